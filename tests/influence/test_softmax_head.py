"""The last layer's Hessian and its solves against autodiff and NumPy."""

import numpy as np
import pytest
import tensorflow as tf

from ssl_influence import config
from ssl_influence.influence import softmax_head, solve_info

RUNNERS = {
    "eager": lambda fn: fn,
    "graph": tf.function,
    "compiled": lambda fn: tf.function(fn, jit_compile=True),
}
SOLVERS = ("cholesky", "cg", "woodbury", "inverse")


def problem(n=12, d=5, c=4, dtype=np.float64, seed=0, spread=2.0, bias=True):
    rng = np.random.default_rng(seed)
    x = np.maximum(rng.normal(size=(n, d)) + 0.3, 0)
    if bias:
        x[:, -1] = 1
    kernel = rng.normal(size=(d, c)) * spread / np.sqrt(d)
    rhs = rng.normal(size=(d, c))
    rhs -= rhs.mean(1, keepdims=True)
    return [a.astype(dtype) for a in (x, x @ kernel, rng.random(n) / n, rhs)] + [kernel]


def dense(x, logits, weight, l2=0.0):
    """The Hessian from its definition, row by row."""
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    matrix = sum(
        w * np.kron(np.outer(a, a), np.diag(q) - np.outer(q, q))
        for a, q, w in zip(x, p, weight, strict=True)
    )
    return matrix + np.diag(np.repeat(np.broadcast_to(l2, x.shape[1]), logits.shape[1]))


def solve(runner, *args, **settings):
    fn = RUNNERS[runner](lambda *tensors: softmax_head.solve(*tensors, **settings))
    return fn(*(tf.constant(a) for a in args))


@pytest.mark.parametrize("runner", RUNNERS)
def test_hessian_and_gradient_equal_autodiff(runner):
    x, _, weight, _, kernel = problem()
    targets = np.random.default_rng(5).dirichlet(np.ones(4), 12)
    l2 = np.array([0.1, 0.2, 0.3, 0.4, 0.0])
    k = tf.Variable(kernel)
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            loss = tf.nn.softmax_cross_entropy_with_logits(targets, tf.matmul(x, k))
            objective = tf.reduce_sum(weight * loss)
            objective += 0.5 * tf.reduce_sum(l2[:, None] * k**2)
        first = inner.gradient(objective, k)
    second = outer.jacobian(first, k)
    matrix = RUNNERS[runner](lambda x, z: softmax_head.hessian(x, z, weight, l2=l2))(
        tf.constant(x), tf.constant(x @ kernel)
    )
    found = softmax_head.gradient(x, x @ kernel, targets, weight) + l2[:, None] * kernel
    np.testing.assert_allclose(matrix, tf.reshape(second, [20, 20]), atol=1e-12)
    np.testing.assert_allclose(found, first, atol=1e-12)
    np.testing.assert_allclose(matrix, dense(x, x @ kernel, weight, l2), atol=1e-12)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("l2", [0.0, 0.3, np.arange(5.0)])
def test_product_equals_the_matrix(runner, l2):
    x, logits, weight, vector, _ = problem()
    product = RUNNERS[runner](
        lambda *a: softmax_head.hessian_vector_product(*a, l2=l2),
    )(*(tf.constant(a) for a in (x, logits, weight, vector + 0.7)))
    expected = dense(x, logits, weight, l2) @ (vector + 0.7).ravel()
    np.testing.assert_allclose(tf.reshape(product, [-1]), expected, atol=1e-12)


def test_gradient_takes_class_ids_and_a_scalar_weight():
    x, logits, _, _, _ = problem()
    labels = np.arange(12) % 4
    np.testing.assert_allclose(
        softmax_head.gradient(x, logits, labels, 0.5),
        softmax_head.gradient(x, logits, np.eye(4)[labels], np.full(12, 0.5)),
        atol=1e-15,
    )


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("method", SOLVERS)
def test_every_method_solves_the_damped_system(runner, method):
    x, logits, weight, rhs, _ = problem()
    rhs = rhs + 0.3 * np.arange(5)[:, None]  # a common shift of the classes is solved too
    l2 = np.array([0.02, 0.02, 0.02, 0.02, 0.0])
    matrix = dense(x, logits, weight, l2) + 0.01 * np.eye(20)
    answer, info = solve(
        runner, x, logits, weight, rhs, l2=l2, damping=0.01, method=method, tolerance=1e-13
    )
    np.testing.assert_allclose(
        tf.reshape(answer, [-1]), np.linalg.solve(matrix, rhs.ravel()), rtol=1e-9, atol=1e-9
    )
    assert info.method == method and info.residual < 1e-12
    assert info.converged and not info.negative_curvature


@pytest.mark.parametrize("method", ["cholesky", "cg", "inverse"])
@pytest.mark.parametrize("l2", [0.0, np.array([0.1, 0.1, 0.1, 0.1, 0.0])])
def test_the_shift_of_all_classes_is_no_obstacle(method, l2):
    x, logits, weight, rhs, _ = problem(n=40)
    answer, info = solve("graph", x, logits, weight, rhs, l2=l2, method=method, tolerance=1e-13)
    expected = np.linalg.pinv(dense(x, logits, weight, l2), rcond=1e-12) @ rhs.ravel()
    np.testing.assert_allclose(tf.reshape(answer, [-1]), expected, rtol=1e-8, atol=1e-8)
    assert info.converged


@pytest.mark.parametrize("method", SOLVERS)
def test_singular_beyond_the_shift_raises_or_is_reported(method):
    x, logits, weight, rhs, _ = problem(n=4, d=9, bias=False)
    with pytest.raises(solve_info.SolveError, match="Raise damping"):
        softmax_head.solve(x, logits, weight, rhs, method=method)
    for runner in ("graph", "compiled") if method == "cg" else ("graph",):
        answer, info = solve(runner, x, logits, weight, rhs, method=method)
        assert not info.converged and not info.negative_curvature
        assert np.all(np.isfinite(answer))
        if method != "cg":
            np.testing.assert_array_equal(answer, np.zeros_like(rhs))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("method", ["cholesky", "inverse"])
def test_a_dead_feature_is_singular(method, dtype):
    x, logits, weight, rhs, _ = problem(n=40, dtype=dtype)
    x[:, 1] = 0
    _, info = solve("graph", x, logits, weight, rhs, method=method)
    assert not info.converged
    _, info = solve("graph", x, logits, weight, rhs, method=method, damping=1e-3)
    assert info.converged


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("method", ["cholesky", "inverse"])
def test_a_singular_system_is_refused_even_if_it_has_answers(method, dtype):
    fn = tf.function(lambda *a: softmax_head.solve(*a, method=method))
    for seed in range(40):  # rounding decides whether a bare factorization succeeds
        x, logits, weight, vector, _ = problem(n=40, d=6, seed=seed, dtype=dtype)
        x[:, 2] = 0.3 * x[:, 1] + 0.7 * x[:, 0]
        rhs = softmax_head.hessian_vector_product(x, logits, weight, vector)
        assert not fn(x, logits, weight, rhs)[1].converged


@pytest.mark.parametrize("method", SOLVERS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_an_indefinite_hessian_is_reported(method, dtype):
    x, logits, weight, rhs, _ = problem(n=40, dtype=dtype)
    weight[:25] *= -3
    with pytest.raises(solve_info.SolveError, match="indefinite"):
        softmax_head.solve(x, logits, weight, rhs, method=method, damping=1e-3)
    for runner in ("graph", "compiled") if dtype == np.float32 else ("graph",):
        answer, info = solve(runner, x, logits, weight, rhs, method=method, damping=1e-3)
        assert info.negative_curvature and not info.converged
        assert np.all(np.isfinite(answer))


@pytest.mark.parametrize("method", SOLVERS)
@pytest.mark.parametrize("which", range(4))
def test_what_is_not_finite_never_leaves_the_solver(method, which):
    args = list(problem(n=10)[:4])
    args[which] = np.array(args[which])
    args[which].flat[1] = np.nan
    with pytest.raises(solve_info.SolveError, match="not finite"):
        softmax_head.solve(*args, method=method, damping=0.1)
    answer, info = solve("graph", *args, method=method, damping=0.1)
    assert not info.converged
    np.testing.assert_array_equal(answer, np.zeros([5, 4]))


@pytest.mark.parametrize(
    "method, scale", [(m, 1.0) for m in SOLVERS] + [("cholesky", 1e-25), ("cg", 1e25)]
)
def test_float32_reaches_a_small_residual_at_any_scale(method, scale):
    x, logits, weight, rhs, _ = problem(n=60, d=20, c=6, dtype=np.float32, spread=6)
    rhs *= scale
    answer, info = solve("graph", x, logits, weight, rhs, damping=1e-3, method=method)
    matrix = dense(*(a.astype(np.float64) for a in (x, logits, weight))) + 1e-3 * np.eye(120)
    expected = np.linalg.solve(matrix, rhs.ravel().astype(np.float64))
    assert answer.dtype == info.residual.dtype == tf.float32
    assert info.converged and info.residual < 1e-5
    error = np.abs(answer.numpy().ravel() - expected).max() / np.abs(expected).max()
    assert error < (1e-4 if method in ("cholesky", "woodbury") else 2e-3)


def test_lower_precision_is_solved_in_float32():
    args = [tf.cast(a, tf.bfloat16) for a in problem(n=40)[:4]]
    answer, info = softmax_head.solve(*args, damping=0.1)
    assert answer.dtype == tf.float32 and info.converged


def test_the_preconditioner_and_a_warm_start_save_iterations(monkeypatch):
    x, logits, weight, rhs, _ = problem(n=200, d=30, c=6)
    x = x * np.geomspace(0.03, 3, 30)
    settings = dict(damping=1e-4, method="cg", tolerance=1e-6)
    answer, info = softmax_head.solve(x, logits, weight, rhs, **settings)
    _, warm = softmax_head.solve(x, logits, weight, rhs, initial=answer, **settings)
    monkeypatch.setattr(
        softmax_head, "_kronecker_preconditioner", lambda system: (lambda r: r, 1.0)
    )
    _, plain = softmax_head.solve(x, logits, weight, rhs, **settings)
    assert info.converged and plain.converged
    assert warm.iterations == 0
    assert 4 * info.iterations < plain.iterations


def test_cg_cut_short_by_its_caller_is_reported_and_usable():
    x, logits, weight, rhs, _ = problem(n=60, d=20, c=6)
    norms = []
    for limit in (1, 5, 20):
        answer, info = softmax_head.solve(
            x, logits, weight, rhs, damping=1e-3, method="cg", tolerance=1e-14, max_iterations=limit
        )
        assert info.iterations == limit and not info.converged
        matrix = dense(x, logits, weight) + 1e-3 * np.eye(120)
        true = np.linalg.norm(rhs.ravel() - matrix @ answer.numpy().ravel())
        np.testing.assert_allclose(info.residual, true / np.linalg.norm(rhs), rtol=1e-6)
        norms.append(true)
    assert norms[2] < norms[1] < norms[0]


def test_more_features_than_rows():
    fn = RUNNERS["compiled"](
        lambda x, z, w, rhs, l2, start: softmax_head.solve(
            x, z, w, rhs, l2=l2, initial=start, method="cg", tolerance=1e-12
        )
    )
    x, logits, weight, rhs, _ = problem(n=8, d=30)
    for l2 in (
        np.full(30, 0.3),
        np.append(np.full(29, 0.2), 0.0),  # a bias that is not decayed
        np.append(0.3, np.linspace(0.01, 2.0, 29)),
        np.append([0.0, 0.0], np.full(28, 0.2)),  # more zeros than the row space may take in
    ):
        shifted = rhs + 0.3 * (l2 > 0)[:, None]
        expected = np.linalg.pinv(dense(x, logits, weight, l2), rcond=1e-12) @ shifted.ravel()
        args = (x, logits, weight, shifted, l2)
        answer, info = fn(*map(tf.constant, args), tf.zeros([30, 4], tf.float64))
        assert info.converged and info.residual < 1e-11
        np.testing.assert_allclose(tf.reshape(answer, [-1]), expected, rtol=1e-8, atol=1e-8)
        assert fn(*map(tf.constant, args), answer)[1].iterations <= 1
        indefinite = (x, logits, weight * ([-9] * 4 + [1] * 4), shifted, l2)
        info = fn(*map(tf.constant, indefinite), tf.zeros([30, 4], tf.float64))[1]
        assert info.negative_curvature and not info.converged


@pytest.mark.parametrize("method", SOLVERS)
def test_zero_right_hand_side_gives_zero(method):
    x, logits, weight, rhs, _ = problem()
    answer, info = softmax_head.solve(x, logits, weight, 0 * rhs, damping=0.1, method=method)
    np.testing.assert_array_equal(answer, 0 * rhs)
    assert info.converged and info.residual == 0


def test_auto_is_direct_for_small_systems_and_cg_for_others():
    for d, expected in ((10, "cholesky"), (200, "cg"), (700, "cg")):
        args = problem(n=8, d=d, c=4)[:4]
        assert softmax_head.solve(*args, damping=0.1)[1].method == expected
    with pytest.raises(config.ConfigError, match="lu"):
        softmax_head.solve(*args, method="lu")


@pytest.mark.parametrize("runner", ["eager", "compiled"])
def test_auto_is_direct_where_cg_falls_short(runner, monkeypatch):
    monkeypatch.setattr(softmax_head, "DIRECT_SIZE", 10)
    monkeypatch.setattr(softmax_head, "FALLBACK_ITERATIONS", 5)
    x, logits, weight, rhs, _ = problem()
    answer, info = solve(runner, x, logits, weight, rhs, damping=1e-3, tolerance=1e-10)
    assert info.method == "cholesky" and info.converged
    expected = np.linalg.solve(dense(x, logits, weight) + 1e-3 * np.eye(20), rhs.ravel())
    np.testing.assert_allclose(tf.reshape(answer, [-1]), expected, rtol=1e-9, atol=1e-9)
    _, info = softmax_head.solve(x, logits, weight, rhs, damping=1e-3, initial=answer)
    assert info.method == "cg" and info.converged


def test_a_thousand_classes_never_form_the_hessian():
    n, d, c = 64, 256, 1000
    tensors = [
        tf.TensorSpec([n, d]),
        tf.TensorSpec([n, c]),
        tf.TensorSpec([n]),
        tf.TensorSpec([d, c]),
    ]
    fn = tf.function(lambda *a: softmax_head.solve(*a, damping=0.1), input_signature=tensors)
    graph = fn.get_concrete_function().graph
    graphs = [graph] + [g for g in graph._functions.values() if hasattr(g, "graph")]
    sizes = [
        out.shape.num_elements() or 0
        for g in graphs
        for op in getattr(g, "graph", g).get_operations()
        for out in op.outputs
        if out.shape.rank is not None and out.shape.is_fully_defined()
    ]
    assert max(sizes) == d * c
    rng = np.random.default_rng(0)
    x, logits = rng.normal(size=(n, d)), rng.normal(size=(n, c))
    rhs = softmax_head.gradient(x, logits, np.arange(n), 1 / n)
    answer, info = fn(
        *(tf.cast(a, tf.float32) for a in (x, logits, np.full(n, 1 / n), rhs)),
    )
    assert info.method == "cg" and info.converged and answer.shape == [d, c]


def binary_problem(n=14, d=5, seed=3):
    """Rows, weights and right-hand side of a two-logit head, and theta' = theta_1 - theta_2."""
    x, _, weight, _, kernel = problem(n=n, d=d, c=2, seed=seed)
    return x, x @ kernel, weight, kernel[:, :1] - kernel[:, 1:]


@pytest.mark.parametrize("runner", RUNNERS)
def test_binary_gradient_and_hessian_equal_autodiff_of_the_two_logit_loss(runner):
    x, _, weight, difference = binary_problem()
    target = np.random.default_rng(5).random((14, 1))
    l2 = np.array([0.1, 0.2, 0.3, 0.4, 0.0])
    k = tf.Variable(difference)
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            f = tf.matmul(x, k)
            loss = target * tf.nn.softplus(-f) + (1 - target) * tf.nn.softplus(f)
            # -log of exp(f / 2) / (exp(f / 2) + exp(-f / 2)) is log(1 + exp(-f)).
            objective = tf.reduce_sum(weight[:, None] * loss)
            objective += 0.5 * tf.reduce_sum(l2[:, None] * k**2)
        first = inner.gradient(objective, k)
    second = tf.reshape(outer.jacobian(first, k), [5, 5])
    run = RUNNERS[runner]
    x, f = tf.constant(x), tf.constant(x @ difference)
    found = run(lambda *a: softmax_head.gradient(*a, target, weight))(x, f) + l2[:, None] * k
    np.testing.assert_allclose(found, first, atol=1e-12)
    matrix = run(lambda *a: softmax_head.hessian(*a, weight, l2=l2))(x, f)
    np.testing.assert_allclose(matrix, second, atol=1e-12)
    vector = np.arange(5.0)[:, None]
    product = run(
        lambda *a: softmax_head.hessian_vector_product(*a, weight, vector, l2=l2),
    )(x, f)
    np.testing.assert_allclose(product, second @ vector, atol=1e-12)


def test_binary_gradient_takes_ids_probabilities_and_distributions():
    x, _, weight, difference = binary_problem()
    label = np.arange(14) % 2
    p = 1 / (1 + np.exp(-x @ difference))
    expected = x.T @ (weight[:, None] * (p - (label == 0)[:, None]))
    for targets in (label, 1.0 - label[:, None], np.eye(2)[label]):
        found = softmax_head.gradient(x, x @ difference, targets, weight)
        np.testing.assert_allclose(found, expected, atol=1e-14)


@pytest.mark.parametrize("d", [5, 30])  # fewer and more than rows
@pytest.mark.parametrize("method", (*SOLVERS, "auto"))
def test_binary_influence_equals_that_of_two_logits_at_twice_the_regularization(method, d):
    x, logits, weight, difference = binary_problem(d=d)
    rng = np.random.default_rng(7)
    target, label = rng.dirichlet(np.ones(2), 14), rng.integers(0, 2, 14)
    l2 = np.append(np.full(d - 1, 0.05), 0.0)

    def influence(logits, target, half):
        """-<x^T S, g> of every row, with the rows as their own validation examples."""
        slope = softmax_head.gradient(x, logits, label, np.full(14, 1 / 14))
        settings = dict(l2=half * l2, damping=half * 0.02, method=method, tolerance=1e-13)
        answer, _ = softmax_head.solve(x, logits, weight, slope, **settings)
        wide = logits.shape[1] == 2
        odds = np.exp(logits) if wide else np.exp(np.hstack([logits / 2, -logits / 2]))
        error = odds / odds.sum(1, keepdims=True) - target
        return -np.sum((x @ answer.numpy()) * (error if wide else error[:, :1]), axis=1)

    two = influence(logits, target, 1.0)
    one = influence(x @ difference, target, 0.5)
    np.testing.assert_allclose(one, two, rtol=1e-8)
