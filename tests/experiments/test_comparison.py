"""Comparisons over rows and seeds, as processes, and the numbers in their tables."""

import json

import numpy as np
import pytest
from scipy import stats

from experiments import comparison, flags as shared_flags, weights_report
from ssl_influence import config as config_lib
from ssl_influence.reporting import tables
from tests.experiments.processes import ROOT, TINY, assert_refused, run, succeeded

SHORT = ["--train_steps=30", "--eval_every=30", "--checkpoint_every=15"]


def table_of(result):
    lines = result.stdout.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("test error"))
    rows = [line.split() for line in lines[begin + 1 :] if not line.startswith("wrote")]
    return {row[0]: row[1:] for row in rows}


def confidence_of_wrong(model_dir, step):
    """Confidences of the unlabeled examples, and which have a wrong pseudo-label."""
    config = shared_flags.read_flagfile(model_dir / "flags.txt")
    found = weights_report.gather(model_dir, config, step, "raw")
    return found.predictions.confidence, found.predictions.pseudo_label != found.pool.label


def test_synthetic_prints_the_errors_of_each_row_and_draws_the_boundaries(tmp_path):
    result = succeeded(run("synthetic", "--dataset=circles", f"--model_dir={tmp_path}", *SHORT))
    table = table_of(result)
    assert list(table) == ["supervised", "fixed", "per_example"]
    for cells in table.values():
        assert all(0 <= float(cell) <= 60 for cell in cells[:2])
    fixed, learned = (
        np.loadtxt(tmp_path / row / "weights/weights-30.csv", delimiter=",", skiprows=1)
        for row in ("fixed", "per_example")
    )
    assert len(fixed) == 1000
    assert np.all(fixed[:, 2] == 0) and np.all(learned[:, 2] > 0)
    judged = json.loads((tmp_path / "per_example/eval/weights.json").read_text())
    assert [row["step"] for row in judged] == [15, 30]
    assert all(row["auroc_stranger"] is None for row in judged)
    for row in ("fixed", "supervised"):  # no weight has moved: nothing to judge
        assert not (tmp_path / row / "eval/weights.json").exists()
    for name in ("auroc_wrong", "auroc_wrong_by_confidence"):
        assert all((row[name] is None) == (row["wrong"] == 0) for row in judged)
    confidence, wrong = confidence_of_wrong(tmp_path / "per_example", 30)
    pairs = confidence[wrong][:, None] - confidence[~wrong]
    expected = np.mean(pairs < 0) + np.mean(pairs == 0) / 2
    assert judged[-1]["auroc_wrong_by_confidence"] == pytest.approx(expected, abs=1e-3)
    assert (tmp_path / "boundaries.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "boundaries.gif").read_bytes().startswith(b"GIF89a")


def test_seeds_are_tabulated_and_finished_cells_are_not_trained_again(tmp_path):
    flags = ["--dataset=linear", f"--model_dir={tmp_path}", "--rows=fixed,per_example", *SHORT]
    flags.append("--row_setting=fixed:unsupervised_weight=0.5")
    both = succeeded(run("synthetic", *flags, "--seeds=3-4"))
    results = json.loads((tmp_path / "comparison.json").read_text())
    assert {row: list(by_seed) for row, by_seed in results.items()} == {
        "fixed": ["3", "4"],
        "per_example": ["3", "4"],
    }
    raw = [results["fixed"][seed]["raw"] for seed in ("3", "4")]
    assert table_of(both)["fixed"][:3] == [
        f"{np.mean(raw):.2f}",
        "+-",
        f"{np.std(raw, ddof=1):.2f}",
    ]
    fixed = (tmp_path / "seed-3/fixed/flags.txt").read_text()
    assert "--dataset=linear.3@10-30" in fixed and "--seed=3" in fixed
    assert "--unsupervised_weight=0.5" in fixed
    learned = (tmp_path / "seed-4/per_example/flags.txt").read_text()
    assert "--unsupervised_weight=1.0" in learned
    again = succeeded(run("synthetic", *flags, "--seeds=3,4"))
    assert "seed 3:" not in again.stdout and table_of(again) == table_of(both)
    assert_refused(run("synthetic", *flags, "--seeds=3,4", "--weight_lr=0.3"), "weight_lr")


def test_a_run_that_diverges_in_its_last_step_is_judged_all_the_same(tmp_path):
    more = ["--train_steps=1", "--optimizer=sgd", "--learning_rate=1e30", "--model=mlp"]
    rows = ["--rows=per_example", "--seeds=7", f"--model_dir={tmp_path}"]
    succeeded(run("compare", *TINY, *more, *rows))
    (judged,) = json.loads((tmp_path / "seed-7/per_example/eval/weights.json").read_text())
    assert judged["auroc_wrong_by_confidence"] is None and judged["wrong"] > 0.5


def test_mismatched_classes_end_in_an_auroc_of_strangers(tmp_path):
    result = succeeded(
        run(
            "compare",
            *TINY,
            "--train_steps=20",
            "--model=mlp",  # quicker to trace
            "--known_classes=0,1,2,3,4,5",
            "--unlabeled_mismatch=0.6",
            "--rows=supervised_all_labels,per_example",
            "--seeds=7",
            f"--model_dir={tmp_path}",
        )
    )
    counts = [line.split() for line in result.stdout.splitlines()]
    totals = [row[1:4] for row in counts if row and row[0] == "total"]
    assert ["60", "40", "895"] in totals and ["20", "40", "895"] in totals
    assert ["other", "class", "0", "0", "537", "0"] in counts
    assert "AUROC, strangers" in result.stdout
    assert "strangers by low confidence" in result.stdout
    cells = json.loads((tmp_path / "comparison.json").read_text())
    for how in ("", "_by_confidence"):
        assert 0 <= cells["per_example"]["7"][f"auroc_stranger{how}"] <= 1
    assert "auroc_stranger" not in cells["supervised_all_labels"]["7"]


@pytest.mark.parametrize(
    "flag",
    [
        "--rows=ours",
        "--rows=",
        "--seeds=3-1",
        "--seeds=1,x",
        "--seeds=1-3,2",
        "--row_setting=fixed",
        "--row_setting=ours:confidence=0.5",
        "--row_setting=fixed:confidance=0.5",
        "--row_setting=fixed:confidence=high",
        "--draw_steps=7",
        "--row_setting=supervised:method=uda",
        "--row_setting=single:confidence=0.5",
        "--dataset=digits",
    ],
)
def test_wrong_comparisons_are_refused_with_one_line(tmp_path, flag):
    value = flag.split("=", 1)[1].split("=")[0].split(":")[-1]
    assert_refused(run("synthetic", flag, f"--model_dir={tmp_path / 'run'}"), value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "path", sorted((ROOT / "experiments/flagfiles/studies").glob("*.flags")), ids=lambda p: p.stem
)
def test_flagfiles_of_studies_hold_known_flags_and_known_rows(tmp_path, path):
    module = "synthetic" if "synthetic" in path.name else "compare"
    flags = [f"--flagfile={path}", f"--model_dir={tmp_path}", "--row_setting=fixed:damping=-1"]
    assert_refused(run(module, *flags), "damping=-1")


def test_the_study_table_gives_means_and_paired_intervals():
    random = np.random.RandomState(0)
    fixed, ours = random.uniform(5, 20, 6), random.uniform(1, 15, 6)
    ours[2] = fixed[2]
    twice = {s: {"raw": 0.0, "ema": 0.0} for s in range(2)}
    same = tables.comparison({"fixed": twice, "per_example": twice}).splitlines()
    assert "+0.00 +- 0.00" in same[2] and "0/2/0" in same[2] and "+0.00" not in same[1]
    results = {
        "fixed": {s: {"raw": x, "ema": x + 1} for s, x in enumerate(fixed)},
        "per_example": {
            s: {"raw": x, "ema": x, "mean_auroc_wrong": None if s else 0.7}
            for s, x in enumerate(ours)
        },
    }
    header, base, row = tables.comparison(results).splitlines()
    interval = stats.ttest_rel(ours, fixed).confidence_interval(0.95)
    difference = np.mean(ours - fixed)
    assert f"{fixed.mean():.2f} +- {fixed.std(ddof=1):.2f}" in base
    assert f"{fixed.mean() + 1:.2f} +-" in base
    assert f"{difference:+.2f} +- {interval.high - difference:.2f}" in row
    wins, losses = np.count_nonzero(ours < fixed), np.count_nonzero(ours > fixed)
    assert f"{wins}/1/{losses}" in row
    assert "AUROC, wrong pseudo-labels" in header and row.endswith("0.70 (1)")
    assert "strangers" not in header and "raw less" not in tables.comparison(
        {"fixed": results["fixed"]}
    )


def test_a_cell_whose_data_are_named_anew_is_not_taken_for_finished(tmp_path):
    config = config_lib.Config()
    (tmp_path / "eval").mkdir()
    for path in (tmp_path / "flags.txt", tmp_path / "eval/flags.txt"):
        path.write_text(shared_flags.to_flagfile(config, "x"))
    result = {"step": config.train.train_steps}
    (tmp_path / "eval/result.json").write_text(json.dumps(result))
    (tmp_path / "eval/summary.json").write_text('{"test": {}}')

    def finished(**data):
        cell = comparison.Cell("fixed", 1, config.replace(data=data), tmp_path)
        return comparison.finished(cell)

    assert finished() == result
    assert finished(data_dir="/moved") is None
