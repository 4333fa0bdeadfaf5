"""Evaluates every checkpoint of a run on its test and validation examples.

    python -m experiments.evaluate --model_dir=/tmp/run

Writes eval/results.jsonl (a line for each checkpoint and split) and eval/summary.json (last, best
and medians of the last 1, 10, 20 and 50 checkpoints) beside the checkpoints, for the weights
themselves (raw) and their moving average (ema), and prints a table. Report the last or a median:
"best" is chosen on the very examples it is measured on. Checkpoints that are there because the run
was stopped between two regular ones are left out. The run's own settings are read from its
flags.txt.

    CUDA_VISIBLE_DEVICES=1 python -m experiments.evaluate --model_dir=/tmp/run --follow

does so while another process trains there, on another device (here the second GPU;
CUDA_VISIBLE_DEVICES= is the CPU). It may be started before, during or after training, waits for
checkpoints, evaluates each as it appears, and ends with exit code 0 when the last step is
evaluated, after --timeout_s seconds without a new checkpoint, or on SIGTERM or Ctrl-C. If there
never was a checkpoint the exit code is 1. The results are the same in each case, but for
checkpoints that training deleted (--keep_checkpoints) before they were seen.

Results of this run that are there already are kept, also of checkpoints that are gone, and not
computed again, so the same command goes on where it was stopped. Results of a run with other
settings or another split are replaced. Remove eval/ to evaluate anew, for example with other code.
"""

import logging
import signal
import time

from absl import flags

from experiments import command, flags as shared_flags
from ssl_influence import config as config_lib, files

_log = logging.getLogger("ssl_influence")
_POLL_S = 1.0

shared_flags.define_model_dir()
shared_flags.define_moved_data()
_BATCH_SIZE = flags.DEFINE_integer(
    "batch_size",
    None,
    "Examples a batch (default: 500, or the run's --rows_per_pass if that is less).",
    lower_bound=1,
)
_STRATEGY = flags.DEFINE_enum(
    "strategy",
    "one_device",
    ("one_device", "mirrored", "tpu"),
    "Devices to evaluate on: all GPUs of this machine (mirrored), a tpu, or one_device.",
)
_TPU = flags.DEFINE_string("tpu", None, "Name of a Cloud TPU; local for that of this machine.")
_VIRTUAL_CPUS = flags.DEFINE_integer(
    "virtual_cpus",
    None,
    "Take the CPU as so many devices, for mirrored.",
    lower_bound=1,
)
_FOLLOW = flags.DEFINE_boolean("follow", False, "Wait for checkpoints of a run in training.")
_TIMEOUT_S = flags.DEFINE_integer(
    "timeout_s", 3600, "With --follow: seconds to wait for a new checkpoint.", lower_bound=0
)


def main() -> None:
    if not _FOLLOW.value:
        if _TIMEOUT_S.present:
            raise config_lib.ConfigError(
                f"--timeout_s={_TIMEOUT_S.value} has no meaning without --follow: add that."
            )
        _evaluate(None)
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        _evaluate(_TIMEOUT_S.value)
    except KeyboardInterrupt:
        _log.info("Stopped; the same command goes on.")


def _evaluate(follow_s: float | None) -> None:
    model_dir = shared_flags.model_dir()
    _wait_for_run(model_dir, follow_s or 0)
    config = shared_flags.read_flagfile(model_dir / "flags.txt")
    config = shared_flags.with_moved_data(config)
    devices = {"strategy": _STRATEGY.value, "tpu": _TPU.value, "virtual_cpus": _VIRTUAL_CPUS.value}
    config = config.replace(distribution=devices)
    from experiments import launch
    from ssl_influence.data import splits
    from ssl_influence.reporting import tables

    built = launch.build(config, evaluated_in=model_dir)
    splits.check(splits.read(model_dir / "split.json"), built.manifest)
    print(tables.evaluation(launch.evaluate(built, model_dir, _BATCH_SIZE.value, follow_s)))


def _wait_for_run(model_dir: files.AnyPath, seconds: float) -> None:
    """Returns once flags.txt and split.json are there, which training writes in this order."""
    deadline = time.monotonic() + seconds
    for name in ("flags.txt", "split.json"):
        if seconds and not (model_dir / name).exists():
            _log.info("Waiting for %s.", model_dir / name)
        while not (model_dir / name).exists():
            if time.monotonic() >= deadline:
                shared_flags.require_of_run(model_dir, name)
            time.sleep(_POLL_S)


if __name__ == "__main__":
    command.run(main)
