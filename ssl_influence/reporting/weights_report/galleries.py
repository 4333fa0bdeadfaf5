"""The examples themselves: galleries, search and the list of suspects.

They are empty here, and filled by page.js.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ssl_influence.reporting.weights_report import embedding, prose, suspects
from ssl_influence.reporting.weights_report.charts import number, percent
from ssl_influence.reporting.weights_report.contents import Contents
from ssl_influence.reporting.weights_report.markup import Child, Html, element

_STRIP = 12  # cards of the most down- and up-weighted, and of the least confident examples
_FIRST = 50  # suspects of whom it is said how many are wrong


def embedded(
    contents: Contents, ranked: np.ndarray, max_examples: int
) -> tuple[dict[str, Any], list[Html], list[str]]:
    """What page.js makes the galleries of.

    Args:
      contents: the run.
      ranked: its suspects, as `suspects.rank` gives them.
      max_examples: see `page.render`.

    Returns:
      Values of JSON; the sheets of pictures; and sentences on what is not there, or not exactly.
    """
    weights, pool, predictions = contents.weights, contents.pool, contents.predictions
    size = len(weights.weight)
    # Without weights that moved the script begins in the order of the ids.
    ties = embedding.mixed(weights.example_id) if contents.learned else weights.example_id
    unsure = [] if predictions is None else np.lexsort((ties, predictions.confidence))[:_STRIP]
    shown = embedding.chosen(weights.weight, ties, max_examples, unsure)
    slot = np.full(size, -1, np.int64)
    slot[shown] = np.arange(len(shown))
    label = np.where(pool.stranger, embedding.STRANGER, pool.label)
    held = {
        "kind": pool.kind,
        "classes": [str(name) for name in pool.class_names],
        "initial": weights.initial,
        "learned": contents.learned,
        "id": embedding.array(weights.example_id, "<u4"),
        "weight": embedding.array(weights.weight, "<f4"),
        "updates": embedding.array(weights.updates, "<u4"),
        "label": embedding.array(label, "<i4"),
        "slot": embedding.array(slot, "<i4"),
        "history": embedding.history(weights.history, shown),
        "names": None if pool.names is None else [str(name) for name in pool.names],
        "predicted": None,
        "suspects": {
            "rows": embedding.array(ranked, "<u4"),
            "csv": suspects.to_csv(contents, ranked),
        },
    }
    if predictions is not None:
        held["predicted"] = {
            "class": embedding.array(predictions.pseudo_label, "<i4"),
            "confidence": embedding.array(predictions.confidence, "<f4"),
        }
    ids = weights.example_id[shown]
    sheets, notes = [], []
    if pool.kind == "image":
        held["image"], sheets, done = embedding.pictures(pool.inputs, ids)
        if done:
            notes.append(f"Pictures are {done}.")
    else:
        held["texts"] = embedding.texts(pool, ids)
    if len(shown) < size:
        what = {"image": "pictures", "text": "texts", "vector": "numbers"}[pool.kind]
        least = "" if predictions is None else "the least confident, "
        notes.append(
            f"The {what} and the history of the weight are in this page for {number(len(shown))} "
            f"of {number(size)} examples: those of the lowest and of the highest weights, a third "
            f"each, {least}and the rest evenly from those between. Weights and predictions are "
            "here for all, and so sorting, filters and search are over all. --max_examples changes "
            "that."
        )
    return held, sheets, notes


def examples_section(contents: Contents, notes: Sequence[str]) -> list[Child]:
    """What the section on examples holds, beginning with some sentences."""
    made: list[Child] = [*prose.paragraphs(*notes)]
    if contents.learned:
        made += [_strip("lowest", "Lowest weights"), _strip("highest", "Highest weights")]
    if contents.predictions is not None:
        made.append(_strip("unsure", "Least confident"))
    return [
        *made,
        _explorer(contents),
        _search(contents),
        prose.explained(
            "A card shows the input, its id (the row in the training part of the dataset), the "
            "weight with the number of its updates and its way over the saved steps, and the "
            "pseudo-label with the model's confidence in it.",
            "Examples that are equal in what they are sorted by come in no order that means "
            "anything.",
            "In the small curve the dashed line is where weights start. All curves have the same "
            "vertical scale.",
        ),
    ]


def _strip(name: str, heading: str) -> Html:
    return element(
        "div",
        element("h3", heading, id=f"{name}-heading"),
        element(
            "ul",
            class_="cards strip",
            id=name,
            tabindex=0,  # it scrolls
            aria_labelledby=f"{name}-heading",
            data_most=_STRIP,
        ),
    )


def _control(name: str, label: str, control: Html) -> Html:
    return element("div", element("label", label, for_=name), control, class_="control")


def _select(name: str, label: str, options: Iterable[tuple[str, str]]) -> Html:
    return _control(
        name, label, element("select", (element("option", t, value=v) for v, t in options), id=name)
    )


def _explorer(contents: Contents) -> Html:
    pool, predictions = contents.pool, contents.predictions
    known = pool.label >= 0
    orders = []
    if contents.learned:
        orders += [("weight", "weight, lowest first"), ("-weight", "weight, highest first")]
    if predictions is not None:
        orders += [
            ("confidence", "confidence, lowest first"),
            ("-confidence", "confidence, highest first"),
        ]
    if contents.learned:
        orders += [("updates", "updates, fewest first"), ("-updates", "updates, most first")]
    orders.append(("id", "example id"))
    classes = [(str(c), name) for c, name in enumerate(pool.class_names)]
    controls = [_select("sort", "Sort by", orders)]
    if predictions is not None:
        controls.append(_select("pseudo", "Pseudo-label", [("", "any"), *classes]))
    if known.any() or pool.stranger.any():
        truths = [("", "any"), *classes]
        if pool.stranger.any():
            truths.append((str(embedding.STRANGER), "stranger (no class of the task)"))
        if (~known & ~pool.stranger).any():
            truths.append(("-1", "unknown"))
        controls.append(_select("label", "True class", truths))
    if predictions is not None and known.any():
        judged = [("", "any"), ("wrong", "wrong"), ("right", "right")]
        controls.append(_select("judged", "Pseudo-label is", judged))
    if contents.learned:
        most = int(contents.weights.updates.max())
        entry = element(
            "input",
            type="number",
            id="least",
            min=0,
            max=most,
            value=0,
            step=1,
            inputmode="numeric",
        )
        controls.append(_control("least", "Updated at least", entry))
    return element(
        "div",
        element("h3", "All examples", id="explorer-heading"),
        element(
            "form",
            controls,
            element("button", "Reset", type="button", id="clear"),
            id="filters",
            role="search",
            aria_label="Sort and filter examples",
        ),
        element("p", role="status", aria_live="polite", id="matches"),
        element("ul", class_="cards", id="cards", aria_labelledby="explorer-heading"),
        _pager("pages", "Pages of examples"),
        class_="part",
    )


def _pager(name: str, label: str) -> Html:
    def button(which: str, text: str) -> Html:
        return element("button", text, type="button", data_go=which)

    entry = f"{name}-entry"
    return element(
        "nav",
        button("first", "First"),
        button("previous", "Previous"),
        element("label", "Page", for_=entry),
        element("input", type="number", id=entry, min=1, value=1, step=1, inputmode="numeric"),
        element("span", "of 1", data_total=True),
        button("next", "Next"),
        button("last", "Last"),
        id=name,
        class_="pager",
        aria_label=label,
    )


def _search(contents: Contents) -> Html:
    ids = contents.weights.example_id
    return element(
        "div",
        element("h3", "Search by example id", id="search-heading", tabindex=-1),
        element(
            "form",
            element(
                "div",
                element("label", "Example ids, with spaces or commas between", for_="ids"),
                element(
                    "input",
                    type="text",
                    id="ids",
                    autocomplete="off",
                    placeholder=f"{ids[0]} {ids[-1]}",
                ),
                class_="control wide",
            ),
            element("button", "Show", type="submit"),
            id="search",
            role="search",
            aria_labelledby="search-heading",
        ),
        element("p", role="status", aria_live="polite", id="found-status"),
        element("ul", class_="cards", id="found", aria_labelledby="search-heading"),
        class_="part",
    )


def suspects_section(contents: Contents, ranked: np.ndarray) -> list[Child]:
    """What the section on suspects holds; `ranked` is as `suspects.rank` gives them."""
    if not contents.learned:
        return [
            prose.missing(
                "Suspects are found by examples' own weights that moved, and there is none."
            )
        ]
    weights, pool, predictions = contents.weights, contents.pool, contents.predictions
    least = suspects.least_updates(weights.updates)
    rule = (
        f"Examples whose weight is below {number(weights.initial)} (--weight_init) after {least} "
        "or more updates (half the median of the weights that moved), the one that the model is "
        "least confident about first and at most a tenth of all. Wrong labels are found better "
        "among pseudo-labels that differ from the label. Examples of no class may be those that "
        "the model is least sure of, or those of the lowest weight, where it is sure of them: look "
        "at both. Weights of examples that it is hardly ever sure of seldom move, so that they are "
        "not listed here: sort by updates, fewest first."
    )
    if not len(ranked):
        return [*prose.paragraphs(rule), prose.missing("There is none.")]
    made: list[Child] = [*prose.paragraphs(rule), *prose.paragraphs(*_hits(contents, ranked))]
    header = ["rank", "example", "weight", "updates"]
    header += ["pseudo-label", "confidence"] if predictions is not None else []
    header += ["true class"] if (pool.label >= 0).any() or pool.stranger.any() else []
    header += ["name"] if pool.names is not None else []
    made += [
        element(
            "p",
            element("button", "Download all as CSV", type="button", id="download"),
            " ",
            element(
                "span",
                "Names there are those of examples.csv, which experiments.inspect_data writes.",
                class_="origin",
            ),
            class_="on-screen",
        ),
        element("p", role="status", aria_live="polite", id="suspects-status"),
        element(
            "div",
            element(
                "table",
                element("caption", f"{number(len(ranked))} suspects"),
                element("thead", element("tr", (element("th", h, scope="col") for h in header))),
                element("tbody", id="suspect-rows"),
                class_="texts",
            ),
            class_="scroll tall",
            tabindex=0,
            role="region",
            aria_label="Table of suspects",
        ),
        _pager("suspect-pages", "Pages of suspects"),
        prose.explained(
            "Suspects are worth a look: a mistake of the model, a mislabeled or odd example, or "
            "something that belongs to no class. Many are none of these: see above how well low "
            "weights tell them, where the truth is known.",
            "The button with an example's id shows its card in the search above.",
        ),
    ]
    return made


def _hits(contents: Contents, ranked: np.ndarray) -> list[str]:
    """What is known of the first suspects, beside all examples."""
    pool, predictions = contents.pool, contents.predictions
    first, lines = ranked[:_FIRST], []
    known = pool.label >= 0
    if predictions is not None and known.any():
        wrong = predictions.pseudo_label != pool.label
        among = first[known[first]]
        if len(among):
            lines.append(
                f"Of the first {len(among)} of known class, {np.count_nonzero(wrong[among])} have "
                f"a wrong pseudo-label ({percent(wrong[among].mean())}; of all "
                f"{percent(wrong[known].mean())})."
            )
    if pool.stranger.any():
        lines.append(
            f"Of the first {len(first)}, {np.count_nonzero(pool.stranger[first])} are strangers "
            f"({percent(pool.stranger[first].mean())}; of all {percent(pool.stranger.mean())})."
        )
    return lines
