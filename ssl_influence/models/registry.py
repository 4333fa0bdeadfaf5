"""From a `ModelConfig` to a model."""

from collections.abc import Sequence

import tf_keras as keras

from ssl_influence import config
from ssl_influence.models import mlp, wide_resnet


def build(
    model_config: config.ModelConfig, input_shape: Sequence[int], num_classes: int, seed: int
) -> keras.Model:
    """The model that `model_config` describes, with outputs `[features [B, D], logits [B, C]]`.

    Args:
      model_config: which network, and its sizes.
      input_shape: shape of one example, without the batch axis.
      num_classes: C, at least 2.
      seed: determines the initial weights, bit for bit.

    Raises:
      ConfigError: if the network cannot be built for these inputs and classes.
    """
    if num_classes < 2:
        raise config.ConfigError(
            f"num_classes={num_classes} leaves nothing to classify: use 2 or more."
        )
    if not input_shape or any(size is None or size < 1 for size in input_shape):
        raise config.ConfigError(
            f"input_shape={tuple(input_shape)} must give each axis of one example a size >= 1."
        )
    if model_config.name == "wide_resnet":
        return wide_resnet.build(
            input_shape,
            num_classes,
            seed,
            depth=model_config.depth,
            width=model_config.width,
            filters=model_config.filters,
            batch_norm_momentum=model_config.batch_norm_momentum,
        )
    if model_config.name == "mlp":
        return mlp.build(input_shape, num_classes, seed, hidden_units=model_config.hidden_units)
    raise config.ConfigError(f"model={model_config.name!r} has no builder: use wide_resnet or mlp.")
