"""Products with the Hessian or the Gauss-Newton matrix of any model, over any of its variables.

Nothing of the size of a matrix is formed. The model runs once, when a product is made, and is
differentiated at the values that its variables then have: later values do not count, and the
activations are held for as long as the product is. Each product is backward passes alone, with
none of the model's random or stateful ops, in eager mode and in a graph, also where it is made
outside of a tf.while_loop and called in its body, and with jit_compile=True.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from ssl_influence import config
from ssl_influence.influence import row_curvature

Vector = Any
Product = Callable[[Vector], Vector]


def hvp(fn: Callable[[], tf.Tensor], variables: Sequence[tf.Variable]) -> Product:
    """The product v -> H v, with H the Hessian of `fn` by `variables`.

    Reverse mode over reverse mode: forward mode returns None through a nested tf.function. The
    gradient is recorded along with the forward pass, so that a product costs one backward pass
    through both.

    Args:
      fn: computes a scalar from the current variables; it is called once, here.
      variables: those that H is over; `fn` need not depend on all of them.

    Returns:
      A function from one tensor a variable to the same, in the variables' dtypes.
    """
    with tf.GradientTape(persistent=True) as outer:
        with tf.GradientTape() as inner:
            value = fn()
        slopes = _dense(inner.gradient(value, variables))

    def product(vector: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return _pull_back(outer, slopes, vector, variables)

    return product


def gauss_newton_product(
    outputs_fn: Callable[[], tf.Tensor],
    curvature: Callable[..., tf.Tensor],
    variables: Sequence[tf.Variable],
) -> Callable[..., Vector]:
    """The product v -> J^T A J v, by the generalized Gauss-Newton matrix of a loss of curvature A.

    It is the Hessian without the curvature of the model itself, hence never indefinite for a convex
    loss, and equals the Hessian where outputs are linear in the variables, as logits are in the
    last layer's (Martens, 2020, section 8). Influence taken with it and with damping says something
    of a network that is not at a minimum too (Bae et al., 2022).

    Args:
      outputs_fn: computes outputs [n, C], the logits of all rows, from the current variables; it is
        called once, here.
      curvature: (outputs, tangent [n, C], *others) -> A tangent [n, C]; see `softmax_curvature`.
      variables: those that J is by; the outputs need not depend on all of them.

    Returns:
      A function (v, *others) from one tensor a variable to the same, in the variables' dtypes; what
      follows v is handed to `curvature`.

    Raises:
      ConfigError: the outputs depend on no variable, or, at the first product, cannot be
        differentiated twice (J v is the derivative of u -> J^T u, along v).
    """
    with tf.GradientTape(persistent=True) as primal:
        outputs = outputs_fn()
    with tf.GradientTape(persistent=True) as linear:
        probe = tf.zeros_like(outputs)
        linear.watch(probe)
        pulled = _dense(primal.gradient(outputs, variables, output_gradients=probe))
    if all(gradient is None for gradient in pulled):
        raise config.ConfigError(
            f"The outputs depend on none of the {len(variables)} variables: name those that the "
            "model computes them with."
        )

    def product(vector: Sequence[tf.Tensor], *others: Any) -> list[tf.Tensor]:
        [tangent] = _pull_back(linear, pulled, vector, [probe], or_zeros=False)
        if tangent is None:
            raise config.ConfigError(
                "The model's gradient has no gradient of its own, as that of a bilinear "
                "upsampling: use a layer that can be differentiated twice."
            )
        return _pull_back(primal, [outputs], [curvature(outputs, tangent, *others)], variables)

    return product


def softmax_curvature(
    logits: tf.Tensor,
    tangent: tf.Tensor,
    sample_weight: tf.Tensor,
    squared_weight: tf.Tensor | None = None,
) -> tf.Tensor:
    """(w_i J_i + v_i J_i J_i) t_i of each row, with J_i = diag p_i - p_i p_i^T, [n, C].

    The first is a cross-entropy's curvature to fixed targets, the second a Brier score's without
    what vanishes where predictions equal targets; see `row_curvature`.

    Args:
      logits: [n, C], with p = softmax(logits).
      tangent: t [n, C].
      sample_weight: w [n].
      squared_weight: v [n]; None is 0.
    """
    p = tf.nn.softmax(logits)
    return row_curvature.RowCurvature(p, sample_weight, squared_weight).times(tangent)


def _dense(gradients):
    """The gradients without sparse ones; None stays None."""
    return [None if part is None else tf.convert_to_tensor(part) for part in gradients]


def _pull_back(tape, targets, weights, sources, or_zeros=True):
    """sum_t <weight_t, d target_t / d source> for each source; a target of None counts as 0."""
    pairs = [(t, w) for t, w in zip(targets, weights, strict=True) if t is not None]
    found = [None] * len(sources)
    if pairs:
        seeds = [tf.cast(weight, target.dtype) for target, weight in pairs]
        kept = [target for target, _ in pairs]
        found = _dense(tape.gradient(kept, sources, output_gradients=seeds))
    if not or_zeros:
        return found
    return [
        tf.zeros_like(source) if part is None else part
        for part, source in zip(found, sources, strict=True)
    ]
