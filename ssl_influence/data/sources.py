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
import logging
import os

import numpy as np

from ssl_influence import config
from ssl_influence.data import examples, names, rows

_log = logging.getLogger("ssl_influence")


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
    "imdb_reviews": _Known("tfds", ".1@20-20"),
    "movie_snippets": _Known("movie_snippets", ".1@50-50"),
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
            f"cifar10.1@250-1024 or csv:/data/reviews.csv.1@20-20. {_sources_there()}"
        )
    return name


def _sources_there() -> str:
    return (
        f"Known sources: {', '.join(sorted(_KNOWN))}; your own data: "
        f"{', '.join(f'{own}:PLACE' for own in _OWN)}."
    )


def load(name: names.DatasetName, settings: config.DataConfig | None = None) -> examples.Source:
    """Reads the examples of `name.source`, and what `settings` joins to them.

    Images are held in memory if all of them, decoded, take no more than `max_memory_gb`. Texts of
    the unlabeled part with fewer characters than `min_text_length` have no ids.

    Args:
      name: which data; its seed and sizes matter here for the synthetic sources alone.
      settings: where data are and how they are read; its `dataset` does not matter here.

    Raises:
      ConfigError: the source is not known, its data could not be had, or they are no texts and
        min_text_length is set, or have no unlabeled part.
    """
    settings = settings or config.DataConfig()
    collection = _read(name, settings)
    others = {}
    for part in (examples.UNLABELED, examples.VALIDATION, examples.TEST):
        place = getattr(settings, f"{part}_data")
        if place is not None:
            others[part] = _read(dataclasses.replace(name, source=place), settings)
    if settings.min_text_length:
        least = settings.min_text_length
        collection = _without_short_texts(collection, (examples.UNLABELED,), least)
        if examples.UNLABELED not in {*collection.parts, *others}:
            raise config.ConfigError(
                f"min_text_length={least} is for the unlabeled part, and {collection.name} has "
                "none: leave it out, or name one by a column `part` or by unlabeled_data."
            )
        if examples.UNLABELED in others:  # whose training part is joined as unlabeled, too
            others[examples.UNLABELED] = _without_short_texts(
                others[examples.UNLABELED], (examples.UNLABELED, examples.TRAIN), least
            )
    # Who says which share strangers have means these.
    all_strangers = settings.unlabeled_mismatch is not None
    source = examples.assemble(collection, others, all_strangers=all_strangers)
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
            f"dataset={str(name)!r}: the source {name.source!r} is not known. {_sources_there()}"
        )
    if place == "":
        raise config.ConfigError(f"dataset={str(name)!r} names no place after {kind}:.")
    module = importlib.import_module(f"ssl_influence.data.readers.{reader}")
    collection = module.read(dataclasses.replace(name, source=kind), place, settings)
    return dataclasses.replace(
        collection, name=name.source, flip=known.flip if known else collection.flip
    )


def _without_short_texts(
    collection: examples.Collection, of_parts: tuple[str, ...], least: int
) -> examples.Collection:
    """The collection without texts of fewer than `least` characters in some of its parts.

    Raises:
      ConfigError: it does not consist of texts.
    """
    parts = dict(collection.parts)
    for part, found in collection.parts.items():
        if found.inputs.ndim != 1:
            raise config.ConfigError(
                f"min_text_length={least} is for texts, and {collection.name} holds none: leave it "
                "out."
            )
        if part not in of_parts:
            continue
        kept = np.array([len(text) >= least for text in found.inputs], bool)
        called = found.names
        parts[part] = dataclasses.replace(
            found,
            inputs=found.inputs[kept],
            labels=found.labels[kept],
            names=called and rows.Strings(called[row] for row in np.flatnonzero(kept)),
        )
        _log.info(
            "%s: %d of %d texts of the part %s have fewer than %d characters and are left out.",
            collection.name,
            np.count_nonzero(~kept),
            len(kept),
            part,
            least,
        )
    return dataclasses.replace(collection, parts=parts)


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
