"""The multi-layer perceptron of the paper's synthetic experiments (section 5.1)."""

from collections.abc import Sequence

import tf_keras as keras

from ssl_influence.models import heads, seeds

layers = keras.layers


def build(
    input_shape: Sequence[int],
    num_classes: int,
    seed: int,
    *,
    hidden_units: Sequence[int] = (100, 100),
    head: str = "softmax",
) -> keras.Model:
    """Fully connected ReLU layers and a linear head; the defaults are the paper's.

    The paper does not name the initial values: kernels are Glorot-uniform and biases zero.

    Args:
      input_shape: shape of one example; anything but a vector is flattened first.
      num_classes: C.
      seed: the same seed gives the same weights, bit for bit.
      hidden_units: width of each hidden layer; the last one is D.
      head: "softmax", with (D + 1) C parameters, or "binary", with D + 1; see `heads.logits`.

    Returns:
      A model from float inputs [B, *input_shape] to `[features [B, D], logits [B, C]]`, both in
      the variables' precision: float32, under a mixed-precision policy too. The Dense layer on
      the features is named "head".

    Raises:
      ConfigError: for an unknown head, or a binary one and another number of classes than 2.
    """
    precision = keras.mixed_precision.global_policy().variable_dtype
    stream = seeds.initializer_seeds(seed)

    def initializer() -> keras.initializers.Initializer:
        return keras.initializers.GlorotUniform(seed=next(stream))

    inputs = layers.Input(tuple(input_shape), name="inputs")
    x = layers.Flatten(name="flatten")(inputs) if len(input_shape) > 1 else inputs
    for index, units in enumerate(hidden_units):
        x = layers.Dense(
            units, activation="relu", kernel_initializer=initializer(), name=f"hidden_{index}"
        )(x)
    features = layers.Activation("linear", dtype=precision, name="features")(x)
    logits = heads.logits(features, num_classes, head, initializer(), precision)
    return keras.Model(inputs, [features, logits], name="mlp")
