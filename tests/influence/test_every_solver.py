"""The hypergradient by every solver, end to end, against minimizing again."""

import functools

import keras as keras_3
import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

from ssl_influence import config, head_rows
from ssl_influence.influence import all_variables, sampling, weight_gradients

CLASSES, LABELED, UNLABELED, VALIDATION = 3, 8, 6, 9
L2 = 0.03

# Settings of each solver that approaches the inverse, and the share of the largest entry by which
# it may miss it.
SOLVERS = {
    "exact": ({}, 1e-7),
    "cg": ({"cg_tolerance": 1e-10}, 1e-7),
    "neumann": ({"neumann_terms": 1500}, 1e-4),
    "unrolled": ({"unroll_steps": 1500}, 1e-4),
    "lissa": ({"lissa_iterations": 400, "lissa_rows": 14}, 0.2),
}


class Problem:
    """A small network with tanh, strictly convex around its minimum by virtue of its L2."""

    def __init__(self, library=keras, hidden=3):
        rng = np.random.default_rng(0)
        layers = library.layers
        self.model = library.Sequential(
            [
                library.Input([4], dtype="float64"),
                layers.Dense(hidden, activation="tanh", dtype="float64"),
                layers.Dense(CLASSES, dtype="float64"),
            ]
        )
        self.variables = [
            v if isinstance(v, tf.Variable) else v.value for v in self.model.variables
        ]
        for variable in self.variables:
            variable.assign(0.5 * rng.normal(size=variable.shape))
        self.labeled, self.validation = (
            (
                tf.constant(rng.normal(size=[n, 4])),
                tf.one_hot(rng.integers(CLASSES, size=n), CLASSES, dtype=tf.float64),
            )
            for n in (LABELED, VALIDATION)
        )
        self.unlabeled = (
            tf.constant(rng.normal(size=[UNLABELED, 4])),
            tf.constant(rng.dirichlet(np.ones(CLASSES), UNLABELED)),
        )
        self.weight = rng.uniform(0.3, 2.0, UNLABELED)
        self.minimize(self.weight)

    @tf.function
    def losses(self, inputs, targets):
        return cross_entropy(self.model(inputs), targets)

    def minimize(self, weight):
        """Newton's method from where the variables are, with gradient descent until it is close."""
        weight = tf.constant(weight)
        for _ in range(3000):
            slope, matrix = self.derivatives(weight)
            if np.linalg.norm(slope) < 1e-13:
                break
            close = np.linalg.norm(slope) < 0.02 and np.linalg.eigvalsh(matrix).min() > 1e-3
            step = np.linalg.solve(matrix, slope) if close else 0.5 * slope
            at = 0
            for variable in self.variables:
                size = variable.shape.num_elements()
                variable.assign_sub(step[at : at + size].reshape(variable.shape))
                at += size
        assert np.linalg.norm(slope) < 1e-11
        assert np.linalg.eigvalsh(matrix).min() > 0

    @tf.function
    def _derivatives(self, weight):
        with tf.GradientTape(persistent=True) as outer:
            with tf.GradientTape() as inner:
                value = (
                    tf.reduce_mean(self.losses(*self.labeled))
                    + tf.reduce_mean(weight * self.losses(*self.unlabeled))
                    + L2 * tf.add_n([tf.nn.l2_loss(v) for v in self.variables])
                )
            slopes = inner.gradient(value, self.variables)
            slope = tf.concat([tf.reshape(s, [-1]) for s in slopes], 0)
        n = slope.shape[0]
        blocks = outer.jacobian(slope, self.variables)
        return slope, tf.concat([tf.reshape(block, [n, -1]) for block in blocks], 1)

    def derivatives(self, weight):
        return [part.numpy() for part in self._derivatives(weight)]

    def truth(self):
        """Central differences of the validation loss by lambda, minimizing again each time."""
        start = [v.numpy() for v in self.variables]
        found = np.empty(UNLABELED)
        for u in range(UNLABELED):
            losses = []
            for sign in (1, -1):
                self.minimize(self.weight + sign * 1e-4 * np.eye(UNLABELED)[u])
                losses.append(float(tf.reduce_mean(self.losses(*self.validation))))
                for variable, value in zip(self.variables, start, strict=True):
                    variable.assign(value)
            found[u] = (losses[0] - losses[1]) / 2e-4
        return found

    def influence(self, runner=lambda fn: fn, variables=None, **settings):
        settings = config.WeightConfig(**{"damping": 0.0, "influence_params": "all", **settings})
        return runner(
            lambda: weight_gradients.of_model(
                self.model,
                self.labeled,
                self.unlabeled,
                self.validation,
                cross_entropy,
                example_weight=tf.constant(self.weight),
                variables=variables,
                l2=L2,
                settings=settings,
            )
        )()


def cross_entropy(logits, targets):
    return tf.nn.softmax_cross_entropy_with_logits(targets, logits)


@pytest.fixture(scope="module")
def problem():
    return Problem()


@pytest.fixture(scope="module")
def truth(problem):
    return problem.truth()


@pytest.mark.parametrize("name", SOLVERS)
def test_solvers_approach_the_truth(problem, truth, name):
    settings, tolerance = SOLVERS[name]
    expected = truth
    if name == "lissa":  # samples rows of the Gauss-Newton matrix
        expected, _ = problem.influence(inverse_hessian="exact")
    else:
        settings = {**settings, "curvature": "hessian"}
    found, info = problem.influence(tf.function, inverse_hessian=name, **settings)
    assert info.converged and info.method == name_of(name)
    assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize("name", ["identity", "outer_product"])
def test_other_matrices_are_what_they_are_said_to_be(problem, truth, name):
    inputs, targets = (
        tf.concat(pair, 0) for pair in zip(problem.labeled, problem.unlabeled, strict=True)
    )
    with tf.GradientTape(persistent=True) as tape:
        losses = problem.losses(inputs, targets)
        validation_loss = tf.reduce_mean(problem.losses(*problem.validation))
    rows = np.hstack(
        [
            block.numpy().reshape(LABELED + UNLABELED, -1)
            for block in tape.jacobian(losses, problem.variables)
        ]
    )
    slope = np.concatenate(
        [g.numpy().ravel() for g in tape.gradient(validation_loss, problem.variables)]
    )
    weight = np.concatenate([np.ones(LABELED) / LABELED, problem.weight / UNLABELED])
    matrix = {
        "identity": np.eye(len(slope)),
        "outer_product": rows.T @ (weight[:, None] * rows) + L2 * np.eye(len(slope)),
    }[name]
    direction = np.linalg.solve(matrix + 0.05 * np.eye(len(slope)), slope)
    expected = -rows[LABELED:] @ direction / UNLABELED
    found, info = problem.influence(tf.function, inverse_hessian=name, damping=0.05)
    assert info.converged and info.method == name
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())
    assert np.corrcoef(found, truth)[0, 1] > 0.4  # and yet related


def name_of(solver):
    return {"cg": "conjugate_gradient"}.get(solver, solver)


def test_both_curvatures_and_more_terms(problem, truth):
    size = np.abs(truth).max()

    def error(**settings):
        return np.abs(problem.influence(**settings)[0] - truth).max() / size

    exact, gauss_newton = (
        error(inverse_hessian="cg", curvature=curvature) for curvature in config.CURVATURES[::-1]
    )
    assert exact < 1e-5 < gauss_newton < 1
    damped, _ = problem.influence(inverse_hessian="exact", curvature="hessian", damping=0.2)
    series = []
    for terms in (5, 20, 80):
        settings = {"inverse_hessian": "neumann", "neumann_terms": terms, "damping": 0.2}
        found, _ = problem.influence(tf.function, curvature="hessian", **settings)
        series.append(np.abs(found - damped).max())
    assert series[0] > 2 * series[1] > 4 * series[2]


@pytest.mark.parametrize(
    "name, settings",
    [
        ("cg", {"cg_iterations": 3}),
        ("unrolled", {"unroll_steps": 4, "unroll_step": 0.5}),
        ("lissa", {"lissa_iterations": 4, "lissa_scale": 8.0, "lissa_rows": 5}),
    ],
)
def test_variables_are_left_alone_and_a_graph_gives_the_same(problem, name, settings):
    before = [v.numpy() for v in problem.variables]
    take = functools.partial(problem.influence, inverse_hessian=name, damping=0.1, **settings)
    eager, _ = take()
    compiled, _ = take(functools.partial(tf.function, jit_compile=True))
    np.testing.assert_allclose(compiled, eager, atol=1e-10)
    np.testing.assert_allclose(take(tf.function)[0], eager, atol=1e-12)
    for variable, value in zip(problem.variables, before, strict=True):
        np.testing.assert_array_equal(variable, value)


def test_a_keras_3_model_gives_the_same(problem, truth):
    other = Problem(keras_3)
    found, _ = other.influence(tf.function, inverse_hessian="exact", curvature="hessian")
    np.testing.assert_allclose(found, truth, atol=1e-7 * np.abs(truth).max())


@pytest.mark.parametrize("name", [*SOLVERS, "identity", "outer_product"])
def test_over_the_last_layer_in_closed_form(problem, name):
    """Two ways to the same: matrices written out, and derivatives of the network."""
    features_of = keras.Model(problem.model.inputs, problem.model.layers[0].output)
    kernel, bias = problem.variables[2:]

    def rows(inputs, targets):
        features, logits = features_of(inputs), problem.model(inputs)
        return head_rows.HeadRows(features, logits, tf.nn.softmax(logits) - targets)

    settings = {**SOLVERS.get(name, [{}])[0], "inverse_hessian": name, "damping": 0.03}
    if name == "lissa":  # the same draws at the same scale
        settings["lissa_scale"] = 30.0
    tolerance = {"outer_product": 1e-5}.get(name, 1e-7)
    validation = rows(*problem.validation)
    found, info = tf.function(
        lambda: weight_gradients.last_layer(
            rows(*problem.labeled),
            tf.ones(LABELED, tf.float64) / LABELED,
            rows(*problem.unlabeled),
            tf.ones(UNLABELED, tf.float64) / UNLABELED,
            tf.constant(problem.weight),
            validation.features,
            validation.logits,
            tf.argmax(problem.validation[1], 1),
            l2=L2,
            l2_bias=L2,
            kernel=tf.concat([kernel, bias[tf.newaxis]], 0),
            settings=config.WeightConfig(**settings),
        )
    )()
    expected, _ = problem.influence(tf.function, variables=[kernel, bias], **settings)
    assert info.converged
    size = np.abs(expected).max()
    np.testing.assert_allclose(found, expected, atol=tolerance * size)


def test_draws_are_a_function_of_seed_and_iteration():
    weight = tf.ones(7, tf.float64)
    draws = [
        sampling.counts(weight, 5, tf.constant(seed), tf.constant(j)).numpy()
        for seed in ([1, 2], [1, 3])
        for j in range(200)
    ]
    again = tf.function(sampling.counts, jit_compile=True)(weight, 5, tf.constant([1, 2]), 3)
    np.testing.assert_allclose(again, draws[3], atol=1e-14)
    assert len({tuple(draw) for draw in draws}) > 150
    np.testing.assert_allclose(np.sum(draws, 1), 7)
    np.testing.assert_allclose(np.mean(draws, 0), np.ones(7), atol=0.2)


def test_exact_refuses_what_would_not_fit():
    with pytest.raises(
        config.ConfigError, match="10,000 x 10,000 numbers by as many products, 0.4 GB"
    ):
        all_variables.check_exact([tf.Variable(tf.zeros([100, 100]))])
    all_variables.check_exact([tf.Variable(tf.zeros([32, 64]))])


def test_losses_must_keep_the_rows(problem):
    with pytest.raises(config.ConfigError, match="keep one for each row"):
        weight_gradients.of_model(
            problem.model,
            problem.labeled,
            problem.unlabeled,
            problem.validation,
            lambda logits, targets: tf.reduce_mean(cross_entropy(logits, targets)),
        )


def test_outputs_with_an_axis_more():
    """A linear model: the Gauss-Newton matrix is the Hessian, also where the axis is as long."""
    rng = np.random.default_rng(0)
    for positions in (3, 4):
        model = keras.Sequential(
            [keras.Input([positions, 2]), keras.layers.Dense(CLASSES, dtype="float64")]
        )
        parts = [
            (
                tf.constant(rng.normal(size=[2, positions, 2])),
                tf.constant(rng.dirichlet(np.ones(CLASSES), [2, positions])),
            )
            for _ in range(3)
        ]
        weight = tf.constant([0.2, 3.0], tf.float64)

        def loss(logits, targets):
            return tf.reduce_sum(cross_entropy(logits, targets), axis=1)

        found = [
            weight_gradients.of_model(
                model,
                *parts,
                loss,
                example_weight=weight,
                settings=config.WeightConfig(inverse_hessian="exact", curvature=curvature),
            )[0]
            for curvature in config.CURVATURES
        ]
        np.testing.assert_allclose(*found, atol=1e-10)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"example_weight": tf.ones([4])}, "does not fit 6 unlabeled rows"),
        ({"validation": (tf.zeros([0, 4]), tf.zeros([0, 3]))}, "validation part has no row"),
        (
            {"labeled": (tf.zeros([5, 4]), tf.zeros([6, 3]))},
            "labeled inputs and targets have 5 and 6",
        ),
    ],
)
def test_parts_that_do_not_fit_are_refused(problem, change, message):
    parts = {name: getattr(problem, name) for name in ("labeled", "unlabeled", "validation")}
    with pytest.raises(config.ConfigError, match=message):
        weight_gradients.of_model(problem.model, loss_fn=cross_entropy, **{**parts, **change})


def test_an_error_while_unrolling_leaves_the_network_where_it_was():
    other = Problem()
    before, calls = [v.numpy() for v in other.variables], []

    def breaks(logits, targets):
        calls.append(1)
        if len(calls) > 6:
            raise ZeroDivisionError
        return cross_entropy(logits, targets)

    with pytest.raises(ZeroDivisionError):
        weight_gradients.of_model(
            other.model,
            other.labeled,
            other.unlabeled,
            other.validation,
            breaks,
            settings=config.WeightConfig(
                inverse_hessian="unrolled", unroll_steps=9, unroll_step=0.5
            ),
        )
    for variable, value in zip(other.variables, before, strict=True):
        np.testing.assert_array_equal(variable, value)
