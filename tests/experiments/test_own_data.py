"""Data of a user's own through the binaries, as processes."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image

from ssl_influence.data import inputs, splits
from tests.experiments.processes import TINY, assert_refused, run, succeeded

CLASSES = ("cats", "zebra", "Äpfel und Birnen")  # sorted by their bytes
SHORT = [flag for flag in TINY if not flag.startswith(("--dataset", "--train_steps"))] + [
    "--train_steps=12",
    "--depth=10",
    "--inner_steps=1",
    "--weight_warmup_steps=2",
    "--validation_batch_size=6",
]


def pictures(folder, count=14):
    """A folder of pictures by class, of two colors and noise, beside others without a class."""
    random = np.random.default_rng(0)
    for c, name in enumerate((*CLASSES, "")):
        place = folder / ("train" if name else "unlabeled") / name
        place.mkdir(parents=True)
        for number in range(count):
            image = random.integers(0, 60, [16, 16, 3]) + 60 * np.eye(3, dtype=int)[c % 3]
            Image.fromarray(image.astype(np.uint8)).save(place / f"{number}.png")
    return f"folder:{folder}.1@9-6"


def train(model_dir, dataset, *flags):
    return run("uda_cifar", *SHORT, f"--dataset={dataset}", f"--model_dir={model_dir}", *flags)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own data")
    dataset = pictures(folder / "my.pictures", 14)
    result = succeeded(train(folder / "run", dataset, "--max_memory_gb=0"))
    return folder, dataset, result


def test_a_folder_of_pictures_trains_without_being_held_in_memory(trained):
    folder, dataset, result = trained
    assert "Äpfel und Birnen" in result.stdout
    counts = [line.split() for line in result.stdout.splitlines() if line.startswith("cats")]
    assert counts == [["cats", "3", "2", "9", "0"]]
    spec = inputs.read(folder / "run/inputs.json")
    assert spec.class_names == CLASSES and spec.shape == (16, 16, 3)
    manifest = splits.read(folder / "run/split.json")
    assert manifest["class_names"] == list(CLASSES) and manifest["dataset"] == dataset


def test_without_a_test_part_runs_are_judged_on_validation_examples_alone(trained):
    folder, _, _ = trained
    succeeded(run("evaluate", f"--model_dir={folder / 'run'}"))
    summary = json.loads((folder / "run/eval/summary.json").read_text())
    assert list(summary) == ["validation"] and summary["validation"]["examples"] == 6


def test_a_run_goes_on_where_its_data_were_moved_to_and_not_on_other_data(trained):
    folder, _, _ = trained
    moved = folder / "elsewhere"
    shutil.copytree(folder / "my.pictures", moved)
    there = f"folder:{moved}.1@9-6"
    shutil.copytree(folder / "run", folder / "moved")
    evaluated = run("evaluate", f"--model_dir={folder / 'moved'}", f"--dataset={there}")
    assert "validation" in succeeded(evaluated).stdout
    result = succeeded(train(folder / "moved", there, "--max_memory_gb=0"))
    assert "Already at step 12" in result.stderr
    (moved / "unlabeled/3.png").unlink()
    other = train(folder / "moved", there, "--max_memory_gb=0")
    assert_refused(other, "the inputs of the data have changed")


def test_weights_learned_by_one_model_are_those_another_starts_with(trained):
    folder, dataset, _ = trained
    flags = [
        f"--weights_from={folder / 'run/weights/weights-12.csv'}",
        "--model=mlp",
        "--weighting=fixed",
        "--max_memory_gb=0",
        "--checkpoint_every=12",
    ]
    result = succeeded(train(folder / "other", dataset, *flags))
    assert "of 41 unlabeled examples start with their weights" in result.stderr
    tables = [
        (folder / name / "weights/weights-12.csv").read_text().splitlines()
        for name in ("run", "other")
    ]
    learned, kept = ([row.split(",")[:2] for row in table[1:]] for table in tables)
    assert kept == learned and len({weight for _, weight in kept}) > 1

    elsewhere = train(folder / "third", "digits.1@20-40", flags[0])
    assert_refused(elsewhere, "weights_from=", dataset, "digits.1@20-40")
    assert not (folder / "third/checkpoints").exists()


def test_a_picture_that_turns_out_damaged_ends_the_run_with_its_name_or_is_skipped(tmp_path):
    dataset = pictures(tmp_path / "pictures", 8)
    damaged = tmp_path / "pictures/unlabeled/3.png"
    damaged.write_bytes(damaged.read_bytes()[:300])
    strict = train(tmp_path / "strict", dataset, "--max_memory_gb=0")
    assert_refused(strict, "unlabeled/3.png")
    result = succeeded(train(tmp_path / "skip", dataset, "--on_bad_example=skip"))
    assert (
        "Left out since they could not be read: 1." in result.stderr
        and "unlabeled/3.png" in result.stderr
    )
    split = splits.read(tmp_path / "skip/split.json")
    assert sum(len(split[role]) for role in splits.ROLES) == 31


def test_texts_are_refused_by_a_model_that_does_not_take_them(tmp_path):
    (tmp_path / "reviews.tsv").write_text("text\tlabel\n" + "good\tyes\nbad\tno\n" * 9)
    result = train(tmp_path / "run", f"tsv:{tmp_path / 'reviews.tsv'}.1@4-4")
    assert_refused(result, "holds texts", "model=bert")
    assert not (tmp_path / "run").exists()
