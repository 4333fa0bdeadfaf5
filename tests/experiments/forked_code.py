"""What test_forks.py runs in processes: says where it is, and ends as it is told."""

import os
import signal
import sys
import time

if __name__ == "__main__":
    how = sys.argv[1]
    print(sys.argv[1:], os.getcwd(), os.environ.get("FORKED"), "tensorflow" in sys.modules)
    print("to stderr", file=sys.stderr)
    if how == "wait":
        try:
            print(os.getpid(), flush=True)
            time.sleep(100)
        except KeyboardInterrupt:
            sys.exit(75)
    if how == "abort":
        os.kill(os.getpid(), signal.SIGABRT)
    sys.exit(3)
