"""Virtual adversarial training: the direction against an eigenvector, the losses against NumPy."""

import numpy as np
import pytest
import tensorflow as tf

from ssl_influence.methods import base, vat
from tests.methods.reference import (
    CLASSES,
    ID,
    PLAIN,
    TRAIN_STEPS,
    WEAK,
    batch,
    check_labeled,
    close,
    forward,
    method_of,
    np_softmax,
    run,
)


def linear(weights):
    return base.Forward(*[lambda x: (x, x @ tf.cast(weights, x.dtype))] * 4)


def leading_eigenvectors(inputs, weights):
    """Of W J W^T, the Hessian of the divergence where the model is x W."""
    found = []
    for p in np_softmax(inputs @ weights):
        values, vectors = np.linalg.eigh(weights @ (np.diag(p) - np.outer(p, p)) @ weights.T)
        assert values[-1] > 1.1 * values[-2]
        found.append(vectors[:, -1])
    return np.array(found)


@pytest.mark.parametrize(
    "dtype,probe,least", [(tf.float64, 1e-6, 1 - 1e-9), (tf.float32, 1e-2, 0.9995)]
)
@pytest.mark.parametrize("graph", [False, True])
def test_direction_is_the_leading_eigenvector_of_the_divergences_hessian(
    dtype, probe, least, graph
):
    rng = np.random.default_rng(0)
    inputs, weights = rng.normal(size=[6, 5]), rng.normal(size=[5, 3])

    def seek(x):
        start = tf.random.stateless_normal(x.shape, [1, 2], dtype=dtype)
        return vat.adversarial_direction(
            linear(weights).constant, x, start, probe=probe, iterations=200
        )

    seek = tf.function(seek) if graph else seek
    direction = seek(tf.constant(inputs, dtype)).numpy()
    close(np.linalg.norm(direction, axis=1), np.ones(6))
    aligned = np.abs(np.sum(direction * leading_eigenvectors(inputs, weights), 1))
    assert aligned.min() > least


def test_default_probe_gives_in_float32_the_direction_of_float64():
    rng = np.random.default_rng(1)
    inputs, weights = rng.normal(size=[50, 20]), rng.normal(size=[20, 10]) / 4
    start = rng.normal(size=inputs.shape)

    def seek(dtype, probe):
        return vat.adversarial_direction(
            linear(weights).constant,
            tf.constant(inputs, dtype),
            tf.constant(start, dtype),
            probe=probe,
            iterations=1,
        ).numpy()

    exact = seek(tf.float64, 1e-6)
    cosine = {probe: np.sum(seek(tf.float32, probe) * exact, 1).min() for probe in (1e-2, 1e-6)}
    assert cosine[1e-2] > 0.999
    assert cosine[1e-6] < 0.99  # the published probe: rounding is as large as the difference


@pytest.mark.parametrize("graph", [False, True])
def test_vat_matches_numpy_term_by_term(graph):
    method = method_of("vat", vat_radius=0.5, unsupervised_weight=0.3, entropy_weight=0.06)
    output = run(method, batch(), TRAIN_STEPS, graph=graph)
    check_labeled(output)
    start = tf.random.stateless_normal([4, CLASSES], base.step_seed(3, TRAIN_STEPS, 0))
    direction = vat.adversarial_direction(
        forward, tf.constant(WEAK, tf.float32), start, probe=1e-2, iterations=1
    )
    p, moved = np_softmax(WEAK), WEAK + 0.5 * direction.numpy()
    divergence = np.sum(p * np.log(p / np_softmax(moved)), -1)
    entropy = -np.sum(p * np.log(p), -1)
    close(output.terms["vat"], divergence)
    close(output.terms["entropy"], entropy)
    close(output.unsupervised, np.concatenate([divergence, entropy]))
    close(output.unsupervised_coefficient, np.repeat([0.3 / 4, 0.06 / 4], 4))
    np.testing.assert_array_equal(output.example_id, np.tile(ID, 2))
    head = output.unlabeled_head
    close(head.logits, np.concatenate([moved, WEAK]))
    of_entropy = -p * (np.log(p) + entropy[:, np.newaxis])
    close(head.gradient, np.concatenate([np_softmax(moved) - p, of_entropy]))
    close(head.cross_entropy, np.repeat([1.0, 0.0], 4))
    assert head.brier is None and not head.exact


def test_without_entropy_each_example_has_one_row_and_its_curvature_is_exact():
    output = run(method_of("vat", entropy_weight=0.0), batch())
    assert output.unsupervised.shape == (4,) and output.unlabeled_head.exact


def test_gradients_flow_through_the_perturbed_view_and_the_entropy_alone():
    weak = tf.constant(WEAK)
    weights = tf.Variable(np.eye(CLASSES))
    for entropy_weight in (0.0, 1.0):
        method = method_of("vat", entropy_weight=entropy_weight, vat_radius=0.5)
        data = batch(tf.float64, weak=WEAK)
        with tf.GradientTape(persistent=True) as tape:
            output = method(linear(weights), data, TRAIN_STEPS)
            divergence = tf.reduce_sum(output.terms["vat"])
        # At a constant target and perturbation: X'^T (p' - p).
        head = output.unlabeled_head
        expected = tf.transpose(head.features[:4]) @ head.gradient[:4]
        close(tape.gradient(divergence, weights), expected, 1e-10)
    close(tape.gradient(output.terms["entropy"], weights), tf.transpose(weak) @ head.gradient[4:])


def test_directions_are_a_function_of_seed_and_step():
    def perturbed(method, step):
        return run(method, batch(), step).unlabeled_head.logits.numpy()

    method = method_of("vat", vat_iterations=1)
    np.testing.assert_array_equal(perturbed(method, 5), perturbed(method_of("vat"), 5))
    assert np.any(perturbed(method, 5) != perturbed(method, 6))
    other = vat.VAT(TRAIN_STEPS, seed=4)
    assert np.any(perturbed(method, 5) != perturbed(other, 5))


def test_an_example_that_no_perturbation_changes_stays_finite():
    saturated = np.eye(CLASSES) * 1e4
    output = run(method_of("vat"), batch(weak=saturated))
    assert all(np.all(np.isfinite(loss)) for loss in output.terms.values())
    assert np.all(np.isfinite(output.unlabeled_head.gradient))
    unit = vat.unit(tf.constant([[0.0, 0.0], [3e-30, 4e-30]]))
    close(unit, [[0, 0], [0.6, 0.8]])


def test_searching_the_direction_leaves_no_trace():
    seen = []

    def note(kind):
        return lambda x: (seen.append(kind), forward(x))[1]

    method_of("vat", vat_iterations=2)(base.Forward(*map(note, base.Forward._fields)), batch(), 0)
    assert seen == ["constant"] * 3 + ["train"]
    assert PLAIN(tf.zeros([1, 3]))[1].shape == (1, 3)
