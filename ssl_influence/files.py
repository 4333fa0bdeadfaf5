"""Writing files so that nobody ever sees half of one."""

import os
import pathlib
from collections.abc import Iterator
from contextlib import contextmanager


def write_atomically(path: str | os.PathLike, text: str) -> None:
    """Replaces the file in one move: a reader, or a kill, sees the old text or the new one.

    Its folder is made where it is missing.
    """
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def replacing(path: str | os.PathLike) -> Iterator[pathlib.Path]:
    """Gives the name of a file to write, which then takes the place of `path` in one move.

    The name is of this process alone. Where the writing fails, `path` stays as it was.
    """
    path = pathlib.Path(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
