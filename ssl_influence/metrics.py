"""Numbers of a run: averaged over the steps between two log lines, written as JSON lines."""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from ssl_influence import config, files

T = TypeVar("T")


class NonFiniteError(config.UserError, FloatingPointError):
    """A term of the objective is NaN or infinite. One line: the term, its value, the step."""


class MetricsError(config.UserError, ValueError):
    """A metrics.jsonl that cannot be read. One line: file, line number and text."""


class MetricWindow(tf.train.experimental.PythonState):
    """Running means of named scalars since the last log line; part of the checkpoint.

    A name counts only the steps that report it (weight steps report more names than theta steps).
    A mean over something else than steps, such as the accuracy of those rows of a batch that are
    judged, is reported as the pair (sum, count): sums are divided by counts, and where nothing was
    counted there is no mean.

    Sums are kept in double precision and stored as JSON text, whose round trip is exact, so that a
    resumed run logs the same numbers as one that was never stopped.
    """

    def __init__(self):
        self._sums: dict[str, list[float]] = {}

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        """Adds one step's scalars and pairs.

        Raises:
          NonFiniteError: a value is NaN or infinite; nothing is added.
        """
        for name, value in values.items():
            if not np.all(np.isfinite(value)):
                raise NonFiniteError(
                    f"{name} is {value} at step {step}: the run stops and the last checkpoint is "
                    "kept. Try a lower --learning_rate, or look at the examples of that batch."
                )
        for name, value in values.items():
            amount, count = (value, 1) if np.ndim(value) == 0 else value
            total = self._sums.setdefault(name, [0.0, 0])
            total[0] += float(amount)
            total[1] += float(count)

    def flush(self) -> dict[str, float]:
        """The means, by name; the window is empty afterwards."""
        means = {name: total / count for name, (total, count) in self._sums.items() if count}
        self._sums = {}
        return means

    def serialize(self) -> str:
        """What a checkpoint stores."""
        return json.dumps(self._sums, sort_keys=True)

    def deserialize(self, string_value: str | bytes) -> None:
        """Takes the state that `serialize` gave."""
        self._sums = json.loads(string_value)


class Throughput:
    """How fast a loop goes through its batches, and how much of that time it waits for them.

    Time begins once the loop asks for its second batch: the first step traces, and the input is
    only starting then. Whatever the loop does counts: weight steps, validation, checkpoints.

    Args:
      examples_of: the number of examples in a batch.
      clock: seconds, from any origin.
    """

    def __init__(
        self, examples_of: Callable[[Any], int], clock: Callable[[], float] = time.monotonic
    ):
        self._examples_of = examples_of
        self._clock = clock
        self._began: float | None = None
        self._waited: float | None = 0.0  # None: not known
        self._examples = 0

    def timed(self, batches: Iterable[T]) -> Iterator[T]:
        """The same batches; loop over these."""
        iterator = iter(batches)
        for first in iterator:
            yield first
            break
        self._began = asked = self._clock()
        for batch in iterator:
            self._waited += self._clock() - asked
            self._examples += self._examples_of(batch)
            yield batch
            asked = self._clock()

    def took(self, batches: int, batch: Any) -> None:
        """Counts so many batches like this one, which the devices read by themselves.

        How long they waited is not known then. The first call begins the measurement.
        """
        if self._began is None:
            self._began = self._clock()
        else:
            self._examples += batches * self._examples_of(batch)
        self._waited = None

    def flush(self) -> dict[str, float]:
        """What was measured since the last flush; nothing where no batch was.

        time/examples_per_second: examples of the batches per second of wall time.
        time/input_wait: share of wall time between asking for a batch and having it. On a CPU a
          step ends before the next batch is asked for, and training stands still meanwhile. An
          accelerator goes on with the steps that are queued: it idles for this share at most.
        time/window_s: the seconds that both are measured over.
        """
        now = self._clock()
        if not self._examples:
            return {}
        seconds = max(now - self._began, 1e-9)
        measured = {"time/examples_per_second": self._examples / seconds}
        if self._waited is not None:
            measured["time/input_wait"] = self._waited / seconds
        measured["time/window_s"] = seconds
        self._began, self._waited, self._examples = now, 0.0, 0
        return measured


class MetricsWriter:
    """Appends one JSON object a line to `path`; a step appears once.

    Args:
      path: the file; its folder exists.
      resume_step: lines of later steps, and a line cut short by a kill, are removed first.
    """

    def __init__(self, path: str | os.PathLike, resume_step: int):
        self._path = files.path(path)
        kept = [row for row in read_metrics(self._path) if row["step"] <= resume_step]
        files.write_atomically(self._path, "".join(json.dumps(row) + "\n" for row in kept))
        self._start = time.monotonic() - (kept[-1]["wall_s"] if kept else 0.0)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Writes `values` for `step`, with the run's seconds so far as "wall_s"."""
        row = {"step": step, "wall_s": round(time.monotonic() - self._start, 3), **values}
        # A bucket's object is written anew.
        with files.os_errors(self._path), self._path.open("a") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")


def read_metrics(path: str | os.PathLike) -> list[dict[str, float]]:
    """The rows of a metrics.jsonl; none where the file is missing. A last line cut short is left
    out.

    Raises:
      MetricsError: a line other than the last is not JSON, naming file and line.
    """
    path = files.path(path)
    lines = path.read_text().splitlines() if path.exists() else []
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise MetricsError(
                    f"{path}:{number} is not JSON ({line[:60]!r}): mend or remove that line."
                ) from error
    return rows
