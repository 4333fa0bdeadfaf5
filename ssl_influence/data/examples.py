"""What a dataset is here: examples with ids, labels and a part to play.

A reader gives a `Collection`: examples in named parts with the labels as it found them. `assemble`
makes a `Source` of one or more of them, the one thing that splits, pipelines and reports work with.
"""

import dataclasses
import logging
from collections.abc import Mapping, Sequence

import numpy as np

from ssl_influence import config
from ssl_influence.data import rows

# Parts of a dataset. Rows of the first three have ids, in this order: what splits may draw from.
TRAIN, UNLABELED, VALIDATION, TEST = PARTS = ("train", "unlabeled", "validation", "test")

# What files, folders and tables may call them.
PART_NAMES = {**{part: part for part in PARTS}, "val": VALIDATION}

# Classes that a message names.
_NAMED = 10

_log = logging.getLogger("ssl_influence")


@dataclasses.dataclass(frozen=True, eq=False)
class Examples:
    """The examples of one part, as they were read.

    Attributes:
      inputs: uint8 images [n, H, W, C], in memory or lazy; float32 vectors [n, d]; or texts [n], an
        array of str with dtype object.
      labels: int32 [n], indices of the collection's class names, -1 where there is none.
      names: what a message calls each example, such as its file's path within the dataset; None:
        its number.
      skipped: one line for each example left out because it could not be read.
    """

    inputs: rows.Rows
    labels: np.ndarray
    names: Sequence[str] | None = None
    skipped: Sequence[str] = ()

    def __len__(self):
        return len(self.labels)


@dataclasses.dataclass(frozen=True, eq=False)
class Collection:
    """Examples by part.

    Attributes:
      name: what messages call it, such as `folder:/data/birds`.
      class_names: one for each class; those of the task first, in the order of their numbers.
      parts: part -> its examples; parts that are not there are left out.
      flip: a horizontally flipped image is as plausible as the image.
      task_classes: how many of the class names are the task's; None: all. Others may occur in the
        unlabeled part alone.
    """

    name: str
    class_names: list[str]
    parts: Mapping[str, Examples]
    flip: bool = False
    task_classes: int | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """All examples of a dataset. Row i of `inputs` has the example id i.

    Attributes:
      name: the source, without the ending of the dataset name.
      inputs: uint8 images [n, H, W, C], in memory or lazy; float32 vectors [n, d]; or texts [n], an
        array of str with dtype object.
      labels: int32 [n], -1 where unknown.
      test_inputs: as `inputs`, [n_test, ...]; n_test may be 0.
      test_labels: int32 [n_test].
      class_names: one for each class; their number is the number of classes.
      flip: a horizontally flipped image is as plausible as the image.
      strangers: bool [n], rows whose truth is a class outside the task (their label is -1); None
        where there are none. Nothing that trains reads it: it is there to judge weights by.
      parts: int8 [n], the index in PARTS of the part each row came with: labeled examples are drawn
        from TRAIN alone, and validation examples from VALIDATION if any row is of it. None: all
        are of TRAIN.
      names: what reports call each row, such as a file's path; None: its id.
      test_names: as `names`, of the test examples.
      skipped: one line for each example that was left out because it could not be read.
    """

    name: str
    inputs: rows.Rows
    labels: np.ndarray
    test_inputs: rows.Rows
    test_labels: np.ndarray
    class_names: list[str]
    flip: bool
    strangers: np.ndarray | None = None
    parts: np.ndarray | None = None
    names: Sequence[str] | None = None
    test_names: Sequence[str] | None = None
    skipped: Sequence[str] = ()

    def __post_init__(self):
        for part, inputs, labels in (
            ("training", self.inputs, self.labels),
            ("test", self.test_inputs, self.test_labels),
        ):
            if (inputs.ndim, inputs.dtype) not in ((4, np.uint8), (2, np.float32), (1, object)):
                raise config.ConfigError(
                    f"{self.name}: {part} inputs are {inputs.dtype} {inputs.shape}; they must be "
                    "uint8 images [n, H, W, C], float32 vectors [n, d] or texts [n]."
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
    def kind(self) -> str:
        """What the inputs are: "image" [n, H, W, C], "vector" [n, d] or "text" [n]."""
        return {4: "image", 2: "vector", 1: "text"}[self.inputs.ndim]

    @property
    def is_image(self) -> bool:
        """Whether the inputs are images."""
        return self.kind == "image"

    @property
    def num_classes(self) -> int:
        """C."""
        return len(self.class_names)

    def row_name(self, row: int) -> str:
        """What messages and reports call the example with this id."""
        return self.names[row] if self.names is not None else str(row)


def assemble(
    collection: Collection,
    others: Mapping[str, Collection] | None = None,
    *,
    all_strangers: bool = False,
) -> Source:
    """The source of a collection, with parts of others joined to it.

    The classes are the collection's; those of others match by name. An unlabeled example of another
    class is a stranger, with the label -1. A validation or test example of another class, or
    without a label, is an error.

    Ids are rows of train, then unlabeled (of this collection, then of the other), then validation.

    Args:
      collection: the dataset.
      others: part -> a collection of which that part is taken, or its part "train" if it is not in
        parts. It takes the place of the collection's own; but for "unlabeled", where both that part
        and "train" are added to what there is. If no class of those is of the task, they are taken
        for examples of unknown class, not for strangers, and that is logged.
      all_strangers: they are strangers all the same.

    Raises:
      ConfigError: there is no training example, or what is joined does not fit.
    """
    others = dict(others or {})
    train = collection.parts.get(TRAIN)
    if train is None or not np.any(train.labels >= 0):
        raise config.ConfigError(
            f"{collection.name} has no training example with a label: at least one of each class "
            "is needed to learn from."
        )
    class_names = collection.class_names[: collection.task_classes]
    gathered = {part: [] for part in PARTS}
    for part, examples in collection.parts.items():
        gathered[part].append((collection, examples))
    for part, other in others.items():
        if part != UNLABELED:
            gathered[part] = []
        gathered[part] += [(other, other.parts[p]) for p in _parts_to_join(part, other)]

    number = {name: c for c, name in enumerate(class_names)}
    joined, strangers = {}, {}
    for part, pieces in gathered.items():
        labels, strange = [], []
        for origin, examples in pieces:
            _check_shape(collection.name, train, origin.name, part, examples)
            # The last entry is for label -1.
            renumbered = np.array([number.get(n, -1) for n in origin.class_names] + [-1], np.int32)
            labels.append(renumbered[examples.labels])
            known = examples.labels >= 0
            strange.append((labels[-1] < 0) & known)
            joined_alone = part == UNLABELED and origin is not collection
            none_known = known.any() and np.array_equal(strange[-1], known)
            if joined_alone and none_known and not all_strangers:
                strange[-1][:] = False
                _log.warning(
                    "%s: none of its classes is one of %s: its examples are taken for unlabeled "
                    "ones of unknown class (of strangers, if unlabeled_mismatch names a share).",
                    origin.name,
                    ", ".join(class_names[:_NAMED]),
                )
            if part in (VALIDATION, TEST):
                _check_all_known(origin, part, examples, labels[-1])
        examples = [examples for _, examples in pieces]
        joined[part] = Examples(
            inputs=rows.concatenate(
                [e.inputs for e in examples] or [rows.empty_like(train.inputs)]
            ),
            labels=np.concatenate([np.zeros(0, np.int32), *labels]),
            names=_joined_names(examples, [_prefix(o, collection) for o, _ in pieces]),
            skipped=[line for e in examples for line in e.skipped],
        )
        strangers[part] = np.concatenate([np.zeros(0, bool), *strange])

    with_ids = [joined[part] for part in (TRAIN, UNLABELED, VALIDATION)]
    sizes = [len(examples) for examples in with_ids]
    strange = np.concatenate([strangers[part] for part in (TRAIN, UNLABELED, VALIDATION)])
    test = joined[TEST]
    return Source(
        name=collection.name,
        inputs=rows.concatenate([e.inputs for e in with_ids]),
        labels=np.concatenate([e.labels for e in with_ids]),
        test_inputs=test.inputs,
        test_labels=test.labels,
        class_names=class_names,
        flip=collection.flip,
        strangers=strange if strange.any() else None,
        parts=np.repeat(np.arange(3, dtype=np.int8), sizes) if any(sizes[1:]) else None,
        names=_joined_names(with_ids),
        test_names=test.names,
        skipped=[line for e in (*with_ids, test) for line in e.skipped],
    )


def _parts_to_join(part: str, other: Collection) -> list[str]:
    """The parts of another collection that are joined as `part`."""
    if part == UNLABELED:
        return [p for p in (UNLABELED, TRAIN) if p in other.parts]
    if part in other.parts:
        return [part]
    if TRAIN in other.parts and set(other.parts) <= {TRAIN, UNLABELED}:
        return [TRAIN]
    raise config.ConfigError(
        f"{part}_data={other.name} has the parts {', '.join(other.parts)} and no {part} part: name "
        "data that have one, or that are not in parts."
    )


def _check_shape(
    name: str, train: Examples, other_name: str, part: str, examples: Examples
) -> None:
    """Raises ConfigError unless inputs are of the kind and the shape of the training inputs."""
    expected, found = train.inputs, examples.inputs
    if len(found) and (expected.shape[1:], expected.dtype) != (found.shape[1:], found.dtype):
        raise config.ConfigError(
            f"{other_name}: {part} examples are {found.dtype} {found.shape[1:]} each, the training "
            f"examples of {name} {expected.dtype} {expected.shape[1:]}: they must agree (images "
            "are resized by image_size and image_channels)."
        )


def _check_all_known(origin: Collection, part: str, examples: Examples, labels: np.ndarray) -> None:
    """Raises ConfigError where an example has no label of the task."""
    for row in np.flatnonzero(labels < 0):
        given = examples.labels[row]
        fault = "has no label"
        if given >= 0:
            fault = f"is of class {origin.class_names[given]!r}, which is not of the task"
        raise config.ConfigError(
            f"{origin.name}: the {part} example {_name(examples, row)} {fault}: take it out of the "
            f"{part} part, or mend its label."
        )


def _name(examples: Examples, row: int) -> str:
    return repr(examples.names[row]) if examples.names is not None else f"number {row}"


def _prefix(origin: Collection, own: Collection) -> str:
    """What the names of examples that are joined begin with."""
    return "" if origin is own else f"{origin.name}: "


def _joined_names(
    examples: Sequence[Examples], prefixes: Sequence[str] | None = None
) -> Sequence[str] | None:
    """The names of all in turn; None if none has names or a prefix."""
    prefixes = prefixes or [""] * len(examples)
    pairs = [(e, prefix) for e, prefix in zip(examples, prefixes, strict=True) if len(e)]
    if all(e.names is None and not prefix for e, prefix in pairs):
        return None
    if len(pairs) == 1 and not pairs[0][1]:
        return pairs[0][0].names
    return rows.Strings(
        f"{prefix}{row if e.names is None else e.names[row]}"
        for e, prefix in pairs
        for row in range(len(e))
    )
