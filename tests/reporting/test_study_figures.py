"""Figures of studies: what is drawn of which cells."""

import dataclasses

import numpy as np
import pytest

from ssl_influence.reporting import figures, studies, study_figures
from tests.reporting.test_studies import cell

STUDY = studies.Study(
    title="A study",
    axes={"weighting": ("fixed", "per_example"), "labels": ("250", "4000")},
    figure={"kind": "lines", "x": "labels"},
)


def lines_of(figure):
    (axis,) = figure.axes
    return {line.get_label(): line.get_xydata() for line in axis.lines}


def test_curves_are_means_over_the_seeds_at_each_step_of_the_averaged_weights():
    metrics = {
        ("fixed", "250"): {
            1: [{"step": 1, "train/loss": 3.0}, {"step": 10, "validation/ema_error": 20.0}],
            2: [{"step": 10, "validation/ema_error": 30.0, "validation/error": 99.0}],
        },
        ("per_example", "250"): {
            1: [{"step": step, "validation/ema_error": 40.0 - step} for step in (20, 10)]
        },
    }
    figure = study_figures.curves(STUDY, metrics)
    drawn = lines_of(figure)
    assert list(drawn) == ["fixed", "per example"]  # not the labels, which they share
    np.testing.assert_allclose(drawn["fixed"], [[10, 25]])
    np.testing.assert_allclose(drawn["per example"], [[10, 30], [20, 20]])
    assert "averaged" in figure.axes[0].get_ylabel() and figure.axes[0].get_ylim()[0] == 0
    (band,) = figure.axes[0].collections
    deviation = np.std([20, 30], ddof=1)
    top = band.get_paths()[0].vertices[:, 1].max()
    assert top == pytest.approx(25 + deviation)
    raw = study_figures.curves(dataclasses.replace(STUDY, weights="raw"), metrics)
    np.testing.assert_allclose(lines_of(raw)["fixed, labels 250"], [[10, 99]])
    assert study_figures.curves(STUDY, {}) is None


def test_lines_are_drawn_over_the_numbers_of_an_axis():
    results = {
        ("fixed", "4000"): {1: cell(4.0)},
        ("fixed", "250"): {1: cell(10.0), 2: cell(20.0)},
        ("per_example", "250"): {1: cell(7.0)},
    }
    figure = study_figures.lines(STUDY, results)
    drawn = lines_of(figure)
    np.testing.assert_allclose(drawn["fixed"], [[250, 15], [4000, 4]])
    np.testing.assert_allclose(drawn["per example"], [[250, 7]])
    (axis,) = figure.axes
    assert axis.get_xscale() == "log" and axis.get_xlabel() == "labels"
    assert [tick.get_text() for tick in axis.get_xticklabels()] == ["250", "4000"]
    assert study_figures.lines(STUDY, {}) is None


def test_dots_are_seeds_in_the_groups_of_the_table():
    study = dataclasses.replace(STUDY, columns=("weighting",), figure={"kind": "dots"})
    results = {
        ("fixed", "4000"): {1: cell(4.0)},
        ("fixed", "250"): {1: cell(10.0), 2: cell(20.0)},
        ("per_example", "250"): {1: cell(7.0)},
    }
    figure = study_figures.dots(study, results)
    (axis,) = figure.axes
    seeds, means, of_other, mean_of_other = (line.get_xydata() for line in axis.lines)
    np.testing.assert_allclose(seeds[:, 0], [10, 20, 4])
    np.testing.assert_allclose(means[:, 0], [15, 4])
    np.testing.assert_allclose(of_other, mean_of_other)
    np.testing.assert_allclose(of_other[:, 0], [7])
    np.testing.assert_allclose(np.round(seeds[:, 1]), [0, 0, 1])  # the groups, in rows
    assert seeds[0, 1] < of_other[0, 1] and axis.yaxis_inverted()
    assert [tick.get_text() for tick in axis.get_yticklabels()] == ["labels 250", "labels 4000"]
    assert axis.get_legend_handles_labels()[1] == ["fixed", "per example"]
    assert study_figures.dots(study, {}) is None

    of_one = {labels: results[labels] for labels in results if labels[0] == "fixed"}
    (axis,) = study_figures.dots(study, of_one).axes
    assert len(axis.lines) == 2 and not axis.figure.legends


def test_measures_are_a_panel_of_the_same_groups():
    study = dataclasses.replace(
        STUDY, columns=("weighting",), figure={"kind": "dots", "measures": True}
    )
    results = {
        ("fixed", "4000"): {1: cell(4.0)},
        ("fixed", "250"): {1: cell(9.0)},
        ("per_example", "250"): {
            1: cell(7.0, auroc_wrong=0.6, auroc_wrong_by_confidence=0.9, auroc_stranger=None),
            2: cell(8.0, auroc_wrong=0.8, auroc_wrong_by_confidence=None),
        },
    }
    _, axis = study_figures.dots(study, results).axes
    weight, mean, confidence, same = (line.get_xydata() for line in axis.lines[:4])
    np.testing.assert_allclose(weight[:, 0], [0.6, 0.8])
    np.testing.assert_allclose(mean[:, 0], [0.7])
    np.testing.assert_allclose(confidence, same)
    np.testing.assert_allclose(confidence[:, 0], [0.9])
    assert np.all(np.abs([weight[0, 1], confidence[0, 1]]) < 0.5)  # in the first group
    assert axis.get_legend_handles_labels()[1] == [
        "wrong pseudo-labels by low weight",
        "wrong pseudo-labels by low confidence",
    ]
    results["fixed", "4000"] = {1: cell(4.0, auroc_wrong=0.3)}
    _, axis = study_figures.dots(study, results).axes
    of_fixed, _, of_other, *_ = axis.lines
    assert of_fixed.get_label() == "wrong pseudo-labels by low weight, fixed"
    np.testing.assert_allclose(of_fixed.get_xdata(), [0.3])
    np.testing.assert_allclose(of_other.get_xdata(), [0.6, 0.8])
    assert of_fixed.get_marker() != of_other.get_marker()
    del results["fixed", "4000"]
    of_none = {labels: results[labels] for labels in results if labels[0] == "fixed"}
    assert len(study_figures.dots(study, of_none).axes) == 1


def test_figures_are_written_by_their_ending(tmp_path):
    figure = study_figures.lines(STUDY, {("fixed", "250"): {1: cell(1.0)}})
    figures.save(figure, tmp_path / "figure.png")
    figures.save(figure, tmp_path / "figure.pdf")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "figure.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize("title", [r"a cost of $5 \over $6", "One that is much longer " * 4])
def test_names_are_as_they_are_and_fit(tmp_path, title):
    study = dataclasses.replace(STUDY, title=title, split="validation", statistic="best")
    numbers = {"best": {"error": 1.0}}
    results = {("fixed", "250"): {1: {"summary": {"validation": {"ema": numbers}}}}}
    figure = study_figures.lines(study, results)
    figures.save(figure, tmp_path / "figure.png")
    figure.draw_without_rendering()
    (axis,) = figure.axes
    assert axis.get_title().replace("\n", " ") == title.strip()
    width, height = figure.canvas.get_width_height()
    for text in (axis.title, axis.xaxis.label, axis.yaxis.label):
        box = text.get_window_extent()
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height


def test_many_lines_have_different_looks():
    names = tuple(f"m{n}" for n in range(20))
    study = studies.Study(title="Many", axes={"method": names}, figure={"kind": "curves"})
    rows = [{"step": s, "validation/ema_error": 1.0} for s in (1, 2)]
    figure = study_figures.curves(study, {(name,): {1: rows} for name in names})
    looks = {(line.get_color(), line.get_linestyle()) for line in figure.axes[0].lines}
    assert len(looks) == 20
