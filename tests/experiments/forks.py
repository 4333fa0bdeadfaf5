"""Starts binaries without waiting for their imports: a server that has them forks at each start.

Importing TensorFlow takes 5 seconds of a core, most of what a small run takes, and the tests start
hundreds of binaries. `command` gives the command of a process that stands for a binary: a few
lines of Python, at once there, that have the server fork, pass on signals (a binary whose stand-in
is killed is killed too), and end with the binary's exit code or by its signal. Its output, folder
and environment are those of the stand-in. What is read once, when libraries are imported, is the
server's: its environment has to be that of the tests.
"""

import atexit
import contextlib
import functools
import gc
import json
import os
import pathlib
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LOCK = threading.Lock()


def command(module: str, *arguments: str, root: pathlib.Path) -> list[str]:
    """What stands for `python -m module arguments`, read from the folder `root`."""
    with _LOCK:
        server = _server(root)
    return [sys.executable, "-I", "-S", __file__, "start", server, module, *arguments]


@functools.cache
def _server(root: pathlib.Path) -> str:
    """The socket of a server that imports what is below `root`, started once."""
    path = pathlib.Path(tempfile.mkdtemp(prefix="forks-"), "socket")
    # It ends with this process, whose end of the pipe closes.
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.experiments.forks", "serve", str(path)],
        cwd=root,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the tests, not for it
    )
    atexit.register(_stop, process, path)
    return str(path)


def _stop(process: subprocess.Popen, path: pathlib.Path) -> None:
    process.stdin.close()
    process.wait()
    path.unlink(missing_ok=True)
    path.parent.rmdir()


def _start(server: str, module: str, *arguments: str) -> None:
    """The stand-in: asks for a fork, and ends as it ends."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    connection = _connect(server)
    request = {
        "module": module,
        "arguments": arguments,
        "folder": os.getcwd(),
        "environment": dict(os.environ),
    }
    connection.sendall(len(body := json.dumps(request).encode()).to_bytes(4, "big") + body)
    socket.send_fds(connection, [b"x"], [0, 1, 2])
    pid = int.from_bytes(_read(connection, 4), "big")
    for number in _PASSED_ON:
        signal.signal(number, lambda number, _: os.kill(pid, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
    code = int.from_bytes(_read(connection, 4), "big", signed=True)
    if code < 0:  # a signal
        if -code in _PASSED_ON:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _connect(server: str) -> socket.socket:
    """Waits until the server has imported what it is to, for two minutes at most."""
    for _ in range(6000):
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(server)
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            signal.sigtimedwait([], 0.02)
        else:
            return connection
    sys.exit("The server that forks has not begun.")


def _read(connection: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        found += (part := connection.recv(count - len(found)))
        if not part:
            sys.exit("The server that forks is gone.")
    return found


def _serve(path: str) -> None:
    """Imports, and forks for each connection until the standard input closes."""
    import tensorflow_datasets  # noqa: F401
    import tf_keras  # noqa: F401
    from tensorboard.plugins.hparams import api  # noqa: F401

    with contextlib.suppress(ImportError):
        import tensorflow_text  # noqa: F401
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    poll = select.poll()
    for source in (sys.stdin.fileno(), listener.fileno()):
        poll.register(source, select.POLLIN)
    forked = {}  # file descriptor of a connection or of a process -> (pid, both of them)
    while True:
        for number, _ in poll.poll():
            if number == sys.stdin.fileno():
                for pid, *_ in forked.values():
                    os.kill(pid, signal.SIGKILL)
                return
            if number == listener.fileno():
                connection = listener.accept()[0]
                pid = _fork(connection, [listener.fileno(), *forked])
                connection.sendall(pid.to_bytes(4, "big"))
                process = os.pidfd_open(pid)
                for source in (process, connection.fileno()):
                    forked[source] = pid, process, connection
                    poll.register(source, select.POLLIN)
                continue
            if number not in forked:  # its other end was told of in the same round
                continue
            pid, process, connection = forked[number]
            if number != process:  # the stand-in is gone
                os.kill(pid, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with contextlib.suppress(BrokenPipeError):
                connection.sendall(code.to_bytes(4, "big", signed=True))
            for source in (process, connection.fileno()):
                poll.unregister(source)
                del forked[source]
            os.close(process)
            connection.close()


def _fork(connection: socket.socket, held: list[int]) -> int:
    """The pid of a new process, which runs what the connection asks for and does not return.

    `held` are file descriptors that it has no use for.
    """
    size = int.from_bytes(_read(connection, 4), "big")
    request = json.loads(_read(connection, size))
    _, streams, *_ = socket.recv_fds(connection, 1, 3)
    pid = os.fork()
    if pid:
        for stream in streams:
            os.close(stream)
        return pid
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    for number in (*streams, *held, connection.detach()):
        os.close(number)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = [request["module"], *request["arguments"]]
    raise _Forked


class _Forked(BaseException):
    """Leaves the server's loop in the new process."""


if __name__ == "__main__":
    task, *given = sys.argv[1:]
    if task == "start":
        _start(*given)
    try:
        _serve(*given)
    except _Forked:
        pass
    else:
        sys.exit()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
