"""The curvature of every loss: by autodiff, in every solve, and against minimizing again."""

import numpy as np
import pytest
import tensorflow as tf

from ssl_influence import config, head_rows
from ssl_influence.influence import all_variables, row_curvature, softmax_head, weight_gradients

RUNNERS = {
    "eager": lambda fn: fn,
    "graph": tf.function,
    "compiled": lambda fn: tf.function(fn, jit_compile=True),
}
SOLVERS = ("cholesky", "cg", "woodbury", "inverse")


def softmax(z):
    p = np.exp(z - z.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def jacobian(p):
    """J of each row."""
    return np.einsum("nc,ce->nce", p, np.eye(p.shape[1])) - p[:, :, None] * p[:, None]


def mixed(n=12, d=5, c=4, seed=0):
    """Rows of a cross-entropy, of a Brier score, of both and of neither: x, logits, w, v."""
    rng = np.random.default_rng(seed)
    x, logits = rng.normal(size=(n, d)), 2 * rng.normal(size=(n, c))
    kind = np.arange(n) % 4
    w, v = (rng.uniform(0.5, 1.5, n) / n for _ in range(2))
    return x, logits, w * np.isin(kind, (0, 2)), 2 / c * v * np.isin(kind, (1, 2))


def row_matrices(logits, w, v):
    """The A_i from their definition; by f, through the two logits (f/2, -f/2), if C is 1."""
    if logits.shape[1] == 1:
        split = np.array([[0.5], [-0.5]])
        return split.T @ row_matrices(logits @ split.T, w, v) @ split
    j = jacobian(softmax(logits))
    return w[:, None, None] * j + v[:, None, None] * j @ j


def dense(x, logits, w, v, l2=0.0):
    matrix = sum(
        np.kron(np.outer(a, a), curvature)
        for a, curvature in zip(x, row_matrices(logits, w, v), strict=True)
    )
    return matrix + np.diag(np.repeat(np.broadcast_to(l2, x.shape[1]), logits.shape[1]))


def brier_score(logits, target):
    """The mean over the classes, of two where there is the one logit of the binary head."""
    if logits.shape[1] == 1:
        logits, target = tf.concat([logits, -logits], 1) / 2, tf.concat([target, 1 - target], 1)
    return tf.reduce_mean((tf.nn.softmax(logits) - target) ** 2, axis=1)


@pytest.mark.parametrize("runner", ["eager", "graph"])
@pytest.mark.parametrize("classes", [1, 2, 3, 10])
def test_a_brier_scores_curvature_is_autodiffs_where_predictions_equal_targets(
    classes, runner, record_property
):
    rng = np.random.default_rng(0)
    logits = tf.constant(rng.normal(size=(6, classes)))
    other = rng.random((6, 1)) if classes == 1 else rng.dirichlet(np.ones(classes), 6)

    def derivatives(target):
        with tf.GradientTape() as outer:
            outer.watch(logits)
            with tf.GradientTape(persistent=True) as inner:
                inner.watch(logits)
                loss = brier_score(logits, target)
                p = softmax_head.probabilities(logits)
            slope = inner.gradient(loss, logits)
        return outer.batch_jacobian(slope, logits), inner.batch_jacobian(p, logits)

    p = softmax_head.probabilities(logits)
    full, of_p = RUNNERS[runner](derivatives)(p)
    ones, share = np.ones(6), 2 / max(classes, 2)
    if classes == 1:  # p and 1 - p both change
        of_p = tf.concat([of_p, -of_p], 1)
    np.testing.assert_allclose(full, share * tf.matmul(of_p, of_p, transpose_a=True), atol=1e-15)
    curvature = row_curvature.RowCurvature.of(p, tf.constant(0 * ones), tf.constant(share * ones))
    columns = [curvature.times(tf.ones_like(p) * row) for row in np.eye(classes)]
    np.testing.assert_allclose(tf.stack(columns, 2), full, atol=1e-15)
    elsewhere, _ = derivatives(other)
    error = np.linalg.norm(elsewhere - full) / np.linalg.norm(elsewhere)
    record_property("relative error of Gauss-Newton at random targets", float(error))
    assert error > 0.05


@pytest.mark.parametrize("classes", [1, 2, 3, 10])
@pytest.mark.parametrize("squared", [False, True])
def test_all_forms_are_those_of_one_matrix(classes, squared):
    _, logits, w, v = mixed(c=classes)
    expected = row_matrices(logits, w, v if squared else 0 * v)
    curvature = row_curvature.RowCurvature.of(
        softmax_head.probabilities(logits), tf.constant(w), tf.constant(v) if squared else None
    )
    tangent = np.random.default_rng(1).normal(size=logits.shape)
    np.testing.assert_allclose(
        curvature.times(tf.constant(tangent)),
        np.einsum("nce,ne->nc", expected, tangent),
        atol=1e-15,
    )
    np.testing.assert_allclose(
        curvature.diagonal(), np.diagonal(expected, axis1=1, axis2=2), atol=1e-15
    )
    root = curvature.root().numpy()
    np.testing.assert_allclose(root @ root.transpose(0, 2, 1), expected, atol=1e-15)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("classes", [1, 3])
def test_the_hessian_and_its_product_have_every_row(classes, runner):
    x, logits, w, v = mixed(c=classes)
    l2 = np.array([0.1, 0.2, 0.3, 0.4, 0.0])
    vector = np.random.default_rng(1).normal(size=(5, classes))
    run, tensors = RUNNERS[runner], [tf.constant(a) for a in (x, logits, w, v)]
    matrix = run(lambda x, z, w, v: softmax_head.hessian(x, z, w, squared_weight=v, l2=l2))(
        *tensors
    )
    expected = dense(x, logits, w, v, l2)
    np.testing.assert_allclose(matrix, expected, atol=1e-13)
    product = run(
        lambda x, z, w, v: softmax_head.hessian_vector_product(
            x, z, w, vector, squared_weight=v, l2=l2
        )
    )(*tensors)
    np.testing.assert_allclose(np.ravel(product), expected @ vector.ravel(), atol=1e-13)


@pytest.mark.parametrize("method", SOLVERS)
@pytest.mark.parametrize(
    ("classes", "width", "runner"),
    [
        (1, 5, "eager"),
        (2, 5, "eager"),
        (3, 5, "graph"),
        (3, 5, "compiled"),
        (3, 30, "graph"),
        (10, 5, "eager"),
    ],
)
def test_every_method_solves_with_mixed_rows(method, classes, width, runner):
    x, logits, w, v = mixed(d=width, c=classes)
    rhs = np.random.default_rng(1).normal(size=(width, classes))
    l2 = np.append(np.full(width - 1, 0.02), 0.0)
    matrix = dense(x, logits, w, v, l2) + 0.01 * np.eye(rhs.size)
    fn = RUNNERS[runner](
        lambda x, z, w, v, rhs: softmax_head.solve(
            x, z, w, rhs, squared_weight=v, l2=l2, damping=0.01, method=method, tolerance=1e-13
        )
    )
    answer, info = fn(*map(tf.constant, (x, logits, w, v, rhs)))
    assert info.converged and info.method == method
    np.testing.assert_allclose(
        np.ravel(answer), np.linalg.solve(matrix, rhs.ravel()), rtol=1e-9, atol=1e-9
    )


def test_the_preconditioner_counts_brier_rows(monkeypatch):
    x, logits, w, v = mixed(n=200, d=30, c=6)
    x = x * np.geomspace(0.03, 3, 30)
    rhs = softmax_head.gradient(x, logits, np.arange(200) % 6, 1 / 200)

    def iterations(w):
        _, info = softmax_head.solve(
            x, logits, w, rhs, squared_weight=v, damping=1e-4, method="cg", max_iterations=500
        )
        return int(info.iterations)

    found = iterations(w), iterations(0 * w)
    monkeypatch.setattr(
        softmax_head, "_kronecker_preconditioner", lambda system: (lambda r: r, 1.0)
    )
    assert 4 * found[0] < iterations(w) and 3 * found[1] < iterations(0 * w)


def test_negative_brier_rows_are_reported():
    x, logits, w, v = mixed(n=40)
    rhs = softmax_head.gradient(x, logits, np.arange(40) % 4, 1 / 40)
    for method in SOLVERS:
        fn = tf.function(
            lambda v, method=method: softmax_head.solve(
                x, logits, 0 * w, rhs, squared_weight=v, damping=1e-3, method=method
            )
        )
        _, info = fn(tf.constant(-9 * v))
        assert info.negative_curvature and not info.converged


class Head:
    """A head on fixed features, rows of every kind, and its minimum by Newton's method in NumPy.

    Unlabeled rows, in turn: a cross-entropy to a soft target; one at a moved point to what a fixed
    head says of the point itself (VAT); a loss linear in the logits, of a gradient and no
    curvature; one that does not touch the head; and a Brier score.
    """

    KINDS = ("soft", "moved", "linear", "other", "brier")

    def __init__(self, brier_targets):
        rng = np.random.default_rng(3)
        d, c, n, labeled, validation = 4, 3, 15, 10, 12
        self.kind = np.array([self.KINDS[i % 5] for i in range(n)])
        self.x = rng.normal(size=(labeled + n, d))
        fixed = softmax(self.x[labeled:] @ rng.normal(size=(d, c)))
        self.x[labeled:][self.kind == "moved"] += 0.3 * rng.normal(size=(3, d))
        soft = rng.dirichlet(np.ones(c), n)
        pull = 0.3 * (soft - 1 / c)
        self.target = np.select(
            [(self.kind == kind)[:, None] for kind in ("moved", "linear")], [fixed, pull], soft
        )
        self.target = np.vstack([np.eye(c)[rng.integers(0, c, labeled)], self.target])
        self.kind = np.concatenate([np.full(labeled, "soft"), self.kind])
        self.a, self.coefficient = rng.random(labeled) / labeled, rng.uniform(0.5, 1, n) / n
        self.weight = rng.uniform(0.3, 2.0, n)
        self.x_validation, self.label = rng.normal(size=(validation, d)), rng.integers(0, c, 12)
        self.l2, self.labeled, self.start = 0.05, labeled, np.zeros((d, c))
        brier = self.kind == "brier"
        if brier_targets == "predictions":
            # Of the minimum without these rows: they then have no gradient there.
            kind, self.kind = self.kind, np.where(brier, "other", self.kind)
            self.target[brier] = softmax(self.x[brier] @ self.minimize(self.weight))
            self.kind = kind
        self.start = self.minimize(self.weight)

    def derivatives(self, kernel):
        """Of each row's loss by its logits: gradient and all of the curvature."""
        p = softmax(self.x @ kernel)
        c, error, j = p.shape[1], p - self.target, jacobian(p)
        away = np.eye(c) - p[:, None]  # e_k - p
        of_p = p[:, :, None, None] * (away[..., None] * away[..., None, :] - j[:, None])
        brier = 2 / c * (j @ j + np.einsum("nk,nkce->nce", error, of_p))
        kind = self.kind[:, None]
        gradient = np.select(
            [np.isin(kind, ("soft", "moved")), kind == "linear", kind == "brier"],
            [error, self.target, 2 / c * np.einsum("nce,ne->nc", j, error)],
        )
        kind = kind[..., None]
        return gradient, np.select([np.isin(kind, ("soft", "moved")), kind == "brier"], [j, brier])

    def minimize(self, weight):
        w = np.concatenate([self.a, self.coefficient * weight])
        kernel = self.start
        for _ in range(60):
            gradient, curvature = self.derivatives(kernel)
            slope = self.x.T @ (w[:, None] * gradient) + self.l2 * kernel
            matrix = np.einsum("n,nd,ne,ncf->dcef", w, self.x, self.x, curvature)
            matrix = matrix.reshape([kernel.size] * 2) + self.l2 * np.eye(kernel.size)
            if np.linalg.norm(slope) < 1e-14:
                break
            kernel = kernel - np.linalg.solve(matrix, slope.ravel()).reshape(kernel.shape)
        assert np.linalg.norm(slope) < 1e-12 and np.linalg.eigvalsh(matrix).min() > 0
        return kernel

    def truth(self):
        def validation_loss(weight):
            p = softmax(self.x_validation @ self.minimize(weight))
            return -np.log(p[np.arange(12), self.label]).mean()

        steps = 1e-4 * np.eye(15)
        return np.array(
            [validation_loss(self.weight + s) - validation_loss(self.weight - s) for s in steps]
        ) / (2e-4)

    def rows(self, part, without=()):
        """As the head sees them; those of the kinds in `without` have no curvature."""
        kind, logits = self.kind[part], self.x[part] @ self.start
        gradient, _ = self.derivatives(self.start)
        kind = np.where(np.isin(kind, without), "none", kind)
        return head_rows.HeadRows(
            *map(tf.constant, (self.x[part], logits, gradient[part])),
            cross_entropy=tf.constant(np.isin(kind, ("soft", "moved")) * 1.0),
            brier=tf.constant((kind == "brier") * 2 / 3),
            exact="brier" not in kind,
        )

    def influence(self, runner=lambda fn: fn, without=(), **settings):
        settings = config.WeightConfig(**{"damping": 0.0, **settings})
        labeled, unlabeled = (
            self.rows(slice(self.labeled)),
            self.rows(slice(self.labeled, None), without),
        )
        labeled = labeled._replace(cross_entropy=None, brier=None)  # 1 and 0, as given before
        return runner(
            lambda: weight_gradients.last_layer(
                labeled,
                self.a,
                unlabeled,
                self.coefficient,
                self.weight,
                tf.constant(self.x_validation),
                tf.constant(self.x_validation @ self.start),
                tf.constant(self.label),
                l2=self.l2,
                use_bias=False,
                settings=settings,
            )
        )()

    def objective(self):
        """The same over the kernel as a variable, from the losses themselves."""
        kernel, shares = tf.Variable(self.start), self.rows(slice(None))
        target, kind = tf.constant(self.target), self.kind

        def output_fn():
            logits = tf.matmul(self.x, kernel)
            losses = tf.where(
                np.isin(kind, ("soft", "moved")),
                -tf.reduce_sum(target * tf.nn.log_softmax(logits), axis=1),
                tf.zeros([len(kind)], tf.float64),
            )
            losses = tf.where(kind == "linear", tf.reduce_sum(target * logits, axis=1), losses)
            losses = tf.where(kind == "brier", brier_score(logits, target), losses)
            n = self.labeled
            heads = [
                all_variables.Outputs(
                    logits[part], shares.cross_entropy[part], shares.brier[part], shares.exact
                )
                for part in (slice(n), slice(n, None))
            ]
            coefficients = tf.constant(self.a), tf.constant(self.coefficient)
            return all_variables.Rows(
                losses[:n], coefficients[0], losses[n:], coefficients[1], *heads
            )

        return all_variables.Objective(output_fn, tf.constant(self.weight), [kernel], [self.l2])

    def over(self, **settings):
        settings = config.WeightConfig(**{"damping": 0.0, "influence_params": "all", **settings})
        logits = self.x_validation @ self.start
        slope = softmax_head.gradient(self.x_validation, logits, self.label, 1 / 12)
        return weight_gradients.over(self.objective(), [slope], settings=settings)


@pytest.fixture(scope="module")
def fitting():
    return Head("predictions")


@pytest.fixture(scope="module")
def random():
    return Head("random")


@pytest.mark.parametrize("runner", ["eager", "graph"])
@pytest.mark.parametrize("solver", ["exact", "cg"])
def test_equals_minimizing_again_where_brier_rows_fit(fitting, solver, runner):
    truth = fitting.truth()
    found, info = fitting.influence(
        RUNNERS[runner],
        inverse_hessian=solver,
        **({"cg_tolerance": 1e-12} if solver == "cg" else {}),
    )
    assert info.converged and info.curvature == "gauss_newton"
    size = np.abs(truth).max()
    np.testing.assert_allclose(found, truth, rtol=0, atol=1e-7 * size)
    kind = fitting.kind[fitting.labeled :]
    assert np.abs(truth[kind == "linear"]).min() > 1e-3 * size
    np.testing.assert_array_equal(found.numpy()[kind == "other"], 0)
    without, info = fitting.influence(without=("brier",), inverse_hessian=solver)
    assert np.abs(without - truth).max() > 1e-3 * size  # the Brier rows do take part
    assert info.curvature == "hessian"


def test_gauss_newton_comes_near_minimizing_again(random, record_property):
    truth = random.truth()
    found, info = random.influence()
    error = np.abs(found - truth).max() / np.abs(truth).max()
    record_property("error of Gauss-Newton, of the largest", float(error))
    record_property("correlation", float(np.corrcoef(found, truth)[0, 1]))
    assert info.curvature == "gauss_newton"
    assert 1e-5 < error < 0.2 and np.corrcoef(found, truth)[0, 1] > 0.98
    exact, info = random.over(inverse_hessian="exact", curvature="hessian")
    assert info.curvature == "hessian"
    np.testing.assert_allclose(exact, truth, atol=1e-7 * np.abs(truth).max())


@pytest.mark.parametrize(
    ("solver", "settings"),
    [
        ("exact", {}),
        ("cg", {"cg_tolerance": 1e-12}),
        ("identity", {}),
        ("neumann", {"neumann_terms": 7, "neumann_step": 0.2}),
        ("lissa", {"lissa_iterations": 7, "lissa_rows": 6, "lissa_scale": 20.0}),
        ("outer_product", {}),
    ],
)
def test_written_out_and_by_derivatives_of_the_losses(random, solver, settings):
    settings = {"inverse_hessian": solver, "damping": 0.03, **settings}
    found, info = random.influence(**settings)
    expected, _ = random.over(**settings)
    assert info.curvature == "gauss_newton"
    tolerance = 1e-5 if solver == "outer_product" else 1e-9
    np.testing.assert_allclose(found, expected, atol=tolerance * np.abs(expected).max())


def test_unrolling_takes_cross_entropies_alone(random):
    message = "unrolled follows cross-entropies .* cross_entropy and brier: use another"
    with pytest.raises(config.ConfigError, match=message):
        random.influence(inverse_hessian="unrolled")
    rows = random.objective().output_fn()
    with pytest.raises(config.ConfigError, match=message):
        all_variables.with_constant_targets(lambda: rows)
    plain = all_variables.Outputs(rows.labeled_head.logits, exact=False)
    with pytest.raises(config.ConfigError, match="rows with exact=False"):
        all_variables.with_constant_targets(
            lambda: rows._replace(labeled_head=plain, unlabeled_head=plain)
        )
