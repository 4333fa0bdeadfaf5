"""What the replicas of one step share, seen from within a replica.

Under a `tf.distribute` strategy of several replicas each sees its part of the global batch. Here
are the few things that must be of all of it. With one replica, or none of TensorFlow's, all of it
is what it was: nothing is communicated and nothing is copied.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


def count() -> int:
    """The number of replicas among which the global batch is divided, in equal parts."""
    return tf.distribute.get_strategy().num_replicas_in_sync


def index() -> int | tf.Tensor:
    """Which of them this one is, counted from 0; its rows have this place in the global batch."""
    return tf.distribute.get_replica_context().replica_id_in_sync_group


def total(values: Any) -> Any:
    """The sum over the replicas of each tensor of a nest. Not within a loop or a condition."""
    if count() == 1 or not tf.nest.flatten(values):
        return values
    context = tf.distribute.get_replica_context()
    flat = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.nest.flatten(values))
    return tf.nest.pack_sequence_as(values, flat)


def mean(values: Any) -> Any:
    """The mean over the replicas of each floating tensor of a nest."""
    if count() == 1:
        return values
    return tf.nest.map_structure(lambda x: x / tf.cast(count(), x.dtype), total(values))


def gathered(values: Any) -> Any:
    """Each tensor [B, ...] of a nest with the rows of all replicas, in their order, [n B, ...]."""
    if count() == 1 or not tf.nest.flatten(values):
        return values
    context = tf.distribute.get_replica_context()
    own = tf.nest.flatten(values)
    with tf.device(_device()):
        flat = context.all_gather(list(map(tf.identity, own)), axis=0)
    flat = [
        tf.ensure_shape(rows, [part.shape[0] and count() * part.shape[0], *part.shape[1:]])
        for rows, part in zip(flat, own, strict=True)
    ]
    return tf.nest.pack_sequence_as(values, flat)


def _device() -> str | None:
    """The device of a worker that has one: it cannot gather tensors that name none."""
    devices = tf.distribute.get_strategy().extended.worker_devices
    return devices[0] if len(devices) == 1 else None


def total_gradient(
    gradient: tf.Tensor | tf.IndexedSlices, joined: Callable[[list], tf.IndexedSlices]
) -> tf.Tensor | tf.IndexedSlices:
    """The sum of a gradient over the replicas; a sparse one is gathered, and `joined` adds it up.

    Args:
      gradient: of a variable.
      joined: ([slices]) -> slices, the sum of those with one index.
    """
    if count() == 1 or not isinstance(gradient, tf.IndexedSlices):
        return total(gradient)
    values, indices = gathered([gradient.values, gradient.indices])
    return joined([tf.IndexedSlices(values, indices, gradient.dense_shape)])


def has_own_copy(variable: tf.Variable) -> bool:
    """Whether the variable may differ between replicas, as BatchNorm's moving statistics may."""
    return variable.synchronization == tf.VariableSynchronization.ON_READ


def move_all(
    variables: Sequence[tf.Variable],
    move: Callable[[tf.Variable, tf.Tensor], Any],
    values: Sequence[tf.Tensor | tf.Variable],
) -> None:
    """move(variable, value) for each pair, on every copy of the variable.

    Values have to be equal on all replicas, but for those of variables with a copy of their own.
    """
    pairs = list(zip(variables, values, strict=True))
    if count() == 1:
        for variable, value in pairs:
            move(variable, value)
        return
    for variable, value in pairs:
        if has_own_copy(variable):
            move(variable, value)
    mirrored = [pair for pair in pairs if not has_own_copy(pair[0])]

    def move_mirrored(strategy, *values):
        for (variable, _), value in zip(mirrored, values, strict=True):
            strategy.extended.update(variable, move, args=(value,), group=False)

    # As the optimizers of Keras do, so that it compiles where they do.
    tf.__internal__.distribute.interim.maybe_merge_call(
        move_mirrored, tf.distribute.get_strategy(), *(value for _, value in mirrored)
    )


def copies(variable: tf.Variable) -> tuple[tf.Variable, ...]:
    """The copies of a variable on the devices of this process; seen from outside of a replica."""
    return tuple(getattr(variable, "values", (variable,)))
