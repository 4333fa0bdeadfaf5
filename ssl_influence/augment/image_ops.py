"""Elementary image operations on batches, each with one magnitude per image, equal to Pillow's.

Every operation maps uint8 images [B, H, W, C] (C is 1 or 3; H, W and C static, B need not be) to
uint8 images of that shape, has no state, and draws nothing at random. Magnitudes are [B], or one
scalar for the batch, in the units of Pillow's `ImageOps`, `ImageEnhance` and `Image.transform`.

`affine`, `flip_and_shift` and `paint` also take packed pixels (see `pack`): one int32 word per
pixel, with its opacity, moves several times faster than four bytes.
"""

import functools
import math

import numpy as np
import tensorflow as tf

# ITU-R 601-2 luma in 16-bit fixed point, as Pillow's conversion from RGB to L has it.
_LUMA = (19595, 38470, 7471)

# Full opacity of a packed pixel: 255 in the highest byte of an int32.
OPAQUE = -(1 << 24)


def check_images(images: tf.Tensor) -> None:
    """Raises a ValueError unless the images are uint8 [B, H, W, C] with static H, W and C."""
    if images.dtype != tf.uint8 or images.shape.rank != 4:
        raise ValueError(
            f"images are {images.dtype.name} {images.shape}: pass uint8 of shape [B, H, W, C]."
        )
    if None in images.shape[1:]:
        raise ValueError(
            f"images have shape {images.shape}: set a static height, width and channels."
        )


def _per_image(magnitude: tf.Tensor, images: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Broadcasts a scalar or [B] magnitude to [B]."""
    magnitude = tf.cast(tf.convert_to_tensor(magnitude), dtype)
    return tf.broadcast_to(magnitude, [tf.shape(images)[0]])


def pack(images: tf.Tensor) -> tf.Tensor:
    """Red + 256 green + 65536 blue of each pixel, with full opacity in the highest byte.

    Args:
      images: uint8 [B, H, W, C], C 1 (gray, the same in all three colors) or 3.

    Returns:
      int32 [B, H, W]; an opaque pixel is negative, a transparent one (highest byte 0) is not.

    Raises:
      ValueError: images of another dtype, rank or number of channels.
    """
    check_images(images)
    if images.shape[-1] not in (1, 3):
        raise ValueError(f"images have {images.shape[-1]} channels: pass 1 or 3.")
    if images.shape[-1] == 1:
        return tf.cast(images[..., 0], tf.int32) * 0x010101 + OPAQUE
    red, green, blue = (tf.cast(band, tf.int32) for band in tf.unstack(images, axis=-1))
    return red + green * 0x100 + blue * 0x10000 + OPAQUE


def unpack(words: tf.Tensor, channels: int) -> tf.Tensor:
    """The images, uint8 [B, H, W, channels], of int32 words [B, H, W]; opacity is dropped."""
    if channels == 1:
        return tf.cast(words & 255, tf.uint8)[..., tf.newaxis]
    return tf.bitcast(words, tf.uint8)[..., :3]


# --- Geometry -----------------------------------------------------------------------------------


def _gather_pixels(pixels: tf.Tensor, source: tf.Tensor) -> tf.Tensor:
    """Pixels `source` [B, H, W] (int32, y * W + x) of each image."""
    batch, pixel = tf.shape(pixels)[0], pixels.shape[3:]
    start = tf.range(batch) * (pixels.shape[1] * pixels.shape[2])
    flat = source + start[:, tf.newaxis, tf.newaxis]
    return tf.gather(tf.reshape(pixels, [-1, *pixel]), flat)


def paint(pixels: tf.Tensor, mask: tf.Tensor, fill: tf.Tensor | int) -> tf.Tensor:
    """Replaces the pixels under a mask.

    Args:
      pixels: uint8 images [B, H, W, C], or packed, int32 [B, H, W].
      mask: bool [B, H, W].
      fill: what to put there: for images a gray level or [C] of them, for packed pixels a word.

    Returns:
      As `pixels`.
    """
    fill = tf.cast(fill, pixels.dtype)
    if pixels.shape.rank == 3:
        # Vectorized by Eigen, which tf.where is not. Wraps around, and so is exact.
        return pixels + (fill - pixels) * tf.cast(mask, tf.int32)
    return tf.where(mask[..., tf.newaxis], fill, pixels)


def affine(pixels: tf.Tensor, matrix: tf.Tensor, fill: int = 0) -> tf.Tensor:
    """Nearest-neighbor resampling, bit for bit `Image.transform(size, AFFINE, matrix, NEAREST)`.

    Pillow maps the center of output pixel (x, y) to (a x + b y + c, d x + e y + f) in 16.16 fixed
    point and takes the pixel that holds that point. TensorFlow's `ImageProjectiveTransformV3` does
    so in float32, with coordinates counted from pixel centers: its result differs where a point
    falls on the edge of a pixel.

    Args:
      pixels: uint8 images [B, H, W, C], or packed, int32 [B, H, W].
      matrix: [B, 6], rows (a, b, c, d, e, f) from output to input coordinates, in pixels.
      fill: gray level (word) of output pixels whose source lies outside the image.

    Returns:
      As `pixels`.
    """
    _, height, width = pixels.shape[:3]
    a, b, c, d, e, f = tf.unstack(tf.cast(matrix, tf.float64), axis=1)
    entries = tf.stack([a, b, c + a * 0.5 + b * 0.5, d, e, f + d * 0.5 + e * 0.5])
    fixed = tf.cast(tf.floor(entries * 65536.0 + 0.5), tf.int32)[:, :, tf.newaxis, tf.newaxis]
    x = tf.range(width)[tf.newaxis, tf.newaxis, :]
    y = tf.range(height)[tf.newaxis, :, tf.newaxis]
    source_x = tf.bitwise.right_shift((fixed[2] + fixed[1] * y) + fixed[0] * x, 16)
    source_y = tf.bitwise.right_shift((fixed[5] + fixed[4] * y) + fixed[3] * x, 16)
    inside = (source_x >= 0) & (source_x < width) & (source_y >= 0) & (source_y < height)
    source = (source_y * width + source_x) * tf.cast(inside, tf.int32)
    return paint(_gather_pixels(pixels, source), ~inside, fill)


def shear_x_matrix(factor: tf.Tensor, height: int, width: int) -> tf.Tensor:
    """Inverse-affine matrices [B, 6] of `shear_x`, for factors [B]."""
    del height, width
    one, zero = tf.ones_like(factor), tf.zeros_like(factor)
    return tf.stack([one, factor, zero, zero, one, zero], axis=1)


def shear_y_matrix(factor: tf.Tensor, height: int, width: int) -> tf.Tensor:
    """Inverse-affine matrices [B, 6] of `shear_y`, for factors [B]."""
    del height, width
    one, zero = tf.ones_like(factor), tf.zeros_like(factor)
    return tf.stack([one, zero, zero, factor, one, zero], axis=1)


def translate_x_matrix(pixels: tf.Tensor, height: int, width: int) -> tf.Tensor:
    """Inverse-affine matrices [B, 6] of `translate_x`, for offsets [B]."""
    del height, width
    one, zero = tf.ones_like(pixels), tf.zeros_like(pixels)
    return tf.stack([one, zero, pixels, zero, one, zero], axis=1)


def translate_y_matrix(pixels: tf.Tensor, height: int, width: int) -> tf.Tensor:
    """Inverse-affine matrices [B, 6] of `translate_y`, for offsets [B]."""
    del height, width
    one, zero = tf.ones_like(pixels), tf.zeros_like(pixels)
    return tf.stack([one, zero, zero, zero, one, pixels], axis=1)


def rotate_matrix(degrees: tf.Tensor, height: int, width: int) -> tf.Tensor:
    """Inverse-affine matrices [B, 6] of `rotate`, for angles [B] in degrees."""
    angle = -degrees * (math.pi / 180.0)
    cos, sin = tf.cos(angle), tf.sin(angle)
    center_x, center_y = width / 2, height / 2
    c = (cos * -center_x + sin * -center_y) + center_x
    f = (-sin * -center_x + cos * -center_y) + center_y
    return tf.stack([cos, sin, c, -sin, cos, f], axis=1)


def shear_x(images: tf.Tensor, factor: tf.Tensor, fill: int = 0) -> tf.Tensor:
    """Shears along x about the top edge: output (x, y) shows input (x + factor y, y).

    Args:
      images: uint8 [B, H, W, C].
      factor: [B], any real number; 0 leaves the image.
      fill: gray level where the source lies outside the image.
    """
    return _move(shear_x_matrix, images, factor, fill)


def shear_y(images: tf.Tensor, factor: tf.Tensor, fill: int = 0) -> tf.Tensor:
    """Shears along y about the left edge: output (x, y) shows input (x, y + factor x).

    Args:
      images: uint8 [B, H, W, C].
      factor: [B], any real number; 0 leaves the image.
      fill: gray level where the source lies outside the image.
    """
    return _move(shear_y_matrix, images, factor, fill)


def translate_x(images: tf.Tensor, pixels: tf.Tensor, fill: int = 0) -> tf.Tensor:
    """Translates along x: output (x, y) shows input (x + pixels, y).

    Args:
      images: uint8 [B, H, W, C].
      pixels: [B], positive moves the content left; 0 leaves the image.
      fill: gray level where the source lies outside the image.
    """
    return _move(translate_x_matrix, images, pixels, fill)


def translate_y(images: tf.Tensor, pixels: tf.Tensor, fill: int = 0) -> tf.Tensor:
    """Translates along y: output (x, y) shows input (x, y + pixels).

    Args:
      images: uint8 [B, H, W, C].
      pixels: [B], positive moves the content up; 0 leaves the image.
      fill: gray level where the source lies outside the image.
    """
    return _move(translate_y_matrix, images, pixels, fill)


def rotate(images: tf.Tensor, degrees: tf.Tensor, fill: int = 0) -> tf.Tensor:
    """Rotates about the center of the image, as Pillow's `Image.rotate`.

    Args:
      images: uint8 [B, H, W, C].
      degrees: [B], positive is counterclockwise; 0 leaves the image.
      fill: gray level where the source lies outside the image.
    """
    return _move(rotate_matrix, images, degrees, fill)


def _move(matrix, images, magnitude, fill):
    check_images(images)
    _, height, width, _ = images.shape
    magnitude = _per_image(magnitude, images, tf.float64)
    return affine(images, matrix(magnitude, height, width), fill)


def flip_and_shift(pixels: tf.Tensor, flip: tf.Tensor, offset: tf.Tensor) -> tf.Tensor:
    """Mirrors the chosen images left to right, then shifts each within its own reflection.

    The shift is a crop from the image padded by reflection without repeating the border, so that
    offset (dy, dx) shows at (y, x) what was at (y + dy, x + dx).

    Args:
      pixels: uint8 images [B, H, W, C], or packed, int32 [B, H, W].
      flip: bool [B].
      offset: int32 [B, 2], (dy, dx) in pixels, |dy| < H and |dx| < W.

    Returns:
      As `pixels`.
    """
    _, height, width = pixels.shape[:3]
    rows = _reflect(tf.range(height) + offset[:, :1], height)
    columns = _reflect(tf.range(width) + offset[:, 1:], width)
    columns = tf.where(flip[:, tf.newaxis], width - 1 - columns, columns)
    return _gather_pixels(pixels, rows[:, :, tf.newaxis] * width + columns[:, tf.newaxis, :])


def _reflect(index: tf.Tensor, size: int) -> tf.Tensor:
    return (size - 1) - tf.abs((size - 1) - tf.abs(index))


def square_mask(center: tf.Tensor, size: tf.Tensor, height: int, width: int) -> tf.Tensor:
    """Where a square lies, clipped at the borders.

    Rows center_y - size // 2 to center_y + size // 2 - 1, and columns likewise: an odd size covers
    what the next smaller even one does, as in UDA's code.

    Args:
      center: int32 [B, 2], (y, x).
      size: int32 [B], side in pixels; 0 or 1 gives an empty square.
      height: H of the images.
      width: W of the images.

    Returns:
      bool [B, H, W].
    """
    half = (size // 2)[:, tf.newaxis]

    def covered(length, middle):
        distance = tf.range(length) - middle
        return (distance >= -half) & (distance < half)

    rows = covered(height, center[:, :1])
    columns = covered(width, center[:, 1:])
    return rows[:, :, tf.newaxis] & columns[:, tf.newaxis, :]


def cutout(
    images: tf.Tensor, center: tf.Tensor, size: tf.Tensor, fill: int | tuple[int, ...] = 0
) -> tf.Tensor:
    """Paints a square (DeVries & Taylor, arXiv:1708.04552), clipped at the borders.

    Args:
      images: uint8 [B, H, W, C].
      center: int32 [B, 2], (y, x).
      size: [B], side in pixels, see `square_mask`; 0 leaves the image.
      fill: gray level, or one per channel.

    Returns:
      uint8 [B, H, W, C].
    """
    check_images(images)
    _, height, width, _ = images.shape
    mask = square_mask(center, _per_image(size, images, tf.int32), height, width)
    return paint(images, mask, fill)


# --- Gray levels --------------------------------------------------------------------------------


def _look_up(images: tf.Tensor, table: tf.Tensor) -> tf.Tensor:
    """Replaces every gray level v of image b, channel c by table[b, c, v], uint8 [B, C, 256]."""
    return tf.gather(tf.reshape(table, [-1]), _table_index(images))


def _table_index(images: tf.Tensor) -> tf.Tensor:
    """Position of each pixel's gray level in a flat [B, C, 256] table, int32 [B, H, W, C]."""
    channels = images.shape[-1]
    rows = tf.reshape(tf.range(tf.shape(images)[0] * channels) * 256, [-1, 1, 1, channels])
    return tf.cast(images, tf.int32) + rows


def autocontrast(images: tf.Tensor) -> tf.Tensor:
    """Stretches each channel so that its darkest pixel becomes 0 and its lightest 255.

    A channel of one gray level is left as it is. Equals `ImageOps.autocontrast`.

    Args:
      images: uint8 [B, H, W, C].
    """
    check_images(images)
    values = tf.cast(images, tf.float64)
    low = tf.reduce_min(values, axis=[1, 2], keepdims=True)
    high = tf.reduce_max(values, axis=[1, 2], keepdims=True)
    flat, one = high <= low, tf.ones_like(low)
    scale = tf.where(flat, one, 255.0 / tf.where(flat, one, high - low))
    offset = tf.where(flat, tf.zeros_like(low), low * scale)
    # Pillow truncates this very expression: (values - low) * scale rounds differently.
    return tf.cast(tf.clip_by_value(values * scale - offset, 0.0, 255.0), tf.uint8)


def equalize(images: tf.Tensor) -> tf.Tensor:
    """Makes the histogram of each channel as flat as a monotone map of its levels can.

    A channel is left as it is if fewer than 255 of its pixels lie below its highest level. Equals
    `ImageOps.equalize`.

    Args:
      images: uint8 [B, H, W, C].
    """
    check_images(images)
    _, height, width, channels = images.shape
    index = _table_index(images)
    histogram = tf.math.unsorted_segment_sum(
        tf.ones_like(index), index, tf.shape(images)[0] * channels * 256
    )
    histogram = tf.reshape(histogram, [-1, channels, 256])
    highest = tf.cast(tf.reduce_max(images, axis=[1, 2]), tf.int32)[..., tf.newaxis]
    step = (height * width - tf.gather(histogram, highest, batch_dims=2)) // 255
    below = tf.cumsum(histogram, axis=-1, exclusive=True)
    # With few pixels the quotient passes 255 by far; Pillow clips it when it applies the table.
    level = tf.minimum((step // 2 + below) // tf.maximum(step, 1), 255)
    return _look_up(images, tf.cast(tf.where(step == 0, tf.range(256), level), tf.uint8))


def invert(images: tf.Tensor) -> tf.Tensor:
    """Replaces every gray level v by 255 - v.

    Args:
      images: uint8 [B, H, W, C].
    """
    check_images(images)
    return 255 - images


def posterize(images: tf.Tensor, bits: tf.Tensor) -> tf.Tensor:
    """Keeps the highest bits of every gray level.

    Args:
      images: uint8 [B, H, W, C].
      bits: [B], integers in 0..8; 8 leaves the image, 0 makes it black.
    """
    check_images(images)
    kept = tf.bitwise.left_shift(255, 8 - _per_image(bits, images, tf.int32)) & 255
    return images & tf.cast(kept, tf.uint8)[:, tf.newaxis, tf.newaxis, tf.newaxis]


def solarize(images: tf.Tensor, threshold: tf.Tensor) -> tf.Tensor:
    """Inverts every gray level that is at or above the threshold.

    Args:
      images: uint8 [B, H, W, C].
      threshold: [B], in 0..256; 256 leaves the image, 0 inverts it.
    """
    check_images(images)
    threshold = _per_image(threshold, images, tf.float32)[:, tf.newaxis, tf.newaxis, tf.newaxis]
    above = tf.cast(tf.cast(images, tf.float32) >= threshold, tf.uint8)
    # Flips all bits of what is above, which inverts it; tf.where takes twice as long.
    return tf.bitwise.bitwise_xor(images, above * 255)


# --- Blends -------------------------------------------------------------------------------------


def blend(start: tf.Tensor, images: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    """Pillow's `Image.blend`: start + factor (images - start), clipped and truncated.

    Args:
      start: gray levels that broadcast to the images.
      images: uint8 [B, H, W, C].
      factor: [B]; 0 gives `start`, 1 gives `images`, others inter- or extrapolate.
    """
    # In float32, as Pillow, whose truncation shows the last bit.
    factor = _per_image(factor, images, tf.float32)[:, tf.newaxis, tf.newaxis, tf.newaxis]
    start = tf.cast(start, tf.float32)
    mixed = start + factor * (tf.cast(images, tf.float32) - start)
    return tf.cast(tf.clip_by_value(mixed, 0.0, 255.0), tf.uint8)


def brightness(images: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    """Blends with black (`ImageEnhance.Brightness`).

    Args:
      images: uint8 [B, H, W, C].
      factor: [B], at least 0: 0 is black, 1 leaves the image, more is brighter.
    """
    check_images(images)
    return blend(0, images, factor)


def contrast(images: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    """Blends with the rounded mean luma of the image (`ImageEnhance.Contrast`).

    Args:
      images: uint8 [B, H, W, C], C 1 or 3.
      factor: [B], at least 0: 0 is flat gray, 1 leaves the image, more is stronger.
    """
    check_images(images)
    _, height, width, _ = images.shape
    total = tf.reduce_sum(_luma(images), axis=[1, 2, 3], keepdims=True)
    mean = tf.floor(tf.cast(total, tf.float64) / (height * width) + 0.5)
    return blend(mean, images, factor)


def _luma(images: tf.Tensor) -> tf.Tensor:
    """Gray levels of the images, int32 [B, H, W, 1]."""
    values = tf.cast(images, tf.int32)
    if images.shape[-1] == 1:
        return values
    red, green, blue = tf.split(values, 3, axis=-1)
    weighted = red * _LUMA[0] + green * _LUMA[1] + blue * _LUMA[2]
    return tf.bitwise.right_shift(weighted + 0x8000, 16)


def smooth(images: tf.Tensor) -> tf.Tensor:
    """Pillow's SMOOTH filter.

    Each pixel becomes (4 times itself plus the sum of its 3 x 3 neighborhood) / 13, rounded; the
    outermost rows and columns are left as they are.

    Args:
      images: uint8 [B, H, W, C], H and W at least 3.
    """
    check_images(images)
    # Whole numbers and halves, and so exact; the quotient is never near a whole number.
    values = tf.cast(images, tf.float32)
    inner = (_box(values, 3) + 4.0 * values[:, 1:-1, 1:-1] + 6.5) * (1 / 13)
    return _with_border(inner, images)


def blur(images: tf.Tensor) -> tf.Tensor:
    """Pillow's BLUR filter.

    Each pixel becomes the mean of the 16 pixels around its 3 x 3 neighborhood, rounded; the two
    outermost rows and columns are left as they are.

    Args:
      images: uint8 [B, H, W, C], H and W at least 5.
    """
    check_images(images)
    values = tf.cast(images, tf.float32)
    ring = _box(values, 5) - _box(values[:, 1:-1, 1:-1], 3)
    return _with_border((ring + 8.0) * (1 / 16), images)


def _box(values: tf.Tensor, size: int) -> tf.Tensor:
    """Sums over size x size pixels, without those that reach beyond the border."""
    height, width = values.shape[1] - size + 1, values.shape[2] - size + 1
    rows = tf.add_n([values[:, i : i + height] for i in range(size)])
    return tf.add_n([rows[:, :, i : i + width] for i in range(size)])


def _with_border(inner: tf.Tensor, images: tf.Tensor) -> tf.Tensor:
    """The images, with what lies inside replaced by values that are truncated to whole levels."""
    size = (images.shape[1] - inner.shape[1]) // 2
    inner = tf.cast(inner, tf.uint8)
    middle = images[:, size:-size]
    middle = tf.concat([middle[:, :, :size], inner, middle[:, :, -size:]], 2)
    return tf.concat([images[:, :size], middle, images[:, -size:]], 1)


def color(images: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    """Blends with the grayscale image (`ImageEnhance.Color`); the identity for one channel.

    Args:
      images: uint8 [B, H, W, C], C 1 or 3.
      factor: [B], at least 0: 0 is gray, 1 leaves the image, more is more colorful.
    """
    check_images(images)
    return blend(_luma(images), images, factor)


def sharpness(images: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    """Blends with the smoothed image (`ImageEnhance.Sharpness`).

    Args:
      images: uint8 [B, H, W, C], H and W at least 3.
      factor: [B], at least 0: 0 is smoothed, 1 leaves the image, more is sharper.
    """
    check_images(images)
    return blend(smooth(images), images, factor)


# --- Resampling ---------------------------------------------------------------------------------

# What `rescale` can enlarge with; the order is part of CTAugment's table.
RESAMPLINGS = ("lanczos", "bicubic", "bilinear", "box", "hamming", "nearest")

_TAPS = 7  # Pixels under the widest of these filters.
_PRECISION = 2.0**22  # Pillow rounds filter weights to multiples of its inverse.


def rescale(images: tf.Tensor, margin: tf.Tensor, method: tf.Tensor) -> tf.Tensor:
    """Cuts off a margin and enlarges the rest to the size of the image.

    Equals `image.crop(box).resize(image.size, method)` with the box (margin W, margin H, W - margin
    W, H - margin H), which Pillow rounds to whole pixels.

    Args:
      images: uint8 [B, H, W, C].
      margin: [B], share of the side that is cut off at each end, in 0..1/4; 0 leaves the image.
      method: [B], integers, index into RESAMPLINGS.

    Returns:
      uint8 [B, H, W, C].
    """
    check_images(images)
    _, height, width, channels = images.shape
    margin = _per_image(margin, images, tf.float64)
    method = _per_image(method, images, tf.int32)
    # Along x first, with whole gray levels in between, as Pillow.
    columns = tf.reshape(tf.transpose(images, [0, 2, 1, 3]), [-1, width, height * channels])
    columns = _resample(columns, margin, method, width)
    columns = tf.reshape(columns, [-1, width, height, channels])
    rows = tf.reshape(tf.transpose(columns, [0, 2, 1, 3]), [-1, height, width * channels])
    rows = _resample(rows, margin, method, height)
    return tf.cast(tf.reshape(rows, [-1, height, width, channels]), tf.uint8)


def _resample(values, margin, method, size):
    """`rescale` along the first axis of gray levels [B, size, n], to whole levels, float64."""
    start = tf.round(margin * size)
    kept = tf.cast(tf.round(size * (1.0 - margin)) - start, tf.int32)
    least, first, taps = _resampling_table(size)
    row = method * first.shape[1] + kept - least
    first = tf.gather(first.reshape(-1, size), row) + tf.cast(start, tf.int32)[:, tf.newaxis]
    taps = tf.gather(taps.reshape(-1, size, _TAPS), row)
    place = tf.range(size) - first[:, :, tf.newaxis]
    weights = tf.gather(taps, tf.clip_by_value(place, 0, _TAPS - 1), batch_dims=2)
    weights *= tf.cast((place >= 0) & (place < _TAPS), tf.float64)
    # Exact: the weights are multiples of 2**-22, the levels whole.
    level = tf.floor(tf.matmul(weights, tf.cast(values, tf.float64)) + 0.5)
    return tf.clip_by_value(level, 0.0, 255.0)


@functools.lru_cache(maxsize=16)
def _resampling_table(size: int) -> tuple[int, np.ndarray, np.ndarray]:
    """How each method enlarges 1 D signals of some lengths to `size`.

    Returns:
      The least length n; first, int32 [methods, lengths, size], the first of the entries that an
      output is made of; and their weights, float64 [methods, lengths, size, _TAPS]. Lengths are n
      to `size`.
    """
    least = max(1, size // 2 - 1)
    tables = [
        [_interpolation(method, length, size) for length in range(least, size + 1)]
        for method in RESAMPLINGS
    ]
    first, taps = (np.stack([[pair[i] for pair in row] for row in tables]) for i in range(2))
    return least, first, taps


def _interpolation(method: str, length: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """(first [size], weights [size, _TAPS]) of `_resampling_table`."""
    scale = length / size
    if method == "nearest":
        # Pillow adds the step up, with the rounding that this brings.
        first = np.add.accumulate(np.r_[scale * 0.5, np.full(size - 1, scale)]).astype(np.int32)
        return first, np.eye(1, _TAPS).repeat(size, 0)
    support, weight = _FILTERS[method]
    center = (np.arange(size) + 0.5) * scale
    first = np.maximum((center - support + 0.5).astype(np.int32), 0)
    end = np.minimum((center + support + 0.5).astype(np.int32), length)
    place = first[:, np.newaxis] + np.arange(_TAPS)
    taps = weight(place - center[:, np.newaxis] + 0.5) * (place < end[:, np.newaxis])
    taps /= taps.sum(axis=1, keepdims=True)
    return first, np.trunc(taps * _PRECISION + np.copysign(0.5, taps)) / _PRECISION


def _cubic(x):
    x = np.abs(x)
    near, far = (1.5 * x - 2.5) * x * x + 1.0, ((x - 5.0) * x + 8.0) * x - 4.0
    return np.where(x < 1.0, near, np.where(x < 2.0, -0.5 * far, 0.0))


# method -> (support in pixels, weight at a distance); Pillow's.
_FILTERS = {
    "lanczos": (3.0, lambda x: np.where((x >= -3) & (x < 3), np.sinc(x) * np.sinc(x / 3), 0.0)),
    "bicubic": (2.0, _cubic),
    "bilinear": (1.0, lambda x: np.maximum(1.0 - np.abs(x), 0.0)),
    "box": (0.5, lambda x: ((x > -0.5) & (x <= 0.5)).astype(np.float64)),
    "hamming": (
        1.0,
        lambda x: np.where(np.abs(x) < 1, np.sinc(x) * (0.54 + 0.46 * np.cos(np.pi * x)), 0.0),
    ),
}
