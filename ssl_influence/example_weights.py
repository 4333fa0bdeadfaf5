"""Lambda: one weight per unlabeled example, addressed by the example's id (section 3)."""

import numpy as np
import tensorflow as tf
import tf_keras as keras

from ssl_influence import config, optimizers


class ExampleWeights(tf.Module):
    """The example weights, the optimizer that moves them, and what is known of their updates.

    All of it is trackable: `tf.train.Checkpoint(weights=example_weights)` saves and restores the
    weights, the optimizer's slots, `skipped` and `updates` bit for bit. With several replicas,
    create and update it outside `strategy.scope()` and `strategy.run`, from ids and gradients that
    are gathered over the replicas.

    Args:
      size: number of examples; ids are 0..size-1.
      initial: lambda at the start, a number or one per example.
      mode: "per_example"; "single", one shared lambda whose gradient is the sum over the batch;
        "fixed", which never moves.
      optimizer: any `keras.optimizers.Optimizer`; None is `MAdam(0.01)`. An update by one that is
        no `optimizers.RowOptimizer` costs O(size), and may move and project examples that are not
        in the batch, as Adam does (the paper's ablation).
      minimum, maximum: the range to which an update is projected; None is no bound.

    Attributes:
      variable: lambda, float32 [size], or [1] in "single".
      updates: int64, of the variable's shape: gradients other than zero that were applied to it. A
        move without one, by what Adam remembers, is not counted.
      skipped: int64 scalar, gradient rows left out for being non-finite.

    Raises:
      ConfigError: for settings that cannot work.
    """

    def __init__(
        self,
        size: int,
        initial: float = 1.0,
        mode: str = "per_example",
        optimizer: keras.optimizers.Optimizer | None = None,
        minimum: float | None = 0.0,
        maximum: float | None = None,
    ):
        super().__init__(name="example_weights")
        if size < 1:
            raise config.ConfigError(f"size={size} leaves no example to weight: use at least 1.")
        if mode not in config.WEIGHTINGS:
            raise config.ConfigError(f"mode={mode!r} is not one of {', '.join(config.WEIGHTINGS)}.")
        self.size = size
        self.mode = mode
        self.minimum = -np.inf if minimum is None else minimum
        self.maximum = np.inf if maximum is None else maximum
        start = _initial_values(initial, 1 if mode == "single" else size)
        if not (start.min() >= self.minimum and start.max() <= self.maximum):
            raise config.ConfigError(
                f"initial weights span [{start.min()}, {start.max()}], outside "
                f"[minimum={self.minimum}, maximum={self.maximum}]: move one or the other."
            )
        self.variable = tf.Variable(start, name="example_weights", trainable=False)
        self.updates = tf.Variable(tf.zeros(start.shape, tf.int64), name="updates", trainable=False)
        self.skipped = tf.Variable(0, dtype=tf.int64, name="skipped", trainable=False)
        self.optimizer = None
        if mode != "fixed":
            self.optimizer = optimizers.MAdam(0.01) if optimizer is None else optimizer
            if not isinstance(self.optimizer, keras.optimizers.Optimizer):
                raise config.ConfigError(
                    f"optimizer={optimizer!r} is not a tf_keras.optimizers.Optimizer."
                )
            # Slots cannot be made inside a traced step, nor restored before they exist.
            self.optimizer.build([self.variable])

    def check_ids(self, ids) -> None:
        """Raises IndexError if a concrete id lies outside the table.

        `lookup` and `update` call it in eager mode, and raise `tf.errors.InvalidArgumentError` in
        graph mode. XLA drops that assertion and clamps the id: before compiled steps, call this on
        the host.
        """
        ids = np.asarray(ids)
        outside = ids[(ids < 0) | (ids >= self.size)]
        if outside.size:
            raise IndexError(
                f"example id {outside.flat[0]} is outside the table of size {self.size}: ids are "
                f"the examples' rows in their source, 0 to {self.size - 1}."
            )

    def start_from(self, ids: np.ndarray, weights: np.ndarray) -> None:
        """Gives the examples named by ids [R] the weights [R], projected; the others keep theirs.

        Nothing is known of updates then, and the optimizer's state stays as it is: call it before
        the first update.

        Raises:
          ConfigError: all examples share one weight, or a weight is not finite.
          IndexError: an id is outside the table.
        """
        if self.mode == "single":
            raise config.ConfigError(
                "weighting=single has one weight for all, so it cannot start from one each."
            )
        self.check_ids(ids)
        weights = np.asarray(weights, np.float32)
        if not np.all(np.isfinite(weights)):
            raise config.ConfigError(
                f"the weight of example {np.asarray(ids)[~np.isfinite(weights)][0]} is not finite."
            )
        start = self.variable.numpy()
        start[ids] = np.clip(weights, self.minimum, self.maximum)
        self.variable.assign(start)

    def lookup(self, ids: tf.Tensor) -> tf.Tensor:
        """Lambda of each id, integer [R] -> float32 [R]. Raises as `check_ids` says."""
        ids = tf.convert_to_tensor(ids)
        with tf.control_dependencies(self._assertions(ids)):
            if self.mode == "single":
                return tf.broadcast_to(self.variable, tf.shape(ids))
            return tf.gather(self.variable, ids)

    def update(self, ids: tf.Tensor, gradients: tf.Tensor) -> None:
        """Moves lambda against its gradient, then projects the rows that moved.

        Rows of one id are summed. A row that is non-finite (or whose square overflows float32,
        which would spoil the moments for good) is left out and counted in `skipped`. The result is
        bit-identical for every order of the rows. Without any row that is neither left out nor zero
        nothing moves, under no optimizer.

        Args:
          ids: integer [R].
          gradients: dL_V/dlambda [R].

        Raises:
          IndexError (eager) or tf.errors.InvalidArgumentError (graph): an id is outside the table.
            Nothing has moved then.
          RuntimeError: called where several replicas would each apply the update.
        """
        if tf.distribute.has_strategy() and (
            tf.distribute.in_cross_replica_context()
            or tf.distribute.get_strategy().num_replicas_in_sync > 1
        ):
            raise RuntimeError(
                "ExampleWeights.update was called inside strategy.scope() or strategy.run(): "
                "gather the ids and gradients over the replicas and call it once, outside both."
            )
        ids = tf.convert_to_tensor(ids)
        with tf.control_dependencies(self._assertions(ids)):
            if self.mode != "fixed":
                self._update(ids, gradients)

    def _update(self, ids, gradients):
        gradients = tf.cast(gradients, self.variable.dtype)
        if self.mode == "single":
            ids = tf.zeros_like(ids)
        usable = tf.math.is_finite(gradients * gradients)
        self.skipped.assign_add(_count(~usable))
        gradients = tf.where(usable, gradients, tf.zeros_like(gradients))
        ids, totals, first = optimizers.sum_duplicates(ids, gradients)
        overflowed = ~tf.math.is_finite(totals * totals)
        self.skipped.assign_add(_count(overflowed & first))
        totals = tf.where(overflowed, tf.zeros_like(totals), totals)
        moving = first & tf.not_equal(totals, 0)
        if isinstance(self.optimizer, optimizers.RowOptimizer):
            self._update_rows(ids, totals, first)
        else:
            self._update_all(ids, totals, first)
        self.updates.scatter_add(tf.IndexedSlices(tf.cast(moving, tf.int64), ids))

    def _update_rows(self, ids, totals, first):
        """Reads and writes the named rows alone."""
        old = tf.gather(self.variable, ids)
        gradient = tf.where(first, totals, tf.zeros_like(totals))
        self._apply(tf.IndexedSlices(gradient, ids))
        new = self._projected(tf.gather(self.variable, ids), old)
        new = tf.where(tf.not_equal(totals, 0), new, old)
        self.variable.scatter_update(tf.IndexedSlices(new, ids))

    def _update_all(self, ids, totals, first):
        """Another optimizer may move any row: the gradient is dense, and every row projected."""

        def move():
            old = tf.identity(self.variable)
            gradient = tf.where(first, totals, tf.zeros_like(totals))
            self._apply(tf.math.unsorted_segment_sum(gradient, ids, old.shape[0]))
            self.variable.assign(self._projected(tf.identity(self.variable), old))
            return True

        tf.cond(tf.reduce_any(tf.not_equal(totals, 0)), move, lambda: False)

    def _apply(self, gradient):
        self.optimizer.apply_gradients([(gradient, self.variable)], skip_gradients_aggregation=True)

    def _projected(self, new, old):
        new = tf.where(tf.math.is_finite(new), new, old)
        return tf.clip_by_value(new, self.minimum, self.maximum)

    def values(self) -> np.ndarray:
        """Lambda of every example, float32 [size]."""
        return np.broadcast_to(self.variable.numpy(), [self.size])

    def update_counts(self) -> np.ndarray:
        """Updates of every example (the shared count in "single"), int64 [size]."""
        return np.broadcast_to(self.updates.numpy(), [self.size])

    def _assertions(self, ids):
        """Checks the ids now (eager), or gives the ops to wait for (graph)."""
        if tf.executing_eagerly():
            self.check_ids(ids)
            return []
        outside = (ids < 0) | (ids >= self.size)
        first = outside & tf.equal(tf.cumsum(tf.cast(outside, tf.int32)), 1)
        culprit = tf.reduce_sum(tf.where(first, ids, tf.zeros_like(ids)))
        message = ["example id", culprit, "is outside the table of size", self.size]
        return [tf.debugging.Assert(~tf.reduce_any(outside), message)]


def _initial_values(initial, rows: int) -> np.ndarray:
    start = np.asarray(initial, np.float32)
    if start.shape not in ((), (rows,)):
        raise config.ConfigError(
            f"initial weights of shape {start.shape} do not fit: use a number or shape ({rows},)."
        )
    if not np.all(np.isfinite(start)):
        raise config.ConfigError(f"initial={initial} is not finite: start from a finite weight.")
    return np.array(np.broadcast_to(start, [rows]))


def _count(mask: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.cast(mask, tf.int64))
