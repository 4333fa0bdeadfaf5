"""The linear system of the last layer, in closed form, for every solver."""

from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from ssl_influence import config
from ssl_influence.influence import (
    inverse_hvp,
    numerics,
    row_curvature,
    sampling,
    softmax_head,
    solve_info,
)
from ssl_influence.per_example import rows as per_example_rows

Solution = tuple[tf.Tensor, solve_info.SolveInfo]


class LastLayer(NamedTuple):
    """Rows i of sum_i w_i ell_i + 1/2 sum_d l2_d |kernel_d|^2 over the head's weights.

    Its methods are those of `all_variables.Objective`, for right-hand sides [D, C]; the curvature
    they take makes no difference, since logits are linear in the weights.

    Attributes:
      features: x [n, D], the last column 1 where there is a bias.
      logits: [n, C]; [n, 1] of the binary head.
      gradient: g_i [n, C], of each row's own loss by its logits.
      weight: w [n].
      l2: of the kernel, a scalar, or one for each of its rows without the bias.
      l2_bias: of the bias, a scalar; None where there is none.
      kernel: the weights [D, C], which `descent` alone needs.
      shares: what the curvature of each row's loss is made of.
    """

    features: tf.Tensor
    logits: tf.Tensor
    gradient: tf.Tensor
    weight: tf.Tensor
    l2: float | tf.Tensor
    l2_bias: float | tf.Tensor | None
    kernel: tf.Tensor | None
    shares: row_curvature.Shares = row_curvature.Shares()

    def is_exact(self, curvature: str) -> bool:
        """Whether `product` is that of all the Hessian."""
        del curvature
        return self.shares.exact

    def product(self, curvature: str) -> Callable[[tf.Tensor], tf.Tensor]:
        """V -> H V, [D, C]."""
        del curvature
        return lambda vector: self._product(self.logits, self.weight, vector)

    def exact(self, rhs: tf.Tensor, curvature: str, damping: float, tolerance: float) -> Solution:
        """A direct solve where it fits, else conjugate gradients; see softmax_head.solve.

        In float64 they go to 1e-10 at least.
        """
        del curvature
        if self.features.dtype == tf.float64:
            tolerance = min(tolerance, 1e-10)
        return self._closed_form(rhs, "auto", damping=damping, tolerance=tolerance)

    def conjugate_gradient(
        self, rhs: tf.Tensor, curvature: str, damping: float, tolerance: float, iterations: int
    ) -> Solution:
        """Preconditioned conjugate gradients."""
        del curvature
        return self._closed_form(
            rhs, "cg", damping=damping, tolerance=tolerance, max_iterations=iterations
        )

    def outer_product(self, rhs: tf.Tensor, damping: float) -> Solution:
        """Solves with sum_i w_i (x_i g_i^T)(x_i g_i^T)^T + L2 in the place of H.

        Raises:
          ConfigError: the products of features and gradients do not fit in memory; L2 and damping
            are 0 for some weights and not for others; or the kernel has several L2.
        """
        if tf.convert_to_tensor(self.l2).shape.rank:
            raise config.ConfigError(
                f"l2 of shape {tf.convert_to_tensor(self.l2).shape}: inverse_hessian=outer_product "
                "takes one number for the kernel."
            )
        (n, d), c = self.features.shape, self.gradient.shape[1]
        if n is not None:
            size = 2 * n * d * c * self.features.dtype.size
            what = f"outer_product of {n} rows of {d} x {c} numbers"
            per_example_rows.require_memory(size, None, what, "use another inverse_hessian")
        outer = self.features[:, :, tf.newaxis] * self.gradient[:, tf.newaxis, :]
        outer = tf.sqrt(self.weight)[:, tf.newaxis, tf.newaxis] * outer
        if self.l2_bias is None:
            return inverse_hvp.outer_product(outer, rhs, damping=self.l2 + damping)
        (found, bias), info = inverse_hvp.outer_product(
            (outer[:, :-1], outer[:, -1:]),
            (rhs[:-1], rhs[-1:]),
            damping=(self.l2 + damping, self.l2_bias + damping),
        )
        return tf.concat([found, bias], axis=0), info

    def sampled_product(
        self, rows: int, seed: tf.Tensor
    ) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
        """(V, iteration) -> H_j V by rows drawn anew each time."""

        def product(vector, iteration):
            counts = sampling.counts(self.weight, rows, seed, iteration)
            return self._product(self.logits, self.weight * counts, vector)

        return product

    def descent(
        self, steps: int, step: float | tf.Tensor, damping: float
    ) -> Callable[[tf.Tensor, tf.Tensor, str], tf.Tensor]:
        """Takes `steps` steps of gradient descent from the kernel, and keeps where they were taken.

        Damping pulls to the start: 1/2 damping |W - start|^2 is added to the objective.

        Returns:
          (V, k, curvature) -> H_k V at the k-th of these points, counted from the start.

        Raises:
          ConfigError: the kernel is not known, or losses are no cross-entropies to fixed targets.
        """
        self.shares.require_cross_entropy()
        if self.kernel is None:
            raise config.ConfigError(
                "inverse_hessian=unrolled follows the head from where it is: give kernel=, its "
                "weights."
            )
        kernel = tf.cast(self.kernel, self.features.dtype)
        targets = softmax_head.probabilities(self.logits) - self.gradient
        l2 = self._row_l2()[:, tf.newaxis]

        def body(k, moved, kept):
            logits = self.logits + tf.matmul(self.features, moved)
            slope = softmax_head.gradient(self.features, logits, targets, self.weight)
            slope += l2 * (kernel + moved) + damping * moved
            kept = kept.write(k, moved)
            return k + 1, moved - tf.cast(step, moved.dtype) * slope, kept

        kept = tf.TensorArray(kernel.dtype, steps, element_shape=kernel.shape)
        start = (tf.constant(0), tf.zeros_like(kernel), kept)
        *_, kept = tf.while_loop(lambda k, *_: k < steps, body, start)
        points = kept.stack()

        def product_at(vector, k, curvature):
            del curvature
            logits = self.logits + tf.matmul(self.features, points[k])
            return self._product(logits, self.weight, vector)

        return product_at

    def _product(self, logits, weight, vector):
        weight, squared = self.shares.weights(weight)
        return softmax_head.hessian_vector_product(
            self.features, logits, weight, vector, squared_weight=squared, l2=self._row_l2()
        )

    def _closed_form(self, rhs, method, **settings):
        weight, squared = self.shares.weights(self.weight)
        return softmax_head.solve(
            self.features,
            self.logits,
            weight,
            rhs,
            squared_weight=squared,
            l2=self._row_l2(),
            method=method,
            **settings,
        )

    def _row_l2(self):
        """[D], the bias's own last."""
        dtype = self.features.dtype
        bias = self.l2_bias is not None
        rows = tf.broadcast_to(numerics.cast(self.l2, dtype), [tf.shape(self.features)[1] - bias])
        return (
            tf.concat([rows, numerics.cast(self.l2_bias, dtype)[tf.newaxis]], 0) if bias else rows
        )
