"""Processes that are forked behave as those that are started."""

import os
import signal
import time

import pytest

from tests.experiments.processes import finish, start

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="forks take Linux")


def forked(how, *more):
    return start("-m", "tests.experiments.forked_code", how, *more)


def waiting(process):
    """The pid of what the process stands for, once it waits."""
    process.stdout.readline()
    return int(process.stdout.readline())


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_output_arguments_environment_and_exit_code_are_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("FORKED", "yes: é")
    ends = [
        finish(start("-m", "tests.experiments.forked_code", "exit", "a b", "", fresh=fresh))
        for fresh in (False, True)
    ]
    for result, imported in zip(ends, ("True", "False"), strict=True):
        assert result.stdout == f"['exit', 'a b', ''] {os.getcwd()} yes: é {imported}\n"
        assert result.stderr == "to stderr\n" and result.returncode == 3


def test_a_signal_that_ends_it_is_told():
    assert finish(forked("abort")).returncode == -signal.SIGABRT


def test_signals_are_passed_on():
    process = forked("wait")
    assert is_alive(waiting(process))
    process.send_signal(signal.SIGINT)
    assert finish(process).returncode == 75
    process = forked("wait")
    waiting(process)
    process.terminate()
    assert finish(process).returncode == -signal.SIGTERM


def test_it_is_killed_with_what_stands_for_it():
    process, other = forked("wait"), forked("wait")
    pid, of_other = waiting(process), waiting(other)
    process.kill()
    assert finish(process).returncode == -signal.SIGKILL
    deadline = time.monotonic() + 20
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(pid) and is_alive(of_other)
    other.kill()
    finish(other)
