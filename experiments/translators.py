"""Commands that translate: they read a text a line and write one line for each."""

import contextlib
import os
import shlex
import signal
import subprocess
import threading
from collections.abc import Sequence

from ssl_influence import config as config_lib


class Translators:
    """Runs translators, from several threads; each is a process group, so that all of it ends."""

    def __init__(self):
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen] = set()
        self._ended = False

    def translate(self, arguments: Sequence[str], lines: Sequence[str]) -> list[str]:
        """One line for each.

        Raises:
          ConfigError: the command cannot be started, fails, writes no UTF-8 or another number of
            lines, or `end` was called.
        """
        if not lines:
            return []
        process = self._start(arguments)
        try:
            out, errors = process.communicate(
                "".join(f"{line}\n" for line in lines).encode("utf-8")
            )
        finally:
            with self._lock:
                self._running.discard(process)
        name = shlex.join(arguments)
        if process.returncode:
            last = (errors.decode("utf-8", "replace").strip().splitlines() or ["nothing"])[-1]
            raise config_lib.ConfigError(
                f"{name} ended with exit code {process.returncode}; the last it said: {last}"
            )
        try:
            found = out.decode("utf-8").split("\n")
        except UnicodeDecodeError as error:
            raise config_lib.ConfigError(
                f"{name} wrote the byte 0x{out[error.start]:02x}, which is not UTF-8: see its "
                "settings, or LC_ALL."
            ) from error
        if not found[-1]:  # what comes after the last line end
            found.pop()
        if len(found) != len(lines):
            raise config_lib.ConfigError(
                f"{name} wrote {len(found)} lines for {len(lines)}: one for each is needed."
            )
        return found

    def _start(self, arguments: Sequence[str]) -> subprocess.Popen:
        with self._lock:
            if self._ended:
                raise config_lib.ConfigError("interrupted.")
            try:
                process = subprocess.Popen(
                    arguments,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
            except OSError as error:
                raise config_lib.ConfigError(
                    f"{arguments[0]} cannot be started ({error.strerror}): install it, or name "
                    "another command."
                ) from error
            self._running.add(process)
            return process

    def end(self) -> None:
        """Kills those that run, and what they started; none starts any more."""
        with self._lock:
            self._ended = True
            for process in self._running:
                if process.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
