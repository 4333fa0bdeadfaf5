"""Fixed logits, a forward pass that gives them back, and NumPy's float64 of the usual terms."""

import numpy as np
import tensorflow as tf

from ssl_influence import config
from ssl_influence.methods import base, registry

CLASSES = 4
TRAIN_STEPS = 200
LABELED = np.array([[2.0, 0, 0, 0], [0, 1, -1, 3], [-2, 0.5, 0, 0], [0, 0, 0, 0], [0.3, 4, 1, 0]])
LABEL = np.array([0, 3, 0, 2, 2])
WEAK = np.array([[3.0, 0, 0.5, 0], [0, 6, 1, 1], [1, 1.2, 0, 0], [0, 0, -1, 5]])
STRONG = np.array([[1.0, 0, 2, 0], [0, 2, 0, 0.5], [0, 0, 0, 0], [3, 0, -1, 1.0]])
TRUTH = np.array([0, 2, -1, -1])
ID = np.array([11, 2**40, 7, 11])


def forward(inputs):
    """Inputs are the logits; two of their columns, the features."""
    return inputs[:, :2], inputs


PLAIN = base.Forward(*[forward] * 4)


def batch(dtype=tf.float32, **replace):
    views = {"weak": WEAK, "strong": STRONG, "weak_2": STRONG, **replace}
    return {
        "labeled": {
            "inputs": tf.constant(views.pop("inputs", LABELED), dtype),
            "label": tf.constant(LABEL, tf.int32),
            "example_id": tf.range(5, dtype=tf.int64),
        },
        "unlabeled": {
            "label": tf.constant(views.pop("truth", TRUTH), tf.int32),
            "example_id": tf.constant(ID, tf.int64),
            **{name: tf.constant(view, dtype) for name, view in views.items()},
        },
    }


def np_softmax(logits):
    e = np.exp(logits - logits.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def np_cross_entropy(logits, label):
    return -np.log(np_softmax(logits)[np.arange(len(label)), label])


def method_of(name, **fields):
    return registry.build(
        config.MethodConfig(name=name, **fields), CLASSES, TRAIN_STEPS, feature_size=2, seed=3
    )


def run(method, data, step=TRAIN_STEPS, graph=False):
    if graph:
        return tf.function(lambda data, step: method(PLAIN, data, step))(data, tf.constant(step))
    return method(PLAIN, data, step)


def close(actual, expected, tolerance=1e-6):
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def check_labeled(output):
    close(output.supervised, np_cross_entropy(LABELED, LABEL))
    close(output.supervised_coefficient, np.full(5, 0.2))
    close(output.labeled_head.features, LABELED[:, :2])
    close(output.labeled_head.logits, LABELED)
    close(output.labeled_head.gradient, np_softmax(LABELED) - np.eye(CLASSES)[LABEL])
    close(output.metrics["train_accuracy"], np.mean(LABELED.argmax(-1) == LABEL))


def tensors(output):
    """The tensors of an output, without what is None or plain."""
    return [part for part in tf.nest.flatten(output) if tf.is_tensor(part)]
