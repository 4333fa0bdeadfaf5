"""HTML and SVG from nested calls, in which every text is escaped."""

import html
from collections.abc import Iterable
from typing import TypeAlias

_VOID = {"input", "link", "meta"}


class Html(str):
    """Markup; any other string is a text."""

    __slots__ = ()


Child: TypeAlias = "str | int | None | Iterable[Child]"


def element(tag: str, *children: Child, **attributes: str | float | bool | None) -> Html:
    """An element.

    Args:
      tag: its name.
      *children: texts, which are escaped, elements, or iterables of these; None is left out.
      **attributes: by name, where `_` stands for `-` and a last one is dropped, as in `class_`.
        None and False are left out; True has no value.
    """
    opening = [tag]
    for name, value in attributes.items():
        name = name.removesuffix("_").replace("_", "-")
        if value is True:
            opening.append(name)
        elif value is not None and value is not False:
            opening.append(f'{name}="{text(str(value))}"')
    inside = join(*children)
    closing = "" if tag in _VOID else f"{inside}</{tag}>"
    return Html(f"<{' '.join(opening)}>{closing}")


def join(*children: Child) -> Html:
    """The children of `element` one after the other."""
    parts = []
    for child in children:
        if isinstance(child, str):
            parts.append(child if isinstance(child, Html) else text(child))
        elif isinstance(child, Iterable):
            parts.append(join(*child))
        elif child is not None:
            parts.append(text(str(child)))
    return Html("".join(parts))


def text(value: str) -> Html:
    """A text, escaped for content and for attributes in double quotes.

    What UTF-8 cannot say, as bytes of a file's name that were no text, is replaced.
    """
    readable = (
        value.encode("utf-8", "replace").decode("utf-8").replace("\0", "\N{REPLACEMENT CHARACTER}")
    )
    return Html(html.escape(readable))


def table(
    caption: str,
    header: Iterable[str],
    rows: Iterable[Iterable[Child]],
    class_: str | None = None,
) -> Html:
    """A table whose first column names its rows, in a box that scrolls where it is too large.

    The box can have the focus, so that the keyboard scrolls it too.
    """
    made = element(
        "table",
        element("caption", caption),
        element("thead", element("tr", (element("th", name, scope="col") for name in header))),
        element(
            "tbody",
            (
                element("tr", element("th", first, scope="row"), (element("td", c) for c in rest))
                for first, *rest in rows
            ),
        ),
        class_=class_,
    )
    return element("div", made, class_="scroll", tabindex=0, role="region", aria_label=caption)
