"""Figures of studies: error over the steps of a run, or over an axis."""

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
    figure, axis = _new()
    titles = _titles(study, list(drawn))
    for number, (labels, by_step) in enumerate(drawn.items()):
        _line(axis, number, list(by_step), list(by_step.values()), titles[labels], marker=None)
    of = {"ema": "averaged weights", "raw": "weights"}[study.weights]
    _finish(axis, study, "step", f"validation error of the {of}, %")
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
    figure, axis = _new()
    titles = _titles(study, list(drawn), without=along)
    for number, (others, by_x) in enumerate(drawn.items()):
        by_x = dict(sorted(by_x.items()))
        _line(axis, number, list(by_x), list(by_x.values()), titles[others], marker="o")
    values = sorted({x for by_x in drawn.values() for x in by_x})
    if values[0] > 0 and values[-1] > 10 * values[0]:
        axis.set_xscale("log")
        axis.set_xticks(values, [f"{x:g}" for x in values], minor=False)
        axis.minorticks_off()
    _finish(axis, study, along.replace("_", " "), study.what())
    return figure


def _new() -> tuple[Figure, Axes]:
    figure = figures.new_figure((6.4, 4.2), layout="constrained")
    axis = figure.subplots()
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)
    axis.set_axisbelow(True)
    return figure, axis


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
    study: studies.Study, combinations: Sequence[studies.Labels], without: str | None = None
) -> dict[studies.Labels, str]:
    """The labels in which the combinations differ; of one combination, all."""
    axes = [axis for axis in study.axes if axis != without]
    varied = [i for i in range(len(axes)) if len({labels[i] for labels in combinations}) > 1]
    return {
        labels: ", ".join(
            f"{axes[i]} {labels[i]}" if labels[i][:1].isdigit() else labels[i]
            for i in varied or range(len(axes))
        ).replace("_", " ")
        for labels in combinations
    }


def _finish(axis: Axes, study: studies.Study, x: str, y: str) -> None:
    axis.set(xlabel=x, ylabel=y, title=study.title)
    axis.set_ylim(bottom=0)
    axis.title.set_fontsize(10)
    if any(axis.get_legend_handles_labels()[1]):
        axis.legend(frameon=False, fontsize=8)
