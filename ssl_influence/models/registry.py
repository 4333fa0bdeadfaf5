"""From a `ModelConfig` to a model."""

import contextlib
import re
from collections.abc import Iterator, Sequence

import tensorflow as tf
import tf_keras as keras

from ssl_influence import config
from ssl_influence.models import bert, mlp, wide_resnet

_POLICIES = {"none": None, "bfloat16": "mixed_bfloat16", "float16": "mixed_float16"}


def build(
    model_config: config.ModelConfig,
    input_shape: Sequence[int],
    num_classes: int,
    seed: int,
    *,
    encoder: bert.Sizes | None = None,
    pad_id: int = 0,
) -> keras.Model:
    """The model that `model_config` describes, with outputs `[features [B, D], logits [B, C]]`.

    Args:
      model_config: which network, and its sizes.
      input_shape: shape of one example, without the batch axis; of a text, [L].
      num_classes: C, at least 2.
      seed: determines the initial weights, bit for bit.
      encoder: of bert, the sizes of its encoder.
      pad_id: of bert, the token that fills texts up.

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
    with _precision(model_config.mixed_precision):
        if model_config.name == "bert":
            return bert.build(
                encoder,
                num_classes,
                seed,
                sequence_length=input_shape[0],
                pad_id=pad_id,
                pooling=model_config.pooling,
                dropout=model_config.dropout,
                head=model_config.head,
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
                sync_bn=model_config.sync_bn,
                head=model_config.head,
            )
        return mlp.build(
            input_shape,
            num_classes,
            seed,
            hidden_units=model_config.hidden_units,
            head=model_config.head,
        )


@contextlib.contextmanager
def _precision(mixed_precision: str) -> Iterator[None]:
    """Layers that are made in the context compute as `mixed_precision` says; none: as outside."""
    before, policy = keras.mixed_precision.global_policy(), _POLICIES[mixed_precision]
    keras.mixed_precision.set_global_policy(policy or before)
    try:
        yield
    finally:
        keras.mixed_precision.set_global_policy(before)


def last_block(model: keras.Model) -> list[tf.Variable]:
    """The trainable variables of the last block and the last layer of a model built here.

    They are those of the last residual block of a Wide-ResNet with the BatchNorm that follows it,
    of the last hidden layer of an MLP, or of the last block and the pooler of BERT; and of the
    head. The paper takes the influence of one of its comparisons over "the last ResNet block and
    the classification layers".

    Returns:
      A part of `model.trainable_variables`, in their order.

    Raises:
      ConfigError: for a model whose layers are not named as they are here.
    """
    if model.name == "bert":
        return bert.last_block(model)
    names = [layer.name for layer in model.layers]
    blocks = [
        found[0] for name in names if (found := re.match(r"stage\d+_block\d+_|hidden_\d+$", name))
    ]
    if not blocks or "head" not in names:
        raise config.ConfigError(
            f"The last block of model {model.name!r} is not known, as its layers are not those of "
            "a wide_resnet, mlp or bert of this library: use influence_params=last_layer or all."
        )
    chosen = {
        id(variable)
        for layer in model.layers
        if layer.name.startswith(blocks[-1]) or layer.name in ("final_norm", "head")
        for variable in layer.trainable_variables
    }
    return [variable for variable in model.trainable_variables if id(variable) in chosen]
