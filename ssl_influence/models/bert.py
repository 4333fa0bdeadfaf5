"""BERT (Devlin et al., 2019) with a classifier on top: the encoder of the TensorFlow Model Garden.

The encoder is `official.nlp.modeling.networks.BertEncoderV2`, from the package tf-models-official,
which is imported when a model is built and not before.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras as keras

from ssl_influence import config, files
from ssl_influence.models import heads, seeds

layers = keras.layers

GELUS = ("erf", "tanh")
_INITIAL_STDDEV = 0.02  # BERT's own, for what is new.


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What a BERT encoder is, but for its weights.

    Attributes:
      vocab_size: V, entries of the vocabulary.
      hidden_size: H.
      num_layers: blocks.
      num_heads: heads of attention in each.
      inner_size: units between the two Dense layers of a block.
      max_positions: the longest sequence.
      type_vocab_size: kinds of segments, of which only the first occurs here.
      gelu: "erf", as published, or "tanh", its approximation.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    inner_size: int
    max_positions: int
    type_vocab_size: int
    gelu: str = "erf"

    def __post_init__(self):
        if self.gelu not in GELUS:
            raise config.ConfigError(f"gelu={self.gelu!r} is not one of {', '.join(GELUS)}.")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name != "gelu" and not (isinstance(value, int) and value >= 1):
                raise config.ConfigError(
                    f"{field.name}={value!r} of the encoder must be a whole number, 1 or more."
                )
        if self.hidden_size % self.num_heads:
            raise config.ConfigError(
                f"hidden_size={self.hidden_size} of the encoder is not a multiple of "
                f"num_heads={self.num_heads}."
            )


@dataclasses.dataclass(frozen=True, eq=False)
class Encoder:
    """A pretrained encoder.

    Attributes:
      sizes: of the network.
      weights: float32 arrays by name, kernels [in, out]: embeddings/{word, position, type},
        embeddings/norm/{gamma, beta}; layer_{i}/attention/{query, key, value, output}/{kernel,
        bias}, layer_{i}/attention/norm/{gamma, beta}, layer_{i}/{intermediate, output}/{kernel,
        bias}, layer_{i}/norm/{gamma, beta}; and perhaps pooler/{kernel, bias}. None: a checkpoint
        of a run has them.
      sha256: of sizes, vocabulary and weights as they were read.
    """

    sizes: Sizes
    weights: Mapping[str, np.ndarray] | None
    sha256: str


def build(
    sizes: Sizes,
    num_classes: int,
    seed: int,
    *,
    sequence_length: int = 128,
    pad_id: int = 0,
    pooling: str = "pooler",
    dropout: float = 0.1,
    head: str = "softmax",
) -> keras.Model:
    """An encoder with new weights, see `load`, and a linear head on its pooled output.

    Args:
      sizes: of the encoder.
      num_classes: C.
      seed: the same seed gives the same weights, bit for bit.
      sequence_length: L.
      pad_id: the token that no token attends to.
      pooling: "pooler", tanh of a Dense layer of the first token's output (BERT section 4.1);
        "first", that output; "mean", the mean over tokens that are not padding.
      dropout: rate on embeddings, attention, after each part of a block, and on the features.
      head: "softmax", with (H + 1) C parameters, or "binary", with H + 1; see `heads.logits`.

    Returns:
      A model from token ids int32 [B, L] to `[features [B, H], logits [B, C]]`, both in the
      variables' precision. Features are what the head multiplies: under training, after dropout.
      The Dense layer on them is named "head". With another pooling than "pooler" that layer of the
      encoder is not trainable.

    Raises:
      ConfigError: tf-models-official is not installed; the encoder takes no sequence so long; an
        unknown pooling or head, or a binary head and another number of classes than 2.
    """
    if pooling not in config.POOLINGS:
        raise config.ConfigError(f"pooling={pooling!r} is not one of {', '.join(config.POOLINGS)}.")
    if sequence_length > sizes.max_positions:
        raise config.ConfigError(
            f"sequence_length={sequence_length} is more than the {sizes.max_positions} positions "
            "that the encoder has: use that or less."
        )
    precision = keras.mixed_precision.global_policy().variable_dtype
    encoder = new_encoder(sizes, dropout)
    ids = layers.Input((sequence_length,), dtype=tf.int32, name="inputs")
    mask = layers.Lambda(lambda x: tf.cast(x != pad_id, tf.int32), name="mask")(ids)
    outputs = encoder(
        {"input_word_ids": ids, "input_mask": mask, "input_type_ids": tf.zeros_like(ids)}
    )
    if pooling == "pooler":
        pooled = outputs["pooled_output"]
    else:
        encoder.pooler_layer.trainable = False
        pooled = _Pool(pooling, dtype=precision, name="pool")(outputs["sequence_output"], mask)
    pooled = layers.Dropout(dropout, name="feature_dropout")(pooled)
    features = layers.Activation("linear", dtype=precision, name="features")(pooled)
    stream = seeds.initializer_seeds(seed)
    logits = heads.logits(features, num_classes, head, _initializer(next(stream)), precision)
    model = keras.Model(ids, [features, logits], name="bert")
    _initialize(encoder, stream)
    return model


def load(model: keras.Model, weights: Mapping[str, np.ndarray]) -> list[str]:
    """Gives the encoder of a model from `build` pretrained weights.

    Args:
      model: the model.
      weights: as `Encoder.weights`.

    Returns:
      The names of what keeps its new weights: those of the pooler, where there are none of it.

    Raises:
      ConfigError: a weight is missing, left over, or of another shape; nothing was loaded then.
    """
    variables = _named_variables(encoder_of(model))
    missing = sorted(set(variables) - set(weights))
    new = missing if all(name.startswith("pooler/") for name in missing) else []
    left_over = sorted(set(weights) - set(variables))
    if (missing and not new) or left_over:
        raise config.ConfigError(
            f"The encoder's weights do not fit: missing are {', '.join(missing) or 'none'}; left "
            f"over are {', '.join(left_over) or 'none'}."
        )
    hidden = variables["embeddings/word"].shape[1]
    for name, value in weights.items():
        shape = tuple(variables[name].shape)
        if "/attention/" in name:  # The variables have the heads on an axis of their own.
            shape = (hidden,) * (2 if name.endswith("kernel") else 1)
        if value.shape != shape:
            raise config.ConfigError(
                f"The encoder's weight {name} is {value.shape}, and the network needs {shape}."
            )
    for name, value in weights.items():
        variables[name].assign(value.reshape(variables[name].shape))
    return new


def encoder_of(model: keras.Model) -> layers.Layer:
    """The Model Garden's encoder in a model from `build`."""
    return next(layer for layer in model.layers if hasattr(layer, "pooler_layer"))


def last_block(model: keras.Model) -> list[tf.Variable]:
    """The trainable variables of the last block, the pooler and the head, in their order."""
    encoder = encoder_of(model)
    parts = (encoder.transformer_layers[-1], encoder.pooler_layer, model.get_layer("head"))
    chosen = {id(variable) for part in parts for variable in part.trainable_variables}
    return [variable for variable in model.trainable_variables if id(variable) in chosen]


def write(sizes: Sizes, sha256: str, path: str | os.PathLike) -> None:
    """Writes what a run's encoder is, as JSON."""
    held = {**dataclasses.asdict(sizes), "pretrained_sha256": sha256}
    files.write_atomically(path, json.dumps(held, indent=1) + "\n")


def read(path: str | os.PathLike) -> tuple[Sizes, str]:
    """Reads what `write` wrote.

    Raises:
      ConfigError: there is no such file, or it does not hold sizes.
    """
    try:
        held: dict[str, Any] = json.loads(files.path(path).read_text(encoding="utf-8"))
        sha256 = held.pop("pretrained_sha256")
        return Sizes(**held), sha256
    except FileNotFoundError as error:
        raise config.ConfigError(
            f"There is no {path}, which says what encoder the run has: it writes it when it starts."
        ) from error
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise config.ConfigError(f"{path} is damaged: {error}.") from error


@keras.utils.register_keras_serializable("ssl_influence")
class _Pool(layers.Layer):
    """(outputs [B, L, H], mask [B, L]) -> [B, H]: the first token, or the mean where mask is 1."""

    def __init__(self, pooling: str, **kwargs):
        super().__init__(**kwargs)
        self.pooling = pooling

    def call(self, outputs, mask):
        if self.pooling == "first":
            return outputs[:, 0]
        mask = tf.cast(mask, outputs.dtype)[:, :, tf.newaxis]
        return tf.reduce_sum(outputs * mask, 1) / tf.maximum(tf.reduce_sum(mask, 1), 1.0)

    def get_config(self):
        return {**super().get_config(), "pooling": self.pooling}


def new_encoder(sizes: Sizes, dropout: float) -> layers.Layer:
    """The Model Garden's encoder of these sizes; dropout is a rate.

    Raises:
      ConfigError: tf-models-official is not installed.
    """
    try:
        from official.nlp.modeling.networks import bert_encoder
    except ImportError as error:
        raise config.ConfigError(
            f"model=bert needs the package tf-models-official ({error}): "
            'pip install --use-pep517 -c third_party/constraints.txt -e ".[text]"'
        ) from error
    approximate = sizes.gelu == "tanh"
    return bert_encoder.BertEncoderV2(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        num_layers=sizes.num_layers,
        num_attention_heads=sizes.num_heads,
        max_sequence_length=sizes.max_positions,
        type_vocab_size=sizes.type_vocab_size,
        inner_dim=sizes.inner_size,
        # Its own default is the approximation.
        inner_activation=lambda x: keras.activations.gelu(x, approximate=approximate),
        output_dropout=dropout,
        attention_dropout=dropout,
        name="encoder",
    )


def _initializer(seed: int) -> keras.initializers.Initializer:
    return keras.initializers.TruncatedNormal(stddev=_INITIAL_STDDEV, seed=seed)


def _initialize(encoder: layers.Layer, stream) -> None:
    """Draws the kernels and embeddings anew: the Model Garden's have no seed."""
    for name, variable in sorted(_named_variables(encoder).items()):
        if name.startswith("embeddings/") and "norm" not in name or name.endswith("kernel"):
            variable.assign(_initializer(next(stream))(variable.shape, variable.dtype))


def _named_variables(encoder: layers.Layer) -> dict[str, tf.Variable]:
    """The encoder's variables by the names of `Encoder.weights`."""
    named = {
        "embeddings/word": encoder._embedding_layer.embeddings,
        "embeddings/position": encoder._position_embedding_layer._position_embeddings,
        "embeddings/type": encoder._type_embedding_layer.embeddings,
        **_norm("embeddings", encoder._embedding_norm_layer),
        **_dense("pooler", encoder.pooler_layer),
    }
    for i, block in enumerate(encoder.transformer_layers):
        attention = block._attention_layer
        named |= _dense(f"layer_{i}/attention/query", attention._query_dense)
        named |= _dense(f"layer_{i}/attention/key", attention._key_dense)
        named |= _dense(f"layer_{i}/attention/value", attention._value_dense)
        named |= _dense(f"layer_{i}/attention/output", attention._output_dense)
        named |= _norm(f"layer_{i}/attention", block._attention_layer_norm)
        named |= _dense(f"layer_{i}/intermediate", block._intermediate_dense)
        named |= _dense(f"layer_{i}/output", block._output_dense)
        named |= _norm(f"layer_{i}", block._output_layer_norm)
    assert len(named) == len(encoder.variables), "the Model Garden's encoder has other variables"
    return named


def _dense(name: str, layer: layers.Layer) -> dict[str, tf.Variable]:
    return {f"{name}/kernel": layer.kernel, f"{name}/bias": layer.bias}


def _norm(name: str, layer: layers.Layer) -> dict[str, tf.Variable]:
    return {f"{name}/norm/gamma": layer.gamma, f"{name}/norm/beta": layer.beta}
