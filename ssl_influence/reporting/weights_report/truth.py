"""Weights beside what is known of the examples, and beside the model's confidence."""

import numpy as np

from ssl_influence.reporting import ranking
from ssl_influence.reporting.weights_report import charts, prose
from ssl_influence.reporting.weights_report.charts import Text, number, percent
from ssl_influence.reporting.weights_report.contents import Contents
from ssl_influence.reporting.weights_report.markup import Child, Html, element, table

_BINS = 40
_CELLS = 24
_TENTHS = 10


def section(contents: Contents) -> list[Child]:
    """What the section holds."""
    weights, pool, predictions = contents.weights, contents.pool, contents.predictions
    if weights is None:
        return [prose.missing("There are no weights yet.")]
    known, learned = pool.label >= 0, contents.learned
    made: list[Child] = []
    figures: list[Html | None] = []
    if predictions is None:
        made.append(
            prose.missing(
                "There is no checkpoint to predict by, so there are neither pseudo-labels nor "
                "confidences."
            )
        )
    else:
        averaged = (
            "the moving average" if predictions.weights == "ema" else "the weights as trained"
        )
        made += prose.paragraphs(
            f"Pseudo-labels here are the most probable classes by {averaged} of step "
            f"{number(predictions.step)}, without augmentation; in training they come from "
            "augmented views of the model as it is then."
        )
        if learned:
            figures.append(_weight_and_confidence(contents))
    if not known.any() and not pool.stranger.any():
        made.append(
            prose.missing(
                "The truth about these examples is not known (the data have no label for them), so "
                "weights cannot be compared with it."
            )
        )
    elif not known.all():
        of = f"{number(known.sum())} of {number(len(known))} examples are of known class"
        if pool.stranger.any():
            of += f", and {number(pool.stranger.sum())} of no class of the task (strangers)"
        made += prose.paragraphs(f"{of}. Only these are judged.")
    if predictions is not None and known.any() and learned:
        wrong = known & (predictions.pseudo_label != pool.label)
        figures.append(
            _groups(
                contents,
                "Weights of right and wrong pseudo-labels",
                {"right pseudo-label": known & ~wrong, "wrong pseudo-label": wrong},
            )
        )
        figures.append(_accuracy_by_weight(contents))
    if pool.stranger.any() and learned:
        figures.append(
            _groups(
                contents, "Weights of strangers", {"of the task": known, "stranger": pool.stranger}
            )
        )
    made.append(element("div", [figure for figure in figures if figure], class_="charts"))
    tables = [_aurocs(contents) if learned else None, _by_class(contents)]
    made.append(element("div", tables, class_="tables"))
    made.append(
        prose.explained(
            "The chance (area under the ROC curve) is that of two examples, one wrong and one "
            "right, the wrong one has the lower weight: 0.5 says nothing, 1 is perfect, and below "
            "0.5 the order is reversed. The same for the model's confidence stands beside it, "
            "which costs nothing to have. It is not defined where all or none are to be found.",
            "Weights follow the validation loss, not the truth of labels: a run may profit from "
            "them while they hardly tell right from wrong.",
        )
    )
    return made


def _weight_and_confidence(contents: Contents) -> Html:
    weight, confidence = contents.weights.weight, contents.predictions.confidence
    x_edges = np.linspace(float(np.floor(confidence.min() * 20) / 20), 1, 21)
    y_edges = charts.edges(weight.min(), weight.max(), _CELLS)
    shares = np.histogram2d(confidence, weight, [x_edges, y_edges])[0] / len(weight)
    known = contents.pool.label >= 0
    right = contents.predictions.pseudo_label == contents.pool.label
    place = np.clip(np.searchsorted(x_edges, confidence, side="right") - 1, 0, len(x_edges) - 2)
    rows = []
    for i in range(len(x_edges) - 1):
        inside = place == i
        if not inside.any():
            continue
        row = [f"{number(x_edges[i])} to {number(x_edges[i + 1])}", number(inside.sum())]
        row.append(number(weight[inside].mean()))
        if known.any():
            judged = inside & known
            row.append(percent(right[judged].mean()) if judged.any() else "")
        rows.append(row)
    header = ["confidence", "examples", "mean weight"]
    header += ["right pseudo-labels"] if known.any() else []
    text = Text(
        "Weight against confidence",
        "confidence in the pseudo-label",
        "weight",
        "The stronger the color, the more examples.",
    )
    numbers = table("Mean weight by confidence", header, rows)
    correlation = _rank_correlation(weight, confidence)
    summary = f"Rank correlation {correlation:.2f}."
    text = Text(text.title, text.x_label, text.y_label, f"{text.note} {summary}")
    return charts.heat_map(text, x_edges, y_edges, shares, numbers, summary)


def _rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's; 0 where one of them is constant."""
    from scipy import stats

    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return 0.0
    return float(stats.spearmanr(a, b).statistic)


def _groups(contents: Contents, title: str, groups: dict[str, np.ndarray]) -> Html | None:
    """Histograms of the weights of groups bool [n], each as shares of its own."""
    weight = contents.weights.weight
    edges = charts.edges(weight.min(), weight.max(), _BINS // 2)
    found = [
        (f"{label} ({number(rows.sum())})", np.histogram(weight[rows], edges)[0] / rows.sum())
        for label, rows in groups.items()
        if rows.any()
    ]
    if len(found) < 2:
        return None
    return charts.histogram(Text(title, "weight", "share of its group"), edges, found, shares=True)


def _accuracy_by_weight(contents: Contents) -> Html:
    pool = contents.pool
    judged = np.flatnonzero(pool.label >= 0)
    right = (contents.predictions.pseudo_label == pool.label)[judged]
    weight, of, counts = np.unique(
        contents.weights.weight[judged], return_inverse=True, return_counts=True
    )
    # Examples of equal weight have no order: each counts as their mean.
    means = np.bincount(of, right, len(weight)) / counts
    parts = np.array_split(means.repeat(counts), _TENTHS)
    text = Text(
        "Right pseudo-labels by weight",
        "tenth of the examples, 1: the lowest weights",
        "right pseudo-labels",
        "Where low weights mark wrong pseudo-labels, the bars rise.",
    )
    tenths = [float(part.mean()) if len(part) else float("nan") for part in parts]
    return charts.bars(text, tenths, 1.0)


def _aurocs(contents: Contents) -> Html | None:
    weights, pool, predictions = contents.weights, contents.pool, contents.predictions
    known, moved = pool.label >= 0, weights.updates > 0
    confidence = None if predictions is None else predictions.confidence
    # What is to be found, and among whom.
    sought: list[tuple[str, np.ndarray, np.ndarray]] = []
    if predictions is not None and known.any():
        sought.append(("wrong pseudo-labels", predictions.pseudo_label != pool.label, known))
    if pool.stranger.any():
        sought.append(("strangers", pool.stranger, known | pool.stranger))
    if not moved.all():
        sought += [
            (f"{what}, of weights that moved", x, among & moved) for what, x, among in sought
        ]
    rows = [
        [what, *(_auroc(score, x, among) for score in (weights.weight, confidence))]
        for what, x, among in sought
    ]
    if not rows:
        return None
    header = ["told from the others", "by a low weight", "by a low confidence"]
    return table("Chance that the one to find ranks first (AUROC)", header, rows)


def _auroc(score: np.ndarray | None, sought: np.ndarray, among: np.ndarray) -> str:
    """How well low scores [n] mark what is sought, bool [n], among some, bool [n]."""
    if score is None:
        return ""
    area = ranking.auroc(-score[among], sought[among])
    return "not defined" if np.isnan(area) else f"{area:.2f}"


def _by_class(contents: Contents) -> Html | None:
    """A table by true class; by pseudo-label where no truth is known."""
    weights, pool, predictions = contents.weights, contents.pool, contents.predictions
    known = pool.label >= 0
    header = ["class", "examples"] + (["mean weight", "median updates"] if contents.learned else [])
    groups: list[tuple[str, np.ndarray]] = []
    judged = predictions is not None and known.any()
    if known.any():
        title = "By true class"
        groups += [(name, pool.label == c) for c, name in enumerate(pool.class_names)]
        groups += [("strangers", pool.stranger), ("unknown", ~known & ~pool.stranger)]
    elif predictions is not None:
        title = "By pseudo-label"
        groups += [(name, predictions.pseudo_label == c) for c, name in enumerate(pool.class_names)]
    else:
        return None
    if judged:
        header.append("right pseudo-labels")
    rows = []
    for name, inside in groups:
        if not inside.any():
            continue
        row = [name, number(inside.sum())]
        if contents.learned:
            row += [
                number(weights.weight[inside].mean()),
                number(np.median(weights.updates[inside])),
            ]
        if judged:
            right = (predictions.pseudo_label == pool.label)[inside & known]
            row.append(percent(right.mean()) if len(right) else "")
        rows.append(row)
    return table(title, header, rows)
