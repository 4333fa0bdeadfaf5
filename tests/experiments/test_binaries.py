"""The binaries as processes, the way a user runs them."""

import concurrent.futures
import dataclasses
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow as tf
from absl import flags as absl_flags

from experiments import flags as shared_flags
from ssl_influence import config as config_lib, metrics

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


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process, timeout=300):
    out, err = process.communicate(timeout=timeout)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def run(module, *arguments):
    return finish(start("-m", f"experiments.{module}", *arguments))


def succeeded(result):
    assert result.returncode == 0, result.stderr[-3000:]
    return result


def train(model_dir, *arguments):
    return run("uda_cifar", *TINY, *arguments, f"--model_dir={model_dir}")


def contents(model_dir):
    """All that a finished run holds, timings aside."""
    reader = tf.train.load_checkpoint(str(model_dir / "checkpoints"))
    # How often a checkpoint was written is no part of the run.
    names = sorted(n for n in reader.get_variable_to_shape_map() if "save_counter" not in n)
    tensors = {name: np.array(reader.get_tensor(name)) for name in names}
    rows = [{**row, "wall_s": 0} for row in metrics.read_metrics(model_dir / "metrics.jsonl")]
    return tensors, rows, (model_dir / "weights" / "weights-40.csv").read_text()


def assert_same_run(a, b):
    tensors, others = contents(a)[0], contents(b)[0]
    assert tensors.keys() == others.keys()
    for name in tensors:
        assert tensors[name].tobytes() == others[name].tobytes(), name
    assert contents(a)[1:] == contents(b)[1:]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """A run that nothing stopped, and what it printed."""
    model_dir = tmp_path_factory.mktemp("whole") / "run"
    return model_dir, succeeded(train(model_dir))


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
    stopped = finish(process)
    succeeded(stopped)
    assert "Stopped at step" in stopped.stderr
    last = tf.train.latest_checkpoint(str(tmp_path / "checkpoints"))
    assert f"Stopped at step {last.rsplit('-')[-1]} and saved" in stopped.stderr
    assert "Resuming from step" in succeeded(train(tmp_path)).stderr
    assert_same_run(whole_run[0], tmp_path)


@pytest.mark.parametrize("seed", [0, 1])
def test_sigkill_at_any_moment_loses_nothing(whole_run, tmp_path, seed):
    process = start("-m", "experiments.uda_cifar", *TINY, f"--model_dir={tmp_path}")
    wait_for(lambda: (tmp_path / "metrics.jsonl").exists(), process)
    time.sleep(random.Random(seed).uniform(0, 6))
    process.kill()
    assert finish(process).returncode in (-signal.SIGKILL, 0)
    succeeded(train(tmp_path))
    assert_same_run(whole_run[0], tmp_path)


def wait_for(condition, process, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[1][-3000:]
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.02)


def test_one_seed_gives_one_run_and_another_seed_another(whole_run, tmp_path):
    succeeded(train(tmp_path / "same"))
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


def test_flags_txt_reruns_the_run(whole_run, tmp_path):
    flagfile = whole_run[0] / "flags.txt"
    succeeded(run("uda_cifar", f"--flagfile={flagfile}", f"--model_dir={tmp_path}"))
    assert_same_run(whole_run[0], tmp_path)


def test_resuming_with_other_settings_is_refused_and_nothing_is_touched(whole_run, tmp_path):
    model_dir = tmp_path / "run"
    shutil.copytree(whole_run[0], model_dir)
    before = {p: p.read_bytes() for p in model_dir.rglob("*") if p.is_file()}
    cases = {
        "--dataset=digits.2@20-40": "--dataset=digits.1@20-40 there, digits.2@20-40 now",
        "--seed=5": "--seed=1 there, 5 now",
        "--damping=0.5": "--damping=0.01 there, 0.5 now",
        "--train_steps=80": "--train_steps=40 there, 80 now",
    }
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        results = pool.map(lambda flag: train(model_dir, flag), cases)
        for result, message in zip(results, cases.values(), strict=True):
            assert_refused(result, message, "another --model_dir")
    assert {p: p.read_bytes() for p in model_dir.rglob("*") if p.is_file()} == before


def assert_refused(result, *parts):
    """Exit code not 0 and one clear line, no traceback."""
    assert result.returncode != 0
    assert "Traceback" not in result.stderr
    for part in parts:
        assert part in result.stderr
    lines = result.stderr.splitlines()
    errors = [line for line in lines if line.startswith(("error: ", "FATAL"))]
    assert len(errors) == 1, result.stderr


WRONG = {
    "unknown_dataset": (["--dataset=digitz.1@20-40"], "digitz"),
    "unparsable_dataset": (["--dataset=digits.1@20"], "digits.1@20"),
    "split_larger_than_the_data": (["--dataset=digits.1@1300-100"], "1352"),
    "class_without_a_label": (["--dataset=digits.1@7-40"], "7 labeled examples for 10 classes"),
    "value_out_of_range": (["--damping=-1"], "damping=-1"),
    "value_not_a_number": (["--inner_steps=often"], "inner_steps"),
    "unknown_choice": (["--weighting=both"], "weighting"),
    "impossible_depth": (["--depth=29"], "depth=29"),
    "initial_weight_above_the_bound": (["--weight_max=0.5"], "weight_init=1.0"),
    "unknown_flag": (["--inner_step=3"], "inner_step"),
    "stray_argument": (["digits"], "'digits'"),
}


def test_wrong_values_end_with_one_line_and_leave_nothing(tmp_path):
    def attempt(item):
        name, (flags, _) = item
        return train(tmp_path / name, *flags)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for (name, (_, part)), result in zip(
            WRONG.items(), pool.map(attempt, WRONG.items()), strict=True
        ):
            assert_refused(result, part)
            assert not (tmp_path / name).exists(), name


def test_wrong_directories_end_with_one_line(tmp_path):
    file = tmp_path / "file"
    file.write_text("a user's notes")
    assert_refused(train(file / "run"), str(file / "run"), "cannot be written")
    assert_refused(run("uda_cifar", *TINY), "--model_dir")
    assert_refused(run("evaluate", f"--model_dir={tmp_path / 'none'}"), "holds no flags.txt")
    assert_refused(run("draw", f"--model_dir={tmp_path}"), "holds no metrics.jsonl")
    assert file.read_text() == "a user's notes"


def test_data_that_cannot_be_fetched_names_dataset_and_remedy(tmp_path):
    result = run(
        "uda_cifar",
        "--dataset=cifar10.1@250-1024",
        f"--data_dir={tmp_path / 'data'}",
        f"--model_dir={tmp_path / 'run'}",
    )
    assert_refused(result, "cifar10", str(tmp_path / "data"))
    assert not (tmp_path / "run").exists()


def test_non_finite_training_stops_with_the_term_and_step(tmp_path):
    result = train(tmp_path, "--learning_rate=1e30", "--log_every=1")
    assert_refused(result, "at step", "learning_rate")
    assert not tf.train.latest_checkpoint(str(tmp_path / "checkpoints"))


def test_help_shows_the_docstring_and_the_flags():
    for module in ("uda_cifar", "synthetic", "compare", "evaluate", "draw"):
        result = run(module, "--help")
        assert f"python -m experiments.{module}" in result.stdout, result.stdout[-500:]
        assert "--model_dir" in result.stdout
        if module in ("uda_cifar", "synthetic", "compare"):
            assert "--inner_steps" in result.stdout and "--weighting" in result.stdout


@pytest.mark.parametrize("dataset", ["two_moons", "circles", "linear"])
def test_synthetic_prints_the_errors_of_each_row(tmp_path, dataset):
    result = succeeded(
        run(
            "synthetic",
            f"--dataset={dataset}",
            f"--model_dir={tmp_path}",
            "--train_steps=30",
            "--eval_every=30",
            "--checkpoint_every=30",
        )
    )
    lines = result.stdout.splitlines()
    table = lines[next(i for i, line in enumerate(lines) if line.startswith("test error")) + 1 :]
    assert [line.split()[0] for line in table] == ["supervised", "fixed", "per_example"]
    for line in table:
        assert all(0 <= float(cell) <= 60 for cell in line.split()[1:])
    counts = [
        np.loadtxt(tmp_path / row / "weights/weights-30.csv", delimiter=",", skiprows=1)
        for row in ("fixed", "per_example")
    ]
    assert len(counts[0]) == 1000
    assert np.all(counts[0][:, 2] == 0) and np.all(counts[1][:, 2] > 0)


def test_digits_compare_prints_the_errors_of_each_row(tmp_path):
    tiny = [flag for flag in TINY if not flag.startswith("--train_steps")]
    result = succeeded(run("compare", *tiny, "--train_steps=10", f"--model_dir={tmp_path}"))
    table = result.stdout.splitlines()[-3:]
    assert [line.split()[0] for line in table] == ["supervised", "fixed", "per_example"]
    assert_refused(run("compare", *tiny, "--rows=ours", f"--model_dir={tmp_path}"), "rows=ours")


@pytest.mark.parametrize("dataset", ["cifar10", "svhn"])
def test_paper_flagfile_runs_end_to_end(tmp_path, dataset):
    result = finish(
        start(
            "-m",
            "tests.experiments.mock_tfds",
            "1500",
            "experiments.uda_cifar",
            f"--flagfile=experiments/flagfiles/paper/uda_{dataset}_250.flags",
            f"--model_dir={tmp_path}",
            "--labeled_batch_size=8",
            "--unlabeled_batch_size=16",
            "--validation_batch_size=16",
            "--train_steps=3",
            "--weight_warmup_steps=0",
            "--inner_steps=1",
            "--learning_rate_warmup_steps=1",
        )
    )
    succeeded(result)
    row = metrics.read_metrics(tmp_path / "metrics.jsonl")[-1]
    assert row["step"] == 3 and np.isfinite(row["validation/error"])
    weights = np.loadtxt(tmp_path / "weights/weights-3.csv", delimiter=",", skiprows=1)
    assert len(weights) == 1500 - 250 - 1024
    assert np.all(weights[weights[:, 2] == 0, 1] == 5)  # the paper's initial weight for 250 labels


def test_every_flag_has_a_description_and_every_setting_a_flag():
    values = absl_flags.FlagValues()
    shared_flags.define(flag_values=values)
    config = config_lib.Config()
    assert sorted((concern, field) for _, concern, field, _ in shared_flags._TABLE) == sorted(
        (concern.name, field.name)
        for concern in dataclasses.fields(config)
        for field in dataclasses.fields(getattr(config, concern.name))
    )
    assert all(len(values[name].help) > 10 for name in values)


def test_flagfiles_parse_and_round_trip(tmp_path):
    for path in sorted((ROOT / "experiments/flagfiles").rglob("*.flags")):
        config = read_in_root(path)
        copy = tmp_path / "flags.txt"
        copy.write_text(shared_flags.to_flagfile(config, "x"))
        assert shared_flags.read_flagfile(copy) == config


def read_in_root(path):
    """Reads a flagfile from the root of the checkout: flagfiles name each other from there."""
    before = os.getcwd()
    os.chdir(ROOT)
    try:
        return shared_flags.read_flagfile(path)
    finally:
        os.chdir(before)
