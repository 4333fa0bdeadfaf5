"""Folders of image files, a class a folder: `folder:/data/birds`."""

import array
import hashlib
import logging
import os
import stat
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ssl_influence import config
from ssl_influence.data import examples, images, names, rows

_log = logging.getLogger("ssl_influence")

_EXTENSIONS = ("png", "jpg", "jpeg", "bmp", "gif", "webp", "tif", "tiff", "ppm", "pgm")
_ENDINGS = tuple(f".{extension}".encode() for extension in _EXTENSIONS)


def read(
    name: names.DatasetName, place: str | None, settings: config.DataConfig
) -> examples.Collection:
    """The images below a folder.

    Either the folder holds class folders (`cat/1.png`, `dog/a/2.jpg`: images at any depth), or it
    holds the parts train, unlabeled, validation (or val) and test, each with class folders; case
    does not matter in the names of parts.

    - The classes are the folders of train, sorted by the bytes of their names.
    - Images that lie beside the class folders, not in one, are unlabeled ones.
    - Folders of `unlabeled` say which class its images truly are, for reports alone; those of other
      classes are strangers. If none of them is named as a class of train they are mere folders.
    - Images of a part are in the order of the bytes of their paths, whose parts "/" separates.
    - Hidden files and folders, and files of other extensions than those of images, are ignored.
    - Symbolic links are followed if they stay within the folder.

    Images are read when they are asked for; the stamp is over each file's path and size.

    Raises:
      ConfigError: the folder is not of this form, a class folder is empty, two classes are named
        alike but for case or Unicode normalization, a link leads out of the folder or in a circle.
    """
    where = f"{name.source}:{place}"
    if not os.path.isdir(place):
        raise config.ConfigError(f"{where}: there is no folder {place!r}.")
    tree = _Tree(where, os.fsencode(os.path.realpath(place)))
    pieces, classes_of = _pieces(tree)
    _check_alike(where, {c for classes in classes_of.values() for c in classes})

    task = classes_of.get(examples.TRAIN, [])
    truths = classes_of.get(examples.UNLABELED, [])
    if task and truths and not set(task) & set(truths):
        _log.info(
            "%s: no folder of the unlabeled part is named as a class; they are taken for mere "
            "folders, not for classes outside the task.",
            where,
        )
        classes_of[examples.UNLABELED] = []
    others = {c for classes in classes_of.values() for c in classes} - set(task)
    classes = task + sorted(others)
    number = {c: i for i, c in enumerate(classes)}
    parts = {
        part: _examples(tree, part, of_part, number, settings)
        for part, of_part in pieces.items()
        if of_part
    }
    if not parts:
        raise config.ConfigError(f"{where} has no image ({', '.join(_EXTENSIONS)}) at all.")
    if tree.ignored:
        _log.info("%s: %d files of other kinds were ignored.", where, tree.ignored)
    return examples.Collection(
        name=where,
        class_names=[os.fsdecode(c) for c in classes],
        parts=parts,
        task_classes=len(task) or None,
    )


def images_below(place: str | os.PathLike) -> tuple[rows.Strings, Callable[[str], bytes]]:
    """The paths of all images below a folder, from there, and what reads the file of one.

    Order, hidden files, extensions and symbolic links are as in `read`; reading raises OSError.

    Raises:
      ConfigError: a folder cannot be listed; a link leads out of `place` or in a circle.
    """
    tree = _Tree(os.fspath(place), os.fsencode(os.path.realpath(place)))
    paths = tree.files(_Folder(b"", tree.root))
    return rows.Strings(map(os.fsdecode, paths)), tree.read_bytes


class _Folder(NamedTuple):
    """A folder below the root.

    Attributes:
      path: from the root, ends in "/"; of the root itself it is empty.
      real: absolute path without symbolic links.
      left: the real folders whose links were followed to get here.
    """

    path: bytes
    real: bytes
    left: tuple[bytes, ...] = ()

    @property
    def base(self) -> bytes:
        return self.path.rstrip(b"/").rpartition(b"/")[2]


# An image file by its path from the root, or a folder.
_Entry = bytes | _Folder


class _Tree:
    """What lies below a folder.

    Attributes:
      where: what messages call it.
      root: its real path.
      ignored: how many files were passed over because they are no images.
    """

    def __init__(self, where: str, root: bytes):
        self.where = where
        self.root = root
        self.ignored = 0

    def shown(self, path: bytes) -> str:
        """What messages call a path from the root."""
        return f"{self.where}: {os.fsdecode(path)!r}"

    def entries(self, folder: _Folder) -> list[_Entry]:
        """Images and folders directly in a folder, in the order of the bytes of paths below it."""
        found = []
        try:
            with os.scandir(folder.real) as listing:
                for entry in listing:
                    if entry.name.startswith(b"."):
                        continue
                    is_folder = entry.is_dir()
                    if not is_folder and not entry.name.lower().endswith(_ENDINGS):
                        self.ignored += 1
                        continue
                    path = folder.path + entry.name
                    real, left = os.path.join(folder.real, entry.name), folder.left
                    if entry.is_symlink():
                        real = self._followed(path, real)
                        left = (*left, folder.real)
                        if is_folder and any(_within(passed, real) for passed in left):
                            raise config.ConfigError(
                                f"{self.shown(path)} is a symbolic link that leads in a circle: "
                                "remove it."
                            )
                    found.append(_Folder(path + b"/", real, left) if is_folder else path)
        except OSError as error:
            raise config.ConfigError(
                f"{self.shown(folder.path or b'.')} cannot be listed ({error.strerror})."
            ) from error
        # With the "/" of folders this is the order of whole paths: "a-b.png" is before "a/b.png".
        return sorted(found, key=lambda entry: entry if isinstance(entry, bytes) else entry.path)

    def files(self, entry: _Entry) -> Iterator[bytes]:
        """The images at and below an entry."""
        pending = [entry]
        while pending:
            entry = pending.pop()
            if isinstance(entry, bytes):
                yield entry
            else:
                pending.extend(reversed(self.entries(entry)))

    def read_bytes(self, path: str) -> bytes:
        """The content of a file; raises OSError."""
        full = os.path.join(os.fsdecode(self.root), path)
        if not stat.S_ISREG(os.stat(full).st_mode):  # a pipe would block for ever
            raise OSError("it is not a regular file")
        with open(full, "rb") as file:
            return file.read()

    def size(self, path: bytes) -> int:
        """Bytes of a file, -1 if that cannot be told: reading it will say why."""
        try:
            return os.stat(os.path.join(self.root, path)).st_size
        except OSError:
            return -1

    def _followed(self, path: bytes, real: bytes) -> bytes:
        target = os.path.realpath(real)
        if not _within(target, self.root):
            raise config.ConfigError(
                f"{self.shown(path)} is a symbolic link that leads out of the folder, to "
                f"{os.fsdecode(target)!r}: put a copy in its place or remove it."
            )
        return target


def _within(path: bytes, folder: bytes) -> bool:
    return path == folder or path.startswith(os.path.join(folder, b""))


def _pieces(tree: _Tree) -> tuple[dict[str, list[_Entry]], dict[str, list[bytes]]]:
    """What each part is made of, and the classes that its folders name, sorted."""
    top = tree.entries(_Folder(b"", tree.root))
    folder_of = {}
    for entry in top:
        if isinstance(entry, _Folder):
            part = examples.PART_NAMES.get(os.fsdecode(entry.base).lower())
            if part is not None and part in folder_of:
                raise config.ConfigError(
                    f"{tree.shown(entry.path)} and {os.fsdecode(folder_of[part].path)!r} are one "
                    "part: put their images in one of them."
                )
            folder_of[part] = entry
    pieces = {part: [] for part in examples.PARTS}
    if not folder_of or set(folder_of) == {None}:
        _sort_in(pieces, tree, examples.TRAIN, top)
    else:
        for entry in top:
            if isinstance(entry, bytes) or entry is folder_of.get(None):
                raise config.ConfigError(
                    f"{tree.shown(entry if isinstance(entry, bytes) else entry.path)} lies beside "
                    "folders of parts (train, unlabeled, validation, test): move it into one."
                )
        for part in examples.PARTS:
            if part in folder_of:
                found = tree.entries(folder_of[part])
                if not found:
                    raise config.ConfigError(
                        f"{tree.shown(folder_of[part].path)} is empty: put images there or remove "
                        "it."
                    )
                _sort_in(pieces, tree, part, found)
    classes_of = {
        part: sorted(entry.base for entry in of_part if isinstance(entry, _Folder))
        for part, of_part in pieces.items()
    }
    return pieces, classes_of


def _sort_in(
    pieces: dict[str, list[_Entry]], tree: _Tree, part: str, found: Sequence[_Entry]
) -> None:
    """Adds the entries of a part's folder; images in no class folder of train are unlabeled."""
    loose = [entry for entry in found if isinstance(entry, bytes)]
    if part != examples.TRAIN or not loose:
        pieces[part] += found
        return
    _log.info(
        "%s: %d images, such as %r, lie in no class folder and are unlabeled ones.",
        tree.where,
        len(loose),
        os.fsdecode(loose[0]),
    )
    pieces[examples.UNLABELED] += loose
    pieces[examples.TRAIN] += [entry for entry in found if isinstance(entry, _Folder)]


def _check_alike(where: str, classes: Iterable[bytes]) -> None:
    seen = {}
    for c in sorted(classes):
        name = os.fsdecode(c)
        key = unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())
        if key in seen:
            raise config.ConfigError(
                f"{where}: the class folders {seen[key]!r} ({seen[key]!a}) and {name!r} ({name!a}) "
                "differ in case or Unicode normalization alone: rename or join them."
            )
        seen[key] = name


def _examples(
    tree: _Tree,
    part: str,
    pieces: Sequence[_Entry],
    number: dict[bytes, int],
    settings: config.DataConfig,
) -> examples.Examples:
    """The examples of one part, in one pass over its folders."""
    labels, stamp = array.array("i"), hashlib.sha256()

    def paths() -> Iterator[str]:
        for piece in pieces:
            before = len(labels)
            label = number.get(piece.base, -1) if isinstance(piece, _Folder) else -1
            for path in tree.files(piece):
                labels.append(label)
                stamp.update(b"%b\0%d\0" % (path, tree.size(path)))
                yield os.fsdecode(path)
            if len(labels) == before and part != examples.UNLABELED:
                raise config.ConfigError(
                    f"{tree.shown(piece.path)} is a class folder without an image "
                    f"({', '.join(_EXTENSIONS)}): put images there or remove it."
                )

    found = rows.Strings(paths())
    if not len(found):
        raise config.ConfigError(
            f"{tree.where}: the {part} part has no image ({', '.join(_EXTENSIONS)}): put images "
            "there or remove its folder."
        )
    return images.examples_of(
        lambda row: tree.read_bytes(found[row]),
        found,
        np.array(labels, np.int32),
        stamp.hexdigest(),
        settings,
        where=tree.where,
    )
