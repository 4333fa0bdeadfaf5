"""Charts as SVG, each in a figure with a caption, a legend and the numbers as a table.

Colors are classes of page.css (series-0, series-1, ...), so that they follow its color scheme.
Lengths are in units of the view box, about a pixel each.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np

from ssl_influence.reporting.weights_report.markup import Html, element, table

_WIDTH, _HEIGHT = 440, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 22, 14, 44
_TICKS = 5
_MAX_POINTS = 400  # of a line
_MAX_ROWS = 24  # of a table


@dataclasses.dataclass(frozen=True, eq=False)
class Series:
    """Numbers over numbers, finite.

    Attributes:
      label: for the legend.
      x: ascending, [n].
      y: [n].
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]


@dataclasses.dataclass(frozen=True)
class Text:
    """What a chart says in words.

    Attributes:
      title: above it.
      x_label, y_label: of the axes, with their units.
      note: below it; may be empty.
    """

    title: str
    x_label: str
    y_label: str
    note: str = ""


class _Axes:
    """The frame of a chart, and where in it a pair of numbers lies."""

    def __init__(self, x_range: tuple[float, float], y_range: tuple[float, float]):
        self._x, self._y = _widened(x_range), _widened(y_range)

    def x(self, value: float) -> float:
        low, high = self._x
        return round(_LEFT + (value - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(self, value: float) -> float:
        low, high = self._y
        return round(_HEIGHT - _BOTTOM - (value - low) / (high - low) * self._height, 1)

    @property
    def _height(self) -> int:
        return _HEIGHT - _TOP - _BOTTOM

    def svg(self, text: Text, summary: str, *marks: Html) -> Html:
        """The chart with these marks on it."""
        bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
        lines, words = [], []
        for tick in ticks(*self._y):
            y = self.y(tick)
            lines.append(element("line", x1=_LEFT, x2=right, y1=y, y2=y, class_="grid"))
            words.append(_word(number(tick), _LEFT - 6, y + 4, "end"))
        for tick in ticks(*self._x):
            x = self.x(tick)
            lines.append(element("line", x1=x, x2=x, y1=bottom, y2=bottom + 4, class_="axis"))
            words.append(_word(number(tick), x, bottom + 17, "middle"))
        lines.append(element("line", x1=_LEFT, x2=right, y1=bottom, y2=bottom, class_="axis"))
        middle = _TOP + self._height / 2
        words.append(_word(text.x_label, (_LEFT + right) / 2, _HEIGHT - 6, "middle"))
        turned = f"rotate(-90 13 {middle})"
        words.append(_word(text.y_label, 13, middle, "middle", transform=turned))
        return element(
            "svg",
            lines,
            marks,
            words,
            viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
            role="img",
            aria_label=f"{text.title}. {summary}",
        )


def _word(content: str, x: float, y: float, anchor: str, **more: str) -> Html:
    return element("text", content, x=x, y=round(y, 1), text_anchor=anchor, **more)


def _widened(ends: tuple[float, float]) -> tuple[float, float]:
    """A range that is not empty."""
    low, high = map(float, ends)
    if high > low:
        return low, high
    margin = 0.05 * abs(low) or 1.0
    return low - margin, high + margin


def ticks(low: float, high: float, most: int = _TICKS) -> list[float]:
    """Round numbers in a range, at most `most` + 1 of them, evenly spaced by 1, 2 or 5 times a
    power of ten.
    """
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [count * step for count in range(first, last + 1)]


def edges(low: float, high: float, bins: int) -> np.ndarray:
    """Ends of bins of equal width, float [bins + 1], around one number where both ends are it."""
    margin = 0.0 if high > low else 0.5
    return np.linspace(low - margin, high + margin, bins + 1)


def number(value: float) -> str:
    """A number for a reader, to four digits; whole ones as they are, with commas."""
    value = float(value)
    if value == int(value) and abs(value) < 1e12:
        return f"{int(value):,}"
    return f"{value:,.4g}" if 1e-4 <= abs(value) < 1e6 else f"{value:.3g}"


def percent(share: float) -> str:
    """A share in percent, to one decimal."""
    return f"{100 * share:.1f}%"


def lines(
    text: Text, series: Sequence[Series], low: float | None = 0.0, high: float | None = None
) -> Html:
    """Lines over a common axis.

    Args:
      text: the words.
      series: at least one, none of them empty.
      low: the vertical axis begins no higher; None leaves it to the data.
      high: it ends no lower; None leaves it to the data.
    """
    thinned = [_thinned(one) for one in series]
    y = np.concatenate([one.y for one in thinned])
    bounds = [bound for bound in (low, high) if bound is not None]
    axes = _Axes(_ends(thinned), (min([y.min(), *bounds]), max([y.max(), *bounds])))
    marks = [_line(axes, one, i) for i, one in enumerate(thinned)]
    legend = [(one.label, f"line series-{i}") for i, one in enumerate(series)]
    summary = "; ".join(f"{one.label}: {_course(one)}" for one in series)
    return _figure(text, axes.svg(text, summary, *marks), legend, _by_x(text, series))


def bands(text: Text, around: Sequence[tuple[Series, Series]], inside: Sequence[Series]) -> Html:
    """Bands between pairs of lines, the widest first, and lines in them, over a common axis.

    Args:
      text: the words.
      around: (lower end, upper end) of each band, over the same x.
      inside: lines.
    """
    thinned = [(_thinned(low), _thinned(high)) for low, high in around]
    drawn = [_thinned(one) for one in inside]
    everything = [one for pair in thinned for one in pair] + drawn
    y = np.concatenate([one.y for one in everything])
    axes = _Axes(_ends(everything), (y.min(), y.max()))
    marks = [
        element(
            "polygon",
            points=f"{_points(axes, low.x, low.y)} {_points(axes, high.x[::-1], high.y[::-1])}",
            class_="band",
        )
        for low, high in thinned
    ]
    marks += [_line(axes, one, i) for i, one in enumerate(drawn)]
    legend = [(one.label, f"line series-{i}") for i, one in enumerate(inside)]
    legend += [
        (f"{low.label} to {high.label}", f"band band-{i}") for i, (low, high) in enumerate(around)
    ]
    summary = "; ".join(f"{one.label}: {_course(one)}" for one in inside)
    listed = [*inside, *(one for pair in around for one in pair)]
    return _figure(text, axes.svg(text, summary, *marks), legend, _by_x(text, listed))


def histogram(
    text: Text,
    edges: np.ndarray,
    groups: Sequence[tuple[str, np.ndarray]],
    markers: Sequence[tuple[str, float]] = (),
    shares: bool = False,
) -> Html:
    """Counts of one group as bars, or of several as outlines.

    Args:
      text: the words.
      edges: of the bins, ascending [k + 1].
      groups: (label, heights [k]).
      markers: (label, place on the horizontal axis) of dashed lines.
      shares: heights are shares, and the table has percents.
    """
    top = max(float(heights.max()) for _, heights in groups)
    axes = _Axes((edges[0], edges[-1]), (0.0, top or 1.0))
    base, marks = axes.y(0), []
    for i, (_, heights) in enumerate(groups):
        if len(groups) == 1:
            for low, high, height in zip(edges[:-1], edges[1:], heights, strict=True):
                marks.append(_bar(axes, low, high, height, f"bar series-{i}", shares))
            continue
        xs, ys = np.repeat(edges, 2), np.concatenate([[0], np.repeat(heights, 2), [0]])
        outline = _points(axes, xs, ys)
        marks.append(element("polyline", points=outline, class_=f"outline series-{i}"))
    for i, (_, place) in enumerate(markers):
        x = axes.x(place)
        marks.append(element("line", x1=x, x2=x, y1=_TOP, y2=base, class_=f"marker marker-{i}"))
    legend = [
        (f"{label} {number(place)}", f"marker marker-{i}")
        for i, (label, place) in enumerate(markers)
    ]
    if len(groups) > 1:
        legend = [(label, f"outline series-{i}") for i, (label, _) in enumerate(groups)] + legend
    show = percent if shares else number
    rows = [
        [f"{number(low)} to {number(high)}", *(show(heights[i]) for _, heights in groups)]
        for i, (low, high) in enumerate(zip(edges[:-1], edges[1:], strict=True))
        if any(heights[i] for _, heights in groups)
    ]
    header = [text.x_label, *(label for label, _ in groups)]
    summary = "; ".join(
        f"{label}: most between {number(edges[h.argmax()])} and {number(edges[h.argmax() + 1])}"
        for label, h in groups
    )
    return _figure(text, axes.svg(text, summary, *marks), legend, table(text.title, header, rows))


def bars(text: Text, heights: Sequence[float], top: float) -> Html:
    """Bars over 1, 2, ...: shares up to `top`, with NaN where there is none."""
    axes = _Axes((0.5, len(heights) + 0.5), (0.0, top))
    marks = [
        _bar(axes, i + 0.6, i + 1.4, height, "bar series-0", True)
        for i, height in enumerate(heights)
        if not math.isnan(height)
    ]
    known = [(i + 1, height) for i, height in enumerate(heights) if not math.isnan(height)]
    summary = ", ".join(f"{i}: {percent(height)}" for i, height in known)
    rows = [[str(i), percent(height)] for i, height in known]
    made = table(text.title, [text.x_label, text.y_label], rows)
    return _figure(text, axes.svg(text, summary, *marks), [], made)


def heat_map(
    text: Text,
    x_edges: np.ndarray,
    y_edges: np.ndarray,
    shares: np.ndarray,
    numbers: Html,
    summary: str,
) -> Html:
    """Shares [len(x_edges) - 1, len(y_edges) - 1] of cells as shades, the largest the strongest."""
    axes = _Axes((x_edges[0], x_edges[-1]), (y_edges[0], y_edges[-1]))
    top = float(shares.max()) or 1.0
    marks = []
    for i, j in np.argwhere(shares > 0).tolist():
        left, right = axes.x(x_edges[i]), axes.x(x_edges[i + 1])
        upper, lower = axes.y(y_edges[j + 1]), axes.y(y_edges[j])
        # The root lets cells of few examples be seen.
        shade = round(0.08 + 0.92 * math.sqrt(shares[i, j] / top), 2)
        tip = (
            f"{number(x_edges[i])} to {number(x_edges[i + 1])}, "
            f"{number(y_edges[j])} to {number(y_edges[j + 1])}: {percent(shares[i, j])}"
        )
        marks.append(
            element(
                "rect",
                element("title", tip),
                x=left,
                y=upper,
                width=round(right - left, 1),
                height=round(lower - upper, 1),
                class_="cell",
                fill_opacity=shade,
            )
        )
    legend = [(f"up to {percent(top)} in a cell; fainter is less", "cell")]
    return _figure(text, axes.svg(text, summary, *marks), legend, numbers)


def _line(axes: _Axes, series: Series, place: int) -> Html:
    if len(series.x) == 1:
        x, y = axes.x(series.x[0]), axes.y(series.y[0])
        return element("circle", cx=x, cy=y, r=4, class_=f"dot series-{place}")
    points = _points(axes, series.x, series.y)
    return element("polyline", points=points, class_=f"line series-{place}")


def _bar(axes: _Axes, low: float, high: float, height: float, class_: str, share: bool) -> Html:
    left, right, top, base = axes.x(low), axes.x(high), axes.y(height), axes.y(0)
    shown = percent(height) if share else number(height)
    return element(
        "rect",
        element("title", f"{number(low)} to {number(high)}: {shown}"),
        x=left,
        y=top,
        width=max(round(right - left - 0.6, 1), 0.4),
        height=round(base - top, 1),
        class_=class_,
    )


def _figure(text: Text, svg: Html, legend: Iterable[tuple[str, str]], numbers: Html) -> Html:
    keys = [
        element("li", element("svg", _key(mark), viewBox="0 0 26 12", aria_hidden="true"), label)
        for label, mark in legend
    ]
    return element(
        "figure",
        element("figcaption", element("h3", text.title)),
        svg,
        element("ul", keys, class_="legend") if keys else None,
        element("p", text.note, class_="origin") if text.note else None,
        element("details", element("summary", "Numbers as a table"), numbers),
    )


def _key(mark: str) -> Html:
    if mark.startswith(("band", "cell", "bar")):
        return element("rect", x=1, y=1, width=24, height=10, class_=mark)
    return element("line", x1=1, x2=25, y1=6, y2=6, class_=mark)


def _points(axes: _Axes, xs: Iterable[float], ys: Iterable[float]) -> str:
    return " ".join(f"{axes.x(x)},{axes.y(y)}" for x, y in zip(xs, ys, strict=True))


def _ends(series: Sequence[Series]) -> tuple[float, float]:
    return min(one.x[0] for one in series), max(one.x[-1] for one in series)


def _thinned(series: Series, most: int = _MAX_POINTS) -> Series:
    """Evenly spaced points of many, the first and the last among them."""
    x, y = np.asarray(series.x, float), np.asarray(series.y, float)
    if len(x) > most:
        picked = np.unique(np.linspace(0, len(x) - 1, most).round().astype(int))
        x, y = x[picked], y[picked]
    return Series(series.label, x, y)


def _course(series: Series) -> str:
    ends = (f"{number(series.y[i])} at {number(series.x[i])}" for i in (0, -1))
    return ", ".join(ends)


def _by_x(text: Text, series: Sequence[Series]) -> Html:
    """The table of lines; of many points, evenly spaced ones."""
    held = [dict(zip(map(float, one.x), map(float, one.y), strict=True)) for one in series]
    xs = sorted(set().union(*held))
    more = ""
    if len(xs) > _MAX_ROWS:
        picked = np.unique(np.linspace(0, len(xs) - 1, _MAX_ROWS).round().astype(int))
        more = f" ({_MAX_ROWS} of {len(xs)} points)"
        xs = [xs[i] for i in picked]
    rows = [[number(x), *(number(of[x]) if x in of else "" for of in held)] for x in xs]
    header = [text.x_label, *(one.label for one in series)]
    return table(f"{text.title}{more}", header, rows)
