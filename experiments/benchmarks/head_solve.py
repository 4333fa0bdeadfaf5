"""Solves of the last layer's system, by the library and as autodiff gives them."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from experiments.benchmarks import timing
from ssl_influence import config as config_lib
from ssl_influence.influence import softmax_head

DIRECT_SIZE = 2500  # the largest D * C of the rows that form the Hessian
VALIDATION_ROWS = 320
STEP = 0.1  # of the descent between a solve and the next, which starts from its answer


class Problem(NamedTuple):
    """Rows, targets and the right-hand side of a solve, in float32."""

    x: tf.Tensor
    kernel: tf.Tensor
    target: tf.Tensor
    weight: tf.Tensor
    rhs: tf.Tensor
    l2: tf.Tensor

    @property
    def arguments(self) -> tuple[tf.Tensor, ...]:
        """What `softmax_head.solve` takes by position."""
        return self.x, tf.matmul(self.x, self.kernel), self.weight, self.rhs


def measure(case: str, config: config_lib.Config, repeats: int) -> timing.Rows:
    """The rows of a case solve_DxCxn."""
    size = case.removeprefix("solve_")
    d, c, n = map(int, size.split("x"))
    damping = config.weights.damping
    before = problem(d, c, n, config.optimizer.weight_decay)
    now = descend(before)
    previous, _ = solver("cg", damping)(*before.arguments, before.l2, tf.zeros_like(before.rhs))
    cold = tf.zeros_like(previous)
    small = d * c <= DIRECT_SIZE
    functions = {
        method: (solver(method, damping), (*now.arguments, now.l2, cold))
        for method in (("cholesky", "cg", "auto") if small else ("cg",))
    }
    functions["cg_warm"] = functions["cg"][0], (*now.arguments, now.l2, previous)
    if small:
        functions["autodiff"] = autodiff(damping), tuple(now)
    answers = {name: function(*arguments) for name, (function, arguments) in functions.items()}
    calls = {
        f"solve_{name}_{size}": lambda function=function, arguments=arguments: function(*arguments)[
            0
        ].numpy()
        for name, (function, arguments) in functions.items()
    }
    rows = timing.interleaved(calls, repeats, warmup=1)
    rows[f"all_{size}"] = {"peak_memory_bytes": timing.peak_memory()}
    exact = reference(now, damping)
    for name, (answer, iterations) in answers.items():
        difference = np.abs(answer.numpy() - exact).max() / np.abs(exact).max()
        row = rows[f"solve_{name}_{size}"]
        row |= {"iterations": int(iterations), "relative_difference": float(difference)}
    return rows


def problem(d: int, c: int, n: int, l2: float) -> Problem:
    """Inputs like those that leave a rectified layer, of a head that is fairly sure of itself."""
    rng = np.random.default_rng(0)
    kernel = 3 * rng.normal(size=(d, c)) / np.sqrt(d)

    def inputs(rows):
        x = np.maximum(rng.normal(size=(rows, d)) + 0.3, 0)
        x[:, -1] = 1  # the bias
        return tf.constant(x, tf.float32)

    x, validation, kernel = inputs(n), inputs(VALIDATION_ROWS), tf.constant(kernel, tf.float32)
    labels = tf.constant(rng.integers(c, size=VALIDATION_ROWS))
    return Problem(
        x,
        kernel,
        tf.nn.softmax(2 * tf.matmul(x, kernel)),  # sharpened predictions
        tf.constant(rng.random(n) / n, tf.float32),
        softmax_head.gradient(
            validation, tf.matmul(validation, kernel), labels, 1 / VALIDATION_ROWS
        ),
        tf.constant(np.append(np.full(d - 1, l2), 0.0), tf.float32),
    )


def descend(before: Problem) -> Problem:
    """The problem after a step of gradient descent."""
    x, kernel, target, weight, _, l2 = before
    slope = softmax_head.gradient(x, tf.matmul(x, kernel), target, weight)
    return before._replace(kernel=kernel - STEP * (slope + l2[:, tf.newaxis] * kernel))


def solver(method: str, damping: float) -> Callable:
    """(features, logits, weight, rhs, l2, initial) -> answer [D, C] and iterations."""

    @tf.function
    def solve(features, logits, weight, rhs, l2, initial):
        answer, info = softmax_head.solve(
            features, logits, weight, rhs, l2=l2, damping=damping, method=method, initial=initial
        )
        return answer, info.iterations

    return solve


def autodiff(damping: float) -> Callable:
    """The same from a `Problem`, by the Hessian of the objective and its inverse."""

    @tf.function
    def solve(x, kernel, target, weight, rhs, l2):
        flat = tf.reshape(kernel, [-1])
        matrix = tf.reshape(flat, kernel.shape)
        loss = tf.nn.softmax_cross_entropy_with_logits(target, tf.matmul(x, matrix))
        objective = tf.reduce_sum(weight * loss)
        objective += 0.5 * tf.reduce_sum(l2[:, tf.newaxis] * matrix**2)
        (hessian,) = tf.hessians(objective, flat)
        inverse = tf.linalg.inv(hessian + damping * tf.eye(flat.shape[0]))
        answer = tf.matmul(inverse, tf.reshape(rhs, [-1, 1]))
        return tf.reshape(answer, kernel.shape), tf.constant(0)

    return solve


def reference(now: Problem, damping: float) -> np.ndarray:
    """The answer in float64, to ten digits."""
    x, logits, weight, rhs = (tf.cast(part, tf.float64) for part in now.arguments)
    answer, _ = softmax_head.solve(
        x,
        logits,
        weight,
        rhs,
        l2=tf.cast(now.l2, tf.float64),
        damping=damping,
        method="cg",
        tolerance=1e-10,
        max_iterations=5000,
    )
    return answer.numpy()
