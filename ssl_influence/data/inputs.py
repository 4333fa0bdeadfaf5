"""What a model takes and gives: all that is needed beside its weights to predict.

Written beside the checkpoints as inputs.json, so that predicting and exporting need no dataset.
"""

import dataclasses
import functools
import json
import os

import numpy as np
import tensorflow as tf

from ssl_influence import config, files
from ssl_influence.augment import policies
from ssl_influence.data import examples, rows, tokens

# Lazy images that the mean and the standard deviation are taken over.
_MOMENT_IMAGES = 10_000


@dataclasses.dataclass(frozen=True)
class InputSpec:
    """The inputs and the classes of a model.

    Attributes:
      kind: "image", "vector" or "text".
      shape: of one input: (H, W, C), (d,) or ().
      class_names: one for each logit, in their order.
      scale, offset: one for each channel of an image: the model takes scale * image + offset; empty
        where inputs are not images.
      tokenizer: of a text, what makes token ids of it.
    """

    kind: str
    shape: tuple[int, ...]
    class_names: tuple[str, ...]
    scale: tuple[float, ...] = ()
    offset: tuple[float, ...] = ()
    tokenizer: tokens.TokenizerSpec | None = None

    @property
    def model_shape(self) -> tuple[int, ...]:
        """The shape of what `normalize` makes of one input."""
        return self.shape if self.tokenizer is None else (self.tokenizer.sequence_length,)

    @functools.cached_property
    def built_tokenizer(self) -> tokens.Tokenizer:
        """The tokenizer of texts.

        Raises:
          ConfigError: tensorflow_text is not installed.
        """
        with tf.init_scope():  # Its tensors outlive the graph that first asks for it.
            return tokens.Tokenizer(self.tokenizer)

    def normalize(self, inputs: tf.Tensor) -> tf.Tensor:
        """What the model takes.

        Float32 for images uint8 [B, H, W, C]; token ids int32 [B, L] for texts, string [B]; vectors
        as they are.

        A division by a constant becomes a product with the rounded reciprocal in some graphs but
        not in others (the optimizer's choice): a batch would have other bits in a dataset than out
        of it. Hence a product and a sum.
        """
        if self.tokenizer is not None:
            return self.built_tokenizer.encode(inputs)
        if self.kind != "image":
            return inputs
        scale, offset = (np.array(x, np.float32) for x in (self.scale, self.offset))
        return tf.cast(inputs, tf.float32) * scale + offset

    @property
    def zero_level(self) -> tuple[int, ...]:
        """The gray level of each channel that is nearest to 0 for the model."""
        scale, offset = (np.array(x, np.float32) for x in (self.scale, self.offset))
        return tuple(np.round(-offset / scale).astype(int).tolist())


def model_shape(
    source: examples.Source, tokenizer: tokens.TokenizerSpec | None = None
) -> tuple[int, ...]:
    """The shape of one input of the source as a model takes it.

    Raises:
      ConfigError: the source is of texts and there is no tokenizer, or the reverse.
    """
    if (source.kind == "text") != (tokenizer is not None):
        raise config.ConfigError(
            f"{source.name} holds {source.kind}s, "
            + (
                "and model=bert takes texts: use model=wide_resnet or mlp."
                if tokenizer
                else "which only model=bert takes: experiments.uda_imdb has it."
            )
        )
    return tuple(source.inputs.shape[1:]) if tokenizer is None else (tokenizer.sequence_length,)


def of(
    source: examples.Source,
    augment: config.AugmentConfig,
    tokenizer: tokens.TokenizerSpec | None = None,
) -> InputSpec:
    """The inputs of a source under the normalization that `augment` names, or of texts by tokens.

    Raises:
      ConfigError: see `model_shape`.
    """
    model_shape(source, tokenizer)
    shape, class_names = tuple(source.inputs.shape[1:]), tuple(source.class_names)
    spec = InputSpec(source.kind, shape, class_names, tokenizer=tokenizer)
    if spec.kind != "image":
        return spec
    moments = ()
    if augment.normalization == "standardize":
        moments = channel_moments(source.inputs)
    ends = np.broadcast_to(np.array([[0], [255]], np.uint8), (2, spec.shape[-1]))
    low, high = policies.normalize(tf.constant(ends), augment, *moments).numpy().astype(np.float64)
    scale = ((high - low) / 255).astype(np.float32)
    return dataclasses.replace(
        spec, scale=tuple(scale.tolist()), offset=tuple(low.astype(np.float32).tolist())
    )


def channel_moments(images: rows.Rows) -> tuple[np.ndarray, np.ndarray]:
    """(mean [C], standard deviation [C]) of uint8 images [n, H, W, C], float64, in gray levels.

    Of lazy images, those of at most _MOMENT_IMAGES of them, drawn from all.
    """
    return moments_of(level_counts(images))


def level_counts(images: rows.Rows) -> np.ndarray:
    """How many pixels of uint8 images [n, H, W, C] have each gray level, int64 [C, 256].

    Of lazy images, those of at most _MOMENT_IMAGES of them, drawn from all.
    """
    if not isinstance(images, np.ndarray) and len(images) > _MOMENT_IMAGES:
        random = np.random.Generator(np.random.PCG64(0))
        drawn = random.choice(len(images), _MOMENT_IMAGES, replace=False)
        images = rows.select(images, np.sort(drawn))
    channels = images.shape[-1]
    counts = np.zeros((channels, 256), np.int64)
    for part in rows.in_turn(images):  # bincount takes eight bytes a pixel.
        for c in range(channels):
            counts[c] += np.bincount(part[..., c].ravel(), minlength=256)
    return counts


def moments_of(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(mean [C], standard deviation [C]), float64, of gray levels that occur so often [C, 256]."""
    total = counts.sum(axis=1)
    levels = np.arange(256.0)
    mean = counts @ levels / total
    variance = (counts * (levels - mean[:, np.newaxis]) ** 2).sum(axis=1) / total
    return mean, np.sqrt(variance)


def write(spec: InputSpec, path: str | os.PathLike) -> None:
    """Writes a spec as JSON; floats come back bit for bit."""
    files.write_atomically(path, json.dumps(dataclasses.asdict(spec), indent=1) + "\n")


def read(path: str | os.PathLike) -> InputSpec:
    """Reads what `write` wrote.

    Raises:
      ConfigError: there is no such file, or it does not hold a spec.
    """
    try:
        held = json.loads(files.path(path).read_text(encoding="utf-8"))
        tokenizer = held.pop("tokenizer", None)
        if tokenizer is not None:
            tokenizer = tokens.TokenizerSpec(**_with_tuples(tokenizer))
        return InputSpec(**_with_tuples(held), tokenizer=tokenizer)
    except FileNotFoundError as error:
        raise config.ConfigError(
            f"There is no {path}, which says what the model takes: a run writes it when it starts."
        ) from error
    except (ValueError, TypeError, AttributeError) as error:
        raise config.ConfigError(f"{path} is damaged: {error}.") from error


def _with_tuples(held: dict) -> dict:
    return {name: tuple(x) if isinstance(x, list) else x for name, x in held.items()}
