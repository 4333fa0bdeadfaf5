"""The model of a run, for predicting: no dataset is needed, nor anything else the run holds."""

import os

import tensorflow as tf
import tf_keras as keras

from ssl_influence import averages, checkpoints, config, files, graphs, serving
from ssl_influence.data import inputs as inputs_lib, tokens
from ssl_influence.models import bert, registry as models


class Classifier:
    """A model that takes inputs as data have them, and gives probabilities.

    Attributes:
      model: from inputs as `spec.normalize` gives them to (features, logits).
      spec: its inputs and classes.
      inputs: what `predict` takes: uint8 images [B, H, W, C], float32 vectors [B, d] or texts [B].
    """

    def __init__(self, model: keras.Model, spec: inputs_lib.InputSpec):
        self.model = model
        self.spec = spec
        dtype = {"image": tf.uint8, "vector": tf.float32, "text": tf.string}[spec.kind]
        self.inputs = tf.TensorSpec([None, *spec.shape], dtype, name="inputs")
        self.predict = tf.function(self._predict, [self.inputs], autograph=False)

    def _predict(self, inputs: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """(the probability of each class float32 [B, C], the class predicted int32 [B])."""
        normalized = self.spec.normalize(inputs)
        _, logits = graphs.converted(self.model)(normalized, training=False)
        # As in evaluation: logits that differ may give probabilities that do not.
        return tf.nn.softmax(logits), tf.argmax(logits, 1, tf.int32)


def load(
    model_dir: str | os.PathLike,
    settings: config.Config,
    *,
    step: int | None = None,
    weights: str = "ema",
) -> Classifier:
    """The model of the run in `model_dir`.

    Args:
      model_dir: the run's directory.
      settings: the run's.
      step: of the checkpoint; None takes the newest.
      weights: "ema", their moving average, which papers report; or "raw", the weights themselves.

    Raises:
      ConfigError: there is no such checkpoint, nothing says what the model takes, or there is no
        model of such inputs.
      CheckpointError: it cannot be read, or is of another model.
    """
    if weights not in serving.WEIGHTS:
        raise config.ConfigError(f"weights={weights!r} is not one of {', '.join(serving.WEIGHTS)}.")
    model_dir = files.path(model_dir)
    spec = inputs_lib.read(model_dir / "inputs.json")
    if spec.kind not in ("image", "vector", "text"):
        raise config.ConfigError(
            f"{model_dir} takes inputs of kind {spec.kind!r}, which no model here is of: this "
            "version predicts for images, vectors and texts."
        )
    takes_texts = settings.model.name == "bert"
    if not takes_texts == (spec.kind == "text") == (spec.tokenizer is not None):
        raise config.ConfigError(
            f"{model_dir / 'inputs.json'} is of {spec.kind}s, and not of this run, whose model is "
            f"{settings.model.name}: put back the one that the run wrote."
        )
    path = _checkpoint(model_dir / "checkpoints", step)
    more = {}
    if spec.tokenizer is not None:
        sizes, _ = bert.read(model_dir / "encoder.json")
        more = {"encoder": sizes, "pad_id": spec.tokenizer.token_id(tokens.PAD)}
    model = models.build(
        settings.model, spec.model_shape, len(spec.class_names), settings.train.seed, **more
    )
    state = {"model": model}
    if weights == "ema":
        state["ema"] = averages.of_model(model, settings.optimizer)
    checkpoints.read(tf.train.Checkpoint(**state), path).assert_existing_objects_matched()
    if weights == "ema":
        state["ema"].assign()
    return Classifier(model, spec)


def _checkpoint(folder: files.AnyPath, step: int | None) -> str:
    """The path prefix of the checkpoint of a step, or of the newest one."""
    found = checkpoints.list_checkpoints(folder)
    path = checkpoints.newest(folder) if step is None else found.get(step)
    if path is None:
        of_step = "" if step is None else f" of step {step}"
        there = f"there are {', '.join(map(str, found))}" if found else "train there first"
        raise config.ConfigError(f"{folder} holds no checkpoint{of_step}: {there}.")
    return path
