"""The last layer of a classifier: what turns features into logits."""

import tensorflow as tf
import tf_keras as keras

from ssl_influence import config

layers = keras.layers


def logits(
    features: tf.Tensor,
    num_classes: int,
    head: str,
    initializer: keras.initializers.Initializer,
    precision: str,
) -> tf.Tensor:
    """Adds a head to features of a functional model.

    The binary head stands for the two logits theta_1^T x and theta_2^T x of a softmax head with
    theta' = theta_1 - theta_2, whose loss is the same (the paper's appendix), at half the
    parameters: one kernel column and one bias.

    Args:
      features: [B, D].
      num_classes: C.
      head: "softmax", or "binary" for two classes.
      initializer: of the kernel.
      precision: dtype in which the head is computed.

    Returns:
      Logits [B, C]: the Dense layer named "head" itself, or (f/2, -f/2) where it gives the one
      number f. That needs no layers but those of Keras, so a saved model loads anywhere.

    Raises:
      ConfigError: for an unknown head, or a binary one and another number of classes than 2.
    """
    if head not in config.HEADS:
        raise config.ConfigError(f"head={head!r} is not one of {', '.join(config.HEADS)}.")
    binary = head == "binary"
    if binary and num_classes != 2:
        raise config.ConfigError(
            f"head=binary is for two classes, but num_classes={num_classes}: use head=softmax."
        )
    outputs = layers.Dense(
        1 if binary else num_classes, kernel_initializer=initializer, dtype=precision, name="head"
    )(features)
    if not binary:
        return outputs
    halves = [
        layers.Rescaling(scale, dtype=precision, name=name)(outputs)
        for scale, name in ((0.5, "logit_0"), (-0.5, "logit_1"))
    ]
    return layers.Concatenate(dtype=precision, name="logits")(halves)
