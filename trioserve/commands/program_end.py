"""Exit codes, handling of stop signals, and standard streams that cannot block or end a program."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import signal
import sys
from collections.abc import AsyncGenerator
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import trio

__all__ = [
    "EXIT_FAILED",
    "EXIT_INTERRUPTED",
    "STANDBY_COMMAND",
    "SteadyStderr",
    "StopSignals",
    "end_program",
    "hang_up_as_before",
    "limit_message",
    "prepare_program",
]

EXIT_FAILED = 1
EXIT_INTERRUPTED = 128 + signal.SIGINT  # Shells report this exit code after Ctrl-C.
STANDBY_COMMAND = "standby"
"""Command that imports the modules of a server, and then reads the arguments of `serve` from standard input."""

_SERVER_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# So many characters have at most PIPE_BUF bytes (4,096). A pipe accepts either all bytes of such a write or none.
_PIECE_CHARACTERS = 1024
_PIPE_WAIT_MS_MAX = 500
_owns_process = False
_hangup_before: Any = None  # handler of SIGHUP at the start of this process


class StopSignals:
    """Receives SIGINT (Ctrl-C), SIGTERM and SIGHUP for a server.

    Signals that arrive before `receive` runs are kept. Signals that arrive after the scope do not change the exit code.
    SIGHUP reloads certificates. It never ends the process, even if the server has no certificates.

    Usage: `with StopSignals() as signals: trio.run(...)`. Inside of the Trio run, one task iterates over
    `signals.receive()`. After the scope, a process that runs one command ignores the signals. Otherwise, a late signal
    would kill the process although the server has stopped normally. In other processes, the earlier handlers are
    restored.
    """

    def __init__(self) -> None:
        self._early: list[int] = []
        self._previous: dict[int, object] = {}

    def __enter__(self) -> StopSignals:
        self._previous = {number: signal.signal(number, self._keep) for number in _SERVER_SIGNALS}
        return self

    def __exit__(self, *_error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_IGN if _owns_process else handler)  # type: ignore[arg-type]

    def _keep(self, number: int, _frame: FrameType | None) -> None:
        self._early.append(number)

    async def receive(self, *, task_status: trio.TaskStatus[None] | None = None) -> AsyncGenerator[int, None]:
        """Yield the number of each signal, beginning with the signals that arrived before this call.

        Args:
            task_status: reports the start as soon as no signal can be lost. None for no report.
        """
        import trio  # This import is late, because most commands need no Trio run.

        with trio.open_signal_receiver(*_SERVER_SIGNALS) as signals:
            if task_status is not None:
                task_status.started()
            for number in self._early:
                yield number
            async for number in signals:
                yield number


class SteadyStderr(io.TextIOWrapper):
    """Standard error that drops text instead of raising an error or blocking for a long time.

    So a slow or closed reader of the log cannot stop the server. The stream has no buffer, so no text is unwritten when
    the process ends.
    """

    def __init__(self) -> None:
        super().__init__(
            io.FileIO(2, "w", closefd=False),
            encoding="utf-8",
            errors="backslashreplace",
            write_through=True,
        )

    def write(self, text: str) -> int:
        for start in range(0, len(text), _PIECE_CHARACTERS):
            if not self._accepts_more():
                break
            with contextlib.suppress(OSError):
                super().write(text[start : start + _PIECE_CHARACTERS])
        return len(text)

    def write_or_raise(self, text: str) -> None:
        """Write text, and block until the stream accepts all of it. Only threads that may block may call this method.

        Args:
            text: Text to write.

        Raises:
            OSError: The text was not written.
        """
        super().write(text)

    def _accepts_more(self) -> bool:
        """Return True if stderr accepts PIPE_BUF bytes within the time limit. A file always accepts them."""
        poll = select.poll()
        poll.register(2, select.POLLOUT)
        return bool(poll.poll(_PIPE_WAIT_MS_MAX))


def prepare_program() -> None:
    """Make the standard streams and SIGHUP safe. Call this first in a process that runs one command.

    After the call, the process ignores SIGHUP, which must not end a server that is still starting. Commands without a
    server call `hang_up_as_before` to restore SIGHUP. A second call of this function changes nothing.

    A closed file descriptor 0, 1 or 2 becomes /dev/null. Otherwise the next socket would get its number, and `print`
    would write into that socket.
    """
    global _owns_process, _hangup_before
    if _owns_process:
        return
    _owns_process = True
    _hangup_before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    for descriptor, mode in ((0, "r"), (1, "w"), (2, "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            # The system gives the new file the lowest free number, which is the number of the closed descriptor.
            os.open(os.devnull, os.O_RDONLY if mode == "r" else os.O_WRONLY)
    if sys.stdin is None:
        sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))
    if sys.stdout is None:
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w", closefd=False)))
    sys.stderr = SteadyStderr()


def hang_up_as_before() -> None:
    """Restore the handler of SIGHUP, so that the end of the terminal ends this process, except under nohup."""
    if _hangup_before is not None:
        signal.signal(signal.SIGHUP, _hangup_before)


def end_program(exit_code: int) -> None:
    """Flush standard output and exit.

    If standard output cannot be written, its text is dropped, and the process still exits with the given code.

    Args:
        exit_code: exit code of the process.
    """
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(exit_code)


def limit_message(error: BaseException) -> str | None:
    """Explain in one sentence which limit of the machine caused an error.

    Args:
        error: an exception. The function also searches its causes, and the members of exception groups.

    Returns:
        The explanation, or None if the error has another cause.
    """
    if isinstance(error, BaseExceptionGroup):
        return next(filter(None, map(limit_message, error.exceptions)), None)
    text = str(error)
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return (
            f"too many open files ({_soft_limit()}): raise the limit with `ulimit -n`, LimitNOFILE= in systemd or "
            "--ulimit nofile=N for a container. 1,024 or more is recommended"
        )
    if "can't start new thread" in text:
        return (
            "the system allows no more threads, or no more memory for threads: check `ulimit -u`, `ulimit -v`, and the "
            "pids and memory limits of the container"
        )
    is_out_of_memory = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    if is_out_of_memory or "failed to map segment" in text or "annot allocate memory" in text:
        return (
            "there is not enough memory: use a smaller model, less KV cache with --kv-cache-memory GIB, or raise the "
            "limit (`ulimit -v`, or that of the container)"
        )
    return _cause_message(error)


def _cause_message(error: BaseException) -> str | None:
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None if cause is None else limit_message(cause)


def _soft_limit() -> str:
    import resource

    return f"this process may have {resource.getrlimit(resource.RLIMIT_NOFILE)[0]:,}"
