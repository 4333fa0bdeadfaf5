"""The weak and strong views of an image: which operations, how strong, how often.

Strong views, in the order in which each was published for images of 32 x 32 pixels:

- "rand_augment", UDA's (Xie et al., arXiv:1904.12848; github.com/google-research/uda,
  image/randaugment): RandAugment on the original image, then cutout, then flip and shift.
- "rand_augment_fixmatch" (Sohn et al., arXiv:2001.07685; github.com/google-research/fixmatch):
  flip and shift, RandAugment with fourteen operations, cutout.
- "auto_augment_cifar10", "auto_augment_svhn" (`auto_augment`): the policy, flip and shift, cutout.
- "ctaugment" (`ctaugment`): flip and shift, operations whose magnitudes are learned, cutout.

They differ also in what the shift's reflection repeats. Departures from the published code of all
but the last, which has its own:

- Every batch draws anew; in UDA's, a fixed number of augmented copies was written to disk.
- Translations and cutouts, stated for 32 pixels, grow with the height or width of the image. Images
  need not be square.
- Pixels that come from outside the image or that cutout painted get one gray level, in uint8 (the
  default 128 is 0 after scaling to [-1, 1], but for rounding); there, exactly 0 after
  normalization. As there, an operation that drops opacity makes them ordinary pixels again.
- Images keep their gray levels; there, normalizing and truncating back lowered about 8% of the
  levels by one.
- Images of one channel are transformed as gray ones: color changes nothing.

All randomness is a function of (seed, position in the batch), and with CTAugment of its rates.
"""

import dataclasses
import re

import numpy as np
import tensorflow as tf

from ssl_influence import config as config_lib, graphs
from ssl_influence.augment import auto_augment, ctaugment, image_ops, per_image

KINDS = ("weak", "strong")
GRAY = per_image.GRAY
LEVELS = 10  # Magnitudes are in tenths of their range; 1 to 9 are drawn.


@dataclasses.dataclass(frozen=True)
class Operation:
    """One row of the table that RandAugment and AutoAugment share.

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

_INDEX = {row.name: index for index, row in enumerate(OPERATIONS)} | {"Identity": -1}

# How each operation runs on (images, magnitude).
_RUN = per_image.Operations(
    names=tuple(row.name for row in OPERATIONS),
    magnitudes=1,
    matrices={
        "ShearX": image_ops.shear_x_matrix,
        "ShearY": image_ops.shear_y_matrix,
        "TranslateX": image_ops.translate_x_matrix,
        "TranslateY": image_ops.translate_y_matrix,
        "Rotate": image_ops.rotate_matrix,
    },
    recolorings={
        "AutoContrast": lambda images, _: image_ops.autocontrast(images),
        "Equalize": lambda images, _: image_ops.equalize(images),
        "Invert": lambda images, _: image_ops.invert(images),
        "Posterize": image_ops.posterize,
        "Solarize": image_ops.solarize,
        "Brightness": image_ops.brightness,
        "Contrast": image_ops.contrast,
        "Color": image_ops.color,
        "Sharpness": image_ops.sharpness,
    },
    cutout="Cutout",
    side=lambda side, *_: side,
    # Without opacity: the mean color of CIFAR-10, seen only if a later operation drops opacity.
    cutout_word=125 + 122 * 0x100 + 113 * 0x10000,
    opaque=frozenset(row.name for row in OPERATIONS if row.opaque),
)

# What FixMatch's RandAugment draws from; of no operation, Identity, there is a fourteenth part.
FIXMATCH_OPERATIONS = tuple(
    row.name for row in OPERATIONS if row.name not in ("Invert", "Cutout")
) + ("Identity",)

_AUTO_AUGMENT = {
    "auto_augment_cifar10": auto_augment.CIFAR10,
    "auto_augment_svhn": auto_augment.SVHN,
}


def view_index(name: str) -> int:
    """The place of a view in the order weak, strong, weak_2, strong_2, weak_3, ...

    Args:
      name: a kind, "weak" or "strong", then nothing for the first copy or _2, _3, ... for others.

    Raises:
      ConfigError: a view has no such name.
    """
    match = re.fullmatch(f"({'|'.join(KINDS)})(?:_([2-9]|[1-9][0-9]+))?", name)
    if match is None:
        raise config_lib.ConfigError(
            f"view={name!r} is not one of {', '.join(KINDS)}, nor a copy of one, as weak_2."
        )
    kind, copy = match.groups()
    return len(KINDS) * (int(copy or 1) - 1) + KINDS.index(kind)


def is_strong(name: str) -> bool:
    """Whether the view of that name is a strong one."""
    return KINDS[view_index(name) % len(KINDS)] == "strong"


@graphs.as_written
def views(
    images: tf.Tensor,
    seed: tf.Tensor,
    names: tuple[str, ...],
    config: config_lib.AugmentConfig,
    default_flip: bool,
    *,
    fill: int | tuple[int, ...] = GRAY,
    rates: tf.Tensor | None = None,
) -> dict[str, tf.Tensor]:
    """The named views of a batch, each with randomness of its own.

    A view's bits do not depend on which other views are asked for.

    Args:
      images: uint8 [B, H, W, C], C 1 or 3.
      seed: integers [2].
      names: see `view_index`.
      config: settings; `flip` None takes `default_flip`, `shift` None is H // 8.
      default_flip: whether images of this dataset may be mirrored.
      fill: see `strong`.
      rates: see `strong`.

    Returns:
      name -> uint8 [B, H, W, C].

    Raises:
      ConfigError: a view has no such name, or the shift does not fit the image.
    """
    image_ops.check_images(images)
    flip, shift = weak_settings(config, default_flip, images.shape[1])
    made = {}
    for name in names:
        key = per_image.fold_in(seed, view_index(name))
        if is_strong(name):
            made[name] = strong(images, key, config, flip=flip, shift=shift, fill=fill, rates=rates)
        else:
            made[name] = weak(images, key, flip=flip, shift=shift)
    return made


def weak_settings(
    config: config_lib.AugmentConfig, default_flip: bool, height: int
) -> tuple[bool, int]:
    """(flip, shift) of `weak` for images of that height."""
    flip = default_flip if config.flip is None else config.flip
    return flip, height // 8 if config.shift is None else config.shift


@graphs.as_written
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
    return per_image.weak(images, seed, flip=flip, shift=shift)


@graphs.as_written
def strong(
    images: tf.Tensor,
    seed: tf.Tensor,
    config: config_lib.AugmentConfig,
    *,
    flip: bool,
    shift: int,
    fill: int | tuple[int, ...] = GRAY,
    rates: tf.Tensor | None = None,
) -> tf.Tensor:
    """The strong view that `config.strong` names, with `weak` in its published place.

    "rand_augment", of UDA, draws from all OPERATIONS, paints the closing square, then flips and
    shifts; "rand_augment_fixmatch" flips and shifts, draws from FIXMATCH_OPERATIONS, then paints;
    the policies of AutoAugment come first, then flip and shift, then the square; "ctaugment" flips
    and shifts, draws by its rates, then paints.

    Args:
      images: uint8 [B, H, W, C], C 1 or 3.
      seed: integers [2].
      config: gives operations, probability, cutout and the settings of CTAugment.
      flip: see `weak`.
      shift: see `weak`.
      fill: gray level, or one per channel, of the closing square and, but for "ctaugment", of
        pixels from outside the image. Pass the rounded training mean where `normalize`
        standardizes.
      rates: of CTAugment, float32 [parameters, bins], see `ctaugment`.

    Returns:
      uint8 [B, H, W, C].

    Raises:
      ValueError: "ctaugment" without rates.
    """
    if config.strong == "ctaugment":
        if rates is None:
            raise ValueError("strong='ctaugment' needs the rates of a CTAugment: pass them.")
        return ctaugment.strong(images, seed, rates, config, flip=flip, shift=shift, fill=fill)
    words = image_ops.pack(images)
    key, weak_key = per_image.fold_in(seed, 0), per_image.fold_in(seed, 1)
    settings = {
        "operations": config.operations,
        "probability": config.probability,
    }

    def flip_and_shift(words):
        return per_image.weak(words, weak_key, flip=flip, shift=shift)

    def close(words):
        return per_image.close(words, per_image.fold_in(key, 1), cutout=config.cutout, fill=fill)

    if config.strong == "rand_augment":
        words = flip_and_shift(close(_rand_augment(words, key, **settings)))
    elif config.strong == "rand_augment_fixmatch":
        names = FIXMATCH_OPERATIONS
        words = close(_rand_augment(flip_and_shift(words), key, names=names, **settings))
    else:
        policy = _AUTO_AUGMENT[config.strong]
        words = close(flip_and_shift(_auto_augment(words, key, policy)))
    return image_ops.unpack(words, images.shape[-1])


@graphs.as_written
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
      fill: see `strong`.

    Returns:
      uint8 [B, H, W, C].
    """
    words = _rand_augment(
        image_ops.pack(images), seed, operations=operations, probability=probability
    )
    words = per_image.close(words, per_image.fold_in(seed, 1), cutout=cutout, fill=fill)
    return image_ops.unpack(words, images.shape[-1])


def _rand_augment(words, seed, *, operations, probability, names=_RUN.names):
    """The operations of RandAugment on packed pixels, int32 [B, H, W]."""
    if not operations:
        return words
    _, height, width = words.shape
    batch = tf.shape(words)[0]
    key = per_image.fold_in(seed, 0)
    return _run(words, _draw(key, batch, operations, probability, height, width, names))


def _auto_augment(words, seed, policy):
    """A policy of AutoAugment on packed pixels, int32 [B, H, W]."""
    _, height, width = words.shape
    batch = tf.shape(words)[0]
    return _run(words, _draw_policy(per_image.fold_in(seed, 0), batch, policy, height, width))


def _run(words, drawn):
    for operation, magnitude, center in zip(*map(tf.unstack, drawn), strict=True):
        words = per_image.apply(words, _RUN, operation, (magnitude,), center)
    return words


def _draw(seed, batch, operations, probability, height, width, names=_RUN.names):
    """What each image does at each of its turns.

    Returns:
      operation: int32 [operations, B], index into OPERATIONS, -1 where none is applied.
      magnitude: float64 [operations, B].
      center: int32 [operations, B, 2], of the square if the operation is Cutout.
    """
    shape = [operations, batch]
    place = per_image.uniform(shape, per_image.fold_in(seed, 0), 0, len(names))
    operation = tf.gather([_INDEX[name] for name in names], place)
    level = per_image.uniform(shape, per_image.fold_in(seed, 1), 1, LEVELS)
    return _applied(seed, operation, level, probability, height, width)


def _draw_policy(seed, batch, policy, height, width):
    """As `_draw`, of a policy of AutoAugment."""
    row = per_image.uniform([batch], per_image.fold_in(seed, 0), 0, len(policy))
    names, probability, level = (np.array(column).T for column in _columns(policy))
    index = np.vectorize(_INDEX.get)(names)
    return _applied(
        seed,
        tf.gather(tf.constant(index, tf.int32), row, axis=1),
        tf.gather(tf.constant(level, tf.int32), row, axis=1),
        tf.gather(tf.constant(probability, tf.float32), row, axis=1),
        height,
        width,
    )


def _columns(policy):
    """The names, probabilities and levels of a policy, each [sub-policies][operations]."""
    return ([[turn[i] for turn in row] for row in policy] for i in range(3))


def _applied(seed, operation, level, probability, height, width):
    """What `_draw` returns, of operations that are not all applied and of their levels."""
    shape = tf.shape(operation)
    applied = per_image.fractions(shape, per_image.fold_in(seed, 2)) < probability
    negated = per_image.uniform(shape, per_image.fold_in(seed, 3), 0, 2) == 1
    table = np.stack([row.magnitudes(height, width) for row in OPERATIONS])
    # Of no operation, index -1, the magnitude is that of the first, and unused.
    index = tf.maximum(operation, 0)
    magnitude = tf.gather(table.ravel(), index * (LEVELS + 1) + level)
    signed = tf.gather([row.signed for row in OPERATIONS], index)
    magnitude = tf.where(signed & negated, -magnitude, magnitude)
    center = per_image.centers(shape, per_image.fold_in(seed, 4), height, width)
    return tf.where(applied, operation, -1), magnitude, center


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
