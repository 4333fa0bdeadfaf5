"""The HTML report as a user asks for it."""

import csv
import json
import shutil

import numpy as np
import pytest

from experiments import flags as shared_flags, weights_report
from ssl_influence import checkpoints
from ssl_influence.serving import classifier as classifier_lib
from tests.experiments.processes import assert_refused, run, succeeded, train
from tests.reporting.page_reader import Reader


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "trained"
    succeeded(train(folder, "--known_classes=0,1,2,3,4,5", "--weight_lr=0.1"))
    return folder


@pytest.fixture
def copy(trained, tmp_path):
    """The run, for tests that change it."""
    return shutil.copytree(trained, tmp_path / "run")


def gathered(model_dir, step=None, weights="ema"):
    config = shared_flags.read_flagfile(model_dir / "flags.txt")
    return weights_report.gather(model_dir, config, step, weights)


def test_the_binary_writes_one_page_and_the_suspects_as_a_table(trained, tmp_path):
    html, table = tmp_path / "new" / "report.html", tmp_path / "suspects.csv"
    result = run("report", f"--model_dir={trained}", f"--html={html}", f"--suspects_csv={table}")
    succeeded(result)
    assert f"wrote {html}" in result.stdout and f"wrote {table}" in result.stdout
    reader = Reader(html.read_text(encoding="utf-8"))
    assert "Example weights of trained" in reader.words
    assert "digits.1@20-40, uda with per-example weights, wide_resnet, 40 steps" in reader.words
    held = json.loads(reader.scripts["data"])
    assert held["suspects"]["csv"] == table.read_text(encoding="utf-8")
    with table.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    ids, weight, updates = checkpoints.read_weights(trained / "weights" / "weights-40.csv")
    by_id = dict(zip(ids.tolist(), zip(weight, updates, strict=True), strict=True))
    assert rows
    for row in rows:
        assert (float(row["weight"]), int(row["updates"])) == by_id[int(row["example_id"])]
    assert list(html.parent.iterdir()) == [html]


def test_what_is_gathered_is_of_the_newest_checkpoint_and_the_pool(trained):
    found = gathered(trained)
    assert found.weights.step == found.predictions.step == 40
    assert list(found.weights.history) == [10, 20, 30, 40]
    assert found.learned
    assert found.pool.stranger.any() and (found.pool.label >= 0).any()
    assert not (found.pool.stranger & (found.pool.label >= 0)).any()
    config = shared_flags.read_flagfile(trained / "flags.txt")
    model = classifier_lib.load(trained, config, weights="ema")
    inputs = found.pool.inputs[found.weights.example_id[-7:]]
    probabilities, predicted = (x.numpy() for x in model.predict(inputs))
    np.testing.assert_array_equal(found.predictions.pseudo_label[-7:], predicted)
    np.testing.assert_allclose(
        found.predictions.confidence[-7:], probabilities.max(axis=1), atol=1e-6
    )


def test_an_older_checkpoint_leaves_out_what_came_later(trained):
    found = gathered(trained, step=20, weights="raw")
    assert found.weights.step == found.predictions.step == 20
    assert found.predictions.weights == "raw"
    assert list(found.weights.history) == [10, 20]
    assert {row["step"] for row in found.metrics} == {6, 8, 12, 16, 18}


def test_a_run_in_training_is_reported_as_far_as_it_came(copy):
    # The checkpoint of step 40 is there, and its weights are not yet.
    (copy / "weights" / "weights-40.csv").unlink()
    found = gathered(copy)
    assert found.weights.step == found.predictions.step == 30
    shutil.rmtree(copy / "checkpoints")
    assert gathered(copy).predictions is None
    shutil.rmtree(copy / "weights")
    found = gathered(copy)
    assert found.weights is found.pool is None and found.metrics


def test_evaluations_are_taken_from_this_run_alone(copy):
    (copy / "eval").mkdir()
    shutil.copy(copy / "flags.txt", copy / "eval")
    row = {"step": 40, "split": "test", "examples": 9, "raw_error": 1.0, "ema_error": 2.0}
    (copy / "eval" / "results.jsonl").write_text(json.dumps(row) + "\n")
    assert gathered(copy).evaluation == [row]
    flagfile = copy / "eval" / "flags.txt"
    flagfile.write_text(flagfile.read_text().replace("--seed=1\n", "--seed=2\n"))
    assert gathered(copy).evaluation == []


def test_data_that_were_moved_can_be_named_and_other_data_are_refused(copy, tmp_path):
    flagfile = copy / "flags.txt"
    flagfile.write_text(flagfile.read_text().replace("=digits.1@", "=folder:gone.1@"))
    html = tmp_path / "report.html"
    named = [f"--model_dir={copy}", f"--html={html}"]
    assert_refused(run("report", *named), "folder:gone")
    assert not html.exists()
    assert_refused(run("report", *named, "--dataset=digits.2@20-40"), "another split")
    succeeded(run("report", *named, "--dataset=digits.1@20-40", "--max_examples=50"))
    assert "for 50 of" in Reader(html.read_text(encoding="utf-8")).words


@pytest.mark.parametrize(
    ("changed", "parts"),
    [
        (["--model_dir={empty}"], ["flags.txt", "name the directory of a run"]),
        (["--html={file}/report.html"], ["cannot be", "name another"]),
        (["--html={empty}"], ["is a folder"]),
        (["--html="], ["name a file"]),
        (["--html=gs://bucket/report.html"], ["--html=gs://bucket", "name a local file"]),
        (["--suspects_csv={empty}/../report.html"], ["--suspects_csv", "the page itself"]),
        (["--suspects_csv={file}/suspects.csv"], ["{file} cannot be", "name another"]),
        (["--checkpoint=15"], ["--checkpoint=15", "10, 20, 30, 40"]),
        (["--max_examples=2"], ["max_examples"]),
    ],
)
def test_what_cannot_be_is_one_line_and_writes_nothing(trained, tmp_path, changed, parts):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("here")
    places = {"empty": tmp_path / "empty", "file": tmp_path / "file"}
    arguments = [f"--model_dir={trained}", f"--html={tmp_path / 'report.html'}"]
    arguments += [argument.format(**places) for argument in changed]
    assert_refused(run("report", *arguments), *(part.format(**places) for part in parts))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file"]
    assert not list((tmp_path / "empty").iterdir())


def test_the_page_has_to_be_named(trained):
    assert_refused(run("report", f"--model_dir={trained}"), "--html=FILE")


def test_a_directory_without_metrics_or_weights_is_refused(copy):
    shutil.rmtree(copy / "weights")
    (copy / "metrics.jsonl").unlink()
    with pytest.raises(ValueError, match="neither metrics nor weights"):
        gathered(copy)


def test_weights_of_other_examples_are_refused(copy):
    path = copy / "weights" / "weights-40.csv"
    path.write_text(path.read_text() + "1,1.0,0\n")
    with pytest.raises(ValueError, match="of other examples"):
        gathered(copy)
    for other in (10, 20, 30):
        (copy / "weights" / f"weights-{other}.csv").unlink()
    with pytest.raises(ValueError, match="not of the unlabeled examples"):
        gathered(copy)
    path.write_text("example_id,weight,updates\n5,nan,1\n")
    with pytest.raises(ValueError, match="no finite number"):
        gathered(copy)
