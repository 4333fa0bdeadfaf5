"""Tables of texts, of paths of images or of numbers: `csv:/data/reviews.csv`, `tsv:...`."""

import array
import collections
import csv
import dataclasses
import functools
import hashlib
import itertools
import logging
import math
import os
import posixpath
import re
import stat
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ssl_influence import config
from ssl_influence.data import examples, images, names, rows

_log = logging.getLogger("ssl_influence")

_PART = ("part", "split")  # in any case
_BREAK = re.compile(r"\r\n|\r|\n")
# Stands for a NUL, which csv refuses before Python 3.11.
_NUL = "\udc00"
# That, or a byte that is no UTF-8 as PEP 383 has it read.
_WRONG = re.compile("[\udc00\udc80-\udcff]")
_FLOAT32_MAX = float(np.finfo(np.float32).max)


def read(
    name: names.DatasetName, place: str | None, settings: config.DataConfig
) -> examples.Collection:
    """The rows of a table in UTF-8, one example each.

    The first line names the columns, or `settings.columns` does.

    - A column settings.text_column: the examples are texts, empty ones too.
    - A column settings.image_column: images, by paths relative to the table's folder and within it.
    - Neither: float32 vectors of all other columns, in their order.
    - The column settings.label_column has the label; it, or one cell, may be missing, and the row
      is unlabeled then. If all labels are integers the classes are sorted by number, else by text.
      Negative labels are classes like others.
    - A column `part` or `split` says train, unlabeled, validation (or val) or test. Without it all
      are of train.

    Texts and vectors of a part stay in the order of the file. Images are sorted by the bytes of
    their paths, so that a list in another order gives the same ids.

    A csv is read as RFC 4180 has it: cells in quotation marks may hold commas, line ends and, if
    doubled, quotation marks. In a tsv a quotation mark is a character like others, and no cell
    holds a tab or a line end. Lines end with LF or CRLF, empty lines do not count.

    Raises:
      ConfigError: the table is not of this form; or a row is not, unless settings.on_bad_example is
        "skip", which leaves it out.
    """
    where = f"{name.source}:{place}"
    records = _records(where, place, name.source)
    columns, records = _header(where, records, settings)
    layout = _layout(where, columns, settings)
    table = _Table(where, layout, os.path.dirname(os.path.abspath(place)))
    for record in records:
        try:
            table.add(record)
        except _BadRow as error:
            if settings.on_bad_example == "error":
                raise
            table.skipped.append(str(error))
    return table.collection(settings)


def read_texts(
    where: str, place: str, kind: str, settings: config.DataConfig
) -> list[tuple[int, str | config.ConfigError]]:
    """(number of the line, the text or what is wrong with the row) of each row of a table.

    Args:
      where: what messages call it.
      place: its path.
      kind: "csv" or "tsv", see `read`.
      settings: names of the columns.

    Raises:
      ConfigError: the table has no column settings.text_column, or no form at all.
    """
    columns, records = _header(where, _records(where, place, kind), settings)
    if settings.text_column not in columns:
        raise config.ConfigError(
            f"{where} has no column {settings.text_column!r} of texts, only "
            f"{', '.join(map(_cut, columns[:20]))}."
        )
    # As if there were no other column of inputs, nor labels.
    layout = _Layout(columns, "text", [columns.index(settings.text_column)], None, None)
    table, found = _Table(where, layout, ""), []
    for record in records:
        try:
            table.add(record)
            found.append((record.line, table.newest_text))
        except _BadRow as error:
            found.append((getattr(record, "line", len(found) + 2), error))
    return found


class _BadRow(config.ConfigError):
    """A row that cannot be an example."""


class _Record(NamedTuple):
    """A row of the table as it stands: its first line, counted from 1, and its cells."""

    line: int
    cells: list[str]


class _Layout(NamedTuple):
    """Which column is what.

    Attributes:
      columns: names of all.
      kind: "text", "image" or "vector".
      inputs: the numbers of the columns that an example is made of.
      label: the number of the column with the label; None: there is none.
      part: of the column with the part.
      absent: of vectors, what would have made them texts or images, in words.
    """

    columns: list[str]
    kind: str
    inputs: list[int]
    label: int | None
    part: int | None
    absent: str = ""


def _records(where: str, place: str, kind: str) -> Iterator[_Record | _BadRow]:
    """The rows that are not empty, cut into cells; in place of a malformed one what is wrong."""
    try:
        # csv splits lines at CR too, as the reader of the module csv does; tsv at LF alone.
        with open(
            place,
            encoding="utf-8-sig",
            errors="surrogateescape",
            newline="" if kind == "csv" else "\n",
        ) as file:
            yield from {"csv": _csv_records, "tsv": _tsv_records}[kind](where, file)
    except OSError as error:
        raise config.ConfigError(
            f"{where} cannot be read: {error.strerror or error}; name a table that can."
        ) from error


def _csv_records(where: str, file: Iterator[str]) -> Iterator[_Record | _BadRow]:
    reader = csv.reader((line.replace("\0", _NUL) for line in file), strict=True)
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if "limit" in str(error) or "unexpected end" in str(error):
                # A quotation mark that is not closed has swallowed rows: there is no skipping them.
                raise config.ConfigError(
                    f"{where}, line {line}: {error}; a quotation mark in the row that begins here "
                    "may never be closed, or a cell is too long: mend it."
                ) from error
            yield _BadRow(f"{where}, line {line} is malformed ({error}): mend or remove it.")
            continue
        if cells:
            yield _Record(line, cells)


def _tsv_records(where: str, file: Iterator[str]) -> Iterator[_Record]:
    for line, text in enumerate(file, 1):
        text = text.removesuffix("\n").removesuffix("\r").replace("\0", _NUL)
        if text:
            yield _Record(line, text.split("\t"))


def _check_text(where: str, record: _Record) -> None:
    """Raises _BadRow for bytes that are no UTF-8, with the line they are in, and for NUL."""
    line = record.line
    for cell in record.cells:
        if not cell.isascii() and (wrong := _WRONG.search(cell)):
            line += len(_BREAK.findall(cell, 0, wrong.start()))
            what = (
                "a NUL character"
                if wrong[0] == _NUL
                else f"the byte 0x{ord(wrong[0]) - 0xDC00:02x}, which is not UTF-8"
            )
            raise _BadRow(f"{where}, line {line} has {what}: save the table as UTF-8 text.")
        line += len(_BREAK.findall(cell))


def _header(
    where: str, records: Iterator[_Record | _BadRow], settings: config.DataConfig
) -> tuple[list[str], Iterator[_Record | _BadRow]]:
    """The names of the columns, and the rows."""
    first = next(records, None)
    if first is None:
        raise config.ConfigError(f"{where} is empty: it needs a row of column names, and rows.")
    if settings.columns:
        columns = list(settings.columns)
        if isinstance(first, _Record) and first.cells == columns:
            raise config.ConfigError(
                f"{where}, line {first.line} names the columns already: leave out --columns."
            )
        records = itertools.chain([first], records)
    else:
        if isinstance(first, _BadRow):
            raise first
        _check_text(where, first)
        columns = first.cells
    counts = collections.Counter(columns)
    twice = [column for column in columns if counts[column] > 1]
    if twice:
        raise config.ConfigError(f"{where} has two columns called {_cut(twice[0])}: rename one.")
    return columns, records


def _layout(where: str, columns: list[str], settings: config.DataConfig) -> _Layout:
    number = {column: i for i, column in enumerate(columns)}
    of_parts = [i for i, column in enumerate(columns) if column.strip().lower() in _PART]
    if len(of_parts) > 1:
        raise config.ConfigError(
            f"{where} has two columns that may say the part, {_cut(columns[of_parts[0]])} and "
            f"{_cut(columns[of_parts[1]])}: rename one."
        )
    label, part = number.get(settings.label_column), of_parts[0] if of_parts else None
    text, image = number.get(settings.text_column), number.get(settings.image_column)
    shown = ", ".join(_cut(column) for column in columns[:20])
    if text is not None and image is not None:
        raise config.ConfigError(
            f"{where} has both {settings.text_column!r} and {settings.image_column!r}: name a "
            "column that it has not as --text_column or --image_column, to read the other."
        )
    if label is None:
        _log.warning(
            "%s has no column %r: all its rows are unlabeled. Its columns: %s.",
            where,
            settings.label_column,
            shown,
        )
    if text is not None:
        return _Layout(columns, "text", [text], label, part)
    if image is not None:
        return _Layout(columns, "image", [image], label, part)
    others = [i for i in range(len(columns)) if i not in (label, part)]
    if not others:
        raise config.ConfigError(
            f"{where} has no column of inputs, only {shown}: see --text_column, --image_column."
        )
    if any(not columns[i] for i in others):
        raise config.ConfigError(
            f"{where} has a column of numbers without a name, as pandas writes the index: write it "
            "with index=False, or name the column."
        )
    absent = (
        f"no column {settings.text_column!r} of texts (--text_column) or {settings.image_column!r} "
        f"of images (--image_column), only {shown}"
    )
    return _Layout(columns, "vector", others, label, part, absent)


class _Table:
    """The examples of a table as they are gathered, row by row."""

    def __init__(self, where: str, layout: _Layout, folder: str):
        self.where = where
        self.layout = layout
        self.folder = folder
        self.skipped: list[str] = []
        self._lines = array.array("q")
        self._parts = array.array("b")
        self._labels = array.array("i")  # of `_label_numbers`
        self._label_numbers: dict[str, int] = {}
        self._inputs: list[str] | array.array = array.array("f") if layout.kind == "vector" else []
        self._sizes = array.array("q")  # of the files of images, in bytes
        self._real_folder = functools.cache(os.path.realpath)

    def add(self, record: _Record | _BadRow) -> None:
        """Takes one row in.

        Raises:
          _BadRow: it cannot be an example; nothing of it was taken in.
          ConfigError: it names an image outside the table's folder.
        """
        if isinstance(record, _BadRow):
            raise record
        layout, line = self.layout, record.line
        _check_text(self.where, record)
        cells = record.cells
        if len(cells) != len(layout.columns):
            raise _BadRow(
                f"{self.where}, line {line} has {len(cells)} cells, there are "
                f"{len(layout.columns)} columns: mend or remove it."
            )
        part = (
            examples.TRAIN
            if layout.part is None
            else examples.PART_NAMES.get(cells[layout.part].strip().lower())
        )
        if part is None:
            raise _BadRow(
                f"{self.where}, line {line}: {_cut(cells[layout.part])} in the column "
                f"{layout.columns[layout.part]!r} is "
                f"none of {', '.join(examples.PART_NAMES)}."
            )
        label = "" if layout.label is None else cells[layout.label].strip()
        if layout.kind == "vector":
            self._inputs.extend([self._number(line, i, cells[i]) for i in layout.inputs])
        elif layout.kind == "text":
            self._inputs.append(cells[layout.inputs[0]])
        else:
            path, size = self._image(line, cells[layout.inputs[0]])
            self._inputs.append(path)
            self._sizes.append(size)
        self._lines.append(line)
        self._parts.append(examples.PARTS.index(part))
        self._labels.append(
            self._label_numbers.setdefault(label, len(self._label_numbers)) if label else -1
        )

    @property
    def newest_text(self) -> str:
        """The text of the row that was taken in last."""
        return self._inputs[-1]

    def _number(self, line: int, column: int, cell: str) -> float:
        try:
            number = float("no number" if "_" in cell else cell)  # Python's own 1_000
        except ValueError as error:
            raise _BadRow(
                f"{self.where}, line {line}: {_cut(cell)} in the column "
                f"{_cut(self.layout.columns[column])} is no number: mend it, or name another "
                f"column, as there is {self.layout.absent}."
            ) from error
        if not math.isfinite(number) or abs(number) > _FLOAT32_MAX:
            raise _BadRow(
                f"{self.where}, line {line}: {_cut(cell)} in the column "
                f"{_cut(self.layout.columns[column])} is no finite float32: mend or remove it."
            )
        return number

    def _image(self, line: int, cell: str) -> tuple[str, int]:
        """The path of an image from the table's folder, and its size in bytes."""
        if not cell:
            raise _BadRow(f"{self.where}, line {line} names no image: mend or remove it.")
        path = posixpath.normpath(cell)
        full = os.path.join(self.folder, path)
        try:
            is_link = stat.S_ISLNK(os.lstat(full).st_mode)
            size, reason = os.path.getsize(full), ""
            if not os.path.isfile(full):
                reason = "it is not a regular file"
        except OSError as error:
            is_link, size, reason = False, -1, error.strerror
        real = os.path.realpath(full) if is_link else self._real_folder(os.path.dirname(full))
        if os.path.isabs(path) or not _within(real, self._real_folder(self.folder)):
            raise config.ConfigError(
                f"{self.where}, line {line}: the image {_cut(cell)} lies outside the table's "
                "folder: paths are relative to it, so put the table above its images."
            )
        if reason:
            raise _BadRow(
                f"{self.where}, line {line}: the image {_cut(cell)} cannot be read ({reason}): "
                "mend the path or remove the row."
            )
        return path, size

    def collection(self, settings: config.DataConfig) -> examples.Collection:
        """All that was taken in, by part.

        Raises:
          ConfigError: there is nothing, or two rows name one image.
        """
        order = np.arange(len(self._lines))
        if self.layout.kind == "image":
            order = self._sorted_images(settings)
        if not len(order):
            raise config.ConfigError(
                f"{self.where}: none of its {len(self.skipped)} rows can be read. The first: "
                f"{self.skipped[0]}"
                if self.skipped
                else f"{self.where} has column names but no row."
            )
        class_names, task, number = self._classes()
        parts = {}
        for i, part in enumerate(examples.PARTS):
            chosen = order[np.array(self._parts, np.int8)[order] == i]
            if len(chosen):
                labels = number[np.array(self._labels, np.int32)[chosen]]
                parts[part] = self._examples(chosen, labels, settings)
        if self.skipped:
            _log.warning(
                "%s: %d rows left out. The first: %s",
                self.where,
                len(self.skipped),
                self.skipped[0],
            )
            part, of_part = next(iter(parts.items()))
            parts[part] = dataclasses.replace(of_part, skipped=[*self.skipped, *of_part.skipped])
        return examples.Collection(self.where, class_names, parts, task_classes=task)

    def _sorted_images(self, settings: config.DataConfig) -> np.ndarray:
        """The rows by the bytes of their paths, each path once."""
        order = sorted(range(len(self._lines)), key=lambda row: self._inputs[row].encode())
        kept = order[:1]
        for row in order[1:]:
            if self._inputs[row] != self._inputs[kept[-1]]:
                kept.append(row)
                continue
            error = _BadRow(
                f"{self.where}, line {self._lines[row]} names the image "
                f"{_cut(self._inputs[row])}, as line {self._lines[kept[-1]]} does: remove one."
            )
            if settings.on_bad_example == "error":
                raise error
            self.skipped.append(str(error))
        return np.array(kept, np.int64)

    def _classes(self) -> tuple[list[str], int | None, np.ndarray]:
        """Names of the classes, how many are the task's, and the class of each label as read.

        The last entry of the latter, int32, is for those without a label.
        """
        texts = list(self._label_numbers)
        are_numbers = all(re.fullmatch("[+-]?[0-9]{1,18}", text) for text in texts)
        if are_numbers:
            texts = [str(int(text)) for text in texts]
        labels, parts = np.array(self._labels, np.int32), np.array(self._parts, np.int8)
        of_train = np.unique(
            labels[(parts == examples.PARTS.index(examples.TRAIN)) & (labels >= 0)]
        )
        task = {texts[label] for label in of_train}
        in_order = functools.partial(sorted, key=int if are_numbers else None)
        class_names = in_order(task) + in_order(set(texts) - task)
        position = {c: i for i, c in enumerate(class_names)}
        number = np.array([position[text] for text in texts] + [-1], np.int32)
        return class_names, len(task) or None, number

    def _examples(
        self, chosen: np.ndarray, labels: np.ndarray, settings: config.DataConfig
    ) -> examples.Examples:
        """The examples of the rows chosen."""
        if self.layout.kind == "image":
            return self._image_examples(chosen, labels, settings)
        if self.layout.kind == "vector":
            vectors = np.frombuffer(self._inputs, np.float32).reshape(-1, len(self.layout.inputs))
            inputs = vectors[chosen]
        else:
            inputs = np.array([self._inputs[row] for row in chosen], object)
        lines = rows.Strings(f"line {self._lines[row]}" for row in chosen)
        return examples.Examples(inputs, labels, lines)

    def _image_examples(
        self, chosen: np.ndarray, labels: np.ndarray, settings: config.DataConfig
    ) -> examples.Examples:
        paths = rows.Strings(self._inputs[row] for row in chosen)
        stamp = hashlib.sha256()
        for row in chosen:
            stamp.update(f"{self._inputs[row]}\0{self._sizes[row]}\0".encode())

        def read_bytes(row: int) -> bytes:
            with open(os.path.join(self.folder, paths[row]), "rb") as file:
                return file.read()

        return images.examples_of(
            read_bytes, paths, labels, stamp.hexdigest(), settings, where=self.where
        )


def _within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(os.path.join(folder, ""))


def _cut(text: str) -> str:
    """A cell as messages show it, on one line and not too long."""
    return repr(text if len(text) <= 60 else text[:57] + "...")
