"""What run this is, and its headline numbers."""

from collections.abc import Iterable

import numpy as np

from ssl_influence.reporting.weights_report import prose
from ssl_influence.reporting.weights_report.charts import number, percent
from ssl_influence.reporting.weights_report.contents import Contents
from ssl_influence.reporting.weights_report.markup import Html, element, table


def section(contents: Contents) -> list[Html]:
    """What the section holds."""
    made = [
        element("dl", (_tile(*tile) for tile in _tiles(contents)), class_="tiles"),
        element("p", _errors_origin(contents), class_="origin"),
    ]
    if _at_chance(contents):
        made.append(
            prose.missing(
                "The validation error is no better than guessing one of the classes: the model has "
                "not learned the task, and neither its pseudo-labels nor the weights mean much. "
                "ssl_influence/docs/troubleshooting.md says what to try."
            )
        )
    if contents.reached < contents.train_steps:
        made.append(
            prose.missing(
                f"The run is at step {number(contents.reached)} of "
                f"{number(contents.train_steps)}: what follows is of an unfinished run."
            )
        )
    elif contents.weights is not None and contents.weights.step < contents.train_steps:
        made.append(
            prose.missing(
                f"This page is of step {number(contents.weights.step)} of "
                f"{number(contents.train_steps)}."
            )
        )
    made.append(
        element(
            "details",
            element("summary", "Settings of the run"),
            table("Settings", ["setting", "value"], contents.settings, class_="texts"),
        )
    )
    return made


def _tile(name: str, value: str, more: str) -> Html:
    detail = element("span", more) if more else None
    return element("div", element("dt", name), element("dd", value, detail))


def _tiles(contents: Contents) -> Iterable[tuple[str, str, str]]:
    """(name, value, detail) of the headline numbers."""
    rows = _last_errors(contents)
    for split, row in rows.items():
        for kind, name in (("ema", "averaged"), ("raw", "as trained")):
            if (error := row.get(f"{kind}_error")) is not None:
                yield f"{split} error, {name}", f"{error:.2f}%", f"step {number(row['step'])}"
    weights, predictions, pool = contents.weights, contents.predictions, contents.pool
    if weights is None:
        return
    size = len(weights.weight)
    yield "unlabeled examples", number(size), f"weights of step {number(weights.step)}"
    if contents.weighting == "single":
        yield "the one weight of all", number(weights.weight[0]), f"start {number(weights.initial)}"
    else:
        low, high = weights.weight.min(), weights.weight.max()
        spread = f"from {number(low)} to {number(high)}" if low < high else "all alike"
        yield "mean weight", number(weights.weight.mean()), spread
    if contents.weighting == "per_example":
        for name, at_bound in weights.at_bounds.items():
            bound = getattr(weights, name)
            detail = f"{number(np.count_nonzero(at_bound))} examples at {number(bound)}"
            yield f"at the {name}", percent(at_bound.mean()), detail
        moved = percent(np.count_nonzero(weights.updates) / size)
        yield "weights that moved", moved, f"median updates {number(np.median(weights.updates))}"
    if predictions is not None and (pool.label >= 0).any():
        known = pool.label >= 0
        right = (predictions.pseudo_label == pool.label)[known]
        detail = f"of {number(known.sum())} of known class"
        yield "pseudo-labels right", percent(right.mean()), detail


def _last_errors(contents: Contents) -> dict[str, dict]:
    """Split -> {"step", "raw_error", "ema_error"} of the newest checkpoint that was evaluated.

    Else what training itself measured on validation examples, which may lack a number.
    """
    if contents.evaluation:
        by_split: dict[str, dict] = {}
        for row in sorted(contents.evaluation, key=lambda row: row["step"]):
            by_split[row["split"]] = dict(row)
        return by_split
    found = [row for row in contents.metrics if "validation/error" in row]
    if not found:
        return {}
    row = {"step": found[-1]["step"], "raw_error": found[-1]["validation/error"]}
    return {"validation": {**row, "ema_error": found[-1].get("validation/ema_error")}}


def _at_chance(contents: Contents) -> bool:
    """Whether neither the weights nor their average are better on validation than guessing."""
    row = _last_errors(contents).get("validation")
    if row is None or contents.pool is None:
        return False
    errors = [row[name] for name in ("raw_error", "ema_error") if row.get(name) is not None]
    return min(errors) >= 100.0 * (1 - 1 / len(contents.pool.class_names))


def _errors_origin(contents: Contents) -> str:
    if contents.evaluation:
        return (
            "Errors are of the last checkpoint that was evaluated (eval/results.jsonl), not the "
            "best one. “Averaged” is the moving average of the network's weights, “as trained” "
            "these themselves."
        )
    if _last_errors(contents):
        return (
            "The errors are what training measured last (metrics.jsonl): no checkpoint was "
            "evaluated. experiments.evaluate does so, and adds the test error where there is a "
            "test part."
        )
    return "No error has been measured yet."
