"""The steps whose operations the suite flops counts, as traced functions."""

import re
from collections.abc import Iterator

import tensorflow as tf

from experiments import encoders
from experiments.benchmarks import steps, text_steps, train_step
from ssl_influence import config as config_lib
from ssl_influence.models import bert

# The encoders that Google published in lower case, by name.
_GOOGLES = re.compile(r"uncased_L-(\d+)_H-(\d+)_A-(\d+)")
_GOOGLES_VOCABULARY, _GOOGLES_POSITIONS = 30_522, 512

Traced = tuple[str, tf.types.experimental.ConcreteFunction]


def traced(config: config_lib.Config) -> Iterator[Traced]:
    """Rows and their functions, one model after the other, so that one at a time is in memory."""
    is_text = config.model.name == "bert"
    if _has_plain_step(config):
        step, _ = steps.plain_step(config, config.method.settings()["target_forward"])
        yield "plain", step.get_concrete_function(batches(config, ("weak", "strong"))[0])
        del step
    shape, num_classes, of_encoder = steps.IMAGE_SHAPE, steps.NUM_CLASSES, {}
    if is_text:
        shape, num_classes = (config.model.sequence_length,), text_steps.NUM_CLASSES
        of_encoder = {"encoder": sizes(config.model), "pad_id": 0}
    for weighting in ("fixed", config.weights.weighting):
        setting = config.replace(weights={"weighting": weighting})
        trainer = steps.make_trainer(setting, shape, num_classes, **of_encoder)
        batch, validation = batches(config, trainer.method.views)
        if weighting == "fixed":
            yield "fixed", trainer.concrete_step("theta_step", batch)
            continue
        yield "theta", trainer.concrete_step("theta_step", batch)
        yield "fused", trainer.concrete_step("bilevel_step", batch, validation)
        yield "weight", trainer.concrete_step("weight_step", batch, validation)
        forward = tf.function(lambda inputs, model=trainer.model: model(inputs, training=False))
        yield "validation_forward", forward.get_concrete_function(validation["inputs"])


def sizes(model_config: config_lib.ModelConfig) -> bert.Sizes:
    """Those of an encoder, by its name where that tells."""
    named = _GOOGLES.search(model_config.encoder)
    if named is None:
        return encoders.load(model_config)[0].sizes
    layers, hidden, heads = map(int, named.groups())
    return bert.Sizes(
        vocab_size=_GOOGLES_VOCABULARY,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        inner_size=4 * hidden,
        max_positions=_GOOGLES_POSITIONS,
        type_vocab_size=2,
    )


def batches(config: config_lib.Config, views: tuple[str, ...]) -> tuple[dict, dict]:
    """A training and a validation batch of zeros: only shapes and dtypes count."""
    if config.model.name == "bert":
        shape, dtype = (config.model.sequence_length,), tf.int32
    else:
        shape, dtype = steps.IMAGE_SHAPE, tf.float32

    def rows(count: int, *names: str) -> dict[str, tf.Tensor]:
        return {
            **{name: tf.zeros([count, *shape], dtype) for name in names},
            "label": tf.zeros([count], tf.int32),
            "example_id": tf.zeros([count], tf.int64),
        }

    batch = {
        "labeled": rows(config.data.labeled_batch_size, "inputs"),
        "unlabeled": rows(config.data.unlabeled_batch_size, *views),
    }
    return batch, rows(config.data.validation_batch_size, "inputs")


def _has_plain_step(config):
    if config.model.name == "bert" or config.optimizer.name not in ("sgd", "adam"):
        return False
    try:
        train_step.check(config.replace(method={"target_forward": "joint"}))
    except config_lib.ConfigError:
        return False
    return True
