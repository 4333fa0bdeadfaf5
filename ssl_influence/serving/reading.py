"""The inputs to predict for, read from files when it is their turn."""

import dataclasses
import itertools
import logging
import os
import pathlib
import stat
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures

import numpy as np

from ssl_influence import config
from ssl_influence.data import images, inputs as inputs_lib, rows
from ssl_influence.data.readers import folder, npz, table

_ARRAYS = ("images", "x", "inputs")

_log = logging.getLogger("ssl_influence")


@dataclasses.dataclass(frozen=True)
class Part:
    """The inputs in one of the files or folders.

    Attributes:
      names: what messages and tables call each.
      read: its number -> the input, as the model's spec says; raises ConfigError if it is bad.
    """

    names: Sequence[str]
    read: Callable[[int], np.ndarray]


def find(
    paths: Sequence[str | os.PathLike],
    spec: inputs_lib.InputSpec,
    settings: config.DataConfig,
    *,
    resize: bool = False,
) -> list[Part]:
    """The inputs that paths hold: arrays are read, images in files are not yet.

    Args:
      paths: of image files; folders, for all images below them, in the order of their paths; and
        .npz files with an array named images, x or inputs, or only one. Vectors are in .npz files.
        Texts are the rows of .csv and .tsv files; the .txt files below folders, one text each; and
        the lines of other files.
      spec: what the model takes.
      settings: how examples were read for training: image_size, image_channels, text_column,
        columns.
      resize: images of another size are scaled so that they cover the model's, and cut to its
        middle; and they are made gray or colored as the model has it.

    Raises:
      ConfigError: a path does not exist, is a pipe or a device, is damaged, or holds no such
        inputs.
    """
    if resize:
        if spec.kind != "image":
            raise config.ConfigError(f"--resize is for images, and the model takes {spec.kind}s.")
        channels = spec.shape[-1] if spec.shape[-1] in (1, 3) else None
        settings = dataclasses.replace(settings, image_size=spec.shape[:2], image_channels=channels)
    return [_part(pathlib.Path(path), spec, settings) for path in paths]


def texts(given: Sequence[str]) -> Part:
    """Texts as they are given, under their own names.

    Raises:
      ConfigError: one is not UTF-8.
    """

    def read(row: int) -> np.ndarray:
        try:
            given[row].encode("utf-8")
        except UnicodeEncodeError as error:
            raise config.ConfigError(f"The text {given[row]!r} is not UTF-8.") from error
        return np.array(given[row], object)

    return Part(given, read)


def batches(
    parts: Sequence[Part], batch_size: int, on_bad_example: str = "error"
) -> Iterator[tuple[list[str], np.ndarray]]:
    """(names, inputs [B, ...]) of so many inputs at a time; no more than these are in memory.

    Args:
      parts: where inputs are; read in their order.
      batch_size: B, but for the last batch and those that bad inputs are missing from.
      on_bad_example: "error", or "skip", which logs them.

    Raises:
      ConfigError: an input is bad, and that is an error, or all are.
    """
    places = ((part, row) for part in parts for row in range(len(part.names)))
    total = skipped = 0
    with futures.ThreadPoolExecutor(max(4, os.cpu_count() or 1), "read") as pool:
        while chunk := list(itertools.islice(places, batch_size)):
            names, inputs = [], []
            for (part, row), found in zip(chunk, pool.map(_attempt, chunk), strict=True):
                if not isinstance(found, config.ConfigError):
                    names.append(part.names[row])
                    inputs.append(found)
                elif on_bad_example == "skip":
                    _log.warning("Left out: %s", found)
                else:
                    raise found
            total += len(chunk)
            skipped += len(chunk) - len(names)
            if names:
                yield names, np.stack(inputs)
    if skipped == total:
        raise config.ConfigError(f"None of {total} inputs could be read: see above.")
    if skipped:
        _log.warning("%d of %d inputs were left out.", skipped, total)


def _attempt(place: tuple[Part, int]) -> np.ndarray | config.ConfigError:
    part, row = place
    try:
        return part.read(row)
    except config.ConfigError as error:
        return error


def _part(path: pathlib.Path, spec: inputs_lib.InputSpec, settings: config.DataConfig) -> Part:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError as error:
        raise config.ConfigError(
            f"{path} does not exist: name files or folders that do."
        ) from error
    except OSError as error:
        raise config.ConfigError(f"{path} cannot be read: {error.strerror or error}.") from error
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # a pipe would block for ever
        raise config.ConfigError(
            f"{path} is neither a regular file nor a folder: save what it gives in a file."
        )
    if spec.kind == "text":
        return _texts(path, stat.S_ISDIR(mode), settings)
    if path.suffix.lower() == ".npz":
        array = _array(path)
        if spec.kind == "vector":
            return _vectors(path, array, spec)
        return _images(path, array, spec, settings)
    if spec.kind == "vector":
        raise config.ConfigError(
            f"{path} is not a .npz file, and the model takes vectors of {spec.shape[0]} numbers: "
            "save them as an array [n, d] by numpy.savez."
        )
    if stat.S_ISDIR(mode):
        return _folder(path, spec, settings)

    def read(row: int) -> np.ndarray:
        return _image(path.read_bytes, str(path), spec, settings)

    return Part([str(path)], read)


def _texts(path: pathlib.Path, is_folder: bool, settings: config.DataConfig) -> Part:
    if is_folder:
        below = sorted(path.rglob("*.txt"))
        if not below:
            raise config.ConfigError(
                f"{path} holds no .txt file, and the model takes texts: name a folder that does, "
                "files of lines, or tables."
            )
        return Part(
            rows.Strings(map(str, below)), lambda row: _decoded(_bytes(below[row]), below[row])
        )
    kind = path.suffix.lower().removeprefix(".")
    if kind in ("csv", "tsv"):
        found = table.read_texts(str(path), str(path), kind, settings)
        lines = [line for line, _ in found]

        def read(row: int) -> np.ndarray:
            text = found[row][1]
            if isinstance(text, config.ConfigError):
                raise text
            return np.array(text, object)
    else:
        whole = _bytes(path)
        held = whole.removesuffix(b"\n").split(b"\n") if whole else []
        lines = range(1, len(held) + 1)

        def read(row: int) -> np.ndarray:
            return _decoded(held[row].removesuffix(b"\r"), f"{path}, line {lines[row]}")

    if not lines:
        raise config.ConfigError(f"{path} holds no text: name a file that does.")
    return Part(rows.Strings(f"{path}, line {line}" for line in lines), read)


def _bytes(path: pathlib.Path) -> bytes:
    try:
        return path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise config.ConfigError(f"{path} cannot be read: {error.strerror or error}.") from error


def _decoded(data: bytes, where: str | pathlib.Path) -> np.ndarray:
    try:
        return np.array(data.decode("utf-8"), object)
    except UnicodeDecodeError as error:
        raise config.ConfigError(
            f"{where} has the byte 0x{data[error.start]:02x}, which is not UTF-8, and the model "
            "takes texts: name files of lines, or tables, in UTF-8."
        ) from error


def _folder(path: pathlib.Path, spec: inputs_lib.InputSpec, settings: config.DataConfig) -> Part:
    below, read_bytes = folder.images_below(path)
    if not len(below):
        raise config.ConfigError(f"{path} holds no image: name a folder that does.")
    names = rows.Strings(os.path.join(path, name) for name in below)

    def read(row: int) -> np.ndarray:
        return _image(lambda: read_bytes(below[row]), names[row], spec, settings)

    return Part(names, read)


def _image(
    read_bytes: Callable[[], bytes],
    name: str,
    spec: inputs_lib.InputSpec,
    settings: config.DataConfig,
) -> np.ndarray:
    try:
        data = read_bytes()
    except OSError as error:
        raise config.ConfigError(f"{name} cannot be read: {error.strerror or error}.") from error
    image = images.decode(data, name, settings)
    _check_shape(image.shape, name, spec)
    return image


def _check_shape(found: Sequence[int], name: str, spec: inputs_lib.InputSpec) -> None:
    if found != spec.shape:
        raise config.ConfigError(
            f"{name} is {_size(found)}, and the model takes {_size(spec.shape)}: --resize scales "
            "and cuts images to that, and makes them gray or colored."
        )


def _size(shape: Sequence[int]) -> str:
    height, width, channels = shape
    return f"{height}x{width} (height x width) with {channels} channel{'s' * (channels > 1)}"


def _images(
    path: pathlib.Path, array: np.ndarray, spec: inputs_lib.InputSpec, settings: config.DataConfig
) -> Part:
    if array.ndim == 3:
        array = array[..., np.newaxis]
    if (
        array.dtype not in (np.uint8, np.uint16)
        or array.ndim != 4
        or array.shape[-1] not in (1, 3)
        or 0 in array.shape
    ):
        raise config.ConfigError(
            f"{path} holds an array {array.dtype} {list(array.shape)}, and the model takes images: "
            "uint8 or uint16 [n, height, width] or [n, height, width, channels], channels 1 or 3."
        )
    if array.dtype == np.uint16:
        array = images.to_uint8(array)
    fitted = images.fit(array, settings)
    _check_shape(fitted.shape[1:], str(path), spec)
    read = fitted.__getitem__ if isinstance(fitted, np.ndarray) else fitted.read_one
    return Part(_RowNames(path, len(array)), read)


def _vectors(path: pathlib.Path, array: np.ndarray, spec: inputs_lib.InputSpec) -> Part:
    (size,) = spec.shape
    if (
        array.dtype.kind not in "fiub"
        or array.ndim != 2
        or array.shape[1] != size
        or not len(array)
    ):
        raise config.ConfigError(
            f"{path} holds an array {array.dtype} {list(array.shape)}, and the model takes vectors "
            f"of {size} numbers, [n, {size}]."
        )

    def read(row: int) -> np.ndarray:
        with np.errstate(over="ignore"):
            vector = array[row].astype(np.float32)
        if not np.isfinite(vector).all():
            raise config.ConfigError(
                f"{_row_name(path, row)} has a number that is not finite in float32: correct or "
                "remove it."
            )
        return vector

    return Part(_RowNames(path, len(array)), read)


class _RowNames(Sequence):
    """The names of an array's rows."""

    def __init__(self, path: pathlib.Path, size: int):
        self._path = path
        self._size = size

    def __len__(self):
        return self._size

    def __getitem__(self, index):
        return _row_name(self._path, index)


def _row_name(path: pathlib.Path, row: int) -> str:
    return f"{path}[{row}]"


def _array(path: pathlib.Path) -> np.ndarray:
    """The array of a .npz file that holds inputs."""
    with npz.opened(str(path), path) as file:
        headers = npz.read_headers(str(path), file)
        chosen = next((name for name in _ARRAYS if name in headers), None)
        if chosen is None and len(headers) == 1:
            (chosen,) = headers
        if chosen is None:
            raise config.ConfigError(
                f"{path} holds the arrays {', '.join(map(repr, headers)) or '(none)'}: call that "
                "of the inputs images, x or inputs."
            )
        return npz.read_array(str(path), file, chosen)
