"""How the training went, from metrics.jsonl."""

import dataclasses
from collections.abc import Mapping

from ssl_influence.reporting.weights_report import charts, prose
from ssl_influence.reporting.weights_report.charts import Series, Text
from ssl_influence.reporting.weights_report.contents import Contents
from ssl_influence.reporting.weights_report.markup import Child, Html, element


@dataclasses.dataclass(frozen=True)
class _Chart:
    """A chart of metrics.

    Attributes:
      text: its words.
      names: of metrics -> their labels.
      high: see `charts.lines`.
      weightings: that it says something about; None: all.
    """

    text: Text
    names: Mapping[str, str]
    high: float | None = None
    weightings: tuple[str, ...] | None = None


_CHARTS = (
    _Chart(
        Text("Validation error", "step", "error, %"),
        {"validation/error": "as trained", "validation/ema_error": "moving average"},
    ),
    _Chart(
        Text("Terms of the objective", "step", "loss", "Means over the steps between two points."),
        {
            "train/loss_supervised": "supervised",
            "train/loss_unsupervised": "unsupervised, weighted",
            "train/loss_unsupervised_unweighted": "unsupervised, without weights",
            "train/loss_l2": "L2",
        },
    ),
    _Chart(
        Text(
            "Pseudo-labels in training",
            "step",
            "share",
            "How many of a batch's unlabeled examples take part (mask), and how many of these have "
            "the right pseudo-label, where the truth is known.",
        ),
        {"train/mask_rate": "mask rate", "train/pseudo_label_accuracy": "right pseudo-labels"},
        high=1.0,
    ),
    _Chart(
        Text("Examples at the bounds", "step", "share", "Of the unlabeled examples."),
        {
            "weights/share_at_minimum": "at the minimum",
            "weights/share_at_maximum": "at the maximum",
        },
        high=1.0,
        weightings=("per_example", "single"),
    ),
    _Chart(
        Text("Weights that have moved", "step", "share", "Of the unlabeled examples."),
        {"weights/share_updated": "moved at least once"},
        high=1.0,
        weightings=("per_example",),
    ),
)


def section(contents: Contents) -> list[Child]:
    """What the section holds."""
    if not contents.metrics:
        return [
            prose.missing("There is no metrics.jsonl with rows: nothing is known of the training.")
        ]
    figures, missing = [], []
    for chart in _CHARTS:
        if chart.weightings is not None and contents.weighting not in chart.weightings:
            continue
        found = [_series(contents, name, label) for name, label in chart.names.items()]
        found = [one for one in found if one is not None]
        if found:
            figures.append(charts.lines(chart.text, found, high=chart.high))
        else:
            missing.append(f"{chart.text.title}: this run's metrics do not have it.")
    figures.append(_weights(contents))
    return [
        element("div", figures, class_="charts"),
        prose.paragraphs(*missing),
        prose.explained(
            "The validation error judges the model; the example weights are moved so as to lower "
            "the validation loss, so it is no independent judge of a run with learned weights. The "
            "test error is.",
            "A mask rate near 0 means that hardly any unlabeled example takes part, and that few "
            "weights can move; pseudo-label accuracy says what the model would be taught.",
            "Many weights at a bound mean that the step size is large or that the bound is tight.",
        ),
    ]


def _series(contents: Contents, name: str, label: str) -> Series | None:
    rows = [row for row in contents.metrics if name in row]
    if not rows:
        return None
    return Series(label, [row["step"] for row in rows], [row[name] for row in rows])


def _weights(contents: Contents) -> Html | None:
    labels = {
        "weights/mean": "mean",
        "weights/median": "median",
        "weights/quantile_05": "5%",
        "weights/quantile_95": "95%",
        "weights/quantile_25": "25%",
        "weights/quantile_75": "75%",
    }
    found = [_series(contents, name, label) for name, label in labels.items()]
    if None in found:
        return None
    text = Text("Example weights", "step", "weight")
    if contents.weighting == "per_example":
        return charts.bands(text, [tuple(found[2:4]), tuple(found[4:])], found[:2])
    return charts.lines(text, found[:1], low=None)
