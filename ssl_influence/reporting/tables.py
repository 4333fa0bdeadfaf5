"""Plain-text tables of results."""

from collections.abc import Mapping, Sequence


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


def comparison(results: Mapping[str, dict]) -> str:
    """Last test errors, one row a run; `results` maps a row's name to its summary of one split."""
    rows = [
        [name, f"{result['raw']['last']['error']:.2f}", f"{result['ema']['last']['error']:.2f}"]
        for name, result in results.items()
    ]
    return render(["test error, %", "raw", "ema"], rows)
