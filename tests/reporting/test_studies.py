"""Tables of studies: combinations, means, paired differences, formats."""

import csv
import dataclasses
import io

import numpy as np
import pytest
from scipy import stats

from ssl_influence import config
from ssl_influence.reporting import studies

AXES = {"method": ("supervised", "uda"), "weighting": ("fixed", "single", "per_example")}
STUDY = studies.Study(
    title="A study",
    axes=AXES,
    skip=({"method": ("supervised",), "weighting": ("single", "per_example")},),
    columns=("weighting",),
    baseline={"weighting": "fixed"},
)
RANDOM = np.random.RandomState(0)
ERRORS = {
    ("supervised", "fixed"): {1: 30.0},
    ("uda", "fixed"): dict(enumerate(RANDOM.uniform(5, 20, 4))),
    ("uda", "per_example"): dict(enumerate(RANDOM.uniform(1, 15, 4))),
}


def cell(error, **more):
    """A cell whose error at the end, averaged, on the test set is `error`; the others differ."""
    summary = {}
    for number, (split, weights) in enumerate(
        (split, weights) for split in ("test", "validation") for weights in ("ema", "raw")
    ):
        base = error + 100 * number
        summary.setdefault(split, {"checkpoints": 15})[weights] = {
            "last": {"step": 9, "error": base},
            "best": {"step": 3, "error": base - 1, "chosen_on": split},
            "median": {
                str(window): {"error": base + window, "checkpoints": min(window, 15)}
                for window in (1, 10, 20, 50)
            },
        }
    return {"summary": summary, **more}


RESULTS = {
    labels: {seed: cell(error) for seed, error in by_seed.items()}
    for labels, by_seed in ERRORS.items()
}


def rows_of(study, results, **asked):
    header, rows = studies.table(dataclasses.replace(study, **asked), results)
    assert {len(row) for row in rows} == {len(header)}
    return header, {row[0]: dict(zip(header, row, strict=True)) for row in rows}


def test_combinations_are_the_product_without_what_is_skipped():
    expected = [("supervised", "fixed"), *(("uda", w) for w in AXES["weighting"])]
    assert STUDY.combinations() == expected
    assert STUDY.combinations({"weighting": ["fixed"]}) == expected[:2]
    with pytest.raises(config.ConfigError, match="nothing is left"):
        STUDY.combinations({"method": ["supervised"], "weighting": ["single"]})


def test_a_table_holds_means_deviations_and_paired_differences():
    header, rows = rows_of(STUDY, RESULTS)
    fixed, ours = (np.array([*ERRORS["uda", w].values()]) for w in ("fixed", "per_example"))
    assert header[:4] == ["method", *AXES["weighting"]]
    uda = rows["uda"]
    assert uda["fixed"] == f"{fixed.mean():.2f} +- {fixed.std(ddof=1):.2f}"
    assert uda["single"] == ""  # none has ended
    interval = stats.t.interval(0.95, 3, (ours - fixed).mean(), stats.sem(ours - fixed))
    half = (interval[1] - interval[0]) / 2
    assert uda["per_example less fixed"] == f"{(ours - fixed).mean():+.2f} +- {half:.2f}"
    better = np.count_nonzero(ours < fixed)
    assert uda["per_example better/equal/worse"] == f"{better}/0/{4 - better}"
    assert rows["supervised"]["fixed"] == "30.00 (1)"
    assert rows["supervised"]["single"] == "-"


def test_a_baseline_in_the_rows_is_compared_with_the_rows_beside_it():
    study = dataclasses.replace(STUDY, columns=())
    header, rows = studies.table(study, RESULTS)
    assert header == ["method", "weighting", "error, %", "less fixed", "better/equal/worse"]
    _, of_columns = rows_of(STUDY, RESULTS)
    ours = next(row for row in rows if row[:2] == ["uda", "per_example"])
    assert ours[3] == of_columns["uda"]["per_example less fixed"]
    assert next(row for row in rows if row[:2] == ["uda", "fixed"])[3:] == ["", ""]


def test_differences_are_of_the_seeds_that_both_have():
    both = {
        ("uda", "fixed"): {1: cell(10.0), 2: cell(50.0)},
        ("uda", "per_example"): {1: cell(8.0), 3: cell(99.0)},
    }
    _, rows = rows_of(STUDY, both)
    assert rows["uda"]["per_example less fixed"] == "-2.00"


@pytest.mark.parametrize(
    ("asked", "number"),
    [
        ({}, 30.0),
        ({"weights": "raw"}, 130.0),
        ({"split": "validation"}, 230.0),
        ({"split": "validation", "weights": "raw", "statistic": "best"}, 329.0),
        ({"statistic": "median_20"}, 50.0),
    ],
)
def test_the_number_is_of_the_split_weights_and_statistic_asked_for(asked, number):
    one = {("supervised", "fixed"): {1: cell(30.0)}}
    _, rows = rows_of(STUDY, one, **asked)
    assert rows["supervised"]["fixed"] == f"{number:.2f}"


def test_best_says_what_it_was_chosen_on():
    study = dataclasses.replace(STUDY, statistic="best")
    assert "chosen on the test set" in study.what()
    assert "last 20 checkpoints" in dataclasses.replace(STUDY, statistic="median_20").what()


def test_several_axes_of_columns_and_the_papers_numbers_below():
    study = studies.Study(
        title="Table",
        axes={"method": ("uda", "vat"), "data": ("a", "b"), "labels": ("20", "40")},
        columns=("data", "labels"),
        paper={"uda": {"a": {"20": {"mean": 5.5, "std": 0.17}}, "b": {"40": {"mean": 2}}}},
    )
    header, rows = studies.table(study, {("uda", "b", "40"): {1: cell(3.0)}})
    assert header == ["method", "a 20", "a 40", "b 20", "b 40"]
    assert rows == [
        ["uda", "", "", "", "3.00"],
        ["paper", "5.50 +- 0.17", "", "", "2.00"],
        ["vat", "", "", "", ""],
    ]


def test_every_format_holds_the_table():
    header, rows = ["method", "a_b, %"], [["uda|x", "5.5 +- 0.1"], ["vat", "-"]]
    markdown = studies.render(header, rows, "markdown").splitlines()
    assert markdown == [
        "| method | a_b, % |",
        "| --- | --- |",
        "| uda\\|x | 5.5 +- 0.1 |",
        "| vat | - |",
    ]
    text = studies.render(header, rows, "csv")
    assert list(csv.reader(io.StringIO(text))) == [header, *rows]
    latex = studies.render(header, rows, "latex")
    assert r"method & a\_b, \% \\" in latex and r"$5.5 \pm 0.1$" in latex
    assert latex.count("&") == 3 and r"\begin{tabular}{lr}" in latex
    assert "5.5 +- 0.1" in studies.render(header, rows, "text")


def test_cells_have_a_line_each_with_every_statistic():
    results = {("uda", "fixed"): {7: cell(10.0, auroc_wrong=0.625, auroc_stranger=None)}}
    header, (row,) = studies.tidy(STUDY, results)
    found = dict(zip(header, row, strict=True))
    assert (found["method"], found["weighting"], found["seed"]) == ("uda", "fixed", "7")
    assert found["test_ema_last"] == "10" and found["validation_raw_median_50"] == "360"
    assert found["auroc_wrong"] == "0.625" and found["auroc_stranger"] == ""


def test_aurocs_are_means_over_the_seeds_that_have_one():
    results = {
        ("uda", "per_example"): {
            1: cell(1.0, mean_auroc_wrong=0.6, auroc_wrong=None),
            2: cell(1.0, mean_auroc_wrong=0.8, auroc_wrong=0.5),
        }
    }
    header, (row,) = studies.measures(STUDY, results)
    found = dict(zip(header, row, strict=True))
    assert found["AUROC, wrong pseudo-labels"] == "0.70 +- 0.14 (2)"
    assert found["at the end"] == "0.50 (1)"
    assert studies.measures(STUDY, RESULTS) is None


@pytest.mark.parametrize(
    ("wrong", "part"),
    [
        ({"columns": ("color",)}, "color"),
        ({"columns": ("weighting", "weighting")}, "twice"),
        ({"skip": ({"method": ("vat",)},)}, "vat"),
        ({"skip": ({"method": ("uda", "supervised")},)}, "leaves nothing"),
        ({"baseline": {"weighting": "none"}}, "none"),
        ({"baseline": {"method": "uda"}}, "only one of the columns"),
        ({"split": "train"}, "split='train'"),
        ({"statistic": "median_3"}, "median_3"),
        ({"figure": {"kind": "bars"}}, "bars"),
        ({"figure": {"kind": "curves", "x": "method"}}, "only lines have an x"),
        ({"figure": {"kind": "lines", "x": "weighting", "measures": True}}, "only dots"),
        ({"figure": {"kind": "dots", "measures": "auroc"}}, "measures='auroc'"),
        ({"figure": {"kind": "lines", "x": "weighting"}}, "x='fixed' is no number"),
        ({"paper": {"uda": {"both": {"mean": 1.0}}}}, "uda/both is no combination"),
        ({"paper": {"uda": 3}}, "needs an object"),
        ({"paper": {"uda": {"fixed": {"mean": 1, "std": "a"}}}}, "is to have numbers"),
    ],
)
def test_a_study_that_does_not_fit_is_refused(wrong, part):
    with pytest.raises(config.ConfigError, match=part):
        dataclasses.replace(STUDY, **wrong)
