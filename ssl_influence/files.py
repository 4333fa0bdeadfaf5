"""Writing files so that nobody ever sees half of one."""

import os
import pathlib


def write_atomically(path: str | os.PathLike, text: str) -> None:
    """Replaces the file in one move: a reader, or a kill, sees the old text or the new one.

    Its folder is made where it is missing.
    """
    path = pathlib.Path(path)
    temporary = path.with_name(path.name + f".{os.getpid()}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
