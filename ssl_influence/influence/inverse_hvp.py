"""Products with a Hessian and with its inverse, for any model over any of its variables.

A vector is a nest of tensors, as a rule a list with one tensor a variable. Nothing of the size of a
matrix is formed.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from ssl_influence.influence import solve_info
from ssl_influence.per_example import dots

_log = logging.getLogger("ssl_influence")

Vector = Any
Product = Callable[[Vector], Vector]


def hvp(fn: Callable[[], tf.Tensor], variables: Sequence[tf.Variable]) -> Product:
    """The product v -> H v, with H the Hessian of `fn` by `variables`.

    Reverse mode over reverse mode: forward mode returns None through a nested tf.function.

    Args:
      fn: computes a scalar from the current variables, anew for each product.
      variables: those that H is over; `fn` need not depend on all of them.

    Returns:
      A function from one tensor a variable to the same, in eager mode or in a graph.
    """

    def product(vector: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                value = fn()
            slope = tf.add_n(
                [
                    tf.reduce_sum(gradient * tf.cast(part, gradient.dtype))
                    for gradient, part in zip(
                        _gradient(inner, value, variables), vector, strict=True
                    )
                ]
            )
        return _gradient(outer, slope, variables)

    return product


def gauss_newton_product(
    outputs_fn: Callable[[], tf.Tensor],
    curvature: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
    variables: Sequence[tf.Variable],
) -> Product:
    """The product v -> J^T A J v, by the generalized Gauss-Newton matrix of a loss of curvature A.

    It is the Hessian without the curvature of the model itself, hence never indefinite for a convex
    loss, and equals the Hessian where outputs are linear in the variables, as logits are in the
    last layer's (Martens, 2020, section 8). Influence taken with it and with damping says something
    of a network that is not at a minimum too (Bae et al., 2022).

    Args:
      outputs_fn: computes outputs [n, C], the logits of all rows, from the current variables.
      curvature: (outputs, tangent [n, C]) -> A tangent [n, C], row weights included; see
        `softmax_curvature`.
      variables: those that J is by.
    """

    def product(vector: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        with tf.GradientTape(persistent=True) as tape:
            outputs = outputs_fn()
        tangent = dots.push_forward(tape, outputs, vector, variables)
        return _gradient(tape, outputs, variables, curvature(outputs, tangent))

    return product


def softmax_curvature(logits: tf.Tensor, tangent: tf.Tensor, sample_weight: tf.Tensor) -> tf.Tensor:
    """w_i (diag p_i - p_i p_i^T) t_i of each row: the cross-entropy's curvature to fixed targets.

    Args:
      logits: [n, C], with p = softmax(logits).
      tangent: t [n, C].
      sample_weight: w [n].
    """
    p = tf.nn.softmax(logits)
    weighted = p * tangent
    centered = weighted - p * tf.reduce_sum(weighted, axis=1, keepdims=True)
    return sample_weight[:, tf.newaxis] * centered


def conjugate_gradient(
    hvp: Product,
    rhs: Vector,
    *,
    damping: float | tf.Tensor = 0.0,
    tolerance: float = 1e-6,
    max_iterations: int = 1000,
) -> tuple[Vector, solve_info.SolveInfo]:
    """Solves (H + damping I) x = rhs by conjugate gradients from 0 (Martens, 2010).

    Stops at the tolerance, at `max_iterations`, or where a direction has no positive curvature, and
    gives the iterate of the smallest residual so far, always finite. `residual` is computed from it
    anew, so that the drift of the recurrence in float32 shows.

    Args:
      hvp: v -> H v, on nests like `rhs`.
      rhs: any nest of tensors of one dtype.
      damping: added to the diagonal.
      tolerance: |rhs - (H + damping I) x| / |rhs| to reach.
      max_iterations: each takes one product; one more gives the residual.

    Returns:
      x, a nest like `rhs`, and SolveInfo. In eager mode an answer that did not converge is logged
      as a warning too.
    """
    given = [tf.convert_to_tensor(part) for part in tf.nest.flatten(rhs)]
    dtype = given[0].dtype
    # tf.cast would round a Python number to float32 first.
    damping = tf.cast(damping if tf.is_tensor(damping) else tf.constant(damping, dtype), dtype)

    def times(vector):
        product = tf.nest.flatten(hvp(tf.nest.pack_sequence_as(rhs, vector)))
        return _axpy(damping, vector, product)

    # In units of the right-hand side: the square of a confident network's gradient may underflow.
    unit = tf.reduce_max([tf.reduce_max(tf.abs(part)) for part in given])
    b = [tf.math.divide_no_nan(part, unit) for part in given]
    target = tolerance**2 * _dot(b, b)
    noise = tf.constant(100 * np.finfo(dtype.as_numpy_dtype).eps, dtype)
    zero, no = tf.zeros([], dtype), tf.constant(False)

    def unfinished(*state):
        s = _State(*state)
        return (s.best_square > target) & ~s.stopped

    def step(*state):
        s = _State(*state)
        product = times(s.direction)
        curvature = _dot(s.direction, product)
        per_length = tf.math.divide_no_nan(curvature, _dot(s.direction, s.direction))
        size = tf.maximum(s.size, tf.abs(per_length))
        going = curvature > 0
        alpha = tf.where(going, tf.math.divide_no_nan(s.square, curvature), zero)
        x = _axpy(alpha, s.direction, s.x)
        residual = _axpy(-alpha, product, s.residual)
        square = _dot(residual, residual)
        better = square < s.best_square
        return _State(
            k=s.k + tf.cast(going, tf.int32),
            x=x,
            residual=residual,
            direction=_axpy(tf.math.divide_no_nan(square, s.square), s.direction, residual),
            square=square,
            best=[tf.where(better, new, old) for new, old in zip(x, s.best, strict=True)],
            best_square=tf.where(better, square, s.best_square),
            size=size,
            stopped=~going,
            # Rounding alone makes a flat direction of a singular system slightly negative.
            negative=per_length < -noise * size,
        )

    start = [tf.zeros_like(part) for part in b]
    square = _dot(b, b)
    begin = _State(tf.constant(0), start, b, b, square, start, square, zero, no, no)
    end = _State(*tf.while_loop(unfinished, step, begin, maximum_iterations=max_iterations))

    left = _axpy(-1.0, times(end.best), b)
    residual = tf.sqrt(tf.math.divide_no_nan(_dot(left, left), square))
    finite = tf.math.is_finite(residual)
    info = solve_info.SolveInfo(
        residual=tf.where(finite, residual, tf.constant(np.inf, dtype)),
        iterations=end.k,
        negative_curvature=end.negative,
        converged=finite & (residual <= tolerance) & ~end.negative,
        solver=tf.constant(solve_info.SOLVERS.index("conjugate_gradient")),
    )
    if tf.executing_eagerly() and not info.converged:
        _log.warning(
            "Conjugate gradients stopped at a relative residual of %.2g after %d iterations%s: a "
            "larger damping makes the system better conditioned.",
            info.residual,
            info.iterations,
            ", at negative curvature" if info.negative_curvature else "",
        )
    return tf.nest.pack_sequence_as(rhs, [part * unit for part in end.best]), info


class _State(NamedTuple):
    k: tf.Tensor
    x: list
    residual: list
    direction: list
    square: tf.Tensor
    best: list
    best_square: tf.Tensor
    size: tf.Tensor
    stopped: tf.Tensor
    negative: tf.Tensor


def _gradient(tape, target, variables, output_gradients=None):
    """Dense gradients; zeros for a variable without influence, as a Hessian has."""
    gradients = tape.gradient(target, variables, output_gradients=output_gradients)
    return [
        tf.zeros_like(variable) if gradient is None else tf.convert_to_tensor(gradient)
        for gradient, variable in zip(gradients, variables, strict=True)
    ]


def _dot(a, b):
    return tf.add_n([tf.reduce_sum(x * y) for x, y in zip(a, b, strict=True)])


def _axpy(alpha, x, y):
    return [b + alpha * a for a, b in zip(x, y, strict=True)]
