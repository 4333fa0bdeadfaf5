"""Where the example weights lie, now and on the way."""

import numpy as np

from ssl_influence.reporting.weights_report import charts, prose
from ssl_influence.reporting.weights_report.charts import Text, number
from ssl_influence.reporting.weights_report.contents import Contents
from ssl_influence.reporting.weights_report.markup import Child, Html, element, table

_BINS = 40
_CELLS = 24


def section(contents: Contents) -> list[Child]:
    """What the section holds."""
    weights = contents.weights
    if weights is None:
        return [
            prose.missing(
                "No weights were written yet: a run writes them with each checkpoint, as "
                "weights/weights-<step>.csv."
            )
        ]
    if contents.weighting == "single":
        return [
            prose.missing(
                "weighting=single: all unlabeled examples share one weight, whose way is above. "
                "There is no distribution, and nothing here tells one example from another."
            )
        ]
    if contents.weighting == "fixed":
        return [
            prose.missing(
                "weighting=fixed: no weight was learned, so they say nothing about the examples."
            )
        ]
    if not contents.learned:
        return [
            prose.missing(
                f"No weight has moved by step {number(weights.step)}: all are where they started."
            )
        ]
    figures = [_newest_weights(contents), _updates(contents)]
    notes = []
    if len(weights.history) > 1:
        figures.insert(0, _weights_by_step(contents))
    else:
        notes.append("There is one file of weights, so nothing can be said about their way.")
    return [
        element("div", figures, class_="charts"),
        prose.paragraphs(*notes),
        prose.explained(
            "A weight below its start means that, for the model as it was, more of this example "
            "would have raised the validation loss; above, that it would have lowered it.",
            "M-Adam moves a weight by about its step size an update, whatever the size of the "
            "gradient: the distance from the start says how steadily the updates agreed, not how "
            "much an example matters.",
            "Examples that never passed the confidence threshold have no updates and stay at the "
            "start.",
        ),
    ]


def _newest_weights(contents: Contents) -> Html:
    weights = contents.weights
    edges = charts.edges(weights.weight.min(), weights.weight.max(), _BINS)
    text = Text(f"Weights at step {number(weights.step)}", "weight", "examples")
    heights = np.histogram(weights.weight, edges)[0]
    markers = [("mean", float(weights.weight.mean())), ("start", weights.initial)]
    markers = [(label, x) for label, x in markers if edges[0] <= x <= edges[-1]]
    return charts.histogram(text, edges, [("examples", heights)], markers)


def _updates(contents: Contents) -> Html:
    updates = contents.weights.updates
    bins = int(min(_BINS, updates.max() - updates.min() + 1))
    width = -(-(updates.max() - updates.min() + 1) // bins)
    edges = updates.min() - 0.5 + width * np.arange(bins + 1.0)
    text = Text(
        f"Updates at step {number(contents.weights.step)}",
        "updates of a weight",
        "examples",
        "How often the weight of an example moved. Those that moved seldom say little.",
    )
    return charts.histogram(text, edges, [("examples", np.histogram(updates, edges)[0])])


def _weights_by_step(contents: Contents) -> Html:
    history = contents.weights.history
    steps = np.array(list(history), float)
    low = min(float(weight.min()) for weight in history.values())
    high = max(float(weight.max()) for weight in history.values())
    edges = charts.edges(low, high, _CELLS)
    size = len(contents.weights.weight)
    shares = np.stack([np.histogram(weight, edges)[0] / size for weight in history.values()])
    between = (steps[1:] + steps[:-1]) / 2
    x_edges = np.concatenate([[2 * steps[0] - between[0]], between, [2 * steps[-1] - between[-1]]])
    quantiles = (0, 5, 25, 50, 75, 95, 100)
    rows = [
        [number(step), *(number(q) for q in np.percentile(weight, quantiles))]
        for step, weight in history.items()
    ]
    title = "Where the weights lie, by step"
    numbers = table("Quantiles by step", ["step", *(f"{q}%" for q in quantiles)], rows)
    first, last = (history[step] for step in (min(history), max(history)))
    summary = (
        f"At step {number(steps[0])} from {number(first.min())} to {number(first.max())}, at step "
        f"{number(steps[-1])} from {number(last.min())} to {number(last.max())}."
    )
    text = Text(
        title,
        "step",
        "weight",
        "A column for each file of weights; the stronger the color, the more examples.",
    )
    return charts.heat_map(text, x_edges, edges, shares, numbers, summary)
