"""Images and labels in IDX files, as MNIST and its relatives were released.

The format is described at the end of http://yann.lecun.com/exdb/mnist/.
"""

import pathlib

import numpy as np

from ssl_influence import config
from ssl_influence.data import examples, images as images_lib, names, released

_PREFIXES = {examples.TRAIN: "train", examples.TEST: "t10k"}
_UNSIGNED_BYTE = 0x08
_DIGITS = [str(digit) for digit in range(10)]
# In the order of their labels; TensorFlow Datasets calls them the same.
_CLASS_NAMES = {
    "mnist": _DIGITS,
    "fashion_mnist": [
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    ],
    "kmnist": ["o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo"],
}


def read(
    name: names.DatasetName, place: str | None, settings: config.DataConfig
) -> examples.Collection:
    """The IDX files of a folder: images uint8 [n, H, W, 1] in the order of the files.

    They are `train-images-idx3-ubyte`, `train-labels-idx1-ubyte` and, if there is a test part, the
    same with `t10k`; each as it is or with `.gz` after it.

    The classes of data that are not known by name are 0 to the largest label.

    Raises:
      ConfigError: a file is missing, or is not what its name says.
    """
    folder = released.existing(place, "the folder with train-images-idx3-ubyte and its labels")
    parts, labels_files = {}, {}
    for part, prefix in _PREFIXES.items():
        images_file = _find(folder, f"{prefix}-images-idx3-ubyte")
        labels_file = _find(folder, f"{prefix}-labels-idx1-ubyte")
        if images_file is None and labels_file is None and part != examples.TRAIN:
            continue
        for file, kind in ((images_file, "images-idx3-ubyte"), (labels_file, "labels-idx1-ubyte")):
            if file is None:
                raise config.ConfigError(
                    f"{folder} has no {prefix}-{kind} (nor {prefix}-{kind}.gz): put it there."
                )
        images = _read_idx(images_file, 3)
        labels = _read_idx(labels_file, 1)
        if len(images) != len(labels):
            raise config.ConfigError(
                f"{images_file} holds {len(images)} images and {labels_file.name} {len(labels)} "
                "labels: they do not belong together."
            )
        images = images_lib.fit(images[..., np.newaxis], settings)
        parts[part] = examples.Examples(images, labels.astype(np.int32))
        labels_files[part] = labels_file
    largest = max(int(e.labels.max(initial=0)) for e in parts.values())
    class_names = _CLASS_NAMES.get(name.source) or [str(c) for c in range(largest + 1)]
    for part, e in parts.items():
        if len(wrong := np.flatnonzero(e.labels >= len(class_names))):
            raise config.ConfigError(
                f"{labels_files[part]}: label {wrong[0]} is {e.labels[wrong[0]]}, and "
                f"{name.source} has {len(class_names)} classes: name other data as idx:{place}."
            )
    return examples.Collection(f"{name.source}:{place}", class_names, parts)


def _find(folder: pathlib.Path, name: str) -> pathlib.Path | None:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return released.inside(folder, path)
    return None


def _read_idx(path: pathlib.Path, dimensions: int) -> np.ndarray:
    """The uint8 array of so many dimensions that an IDX file holds."""
    with released.opened(path) as (stream, most):
        head = stream.read(4 + 4 * dimensions)
        if len(head) < 4 + 4 * dimensions or head[:2] != b"\0\0":
            raise config.ConfigError(
                f"{path} is no IDX file: it begins with the bytes {head[:4].hex(' ') or '(none)'}, "
                f"and 00 00 {_UNSIGNED_BYTE:02x} {dimensions:02x} is expected."
            )
        if head[2] != _UNSIGNED_BYTE:
            raise config.ConfigError(
                f"{path} holds values of the IDX type 0x{head[2]:02x}: only unsigned bytes "
                f"(0x{_UNSIGNED_BYTE:02x}) can be read."
            )
        if head[3] != dimensions:
            raise config.ConfigError(
                f"{path} has {head[3]} dimensions, and {dimensions} are expected: it is "
                "another file."
            )
        shape = tuple(int(size) for size in np.frombuffer(head, ">u4", offset=4))
        count = int(np.prod(shape, dtype=object))
        if not count:
            raise config.ConfigError(f"{path} is empty: its dimensions are {shape}.")
        if count + len(head) > most:
            raise config.ConfigError(
                f"{path} is cut short: it is too small to hold the {count} bytes of {shape} that "
                "it announces; get it again."
            )
        array = released.read_array(stream, shape, str(path))
        if stream.read(1):
            raise config.ConfigError(
                f"{path} goes on after the {count} bytes of {shape} that it announces: it is "
                "damaged; get it again."
            )
    return array
