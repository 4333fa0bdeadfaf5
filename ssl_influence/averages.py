"""Exponential moving average of a model's weights, evaluated beside the weights themselves."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import tensorflow as tf
import tf_keras as keras

from ssl_influence import config, replicas

T = TypeVar("T")


class ExponentialMovingAverage(tf.Module):
    """Shadow copies `s <- decay s + (1 - decay) v`, which start at the variables' own values.

    Args:
      variables: floating-point variables to follow.
      decay: in [0, 1); 0 makes the shadow equal to the variable.
    """

    def __init__(self, variables: Sequence[tf.Variable], decay: float):
        super().__init__(name="ema")
        self._decay = decay
        # On each replica where the variable is, and with a copy of its own where that has one.
        self.shadow = [
            tf.Variable(
                v,
                trainable=False,
                dtype=v.dtype,
                synchronization=v.synchronization,
                aggregation=v.aggregation,
            )
            for v in variables
        ]
        # A list as an attribute would put the model's variables under "ema" in checkpoints.
        self._pairs = lambda: zip(self.shadow, variables, strict=True)

    def update(self) -> None:
        """Moves every shadow one step toward its variable; call after each theta step."""

        def move(shadow, variable):
            shadow.assign_sub((1.0 - self._decay) * (shadow - variable))

        _, variables = zip(*self._pairs(), strict=True)
        replicas.move_all(self.shadow, move, variables)

    def applied(self, compute: Callable[[], T]) -> T:
        """compute() while the variables hold the averages; may be called in a tf.function."""
        _, variables = zip(*self._pairs(), strict=True)
        own = [tf.identity(variable) for variable in variables]
        replicas.move_all(variables, _assign, [tf.identity(shadow) for shadow in self.shadow])
        result = compute()
        replicas.move_all(variables, _assign, own)
        return result

    def assign(self) -> None:
        """Gives the variables the averages, for good; outside of a replica."""
        for shadow, variable in self._pairs():
            for source, copy in zip(
                replicas.copies(shadow), replicas.copies(variable), strict=True
            ):
                copy.assign(source)

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """Within the context the variables hold the averages, after it their own values.

        To be entered outside of a replica.
        """
        copies = [copy for _, variable in self._pairs() for copy in replicas.copies(variable)]
        own = [copy.numpy() for copy in copies]
        self.assign()
        try:
            yield
        finally:
            for copy, value in zip(copies, own, strict=True):
                copy.assign(value)


def _assign(variable: tf.Variable, value: tf.Tensor) -> None:
    variable.assign(value)


def of_model(
    model: keras.Model, optimizer_config: config.OptimizerConfig
) -> ExponentialMovingAverage:
    """The average of a model whose variables and decay are those that `optimizer_config` names."""
    followed = model.trainable_variables
    if optimizer_config.ema_variables == "all":
        followed = [v for v in model.variables if v.dtype.is_floating]
    return ExponentialMovingAverage(followed, optimizer_config.ema_decay)
