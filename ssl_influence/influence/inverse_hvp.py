"""x = (H + damping I)^-1 rhs by every method that the paper compares (table hessian).

A vector is a nest of tensors, as a rule a list with one tensor a variable, and H is given as a
product v -> H v (see `products`). What the paper's table names is here

    Larsen et al.                   outer_product     H is the sum of outer products of gradients
    conjugate gradients (Martens)   conjugate_gradient
    identity (Luketina et al.)      identity          H is I
    stochastic (Koh & Liang)        lissa             a recursion with another sample of H each time
    unrolled (Shaban et al.)        unrolled          back through the last steps of training
    Neumann (Lorraine et al.)       neumann           a truncated power series
    the paper's own                 exact             the matrix itself (of the last layer: see
                                                      `softmax_head`, which needs no autodiff)

`damping` is added to the diagonal, in units of H, by all of them: they differ in how near they come
to one and the same answer, and `residual` = |rhs - (H + damping I) x| / |rhs| tells how near. Each
gives (x, SolveInfo). x is a nest like `rhs`, always finite, in float64 where rhs is, else in
float32, which products are called with too. `converged` says that the answer may be used: solved to
the tolerance by `exact`, `conjugate_gradient` and `outer_product`; of the truncated series, which
are meant to be far from the inverse, that they are finite and do not grow. What did not converge or
met negative curvature is logged as a warning in eager mode; a graph has SolveInfo alone.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from ssl_influence import config
from ssl_influence.influence import factorizations, numerics, products, solve_info

_log = logging.getLogger("ssl_influence")

_SERIES_REMEDY = (
    "where curvature is negative raise damping or take the Gauss-Newton matrix, else lower the step"
)

Solution = tuple[products.Vector, solve_info.SolveInfo]


def identity(
    rhs: products.Vector,
    *,
    damping: float | tf.Tensor = 0.0,
    hvp: products.Product | None = None,
) -> Solution:
    """The vector rhs / (1 + damping), with I for H (Luketina et al., 2016).

    Args:
      rhs: any nest of tensors.
      damping: added to the diagonal of I.
      hvp: the true H, which costs one product and gives the residual and the curvature along the
        answer; without it the residual is NaN (unknown).

    Returns:
      x and SolveInfo; it has converged where it is finite.
    """
    system = _System(rhs, damping)
    x = [part / (1 + own) for part, own in zip(system.b, system.damping, strict=True)]
    times = None if hvp is None else system.operator(hvp)
    return system.solution(
        "identity", x, times, iterations=0, remedy="conjugate_gradient takes H itself"
    )


def exact(matrix: tf.Tensor, rhs: products.Vector, *, damping: float | tf.Tensor = 0.0) -> Solution:
    """Solves by a Cholesky factorization, refined twice.

    Args:
      matrix: H, symmetric, [P, P], over the entries of tf.nest.flatten(rhs) in turn; see `dense`.
      rhs: any nest of tensors, of P entries.
      damping: added to the diagonal.

    Returns:
      x, zeros where the solve failed, and SolveInfo.

    Raises:
      SolveError: in eager mode, if H + damping I is singular, indefinite or not finite; in a graph
        `converged` is False instead.
    """
    system = _System(rhs, damping, matrix)
    matrix = numerics.cast(matrix, system.dtype)
    shift = tf.concat(
        [tf.fill([size], own) for size, own in zip(system.sizes, system.damping, strict=True)], 0
    )
    matrix = tf.linalg.set_diag(matrix, tf.linalg.diag_part(matrix) + shift)
    factor, done = factorizations.cholesky(matrix)

    def inverse(vector):
        return tf.linalg.cholesky_solve(factor, vector[:, tf.newaxis])[:, 0]

    def times(vector):
        return tf.linalg.matvec(matrix, vector)

    b = system.flat(system.b)
    x = _refined(inverse, times, b)
    x = tf.where(done, x, tf.zeros_like(x))

    def look_for_negative_curvature():
        start = [factorizations.probe(matrix)[:, 0]]
        return _conjugate_gradients(lambda v: [times(v[0])], start, 1e-6, 100).negative

    negative = tf.cond(done, lambda: tf.constant(False), look_for_negative_curvature)
    accepted = system.epsilon**0.5
    answer, info = system.solution(
        "exact",
        system.parts(x),
        lambda parts: system.parts(times(system.flat(parts))),
        iterations=2,
        negative=negative,
        usable=lambda residual, negative: done & ~negative & (residual <= accepted),
    )
    if tf.executing_eagerly() and not info.converged:
        what = "indefinite" if info.negative_curvature else "singular or not finite"
        raise solve_info.SolveError(
            f"The matrix is {what} (relative residual {info.residual:.2g}): raise damping, and "
            "check that all of its entries are finite and that it is symmetric."
        )
    return answer, info


def dense(product: products.Product, like: products.Vector) -> tf.Tensor:
    """The matrix of a product, for `exact`: P products, and P^2 numbers of memory.

    Args:
      product: v -> H v, on nests like `like`.
      like: a nest of tensors of P entries, for its structure and shapes.

    Returns:
      [P, P], symmetrized, over the entries of tf.nest.flatten(like) in turn.
    """
    system = _System(like, 0.0)
    size, times = sum(system.sizes), system.operator(product)

    def row(index):
        vector = system.parts(tf.one_hot(index, size, dtype=system.dtype))
        return system.flat(times(vector))

    spec = tf.TensorSpec([size if isinstance(size, int) else None], system.dtype)
    matrix = tf.map_fn(row, tf.range(size), fn_output_signature=spec)
    return (matrix + tf.transpose(matrix)) / 2


def conjugate_gradient(
    hvp: products.Product,
    rhs: products.Vector,
    *,
    damping: float | tf.Tensor = 0.0,
    tolerance: float = 1e-6,
    max_iterations: int = 1000,
) -> Solution:
    """Conjugate gradients from 0 (Martens, 2010).

    Stops at the tolerance, at `max_iterations`, or where a direction has no positive curvature, and
    gives the iterate of the smallest residual so far.

    Args:
      hvp: v -> H v, on nests like `rhs`.
      rhs: any nest of tensors.
      damping: added to the diagonal.
      tolerance: relative residual to reach.
      max_iterations: each takes one product; one more gives the residual.

    Returns:
      x and SolveInfo. `residual` is computed from x anew. The residual that the recurrence carries
      falls on where rounding stops the true one: where it reaches the tolerance, x has converged if
      the true one is below the square root of the machine epsilon (3e-4 in float32).
    """
    system = _System(rhs, damping)
    times = system.operator(hvp)
    end = _conjugate_gradients(times, system.b, tolerance, max_iterations)
    reached = end.best_square <= tolerance**2 * _dot(system.b, system.b)
    rounding = system.epsilon**0.5
    return system.solution(
        "conjugate_gradient",
        end.best,
        times,
        iterations=end.k,
        negative=end.negative,
        usable=lambda residual, negative: (
            ~negative & ((residual <= tolerance) | reached & (residual <= rounding))
        ),
        remedy="a larger damping makes the system better conditioned",
    )


def largest_eigenvalue(
    hvp: products.Product, like: products.Vector, *, iterations: int = 20
) -> tf.Tensor:
    """The largest absolute eigenvalue of H by power iteration from a fixed start.

    Args:
      hvp: v -> H v, on nests like `like`.
      like: a nest of tensors, for its structure and shapes.
      iterations: each takes one product.

    Returns:
      A scalar, never above the true value beyond rounding. 20 iterations leave at worst a share of
      about P^(-1/40): 0.7 of it at a million entries where all the spectrum lies close below it.
    """
    config.require(iterations >= 1, f"iterations={iterations} must be at least 1.")
    system = _System(like, 0.0)
    times = system.operator(hvp)
    start = [
        tf.random.stateless_normal(tf.shape(part), [index, 0], dtype=part.dtype, alg="philox")
        for index, part in enumerate(system.b)
    ]
    length = _norm(start)

    def step(vector, _):
        image = times(vector)
        size = _norm(image)
        return [tf.math.divide_no_nan(part, size) for part in image], size

    state = ([part / length for part in start], tf.zeros([], system.dtype))
    _, size = tf.while_loop(lambda *_: True, step, state, maximum_iterations=iterations)
    return size


def eigenvalue_estimate(
    hvp: products.Product, like: products.Vector, damping: float | tf.Tensor
) -> tf.Tensor:
    """The largest eigenvalue of H + damping I, by 20 products, with a tenth for its shortfall."""
    return 1.1 * largest_eigenvalue(hvp, like) + damping


def neumann(
    hvp: products.Product,
    rhs: products.Vector,
    *,
    terms: int,
    step: float | tf.Tensor | None = None,
    damping: float | tf.Tensor = 0.0,
) -> Solution:
    """The Neumann series step * sum_{j < terms} (I - step (H + damping I))^j rhs.

    From Lorraine et al. (2020). It tends to the inverse with the number of terms where the
    eigenvalues of step * (H + damping I) lie between 0 and 2. Terms of a symmetric H that grow once
    grow for ever, at negative curvature or because the step is too large: the series diverges.

    Args:
      hvp: v -> H v, on nests like `rhs`.
      rhs: any nest of tensors.
      terms: how many; each takes one product, the last one's giving the residual.
      step: None is 1 / (1.1 * largest_eigenvalue + damping), for 20 products more. It converges if
        the estimate is at least half of the truth, which it is by far.
      damping: added to the diagonal.

    Returns:
      x and SolveInfo: `iterations` is the number of terms, smaller only where the next was not
      finite; converged where x is finite, the step positive and no term is longer than the one
      before, which excludes negative curvature along a term.
    """
    config.require(terms >= 1, f"terms={terms} must be at least 1.")
    system = _System(rhs, damping)
    times = system.operator(hvp)
    if step is None:
        bound = eigenvalue_estimate(hvp, rhs, tf.reduce_max(system.damping))
        step = tf.math.reciprocal_no_nan(bound)  # 0, and not converged, where H is
    else:
        step = _positive("step", step, system.dtype)

    def add(*state):
        s = _Series(*state)
        return _next_term(s, times(s.term), step)

    state = tf.while_loop(_summing, add, _Series.begin(system.b), maximum_iterations=terms - 1)
    end = _Series(*state)
    # The residual is the next term, down to the rounding of x.
    last = tf.maximum(end.norm, system.epsilon**0.5 * system.norm)
    return system.solution(
        "neumann",
        [step * part for part in end.total],
        times,
        iterations=end.k,
        negative=end.negative,
        usable=lambda residual, _: (step > 0) & ~end.grown & ~_longer(residual * system.norm, last),
        remedy=_SERIES_REMEDY,
    )


def lissa(
    stochastic_hvp: Callable[[products.Vector, tf.Tensor], products.Vector],
    rhs: products.Vector,
    *,
    iterations: int,
    scale: float | tf.Tensor,
    damping: float | tf.Tensor = 0.0,
    hvp: products.Product | None = None,
) -> Solution:
    """LiSSA: the Neumann series with a new sample of H in each term (Agarwal et al., Koh & Liang).

    h <- rhs + h - (H_j h + damping h) / scale from h = rhs, and x = h / scale. Samples of curvature
    between 0 and 2 scale let h grow by |rhs| an iteration at most: a longer h proves that it
    diverges, which ends the recursion with the iterate of the smallest sampled residual so far (the
    first is 0). The literature adds its damping after the division: ours is `scale` times that.

    Args:
      stochastic_hvp: (v, iteration) -> H_j v, with a sample that it draws by the iteration, an
        int32 scalar tensor; H is its mean.
      rhs: any nest of tensors.
      iterations: each takes one sampled product.
      scale: at least half of the largest eigenvalue of any sample and damping, for convergence.
      damping: added to the diagonal, in units of H.
      hvp: the product with H itself, for the residual and the curvature along x. Without it they
        come from one sample more, which the recursion has not seen: a residual that, squared, is
        too large by the variance of the sample on the mean.

    Returns:
      x and SolveInfo: converged where h did not grow beyond the bound and, given `hvp`, x is no
      worse than 0 (a residual of 1). negative_curvature tells of any sample; H need not share it.
    """
    config.require(iterations >= 1, f"iterations={iterations} must be at least 1.")
    system = _System(rhs, damping)
    scale = _positive("scale", scale, system.dtype)

    def unfinished(*state):
        return ~_Recursion(*state).grown

    def step(*state):
        s = _Recursion(*state)
        image = system.operator(lambda v: stochastic_hvp(v, s.k))(s.h)
        residual = _axpy(-1 / scale, image, system.b)
        h = _axpy(1.0, residual, s.h)
        size = _norm(residual)
        better = size < s.best_size
        bound = (tf.cast(s.k, system.dtype) + 2) * system.norm
        return _Recursion(
            k=s.k + 1,
            h=h,
            best=[tf.where(better, new, old) for new, old in zip(s.h, s.best, strict=True)],
            best_size=tf.where(better, size, s.best_size),
            grown=_longer(_norm(h), bound),
            negative=s.negative | _is_negative(s.h, image),
        )

    no = tf.constant(False)
    zeros = [tf.zeros_like(part) for part in system.b]
    begin = _Recursion(tf.constant(0), system.b, zeros, system.norm, no, no)
    end = _Recursion(*tf.while_loop(unfinished, step, begin, maximum_iterations=iterations))
    h = [tf.where(end.grown, best, last) for best, last in zip(end.best, end.h, strict=True)]
    judge = hvp or (lambda v: stochastic_hvp(v, tf.constant(iterations)))
    return system.solution(
        "lissa",
        [part / scale for part in h],
        system.operator(judge),
        iterations=end.k,
        negative=end.negative,
        usable=lambda residual, _: ~end.grown & ((residual <= 1) | (hvp is None)),
        remedy="raise scale above the largest eigenvalue of a sample, and damping where curvature "
        "is negative",
    )


def outer_product(
    gradients: products.Vector, rhs: products.Vector, *, damping: Any = 0.0
) -> Solution:
    """Solves with H = sum_i g_i g_i^T (Larsen et al., 1996) through the n x n matrix of products.

    With G [n, P] and b = rhs it is the pseudo-inverse, G^T (G G^T)^+ (G G^T)^+ G b without damping;
    with damping D it is Woodbury's D^-1 b - D^-1 G^T (I + G D^-1 G^T)^-1 G D^-1 b, whose terms all
    but cancel within the span of the gradients where D is small: that part is computed apart.

    What of b lies outside of the span is divided by the damping, and beside it that within keeps
    few digits in float32. The residual shows it; up to the fourth root of the machine epsilon (0.02
    in float32) x counts as converged.

    Args:
      gradients: g_i, weights included (sqrt(w_i) times the gradient, for a sum weighted by w): a
        nest like `rhs` of [n, *part.shape], or one tensor [n, P] over tf.nest.flatten(rhs) in turn.
      rhs: any nest of tensors, of P entries.
      damping: a scalar, or a nest like `rhs` of one scalar a part (as for an L2 that differs).
        A tensor that has no value yet while a graph is traced is taken to be positive.

    Returns:
      x and SolveInfo. Without damping what of rhs no gradient reaches is part of `residual`, and
      converged judges the rest.

    Raises:
      ConfigError: damping is 0 for some parts and not for others.
    """
    rows = [tf.convert_to_tensor(part) for part in tf.nest.flatten(gradients)]
    system = _System(rhs, damping, *rows)
    rows = [numerics.cast(part, system.dtype) for part in rows]
    if len(rows) == 1 and rows[0].shape.rank == 2:
        rows = tf.split(rows[0], system.sizes, axis=1, num=len(system.sizes))
    rows = [tf.reshape(part, [-1, n]) for part, n in zip(rows, system.sizes, strict=True)]
    zero = [tf.get_static_value(own) == 0 for own in system.damping]
    config.require(
        all(zero) or not any(zero),
        f"damping={damping} is 0 for some parts and not for others: the matrix would be singular "
        "in some alone. Give each of them a damping, or none.",
    )
    undamped = all(zero)
    # `rows` become G D^-1/2, which maps D^1/2 x to G x.
    ones = [tf.ones_like(own) for own in system.damping]
    weight = ones if undamped else [tf.math.rsqrt(own) for own in system.damping]
    rows = _multiply(rows, weight)
    values, vectors = factorizations.eigh(
        tf.add_n([tf.matmul(part, part, transpose_b=True) for part in rows])
    )
    noise = system.epsilon * tf.cast(tf.maximum(tf.shape(values)[0], 10), system.dtype)
    kept = values > noise * tf.reduce_max(values)
    inverse_values = tf.where(kept, tf.math.reciprocal_no_nan(values), tf.zeros_like(values))

    def project(parts):
        return tf.add_n(
            [
                tf.linalg.matvec(part, tf.reshape(v, [-1]))
                for part, v in zip(rows, parts, strict=True)
            ]
        )

    def back(u):
        pulled = [tf.linalg.matvec(part, u, transpose_a=True) for part in rows]
        return [tf.reshape(v, tf.shape(like)) for v, like in zip(pulled, system.b, strict=True)]

    def apply(function, u):
        """U f U^T u, for a factor f of each eigenvalue."""
        return tf.linalg.matvec(vectors, function * tf.linalg.matvec(vectors, u, transpose_a=True))

    def times(parts):
        image = back(project([v / own for v, own in zip(parts, weight, strict=True)]))
        image = [v / own for v, own in zip(image, weight, strict=True)]
        return system.damped(image, parts)

    def pseudo_inverse(r):
        return back(apply(inverse_values, apply(inverse_values, project(r))))

    def woodbury(r):
        r = _multiply(r, weight)
        projected = project(r)
        within = back(apply(inverse_values / (1 + values), projected))
        outside = _axpy(-1.0, back(apply(inverse_values, projected)), r)
        # Once more, as rounding leaves a share within.
        outside = _axpy(-1.0, back(apply(inverse_values, project(outside))), outside)
        return _multiply(_axpy(1.0, within, outside), weight)

    inverse = pseudo_inverse if undamped else woodbury
    x = _refined(
        lambda v: system.flat(inverse(system.parts(v))),
        lambda v: system.flat(times(system.parts(v))),
        system.flat(system.b),
    )
    x = system.parts(x)

    def usable(residual, _):
        if undamped:
            left = _axpy(-1.0, times(x), system.b)
            reached = tf.norm(apply(tf.sqrt(inverse_values), project(left)))
            residual = tf.math.divide_no_nan(reached, system.norm)
        return residual <= system.epsilon**0.25

    return system.solution(
        "outer_product",
        x,
        times,
        iterations=2,
        usable=usable,
        remedy="raise damping, and check that the gradients are finite",
    )


def unrolled(
    step_hvps: Sequence[products.Product] | Callable[[products.Vector, tf.Tensor], products.Vector],
    rhs: products.Vector,
    *,
    step: float | tf.Tensor,
    damping: float | tf.Tensor = 0.0,
    steps: int | None = None,
) -> Solution:
    """Reverse mode through the last K steps of gradient descent (Shaban et al., 2019).

    Let w_{k+1} = w_k - step * grad L(w_k, lambda), with H_k the Hessian at w_k. A change of lambda
    that adds c to every gradient changes w_K by -step * sum_k M_{K-1} ... M_{k+1} c, where
    M_k = I - step (H_k + damping I). Transposed and applied to rhs, the gradient of the validation
    loss by w_K, that is

        x = step * (rhs + M_{K-1} rhs + M_{K-2} M_{K-1} rhs + ... + M_1 ... M_{K-1} rhs)

    K terms, the newest step first. w_0 does not depend on lambda: H_0 enters where K = 1 alone, in
    the residual. On a quadratic it is `neumann` of K terms.

    Args:
      step_hvps: the products with H_0 to H_{K-1}, oldest first; or a function (v, k) -> H_k v of
        an int32 scalar tensor, which is called in one tf.while_loop, so that a graph does not grow
        with K.
      rhs: any nest of tensors.
      step: the learning rate.
      damping: added to the diagonal of each H_k.
      steps: K, for a function.

    Returns:
      x and SolveInfo: `iterations` is the number of terms; `residual` is by H_{K-1}, the newest;
      converged where x is finite, no worse than 0 by that residual, and no term longer than the one
      before, which excludes negative curvature along a term.
    """
    listed = not callable(step_hvps)
    config.require(
        listed == (steps is None), "steps is for a function: give it there, and not with a list."
    )
    count = len(step_hvps) if listed else steps
    config.require(count >= 1, f"steps={count} must be at least 1.")
    system = _System(rhs, damping)
    step = _positive("step", step, system.dtype)

    def times_at(k):
        return system.operator(step_hvps[k] if listed else lambda v: step_hvps(v, k))

    def add(*state, k=None):
        s = _Series(*state)
        k = count - s.k if k is None else k
        return _next_term(s, times_at(k)(s.term), step)

    state = _Series.begin(system.b)
    if listed:
        for k in range(count - 1, 0, -1):
            state = add(*state, k=k)
    else:
        state = tf.while_loop(_summing, add, state, maximum_iterations=count - 1)
    end = _Series(*state)
    newest = count - 1 if listed else tf.constant(count - 1)
    return system.solution(
        "unrolled",
        [step * part for part in end.total],
        times_at(newest),
        iterations=end.k,
        negative=end.negative,
        usable=lambda residual, _: ~end.grown & ~_longer(residual, tf.ones_like(residual)),
        remedy=_SERIES_REMEDY,
    )


class _System:
    """(H + damping I) x = b, on the list of a nest's tensors, with b in units of its largest entry.

    The square of a confident network's gradient may underflow otherwise.
    """

    def __init__(self, rhs, damping, *others):
        given = [tf.convert_to_tensor(part) for part in tf.nest.flatten(rhs)]
        double = any(tf.as_dtype(part.dtype) == tf.float64 for part in (*given, *others))
        self.dtype = tf.float64 if double else tf.float32
        self.epsilon = numerics.epsilon(self.dtype)
        self._structure = rhs
        given = [numerics.cast(part, self.dtype) for part in given]
        self._unit = tf.reduce_max([tf.reduce_max(tf.abs(part)) for part in given])
        self.b = [tf.math.divide_no_nan(part, self._unit) for part in given]
        self.norm = _norm(self.b)
        self.sizes = [part.shape.num_elements() or tf.size(part) for part in given]
        parts = [numerics.cast(own, self.dtype) for own in tf.nest.flatten(damping)]
        config.require(
            len(parts) in (1, len(given)),
            f"damping has {len(parts)} parts and the right-hand side {len(given)}: give one, or "
            "one for each.",
        )
        for own in parts:
            value = tf.get_static_value(own)
            config.require(value is None or value >= 0, f"damping={value} must be at least 0.")
        self.damping = parts * len(given) if len(parts) == 1 else parts

    def _pack(self, parts):
        return tf.nest.pack_sequence_as(self._structure, parts)

    def flat(self, parts):
        return tf.concat([tf.reshape(part, [-1]) for part in parts], axis=0)

    def parts(self, vector):
        pieces = tf.split(vector, self.sizes, num=len(self.sizes))
        return [tf.reshape(v, tf.shape(like)) for v, like in zip(pieces, self.b, strict=True)]

    def damped(self, image, parts):
        return [
            numerics.cast(h, self.dtype) + own * v
            for h, own, v in zip(image, self.damping, parts, strict=True)
        ]

    def operator(self, product):
        """H + damping I on lists, from the product with H on nests."""
        return lambda parts: self.damped(tf.nest.flatten(product(self._pack(parts))), parts)

    def solution(
        self,
        solver,
        x,
        times,
        *,
        iterations,
        negative=False,
        usable=lambda residual, negative: True,
        remedy=None,
    ):
        """x, in units of b, as the caller's answer, and how good it is.

        `times` is H + damping I on lists, to measure it by, or None; `usable` tells from the
        residual and the negative curvature whether a finite answer may be used; `remedy` is what to
        do if not, logged in eager mode, where None leaves that to the caller.
        """
        answer = [part * self._unit for part in x]
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(part)) for part in answer])
        answer = [tf.where(finite, part, tf.zeros_like(part)) for part in answer]
        negative = tf.convert_to_tensor(negative)
        if times is None:
            residual = tf.constant(np.nan, self.dtype)
        else:
            image = times(x)
            left = _axpy(-1.0, image, self.b)
            residual = tf.math.divide_no_nan(_norm(left), self.norm)
            finite &= tf.math.is_finite(residual)
            residual = tf.where(finite, residual, tf.constant(np.inf, self.dtype))
            negative |= _is_negative(x, image)
        info = solve_info.SolveInfo(
            residual=residual,
            iterations=tf.convert_to_tensor(iterations),
            negative_curvature=negative,
            converged=finite & usable(residual, negative),
            solver=tf.constant(solve_info.SOLVERS.index(solver)),
            exact_curvature=tf.constant(True),
        )
        if tf.executing_eagerly() and remedy and not (info.converged and not negative):
            _log.warning(
                "%s ended with a relative residual of %.2g after %d iterations%s%s: %s.",
                solver,
                info.residual,
                info.iterations,
                ", at negative curvature" if negative else "",
                "" if info.converged else ", and its answer is not to be used",
                remedy,
            )
        return self._pack(answer), info


class _Series(NamedTuple):
    """The first k terms of a series: their sum, the last one, and what was seen on the way."""

    k: tf.Tensor
    total: list
    term: list
    norm: tf.Tensor
    grown: tf.Tensor
    negative: tf.Tensor
    ended: tf.Tensor

    @classmethod
    def begin(cls, b):
        no = tf.constant(False)
        return cls(tf.constant(1), b, b, _norm(b), no, no, no)


def _summing(*state):
    return ~_Series(*state).ended


def _next_term(s, image, step):
    """Adds (I - step A) term, given image = A term; a sum that would not be finite stays as is."""
    term = _axpy(-step, image, s.term)
    norm = _norm(term)
    ended = s.ended | ~tf.math.is_finite(norm)
    return _Series(
        k=s.k + tf.cast(~ended, tf.int32),
        total=[tf.where(ended, old, old + new) for old, new in zip(s.total, term, strict=True)],
        term=[tf.where(ended, old, new) for old, new in zip(s.term, term, strict=True)],
        norm=tf.where(ended, s.norm, norm),
        grown=s.grown | _longer(norm, s.norm),
        negative=s.negative | _is_negative(s.term, image),
        ended=ended,
    )


class _Recursion(NamedTuple):
    k: tf.Tensor
    h: list
    best: list
    best_size: tf.Tensor
    grown: tf.Tensor
    negative: tf.Tensor


class _Conjugate(NamedTuple):
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


def _conjugate_gradients(times, b, tolerance, max_iterations):
    """The end of conjugate gradients for `times`, a product of lists of tensors."""
    square = _dot(b, b)
    target = tolerance**2 * square
    noise = 100 * numerics.epsilon(square.dtype)

    def unfinished(*state):
        s = _Conjugate(*state)
        return (s.best_square > target) & ~s.stopped

    def step(*state):
        s = _Conjugate(*state)
        product = times(s.direction)
        curvature = _dot(s.direction, product)
        per_length = tf.math.divide_no_nan(curvature, _dot(s.direction, s.direction))
        size = tf.maximum(s.size, tf.abs(per_length))
        going = curvature > 0
        alpha = tf.where(going, tf.math.divide_no_nan(s.square, curvature), tf.zeros_like(square))
        x = _axpy(alpha, s.direction, s.x)
        residual = _axpy(-alpha, product, s.residual)
        new_square = _dot(residual, residual)
        better = new_square < s.best_square
        return _Conjugate(
            k=s.k + tf.cast(going, tf.int32),
            x=x,
            residual=residual,
            direction=_axpy(tf.math.divide_no_nan(new_square, s.square), s.direction, residual),
            square=new_square,
            best=[tf.where(better, new, old) for new, old in zip(x, s.best, strict=True)],
            best_square=tf.where(better, new_square, s.best_square),
            size=size,
            stopped=~going,
            # Rounding alone makes a flat direction of a singular system slightly negative.
            negative=per_length < -noise * size,
        )

    no, start = tf.constant(False), [tf.zeros_like(part) for part in b]
    begin = _Conjugate(
        tf.constant(0), start, b, b, square, start, square, tf.zeros_like(square), no, no
    )
    return _Conjugate(*tf.while_loop(unfinished, step, begin, maximum_iterations=max_iterations))


def _refined(inverse, times, b, steps=2):
    """Iterative refinement recovers the digits that float32, or XLA's eigenvalues, cost."""
    x = inverse(b)
    for _ in range(steps):
        x += inverse(b - times(x))
    return x


def _longer(norm, other):
    """Whether it is so beyond rounding, or not finite."""
    return ~(norm <= (1 + 100 * numerics.epsilon(norm.dtype)) * other)


def _is_negative(vector, image):
    """Whether <v, A v> is below 0 beyond rounding."""
    curvature = _dot(vector, image)
    return curvature < -100 * numerics.epsilon(curvature.dtype) * _norm(vector) * _norm(image)


def _dot(a, b):
    return tf.add_n([tf.reduce_sum(x * y) for x, y in zip(a, b, strict=True)])


def _norm(a):
    return tf.sqrt(_dot(a, a))


def _multiply(parts, factors):
    return [factor * part for part, factor in zip(parts, factors, strict=True)]


def _axpy(alpha, x, y):
    return [b + alpha * a for a, b in zip(x, y, strict=True)]


def _positive(name, value, dtype):
    value = numerics.cast(value, dtype)
    known = tf.get_static_value(value)
    # A scale or step that was computed from what is not finite is no setting: the answer tells.
    config.require(known is None or not known <= 0, f"{name}={known} must be above 0.")
    return value
