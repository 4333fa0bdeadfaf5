"""The bilevel step of the paper's Algorithm 1, and the outer loop around it."""

import logging
import math
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras as keras
import tqdm

from ssl_influence import (
    averages,
    checkpoints,
    config as config_lib,
    evaluation,
    example_weights as example_weights_lib,
    metrics as metrics_lib,
    optimizers,
)
from ssl_influence.influence import weight_gradients

_log = logging.getLogger("ssl_influence")

Batch = Mapping[str, Any]


@keras.utils.register_keras_serializable("ssl_influence")
class Schedule(keras.optimizers.schedules.LearningRateSchedule):
    """Linear warm-up, then one of the schedules that `config.OptimizerConfig` describes.

    Args:
      name: "cosine", "half_cosine" or "constant".
      learning_rate: alpha.
      steps: of the whole run.
      warmup_steps: of those, the ones over which the rate grows from 0.
    """

    def __init__(self, name: str, learning_rate: float, steps: int, warmup_steps: int = 0):
        self.name = name
        self.learning_rate = learning_rate
        self.steps = steps
        self.warmup_steps = warmup_steps

    def __call__(self, step):
        """The learning rate at a step, counted from 0."""
        step = tf.cast(step, tf.float32)
        p = (step - self.warmup_steps) / max(self.steps - self.warmup_steps, 1)
        p = tf.clip_by_value(p, 0.0, 1.0)
        factor = {
            "cosine": lambda: tf.cos(7.0 * math.pi / 16.0 * p),
            "half_cosine": lambda: 0.004 + 0.996 * 0.5 * (1.0 + tf.cos(math.pi * p)),
            "constant": lambda: tf.ones_like(p),
        }[self.name]()
        if self.warmup_steps:
            factor = tf.where(step < self.warmup_steps, step / self.warmup_steps, factor)
        return self.learning_rate * factor

    def get_config(self):
        """The arguments that make an equal schedule."""
        return {
            "name": self.name,
            "learning_rate": self.learning_rate,
            "steps": self.steps,
            "warmup_steps": self.warmup_steps,
        }


def make_optimizer(
    config: config_lib.OptimizerConfig, train_steps: int
) -> keras.optimizers.Optimizer:
    """The theta optimizer. Weight decay is no part of it: it is coupled, inside the objective."""
    rate = Schedule(config.schedule, config.learning_rate, train_steps, config.warmup_steps)
    if config.name == "adam":
        return keras.optimizers.Adam(rate, jit_compile=False)
    return keras.optimizers.SGD(rate, momentum=config.momentum, nesterov=True, jit_compile=False)


def make_example_weights(
    config: config_lib.WeightConfig, size: int
) -> example_weights_lib.ExampleWeights:
    """Lambda for examples 0 to size - 1, all at the initial weight, moved by M-Adam."""
    return example_weights_lib.ExampleWeights(
        size,
        initial=config.initial,
        mode=config.weighting,
        optimizer=optimizers.MAdam(config.learning_rate),
        minimum=config.minimum,
        maximum=config.maximum,
    )


def weight_step_due(step: int, config: config_lib.WeightConfig) -> bool:
    """Whether Lambda moves at theta step `step` (from 0): every N steps, first N after the warm-up.

    With batch="fused" the weight step shares the batch of theta step `step`; with "fresh" it stands
    alone just before it. Either way N theta steps lie between two weight steps (Algorithm 1).
    """
    since = step - config.warmup_steps
    return config.weighting != "fixed" and since > 0 and since % config.inner_steps == 0


class BilevelTrainer(tf.Module):
    """Theta steps on a weighted objective, and influence-driven steps of the example weights.

    The objective on a batch, with example weights lambda:

        L = sum_l a_l ell_S(l) + sum_r c_r lambda_id(r) ell_U(r) + 1/2 sum_v l2_v |v|^2

    where a_l, c_r, ell_S and ell_U come from the method. A weight step moves lambda_u of the batch
    by M-Adam along dL_V/dlambda_u = -grad L_V^T (H + damping I)^-1 c_u grad ell_U(u)
    (eq:influence), taken over the last layer, in closed form.

    Args:
      model: a keras.Model that maps inputs to (features [B, D], logits [B, C]), where logits is a
        Dense layer (the head, with linear activation) of features.
      method: an object with `views` and `__call__(forward, batch, step) -> MethodOutput`; see
        ssl_influence.methods.base, and the methods beside it.
      example_weights: Lambda.
      config: `weights`, `optimizer`, `train.train_steps` and `train.jit_compile` are read.
      optimizer: replaces the one that `config.optimizer` names.
      head: the Dense layer; None finds the layer called "head", or else the model's last Dense
        layer.

    Raises:
      ConfigError: the model has no Dense layer to serve as head, it has an activation, or (at the
        first step) the logits are not head(features).
    """

    def __init__(
        self,
        model: keras.Model,
        method: Callable,
        example_weights: example_weights_lib.ExampleWeights,
        config: config_lib.Config,
        *,
        optimizer: keras.optimizers.Optimizer | None = None,
        head: keras.layers.Dense | None = None,
    ):
        super().__init__(name="bilevel_trainer")
        self.model = model
        self.method = method
        self.example_weights = example_weights
        self.config = config
        self.head = head or _find_head(model)
        if self.head.activation is not keras.activations.linear:
            raise config_lib.ConfigError(
                f"The head {self.head.name!r} has an activation: its outputs must be the logits."
            )
        if any(isinstance(module, keras.layers.Dropout) for module in model.submodules):
            _log.warning(
                "The model has Dropout, whose random state no checkpoint holds: a resumed run will "
                "differ from one that was not stopped."
            )
        self.optimizer = optimizer or make_optimizer(config.optimizer, config.train.train_steps)
        self.optimizer.build(model.trainable_variables)
        followed = model.trainable_variables
        if config.optimizer.ema_variables == "all":
            followed = [v for v in model.variables if v.dtype.is_floating]
        self.ema = averages.ExponentialMovingAverage(followed, config.optimizer.ema_decay)
        self.step = tf.Variable(0, dtype=tf.int64, trainable=False, name="step")
        self.skipped_weight_steps = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._l2 = [(v, self._l2_of(v)) for v in model.trainable_variables if self._l2_of(v)]
        self._head_checked = False
        compiled = tf.function(jit_compile=config.train.jit_compile or None)
        self._theta_step = compiled(self._theta_step_impl)
        self._bilevel_step = compiled(self._bilevel_step_impl)
        self._weight_step = compiled(self._weight_step_impl)

    def state(self) -> dict[str, Any]:
        """Every trackable object of the run, by its name in the checkpoint."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "ema": self.ema,
            "example_weights": self.example_weights,
            "step": self.step,
            "skipped_weight_steps": self.skipped_weight_steps,
        }

    def theta_step(self, batch: Batch) -> dict[str, tf.Tensor]:
        """One step of theta with Lambda held. Returns named scalars, float32."""
        self._check(batch)
        return self._theta_step(batch)

    def bilevel_step(self, batch: Batch, validation: Batch) -> dict[str, tf.Tensor]:
        """A weight step on this batch, then a theta step on it with the new Lambda.

        Features and logits of the batch are those of the theta step's own forward pass; only the
        validation batch ({"inputs", "label"}) costs another. Returns named scalars, float32.
        """
        self._check(batch)
        return self._bilevel_step(batch, validation)

    def weight_step(self, batch: Batch, validation: Batch) -> dict[str, tf.Tensor]:
        """A weight step alone; theta and BatchNorm's moving statistics stay as they are."""
        self._check(batch)
        return self._weight_step(batch, validation)

    def _theta_step_impl(self, batch):
        return self._descend(batch, lambda output: {})

    def _bilevel_step_impl(self, batch, validation):
        return self._descend(batch, lambda output: self._move_weights(output, validation))

    def _weight_step_impl(self, batch, validation):
        output = self._keeping_statistics(lambda: self.method(self._forward, batch, self.step))
        return self._move_weights(output, validation)

    def _descend(self, batch, before_loss):
        with tf.GradientTape() as tape:
            output = self.method(self._forward, batch, self.step)
            with tape.stop_recording():
                reported = before_loss(output)
            weight = self.example_weights.lookup(output.example_id)
            terms = {
                "loss_supervised": tf.reduce_sum(output.supervised_coefficient * output.supervised),
                "loss_unsupervised": tf.reduce_sum(
                    weight * output.unsupervised_coefficient * output.unsupervised
                ),
                "loss_l2": sum((l2 * tf.nn.l2_loss(v) for v, l2 in self._l2), tf.zeros([])),
            }
            loss = tf.add_n(list(terms.values()))
        variables = self.model.trainable_variables
        gradients = tape.gradient(loss, variables)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        self.ema.update()
        self.step.assign_add(1)
        terms["gradient_norm"] = tf.linalg.global_norm(gradients)
        # Terms first: where several are not finite, the run names the first.
        named = {**terms, **output.metrics}
        return {**{f"train/{name}": value for name, value in named.items()}, **reported}

    def _move_weights(self, output, validation):
        config = self.config.weights
        weight = self.example_weights.lookup(output.example_id)
        if config.validation_batch_norm == "batch":
            features, logits = self._keeping_statistics(lambda: self._forward(validation["inputs"]))
        else:
            features, logits = self.model(validation["inputs"], training=False)
        gradient, info = weight_gradients.last_layer(
            output.labeled_head,
            output.supervised_coefficient,
            output.unlabeled_head,
            output.unsupervised_coefficient,
            weight,
            features,
            logits,
            validation["label"],
            l2=self._l2_of(self.head.kernel),
            l2_bias=self._l2_of(self.head.bias) if self.head.use_bias else 0.0,
            use_bias=self.head.use_bias,
            damping=config.damping,
            method="auto" if config.inverse_hessian == "exact" else config.inverse_hessian,
            tolerance=config.cg_tolerance,
        )
        # A row whose gradient is exactly zero stays where it is, moments included: M-Adam's mask.
        usable = info.converged
        self.skipped_weight_steps.assign_add(tf.cast(~usable, tf.int64))
        self.example_weights.update(
            output.example_id, tf.where(usable, gradient, tf.zeros_like(gradient))
        )
        validation_loss = keras.losses.sparse_categorical_crossentropy(
            validation["label"], tf.cast(logits, tf.float32), from_logits=True
        )
        return {
            "weights/validation_loss": tf.reduce_mean(validation_loss),
            "weights/solver_iterations": tf.cast(info.iterations, tf.float32),
        }

    def _forward(self, inputs):
        features, logits = self.model(inputs, training=True)
        return features, logits

    def _keeping_statistics(self, compute):
        """compute(), after which non-trainable variables hold what they held before."""
        statistics = self.model.non_trainable_variables
        before = [tf.identity(variable) for variable in statistics]
        result = compute()
        for variable, value in zip(statistics, before, strict=True):
            variable.assign(value)
        return result

    def _l2_of(self, variable) -> float:
        """l2_v of the objective for one variable."""
        config = self.config.optimizer
        if config.decayed_variables == "all" or _is_kernel(variable):
            return config.weight_decay
        return 0.0

    def _check(self, batch) -> None:
        if self.config.train.jit_compile:  # XLA drops the assertion that the step itself makes
            self.example_weights.check_ids(batch["unlabeled"]["example_id"])
        if self._head_checked:
            return
        few = tf.nest.map_structure(lambda tensor: tensor[:2], batch["labeled"]["inputs"])
        features, logits = self.model(few, training=False)
        expected = tf.cast(self.head(features), tf.float32)
        error = tf.reduce_max(tf.abs(expected - tf.cast(logits, tf.float32)))
        scale = 1.0 + tf.reduce_max(tf.abs(expected))
        if not error <= 1e-2 * scale:
            raise config_lib.ConfigError(
                f"The model's logits are not {self.head.name!r} applied to its features (they "
                f"differ by {float(error):.3g}): return [features, logits] with logits = "
                "head(features), or pass the right layer as head=."
            )
        self._head_checked = True


def _find_head(model: keras.Model) -> keras.layers.Dense:
    dense = [layer for layer in model.layers if isinstance(layer, keras.layers.Dense)]
    named = [layer for layer in dense if layer.name == "head"]
    if not dense:
        raise config_lib.ConfigError(
            "The model has no Dense layer among model.layers to serve as head: pass head=."
        )
    return (named or dense)[-1]


def _is_kernel(variable: tf.Variable) -> bool:
    return variable.name.split("/")[-1].split(":")[0].endswith("kernel")


def train(
    trainer: BilevelTrainer,
    pipeline,
    model_dir: str | pathlib.Path,
    config: config_lib.TrainConfig,
    *,
    weight_ids: np.ndarray | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> int:
    """Trains to `config.train_steps`, from the newest checkpoint under `model_dir` if there is one.

    Writes metrics.jsonl, checkpoints/ and weights/ there. Batches are functions of the step, so a
    run that was stopped, at any moment and by anything, goes on as if it had not been.

    Args:
      trainer: holds all state.
      pipeline: gives `train_dataset(start, stop)`, `fresh_batch(step)`, `validation_batch(step)`
        and `evaluation_batches(role, batch_size)`.
      model_dir: the run's directory; made where it is missing.
      config: length and intervals.
      weight_ids: ids of the unlabeled examples, whose weights are summarized in the metrics and
        written beside each checkpoint; None takes the whole table.
      should_stop: asked after each step; once true, the state is saved and the function returns.

    Returns:
      The step it stands at.

    Raises:
      NonFiniteError: a term of the objective is NaN or infinite. Nothing is saved after the last
        step that was known to be good.
      CheckpointError: the newest checkpoint does not fit.
    """
    model_dir = pathlib.Path(model_dir)
    window = metrics_lib.MetricWindow()
    checkpointer = checkpoints.Checkpointer(
        model_dir / "checkpoints", config.keep_checkpoints, window=window, **trainer.state()
    )
    if weight_ids is None:
        weight_ids = np.arange(trainer.example_weights.size)
    resumed = checkpointer.restore_latest()
    start = int(trainer.step)
    if resumed:
        finished = start == config.train_steps
        _log.info("Already at step %d, the last." if finished else "Resuming from step %d.", start)
        # A kill may have come between the checkpoint and its weights.
        _export_weights(model_dir, start, trainer.example_weights, weight_ids)
    weights = trainer.config.weights
    first_weight_step = weights.warmup_steps + weights.inner_steps
    if weights.weighting != "fixed" and first_weight_step >= config.train_steps:
        _log.warning(
            "No example weight will move: the first weight step comes after step %d of %d. Lower "
            "--weight_warmup_steps or --inner_steps.",
            first_weight_step,
            config.train_steps,
        )
    writer = metrics_lib.MetricsWriter(model_dir / "metrics.jsonl", start)
    evaluator = evaluation.Evaluator(trainer.model)
    validation = pipeline.evaluation_batches("validation", config_lib.EVALUATION_BATCH_SIZE)
    skipped = int(trainer.skipped_weight_steps)
    progress = _Progress(start, config.train_steps)
    pending = []

    def settle() -> None:
        """Moves the scalars of finished steps to the window; the one place that waits for them."""
        for step, values in pending:
            window.add(step, {name: float(value) for name, value in values.items()})
        pending.clear()

    def save(step: int) -> None:
        checkpointer.save(step)
        _export_weights(model_dir, step, trainer.example_weights, weight_ids)

    step = start
    for batch in pipeline.train_dataset(start, config.train_steps):
        pending.append((step + 1, _step(trainer, pipeline, step, batch)))
        step += 1
        last = step == config.train_steps
        row = {}
        if last or step % config.log_every == 0:
            settle()
            row.update(window.flush())
            row.update(_summarize_weights(trainer, weight_ids))
        if last or step % config.eval_every == 0:
            settle()
            errors = evaluation.errors(evaluator, trainer.ema, validation)
            row["validation/error"] = errors["raw_error"]
            row["validation/ema_error"] = errors["ema_error"]
        if row:
            writer.write(step, row)
            progress.report(step, row)
        if row.get("weights/skipped_steps", skipped) > skipped:
            skipped = row["weights/skipped_steps"]
            _log.warning(
                "%d weight steps were skipped so far: the last layer's system could not be solved. "
                "A larger --damping makes it better conditioned.",
                skipped,
            )
        stop = not last and should_stop()
        if last or stop or step % config.checkpoint_every == 0:
            settle()
            save(step)
        progress.advance()
        if stop:
            _log.info("Stopped at step %d and saved; the same command resumes.", step)
            break
    progress.close()
    return step


def _step(trainer: BilevelTrainer, pipeline, step: int, batch: Batch) -> dict[str, tf.Tensor]:
    if not weight_step_due(step, trainer.config.weights):
        return trainer.theta_step(batch)
    weights = trainer.config.weights
    # Counted in weight steps, so that one after the other sees all examples.
    weight_step = (step - weights.warmup_steps) // weights.inner_steps - 1
    validation = pipeline.validation_batch(weight_step)
    if weights.batch == "fused":
        return trainer.bilevel_step(batch, validation)
    reported = trainer.weight_step(pipeline.fresh_batch(weight_step), validation)
    return {**reported, **trainer.theta_step(batch)}


def _summarize_weights(trainer: BilevelTrainer, ids: np.ndarray) -> dict[str, float]:
    if not len(ids):
        return {}
    weights = trainer.example_weights.values()[ids]
    updates = trainer.example_weights.update_counts()[ids]
    low, median, high = np.quantile(weights, [0.05, 0.5, 0.95])
    return {
        "weights/mean": float(weights.mean(dtype=np.float64)),
        "weights/quantile_05": float(low),
        "weights/median": float(median),
        "weights/quantile_95": float(high),
        "weights/updates_per_example": float(updates.mean()),
        "weights/skipped_steps": int(trainer.skipped_weight_steps),
        "weights/skipped_rows": int(trainer.example_weights.skipped),
    }


def _export_weights(
    model_dir: pathlib.Path,
    step: int,
    example_weights: example_weights_lib.ExampleWeights,
    ids: np.ndarray,
) -> None:
    """Writes weights-<step>.csv and removes the files whose checkpoint is gone."""
    folder = model_dir / "weights"
    checkpoints.export_weights(
        folder / f"weights-{step}.csv",
        ids,
        example_weights.values(),
        example_weights.update_counts(),
    )
    kept = checkpoints.list_checkpoints(model_dir / "checkpoints")
    for path in folder.glob("weights-*.csv"):
        if checkpoints.step_of(path.stem) not in kept:
            path.unlink()


class _Progress:
    """A bar with the time left on a terminal; a plain line for each row of metrics elsewhere."""

    _SHOWN = {
        "train/loss_supervised": "supervised",
        "train/loss_unsupervised": "unsupervised",
        "weights/mean": "mean weight",
        "validation/error": "validation error %",
    }

    def __init__(self, start: int, stop: int):
        self._stop = stop
        self._bar = tqdm.tqdm(
            total=stop, initial=start, unit="step", disable=not sys.stderr.isatty(), leave=True
        )

    def advance(self) -> None:
        self._bar.update()

    def report(self, step: int, row: Mapping[str, float]) -> None:
        shown = {label: row[name] for name, label in self._SHOWN.items() if name in row}
        if self._bar.disable:
            numbers = "  ".join(f"{name} {value:.4g}" for name, value in shown.items())
            _log.info("step %d/%d  %s", step, self._stop, numbers)
        else:
            self._bar.set_postfix({name: f"{value:.4g}" for name, value in shown.items()})

    def close(self) -> None:
        self._bar.close()
