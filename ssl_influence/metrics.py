"""Numbers of a run: averaged over the steps between two log lines, written as JSON lines."""

import json
import math
import os
import pathlib
import time
from collections.abc import Mapping

import tensorflow as tf

from ssl_influence import config, files


class NonFiniteError(config.UserError, FloatingPointError):
    """A term of the objective is NaN or infinite. One line: the term, its value, the step."""


class MetricsError(config.UserError, ValueError):
    """A metrics.jsonl that cannot be read. One line: file, line number and text."""


class MetricWindow(tf.train.experimental.PythonState):
    """Running means of named scalars since the last log line; part of the checkpoint.

    A name counts only the steps that report it (weight steps report more names than theta steps).
    Sums are kept in double precision and stored as JSON text, whose round trip is exact, so that a
    resumed run logs the same numbers as one that was never stopped.
    """

    def __init__(self):
        self._sums: dict[str, list[float]] = {}

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Adds one step's scalars.

        Raises:
          NonFiniteError: a value is NaN or infinite; nothing is added.
        """
        for name, value in values.items():
            if not math.isfinite(value):
                raise NonFiniteError(
                    f"{name} is {value} at step {step}: the run stops and the last checkpoint is "
                    "kept. Try a lower --learning_rate, or look at the examples of that batch."
                )
        for name, value in values.items():
            total = self._sums.setdefault(name, [0.0, 0])
            total[0] += value
            total[1] += 1

    def flush(self) -> dict[str, float]:
        """The means, by name; the window is empty afterwards."""
        means = {name: total / count for name, (total, count) in self._sums.items()}
        self._sums = {}
        return means

    def serialize(self) -> str:
        """What a checkpoint stores."""
        return json.dumps(self._sums, sort_keys=True)

    def deserialize(self, string_value: str | bytes) -> None:
        """Takes the state that `serialize` gave."""
        self._sums = json.loads(string_value)


class MetricsWriter:
    """Appends one JSON object a line to `path`; a step appears once.

    Args:
      path: the file; its folder exists.
      resume_step: lines of later steps, and a line cut short by a kill, are removed first.
    """

    def __init__(self, path: str | os.PathLike, resume_step: int):
        self._path = pathlib.Path(path)
        kept = [row for row in read_metrics(self._path) if row["step"] <= resume_step]
        files.write_atomically(self._path, "".join(json.dumps(row) + "\n" for row in kept))
        self._start = time.monotonic() - (kept[-1]["wall_s"] if kept else 0.0)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Writes `values` for `step`, with the run's seconds so far as "wall_s"."""
        row = {"step": step, "wall_s": round(time.monotonic() - self._start, 3), **values}
        with self._path.open("a") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")


def read_metrics(path: str | os.PathLike) -> list[dict[str, float]]:
    """The rows of a metrics.jsonl; none where the file is missing. A last line cut short is left
    out.

    Raises:
      MetricsError: a line other than the last is not JSON, naming file and line.
    """
    path = pathlib.Path(path)
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
