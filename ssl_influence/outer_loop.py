"""The outer loop of the paper's Algorithm 1: steps, measurements, checkpoints."""

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf
import tqdm

from ssl_influence import (
    alarms as alarms_lib,
    checkpoints,
    config as config_lib,
    distribution,
    evaluation,
    event_files,
    example_weights as example_weights_lib,
    files,
    metrics as metrics_lib,
    training,
)

# What an example weight should be able to move by, and what share of a moving average may be old.
_HARDLY = 0.1
_STILL_INITIAL = 0.5

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
    model_dir: str | os.PathLike,
    config: config_lib.TrainConfig,
    *,
    weight_ids: np.ndarray | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> int:
    """Trains to `config.train_steps`, from the newest checkpoint under `model_dir` if there is one.

    Writes metrics.jsonl, tensorboard/, checkpoints/ and weights/ there. Batches are functions of
    the step, so a run that was stopped, at any moment and by anything, goes on as if it had not
    been. What looks wrong in the metrics is logged as a warning, see `alarms`.

    Args:
      trainer: holds all state.
      pipeline: gives `train_dataset(start, stop)`, `fresh_batch(step)`, `validation_batch(step)`
        and `evaluation_batches(role, batch_size)`; has `unlabeled_batch_size`, and in `spec` the
        class names.
      model_dir: the run's directory; made where it is missing. It may lie in a bucket (gs://...).
      config: length and intervals, and whether to write event files.
      weight_ids: ids of the unlabeled examples, whose weights are summarized in the metrics and
        written beside each checkpoint; None takes the whole table.
      should_stop: asked after each step; once true, the state is saved and the function returns.

    Returns:
      The step it stands at.

    Of several workers, each goes through this with the same arguments; the first writes.

    Raises:
      NonFiniteError: a term of the objective is NaN or infinite. Nothing is saved after the last
        step that was known to be good.
      CheckpointError: the newest checkpoint does not fit.
      EventFileError: event files cannot be written, or are damaged.
      ConfigError: workers do not go on from one step.
    """
    model_dir = files.path(model_dir)
    window = metrics_lib.MetricWindow()
    is_chief = distribution.is_chief(trainer.strategy)
    checkpointer = checkpoints.Checkpointer(
        model_dir / "checkpoints",
        config.keep_checkpoints,
        writes=is_chief,
        window=window,
        **trainer.state(),
    )
    if weight_ids is None:
        weight_ids = np.arange(trainer.example_weights.size)
    resumed = checkpointer.restore_latest()
    start = int(trainer.step)
    distribution.check_agreement(trainer.strategy, "the step that they go on from", str(start))
    if resumed:
        finished = start == config.train_steps
        _log.info("Already at step %d, the last." if finished else "Resuming from step %d.", start)
        if is_chief:  # A kill may have come between the checkpoint and its weights.
            _export_weights(model_dir, start, trainer.example_weights, weight_ids)
    expected_moves = pipeline.unlabeled_batch_size / max(len(weight_ids), 1)
    for message in _short_run_warnings(trainer.config, config.train_steps, expected_moves):
        _log.warning(message)
    evaluator = evaluation.Evaluator(trainer.model, trainer.strategy)
    validation = pipeline.evaluation_batches("validation", config.evaluation_batch_size)
    validation_counts = _count_labels(validation, trainer.head.units)
    facts = alarms_lib.Facts(
        train_steps=config.train_steps,
        confidence=getattr(trainer.method, "confidence", None),
        minimum=trainer.example_weights.minimum,
        maximum=trainer.example_weights.maximum,
        validation_counts=validation_counts,
        class_names=pipeline.spec.class_names,
    )
    journal = _Journal(model_dir, start, config, facts) if is_chief else _NoJournal()
    throughput = metrics_lib.Throughput(lambda batch: _examples_in(batch, trainer.method))
    pending: list[_Done] = []

    def settle() -> None:
        """Moves the scalars of finished steps to the window; the one place that waits for them."""
        for done in pending:
            for step, values in done.by_step():
                window.add(step, values)
        pending.clear()

    def save(step: int) -> None:
        checkpointer.save(step)
        if is_chief:
            _export_weights(model_dir, step, trainer.example_weights, weight_ids)

    step = start
    for done in _calls(trainer, pipeline, start, config, throughput):
        pending.append(done)
        step += done.count or 1
        last = step == config.train_steps
        row, histograms, unpredicted = {}, {}, []
        if last or step % config.log_every == 0:
            settle()
            row.update(window.flush())
            row.update(throughput.flush())
            row.update(_summarize_weights(trainer, weight_ids))
            histograms["weights/example_weights"] = trainer.example_weights.values()[weight_ids]
        if last or step % config.eval_every == 0:
            settle()
            wrong, examples, predicted = evaluator.counts(validation)
            with trainer.ema.swapped():
                ema_error, _ = evaluator.error(validation)
            unpredicted = alarms_lib.never_predicted(validation_counts, predicted)
            row["validation/error"] = 100.0 * wrong / examples
            row["validation/ema_error"] = ema_error
            row["validation/classes_never_predicted"] = len(unpredicted)
        if row:
            journal.write(step, row, histograms, unpredicted)
        stop = not last and distribution.any_worker(trainer.strategy, should_stop())
        if last or stop or step % config.checkpoint_every == 0:
            settle()
            save(step)
        journal.advance(done.count or 1)
        if stop:
            _log.info("Stopped at step %d and saved; the same command resumes.", step)
            break
    journal.close()
    return step


class _Done(NamedTuple):
    """Steps that were taken at once.

    Attributes:
      first: the first of them, counted from 1.
      count: how many; None: one, whose values are not stacked.
      values: what they reported, by name, [count] each, but for what a weight step at the beginning
        of the first reported.
    """

    first: int
    count: int | None
    values: dict[str, tf.Tensor]

    def by_step(self) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        """Each step with what it reported."""
        values = {name: value.numpy() for name, value in self.values.items()}
        if self.count is None:
            yield self.first, values
            return
        of_weights = {
            name: values.pop(name) for name in training.REPORTED_OF_WEIGHTS if name in values
        }
        for index in range(self.count):
            of_step = {name: rows[index] for name, rows in values.items()}
            yield self.first + index, {**(of_weights if index == 0 else {}), **of_step}


def _calls(
    trainer: training.BilevelTrainer,
    pipeline,
    start: int,
    config: config_lib.TrainConfig,
    throughput: metrics_lib.Throughput,
) -> Iterator[_Done]:
    """Takes the steps from `start` on, one at a time or several; asked for more, it goes on.

    Several end where there is something to log, to evaluate or to save, so that a run does not
    depend on how many they are.
    """
    batches = pipeline.train_dataset(start, config.train_steps)
    at_once = distribution.steps_per_call(trainer.config.distribution, trainer.strategy)
    if at_once > 1 and not isinstance(batches, tf.data.Dataset):
        _log.info("Steps are taken one at a time: their batches need Python.")
        at_once = 1
    if at_once == 1:
        for step, batch in enumerate(throughput.timed(batches), start):
            yield _Done(step + 1, None, _step(trainer, pipeline, step, batch))
        return
    for batch in batches.take(1):
        trainer.check_head(batch)
    weights, step = trainer.config.weights, start
    weight_batches, whole = _weight_batches(trainer, pipeline, start, config.train_steps)
    iterator = iter(distribution.split_dataset(batches, trainer.strategy))
    events = (config.log_every, config.eval_every, config.checkpoint_every)
    while step < config.train_steps:
        end = min(step + at_once, config.train_steps, *(step + n - step % n for n in events))
        due = weight_step_due(step, weights)
        next_due = (k for k in range(step + 1, end) if weight_step_due(k, weights))
        count = next(next_due, end) - step
        values = trainer.steps(count, iterator, weight_batches if due else (), whole=whole)
        throughput.took(count, batches.element_spec)
        yield _Done(step + 1, count, values)
        step += count


def _weight_batches(trainer, pipeline, start, stop):
    """Iterators over what weight steps read from a step on; whether replicas read all of it."""
    weights = trainer.config.weights
    if weights.weighting == "fixed":
        return (), False
    numbers = _weight_step_at(start, weights), _weight_step_at(stop, weights) + 1
    validations = pipeline.weight_step_dataset(*numbers)
    whole = not distribution.divides(trainer.strategy, validations.element_spec)
    datasets = [distribution.split_dataset(validations, trainer.strategy, whole=whole)]
    if weights.batch == "fresh":
        fresh = pipeline.weight_step_dataset(*numbers, fresh=True)
        datasets.append(distribution.split_dataset(fresh, trainer.strategy))
    return tuple(map(iter, datasets)), whole


def _weight_step_at(step: int, weights: config_lib.WeightConfig) -> int:
    """The number, from 0, of the weight step that is due at a theta step; else of the next one.

    Counted in weight steps, batches of one after the other see all examples.
    """
    return max(-(-(step - weights.warmup_steps) // weights.inner_steps) - 1, 0)


def _step(
    trainer: training.BilevelTrainer, pipeline, step: int, batch: training.Batch
) -> dict[str, tf.Tensor]:
    weights = trainer.config.weights
    if not weight_step_due(step, weights):
        return trainer.theta_step(batch)
    weight_step = _weight_step_at(step, weights)
    validation = pipeline.validation_batch(weight_step)
    if weights.batch == "fused":
        return trainer.bilevel_step(batch, validation)
    reported = trainer.weight_step(pipeline.fresh_batch(weight_step), validation)
    return {**reported, **trainer.theta_step(batch)}


def _count_labels(batches, num_classes: int) -> np.ndarray:
    """Examples of each class in batches of {"label", "mask"}, int64 [C]."""
    labels = [batch["label"].numpy()[batch["mask"].numpy()] for batch in batches]
    return np.bincount(np.concatenate(labels), minlength=num_classes)


def _examples_in(batch: training.Batch, method) -> int:
    """How many examples of a training batch the method reads."""
    roles = ("labeled", "unlabeled") if method.views else ("labeled",)
    return sum(batch[role]["example_id"].shape[0] for role in roles)


def _summarize_weights(trainer: training.BilevelTrainer, ids: np.ndarray) -> dict[str, float]:
    if not len(ids):
        return {}
    table = trainer.example_weights
    weights, updates = table.values()[ids], table.update_counts()[ids]
    quantiles = np.quantile(weights, [0.05, 0.25, 0.5, 0.75, 0.95])
    names = ("quantile_05", "quantile_25", "median", "quantile_75", "quantile_95")
    at_bound = {
        # Lambda is projected to the bounds as they are in float32.
        f"share_at_{name}": np.mean(weights == np.float32(bound))
        for name, bound in (("minimum", table.minimum), ("maximum", table.maximum))
        if np.isfinite(bound)
    }
    summary = {
        "mean": weights.mean(dtype=np.float64),
        **dict(zip(names, quantiles, strict=True)),
        **at_bound,
        "updates_per_example": updates.mean(),
        "share_updated": np.mean(updates > 0),
    }
    return {
        **{f"weights/{name}": float(value) for name, value in summary.items()},
        "weights/skipped_steps": int(trainer.skipped_weight_steps),
        "weights/skipped_rows": int(table.skipped),
    }


def _export_weights(
    model_dir: files.AnyPath,
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


def _short_run_warnings(config: config_lib.Config, steps: int, share: float) -> Iterator[str]:
    """What a run of so many steps is too short for; a batch has a share of the unlabeled examples.

    Below `_HARDLY`, what a weight can move by is lost in what it moves back and forth; above
    `_STILL_INITIAL` the average is mostly of weights that know nothing.
    """
    weights, decay = config.weights, config.optimizer.ema_decay
    first = weights.warmup_steps + weights.inner_steps
    if weights.weighting != "fixed" and first >= steps:
        yield (
            f"No example weight will move: the first weight step comes after step {first} of "
            f"{steps}. Lower --weight_warmup_steps or --inner_steps."
        )
    elif weights.weighting == "per_example":
        moves = (steps - weights.warmup_steps) // weights.inner_steps * share
        if weights.optimizer == "m_adam" and moves * weights.learning_rate < _HARDLY:
            yield (
                f"Example weights will hardly move: about {moves:.2g} times by "
                f"{weights.learning_rate:g} each. Lower --inner_steps, raise --weight_lr, or train "
                "for more steps."
            )
    if decay**steps > _STILL_INITIAL:
        yield (
            f"{decay**steps:.0%} of the moving average will still be initial weights at step "
            f"{steps}: lower --ema_decay={decay:g}, or judge by the weights themselves (raw)."
        )


class _Journal:
    """Where the rows of metrics go: two kinds of files, the alarms and the progress shown."""

    def __init__(
        self,
        model_dir: files.AnyPath,
        start: int,
        config: config_lib.TrainConfig,
        facts: alarms_lib.Facts,
    ):
        lines = model_dir / "metrics.jsonl"
        self._metrics = metrics_lib.MetricsWriter(lines, start)
        event_files.cut(model_dir / "tensorboard", start)
        self._events = None
        if config.tensorboard:
            self._events = event_files.EventWriter(model_dir / "tensorboard")
        self._alarms = alarms_lib.Alarms(facts, metrics_lib.read_metrics(lines))
        self._progress = _Progress(start, config.train_steps)

    def write(
        self,
        step: int,
        row: Mapping[str, float],
        histograms: Mapping[str, np.ndarray],
        never_predicted: Sequence[int],
    ) -> None:
        self._metrics.write(step, row)
        if self._events:
            self._events.write(step, row, histograms)
        self._progress.report(step, row)
        for message in self._alarms.check({"step": step, **row}, never_predicted):
            _log.warning("%s", message)

    def advance(self, steps: int) -> None:
        self._progress.advance(steps)

    def close(self) -> None:
        self._progress.close()


class _NoJournal:
    """That of a worker that writes nothing."""

    def write(self, step, row, histograms, never_predicted) -> None:
        pass

    def advance(self, steps) -> None:
        pass

    def close(self) -> None:
        pass


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

    def advance(self, steps: int) -> None:
        self._bar.update(steps)

    def report(self, step: int, row: Mapping[str, float]) -> None:
        shown = {label: row[name] for name, label in self._SHOWN.items() if name in row}
        if self._bar.disable:
            numbers = "  ".join(f"{name} {value:.4g}" for name, value in shown.items())
            _log.info("step %d/%d  %s", step, self._stop, numbers)
        else:
            self._bar.set_postfix({name: f"{value:.4g}" for name, value in shown.items()})

    def close(self) -> None:
        self._bar.close()
