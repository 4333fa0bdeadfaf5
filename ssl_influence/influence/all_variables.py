"""Influence over any variables of a model, where the last layer alone has a closed form.

Slower by orders of magnitude than `weight_gradients.last_layer`, and meant to judge it.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from ssl_influence.influence import inverse_hvp
from ssl_influence.per_example import dots

CURVATURES = ("gauss_newton", "hessian")


@dataclasses.dataclass(frozen=True)
class Objective:
    """sum_l a_l ell_S(l) + sum_r c_r lambda_r ell_U(r) + 1/2 sum_v l2_v |v|^2 on fixed rows.

    A plain function of its variables: `output_fn` must not change any, and BatchNormalization must
    be in inference mode, lest rows interact.

    Attributes:
      output_fn: computes the method's rows (a methods.base.MethodOutput) anew from the variables.
      example_weight: lambda of each unlabeled row, [R].
      variables: what derivatives are taken by.
      l2: l2_v of each.
    """

    output_fn: Callable[[], Any]
    example_weight: tf.Tensor
    variables: Sequence[tf.Variable]
    l2: Sequence[float]

    def value(self) -> tf.Tensor:
        """The objective, a scalar, without the L2 of variables that it is not taken over."""
        output = self.output_fn()
        supervised = tf.reduce_sum(output.supervised_coefficient * output.supervised)
        weight = output.unsupervised_coefficient * self._lambda(output)
        unsupervised = tf.reduce_sum(weight * output.unsupervised)
        penalties = [c * tf.nn.l2_loss(v) for c, v in zip(self.l2, self.variables, strict=True)]
        return tf.add_n([supervised, unsupervised, *penalties])

    def product(self, curvature: str) -> inverse_hvp.Product:
        """The product v -> H v.

        Args:
          curvature: "hessian", or "gauss_newton": the softmax curvature of each row's logits with
            the model taken as linear; the L2 is exact in both. They agree over the last layer.
        """
        if curvature == "hessian":
            return inverse_hvp.hvp(self.value, self.variables)
        if curvature != "gauss_newton":
            raise ValueError(f"curvature={curvature!r} is not one of {', '.join(CURVATURES)}.")

        def logits_fn():
            output = self.output_fn()
            return tf.concat([output.labeled_head.logits, output.unlabeled_head.logits], axis=0)

        # Constants of the objective, but of the variables' current values.
        output = self.output_fn()
        row_weight = tf.concat(
            [
                output.supervised_coefficient,
                output.unsupervised_coefficient * self._lambda(output),
            ],
            axis=0,
        )

        def of_logits(logits, tangent):
            return inverse_hvp.softmax_curvature(logits, tangent, row_weight)

        of_rows = inverse_hvp.gauss_newton_product(logits_fn, of_logits, self.variables)

        def product(vector):
            return [p + c * v for p, c, v in zip(of_rows(vector), self.l2, vector, strict=True)]

        return product

    def influence(self, direction: Sequence[tf.Tensor]) -> tf.Tensor:
        """-c_r <direction, grad ell_U(r)>, [R].

        It is dL_V/dlambda_r (eq. influence) where direction is (H + damping I)^-1 grad L_V, and its
        identity approximation (Luketina et al., 2016) where it is grad L_V.
        """

        def weighted_losses():
            output = self.output_fn()
            return tf.stop_gradient(output.unsupervised_coefficient) * output.unsupervised

        return -dots.row_dots(weighted_losses, direction, self.variables)

    def _lambda(self, output):
        return tf.cast(self.example_weight, output.unsupervised.dtype)
