"""Lambda: one weight per unlabeled example, addressed by the example's id (section 3)."""

from typing import NamedTuple

import numpy as np
import tensorflow as tf
import tf_keras as keras

from ssl_influence import config, optimizers


class Rows(NamedTuple):
    """What the table holds for the examples of a batch: a small table, made of tensors alone.

    Attributes:
      ids: int64 [B], ascending; of an example that the batch holds more than once, the first row
        counts. In "single" there is one row, [1], for every id.
      values: the weights, and where they are to move the optimizer's slots, [B] each.
      updates: how often each weight has moved since it was read, int64 [B].
      skipped: gradient rows that were left out since then, int64 scalar.
      learning_rate: of the optimizer, or none.
      iterations: of the optimizer, or none.
    """

    ids: tf.Tensor
    values: tuple[tf.Tensor, ...]
    updates: tf.Tensor
    skipped: tf.Tensor
    learning_rate: tf.Tensor | None = None
    iterations: tf.Tensor | None = None


class ExampleWeights(tf.Module):
    """The example weights, the optimizer that moves them, and what is known of their updates.

    All of it is trackable: `tf.train.Checkpoint(weights=example_weights)` saves and restores the
    weights, the optimizer's slots, `skipped` and `updates` bit for bit.

    `lookup` and `update` work on the table. Where several replicas share it, or a step is compiled,
    the rows of a batch travel instead: `read` takes them out, `weight_of` and `moved` are functions
    of tensors, the same wherever they are computed, and `write` puts them back once. Create the
    table outside of `strategy.scope()`, and call `read`, `write` and `update` outside of
    `strategy.run`.

    Args:
      size: number of examples; ids are 0..size-1.
      initial: lambda at the start, a number or one per example.
      mode: "per_example"; "single", one shared lambda whose gradient is the sum over the batch;
        "fixed", which never moves.
      optimizer: any `keras.optimizers.Optimizer`; None is `MAdam(0.01)`. An update by one that is
        no `optimizers.RowOptimizer` costs O(size), and may move and project examples that are not
        in the batch, as Adam does (the paper's ablation).
      minimum, maximum: the range to which an update is projected; None is no bound.
      dtype: of lambda, float32 or float64.

    Attributes:
      variable: lambda, [size], or [1] in "single".
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
        dtype: tf.DType = tf.float32,
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
        start = _initial_values(initial, 1 if mode == "single" else size, dtype)
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
        weights = np.asarray(weights, self.variable.dtype.as_numpy_dtype)
        if not np.all(np.isfinite(weights)):
            raise config.ConfigError(
                f"the weight of example {np.asarray(ids)[~np.isfinite(weights)][0]} is not finite."
            )
        start = self.variable.numpy()
        start[ids] = np.clip(weights, self.minimum, self.maximum)
        self.variable.assign(start)

    def lookup(self, ids: tf.Tensor) -> tf.Tensor:
        """Lambda of each id, integer [R] -> [R]. Raises as `check_ids` says."""
        ids = self.checked(ids)
        if self.mode == "single":
            return tf.broadcast_to(self.variable, tf.shape(ids))
        return tf.gather(self.variable, ids)

    def checked(self, ids: tf.Tensor) -> tf.Tensor:
        """The ids as they are. Raises as `check_ids` says."""
        ids = tf.convert_to_tensor(ids)
        with tf.control_dependencies(self._assertions(ids)):
            return tf.identity(ids)

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
        self._check_outside("update")
        if self.mode == "fixed":
            self.checked(ids)
        elif self.moves_rows:
            self.write(self.moved(self.read(ids, to_move=True), ids, gradients))
        else:
            self._update_all(self.checked(ids), gradients)

    @property
    def moves_rows(self) -> bool:
        """Whether the optimizer moves the rows of a batch alone, if it moves any."""
        return self.mode == "fixed" or isinstance(self.optimizer, optimizers.RowOptimizer)

    def read(self, ids: tf.Tensor, *, to_move: bool = False) -> Rows:
        """The rows of the examples named by ids, integer [B].

        Args:
          ids: may repeat, in any order.
          to_move: with all that `moved` needs.

        Raises:
          IndexError (eager) or tf.errors.InvalidArgumentError (graph): see `check_ids`.
        """
        ids = tf.sort(tf.cast(self.checked(ids), tf.int64))
        if self.mode == "single":
            with tf.control_dependencies([ids]):
                ids = tf.zeros([1], tf.int64)
        none = Rows(ids, (), tf.zeros_like(ids), tf.zeros([], tf.int64))
        if not self.moves_rows:
            return none
        if not to_move or self.mode == "fixed":
            return none._replace(values=(tf.gather(self.variable, ids),))
        return none._replace(
            values=tuple(tf.gather(held, ids) for held in self.optimizer.targets(self.variable)),
            learning_rate=self.optimizer.current_learning_rate(),
            iterations=tf.identity(self.optimizer.iterations),
        )

    def weight_of(self, rows: Rows, ids: tf.Tensor) -> tf.Tensor:
        """Lambda of each id, integer [R], all of them among those that were read -> [R].

        Raises:
          tf.errors.InvalidArgumentError: an id is not among them (compiled code takes another).
        """
        if not self.moves_rows:
            return self.lookup(ids)
        return tf.gather(rows.values[0], self._place(rows, ids))

    def moved(self, rows: Rows, ids: tf.Tensor, gradients: tf.Tensor) -> Rows:
        """The rows after the step that `update` makes; the table stays as it is.

        Under an optimizer that is no `optimizers.RowOptimizer` the step is made in the table.

        Args:
          rows: what `read` gave with `to_move`.
          ids: integer [R], all of them among those that were read.
          gradients: dL_V/dlambda [R].

        Raises:
          tf.errors.InvalidArgumentError: as `weight_of`.
        """
        if self.mode == "fixed":
            return rows
        if not self.moves_rows:
            self.update(ids, gradients)
            return rows
        old = rows.values[0]
        place, totals, first, left_out = self._totals(self._place(rows, ids), gradients)
        gradient = tf.math.unsorted_segment_sum(
            tf.where(first, totals, tf.zeros_like(totals)), place, tf.size(old)
        )
        gradient = tf.reshape(gradient, tf.shape(old))
        new, *slots = self.optimizer.updated(
            rows.values, gradient, rows.learning_rate, rows.iterations
        )
        moving = tf.not_equal(gradient, 0)
        return rows._replace(
            values=(tf.where(moving, self._projected(new, old), old), *slots),
            updates=rows.updates + tf.cast(moving, tf.int64),
            skipped=rows.skipped + left_out,
        )

    def write(self, rows: Rows) -> None:
        """Puts rows that `moved` gave back into the table, which may not have moved meanwhile."""
        self._check_outside("write")
        if rows.iterations is None:
            return
        first = tf.searchsorted(rows.ids, rows.ids)
        for held, values in zip(self.optimizer.targets(self.variable), rows.values, strict=True):
            held.scatter_update(tf.IndexedSlices(tf.gather(values, first), rows.ids))
        # Rows after the first of an example were moved by nothing.
        self.updates.scatter_add(tf.IndexedSlices(rows.updates, rows.ids))
        self.skipped.assign_add(rows.skipped)
        self.optimizer.iterations.assign(rows.iterations + 1)

    def _place(self, rows, ids):
        """Where each id is among the rows; the first place where it is there more than once."""
        ids = tf.cast(ids, tf.int64)
        if self.mode == "single":
            return tf.zeros_like(ids)
        place = tf.minimum(tf.searchsorted(rows.ids, ids), tf.maximum(tf.size(rows.ids) - 1, 0))
        if tf.executing_eagerly() and not rows.ids.shape[0]:
            return place
        found = tf.equal(tf.gather(rows.ids, place), ids)
        message = ["An example id is not one of the batch: a method gives those it was given."]
        with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(found), message)]):
            return tf.identity(place)

    def _check_outside(self, name):
        if tf.distribute.has_strategy() and (
            tf.distribute.in_cross_replica_context()
            or tf.distribute.get_strategy().num_replicas_in_sync > 1
        ):
            raise RuntimeError(
                f"ExampleWeights.{name} was called inside strategy.scope() or strategy.run(): "
                "gather the ids and gradients over the replicas and call it once, outside both."
            )

    def _totals(self, ids, gradients):
        """`optimizers.sum_duplicates` of the usable gradients, and how many rows were left out."""
        gradients = tf.cast(gradients, self.variable.dtype)
        usable = tf.math.is_finite(gradients * gradients)
        gradients = tf.where(usable, gradients, tf.zeros_like(gradients))
        ids, totals, first = optimizers.sum_duplicates(ids, gradients)
        overflowed = ~tf.math.is_finite(totals * totals)
        totals = tf.where(overflowed, tf.zeros_like(totals), totals)
        return ids, totals, first, _count(~usable) + _count(overflowed & first)

    def _update_all(self, ids, gradients):
        """Another optimizer may move any row: the gradient is dense, and every row projected."""
        if self.mode == "single":
            ids = tf.zeros_like(ids)
        ids, totals, first, left_out = self._totals(ids, gradients)
        self.skipped.assign_add(left_out)
        moving = first & tf.not_equal(totals, 0)

        def move():
            old = tf.identity(self.variable)
            gradient = tf.where(first, totals, tf.zeros_like(totals))
            gradient = tf.math.unsorted_segment_sum(gradient, ids, old.shape[0])
            self.optimizer.apply_gradients(
                [(gradient, self.variable)], skip_gradients_aggregation=True
            )
            self.variable.assign(self._projected(tf.identity(self.variable), old))
            return True

        tf.cond(tf.reduce_any(moving), move, lambda: False)
        self.updates.scatter_add(tf.IndexedSlices(tf.cast(moving, tf.int64), ids))

    def _projected(self, new, old):
        new = tf.where(tf.math.is_finite(new), new, old)
        return tf.clip_by_value(new, self.minimum, self.maximum)

    def values(self) -> np.ndarray:
        """Lambda of every example, [size]."""
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


def _initial_values(initial, rows: int, dtype: tf.DType) -> np.ndarray:
    start = np.asarray(initial, dtype.as_numpy_dtype)
    if start.shape not in ((), (rows,)):
        raise config.ConfigError(
            f"initial weights of shape {start.shape} do not fit: use a number or shape ({rows},)."
        )
    if not np.all(np.isfinite(start)):
        raise config.ConfigError(f"initial={initial} is not finite: start from a finite weight.")
    return np.array(np.broadcast_to(start, [rows]))


def _count(mask: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.cast(mask, tf.int64))
