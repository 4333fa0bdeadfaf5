"""Tables of studies: error rates over seeds, by the labels of a few named axes.

A study is a product of axes, as method and weighting. A combination has a label of each axis, a
tuple of strings in the order of the axes; a cell is a combination on one seed.
"""

import csv
import dataclasses
import io
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ssl_influence import config
from ssl_influence.reporting import tables

Labels = tuple[str, ...]
# Combination -> seed -> what a cell ended with: see `launch.train_and_judge` of the experiments.
Results = Mapping[Labels, Mapping[int, Mapping[str, Any]]]

STATISTICS = ("last", "best", "median_1", "median_10", "median_20", "median_50")
FORMATS = ("text", "markdown", "csv", "latex")
FIGURES = ("curves", "lines", "dots")


@dataclasses.dataclass(frozen=True)
class Study:
    """What is tabulated, and how.

    Attributes:
      title: a line.
      axes: name -> labels, in the order that tables have.
      skip: combinations that there are not: each is axis -> labels, and all have to fit.
      columns: the axes that are columns; the others are rows.
      baseline: {axis: label}; the other labels of that axis are compared with this one, seed by
        seed. The axis is the one column, or there are no columns.
      split: "test" or "validation".
      weights: "ema", the moving average, or "raw".
      statistic: one of STATISTICS.
      figure: {"kind": "curves"}: validation error over the steps; {"kind": "lines", "x": axis}:
        error over that axis, whose labels are numbers, a line for each combination of the others;
        {"kind": "dots"}: errors seed by seed, grouped as in the table; with "measures": true also
        how well low weights and low confidences mark bad examples.
      paper: label -> ... -> {"mean": percent, "std": percent or absent}, in the order of the axes,
        for the combinations that the paper has numbers for.

    Raises:
      ConfigError: axes, labels or values that do not go together.
    """

    title: str
    axes: Mapping[str, Labels]
    skip: tuple[Mapping[str, Labels], ...] = ()
    columns: tuple[str, ...] = ()
    baseline: Mapping[str, str] | None = None
    split: str = "test"
    weights: str = "ema"
    statistic: str = "last"
    figure: Mapping[str, Any] | None = None
    paper: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        for one in self.skip:
            for axis, labels in one.items():
                self._check("skip", axis, labels)
        for axis in self.columns:
            self._check("columns", axis)
        config.require(len(set(self.columns)) == len(self.columns), "columns names an axis twice.")
        for key, allowed in (
            ("split", ("test", "validation")),
            ("weights", ("ema", "raw")),
            ("statistic", STATISTICS),
        ):
            value = getattr(self, key)
            config.require(value in allowed, f"{key}={value!r} is not one of {', '.join(allowed)}.")
        if self.baseline is not None:
            config.require(len(self.baseline) == 1, "baseline names one axis and its label.")
            ((axis, label),) = self.baseline.items()
            self._check("baseline", axis, (label,))
            config.require(
                self.columns in ((), (axis,)),
                f"baseline: {axis!r} has to be the only one of the columns, or there are none.",
            )
        if self.figure is not None:
            kind = self.figure.get("kind")
            config.require(
                kind in FIGURES, f"figure: kind={kind!r} is not one of {', '.join(FIGURES)}."
            )
            needed = {"kind", "x"} if kind == "lines" else {"kind"}
            allowed = needed | ({"measures"} if kind == "dots" else set())
            config.require(
                needed <= set(self.figure) <= allowed,
                f"figure: {', '.join(self.figure)}: only lines have an x, an axis, and they need "
                "one; only dots may have measures.",
            )
            measures = self.figure.get("measures", False)
            config.require(
                isinstance(measures, bool), f"figure: measures={measures!r} is no boolean."
            )
            if kind == "lines":
                self._check("figure", self.figure["x"])
                for label in self.axes[self.figure["x"]]:
                    config.require(_is_number(label), f"figure: x={label!r} is no number.")
                numbers = [float(label) for label in self.axes[self.figure["x"]]]
                config.require(len(set(numbers)) == len(numbers), "figure: x has a number twice.")
        combinations = set(self.combinations())
        config.require(bool(combinations), "skip leaves nothing.")
        for labels in _leaves(self.paper):
            config.require(labels in combinations, f"paper: {'/'.join(labels)} is no combination.")

    def _check(self, key: str, axis: str, labels: Sequence[str] = ()) -> None:
        config.require(axis in self.axes, f"{key}: {axis!r} is no axis of {', '.join(self.axes)}.")
        for label in labels:
            config.require(
                label in self.axes[axis],
                f"{key}: {label!r} is not one of {axis}'s {', '.join(self.axes[axis])}.",
            )

    def combinations(self, only: Mapping[str, Sequence[str]] | None = None) -> list[Labels]:
        """All combinations but those skipped.

        Args:
          only: axis -> the labels that are kept.

        Raises:
          ConfigError: it names an axis or a label that there is not, or leaves nothing.
        """
        only = only or {}
        for axis, labels in only.items():
            self._check("only", axis, labels)
        kept = [
            [label for label in labels if label in only.get(axis, labels)]
            for axis, labels in self.axes.items()
        ]
        found = [labels for labels in itertools.product(*kept) if not self._skipped(labels)]
        config.require(bool(found) or not only, "only: nothing is left of it.")
        return found

    def _skipped(self, labels: Labels) -> bool:
        at = dict(zip(self.axes, labels, strict=True))
        return any(all(at[axis] in among for axis, among in one.items()) for one in self.skip)

    @property
    def rows(self) -> tuple[str, ...]:
        """The axes that are rows."""
        return tuple(axis for axis in self.axes if axis not in self.columns)

    def combination(self, row: Labels, column: Labels) -> Labels:
        """The labels of a row and of a column, in the order of the axes."""
        at = dict(zip((*self.rows, *self.columns), (*row, *column), strict=True))
        return tuple(at[axis] for axis in self.axes)

    def error(self, cell: Mapping[str, Any]) -> float:
        """What is tabulated of a cell, in percent."""
        of_kind = cell["summary"][self.split][self.weights]
        if self.statistic.startswith("median_"):
            return of_kind["median"][self.statistic.removeprefix("median_")]["error"]
        return of_kind[self.statistic]["error"]

    def what(self) -> str:
        """What the numbers are, in words: error of which weights, on what, of which checkpoints."""
        weights = {"ema": "averaged weights", "raw": "weights"}[self.weights]
        when = {"last": "at the end", "best": f"best checkpoint, chosen on the {self.split} set"}
        window = self.statistic.removeprefix("median_")
        of = when.get(self.statistic, f"median of the last {window} checkpoints")
        return f"{self.split} error of the {weights}, %, {of}"


def _is_number(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and math.isfinite(float(value))
    except (TypeError, ValueError, OverflowError):
        return False


def _leaves(paper: Mapping[str, Any], above: Labels = ()) -> dict[Labels, Mapping[str, float]]:
    """{"uda": {"250": {"mean": 1}}} -> {("uda", "250"): {"mean": 1}}."""
    found = {}
    for label, value in paper.items():
        config.require(
            isinstance(value, Mapping), f"paper: {label!r} needs an object, with mean or labels."
        )
        if "mean" in value:
            numbers = (value["mean"], value.get("std", 0))
            config.require(
                all(isinstance(x, int | float) and _is_number(x) for x in numbers)
                and set(value) <= {"mean", "std"},
                f"paper: {label!r} is to have numbers, mean and perhaps std.",
            )
            found[(*above, label)] = value
        else:
            found.update(_leaves(value, (*above, label)))
    return found


def table(study: Study, results: Results) -> tuple[list[str], list[list[str]]]:
    """Header and rows of a study's table, as text.

    Errors are mean +- sample standard deviation over the seeds that are there, with their number
    where a combination has fewer than another; "" where there is none yet, "-" where there is no
    such combination. The labels that differ from the baseline have the mean of the paired
    differences with the half width of its 95% interval (Student's t), and the numbers of seeds on
    which they are better, equal and worse. Below a row are the paper's numbers, if there are any.
    """
    most = max((len(by_seed) for by_seed in results.values()), default=0)
    combinations, paper = set(study.combinations()), _leaves(study.paper)
    columns = list(itertools.product(*(study.axes[axis] for axis in study.columns)))
    compared = _compared(study)
    header = [*study.rows, *(" ".join(column) or "error, %" for column in columns)]
    for label, base in compared:
        header += [f"{label} less {base}".strip(), f"{label} better/equal/worse".strip()]
    rows = []
    for row in itertools.product(*(study.axes[axis] for axis in study.rows)):
        of_row = [study.combination(row, column) for column in columns]
        if not combinations & set(of_row):
            continue
        cells = list(row)
        for labels in of_row:
            errors = [study.error(cell) for cell in results.get(labels, {}).values()]
            cells.append(_errors(errors, most) if labels in combinations else "-")
        for label, _ in compared:
            cells += _differences(study, results, of_row, label)
        rows.append(cells)
        if any(labels in paper for labels in of_row):
            theirs = [_paper(paper.get(labels)) for labels in of_row]
            rows.append(["paper", *[""] * (len(row) - 1), *theirs, *[""] * (2 * len(compared))])
    return header, rows


def _compared(study: Study) -> list[tuple[str, str]]:
    """(label, baseline) for each column of differences; the label is "" for a baseline in rows."""
    if study.baseline is None:
        return []
    ((axis, base),) = study.baseline.items()
    if axis in study.columns:
        return [(label, base) for label in study.axes[axis] if label != base]
    return [("", base)]


def _differences(study: Study, results: Results, of_row: Sequence[Labels], label: str) -> list[str]:
    ((axis, base),) = study.baseline.items()
    place = list(study.axes).index(axis)
    ours = next((c for c in of_row if label in ("", c[place])), None)
    if ours is None or ours[place] == base:
        return ["", ""]
    theirs = (*ours[:place], base, *ours[place + 1 :])
    both = sorted(results.get(ours, {}).keys() & results.get(theirs, {}).keys())
    errors = [
        study.error(results[ours][seed]) - study.error(results[theirs][seed]) for seed in both
    ]
    return tables.paired(errors)


def _errors(values: Sequence[float], most: int) -> str:
    if not values:
        return ""
    return tables.spread(values) + (f" ({len(values)})" if len(values) < most else "")


def _paper(value: Mapping[str, float] | None) -> str:
    if value is None:
        return ""
    return f"{value['mean']:.2f}" + (f" +- {value['std']:.2f}" if "std" in value else "")


def measures(study: Study, results: Results) -> tuple[list[str], list[list[str]]] | None:
    """How well low weights mark examples that should not be trained on, for each combination.

    Returns:
      Header and rows, mean +- sample standard deviation of the numbers of `tables.MEASURES` with
      the number of seeds that have one; None where no cell has any.
    """
    names = [
        name
        for name in tables.MEASURES
        if any(c.get(name) is not None for by_seed in results.values() for c in by_seed.values())
    ]
    rows = []
    for labels in study.combinations():
        cells = []
        for name in names:
            values = [c[name] for c in results.get(labels, {}).values() if c.get(name) is not None]
            cells.append(f"{tables.spread(values)} ({len(values)})" if values else "")
        if any(cells):
            rows.append([*labels, *cells])
    return ([*study.axes, *(tables.MEASURES[name] for name in names)], rows) if rows else None


def render(header: Sequence[str], rows: Sequence[Sequence[str]], layout: str) -> str:
    """A table in one of FORMATS, without a last line's end."""
    if layout == "text":
        return tables.render(header, rows)
    if layout == "markdown":
        lines = [header, ["---"] * len(header), *rows]
        return "\n".join("| " + " | ".join(_escaped(c) for c in line) + " |" for line in lines)
    if layout == "csv":
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([header, *rows])
        return text.getvalue().rstrip("\n")
    return _latex(header, rows)


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|")


def _latex(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """For the package booktabs."""
    numbers = max(len(header) - 1, 0)
    body = [" & ".join(map(_latex_cell, row)) + r" \\" for row in rows]
    return "\n".join(
        [
            rf"\begin{{tabular}}{{l{'r' * numbers}}}",
            r"\toprule",
            " & ".join(map(_latex_cell, header)) + r" \\",
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
        ]
    )


def _latex_cell(cell: str) -> str:
    special = {"\\": r"\textbackslash{}", "^": r"\^{}", "~": r"\~{}", "|": r"\textbar{}"}
    special.update({character: f"\\{character}" for character in "%&#_${}"})
    escaped = "".join(special.get(character, character) for character in cell)
    return re.sub(
        r"([+-]?[\d.]+) \+- ([\d.]+)|^[+-][\d.]+$",
        lambda found: f"${found[0].replace('+-', chr(92) + 'pm')}$",
        escaped,
    )


def tidy(study: Study, results: Results) -> tuple[list[str], list[list[str]]]:
    """A line for each cell: its labels, seed, and every statistic of raw and averaged weights.

    What a cell has no number for (AUROCs without learned weights, a test part) is left empty.
    """
    kinds = list(itertools.product(("test", "validation"), ("raw", "ema"), STATISTICS))
    header = [*study.axes, "seed", *(f"{s}_{k}_{which}" for s, k, which in kinds), *tables.MEASURES]
    rows = []
    for labels in study.combinations():
        for seed, cell in sorted(results.get(labels, {}).items()):
            row = [*labels, str(seed)]
            for split, weights, statistic in kinds:
                view = dataclasses.replace(study, split=split, weights=weights, statistic=statistic)
                row.append(f"{view.error(cell):.6g}" if split in cell["summary"] else "")
            for name in tables.MEASURES:
                value = cell.get(name)
                row.append("" if value is None else f"{value:.6g}")
            rows.append(row)
    return header, rows
