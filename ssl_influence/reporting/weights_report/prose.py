"""Paragraphs of the page, and what it says in the end."""

from ssl_influence.reporting.weights_report.contents import Contents
from ssl_influence.reporting.weights_report.markup import Child, Html, element


def paragraphs(*texts: Child) -> list[Html]:
    """A paragraph for each text that is not empty."""
    return [element("p", text) for text in texts if text]


def missing(text: str) -> Html:
    """A paragraph that stands out: what cannot be shown, and why."""
    return element("p", text, class_="notice")


def explained(*texts: str) -> Html:
    """Paragraphs that open when they are asked for."""
    return element(
        "details",
        element("summary", "How to read this"),
        paragraphs(*texts),
        class_="explained",
    )


def reading(contents: Contents) -> list[Child]:
    """What the last section holds: what weights mean, and what they do not."""
    texts = [
        "The example weight lambda multiplies what an unlabeled example adds to the loss. It moves "
        "by the example's influence on the validation loss: down where more of the example would "
        "have raised that loss, up where it would have lowered it.",
        "A low weight marks a wrong pseudo-label as a tendency, not sharply: in this project's "
        "experiments the chance that a wrong one has the lower weight was 0.58 to 0.73 on small "
        "sets, and 0.5 on texts, where the weights lowered the error all the same.",
        "A weight that moved seldom says little. The distance from the start measures agreement "
        "over updates rather than the size of the effect, since each update is about as large as "
        "any other.",
        "By default the influence is that over the last layer alone, a useful signal but no "
        "faithful copy of the whole network's.",
        "Weights are of one run. Another seed of the split or of the network gives others.",
    ]
    if contents.weighting != "per_example":
        texts.append(
            f"In this run weighting={contents.weighting}: examples have no weight of their own."
        )
    return paragraphs(*texts)
