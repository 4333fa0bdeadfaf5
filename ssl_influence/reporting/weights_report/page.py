"""The page: its sections, and what it says."""

import base64
import hashlib
import importlib.resources
from collections.abc import Sequence

from ssl_influence.reporting import weights_report
from ssl_influence.reporting.weights_report import (
    curves,
    distribution,
    embedding,
    galleries,
    prose,
    summary,
    suspects,
    truth,
)
from ssl_influence.reporting.weights_report.contents import Contents
from ssl_influence.reporting.weights_report.markup import Child, Html, element


def render(contents: Contents, max_examples: int = weights_report.DEFAULT_MAX_EXAMPLES) -> str:
    """The page about a run, as HTML that needs no other file.

    A Content-Security-Policy in it forbids any connection and any script or style but its own.

    Args:
      contents: the run.
      max_examples: of how many unlabeled examples the picture, text or numbers and the history of
        the weight are in the page; weights and predictions are there of all.
    """
    sections = [
        ("summary", "Summary", summary.section(contents)),
        ("curves", "Training", curves.section(contents)),
        ("weights", "Distribution of the weights", distribution.section(contents)),
        ("truth", "Weights and truth", truth.section(contents)),
    ]
    data: list[Html] = []
    if contents.weights is not None:
        ranked = suspects.rank(contents)
        held, sheets, notes = galleries.embedded(contents, ranked, max_examples)
        sections += [
            ("examples", "Examples", galleries.examples_section(contents, notes)),
            ("suspects", "Suspects", galleries.suspects_section(contents, ranked)),
        ]
        data = [
            *sheets,
            element("script", embedding.script_data(held), type="application/json", id="data"),
        ]
    sections.append(("reading", "How to read the weights", prose.reading(contents)))
    return _document(contents, sections, data)


def _document(
    contents: Contents, sections: Sequence[tuple[str, str, Child]], data: Sequence[Html]
) -> str:
    style, script = _resource("page.css"), _resource("page.js")
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    title = f"Example weights of {contents.name}"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("link", rel="icon", href="data:,"),
        element("style", Html(style)),
    )
    links = (element("li", element("a", heading, href=f"#{name}")) for name, heading, _ in sections)
    main = (
        element(
            "section",
            element("h2", heading, id=f"{name}-heading"),
            body,
            id=name,
            aria_labelledby=f"{name}-heading",
        )
        for name, heading, body in sections
    )
    body = element(
        "body",
        element("a", "Skip to the content", href="#main", class_="skip"),
        element(
            "header",
            element(
                "div",
                element("h1", title),
                element("button", "Dark colors", type="button", id="theme", aria_pressed="false"),
                class_="title",
            ),
            element("p", contents.description, class_="origin"),
            element("nav", element("ul", links), aria_label="Sections"),
        ),
        element(
            "noscript",
            element(
                "p",
                "Galleries, search and the list of suspects need JavaScript, which is off. Charts "
                "and tables do not.",
                class_="notice",
            ),
        ),
        element("main", main, id="main", tabindex=-1),
        element(
            "footer",
            element("p", "This page is complete in itself: it loads nothing and sends nothing."),
        ),
        data,
        element("script", Html(script)),
    )
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"


def _resource(name: str) -> str:
    return importlib.resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    """How a Content-Security-Policy names an inline script or style."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}"
