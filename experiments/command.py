"""Runs a binary's main, with one clear line for whatever a user can mend."""

import logging
import os
import sys
from collections.abc import Callable

from absl import app, logging as absl_logging

from ssl_influence import config as config_lib

# Exit code of what the same command goes on with: it was stopped and saved, or another worker is
# gone (EX_TEMPFAIL of sysexits.h).
STOPPED = 75


def run(main: Callable[[], int | None]) -> None:
    """Parses the flags and calls `main`; a UserError ends the binary with one line and exit code
    1, or STOPPED where the same command goes on.

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
            code = main()
            sys.stdout.flush()
            sys.exit(code)
        except config_lib.UserError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            sys.exit(STOPPED if error.goes_on else 1)
        except BrokenPipeError:  # as of head
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            print("error: what read the output has closed it.", file=sys.stderr, flush=True)
            sys.exit(1)
        except KeyboardInterrupt:
            message = "error: interrupted; the same command goes on from the newest checkpoint."
            print(message, file=sys.stderr, flush=True)
            sys.exit(STOPPED)

    app.run(guarded)
