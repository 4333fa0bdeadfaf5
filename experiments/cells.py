"""Trains the cells of a sweep in parallel processes.

Results depend on how many threads TensorFlow computes with, in the last digits of its sums and soon
in more. One thread is what every machine has, and several such processes leave no core idle.
"""

import collections
import contextlib
import dataclasses
import logging
import multiprocessing
import os
import pathlib
import signal
from collections.abc import Callable, Sequence
from multiprocessing import connection as connections

from experiments import comparison
from ssl_influence import config as config_lib, files

THREADS = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS")


class CellError(config_lib.UserError):
    """Cells could not be trained; the message says which, or how many."""


class StoppedError(CellError):
    """A process was told to stop by others than this program."""

    goes_on = True


class _Died(Exception):
    """The process of a cell is gone; the message says so and names its log."""


def train(
    cells: Sequence[comparison.Cell],
    jobs: int,
    logs: files.AnyPath,
    program: str,
    report: Callable[[comparison.Cell, dict | str], None],
    threads: int = 1,
) -> dict[comparison.Cell, str]:
    """Trains, or resumes, and judges each cell, see `launch.train_and_judge`.

    A process takes one cell after the other, as importing TensorFlow takes seconds. SIGTERM and
    SIGINT end the processes, which save what they have.

    Args:
      cells: what to train; the first ones first.
      jobs: processes at a time.
      logs: folder of job-<n>.log, to which process n adds all that it prints.
      program: the binary that the runs' flags.txt name.
      report: called with each cell and its result as it ends, or a line that says why it failed.
      threads: that a process computes with; 0 leaves it to TensorFlow.

    Returns:
      A line that says why, for each cell that failed.

    Raises:
      StoppedError: a process was told to stop by others.
      ConfigError: `logs` cannot be made or written, or lies in a bucket.
      KeyboardInterrupt: on SIGTERM and SIGINT.
    """
    if not files.is_local(logs):
        raise config_lib.ConfigError(
            f"{logs} lies in a bucket, where processes cannot log to: name a local directory."
        )
    paths = [logs / f"job-{number}.log" for number in range(1, min(jobs, len(cells)) + 1)]
    try:
        logs.mkdir(parents=True, exist_ok=True)
        for path in paths:
            path.open("ab").close()
    except OSError as error:
        raise config_lib.ConfigError(
            f"{logs} cannot be written ({error.strerror}): name another directory."
        ) from error
    if threads:  # TensorFlow reads these in the processes started below.
        os.environ.update(dict.fromkeys(THREADS, str(threads)))
    waiting, failed = collections.deque(cells), {}
    workers: dict[connections.Connection, _Worker] = {}

    def start(log: pathlib.Path) -> None:
        worker = _Worker.start(log, program)
        workers[worker.connection] = worker
        worker.give(waiting.popleft())

    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for path in paths:
            start(path)
        while workers:
            for connection in connections.wait(list(workers)):
                worker = workers[connection]
                try:
                    answer = worker.result()
                except _Died as error:
                    failed[worker.cell] = str(error)
                    report(worker.cell, str(error))
                    workers.pop(connection)
                    if waiting:
                        start(worker.log)
                    continue
                report(worker.cell, answer)
                if isinstance(answer, str):
                    failed[worker.cell] = answer
                if waiting:
                    worker.give(waiting.popleft())
                else:
                    workers.pop(connection).end()
        return failed
    finally:
        for worker in workers.values():
            worker.process.terminate()
        for worker in workers.values():
            worker.end()
        signal.signal(signal.SIGTERM, before)


@dataclasses.dataclass
class _Worker:
    """A process that trains the cells it is sent, and sends back their results."""

    process: multiprocessing.Process
    connection: connections.Connection
    log: pathlib.Path
    cell: comparison.Cell | None = None

    @classmethod
    def start(cls, log: pathlib.Path, program: str) -> "_Worker":
        context = multiprocessing.get_context("spawn")  # TensorFlow does not survive a fork
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, log, program), daemon=True)
        process.start()
        theirs.close()  # so that the end of the process closes the pipe
        return cls(process, ours, log)

    def give(self, cell: comparison.Cell) -> None:
        self.cell = cell
        # A process that is gone is met by `result`.
        with contextlib.suppress(OSError):
            self.connection.send(cell)

    def result(self) -> dict | str:
        """What the cell ended with, or the line that says why it failed.

        Raises:
          StoppedError: the process was told to stop.
          _Died: it is gone.
        """
        try:
            answer = self.connection.recv()
        except (EOFError, OSError) as error:
            self.end()
            raise _Died(
                f"its process died with exit code {self.process.exitcode}; {self.log} ends with "
                "what it printed."
            ) from error
        if answer is None:
            raise StoppedError(
                f"{self.cell.model_dir}: the process was told to stop; the same command goes on."
            )
        return answer

    def end(self) -> None:
        self.connection.close()
        self.process.join()


def _work(connection: connections.Connection, log: pathlib.Path, program: str) -> None:
    """What a process does: a cell in; its result, the line of a `UserError`, or None out."""
    # A terminal sends SIGINT to every process: the one that started this passes it on as SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    logging.basicConfig()
    logging.getLogger("ssl_influence").setLevel(logging.INFO)
    from experiments import launch

    try:
        while True:
            cell = connection.recv()
            print(f"\n{cell.model_dir}:", flush=True)
            try:
                answer = launch.train_and_judge(cell.config, cell.model_dir, program, cell.labels)
            except config_lib.UserError as error:
                answer = str(error)
            connection.send(answer)
    except (EOFError, ConnectionError):  # the other side has no more cells, or is no more
        return
