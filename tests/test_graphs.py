"""AutoGraph: off for the library's own code, on for layers and methods of others."""

import sys

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

from ssl_influence import evaluation, graphs
from ssl_influence.methods import pseudo_label
from ssl_influence.serving import classifier
from tests.test_training import DIM, ToyPipeline, make_config, make_model, make_trainer, values


class Conditional(keras.layers.Layer):
    """Needs AutoGraph in a graph: its condition is of the values."""

    def call(self, x):
        if tf.reduce_sum(x) > 1e6:
            x = tf.zeros_like(x)
        return x


class ConditionalMethod(pseudo_label.PseudoLabel):
    def __call__(self, forward, batch, step):
        if step > 1000:
            tf.print("late")
        return super().__call__(forward, batch, step)


def with_layer(layer):
    model = make_model()
    inputs = keras.Input([DIM])
    features = model.layers[1](layer(inputs))
    return keras.Model(inputs, [features, model.layers[2](features)])


def generated():
    return {name for name in sys.modules if name.startswith("__autograph_generated_file")}


@pytest.mark.parametrize("rows_per_pass", [None, 5])
def test_layers_of_others_may_have_conditions_on_tensors(rows_per_pass):
    config = make_config(train={"rows_per_pass": rows_per_pass})
    ends = []
    for layer in (Conditional(), keras.layers.Activation("linear")):
        trainer = make_trainer(config, with_layer(layer))
        pipeline = ToyPipeline()
        trainer.theta_step(pipeline.train_batch(0))
        trainer.bilevel_step(pipeline.train_batch(1), pipeline.validation_batch(0))
        trainer.weight_step(pipeline.train_batch(2), pipeline.validation_batch(0))
        counts = evaluation.Evaluator(trainer.model).counts(
            pipeline.evaluation_batches("validation", 9)
        )
        ends.append([*values(trainer.trainable), trainer.example_weights.values(), *counts])
    for ours, theirs in zip(*ends, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_methods_of_others_may_have_conditions_on_tensors():
    trainer = make_trainer(method=ConditionalMethod(12, confidence=0.0, ramp_up=0.0))
    plain = make_trainer()
    for one in (trainer, plain):
        one.theta_step(ToyPipeline().train_batch(0))
    for ours, theirs in zip(values(trainer.trainable), values(plain.trainable), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_classifier_takes_models_of_others():
    spec = ToyPipeline.spec
    inputs = np.random.RandomState(0).randn(4, DIM).astype(np.float32)
    ours, theirs = (
        classifier.Classifier(with_layer(layer), spec).predict(inputs)[0]
        for layer in (Conditional(), keras.layers.Activation("linear"))
    )
    np.testing.assert_array_equal(ours, theirs)


def test_the_librarys_own_code_is_traced_as_it_is_written():
    before = generated()
    trainer, pipeline = make_trainer(), ToyPipeline()
    trainer.theta_step(pipeline.train_batch(0))
    trainer.bilevel_step(pipeline.train_batch(1), pipeline.validation_batch(0))
    evaluation.Evaluator(trainer.model).counts(pipeline.evaluation_batches("validation", 9))
    assert generated() == before
    tf.function(lambda x: x + 1)(tf.constant(1))
    assert generated() > before  # what the test looks at is there where AutoGraph was


def test_eager_calls_are_not_converted():
    layer = Conditional()
    assert graphs.converted(layer) is layer
