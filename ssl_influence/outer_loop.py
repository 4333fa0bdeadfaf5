"""The outer loop of the paper's Algorithm 1: steps, measurements, checkpoints."""

import logging
import pathlib
import sys
from collections.abc import Callable, Mapping

import numpy as np
import tensorflow as tf
import tqdm

from ssl_influence import (
    checkpoints,
    config as config_lib,
    evaluation,
    example_weights as example_weights_lib,
    metrics as metrics_lib,
    training,
)

_log = logging.getLogger("ssl_influence")


def weight_step_due(step: int, config: config_lib.WeightConfig) -> bool:
    """Whether Lambda moves at theta step `step` (from 0): every N steps, first N after the warm-up.

    With batch="fused" the weight step shares the batch of theta step `step`; with "fresh" it stands
    alone just before it. Either way N theta steps lie between two weight steps (Algorithm 1).
    """
    since = step - config.warmup_steps
    return config.weighting != "fixed" and since > 0 and since % config.inner_steps == 0


def train(
    trainer: training.BilevelTrainer,
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


def _step(
    trainer: training.BilevelTrainer, pipeline, step: int, batch: training.Batch
) -> dict[str, tf.Tensor]:
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


def _summarize_weights(trainer: training.BilevelTrainer, ids: np.ndarray) -> dict[str, float]:
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
