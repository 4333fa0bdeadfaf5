"""Products with Hessians, their inverses and influence over any variables, against matrices."""

import logging
from typing import NamedTuple

import numpy as np
import pytest
import tensorflow as tf

from ssl_influence import head_rows
from ssl_influence.influence import all_variables, inverse_hvp, products

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


@pytest.mark.parametrize("runner", RUNNERS)
def test_hvp_goes_through_a_nested_function_and_a_variable_that_is_not_used(network, runner):
    nested = tf.function(network.written_out)
    variables = [*network.variables, network.unused]
    product = runner(products.hvp(nested, variables))
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
