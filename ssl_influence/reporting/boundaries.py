"""Decision boundaries and example weights in the plane over the steps: Figures 1 and 3.

    history = boundaries.read("Two moons", source, split, side, model, {
        "per-example weights": model_dir / "per_example",
        "supervised": model_dir / "supervised",
    })
    boundaries.panels([history], model_dir / "boundaries.png")
    boundaries.animation([history], model_dir / "boundaries.gif")

As in the paper the lines are the boundaries of the truth, of our model and of a supervised one, and
the unlabeled points are shaded by their weights.
"""

import dataclasses
import io
import math
import os
from collections.abc import Callable, Mapping, Sequence

import contourpy
import matplotlib
import numpy as np
import tensorflow as tf
import tf_keras as keras
from matplotlib import colors, lines
from matplotlib.figure import Figure
from PIL import Image

from ssl_influence import checkpoints, config, files
from ssl_influence.data import examples, splits
from ssl_influence.reporting import figures

# The palette of Okabe and Ito, which the paper takes as well: told apart by the colorblind.
_GREEN, _BLUE, _AMBER, _VERMILION, _SKY = "#009e73", "#0072b2", "#e69f00", "#d55e00", "#56b4e9"
_TRUTH_STYLE = {"color": _GREEN, "linestyle": (0, (5, 1.6)), "linewidth": 2.0}
# Of the rows in turn; they differ in dashes and width too.
_ROW_STYLES = (
    {"color": _BLUE, "linestyle": "-", "linewidth": 2.6},
    {"color": _AMBER, "linestyle": (0, (7, 1.6, 1.5, 1.6)), "linewidth": 2.0},
    {"color": _SKY, "linestyle": (0, (1.2, 1.2)), "linewidth": 2.0},
)
# One marker a class.
_MARKERS = ("o", "^")
# Pink to black, as in the paper, with lightness falling evenly. Weights start at 1, in its middle;
# larger ones than 2 are rare and as black as 2.
_WEIGHT_MAP = colors.LinearSegmentedColormap.from_list("weights", ["#f29fd5", "#8a4f86", "#000000"])
_WEIGHT_SCALE = colors.Normalize(0.0, 2.0, clip=True)

_RESOLUTION = 150
_MARGIN = 0.08
# Inches. At 100 dots an inch the figure is 900 pixels wide, the width of a page on the web; PNG
# files have twice the dots.
_WIDTH, _MAX_PANEL_HEIGHT, _GAP = 9.0, 4.0, 0.12
_BAR_SPACE, _BAR_WIDTH = 0.85, 0.13
_TITLE_HEIGHT, _LINE_HEIGHT, _LEGEND_HEIGHT = 0.3, 0.17, 0.56
_SMALL, _MEDIUM, _LARGE = 8, 9, 10
_PNG_DPI, _GIF_DPI = 200, 100
_GIF_COLORS = 128
_FRAME_MS, _LAST_FRAME_MS = 300, 2500


@dataclasses.dataclass(frozen=True, eq=False)
class Frame:
    """What was learned at one step.

    Attributes:
      step: theta steps done.
      scores: name of a row -> logit of class 1 less that of class 0 over the grid, [h, w].
      test_errors: name of a row -> its test error there, percent.
      weight: lambda of the unlabeled points in the first row, [u].
      pseudo_label: what the first row's model predicts for them, int [u].
    """

    step: int
    scores: Mapping[str, np.ndarray]
    test_errors: Mapping[str, float]
    weight: np.ndarray
    pseudo_label: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class History:
    """The points of one data set in the plane, and what was learned on them step by step.

    Attributes:
      title: of the data set.
      x: ascending grid coordinates, [w].
      y: ascending grid coordinates, [h].
      truth: positive on the grid where class 1 is the truth, negative for class 0, [h, w].
      labeled: points, [l, 2].
      labels: their classes, 0 or 1, [l].
      unlabeled: points, [u, 2].
      frames: by ascending step, at least one.
    """

    title: str
    x: np.ndarray
    y: np.ndarray
    truth: np.ndarray
    labeled: np.ndarray
    labels: np.ndarray
    unlabeled: np.ndarray
    frames: Sequence[Frame]


def read(
    title: str,
    source: examples.Source,
    split: splits.Split,
    side: Callable[[np.ndarray], np.ndarray],
    model: keras.Model,
    rows: Mapping[str, str | os.PathLike],
) -> History:
    """Collects the history of runs on one split from their checkpoints and weights.

    Args:
      title: of the data set.
      source: points in the plane, of two classes.
      split: the one of every row.
      side: points [n, 2] -> [n], positive where class 1 is the truth; see data.synthetic.SHAPES.
      model: of the architecture of every row; gives (features, logits); its values are overwritten.
      rows: name for the legend -> the directory of its run, up to three. The first row's weights
        shade the points.

    Returns:
      A frame for each step of which every row has a checkpoint: the model as trained, not its
      moving average.

    Raises:
      ValueError: more rows than three, or none.
      ConfigError: the source has other classes than two, or its inputs are no points in the plane.
      CheckpointError: the rows have no step in common, or a checkpoint or its weights are missing
        or do not fit.
    """
    if not 1 <= len(rows) <= len(_ROW_STYLES):
        raise ValueError(f"There are lines for 1 to {len(_ROW_STYLES)} rows, not for {len(rows)}.")
    if source.inputs.shape[1:] != (2,) or source.num_classes != 2:
        raise config.ConfigError(
            f"Boundaries are drawn for points in the plane of two classes; {source.name} has "
            f"{source.num_classes} classes of inputs {source.inputs.shape[1:]}."
        )
    unlabeled = source.inputs[split.unlabeled]
    x, y = _axes(unlabeled)
    plane = np.stack(np.meshgrid(x, y), axis=-1).reshape(-1, 2)
    found = {
        name: checkpoints.list_checkpoints(files.path(directory) / "checkpoints")
        for name, directory in rows.items()
    }
    steps = sorted(set.intersection(*map(set, found.values())))
    if not steps:
        raise checkpoints.CheckpointError(
            f"There is no step of which each of {', '.join(map(str, rows.values()))} has a "
            "checkpoint: train them with the same --checkpoint_every."
        )
    first = next(iter(rows))
    reader = tf.train.Checkpoint(model=model)
    frames = []
    for step in steps:
        scores, test_errors = {}, {}
        for name in rows:
            checkpoints.read(reader, found[name][step]).assert_existing_objects_matched()
            scores[name] = _score(model, plane).reshape(len(y), len(x))
            wrong = (_score(model, source.test_inputs) > 0) != source.test_labels
            test_errors[name] = 100.0 * float(wrong.mean())
            if name == first:
                pseudo_label = (_score(model, unlabeled) > 0).astype(np.int32)
        weight = _read_weight(rows[first], step, split.unlabeled)
        frames.append(Frame(step, scores, test_errors, weight, pseudo_label))
    return History(
        title=title,
        x=x,
        y=y,
        truth=side(plane).reshape(len(y), len(x)),
        labeled=source.inputs[split.labeled],
        labels=source.labels[split.labeled],
        unlabeled=unlabeled,
        frames=frames,
    )


def panels(
    histories: Sequence[History],
    path: str | os.PathLike,
    steps: Sequence[int] | None = None,
) -> None:
    """Draws one row of panels a data set and one column a step, as PNG.

    Args:
      histories: data sets, whose rows have the same names.
      path: of the file, replaced in one move.
      steps: which; None takes the first, the last and the middle one by ratio, of each data set.

    Raises:
      ValueError: a history has no frame of such a step.
    """
    table = [_at_steps(history, steps or _telling_steps(history)) for history in histories]
    figures.save(_figure(table), path, _PNG_DPI)


def animation(
    histories: Sequence[History],
    path: str | os.PathLike,
    steps: Sequence[int] | None = None,
) -> None:
    """Draws a frame a step of an endless GIF, data sets side by side.

    A frame of one data set takes about 30 kB.

    Args:
      histories: data sets, whose rows have the same names.
      path: of the file, replaced in one move.
      steps: which; None takes all of the first data set.

    Raises:
      ValueError: a history has no frame of such a step.
    """
    if steps is None:
        steps = [frame.step for frame in histories[0].frames]
    columns = [_at_steps(history, steps) for history in histories]
    images = []
    for row in zip(*columns, strict=True):
        figure = _figure([row])
        figure.set_dpi(_GIF_DPI)
        figure.canvas.draw()
        images.append(np.asarray(figure.canvas.buffer_rgba())[..., :3])
    images = _with_one_palette(images)
    durations = [_FRAME_MS] * (len(images) - 1) + [_LAST_FRAME_MS]
    moving = io.BytesIO()
    images[0].save(
        moving,
        format="GIF",
        save_all=True,
        append_images=images[1:],
        duration=durations,
        loop=0,
        optimize=False,
    )
    with files.replacing(path) as temporary:
        temporary.write_bytes(moving.getvalue())


def boundary(x: np.ndarray, y: np.ndarray, score: np.ndarray) -> list[np.ndarray]:
    """The lines along which a score is zero, by linear interpolation on the grid.

    Args:
      x: [w], ascending.
      y: [h], ascending.
      score: [h, w].

    Returns:
      Polylines [k, 2] of (x, y); none where the score keeps its sign.
    """
    return contourpy.contour_generator(x, y, score).lines(0.0)


def _with_one_palette(images: Sequence[np.ndarray]) -> list[Image.Image]:
    """RGB images [h, w, 3] in the same _GIF_COLORS colors, chosen on the first and the last image.

    With a palette each, still parts would flicker.
    """
    sample = Image.fromarray(np.concatenate([images[0], images[-1]]))
    palette = sample.quantize(_GIF_COLORS, dither=Image.Dither.NONE)
    reduced = [
        Image.fromarray(image).quantize(palette=palette, dither=Image.Dither.NONE)
        for image in images
    ]
    # Pillow's background is a mean of white and the shades near it: make it white again.
    entries = palette.getpalette()
    background = reduced[0].getpixel((0, 0))
    entries[3 * background : 3 * background + 3] = (255, 255, 255)
    for image in reduced:
        image.putpalette(entries)
    return reduced


def _axes(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Grid coordinates that hold the points and a margin around them."""
    low, high = points.min(axis=0), points.max(axis=0)
    margin = _MARGIN * np.max(high - low)
    x, y = (
        np.linspace(a - margin, b + margin, _RESOLUTION) for a, b in zip(low, high, strict=True)
    )
    return x, y


def _score(model: keras.Model, points: np.ndarray) -> np.ndarray:
    _, logits = model(tf.constant(points, tf.float32), training=False)
    logits = np.asarray(logits, np.float64)
    return logits[:, 1] - logits[:, 0]


def _read_weight(model_dir: str | os.PathLike, step: int, example_id: np.ndarray) -> np.ndarray:
    """Weights of the given examples at a checkpoint, [n]."""
    path = files.path(model_dir) / "weights" / f"weights-{step}.csv"
    try:
        ids, weights, _ = checkpoints.read_weights(path)
        weight = dict(zip(ids.tolist(), weights, strict=True))
        return np.array([weight[identity] for identity in example_id])
    except FileNotFoundError as error:
        raise checkpoints.CheckpointError(
            f"{path} is missing beside its checkpoint: put it back, or train again."
        ) from error
    except KeyError as error:
        raise checkpoints.CheckpointError(
            f"{path} has no example {error.args[0]}: it was written by a run on another split."
        ) from error


def _telling_steps(history: History) -> list[int]:
    """The first, the last, and the one nearest to their geometric mean: most happens early."""
    steps = [frame.step for frame in history.frames]
    middle = math.sqrt(max(steps[0], 1) * steps[-1])
    return sorted({steps[0], min(steps, key=lambda step: abs(step - middle)), steps[-1]})


def _at_steps(history: History, steps: Sequence[int]) -> list[tuple[History, Frame]]:
    frames = {frame.step: frame for frame in history.frames}
    missing = [step for step in steps if step not in frames]
    if missing:
        raise ValueError(f"{history.title}: no frame of steps {missing}, only of {list(frames)}.")
    return [(history, frames[step]) for step in steps]


def _figure(table: Sequence[Sequence[tuple[History, Frame]]]) -> Figure:
    """A panel for each entry of the table, a color bar at the right and the legend below."""
    names = list(table[0][0][1].scores)
    notes_height = _LINE_HEIGHT * len(names) + 0.1
    # In a row all panels are equally high, and as wide as their data then ask for.
    ratios = [[_width_by_height(history) for history, _ in row] for row in table]
    widest = _WIDTH - _BAR_SPACE - _GAP * len(table[0])
    heights = [min(_MAX_PANEL_HEIGHT, widest / sum(row)) for row in ratios]
    row_widths = [
        height * sum(row) + _GAP * len(row) for height, row in zip(heights, ratios, strict=True)
    ]
    width = max(row_widths) + _BAR_SPACE
    height = sum(heights) + (_TITLE_HEIGHT + notes_height) * len(table) + _LEGEND_HEIGHT
    figure = figures.new_figure((width, height))

    def axes_at(left, bottom, panel_width, panel_height):
        return figure.add_axes(
            (left / width, bottom / height, panel_width / width, panel_height / height)
        )

    bottom = height
    for row, row_ratios, row_width, panel_height in zip(
        table, ratios, row_widths, heights, strict=True
    ):
        bottom -= _TITLE_HEIGHT + panel_height
        left = _GAP + (max(row_widths) - row_width) / 2
        for (history, frame), ratio in zip(row, row_ratios, strict=True):
            points = _panel(
                axes_at(left, bottom, panel_height * ratio, panel_height), history, frame
            )
            left += panel_height * ratio + _GAP
        bottom -= notes_height
    bar = axes_at(
        max(row_widths) + _GAP,
        bottom + notes_height,
        _BAR_WIDTH,
        height - bottom - notes_height - _TITLE_HEIGHT,
    )
    _color_bar(figure, points, bar)
    for y, handles in ((0.36, _line_handles(names)), (0.14, _point_handles())):
        figure.legend(
            handles=handles,
            loc="center",
            bbox_to_anchor=(0.5, y / height),
            ncols=len(handles),
            frameon=False,
            fontsize=_MEDIUM,
            borderpad=0,
        )
    return figure


def _width_by_height(history: History) -> float:
    return float(np.ptp(history.x) / np.ptp(history.y))


def _color_bar(figure: Figure, points, axis: matplotlib.axes.Axes) -> None:
    bar = figure.colorbar(
        points, cax=axis, extend="max", extendfrac=0.03, ticks=[0, 0.5, 1, 1.5, 2]
    )
    bar.set_label("example weight", fontsize=_MEDIUM)
    bar.ax.tick_params(labelsize=_SMALL)
    bar.outline.set_visible(False)


def _panel(axis: matplotlib.axes.Axes, history: History, frame: Frame):
    """Draws one panel and returns the unlabeled points, whose colors the bar explains."""
    height = axis.bbox.height / axis.figure.dpi
    # Low weights lie on top: they are few, and what the figure is about.
    order = np.argsort(-frame.weight, kind="stable")
    unlabeled = axis.scatter(
        *history.unlabeled[order].T,
        c=frame.weight[order],
        cmap=_WEIGHT_MAP,
        norm=_WEIGHT_SCALE,
        s=3.0 * height,
        linewidths=0,
    )
    for line in boundary(history.x, history.y, history.truth):
        axis.plot(*line.T, **_TRUTH_STYLE)
    # The first row last, on top of the others.
    for (_, score), style in reversed(list(zip(frame.scores.items(), _ROW_STYLES, strict=False))):
        for line in boundary(history.x, history.y, score):
            axis.plot(*line.T, **style)
    for label, marker in enumerate(_MARKERS):
        points = history.labeled[history.labels == label]
        axis.plot(*points.T, **_labeled_style(marker, 8.0 * max(1.0, math.sqrt(height / 2))))
    axis.set(
        aspect="equal",
        xlim=history.x[[0, -1]],
        ylim=history.y[[0, -1]],
        xticks=[],
        yticks=[],
    )
    axis.set_title(f"{history.title}, step {frame.step}", fontsize=_LARGE, pad=5)
    handles = [
        lines.Line2D([], [], label=f"{frame.test_errors[name]:.1f}% test error", **style)
        for name, style in zip(frame.scores, _ROW_STYLES, strict=False)
    ]
    axis.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0.0, 0.0),
        frameon=False,
        fontsize=_SMALL,
        handlelength=2.6,
        borderpad=0.2,
        borderaxespad=0.2,
        labelspacing=0.35,
    )
    for spine in axis.spines.values():
        spine.set_color("#c8ccd2")
    return unlabeled


def _labeled_style(marker: str, size: float = 8.0) -> dict:
    return {
        "linestyle": "none",
        "marker": marker,
        "markersize": size,
        "color": _VERMILION,
        "markeredgecolor": "white",
        "markeredgewidth": 1.2,
    }


def _line_handles(names: Sequence[str]) -> list[lines.Line2D]:
    named = {"ground truth": _TRUTH_STYLE, **dict(zip(names, _ROW_STYLES, strict=False))}
    return [lines.Line2D([], [], label=name, **style) for name, style in named.items()]


def _point_handles() -> list[lines.Line2D]:
    labeled = [
        lines.Line2D([], [], label=f"labeled, class {label}", **_labeled_style(marker))
        for label, marker in enumerate(_MARKERS)
    ]
    unlabeled = lines.Line2D(
        [],
        [],
        label="unlabeled, shaded by weight",
        linestyle="none",
        marker="o",
        markersize=3,
        color=_WEIGHT_MAP(_WEIGHT_SCALE(1.0)),
    )
    return [*labeled, unlabeled]
