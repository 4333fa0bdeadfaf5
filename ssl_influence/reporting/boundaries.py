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

import csv
import dataclasses
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence

import contourpy
import matplotlib
import numpy as np
import tensorflow as tf
import tf_keras as keras
from matplotlib import colors, lines
from matplotlib.figure import Figure
from PIL import Image

from ssl_influence import checkpoints, config
from ssl_influence.data import sources, splits
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

_RESOLUTION = 200
_MARGIN = 0.08
_PANEL_WIDTH = 3.0
_PNG_DPI = 200
_GIF_DPI = 110
_FRAME_MS = 350
_LAST_FRAME_MS = 2500


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
    source: sources.Source,
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
      ConfigError: the source has other classes than two, or its inputs are no points in the plane.
      CheckpointError: the rows have no step in common, or a checkpoint or its weights are missing
        or do not fit.
    """
    if source.inputs.shape[1:] != (2,) or source.num_classes != 2:
        raise config.ConfigError(
            f"Boundaries are drawn for points in the plane of two classes; {source.name} has "
            f"{source.num_classes} classes of inputs {source.inputs.shape[1:]}."
        )
    unlabeled = source.inputs[split.unlabeled]
    x, y = _axes(unlabeled)
    plane = np.stack(np.meshgrid(x, y), axis=-1).reshape(-1, 2)
    found = {
        name: checkpoints.list_checkpoints(pathlib.Path(directory) / "checkpoints")
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
      steps: which; None takes the first, the last and the middle one by ratio.

    Raises:
      ValueError: a history has no frame of such a step.
    """
    figure = _figure([_at_steps(history, steps) for history in histories])
    figures.save(figure, path, _PNG_DPI)


def animation(histories: Sequence[History], path: str | os.PathLike) -> None:
    """Draws every step as a frame of an endless GIF, data sets side by side.

    Args:
      histories: data sets with frames of the same steps, whose rows have the same names.
      path: of the file, replaced in one move.

    Raises:
      ValueError: the histories have different steps.
    """
    steps = [[frame.step for frame in history.frames] for history in histories]
    if any(other != steps[0] for other in steps):
        raise ValueError(f"An animation needs the same steps of every data set, got {steps}.")
    images = []
    for index in range(len(steps[0])):
        figure = _figure([[(history, history.frames[index]) for history in histories]])
        figure.set_dpi(_GIF_DPI)
        figure.canvas.draw()
        images.append(Image.fromarray(np.asarray(figure.canvas.buffer_rgba())[..., :3]))
    # One palette for all frames: with one each, still parts would flicker.
    sample = np.concatenate([np.asarray(images[0]), np.asarray(images[-1])])
    palette = Image.fromarray(sample).quantize(255, dither=Image.Dither.NONE)
    images = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images]
    durations = [_FRAME_MS] * (len(images) - 1) + [_LAST_FRAME_MS]
    figures.write_atomically(
        path,
        lambda temporary: images[0].save(
            temporary,
            format="GIF",
            save_all=True,
            append_images=images[1:],
            duration=durations,
            loop=0,
            optimize=False,
        ),
    )


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
    path = pathlib.Path(model_dir) / "weights" / f"weights-{step}.csv"
    try:
        with path.open() as file:
            weight = {int(row["example_id"]): float(row["weight"]) for row in csv.DictReader(file)}
        return np.array([weight[identity] for identity in example_id])
    except FileNotFoundError as error:
        raise checkpoints.CheckpointError(
            f"{path} is missing beside its checkpoint: put it back, or train again."
        ) from error
    except KeyError as error:
        raise checkpoints.CheckpointError(
            f"{path} has no example {error}: it was written by a run on another split."
        ) from error


def _at_steps(history: History, steps: Sequence[int] | None) -> list[tuple[History, Frame]]:
    by_step = {frame.step: frame for frame in history.frames}
    if steps is None:
        all_steps = list(by_step)
        middle = np.sqrt(max(all_steps[0], 1) * all_steps[-1])
        nearest = min(all_steps, key=lambda step: abs(step - middle))
        steps = sorted({all_steps[0], nearest, all_steps[-1]})
    missing = [step for step in steps if step not in by_step]
    if missing:
        raise ValueError(f"{history.title}: no frame of steps {missing}, only of {list(by_step)}.")
    return [(history, by_step[step]) for step in steps]


def _figure(table: Sequence[Sequence[tuple[History, Frame]]]) -> Figure:
    """A panel for each entry of the table, one legend and one color bar."""
    # Heights follow the data, so that equal axes fill their panels.
    heights = [_PANEL_WIDTH * max(_aspect(history) for history, _ in row) for row in table]
    names = list(table[0][0][1].scores)
    size = (_PANEL_WIDTH * len(table[0]), sum(heights) + 0.62 * len(table) + 0.75)
    figure = figures.new_figure(size)
    axes = figure.subplots(
        len(table), len(table[0]), squeeze=False, gridspec_kw={"height_ratios": heights}
    )
    for row, row_axes in zip(table, axes, strict=True):
        for (history, frame), axis in zip(row, row_axes, strict=True):
            points = _panel(axis, history, frame)
    bar = figure.colorbar(
        points, ax=axes, extend="max", ticks=[0, 0.5, 1, 1.5, 2], fraction=0.03, pad=0.02
    )
    bar.set_label("weight of an unlabeled point")
    bar.outline.set_visible(False)
    figure.legend(
        handles=_legend(names), loc="outside lower center", ncols=3, frameon=False, fontsize=9
    )
    return figure


def _aspect(history: History) -> float:
    return float(np.ptp(history.y) / np.ptp(history.x))


def _panel(axis: matplotlib.axes.Axes, history: History, frame: Frame):
    """Draws one panel and returns the unlabeled points, whose colors the bar explains."""
    # Low weights lie on top: they are few, and what the figure is about.
    order = np.argsort(-frame.weight, kind="stable")
    unlabeled = axis.scatter(
        *history.unlabeled[order].T,
        c=frame.weight[order],
        cmap=_WEIGHT_MAP,
        norm=_WEIGHT_SCALE,
        s=7,
        linewidths=0,
    )
    for line in boundary(history.x, history.y, history.truth):
        axis.plot(*line.T, **_TRUTH_STYLE)
    # The first row last, on top of the others.
    for (_, score), style in reversed(list(zip(frame.scores.items(), _ROW_STYLES, strict=False))):
        for line in boundary(history.x, history.y, score):
            axis.plot(*line.T, **style)
    for label, marker in enumerate(_MARKERS):
        axis.plot(*history.labeled[history.labels == label].T, **_labeled_style(marker))
    axis.set(
        aspect="equal",
        xlim=history.x[[0, -1]],
        ylim=history.y[[0, -1]],
        xticks=[],
        yticks=[],
    )
    axis.set_title(f"{history.title}, step {frame.step}", fontsize=10)
    errors = [f"{name} {frame.test_errors[name]:.1f}%" for name in frame.scores]
    axis.set_xlabel("test error: " + ", ".join(errors), fontsize=8)
    for spine in axis.spines.values():
        spine.set_color("#c8ccd2")
    return unlabeled


def _labeled_style(marker: str) -> dict:
    return {
        "linestyle": "none",
        "marker": marker,
        "markersize": 9 if marker == "^" else 8,
        "color": _VERMILION,
        "markeredgecolor": "white",
        "markeredgewidth": 1.2,
    }


def _legend(names: Sequence[str]) -> list[lines.Line2D]:
    handles = [lines.Line2D([], [], label="ground truth", **_TRUTH_STYLE)]
    for name, style in zip(names, _ROW_STYLES, strict=False):
        handles.append(lines.Line2D([], [], label=name, **style))
    for label, marker in enumerate(_MARKERS):
        handles.append(
            lines.Line2D([], [], label=f"labeled, class {label}", **_labeled_style(marker))
        )
    return handles
