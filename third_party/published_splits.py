"""Turns split files that other projects publish into files of ids, one a line.

    python -m third_party.published_splits --format=fixmatch \
        --input=cifar10.1@250-label.json --output=labeled.txt

The result is for --labeled_ids (or --unlabeled_ids) of the binaries. Ids are positions in the
released files: name those as the data, such as `cifar10:cifar-10-binary.tar.gz`, since TensorFlow
Datasets has them in another order. README.md says where each format comes from.
"""

import collections
import json
import os
import pathlib
import sys
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from absl import app, flags

_FORMAT = flags.DEFINE_enum(
    "format", None, ["fixmatch", "usb", "stl10_folds", "uda_imdb"], "What the file is."
)
_INPUT = flags.DEFINE_string("input", None, "The published file.")
_OUTPUT = flags.DEFINE_string("output", None, "The file of ids to write.")
_FOLD = flags.DEFINE_integer("fold", None, "stl10_folds: which of the folds, from 0.")
_SIZE = flags.DEFINE_integer(
    "size", None, "uda_imdb: how many labeled reviews, half of each class."
)
_NAMES = flags.DEFINE_string(
    "names",
    None,
    "uda_imdb: names of your reviews in the order of their ids, one a line, such as "
    "neg/9851_1.txt; without it ids are positions in the list itself.",
)


# Of an id, so that it is an int64; the binaries read no more.
_MAX_DIGITS = 18


class SplitError(ValueError):
    """A split file that is not what it should be. One line: the file, the cause."""


def read_fixmatch(path: pathlib.Path) -> list[int]:
    """The labeled ids of FixMatch's `<dataset>.<seed>@<size>-label.json`.

    Raises:
      SplitError: the file is none.
    """
    text = _read_text(path)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:  # too deep, or a number of thousands of digits
        raise SplitError(f"{path} is no JSON that can be read: {_reason(error)}.") from error
    ids = content.get("label") if isinstance(content, dict) else None
    # To Python, true is an integer.
    if not isinstance(ids, list) or any(type(i) is not int for i in ids):
        raise SplitError(f"{path} holds no list of whole numbers as 'label'.")
    return _checked(ids, path)


def read_usb(path: pathlib.Path) -> list[int]:
    """The ids of USB's `lb_labels*_idx.npy` or `ulb_labels*_idx.npy`, or of TorchSSL's file.

    Raises:
      SplitError: the file is none.
    """
    try:
        with open(path, "rb") as file:
            ids = np.lib.format.read_array(file, allow_pickle=False)
    except OSError as error:
        raise _unreadable(path, error) from error
    except Exception as error:  # a pickle, or damaged, of which numpy raises many types
        raise SplitError(f"{path} is no .npy file of numbers: {_reason(error)}.") from error
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise SplitError(f"{path} holds {ids.dtype} {ids.shape}: whole numbers [n] are expected.")
    return _checked(ids.tolist(), path)


def read_stl10_fold(path: pathlib.Path, fold: int) -> list[int]:
    """The ids of one line of STL-10's `fold_indices.txt`.

    Raises:
      SplitError: the file is none, or has no such line.
    """
    folds = [line.split() for line in _read_text(path).splitlines() if line.strip()]
    if not 0 <= fold < len(folds):
        raise SplitError(f"{path} has no fold {fold}, only 0 to {len(folds) - 1}.")
    for text in folds[fold]:
        if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS):
            raise SplitError(f"{path} fold {fold}: {text[:40]!r} is no id.")
    return _checked([int(text) for text in folds[fold]], path)


def read_uda_imdb(path: pathlib.Path, size: int, names: Sequence[str] | None = None) -> list[int]:
    """The ids of the labeled reviews that UDA's text code takes from its `train_id_list.txt`.

    The list names reviews as `<label>_<file>`, of the labels pos, neg and unsup. UDA's labeled set
    of a size are the first size / 2 of pos and of neg.

    Args:
      path: the list.
      size: how many labeled reviews.
      names: of the reviews in the order of their ids, as in the list or as paths that end in
        `<label>/<file>`. None: ids are positions in the list, which is the order of the table
        that UDA's imdb_format.py writes.

    Raises:
      SplitError: the list is none, too short, or names a review that is not among the names, or
        is more than once.
    """
    listed = [line.strip() for line in _read_text(path).splitlines() if line.strip()]
    if size < 2 or size % 2:
        raise SplitError(f"The size {size} must be an even number: half of each class.")
    chosen = []
    for label in ("pos", "neg"):
        of_label = [name for name in listed if name.startswith(f"{label}_")][: size // 2]
        if len(of_label) < size // 2:
            raise SplitError(f"{path} names {len(of_label)} {label} reviews, not {size // 2}.")
        chosen += of_label
    order = listed if names is None else ["_".join(name.split("/")[-2:]) for name in names]
    position = {name: i for i, name in enumerate(order)}
    missing = next((name for name in chosen if name not in position), None)
    if missing is not None:
        raise SplitError(
            f"{path}: {missing!r} is not among the {len(order)} names of your reviews."
        )
    times = collections.Counter(order)
    twice = next((name for name in chosen if times[name] > 1), None)
    if twice is not None:
        where = path if names is None else "The names of your reviews"
        raise SplitError(f"{where}: {twice!r} is there {times[twice]} times, so its id is unclear.")
    return _checked([position[name] for name in chosen], path)


def write_ids(path: pathlib.Path, ids: Iterable[int], comment: str) -> None:
    """Writes a file of ids, one a line, after a comment; `path` is the old file or a whole one.

    Raises:
      SplitError: the path is that of a folder, or of a device, which the file would replace.
    """
    if path.exists() and not path.is_file():
        raise SplitError(f"{path} is not a regular file: name one to write.")
    lines = [f"# {comment}", *map(str, ids)]
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _checked(ids: list[int], path: pathlib.Path) -> list[int]:
    """The ids, sorted; raises SplitError unless they are different, whole and at least one."""
    if not ids:
        raise SplitError(f"{path} holds no id.")
    if max(ids) >= 10**_MAX_DIGITS:
        raise SplitError(f"{path} holds a number of more than {_MAX_DIGITS} digits: that is no id.")
    if min(ids) < 0:
        raise SplitError(f"{path} holds the id {min(ids)}: ids count from 0.")
    ids = sorted(ids)
    twice = next((a for a, b in zip(ids, ids[1:], strict=False) if a == b), None)
    if twice is not None:
        raise SplitError(f"{path} holds the id {twice} more than once.")
    return ids


def _read_text(path: pathlib.Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise _unreadable(path, error) from error
    except UnicodeDecodeError as error:
        raise SplitError(f"{path} is no text.") from error


def _unreadable(path: pathlib.Path, error: OSError) -> SplitError:
    return SplitError(f"{path} cannot be read: {error.strerror}.")


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _needed(flag: flags.FlagHolder) -> int:
    if flag.value is None:
        raise SplitError(f"--format={_FORMAT.value} needs --{flag.name}.")
    return flag.value


def _read() -> list[int]:
    path = pathlib.Path(_INPUT.value)
    readers: dict[str, Callable[[], list[int]]] = {
        "fixmatch": lambda: read_fixmatch(path),
        "usb": lambda: read_usb(path),
        "stl10_folds": lambda: read_stl10_fold(path, _needed(_FOLD)),
        "uda_imdb": lambda: read_uda_imdb(
            path,
            _needed(_SIZE),
            _NAMES.value and _read_text(pathlib.Path(_NAMES.value)).split("\n"),
        ),
    }
    return readers[_FORMAT.value]()


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        sys.exit(f"error: unexpected argument {argv[1]!r}: every setting is a --flag=value.")
    try:
        ids = _read()
        output = pathlib.Path(_OUTPUT.value)
        write_ids(output, ids, f"{len(ids)} ids of {_INPUT.value!r}, in the format {_FORMAT.value}")
    except SplitError as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        sys.exit(f"error: {_OUTPUT.value} cannot be written: {error.strerror}.")
    print(f"{len(ids)} ids, {ids[0]} to {ids[-1]}, are in {output}.")


if __name__ == "__main__":
    for required in (_FORMAT, _INPUT, _OUTPUT):
        flags.mark_flag_as_required(required)
    app.run(main)
