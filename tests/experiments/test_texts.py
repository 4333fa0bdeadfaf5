"""Runs on texts as users have them: trained, stopped, resumed, predicted with, exported."""

import csv
import json
import pathlib
import re
import shutil
import signal
import sys

import numpy as np
import pytest

from experiments import flags as shared_flags, launch
from ssl_influence import config as config_lib
from ssl_influence.data import paraphrases, sources
from tests import isolated
from tests.experiments import text_encoder
from tests.experiments.processes import (
    assert_refused,
    assert_same_contents,
    contents,
    finish,
    run,
    start,
    stopped,
    succeeded,
)
from tests.experiments.test_resume import wait_for

pytest.importorskip("tensorflow_text")
pytest.importorskip("official.nlp")
STEPS = 12


def write_paraphrases(path, texts, word="also"):
    rows = (
        paraphrases.row(i, text, f"{word} {text[:60]}" if text.strip() else "")
        for i, text in enumerate(texts)
    )
    path.write_text(paraphrases.HEADER + "".join(rows), encoding="utf-8")


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    """Flags of a run, and the folder with its encoder, its texts and their paraphrases."""
    folder = tmp_path_factory.mktemp("texts")
    text_encoder.write_encoder(folder / "encoder", num_layers=1)
    table = text_encoder.write_texts(folder / "texts.tsv")
    source = sources.load(sources.parse_name(f"tsv:{table}.1@20-20"), config_lib.DataConfig())
    write_paraphrases(folder / "paraphrases.tsv", source.inputs)
    return folder, (
        f"--dataset=tsv:{table}.1@20-20",
        f"--encoder={folder}/encoder",
        "--strong_view=paraphrases",
        f"--paraphrases={folder}/paraphrases.tsv",
        "--sequence_length=12",
        "--labeled_batch_size=4",
        "--unlabeled_batch_size=8",
        "--learning_rate=1e-3",
        "--ema_decay=0.9",
        "--confidence=0.3",
        "--weight_warmup_steps=1",
        "--inner_steps=2",
        "--log_every=1",
        "--eval_every=12",
        "--checkpoint_every=6",
        f"--train_steps={STEPS}",
        "--notensorboard",
    )


@pytest.fixture(scope="module")
def runs(arguments, tmp_path_factory):
    """(A run that Ctrl-C stopped, with its encoder moved when it went on; one that was not; it)."""
    folder, given = arguments
    halved, whole = (tmp_path_factory.mktemp(name) / "run" for name in ("stopped", "whole"))
    process = start("-m", "experiments.uda_imdb", *given, f"--model_dir={halved}")
    wait_for(lambda: (halved / "metrics.jsonl").exists(), process, seconds=300)
    process.send_signal(signal.SIGINT)
    stopped(finish(process))
    config = shared_flags.read_flagfile(halved / "flags.txt")
    built = launch.build(config)
    assert launch.train(built, whole, "test")
    # Neither the encoder nor paraphrases are read again for that.
    gone = {"model": {"encoder": "/gone"}, "augment": {"strong": "paraphrases", "paraphrases": "/"}}
    launch.evaluate(built, whole)
    results = (whole / "eval/results.jsonl").read_bytes()
    (whole / "eval/result.json").write_text("{}")
    launch.evaluate(launch.build(config.replace(**gone), evaluated_in=whole), whole)
    assert (whole / "eval/results.jsonl").read_bytes() == results
    assert (whole / "eval/result.json").exists()  # an evaluation of the same run, not of another
    shutil.copytree(folder / "encoder", folder / "moved")
    moved = config.replace(model={"encoder": str(folder / "moved")})
    assert launch.train(launch.build(moved), halved, "test")
    return halved, whole, built


def test_ctrl_c_saves_and_the_run_goes_on_bit_for_bit_with_its_encoder_moved(runs):
    halved, whole, _ = runs
    assert_same_contents(contents(halved, STEPS), contents(whole, STEPS))


def test_texts_are_predicted_for_from_anywhere_and_exported(runs, tmp_path):
    _, whole, built = runs
    model_dir = tmp_path / "run"  # Nothing but the run's own files is left of it.
    shutil.copytree(whole, model_dir)
    flagfile = model_dir / "flags.txt"
    flagfile.write_text(flagfile.read_text().replace("--encoder=", "--encoder=/gone"))
    lines = [*text_encoder.ODD_TEXTS.values(), "good\0film"]
    (tmp_path / "lines.txt").write_text("\r\n".join([*lines, ""]), encoding="utf-8", newline="")
    rows = [(text, label) for text, label, part in text_encoder.rows_of_texts() if part == "test"]
    with (tmp_path / "reviews.csv").open("w", encoding="utf-8-sig", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *rows])
    (tmp_path / "folder/below").mkdir(parents=True)
    (tmp_path / "folder/b.txt").write_text("two lines\nof a good film\n")
    (tmp_path / "folder/below/a.txt").write_text("")
    given = ["Funny, and moving.", "סרט 👍"]
    places = [tmp_path / name for name in ("lines.txt", "reviews.csv", "folder")]
    result = run(
        "predict",
        f"--model_dir={model_dir}",
        f"--inputs={','.join(map(str, places))}",
        *(f"--text={text}" for text in given),
        "--format=json",
    )
    found = [json.loads(line) for line in succeeded(result).stdout.splitlines()]
    # An empty line, one of spaces, and an empty file.
    assert re.search(r"texts 3 have no word, and \d+ are cut to 12 tokens", result.stderr)
    texts = [*lines, *(text for text, _ in rows), "two lines\nof a good film\n", "", *given]
    names = [line["input"] for line in found]
    assert len(names) == len(texts) and names[-2:] == given
    assert names[0] == f"{places[0]}, line 1" and names[len(lines)] == f"{places[1]}, line 2"
    assert [pathlib.Path(name).name for name in names[-4:-2]] == ["b.txt", "a.txt"]
    probabilities = np.array([list(line["probabilities"].values()) for line in found])
    np.testing.assert_allclose(probabilities.sum(1), 1, atol=1e-6)
    # The test part is what evaluation counted.
    of_test = found[len(lines) : len(lines) + len(rows)]
    predicted, labels = [line["class"] for line in of_test], [label for _, label in rows]
    wrong = 100 * np.mean(np.array(predicted) != labels)
    results = (whole / "eval/results.jsonl").read_text().splitlines()
    at_end = [
        row for row in map(json.loads, results) if (row["step"], row["split"]) == (12, "test")
    ]
    assert wrong == at_end[0]["ema_error"]

    succeeded(run("export", f"--model_dir={model_dir}", f"--output={tmp_path}/model"))
    (served,) = isolated.signatures(tmp_path, tmp_path / "model", np.array(texts), []).values()
    np.testing.assert_allclose(served["probabilities"], probabilities, atol=1e-6)
    assert served["class_name"] == [line["class"] for line in found]


def test_what_a_run_began_with_cannot_change(runs, arguments, tmp_path):
    _, whole, built = runs
    model_dir = tmp_path / "run"
    shutil.copytree(whole, model_dir)
    text_encoder.write_encoder(tmp_path / "other", num_layers=1, seed=1)
    write_paraphrases(tmp_path / "other.tsv", built.source.inputs, word="another")
    changes = {
        "began with another encoder than --encoder=": {"model": {"encoder": f"{tmp_path}/other"}},
        "paraphrases": {"augment": {"paraphrases": f"{tmp_path}/other.tsv"}},
    }
    for says, change in changes.items():
        other = launch.build(built.config.replace(**change))
        with pytest.raises(config_lib.ConfigError, match=says) as refused:
            launch.train(other, model_dir, "test")
        assert "\n" not in str(refused.value)
    assert_same_contents(contents(model_dir, STEPS), contents(whole, STEPS))


def test_encoders_that_cannot_be_right_are_refused_in_one_line(runs, tmp_path):
    *_, built = runs
    cased = [token.capitalize() if token.isalpha() else token for token in text_encoder.VOCABULARY]
    text_encoder.write_encoder(tmp_path / "cased", vocabulary=cased)
    text_encoder.write_encoder(tmp_path / "short")
    vocabulary = tmp_path / "short/vocab.txt"
    vocabulary.write_text(vocabulary.read_text(encoding="utf-8").rpartition("night\n")[0])
    cases = {
        "cased": ("cased/tokenizer_config.json", "lower-cased", "cased/vocab.txt"),
        "short": (f"has {len(cased) - 1} tokens", f"one of {len(cased)}", "short/vocab.txt"),
    }
    for name, says in cases.items():
        with pytest.raises(config_lib.ConfigError) as refused:
            launch.build(built.config.replace(model={"encoder": str(tmp_path / name)}))
        assert all(part in str(refused.value) for part in says) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "modules",
    [("safetensors",), ("official", "official.nlp.modeling.networks"), ("tensorflow_text",)],
)
def test_without_the_extra_the_pip_command_is_named(runs, modules, monkeypatch):
    *_, built = runs
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(config_lib.ConfigError, match=r'pip install .*".\[text\]"') as refused:
        launch.build(built.config)
    assert "\n" not in str(refused.value)


def test_a_run_that_cannot_be_leaves_no_directory(arguments, tmp_path):
    folder, given = arguments
    path = tmp_path / "short.tsv"
    lines = (folder / "paraphrases.tsv").read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(line for line in lines if not line.startswith("100\t")))
    result = run("uda_imdb", *given, f"--paraphrases={path}", f"--model_dir={tmp_path}/run")
    assert_refused(result, f"paraphrases={path}", "such as example 100")
    assert result.returncode == 1 and not (tmp_path / "run").exists()


_OTHERS = """
import sys
from experiments import command, uda_cifar
try:
    command.run(uda_cifar.main)
except SystemExit as end:
    print(end.code)
print(sorted({"tensorflow_text", "official", "safetensors"} & set(sys.modules)))
"""


def test_runs_on_images_do_without_what_texts_need(tmp_path):
    network = ("--dataset=digits.1@20-40", "--model=mlp", "--hidden_units=4")
    settings = (*network, "--weighting=fixed", "--train_steps=1", "--notensorboard")
    for given in (("--help",), (*settings, f"--model_dir={tmp_path}/run")):
        result = succeeded(finish(start("-c", _OTHERS, *given)))
        assert result.stdout.splitlines()[-1] == "[]"
    assert (tmp_path / "run/checkpoints/ckpt-1.index").exists()


def test_texts_are_inspected_on_one_short_line_each(tmp_path):
    odd = text_encoder.ODD_TEXTS
    of_class = {"good": odd["controls"], "bad": odd["long"], "": odd["hebrew"]}
    rows = [(f"{text} {i}", c, "train") for c, text in of_class.items() for i in range(4)]
    table = text_encoder.write_texts(tmp_path / "texts.tsv", [*rows, ("", "good", "train")])
    printed = succeeded(run("inspect_data", f"--dataset=tsv:{table}.1@2-2")).stdout
    good, bad, unknown = (
        [line for line in printed.splitlines() if line.startswith(f"{name}: ")]
        for name in ("good", "bad", "unknown")
    )
    assert "empty texts: 1" in printed and len(good) == len(bad) == len(unknown) == 2
    assert all(line.startswith("good: bad\ufffd\ufffd[31m film") for line in good if line[6:])
    assert all("…" in line and len(line) == len("bad: ") + 100 for line in bad)
    # What turns the direction of the rest of the line is not printed.
    assert all("סרט טוב" in line and "\u202e" not in line for line in unknown)
