"""Products of per-example gradients with a vector, against the gradients themselves."""

import keras as keras_3
import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

from ssl_influence import config
from ssl_influence.per_example import products

RUNNERS = [lambda fn: fn, tf.function]
ROWS = 5


def convolutional_model():
    keras.utils.set_random_seed(0)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input([6, 6, 2]),
            layers.Conv2D(3, 3, strides=2, padding="same"),
            layers.BatchNormalization(momentum=0.5),
            layers.LeakyReLU(),
            layers.GlobalAveragePooling2D(),
            layers.Dense(4),
        ]
    )


def problem(model, shape, classes=4, seed=0):
    rng = np.random.default_rng(seed)
    inputs, labels = tf.constant(rng.normal(size=[ROWS, *shape])), rng.integers(classes, size=ROWS)
    vectors = [tf.constant(rng.normal(size=v.shape)) for v in model.trainable_variables]
    return inputs, tf.constant(labels), vectors


def cross_entropy(logits, labels):
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)


def by_jacobian(losses_fn, vectors, variables):
    with tf.GradientTape(persistent=True) as tape:
        losses = losses_fn()
    blocks = tape.jacobian(losses, variables, experimental_use_pfor=False)
    return sum(
        (block.numpy() * vector.numpy()).reshape(len(losses), -1).sum(1)
        for block, vector in zip(blocks, vectors, strict=True)
    )


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("training", [False, True])
def test_equal_the_products_with_each_gradient(training, runner):
    model = convolutional_model()
    inputs, labels, vectors = problem(model, [6, 6, 2])
    before = [v.numpy() for v in model.variables]
    fn = runner(
        lambda: products.dots(model, inputs, labels, cross_entropy, vectors, training=training)
    )
    found = fn()
    for value, variable in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(variable, value)
    expected = by_jacobian(
        lambda: cross_entropy(model(inputs, training=training), labels),
        vectors,
        model.trainable_variables,
    )
    assert found.shape == [ROWS] and found.dtype == tf.float64
    np.testing.assert_allclose(found, expected, atol=1e-13)


def test_batch_statistics_let_the_rows_interact():
    model = convolutional_model()
    inputs, labels, vectors = problem(model, [6, 6, 2])
    found = [
        products.dots(model, inputs[rows], labels[rows], cross_entropy, vectors, training=training)[
            0
        ]
        for training in (False, True)
        for rows in (slice(0, ROWS), slice(0, 1))
    ]
    np.testing.assert_allclose(found[0], found[1], atol=1e-14)
    assert abs(found[2] - found[3]) > 1e-3


def test_some_variables_of_a_model_with_two_inputs():
    a, b = keras.Input([3]), keras.Input([2])
    hidden = keras.layers.Dense(4, activation="tanh")(a)
    model = keras.Model([a, b], keras.layers.Dense(4)(keras.layers.concatenate([hidden, b])))
    rng = np.random.default_rng(1)
    inputs = [tf.constant(rng.normal(size=[ROWS, n])) for n in (3, 2)]
    target = {"mean": tf.constant(rng.normal(size=[ROWS, 4]))}
    variables = model.layers[-1].trainable_variables
    vectors = [tf.constant(rng.normal(size=v.shape)) for v in variables]

    def squared(outputs, target):
        return tf.reduce_sum((outputs - target["mean"]) ** 2, axis=1)

    found = products.dots(model, inputs, target, squared, vectors, variables=variables)
    expected = by_jacobian(lambda: squared(model(inputs), target), vectors, variables)
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_embeddings_give_sparse_gradients_and_the_same_products():
    model = keras.Sequential(
        [keras.Input([6], dtype="int32"), keras.layers.Embedding(9, 4), keras.layers.LSTM(4)]
    )
    rng = np.random.default_rng(2)
    tokens, labels = rng.integers(9, size=[ROWS, 6]), rng.integers(4, size=ROWS)
    vectors = [tf.constant(rng.normal(size=v.shape)) for v in model.trainable_variables]
    found = products.dots(model, tf.constant(tokens), labels, cross_entropy, vectors)
    expected = np.empty(ROWS)
    for u in range(ROWS):
        with tf.GradientTape() as tape:
            loss = cross_entropy(model(tokens[u : u + 1]), labels[u : u + 1])[0]
        gradients = map(tf.convert_to_tensor, tape.gradient(loss, model.trainable_variables))
        expected[u] = sum(tf.reduce_sum(g * v) for g, v in zip(gradients, vectors, strict=True))
    np.testing.assert_allclose(found, expected, atol=1e-12)


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_keras_3_model_goes_too(runner):
    model = keras_3.Sequential(
        [
            keras_3.Input([5], dtype="float64"),
            keras_3.layers.Dense(4, activation="tanh", dtype="float64"),
            keras_3.layers.BatchNormalization(dtype="float64"),
            keras_3.layers.Dense(4, dtype="float64"),
        ]
    )
    inputs, labels, vectors = problem(model, [5])
    fn = runner(lambda: products.dots(model, inputs, labels, cross_entropy, vectors))
    variables = [v.value for v in model.trainable_variables]
    expected = by_jacobian(lambda: cross_entropy(model(inputs), labels), vectors, variables)
    np.testing.assert_allclose(fn(), expected, atol=1e-12)


def test_losses_of_any_shape_and_a_variable_that_none_depends_on():
    x, unused = tf.Variable([1.0, 2.0]), tf.Variable(3.0)
    found = products.row_dots(
        lambda: tf.stack([x**2, x * x[0]]),
        [tf.constant([1.0, 10.0]), tf.constant(7.0)],
        [x, unused],
    )
    np.testing.assert_allclose(found, [[2, 40], [2, 12]])


def test_losses_that_depend_on_no_variable_are_refused():
    with pytest.raises(config.ConfigError, match="none of the 1 variables"):
        products.row_dots(lambda: tf.ones(3), [tf.ones(2)], [tf.Variable([1.0, 2.0])])


def test_what_cannot_be_differentiated_twice_is_refused():
    x = tf.Variable([1.0, 2.0])

    @tf.custom_gradient
    def once(y):
        return y, lambda upstream: tf.stop_gradient(upstream)

    with pytest.raises(config.ConfigError, match="differentiated twice"):
        products.row_dots(lambda: once(x * 1.0), [tf.ones(2)], [x])
