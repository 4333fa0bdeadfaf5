"""SVHN's cropped digits (format 2) as released, at http://ufldl.stanford.edu/housenumbers/."""

import pathlib

import numpy as np

from ssl_influence import config
from ssl_influence.data import examples, images as images_lib, names, released


def read(
    name: names.DatasetName, place: str | None, settings: config.DataConfig
) -> examples.Collection:
    """Images uint8 [n, 32, 32, 3] of a folder with train_32x32.mat and test_32x32.mat.

    Ids are positions in train_32x32.mat; `svhn_cropped_extra` goes on with extra_32x32.mat. The
    files label the digit 0 by 10; here it is 0.

    Raises:
      ConfigError: a file is missing, damaged, or not what the dataset consists of.
    """
    folder = released.existing(place, "the folder with train_32x32.mat and test_32x32.mat")
    files = {examples.TRAIN: ["train_32x32.mat"], examples.TEST: ["test_32x32.mat"]}
    if name.source == "svhn_cropped_extra":
        files[examples.TRAIN].append("extra_32x32.mat")
    parts = {}
    for part, of_part in files.items():
        pieces = [_read_mat(released.inside(folder, folder / file)) for file in of_part]
        labels = np.concatenate([labels for _, labels in pieces])
        # Filled in place: MATLAB's order would otherwise stay, and rows be scattered over memory.
        images = np.concatenate(
            [images for images, _ in pieces], out=np.empty((len(labels), 32, 32, 3), np.uint8)
        )
        del pieces
        images = images_lib.fit(images, settings)
        parts[part] = examples.Examples(images, labels)
    return examples.Collection(f"{name.source}:{place}", [str(digit) for digit in range(10)], parts)


def _read_mat(path: pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
    """(images uint8 [n, 32, 32, 3], labels int32 [n], 0 to 9) of a MATLAB file."""
    from scipy import io

    if not path.is_file():
        raise config.ConfigError(f"There is no {path}: put it there.")
    try:
        content = io.loadmat(path, variable_names=["X", "y"])
    except Exception as error:  # scipy lets errors of zlib, NumPy and its own parser through.
        reason = (str(error).splitlines() or [""])[0] or type(error).__name__
        raise config.ConfigError(
            f"{path} cannot be read ({reason}): it is damaged or cut short; get it again."
        ) from error
    images, labels = (np.asarray(content.get(key)) for key in ("X", "y"))
    if (
        images.dtype != np.uint8
        or images.shape[:-1] != (32, 32, 3)
        or labels.size != images.shape[-1]
        or not np.issubdtype(labels.dtype, np.number)
    ):
        raise config.ConfigError(
            f"{path} holds X {images.dtype} {images.shape} and y {labels.dtype} {labels.shape}: "
            "uint8 (32, 32, 3, n) and n labels are expected."
        )
    labels = labels.reshape(-1)
    if len(wrong := np.flatnonzero(~np.isin(labels, range(1, 11)))):
        raise config.ConfigError(
            f"{path}: label {wrong[0]} is {labels[wrong[0]]}; 1 to 10 are expected."
        )
    return images.transpose(3, 0, 1, 2), labels.astype(np.int32) % 10
