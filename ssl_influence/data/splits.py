"""Which training example plays which role: labeled, validation or unlabeled.

A split is a function of the labels, the sizes, the seed and a few settings, nothing else. It is
written down as a manifest beside the checkpoints, so that a run is only resumed on the data it
began with.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ssl_influence import config, files
from ssl_influence.data import examples, names, rows

ROLES = ("labeled", "validation", "unlabeled")

# Settings that a manifest holds under their own names.
_SETTINGS = (
    "unlabeled_includes_labeled",
    "validation_overlap",
    "labeled_includes_validation",
    "unlabeled_mismatch",
    "unlabeled_size",
    "balance",
    "label_noise",
)

# What came later: manifests hold it where it is not left at its default, so that those of older
# runs stay what they are.
_LATER = ("unlabeled_size",)

_NOISE = 1  # The stream of random numbers of the wrong labels, beside the seed's own.


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """The ids of each role, sorted int64 [n_role]."""

    labeled: np.ndarray
    validation: np.ndarray
    unlabeled: np.ndarray

    @property
    def overlaps(self) -> dict[tuple[str, str], int]:
        """How many ids two roles share, for each pair of roles."""
        return {
            (a, b): len(np.intersect1d(getattr(self, a), getattr(self, b)))
            for i, a in enumerate(ROLES)
            for b in ROLES[i + 1 :]
        }


def draw(
    source: examples.Source,
    name: names.DatasetName,
    settings: config.DataConfig,
    allowed: np.ndarray | None = None,
) -> Split:
    """The roles of a source's examples, as its name and the settings say; see `make`.

    Args:
      source: the examples.
      name: gives the sizes and the seed.
      settings: give the rest.
      allowed: bool [n], rows that may be unlabeled examples; None: all.

    Raises:
      ConfigError: the split cannot be had, or a file of ids cannot be read.
    """
    return make(
        source.labels,
        source.num_classes,
        labeled=name.labels,
        validation=name.validation,
        seed=name.seed,
        unlabeled_includes_labeled=settings.unlabeled_includes_labeled,
        validation_overlap=settings.validation_overlap,
        labeled_includes_validation=settings.labeled_includes_validation,
        strangers=source.strangers,
        unlabeled_mismatch=settings.unlabeled_mismatch,
        unlabeled_size=settings.unlabeled_size,
        balance=settings.balance,
        parts=source.parts,
        allowed=allowed,
        chosen={
            role: read_ids(path)
            for role in ROLES
            if (path := getattr(settings, f"{role}_ids")) is not None
        },
        class_names=source.class_names,
    )


def make(
    labels: np.ndarray,
    num_classes: int,
    *,
    labeled: int,
    validation: int,
    seed: int,
    unlabeled_includes_labeled: bool = False,
    validation_overlap: bool = False,
    labeled_includes_validation: bool = False,
    strangers: np.ndarray | None = None,
    unlabeled_mismatch: float | None = None,
    unlabeled_size: int | None = None,
    balance: bool = True,
    parts: np.ndarray | None = None,
    allowed: np.ndarray | None = None,
    chosen: Mapping[str, np.ndarray] | None = None,
    class_names: Sequence[str] | None = None,
) -> Split:
    """Draws the roles.

    Labeled: labeled // C examples of each class; the remainder goes to classes drawn by the seed,
    one each. For one seed, the labeled examples of a smaller set are among those of a larger one,
    and do not depend on the number of validation examples.

    Validation: balanced over the classes as well, as far as they have examples left; a class that
    runs out is made up for by the others. If there are rows of the part "validation", they are
    drawn from these alone.

    Unlabeled: all other rows, those of unknown label (-1) included, but for those of the part
    "validation". With `unlabeled_mismatch`, as many of them as can be had with that share of
    strangers; with `unlabeled_size`, that many of them. Rows left over have no role. For one seed
    and share, a smaller pool is a part of a larger one.

    With `validation_overlap` the published FixMatch code is followed: the validation examples are
    the first rows of a class-balanced order that is the same for every seed, and labeled examples
    are drawn from all rows, so that one may be the other too. Here this order takes one row of each
    class in turn, in the order of their ids.

    The draws are `Generator(PCG64(seed)).permutation` of the classes and then of the rows, for the
    labeled examples; the same again for the validation examples; and one of the rows for the
    mismatch and the size of the pool.

    Args:
      labels: int [n], -1 where unknown.
      num_classes: C.
      labeled: how many labeled examples.
      validation: how many validation examples.
      seed: of the draws.
      unlabeled_includes_labeled: the labeled examples that are not validation examples are
        unlabeled ones too.
      validation_overlap: see above.
      labeled_includes_validation: the validation examples are labeled examples too.
      strangers: bool [n], rows that are of no class of the task; needed for `unlabeled_mismatch`.
      unlabeled_mismatch: share of strangers among the unlabeled examples; None keeps all rows.
      unlabeled_size: how many unlabeled examples; None keeps all rows.
      balance: if false, labeled and validation examples are drawn from all alike, whatever their
        class, so that a class may have none.
      parts: int [n], see `examples.Source`; None: all rows are of the part "train".
      allowed: bool [n], rows that may be unlabeled examples; None: all.
      chosen: role -> its ids, int64, which are then not drawn. Unlabeled ids may be labeled ones
        only with `unlabeled_includes_labeled`, validation ids only with `validation_overlap`.
      class_names: for messages; None: numbers.

    Raises:
      ConfigError: the data do not hold that many examples, or a class that many labeled ones;
        chosen ids are not of the data, of no known class, doubled, not as many as asked for, or of
        two roles.
    """
    labels, chosen = np.asarray(labels), dict(chosen or {})
    is_part = {
        part: np.full(len(labels), part == examples.TRAIN) if parts is None else parts == index
        for index, part in enumerate(examples.PARTS)
    }
    for role, ids in chosen.items():
        size = {"labeled": labeled, "validation": validation}.get(role)
        _check_chosen(role, ids, labels, size)
    # Labels of the rows that may play a role; the others count as unknown.
    taken = np.zeros(len(labels), bool)
    if not validation_overlap:
        taken |= _among(chosen.get("validation", ()), labels)
    if not unlabeled_includes_labeled:
        taken |= _among(chosen.get("unlabeled", ()), labels)
    own = is_part[examples.VALIDATION].any()
    to_learn = np.where(is_part[examples.TRAIN] & ~taken, labels, -1)
    to_validate = np.where(is_part[examples.VALIDATION if own else examples.TRAIN], labels, -1)
    to_validate[_among(chosen.get("unlabeled", ()), labels)] = -1

    _check_sizes(labels, to_learn, to_validate, labeled, validation, chosen, validation_overlap)
    if balance and labeled < num_classes and "labeled" not in chosen:
        raise config.ConfigError(
            f"{labeled} labeled examples for {num_classes} classes leave a labeled class with no "
            f"example: ask for at least {num_classes}."
        )
    random = np.random.Generator(np.random.PCG64(seed))
    class_order, row_order = random.permutation(num_classes), random.permutation(len(labels))
    order = _balanced_order if balance else _known_order
    if "labeled" in chosen:
        labeled_ids = chosen["labeled"]
    else:
        if balance:
            _check_classes(to_learn, class_order, labeled, class_names)
        labeled_ids = order(to_learn, class_order, row_order)[:labeled]

    if "validation" in chosen:
        validation_ids = chosen["validation"]
    elif validation_overlap:
        in_turn = order(to_validate, np.arange(num_classes), np.arange(len(labels)))
        validation_ids = in_turn[:validation]
    else:
        class_order, row_order = random.permutation(num_classes), random.permutation(len(labels))
        left = row_order[~_among(labeled_ids, labels)[row_order]]
        validation_ids = order(to_validate, class_order, left)[:validation]

    for role, ids, size in (
        ("labeled", labeled_ids, labeled),
        ("validation", validation_ids, validation),
    ):
        if len(ids) < size:
            raise config.ConfigError(
                f"Only {len(ids)} examples of known class are left for {size} {role} ones beside "
                "those of other roles: ask for fewer."
            )

    if "unlabeled" in chosen:
        is_unlabeled = _among(chosen["unlabeled"], labels)
    else:
        is_unlabeled = ~is_part[examples.VALIDATION]
        if allowed is not None:
            is_unlabeled &= allowed
        is_unlabeled[validation_ids] = False
        if not unlabeled_includes_labeled:
            is_unlabeled[labeled_ids] = False
    if unlabeled_mismatch is not None and strangers is None:
        raise config.ConfigError(
            f"unlabeled_mismatch={unlabeled_mismatch} needs examples outside the task: name "
            "the task's classes by known_classes, or join data of other classes by unlabeled_data."
        )
    if unlabeled_mismatch is not None or unlabeled_size is not None:
        row_order = random.permutation(len(labels))
        kept = row_order[is_unlabeled[row_order]]
        if unlabeled_mismatch is not None:
            kept = _with_share(kept, strangers, unlabeled_mismatch, unlabeled_size or len(kept))
        if unlabeled_size is not None:
            if len(kept) < unlabeled_size:
                raise config.ConfigError(
                    f"unlabeled_size={unlabeled_size}: only {len(kept)} unlabeled examples can be "
                    "had: ask for fewer."
                )
            kept = kept[:unlabeled_size]
        is_unlabeled = _among(kept, labels)
    split = Split(
        labeled=np.sort(labeled_ids).astype(np.int64),
        validation=np.sort(validation_ids).astype(np.int64),
        unlabeled=np.flatnonzero(is_unlabeled).astype(np.int64),
    )
    _check_overlaps(split, unlabeled_includes_labeled, validation_overlap)
    if labeled_includes_validation:
        both = np.union1d(split.labeled, split.validation)
        split = dataclasses.replace(split, labeled=both)
    return split


def read_ids(path: str | os.PathLike) -> np.ndarray:
    """Ids, int64, from a text file with one a line; empty lines and what follows a # are left out.

    Raises:
      ConfigError: the file cannot be read, holds no id, or a line is none; names the line.
    """
    path = pathlib.Path(path).expanduser()
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise config.ConfigError(f"The ids in {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise config.ConfigError(f"{path} is not a text of ids, one a line.") from error
    ids = []
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if text and not (text.isascii() and text.isdigit() and len(text) < 19):
            raise config.ConfigError(
                f"{path} line {number}: {text!r} is no id; one whole number a line is expected."
            )
        if text:
            ids.append(int(text))
    if not ids:
        raise config.ConfigError(f"{path} holds no id.")
    return np.array(ids, np.int64)


def with_label_noise(
    source: examples.Source, split: Split, share: float, seed: int
) -> examples.Source:
    """The source with a share of the labeled examples labeled as another class, all equally likely.

    round(share * labeled) of them are drawn by the seed; the rest of the data, validation examples
    that are labeled ones too included, is left alone.

    Raises:
      ConfigError: there is but one class.
    """
    ids = np.setdiff1d(split.labeled, split.validation)
    if share and source.num_classes < 2:
        raise config.ConfigError(f"label_noise={share} needs two classes or more.")
    random = np.random.Generator(np.random.PCG64([seed, _NOISE]))
    wrong = random.permutation(ids)[: round(share * len(ids))]
    if not len(wrong):
        return source
    labels = source.labels.copy()
    shift = random.integers(1, source.num_classes, len(wrong))
    labels[wrong] = (labels[wrong] + shift) % source.num_classes
    return dataclasses.replace(source, labels=labels)


def _among(ids: Sequence[int] | np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The rows, bool [n], that `ids` name."""
    marked = np.zeros(len(labels), bool)
    marked[np.asarray(ids, np.int64)] = True
    return marked


def _check_chosen(role: str, ids: np.ndarray, labels: np.ndarray, size: int | None) -> None:
    if size is not None and len(ids) != size:
        raise config.ConfigError(
            f"{role}_ids names {len(ids)} examples, and the dataset's name asks for {size}: write "
            f"{len(ids)} there."
        )
    if len(outside := ids[ids >= len(labels)]):
        raise config.ConfigError(
            f"{role}_ids names the id {outside[0]}, and there are {len(labels)} examples, from 0."
        )
    unique, counts = np.unique(ids, return_counts=True)
    if len(unique) < len(ids):
        raise config.ConfigError(
            f"{role}_ids names the id {unique[counts > 1][0]} {counts.max()} times: once is enough."
        )
    if size is not None and len(unknown := ids[labels[ids] < 0]):
        raise config.ConfigError(f"{role}_ids names the id {unknown[0]}, which has no label.")


def _check_sizes(
    labels: np.ndarray,
    to_learn: np.ndarray,
    to_validate: np.ndarray,
    labeled: int,
    validation: int,
    chosen: Mapping[str, np.ndarray],
    overlap: bool,
) -> None:
    """Raises ConfigError if there are fewer examples of known label than are to be drawn."""
    drawn = (labeled if "labeled" not in chosen else 0, validation * ("validation" not in chosen))
    counts = [np.count_nonzero(part >= 0) for part in (to_learn, to_validate)]
    either = np.count_nonzero((to_learn >= 0) | (to_validate >= 0))
    needed = max(drawn) if overlap else sum(drawn)
    if needed > either or drawn[0] > counts[0] or drawn[1] > counts[1]:
        raise config.ConfigError(
            f"The split takes {labeled} labeled and {validation} validation examples, but only "
            f"{either} of the {len(labels)} training examples have a label"
            + (
                f" ({counts[0]} for training, {counts[1]} for validation)"
                if either != counts[0]
                else ""
            )
            + ": ask for fewer."
        )


def _check_overlaps(split: Split, includes_labeled: bool, validation_overlap: bool) -> None:
    """Raises ConfigError if chosen ids are of two roles that are not said to overlap."""
    for (a, b), allowed, remedy in (
        (("labeled", "validation"), validation_overlap, "allow it by validation_overlap"),
        (("labeled", "unlabeled"), includes_labeled, "allow it by unlabeled_includes_labeled"),
        (("validation", "unlabeled"), False, "take it out of one"),
    ):
        shared = np.intersect1d(getattr(split, a), getattr(split, b))
        if len(shared) and not allowed:
            raise config.ConfigError(
                f"{len(shared)} examples are both {a} and {b}, the first with id {shared[0]}: "
                f"{remedy}."
            )


def _with_share(rows: np.ndarray, marked: np.ndarray, share: float, most: int) -> np.ndarray:
    """As many of `rows`, up to `most`, as can be had with `share` of them marked (rounded down).

    Of both kinds the first ones.

    Raises:
      ConfigError: no row is left.
    """
    inside, outside = rows[marked[rows]], rows[~marked[rows]]
    total = min(
        len(inside) / share if share > 0 else np.inf,
        len(outside) / (1 - share) if share < 1 else np.inf,
    )
    # The small term keeps a whole number whole after the division.
    counts = [int(total * s + 1e-9) for s in (share, 1 - share)]
    if sum(counts) > most:
        counts[0] = int(most * share + 1e-9)
        counts[1] = most - counts[0]
    if not sum(counts):
        raise config.ConfigError(
            f"unlabeled_mismatch={share} cannot be had from {len(inside)} strangers and "
            f"{len(outside)} others: choose another share, or fewer labeled examples."
        )
    return np.concatenate([inside[: counts[0]], outside[: counts[1]]])


def _check_classes(
    labels: np.ndarray, class_order: np.ndarray, labeled: int, class_names: Sequence[str] | None
) -> None:
    """Raises ConfigError if a class has fewer examples than a balanced draw takes of it."""
    num_classes = len(class_order)
    counts = np.bincount(labels[labels >= 0], minlength=num_classes)
    taken = np.full(num_classes, labeled // num_classes)
    taken[class_order[: labeled % num_classes]] += 1
    for c in np.flatnonzero(counts < taken):
        raise config.ConfigError(
            f"{labeled} labeled examples take {taken[c]} of class "
            f"{c if class_names is None else repr(class_names[c])}, which has only {counts[c]}"
            + (": a labeled class with no example." if counts[c] == 0 else ": ask for fewer.")
        )


def _balanced_order(
    labels: np.ndarray, class_order: np.ndarray, row_order: np.ndarray
) -> np.ndarray:
    """The labeled rows of `row_order`, reordered to take one of each class in turn.

    Each turn goes through `class_order`; a class that has run out is passed over.
    """
    row_order = row_order[labels[row_order] >= 0]
    row_labels = labels[row_order]
    place = np.empty(len(class_order), np.int64)
    place[class_order] = np.arange(len(class_order))
    # The turn of a row is how many of its class come before it.
    by_class = np.argsort(row_labels, kind="stable")
    starts = np.cumsum(np.bincount(row_labels, minlength=len(class_order)))
    turn = np.empty(len(row_order), np.int64)
    turn[by_class] = np.arange(len(row_order)) - np.r_[0, starts][row_labels[by_class]]
    return row_order[np.lexsort((place[row_labels], turn))]


def _known_order(labels: np.ndarray, class_order: np.ndarray, row_order: np.ndarray) -> np.ndarray:
    """The labeled rows of `row_order`."""
    return row_order[labels[row_order] >= 0]


def class_counts(
    split: Split,
    labels: np.ndarray,
    class_names: Sequence[str],
    strangers: np.ndarray | None = None,
    test_labels: np.ndarray | None = None,
) -> list[tuple[str, list[int]]]:
    """(class, how many of its examples have each role, and are in the test part if that is given).

    After the classes come "other class", of strangers, and "unknown", where there are any.
    """
    names = [*class_names, "other class", "unknown"]
    other, unknown = len(class_names), len(class_names) + 1
    if strangers is not None:
        labels = np.where(strangers, other, labels)
    parts = [labels[getattr(split, role)] for role in ROLES]
    parts += [] if test_labels is None else [test_labels]
    counts = np.stack(
        [np.bincount(np.where(part < 0, unknown, part), minlength=len(names)) for part in parts],
        axis=1,
    )
    rows = list(zip(names, counts.tolist(), strict=True))
    return rows[:other] + [row for row in rows[other:] if any(row[1])]


def describe(
    split: Split,
    labels: np.ndarray,
    class_names: Sequence[str],
    strangers: np.ndarray | None = None,
    test_labels: np.ndarray | None = None,
) -> str:
    """A table of the class counts of each role, and the overlaps between the roles.

    It has a column for the test part if its labels are given.
    """
    counts = class_counts(split, labels, class_names, strangers, test_labels)
    rows = [
        ("class", *ROLES, *(() if test_labels is None else ("test",))),
        *((name, *map(str, row)) for name, row in counts),
        ("total", *map(str, np.sum([row for _, row in counts], axis=0))),
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            [
                row[0].ljust(widths[0]),
                *(x.rjust(w) for x, w in zip(row[1:], widths[1:], strict=True)),
            ]
        )
        for row in rows
    ]
    overlaps = [f"{a} and {b} {count}" for (a, b), count in split.overlaps.items()]
    return "\n".join([*lines, "in both: " + ", ".join(overlaps)])


def _seal(contents: dict[str, Any]) -> str:
    """sha256 over a canonical form of a manifest without its own `sha256`."""
    body = {key: value for key, value in contents.items() if key != "sha256"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def manifest(
    split: Split,
    name: names.DatasetName,
    source: examples.Source,
    settings: config.DataConfig | None = None,
    digests: dict[str, str] | None = None,
) -> dict[str, Any]:
    """All that identifies a split, as JSON values: dataset, seed, settings, digests of data, ids.

    `inputs_sha256` and `labels_sha256` cover the training and the test part (of files that are read
    when needed: their names and sizes); `sha256` covers the rest of the manifest, these two
    included.

    Args:
      split: the ids.
      name: of the dataset.
      source: the examples.
      settings: how they were drawn.
      digests: of what else the batches are made of, by name.
    """
    settings = settings or config.DataConfig()
    contents = {
        "dataset": str(name),
        "seed": name.seed,
        "class_names": list(source.class_names),
        **{
            key: getattr(settings, key)
            for key in _SETTINGS
            if key not in _LATER or getattr(settings, key) != getattr(config.DataConfig(), key)
        },
        "unlabeled_classes": list(settings.unlabeled_classes),
        "inputs_sha256": rows.digest(source.inputs, source.test_inputs),
        "labels_sha256": rows.digest(source.labels, source.test_labels),
        **(digests or {}),
        **{role: getattr(split, role).tolist() for role in ROLES},
    }
    return {**contents, "sha256": _seal(contents)}


def write(contents: dict[str, Any], path: str | os.PathLike) -> None:
    """Writes a manifest. There is never a half-written file at `path`."""
    text = json.dumps(contents, separators=(",", ":"))
    files.write_atomically(path, text + "\n")


def read(path: str | os.PathLike) -> dict[str, Any]:
    """Reads a manifest.

    Raises:
      ConfigError: there is none at `path`, or it was damaged or edited.
    """
    try:
        contents = json.loads(files.path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise config.ConfigError(f"There is no split manifest at {path}.") from error
    except ValueError as error:
        raise config.ConfigError(
            f"The split manifest {path} is not valid JSON: {error}."
        ) from error
    if not isinstance(contents, dict) or contents.get("sha256") != _seal(contents):
        raise config.ConfigError(
            f"The split manifest {path} does not match its own sha256: it was damaged or edited."
        )
    return contents


def check(old: dict[str, Any], new: dict[str, Any]) -> None:
    """Raises ConfigError, naming what differs, unless both manifests describe the same split."""
    default = {field.name: field.default for field in dataclasses.fields(config.DataConfig)}
    # What a manifest was written without, before there was such a setting, it has as by default.
    values = [(key, *(held.get(key, default.get(key)) for held in (old, new))) for key in _SETTINGS]
    # The data may lie elsewhere now: their digests say whether they are the same.
    endings = [names.ending(str(contents.get("dataset"))) for contents in (old, new)]
    differences = [
        f"{key} was {before!r} and is now {after!r}"
        for key, before, after in (
            *values,
            ("class_names", old.get("class_names", new["class_names"]), new["class_names"]),
            ("unlabeled_classes", old.get("unlabeled_classes", []), new["unlabeled_classes"]),
        )
        if before != after
    ]
    differences += [
        f"the {part} of the data have changed"
        for part in ("inputs", "labels")
        if old.get(f"{part}_sha256") != new.get(f"{part}_sha256")
    ]
    digest = "paraphrases_sha256"
    if digest in new and old.get(digest) != new[digest]:  # evaluations read no paraphrases
        differences.append("the paraphrases have changed")
    if not differences:
        differences = [
            f"other examples are {role}" for role in ROLES if old.get(role) != new.get(role)
        ]
    if old.get("dataset") != new["dataset"] and (differences or endings[0] != endings[1]):
        renamed = f"dataset was {old.get('dataset')!r} and is now {new['dataset']!r}"
        differences.insert(0, renamed)
    if differences:
        raise config.ConfigError(
            f"This run began with another split: {'; '.join(differences)}. "
            "Restore the old settings and data, or start in a new folder."
        )
