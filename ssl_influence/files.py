"""Places of files, which may lie in a bucket, and writing them so that nobody sees half of one."""

import errno
import os
import pathlib
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Union

if TYPE_CHECKING:
    from etils import epath

AnyPath = Union[pathlib.Path, "epath.Path"]


def path(place: str | os.PathLike) -> AnyPath:
    """A local place as pathlib's path; gs://bucket/... as etils.epath's, which is much like it.

    That one cannot `resolve`, takes text for UTF-8, and its `stat` is another.
    """
    text = os.fspath(place)
    if not has_scheme(text):
        return pathlib.Path(text)
    from etils import epath  # which takes as long as all else that --help imports

    try:
        return epath.Path(text)
    except KeyError:  # a scheme that it does not know
        return pathlib.Path(text)


def has_scheme(text: str) -> bool:
    """Whether a place begins as that of a bucket, as gs://."""
    return re.match(r"\w+://", text) is not None


def is_local(place: str | os.PathLike) -> bool:
    """Whether a place is a file or folder of this machine, mounted ones included."""
    return isinstance(path(place), pathlib.Path)


@contextmanager
def os_errors(place: str | os.PathLike) -> Iterator[None]:
    """Within it, an OSError with a reason is raised of a bucket too, where TensorFlow has its own.

    Local places are left alone.
    """
    if is_local(place):
        yield
        return
    import tensorflow as tf

    try:
        yield
    except (tf.errors.OpError, OSError) as error:
        if getattr(error, "strerror", None):
            raise
        number = errno.ENOENT if isinstance(error, FileNotFoundError) else errno.EIO
        reason = str(error).partition("\n")[0] or os.strerror(number)
        raise OSError(number, reason, str(place)) from error


def write_atomically(place: str | os.PathLike, text: str) -> None:
    """Replaces the file in one move: a reader, or a kill, sees the old text or the new one.

    Its folder is made where it is missing.
    """
    with replacing(place) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def replacing(place: str | os.PathLike) -> Iterator[AnyPath]:
    """Gives the name of a file to write, which then takes the place of another in one move.

    The name is of this call alone. Where the writing fails, `place` stays as it was.

    Raises:
      OSError: it cannot be written.
    """
    final = path(place)
    temporary = final.with_name(f"{final.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    with os_errors(final):
        final.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            temporary.replace(final)
        except OSError as error:
            if error.filename == str(temporary):
                error.filename = str(final)
            raise
        finally:
            temporary.unlink(missing_ok=True)
