"""One checkpoint that holds all state of a run, and what lies beside it."""

import contextlib
import csv
import io
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from typing import TypeVar

import numpy as np
import tensorflow as tf

from ssl_influence import config, files

T = TypeVar("T")

_STEP = re.compile(r"-(\d+)$")

_log = logging.getLogger("ssl_influence")

# kTableMagicNumber, which closes every table that TensorFlow writes (tsl/lib/io/format.h).
_INDEX_END = (0xDB4775248B80FB57).to_bytes(8, "little")


class CheckpointError(config.UserError, RuntimeError):
    """A checkpoint that does not hold just what the run needs. One line: file and cause."""


class UnreadableError(CheckpointError):
    """Files that cannot be read: damaged, or caught while they were written or deleted."""


class Checkpointer:
    """Saves and restores every trackable object of a run under `directory`/ckpt-<step>.

    Writing is safe against a kill at any moment: TensorFlow writes the tensors under temporary
    names, moves them into place and writes their index. They are then read again, and only if they
    are whole the `checkpoint` file is pointed at them; an older checkpoint is deleted after that.

    Args:
      directory: where checkpoints lie; made on the first save.
      keep: how many of the newest stay.
      writes: False in a worker that is not the first of its cluster. It takes part in `save`, as
        TensorFlow asks of all, and what it writes is thrown away.
      **state: the trackable objects, by the name they have in the checkpoint.
    """

    def __init__(self, directory: str | os.PathLike, keep: int, *, writes: bool = True, **state):
        self._checkpoint = tf.train.Checkpoint(**state)
        self._directory = files.path(directory)
        self._keep = keep
        self._writes = writes
        self._manager = None

    def restore_latest(self) -> bool:
        """Restores the newest checkpoint that is whole, all of it; False where there is none.

        Raises:
          CheckpointError: it lacks state the run needs, or holds state it does not know; or there
            are checkpoints, all of them damaged.
        """
        path = newest(self._directory)
        if path is None:
            return False
        read(self._checkpoint, path).assert_consumed()
        return True

    def save(self, step: int) -> str:
        """Saves as ckpt-<step>, overwriting one of that step; returns its path prefix.

        Raises:
          CheckpointError: it cannot be written, or reads as something else. Nothing is left of it,
            and older ones are as they were.
        """
        if not self._writes:
            with tempfile.TemporaryDirectory() as folder:
                return self._checkpoint.write(os.path.join(folder, f"ckpt-{step}"))
        if self._manager is None:
            self._manager = tf.train.CheckpointManager(
                self._checkpoint, str(self._directory), max_to_keep=self._keep
            )
        # Called before the manager takes it for the newest, and deletes the oldest.
        options = tf.train.CheckpointOptions(experimental_write_callbacks=[verify])
        try:
            return self._manager.save(checkpoint_number=step, options=options)
        except (UnreadableError, tf.errors.OpError, OSError) as error:
            self._remove(step)
            raise CheckpointError(
                f"Step {step} cannot be saved in {self._directory} ({_first_line(error)}). Older "
                "checkpoints are as they were: mend that or make room; the same command goes on."
            ) from error

    def _remove(self, step):
        """What a failed write left, as far as that can be deleted."""
        for left in self._directory.glob(f"ckpt-{step}[._]*"):
            with contextlib.suppress(OSError, tf.errors.OpError):
                if not left.is_dir():
                    left.unlink()
                elif files.is_local(left):
                    shutil.rmtree(left)
                else:
                    left.rmtree()


def newest(directory: str | os.PathLike) -> str | None:
    """The path prefix of the newest checkpoint that is whole; None where there is none at all.

    It is the one that the `checkpoint` file names, or where a kill came before that file was first
    written the last one. If that is damaged or incomplete, a warning says so, and it is the last
    one before it that is not.

    Raises:
      CheckpointError: there are checkpoints, all of them damaged.
    """
    named = _named_checkpoint(directory)
    complete = list_checkpoints(directory)
    if named is None:
        # The index of one that a kill cut short within the first save is none.
        candidates = [path for path in complete.values() if _has_whole_index(path)]
    else:
        candidates = [path for step, path in complete.items() if step <= step_of(named)]
        if named not in candidates:
            _log.warning("%s is incomplete: its .index or .data file is missing.", named)
    problem = None
    for path in reversed(candidates):
        try:
            verify(path)
        except UnreadableError as error:
            problem = problem or error
            _log.warning("%s", error)
        else:
            if path != named and named is not None:
                _log.warning("Going back to %s.", path)
            return path
    if problem is not None:
        raise problem
    if named is not None:
        raise CheckpointError(
            f"{named} is incomplete: its .index or .data file is missing, and there is none before "
            "it. Put it back, or use a new --model_dir."
        )
    return None


def verify(path: str) -> None:
    """Reads every tensor of the checkpoint at a path prefix, whose checksums TensorFlow compares.

    Raises:
      UnreadableError: it is damaged, incomplete or gone.
    """
    try:
        # tf.train.load_checkpoint looks first whether the path is a folder, of which a file system
        # in memory says that it is.
        reader = tf.compat.v1.train.NewCheckpointReader(path)
        for name in reader.get_variable_to_shape_map():
            reader.get_tensor(name)
    except (tf.errors.OpError, ValueError, IndexError) as error:
        raise UnreadableError(
            f"{path} cannot be read ({_first_line(error)}): it is damaged."
        ) from error


def list_checkpoints(directory: str | os.PathLike) -> dict[int, str]:
    """Step -> path prefix of the complete checkpoints under `directory`, by ascending step."""
    found = {}
    for index in files.path(directory).glob("ckpt-*.index"):
        path = str(index.with_suffix(""))
        if _STEP.search(path) and any(index.parent.glob(f"{index.stem}.data-*")):
            found[step_of(path)] = path
    return dict(sorted(found.items()))


def stamp(path: str) -> tuple[tuple[str, int, int], ...] | None:
    """Name, size and time of each file of the checkpoint at a path prefix; None where one is gone.

    Equal stamps say that nobody wrote to it in between.
    """
    prefix = files.path(path)
    data = sorted(prefix.parent.glob(f"{prefix.name}.data-*"))
    try:
        status = [
            (file.name, *_size_and_time(file))
            for file in (prefix.with_name(f"{prefix.name}.index"), *data)
        ]
    except (FileNotFoundError, tf.errors.NotFoundError):
        return None
    return tuple(status) if data else None


def _size_and_time(file: files.AnyPath) -> tuple[int, int]:
    """Bytes, and nanoseconds since the epoch at the last change."""
    if files.is_local(file):
        status = file.stat()
        return status.st_size, status.st_mtime_ns
    status = tf.io.gfile.stat(str(file))  # epath rounds to seconds
    return status.length, status.mtime_nsec


def on_schedule(by_step: Mapping[int, T], every: int, last: int) -> dict[int, T]:
    """What belongs to the regular steps, the multiples of `every`, or to the last step.

    Others are there because a run was stopped, and its results should not depend on that.
    """
    return {step: x for step, x in by_step.items() if step % every == 0 or step == last}


class Restored:
    """What was read from a checkpoint, and the checks whether that was everything."""

    def __init__(self, path: str, status):
        self._path = path
        self._status = status

    def assert_consumed(self) -> None:
        """Raises CheckpointError unless checkpoint and objects match one to one."""
        self._check(self._status.assert_consumed)

    def assert_existing_objects_matched(self) -> None:
        """Raises CheckpointError unless every object was found in the checkpoint."""
        self._check(self._status.expect_partial().assert_existing_objects_matched)

    def _check(self, check):
        try:
            check()
        except AssertionError as error:
            raise CheckpointError(_misfit(self._path, error)) from error


def read(checkpoint: tf.train.Checkpoint, path: str) -> Restored:
    """Reads the checkpoint at a path prefix into the objects of `checkpoint`.

    Raises:
      UnreadableError: its files are damaged, incomplete or gone.
      CheckpointError: a tensor has another shape there.
    """
    try:
        return Restored(path, checkpoint.restore(path))
    except (tf.errors.OpError, IndexError) as error:  # IndexError: a file cut short
        raise UnreadableError(
            f"{path} cannot be read ({_first_line(error)}): it is damaged. Remove it to go on from "
            "an older one, or use a new --model_dir."
        ) from error
    except (AssertionError, ValueError) as error:
        raise CheckpointError(_misfit(path, error)) from error


def _misfit(path: str, error: Exception) -> str:
    return (
        f"{path} does not fit this run ({_first_line(error)}): it was written by other settings or "
        "another version; use a new --model_dir."
    )


def _first_line(error: Exception) -> str:
    """What it says, without the name of the op that TensorFlow puts around it."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return re.sub(r"^\{\{function_node [^}]*\}\}\s*|\s*\[Op:\w+\]$", "", line)


def _has_whole_index(path: str) -> bool:
    """Whether the index was written to its end, which TensorFlow does in place and after the data.

    A kill may leave it cut short, but not once the file `checkpoint` names it.
    """
    return files.path(f"{path}.index").read_bytes().endswith(_INDEX_END)


def _named_checkpoint(directory: str | os.PathLike) -> str | None:
    """The path prefix in the file `checkpoint`; None where it is missing or unreadable."""
    try:
        state = tf.train.get_checkpoint_state(str(directory))
    except ValueError:  # an empty file
        return None
    named = state.model_checkpoint_path if state else ""
    return named if _STEP.search(named) else None


def step_of(path: str) -> int:
    """The step in a checkpoint's path prefix, `.../ckpt-1200` -> 1200."""
    return int(_STEP.search(path).group(1))


def export_weights(
    path: str | os.PathLike, example_id: np.ndarray, weight: np.ndarray, updates: np.ndarray
) -> None:
    """Writes example_id,weight,updates as CSV, one row an unlabeled example, in one move.

    Args:
      path: the file; its folder is made.
      example_id: ids to write, [n].
      weight: lambda by id, [size].
      updates: how often lambda moved, by id, [size].
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["example_id", "weight", "updates"])
    for identity in example_id:
        writer.writerow([identity, repr(float(weight[identity])), updates[identity]])
    files.write_atomically(path, text.getvalue())


def read_weights(path: str | os.PathLike) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What `export_weights` wrote: example_id int64 [n], weight float64 [n], updates int64 [n].

    Raises:
      FileNotFoundError: there is no such file.
      ConfigError: it cannot be read, or is not one of weights.
    """
    try:
        text = files.path(path).read_bytes().decode("utf-8")
        rows = list(csv.DictReader(io.StringIO(text, newline="")))
        return (
            np.array([int(row["example_id"]) for row in rows], np.int64),
            np.array([float(row["weight"]) for row in rows]),
            np.array([int(row["updates"]) for row in rows], np.int64),
        )
    except FileNotFoundError:
        raise
    except OSError as error:
        raise config.ConfigError(f"{path} cannot be read ({error.strerror}).") from error
    except (KeyError, TypeError, ValueError, OverflowError, csv.Error) as error:
        raise config.ConfigError(
            f"{path} is not a table of weights with the columns example_id, weight, updates: "
            f"{error}."
        ) from error
