"""A small model for each kind of layer, in tf_keras and in Keras 3."""

import keras as keras_3
import numpy as np
import tensorflow as tf
import tf_keras as keras

LIBRARIES = {"tf_keras": keras, "keras_3": keras_3}
ROWS, CLASSES, TOKENS = 5, 3, 7


def _chain(library, shape, *layers, dtype):
    inputs = library.Input(shape, dtype=dtype)
    x = inputs
    for layer in layers:
        x = layer(x)
    return library.Model(inputs, x)


def build(kind, library_name, dtype="float64"):
    """A model of one kind in float64 or float32, with all its variables away from their start."""
    library = LIBRARIES[library_name]
    library.utils.set_random_seed(0)

    def layer(name, *args, **kwargs):
        return getattr(library.layers, name)(*args, dtype=dtype, **kwargs)

    def chain(shape, *layers):
        return _chain(library, shape, *layers, dtype=dtype)

    def head():
        return layer("Flatten"), layer("Dense", CLASSES)

    model = {
        "dense": lambda: chain(
            [4, 5], layer("Dense", 4, activation="tanh"), *head(), layer("Dense", CLASSES)
        ),
        "einsum": lambda: chain(
            [4, 6],
            layer("EinsumDense", "abc,cde->abde", output_shape=(4, 2, 3), bias_axes="de"),
            layer("Reshape", (4, 6)),
            layer("EinsumDense", "...d,de->...e", output_shape=5, bias_axes="e", activation="tanh"),
            *head(),
        ),
        "conv1d": lambda: chain(
            [9, 3],
            layer("Conv1D", 4, 3, padding="causal", dilation_rate=2, activation="tanh"),
            layer("Conv1D", 3, 2, strides=2),
            *head(),
        ),
        "conv2d": lambda: chain(
            [9, 8, 3],
            layer("Conv2D", 4, 3, strides=2, padding="same", activation="tanh"),
            layer("Conv2D", 5, (3, 2), dilation_rate=2, padding="same", use_bias=False),
            layer("Conv2D", 3, (2, 3), strides=(1, 2)),
            *head(),
        ),
        "conv3d": lambda: chain(
            [5, 4, 6, 2], layer("Conv3D", 3, 2, strides=(2, 1, 3), padding="same"), *head()
        ),
        "depthwise": lambda: chain(
            [7, 8, 3],
            layer("DepthwiseConv2D", 3, 2, "same", depth_multiplier=2, activation="tanh"),
            layer("DepthwiseConv2D", (2, 3), dilation_rate=1),
            *head(),
        ),
        "norms": lambda: chain(
            [5, 6, 4],
            layer("Dense", 4, activation="tanh"),
            layer("BatchNormalization"),
            layer("LayerNormalization", axis=[1, -1]),
            layer("GroupNormalization", 2),
            layer("LayerNormalization", center=False),
            *head(),
        ),
        "attention": lambda: _attention(library, layer),
        "shared": lambda: _shared(library, layer, chain, dtype),
    }[kind]()
    rng = np.random.default_rng(1)
    for variable in model.trainable_variables:
        variable.assign(
            np.asarray(tf.convert_to_tensor(variable)) + 0.2 * rng.normal(size=variable.shape)
        )
    return model


KINDS = (
    "dense",
    "einsum",
    "conv1d",
    "conv2d",
    "conv3d",
    "depthwise",
    "norms",
    "attention",
    "shared",
)


def _attention(library, layer):
    tokens = library.Input([4], dtype="int32")
    x = layer("Embedding", TOKENS, 6)(tokens)
    x = layer("MultiHeadAttention", 2, 3)(x, x)
    return library.Model(tokens, layer("Dense", CLASSES)(layer("Flatten")(x)))


def _shared(library, layer, chain, dtype):
    """A layer applied twice, within a model that is applied twice itself."""
    twice = layer("Dense", 5, activation="tanh")
    inner = chain([5], layer("Dense", 5, activation="tanh"), twice)
    inputs = library.Input([5], dtype=dtype)
    return library.Model(inputs, layer("Dense", CLASSES)(inner(twice(inner(inputs)))))


def batch(model, dtype="float64", rows=ROWS):
    """Inputs and labels."""
    rng = np.random.default_rng(2)
    tensor = model.inputs[0]
    shape = [rows, *tensor.shape[1:]]
    if tf.as_dtype(tensor.dtype).is_integer:
        inputs = tf.constant(rng.integers(TOKENS, size=shape), tf.int32)
    else:
        inputs = tf.constant(rng.normal(size=shape), dtype)
    return inputs, tf.constant(rng.integers(CLASSES, size=rows))


def cross_entropy(logits, labels):
    """[B]."""
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)


def one_by_one(model, inputs, labels, loss_fn=cross_entropy):
    """The gradients of each example, [B, ...] for each variable, by a tape of its own."""
    variables = [v if isinstance(v, tf.Variable) else v.value for v in model.trainable_variables]
    rows = []
    for u in range(len(inputs)):
        with tf.GradientTape() as tape:
            loss = loss_fn(model(inputs[u : u + 1], training=False), labels[u : u + 1])[0]
        rows.append([np.array(tf.convert_to_tensor(g)) for g in tape.gradient(loss, variables)])
    return [np.stack(gradients) for gradients in zip(*rows, strict=True)]
