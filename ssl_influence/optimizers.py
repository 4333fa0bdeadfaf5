"""M(asked)-Adam for the example weights (Algorithm A1), and the optimizers of the network.

`m_adam_update` is the mathematics in the paper's symbols, without state. `MAdam` keeps the state as
a Keras optimizer. Both move only the coordinates that have a gradient; everything that belongs to
another coordinate stays bit-identical. The cost of a sparse update grows with the batch, not with
the number of examples.

`make_optimizer` gives what moves the network: SGD (`Nesterov`) or Adam under a `Schedule`.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf
import tf_keras as keras

from ssl_influence import config

BIAS_CORRECTIONS = ("per_example", "global")


class MAdamState(NamedTuple):
    """Lambda and its statistics: `lam`, `m`, `v` [...] and the step count `t` ([...] or scalar)."""

    lam: tf.Tensor
    m: tf.Tensor
    v: tf.Tensor
    t: tf.Tensor


def m_adam_update(
    lam: tf.Tensor,
    m: tf.Tensor,
    v: tf.Tensor,
    t: tf.Tensor,
    g: tf.Tensor,
    *,
    learning_rate: float | tf.Tensor = 0.01,
    beta_1: float = 0.9,
    beta_2: float = 0.999,
    epsilon: float = 1e-8,
    bias_correction: str = "per_example",
) -> MAdamState:
    """One step of Algorithm A1 with the mask M = 1[g != 0].

    Args:
      lam: Lambda, any shape and floating dtype, which the others share.
      m: running average of g.
      v: running average of g * g.
      t: steps taken so far, any numeric dtype. "per_example": the shape of lam. "global": a scalar.
      g: the gradient.
      learning_rate: alpha.
      beta_1: decay rate of m, in [0, 1).
      beta_2: decay rate of v, in [0, 1).
      epsilon: added to sqrt(v-hat).
      bias_correction: "per_example" advances t with the mask, which makes every coordinate an Adam
        of its own; "global" advances it at each call, as the algorithm is printed.

    Returns:
      The new `MAdamState`. Where g is 0, lam, m, v and a per-example t are the old, bit for bit.
    """
    lam = tf.convert_to_tensor(lam)
    m, v, g = (tf.convert_to_tensor(x, lam.dtype) for x in (m, v, g))
    t = tf.convert_to_tensor(t)
    _check_choice(bias_correction)
    mask = tf.not_equal(g, 0)
    t_new = t + (tf.cast(mask, t.dtype) if bias_correction == "per_example" else tf.ones_like(t))
    m_new = m + (beta_1 - 1) * m + (1 - beta_1) * g
    v_new = v + (beta_2 - 1) * v + (1 - beta_2) * g * g
    # A masked coordinate may still be at t = 0; its (discarded) step must not divide by zero.
    steps = tf.cast(tf.maximum(t_new, tf.ones_like(t_new)), lam.dtype)
    m_hat = m_new / _one_minus_power(beta_1, steps)
    v_hat = v_new / _one_minus_power(beta_2, steps)
    if tf.is_tensor(learning_rate):  # a cast of a Python float would pass through float32
        learning_rate = tf.cast(learning_rate, lam.dtype)
    lam_new = lam - learning_rate * m_hat / (tf.sqrt(v_hat) + epsilon)
    return MAdamState(
        tf.where(mask, lam_new, lam), tf.where(mask, m_new, m), tf.where(mask, v_new, v), t_new
    )


def _one_minus_power(beta: float, steps: tf.Tensor) -> tf.Tensor:
    # 1 - beta**t the plain way keeps only four digits of 1 - 0.999 in float32.
    if beta == 0:
        return tf.ones_like(steps)
    return -tf.math.expm1(steps * tf.constant(math.log(beta), steps.dtype))


def _check_choice(bias_correction: str) -> None:
    if bias_correction not in BIAS_CORRECTIONS:
        raise config.ConfigError(
            f"bias_correction={bias_correction!r} is not one of {', '.join(BIAS_CORRECTIONS)}."
        )


def sum_duplicates(ids: tf.Tensor, values: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Sums the rows that share an id, with static shapes and in an order of its own.

    Rows are sorted by (id, value), so the sums are bit-identical under any permutation of the rows.
    On a GPU that needs `tf.config.experimental.enable_op_determinism` (segment sums use atomics).

    Args:
      ids: integer [R].
      values: [R, ...].

    Returns:
      ids sorted [R]; totals [R, ...], where every row of one id holds the sum over that id; first
      [R], True at the first row of each id. Scattering all rows is safe: repeated rows are equal.
    """
    ids, values = tf.convert_to_tensor(ids), tf.convert_to_tensor(values)
    shape = tf.shape(values)
    rows = shape[0]
    columns = tf.transpose(tf.reshape(values, [rows, tf.reduce_prod(shape[1:])]))
    by_value = tf.argsort(columns, stable=True)
    by_id = tf.argsort(tf.gather(ids, by_value), stable=True)
    order = tf.gather(by_value, by_id, batch_dims=1)
    ordered = tf.transpose(tf.gather(columns, order, batch_dims=1))
    ids = tf.sort(ids)
    first = tf.concat([tf.ones_like(ids[:1], tf.bool), tf.not_equal(ids[1:], ids[:-1])], axis=0)
    segments = tf.cumsum(tf.cast(first, tf.int32)) - 1
    totals = tf.gather(tf.math.unsorted_segment_sum(ordered, segments, rows), segments)
    totals = tf.ensure_shape(tf.reshape(totals, shape), values.shape)
    return ids, totals, first


class RowOptimizer(keras.optimizers.Optimizer):
    """An optimizer whose sparse update reads and writes the named rows alone.

    What it does to a row is `updated`, which has no state: so rows can be moved as tensors, on one
    device or the same on many, and be written back later.
    """

    def targets(self, variable: tf.Variable) -> list[tf.Variable]:
        """A variable that this optimizer was built on, and the slots it has beside it."""
        return [variable]

    def updated(
        self,
        old: Sequence[tf.Tensor],
        gradient: tf.Tensor,
        learning_rate: tf.Tensor,
        iterations: tf.Tensor,
    ) -> list[tf.Tensor]:
        """The rows after a step; where the gradient is 0, they have to be the old, bit for bit.

        Args:
          old: rows of the variable and of its slots, as `targets` orders them, [R, ...] each.
          gradient: [R, ...].
          learning_rate: scalar.
          iterations: steps taken so far, int64 scalar.
        """
        raise NotImplementedError

    def update_step(self, gradient, variable):
        """Moves the coordinates, or the rows, that `gradient` names."""
        targets, scalars = self.targets(variable), (self.learning_rate, self.iterations)
        if isinstance(gradient, tf.IndexedSlices):
            ids, g, _ = sum_duplicates(gradient.indices, gradient.values)
            new = self.updated([tf.gather(target, ids) for target in targets], g, *scalars)
            for target, value in zip(targets, new, strict=True):
                target.scatter_update(tf.IndexedSlices(value, ids))
        else:
            old = [tf.convert_to_tensor(target) for target in targets]
            for target, value in zip(targets, self.updated(old, gradient, *scalars), strict=True):
                target.assign(value)

    def current_learning_rate(self) -> tf.Tensor:
        """The learning rate of the next step, a scalar, by the schedule where there is one."""
        self._compute_current_learning_rate()
        return tf.identity(self.learning_rate)

    def _deduplicate_sparse_grad(self, grads):
        # Keras sums duplicates with tf.unique, in the order of the rows and with dynamic shapes.
        return grads


@keras.utils.register_keras_serializable(package="ssl_influence")
class MAdam(RowOptimizer):
    """M-Adam as a Keras optimizer, with slots m, v and (if "per_example") t beside each variable.

    A dense gradient is masked by 1[g != 0]. For `tf.IndexedSlices` the named rows are summed over
    duplicates and then masked; no others are read or written. Both run under `jit_compile=True`,
    where XLA for CPUs copies every table that it scatters into, at a cost that grows with its size.

    Args:
      learning_rate: alpha, a number or a Keras schedule.
      beta_1, beta_2: decay rates in [0, 1).
      epsilon: added to sqrt(v-hat).
      bias_correction: "per_example" counts t per coordinate, so that a first touch moves it by
        learning_rate at any age of its neighbors; "global" counts calls (Algorithm A1 as printed).
      name: of the optimizer.
      **kwargs: those of `keras.optimizers.Optimizer`.

    The slot t has the variable's dtype: in float32 it counts exactly to 2**24.

    Raises:
      ConfigError: for a hyperparameter out of range.
    """

    def __init__(
        self,
        learning_rate=0.01,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-8,
        bias_correction: str = "per_example",
        name: str = "MAdam",
        **kwargs,
    ):
        _check_choice(bias_correction)
        for label, value in (("beta_1", beta_1), ("beta_2", beta_2)):
            if not 0 <= value < 1:
                raise config.ConfigError(f"{label}={value} is out of range: it must lie in [0, 1).")
        if not epsilon > 0:
            raise config.ConfigError(f"epsilon={epsilon} is out of range: it must be above 0.")
        # The Keras default of 0 would still read and write every row for a decay of nothing.
        super().__init__(name=name, **{"weight_decay": None, **kwargs})
        self._learning_rate = self._build_learning_rate(learning_rate)
        self.beta_1 = beta_1
        self.beta_2 = beta_2
        self.epsilon = epsilon
        self.bias_correction = bias_correction

    def build(self, var_list):
        """Creates the slots; a second call does nothing."""
        super().build(var_list)
        if getattr(self, "_built", False):
            return
        self._built = True
        slots = ("m", "v", "t") if self.bias_correction == "per_example" else ("m", "v")
        self._slots = {
            slot: [self.add_variable_from_reference(v, variable_name=slot) for v in var_list]
            for slot in slots
        }

    def slot(self, variable: tf.Variable, name: str) -> tf.Variable:
        """The slot "m", "v" or "t" of a variable this optimizer was built on."""
        return self._slots[name][self._index_dict[self._var_key(variable)]]

    def targets(self, variable):
        """The variable and its slots."""
        return [variable] + [self.slot(variable, name) for name in self._slots]

    def updated(self, old, gradient, learning_rate, iterations):
        """`m_adam_update`, see `RowOptimizer.updated`."""
        lam, m, v = old[:3]
        new = m_adam_update(
            lam,
            m,
            v,
            old[3] if self.bias_correction == "per_example" else iterations,
            gradient,
            learning_rate=learning_rate,
            beta_1=self.beta_1,
            beta_2=self.beta_2,
            epsilon=self.epsilon,
            bias_correction=self.bias_correction,
        )
        return list(new[: len(old)])

    def get_config(self):
        """Hyperparameters from which `from_config` makes an equal optimizer."""
        return {
            **super().get_config(),
            "learning_rate": self._serialize_hyperparameter(self._learning_rate),
            "beta_1": self.beta_1,
            "beta_2": self.beta_2,
            "epsilon": self.epsilon,
            "bias_correction": self.bias_correction,
        }


@keras.utils.register_keras_serializable(package="ssl_influence")
class PlainSGD(RowOptimizer):
    """theta <- theta - alpha g, without state.

    The SGD of Keras keeps a momentum of the variable's size even where momentum is 0, and reads and
    writes all of it at a sparse update.
    """

    def __init__(self, learning_rate=0.01, name="PlainSGD", **kwargs):
        super().__init__(name=name, **{"weight_decay": None, **kwargs})
        self._learning_rate = self._build_learning_rate(learning_rate)

    def updated(self, old, gradient, learning_rate, iterations):
        """See `RowOptimizer.updated`."""
        (rows,) = old
        return [rows - tf.cast(learning_rate, rows.dtype) * gradient]

    def get_config(self):
        """Hyperparameters from which `from_config` makes an equal optimizer."""
        rate = self._serialize_hyperparameter(self._learning_rate)
        return {**super().get_config(), "learning_rate": rate}


def make_weight_optimizer(settings: config.WeightConfig) -> keras.optimizers.Optimizer:
    """What moves the example weights: M-Adam, or what the paper's ablation compares it with.

    Adam has the constants of M-Adam, and its moments decay at every update for every example.
    """
    if settings.optimizer == "adam":
        return keras.optimizers.Adam(settings.learning_rate, epsilon=1e-8, jit_compile=False)
    if settings.optimizer == "sgd":
        return PlainSGD(settings.learning_rate, jit_compile=False)
    return MAdam(settings.learning_rate, jit_compile=False)


@keras.utils.register_keras_serializable("ssl_influence")
class Schedule(keras.optimizers.schedules.LearningRateSchedule):
    """Linear warm-up, then one of the schedules that `config.OptimizerConfig` describes.

    Args:
      name: "cosine", "half_cosine", "linear" or "constant".
      learning_rate: alpha.
      steps: of the whole run.
      warmup_steps: of those, the ones over which the rate grows from 0.
    """

    def __init__(self, name: str, learning_rate: float, steps: int, warmup_steps: int = 0):
        self.name = name
        self.learning_rate = learning_rate
        self.steps = steps
        self.warmup_steps = warmup_steps

    def __call__(self, step):
        """The learning rate at a step, counted from 0."""
        step = tf.cast(step, tf.float32)
        p = (step - self.warmup_steps) / max(self.steps - self.warmup_steps, 1)
        p = tf.clip_by_value(p, 0.0, 1.0)
        factor = {
            "cosine": lambda: tf.cos(7.0 * math.pi / 16.0 * p),
            "linear": lambda: 1.0 - tf.minimum(step / self.steps, 1.0),
            "half_cosine": lambda: 0.004 + 0.996 * 0.5 * (1.0 + tf.cos(math.pi * p)),
            "constant": lambda: tf.ones_like(p),
        }[self.name]()
        if self.warmup_steps:
            factor = tf.where(step < self.warmup_steps, step / self.warmup_steps, factor)
        return self.learning_rate * factor

    def get_config(self):
        """The arguments that make an equal schedule."""
        return {
            "name": self.name,
            "learning_rate": self.learning_rate,
            "steps": self.steps,
            "warmup_steps": self.warmup_steps,
        }


@keras.utils.register_keras_serializable("ssl_influence")
class Nesterov(keras.optimizers.SGD):
    """SGD with Nesterov momentum, m <- mu m - alpha g and theta <- theta + mu m - alpha g.

    One op a variable instead of the eight of Keras, which saves 8 ms a step of WRN-28-2 on a CPU,
    about what the moving average and the gradient norm cost.
    """

    def __init__(self, learning_rate=0.03, momentum=0.9, name="Nesterov", **kwargs):
        kwargs["nesterov"] = True
        super().__init__(learning_rate, momentum, name=name, **kwargs)

    def update_step(self, gradient, variable):
        """Moves a variable and its momentum; without momentum or with few rows as Keras does."""
        if not self.momentum or isinstance(gradient, tf.IndexedSlices):
            super().update_step(gradient, variable)
            return
        accumulator = self.momentums[self._index_dict[self._var_key(variable)]]
        tf.raw_ops.ResourceApplyKerasMomentum(
            var=variable.handle,
            accum=accumulator.handle,
            lr=tf.cast(self.learning_rate, variable.dtype),
            grad=gradient,
            momentum=tf.cast(self.momentum, variable.dtype),
            use_nesterov=True,
        )


@keras.utils.register_keras_serializable("ssl_influence")
class Adam(keras.optimizers.Adam):
    """Adam in one op a variable, whose bias correction may be left out as in BERT's own code.

    Rows of a table without a gradient have one of 0: their moments decay, as those of others do.
    """

    def __init__(
        self,
        learning_rate=0.001,
        epsilon: float = 1e-7,
        bias_correction: bool = True,
        name="Adam",
        **kwargs,
    ):
        super().__init__(learning_rate, epsilon=epsilon, name=name, **kwargs)
        self.bias_correction = bias_correction

    def update_step(self, gradient, variable):
        """Moves a variable and its moments."""
        index = self._index_dict[self._var_key(variable)]
        power = tf.cast(self.iterations + 1, variable.dtype)
        beta_1, beta_2 = (tf.cast(beta, variable.dtype) for beta in (self.beta_1, self.beta_2))
        none = tf.zeros([], variable.dtype)  # divides by 1 - 0
        tf.raw_ops.ResourceApplyAdam(
            var=variable.handle,
            m=self._momentums[index].handle,
            v=self._velocities[index].handle,
            beta1_power=tf.pow(beta_1, power) if self.bias_correction else none,
            beta2_power=tf.pow(beta_2, power) if self.bias_correction else none,
            lr=tf.cast(self.learning_rate, variable.dtype),
            beta1=beta_1,
            beta2=beta_2,
            epsilon=tf.cast(self.epsilon, variable.dtype),
            grad=tf.convert_to_tensor(gradient),
        )

    def get_config(self):
        """The arguments that make an equal optimizer."""
        return {**super().get_config(), "bias_correction": self.bias_correction}


def total(parts: list[tf.Tensor | tf.IndexedSlices]) -> tf.Tensor | tf.IndexedSlices:
    """The sum of gradients; sparse where all are, with static shapes and each row once.

    A row that several name is their sum in the place of one, and zeros in the places of the others,
    under the index 0. So `tf.linalg.global_norm` and clipping by it, which look at values alone,
    are right.
    """
    if not all(isinstance(part, tf.IndexedSlices) for part in parts):
        dense = [tf.convert_to_tensor(part) for part in parts]
        return dense[0] if len(dense) == 1 else tf.add_n(dense)
    ids = tf.concat([part.indices for part in parts], 0)
    values = tf.concat([part.values for part in parts], 0)
    order = tf.argsort(ids, stable=True)
    ids, values = tf.gather(ids, order), tf.gather(values, order)
    first = tf.concat([tf.ones_like(ids[:1], tf.bool), tf.not_equal(ids[1:], ids[:-1])], 0)
    segments = tf.cumsum(tf.cast(first, tf.int32)) - 1
    rows = ids.shape[0] or tf.shape(ids)[0]
    sums = tf.math.unsorted_segment_sum(values, segments, rows)
    sum_ids = tf.maximum(tf.math.unsorted_segment_max(ids, segments, rows), 0)
    return tf.IndexedSlices(sums, sum_ids, parts[0].dense_shape)


def clip(
    gradients: list[tf.Tensor | tf.IndexedSlices], norm: tf.Tensor, limit: float | None
) -> list[tf.Tensor | tf.IndexedSlices]:
    """The gradients times min(1, limit / norm), norm being that of all together."""
    if limit is None:
        return gradients
    scale = limit / tf.maximum(norm, limit)
    return [
        tf.IndexedSlices(g.values * tf.cast(scale, g.dtype), g.indices, g.dense_shape)
        if isinstance(g, tf.IndexedSlices)
        else g * tf.cast(scale, g.dtype)
        for g in gradients
    ]


def make_optimizer(
    settings: config.OptimizerConfig, train_steps: int
) -> keras.optimizers.Optimizer:
    """The theta optimizer, with decoupled weight decay; the coupled one is inside the objective."""
    rate = Schedule(settings.schedule, settings.learning_rate, train_steps, settings.warmup_steps)
    decay = settings.decoupled_weight_decay or None
    if settings.name == "adam":
        return Adam(
            rate,
            settings.adam_epsilon,
            settings.adam_bias_correction,
            weight_decay=decay,
            jit_compile=False,
        )
    return Nesterov(rate, settings.momentum, weight_decay=decay, jit_compile=False)
