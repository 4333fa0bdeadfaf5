"""Several workers, each a process as a scheduler starts them."""

import os
import resource
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow as tf

from experiments import command
from tests.experiments.processes import (
    ROOT,
    TINY,
    assert_refused,
    assert_same_run,
    finish,
    run,
    succeeded,
)
from tests.test_distribution import free_ports, workers_environment

SMALL = ["--model=mlp", "--hidden_units=8", "--worker_timeout_s=20"]


def start_workers(model_dir, *arguments, of_last=()):
    """A chief and a worker, the last with some flags of its own."""
    return [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "experiments.uda_cifar", *TINY, *SMALL),
                *(f"--model_dir={model_dir}", *arguments, *own),
            ],
            cwd=ROOT,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for environment, own in zip(workers_environment(free_ports(2)), ((), of_last), strict=True)
    ]


def wait_for(condition, *processes, seconds=200):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        assert all(process.poll() is None for process in processes)
        time.sleep(0.005)


def test_a_killed_worker_ends_the_other_and_the_pair_goes_on(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    # Where the devices are, and how many steps they take at a time, is not part of a run.
    devices = ("--virtual_cpus=2", "--steps_per_call=7")
    succeeded(run("uda_cifar", *TINY, *SMALL, *devices, f"--model_dir={whole}"))
    pair = start_workers(killed)
    wait_for((killed / "checkpoints" / "ckpt-10.index").exists, *pair)
    pair[1].kill()
    began = time.monotonic()
    left = finish(pair[0], timeout=100)
    assert time.monotonic() - began < 40
    assert left.returncode == command.STOPPED
    assert_refused(left, "Another worker is gone", "they go on from the newest checkpoint")
    finish(pair[1])
    for result in [finish(process) for process in start_workers(killed)]:
        succeeded(result)
        assert "Resuming from step" in result.stderr
    assert_same_run(whole, killed)


def test_workers_with_other_settings_are_told(tmp_path):
    pair = start_workers(tmp_path / "run", of_last=["--learning_rate=0.3"])
    for result in map(finish, pair):
        assert_refused(result, "The workers differ in their settings")
        assert result.returncode == 1
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_ctaugment_learns_from_all_replicas(tmp_path):
    flags = ("--strong_view=ctaugment", "--virtual_cpus=2", "--train_steps=4")
    succeeded(run("fixmatch_cifar", *TINY, *SMALL, *flags, f"--model_dir={tmp_path}"))
    reader = tf.train.load_checkpoint(str(tmp_path / "checkpoints"))
    (rates,) = (
        reader.get_tensor(name)
        for name in reader.get_variable_to_shape_map()
        if name.startswith("augmenter/rates")
    )
    assert np.any(rates != 1)


@pytest.mark.parametrize("at_once", [1, 5])
def test_batches_that_replicas_cannot_divide_are_refused(tmp_path, at_once):
    devices = ("--virtual_cpus=3", f"--steps_per_call={at_once}")
    result = run("uda_cifar", *TINY, *SMALL, *devices, f"--model_dir={tmp_path / 'run'}")
    assert_refused(result, "A batch of 8 examples cannot be divided among 3 replicas")


def test_every_example_is_evaluated_once_on_any_devices_in_batches_of_any_size(tmp_path):
    succeeded(run("uda_cifar", *TINY, *SMALL, "--train_steps=10", f"--model_dir={tmp_path}"))
    found = set()
    for devices, size in (("one_device", 500), ("mirrored", 500), ("mirrored", 7)):
        arguments = ["--virtual_cpus=3"] if devices == "mirrored" else []
        for name in ("results.jsonl", "summary.json"):
            (tmp_path / "eval" / name).unlink(missing_ok=True)
        flags = (f"--strategy={devices}", f"--batch_size={size}", *arguments)
        succeeded(run("evaluate", f"--model_dir={tmp_path}", *flags))
        found.add((tmp_path / "eval/results.jsonl").read_text())
    assert len(found) == 1 and '"examples": 445' in found.pop()


@pytest.mark.parametrize(
    ("size", "message"),
    [(2**15, "Step 20 cannot be saved in"), (7500, "cannot be written")],
)
def test_a_full_disk_ends_a_run_with_a_message_and_leaves_nothing_half_written(
    tmp_path, size, message
):
    # Files cannot grow beyond a size, the metrics in the second case; others are smaller.
    arguments = (*TINY, *SMALL, "--notensorboard", "--log_every=1", "--checkpoint_every=20")
    result = subprocess.run(
        [sys.executable, "-m", "experiments.uda_cifar", *arguments, f"--model_dir={tmp_path}"],
        cwd=ROOT,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)),
        capture_output=True,
        text=True,
    )
    assert_refused(result, message, "File too large", "the same command goes on")
    assert not list((tmp_path / "checkpoints").glob("ckpt-*"))
