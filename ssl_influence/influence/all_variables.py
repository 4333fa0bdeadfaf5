"""Influence over any variables of a model, where the last layer alone has a closed form.

Each product with the Hessian is a backward pass through the network; `last_layer` needs none.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from ssl_influence import config
from ssl_influence.influence import inverse_hvp, products, row_curvature, sampling, solve_info
from ssl_influence.per_example import products as per_example_products

CURVATURES = config.CURVATURES
# Largest number of parameters whose Hessian is formed, a product for each of them.
EXACT_LIMIT = 2048

Curvature = Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tf.Tensor]


class Outputs(NamedTuple):
    """The model's outputs for some rows, with what head_rows.HeadRows has of that name.

    Attributes:
      logits: [n, C].
      cross_entropy, brier, exact: of the curvature of the rows' losses by the logits.
    """

    logits: tf.Tensor
    cross_entropy: tf.Tensor | None = None
    brier: tf.Tensor | None = None
    exact: bool = True


class Rows(NamedTuple):
    """What an objective reads of a methods.base.MethodOutput, whose attributes have these names."""

    supervised: tf.Tensor
    supervised_coefficient: tf.Tensor
    unsupervised: tf.Tensor
    unsupervised_coefficient: tf.Tensor
    labeled_head: Outputs
    unlabeled_head: Outputs


@dataclasses.dataclass(frozen=True)
class Objective:
    """sum_l a_l ell_S(l) + sum_r c_r lambda_r ell_U(r) + 1/2 sum_v l2_v |v|^2 on fixed rows.

    A plain function of its variables: `output_fn` must leave all of them as they are.

    Attributes:
      output_fn: computes the rows (`Rows`, or a methods.base.MethodOutput) anew from the variables.
      example_weight: lambda of each unlabeled row, [R].
      variables: what derivatives are taken by.
      l2: l2_v of each.
      curvature: (outputs [n, ...], tangent [n, ...], row weight [n]) -> w_i A_i t_i, with A_i the
        curvature of a row's loss by its outputs. None is the one that the rows themselves tell, as
        a rule that of a softmax cross-entropy to a fixed target; `loss_curvature` makes that of any
        loss. The targets in the losses must be constants (tf.stop_gradient) for the Hessian too.
    """

    output_fn: Callable[[], Any]
    example_weight: tf.Tensor
    variables: Sequence[tf.Variable]
    l2: Sequence[float]
    curvature: Curvature | None = None

    def value(self) -> tf.Tensor:
        """The objective, a scalar, without the L2 of variables that it is not taken over."""
        output = self.output_fn()
        penalties = [c * tf.nn.l2_loss(v) for c, v in zip(self.l2, self.variables, strict=True)]
        total = tf.reduce_sum(self._row_weight(output) * _losses(output))
        return tf.add_n([total, *(tf.cast(penalty, total.dtype) for penalty in penalties)])

    def product(self, curvature: str) -> products.Product:
        """The product v -> H v at the variables' present values.

        Args:
          curvature: "hessian", or "gauss_newton": the curvature of each row's loss by its logits,
            see HeadRows, with the model taken as linear; the L2 is exact in both. They agree over
            the last layer where all rows are exact.

        Raises:
          ConfigError: for another one.
        """
        if curvature == "hessian":
            return products.hvp(self.value, self.variables)
        if curvature != "gauss_newton":
            raise config.ConfigError(
                f"curvature={curvature!r} is not one of {', '.join(CURVATURES)}."
            )
        weighted, row_weight = self._of_outputs()
        return lambda vector: weighted(vector, row_weight)

    def is_exact(self, curvature: str) -> bool:
        """Whether `product` is that of all the Hessian; over the last layer both may be."""
        return curvature == "hessian"

    def sampled_product(self, rows: int, seed: tf.Tensor) -> Callable[..., products.Vector]:
        """(v, iteration) -> H_j v by the Gauss-Newton matrix of rows drawn anew each time.

        Args:
          rows: how many, with replacement, out of all; its expectation is the whole matrix.
          seed: [2] integers; with the iteration it determines what is drawn.
        """
        weighted, row_weight = self._of_outputs()
        return lambda vector, j: weighted(
            vector, row_weight * sampling.counts(row_weight, rows, seed, j)
        )

    def exact(
        self, rhs: products.Vector, curvature: str, damping: float, tolerance: float
    ) -> tuple[products.Vector, solve_info.SolveInfo]:
        """Forms the matrix of `product` and factorizes it.

        Raises:
          ConfigError: the variables have more than EXACT_LIMIT parameters.
          SolveError: in eager mode, if it is singular, indefinite or not finite.
        """
        del tolerance
        check_exact(self.variables)
        matrix = inverse_hvp.dense(self.product(curvature), rhs)
        return inverse_hvp.exact(matrix, rhs, damping=damping)

    def conjugate_gradient(
        self,
        rhs: products.Vector,
        curvature: str,
        damping: float,
        tolerance: float,
        iterations: int,
    ) -> tuple[products.Vector, solve_info.SolveInfo]:
        """Conjugate gradients on `product`."""
        return inverse_hvp.conjugate_gradient(
            self.product(curvature),
            rhs,
            damping=damping,
            tolerance=tolerance,
            max_iterations=iterations,
        )

    def outer_product(
        self, rhs: products.Vector, damping: float
    ) -> tuple[products.Vector, solve_info.SolveInfo]:
        """Solves with sum_i w_i g_i g_i^T + L2 in the place of H, g_i the gradients of the rows.

        It is of rank n beside the L2: conjugate gradients get there in few more than n steps, or
        twice that where the L2 has two values, and form no g_i.
        """
        product, row_weight = self._of_rows(
            _losses, lambda losses, tangent, weight: weight * tangent
        )
        answer, info = inverse_hvp.conjugate_gradient(
            lambda vector: product(vector, row_weight), rhs, damping=damping
        )
        return answer, info._replace(solver=tf.constant(solve_info.SOLVERS.index("outer_product")))

    def descent(
        self, steps: int, step: float | tf.Tensor, damping: float
    ) -> Callable[[products.Vector, tf.Tensor, str], products.Vector]:
        """Takes `steps` steps of gradient descent, keeps where they were taken, and comes back.

        Damping pulls to the start: 1/2 damping |theta - start|^2 is added to the objective.

        Returns:
          (v, k, curvature) -> H_k v at the k-th of these points, counted from the start.
        """
        start = [tf.identity(v) for v in self.variables]
        kept = [tf.TensorArray(v.dtype, steps, element_shape=v.shape) for v in self.variables]

        def body(k, kept):
            values = [tf.identity(v) for v in self.variables]
            kept = [array.write(k, value) for array, value in zip(kept, values, strict=True)]
            with tf.GradientTape() as tape:
                value = self.value()
            slopes = tape.gradient(value, self.variables, unconnected_gradients="zero")
            for v, slope, first in zip(self.variables, slopes, start, strict=True):
                slope = tf.convert_to_tensor(slope) + damping * (v - first)
                v.assign_sub(tf.cast(step, v.dtype) * slope)
            return k + 1, kept

        try:
            _, kept = tf.while_loop(lambda k, _: k < steps, body, (tf.constant(0), kept))
            points = [array.stack() for array in kept]
        finally:
            self._move_to(start)

        def product_at(vector, k, curvature):
            self._move_to([point[k] for point in points])
            try:
                return self.product(curvature)(vector)
            finally:
                self._move_to(start)

        return product_at

    def influence(self, direction: Sequence[tf.Tensor]) -> tf.Tensor:
        """-c_r <direction, grad ell_U(r)>, [R].

        It is dL_V/dlambda_r (eq. influence) where direction is (H + damping I)^-1 grad L_V, and its
        identity approximation (Luketina et al., 2016) where it is grad L_V.
        """

        def weighted_losses():
            output = self.output_fn()
            return tf.stop_gradient(output.unsupervised_coefficient) * output.unsupervised

        return -per_example_products.row_dots(weighted_losses, direction, self.variables)

    def _move_to(self, values):
        for variable, value in zip(self.variables, values, strict=True):
            variable.assign(value)

    def _of_outputs(self):
        """`_of_rows` of the outputs, with the curvature of the losses."""
        if self.curvature is not None:
            return self._of_rows(_outputs, self.curvature)
        shares = None

        def outputs(output):
            nonlocal shares
            shares = row_curvature.Shares.of(output.labeled_head, output.unlabeled_head)
            return _outputs(output)

        def curvature(outputs, tangent, row_weight):
            return products.softmax_curvature(outputs, tangent, *shares.weights(row_weight))

        return self._of_rows(outputs, curvature)

    def _of_rows(self, quantity, curvature):
        """(v, w) -> sum_i w_i J_i^T A_i J_i v + L2 v, J of a quantity of the rows; and their w."""
        row_weight = None

        def outputs_fn():
            nonlocal row_weight
            output = self.output_fn()
            row_weight = self._row_weight(output)
            return quantity(output)

        of_rows = products.gauss_newton_product(outputs_fn, curvature, self.variables)

        def product(vector, weight):
            parts = zip(of_rows(vector, weight), self.l2, vector, strict=True)
            return [p + tf.cast(c * v, p.dtype) for p, c, v in parts]

        return product, row_weight

    def _row_weight(self, output):
        # Constants of the objective, but of the variables' present values.
        unsupervised = tf.stop_gradient(output.unsupervised_coefficient)
        weight = tf.cast(self.example_weight, unsupervised.dtype)
        supervised = tf.stop_gradient(output.supervised_coefficient)
        return tf.concat([supervised, unsupervised * weight], axis=0)


def with_constant_targets(output_fn: Callable[[], Any]) -> Callable[[], Rows]:
    """Rows whose targets, masks and coefficients stay what they are now, wherever variables go.

    A method computes its targets from the network; in the objective they are constants. A loss
    whose gradient by the logits is p - q, as of every cross-entropy and divergence, is held to the
    q of now; of others that would be another loss of the same gradient.

    Raises:
      ConfigError: the rows are not all of such losses.
    """
    now = output_fn()
    row_curvature.Shares.of(now.labeled_head, now.unlabeled_head).require_cross_entropy()
    targets = [
        tf.stop_gradient(tf.nn.softmax(head.logits) - head.gradient)
        for head in (now.labeled_head, now.unlabeled_head)
    ]

    def rows():
        output = output_fn()
        heads = [output.labeled_head, output.unlabeled_head]
        supervised, unsupervised = (
            -tf.reduce_sum(q * tf.nn.log_softmax(head.logits), axis=1)
            for q, head in zip(targets, heads, strict=True)
        )
        return Rows(
            supervised,
            now.supervised_coefficient,
            unsupervised,
            now.unsupervised_coefficient,
            *(Outputs(head.logits) for head in heads),
        )

    return rows


def check_exact(variables: Sequence[tf.Variable]) -> None:
    """Raises ConfigError if the variables have more parameters than a Hessian is formed for."""
    size = sum(variable.shape.num_elements() for variable in variables)
    if size > EXACT_LIMIT:
        raise config.ConfigError(
            f"inverse_hessian=exact would form a Hessian of {size:,} x {size:,} numbers by as many "
            f"products, {4e-9 * size**2:,.3g} GB: use inverse_hessian=cg, or "
            "influence_params=last_layer, whose Hessian has a closed form."
        )


def loss_curvature(loss_fn: Callable[[tf.Tensor], tf.Tensor]) -> Curvature:
    """The curvature of any loss by the model's outputs, for `Objective`.

    Args:
      loss_fn: outputs [n, ...] -> losses [n], each of its own row alone.
    """

    def curvature(outputs, tangent, row_weight):
        with tf.GradientTape() as outer:
            outer.watch(outputs)
            with tf.GradientTape() as inner:
                inner.watch(outputs)
                losses = loss_fn(outputs)
            slope = inner.gradient(losses, outputs)
        found = outer.gradient(
            slope, outputs, output_gradients=tangent, unconnected_gradients="zero"
        )
        shape = tf.concat([tf.shape(row_weight), tf.ones([outputs.shape.rank - 1], tf.int32)], 0)
        return tf.reshape(tf.cast(row_weight, found.dtype), shape) * found

    return curvature


def _outputs(output):
    return tf.concat([output.labeled_head.logits, output.unlabeled_head.logits], axis=0)


def _losses(output):
    return tf.concat([output.supervised, output.unsupervised], axis=0)
