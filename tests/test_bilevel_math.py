"""The hypergradient that the trainer hands to the example weights, against the written objective.

The reference shares no code with the package. Forward passes are NumPy, in float64. The objective

    L = sum_l a_l ell_S(l) + sum_r c_r lambda_id(r) ell_U(r) + 1/2 sum_v l2_v |v|^2

is a function of the head's kernel and bias alone, with features, targets and masks constant. Its
Hessian H comes from autodiff, and dL_V/dlambda_r = -c_r grad L_V^T (H + damping I)^+ grad ell_U(r)
from a pseudo-inverse, because L cannot tell a common shift of all classes.
"""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

from ssl_influence import config as config_lib, training
from ssl_influence.methods import pseudo_label, uda

SIZE, DIM, HIDDEN, CLASSES = 12, 4, 5, 3
LABELED, VALIDATION = 7, 9
IDS = np.array([3, 7, 3, 0, 11, 5, 8, 2])  # one example is there twice
MOMENTUM, EPSILON = 0.9, 1e-3  # of BatchNorm
WEIGHT_DECAY, THETA_RATE, WEIGHT_RATE = 0.03, 0.1, 0.05
CONFIDENCE, TEMPERATURE, UNSUPERVISED_WEIGHT = 0.6, 0.5, 0.7


def make_model(random):
    inputs = keras.Input([DIM])
    x = keras.layers.Dense(HIDDEN, activation="tanh", name="hidden")(inputs)
    x = keras.layers.BatchNormalization(momentum=MOMENTUM, epsilon=EPSILON, name="norm")(x)
    model = keras.Model(inputs, [x, keras.layers.Dense(CLASSES, name="head")(x)])
    for variable in model.variables:
        variable.assign(random.uniform(-0.8, 0.8, variable.shape))
    for name in ("gamma", "moving_variance"):
        variable = getattr(model.get_layer("norm"), name)
        variable.assign(random.uniform(0.5, 1.5, variable.shape))
    return model


def make_method(name):
    if name == "pseudo_label":
        return pseudo_label.PseudoLabel(1, CONFIDENCE, UNSUPERVISED_WEIGHT, ramp_up=0.0)
    return uda.UDA(CLASSES, 10, CONFIDENCE, TEMPERATURE, UNSUPERVISED_WEIGHT)


def make_batches(random):
    weak = random.normal(size=[len(IDS), DIM])
    labeled, validation = (
        {"inputs": random.normal(size=[rows, DIM]), "label": random.integers(CLASSES, size=rows)}
        for rows in (LABELED, VALIDATION)
    )
    unlabeled = {
        "weak": weak,
        "strong": weak + random.normal(scale=0.5, size=weak.shape),
        "label": random.integers(CLASSES, size=len(IDS)),
        "example_id": IDS,
    }

    def tensor(x):
        return tf.constant(x, tf.float32 if x.dtype == np.float64 else tf.int64)

    batches = {"labeled": labeled, "unlabeled": unlabeled}, validation
    return tf.nest.map_structure(tensor, batches)


class Recorder:
    """What the trainer hands to `example_weights.moved`, which still does its work."""

    def __init__(self, trainer):
        self._ids = tf.Variable(tf.zeros([len(IDS)], tf.int64))
        self._gradient = tf.Variable(tf.zeros([len(IDS)]))
        self._moved = trainer.example_weights.moved
        trainer.example_weights.moved = self._record

    def _record(self, rows, ids, gradients):
        self._ids.assign(ids)
        self._gradient.assign(gradients)
        return self._moved(rows, ids, gradients)

    def gradient(self):
        np.testing.assert_array_equal(self._ids.numpy(), IDS)
        return self._gradient.numpy()


@dataclasses.dataclass
class Problem:
    """A trainer, its batches, and what theta and the statistics were before the step."""

    trainer: training.BilevelTrainer
    recorder: Recorder
    batch: dict
    validation: dict
    method: str
    variables: dict

    def head(self):
        layer = self.trainer.head
        return np.concatenate([layer.kernel.numpy(), layer.bias.numpy()[np.newaxis]])

    def statistics(self):
        norm = self.trainer.model.get_layer("norm")
        return norm.moving_mean.numpy(), norm.moving_variance.numpy()

    def lookup(self):
        return self.trainer.example_weights.values()[IDS].astype(np.float64)


def make_problem(method="pseudo_label", seed=2, weights=None, decayed="kernels"):
    random = np.random.default_rng(seed)
    model = make_model(random)
    batch, validation = make_batches(random)
    config = config_lib.Config().replace(
        optimizer={
            "learning_rate": THETA_RATE,
            "schedule": "constant",
            "momentum": 0.0,
            "weight_decay": WEIGHT_DECAY,
            "decayed_variables": decayed,
        },
        weights={"damping": 0.05, "learning_rate": WEIGHT_RATE, **(weights or {})},
    )
    example_weights = training.make_example_weights(config.weights, SIZE)
    if config.weights.weighting == "per_example":
        example_weights.variable.assign(random.uniform(0.4, 2.0, SIZE))
    trainer = training.BilevelTrainer(model, make_method(method), example_weights, config)
    variables = {
        f"{layer.name}/{v.name.split('/')[-1].split(':')[0]}": v.numpy().astype(np.float64)
        for layer in model.layers
        for v in layer.variables
    }
    return Problem(trainer, Recorder(trainer), batch, validation, method, variables)


@tf.function
def differentiate(theta, objective_rows, row_weight, l2, validation_rows):
    """Gradient and Hessian of L, gradient of each row's loss, and gradient of L_V, by autodiff.

    Args:
      theta: [D + 1, C], the kernel and below it the bias.
      objective_rows, validation_rows: (features [n, D + 1], fixed targets [n, C]).
      row_weight: [n], all that multiplies a row's loss in L.
      l2: [D + 1].
    """

    def losses(rows):
        features, target = rows
        return -tf.reduce_sum(target * tf.nn.log_softmax(tf.matmul(features, theta)), axis=1)

    with tf.GradientTape(persistent=True) as outer:
        outer.watch(theta)
        with tf.GradientTape() as inner:
            inner.watch(theta)
            penalty = 0.5 * tf.reduce_sum(l2[:, tf.newaxis] * theta**2)
            objective = tf.reduce_sum(row_weight * losses(objective_rows)) + penalty
        gradient = inner.gradient(objective, theta)
        rows = losses(objective_rows)
        validation_loss = tf.reduce_mean(losses(validation_rows))
    return {
        "gradient": gradient,
        "hessian": outer.jacobian(gradient, theta),
        "rows": outer.jacobian(rows, theta),
        "validation": outer.gradient(validation_loss, theta),
    }


def softmax(logits):
    exponential = np.exp(logits - logits.max(axis=1, keepdims=True))
    return exponential / exponential.sum(axis=1, keepdims=True)


def forward(variables, inputs, statistics=None):
    """Head inputs with a last column of ones, and the statistics of the batch."""
    x = inputs.numpy().astype(np.float64)
    x = np.tanh(x @ variables["hidden/kernel"] + variables["hidden/bias"])
    of_batch = x.mean(axis=0), x.var(axis=0)
    mean, variance = of_batch if statistics is None else statistics
    x = (x - mean) / np.sqrt(variance + EPSILON)
    x = x * variables["norm/gamma"] + variables["norm/beta"]
    return np.concatenate([x, np.ones([len(x), 1])], axis=1), of_batch


@dataclasses.dataclass
class Reference:
    hypergradient: np.ndarray
    masked: np.ndarray
    head_gradient: np.ndarray
    statistics: tuple


def make_reference(problem, lam, fused):
    """The answer for lambda_id(r) = lam [R], from the variables before the step."""
    config, variables = problem.trainer.config, problem.variables
    labeled, unlabeled = problem.batch["labeled"], problem.batch["unlabeled"]
    theta = np.concatenate([variables["head/kernel"], variables["head/bias"][np.newaxis]])
    one_hot = np.eye(CLASSES)

    views = [labeled["inputs"], unlabeled["weak"]]
    if problem.method == "uda":
        views.append(unlabeled["strong"])
    features, of_batch = forward(variables, tf.concat(views, axis=0))
    on_labeled, on_weak = features[:LABELED], features[LABELED : LABELED + len(IDS)]
    on_view = features[-len(IDS) :]

    probability = softmax(on_weak @ theta)
    highest = probability.max(axis=1)
    assert np.min(np.abs(highest - CONFIDENCE)) > 1e-3  # float32 must see the same mask
    mask = highest > CONFIDENCE
    if problem.method == "uda":
        target = probability ** (1 / TEMPERATURE)
        target /= target.sum(axis=1, keepdims=True)
    else:
        target = one_hot[probability.argmax(axis=1)]
    coefficient = UNSUPERVISED_WEIGHT * mask / len(IDS)
    l2 = np.full(HIDDEN + 1, WEIGHT_DECAY)
    if config.optimizer.decayed_variables == "kernels":
        l2[-1] = 0.0

    # The fused step's own forward pass has moved the statistics by the time of validation.
    old = variables["norm/moving_mean"], variables["norm/moving_variance"]
    moved = tuple(MOMENTUM * o + (1 - MOMENTUM) * n for o, n in zip(old, of_batch, strict=True))
    statistics = moved if fused else old
    by_batch = config.weights.validation_batch_norm == "batch"
    on_validation, _ = forward(
        variables, problem.validation["inputs"], None if by_batch else statistics
    )

    targets = np.concatenate([one_hot[labeled["label"].numpy()], target])
    arguments = (
        theta,
        (np.concatenate([on_labeled, on_view]), targets),
        np.concatenate([np.full(LABELED, 1 / LABELED), coefficient * lam]),
        l2,
        (on_validation, one_hot[problem.validation["label"].numpy()]),
    )
    found = differentiate(*tf.nest.map_structure(tf.constant, arguments))
    found = {name: value.numpy() for name, value in found.items()}
    hessian = found["hessian"].reshape(theta.size, theta.size)
    damped = hessian + config.weights.damping * np.eye(theta.size)
    direction = np.linalg.pinv(damped, rcond=1e-10, hermitian=True) @ found["validation"].ravel()
    rows = found["rows"][-len(IDS) :].reshape(len(IDS), theta.size)
    return Reference(-coefficient * (rows @ direction), ~mask, found["gradient"], statistics)


def take_step(problem, fused, compiled=False):
    step = problem.trainer.bilevel_step if fused else problem.trainer.weight_step
    tf.config.run_functions_eagerly(not compiled)
    try:
        step(problem.batch, problem.validation)
    finally:
        tf.config.run_functions_eagerly(False)
    assert int(problem.trainer.skipped_weight_steps) == 0


def close(a, b, tolerance=1e-4):
    """Whether a agrees with b to within a fraction of b's largest entry."""
    return np.abs(a - b).max() <= tolerance * np.abs(b).max()


def check_step(problem, fused, compiled=False):
    lam, before = problem.lookup(), problem.trainer.example_weights.values().copy()
    expected = make_reference(problem, lam, fused)
    take_step(problem, fused, compiled)
    gradient = problem.recorder.gradient()

    assert close(gradient, expected.hypergradient), (gradient, expected.hypergradient)
    assert 0 < expected.masked.sum() < len(IDS) - 3
    assert np.all(gradient[expected.masked] == 0)
    for a, b in zip(problem.statistics(), expected.statistics, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    # The first step of an Adam has size eta, whatever the sum of an example's rows.
    total = np.zeros(SIZE)
    np.add.at(total, IDS, expected.hypergradient)
    np.testing.assert_allclose(
        problem.trainer.example_weights.values(), before - WEIGHT_RATE * np.sign(total), atol=1e-4
    )


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "fresh"])
@pytest.mark.parametrize("inverse_hessian", ["exact", "cg"])
@pytest.mark.parametrize("method", ["pseudo_label", "uda"])
@pytest.mark.parametrize("batch_norm", ["inference", "batch"])
@pytest.mark.parametrize("decayed", ["kernels", "all"])
def test_hypergradient_is_that_of_the_written_objective(
    decayed, batch_norm, method, inverse_hessian, fused
):
    weights = {"validation_batch_norm": batch_norm, "inverse_hessian": inverse_hessian}
    check_step(make_problem(method, weights=weights, decayed=decayed), fused)


@pytest.mark.parametrize("inverse_hessian", ["exact", "cg"])
def test_without_damping_the_answer_is_the_pseudo_inverse(inverse_hessian):
    weights = {"damping": 0.0, "inverse_hessian": inverse_hessian}
    check_step(make_problem("uda", weights=weights), fused=True)


@pytest.mark.parametrize("method, fused", [("uda", True), ("pseudo_label", False)])
def test_compiled_step_hands_over_the_same(method, fused):
    problem = make_problem(method, weights={"validation_batch_norm": "batch"})
    check_step(problem, fused, compiled=True)


@pytest.mark.parametrize("method", ["pseudo_label", "uda"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_hessian_has_the_old_weights_and_the_theta_step_the_new_ones(compiled, method):
    problem = make_problem(method, weights={"learning_rate": 0.3}, decayed="all")
    old, theta = problem.lookup(), problem.head()
    by_old = make_reference(problem, old, fused=True)
    take_step(problem, True, compiled)
    new, gradient = problem.lookup(), problem.recorder.gradient()
    by_new = make_reference(problem, new, fused=True)

    assert close(gradient, by_old.hypergradient)
    assert not close(by_new.hypergradient, by_old.hypergradient, 1e-2)
    moved = (theta - problem.head()) / THETA_RATE
    assert close(moved, by_new.head_gradient)
    assert not close(by_old.head_gradient, by_new.head_gradient, 1e-2)


@pytest.mark.parametrize("seed, sign", [(90, 1), (61, -1)])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "fresh"])
def test_single_weight_follows_the_sum_over_the_batch(fused, seed, sign):
    weights = {"weighting": "single", "initial": 0.7}
    problem = make_problem("uda", seed, weights)
    expected = make_reference(problem, np.full(len(IDS), 0.7), fused)
    take_step(problem, fused)
    gradient = problem.recorder.gradient()

    assert close(gradient, expected.hypergradient)
    assert np.sign(gradient).sum() * sign < 0  # most rows would have it the other way
    assert np.sign(expected.hypergradient.sum()) == sign
    np.testing.assert_allclose(
        problem.trainer.example_weights.values(), 0.7 - WEIGHT_RATE * sign, atol=1e-4
    )
