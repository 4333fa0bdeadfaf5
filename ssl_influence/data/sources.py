"""From the name of a dataset to its examples, as arrays in a fixed order.

A name is `source.seed@labels-validation`: `cifar10.1@250-1024` is CIFAR-10 with 250 labeled and
1,024 validation examples, drawn with seed 1. The row of an example in `Source.inputs` is its id: it
does not depend on the seed of the split, on the machine or on how often the data were read.
"""

import dataclasses
import os
import re
from collections.abc import Callable

import numpy as np

from ssl_influence import config
from ssl_influence.data import synthetic

_NAME = re.compile(
    r"(?P<source>.+)\.(?P<seed>[0-9]+)@(?P<labels>[0-9]+)-(?P<validation>[0-9]+)", re.DOTALL
)
_MAX_SEED = 2**31 - 1
_READ_BATCH = 1024


@dataclasses.dataclass(frozen=True)
class DatasetName:
    """Which data, and how its training part is split.

    Attributes:
      source: where the examples come from; may hold dots, slashes and `@`.
      seed: of the split (and of the points themselves where the source is synthetic).
      labels: number of labeled examples.
      validation: number of validation examples.
    """

    source: str
    seed: int
    labels: int
    validation: int

    def __post_init__(self):
        if not self.source:
            raise config.ConfigError(f"dataset={str(self)!r} names no source before its ending.")
        if not 0 <= self.seed <= _MAX_SEED:
            raise config.ConfigError(
                f"dataset={str(self)!r}: the seed {self.seed} must lie in [0, {_MAX_SEED}]."
            )
        if self.labels < 1:
            raise config.ConfigError(
                f"dataset={str(self)!r}: {self.labels} labeled examples, there must be at least 1."
            )
        if self.validation < 0:
            raise config.ConfigError(
                f"dataset={str(self)!r}: {self.validation} validation examples, "
                "there must be at least 0."
            )

    def __str__(self):
        return f"{self.source}.{self.seed}@{self.labels}-{self.validation}"


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """All examples of a dataset. Row i of `inputs` has the example id i.

    Attributes:
      name: the source, without the ending of the dataset name.
      inputs: uint8 images [n, H, W, C], or float32 vectors [n, d].
      labels: int32 [n], -1 where unknown.
      test_inputs: as `inputs`, [n_test, ...].
      test_labels: int32 [n_test].
      class_names: one for each class; their number is the number of classes.
      flip: a horizontally flipped image is as plausible as the image.
      strangers: bool [n], rows whose truth is a class outside the task (their label is -1); None
        where there are none. Nothing that trains reads it: it is there to judge weights by.
    """

    name: str
    inputs: np.ndarray
    labels: np.ndarray
    test_inputs: np.ndarray
    test_labels: np.ndarray
    class_names: list[str]
    flip: bool
    strangers: np.ndarray | None = None

    def __post_init__(self):
        for part, inputs, labels in (
            ("training", self.inputs, self.labels),
            ("test", self.test_inputs, self.test_labels),
        ):
            if (inputs.ndim, inputs.dtype) not in ((4, np.uint8), (2, np.float32)):
                raise config.ConfigError(
                    f"{self.name}: {part} inputs are {inputs.dtype} {inputs.shape}; they must be "
                    "uint8 images [n, H, W, C] or float32 vectors [n, d]."
                )
            if labels.dtype != np.int32 or labels.shape != inputs.shape[:1]:
                raise config.ConfigError(
                    f"{self.name}: {part} labels are {labels.dtype} {labels.shape} beside "
                    f"{len(inputs)} inputs; they must be int32, one for each."
                )
            if labels.size and not -1 <= labels.min() <= labels.max() < self.num_classes:
                raise config.ConfigError(
                    f"{self.name}: {part} labels range from {labels.min()} to {labels.max()}, "
                    f"but there are {self.num_classes} classes."
                )
        if self.inputs.shape[1:] != self.test_inputs.shape[1:]:
            raise config.ConfigError(
                f"{self.name}: training inputs have shape {self.inputs.shape[1:]}, test inputs "
                f"{self.test_inputs.shape[1:]}; they must agree."
            )

    @property
    def is_image(self) -> bool:
        """Whether the inputs are images [n, H, W, C]; else they are vectors [n, d]."""
        return self.inputs.ndim == 4

    @property
    def num_classes(self) -> int:
        """C."""
        return len(self.class_names)


@dataclasses.dataclass(frozen=True)
class _Entry:
    """A known source: how it is read, the ending of its bare name, and whether flips make sense."""

    read: Callable[["DatasetName", "_Entry", str | None], Source]
    ending: str
    flip: bool = False


def parse_name(text: str) -> DatasetName:
    """`source.seed@labels-validation`, parsed from the right.

    A bare known source takes its own ending.

    Raises:
      ConfigError: there is no such ending, and the text as it stands is no known source.
    """
    match = _NAME.fullmatch(text)
    if match is None and text in _SOURCES:
        match = _NAME.fullmatch(text + _SOURCES[text].ending)
    if match is None:
        raise config.ConfigError(
            f"dataset={text!r} is not of the form source.seed@labels-validation, for example "
            f"cifar10.1@250-1024, nor one of the known sources: {', '.join(sorted(_SOURCES))}."
        )
    return DatasetName(
        source=match["source"],
        seed=int(match["seed"]),
        labels=int(match["labels"]),
        validation=int(match["validation"]),
    )


def load(name: DatasetName, data_dir: str | None = None) -> Source:
    """Reads the examples of `name.source`.

    Args:
      name: which data; its seed and sizes matter here for the synthetic sources alone.
      data_dir: folder of prepared datasets, None for TFDS's own default.

    Raises:
      ConfigError: the source is not known, or its data could not be had.
    """
    entry = _SOURCES.get(name.source)
    if entry is None:
        raise config.ConfigError(
            f"dataset={str(name)!r}: the source {name.source!r} is not known. "
            f"Known sources: {', '.join(sorted(_SOURCES))}."
        )
    return entry.read(name, entry, data_dir)


def restrict(source: Source, known_classes: tuple[int, ...]) -> Source:
    """The task of telling `known_classes` apart, renumbered from 0 in the order given.

    Training examples of other classes stay, with the label -1 and marked as strangers, so that they
    can be among the unlabeled ones (Oliver et al., 2018, section 4.4). Test examples of other
    classes go.

    Raises:
      ConfigError: a class is not one of the source's.
    """
    outside = [c for c in known_classes if c >= source.num_classes]
    if outside:
        raise config.ConfigError(
            f"known_classes={','.join(map(str, known_classes))}: {source.name} has no class "
            f"{outside[0]}, only 0 to {source.num_classes - 1}."
        )
    number = np.full(source.num_classes + 1, -1, np.int32)  # the last one is for label -1
    number[list(known_classes)] = np.arange(len(known_classes))
    labels, test_labels = number[source.labels], number[source.test_labels]
    return dataclasses.replace(
        source,
        labels=labels,
        test_inputs=source.test_inputs[test_labels >= 0],
        test_labels=test_labels[test_labels >= 0],
        class_names=[source.class_names[c] for c in known_classes],
        strangers=(labels < 0) & (source.labels >= 0),
    )


def _read_digits(name: DatasetName, entry: _Entry, data_dir: str | None) -> Source:
    """scikit-learn's 1,797 handwritten digits, 8x8, scaled from 0..16 to 0..255.

    The set has no test part of its own. Every fourth row of each class, in the order of the file,
    is the test part here: it depends on no seed, so that numbers of different splits compare.
    """
    from sklearn import datasets

    raw = datasets.load_digits()
    images = np.rint(raw.images * (255 / 16)).astype(np.uint8)[..., np.newaxis]
    labels = raw.target.astype(np.int32)
    is_test = np.zeros(len(labels), bool)
    for c in np.unique(labels):
        is_test[np.flatnonzero(labels == c)[3::4]] = True
    return Source(
        name=name.source,
        inputs=images[~is_test],
        labels=labels[~is_test],
        test_inputs=images[is_test],
        test_labels=labels[is_test],
        class_names=[str(c) for c in raw.target_names],
        flip=entry.flip,
    )


def _read_synthetic(name: DatasetName, entry: _Entry, data_dir: str | None) -> Source:
    """Points in the plane.

    Training and test part are drawn in turn with the dataset's seed. There are as many training
    rows as leave exactly synthetic.UNLABELED beside labels + validation.
    """
    random, draw = np.random.RandomState(name.seed), synthetic.SHAPES[name.source].draw
    inputs, labels = draw(name.labels + name.validation + synthetic.UNLABELED, random)
    test_inputs, test_labels = draw(synthetic.TEST, random)
    return Source(
        name=name.source,
        inputs=inputs.astype(np.float32),
        labels=labels.astype(np.int32),
        test_inputs=test_inputs.astype(np.float32),
        test_labels=test_labels.astype(np.int32),
        class_names=["0", "1"],
        flip=entry.flip,
    )


def _read_tfds(name: DatasetName, entry: _Entry, data_dir: str | None) -> Source:
    """The splits `train` and `test` of a TensorFlow Datasets image classification set."""
    import tensorflow_datasets as tfds

    if data_dir is not None:
        data_dir = os.path.expanduser(data_dir)
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
    inputs, labels = _read_tfds_split(builder, "train")
    test_inputs, test_labels = _read_tfds_split(builder, "test")
    return Source(
        name=name.source,
        inputs=inputs,
        labels=labels,
        test_inputs=test_inputs,
        test_labels=test_labels,
        class_names=list(builder.info.features["label"].names),
        flip=entry.flip,
    )


def _read_tfds_split(builder, split: str) -> tuple[np.ndarray, np.ndarray]:
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


# Flips: pictures of things may be mirrored, digits and letters may not.
_SOURCES = {
    "digits": _Entry(_read_digits, ".1@60-200"),
    "two_moons": _Entry(_read_synthetic, ".1@10-30"),
    "circles": _Entry(_read_synthetic, ".1@10-30"),
    "linear": _Entry(_read_synthetic, ".1@10-30"),
    "cifar10": _Entry(_read_tfds, ".1@250-1024", flip=True),
    "cifar100": _Entry(_read_tfds, ".1@2500-1024", flip=True),
    "svhn_cropped": _Entry(_read_tfds, ".1@250-1024"),
    "mnist": _Entry(_read_tfds, ".1@250-1024"),
    "fashion_mnist": _Entry(_read_tfds, ".1@250-1024", flip=True),
    "kmnist": _Entry(_read_tfds, ".1@250-1024"),
}
