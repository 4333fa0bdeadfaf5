"""TensorBoard event files beside metrics.jsonl: the same scalars, and histograms.

A run that resumes writes a new file, and cuts the older ones at the step it resumes from, as
metrics.jsonl is cut: TensorBoard reads all files of a directory as one run, and would otherwise
show the abandoned steps beside those that replace them.
"""

import os
import struct
from collections.abc import Mapping

import numpy as np
import tensorflow as tf
from google.protobuf import message
from tensorboard.plugins.histogram import summary_v2 as histogram_summary
from tensorboard.plugins.hparams import api as hparams_api
from tensorboard.plugins.scalar import summary_v2 as scalar_summary
from tensorflow.core.util import event_pb2

from ssl_influence import config, files

# A record is its length (8 bytes), a checksum of that (4), the data, and a checksum of them (4).
_HEAD, _TAIL = 12, 4


class EventFileError(config.UserError, RuntimeError):
    """Event files that cannot be written or cut. One line: file, cause and remedy."""


class EventWriter:
    """Writes scalars and histograms by step; everything written is on disk when `write` returns.

    Args:
      directory: of the event files; made with the first of them, at the first `write`.
    """

    def __init__(self, directory: str | os.PathLike):
        self._directory = files.path(directory)
        self._writer = None

    def write_hparams(self, hparams: Mapping[str, str | float]) -> None:
        """Writes the settings by which TensorBoard's HParams tab lists the run.

        Raises:
          EventFileError: see `write`.
        """
        self._write(0, hparams_api.hparams_pb(dict(hparams)).SerializeToString())

    def write(
        self,
        step: int,
        scalars: Mapping[str, float],
        histograms: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Writes values by name for a step; a histogram takes an array of any shape.

        Raises:
          EventFileError: the files cannot be written, as on a full disk.
        """
        # One event for all, since serialized summaries in a row are one summary: an op for each, as
        # in tf.summary.scalar, takes ten times as long.
        summaries = [scalar_summary.scalar_pb(*item) for item in scalars.items()]
        summaries += [histogram_summary.histogram_pb(*item) for item in (histograms or {}).items()]
        self._write(step, b"".join(summary.SerializeToString() for summary in summaries))

    def _write(self, step: int, event: bytes) -> None:
        try:
            if self._writer is None:
                self._writer = tf.summary.create_file_writer(str(self._directory))
            with self._writer.as_default(step):
                tf.summary.experimental.write_raw_pb(event)
            self._writer.flush()
        except (tf.errors.OpError, OSError) as error:
            raise EventFileError(
                f"{self._directory} cannot be written ({str(error).splitlines()[0]}): make room, "
                "or go on with --notensorboard."
            ) from error


def cut(directory: str | os.PathLike, last_step: int) -> None:
    """Removes what the event files under `directory` hold of steps after `last_step`.

    What a kill left of a last event goes too. Steps ascend within a file, so that each is merely
    cut short. A TensorBoard that has read the steps already may show them until it is restarted.

    Raises:
      EventFileError: a file holds what is no event.
    """
    for path in sorted(files.path(directory).glob("events.out.tfevents.*")):
        data = path.read_bytes()
        end = _end_of_steps(path, data, last_step)
        if end == len(data):
            continue
        if files.is_local(path):
            os.truncate(path, end)
        else:
            with files.replacing(path) as whole:
                whole.write_bytes(data[:end])


def _end_of_steps(path: files.AnyPath, data: bytes, last_step: int) -> int:
    """Where in `data` the first event after `last_step`, or half an event, begins."""
    start = 0
    while start + _HEAD <= len(data):
        end = start + _HEAD + struct.unpack_from("<Q", data, start)[0]
        if end + _TAIL > len(data):
            break
        try:
            event = event_pb2.Event.FromString(data[start + _HEAD : end])
        except message.DecodeError as error:
            raise EventFileError(
                f"{path} is damaged at byte {start}: remove it; metrics.jsonl has its scalars."
            ) from error
        if event.step > last_step:
            break
        start = end + _TAIL
    return start
