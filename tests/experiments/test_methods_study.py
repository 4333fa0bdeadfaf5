"""The study of all methods as a process: its cells, table, interruption and failures."""

import json
import pathlib
import signal
import time

import numpy as np
import pytest

from experiments import cells, comparison
from ssl_influence.reporting import tables
from tests.experiments.processes import (
    TINY,
    assert_refused,
    assert_same_run,
    finish,
    run,
    start,
    succeeded,
)

SETTINGS = {
    "supervised": ["--method=supervised", "--weighting=fixed"],
    "mean_teacher": ["--method=mean_teacher"],
}


def write_settings(folder: pathlib.Path, **further):
    folder.mkdir()
    common = [flag for flag in TINY if not flag.startswith("--confidence")]
    for method, lines in SETTINGS.items():
        text = "\n".join([*common, "--model=mlp", *lines, *further.get(method, [])])
        (folder / f"{method}.flags").write_text(text)
    return folder


def study(settings, model_dir, *flags):
    return (
        "methods_study",
        f"--settings={settings}",
        f"--methods={','.join(SETTINGS)}",
        f"--model_dir={model_dir}",
        *flags,
    )


def cells_in(model_dir):
    return {
        str(path.relative_to(model_dir).parent.parent): path.read_text()
        for path in model_dir.rglob("eval/result.json")
    }


def test_an_interrupted_study_goes_on_and_ends_as_one_that_was_not(tmp_path):
    settings = write_settings(tmp_path / "settings")
    (settings / "fixed.flags").write_text("--validation_batch_size=7\n")
    flags = ["--weightings=fixed", "--seeds=9", "--jobs=1"]
    module, *arguments = study(settings, tmp_path / "study", *flags)
    process = start("-m", f"experiments.{module}", *arguments)
    deadline = time.monotonic() + 120
    while not cells_in(tmp_path / "study") and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert_refused(finish(process), "the same command goes on")
    before = cells_in(tmp_path / "study")
    assert list(before) == ["supervised/fixed/seed-9"]

    result = succeeded(run(module, *arguments))
    assert "1 of 2 cells to train" in result.stdout
    found = cells_in(tmp_path / "study")
    rows = ["supervised/fixed", "mean_teacher/fixed"]
    assert set(found) == {f"{row}/seed-9" for row in rows}
    assert before.items() <= found.items()
    results = json.loads((tmp_path / "study/study.json").read_text())
    for row in rows:
        method, weighting = row.split("/")
        assert results[method][weighting] == {"9": json.loads(found[f"{row}/seed-9"])}
    last = "mean_teacher/fixed/seed-9"
    flagfile = (tmp_path / "study" / last / "flags.txt").read_text().splitlines()
    of_cell = {"--dataset=digits.9@20-40", "--seed=9", "--method=mean_teacher"}
    assert of_cell | {"--validation_batch_size=7"} <= set(flagfile)

    # Here one process trains both cells.
    succeeded(run(*study(settings, tmp_path / "whole", *flags)))
    assert_same_run(tmp_path / "study" / last, tmp_path / "whole" / last)
    assert cells_in(tmp_path / "whole") == found


def test_a_failing_cell_ends_the_study_with_its_line(tmp_path):
    wrong = ["--learning_rate=1e30", "--log_every=1"]
    settings = write_settings(tmp_path / "settings", supervised=wrong)
    flags = ["--seeds=7", "--methods=supervised,mean_teacher", "--jobs=1"]
    result = run(*study(settings, tmp_path / "study", *flags))
    assert_refused(result, "supervised/fixed/seed-7", "at step", "learning_rate")
    assert not (tmp_path / "study/study.json").exists()


def test_a_cell_that_dies_ends_the_study_and_names_what_it_printed(tmp_path):
    broken = comparison.Cell("uda/fixed", 1, None, tmp_path / "uda/fixed/seed-1")
    with pytest.raises(cells.CellError, match="uda/fixed/seed-1: .* exit code 1; .*job-1.log"):
        cells.train([broken], 2, tmp_path, "experiments.methods_study", lambda *_: None)
    assert "AttributeError" in (tmp_path / "job-1.log").read_text()


@pytest.mark.parametrize(
    "flag, part",
    [
        ("--methods=uda,cotraining", "cotraining"),
        ("--methods=uda,uda", "methods=uda,uda"),
        ("--weightings=both", "weightings=both"),
        ("--seeds=", "seeds="),
        ("--seeds=3-1", "3-1"),
        ("--jobs=0", "jobs"),
        ("--settings=/tmp/nowhere", "/tmp/nowhere"),
        (f"--model_dir={__file__}/run", "cannot be written"),
    ],
)
def test_wrong_studies_are_refused_with_one_line(tmp_path, flag, part):
    assert_refused(run("methods_study", f"--model_dir={tmp_path / 'run'}", flag), part)
    assert not (tmp_path / "run").exists()


def test_the_table_holds_errors_by_weighting_and_paired_differences():
    random = np.random.RandomState(0)
    fixed, ours = random.uniform(5, 20, 4), random.uniform(1, 15, 4)
    results = {
        "supervised": {"fixed": {1: {"ema": 30.0}}},
        "uda": {
            "fixed": {seed: {"ema": x} for seed, x in enumerate(fixed)},
            "per_example": {seed: {"ema": x} for seed, x in enumerate(ours)},
        },
    }
    header, alone, uda = tables.by_weighting(results).splitlines()
    assert header.split()[-4:] == ["per_example", "less", "fixed", "better/equal/worse"]
    assert alone.split() == ["supervised", "30.00"]
    rows = tables.comparison(
        {
            name: {s: {"raw": r["ema"], "ema": 0.0} for s, r in row.items()}
            for name, row in results["uda"].items()
        }
    ).splitlines()
    assert rows[2].split()[-4:] == uda.split()[-4:]
    assert f"{np.mean(fixed):.2f} +- {np.std(fixed, ddof=1):.2f}" in uda
    assert f"{np.mean(ours - fixed):+.2f} +-" in uda
