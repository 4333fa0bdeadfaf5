"""The last-layer hypergradient of every method against minimizing its frozen objective again.

A batch of a small network is passed through a method; features, targets, masks, mixing ratios and
adversarial directions are then constants, and the objective is one of the head alone. Its losses
are written out here anew, by the definitions of the methods.
"""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

from ssl_influence import config as config_lib
from ssl_influence.influence import weight_gradients
from ssl_influence.methods import base, registry

CLASSES, D, STEP, TRAIN_STEPS = 3, 4, 60, 80
L2 = 0.05
EXACT = {"pseudo_label": {"confidence": 0.4}, "uda": {"confidence": 0.4, "tsa": "linear"}}
EXACT |= {"fixmatch": {"confidence": 0.4}, "vat": {"entropy_weight": 0.0, "vat_radius": 0.3}}
EXACT |= {"remixmatch": {"augmentations": 2}}
SETTINGS = config_lib.WeightConfig(damping=0.0)


@pytest.fixture(autouse=True, scope="module")
def double_precision():
    before = keras.mixed_precision.global_policy()
    keras.mixed_precision.set_global_policy("float64")
    yield
    keras.mixed_precision.set_global_policy(before)


def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def make_batch():
    rng = np.random.default_rng(5)

    def images(n):
        return tf.constant(rng.normal(size=[n, 2, 2, 1]))

    names = ("weak", "weak_2", "strong", "strong_2")
    return {
        "labeled": {"inputs": images(8), "label": tf.constant(rng.integers(CLASSES, size=8))},
        "unlabeled": {
            **{name: images(6) for name in names},
            "label": tf.fill([6], -1),
            "example_id": tf.range(6, dtype=tf.int64),
        },
    }, (images(7), rng.integers(CLASSES, size=7))


class Network:
    """Fixed features and a head whose weights are given, the bias in the last row."""

    def __init__(self):
        rng = np.random.default_rng(2)
        self.body = tf.constant(rng.normal(size=[4, D]))
        self.head = tf.constant(rng.normal(size=[D + 1, CLASSES]))

    def __call__(self, x):
        features = tf.tanh(tf.reshape(x, [-1, 4]) @ self.body)
        return features, features @ self.head[:-1] + self.head[-1]


class Frozen:
    """sum_l a_l CE + sum_r c_r lambda_r ell_r + L2 of the head, by NumPy, and its minimum."""

    def __init__(self, output):
        labeled, unlabeled = output.labeled_head, output.unlabeled_head
        self.x = with_ones(np.concatenate([labeled.features, unlabeled.features]))
        self.n_labeled = len(labeled.features)
        self.a = output.supervised_coefficient.numpy()
        self.c = output.unsupervised_coefficient.numpy()
        n = len(self.c)
        self.ce = filled(unlabeled.cross_entropy, np.ones(n))
        self.brier = filled(unlabeled.brier, np.zeros(n))
        self.q = np.concatenate([targets(labeled), targets(unlabeled)])
        # Of the rows, labeled ones first.
        self.entropic = np.zeros(len(self.x), bool)
        if "entropy" in output.terms:
            self.entropic[-len(output.terms["entropy"]) :] = True

    def weights(self, lam):
        return np.concatenate([self.a, self.c * lam])

    def shares(self):
        ones = np.ones(self.n_labeled)
        return np.concatenate([ones, self.ce]), np.concatenate([0 * ones, self.brier])

    def gradient_and_hessian(self, head, lam):
        """Of the objective, exact for cross-entropy, Brier and entropy rows alike."""
        p = softmax(self.x @ head)
        w = self.weights(lam)
        ce, brier = self.shares()
        total = np.zeros((D + 1) * CLASSES), np.zeros([(D + 1) * CLASSES] * 2)
        for i, x in enumerate(self.x):
            jacobian = np.diag(p[i]) - np.outer(p[i], p[i])
            e = p[i] - self.q[i]
            g = ce[i] * e + brier[i] * jacobian @ e
            # d/dz (J e) = J J + sum_k e_k d^2 p_k, the part that Gauss-Newton leaves out.
            h = ce[i] * jacobian + brier[i] * (jacobian @ jacobian + second(p[i], e))
            if self.entropic[i]:
                log_p = np.log(p[i])
                g = -jacobian @ log_p
                h = -jacobian @ (np.eye(CLASSES) - np.ones([CLASSES, 1]) * p[i])
                h = h - second(p[i], log_p)
            total[0][:] += w[i] * np.outer(x, g).ravel()
            total[1][:] += w[i] * np.kron(np.outer(x, x), h)
        decay = L2 * np.repeat(np.append(np.ones(D), 1.0), CLASSES)
        return total[0] + decay * head.ravel(), total[1] + np.diag(decay)

    def minimize(self, lam, start):
        head = start
        for _ in range(200):
            g, h = self.gradient_and_hessian(head, lam)
            if np.abs(g).max() < 1e-13:
                return head
            values, vectors = np.linalg.eigh(h)
            step = vectors @ ((vectors.T @ g) / np.maximum(np.abs(values), 1e-3))
            head = head - (step * min(1, 2 / np.linalg.norm(step))).reshape(head.shape)
        raise AssertionError(f"no minimum: the gradient is {np.abs(g).max()}")


def with_ones(x):
    return np.concatenate([x, np.ones([len(x), 1])], 1)


def filled(value, default):
    return default if value is None else value.numpy()


def second(p, e):
    """sum_k e_k (d^2 p_k / dz dz), [C, C]."""
    jacobian = np.diag(p) - np.outer(p, p)
    # p_k has the gradient p_k (1_k - p); its Hessian is p_k ((1_k - p)(1_k - p)^T - J).
    shifted = np.eye(len(p)) - p
    return sum(e[k] * p[k] * (np.outer(shifted[k], shifted[k]) - jacobian) for k in range(len(p)))


def targets(head):
    """q of each row, of its gradient: p - q, or brier J (p - q)."""
    p, g = softmax(head.logits.numpy()), head.gradient.numpy()
    if head.brier is None:
        return p - g
    found = []
    for row, slope, share in zip(p, g, head.brier.numpy(), strict=True):
        jacobian = np.diag(row) - np.outer(row, row)
        error = np.linalg.lstsq(jacobian, slope / share, rcond=None)[0]
        found.append(row - (error - error.mean()))
    return np.array(found)


def frozen_problem(name, **fields):
    """The output of a method with the head at the minimum of its frozen objective, and that."""
    batch, validation = make_batch()
    method = registry.build(
        config_lib.MethodConfig(name, **fields), CLASSES, TRAIN_STEPS, feature_size=D, seed=1
    )
    network = Network()
    output = method(base.Forward(*[network] * 4), batch, STEP)
    frozen = Frozen(output)
    rng = np.random.default_rng(3)
    lam = rng.uniform(0.5, 1.5, size=6)[output.example_id.numpy()]
    head = frozen.minimize(lam, network.head.numpy())
    return frozen, output, lam, head, network(validation[0])[0].numpy(), validation[1]


def at(head_rows, frozen, head, rows):
    """The rows with the head elsewhere, at their frozen targets."""
    p = softmax(frozen.x[rows] @ head)
    ce, brier = (share[rows] for share in frozen.shares())
    gradient = np.array(
        [
            c * (pi - qi) + b * (np.diag(pi) - np.outer(pi, pi)) @ (pi - qi)
            for c, b, pi, qi in zip(ce, brier, p, frozen.q[rows], strict=True)
        ]
    )
    for i in np.flatnonzero(frozen.entropic[rows]):
        gradient[i] = -(np.diag(p[i]) - np.outer(p[i], p[i])) @ np.log(p[i])
    return head_rows._replace(
        logits=tf.constant(frozen.x[rows] @ head), gradient=tf.constant(gradient)
    )


def validation_loss(head, features, label):
    p = softmax(with_ones(features) @ head)
    return -np.mean(np.log(p[np.arange(len(label)), label]))


def hypergradients(name, **fields):
    """By the library, and by minimizing again: dL_V/dlambda_u of each example, [6] and [6]."""
    frozen, output, lam, head, features, label = frozen_problem(name, **fields)
    n = frozen.n_labeled
    found, info = weight_gradients.last_layer(
        at(output.labeled_head, frozen, head, slice(0, n)),
        output.supervised_coefficient,
        at(output.unlabeled_head, frozen, head, slice(n, None)),
        output.unsupervised_coefficient,
        tf.constant(lam),
        tf.constant(features),
        tf.constant(with_ones(features) @ head),
        tf.constant(label),
        l2=L2,
        l2_bias=L2,
        settings=SETTINGS,
    )
    ids = output.example_id.numpy()
    found = np.bincount(ids, found.numpy(), minlength=6)
    expected = []
    for u in range(6):
        loss = [
            validation_loss(frozen.minimize(lam + sign * 1e-4 * (ids == u), head), features, label)
            for sign in (1, -1)
        ]
        expected.append((loss[0] - loss[1]) / 2e-4)
    return found, np.array(expected), info


@pytest.mark.parametrize("name", EXACT)
def test_exact_rows_agree_with_minimizing_again(name):
    found, expected, info = hypergradients(name, **EXACT[name])
    assert info.curvature == "hessian"
    largest = np.abs(expected).max()
    assert largest > 1e-4
    np.testing.assert_allclose(found, expected, atol=1e-6 * largest)


@pytest.mark.parametrize(
    "name,fields,tolerance",
    [
        ("mean_teacher", {"unsupervised_weight": 2.0}, 0.5),
        ("mixmatch", {"unsupervised_weight": 2.0}, 0.5),
        ("vat", {"entropy_weight": 0.06, "vat_radius": 0.3}, 0.5),
    ],
)
def test_gauss_newton_rows_say_so_and_their_error_is_known(
    name, fields, tolerance, record_property
):
    found, expected, info = hypergradients(name, **fields)
    assert info.curvature == "gauss_newton"
    error = np.abs(found - expected).max() / np.abs(expected).max()
    record_property("relative_error", float(error))
    print(f"{name}: relative error of Gauss-Newton {error:.3g}")
    assert 1e-9 < error < tolerance
    assert np.corrcoef(found, expected)[0, 1] > 0.9
