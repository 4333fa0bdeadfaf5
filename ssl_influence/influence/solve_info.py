"""What a linear solver tells of its answer, the same for every solver."""

from typing import NamedTuple

import tensorflow as tf

SOLVERS = (
    "cholesky",
    "cg",
    "woodbury",
    "inverse",
    "identity",
    "exact",
    "conjugate_gradient",
    "lissa",
    "neumann",
    "outer_product",
    "unrolled",
)


class SolveError(ArithmeticError):
    """A linear system that has no trustworthy answer. One line: what was seen and the remedy."""


class SolveInfo(NamedTuple):
    """How a solve went; scalars, all tensors, so that it may leave a compiled tf.function.

    Attributes:
      residual: |b - A x| / |b| of the answer that was found (0 for b = 0, infinite if not finite,
        NaN if nothing was there to measure it by).
      iterations: int32; terms of a series, refinement steps of a direct method.
      negative_curvature: bool, a direction with v^T A v < 0 was met.
      converged: bool, the answer may be used.
      solver: int32, the index of the method in SOLVERS (`method` is its name).
      exact_curvature: bool, H is all of the objective's Hessian while targets are constants, and
        not its Gauss-Newton matrix (`curvature` is its name). It is of the H that the method
        inverts or approaches, or, as identity and outer_product do, replaces by another matrix. A
        solver that is given H as such takes it for the Hessian.
    """

    residual: tf.Tensor
    iterations: tf.Tensor
    negative_curvature: tf.Tensor
    converged: tf.Tensor
    solver: tf.Tensor
    exact_curvature: tf.Tensor | bool = True

    @property
    def method(self) -> str:
        """The method's name. Only outside of a graph, where `solver` has a value."""
        return SOLVERS[int(self.solver)]

    @property
    def curvature(self) -> str:
        """What H is, "hessian" or "gauss_newton". Only outside of a graph, as `method`."""
        return "hessian" if self.exact_curvature else "gauss_newton"
