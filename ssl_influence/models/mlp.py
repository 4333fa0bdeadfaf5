"""The multi-layer perceptron of the paper's synthetic experiments (section 5.1)."""

from collections.abc import Sequence

import tf_keras as keras

from ssl_influence.models import seeds

layers = keras.layers


def build(
    input_shape: Sequence[int],
    num_classes: int,
    seed: int,
    *,
    hidden_units: Sequence[int] = (100, 100),
) -> keras.Model:
    """Fully connected ReLU layers and a softmax head; the defaults are the paper's.

    The paper does not name the initial values: kernels are Glorot-uniform and biases zero.

    Args:
      input_shape: shape of one example; anything but a vector is flattened first.
      num_classes: C.
      seed: the same seed gives the same weights, bit for bit.
      hidden_units: width of each hidden layer; the last one is D.

    Returns:
      A model from float inputs [B, *input_shape] to `[features [B, D], logits [B, C]]`, both in
      the variables' precision: float32, under a mixed-precision policy too. The layer that gives
      the logits is named "head".
    """
    precision = keras.mixed_precision.global_policy().variable_dtype
    stream = seeds.initializer_seeds(seed)

    def dense(units: int, **kwargs) -> layers.Layer:
        initializer = keras.initializers.GlorotUniform(seed=next(stream))
        return layers.Dense(units, kernel_initializer=initializer, **kwargs)

    inputs = layers.Input(tuple(input_shape), name="inputs")
    x = layers.Flatten(name="flatten")(inputs) if len(input_shape) > 1 else inputs
    for index, units in enumerate(hidden_units):
        x = dense(units, activation="relu", name=f"hidden_{index}")(x)
    features = layers.Activation("linear", dtype=precision, name="features")(x)
    logits = dense(num_classes, dtype=precision, name="head")(features)
    return keras.Model(inputs, [features, logits], name="mlp")
