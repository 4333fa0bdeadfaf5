"""Files of a dataset as its authors released them: an archive, its folder, and images in arrays."""

import contextlib
import gzip
import lzma
import os
import pathlib
import tarfile
import zlib
from collections.abc import Callable, Collection, Iterator
from typing import BinaryIO, TypeVar

import numpy as np

from ssl_influence import config

_T = TypeVar("_T")

_DAMAGE = (EOFError, OSError, zlib.error, lzma.LZMAError, tarfile.TarError)
# How much longer than the file the data in a gzip file can be (RFC 1951: 258 bytes in 2 bits).
_GZIP_RATIO = 1032


def existing(place: str, what: str) -> pathlib.Path:
    """The path itself.

    Raises:
      ConfigError: nothing is there; the message says `what` should be.
    """
    path = pathlib.Path(place)
    if not path.exists():
        raise config.ConfigError(f"There is no {path}: name {what}.")
    return path


def inside(folder: pathlib.Path, path: pathlib.Path) -> pathlib.Path:
    """The path itself.

    Raises:
      ConfigError: it leads out of the folder, by .. or by a link.
    """
    if not path.resolve().is_relative_to(folder.resolve()):
        raise config.ConfigError(
            f"{path} leads out of {folder}, to {path.resolve()}: put the file itself there."
        )
    return path


@contextlib.contextmanager
def naming_damage(path: os.PathLike | str) -> Iterator[None]:
    """Turns what a reader of compressed files raises into a ConfigError that names the file."""
    try:
        yield
    except _DAMAGE as error:
        if isinstance(error, OSError) and error.errno is not None:  # gzip's own have none
            raise config.ConfigError(f"{path} cannot be read: {error.strerror}.") from error
        reason = (str(error).splitlines() or [""])[0] or type(error).__name__
        raise config.ConfigError(
            f"{path} cannot be read ({reason}): it is damaged or cut short; get it again."
        ) from error


def read_files(
    path: pathlib.Path, wanted: Collection[str], read: Callable[[BinaryIO, str, int], _T]
) -> dict[str, _T]:
    """What `read` makes of files of a folder or of a tar archive, by the name of the file.

    Nothing is extracted. An archive is read once, in its own order, to its end and checksum.

    Args:
      path: the folder, or an archive that is plain or compressed by gzip, bzip2 or xz.
      wanted: names of files, without folders; those that are not there are left out.
      read: (stream, what messages call the file, its size in bytes) -> result.

    Raises:
      ConfigError: the archive is damaged or cut short, holds a file twice or as a link, or a file
        leads out of the folder.
    """
    if path.is_dir():
        found = {}
        for name in sorted(wanted):
            if (path / name).is_file():
                file = inside(path, path / name)
                with naming_damage(file), open(file, "rb") as stream:
                    found[name] = read(stream, str(file), file.stat().st_size)
        return found
    found = {}
    with naming_damage(path), tarfile.open(path, "r:*") as archive:
        for member in archive:
            parts = pathlib.PurePosixPath(member.name).parts
            name = parts[-1] if parts else ""
            if name not in wanted:
                continue
            label = f"{path}: {member.name}"
            if not member.isfile() or ".." in parts or member.name.startswith("/"):
                raise config.ConfigError(f"{label} is no plain file of the archive; get it again.")
            if name in found:
                raise config.ConfigError(f"{label} is a second file of this name; get it again.")
            found[name] = read(archive.extractfile(member), label, member.size)
        while archive.fileobj.read(1 << 20):  # The checksum of gzip comes last.
            pass
    return found


def read_all(stream: BinaryIO, label: str, size: int) -> bytes:
    """The bytes of a file of `read_files`.

    Raises:
      ConfigError: there are fewer than its size.
    """
    data = stream.read()
    if len(data) != size:
        raise config.ConfigError(
            f"{label} has {len(data)} of its {size} bytes: it is cut short; get it again."
        )
    return data


def read_array(stream: BinaryIO, shape: tuple[int, ...], label: str) -> np.ndarray:
    """uint8 of a shape from a stream, whose pointer moves on; the peak is one copy.

    Raises:
      ConfigError: the stream ends before.
    """
    array = np.empty(shape, np.uint8)
    view, done = memoryview(array.reshape(-1)), 0
    while done < len(view):
        count = stream.readinto(view[done : done + (1 << 24)])
        if not count:
            raise config.ConfigError(
                f"{label} ends after {done} of {len(view)} bytes: it is cut short; get it again."
            )
        done += count
    return array


@contextlib.contextmanager
def opened(path: pathlib.Path) -> Iterator[tuple[BinaryIO, int]]:
    """(stream, the most bytes it can give) of a file that is plain or, by its name, gzip.

    Raises:
      ConfigError: reading from it fails within the context.
    """
    size, zipped = path.stat().st_size, path.suffix == ".gz"
    with naming_damage(path), gzip.open(path) if zipped else open(path, "rb") as stream:
        yield stream, size * (_GZIP_RATIO if zipped else 1)
