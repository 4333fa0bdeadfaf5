"""Trains the cells of a study in parallel processes of one thread each.

Results depend on how many threads TensorFlow computes with, in the last digits of its sums and soon
in more. One thread is what every machine has, and several such processes leave no core idle.
"""

import collections
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

ONE_THREAD = {
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}


class CellError(config_lib.UserError):
    """A cell could not be trained; the message names its directory and the cause."""


def train(
    cells: Sequence[comparison.Cell],
    jobs: int,
    logs: files.AnyPath,
    program: str,
    report: Callable[[comparison.Cell, dict], None],
) -> None:
    """Trains, or resumes, and judges each cell, see `launch.train_and_judge`.

    A process takes one cell after the other, as importing TensorFlow takes seconds. SIGTERM and
    SIGINT end the processes, which save what they have.

    Args:
      cells: what to train; the first ones first.
      jobs: processes at a time.
      logs: folder of job-<n>.log, to which process n adds all that it prints.
      program: the binary that the runs' flags.txt name.
      report: called with each cell and its result as it ends.

    Raises:
      CellError: a cell failed; the others have been ended.
      ConfigError: `logs` cannot be made, or lies in a bucket.
      KeyboardInterrupt: on SIGTERM and SIGINT.
    """
    if not files.is_local(logs):
        raise config_lib.ConfigError(
            f"{logs} lies in a bucket, where processes cannot log to: name a local directory."
        )
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise config_lib.ConfigError(
            f"{logs} cannot be written ({error.strerror}): name another directory."
        ) from error
    os.environ.update(ONE_THREAD)  # TensorFlow reads them in the processes started below.
    waiting = collections.deque(cells)
    workers: dict[connections.Connection, _Worker] = {}
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for number in range(1, min(jobs, len(cells)) + 1):
            worker = _Worker.start(logs / f"job-{number}.log", program)
            workers[worker.connection] = worker
            worker.give(waiting.popleft())
        while workers:
            for connection in connections.wait(list(workers)):
                worker = workers[connection]
                report(worker.cell, worker.result())
                if waiting:
                    worker.give(waiting.popleft())
                else:
                    workers.pop(connection).end()
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
        try:
            self.connection.send(cell)
        except OSError as error:
            raise self._failed() from error

    def result(self) -> dict:
        try:
            answer = self.connection.recv()
        except (EOFError, OSError) as error:
            raise self._failed() from error
        if isinstance(answer, str):
            raise CellError(f"{self.cell.model_dir}: {answer}")
        if answer is None:
            raise CellError(
                f"{self.cell.model_dir}: the process was told to stop; the same command goes on."
            )
        return answer

    def end(self) -> None:
        self.connection.close()
        self.process.join()

    def _failed(self) -> CellError:
        self.process.join()
        return CellError(
            f"{self.cell.model_dir}: the process died with exit code {self.process.exitcode}; "
            f"{self.log} ends with what it printed."
        )


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
                answer = launch.train_and_judge(cell.config, cell.model_dir, program)
            except config_lib.UserError as error:
                answer = str(error)
            connection.send(answer)
    except (EOFError, ConnectionError):  # the other side has no more cells, or is no more
        return
