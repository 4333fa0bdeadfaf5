"""Arrays in a file of numpy's: `npz:/data/birds.npz`."""

import logging
import math
import os
import zipfile
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ssl_influence import config
from ssl_influence.data import examples, images, names

_log = logging.getLogger("ssl_influence")

# part -> what its inputs and labels may be called. Keras has x_train, MedMNIST has train_images.
_NAMES = {
    examples.TRAIN: (
        ("x_train", "y_train"),
        ("train_images", "train_labels"),
        ("images", "labels"),
        ("inputs", "labels"),
    ),
    examples.UNLABELED: (
        ("x_unlabeled", "y_unlabeled"),
        ("unlabeled_images", "unlabeled_labels"),
        ("unlabeled", "unlabeled_labels"),
    ),
    examples.VALIDATION: (("x_val", "y_val"), ("val_images", "val_labels")),
    examples.TEST: (("x_test", "y_test"), ("test_images", "test_labels")),
}
_CLASS_NAMES = "class_names"
# Labels beyond are numbers of something else, and a name for each would fill the memory.
_MAX_CLASSES = 2**16


def read(
    name: names.DatasetName, place: str | None, settings: config.DataConfig
) -> examples.Collection:
    """The arrays of an .npz file, found by their names.

    Training examples are x_train and y_train, train_images and train_labels, images and labels, or
    inputs and labels; test ones x_test and y_test, or test_images and test_labels; validation ones
    x_val and y_val, or val_images and val_labels; unlabeled ones x_unlabeled, unlabeled_images or
    unlabeled. The truth about the latter, for reports alone, may be in y_unlabeled or
    unlabeled_labels, and names of the classes in class_names. Others are ignored.

    Inputs are images [n, H, W] or [n, H, W, C], with C 1 or 3, of type uint8 or uint16 (x becomes
    (x + 128) // 257); or vectors [n, d] of floats. Labels are integers [n] or [n, 1] from 0, or -1
    where there is none; where the array is not there, no example has one. There are as many classes
    as class_names, else one more than the highest label that is not of an unlabeled example.

    Headers are read first: more than `settings.max_memory_gb` is refused. Nothing is unpickled.

    Raises:
      ConfigError: the file or an array in it is not of this form. A vector with NaN or infinity is
        left out where settings.on_bad_example is "skip".
    """
    where = f"{name.source}:{place}"
    with opened(where, place) as file:
        headers = read_headers(where, file)
        chosen = _choose(where, headers)
        used = {array for pair in chosen.values() for array in pair if array in headers}
        if _CLASS_NAMES in headers:
            used.add(_CLASS_NAMES)
        _check_used(where, {array: headers[array] for array in sorted(used)}, settings)
        for inputs_name, _ in chosen.values():
            _check_inputs(where, inputs_name, headers[inputs_name])
        ignored = sorted(set(headers) - used)
        if ignored:
            _log.info("%s: ignored the arrays %s.", where, ", ".join(ignored))
        arrays = {array: read_array(where, file, array) for array in sorted(used)}

    labels = {}
    for part, (inputs_name, labels_name) in chosen.items():
        count = len(arrays[inputs_name])
        if labels_name in arrays:
            labels[part] = _labels(where, labels_name, arrays[labels_name], inputs_name, count)
        else:
            labels[part] = np.full(count, -1, np.int32)
    class_names, task = _classes(where, arrays.get(_CLASS_NAMES), chosen, labels)
    parts = {
        part: _examples(where, inputs_name, arrays[inputs_name], labels[part], settings)
        for part, (inputs_name, _) in chosen.items()
    }
    return examples.Collection(name=where, class_names=class_names, parts=parts, task_classes=task)


class Header(NamedTuple):
    """What the file says of an array before its numbers."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """Of the array in memory."""
        return math.prod(self.shape) * self.dtype.itemsize


def opened(where: str, place: str | os.PathLike) -> zipfile.ZipFile:
    """The .npz file at a place, which messages call `where`; to be closed.

    Raises:
      ConfigError: it cannot be read, or is none.
    """
    try:
        return zipfile.ZipFile(place)
    except OSError as error:
        raise config.ConfigError(f"{where} cannot be read: {error.strerror or error}.") from error
    except Exception as error:  # zipfile raises many types on damaged files
        raise config.ConfigError(
            f"{where} is no .npz file, or is damaged or cut short ({_reason(error)}): write it "
            "with numpy.savez."
        ) from error


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _damaged(where: str, array: str, error: Exception) -> config.ConfigError:
    return config.ConfigError(
        f"{where}: the array {array!r} cannot be read ({_reason(error)}): write the file anew with "
        "numpy.savez."
    )


def read_headers(where: str, file: zipfile.ZipFile) -> dict[str, Header]:
    """Shape and type of each array, by its name without ".npy"; no array is read.

    Raises:
      ConfigError: a header is damaged, or says another size than the array has in the file; two
        arrays have one name.
    """
    headers = {}
    for member in file.infolist():
        array, dot, extension = member.filename.rpartition(".")
        if not dot or extension != "npy":
            continue
        if array in headers:
            raise config.ConfigError(
                f"{where} has two arrays called {array!r}: write it anew with numpy.savez."
            )
        try:
            with file.open(member) as stream:
                version = np.lib.format.read_magic(stream)
                # Version 3 differs in allowing more in the names of structured types.
                read_header = {
                    (1, 0): np.lib.format.read_array_header_1_0,
                    (2, 0): np.lib.format.read_array_header_2_0,
                }[version]
                shape, _, dtype = read_header(stream)
                length = stream.tell()
        except Exception as error:  # zipfile, zlib and numpy raise many types on damaged files
            raise _damaged(where, array, error) from error
        headers[array] = Header(shape, dtype)
        if dtype.hasobject:
            continue  # pickled: refused if it is one of those that are used
        if min(shape, default=0) < 0 or length + headers[array].nbytes != member.file_size:
            raise config.ConfigError(
                f"{where}: the array {array!r} is damaged or cut short, it has "
                f"{member.file_size - length} bytes where shape {shape} of {dtype} needs "
                f"{headers[array].nbytes}: write the file anew with numpy.savez."
            )
    return headers


def _choose(where: str, headers: Mapping[str, Header]) -> dict[str, tuple[str, str]]:
    """The names of inputs and labels by part; an array of labels need not be there."""
    chosen = {}
    for part, pairs in _NAMES.items():
        present = [pair for pair in pairs if pair[0] in headers]
        if len(present) > 1:
            raise config.ConfigError(
                f"{where} has both {present[0][0]!r} and {present[1][0]!r} as inputs of the {part} "
                "part: leave one out."
            )
        if present:
            chosen[part] = present[0]
        for _, labels_name in pairs:
            if labels_name in headers and chosen.get(part, ("", ""))[1] != labels_name:
                raise config.ConfigError(
                    f"{where} has labels {labels_name!r} but not their inputs "
                    f"{' or '.join(repr(pair[0]) for pair in pairs if pair[1] == labels_name)}."
                )
    if not chosen:
        known = ", ".join(inputs for pairs in _NAMES.values() for inputs, _ in pairs)
        raise config.ConfigError(
            f"{where} has no array of inputs, only {', '.join(sorted(headers)) or 'none at all'}: "
            f"call it one of {known}."
        )
    return chosen


def _check_used(where: str, headers: Mapping[str, Header], settings: config.DataConfig) -> None:
    """Raises ConfigError if an array is a pickle, or all together are too large."""
    for array, header in headers.items():
        if header.dtype.hasobject:
            raise config.ConfigError(
                f"{where}: the array {array!r} holds pickled Python objects, which are not read "
                "since they can run code: save it as numbers or, of class names, as texts."
            )
    total = sum(header.nbytes for header in headers.values())
    if total > settings.max_memory_gb * 2**30:
        largest = max(headers, key=lambda array: headers[array].nbytes)
        raise config.ConfigError(
            f"{where} takes {total / 2**30:.3g} GB of memory ({largest!r} has shape "
            f"{headers[largest].shape} of {headers[largest].dtype}), more than "
            f"max_memory_gb={settings.max_memory_gb:g}: raise that, or keep the images as files."
        )


def read_array(where: str, file: zipfile.ZipFile, array: str) -> np.ndarray:
    """An array that `read_headers` found.

    Raises:
      ConfigError: it is damaged, or a pickle.
    """
    try:
        with file.open(f"{array}.npy") as stream:
            return np.lib.format.read_array(stream, allow_pickle=False)
    except Exception as error:  # zipfile, zlib and numpy raise many types on damaged files
        raise _damaged(where, array, error) from error


def _labels(where: str, array: str, labels: np.ndarray, inputs_name: str, count: int) -> np.ndarray:
    """int32 [n] of integers [n] or [n, 1]."""
    described = f"{where}: the labels {array!r} are {labels.dtype} {labels.shape}"
    if labels.ndim == 2 and labels.shape[1] > 1:
        raise config.ConfigError(
            f"{described}; of one-hot labels take labels.argmax(axis=1), one number a row."
        )
    if labels.dtype.kind not in "iu" or labels.ndim not in (1, 2):
        raise config.ConfigError(f"{described}; they must be integers [n], the number of a class.")
    if len(labels) != count or labels.size != count:
        raise config.ConfigError(f"{described}, but {inputs_name!r} has {count} rows.")
    labels = labels.reshape(-1)
    wrong = np.flatnonzero((labels < -1) | (labels >= _MAX_CLASSES))
    if wrong.size:
        raise config.ConfigError(
            f"{where}: the label {labels[wrong[0]]} in row {wrong[0]} of {array!r} is not the "
            f"number of a class, from 0 (at most {_MAX_CLASSES - 1}), nor -1 for none."
        )
    return labels.astype(np.int32)


def _classes(
    where: str,
    given: np.ndarray | None,
    chosen: Mapping[str, tuple[str, str]],
    labels: Mapping[str, np.ndarray],
) -> tuple[list[str], int | None]:
    """The names of classes, and how many are the task's."""
    highest = {part: int(of_part.max(initial=-1)) for part, of_part in labels.items()}
    if given is None:
        task = 1 + max((h for part, h in highest.items() if part != examples.UNLABELED), default=-1)
        return [str(c) for c in range(1 + max(highest.values()))], task or None
    if given.ndim != 1 or given.dtype.kind != "U" or not given.size:
        raise config.ConfigError(
            f"{where}: {_CLASS_NAMES!r} is {given.dtype} {given.shape}; it must be an array of "
            "texts [number of classes]."
        )
    class_names = given.tolist()
    if len(set(class_names)) < len(class_names):
        twice = next(c for c in class_names if class_names.count(c) > 1)
        raise config.ConfigError(f"{where}: {_CLASS_NAMES!r} has {twice!r} twice.")
    for part, of_part in labels.items():
        if highest[part] >= len(class_names):
            raise config.ConfigError(
                f"{where}: the label {highest[part]} in row {of_part.argmax()} of "
                f"{chosen[part][1]!r} has no name, {_CLASS_NAMES!r} has {len(class_names)}: they "
                "are numbered from 0."
            )
    return class_names, None


def _check_inputs(where: str, array: str, header: Header) -> None:
    """Raises ConfigError unless the array holds images or vectors."""
    shape, dtype = header
    described = f"{where}: the inputs {array!r} are {dtype} {shape}"
    if dtype.kind == "f" and len(shape) == 2:
        if not shape[1]:
            raise config.ConfigError(f"{described}; vectors must have at least one entry.")
        return
    if len(shape) not in (3, 4):
        raise config.ConfigError(
            f"{described}; they must be uint8 images [n, H, W] or [n, H, W, C], or vectors [n, d] "
            "of floats."
        )
    if dtype.kind != "u" or dtype.itemsize > 2:
        raise config.ConfigError(
            f"{described}; images must be uint8 or uint16: save floats from 0 to 1 as "
            "numpy.rint(255 * x).astype('uint8')."
        )
    if len(shape) == 4 and shape[3] not in (1, 3):
        raise config.ConfigError(
            f"{described}; the last axis must be the channels, 1 or 3 of them: move it with "
            "numpy.moveaxis, drop transparency with x[..., :3]."
        )
    if 0 in shape[1:]:
        raise config.ConfigError(f"{described}; images must have at least one pixel.")


def _examples(
    where: str, array: str, inputs: np.ndarray, labels: np.ndarray, settings: config.DataConfig
) -> examples.Examples:
    if inputs.ndim == 2:
        return _vectors(where, array, inputs, labels, settings)
    if inputs.dtype.itemsize == 2:
        inputs = images.to_uint8(inputs)
    if inputs.ndim == 3:
        inputs = inputs[..., np.newaxis]
    return examples.Examples(images.fit(inputs, settings), labels)


def _vectors(
    where: str, array: str, inputs: np.ndarray, labels: np.ndarray, settings: config.DataConfig
) -> examples.Examples:
    with np.errstate(over="ignore"):  # what overflows is infinite, and refused
        vectors = inputs.astype(np.float32)
    finite = np.isfinite(vectors).all(axis=1)
    bad = [
        f"{where}: row {row} of {array!r} holds {inputs[row][~np.isfinite(vectors[row])][0]}, no "
        "finite float32: mend or remove it."
        for row in np.flatnonzero(~finite)
    ]
    if not bad:
        return examples.Examples(vectors, labels)
    if settings.on_bad_example == "error" or len(bad) == len(vectors):
        raise config.ConfigError(bad[0])
    _log.warning(
        "%s: %d of %d rows of %r left out. The first: %s",
        where, len(bad), len(vectors), array, bad[0],
    )  # fmt: skip
    return examples.Examples(vectors[finite], labels[finite], skipped=bad)
