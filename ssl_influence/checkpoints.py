"""One checkpoint that holds all state of a run, and what lies beside it."""

import csv
import io
import os
import pathlib
import re

import numpy as np
import tensorflow as tf

from ssl_influence import config, files


class CheckpointError(config.UserError, RuntimeError):
    """A checkpoint that does not hold just what the run needs. One line: file and cause."""


class Checkpointer:
    """Saves and restores every trackable object of a run under `directory`/ckpt-<step>.

    Writing is safe against a kill at any moment: TensorFlow writes the tensors under temporary
    names, moves them into place, and only then points the `checkpoint` file at them; an older
    checkpoint is deleted after that.

    Args:
      directory: where checkpoints lie; made on the first save.
      keep: how many of the newest stay.
      **state: the trackable objects, by the name they have in the checkpoint.
    """

    def __init__(self, directory: str | os.PathLike, keep: int, **state):
        self._checkpoint = tf.train.Checkpoint(**state)
        self._directory = pathlib.Path(directory)
        self._keep = keep
        self._manager = None

    def restore_latest(self) -> bool:
        """Restores the newest checkpoint, all of it; False where there is none.

        Raises:
          CheckpointError: it is unreadable, lacks state the run needs, or holds state it does not
          know.
        """
        path = tf.train.latest_checkpoint(str(self._directory))
        if path is None:
            return False
        try:
            self._checkpoint.restore(path).assert_consumed()
        except (AssertionError, ValueError, tf.errors.OpError) as error:
            cause = str(error).strip().splitlines()[0]
            raise CheckpointError(
                f"{path} does not fit this run ({cause}): it was written by other settings or "
                "another version; use a new --model_dir."
            ) from error
        return True

    def save(self, step: int) -> str:
        """Saves as ckpt-<step>, overwriting one of that step; returns its path prefix."""
        if self._manager is None:
            self._manager = tf.train.CheckpointManager(
                self._checkpoint, str(self._directory), max_to_keep=self._keep
            )
        return self._manager.save(checkpoint_number=step)


def list_checkpoints(directory: str | os.PathLike) -> dict[int, str]:
    """Step -> path prefix of the checkpoints under `directory`, by ascending step."""
    state = tf.train.get_checkpoint_state(str(directory))
    paths = state.all_model_checkpoint_paths if state else []
    found = {step_of(path): path for path in paths if tf.io.gfile.exists(path + ".index")}
    return dict(sorted(found.items()))


def step_of(path: str) -> int:
    """The step in a checkpoint's path prefix, `.../ckpt-1200` -> 1200."""
    return int(re.search(r"-(\d+)$", path).group(1))


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
