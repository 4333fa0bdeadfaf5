"""CTAugment (Berthelot et al., arXiv:1911.09785): magnitudes that the model keeps up with.

The range of every parameter of every operation is cut into bins, and every bin has a rate: how well
the model recognizes labeled images that were transformed with magnitudes of that bin. A strong view
draws from the bins whose rates are near the highest of their parameter. Rates move by probes,
labeled images that were transformed with magnitudes of any bin.

Operations, bins and ranges are those of FixMatch's code (github.com/google-research/fixmatch,
libml/ctaugment.py). Departures:

- Translations go up to 0.3 of the width or height, as the paper has it; there, up to 0.3 pixels,
  which leaves the image as it is.
- The closing square has the color that is 0 after normalization (there, gray 127), like that of
  the other strong views.

All randomness is a function of (seed, position in the batch), and of the rates.
"""

import dataclasses

import numpy as np
import tensorflow as tf

from ssl_influence import config as config_lib, graphs
from ssl_influence.augment import image_ops, per_image


@dataclasses.dataclass(frozen=True)
class Operation:
    """One row of the table.

    Attributes:
      name: as in the published code.
      bins: how many the range of each of its parameters has.
    """

    name: str
    bins: tuple[int, ...] = (17,)


OPERATIONS = (
    Operation("autocontrast"),
    Operation("blur"),
    Operation("brightness"),
    Operation("color"),
    Operation("contrast"),
    Operation("cutout"),
    Operation("equalize"),
    Operation("invert"),
    Operation("identity", bins=()),
    Operation("posterize", bins=(8,)),
    Operation("rescale", bins=(17, len(image_ops.RESAMPLINGS))),
    Operation("rotate"),
    Operation("sharpness"),
    Operation("shear_x"),
    Operation("shear_y"),
    Operation("smooth"),
    Operation("solarize"),
    Operation("translate_x"),
    Operation("translate_y"),
)
PARAMETERS = max(len(row.bins) for row in OPERATIONS)  # Of one operation, at most.

_BINS = np.array([bins for row in OPERATIONS for bins in row.bins], np.int32)
SHAPE = (len(_BINS), int(_BINS.max()))  # Of the rates: a row per parameter, a column per bin.
_EXISTS = np.arange(SHAPE[1]) < _BINS[:, np.newaxis]
_FIRST_ROW = np.cumsum([0, *(len(row.bins) for row in OPERATIONS)])
# The row of each parameter of each operation, or -1.
_ROWS = np.array(
    [
        [_FIRST_ROW[i] + j if j < len(row.bins) else -1 for j in range(PARAMETERS)]
        for i, row in enumerate(OPERATIONS)
    ],
    np.int32,
)


def _matrix(make, magnitude):
    return lambda level, _, height, width: make(magnitude(level, height, width), height, width)


def _centered(level, most):
    """Levels 0 to 1 as -most to most. Takes one constant: graphs reorder factors."""
    return (2.0 * level - 1.0) * most


def _enhance(operation):
    return lambda images, level, _: operation(images, 0.1 + 1.9 * level)


def _blend_with(operation):
    return lambda images, level, _: image_ops.blend(images, operation(images), level)


def _whole(level):
    """Rounded down, for a magnitude that counts."""
    return tf.cast(level, tf.int32)


# How each operation runs on (images, level, second level), levels in 0..1.
_RUN = per_image.Operations(
    names=tuple(row.name for row in OPERATIONS),
    magnitudes=PARAMETERS,
    matrices={
        "rotate": _matrix(
            image_ops.rotate_matrix, lambda level, *_: tf.round(_centered(level, 45.0))
        ),
        "shear_x": _matrix(image_ops.shear_x_matrix, lambda level, *_: _centered(level, 0.3)),
        "shear_y": _matrix(image_ops.shear_y_matrix, lambda level, *_: _centered(level, 0.3)),
        "translate_x": _matrix(
            image_ops.translate_x_matrix,
            lambda level, height, width: _centered(level, 0.3 * width),
        ),
        "translate_y": _matrix(
            image_ops.translate_y_matrix,
            lambda level, height, width: _centered(level, 0.3 * height),
        ),
    },
    recolorings={
        "autocontrast": _blend_with(image_ops.autocontrast),
        "blur": _blend_with(image_ops.blur),
        "brightness": _enhance(image_ops.brightness),
        "color": _enhance(image_ops.color),
        "contrast": _enhance(image_ops.contrast),
        "equalize": _blend_with(image_ops.equalize),
        "invert": _blend_with(image_ops.invert),
        "posterize": lambda images, level, _: image_ops.posterize(
            images, 1 + _whole(level * 7.999)
        ),
        "rescale": lambda images, level, method: image_ops.rescale(
            images, level * 0.25, _whole(method * 5.99)
        ),
        "sharpness": _enhance(image_ops.sharpness),
        "smooth": _blend_with(image_ops.smooth),
        "solarize": lambda images, level, _: image_ops.solarize(images, _whole(level * 255.999)),
    },
    cutout="cutout",
    side=lambda level, _, height, width: 1 + _whole(level * (min(height, width) * 0.499)),
    cutout_word=127 * 0x010101 + image_ops.OPAQUE,
)


def initial_rates() -> tf.Tensor:
    """Rates of 1 for every bin, 0 where a parameter has fewer than the most, float32 SHAPE."""
    return tf.constant(_EXISTS, tf.float32)


def bin_probabilities(rates: tf.Tensor, *, decay: float, threshold: float) -> tf.Tensor:
    """How often each bin is drawn, in proportion: rates near the highest of their parameter, or 0.

    Args:
      rates: float32 SHAPE.
      decay: its complement is added, so that not all are 0.
      threshold: rates below this share of the highest are not drawn.

    Returns:
      float32 SHAPE; in each row, the highest is 1.
    """
    raised = (rates + (1.0 - decay)) * _EXISTS
    share = raised / tf.reduce_max(raised, axis=1, keepdims=True)
    return tf.where(share < threshold, 0.0, share)


def proximity(probabilities: tf.Tensor, label: tf.Tensor) -> tf.Tensor:
    """1 - 1/2 sum_c |p_c - onehot_c|: 1 for a prediction that is sure and right.

    Args:
      probabilities: float [B, C].
      label: integers [B].

    Returns:
      float [B], in 0..1.
    """
    truth = tf.one_hot(label, probabilities.shape[-1], dtype=probabilities.dtype)
    return 1.0 - 0.5 * tf.reduce_sum(tf.abs(probabilities - truth), axis=-1)


def updated_rates(
    rates: tf.Tensor, slots: tf.Tensor, proximity: tf.Tensor, *, decay: float
) -> tf.Tensor:
    """Sets rate <- decay rate + (1 - decay) proximity, probe after probe and slot after slot.

    Args:
      rates: float32 SHAPE.
      slots: int32 [B, S], places in the flat rates that each probe was made with, -1 for none.
      proximity: float32 [B], see `proximity`. A probe whose proximity is not finite is left out.
      decay: of the old rate.

    Returns:
      float32 SHAPE.
    """
    slots = tf.where(tf.math.is_finite(proximity)[:, tf.newaxis], slots, -1)
    proximity = tf.repeat(proximity, slots.shape[1])
    hit = tf.one_hot(tf.reshape(slots, [-1]), rates.shape.num_elements())
    later = tf.cumsum(hit, axis=0, exclusive=True, reverse=True)
    # Of n hits on a rate, the i-th counts (1 - decay) decay^(n - i), the old rate decay^n.
    share = (1.0 - decay) * decay**later * hit
    old = tf.reshape(rates, [-1]) * decay ** tf.reduce_sum(hit, axis=0)
    new = tf.reduce_sum(tf.where(hit > 0, share * proximity[:, tf.newaxis], 0.0), axis=0)
    return tf.reshape(old + new, rates.shape)


@graphs.as_written
def strong(
    images: tf.Tensor,
    seed: tf.Tensor,
    rates: tf.Tensor,
    config: config_lib.AugmentConfig,
    *,
    flip: bool,
    shift: int,
    fill: int | tuple[int, ...] = per_image.GRAY,
) -> tf.Tensor:
    """The strong view: flip and shift, operations with magnitudes drawn by rates, a square.

    Args:
      images: uint8 [B, H, W, C], C 1 or 3.
      seed: integers [2].
      rates: float32 SHAPE.
      config: gives depth, threshold, decay and cutout.
      flip: see `policies.weak`.
      shift: see `policies.weak`.
      fill: gray level, or one per channel, of the closing square.

    Returns:
      uint8 [B, H, W, C].
    """
    probabilities = bin_probabilities(
        rates, decay=config.ctaugment_decay, threshold=config.ctaugment_threshold
    )
    words = image_ops.pack(images)
    words = per_image.weak(words, per_image.fold_in(seed, 1), flip=flip, shift=shift)
    words, _ = _transform(words, per_image.fold_in(seed, 0), config.ctaugment_depth, probabilities)
    # What came from outside is black, not transparent.
    words |= image_ops.OPAQUE
    words = per_image.close(words, per_image.fold_in(seed, 2), cutout=config.cutout, fill=fill)
    return image_ops.unpack(words, images.shape[-1])


@graphs.as_written
def probe(
    images: tf.Tensor,
    seed: tf.Tensor,
    config: config_lib.AugmentConfig,
    *,
    flip: bool,
    shift: int,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Flip and shift, then operations with magnitudes uniform over all bins.

    Args:
      images: uint8 [B, H, W, C], C 1 or 3.
      seed: integers [2].
      config: gives the depth.
      flip: see `policies.weak`.
      shift: see `policies.weak`.

    Returns:
      uint8 [B, H, W, C], and the bins that were drawn, int32 [B, depth * PARAMETERS], places in the
      flat rates, -1 where an operation has fewer parameters.
    """
    words = image_ops.pack(images)
    words = per_image.weak(words, per_image.fold_in(seed, 1), flip=flip, shift=shift)
    uniform = tf.constant(_EXISTS, tf.float32)
    words, slots = _transform(words, per_image.fold_in(seed, 0), config.ctaugment_depth, uniform)
    slots = tf.reshape(tf.transpose(slots, [1, 0, 2]), [-1, slots.shape[0] * PARAMETERS])
    return image_ops.unpack(words, images.shape[-1]), slots


def _transform(words, seed, depth, probabilities):
    """Draws and applies `depth` operations to each image.

    Returns:
      Packed pixels, int32 [B, H, W], and slots, int32 [depth, B, PARAMETERS].
    """
    _, height, width = words.shape
    operation, levels, slots, center = _draw(
        seed, tf.shape(words)[0], depth, probabilities, height, width
    )
    for turn in range(depth):
        magnitudes = tuple(tf.unstack(levels[turn], axis=-1))
        words = per_image.apply(words, _RUN, operation[turn], magnitudes, center[turn])
    return words, slots


def _draw(seed, batch, depth, probabilities, height, width):
    """What each image does at each of its turns.

    Returns:
      operation: int32 [depth, B], index into OPERATIONS.
      levels: float64 [depth, B, PARAMETERS], in [0, 1), uniform within their bins.
      slots: int32 [depth, B, PARAMETERS].
      center: int32 [depth, B, 2], of the square if the operation is cutout.
    """
    shape = [depth, batch]
    operation = per_image.uniform(shape, per_image.fold_in(seed, 0), 0, len(OPERATIONS))
    rows = tf.gather(_ROWS, operation)
    row = tf.maximum(rows, 0)  # Of no parameter, anything will do.
    chosen, within = tf.unstack(
        per_image.fractions([2, *shape, PARAMETERS], per_image.fold_in(seed, 1))
    )
    sums = tf.gather(tf.cumsum(probabilities, axis=1), row)
    # A product that is below the whole sum, in float32 too, so that no bin of probability 0 is hit.
    passed = sums <= (chosen * sums[..., -1])[..., tf.newaxis]
    bin_ = tf.reduce_sum(tf.cast(passed, tf.int32), axis=-1)
    # A product, since a quotient by a constant has other bits in some graphs than in others.
    levels = tf.cast(bin_, tf.float64) + tf.cast(within, tf.float64)
    levels *= tf.gather(1.0 / _BINS, row)
    slots = tf.where(rows >= 0, rows * SHAPE[1] + bin_, -1)
    center = per_image.centers(shape, per_image.fold_in(seed, 2), height, width)
    return operation, levels, slots, center


class CTAugment(tf.Module):
    """The state of CTAugment, for a checkpoint.

    Attributes:
      rates: float32 SHAPE, see `updated_rates`.
      snapshot: the rates that strong views are drawn by, float32 SHAPE.
    """

    def __init__(self, config: config_lib.AugmentConfig, name: str = "ctaugment"):
        """Every rate starts at 1: all magnitudes are drawn.

        Args:
          config: gives decay and threshold.
          name: of the module.
        """
        super().__init__(name)
        self._config = config
        self.rates = tf.Variable(initial_rates(), trainable=False, name="rates")
        self.snapshot = tf.Variable(initial_rates(), trainable=False, name="snapshot")

    def take_snapshot(self) -> None:
        """Makes the rates of now those that strong views are drawn by."""
        self.snapshot.assign(self.rates)

    def update(self, slots: tf.Tensor, probabilities: tf.Tensor, label: tf.Tensor) -> None:
        """Learns from the model's predictions on a batch of probes.

        With several replicas, call this once, outside of them, with the probes of all.

        Args:
          slots: int32 [B, S], of `probe`.
          probabilities: float [B, C], the predictions.
          label: int32 [B], the truth.
        """
        near = tf.cast(proximity(probabilities, label), tf.float32)
        decay = self._config.ctaugment_decay
        self.rates.assign(updated_rates(self.rates, slots, near, decay=decay))
