"""The binaries as processes, the way a user runs them, wrong inputs included."""

import concurrent.futures
import csv
import dataclasses
import os

import numpy as np
import pytest
import tensorflow as tf
from absl import flags as absl_flags

from experiments import flags as shared_flags
from ssl_influence import config as config_lib, metrics
from tests.experiments.processes import (
    ROOT,
    TINY,
    assert_refused,
    finish,
    run,
    start,
    succeeded,
    train,
)

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
    "pattern_in_the_name": ([], "which TensorFlow takes for a pattern", "run[1]"),
    "shift_larger_than_the_image": (["--shift=9"], "shift=9"),
    "no_validation": (["--dataset=digits.1@20-0"], "no validation example"),
    "setting_of_another_method": (["--method=supervised"], "confidence=0.2 has no effect"),
    "setting_of_another_view": (["--ctaugment_depth=3"], "use strong_view=ctaugment"),
    "hessian_that_would_not_fit": (["--influence_params=all"], "would form a Hessian of"),
    "count_beyond_int32": (["--train_steps=99999999999"], "train_steps=99999999999"),
    "empty_directory": (["--model_dir="], "name a directory"),
    "stray_argument": (["digits"], "'digits'"),
}


def test_wrong_values_end_with_one_line_and_leave_nothing(tmp_path):
    def attempt(item):
        name, (flags, _, *directory) = item
        return train(tmp_path / (directory or [name])[0], *flags)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for (name, (_, part, *directory)), result in zip(
            WRONG.items(), pool.map(attempt, WRONG.items()), strict=True
        ):
            assert_refused(result, part)
            assert not (tmp_path / (directory or [name])[0]).exists(), name


def test_other_solvers_variables_and_optimizers_train(tmp_path):
    flags = ["--inner_steps=2", "--weight_warmup_steps=0", "--train_steps=6", "--weight_lr=0.1"]
    flags += ["--influence_params=last_block", "--inverse_hessian=lissa", "--lissa_iterations=3"]
    flags += ["--lissa_scale=100"]
    result = succeeded(train(tmp_path, *flags, "--weight_optimizer=adam"))
    assert f"Curves: tensorboard --logdir={tmp_path}\n" in result.stdout
    with (tmp_path / "weights" / "weights-6.csv").open() as file:
        weights = [float(row["weight"]) for row in csv.DictReader(file)]
    assert min(weights) < 0.95 and max(weights) > 1.05


def test_wrong_directories_end_with_one_line(tmp_path):
    file = tmp_path / "file"
    file.write_text("a user's notes")
    assert_refused(train(file / "run"), str(file / "run"), "cannot be written")
    assert_refused(run("uda_cifar", *TINY), "--model_dir")
    assert_refused(run("evaluate", f"--model_dir={tmp_path / 'none'}"), "holds no flags.txt")
    assert_refused(run("draw", f"--model_dir={tmp_path}"), "holds no metrics.jsonl")
    assert file.read_text() == "a user's notes"


def test_data_that_cannot_be_fetched_names_dataset_and_remedy(tmp_path):
    (tmp_path / "file").write_text("")  # where no dataset can be written, with a network or without
    result = run(
        "uda_cifar",
        "--dataset=cifar10.1@250-1024",
        f"--data_dir={tmp_path / 'file' / 'data'}",
        f"--model_dir={tmp_path / 'run'}",
    )
    assert_refused(result, "cifar10", str(tmp_path / "file" / "data"), "tfds build cifar10")
    assert not (tmp_path / "run").exists()


def test_non_finite_training_stops_with_the_term_and_step(tmp_path):
    result = train(tmp_path, "--learning_rate=1e30", "--log_every=1", "--model=mlp")
    assert_refused(result, "at step", "learning_rate")
    assert not tf.train.latest_checkpoint(str(tmp_path / "checkpoints"))


def test_help_shows_the_docstring_and_the_flags():
    for module in ("uda_cifar", "synthetic", "compare", "evaluate", "draw"):
        result = run(module, "--help", fresh=True)
        assert f"python -m experiments.{module}" in result.stdout, result.stdout[-500:]
        assert "--model_dir" in result.stdout
        if module in ("uda_cifar", "synthetic", "compare"):
            assert "--inner_steps" in result.stdout and "--weighting" in result.stdout


# One of them with the paper's WRN-28-2, the other shallower, for time.
@pytest.mark.parametrize("dataset, depth", [("cifar10", 28), ("svhn", 10)])
def test_paper_flagfile_runs_end_to_end(tmp_path, dataset, depth):
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
            f"--depth={depth}",
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


def test_a_resume_may_change_only_what_leaves_the_run_the_same(tmp_path):
    config = config_lib.Config().replace(optimizer={"schedule": "constant"})
    path = tmp_path / "flags.txt"
    path.write_text(shared_flags.to_flagfile(config, "x"))
    for free in (
        {"data": {"data_dir": "/elsewhere"}},
        {"train": {"keep_checkpoints": 3, "checkpoint_every": 7}},
        {"train": {"train_steps": config.train.train_steps + 1}},
    ):
        shared_flags.check_resumable(path, config.replace(**free))
    for name, binding in (
        ("seed", {"train": {"seed": 5}}),
        ("train_steps", {"train": {"train_steps": config.train.train_steps - 1}}),
        ("damping", {"weights": {"damping": 0.5}}),
        ("weight_max", {"weights": {"maximum": 2.0}}),
        ("flip", {"augment": {"flip": True}}),
    ):
        with pytest.raises(config_lib.ConfigError, match=f"--{name}=.* there, .* now"):
            shared_flags.check_resumable(path, config.replace(**binding))
    path.write_text(path.read_text() + "surplus\n")
    with pytest.raises(config_lib.ConfigError, match="'surplus' is not a --flag=value"):
        shared_flags.check_resumable(path, config)


def test_flagfiles_parse_and_round_trip(tmp_path):
    for path in sorted((ROOT / "experiments/flagfiles").rglob("*.flags")):
        if path.parent.name == "studies":  # of comparisons, see test_comparison.py
            continue
        config = read_in_root(path)
        copy = tmp_path / "flags.txt"
        copy.write_text(shared_flags.to_flagfile(config, "x"))
        again = shared_flags.read_flagfile(copy)
        assert again.method.settings() == config.method.settings()
        assert dataclasses.replace(again, method=config.method) == config


def read_in_root(path):
    """Reads a flagfile from the root of the checkout: flagfiles name each other from there."""
    before = os.getcwd()
    os.chdir(ROOT)
    try:
        return shared_flags.read_flagfile(path)
    finally:
        os.chdir(before)


def test_what_a_trace_finds_wrong_is_one_line_and_its_advice_can_be_followed(tmp_path):
    flags = ["--dataset=two_moons.1@10-30", "--model=mlp", "--method=remixmatch"]
    flags += ["--augmentations=1", "--train_steps=2", f"--model_dir={tmp_path}"]
    refused = run("uda_cifar", *flags)
    assert_refused(refused, "use rotation_weight=0")
    (line,) = [line for line in refused.stderr.splitlines() if "rotation_weight" in line]
    assert line.startswith("error: Inputs of shape (2,)")
    succeeded(run("uda_cifar", *flags, "--rotation_weight=0"))
