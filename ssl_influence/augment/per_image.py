"""What all policies share: stateless draws, the weak view, and one operation per image of a batch.

Functions here work on packed pixels (`image_ops.pack`), int32 [B, H, W].
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import tensorflow as tf

from ssl_influence import config as config_lib
from ssl_influence.augment import image_ops

GRAY = 128


def fold_in(seed: tf.Tensor, data: int | tf.Tensor) -> tf.Tensor:
    """A new seed, integers [2]. Philox by name: the default depends on the device."""
    return tf.random.experimental.stateless_fold_in(seed, data, alg="philox")


def uniform(shape, seed: tf.Tensor, low: int, high: int) -> tf.Tensor:
    """Integers of low..high - 1, int32. Philox by name: the default depends on the device."""
    return tf.random.stateless_uniform(shape, seed, low, high, tf.int32, alg="philox")


def fractions(shape, seed: tf.Tensor) -> tf.Tensor:
    """Numbers of [0, 1), float32."""
    return tf.random.stateless_uniform(shape, seed, alg="philox")


def centers(shape, seed: tf.Tensor, height: int, width: int) -> tf.Tensor:
    """Positions (y, x), uniform over the pixels, int32 [*shape, 2]."""
    y = uniform(shape, fold_in(seed, 0), 0, height)
    x = uniform(shape, fold_in(seed, 1), 0, width)
    return tf.stack([y, x], axis=-1)


def check_shift(shift: int, height: int, width: int) -> None:
    """Raises ConfigError if reflection cannot fill a shift by that many pixels."""
    limit = min(height, width)
    if not 0 <= shift < limit:
        raise config_lib.ConfigError(
            f"shift={shift} does not fit images of {height} x {width} pixels: use 0 to {limit - 1}."
        )


def weak(pixels: tf.Tensor, seed: tf.Tensor, *, flip: bool, shift: int) -> tf.Tensor:
    """`policies.weak` on images or on packed pixels."""
    _, height, width = pixels.shape[:3]
    check_shift(shift, height, width)
    if not flip and not shift:
        return tf.identity(pixels)
    batch = tf.shape(pixels)[0]
    flipped = tf.zeros([batch], tf.bool)
    if flip:
        flipped = uniform([batch], fold_in(seed, 0), 0, 2) == 1
    offset = uniform([batch, 2], fold_in(seed, 1), -shift, shift + 1)
    return image_ops.flip_and_shift(pixels, flipped, offset)


@dataclasses.dataclass(frozen=True, eq=False)
class Operations:
    """The operations of a policy, each of one of three forms.

    An operation takes the magnitudes [b] of its images.

    Attributes:
      names: in the order of their indices.
      magnitudes: how many each takes.
      matrices: name -> (*magnitudes, height, width) -> inverse-affine matrices [b, 6].
      recolorings: name -> (images uint8 [b, H, W, 3], *magnitudes) -> images.
      cutout: name of the operation that paints a square.
      side: (*magnitudes, height, width) -> its side [b], rounded down to whole pixels.
      cutout_word: what it paints.
      opaque: recolorings that drop opacity; the others keep it.
    """

    names: tuple[str, ...]
    magnitudes: int
    matrices: Mapping[str, Callable]
    recolorings: Mapping[str, Callable]
    cutout: str
    side: Callable
    cutout_word: int
    opaque: frozenset[str] = frozenset()


def apply(
    words: tf.Tensor,
    table: Operations,
    operation: tf.Tensor,
    magnitudes: tuple[tf.Tensor, ...],
    center: tf.Tensor,
) -> tf.Tensor:
    """Applies to each image its own operation; each image is read and written by that alone.

    Args:
      words: packed pixels, int32 [B, H, W].
      table: the operations.
      operation: int32 [B], index into `table.names`, or -1 to leave the image.
      magnitudes: float64 [B] each.
      center: int32 [B, 2], (y, x) of the square if the operation is a cutout.

    Returns:
      int32 [B, H, W]; what a matrix takes from outside the image is 0, transparent black.
    """
    changed = _traced(table, *words.shape[1:])(words, operation, magnitudes, center)
    return tf.ensure_shape(changed, words.shape)


@functools.lru_cache(maxsize=32)
def _traced(table, height, width):
    """`_apply` as a graph of its own: a pipeline that calls it several times is traced faster."""
    spec = tf.TensorSpec
    return tf.function(
        functools.partial(_apply, table),
        input_signature=[
            spec([None, height, width], tf.int32),
            spec([None], tf.int32),
            (spec([None], tf.float64),) * table.magnitudes,
            spec([None, 2], tf.int32),
        ],
        autograph=False,
    )


def _apply(table, words, operation, magnitudes, center):
    _, height, width = words.shape
    names = [None, *table.names]
    indices = tf.range(tf.shape(words)[0])

    def divide(values):
        parts = tf.dynamic_partition(values, operation + 1, len(names))
        return dict(zip(names, parts, strict=True))

    rows, before = divide(indices), divide(words)
    divided = [divide(magnitude) for magnitude in magnitudes]
    strength = {name: tuple(parts[name] for parts in divided) for name in names}

    def together(parts, group):
        return tf.concat([parts[name] for name in group], 0)

    matrices = [make(*strength[name], height, width) for name, make in table.matrices.items()]
    moved = image_ops.affine(together(before, table.matrices), tf.concat(matrices, 0))

    original = together(before, table.recolorings)
    # Not the sizes of `rows`: where the draws are constants, graphs fold all of them to one number.
    sizes = [tf.shape(before[name])[0] for name in table.recolorings]
    parts = tf.split(image_ops.unpack(original, 3), sizes)
    recolored = [
        recolor(part, *strength[name])
        for part, (name, recolor) in zip(parts, table.recolorings.items(), strict=True)
    ]
    recolored = image_ops.pack(tf.concat(recolored, 0))
    # Packing made all of it opaque: what was transparent stays so, unless opacity is dropped.
    kept = original | ~image_ops.OPAQUE
    if table.opaque:
        opaque = [image_ops.OPAQUE if name in table.opaque else 0 for name in names]
        dropped = together(divide(tf.gather(opaque, operation + 1)), table.recolorings)
        kept |= dropped[:, tf.newaxis, tf.newaxis]
    recolored &= kept

    side = tf.cast(table.side(*strength[table.cutout], height, width), tf.int32)
    square = image_ops.square_mask(divide(center)[table.cutout], side, height, width)
    painted = image_ops.paint(before[table.cutout], square, table.cutout_word)

    left = [name for name in names if name not in (*table.matrices, *table.recolorings)]
    left.remove(table.cutout)
    return tf.dynamic_stitch(
        [
            together(rows, left),
            together(rows, table.matrices),
            together(rows, table.recolorings),
            rows[table.cutout],
        ],
        [together(before, left), moved, recolored, painted],
    )


def close(
    words: tf.Tensor, seed: tf.Tensor, *, cutout: float, fill: int | tuple[int, ...]
) -> tf.Tensor:
    """Paints the transparent pixels, and a square around a uniform center.

    Args:
      words: packed pixels, int32 [B, H, W].
      seed: integers [2].
      cutout: side of the square as a fraction of the height, rounded down to pixels; 0 for none.
      fill: gray level, or one per channel.
    """
    _, height, width = words.shape
    batch = tf.shape(words)[0]
    painted = words >= 0  # Transparent.
    if cutout:
        center = centers([batch], seed, height, width)
        side = tf.fill([batch], int(cutout * height))
        painted |= image_ops.square_mask(center, side, height, width)
    color = tf.broadcast_to(tf.constant(fill, tf.uint8), [1, 1, 1, 3])
    return image_ops.paint(words, painted, image_ops.pack(color)[0, 0, 0])
