"""Plain-text tables of results."""

from collections.abc import Mapping, Sequence

import numpy as np
from scipy import stats


def render(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned by width, the first to the left and the others to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]
    lines = []
    for row in (header, *rows):
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def evaluation(summary: Mapping[str, dict]) -> str:
    """The table of what `evaluation.summarize` gives for each split: errors in percent.

    Medians over more checkpoints than there are would repeat one another, and are left out.
    """
    rows = []
    for split, result in summary.items():
        for kind in ("raw", "ema"):
            medians = {
                window: f"{median['error']:.2f} ({median['checkpoints']})"
                for window, median in result[kind]["median"].items()
                if window == "10" or median["checkpoints"] == int(window) > 10
            }
            rows.append(
                [
                    f"{split} {kind}",
                    f"{result[kind]['last']['error']:.2f}",
                    *medians.values(),
                    f"{result[kind]['best']['error']:.2f} (step {result[kind]['best']['step']})",
                ]
            )
    header = ["error, %", "last", *(f"median of last {w} (used)" for w in medians)]
    return render([*header, "best, chosen on itself"], rows)


MEASURES = {
    "mean_auroc_wrong": "AUROC, wrong pseudo-labels",
    "auroc_wrong": "at the end",
    "auroc_wrong_by_confidence": "by low confidence",
    "auroc_stranger": "AUROC, strangers",
    "auroc_stranger_by_confidence": "strangers by low confidence",
}


def comparison(
    results: Mapping[str, Mapping[int, Mapping[str, float | None]]], base: str = "fixed"
) -> str:
    """Test errors, and over several seeds how each row stands to the row `base`, seed by seed.

    Args:
      results: row -> seed -> {"raw", "ema": percent; the names of MEASURES: a number or None}.
      base: the row that the others are compared with, if it is among them.

    Returns:
      A table of mean +- sample standard deviation over the seeds; the mean of the paired
      differences of raw errors with the half width of its 95% interval (Student's t) and the
      numbers of seeds on which the row is better, equal and worse; and mean AUROCs, with the
      number of seeds where there was an example to tell from the others.
    """
    several = max(map(len, results.values())) > 1
    compared = several and base in results and len(results) > 1
    measures = {
        name: title
        for name, title in MEASURES.items()
        if any(_values(by_seed, name) for by_seed in results.values())
    }
    header = ["test error, %", "raw", "ema"]
    header += [f"raw less {base}", "better/equal/worse"] if compared else []
    rows = []
    for name, by_seed in results.items():
        cells = [name, spread(_values(by_seed, "raw")), spread(_values(by_seed, "ema"))]
        if compared and name == base:
            cells += ["", ""]
        elif compared:
            both = sorted(by_seed.keys() & results[base].keys())
            cells += paired([by_seed[s]["raw"] - results[base][s]["raw"] for s in both])
        for measure in measures:
            values = _values(by_seed, measure)
            count = f" ({len(values)})" if several else ""
            cells.append(f"{spread(values)}{count}" if values else "")
        rows.append(cells)
    return render([*header, *measures.values()], rows)


def _values(by_seed: Mapping[int, Mapping[str, float | None]], name: str) -> list[float]:
    return [result[name] for result in by_seed.values() if result.get(name) is not None]


def spread(values: Sequence[float]) -> str:
    """Mean +- sample standard deviation, of one value that value alone."""
    deviation = f" +- {np.std(values, ddof=1):.2f}" if len(values) > 1 else ""
    return f"{np.mean(values):.2f}{deviation}"


def paired(differences: Sequence[float]) -> list[str]:
    """Mean and 95% half width of paired differences, and how many are below, at and above 0."""
    differences = np.asarray(differences)
    if not differences.size:
        return ["", ""]
    counts = [np.count_nonzero(x) for x in (differences < 0, differences == 0, differences > 0)]
    n, half = len(differences), ""
    if n > 1:
        half = stats.t.ppf(0.975, n - 1) * differences.std(ddof=1) / np.sqrt(n)
        half = f" +- {half:.2f}"
    return [f"{differences.mean():+.2f}{half}", "/".join(map(str, counts))]
