"""What the suites train: the library's steps, and a plain one of the same graph."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras as keras

from experiments.benchmarks import flops, timing
from ssl_influence import config as config_lib, training
from ssl_influence.methods import registry as methods
from ssl_influence.models import registry as models

IMAGE_SHAPE = (32, 32, 3)
NUM_CLASSES = 10
TABLE_SIZE = 50_000  # example weights, as CIFAR-10 has examples


def times(config: config_lib.Config, repeats: int) -> timing.Rows:
    """Seconds and floating-point operations of every step."""
    batch, validation = batches(config.data)
    calls, traced = {}, {}
    for mode in config_lib.TARGET_FORWARDS:
        trainer = make_trainer(config.replace(method={"target_forward": mode}))
        for row, name, arguments in (
            ("theta", "theta_step", (batch,)),
            ("fused", "bilevel_step", (batch, validation)),
            ("weight", "weight_step", (batch, validation)),
        ):
            step = getattr(trainer, name)
            calls[f"{row}_{mode}"] = lambda step=step, arguments=arguments: wait(step(*arguments))
            traced[f"{row}_{mode}"] = trainer.concrete_step(name, *arguments)
        plain, _ = plain_step(config, mode)
        calls[f"plain_{mode}"] = lambda plain=plain: wait(plain(batch))
        traced[f"plain_{mode}"] = plain.get_concrete_function(batch)

    @tf.function(jit_compile=config.train.jit_compile or None)
    def forward(inputs):
        return trainer.model(inputs, training=False)

    calls["validation_forward"] = lambda: wait(forward(validation["inputs"]))
    traced["validation_forward"] = forward.get_concrete_function(validation["inputs"])
    rows = timing.interleaved(calls, repeats)
    for row, function in traced.items():
        rows[row]["float_operations"] = flops.count(function).total
    return rows


def run(config: config_lib.Config, repeats: int, *, with_weights: bool) -> None:
    """2 * repeats steps of the network, with a weight step in every other one, or in none."""
    batch, validation = batches(config.data)
    trainer = make_trainer(config)
    for _ in range(repeats):
        wait(trainer.theta_step(batch))
        second = trainer.bilevel_step(batch, validation) if with_weights else None
        wait(second or trainer.theta_step(batch))


def make_trainer(
    config: config_lib.Config,
    input_shape: tuple[int, ...] = IMAGE_SHAPE,
    num_classes: int = NUM_CLASSES,
    **of_encoder: Any,
) -> training.BilevelTrainer:
    """A trainer for inputs of a shape, with new weights; `of_encoder` is for `models.build`."""
    model = models.build(config.model, input_shape, num_classes, config.train.seed, **of_encoder)
    method = methods.build(
        config.method,
        num_classes,
        config.train.train_steps,
        feature_size=model.outputs[0].shape[-1],
        seed=config.train.seed,
    )
    return training.BilevelTrainer(
        model, method, training.make_example_weights(config.weights, TABLE_SIZE), config
    )


def plain_step(config: config_lib.Config, mode: str) -> tuple[Callable, keras.Model]:
    """UDA's step as one writes it for a single experiment, and the network that it moves."""
    model = models.build(config.model, IMAGE_SHAPE, NUM_CLASSES, config.train.seed)
    rate, momentum = config.optimizer.learning_rate, config.optimizer.momentum
    optimizer = {
        "sgd": lambda: keras.optimizers.SGD(rate, momentum, nesterov=True, jit_compile=False),
        "adam": lambda: keras.optimizers.Adam(rate, jit_compile=False),
    }[config.optimizer.name]()
    optimizer.build(model.trainable_variables)
    every = config.optimizer.decayed_variables == "all"
    decayed = [v for v in model.trainable_variables if every or "kernel" in v.name]
    labeled_rows, rows = config.data.labeled_batch_size, config.data.unlabeled_batch_size
    uda = config.method.settings()

    @tf.function(jit_compile=config.train.jit_compile or None)
    def step(batch):
        labeled, unlabeled = batch["labeled"], batch["unlabeled"]
        if mode == "separate":
            _, weak = model(unlabeled["weak"], training=True)
        with tf.GradientTape() as tape:
            if mode == "separate":
                inputs = tf.concat([labeled["inputs"], unlabeled["strong"]], 0)
                _, logits = model(inputs, training=True)
                logits, strong = tf.split(logits, [labeled_rows, rows])
            else:
                inputs = [labeled["inputs"], unlabeled["weak"], unlabeled["strong"]]
                _, logits = model(tf.concat(inputs, 0), training=True)
                logits, weak, strong = tf.split(logits, [labeled_rows, rows, rows])
            weak = tf.stop_gradient(weak)
            target = tf.nn.softmax(weak / uda["temperature"])
            confident = tf.reduce_max(tf.nn.softmax(weak), 1) > uda["confidence"]
            supervised = tf.nn.sparse_softmax_cross_entropy_with_logits(labeled["label"], logits)
            unsupervised = tf.nn.softmax_cross_entropy_with_logits(target, strong)
            loss = tf.reduce_mean(supervised)
            loss += uda["unsupervised_weight"] * tf.reduce_mean(
                tf.cast(confident, tf.float32) * unsupervised
            )
            loss += config.optimizer.weight_decay * tf.add_n([tf.nn.l2_loss(v) for v in decayed])
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return step, model


def batches(data: config_lib.DataConfig) -> tuple[dict, dict]:
    """A training and a validation batch, of noise."""
    rng = np.random.default_rng(0)

    def rows(count: int, *views: str) -> dict[str, tf.Tensor]:
        images = {
            view: tf.constant(rng.normal(size=(count, *IMAGE_SHAPE)), tf.float32) for view in views
        }
        return {
            **images,
            "label": tf.constant(rng.integers(NUM_CLASSES, size=count), tf.int32),
            "example_id": tf.constant(rng.integers(TABLE_SIZE, size=count), tf.int64),
        }

    batch = {
        "labeled": rows(data.labeled_batch_size, "inputs"),
        "unlabeled": rows(data.unlabeled_batch_size, "weak", "strong"),
    }
    return batch, rows(data.validation_batch_size, "inputs")


def wait(result: Any) -> None:
    """Returns once the result has been computed."""
    for tensor in tf.nest.flatten(result):
        tensor.numpy()
