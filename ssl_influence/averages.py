"""Exponential moving average of a model's weights, evaluated beside the weights themselves."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import tensorflow as tf
import tf_keras as keras

from ssl_influence import config

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
        self.shadow = [tf.Variable(v, trainable=False, dtype=v.dtype) for v in variables]
        # A list as an attribute would put the model's variables under "ema" in checkpoints.
        self._pairs = lambda: zip(self.shadow, variables, strict=True)

    def update(self) -> None:
        """Moves every shadow one step toward its variable; call after each theta step."""
        for shadow, variable in self._pairs():
            shadow.assign_sub((1.0 - self._decay) * (shadow - variable))

    def applied(self, compute: Callable[[], T]) -> T:
        """compute() while the variables hold the averages; may be called in a tf.function."""
        own = [tf.identity(variable) for _, variable in self._pairs()]
        self.assign()
        result = compute()
        for (_, variable), value in zip(self._pairs(), own, strict=True):
            variable.assign(value)
        return result

    def assign(self) -> None:
        """Gives the variables the averages, for good."""
        for shadow, variable in self._pairs():
            variable.assign(shadow)

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """Within the context the variables hold the averages, after it their own values."""
        own = [variable.numpy() for _, variable in self._pairs()]
        self.assign()
        try:
            yield
        finally:
            for (_, variable), value in zip(self._pairs(), own, strict=True):
                variable.assign(value)


def of_model(
    model: keras.Model, optimizer_config: config.OptimizerConfig
) -> ExponentialMovingAverage:
    """The average of a model whose variables and decay are those that `optimizer_config` names."""
    followed = model.trainable_variables
    if optimizer_config.ema_variables == "all":
        followed = [v for v in model.variables if v.dtype.is_floating]
    return ExponentialMovingAverage(followed, optimizer_config.ema_decay)
