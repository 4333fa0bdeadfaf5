"""Runs as processes: what they leave, and that stopping them changes nothing."""

import concurrent.futures
import json
import shutil
import signal
import time

import numpy as np
import pytest
import tensorflow as tf

from ssl_influence import metrics
from tests.experiments.processes import (
    TINY,
    assert_refused,
    assert_same_run,
    contents,
    finish,
    run,
    start,
    stopped,
    succeeded,
    train,
)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """A run that nothing stopped, and what it printed."""
    model_dir = tmp_path_factory.mktemp("whole") / "run"
    return model_dir, succeeded(train(model_dir, fresh=True))


def test_run_leaves_the_promised_files_and_prints_its_split(whole_run):
    model_dir, result = whole_run
    for name in ("labeled", "validation", "unlabeled"):
        assert name in result.stdout
    assert json.loads((model_dir / "split.json").read_text())
    assert "--inner_steps=3\n" in (model_dir / "flags.txt").read_text()
    rows = metrics.read_metrics(model_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == [6, 8, 12, 16, 18, 24, 30, 32, 36, 40]
    wanted = {"train/loss_supervised", "train/mask_rate", "weights/mean", "validation/error"}
    assert wanted <= rows[-1].keys()
    assert {p.name for p in (model_dir / "weights").iterdir()} == {
        f"weights-{step}.csv" for step in (10, 20, 30, 40)
    }
    weights = np.loadtxt(model_dir / "weights/weights-40.csv", delimiter=",", skiprows=1)
    assert len(weights) == 1352 - 20 - 40  # three quarters of 1,797 digits, less the other roles
    moved = weights[weights[:, 2] > 0]
    assert (
        len(moved) > 50 and np.all(moved[:, 1] != 1) and np.all(weights[weights[:, 2] == 0, 1] == 1)
    )


def test_sigterm_saves_exits_cleanly_and_the_same_command_resumes(whole_run, tmp_path):
    process = start("-m", "experiments.uda_cifar", *TINY, f"--model_dir={tmp_path}")
    wait_for(lambda: metrics.read_metrics(tmp_path / "metrics.jsonl"), process)
    process.send_signal(signal.SIGTERM)
    result = stopped(finish(process))
    last = tf.train.latest_checkpoint(str(tmp_path / "checkpoints"))
    assert f"Stopped at step {last.rsplit('-')[-1]} and saved" in result.stderr
    assert "Resuming from step" in succeeded(train(tmp_path)).stderr
    assert_same_run(whole_run[0], tmp_path)


def test_sigkill_twice_loses_nothing(whole_run, tmp_path):
    directory = f"--model_dir={tmp_path}"
    # The second falls while a checkpoint is written.
    for after in ("ckpt-10.index", "ckpt-20.data-00000-of-00001"):
        process = start("-m", "experiments.uda_cifar", *TINY, directory, fresh=True)
        wait_for((tmp_path / "checkpoints" / after).exists, process)
        process.kill()
        assert finish(process).returncode == -signal.SIGKILL
    assert "Resuming from step" in succeeded(train(tmp_path)).stderr
    assert_same_run(whole_run[0], tmp_path)


def test_a_directory_takes_one_process_at_a_time(tmp_path):
    process = start("-m", "experiments.uda_cifar", *TINY, f"--model_dir={tmp_path}", fresh=True)
    wait_for((tmp_path / "metrics.jsonl").exists, process)
    second = start("-m", "experiments.uda_cifar", *TINY, f"--model_dir={tmp_path}", fresh=True)
    process.send_signal(signal.SIGSTOP)  # the lock is held however long the second takes
    assert_refused(finish(second), "Another process trains in")
    process.kill()
    process.send_signal(signal.SIGCONT)
    finish(process)


def wait_for(condition, process, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[1][-3000:]
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.005)


def test_one_seed_gives_one_run_and_another_seed_another(whole_run, tmp_path):
    flagfile = whole_run[0] / "flags.txt"
    same = f"--model_dir={tmp_path / 'same'}"
    succeeded(run("uda_cifar", f"--flagfile={flagfile}", same, "--steps_per_call=7"))
    succeeded(train(tmp_path / "other", "--seed=2"))
    assert_same_run(whole_run[0], tmp_path / "same")
    a, b = contents(whole_run[0]), contents(tmp_path / "other")
    assert a[1] != b[1] and a[2] != b[2]
    kernels = [name for name in a[0] if name.endswith("kernel/.ATTRIBUTES/VARIABLE_VALUE")]
    assert kernels and all(np.any(a[0][name] != b[0][name]) for name in kernels)


def test_evaluating_and_drawing_a_finished_run(whole_run, tmp_path):
    model_dir = tmp_path / "run"
    shutil.copytree(whole_run[0], model_dir)
    result = succeeded(run("evaluate", f"--model_dir={model_dir}", "--batch_size=77"))
    rows = [
        json.loads(line) for line in (model_dir / "eval/results.jsonl").read_text().splitlines()
    ]
    assert {(row["step"], row["split"]) for row in rows} == {
        (step, split) for step in (10, 20, 30, 40) for split in ("test", "validation")
    }
    assert {row["examples"] for row in rows} == {445, 40}
    at_40 = next(r for r in rows if r["step"] == 40 and r["split"] == "validation")
    logged = metrics.read_metrics(model_dir / "metrics.jsonl")[-1]
    assert at_40["raw_error"] == pytest.approx(logged["validation/error"])
    assert at_40["ema_error"] == pytest.approx(logged["validation/ema_error"])
    summary = json.loads((model_dir / "eval/summary.json").read_text())
    assert f"{summary['test']['raw']['last']['error']:.2f}" in result.stdout
    succeeded(run("draw", f"--model_dir={model_dir}"))
    for name in ("curve.png", "weights.png"):
        assert (model_dir / name).read_bytes().startswith(b"\x89PNG")


def test_running_a_finished_run_again_changes_nothing(whole_run, tmp_path):
    model_dir = tmp_path / "run"
    shutil.copytree(whole_run[0], model_dir)
    succeeded(train(model_dir))
    assert_same_run(whole_run[0], model_dir)


def test_resuming_with_other_settings_is_refused_and_nothing_is_touched(whole_run, tmp_path):
    model_dir = tmp_path / "run"
    shutil.copytree(whole_run[0], model_dir)
    before = {p: p.read_bytes() for p in model_dir.rglob("*") if p.is_file()}
    cases = {
        "--dataset=digits.2@20-40": "--dataset=digits.1@20-40 there, digits.2@20-40 now",
        "--train_steps=80": "--train_steps=40 there, 80 now",
    }
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        results = pool.map(lambda flag: train(model_dir, flag), cases)
        for result, message in zip(results, cases.values(), strict=True):
            assert_refused(result, message, "another --model_dir")
    assert {p: p.read_bytes() for p in model_dir.rglob("*") if p.is_file()} == before
