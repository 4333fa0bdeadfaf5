"""From the name of a dataset to its examples, in a fixed order.

A name is `source.seed@labels-validation`: `cifar10.1@250-1024` is CIFAR-10 with 250 labeled and
1,024 validation examples, drawn with seed 1. The source is a known one (`digits`, `cifar10`), a
known one whose released files lie somewhere (`cifar10:/data/cifar-10-binary.tar.gz`), or data of
one's own (`folder:/data/birds`). The row of an example in `Source.inputs` is its id: it does not
depend on the seed of the split, on the machine, on the order in which files are listed or on how
often the data were read.
"""

import dataclasses
import importlib
import os

import numpy as np

from ssl_influence import config
from ssl_influence.data import examples, names, rows


@dataclasses.dataclass(frozen=True)
class _Known:
    """A source with a name of its own.

    Attributes:
      reader: module of `readers` that has it without a place.
      ending: of its bare name.
      released: module of `readers` that reads its files as they were released; None: none does.
      flip: pictures of things may be mirrored, digits and letters may not.
    """

    reader: str
    ending: str
    released: str | None = None
    flip: bool = False


_KNOWN = {
    "digits": _Known("digits", ".1@60-200"),
    "two_moons": _Known("synthetic", ".1@10-30"),
    "circles": _Known("synthetic", ".1@10-30"),
    "linear": _Known("synthetic", ".1@10-30"),
    "cifar10": _Known("tfds", ".1@250-1024", "cifar", flip=True),
    "cifar100": _Known("tfds", ".1@2500-1024", "cifar", flip=True),
    "svhn_cropped": _Known("tfds", ".1@250-1024", "svhn"),
    "svhn_cropped_extra": _Known("tfds", ".1@250-1024", "svhn"),
    "stl10": _Known("tfds", ".1@1000-1024", "stl10", flip=True),
    "mnist": _Known("tfds", ".1@250-1024", "idx"),
    "fashion_mnist": _Known("tfds", ".1@250-1024", "idx", flip=True),
    "kmnist": _Known("tfds", ".1@250-1024", "idx"),
}

# Data of one's own, by `kind:place`.
_OWN = {
    "folder": "folder",
    "npz": "npz",
    "csv": "table",
    "tsv": "table",
    "tfrecord": "tfrecord",
    "idx": "idx",
    "tfds": "tfds",
}


def parse_name(text: str) -> names.DatasetName:
    """`source.seed@labels-validation`, parsed from the right.

    A bare known source takes its own ending.

    Raises:
      ConfigError: there is no such ending, and the text as it stands is no known source.
    """
    name = names.parse(text, {source: known.ending for source, known in _KNOWN.items()})
    if name is None:
        raise config.ConfigError(
            f"dataset={text!r} is not of the form source.seed@labels-validation, for example "
            f"cifar10.1@250-1024 or folder:/data/birds.1@40-100, nor one of the known sources: "
            f"{', '.join(sorted(_KNOWN))}."
        )
    return name


def load(name: names.DatasetName, settings: config.DataConfig | None = None) -> examples.Source:
    """Reads the examples of `name.source`, and what `settings` joins to them.

    Images are held in memory if all of them, decoded, take no more than `max_memory_gb`.

    Args:
      name: which data; its seed and sizes matter here for the synthetic sources alone.
      settings: where data are and how they are read; its `dataset` does not matter here.

    Raises:
      ConfigError: the source is not known, or its data could not be had.
    """
    settings = settings or config.DataConfig()
    collection = _read(name, settings)
    others = {}
    for part in (examples.UNLABELED, examples.VALIDATION, examples.TEST):
        place = getattr(settings, f"{part}_data")
        if place is not None:
            others[part] = _read(dataclasses.replace(name, source=place), settings)
    source = examples.assemble(collection, others)
    sizes = [i.nbytes for i in (source.inputs, source.test_inputs)]
    if sum(sizes) > settings.max_memory_gb * 2**30:
        return source
    return dataclasses.replace(
        source,
        inputs=rows.in_memory(source.inputs),
        test_inputs=rows.in_memory(source.test_inputs),
    )


def _read(name: names.DatasetName, settings: config.DataConfig) -> examples.Collection:
    kind, colon, place = name.source.partition(":")
    place = os.path.expanduser(place)  # no shell does so after a colon
    known = _KNOWN.get(kind)
    if not colon:
        reader, place = known and known.reader, None
    else:
        reader = known.released if known else _OWN.get(kind)
    if reader is None:
        raise config.ConfigError(
            f"dataset={str(name)!r}: the source {name.source!r} is not known. Known sources: "
            f"{', '.join(sorted(_KNOWN))}; your own data: "
            f"{', '.join(f'{own}:PLACE' for own in _OWN)}."
        )
    if place == "":
        raise config.ConfigError(f"dataset={str(name)!r} names no place after {kind}:.")
    module = importlib.import_module(f"ssl_influence.data.readers.{reader}")
    collection = module.read(dataclasses.replace(name, source=kind), place, settings)
    return dataclasses.replace(
        collection, name=name.source, flip=known.flip if known else collection.flip
    )


def of_classes(source: examples.Source, classes: tuple[int, ...]) -> np.ndarray | None:
    """The rows, bool [n], whose label is one of `classes`; None, for all, if it names none.

    Raises:
      ConfigError: a class is not one of the source's.
    """
    if not classes:
        return None
    _check_classes("unlabeled_classes", source, classes)
    return np.isin(source.labels, classes)


def _check_classes(setting: str, source: examples.Source, classes: tuple[int, ...]) -> None:
    outside = [c for c in classes if c >= source.num_classes]
    if outside:
        raise config.ConfigError(
            f"{setting}={','.join(map(str, classes))}: {source.name} has no class {outside[0]}, "
            f"only 0 to {source.num_classes - 1}."
        )


def restrict(source: examples.Source, known_classes: tuple[int, ...]) -> examples.Source:
    """The task of telling `known_classes` apart, renumbered from 0 in the order given.

    Training examples of other classes stay, with the label -1 and marked as strangers, so that they
    can be among the unlabeled ones (Oliver et al., 2018, section 4.4). Test examples of other
    classes go.

    Raises:
      ConfigError: a class is not one of the source's.
    """
    _check_classes("known_classes", source, known_classes)
    number = np.full(source.num_classes + 1, -1, np.int32)  # the last one is for label -1
    number[list(known_classes)] = np.arange(len(known_classes))
    strangers = number[source.labels] < 0
    if source.strangers is None:
        strangers &= source.labels >= 0
    else:
        strangers &= (source.labels >= 0) | source.strangers
    labels, test_labels = number[source.labels], number[source.test_labels]
    return dataclasses.replace(
        source,
        labels=labels,
        test_inputs=rows.select(source.test_inputs, test_labels >= 0),
        test_labels=test_labels[test_labels >= 0],
        class_names=[source.class_names[c] for c in known_classes],
        test_names=source.test_names
        and rows.Strings(source.test_names[row] for row in np.flatnonzero(test_labels >= 0)),
        strangers=strangers,
    )
