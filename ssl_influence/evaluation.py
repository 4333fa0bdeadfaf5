"""Error rates of a model and of its moving average, for one model or a run's checkpoints."""

import json
import logging
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import tensorflow as tf
import tf_keras as keras

from ssl_influence import averages, checkpoints, config, distribution, files, graphs, metrics

MEDIAN_WINDOWS = (1, 10, 20, 50)
POLL_S = 1.0

_log = logging.getLogger("ssl_influence")


class Evaluator:
    """Counts errors of `model` over batches of {"inputs", "label", "mask"}.

    Args:
      model: gives (features, logits); called with training=False.
      strategy: divides each batch among its replicas, filled up where that does not go. The model
        has to be made within its scope. None is the strategy whose scope this is called in, or
        none.
    """

    def __init__(self, model: keras.Model, strategy: tf.distribute.Strategy | None = None):
        self._model = model
        self._strategy = strategy or tf.distribute.get_strategy()

    @tf.function(autograph=False, reduce_retracing=True)
    def _counts(self, batch):
        found = self._strategy.run(self._counts_of_part, (batch,))
        return tf.nest.map_structure(
            lambda count: self._strategy.reduce(tf.distribute.ReduceOp.SUM, count, axis=None),
            found,
        )

    def _counts_of_part(self, batch):
        _, logits = graphs.converted(self._model)(batch["inputs"], training=False)
        predicted, mask = tf.argmax(logits, 1, tf.int32), batch["mask"]
        wrong = (predicted != tf.cast(batch["label"], tf.int32)) & mask
        classes = tf.one_hot(tf.where(mask, predicted, -1), logits.shape[-1], dtype=tf.int32)
        counted = tf.cast(tf.stack([wrong, mask]), tf.int32)
        return tf.reduce_sum(counted, 1), tf.reduce_sum(classes, 0)

    def counts(self, batches: Iterable[Mapping[str, tf.Tensor]]) -> tuple[int, int, np.ndarray]:
        """Wrong predictions, examples, and how many examples each class was predicted for.

        The last is int64 [C].

        Raises:
          ValueError: there is no example.
        """
        totals, predicted = np.zeros(2, np.int64), 0
        for batch in batches:
            part = distribution.split(distribution.filled_up(batch, self._strategy), self._strategy)
            batch_totals, batch_predicted = self._counts(part)
            totals += batch_totals.numpy()
            predicted = predicted + batch_predicted.numpy().astype(np.int64)
        wrong, examples = totals.tolist()
        if not examples:
            raise ValueError("There is no example to evaluate.")
        return wrong, examples, predicted

    def error(self, batches: Iterable[Mapping[str, tf.Tensor]]) -> tuple[float, int]:
        """The error rate in percent and the number of examples it was counted over."""
        wrong, examples, _ = self.counts(batches)
        return 100.0 * wrong / examples, examples


def errors(
    evaluator: Evaluator,
    average: averages.ExponentialMovingAverage,
    batches: Iterable[Mapping[str, tf.Tensor]],
) -> dict[str, float]:
    """{"examples", "raw_error", "ema_error"}: the weights themselves and their moving average."""
    raw, examples = evaluator.error(batches)
    with average.swapped():
        ema, _ = evaluator.error(batches)
    return {"examples": examples, "raw_error": raw, "ema_error": ema}


def evaluate_run(
    model: keras.Model,
    average: averages.ExponentialMovingAverage,
    splits: Mapping[str, Iterable[Mapping[str, tf.Tensor]]],
    model_dir: str | os.PathLike,
    every: int = 1,
    *,
    keep: bool = False,
    strategy: tf.distribute.Strategy | None = None,
) -> dict[str, dict]:
    """Evaluates every checkpoint under `model_dir` and writes eval/results.jsonl and
    eval/summary.json.

    Only the model and its average are restored. Both files are replaced whole after each
    checkpoint.

    Args:
      model: of the run's architecture; its values are overwritten.
      average: of the run's kind; its values are overwritten.
      splits: name ("test", "validation") -> re-iterable batches.
      model_dir: the run's directory.
      every: leaves out checkpoints of other steps than multiples of this, but for the last: they
        are there because the run was stopped, and a run's results should not depend on that.
      keep: rows that results.jsonl has already stay, also where their checkpoint is gone, and are
        not computed again. Only right where they are of this very run. Without it the files speak
        of the checkpoints that exist now.
      strategy: see `Evaluator`.

    Returns:
      What summary.json holds, see `summarize`.

    Raises:
      CheckpointError: there is no checkpoint, or one is damaged or lacks the model or its average.
    """
    results = _Results(model, average, splits, model_dir, keep, strategy)
    found = _list(model_dir)
    last = max([*found, *results.steps], default=0)
    for step, path in checkpoints.on_schedule(found, every, last).items():
        if step in results.steps:
            continue
        try:
            rows = results.evaluate(step, path)
        except checkpoints.UnreadableError:
            if checkpoints.stamp(path) is not None:
                raise
            _log.info("%s was deleted before it could be read.", path)
        else:
            results.add(step, rows, every)
    if not results.steps:
        raise checkpoints.CheckpointError(
            f"{files.path(model_dir) / 'checkpoints'} holds no checkpoint: train there first, or "
            "name the directory of a run with --model_dir."
        )
    return results.write(every)


def follow_run(
    model: keras.Model,
    average: averages.ExponentialMovingAverage,
    splits: Mapping[str, Iterable[Mapping[str, tf.Tensor]]],
    model_dir: str | os.PathLike,
    *,
    current: Callable[[], config.TrainConfig],
    timeout_s: float,
    strategy: tf.distribute.Strategy | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, dict]:
    """As `evaluate_run` with keep=True, for a run that is still being trained by another process.

    Evaluates checkpoints as they appear, until that of the last step is done or no new one came for
    `timeout_s`. Whenever it is started, and however often it is stopped, results.jsonl comes out
    the same, but for checkpoints that training deleted before they were seen.

    A checkpoint off the schedule is what a stopped run leaves. It is evaluated only if it is still
    the newest at the timeout, and its rows go once there are newer ones.

    Reading is never in training's way, and a checkpoint that is being written or deleted meanwhile
    does no harm: one that cannot be read is tried again. If it fails twice and its files are the
    same, it is damaged: that is logged, and it is left alone until its files change.

    Args:
      model: as in `evaluate_run`.
      average: as there.
      splits: as there.
      model_dir: as there.
      current: the run's settings as they are now, of which `train_steps` and `checkpoint_every` are
        used. Asked at every look and before rows are written; should raise if the directory holds
        another run by now.
      timeout_s: seconds to wait for a new checkpoint.
      strategy: see `Evaluator`.
      clock: seconds that only grow.
      sleep: waits for some seconds.

    Returns:
      What summary.json holds, see `summarize`.

    Raises:
      CheckpointError: no checkpoint could be evaluated in time, or one lacks the model or its
        average.
    """
    results = _Results(model, average, splits, model_dir, True, strategy)
    suspects = _Suspects()

    def evaluate(step: int, path: str) -> bool:
        """Whether the checkpoint could be read; its rows are written then."""
        try:
            rows = results.evaluate(step, path)
        except checkpoints.UnreadableError as error:
            suspects.add(path, error)
            return False
        finally:
            every = current().checkpoint_every
        suspects.clear(path)
        results.add(step, rows, every)
        return True

    waiting_since = clock()
    while True:
        train = current()
        chosen = checkpoints.on_schedule(
            _list(model_dir), train.checkpoint_every, train.train_steps
        )
        new = {step: path for step, path in chosen.items() if step not in results.steps}
        suspects.drop_all_but(new.values())
        tried = [evaluate(step, path) for step, path in new.items() if not suspects.damaged(path)]
        if any(tried):
            waiting_since = clock()
        if tried and all(tried):
            continue  # others may have come meanwhile; one that failed needs time
        if train.train_steps in results.steps and not suspects.unsettled:
            _log.info("Step %d, the last, is evaluated.", train.train_steps)
            break
        left = waiting_since + timeout_s - clock()
        if left <= 0:
            _log.info("No new checkpoint came for %g s.", timeout_s)
            break
        sleep(min(POLL_S, left))
    found = _list(model_dir)
    newest = max([*found, *results.steps], default=0)
    if newest not in results.steps and newest in found and not suspects.damaged(found[newest]):
        evaluate(newest, found[newest])
    suspects.settle()
    if not results.steps:
        raise checkpoints.CheckpointError(
            f"{files.path(model_dir) / 'checkpoints'} held no checkpoint to evaluate for "
            f"{timeout_s:g} s: train there, or wait longer."
        )
    return results.write(train.checkpoint_every)


class _Results:
    """The rows of a run: evaluates checkpoints, and writes results.jsonl and summary.json."""

    def __init__(self, model, average, splits, model_dir, keep, strategy):
        self._evaluator = Evaluator(model, strategy)
        self._average = average
        self._splits = splits
        self._model = model
        self._folder = files.path(model_dir) / "eval"
        kept = metrics.read_metrics(self._folder / "results.jsonl") if keep else []
        by_step = {}
        for row in kept:
            by_step.setdefault(row["step"], {})[row["split"]] = row
        self.steps: dict[int, list[dict]] = {
            step: [rows[split] for split in splits]
            for step, rows in by_step.items()
            if splits.keys() <= rows.keys()
        }

    def evaluate(self, step: int, path: str) -> list[dict]:
        """The rows of a checkpoint, one for each split; nothing is written."""
        # A new one each time: what is left of a failed restore would spoil the next.
        reader = tf.train.Checkpoint(model=self._model, ema=self._average)
        checkpoints.read(reader, path).assert_existing_objects_matched()
        return [
            {"step": step, "split": split, **errors(self._evaluator, self._average, batches)}
            for split, batches in self._splits.items()
        ]

    def add(self, step: int, rows: list[dict], every: int) -> None:
        """Takes the rows of a checkpoint, says what they are and writes the files."""
        self.steps[step] = rows
        shown = [f"{r['split']} {r['raw_error']:.2f} (ema {r['ema_error']:.2f})" for r in rows]
        _log.info("step %d  error, %%: %s", step, "  ".join(shown))
        self.write(every)

    def write(self, every: int) -> dict[str, dict]:
        """Writes the rows that are on the schedule, and the last; returns their summary."""
        chosen = checkpoints.on_schedule(self.steps, every, max(self.steps))
        rows = [row for step in sorted(chosen) for row in chosen[step]]
        summary = {
            split: summarize([row for row in rows if row["split"] == split], split)
            for split in self._splits
        }
        files.write_atomically(
            self._folder / "results.jsonl", "".join(json.dumps(row) + "\n" for row in rows)
        )
        files.write_atomically(self._folder / "summary.json", json.dumps(summary, indent=2) + "\n")
        return summary


class _Suspects:
    """Tells damaged checkpoints from those that were caught while they were written or deleted.

    TensorFlow moves the data into place and then writes the index there, which for a moment is
    empty; it deletes the index before the data.
    """

    def __init__(self):
        self._seen = {}  # path -> its stamp when it last failed
        self.unsettled: dict[str, Exception] = {}

    def add(self, path: str, error: Exception) -> None:
        """Notes that a checkpoint could not be read; logs it if that is for good."""
        before, now = self._seen.get(path), checkpoints.stamp(path)
        self.clear(path)
        if now is None:
            _log.info("%s was deleted before it could be read.", path)
            return
        self._seen[path], self.unsettled[path] = now, error
        if now == before:
            self._report(path)

    def clear(self, path: str) -> None:
        """Forgets a checkpoint."""
        self._seen.pop(path, None)
        self.unsettled.pop(path, None)

    def drop_all_but(self, paths: Iterable[str]) -> None:
        """Forgets those that failed once and are not there any more."""
        for path in self.unsettled.keys() - set(paths):
            self.clear(path)
            _log.info("%s was deleted before it could be read.", path)

    def damaged(self, path: str) -> bool:
        """Whether it was reported and its files have not changed since."""
        return (
            path in self._seen
            and path not in self.unsettled
            and self._seen[path] == checkpoints.stamp(path)
        )

    def settle(self) -> None:
        """Logs those that failed and were not tried again."""
        for path in list(self.unsettled):
            self._report(path)

    def _report(self, path):
        _log.warning("Left out: %s", self.unsettled.pop(path))


def _list(model_dir: str | os.PathLike) -> dict[int, str]:
    return checkpoints.list_checkpoints(files.path(model_dir) / "checkpoints")


def summarize(rows: list[dict], split: str) -> dict:
    """Last, best and medians of one split's rows, raw and EMA.

    Args:
      rows: objects as in results.jsonl, all of one split, by ascending step.
      split: its name; "best" is the lowest error on this very split and says so.

    Returns:
      {"raw" | "ema": {"last": {step, error}, "best": {step, error, "chosen_on"}, "median": {"1":
      {error, checkpoints}, "10": ..., "20": ..., "50": ...}}, "checkpoints", "examples"}; a median
      over fewer checkpoints than asked for says how many were used.
    """
    summary = {"checkpoints": len(rows), "examples": rows[-1]["examples"]}
    for kind in ("raw", "ema"):
        series = [(row[f"{kind}_error"], row["step"]) for row in rows]
        best_error, best_step = min(series)
        summary[kind] = {
            "last": {"step": series[-1][1], "error": series[-1][0]},
            "best": {"step": best_step, "error": best_error, "chosen_on": split},
            "median": {
                str(window): {
                    "error": statistics.median(error for error, _ in series[-window:]),
                    "checkpoints": len(series[-window:]),
                }
                for window in MEDIAN_WINDOWS
            },
        }
    return summary
