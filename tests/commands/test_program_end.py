"""Tests of exit codes, of signals that stop a server, and of messages about limits of the machine."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys

import pytest
import trio

from trioserve.commands.program_end import StopSignals, limit_message


def test_stop_signal_before_the_server_listens_stops_it_later():
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)

        async def first() -> int:
            async with contextlib.aclosing(signals.receive()) as numbers:
                return await anext(numbers)

        assert trio.run(first) == signal.SIGTERM


def test_signal_handlers_are_restored_in_a_process_that_continues():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with StopSignals():
        assert signal.getsignal(signal.SIGTERM) is not before[0]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_after_the_stop_does_not_change_the_exit_code(number):
    """The exit code also stays the same while the interpreter ends and Python has already removed its own handlers."""
    program = f"""
import os
from trioserve.commands.program_end import StopSignals, end_program, prepare_program

class SentLast:
    def __del__(self, kill=os.kill, pid=os.getpid()):
        kill(pid, {int(number)})

prepare_program()
kept = SentLast()
with StopSignals():
    pass
os.kill(os.getpid(), {int(number)})
end_program(7)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (7, "")


@pytest.mark.parametrize(("serves", "code"), [(True, 7), (False, -signal.SIGHUP)], ids=["serve", "another command"])
def test_sighup_while_a_server_starts_does_not_end_it(serves, code):
    program = f"""
import os, signal
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a parent that ignores it, such as nohup, hands that on
from trioserve.commands.program_end import end_program, hang_up_as_before, prepare_program
prepare_program()
prepare_program()
if not {serves}:
    hang_up_as_before()
os.kill(os.getpid(), signal.SIGHUP)
end_program(7)
"""
    ended = subprocess.run([sys.executable, "-c", program], timeout=60, check=False)
    assert ended.returncode == code


def test_closed_output_does_not_change_the_exit_code():
    program = """
from trioserve.commands.program_end import end_program, prepare_program
prepare_program()
print("to a full disk")
end_program(0)
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        ended = subprocess.run([sys.executable, "-c", program], stdout=full, env=environment, timeout=60, check=False)
    assert ended.returncode == 0


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "ulimit -n"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "--kv-cache-memory"),
        (RuntimeError("can't start new thread"), "ulimit -u"),
        (MemoryError(), "--kv-cache-memory"),
        (ImportError("libx.so: failed to map segment from shared object"), "memory"),
        (BaseExceptionGroup("", [ValueError(), ExceptionGroup("", [RuntimeError("can't start new thread")])]), "pids"),
    ],
)
def test_error_names_the_exceeded_limit_of_the_machine(error, words):
    assert words in (limit_message(error) or "")


def test_exceeded_limit_is_found_as_the_cause_of_another_error():
    error = RuntimeError("the thread was not started")
    error.__cause__ = OSError(errno.EMFILE, "Too many open files")
    assert "ulimit -n" in (limit_message(error) or "")


@pytest.mark.parametrize("error", [ValueError("wrong"), OSError(errno.ENOENT, "not found"), RuntimeError("broken")])
def test_error_with_another_cause_names_no_limit_of_the_machine(error):
    assert limit_message(error) is None
