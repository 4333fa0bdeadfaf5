"""STL-10 as it was released, at https://cs.stanford.edu/~acoates/stl10/."""

import functools
import pathlib
from typing import BinaryIO

import numpy as np

from ssl_influence import config
from ssl_influence.data import examples, images as images_lib, names, released, rows

_ARCHIVE, _FOLDER = "stl10_binary.tar.gz", "stl10_binary"
_SHAPE = (96, 96, 3)
_BYTES = 96 * 96 * 3
_FILES = {
    examples.TRAIN: ("train_X.bin", "train_y.bin"),
    examples.UNLABELED: ("unlabeled_X.bin", None),
    examples.TEST: ("test_X.bin", "test_y.bin"),
}
_STAMPED = 64  # images of a file that its stamp is taken of
_NAMES_FILE = "class_names.txt"
_CLASS_NAMES = ["airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck"]


def read(
    name: names.DatasetName, place: str | None, settings: config.DataConfig
) -> examples.Collection:
    """Images uint8 [n, 96, 96, 3] with the parts train, unlabeled and test.

    Ids are positions in train_X.bin, which is what fold_indices.txt of the archive refers to, and
    then in unlabeled_X.bin. Images of an unpacked folder are read when they are asked for; those of
    the archive are held in memory.

    Args:
      name: its source is "stl10".
      place: stl10_binary.tar.gz, its unpacked folder, or a folder that holds either. The training
        part must be there, the other two may be missing.
      settings: how images are brought to a size, and how many of them memory may hold.

    Raises:
      ConfigError: it is not there, damaged, cut short, larger than memory may hold, or not what the
        dataset consists of.
    """
    path = _locate(released.existing(place, f"{_ARCHIVE} or its unpacked folder"))
    wanted = {file for pair in _FILES.values() for file in pair if file} | {_NAMES_FILE}
    if path.is_dir():
        files = released.read_files(path, wanted, functools.partial(_from_folder, settings))
    else:
        files = released.read_files(path, wanted, functools.partial(_from_archive, settings))
    class_names = _CLASS_NAMES
    if _NAMES_FILE in files:
        class_names = files[_NAMES_FILE].decode("utf-8", "replace").split()
        if len(class_names) != len(_CLASS_NAMES):
            raise config.ConfigError(
                f"{path}: {_NAMES_FILE} names {len(class_names)} classes, and STL-10 has 10; get "
                "it again."
            )
    parts = {}
    for part, (images_file, labels_file) in _FILES.items():
        missing = [file for file in (images_file, labels_file) if file and file not in files]
        if part == examples.TRAIN and missing or len(missing) == 1 and labels_file:
            raise config.ConfigError(
                f"{path} holds no {missing[0]}: it is not the whole of {_ARCHIVE}; get it again."
            )
        if missing:
            continue
        images = files[images_file]
        labels = np.full(len(images), -1, np.int32)
        if labels_file:
            labels = _labels(files[labels_file], len(images), path, images_file, labels_file)
        if isinstance(images, np.ndarray):
            images = images_lib.fit(images, settings)
        parts[part] = examples.Examples(images, labels)
    return examples.Collection(f"{name.source}:{place}", class_names, parts)


def _locate(path: pathlib.Path) -> pathlib.Path:
    """The archive or the folder with the files: the path itself, or what lies in it."""
    if not path.is_dir() or (path / _FILES[examples.TRAIN][0]).is_file():
        return path
    for inner in (path / _FOLDER, path / _ARCHIVE):
        if inner.exists():
            return released.inside(path, inner)
    raise config.ConfigError(
        f"{path} holds neither {_ARCHIVE} nor what is in it: put the archive there, or name it."
    )


def _labels(
    data: bytes, size: int, path: pathlib.Path, images_file: str, labels_file: str
) -> np.ndarray:
    """int32 [n], 0 to 9, of labels that are 1 to 10."""
    labels = np.frombuffer(data, np.uint8)
    if len(labels) != size:
        raise config.ConfigError(
            f"{path}: {labels_file} holds {len(labels)} labels and {images_file} {size} images: "
            "one is cut short; get it again."
        )
    if len(wrong := np.flatnonzero((labels < 1) | (labels > 10))):
        raise config.ConfigError(
            f"{path}: label {wrong[0]} of {labels_file} is {labels[wrong[0]]}; 1 to 10 are "
            "expected."
        )
    return labels.astype(np.int32) - 1


def _count(label: str, size: int) -> int:
    """How many images a file of so many bytes holds."""
    if not size or size % _BYTES:
        raise config.ConfigError(
            f"{label} has {size} bytes, which is no multiple of the {_BYTES} of an image: it is "
            "cut short; get it again."
        )
    return size // _BYTES


def _upright(images: np.ndarray) -> np.ndarray:
    """[n, 96, 96, 3] of [n, 3, 96, 96] in MATLAB's order: channel, then column, then row."""
    return images.transpose(0, 3, 2, 1)


def _from_archive(
    settings: config.DataConfig, stream: BinaryIO, label: str, size: int
) -> np.ndarray | bytes:
    """The bytes of a file of labels or names; uint8 [n, 96, 96, 3] of a file of images."""
    if not label.endswith("_X.bin"):
        return released.read_all(stream, label, size)
    count = _count(label, size)
    if size > settings.max_memory_gb * 2**30:
        raise config.ConfigError(
            f"{label} takes {size / 2**30:.2f} GB of memory, and max_memory_gb="
            f"{settings.max_memory_gb}: unpack the archive and name its folder, of which images "
            "are read when they are asked for."
        )
    images = np.empty((count, *_SHAPE), np.uint8)
    for start in range(0, count, 1024):  # So that the peak is one copy of the images and a part.
        stop = min(start + 1024, count)
        images[start:stop] = _upright(released.read_array(stream, (stop - start, 3, 96, 96), label))
    return images


def _from_folder(
    settings: config.DataConfig, stream: BinaryIO, label: str, size: int
) -> rows.LazyImages | bytes:
    """The bytes of a file of labels or names; images that are read when they are asked for."""
    if not label.endswith("_X.bin"):
        return released.read_all(stream, label, size)
    stored = np.memmap(label, np.uint8, "r", shape=(_count(label, size), 3, 96, 96))

    def read_one(row: int) -> np.ndarray:
        image = np.ascontiguousarray(_upright(stored[row : row + 1])[0])
        return images_lib.fit_one(image, settings)

    # The size is the same for all, and the time of a file is no part of the data.
    sample = np.unique(np.linspace(0, len(stored) - 1, _STAMPED).astype(int))
    stamp = rows.digest(np.array(size), stored[sample])
    return rows.LazyImages(len(stored), read_one(0).shape, read_one, stamp)
