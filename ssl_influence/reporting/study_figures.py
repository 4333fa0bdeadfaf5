"""Figures of studies: error over the steps of a run, over an axis, or seed by seed."""

import itertools
import textwrap
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ssl_influence.reporting import figures, studies

# Okabe and Ito's colors, told apart also by those who see fewer; dashes go on where they end.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
DASHES = ("-", "--", ":", "-.")

# Combination -> seed -> the rows of its metrics.jsonl.
Metrics = Mapping[studies.Labels, Mapping[int, Sequence[Mapping[str, float]]]]

_MARKERS = "osD^v"

# What cells measure -> how it is drawn: its name, its color, and whether its markers are full.
_MARKS = {
    "auroc_wrong": ("wrong pseudo-labels by low weight", COLORS[3], True),
    "auroc_wrong_by_confidence": ("wrong pseudo-labels by low confidence", COLORS[3], False),
    "auroc_stranger": ("strangers by low weight", COLORS[6], True),
    "auroc_stranger_by_confidence": ("strangers by low confidence", COLORS[6], False),
}


def curves(study: studies.Study, metrics: Metrics) -> Figure | None:
    """Validation error over the steps, a line for each combination.

    Mean over the seeds that have a number at that step, and a band of a sample standard deviation
    around it where there are several. None where there is no number at all.
    """
    name = {"ema": "validation/ema_error", "raw": "validation/error"}[study.weights]
    drawn = {}
    for labels in study.combinations():
        by_step: dict[float, list[float]] = {}
        for rows in metrics.get(labels, {}).values():
            for row in rows:
                if name in row:
                    by_step.setdefault(row["step"], []).append(row[name])
        if by_step:
            drawn[labels] = dict(sorted(by_step.items()))
    if not drawn:
        return None
    figure, (axis,) = _new()
    titles = _titles(study, list(drawn), list(study.axes))
    for number, (labels, by_step) in enumerate(drawn.items()):
        _line(axis, number, list(by_step), list(by_step.values()), titles[labels], marker=None)
    of = {"ema": "averaged weights", "raw": "weights"}[study.weights]
    axis.set_ylim(bottom=0)
    _finish(axis, study.title, "step", f"validation error of the {of}, %")
    return figure


def lines(study: studies.Study, results: studies.Results) -> Figure | None:
    """Error over the axis study.figure["x"], a line for each combination of the other axes.

    Mean over seeds, with a band of a sample standard deviation. The axis is logarithmic where its
    labels span more than a factor of ten. None where there is no result.
    """
    along = study.figure["x"]
    place = list(study.axes).index(along)
    drawn: dict[studies.Labels, dict[float, list[float]]] = {}
    for labels in study.combinations():
        errors = [study.error(cell) for cell in results.get(labels, {}).values()]
        if errors:
            others = (*labels[:place], *labels[place + 1 :])
            drawn.setdefault(others, {})[float(labels[place])] = errors
    if not drawn:
        return None
    figure, (axis,) = _new()
    titles = _titles(study, list(drawn), [axis for axis in study.axes if axis != along])
    for number, (others, by_x) in enumerate(drawn.items()):
        by_x = dict(sorted(by_x.items()))
        _line(axis, number, list(by_x), list(by_x.values()), titles[others], marker="o")
    values = sorted({x for by_x in drawn.values() for x in by_x})
    if values[0] > 0 and values[-1] > 10 * values[0]:
        axis.set_xscale("log")
        axis.set_xticks(values, [f"{x:g}" for x in values], minor=False)
        axis.minorticks_off()
    axis.set_ylim(bottom=0)
    _finish(axis, study.title, along.replace("_", " "), study.what())
    return figure


def dots(study: studies.Study, results: studies.Results) -> Figure | None:
    """Error of each seed, a dot, and their mean, a stroke: a group for each row of the table, in
    its order from the top, and a color for each column.

    With "measures" in study.figure, a panel beside it has the AUROCs of these cells at the end: how
    well a low weight, and a low confidence, mark wrong pseudo-labels and strangers. Where several
    columns have some, their markers differ. The axis of errors need not begin at 0. None where
    there is no result.
    """
    errors = {
        labels: [study.error(cell) for cell in by_seed.values()]
        for labels, by_seed in results.items()
        if by_seed
    }
    columns = list(itertools.product(*(study.axes[axis] for axis in study.columns)))
    rows = [
        row
        for row in itertools.product(*(study.axes[axis] for axis in study.rows))
        if any(study.combination(row, column) in errors for column in columns)
    ]
    columns = [c for c in columns if any(study.combination(row, c) in errors for row in rows)]
    if not rows:
        return None
    marks = _marks(study, results, rows, columns) if study.figure.get("measures") else []
    height = 1.2 + 0.16 * len(rows) * (max(len(columns), len(marks)) + 1)
    figure, axes = _new(2 if marks else 1, height)
    of_columns = _titles(study, columns, study.columns)
    for number, column in enumerate(columns):
        values = [errors.get(study.combination(row, column), []) for row in rows]
        label = of_columns[column] if len(columns) > 1 else None
        marker = _MARKERS[number // len(COLORS) % len(_MARKERS)]
        shift = _shift(number, len(columns))
        _dots(axes[0], shift, values, label, COLORS[number % len(COLORS)], marker)
    of_rows = _titles(study, rows, study.rows)
    axes[0].set_yticks(range(len(rows)), [of_rows[row] for row in rows])
    axes[0].set_ylim(len(rows) - 0.4, -0.6)
    _finish(axes[0], study.title, study.what(), "", "outside lower left")
    if marks:
        of = list(dict.fromkeys(column for _, column, _ in marks))
        for number, (name, column, values) in enumerate(marks):
            label, color, full = _MARKS[name]
            label += f", {of_columns[column]}" if len(of) > 1 else ""
            marker = _MARKERS[of.index(column) % len(_MARKERS)]
            _dots(axes[1], _shift(number, len(marks)), values, label, color, marker, full)
        axes[1].axvline(0.5, color="gray", linestyle=":", linewidth=1)
        title = "Telling wrong pseudo-labels and strangers"
        _finish(axes[1], title, "AUROC at the end; 0.5 says nothing", "", "outside lower right")
    for axis in axes:
        axis.grid(visible=False, axis="y")
    return figure


def _marks(
    study: studies.Study,
    results: studies.Results,
    rows: Sequence[studies.Labels],
    columns: Sequence[studies.Labels],
) -> list[tuple[str, studies.Labels, list[list[float]]]]:
    """(name of _MARKS, column, numbers of each row's cells there), where there are any."""
    found = []
    for name, column in itertools.product(_MARKS, columns):
        of_rows = [results.get(study.combination(row, column), {}).values() for row in rows]
        values = [[c[name] for c in cells if c.get(name) is not None] for cells in of_rows]
        if any(values):
            found.append((name, column, values))
    return found


def _shift(number: int, of: int) -> float:
    """How far below the middle of a group one of its lines is."""
    return (number - (of - 1) / 2) / (of + 1)


def _dots(
    axis: Axes,
    shift: float,
    values: Sequence[Sequence[float]],
    label: str | None,
    color: str,
    marker: str,
    full: bool = True,
) -> None:
    """Markers of the values of each group, which are at 0, 1, ..., and a stroke at their mean."""
    seeds = [(value, place + shift) for place, group in enumerate(values) for value in group]
    means = [(np.mean(group), place + shift) for place, group in enumerate(values) if group]
    looks = {"alpha": 0.4, "mew": 0} if full else {"alpha": 0.6, "mfc": "none"}
    axis.plot(*zip(*seeds, strict=True), marker, color=color, ms=5, label=label, **looks)
    axis.plot(*zip(*means, strict=True), "|", color=color, ms=11, mew=2.5)


def _new(panels: int = 1, height: float = 4.2) -> tuple[Figure, Sequence[Axes]]:
    """A figure of panels beside one another, which share their vertical axis."""
    figure = figures.new_figure((6.4 if panels == 1 else 10.4, height), layout="constrained")
    axes = figure.subplots(1, panels, sharey=True, squeeze=False)[0]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
        axis.set_axisbelow(True)
    return figure, axes


def _line(
    axis: Axes,
    number: int,
    x: Sequence[float],
    errors: Sequence[Sequence[float]],
    label: str,
    marker: str | None,
) -> None:
    color, dash = COLORS[number % len(COLORS)], DASHES[number // len(COLORS) % len(DASHES)]
    mean = np.array([np.mean(at) for at in errors])
    axis.plot(x, mean, color=color, linestyle=dash, marker=marker, markersize=4, label=label)
    if max(map(len, errors)) > 1:
        deviation = np.array([np.std(at, ddof=1) if len(at) > 1 else 0.0 for at in errors])
        axis.fill_between(x, mean - deviation, mean + deviation, color=color, alpha=0.15, lw=0)


def _titles(
    study: studies.Study, labels_of: Sequence[studies.Labels], axes: Sequence[str]
) -> dict[studies.Labels, str]:
    """What labels of some axes are called: those in which they differ; of one alone, all."""
    varied = [i for i in range(len(axes)) if len({labels[i] for labels in labels_of}) > 1]
    return {
        labels: ", ".join(
            f"{axes[i]} {labels[i]}" if labels[i][:1].isdigit() else labels[i]
            for i in varied or range(len(axes))
        ).replace("_", " ")
        for labels in labels_of
    }


def _finish(axis: Axes, title: str, x: str, y: str, legend: str = "best") -> None:
    """Names of the axes, a title, and a legend where matplotlib knows the place by that name."""
    axis.set(xlabel=_lines(x), ylabel=_lines(y), title=_lines(title))
    axis.title.set_fontsize(10)
    for text in (axis.title, axis.xaxis.label):
        text.set_parse_math(False)  # they may hold dollars
    handles, labels = axis.get_legend_handles_labels()
    if labels:
        outside = legend.startswith("outside")
        # As many beside one another as a panel is wide.
        columns = max(1, min(3, 100 // (8 + max(map(len, labels))))) if outside else 1
        owner = axis.figure if outside else axis
        owner.legend(handles, labels, loc=legend, ncols=columns, frameon=False, fontsize=8)


def _lines(text: str) -> str:
    """Broken so that it fits along a side of a panel."""
    return textwrap.fill(text, 52, break_on_hyphens=False)
