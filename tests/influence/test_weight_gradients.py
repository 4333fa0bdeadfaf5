"""The hypergradient against retraining: a strictly convex head, minimized by Newton in NumPy."""

import numpy as np
import pytest
import tensorflow as tf

from ssl_influence import config, head_rows
from ssl_influence.influence import solve_info, weight_gradients

UNDAMPED = config.WeightConfig(damping=0.0)


def softmax(z):
    p = np.exp(z - z.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True)


class ConvexHead:
    """Labeled and unlabeled rows over fixed features; targets are frozen, the kernel is not."""

    def __init__(self, l2, l2_bias, use_bias, unlabeled=9, seed=0):
        rng = np.random.default_rng(seed)
        d, c, labeled, validation, views = 4, 3, 12, 15, 2
        self.labeled, self.validation = rng.normal(size=(labeled, d)), rng.normal(size=(15, d))
        self.unlabeled = rng.normal(size=(unlabeled * views, d))
        self.label = rng.integers(0, c, labeled)
        self.validation_label = rng.integers(0, c, validation)
        self.target = rng.dirichlet(np.ones(c), unlabeled * views)
        self.example_id = np.tile(np.arange(unlabeled), views)
        self.a = rng.random(labeled) / labeled
        mask = rng.random(unlabeled * views) < 0.8
        self.coefficient = 0.7 * mask / (views * max(unlabeled, 1))
        self.weight = rng.uniform(0.2, 2.0, unlabeled)
        self.l2, self.l2_bias, self.use_bias, self.classes = l2, l2_bias, use_bias, c

    def inputs(self, x):
        return np.hstack([x, np.ones((len(x), 1))]) if self.use_bias else x

    def minimize(self, weight, damping=0.0):
        x = self.inputs(np.vstack([self.labeled, self.unlabeled]))
        q = np.vstack([np.eye(self.classes)[self.label], self.target])
        w = np.concatenate([self.a, self.coefficient * weight[self.example_id]])
        l2 = np.append(np.full(4, self.l2), self.l2_bias) if self.use_bias else np.full(4, self.l2)
        kernel = np.zeros((x.shape[1], self.classes))

        def objective(k):
            log_p = x @ k - np.logaddexp.reduce(x @ k, axis=1, keepdims=True)
            return -(w[:, None] * q * log_p).sum() + 0.5 * (l2[:, None] * k**2).sum()

        for _ in range(100):
            p = softmax(x @ kernel)
            gradient = x.T @ (w[:, None] * (p - q)) + l2[:, None] * kernel
            if np.linalg.norm(gradient) < 1e-13:
                break
            j = np.einsum("nc,ce->nce", p, np.eye(self.classes)) - p[:, :, None] * p[:, None]
            matrix = np.einsum("n,nd,ne,ncf->dcef", w, x, x, j).reshape(kernel.size, kernel.size)
            matrix += np.diag(np.repeat(l2, self.classes))
            step = (np.linalg.pinv(matrix, rcond=1e-12) @ gradient.ravel()).reshape(kernel.shape)
            length = 1.0
            while objective(kernel - length * step) > objective(kernel) + 1e-14:
                length /= 2
            kernel = kernel - length * step
        assert np.linalg.norm(gradient) < 1e-12
        return kernel

    def validation_loss(self, weight):
        p = softmax(self.inputs(self.validation) @ self.minimize(weight))
        return -np.log(p[np.arange(len(p)), self.validation_label]).mean()

    def arguments(self, dtype=np.float64):
        kernel = self.minimize(self.weight)

        def rows(x, target):
            logits = self.inputs(x) @ kernel
            parts = x, logits, softmax(logits) - target
            return head_rows.HeadRows(*(tf.constant(part, dtype) for part in parts))

        validation = rows(self.validation, 0)
        return (
            rows(self.labeled, np.eye(self.classes)[self.label]),
            tf.constant(self.a, dtype),
            rows(self.unlabeled, self.target),
            tf.constant(self.coefficient, dtype),
            tf.constant(self.weight[self.example_id], dtype),
            validation.features,
            validation.logits,
            tf.constant(self.validation_label, tf.int32),
        )

    def influence(self, dtype=np.float64, runner=lambda fn: fn, **settings):
        """dL_V/dlambda per example: rows of one id are summed."""
        penalties = {"l2": self.l2, "l2_bias": self.l2_bias, "use_bias": self.use_bias}
        settings = config.WeightConfig(**{"damping": 0.0, **settings})
        fn = runner(lambda args: weight_gradients.last_layer(*args, **penalties, settings=settings))
        gradient, info = fn(self.arguments(dtype))
        return np.bincount(self.example_id, gradient, len(self.weight)), info


@pytest.mark.parametrize("l2_bias, use_bias", [(0.05, True), (0.0, True), (0.0, False)])
def test_equals_the_central_difference_of_retraining(l2_bias, use_bias):
    head = ConvexHead(0.05, l2_bias, use_bias)
    expected = np.empty(len(head.weight))
    for u in range(len(head.weight)):
        step = 1e-4 * np.eye(len(head.weight))[u]
        expected[u] = (
            head.validation_loss(head.weight + step) - head.validation_loss(head.weight - step)
        ) / 2e-4
    for settings in (
        {"runner": tf.function},
        {"inverse_hessian": "cg", "cg_tolerance": 1e-12, "runner": tf.function},
    ):
        found, info = head.influence(**settings)
        assert info.converged
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-7 * np.abs(expected).max())
    found, _ = head.influence(np.float32)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


def test_predicts_what_leaving_each_example_out_does():
    head = ConvexHead(0.2, 0.0, True, unlabeled=60, seed=1)
    base = head.validation_loss(head.weight)
    true = np.empty(len(head.weight))
    for u in range(len(head.weight)):
        weight = head.weight.copy()
        weight[u] = 0
        true[u] = head.validation_loss(weight) - base
    predicted = -head.weight * head.influence()[0]
    assert np.corrcoef(predicted, true)[0, 1] > 0.99
    np.testing.assert_allclose(predicted, true, atol=0.2 * np.abs(true).max())


@pytest.mark.parametrize("compile_it", [False, True])
def test_damping_is_that_of_the_solve(compile_it):
    head = ConvexHead(0.05, 0.0, True)
    found, _ = head.influence(damping=0.3, runner=lambda f: tf.function(f, jit_compile=compile_it))
    without, _ = head.influence()
    arguments = head.arguments()
    more = dict(l2=0.35, l2_bias=0.3, settings=UNDAMPED)
    other, _ = weight_gradients.last_layer(*arguments, **more)
    np.testing.assert_allclose(found, np.bincount(head.example_id, other), atol=1e-12)
    assert np.abs(found - without).max() > 1e-4


def test_l2_may_differ_between_the_rows_of_the_kernel():
    head = ConvexHead(0.05, 0.02, True)
    expected, _ = head.influence()
    head.l2 = tf.constant([0.05] * 4, tf.float64)
    found, _ = head.influence()
    np.testing.assert_allclose(found, expected, atol=1e-14)
    head.l2 = np.array([0.5, 0.05, 0.05, 0.05])
    other, _ = head.influence()
    assert np.abs(found - other).max() > 1e-5


@pytest.mark.parametrize("runner", [lambda fn: fn, tf.function])
def test_no_unlabeled_rows_give_no_derivatives(runner):
    head = ConvexHead(0.05, 0.0, True, unlabeled=0)
    fn = runner(lambda a: weight_gradients.last_layer(*a, l2=0.05, settings=UNDAMPED))
    gradient, info = fn(head.arguments())
    assert gradient.shape == [0] and info.converged


def test_masked_rows_have_no_influence_and_zero_weights_do():
    head = ConvexHead(0.05, 0.0, True)
    head.weight[0] = 0
    gradient, _ = weight_gradients.last_layer(*head.arguments(), l2=0.05, settings=UNDAMPED)
    np.testing.assert_array_equal(gradient.numpy()[head.coefficient == 0], 0)
    assert np.all(gradient.numpy()[head.coefficient > 0] != 0)


def test_a_singular_head_raises_in_eager_mode_and_is_reported_in_a_graph():
    head = ConvexHead(0.05, 0.0, True)
    args = list(head.arguments())
    args[1], args[3] = 0 * args[1], 0 * args[3]
    with pytest.raises(solve_info.SolveError, match="Raise damping"):
        weight_gradients.last_layer(*args, settings=UNDAMPED)
    fn = tf.function(lambda *a: weight_gradients.last_layer(*a, settings=UNDAMPED))
    gradient, info = fn(*args)
    assert not info.converged and np.all(np.isfinite(gradient))


@pytest.mark.parametrize("inverse_hessian", ["exact", "cg"])
def test_the_training_batch_may_be_of_unknown_size(inverse_hessian):
    labeled, a, unlabeled, *others = ConvexHead(0.05, 0.0, True).arguments()
    args = (labeled[:3], a, unlabeled[:3], *others)
    specs = tf.nest.map_structure(lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype), args)
    settings = config.WeightConfig(damping=0.0, inverse_hessian=inverse_hessian, cg_tolerance=1e-13)

    def influence(labeled, a, unlabeled, *others, settings=UNDAMPED):
        heads = head_rows.HeadRows(*labeled), a, head_rows.HeadRows(*unlabeled)
        return weight_gradients.last_layer(*heads, *others, l2=0.05, settings=settings)[0]

    fn = tf.function(lambda *a: influence(*a, settings=settings), input_signature=specs)
    np.testing.assert_allclose(fn(*args), influence(*args), atol=1e-12)
