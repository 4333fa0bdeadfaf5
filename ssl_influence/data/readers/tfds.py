"""Image classification sets of TensorFlow Datasets."""

import os

import numpy as np

from ssl_influence import config
from ssl_influence.data import examples, names

_READ_BATCH = 1024


def read(
    name: names.DatasetName, place: str | None, settings: config.DataConfig
) -> examples.Collection:
    """The splits `train` and `test` of a TensorFlow Datasets image classification set."""
    import tensorflow_datasets as tfds

    data_dir = settings.data_dir and os.path.expanduser(settings.data_dir)
    builder = tfds.builder(name.source, data_dir=data_dir)
    try:
        builder.download_and_prepare()
    except ImportError as error:
        raise config.ConfigError(
            f"dataset={str(name)!r} cannot be prepared without the package {error.name!r}, which "
            "TFDS needs: install it with pip and start again."
        ) from error
    except Exception as error:  # Network, disk, checksum, parser: TFDS has no common base class.
        reason = (str(error).splitlines() or [""])[0]
        folder = os.path.dirname(os.path.dirname(str(builder.data_dir)))
        raise config.ConfigError(
            f"dataset={str(name)!r} could not be prepared in data_dir={folder} "
            f"({type(error).__name__}: {reason}). Its files come from {builder.info.homepage}: "
            f"where those can be reached, run `tfds build {name.source} --data_dir=DIR`, copy "
            f"DIR/{name.source} to {os.path.join(folder, name.source)} and start again."
        ) from error
    return examples.Collection(
        name=name.source,
        class_names=list(builder.info.features["label"].names),
        parts={
            part: examples.Examples(*_read_split(builder, part))
            for part in (examples.TRAIN, examples.TEST)
        },
    )


def _read_split(builder, split: str) -> tuple[np.ndarray, np.ndarray]:
    """(images uint8 [n, H, W, C], labels int32 [n]) in the order of the prepared files."""
    import tensorflow_datasets as tfds

    # Files one after the other: ids are positions, so the order must be that of the files alone.
    read_config = tfds.ReadConfig(interleave_cycle_length=1, try_autocache=False)
    dataset = builder.as_dataset(split=split, shuffle_files=False, read_config=read_config)
    total = int(dataset.cardinality())  # Negative where not recorded.
    images, labels, done = [], [], 0
    if total > 0:
        # Filled in place, so that the peak is one copy of the data and a batch of it.
        images = np.empty((total, *dataset.element_spec["image"].shape), np.uint8)
    for batch in dataset.batch(_READ_BATCH).as_numpy_iterator():
        rows = batch["image"]
        if total > 0:
            images[done : done + len(rows)] = rows
        else:
            images.append(rows)
        labels.append(batch["label"].astype(np.int32))
        done += len(rows)
    if not done or (total > 0 and done != total):
        raise config.ConfigError(
            f"{builder.name}: {done} of {max(total, 1)} examples of the split {split!r} could be "
            f"read from {builder.data_dir}: delete that folder and prepare the dataset again."
        )
    return images if total > 0 else np.concatenate(images), np.concatenate(labels)
