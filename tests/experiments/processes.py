"""Starting the binaries as a user does, and reading what they left."""

import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import tensorflow as tf

from experiments import command
from ssl_influence import metrics
from tests.experiments import forks

ROOT = pathlib.Path(__file__).resolve().parents[2]
TINY = [
    "--dataset=digits.1@20-40",
    "--depth=10",
    "--width=1",
    "--filters=4",
    "--batch_norm_momentum=0.9",
    "--confidence=0.2",
    "--labeled_batch_size=8",
    "--unlabeled_batch_size=16",
    "--validation_batch_size=20",
    "--weight_warmup_steps=5",
    "--inner_steps=3",
    "--log_every=6",
    "--eval_every=8",
    "--checkpoint_every=10",
    "--train_steps=40",
]


def _take_interrupts():
    """Ends what a process inherits of nohup, that Ctrl-C is ignored: tests wait for its effect."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(*arguments, environment=None, fresh=False):
    """A Python process with these arguments.

    A binary is forked from a process that has TensorFlow imported, see `forks`, unless it is to be
    fresh, or gets an environment of its own.
    """
    command_line = [sys.executable, *arguments]
    if arguments[0] == "-m" and not (fresh or environment) and hasattr(os, "pidfd_open"):
        command_line = forks.command(*arguments[1:], root=ROOT)
    return subprocess.Popen(
        command_line,
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        preexec_fn=_take_interrupts,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process, timeout=300):
    out, err = process.communicate(timeout=timeout)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def run(module, *arguments, fresh=False):
    return finish(start("-m", f"experiments.{module}", *arguments, fresh=fresh))


def succeeded(result):
    assert result.returncode == 0, result.stderr[-3000:]
    return result


def stopped(result):
    """Stopped and saved, to be gone on with: neither a success nor an error."""
    assert result.returncode == command.STOPPED, result.stderr[-3000:]
    assert "Stopped at step" in result.stderr
    return result


def train(model_dir, *arguments, fresh=False):
    return run("uda_cifar", *TINY, f"--model_dir={model_dir}", *arguments, fresh=fresh)


def contents(model_dir, step=40):
    """All that a run which ended at a step holds, timings aside."""
    reader = tf.train.load_checkpoint(str(model_dir / "checkpoints"))
    # How often a checkpoint was written is no part of the run.
    names = sorted(n for n in reader.get_variable_to_shape_map() if "save_counter" not in n)
    tensors = {name: np.array(reader.get_tensor(name)) for name in names}
    rows = [
        {name: value for name, value in row.items() if not name.startswith(("wall_s", "time/"))}
        for row in metrics.read_metrics(model_dir / "metrics.jsonl")
    ]
    return tensors, rows, (model_dir / "weights" / f"weights-{step}.csv").read_text()


def assert_same_contents(a, b):
    assert a[0].keys() == b[0].keys()
    for name in a[0]:
        assert a[0][name].tobytes() == b[0][name].tobytes(), name
    assert a[1:] == b[1:]


def assert_same_run(a, b):
    assert_same_contents(contents(a), contents(b))


def assert_refused(result, *parts):
    """Exit code not 0 and one clear line, no traceback."""
    assert result.returncode != 0
    assert "Traceback" not in result.stderr
    for part in parts:
        assert part in result.stderr
    lines = result.stderr.splitlines()
    errors = [line for line in lines if line.startswith(("error: ", "FATAL"))]
    assert len(errors) == 1, result.stderr
