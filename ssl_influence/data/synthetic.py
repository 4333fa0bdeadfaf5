"""Points in the plane: the paper's Linear, Circles and Moons, and the truth behind them.

Each shape has a `draw(rows, random) -> (points float64 [rows, 2], labels [rows])` and a
`side(points [n, 2]) -> [n]`, which is positive where class 1 is the truth, negative where class 0
is, and zero on the boundary between them; it is what the figures call ground truth.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

# Rows beside the labeled and the validation ones (paper, "Synthetic Experiments"), and rows of the
# test part.
UNLABELED = 1000
TEST = 1000

# Standard deviation of the noise added to the shapes, which are of about unit size. The paper gives
# none.
MOONS_NOISE = 0.1
CIRCLES_NOISE = 0.1
CIRCLES_FACTOR = 0.5
LINEAR_MARGIN = 0.02


@dataclasses.dataclass(frozen=True)
class Shape:
    """How points of a synthetic set are drawn, and on which side of its boundary a point lies."""

    draw: Callable[[int, np.random.RandomState], tuple[np.ndarray, np.ndarray]]
    side: Callable[[np.ndarray], np.ndarray]


def _draw_moons(rows: int, random: np.random.RandomState) -> tuple[np.ndarray, np.ndarray]:
    """Two interleaved half circles of radius 1, with Gaussian noise of MOONS_NOISE."""
    from sklearn import datasets

    return datasets.make_moons(rows, noise=MOONS_NOISE, random_state=random)


def _moons_side(points: np.ndarray) -> np.ndarray:
    """Distance to the half circle of class 0 less that to the half circle of class 1."""
    points = np.asarray(points, np.float64)
    upper = _distance_to_arc(points, center=(0.0, 0.0), up=True)
    lower = _distance_to_arc(points, center=(1.0, 0.5), up=False)
    return upper - lower


def _distance_to_arc(points: np.ndarray, center: tuple[float, float], up: bool) -> np.ndarray:
    """Distance of points [n, 2] to the upper or lower half of the unit circle around a center."""
    x, y = (points - center).T
    y = y if up else -y
    on_arc = np.abs(np.hypot(x, y) - 1.0)
    to_end = np.hypot(np.abs(x) - 1.0, y)
    return np.where(y >= 0, on_arc, to_end)


def _draw_circles(rows: int, random: np.random.RandomState) -> tuple[np.ndarray, np.ndarray]:
    """Circles of radius 1 (class 0) and CIRCLES_FACTOR (class 1), with noise of CIRCLES_NOISE."""
    from sklearn import datasets

    return datasets.make_circles(
        rows, noise=CIRCLES_NOISE, factor=CIRCLES_FACTOR, random_state=random
    )


def _circles_side(points: np.ndarray) -> np.ndarray:
    """How far inside the radius half way between the two circles."""
    return (1 + CIRCLES_FACTOR) / 2 - np.linalg.norm(np.asarray(points, np.float64), axis=1)


def _draw_linear(rows: int, random: np.random.RandomState) -> tuple[np.ndarray, np.ndarray]:
    """Points on either side of x_0 + x_1 = 0, at least LINEAR_MARGIN from it.

    The distance from the line is LINEAR_MARGIN + |N(0, 1/2)|, the place along it N(0, 1).
    """
    labels = random.permutation(np.arange(rows) % 2)
    distance = LINEAR_MARGIN + np.abs(random.normal(scale=0.5, size=rows))
    along = random.normal(size=rows)
    across = np.where(labels == 1, distance, -distance)
    return np.stack([across - along, across + along], axis=1) / np.sqrt(2), labels


def _linear_side(points: np.ndarray) -> np.ndarray:
    """Distance from the line x_0 + x_1 = 0, signed."""
    return np.asarray(points, np.float64) @ [1.0, 1.0] / np.sqrt(2)


SHAPES = {
    "two_moons": Shape(_draw_moons, _moons_side),
    "circles": Shape(_draw_circles, _circles_side),
    "linear": Shape(_draw_linear, _linear_side),
}
