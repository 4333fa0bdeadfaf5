"""Products with Hessians, their inverses and influence over any variables, against matrices."""

import functools
import logging
from typing import NamedTuple

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings, strategies as st

from ssl_influence import config, head_rows
from ssl_influence.influence import all_variables, inverse_hvp, products, solve_info

RUNNERS = [lambda fn: fn, tf.function]
CLASSES, LABELED, UNLABELED = 3, 5, 7


class Network:
    """Two layers in float64, rows of a weighted objective, and its derivatives by autodiff."""

    def __init__(self, seed=0):
        rng = np.random.default_rng(seed)
        shapes = [(4, 3), (3,), (3, CLASSES), (CLASSES,)]
        self.variables = [tf.Variable(rng.normal(size=shape)) for shape in shapes]
        self.unused = tf.Variable(rng.normal(size=2))
        self.inputs = rng.normal(size=(LABELED + UNLABELED, 4))
        self.target = rng.dirichlet(np.ones(CLASSES), LABELED + UNLABELED)
        mask = np.array([1, 0, 1, 1, 1, 0, 1.0])
        self.coefficient = 0.6 * mask / UNLABELED
        self.example_weight = tf.constant(rng.uniform(0.3, 2.0, UNLABELED))
        self.l2 = [0.3, 0.0, 0.2, 0.0]
        self.validation_inputs = rng.normal(size=(6, 4))
        self.validation_target = np.eye(CLASSES)[rng.integers(CLASSES, size=6)]
        self.vector = [tf.constant(rng.normal(size=shape)) for shape in shapes]

    def logits(self, inputs):
        kernel, bias, head_kernel, head_bias = self.variables
        return tf.tanh(inputs @ kernel + bias) @ head_kernel + head_bias

    def losses(self):
        return tf.nn.softmax_cross_entropy_with_logits(self.target, self.logits(self.inputs))

    def output(self):
        logits, losses = self.logits(self.inputs), self.losses()
        parts = [
            head_rows.HeadRows(rows, rows, rows)
            for rows in tf.split(logits, [LABELED, UNLABELED])  # only logits are read
        ]
        return Output(
            losses[:LABELED],
            tf.ones(LABELED, tf.float64) / LABELED,
            losses[LABELED:],
            tf.constant(self.coefficient),
            *parts,
        )

    def objective(self):
        return all_variables.Objective(self.output, self.example_weight, self.variables, self.l2)

    def row_weight(self):
        unlabeled = self.coefficient * self.example_weight.numpy()
        return np.concatenate([np.ones(LABELED) / LABELED, unlabeled])

    def written_out(self):
        value = tf.reduce_sum(self.row_weight() * self.losses())
        return value + sum(
            0.5 * c * tf.reduce_sum(v**2) for c, v in zip(self.l2, self.variables, strict=True)
        )

    def jacobian(self, fn):
        """[outputs, P], whatever the shape of the outputs."""
        with tf.GradientTape() as tape:
            outputs = tf.reshape(fn(), [-1])
        blocks = tape.jacobian(outputs, self.variables)
        return np.hstack([block.numpy().reshape(len(outputs), -1) for block in blocks])

    def gradient(self):
        with tf.GradientTape() as tape:
            value = self.written_out()
        return tf.concat([tf.reshape(g, [-1]) for g in tape.gradient(value, self.variables)], 0)

    @functools.cache  # noqa: B019 - one network, whose variables never change
    def matrix(self, curvature):
        if curvature == "hessian":
            return self.jacobian(self.gradient)
        p = tf.nn.softmax(self.logits(self.inputs)).numpy()
        weight = self.row_weight()
        jacobian = self.jacobian(lambda: self.logits(self.inputs))
        jacobian = jacobian.reshape(len(p), CLASSES, -1)
        sizes = [v.shape.num_elements() for v in self.variables]
        return np.diag(np.repeat(self.l2, sizes)) + sum(
            w * j.T @ (np.diag(q) - np.outer(q, q)) @ j
            for w, j, q in zip(weight, jacobian, p, strict=True)
        )

    def validation_loss(self):
        logits = self.logits(self.validation_inputs)
        return tf.reduce_mean(
            tf.nn.softmax_cross_entropy_with_logits(self.validation_target, logits)
        )


class Output(NamedTuple):
    supervised: tf.Tensor
    supervised_coefficient: tf.Tensor
    unsupervised: tf.Tensor
    unsupervised_coefficient: tf.Tensor
    labeled_head: head_rows.HeadRows
    unlabeled_head: head_rows.HeadRows


@pytest.fixture(scope="module")
def network():
    return Network()


def flat(parts):
    return np.concatenate([np.ravel(part) for part in parts])


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("curvature", all_variables.CURVATURES)
def test_products_equal_those_with_the_matrix(network, curvature, runner):
    found = runner(network.objective().product(curvature))(network.vector)
    expected = network.matrix(curvature) @ flat(network.vector)
    np.testing.assert_allclose(flat(found), expected, atol=1e-12)


def test_the_value_is_the_written_objective(network):
    np.testing.assert_allclose(network.objective().value(), network.written_out(), atol=1e-13)


def test_both_curvatures_agree_over_the_last_layer(network):
    head = slice(2, 4)
    objective = all_variables.Objective(
        network.output, network.example_weight, network.variables[head], network.l2[head]
    )
    vector = network.vector[head]
    gauss_newton, hessian = (flat(objective.product(c)(vector)) for c in all_variables.CURVATURES)
    np.testing.assert_allclose(gauss_newton, hessian, atol=1e-13)
    below = network.matrix("gauss_newton") - network.matrix("hessian")
    assert np.abs(below).max() > 1e-2  # which they do not in the layer below


def test_an_unknown_curvature_is_refused(network):
    with pytest.raises(ValueError, match="curvature='fisher'"):
        network.objective().product("fisher")


def test_a_variable_that_is_not_used_has_no_curvature(network):
    product = products.hvp(network.written_out, [*network.variables, network.unused])
    *found, of_unused = product([*network.vector, tf.ones(2, tf.float64)])
    expected = network.matrix("hessian") @ flat(network.vector)
    np.testing.assert_allclose(flat(found), expected, atol=1e-12)
    np.testing.assert_array_equal(of_unused, np.zeros(2))


@pytest.mark.parametrize("runner", RUNNERS)
def test_influence_equals_that_with_the_inverse_matrix(network, runner):
    damping = 0.05

    def compute():
        objective = network.objective()
        with tf.GradientTape() as tape:
            loss = network.validation_loss()
        direction, info = inverse_hvp.conjugate_gradient(
            objective.product("gauss_newton"),
            tape.gradient(loss, network.variables),
            damping=damping,
            tolerance=1e-12,
        )
        return objective.influence(direction), info

    found, info = runner(compute)()
    matrix = network.matrix("gauss_newton")
    rows = network.jacobian(network.losses)[LABELED:]
    direction = np.linalg.solve(
        matrix + damping * np.eye(len(matrix)), network.jacobian(network.validation_loss)[0]
    )
    np.testing.assert_allclose(found, -network.coefficient * (rows @ direction), atol=1e-11)
    assert info.converged and info.residual < 1e-12
    np.testing.assert_array_equal(found.numpy()[network.coefficient == 0], 0)


def positive(size, condition, seed=0):
    rng = np.random.default_rng(seed)
    vectors, _ = np.linalg.qr(rng.normal(size=(size, size)))
    return vectors @ np.diag(np.geomspace(1, condition, size)) @ vectors.T, rng.normal(size=size)


def product_with(matrix):
    return lambda vector: tf.linalg.matvec(tf.constant(matrix, vector.dtype), vector)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("damping", [0.0, 0.7])
def test_conjugate_gradients_solve_the_system(runner, damping):
    matrix, rhs = positive(20, 1e3)
    solve = runner(
        lambda b: inverse_hvp.conjugate_gradient(
            product_with(matrix), b, damping=damping, tolerance=1e-11
        )
    )
    x, info = solve(tf.constant(rhs))
    expected = np.linalg.solve(matrix + damping * np.eye(20), rhs)
    np.testing.assert_allclose(x, expected, atol=1e-9 * np.abs(expected).max())
    left = rhs - (matrix + damping * np.eye(20)) @ x.numpy()
    np.testing.assert_allclose(
        info.residual, np.linalg.norm(left) / np.linalg.norm(rhs), rtol=0.01, atol=1e-14
    )
    assert info.converged and not info.negative_curvature


def test_as_many_steps_as_different_eigenvalues_suffice():
    matrix = np.diag([1.0, 1, 4, 4, 9])
    x, info = inverse_hvp.conjugate_gradient(product_with(matrix), tf.ones(5, tf.float64))
    assert info.iterations == 3 and info.method == "conjugate_gradient"
    np.testing.assert_allclose(x, 1 / np.diag(matrix), rtol=1e-9)


def test_a_nest_keeps_its_structure_and_tiny_right_hand_sides_their_digits():
    def double(vector):
        return {name: 2 * part for name, part in vector.items()}

    rhs = {"kernel": tf.fill([2, 3], 1e-30), "bias": tf.fill([3], 3e-30)}
    x, info = inverse_hvp.conjugate_gradient(double, rhs)
    assert info.converged
    np.testing.assert_allclose(x["kernel"], np.full([2, 3], 5e-31), rtol=1e-6)
    np.testing.assert_allclose(x["bias"], np.full(3, 1.5e-30), rtol=1e-6)


def test_a_right_hand_side_of_zeros_is_solved_by_zeros():
    x, info = inverse_hvp.conjugate_gradient(product_with(np.eye(3)), tf.zeros(3))
    np.testing.assert_array_equal(x, np.zeros(3))
    assert info.converged and info.iterations == 0 and info.residual == 0


@pytest.mark.parametrize("runner", RUNNERS)
def test_negative_curvature_stops_with_the_best_so_far(runner, caplog):
    matrix, rhs = positive(12, 50)
    values, vectors = np.linalg.eigh(matrix)
    values[0] = -0.5
    matrix = vectors @ np.diag(values) @ vectors.T
    solve = runner(lambda b: inverse_hvp.conjugate_gradient(product_with(matrix), b))
    with caplog.at_level(logging.WARNING, "ssl_influence"):
        x, info = solve(tf.constant(rhs))
    assert info.negative_curvature and not info.converged and info.iterations < 12
    left = np.linalg.norm(rhs - matrix @ x.numpy()) / np.linalg.norm(rhs)
    np.testing.assert_allclose(info.residual, left, rtol=1e-9)
    assert left <= 1
    if runner is not tf.function:  # a graph cannot log
        assert "negative curvature" in caplog.text
    x, info = inverse_hvp.conjugate_gradient(product_with(matrix), tf.constant(rhs), damping=1.0)
    assert info.converged


def test_an_unmet_tolerance_is_reported(caplog):
    matrix, rhs = positive(20, 1e4)
    with caplog.at_level(logging.WARNING, "ssl_influence"):
        _, info = inverse_hvp.conjugate_gradient(
            product_with(matrix), tf.constant(rhs), max_iterations=3
        )
    assert not info.converged and not info.negative_curvature and info.iterations == 3
    assert "after 3 iterations" in caplog.text


def test_the_residual_is_that_of_the_answer_in_float32_too():
    matrix, rhs = positive(30, 1e6)
    x, info = inverse_hvp.conjugate_gradient(
        product_with(matrix), tf.constant(rhs, tf.float32), tolerance=1e-9, max_iterations=150
    )
    left = np.linalg.norm(rhs - matrix @ x.numpy().astype(float)) / np.linalg.norm(rhs)
    np.testing.assert_allclose(info.residual, left, rtol=0.2)
    assert not info.converged


def test_values_that_are_not_finite_do_not_reach_the_answer():
    x, info = inverse_hvp.conjugate_gradient(lambda v: v * float("nan"), tf.ones(3))
    np.testing.assert_array_equal(x, np.zeros(3))
    assert not info.converged and np.isinf(info.residual)


def compiled(fn):
    return tf.function(fn, jit_compile=True)


def twice(product, vector):
    """H H v, by a loop that calls a product made outside of it."""

    def body(k, *parts):
        return k + 1, *product(list(parts))

    start = (tf.constant(0), *vector)
    return tf.while_loop(lambda k, *_: k < 2, body, start, maximum_iterations=2)[1:]


@pytest.mark.parametrize(
    ("made_within", "runner"),
    [(False, RUNNERS[0]), (True, tf.function), (False, compiled), (True, compiled)],
)
def test_products_work_in_a_loop_that_they_were_made_outside_of(network, runner, made_within):
    def of_hessian():
        return products.hvp(tf.function(network.written_out), network.variables)

    def of_gauss_newton():
        weight = tf.constant(network.row_weight())
        return products.gauss_newton_product(
            tf.function(lambda: network.logits(network.inputs)),
            lambda logits, tangent: products.softmax_curvature(logits, tangent, weight),
            network.variables,
        )

    if made_within:
        found = runner(lambda v: [twice(of_hessian(), v), twice(of_gauss_newton(), v)])
    else:
        made = [of_hessian(), of_gauss_newton()]
        found = runner(lambda v: [twice(product, v) for product in made])
    hessian, gauss_newton = found(network.vector)
    expected = np.linalg.matrix_power(network.matrix("hessian"), 2) @ flat(network.vector)
    np.testing.assert_allclose(flat(hessian), expected, atol=1e-11)
    sizes = [v.shape.num_elements() for v in network.variables]
    matrix = network.matrix("gauss_newton") - np.diag(np.repeat(network.l2, sizes))
    expected = np.linalg.matrix_power(matrix, 2) @ flat(network.vector)
    np.testing.assert_allclose(flat(gauss_newton), expected, atol=1e-11)


@pytest.mark.parametrize("runner", [RUNNERS[0], compiled])
def test_products_go_through_a_loop_and_a_branch_of_the_model(runner):
    variable = tf.Variable([0.3, -0.2], dtype=tf.float64)

    def fn():
        def body(k, z):
            return k + 1, z**2

        _, power = tf.while_loop(
            lambda k, _: k < 2, body, (0, tf.identity(variable)), maximum_iterations=2
        )
        cube = tf.cond(variable[0] > 0, lambda: variable**3, lambda: variable)
        return tf.reduce_sum(power + cube)  # v^4 + v^3

    [found] = runner(lambda v: twice(products.hvp(fn, [variable]), [v]))(tf.ones(2, tf.float64))
    v = variable.numpy()
    np.testing.assert_allclose(found, (12 * v**2 + 6 * v) ** 2, rtol=1e-12)


def test_the_model_runs_once_and_none_of_it_in_the_loop():
    variable, calls = tf.Variable([0.5, 2.0]), []

    def fn():
        calls.append(None)
        noise = tf.random.uniform([2])
        return tf.reduce_sum(noise * variable**4)

    product = products.hvp(fn, [variable])
    first, again = product([tf.ones(2)]), product([tf.ones(2)])
    np.testing.assert_array_equal(first, again)
    assert len(calls) == 1

    @tf.function
    def solve(b):
        return inverse_hvp.conjugate_gradient(products.hvp(fn, [variable]), b)

    graph = solve.get_concrete_function([tf.ones(2)]).graph
    [loop] = [op for op in graph.get_operations() if op.type in ("While", "StatelessWhile")]
    body = loop.get_attr("body").name
    inner = graph._get_function(body).cached_definition.node_def
    assert any(op.type == "RandomUniform" for op in graph.get_operations())
    assert not {"RandomUniform", "ReadVariableOp"} & {node.op for node in inner}


def test_later_values_of_the_variables_do_not_count():
    variable = tf.Variable([1.0, 2.0], dtype=tf.float64)
    product = products.hvp(lambda: tf.reduce_sum(variable**3), [variable])
    variable.assign([7.0, 7.0])
    np.testing.assert_allclose(product([tf.ones(2, tf.float64)]), [[6.0, 12.0]])


def test_outputs_of_no_variable_are_refused():
    variable = tf.Variable([1.0])
    with pytest.raises(config.ConfigError, match="none of the 1 variables"):
        products.gauss_newton_product(lambda: tf.ones([2, 2]), lambda _, t: t, [variable])


# One system for all solvers: (S S^T + I) of 6 entries in two parts, eigenvalues between 1 and 5.
FACTOR = np.random.default_rng(1).normal(size=(6, 6)) / 3
SYSTEM = FACTOR @ FACTOR.T + np.eye(6)
RHS = {"a": np.array([1.0, 2, 3, -1]), "b": np.array([[0.5], [-2.0]])}
TRUTH_WITHIN = {
    "exact": 1e-13,
    "outer_product": 1e-13,
    "conjugate_gradient": 1e-12,
    "neumann": 1e-5,
    "lissa": 1e-5,
    "unrolled": 1e-5,
    "unrolled list": 0.3,
}


def split(vector):
    return {"a": vector[:4], "b": tf.reshape(vector[4:], [2, 1])}


def joined(nest):
    return tf.concat([nest["a"], tf.reshape(nest["b"], [-1])], axis=0)


def system_product(nest):
    return split(product_with(SYSTEM)(joined(nest)))


def solve_by_all(rhs, damping):
    dtype = inverse_hvp.largest_eigenvalue(system_product, rhs, iterations=1).dtype
    gradients = tf.constant(FACTOR.T, dtype)
    parts = {"a": gradients[:, :4], "b": tf.reshape(gradients[:, 4:], [6, 2, 1])}
    matrix = inverse_hvp.dense(system_product, rhs)
    return {
        "exact": inverse_hvp.exact(matrix, rhs, damping=damping),
        "outer_product": inverse_hvp.outer_product(
            parts, rhs, damping={"a": 1.0 + damping, "b": 1.0 + damping}
        ),
        "conjugate_gradient": inverse_hvp.conjugate_gradient(
            system_product, rhs, damping=damping, tolerance=1e-12
        ),
        "neumann": inverse_hvp.neumann(system_product, rhs, terms=30, damping=damping),
        "lissa": inverse_hvp.lissa(
            lambda v, _: system_product(v), rhs, iterations=30, scale=2.5, damping=damping
        ),
        "unrolled": inverse_hvp.unrolled(
            lambda v, _: system_product(v), rhs, step=0.4, steps=30, damping=damping
        ),
        "unrolled list": inverse_hvp.unrolled([system_product] * 4, rhs, step=0.4, damping=damping),
        "identity": inverse_hvp.identity(rhs, damping=damping, hvp=system_product),
    }


@pytest.fixture(scope="module")
def solved_eagerly():
    return solve_by_all(tf.nest.map_structure(tf.constant, RHS), 0.1)


def test_all_solvers_tend_to_the_same_answer_and_measure_how_near(solved_eagerly):
    b, matrix = joined(RHS).numpy(), SYSTEM + 0.1 * np.eye(6)
    truth = np.linalg.solve(matrix, b)
    for name, (x, info) in solved_eagerly.items():
        assert set(x) == {"a", "b"} and x["a"].dtype == tf.float64 and x["b"].shape == [2, 1]
        assert info.converged and not info.negative_curvature and info.method in name
        x = joined(x).numpy()
        left = np.linalg.norm(b - matrix @ x) / np.linalg.norm(b)
        np.testing.assert_allclose(info.residual, left, rtol=1e-6, atol=1e-14, err_msg=name)
        if name in TRUTH_WITHIN:
            np.testing.assert_allclose(x, truth, atol=TRUTH_WITHIN[name], err_msg=name)
    np.testing.assert_allclose(joined(solved_eagerly["identity"][0]), b / 1.1, rtol=1e-15)


@pytest.mark.parametrize("runner", [tf.function, compiled])
def test_graphs_give_what_eager_mode_gives(solved_eagerly, runner):
    rhs = tf.nest.map_structure(tf.constant, RHS)
    found = runner(lambda b: solve_by_all(b, 0.1))(rhs)
    for name, (x, info) in solved_eagerly.items():
        np.testing.assert_allclose(joined(found[name][0]), joined(x), atol=1e-7, err_msg=name)
        assert found[name][1].converged and found[name][1].iterations == info.iterations


def test_half_precision_is_solved_in_float32(solved_eagerly):
    rhs = tf.nest.map_structure(lambda part: tf.constant(part, tf.float16), RHS)
    for name, (x, info) in solve_by_all(rhs, 0.1).items():
        if name != "conjugate_gradient":  # at a tolerance of 1e-12
            assert info.converged, name
        assert x["a"].dtype == tf.float32 and info.residual.dtype == tf.float32
        np.testing.assert_allclose(joined(x), joined(solved_eagerly[name][0]), atol=2e-5)


def test_a_right_hand_side_of_zeros_is_solved_by_zeros_everywhere():
    for name, (x, info) in solve_by_all(tf.nest.map_structure(tf.zeros_like, RHS), 0.1).items():
        np.testing.assert_array_equal(joined(x), np.zeros(6), err_msg=name)
        assert info.converged and info.residual == 0, name


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_right_hand_side_that_is_not_finite_gives_zeros_and_is_reported(bad):
    rhs, hvp = tf.constant([1.0, bad]), product_with(np.eye(2))
    answers = [
        inverse_hvp.identity(rhs),
        inverse_hvp.conjugate_gradient(hvp, rhs),
        inverse_hvp.neumann(hvp, rhs, terms=3, step=0.5),
        inverse_hvp.lissa(lambda v, _: hvp(v), rhs, iterations=3, scale=2.0),
        inverse_hvp.outer_product(tf.ones([1, 2]), rhs, damping=1.0),
        inverse_hvp.unrolled([hvp, hvp], rhs, step=0.5),
    ]
    for x, info in answers:
        np.testing.assert_array_equal(x, np.zeros(2), err_msg=info.method)
        assert not info.converged, info.method


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 8), st.floats(0.01, 10))
def test_random_positive_systems_are_solved(seed, size, damping):
    rng = np.random.default_rng(seed)
    factor, b = rng.normal(size=(size, size)), rng.normal(size=size)
    truth = np.linalg.solve(factor @ factor.T + damping * np.eye(size), b)
    hvp, rhs = product_with(factor @ factor.T), tf.constant(b)
    answers = [
        inverse_hvp.exact(tf.constant(factor @ factor.T), rhs, damping=damping),
        inverse_hvp.conjugate_gradient(hvp, rhs, damping=damping, tolerance=1e-10),
        inverse_hvp.outer_product(tf.constant(factor.T), rhs, damping=damping),
    ]
    for x, info in answers:
        np.testing.assert_allclose(x, truth, atol=1e-6 * np.abs(truth).max(), err_msg=info.method)
        assert info.converged
    residuals = [
        float(inverse_hvp.neumann(hvp, rhs, terms=terms, damping=damping)[1].residual)
        for terms in (1, 4, 16)
    ]
    assert residuals == sorted(residuals, reverse=True)
    largest = float(inverse_hvp.largest_eigenvalue(hvp, rhs))
    assert 0.5 <= largest / np.linalg.norm(factor, 2) ** 2 <= 1 + 1e-9


TWO = tf.constant([1.0, 1.0], tf.float64)
ONE_AND_FOUR = product_with(np.diag([1.0, 4.0]))


def test_neumann_takes_exactly_as_many_terms_and_unrolled_agrees_on_a_quadratic():
    answers = [
        inverse_hvp.neumann(ONE_AND_FOUR, TWO, step=0.2, terms=10),
        inverse_hvp.unrolled([ONE_AND_FOUR] * 10, TWO, step=0.2),
        inverse_hvp.unrolled(lambda v, _: ONE_AND_FOUR(v), TWO, step=0.2, steps=10),
    ]
    for x, info in answers:
        np.testing.assert_allclose(x, [0.8926258, 0.24999997], atol=5e-8)
        assert info.converged and info.iterations == 10
    x, info = inverse_hvp.neumann(ONE_AND_FOUR, TWO, step=0.2, terms=1)
    np.testing.assert_allclose(x, [0.2, 0.2], rtol=1e-15)
    np.testing.assert_allclose(info.residual, np.linalg.norm([0.8, 0.2]) / 2**0.5)


def test_terms_beyond_rounding_do_not_count_as_growth():
    x, info = inverse_hvp.neumann(ONE_AND_FOUR, tf.ones(2), terms=100)
    np.testing.assert_allclose(x, [1, 0.25], rtol=1e-6)
    assert info.converged and info.residual < 1e-6


@pytest.mark.parametrize("runner", RUNNERS)
def test_unrolled_is_the_gradient_through_steps_of_gradient_descent(runner):
    rng = np.random.default_rng(0)
    inputs, target = rng.normal(size=(7, 3)), rng.normal(size=(7, 2))
    scale, step, steps, l2 = rng.uniform(0.5, 2, size=(3, 2)), 0.3, 4, 0.05

    def gradient(w, shift, tape_loss):
        with tf.GradientTape() as tape:
            tape.watch(w)
            value = tape_loss(w) + l2 / 2 * tf.reduce_sum(w**2) + tf.reduce_sum(shift * w)
        return tape.gradient(value, w)

    def loss(w):
        return tf.reduce_mean((tf.tanh(inputs @ w) - target) ** 2)

    shift = tf.zeros([3, 2], tf.float64)  # what is differentiated by: it adds to each gradient
    trajectory = []
    with tf.GradientTape() as through:
        through.watch(shift)
        w = tf.constant(scale)
        for _ in range(steps):
            trajectory.append(w)
            w = w - step * gradient(w, shift, loss)
        validation = tf.reduce_sum(tf.sin(w))
    expected = -through.gradient(validation, shift)

    stored, rhs = tf.stack(trajectory), tf.cos(w)

    def hvp_at(w):
        variable = tf.Variable(w) if tf.executing_eagerly() else w

        def product(v):
            with tf.GradientTape() as tape:
                tape.watch(variable)
                slope = gradient(tf.identity(variable), tf.zeros_like(w), loss)
            return tape.gradient(slope, variable, output_gradients=v) - l2 * v

        return product

    x, info = runner(
        lambda b: inverse_hvp.unrolled(
            lambda v, k: hvp_at(stored[k])(v), b, step=step, damping=l2, steps=steps
        )
    )(rhs)
    np.testing.assert_allclose(x, expected, atol=1e-12)
    assert info.iterations == steps
    listed, _ = runner(
        lambda b: inverse_hvp.unrolled([hvp_at(w) for w in trajectory], b, step=step, damping=l2)
    )(rhs)
    np.testing.assert_allclose(listed, expected, atol=1e-12)
    reverse, _ = inverse_hvp.unrolled(
        [hvp_at(w) for w in trajectory[::-1]], rhs, step=step, damping=l2
    )
    assert np.abs(reverse - expected).max() > 1e-3  # the order matters here


def test_outer_products_have_their_pseudo_inverse_without_damping():
    g, b = tf.constant([[1.0, 2, 2]], tf.float64), tf.constant([1.0, 0, 1], tf.float64)
    x, info = inverse_hvp.outer_product(g, b)
    np.testing.assert_allclose(x, np.array([1, 2, 2]) / 27, rtol=1e-14)
    np.testing.assert_allclose(info.residual, 0.5**0.5)  # half of b is out of reach
    assert info.converged
    x, info = inverse_hvp.outer_product(g, b, damping=0.5)
    np.testing.assert_allclose(x, [1.368421, -1.263158, 0.736842], atol=5e-7)
    assert info.converged and info.residual < 1e-14


def test_outer_products_take_a_damping_for_each_part():
    rng = np.random.default_rng(0)
    rows, b = rng.normal(size=(4, 6)), rng.normal(size=6)
    damping = np.array([0.1] * 4 + [2.0] * 2)
    rhs = [tf.constant(b[:4].reshape(2, 2)), tf.constant(b[4:])]
    x, info = inverse_hvp.outer_product(tf.constant(rows), rhs, damping=[0.1, 2.0])
    expected = np.linalg.solve(rows.T @ rows + np.diag(damping), b)
    np.testing.assert_allclose(flat(x), expected, rtol=1e-11)
    assert info.converged
    with pytest.raises(config.ConfigError, match="0 for some parts"):
        inverse_hvp.outer_product(tf.constant(rows), rhs, damping=[0.0, 2.0])


@pytest.mark.parametrize("rows", [20, 200])
def test_little_damping_leaves_outer_products_their_digits_in_float32(rows):
    rng = np.random.default_rng(0)
    gradients, b = rng.normal(size=(rows, 60)) / rows**0.5, rng.normal(size=60)
    x, info = inverse_hvp.outer_product(
        tf.constant(gradients, tf.float32), tf.constant(b, tf.float32), damping=1e-4
    )
    expected = np.linalg.solve(gradients.T @ gradients + 1e-4 * np.eye(60), b)
    assert np.linalg.norm(x - expected) < 2e-6 * np.linalg.norm(expected)
    assert info.converged


def test_lissa_takes_damping_in_units_of_the_hessian():
    rhs = tf.constant([3.0], tf.float64)
    x, info = inverse_hvp.lissa(lambda v, _: 2 * v, rhs, iterations=200, scale=10, damping=0.1)
    np.testing.assert_allclose(x, [3 / 2.1], rtol=1e-12)
    assert info.converged and info.iterations == 200 and info.residual < 1e-12


def test_lissa_draws_by_the_iteration_and_settles_near_the_answer():
    matrices = tf.constant([np.diag([1.0, 6.0]), np.diag([3.0, 2.0])])  # mean diag(2, 4)
    seen = []

    def sampled(vector, k):
        seen.append(int(k))
        return tf.linalg.matvec(matrices[k % 2], vector)

    mean = product_with(np.diag([2.0, 4.0]))
    x, info = inverse_hvp.lissa(sampled, TWO, iterations=200, scale=40.0, hvp=mean)
    np.testing.assert_allclose(x, [0.5, 0.25], rtol=0.1)
    assert seen == list(range(200)) and info.converged and 0 < info.residual < 0.1
    _, info = inverse_hvp.lissa(sampled, TWO, iterations=200, scale=40.0)
    assert seen[-1] == 200 and info.residual > 0.3  # by one sample, other than the mean


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(
    ("solve", "negative"),
    [
        (lambda h, b: inverse_hvp.neumann(h(1, 4), b, step=0.6, terms=30), False),
        (lambda h, b: inverse_hvp.neumann(h(1, 4), b, step=0.6, terms=1), False),
        (lambda h, b: inverse_hvp.neumann(h(1, 4), b, step=50.0, terms=1000), False),
        (lambda h, b: inverse_hvp.neumann(h(1, -4), b, terms=10), True),
        (lambda h, b: inverse_hvp.neumann(h(0, 0), b, terms=10), False),
        (lambda h, b: inverse_hvp.unrolled([h(1, 4)] * 9, b, step=0.6), False),
        (lambda h, b: inverse_hvp.unrolled([h(1, -4)] * 9, b, step=0.1), True),
        (
            lambda h, b: inverse_hvp.unrolled(lambda v, _: h(1, 9)(v), b, step=90.0, steps=1000),
            False,
        ),
        (
            lambda h, b: inverse_hvp.lissa(lambda v, _: h(1, 4)(v), b, iterations=100, scale=1.5),
            False,
        ),
        (
            lambda h, b: inverse_hvp.lissa(
                lambda v, _: h(1, -4)(v), b, iterations=100, scale=9.0, hvp=h(1, -4)
            ),
            True,
        ),
    ],
)
def test_series_that_diverge_are_finite_and_reported(solve, negative, runner, caplog):
    def diagonal(*entries):
        return product_with(np.diag(np.array(entries, float)))

    with caplog.at_level(logging.WARNING, "ssl_influence"):
        x, info = runner(lambda b: solve(diagonal, b))(tf.ones(2))
    assert not info.converged and bool(info.negative_curvature) == negative
    assert np.all(np.isfinite(x)) and info.residual >= 0.9
    warned = [record for record in caplog.records if record.name == "ssl_influence"]
    assert len(warned) == (runner is not tf.function)
    assert all("not to be used" in record.getMessage() for record in warned)


@pytest.mark.parametrize(
    ("matrix", "match"),
    [
        (np.diag([1.0, -1.0]), "indefinite"),
        (np.array([[1.0, 2.0], [2.0, 1.0]]), "indefinite"),
        (np.ones([2, 2]), "singular"),
        (np.diag([1.0, np.nan]), "not finite"),
        (np.array([[2.0, 1.0], [0.0, 2.0]]), "symmetric"),
    ],
)
def test_exact_refuses_what_has_no_answer(matrix, match):
    rhs = tf.constant([1.0, 0.5], tf.float64)
    with pytest.raises(solve_info.SolveError, match=match):
        inverse_hvp.exact(tf.constant(matrix), rhs)
    x, info = tf.function(inverse_hvp.exact)(tf.constant(matrix), rhs)
    assert not info.converged and bool(info.negative_curvature) == (match == "indefinite")
    np.testing.assert_array_equal(x, np.zeros(2))
    if np.all(np.isfinite(matrix)) and match != "symmetric":
        assert inverse_hvp.exact(tf.constant(matrix), rhs, damping=1.5)[1].converged


def test_identity_reports_what_the_hessian_says_of_it(caplog):
    x, info = inverse_hvp.identity(TWO, damping=1.0)
    np.testing.assert_array_equal(x, [0.5, 0.5])
    assert info.converged and np.isnan(info.residual) and not caplog.records
    x, info = inverse_hvp.identity(TWO, hvp=product_with(np.diag([1.0, -4.0])))
    np.testing.assert_array_equal(x, TWO)
    assert info.converged and info.negative_curvature
    assert "identity ended" in caplog.text and "negative curvature" in caplog.text


def test_a_residual_that_only_rounding_holds_up_counts_as_converged():
    matrix, rhs = positive(100, 1e3)
    x, info = inverse_hvp.conjugate_gradient(product_with(matrix), tf.constant(rhs, tf.float32))
    expected = np.linalg.solve(matrix, rhs)
    assert 1e-6 < info.residual < 3e-4 and info.converged
    np.testing.assert_allclose(x, expected, atol=1e-3 * np.abs(expected).max())


def test_dense_is_symmetric_and_in_the_order_of_the_nest(network):
    product = network.objective().product("hessian")
    found = inverse_hvp.dense(product, network.vector)
    np.testing.assert_allclose(found, network.matrix("hessian"), atol=1e-12)
    np.testing.assert_array_equal(found, tf.transpose(found))


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: inverse_hvp.identity(TWO, damping=-1.0), "damping=-1.0"),
        (lambda: inverse_hvp.identity(TWO, damping=[1.0, 2.0]), "damping has 2 parts"),
        (lambda: inverse_hvp.neumann(ONE_AND_FOUR, TWO, terms=0), "terms=0"),
        (lambda: inverse_hvp.neumann(ONE_AND_FOUR, TWO, terms=2, step=0.0), "step=0.0"),
        (lambda: inverse_hvp.lissa(ONE_AND_FOUR, TWO, iterations=2, scale=-1.0), "scale=-1.0"),
        (lambda: inverse_hvp.lissa(ONE_AND_FOUR, TWO, iterations=0, scale=1.0), "iterations=0"),
        (lambda: inverse_hvp.unrolled([], TWO, step=0.1), "steps=0"),
        (lambda: inverse_hvp.unrolled(ONE_AND_FOUR, TWO, step=0.1), "steps is for a function"),
        (lambda: inverse_hvp.largest_eigenvalue(ONE_AND_FOUR, TWO, iterations=0), "iterations=0"),
    ],
)
def test_settings_that_cannot_work_are_refused(call, match):
    with pytest.raises(config.ConfigError, match=match):
        call()
