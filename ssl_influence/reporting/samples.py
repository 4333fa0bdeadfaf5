"""Pictures of a dataset: examples of each class and role, and the views that training makes."""

import dataclasses
import os
from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from PIL import Image

from ssl_influence import config as config_lib
from ssl_influence.augment import ctaugment, policies
from ssl_influence.data import examples, inputs, rows, splits
from ssl_influence.reporting import figures

_COLUMNS, _MAX_CLASSES, _UNKNOWN_LINES = 10, 20, 3
_AUGMENTED, _WEAK_VIEWS, _STRONG_VIEWS = 6, 3, 5

# Pixels. Every pixel of a figure is set here, so that an image is magnified by whole numbers.
_DPI = 100
_TILE, _MAX_TILE = 80, 112
_MIN_HEIGHT, _MIN_WIDTH, _MIN_ROOM = 14, 56, 360  # of text beside and above
_GAP, _GROUP_GAP, _MARGIN, _HEADING = 5, 16, 14, 26
_FRAME = 215  # gray level
_SMALL, _LARGE = 9, 11  # points
_LETTER, _LARGE_LETTER = 7.5, 9.2  # the widths of a letter, about
_MAX_LETTERS = 26


@dataclasses.dataclass(frozen=True, eq=False)
class _Section:
    """A part of a picture with columns of its own.

    Attributes:
      headings: (text, how many columns it is above).
      lines: (text at the left, a tile uint8 [h, w, 3] or None for each column).
    """

    headings: Sequence[tuple[str, int]]
    lines: Sequence[tuple[str, Sequence[np.ndarray | None]]]


def draw_classes(
    source: examples.Source,
    split: splits.Split,
    path: str | os.PathLike,
    *,
    title: str,
    seed: int = 0,
) -> None:
    """A PNG with a line of images for each class, drawn at random from each role and the test part.

    Of more than 20 classes, 20 evenly spaced ones. Unlabeled examples of other classes and of
    unknown class follow in sections of their own.

    Args:
      source: images.
      split: their roles.
      path: of the PNG.
      title: what the dataset is called.
      seed: of the draw.
    """
    random = np.random.Generator(np.random.PCG64(seed))
    labels = np.concatenate([source.labels, source.test_labels])
    roles = {role: getattr(split, role) for role in splits.ROLES}
    roles["test"] = np.arange(len(source.labels), len(labels))
    unlabeled = split.unlabeled[labels[split.unlabeled] < 0]
    strange = np.zeros(len(unlabeled), bool)
    if source.strangers is not None:
        strange = source.strangers[unlabeled]
    classes = np.unique(
        np.linspace(0, source.num_classes - 1, min(source.num_classes, _MAX_CLASSES)).astype(int)
    )

    known = {role: places for role, places in roles.items() if np.any(labels[places] >= 0)}
    columns = {}
    for (role, places), room in zip(
        known.items(), np.array_split(np.arange(_COLUMNS), len(known)), strict=True
    ):
        drawn = [random.permutation(places[labels[places] == c])[: len(room)] for c in classes]
        width = max(1, *map(len, drawn))
        columns[role] = width, [_filled(d, width) for d in drawn]
    headings = [(role, width) for role, (width, _) in columns.items()]
    lines = [
        (source.class_names[c], sum((drawn[row] for _, drawn in columns.values()), []))
        for row, c in enumerate(classes)
    ]
    sections = [(headings, lines)]
    for text, among in (
        ("unlabeled, of other classes", unlabeled[strange]),
        ("unlabeled, of unknown class", unlabeled[~strange]),
    ):
        drawn = random.permutation(among)[: _COLUMNS * _UNKNOWN_LINES]
        if len(drawn):
            parts = [drawn[start : start + _COLUMNS] for start in range(0, len(drawn), _COLUMNS)]
            width = len(parts[0])
            sections.append(([(text, width)], [("", _filled(part, width)) for part in parts]))

    tiles = _tiles(source, [p for _, lines in sections for _, line in lines for p in line])
    if len(classes) < source.num_classes:
        title = f"{title}: {len(classes)} of {source.num_classes} classes"
    _draw(
        path,
        title,
        [
            _Section(headings, [(name, [tiles[p] for p in line]) for name, line in lines])
            for headings, lines in sections
        ],
    )


def _filled(places: np.ndarray, width: int) -> list[int | None]:
    """The places in their order, and None up to that many."""
    return [*np.sort(places).tolist(), *[None] * (width - len(places))]


def _tiles(
    source: examples.Source, places: Sequence[int | None]
) -> dict[int | None, np.ndarray | None]:
    """Place, an id or behind all ids a row of the test part, -> its tile; None -> None."""
    shown = np.array(sorted({place for place in places if place is not None}), np.int64)
    size = len(source.labels)
    taken = [
        *rows.take(source.inputs, shown[shown < size]),
        *rows.take(source.test_inputs, shown[shown >= size] - size),
    ]
    return {None: None, **dict(zip(shown.tolist(), map(_tile, taken), strict=True))}


def draw_views(
    source: examples.Source,
    split: splits.Split,
    config: config_lib.Config,
    path: str | os.PathLike,
    *,
    title: str,
) -> None:
    """A PNG with some unlabeled images, and weak and strong views of each.

    Drawn by the run's seed, as a `Pipeline` makes them, if not those of any batch; with CTAugment
    as at the start of a run, when all magnitudes are drawn. Without unlabeled examples it shows
    labeled ones.

    Args:
      source: images.
      split: their roles.
      config: gives the augmentation and the seed.
      path: of the PNG.
      title: what the dataset is called.

    Raises:
      ConfigError: the augmentation does not fit the images.
    """
    ids, weak, strong = views(source, split, config)
    images = rows.take(source.inputs, ids)
    lines = []
    for row, label in enumerate(source.labels[ids]):
        name = source.class_names[label] if label >= 0 else "unknown"
        lines.append((name, [_tile(made[row]) for made in (images, *weak, *strong)]))
    headings = [("image", 1), ("weak views", len(weak)), ("strong views", len(strong))]
    _draw(path, f"{title}: strong_view={config.augment.strong}", [_Section(headings, lines)])


def views(
    source: examples.Source, split: splits.Split, config: config_lib.Config
) -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]:
    """(ids [n], weak views, strong views, each uint8 [n, H, W, C]) of a few unlabeled images."""
    among = split.unlabeled if len(split.unlabeled) else split.labeled
    random = np.random.Generator(np.random.PCG64(config.train.seed))
    ids = np.sort(random.permutation(among)[:_AUGMENTED])
    is_ctaugment = config.augment.strong == "ctaugment"
    # Copies in one batch: tracing or starting the operations takes longer than they do.
    copies = max(_WEAK_VIEWS, _STRONG_VIEWS)
    made = policies.views(
        tf.constant(np.tile(rows.take(source.inputs, ids), (copies, 1, 1, 1))),
        tf.constant([config.train.seed, 0], tf.int64),
        policies.KINDS,
        config.augment,
        source.flip,
        fill=inputs.of(source, config.augment).zero_level,
        rates=ctaugment.initial_rates() if is_ctaugment else None,
    )
    weak, strong = (np.split(made[kind].numpy(), copies) for kind in policies.KINDS)
    return ids, weak[:_WEAK_VIEWS], strong[:_STRONG_VIEWS]


def _draw(path: str | os.PathLike, title: str, sections: Sequence[_Section]) -> None:
    """A PNG with grids of images, one below the other."""
    shape = next(
        tile.shape for s in sections for _, line in s.lines for tile in line if tile is not None
    )
    height, width = max(shape[0], _MIN_HEIGHT), max(shape[1], _MIN_WIDTH)
    names = [shortened(text, _MAX_LETTERS) for section in sections for text, _ in section.lines]
    left = round(_MARGIN + 2 * _GAP + _LETTER * max(map(len, names)))

    right, bottom = left + _MIN_ROOM, _MARGIN + _HEADING
    words, pasted = [], []
    for section in sections:
        columns, x = [], left
        for text, count in section.headings:
            end = x + count * (width + _GAP) - _GAP
            columns += range(x, end, width + _GAP)
            words.append((x, bottom + _HEADING / 2, text))
            right, x = max(right, end), end + _GROUP_GAP
        bottom += _HEADING
        for _, line in section.lines:
            pasted += [(bottom, x, tile) for x, tile in zip(columns, line, strict=True)]
            bottom += height + _GAP
    size = bottom - _GAP + _MARGIN, right + _MARGIN

    canvas = np.full((*size, 3), 255, np.uint8)
    for y, x, tile in pasted:
        if tile is not None:
            bottom, right = y + tile.shape[0], x + tile.shape[1]
            canvas[y - 1 : bottom + 1, x - 1 : right + 1] = _FRAME
            canvas[y:bottom, x:right] = tile
    # The small term keeps a size that is no binary fraction from being cut to a pixel less.
    figure = figures.new_figure(((size[1] + 0.01) / _DPI, (size[0] + 0.01) / _DPI))
    figure.set_dpi(_DPI)
    figure.figimage(canvas)

    def write(x, y, text, size, **how):
        place = x / canvas.shape[1], 1 - y / canvas.shape[0]
        figure.text(*place, text, fontsize=size, va="center", parse_math=False, **how)

    room = size[1] - 2 * _MARGIN
    write(_MARGIN, _MARGIN + _HEADING / 2 - 4, shortened(title, int(room / _LARGE_LETTER)), _LARGE)
    for x, y, text in words:
        write(x, y, text, _SMALL, color=figures.BLUE)
    lines = dict.fromkeys(y for y, _, _ in pasted)
    for y, text in zip(lines, names, strict=True):
        write(left - 2 * _GAP, y + height / 2, text, _SMALL, ha="right")
    figures.save(figure, path, dpi=_DPI)


def _tile(image: np.ndarray) -> np.ndarray:
    """An image in color: small ones magnified by a whole number, large ones reduced."""
    image = np.broadcast_to(image, (*image.shape[:2], 3))
    side = max(image.shape[:2])
    if side > _MAX_TILE:
        size = [max(1, round(s * _MAX_TILE / side)) for s in image.shape[1::-1]]
        return np.asarray(Image.fromarray(image).resize(size, Image.Resampling.LANCZOS))
    factor = max(1, round(_TILE / side))
    return image.repeat(factor, axis=0).repeat(factor, axis=1)


def shortened(text: str, letters: int) -> str:
    """A text without what cannot be printed, and without its middle where it has more letters."""
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    if len(text) <= letters:
        return text
    end = (letters - 1) // 2
    return f"{text[: letters - 1 - end]}…{text[-end:]}"
