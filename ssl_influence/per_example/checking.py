"""Is what was had for a batch what single examples give?"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from ssl_influence import config
from ssl_influence.per_example import products, rows


def check(
    model: Callable[..., Any],
    inputs: Any,
    targets: Any,
    loss_fn: Callable[[Any, Any], tf.Tensor],
    *,
    variables: Sequence[Any] | None = None,
    method: str = "kernels",
    conv_method: str = "auto",
    examples: int = 4,
    tolerance: float = 1e-4,
) -> float:
    """Compares a method with one example at a time, on the first few examples.

    It tells of a layer of one's own whose kernel is wrong, of a model that mixes examples, and of
    TensorFlow operations whose derivatives are wrong. In eager mode only.

    Args:
      model: as for `rows.gradients`, as are inputs, targets, loss_fn and variables.
      inputs: a batch.
      targets: likewise.
      loss_fn: (outputs, targets) -> [B].
      variables: what the gradient is taken by.
      method: what is checked: one of `rows.METHODS`, or of `products.METHODS`, whose products with
        a fixed vector are compared.
      conv_method: of "kernels".
      examples: how many.
      tolerance: largest difference that is let pass, relative to the largest entry of the same
        variable's gradients (or to 1e-3 of the largest of any variable's), or of the products.

    Returns:
      The largest relative difference.

    Raises:
      ConfigError: the difference is above the tolerance; the variable is named.
    """
    variables = list(model.trainable_variables if variables is None else variables)
    few = [tf.convert_to_tensor(x)[:examples] for x in rows.leaves((inputs, targets))]
    if not few[0].shape[0]:
        raise config.ConfigError("There is no example to check with: give at least one.")
    inputs, targets = rows.refilled((inputs, targets), few)
    arguments = (model, inputs, targets, loss_fn)
    expected = rows.gradients(*arguments, variables=variables, method="loop")
    if method in products.METHODS:
        vectors = [_vector(v) for v in variables]
        found = [products.dots(*arguments, vectors, variables=variables, method=method)]
        expected = [
            tf.add_n(
                [
                    tf.cast(tf.tensordot(g, v, v.shape.rank), found[0].dtype)
                    for g, v in zip(expected, vectors, strict=True)
                ]
            )
        ]
        names = ["the products"]
    else:
        found = rows.gradients(
            *arguments, variables=variables, method=method, conv_method=conv_method
        )
        names = [f"{variable.name!r}" for variable in variables]
    scales = [float(tf.reduce_max(tf.abs(g))) for g in expected]
    differences = []
    for name, a, b, scale in zip(names, found, expected, scales, strict=True):
        scale = max(scale, 1e-3 * max(scales))
        difference = float(tf.reduce_max(tf.abs(a - b)))
        differences.append(difference / scale if scale else difference)
        if not math.isfinite(differences[-1]):
            raise config.ConfigError(
                f"By method={method!r} {name} of the batch, or of its examples one by one, are not "
                "finite: check inputs, variables and loss."
            )
        if differences[-1] > tolerance:
            raise config.ConfigError(
                f"By method={method!r} {name} of the batch differ from those of single examples by "
                f"{differences[-1]:.2g} of their size (tolerance {tolerance}): the model mixes "
                "examples, or a derivative of one of its layers is wrong."
            )
    return max(differences, default=0.0)


def _vector(variable):
    """Fixed, without structure, of the variable's shape and dtype."""
    index = tf.range(math.prod(variable.shape), dtype=tf.float64)
    vector = tf.reshape(tf.sin(1.7 * index**1.1 + 1.0), variable.shape)
    return tf.cast(vector, variable.dtype)
