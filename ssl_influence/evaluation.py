"""Error rates of a model and of its moving average, for one model or a run's checkpoints."""

import json
import os
import pathlib
import statistics
from collections.abc import Iterable, Mapping

import numpy as np
import tensorflow as tf
import tf_keras as keras

from ssl_influence import averages, checkpoints, files

MEDIAN_WINDOWS = (1, 10, 20, 50)


class Evaluator:
    """Counts errors of `model` over batches of {"inputs", "label", "mask"}.

    Args:
      model: gives (features, logits); called with training=False.
    """

    def __init__(self, model: keras.Model):
        self._model = model

    @tf.function(reduce_retracing=True)
    def _counts(self, batch):
        _, logits = self._model(batch["inputs"], training=False)
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
            batch_totals, batch_predicted = self._counts(batch)
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
) -> dict[str, dict]:
    """Evaluates every checkpoint under `model_dir` and writes eval/results.jsonl and
    eval/summary.json.

    Only the model and its average are restored. Both files are replaced whole, so they speak of the
    checkpoints that exist now.

    Args:
      model: of the run's architecture; its values are overwritten.
      average: of the run's kind; its values are overwritten.
      splits: name ("test", "validation") -> re-iterable batches.
      model_dir: the run's directory.
      every: leaves out checkpoints of other steps than multiples of this, but for the last: they
        are there because the run was stopped, and a run's results should not depend on that.

    Returns:
      What summary.json holds, see `summarize`.

    Raises:
      CheckpointError: there is no checkpoint, or one lacks the model or its average.
    """
    model_dir = pathlib.Path(model_dir)
    found = checkpoints.list_checkpoints(model_dir / "checkpoints")
    found = {k: path for k, path in found.items() if k % every == 0 or k == max(found)}
    if not found:
        raise checkpoints.CheckpointError(
            f"{model_dir / 'checkpoints'} holds no checkpoint: train there first, or name the "
            "directory of a run with --model_dir."
        )
    evaluator = Evaluator(model)
    reader = tf.train.Checkpoint(model=model, ema=average)
    rows = []
    for step, path in found.items():
        checkpoints.read(reader, path).assert_existing_objects_matched()
        for split, batches in splits.items():
            rows.append({"step": step, "split": split, **errors(evaluator, average, batches)})
    summary = {
        split: summarize([row for row in rows if row["split"] == split], split) for split in splits
    }
    files.write_atomically(
        model_dir / "eval" / "results.jsonl", "".join(json.dumps(row) + "\n" for row in rows)
    )
    files.write_atomically(
        model_dir / "eval" / "summary.json", json.dumps(summary, indent=2) + "\n"
    )
    return summary


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
