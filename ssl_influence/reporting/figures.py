"""Figures of one run, drawn from its metrics.jsonl and weights/."""

import io
import os

import numpy as np
from matplotlib.backends import backend_agg
from matplotlib.figure import Figure

from ssl_influence import checkpoints, files, metrics

BLUE, ORANGE, GRAY = "#3572b0", "#d9822b", "#8a8f98"


def curve(model_dir: str | os.PathLike, path: str | os.PathLike) -> None:
    """Validation error (raw and moving average) and the objective's terms over the steps, as PNG.

    Raises:
      FileNotFoundError: the run has no metrics yet.
    """
    rows = metrics.read_metrics(files.path(model_dir) / "metrics.jsonl")
    if not rows:
        raise FileNotFoundError(f"{model_dir} holds no metrics.jsonl with rows to draw.")
    figure, (left, right) = in_a_row(2)
    for name, label, color in (
        ("validation/error", "as trained", BLUE),
        ("validation/ema_error", "moving average", ORANGE),
    ):
        left.plot(*_series(rows, name), color=color, label=label)
    left.set(xlabel="step", ylabel="validation error, %", ylim=(0, None))
    left.legend(frameon=False)
    for name, label, color in (
        ("train/loss_supervised", "supervised", BLUE),
        ("train/loss_unsupervised", "unsupervised, weighted", ORANGE),
        ("train/loss_l2", "L2", GRAY),
    ):
        right.plot(*_series(rows, name), color=color, label=label)
    right.set(xlabel="step", ylabel="term of the training objective", ylim=(0, None))
    right.legend(frameon=False)
    save(figure, path)


def weight_histogram(model_dir: str | os.PathLike, path: str | os.PathLike) -> None:
    """Histogram of the newest example weights, and how often each example was updated, as PNG.

    Raises:
      FileNotFoundError: the run has written no weights yet.
    """
    newest, weight, updates = read_weights(model_dir)
    figure, (left, right) = in_a_row(2)
    left.hist(weight, bins=40, color=BLUE)
    left.axvline(weight.mean(), color=ORANGE, label=f"mean {weight.mean():.3f}")
    left.set(xlabel=f"example weight at step {newest}", ylabel="unlabeled examples")
    left.legend(frameon=False)
    right.hist(updates, bins=min(40, int(np.ptp(updates)) + 1), color=GRAY)
    right.set(xlabel="updates of the weight", ylabel="unlabeled examples")
    save(figure, path)


def read_weights(model_dir: str | os.PathLike) -> tuple[int, np.ndarray, np.ndarray]:
    """Step, weights [n] and update counts [n] of the newest weights/weights-<step>.csv.

    Raises:
      FileNotFoundError: there is none.
    """
    found = list(files.path(model_dir).glob("weights/weights-*.csv"))
    if not found:
        raise FileNotFoundError(f"{model_dir} holds no weights/weights-<step>.csv to draw.")
    newest = max(found, key=lambda path: checkpoints.step_of(path.stem))
    _, weight, updates = checkpoints.read_weights(newest)
    if not len(weight):
        raise FileNotFoundError(f"{newest} holds no unlabeled example to draw.")
    return checkpoints.step_of(newest.stem), weight, updates


def _series(rows: list[dict], name: str) -> tuple[list[float], list[float]]:
    kept = [row for row in rows if name in row]
    return [row["step"] for row in kept], [row[name] for row in kept]


def in_a_row(columns: int) -> tuple[Figure, np.ndarray]:
    """A figure and its axes [columns], side by side, without frame and with a faint grid."""
    figure = new_figure((4.8 * columns, 3.6), layout="constrained")
    axes = figure.subplots(1, columns)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
        axis.set_axisbelow(True)
    return figure, axes


def new_figure(size: tuple[float, float], layout: str | None = None) -> Figure:
    """An empty figure of a width and height in inches, that draws to memory or a file alone."""
    # No pyplot: it would pick a window system and keep every figure alive.
    figure = Figure(figsize=size, layout=layout)
    backend_agg.FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, path: str | os.PathLike, dpi: int = 150) -> None:
    """Writes a figure in one move, as PDF where the name ends so, else as PNG."""
    image = io.BytesIO()
    kind = "pdf" if files.path(path).suffix.lower() == ".pdf" else "png"
    figure.savefig(image, format=kind, dpi=dpi)
    with files.replacing(path) as temporary:
        temporary.write_bytes(image.getvalue())
