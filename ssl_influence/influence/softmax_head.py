"""The exact Hessian of a softmax classifier's last layer, without autodiff (eq. influence).

Rows i have head inputs x_i [D], probabilities p_i [C] and coefficients w_i. The objective
sum_i w_i CE(p_i, q_i) + 1/2 sum_d l2_d |kernel_d|^2, with targets q_i that sum to one, has

    gradient  X^T [w * (P - Q)]                            (+ l2 * kernel, zero at no optimum)
    Hessian   sum_i w_i (x_i x_i^T) (x) J_i + diag(l2) (x) I_C,      J_i = diag(p_i) - p_i p_i^T

whatever the targets: pseudo-labels, sharpened or mixed distributions, and adversarial views (x_i
and p_i at the moved point) alike. It is exact while targets, masks and directions are constants. A
squared loss on probabilities or an added entropy term has another curvature than J.

A bias is one more row of the kernel, whose feature is 1. Matrices are row-major over kernel[d, c].
Everything is computed in float64 if features or logits are, else in float32.
"""

from typing import NamedTuple

import numpy as np
import tensorflow as tf

from ssl_influence import config
from ssl_influence.influence import solve_info

METHODS = ("auto", "cholesky", "cg", "woodbury", "inverse")
# Largest D * C that "auto" solves directly. On 2 CPU cores, float32, n = 700 and damping 0.01,
# cholesky took 0.01, 0.03, 0.14, 0.74 and 3.0 s at D * C = 330, 650, 1290, 2500 and 4000; cg took
# 0.01 to 0.04 s, up to 0.2 s where predictions are confident. Direct wins on time below 500 only,
# but does not depend on the conditioning: at damping 1e-4 cg takes hundreds of iterations, and at
# 1e-6 it may not get there.
DIRECT_LIMIT = 2500
CG_ITERATIONS = 1000


def gradient(
    features: tf.Tensor, logits: tf.Tensor, targets: tf.Tensor, sample_weight: tf.Tensor
) -> tf.Tensor:
    """Gradient of sum_i w_i CE(p_i, q_i) with respect to the kernel.

    Args:
      features: X [n, D].
      logits: [n, C].
      targets: q, class ids (integer [n]) or distributions [n, C].
      sample_weight: w [n], or a scalar for all rows.

    Returns:
      X^T [w * (P - Q)], [D, C]. Its rows sum to zero over the classes.
    """
    x, logits = _rows(features, logits)
    targets = tf.convert_to_tensor(targets)
    if targets.shape.rank == 1:
        targets = tf.one_hot(targets, tf.shape(logits)[1], dtype=x.dtype)
    weight = _cast(sample_weight, x.dtype) * tf.ones_like(x[:, 0])
    error = tf.nn.softmax(logits) - _cast(targets, x.dtype)
    return tf.matmul(x, weight[:, tf.newaxis] * error, transpose_a=True)


def hessian(
    features: tf.Tensor,
    logits: tf.Tensor,
    sample_weight: tf.Tensor,
    *,
    l2: float | tf.Tensor = 0.0,
) -> tf.Tensor:
    """The Hessian as a matrix.

    Args:
      features: X [n, D].
      logits: [n, C].
      sample_weight: w [n].
      l2: scalar, or [D] where rows of the kernel differ (0 for a bias that is not decayed).

    Returns:
      [D*C, D*C], symmetric. It is singular along a common shift of all classes where l2 is 0.
    """
    x, logits = _rows(features, logits)
    weight = _cast(sample_weight, x.dtype)
    return _matrix(x, tf.nn.softmax(logits), weight, _row_diagonal(l2, x))


def hessian_vector_product(
    features: tf.Tensor,
    logits: tf.Tensor,
    sample_weight: tf.Tensor,
    vector: tf.Tensor,
    *,
    l2: float | tf.Tensor = 0.0,
) -> tf.Tensor:
    """The Hessian times a vector, in O(n D C) time and O((n + D) C) memory.

    Args:
      features: X [n, D].
      logits: [n, C].
      sample_weight: w [n].
      vector: V [D, C].
      l2: scalar or [D].

    Returns:
      X^T [w * (Z - P * rowsum Z)] + l2 V with Z = (X V) * P, [D, C].
    """
    x, logits = _rows(features, logits)
    weight = _cast(sample_weight, x.dtype)
    vector = _cast(vector, x.dtype)
    return _product(x, tf.nn.softmax(logits), weight, _row_diagonal(l2, x), vector)


def solve(
    features: tf.Tensor,
    logits: tf.Tensor,
    sample_weight: tf.Tensor,
    rhs: tf.Tensor,
    *,
    l2: float | tf.Tensor = 0.0,
    damping: float | tf.Tensor = 0.0,
    method: str = "auto",
    tolerance: float = 1e-6,
    max_iterations: int | None = None,
    initial: tf.Tensor | None = None,
) -> tuple[tf.Tensor, solve_info.SolveInfo]:
    """Solves (Hessian + damping I) x = rhs.

    Along a common shift of all classes the Hessian is diag(l2) alone. That part is split off and
    solved by division (to 0 where l2 + damping is 0: the pseudo-inverse), and the rest is solved in
    the complement, where direct methods lift the shift by a multiple of I (x) 11^T/C.

    Args:
      features: X [n, D].
      logits: [n, C].
      sample_weight: w [n], at least 0 if the Hessian is to be positive.
      rhs: [D, C].
      l2: scalar or [D].
      damping: added to the whole diagonal.
      method: "cholesky": O((D C)^3), refined twice. "cg": matrix-free conjugate gradients,
        preconditioned by X^T W X (x) mean J + mean(l2 + damping) I. "woodbury": O((n C)^3), for few
        rows; needs w >= 0 and l2 + damping > 0. "inverse": an explicit inverse from all
        eigenvalues, the reference. "auto": "cholesky" up to D * C = 2500, then "cg".
      tolerance: relative residual at which cg stops. A direct method has converged below
        max(tolerance, sqrt(machine epsilon)).
      max_iterations: of cg; None is 1000.
      initial: where cg starts, [D, C]; None is 0.

    Returns:
      x [D, C] and SolveInfo. If a direct method fails, x is 0; cg gives its best so far. It is
      always finite.

    Raises:
      ConfigError: for an unknown method.
      SolveError: in eager mode, if the system is singular (beyond the shift), indefinite or not
        finite; in a graph `converged` is False instead. A cg that met its caller's own
        max_iterations is only reported.
    """
    if method not in METHODS:
        raise config.ConfigError(f"method={method!r} is not one of {', '.join(METHODS)}.")
    x, logits = _rows(features, logits)
    weight, rhs = _cast(sample_weight, x.dtype), _cast(rhs, x.dtype)
    p = tf.nn.softmax(logits)
    if method == "auto":
        d, c = x.shape[1], p.shape[1]
        method = "cholesky" if d and c and d * c <= DIRECT_LIMIT else "cg"
    system = _System(x, p, weight, _row_diagonal(l2, x) + _cast(damping, x.dtype))

    # In units of the right-hand side: its square may underflow.
    unit = tf.reduce_max(tf.abs(rhs))
    rhs = tf.math.divide_no_nan(rhs, unit)
    shift = tf.reduce_mean(rhs, axis=1, keepdims=True)
    rest = rhs - shift
    if method == "cg":
        start = tf.zeros_like(rhs) if initial is None else _cast(initial, x.dtype)
        start = tf.math.divide_no_nan(start, unit)
        limit = CG_ITERATIONS if max_iterations is None else max_iterations
        attempt = _conjugate_gradients(system, rest, start, tolerance, limit)
    else:
        solver = {"cholesky": _cholesky, "woodbury": _woodbury, "inverse": _inverse}[method]
        attempt = solver(system, rest)
    answer = _without_shift(attempt.answer) + tf.math.divide_no_nan(shift, system.diagonal)

    residual = tf.math.divide_no_nan(tf.norm(rhs - system.times(answer)), tf.norm(rhs))
    answer = tf.ensure_shape(answer * unit, rhs.shape)
    finite = tf.math.is_finite(residual) & tf.reduce_all(tf.math.is_finite(answer))
    accepted = max(tolerance, _epsilon(x.dtype) ** 0.5)
    converged = attempt.done & finite & (residual <= accepted)
    info = solve_info.SolveInfo(
        residual=tf.where(finite, residual, tf.constant(float("inf"), x.dtype)),
        iterations=attempt.iterations,
        negative_curvature=attempt.negative_curvature,
        converged=converged,
        solver=tf.constant(solve_info.SOLVERS.index(method)),
    )
    if tf.executing_eagerly():
        cut_short = max_iterations is not None and method == "cg" and bool(finite)
        if not (info.converged or (cut_short and not info.negative_curvature)):
            raise solve_info.SolveError(_failure(info))
    usable = finite if method == "cg" else converged
    return tf.where(usable, answer, tf.zeros_like(answer)), info


class _Attempt(NamedTuple):
    answer: tf.Tensor
    iterations: tf.Tensor
    negative_curvature: tf.Tensor
    done: tf.Tensor


class _System(NamedTuple):
    """H + damping I of one problem; `diagonal` [D, 1] is l2 + damping per row of the kernel."""

    x: tf.Tensor
    p: tf.Tensor
    weight: tf.Tensor
    diagonal: tf.Tensor

    def times(self, vector):
        return _product(self.x, self.p, self.weight, self.diagonal, vector)

    def lifted_matrix(self):
        """The matrix, with the shift lifted by the mean of its diagonal, to stay in scale."""
        matrix = _matrix(*self)
        d, c = tf.shape(self.x)[1], tf.shape(self.p)[1]
        lift = tf.reduce_mean(tf.abs(tf.linalg.diag_part(matrix))) / tf.cast(c, matrix.dtype)
        shift = lift * tf.eye(d, dtype=matrix.dtype)[:, tf.newaxis, :, tf.newaxis]
        return tf.reshape(tf.reshape(matrix, [d, c, d, c]) + shift, [d * c, d * c])


def _cholesky(system, rhs):
    matrix = system.lifted_matrix()
    factor = tf.linalg.cholesky(matrix)
    # On CPU a failed factorization is not an error: the result is NaN or not a factor at all.
    probe = tf.cos(tf.range(tf.shape(matrix)[0], dtype=tf.float32))
    probe = tf.cast(probe, matrix.dtype)[:, tf.newaxis]
    expected = tf.matmul(matrix, probe)
    found = tf.matmul(factor, tf.matmul(factor, probe, transpose_a=True))
    pivots = tf.linalg.diag_part(factor) ** 2 / tf.linalg.diag_part(matrix)
    done = (
        tf.reduce_all(tf.math.is_finite(factor))
        & (tf.norm(found - expected) <= 1e-3 * tf.norm(expected))
        & tf.reduce_all(pivots > 30 * _epsilon(matrix.dtype))
    )
    factor = tf.where(done, factor, _identity_like(factor))

    def inverse(r):
        return tf.reshape(tf.linalg.cholesky_solve(factor, tf.reshape(r, [-1, 1])), tf.shape(r))

    answer, iterations = _refined(inverse, system, rhs)

    # Eigenvalues would tell for certain, but take 2 s at D * C = 1290 and grow with the cube.
    def look_for_negative_curvature():
        return _conjugate_gradients(system, rhs, tf.zeros_like(rhs), 1e-6, 100).negative_curvature

    negative = tf.cond(done, lambda: tf.constant(False), look_for_negative_curvature)
    return _Attempt(answer, iterations, negative, done)


def _inverse(system, rhs):
    values, vectors = _eigh(system.lifted_matrix())
    done = tf.reduce_min(values) > 30 * _epsilon(rhs.dtype) * tf.reduce_max(tf.abs(values))
    values_or_one = tf.where(done, values, tf.ones_like(values))
    matrix = tf.matmul(vectors / values_or_one, vectors, transpose_b=True)

    def inverse(r):
        return tf.reshape(tf.matmul(matrix, tf.reshape(r, [-1, 1])), tf.shape(r))

    answer, iterations = _refined(inverse, system, rhs)
    return _Attempt(answer, iterations, _is_indefinite(values), done)


def _woodbury(system, rhs):
    """With J_i = B_i B_i^T and U = [sqrt(w_i) x_i (x) B_i]: a system of n C unknowns.

    Negative weights have no square root; they are reported as negative curvature.
    """
    x, p, weight, diagonal = system
    n, c = tf.shape(p)[0], tf.shape(p)[1]
    done = tf.reduce_all(diagonal > 0) & tf.reduce_all(weight >= 0)
    diagonal = tf.where(diagonal > 0, diagonal, tf.ones_like(diagonal))
    weighted = tf.sqrt(tf.maximum(weight, 0))[:, tf.newaxis] * x
    root = tf.sqrt(p)
    b = tf.linalg.diag(root) - p[:, :, tf.newaxis] * root[:, tf.newaxis, :]  # [n, C, C]
    gram = tf.matmul(weighted / diagonal[:, 0], weighted, transpose_b=True)
    inner = tf.einsum("ij,ifc,jfe->icje", gram, b, b)
    inner = tf.reshape(inner, [n * c, n * c]) + tf.eye(n * c, dtype=x.dtype)
    factor = tf.linalg.cholesky(inner)
    done &= tf.reduce_all(tf.math.is_finite(factor))
    factor = tf.where(done, factor, _identity_like(factor))

    def inverse(r):
        r = r / diagonal
        u = tf.einsum("ifc,if->ic", b, tf.matmul(weighted, r))
        u = tf.reshape(tf.linalg.cholesky_solve(factor, tf.reshape(u, [-1, 1])), [n, c])
        back = tf.matmul(weighted, tf.einsum("ifc,ic->if", b, u), transpose_a=True)
        return r - back / diagonal

    answer, iterations = _refined(inverse, system, rhs)
    return _Attempt(answer, iterations, tf.reduce_any(weight < 0), done)


def _refined(inverse, system, rhs, steps=2):
    """Iterative refinement recovers the digits that float32, or XLA's eigenvalues, cost."""
    answer = inverse(rhs)
    for _ in range(steps):
        answer = _without_shift(answer + inverse(rhs - system.times(answer)))
    return answer, tf.constant(steps)


def _conjugate_gradients(system, rhs, start, tolerance, limit):
    """Preconditioned conjugate gradients in the space without the shift; keeps the best iterate."""
    precondition, size = _kronecker_preconditioner(system)
    target = _cast(tolerance, rhs.dtype) * tf.norm(rhs)
    x = _without_shift(start)
    r = _without_shift(rhs - system.times(x))
    z = precondition(r)
    zero = tf.zeros([], rhs.dtype)

    class State(NamedTuple):
        k: tf.Tensor
        x: tf.Tensor
        r: tf.Tensor
        direction: tf.Tensor
        rz: tf.Tensor
        best: tf.Tensor
        best_norm: tf.Tensor
        stopped: tf.Tensor
        negative: tf.Tensor

    def unfinished(*state):
        s = State(*state)
        return (s.best_norm > target) & ~s.stopped

    def step(*state):
        s = State(*state)
        # Rounding noise along the shift would stay in r for ever, as no direction leads there.
        product = _without_shift(system.times(s.direction))
        curvature = tf.reduce_sum(s.direction * product)
        per_length = tf.math.divide_no_nan(curvature, tf.reduce_sum(s.direction**2))
        # Rounding alone makes a flat direction of a singular system slightly negative.
        negative = per_length < -100 * _epsilon(rhs.dtype) * size
        going = curvature > 0
        alpha = tf.where(going, tf.math.divide_no_nan(s.rz, curvature), zero)
        x = s.x + alpha * s.direction
        r = s.r - alpha * product
        z = precondition(r)
        rz = tf.reduce_sum(r * z)
        norm = tf.norm(r)
        better = norm < s.best_norm
        return State(
            k=s.k + tf.cast(going, tf.int32),
            x=x,
            r=r,
            direction=z + tf.math.divide_no_nan(rz, s.rz) * s.direction,
            rz=rz,
            best=tf.where(better, x, s.best),
            best_norm=tf.where(better, norm, s.best_norm),
            stopped=~going,
            negative=negative,
        )

    no = tf.constant(False)
    begin = State(tf.constant(0), x, r, z, tf.reduce_sum(r * z), x, tf.norm(r), no, no)
    end = State(*tf.while_loop(unfinished, step, begin, maximum_iterations=limit))
    return _Attempt(end.best, end.k, end.negative, end.best_norm <= target)


def _kronecker_preconditioner(system):
    """Inverse of X^T W X (x) mean J + mean(l2 + damping) I, through two small eigenproblems.

    It is the mean of the J_i and not J at the mean p, which is too large once predictions are
    confident (35 iterations against 55 at D = 129, C = 10, damping 0.01, float32). Returns the
    function r -> z and the largest eigenvalue of what it inverts.
    """
    x, p, weight, diagonal = system
    weight = tf.abs(weight)[:, tf.newaxis]
    p_mean = tf.math.divide_no_nan(tf.reduce_sum(weight * p, axis=0), tf.reduce_sum(weight))
    j_mean = tf.linalg.diag(p_mean) - tf.math.divide_no_nan(
        tf.matmul(p, weight * p, transpose_a=True), tf.reduce_sum(weight)
    )
    g, v = _eigh(tf.matmul(x, weight * x, transpose_a=True))
    s, q = _eigh(j_mean)
    scale = tf.maximum(g, 0)[:, tf.newaxis] * tf.maximum(s, 0) + tf.reduce_mean(diagonal)
    size = tf.reduce_max(scale)
    scale = tf.maximum(scale, _epsilon(x.dtype) * size)

    def precondition(r):
        r = tf.matmul(tf.matmul(v, r, transpose_a=True), q)
        r = tf.matmul(tf.matmul(v, tf.math.divide_no_nan(r, scale)), q, transpose_b=True)
        return _without_shift(r)

    return precondition, size


def _matrix(x, p, weight, diagonal):
    d, c = tf.shape(x)[1], tf.shape(p)[1]
    rows = tf.reshape(x[:, :, tf.newaxis] * p[:, tf.newaxis, :], [-1, d * c])
    outer = tf.matmul(rows, weight[:, tf.newaxis] * rows, transpose_a=True)
    outer = tf.transpose(tf.reshape(outer, [d, c, d, c]), [0, 2, 1, 3])
    scaled = x[tf.newaxis] * tf.transpose(weight[:, tf.newaxis] * p)[:, :, tf.newaxis]
    own_class = tf.transpose(tf.matmul(scaled, x, transpose_a=True), [1, 2, 0])  # [D, D, C]
    own_class += tf.eye(d, dtype=x.dtype)[:, :, tf.newaxis] * diagonal
    blocks = tf.linalg.set_diag(-outer, own_class - tf.linalg.diag_part(outer))
    return tf.reshape(tf.transpose(blocks, [0, 2, 1, 3]), [d * c, d * c])


def _product(x, p, weight, diagonal, vector):
    z = tf.matmul(x, vector) * p
    curved = z - p * tf.reduce_sum(z, axis=1, keepdims=True)
    return tf.matmul(x, weight[:, tf.newaxis] * curved, transpose_a=True) + diagonal * vector


def _without_shift(matrix):
    return matrix - tf.reduce_mean(matrix, axis=1, keepdims=True)


def _eigh(matrix):
    # The decomposition raises on what is not finite, in a graph too; the residual tells of it.
    finite = tf.reduce_all(tf.math.is_finite(matrix))
    return tf.linalg.eigh(tf.where(finite, matrix, _identity_like(matrix)))


def _is_indefinite(eigenvalues):
    largest = tf.reduce_max(tf.abs(eigenvalues))
    return tf.reduce_min(eigenvalues) < -100 * _epsilon(eigenvalues.dtype) * largest


def _identity_like(matrix):
    return tf.eye(tf.shape(matrix)[0], dtype=matrix.dtype)


def _epsilon(dtype):
    return float(np.finfo(dtype.as_numpy_dtype).eps)


def _rows(features, logits):
    features, logits = tf.convert_to_tensor(features), tf.convert_to_tensor(logits)
    double = tf.float64 in (features.dtype, logits.dtype)
    dtype = tf.float64 if double else tf.float32
    return tf.cast(features, dtype), tf.cast(logits, dtype)


def _cast(value, dtype):
    # tf.cast takes a Python float through float32.
    return tf.cast(value, dtype) if tf.is_tensor(value) else tf.convert_to_tensor(value, dtype)


def _row_diagonal(l2, x):
    """A scalar or [D] as [D, 1]."""
    return tf.broadcast_to(_cast(l2, x.dtype), tf.shape(x)[1:])[:, tf.newaxis]


def _failure(info) -> str:
    what = "indefinite" if info.negative_curvature else "singular, badly conditioned or not finite"
    return (
        f"The last-layer Hessian is {what}: {info.method} ended with a relative residual of "
        f"{float(info.residual):.3g} after {int(info.iterations)} iterations. Raise damping or l2, "
        "and check that features and logits are finite and sample weights not negative."
    )
