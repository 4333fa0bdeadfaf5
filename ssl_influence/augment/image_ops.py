"""Elementary image operations on batches, each with one magnitude per image, equal to Pillow's.

Every operation maps uint8 images [B, H, W, C] (C is 1 or 3; H, W and C static, B need not be) to
uint8 images of that shape, has no state, and draws nothing at random. Magnitudes are [B], or one
scalar for the batch, in the units of Pillow's `ImageOps`, `ImageEnhance` and `Image.transform`.

`affine`, `flip_and_shift` and `paint` also take packed pixels (see `pack`): one int32 word per
pixel, with its opacity, moves several times faster than four bytes.
"""

import math

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
    low = tf.cast(tf.reduce_min(images, axis=[1, 2]), tf.float64)[..., tf.newaxis]
    high = tf.cast(tf.reduce_max(images, axis=[1, 2]), tf.float64)[..., tf.newaxis]
    flat = high <= low
    scale = 255.0 / tf.where(flat, tf.ones_like(high), high - low)
    level = tf.range(256, dtype=tf.float64)
    # Pillow truncates this very expression: (level - low) * scale rounds differently.
    stretched = tf.clip_by_value(level * scale - low * scale, 0.0, 255.0)
    return _look_up(images, tf.cast(tf.where(flat, level, stretched), tf.uint8))


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
    return tf.where(tf.cast(images, tf.float32) < threshold, images, 255 - images)


# --- Blends -------------------------------------------------------------------------------------


def _blend(start: tf.Tensor, images: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
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
    return _blend(0, images, factor)


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
    return _blend(mean, images, factor)


def _luma(images: tf.Tensor) -> tf.Tensor:
    """Gray levels of the images, int32 [B, H, W, 1]."""
    values = tf.cast(images, tf.int32)
    if images.shape[-1] == 1:
        return values
    red, green, blue = tf.split(values, 3, axis=-1)
    weighted = red * _LUMA[0] + green * _LUMA[1] + blue * _LUMA[2]
    return tf.bitwise.right_shift(weighted + 0x8000, 16)


def _smooth(images: tf.Tensor) -> tf.Tensor:
    """Pillow's SMOOTH filter, uint8 [B, H, W, C].

    Each pixel becomes (4 times itself plus the sum of its 3 x 3 neighborhood) / 13, rounded; the
    outermost rows and columns are left as they are.
    """
    _, height, width, _ = images.shape
    values = tf.cast(images, tf.int32)
    rows = values[:, :-2] + values[:, 1:-1] + values[:, 2:]
    box = rows[:, :, :-2] + rows[:, :, 1:-1] + rows[:, :, 2:]
    inner = (box + 4 * values[:, 1:-1, 1:-1] + 6) // 13
    border = [[0, 0], [1, 1], [1, 1], [0, 0]]
    is_inner = tf.pad(tf.ones([1, height - 2, width - 2, 1], tf.bool), border)
    return tf.where(is_inner, tf.pad(tf.cast(inner, tf.uint8), border), images)


def color(images: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    """Blends with the grayscale image (`ImageEnhance.Color`); the identity for one channel.

    Args:
      images: uint8 [B, H, W, C], C 1 or 3.
      factor: [B], at least 0: 0 is gray, 1 leaves the image, more is more colorful.
    """
    check_images(images)
    return _blend(_luma(images), images, factor)


def sharpness(images: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    """Blends with the smoothed image (`ImageEnhance.Sharpness`).

    Args:
      images: uint8 [B, H, W, C], H and W at least 3.
      factor: [B], at least 0: 0 is smoothed, 1 leaves the image, more is sharper.
    """
    check_images(images)
    return _blend(_smooth(images), images, factor)
