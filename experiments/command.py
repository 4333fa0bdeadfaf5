"""Runs a binary's main, with one clear line for whatever a user can mend."""

import logging
import sys
from collections.abc import Callable

from absl import app, logging as absl_logging

from ssl_influence import config as config_lib

# Exit code of what was stopped and saved, and goes on by the same command (EX_TEMPFAIL).
STOPPED = 75


def run(main: Callable[[], int | None]) -> None:
    """Parses the flags and calls `main`; a UserError ends the binary with one line and exit code 1.

    What `main` returns is the exit code; nothing is 0.

    Binaries import TensorFlow inside `main`: it takes seconds, and neither --help nor a wrong flag
    should wait for it.
    """

    def guarded(argv):
        if len(argv) > 1:
            sys.exit(f"error: unexpected argument {argv[1]!r}: every setting is a --flag=value.")
        absl_logging.set_verbosity(absl_logging.WARNING)  # TensorFlow writes there too
        for own in ("ssl_influence", "third_party"):
            logging.getLogger(own).setLevel(logging.INFO)
        for stream in (sys.stdout, sys.stderr):  # names of files need not be text
            stream.reconfigure(errors="backslashreplace")
        try:
            sys.exit(main())
        except config_lib.UserError as error:
            sys.exit(f"error: {error}")
        except KeyboardInterrupt:
            sys.exit("error: interrupted; the same command goes on from the newest checkpoint.")

    app.run(guarded)
