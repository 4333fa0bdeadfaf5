"""The weak and strong views of an image: which operations, how strong, how often.

The strong view follows UDA (Xie et al., arXiv:1904.12848) as published for images of 32 x 32 pixels
(github.com/google-research/uda, image/randaugment): RandAugment on the original image, then cutout,
then the weak view's flip and shift. Departures from that code:

- Every batch draws anew; there, a fixed number of augmented copies was written to disk.
- Translations and cutouts, stated for 32 pixels, grow with the height or width of the image. Images
  need not be square.
- Pixels that come from outside the image or that cutout painted get one gray level, in uint8 (the
  default 128 is 0 after scaling to [-1, 1], but for rounding); there, exactly 0 after
  normalization. As there, an operation that drops opacity makes them ordinary pixels again.
- Images keep their gray levels; there, normalizing and truncating back lowered about 8% of the
  levels by one.
- Images of one channel are transformed as gray ones: color changes nothing.

FixMatch's strong view flips and shifts first; the two orders differ in what the shift's reflection
repeats. All randomness is a function of (seed, position in the batch).
"""

import dataclasses

import numpy as np
import tensorflow as tf

from ssl_influence import config as config_lib
from ssl_influence.augment import image_ops

# All control flow here is Python's, and converting it would triple the time to trace a pipeline.
_as_written = tf.autograph.experimental.do_not_convert

VIEWS = ("weak", "strong")
GRAY = 128
LEVELS = 10  # Magnitudes are in tenths of their range; 1 to 9 are drawn.


@dataclasses.dataclass(frozen=True)
class Operation:
    """One row of RandAugment's table.

    The magnitude at level l is start + span l / 10, the second term truncated if `whole`.

    Attributes:
      name: as in the published code.
      start: magnitude at level 0, in the units of the operation in `image_ops`.
      span: magnitude at level 10 less `start`.
      whole: the magnitude is an integer.
      signed: the magnitude is negated with probability 1/2.
      side: "height" or "width" if the magnitude is in pixels of a side of 32 and scales with it.
      opaque: drops opacity, so that pixels from outside the image are no longer filled.
    """

    name: str
    start: float = 0.0
    span: float = 0.0
    whole: bool = False
    signed: bool = False
    side: str | None = None
    opaque: bool = False

    def magnitudes(self, height: int, width: int) -> np.ndarray:
        """Magnitudes at levels 0 to 10 for images of this size, float64 [11]."""
        scale = {None: 1.0, "height": height / 32, "width": width / 32}[self.side]
        change = np.arange(LEVELS + 1) * (self.span * scale) / LEVELS
        return self.start + (np.trunc(change) if self.whole else change)


OPERATIONS = (
    Operation("Invert", opaque=True),
    Operation("Cutout", span=20, whole=True, side="height"),
    Operation("Sharpness", start=0.1, span=1.8),
    Operation("AutoContrast", opaque=True),
    Operation("Posterize", start=4, span=-4, whole=True, opaque=True),
    Operation("ShearX", span=0.3, signed=True),
    Operation("TranslateX", span=10, whole=True, signed=True, side="width"),
    Operation("TranslateY", span=10, whole=True, signed=True, side="height"),
    Operation("ShearY", span=0.3, signed=True),
    Operation("Rotate", span=30, whole=True, signed=True),
    Operation("Equalize", opaque=True),
    Operation("Contrast", start=0.1, span=1.8),
    Operation("Color", start=0.1, span=1.8),
    Operation("Solarize", start=256, span=-256, whole=True, opaque=True),
    Operation("Brightness", start=0.1, span=1.8),
)

# How each operation runs on (images, magnitude); the rest is Cutout.
_MATRICES = {
    "ShearX": image_ops.shear_x_matrix,
    "ShearY": image_ops.shear_y_matrix,
    "TranslateX": image_ops.translate_x_matrix,
    "TranslateY": image_ops.translate_y_matrix,
    "Rotate": image_ops.rotate_matrix,
}
_RECOLORINGS = {
    "AutoContrast": lambda images, _: image_ops.autocontrast(images),
    "Equalize": lambda images, _: image_ops.equalize(images),
    "Invert": lambda images, _: image_ops.invert(images),
    "Posterize": image_ops.posterize,
    "Solarize": image_ops.solarize,
    "Brightness": image_ops.brightness,
    "Contrast": image_ops.contrast,
    "Color": image_ops.color,
    "Sharpness": image_ops.sharpness,
}

# What the Cutout among the operations paints in the published code, without opacity: the mean color
# of CIFAR-10, seen only if a later operation drops opacity.
_CUTOUT_WORD = 125 + 122 * 0x100 + 113 * 0x10000


@_as_written
def views(
    images: tf.Tensor,
    seed: tf.Tensor,
    names: tuple[str, ...],
    config: config_lib.AugmentConfig,
    default_flip: bool,
    *,
    fill: int | tuple[int, ...] = GRAY,
) -> dict[str, tf.Tensor]:
    """The named views of a batch, each with randomness of its own.

    A view's bits do not depend on which other views are asked for.

    Args:
      images: uint8 [B, H, W, C], C 1 or 3.
      seed: integers [2].
      names: of VIEWS.
      config: settings; `flip` None takes `default_flip`, `shift` None is H // 8.
      default_flip: whether images of this dataset may be mirrored.
      fill: see `rand_augment`.

    Returns:
      name -> uint8 [B, H, W, C].

    Raises:
      ConfigError: a view has no such name, or the shift does not fit the image.
    """
    image_ops.check_images(images)
    flip = default_flip if config.flip is None else config.flip
    shift = images.shape[1] // 8 if config.shift is None else config.shift
    makers = {
        "weak": lambda key: weak(images, key, flip=flip, shift=shift),
        "strong": lambda key: strong(images, key, config, flip=flip, shift=shift, fill=fill),
    }
    for name in names:
        if name not in VIEWS:
            raise config_lib.ConfigError(f"view={name!r} is not one of {', '.join(VIEWS)}.")
    return {name: makers[name](_fold_in(seed, VIEWS.index(name))) for name in names}


@_as_written
def check_shift(shift: int, height: int, width: int) -> None:
    """Raises ConfigError if reflection cannot fill a shift by that many pixels."""
    limit = min(height, width)
    if not 0 <= shift < limit:
        raise config_lib.ConfigError(
            f"shift={shift} does not fit images of {height} x {width} pixels: use 0 to {limit - 1}."
        )


def weak(images: tf.Tensor, seed: tf.Tensor, *, flip: bool, shift: int) -> tf.Tensor:
    """Mirrors half of the images left to right, then shifts each by up to `shift` pixels.

    The shift is uniform over -shift..shift in y and x, and what enters is the image's reflection
    (without repeating its border).

    Args:
      images: uint8 [B, H, W, C].
      seed: integers [2].
      flip: whether to mirror at all.
      shift: in pixels, below H and W; 0 for none.

    Returns:
      uint8 [B, H, W, C].

    Raises:
      ConfigError: the shift is as large as the image.
    """
    image_ops.check_images(images)
    return _weak(images, seed, flip=flip, shift=shift)


def _weak(pixels, seed, *, flip, shift):
    """`weak` on images or on packed pixels."""
    _, height, width = pixels.shape[:3]
    check_shift(shift, height, width)
    if not flip and not shift:
        return tf.identity(pixels)
    batch = tf.shape(pixels)[0]
    flipped = tf.zeros([batch], tf.bool)
    if flip:
        flipped = _uniform([batch], _fold_in(seed, 0), 0, 2) == 1
    offset = _uniform([batch, 2], _fold_in(seed, 1), -shift, shift + 1)
    return image_ops.flip_and_shift(pixels, flipped, offset)


@_as_written
def strong(
    images: tf.Tensor,
    seed: tf.Tensor,
    config: config_lib.AugmentConfig,
    *,
    flip: bool,
    shift: int,
    fill: int | tuple[int, ...] = GRAY,
) -> tf.Tensor:
    """UDA's augmentation: `rand_augment` with the settings of `config`, then `weak`.

    Args:
      images: uint8 [B, H, W, C], C 1 or 3.
      seed: integers [2].
      config: gives operations, probability and cutout.
      flip: see `weak`.
      shift: see `weak`.
      fill: see `rand_augment`.

    Returns:
      uint8 [B, H, W, C].
    """
    words = _rand_augment(
        image_ops.pack(images),
        _fold_in(seed, 0),
        operations=config.operations,
        probability=config.probability,
        cutout=config.cutout,
        fill=fill,
    )
    words = _weak(words, _fold_in(seed, 1), flip=flip, shift=shift)
    return image_ops.unpack(words, images.shape[-1])


@_as_written
def rand_augment(
    images: tf.Tensor,
    seed: tf.Tensor,
    *,
    operations: int = 2,
    probability: float = 0.5,
    cutout: float = 0.5,
    fill: int | tuple[int, ...] = GRAY,
) -> tf.Tensor:
    """RandAugment as in UDA, closed by cutout.

    Each image draws `operations` times, with replacement, one of the 15 `OPERATIONS` and a level of
    1 to 9, both uniform, and applies the operation with `probability`. Then a square of side
    cutout * H, rounded down, is painted around a uniform center and clipped at the borders.

    Args:
      images: uint8 [B, H, W, C], C 1 or 3.
      seed: integers [2].
      operations: how many are drawn, 0 for none.
      probability: chance that a drawn operation is applied.
      cutout: side of the closing square as a fraction of the height, 0 for none.
      fill: gray level, or one per channel, of the square and of pixels from outside the image. Pass
        the rounded training mean where `normalize` standardizes.

    Returns:
      uint8 [B, H, W, C].
    """
    words = _rand_augment(
        image_ops.pack(images),
        seed,
        operations=operations,
        probability=probability,
        cutout=cutout,
        fill=fill,
    )
    return image_ops.unpack(words, images.shape[-1])


def _rand_augment(words, seed, *, operations, probability, cutout, fill):
    """`rand_augment` on packed pixels, int32 [B, H, W]."""
    _, height, width = words.shape
    batch = tf.shape(words)[0]
    painted = tf.zeros_like(words, tf.bool)
    if operations:
        drawn = _draw(_fold_in(seed, 0), batch, operations, probability, height, width)
        for operation, magnitude, center in zip(*map(tf.unstack, drawn), strict=True):
            words = _apply(words, operation, magnitude, center)
        painted |= words >= 0  # Transparent.
    if cutout:
        center = _centers([batch], _fold_in(seed, 1), height, width)
        side = tf.fill([batch], int(cutout * height))
        painted |= image_ops.square_mask(center, side, height, width)
    color = np.broadcast_to(np.asarray(fill, np.uint8), [1, 1, 1, 3])
    return image_ops.paint(words, painted, image_ops.pack(tf.constant(color))[0, 0, 0])


def _draw(seed, batch, operations, probability, height, width):
    """What each image does at each of its turns.

    Returns:
      operation: int32 [operations, B], index into OPERATIONS, -1 where none is applied.
      magnitude: float64 [operations, B].
      center: int32 [operations, B, 2], of the square if the operation is Cutout.
    """
    shape = [operations, batch]
    operation = _uniform(shape, _fold_in(seed, 0), 0, len(OPERATIONS))
    level = _uniform(shape, _fold_in(seed, 1), 1, LEVELS)
    applied = tf.random.stateless_uniform(shape, _fold_in(seed, 2), alg="philox") < probability
    negated = _uniform(shape, _fold_in(seed, 3), 0, 2) == 1
    table = np.stack([row.magnitudes(height, width) for row in OPERATIONS])
    magnitude = tf.gather(table.ravel(), operation * (LEVELS + 1) + level)
    signed = tf.gather([row.signed for row in OPERATIONS], operation)
    magnitude = tf.where(signed & negated, -magnitude, magnitude)
    center = _centers(shape, _fold_in(seed, 4), height, width)
    return tf.where(applied, operation, -1), magnitude, center


def _apply(words, operation, magnitude, center):
    """Applies to each image its own operation; each image is read and written by that alone.

    Args:
      words: packed pixels, int32 [B, H, W].
      operation: int32 [B], index into OPERATIONS or -1.
      magnitude: float64 [B].
      center: int32 [B, 2].

    Returns:
      int32 [B, H, W].
    """
    _, height, width = words.shape
    names = [None, *(row.name for row in OPERATIONS)]
    indices = tf.range(tf.shape(words)[0])

    def divide(values):
        parts = tf.dynamic_partition(values, operation + 1, len(names))
        return dict(zip(names, parts, strict=True))

    rows, before, strength = divide(indices), divide(words), divide(magnitude)

    def together(parts, group):
        return tf.concat([parts[name] for name in group], 0)

    matrices = [make(strength[name], height, width) for name, make in _MATRICES.items()]
    moved = image_ops.affine(together(before, _MATRICES), tf.concat(matrices, 0))

    original = together(before, _RECOLORINGS)
    sizes = [tf.size(rows[name]) for name in _RECOLORINGS]
    parts = tf.split(image_ops.unpack(original, 3), sizes)
    recolored = [
        recolor(part, strength[name])
        for part, (name, recolor) in zip(parts, _RECOLORINGS.items(), strict=True)
    ]
    recolored = image_ops.pack(tf.concat(recolored, 0))
    opaque = {row.name: image_ops.OPAQUE if row.opaque else 0 for row in OPERATIONS}
    dropped = tf.repeat([opaque[name] for name in _RECOLORINGS], sizes)
    # Packing made all of it opaque: what was transparent stays so, unless opacity is dropped.
    recolored &= original | dropped[:, tf.newaxis, tf.newaxis] | ~image_ops.OPAQUE

    side = tf.cast(strength["Cutout"], tf.int32)
    square = image_ops.square_mask(divide(center)["Cutout"], side, height, width)
    painted = image_ops.paint(before["Cutout"], square, _CUTOUT_WORD)

    changed = tf.dynamic_stitch(
        [rows[None], together(rows, _MATRICES), together(rows, _RECOLORINGS), rows["Cutout"]],
        [before[None], moved, recolored, painted],
    )
    return tf.ensure_shape(changed, words.shape)


def normalize(
    images: tf.Tensor,
    config: config_lib.AugmentConfig,
    mean: np.ndarray | None = None,
    std: np.ndarray | None = None,
) -> tf.Tensor:
    """Gray levels as the model takes them.

    Args:
      images: uint8 [..., C].
      config: `normalization` "scale" gives x / 127.5 - 1; "standardize" gives (x - mean) / std.
      mean: [C] or scalar, in gray levels 0 to 255; unused by "scale".
      std: [C] or scalar, in gray levels, above 0; unused by "scale".

    Returns:
      float32 [..., C].

    Raises:
      ConfigError: "standardize" without mean and std, or with a std that is not above 0.
    """
    values = tf.cast(images, tf.float32)
    if config.normalization == "scale":
        return values / 127.5 - 1.0
    if mean is None or std is None or not np.all(np.asarray(std) > 0):
        raise config_lib.ConfigError(
            f"normalization='standardize' with mean={mean} and std={std}: "
            "pass the training mean and a std above 0."
        )
    return (values - tf.constant(mean, tf.float32)) / tf.constant(std, tf.float32)


def _fold_in(seed: tf.Tensor, data: int) -> tf.Tensor:
    return tf.random.experimental.stateless_fold_in(seed, data, alg="philox")


def _uniform(shape, seed, low: int, high: int) -> tf.Tensor:
    """Integers of low..high - 1, int32. Philox by name: the default depends on the device."""
    return tf.random.stateless_uniform(shape, seed, low, high, tf.int32, alg="philox")


def _centers(shape, seed, height: int, width: int) -> tf.Tensor:
    """Positions (y, x), uniform over the pixels, int32 [*shape, 2]."""
    y = _uniform(shape, _fold_in(seed, 0), 0, height)
    x = _uniform(shape, _fold_in(seed, 1), 0, width)
    return tf.stack([y, x], axis=-1)
