import concurrent.futures
import csv
import json
import os

import numpy as np
import pytest
from PIL import Image

from tests.experiments import text_encoder
from tests.experiments.processes import assert_refused, run, succeeded

LONG = 'a "long" text\n\tof many, many words ' * 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """20 cats, 21 dogs (one of which is damaged) and 6 test images, of 9 x 12 pixels.

    Copies: cat/00 = cat/01; dog/00 = test cat/0. One name is no UTF-8.
    """
    root = tmp_path_factory.mktemp("data") / "pets"
    images = np.random.default_rng(0).integers(0, 256, (46, 9, 12, 3), dtype=np.uint8)
    images[1] = images[0]
    images[40] = images[20]
    names = [f"train/{'cat' if i < 20 else 'dog'}/{i % 20:02d}.png" for i in range(40)]
    names += [f"test/{'cat' if i < 3 else 'dog'}/{i}.png" for i in range(6)]
    names[5] = os.fsdecode(b"train/cat/05\xff.png")
    for name, image in zip(names, images, strict=True):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    (root / "train/dog/broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    return root


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "reviews.csv"
    lines = [f"review number {i},{'good' if i % 2 else 'bad'}" for i in range(30)]
    lines += ["one that nobody has judged,", ",good"]
    path.write_text("\n".join(["text,label", *lines]) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def results(folder, table, tmp_path_factory):
    """The inspections of all tests, two at a time."""
    tested = tmp_path_factory.mktemp("tested") / "long.csv"
    with tested.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("text", "label"), (LONG, "bad"), ("fine", "good")])
    output = tmp_path_factory.mktemp("output") / "new" / "pets"
    texts_output = output.with_name("texts")
    skip = ["--on_bad_example=skip", "--max_memory_gb=0"]
    arguments = {
        "images": [f"--dataset=folder:{folder}.1@4-6", *skip, f"--output={output}"],
        "texts": [f"--dataset=csv:{table}.1@4-6", "--unlabeled_includes_labeled"],
        "tokens": [
            f"--dataset=csv:{table}.1@4-6",
            "--model=bert",
            f"--encoder={text_encoder.write_encoder(tmp_path_factory.mktemp('encoder') / 'here')}",
            "--sequence_length=5",
            "--strong_view=tf_idf",
            f"--test_data=csv:{tested}",
            f"--output={texts_output}",
        ],
        "vectors": ["--dataset=two_moons.1@10-30"],
        "damaged": [f"--dataset=folder:{folder}.1@4-6"],
        "no_directory": [f"--dataset=csv:{table}.1@4-6", f"--output={table}/here"],
        "empty_output": ["--output="],
    }
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        done = pool.map(lambda given: run("inspect_data", *given), arguments.values())
        results = dict(zip(arguments, done, strict=True))
    return {**results, "output": output, "texts_output": texts_output}


def test_of_images_roles_skipped_files_copies_and_levels_are_printed(results, folder):
    printed = succeeded(results["images"]).stdout
    assert f"folder:{folder}.1@4-6: images of 9 x 12 x 3, read when they are needed" in printed
    assert "40 training examples, 6 test examples, 2 classes" in printed
    rows = [line.split() for line in printed.splitlines()]
    assert ["class", "labeled", "validation", "unlabeled", "test"] in rows
    assert ["cat", "2", "3", "15", "3"] in rows and ["dog", "2", "3", "15", "3"] in rows
    assert "skipped since they could not be read: 1" in printed and "broken.png" in printed
    assert "copies: 4 examples are in 2 groups of exact copies" in printed
    warnings = [line for line in printed.splitlines() if line.startswith("WARNING")]
    assert any("Labels disagree within 1 group" in line and "dog" in line for line in warnings)


def test_of_images_tables_and_pictures_are_written(results, folder):
    succeeded(results["images"])
    output = results["output"]
    assert sorted(path.name for path in output.iterdir()) == [
        "augmentations.png",
        "examples.csv",
        "samples.png",
        "summary.json",
    ]
    for name in ("augmentations.png", "samples.png"):
        with Image.open(output / name) as picture:
            assert picture.format == "PNG" and min(picture.size) > 200

    with (output / "examples.csv").open(errors="surrogateescape", newline="") as file:
        rows = list(csv.DictReader(file))
    train = [row for row in rows if row["role"] != "test"]
    assert [row["example_id"] for row in train] == [str(i) for i in range(40)]
    assert [row["example_id"] for row in rows[40:]] == [str(i) for i in range(6)]
    assert all(row["label"] in row["name"] for row in rows)
    for role, count in {"labeled": 4, "validation": 6, "unlabeled": 30, "test": 6}.items():
        assert sum(row["role"] == role for row in rows) == count
    in_groups = {}
    for row in rows:
        in_groups.setdefault(row["group"], []).append(os.path.basename(row["name"]))
    assert sorted(in_groups) == ["", "0", "1"]
    assert in_groups["0"] == ["00.png", "01.png"] and in_groups["1"] == ["00.png", "0.png"]
    assert os.fsdecode(b"05\xff.png") in in_groups[""]

    summary = json.loads((output / "summary.json").read_text())
    assert summary["dataset"] == f"folder:{folder}.1@4-6" and summary["shape"] == [9, 12, 3]
    assert summary["counts"][1] == {
        "class": "dog",
        "labeled": 2,
        "validation": 3,
        "unlabeled": 15,
        "test": 3,
    }
    assert summary["copies"]["groups"] == 2 and summary["copies"]["examples"] == 4
    assert summary["copies"]["groups_with_different_labels"] == 1
    assert len(summary["skipped"]) == 1 and len(summary["warnings"]) >= 1
    # 39 different images of random bytes.
    np.testing.assert_allclose(summary["values"]["mean"], 127.5, atol=5)
    np.testing.assert_allclose(summary["values"]["std"], 73.9, atol=3)
    assert max(summary["values"]["minimum"]) <= 2 and min(summary["values"]["maximum"]) >= 253


def test_of_texts_lengths_and_some_of_each_class_are_printed(results):
    printed = succeeded(results["texts"]).stdout
    rows = [line.split() for line in printed.splitlines()]
    assert ["letters", "0", "16", "16", "26"] in rows and ["words", "0", "3", "3", "5"] in rows
    assert "empty texts: 1" in printed
    assert "unknown: one that nobody has judged" in printed
    assert sum(line.startswith(("good: ", "bad: ")) for line in printed.splitlines()) == 4
    assert "labeled and unlabeled 4" in printed
    # That an example has two roles by a flag makes it no copy.
    assert "no two examples are the same" in printed and "wrote" not in printed


def test_of_texts_and_a_model_for_them_what_it_reads_is_printed(results):
    pytest.importorskip("tensorflow_text")
    printed = succeeded(results["tokens"]).stdout
    # "review" and "number" are no words of the vocabulary, nor is a number: one [UNK] each.
    assert (
        "tokens of a text: median 5, at most 7; 3.1% are cut to 5, their right end kept" in printed
    )
    lines = printed.splitlines()
    shown = [place for place, line in enumerate(lines) if line.startswith("example ")]
    assert len(shown) == 3
    for place in shown:
        assert lines[place + 1].startswith("  weak: ") and lines[place + 2].startswith("  strong: ")


def test_of_texts_the_table_of_examples_has_how_each_begins(results):
    pytest.importorskip("tensorflow_text")
    succeeded(results["tokens"])
    with (results["texts_output"] / "examples.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["text"] for row in rows[:30]] == [f"review number {i}" for i in range(30)]
    assert rows[31]["text"] == "" and rows[31]["name"] == "line 33"
    long, fine = rows[32:]
    assert long["text"] == LONG.replace("\n\t", " ")[:200] and fine["text"] == "fine"
    assert [(row["example_id"], row["role"]) for row in (long, fine)] == [
        ("0", "test"),
        ("1", "test"),
    ]


def test_of_vectors_the_range_of_each_column_is_printed(results):
    printed = succeeded(results["vectors"]).stdout
    assert "two_moons.1@10-30: vectors of 2, in memory" in printed
    rows = [line.split() for line in printed.splitlines()]
    assert ["column", "minimum", "maximum", "mean", "std"] in rows


def test_what_cannot_be_is_refused_in_one_line(results):
    assert_refused(results["damaged"], "broken.png")
    assert_refused(results["no_directory"], "reviews.csv/here cannot be written")
    assert_refused(results["empty_output"], "name a directory")
