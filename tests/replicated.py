"""Some steps of a bilevel run on so many replicas, in a process of its own: devices are set once.

    python -m tests.replicated PATH.npz COUNT CASE...                 COUNT virtual CPUs
    TF_CONFIG=... python -m tests.replicated PATH.npz COUNT CASE...     a worker that has so many

    python -m tests.replicated compare ONE.npz OTHER.npz...             differences from the first

A case is method:model:dtype, with the models "mlp", "wide_resnet" (with synchronized BatchNorm) and
"own_norms" (the same without).
Results are named case/what; "evaluated" is what `evaluate` gives.
"""

import sys

import numpy as np
import tensorflow as tf
import tf_keras as keras

from ssl_influence import (
    config as config_lib,
    distribution,
    evaluation,
    example_weights,
    optimizers,
    replicas,
    training,
)
from ssl_influence.methods import registry as methods
from ssl_influence.models import registry as models

SIZE, CLASSES, STEPS, EVERY = 40, 3, 20, 5
LABELED, UNLABELED, VALIDATION = 8, 16, 12
EXAMPLES, BATCH_SIZES = 10_003, (63, 500, 2_001, 10_003)
SHAPES = {"mlp": (6,), "wide_resnet": (8, 8, 3), "own_norms": (8, 8, 3)}


def config_of(method, model):
    return config_lib.Config().replace(
        model={
            "name": "mlp" if model == "mlp" else "wide_resnet",
            "hidden_units": (8,),
            "depth": 10,
            "width": 1,
            "filters": 4,
            "sync_bn": model == "wide_resnet",
        },
        method={"name": method},
        optimizer={
            "learning_rate": 0.05,
            "weight_decay": 0.01,
            "clip_norm": 5.0,
            "ema_variables": "all",
        },
        weights={"damping": 0.1, "learning_rate": 0.05, "inner_steps": EVERY},
        train={"train_steps": STEPS},
    )


def batches(step, shape, dtype):
    """Of a step: train and validation batch. An unlabeled example comes twice, far apart."""
    random = np.random.RandomState(step)

    def rows(count):
        return tf.constant(random.randn(count, *shape), dtype)

    def ints(count, below):
        return tf.constant(random.randint(below, size=count))

    ids = random.permutation(SIZE)[:UNLABELED]
    ids[-1] = ids[0]
    weak = rows(UNLABELED)
    batch = {
        "labeled": {"inputs": rows(LABELED), "label": ints(LABELED, CLASSES)},
        "unlabeled": {
            "weak": weak,
            "weak_2": weak + 0.1 * rows(UNLABELED),
            "strong": weak + 0.5 * rows(UNLABELED),
            "label": ints(UNLABELED, CLASSES),
            "example_id": tf.constant(ids, tf.int64),
        },
    }
    return batch, {"inputs": rows(VALIDATION), "label": ints(VALIDATION, CLASSES)}


def run(case, strategy):
    """What comes out: losses [steps], weights [SIZE], their updates, theta and its average."""
    method, model, dtype = case.split(":")
    keras.mixed_precision.set_global_policy(dtype)
    config = config_of(method, model)
    weights = example_weights.ExampleWeights(
        SIZE, optimizer=optimizers.MAdam(0.05), dtype=tf.as_dtype(dtype)
    )
    with strategy.scope():
        network = models.build(config.model, SHAPES[model], CLASSES, 1)
        settings = {"confidence": 0.3} if method in ("uda", "fixmatch") else {}
        if method == "uda":
            settings["tsa"] = "linear"
        algorithm = methods.build(
            config.replace(method=settings).method,
            CLASSES,
            STEPS,
            feature_size=network.outputs[0].shape[-1],
            seed=1,
        )
    trainer = training.BilevelTrainer(network, algorithm, weights, config, strategy=strategy)
    losses = []
    for step in range(STEPS):
        batch, validation = batches(step, SHAPES[model], tf.as_dtype(dtype))
        if step % EVERY == 2:
            reported = trainer.bilevel_step(batch, validation)
        else:
            reported = trainer.theta_step(batch)
        losses.append(
            [
                np.asarray(reported[f"train/{name}"]).ravel()[0]
                for name in ("loss_supervised", "loss_unsupervised", "loss_l2", "gradient_norm")
            ]
        )
    for variable in (*network.variables, *trainer.ema.shadow):  # a checkpoint holds one for all
        first, *others = (copy.numpy() for copy in replicas.copies(variable))
        assert all(np.array_equal(first, other) for other in others), variable.name
    assert int(trainer.step) == STEPS and not int(trainer.skipped_weight_steps)
    return {
        "losses": np.array(losses, np.float64),
        "weights": weights.values(),
        "updates": weights.update_counts(),
        "theta": np.concatenate([v.numpy().ravel() for v in network.variables]),
        "average": np.concatenate([v.numpy().ravel() for v in trainer.ema.shadow]),
    }


def evaluate(strategy):
    """(wrong, examples) of 10,003 examples, in batches of several sizes, int [sizes, 2]."""
    keras.mixed_precision.set_global_policy("float32")
    random = np.random.RandomState(0)
    inputs = random.randn(EXAMPLES, 6).astype(np.float32)
    labels = random.randint(CLASSES, size=EXAMPLES)
    with strategy.scope():
        network = models.build(config_of("uda", "mlp").model, SHAPES["mlp"], CLASSES, 1)
    evaluator = evaluation.Evaluator(network, strategy)
    found = []
    for size in BATCH_SIZES:
        batches = []
        for start in range(0, EXAMPLES, size):
            x, y = inputs[start : start + size], labels[start : start + size]
            missing = size - len(y)
            batches.append(
                {
                    "inputs": tf.constant(np.pad(x, [[0, missing], [0, 0]])),
                    "label": tf.constant(np.pad(y, [0, missing]), tf.int32),
                    "mask": tf.constant(np.arange(size) < len(y)),
                }
            )
        found.append(evaluator.counts(batches)[:2])
    return np.array(found)


def compare(one, *others):
    """Prints the largest difference of each result, of each other file from the first."""
    expected = np.load(one)
    for other in others:
        found = np.load(other)
        for name in sorted(set(found) & set(expected) - {"replicas"}):
            difference = np.abs(found[name] - expected[name]).max()
            print(f"{other}, {found['replicas']} replicas: {name} {difference:.1e}")


def main():
    if sys.argv[1] == "compare":
        compare(*sys.argv[2:])
        return
    path, count, *cases = sys.argv[1:]
    strategy = distribution.make(config_lib.DistributionConfig(virtual_cpus=int(count)))
    tf.config.experimental.enable_op_determinism()
    found = {"evaluated": evaluate(strategy)}
    for case in cases:
        for name, value in run(case, strategy).items():
            found[f"{case}/{name}"] = value
    np.savez(path, replicas=strategy.num_replicas_in_sync, **found)


if __name__ == "__main__":
    main()
