"""Predicting and exporting with the binaries, from nothing but a run's directory."""

import csv
import io
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
from absl import flags
from PIL import Image

from experiments import flags as shared_flags, launch
from ssl_influence.serving import classifier as classifier_lib
from tests import isolated
from tests.experiments.processes import ROOT, TINY, assert_refused, run, succeeded


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What is left of a run: a directory without its dataset; its results, test part and config."""
    flag_values = flags.FlagValues()
    shared_flags.define(flag_values=flag_values)
    changes = ("--weighting=fixed", "--ema_decay=0.9", "--train_steps=20")
    flag_values(["train", *TINY, *changes])
    folder = tmp_path_factory.mktemp("runs")
    built = launch.build(shared_flags.to_config(flag_values=flag_values))
    assert launch.train(built, folder / "whole", "test")
    launch.evaluate(built, folder / "whole")
    lines = (folder / "whole/eval/results.jsonl").read_text().splitlines()
    results = {row["step"]: row for row in map(json.loads, lines) if row["split"] == "test"}
    (folder / "run").mkdir()
    for name in ("flags.txt", "inputs.json"):
        shutil.copy(folder / "whole" / name, folder / "run")
    shutil.copytree(folder / "whole/checkpoints", folder / "run/checkpoints")
    flagfile = folder / "run/flags.txt"
    flagfile.write_text(flagfile.read_text().replace("=digits.1@", "=folder:gone.1@"))
    return folder / "run", results, built.source, shared_flags.read_flagfile(flagfile)


def error_of(predicted, labels):
    return 100 * np.mean(np.array(predicted) != labels.astype(str))


def test_predictions_are_those_that_evaluation_counts(trained, tmp_path):
    model_dir, results, source, config = trained
    np.savez(tmp_path / "test.npz", images=source.test_inputs)
    result = succeeded(run("predict", f"--model_dir={model_dir}", f"--inputs={tmp_path}/test.npz"))
    header, *rows = csv.reader(io.StringIO(result.stdout, newline=""))
    assert header == ["input", "class", "probability", *source.class_names]
    assert [row[0] for row in rows] == [
        f"{tmp_path}/test.npz[{i}]" for i in range(len(source.test_labels))
    ]
    assert error_of([row[1] for row in rows], source.test_labels) == results[20]["ema_error"]
    expected, best = classifier_lib.load(model_dir, config).predict(source.test_inputs)
    np.testing.assert_allclose([[float(x) for x in row[3:]] for row in rows], expected, atol=1e-6)
    np.testing.assert_allclose([float(row[2]) for row in rows], np.max(expected, 1), atol=1e-6)


def test_another_checkpoint_its_own_weights_and_files_that_are_bad(trained, tmp_path):
    model_dir, results, source, _ = trained
    folder, output = tmp_path / "images", tmp_path / "new" / "table.json"
    folder.mkdir()
    for i, image in enumerate(source.test_inputs):
        Image.fromarray(image[..., 0]).save(folder / f"{i:04}.png")
    (folder / "damaged.png").write_bytes((folder / "0000.png").read_bytes()[:40])
    Image.new("L", (8, 9)).save(folder / "large.png")
    result = succeeded(
        run(
            "predict",
            f"--model_dir={model_dir}",
            f"--inputs={folder}",
            "--checkpoint=10",
            "--weights=raw",
            "--format=json",
            "--top=3",
            "--batch_size=100",
            "--on_bad_example=skip",
            f"--output={output}",
        )
    )
    assert result.stdout == ""
    assert f"2 of {len(source.test_labels) + 2} inputs were left out." in result.stderr
    assert "damaged.png" in result.stderr and "large.png is 9x8" in result.stderr
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["input"] for line in lines] == sorted(map(str, folder.glob("0*.png")))
    assert {len(line["probabilities"]) for line in lines} == {3}
    predicted = [line["class"] for line in lines]
    assert error_of(predicted, source.test_labels) == results[10]["raw_error"]
    assert results[10]["raw_error"] != results[20]["raw_error"]
    assert [path.name for path in output.parent.iterdir()] == ["table.json"]


def test_an_exported_model_gives_the_same_probabilities(trained, tmp_path):
    model_dir, _, source, config = trained
    succeeded(run("export", f"--model_dir={model_dir}", f"--output={tmp_path}/model"))
    inputs, files = source.test_inputs[:20], []
    for image in inputs:
        file = io.BytesIO()
        Image.fromarray(image[..., 0]).save(file, "PNG")
        files.append(file.getvalue())
    expected, best = classifier_lib.load(model_dir, config).predict(inputs)
    for found in isolated.signatures(tmp_path, tmp_path / "model", inputs, files).values():
        np.testing.assert_allclose(found["probabilities"], expected, atol=1e-6)
        np.testing.assert_array_equal(found["class"], best)
        assert found["class_name"] == [source.class_names[c] for c in best]
    again = run("export", f"--model_dir={model_dir}", f"--output={tmp_path}/model")
    assert_refused(again, f"{tmp_path}/model is there already")


def test_inputs_that_cannot_be_read_end_without_a_table(trained, tmp_path):
    model_dir, *_ = trained
    Image.new("L", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(b"no image")
    output = tmp_path / "table.csv"
    output.write_text("what was there")
    arguments = (f"--model_dir={model_dir}", f"--inputs={tmp_path}", "--batch_size=1")
    result = run("predict", *arguments, f"--output={output}")
    assert_refused(result, f"{tmp_path}/b.png is not an image")
    assert output.read_text() == "what was there"


@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [
        ("predict", ["--model_dir=nowhere", "--inputs=a.png"], "nowhere holds no flags.txt"),
        ("export", ["--model_dir=nowhere", "--output=new"], "nowhere holds no flags.txt"),
        ("predict", ["--model_dir=RUN"], "--inputs"),
        ("predict", ["--model_dir=RUN", "--inputs=a,,b"], "name files or folders"),
        ("predict", ["--model_dir=RUN", "--inputs=a", "--output=RUN"], "is a folder: name a file"),
        ("predict", ["--model_dir=RUN", "--inputs=a", "--top=0"], "--top=0"),
        ("export", ["--model_dir=RUN", "--output="], "name a folder"),
    ],
)
def test_settings_that_cannot_work_end_with_one_line(trained, module, arguments, message):
    arguments = [argument.replace("RUN", str(trained[0])) for argument in arguments]
    assert_refused(run(module, *arguments), message)
    assert not (ROOT / "new").exists()


def test_a_reader_of_the_table_may_stop_reading():
    code = "from experiments import predict; predict._print(['row\\n' * 9999] * 99); print('gone')"
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout.readline() == b"row\n"
    process.stdout.close()
    assert (process.stderr.read(), process.wait()) == (b"", 0)
    process.stderr.close()
