"""Exact copies among examples, whatever their ids, names, roles and parts; and making near ones.

A validation example that is also trained on rewards the weights for what was learned by heart; a
test example that is makes the test error too low. Copies are found by a 128-bit hash of what the
model is given: the pixels of an image after decoding, the bytes of a vector, the UTF-8 of a text.
Inputs of one source have one shape and one type, so that equal bytes are equal examples.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ssl_influence.data import examples, rows, splits

ROLES = (*splits.ROLES, "test")
_TRAINING = ("labeled", "unlabeled")

# Examples that one line names.
_NAMED = 3


@dataclasses.dataclass(frozen=True, eq=False)
class Report:
    """The groups of identical examples.

    An example is known by its place: its id, or `size` plus its row in the test part.

    Attributes:
      size: how many examples have an id.
      places: those that have a copy, group after group and ascending in each, int64 [m].
      group: the number of the group of each, from 0 in the order of their first places, int64 [m].
      roles: bit r is set if it has the role ROLES[r], uint8 [m]; an example may have two, or none.
      labels: int32 [m], -1 where unknown.
    """

    size: int
    places: np.ndarray
    group: np.ndarray
    roles: np.ndarray
    labels: np.ndarray

    @property
    def groups(self) -> list[np.ndarray]:
        """The places of each group, int64, two or more."""
        return np.split(self.places, np.flatnonzero(np.diff(self.group)) + 1)[: self.num_groups]

    @property
    def num_groups(self) -> int:
        """How many groups there are."""
        return int(self.group[-1]) + 1 if len(self.group) else 0

    @property
    def counts(self) -> dict[tuple[str, str], int]:
        """(a, b) -> how many examples of role a have a copy, not themselves, in role b."""
        return {(a, b): len(self.copies([a], [b])) for a in ROLES for b in ROLES}

    @property
    def contradictory(self) -> np.ndarray:
        """The numbers of the groups whose known labels are not all the same, int64."""
        known = self.labels >= 0
        low = np.full(self.num_groups, np.iinfo(np.int32).max)
        high = np.full(self.num_groups, -1)
        np.minimum.at(low, self.group[known], self.labels[known])
        np.maximum.at(high, self.group[known], self.labels[known])
        return np.flatnonzero(low < high)

    def copies(self, of: Iterable[str], among: Iterable[str]) -> np.ndarray:
        """Pairs of places, int64 [k, 2]: each example with a role in `of` that has a copy, not
        itself, with a role in `among`, and the first such copy.
        """
        targets = np.flatnonzero(self._has_role(among))
        first, last = (
            np.searchsorted(self.group[targets], self.group, side) for side in ("left", "right")
        )
        # Places differ from one another, so that at most one target is the example itself.
        ends = np.append(targets, -1)
        first = first + (ends[first] == np.arange(len(self.group)))
        found = self._has_role(of) & (first < last)
        return np.stack([self.places[found], self.places[ends[first[found]]]], axis=1)

    def leaks(self, role: str) -> np.ndarray:
        """Pairs as of `copies`: examples of a role that copy one that is trained on.

        Those that are trained on themselves, since they have two roles by design, are left out.
        """
        pairs = self.copies([role], _TRAINING)
        trained = self.places[self._has_role(_TRAINING)]
        return pairs[~np.isin(pairs[:, 0], trained)]

    def _has_role(self, roles: Iterable[str]) -> np.ndarray:
        bits = sum(1 << ROLES.index(role) for role in roles)
        return self.roles & bits > 0


def find(source: examples.Source, split: splits.Split) -> Report:
    """Finds the identical examples of a source, test part included.

    Lazy images are each read once. Memory: a few words an example.

    Raises:
      ConfigError: a lazy image cannot be read.
    """
    digests = np.concatenate([_digests(source.inputs), _digests(source.test_inputs)])
    places, group = _groups(digests)
    size = len(source.labels)
    roles = np.zeros(len(digests), np.uint8)
    for bit, role in enumerate(splits.ROLES):
        roles[getattr(split, role)] |= 1 << bit
    roles[size:] = 1 << ROLES.index("test")
    labels = np.concatenate([source.labels, source.test_labels])
    return Report(size, places, group, roles[places], labels[places])


def describe(report: Report, source: examples.Source) -> list[str]:
    """What was found, in lines of a few examples each."""
    if not report.num_groups:
        return ["no two examples are the same"]
    lines = [f"{len(report.places)} examples are in {_groups_of_copies(report.num_groups)}"]
    for number, a in enumerate(ROLES):
        for b in ROLES[: number + 1]:
            pairs = report.copies([a], [b])
            if len(pairs):
                others = f"other {b} ones" if a == b else f"{b} ones"
                lines.append(
                    f"{_number(pairs, a)} identical to {others}: {_pairs(pairs, report, source)}"
                )
    groups = report.contradictory
    if len(groups):
        lines.append(
            f"labels disagree within {_groups_of_copies(len(groups))}: "
            f"{_contradictions(groups, report, source)}"
        )
    return lines


def alarms(report: Report, source: examples.Source) -> list[str]:
    """One line for each kind of copies that spoil a run, with what to do about them."""
    lines = []
    for role, harm in (
        ("validation", "weights are learned, and runs chosen, by what was trained on"),
        ("test", "the test error is too low"),
    ):
        pairs = report.leaks(role)
        if len(pairs):
            lines.append(
                f"{_number(pairs, role)} identical to labeled or unlabeled ones "
                f"({_pairs(pairs, report, source)}): {harm}. Take one of each pair out of the data."
            )
    groups = report.contradictory
    if len(groups):
        lines.append(
            f"Labels disagree within {_groups_of_copies(len(groups))} "
            f"({_contradictions(groups, report, source)}): mend the labels, or take these examples "
            "out of the data."
        )
    return lines


def _digests(inputs: rows.Rows) -> np.ndarray:
    """A hash of each row, 16 bytes each, [n]."""
    digests, start = np.empty(len(inputs), "S16"), 0
    for part in rows.in_turn(inputs):
        if part.dtype == object:
            contents = [text.encode("utf-8", "surrogateescape") for text in part]
        else:
            contents = np.ascontiguousarray(part).reshape(len(part), -1)
        hashes = b"".join(hashlib.blake2b(c, digest_size=16).digest() for c in contents)
        digests[start : start + len(part)] = np.frombuffer(hashes, "S16")
        start += len(part)
    return digests


def _groups(digests: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`Report.places` and `Report.group`."""
    _, first, content, size = np.unique(
        digests, return_index=True, return_inverse=True, return_counts=True
    )
    places = np.flatnonzero(size[content] > 1)
    leader = first[content[places]]  # the first place of its group
    order = np.argsort(leader, kind="stable")
    return places[order], np.unique(leader[order], return_inverse=True)[1]


def _number(pairs: np.ndarray, role: str) -> str:
    return f"{len(pairs)} {role} example{' is' if len(pairs) == 1 else 's are'}"


def _groups_of_copies(count: int) -> str:
    return f"{count} group{'s' * (count != 1)} of exact copies"


def _name(place: int, report: Report, source: examples.Source) -> str:
    if place < report.size:
        return source.row_name(place)
    row = place - report.size
    return f"test {row if source.test_names is None else source.test_names[row]}"


def _pairs(pairs: np.ndarray, report: Report, source: examples.Source) -> str:
    """The first of the pairs."""
    return _first(pairs, lambda pair: " = ".join(_name(p, report, source) for p in pair))


def _contradictions(groups: np.ndarray, report: Report, source: examples.Source) -> str:
    """Of the first of the groups, an example and the first one with another label."""

    def words(number):
        members = np.flatnonzero((report.group == number) & (report.labels >= 0))
        other = members[report.labels[members] != report.labels[members[0]]][0]
        return " = ".join(
            f"{_name(report.places[m], report, source)} ({source.class_names[report.labels[m]]})"
            for m in (members[0], other)
        )

    return _first(groups, words)


def _first(found: Sequence, words: Callable[..., str]) -> str:
    more = ", ..." if len(found) > _NAMED else ""
    return ", ".join(words(item) for item in found[:_NAMED]) + more


def near_copies(
    images: np.ndarray, count: int, noise: float, random: np.random.Generator
) -> np.ndarray:
    """Moves and roughens images in turn: uint8 [n, H, W, C] -> uint8 [count, H, W, C].

    Args:
      images: what is copied.
      count: how many copies; the first one is of the first image.
      noise: standard deviation of normal noise, in gray levels; the sum is rounded and clipped.
      random: of the moves, -1, 0 or 1 pixel in each direction, and the noise.
    """
    height, width = images.shape[1:3]
    rim = np.pad(images, [(0, 0), (1, 1), (1, 1), (0, 0)], mode="edge")
    moves = random.integers(3, size=(count, 2))
    moved = np.stack(
        [
            rim[number % len(images), down : down + height, right : right + width]
            for number, (down, right) in enumerate(moves)
        ]
    )
    for copy in moved:  # one by one, as floats take eight times the memory
        rough = copy + random.normal(scale=noise, size=copy.shape)
        copy[:] = np.clip(np.rint(rough), 0, 255)
    return moved
