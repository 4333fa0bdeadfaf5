"""Wide residual networks (Zagoruyko & Komodakis, 2016) with the constants of FixMatch's code.

Those constants are: pre-activation blocks with leaky ReLU of slope 0.1, convolutions with biases
whose kernels start normal with standard deviation sqrt(2 / (k k filters)), a Glorot-normal head,
and BatchNorm with momentum 0.999 and epsilon 0.001. The very first block feeds its activated input
to both branches; a shortcut is a 1x1 convolution only where the number of channels changes.
"""

from collections.abc import Sequence

import tf_keras as keras

from ssl_influence import config
from ssl_influence.models import heads, seeds

layers = keras.layers

STAGES = 3
LEAKY_RELU_SLOPE = 0.1
BATCH_NORM_EPSILON = 1e-3


def build(
    input_shape: Sequence[int],
    num_classes: int,
    seed: int,
    *,
    depth: int = 28,
    width: int = 2,
    filters: int = 16,
    batch_norm_momentum: float = 0.999,
    sync_bn: bool = False,
    head: str = "softmax",
) -> keras.Model:
    """WRN-depth-width: a stem, three stages of (depth - 4) / 6 blocks, mean pooling, a linear head.

    Stage s = 0, 1, 2 has filters * width * 2^s channels. Stages 1 and 2 halve the image, rounding
    up, so that images of any size work. With 10 classes WRN-28-2 has 1,469,642 trainable parameters
    and 3,616 moving statistics; with 2 classes 1,468,610 parameters, or 1,468,481 with the binary
    head.

    Args:
      input_shape: (height, width, channels) of one image.
      num_classes: C.
      seed: the same seed gives the same weights, bit for bit.
      depth: 6 n + 4.
      width: the widening factor.
      filters: channels of the stem.
      batch_norm_momentum: share of the old value that BatchNorm's moving statistics keep in a step.
      sync_bn: BatchNorm normalizes by the batch of all replicas of a strategy.
      head: "softmax", with (D + 1) C parameters, or "binary", with D + 1; see `heads.logits`.

    Returns:
      A model from float images [B, height, width, channels] to `[features [B, D], logits [B, C]]`,
      with D = 4 filters width, both in the variables' precision: float32, under a mixed-precision
      policy too. The Dense layer on the features is named "head".

    Raises:
      ConfigError: for a depth, width, number of filters or input shape that makes no such network,
        and for a binary head and another number of classes than 2.
    """
    config.ModelConfig(
        name="wide_resnet",
        depth=depth,
        width=width,
        filters=filters,
        batch_norm_momentum=batch_norm_momentum,
        head=head,
    )
    if len(input_shape) != 3:
        raise config.ConfigError(
            f"A Wide-ResNet takes images, not inputs of shape {tuple(input_shape)}: "
            "give (height, width, channels), or use model=mlp."
        )
    precision = keras.mixed_precision.global_policy().variable_dtype
    stream = seeds.initializer_seeds(seed)

    def convolution(x, channels: int, size: int, stride: int, name: str):
        stddev = (2.0 / (size * size * channels)) ** 0.5
        initializer = keras.initializers.RandomNormal(stddev=stddev, seed=next(stream))
        return layers.Conv2D(
            channels, size, stride, padding="same", kernel_initializer=initializer, name=name
        )(x)

    def activation(x, name: str):
        x = layers.BatchNormalization(
            momentum=batch_norm_momentum,
            epsilon=BATCH_NORM_EPSILON,
            synchronized=sync_bn,
            name=f"{name}_norm",
        )(x)
        return layers.LeakyReLU(LEAKY_RELU_SLOPE, name=f"{name}_relu")(x)

    def block(x, channels: int, stride: int, first: bool, name: str):
        h = activation(x, f"{name}_0")
        shortcut = h if first else x
        h = convolution(h, channels, 3, stride, f"{name}_0_conv")
        h = convolution(activation(h, f"{name}_1"), channels, 3, 1, f"{name}_1_conv")
        if shortcut.shape[-1] != channels:
            shortcut = convolution(shortcut, channels, 1, stride, f"{name}_shortcut")
        return layers.Add(name=f"{name}_add")([shortcut, h])

    inputs = layers.Input(tuple(input_shape), name="inputs")
    x = convolution(inputs, filters, 3, 1, "stem")
    for stage in range(STAGES):
        for index in range((depth - 4) // 6):
            x = block(
                x,
                channels=filters * width * 2**stage,
                stride=2 if stage > 0 and index == 0 else 1,
                first=stage == 0 and index == 0,
                name=f"stage{stage}_block{index}",
            )
    x = activation(x, "final")
    features = layers.GlobalAveragePooling2D(dtype=precision, name="features")(x)
    initializer = keras.initializers.GlorotNormal(seed=next(stream))
    logits = heads.logits(features, num_classes, head, initializer, precision)
    return keras.Model(inputs, [features, logits], name=f"wide_resnet_{depth}_{width}")
