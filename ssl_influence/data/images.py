"""Image files of any common format, decoded and brought to one shape, when they are asked for."""

import collections
import io
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures

import numpy as np
from PIL import Image, UnidentifiedImageError

from ssl_influence import config
from ssl_influence.data import examples, rows

# No others: Pillow has plugins that run other programs (EPS) or that nobody keeps data in.
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")

_EXIF_ORIENTATION = 0x0112  # Exif 2.32, section 4.6.4 A: how the camera was held, 1 to 8
# TIFF 6.0, section 8; a photometric interpretation of 0 says that 0 is white.
_TIFF_BITS, _TIFF_PHOTOMETRIC = 258, 262
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_GRAY = ("1", "L", "LA", "La")
_COLORED = ("P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr")
_CHECKED_TOGETHER = 1024

_REMEDY = "replace or remove it, or leave such files out by --on_bad_example=skip."

# Filters for the whole process, since `warnings.catch_warnings` is not safe in threads. Pillow only
# warns of images up to twice its limit.
warnings.simplefilter("error", Image.DecompressionBombWarning)
# Of metadata it cannot make sense of, for file after file. Damage to pixels raises.
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")


def decode(data: bytes, name: str, settings: config.DataConfig) -> np.ndarray:
    """The image in the bytes of a PNG, JPEG, BMP, GIF, WebP, TIFF, PPM or PGM file.

    Of an animation or a file of several pages it is the first one, turned as its Exif orientation
    says. Transparency is dropped, not blended: a pixel has the color that the file has beneath it.
    16-bit gray x becomes (x + 128) // 257; of 16-bit colors Pillow takes the upper byte.
    Gray images (also with transparency, also black and white) have 1 channel and all others 3,
    unless `settings.image_channels` says otherwise. With `settings.image_size` the image is scaled
    (bilinear, with antialiasing) so that it covers that size, and cut to its middle.

    Args:
      data: the file.
      name: what messages call it.
      settings: gives image_size and image_channels.

    Returns:
      uint8 [H, W, C].

    Raises:
      ConfigError: it is no such image, damaged, cut short, larger than Pillow's limit
        (`PIL.Image.MAX_IMAGE_PIXELS`), or its pixels have no one form in bytes (floats, 32 bits).
    """
    if not data:
        raise config.ConfigError(f"{name} is empty (0 bytes): {_REMEDY}")
    image = _opened(data, name)
    try:
        image.load()
        orientation = image.getexif().get(_EXIF_ORIENTATION)
    except Exception as error:  # Pillow's decoders raise many types on damaged files
        raise _damaged(name, error) from error
    image = _to_bytes(image, name)
    if orientation in _UPRIGHT:
        image = image.transpose(_UPRIGHT[orientation])
    return _fit_one(image, settings)


def fit(images: np.ndarray, settings: config.DataConfig) -> rows.Rows:
    """Images that were decoded elsewhere, as `decode` would bring them to size and channels.

    Args:
      images: uint8 [n, H, W, C], C 1 or 3.
      settings: gives image_size and image_channels.

    Returns:
      The same array where nothing is to be done, else images that are scaled when asked for.
    """
    n, *given = images.shape
    size = settings.image_size or given[:2]
    wanted = (size[0], size[-1], settings.image_channels or given[2])
    if wanted == tuple(given):
        return images

    return rows.LazyImages(
        n, wanted, lambda row: fit_one(images[row], settings), rows.digest(images)
    )


def fit_one(image: np.ndarray, settings: config.DataConfig) -> np.ndarray:
    """As `fit`, of one image, uint8 [H, W, C]."""
    return _fit_one(Image.fromarray(image[..., 0] if image.shape[2] == 1 else image), settings)


def to_uint8(wide: np.ndarray) -> np.ndarray:
    """16-bit values x as bytes, (x + 128) // 257: 0 stays 0, 65535 becomes 255."""
    return ((wide.astype(np.uint32) + 128) // 257).astype(np.uint8)


def examples_of(
    read_bytes: Callable[[int], bytes],
    names: Sequence[str],
    labels: np.ndarray,
    stamp: str,
    settings: config.DataConfig,
    *,
    where: str,
) -> examples.Examples:
    """Examples whose images are read and decoded when they are asked for.

    All have the shape of the first one. Where settings.on_bad_example is "skip" every image is
    read once here; those that cannot be had, or are not of the shape that most have, are left out.

    Args:
      read_bytes: row -> the bytes of its image file; called from several threads at once.
      names: what messages call each image, n of them.
      labels: int32 [n].
      stamp: differs where the files differ, as far as can be told without decoding them.
      settings: gives image_size, image_channels and on_bad_example.
      where: what messages call the data, such as `folder:/data/birds`.

    Raises:
      ConfigError: there is no image; or an image is bad where that is an error: the first one here,
        another one when it is read.
    """

    def read_one(row: int) -> np.ndarray:
        name = f"{where}: {names[row]!r}"
        try:
            data = read_bytes(row)
        except OSError as error:
            raise config.ConfigError(
                f"{name} cannot be read: {error.strerror or error}."
            ) from error
        return decode(data, name, settings)

    if not len(names):
        raise config.ConfigError(f"{where} has no image.")
    skip = settings.on_bad_example == "skip"
    if skip:
        found = list(_shapes(read_one, len(names)))
        counts = collections.Counter(shape for shape in found if not isinstance(shape, str))
        if not counts:
            raise config.ConfigError(
                f"{where}: none of {len(names)} images can be had. The first: {found[0]}"
            )
        expected = counts.most_common(1)[0][0]
    else:
        expected = read_one(0).shape

    def read_alike(row: int) -> np.ndarray:
        image = read_one(row)
        if image.shape != expected:
            raise config.ConfigError(_unlike(where, names[row], image.shape, expected, skip))
        return image

    images = rows.LazyImages(len(names), expected, read_alike, stamp)
    if not skip or all(shape == expected for shape in found):
        return examples.Examples(images, labels, names)
    skipped = [
        shape if isinstance(shape, str) else _unlike(where, names[row], shape, expected, skip)
        for row, shape in enumerate(found)
        if shape != expected
    ]
    kept = np.array([row for row, shape in enumerate(found) if shape == expected])
    return examples.Examples(
        inputs=rows.select(images, kept),
        labels=labels[kept],
        names=rows.Strings(names[row] for row in kept),
        skipped=skipped,
    )


def _opened(data: bytes, name: str) -> Image.Image:
    """The image with its header read, not its pixels."""
    try:
        image = Image.open(io.BytesIO(data), formats=_FORMATS)
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise _too_large(name) from error
    except UnidentifiedImageError as error:
        raise config.ConfigError(
            f"{name} is not an image ({len(data)} bytes, but none of {', '.join(_FORMATS)}), "
            f"or its header is damaged: {_REMEDY}"
        ) from error
    except Exception as error:  # Pillow's plugins raise many types on damaged headers
        raise _damaged(name, error) from error
    width, height = image.size
    if Image.MAX_IMAGE_PIXELS is not None and width * height > Image.MAX_IMAGE_PIXELS:
        raise _too_large(name)
    return image


def _too_large(name: str) -> config.ConfigError:
    return config.ConfigError(
        f"{name} has more than {Image.MAX_IMAGE_PIXELS} pixels, Pillow's limit against files that "
        "fill the memory: scale it down or remove it."
    )


def _damaged(name: str, error: Exception) -> config.ConfigError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return config.ConfigError(f"{name} is damaged or cut short ({reason}): {_REMEDY}")


def _to_bytes(image: Image.Image, name: str) -> Image.Image:
    """The image in mode L or RGB.

    Raises:
      ConfigError: its pixels have no one form in bytes.
    """
    # Mode I has 32 bits; PNG and PGM fill it with 16, TIFF with all of them.
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        wide = np.asarray(image)
        if image.format == "TIFF":
            if image.tag_v2.get(_TIFF_BITS) != (16,):
                raise config.ConfigError(f"{name} has 12 bits a pixel: save it with 8 or 16.")
            if image.tag_v2.get(_TIFF_PHOTOMETRIC) == 0:  # Pillow inverts 8 bits alone
                wide = 65535 - wide
        return Image.fromarray(to_uint8(wide))
    if image.mode in _GRAY:
        return image.convert("L") if image.mode != "La" else image.convert("LA").convert("L")
    if image.mode in _COLORED:
        # By way of RGBA: Pillow warns of palettes with transparency that are converted to RGB.
        through_alpha = image.mode in ("P", "PA", "RGBa")
        return (image.convert("RGBA") if through_alpha else image).convert("RGB")
    raise config.ConfigError(
        f"{name} has pixels of type {image.mode} (Pillow's name), which have no one form in bytes: "
        "save it in gray or RGB with 8 or 16 bits a channel."
    )


def _fit_one(image: Image.Image, settings: config.DataConfig) -> np.ndarray:
    """uint8 [H, W, C] of an image in mode L or RGB, with the channels and the size of settings."""
    if settings.image_channels is not None:
        image = image.convert({1: "L", 3: "RGB"}[settings.image_channels])
    if settings.image_size:
        image = _cover(image, settings.image_size[0], settings.image_size[-1])
    array = np.asarray(image)
    return array if array.ndim == 3 else array[..., np.newaxis]


def _cover(image: Image.Image, height: int, width: int) -> Image.Image:
    """The middle of the image, of the largest size of that aspect, scaled to height x width."""
    scale = max(height / image.height, width / image.width)
    w, h = min(width / scale, image.width), min(height / scale, image.height)
    box = tuple(side / 2 for side in (image.width - w, image.height - h))
    box += tuple(side / 2 for side in (image.width + w, image.height + h))
    return image.resize((width, height), Image.Resampling.BILINEAR, box=box)


def _shapes(read_one: Callable[[int], np.ndarray], n: int) -> Iterator[tuple[int, ...] | str]:
    """The shape of each of n images in turn, or one line that says why it cannot be had."""

    def shape_of(row: int) -> tuple[int, ...] | str:
        try:
            return read_one(row).shape
        except config.ConfigError as error:
            return str(error)

    with futures.ThreadPoolExecutor(max(4, os.cpu_count() or 1), "check") as pool:
        for start in range(0, n, _CHECKED_TOGETHER):  # futures of all n would fill the memory
            yield from pool.map(shape_of, range(start, min(start + _CHECKED_TOGETHER, n)))


def _unlike(
    where: str, name: str, found: Sequence[int], expected: Sequence[int], most: bool
) -> str:
    others = "most images have" if most else "the first image has"
    if found[:2] != expected[:2]:
        return (
            f"{where}: {name!r} is {found[0]}x{found[1]} (height x width), {others} "
            f"{expected[0]}x{expected[1]}: scale all to one size with --image_size."
        )
    return (
        f"{where}: {name!r} has {found[2]} channels, {others} {expected[2]}: make all "
        "gray or all colored with --image_channels=1 or 3."
    )
