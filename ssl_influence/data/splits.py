"""Which training example plays which role: labeled, validation or unlabeled.

A split is a function of the labels, the sizes, the seed and two flags, nothing else. It is written
down as a manifest beside the checkpoints, so that a run is only resumed on the data it began with.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
from typing import Any

import numpy as np

from ssl_influence import config, files
from ssl_influence.data import sources

ROLES = ("labeled", "validation", "unlabeled")


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """The ids of each role, sorted int64 [n_role], and the flags they were drawn under."""

    labeled: np.ndarray
    validation: np.ndarray
    unlabeled: np.ndarray
    unlabeled_includes_labeled: bool = False
    validation_overlap: bool = False
    labeled_includes_validation: bool = False
    unlabeled_mismatch: float | None = None

    @property
    def overlaps(self) -> dict[tuple[str, str], int]:
        """How many ids two roles share, for each pair of roles."""
        return {
            (a, b): len(np.intersect1d(getattr(self, a), getattr(self, b)))
            for i, a in enumerate(ROLES)
            for b in ROLES[i + 1 :]
        }


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
) -> Split:
    """Draws the roles.

    Labeled: labeled // C examples of each class; the remainder goes to classes drawn by the seed,
    one each. For one seed, the labeled examples of a smaller set are among those of a larger one,
    and do not depend on the number of validation examples.

    Validation: balanced over the classes as well, as far as they have examples left; a class that
    runs out is made up for by the others.

    Unlabeled: all other rows, those of unknown label (-1) included. With `unlabeled_mismatch`, as
    many of them as can be had with that share of strangers; rows left over have no role.

    With `validation_overlap` the published FixMatch code is followed: the validation examples are
    the first rows of a class-balanced order that is the same for every seed, and labeled examples
    are drawn from all rows, so that one may be the other too. Here this order takes one row of each
    class in turn, in the order of their ids.

    The draws are `Generator(PCG64(seed)).permutation` of the classes and then of the rows, for the
    labeled examples; the same again for the validation examples; and one of the rows for the
    mismatch.

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

    Raises:
      ConfigError: the data do not hold that many examples, or a class that many labeled ones.
    """
    labels = np.asarray(labels)
    known = int(np.count_nonzero(labels >= 0))
    needed = max(labeled, validation) if validation_overlap else labeled + validation
    if needed > known:
        raise config.ConfigError(
            f"The split takes {labeled} labeled and {validation} validation examples, but only "
            f"{known} of the {len(labels)} training examples have a label: ask for fewer."
        )
    if labeled < num_classes:
        raise config.ConfigError(
            f"{labeled} labeled examples for {num_classes} classes leave a labeled class with no "
            f"example: ask for at least {num_classes}."
        )
    random = np.random.Generator(np.random.PCG64(seed))
    class_order, row_order = random.permutation(num_classes), random.permutation(len(labels))
    _check_classes(labels, class_order, labeled)
    labeled_ids = _balanced_order(labels, class_order, row_order)[:labeled]

    if validation_overlap:
        in_turn = _balanced_order(labels, np.arange(num_classes), np.arange(len(labels)))
        validation_ids = in_turn[:validation]
    else:
        class_order, row_order = random.permutation(num_classes), random.permutation(len(labels))
        left = row_order[~np.isin(row_order, labeled_ids)]
        validation_ids = _balanced_order(labels, class_order, left)[:validation]

    is_unlabeled = np.ones(len(labels), bool)
    is_unlabeled[validation_ids] = False
    if not unlabeled_includes_labeled:
        is_unlabeled[labeled_ids] = False
    if unlabeled_mismatch is not None:
        if strangers is None:
            raise config.ConfigError(
                f"unlabeled_mismatch={unlabeled_mismatch} needs examples outside the task: name "
                "the task's classes by known_classes."
            )
        order = random.permutation(len(labels))
        kept = _with_share(order[is_unlabeled[order]], strangers, unlabeled_mismatch)
        is_unlabeled = np.isin(np.arange(len(labels)), kept)
    if labeled_includes_validation:
        labeled_ids = np.union1d(labeled_ids, validation_ids)
    return Split(
        labeled=np.sort(labeled_ids).astype(np.int64),
        validation=np.sort(validation_ids).astype(np.int64),
        unlabeled=np.flatnonzero(is_unlabeled).astype(np.int64),
        unlabeled_includes_labeled=unlabeled_includes_labeled,
        validation_overlap=validation_overlap,
        labeled_includes_validation=labeled_includes_validation,
        unlabeled_mismatch=unlabeled_mismatch,
    )


def _with_share(rows: np.ndarray, marked: np.ndarray, share: float) -> np.ndarray:
    """The most of `rows`, in their order, of which `share` are marked (rounded down).

    Raises:
      ConfigError: no row is left.
    """
    inside, outside = rows[marked[rows]], rows[~marked[rows]]
    total = min(
        len(inside) / share if share > 0 else np.inf,
        len(outside) / (1 - share) if share < 1 else np.inf,
    )
    # The small term keeps a whole number whole after the division.
    kept = [part[: int(total * s + 1e-9)] for part, s in ((inside, share), (outside, 1 - share))]
    if not len(kept[0]) + len(kept[1]):
        raise config.ConfigError(
            f"unlabeled_mismatch={share} cannot be had from {len(inside)} strangers and "
            f"{len(outside)} others: choose another share, or fewer labeled examples."
        )
    return np.concatenate(kept)


def _check_classes(labels: np.ndarray, class_order: np.ndarray, labeled: int) -> None:
    """Raises ConfigError if a class has fewer examples than a balanced draw takes of it."""
    num_classes = len(class_order)
    counts = np.bincount(labels[labels >= 0], minlength=num_classes)
    taken = np.full(num_classes, labeled // num_classes)
    taken[class_order[: labeled % num_classes]] += 1
    for c in np.flatnonzero(counts < taken):
        raise config.ConfigError(
            f"{labeled} labeled examples take {taken[c]} of class {c}, which has only {counts[c]}"
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
    turn = np.empty(len(row_order), np.int64)
    place = np.empty(len(class_order), np.int64)
    place[class_order] = np.arange(len(class_order))
    for c in class_order:
        rows = np.flatnonzero(row_labels == c)
        turn[rows] = np.arange(len(rows))
    return row_order[np.lexsort((place[row_labels], turn))]


def describe(
    split: Split,
    labels: np.ndarray,
    class_names: list[str],
    strangers: np.ndarray | None = None,
) -> str:
    """A table of the class counts of each role, and the overlaps between the roles."""
    rows = [("class", *ROLES)]
    per_role = {role: labels[getattr(split, role)] for role in ROLES}
    for c, name in enumerate(class_names):
        rows.append((name, *(str(np.count_nonzero(per_role[role] == c)) for role in ROLES)))
    strangers = np.zeros(len(labels), bool) if strangers is None else strangers
    for name, chosen in (("other class", strangers), ("unknown", (labels < 0) & ~strangers)):
        counts = [np.count_nonzero(chosen[getattr(split, role)]) for role in ROLES]
        if any(counts):
            rows.append((name, *map(str, counts)))
    rows.append(("total", *(str(len(per_role[role])) for role in ROLES)))
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


def _digest(*arrays: np.ndarray) -> str:
    """sha256 over shape, type and little-endian bytes of the arrays in turn."""
    digest = hashlib.sha256()
    for array in arrays:
        array = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(array.data if array.size else b"")
    return digest.hexdigest()


def _seal(contents: dict[str, Any]) -> str:
    """sha256 over a canonical form of a manifest without its own `sha256`."""
    body = {key: value for key, value in contents.items() if key != "sha256"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def manifest(split: Split, name: sources.DatasetName, source: sources.Source) -> dict[str, Any]:
    """All that identifies a split, as JSON values: dataset, seed, flags, digests of the data, ids.

    `inputs_sha256` and `labels_sha256` cover the training and the test part; `sha256` covers the
    rest of the manifest, these two included.
    """
    contents = {
        "dataset": str(name),
        "seed": name.seed,
        "unlabeled_includes_labeled": split.unlabeled_includes_labeled,
        "validation_overlap": split.validation_overlap,
        "labeled_includes_validation": split.labeled_includes_validation,
        "unlabeled_mismatch": split.unlabeled_mismatch,
        "inputs_sha256": _digest(source.inputs, source.test_inputs),
        "labels_sha256": _digest(source.labels, source.test_labels),
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
        contents = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
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


def check(manifest_old: dict[str, Any], manifest_new: dict[str, Any]) -> None:
    """Raises ConfigError, naming what differs, unless both manifests describe the same split."""
    differences = [
        f"{key} was {manifest_old.get(key, default)!r} and is now {manifest_new.get(key)!r}"
        for key, default in (
            ("dataset", None),
            ("unlabeled_includes_labeled", None),
            ("validation_overlap", None),
            # Not in the first manifests, which were written before there was such a setting.
            ("labeled_includes_validation", False),
            ("unlabeled_mismatch", None),
        )
        if manifest_old.get(key, default) != manifest_new.get(key)
    ]
    differences += [
        f"the {part} of the data have changed"
        for part in ("inputs", "labels")
        if manifest_old.get(f"{part}_sha256") != manifest_new.get(f"{part}_sha256")
    ]
    if not differences:
        differences = [
            f"other examples are {role}"
            for role in ROLES
            if manifest_old.get(role) != manifest_new.get(role)
        ]
    if differences:
        raise config.ConfigError(
            f"This run began with another split: {'; '.join(differences)}. "
            "Restore the old settings and data, or start in a new folder."
        )
