"""The server processes of a survival run. The run kills them at its end in any case."""

from __future__ import annotations

import pathlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import IO

import trio

from trioserve.bench.startup import free_port, wait_until_ready

__all__ = ["NotReady", "ServerProcess", "start_all"]

READY_SECONDS_MAX = 180.0


class NotReady(Exception):
    """A server did not become ready. The message has the last line of its output."""


class ServerProcess:
    """One server, which can be killed and started again on the same port.

    Args:
        name: name for messages and for the log file.
        words: words of the command line without the port.
        log_directory: directory for the output. None: a temporary file keeps it.
    """

    def __init__(self, name: str, words: Sequence[str], *, log_directory: pathlib.Path | None = None) -> None:
        self.name = name
        self.port = free_port()
        self._words = words
        self._log: IO[bytes]
        if log_directory is None:
            self._log = tempfile.TemporaryFile()  # noqa: SIM115  # close() closes it
        else:
            self._log = (log_directory / f"{name}.log").open("w+b")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        command = [sys.executable, "-m", "trioserve", *self._words, "--port", str(self.port)]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log)

    async def wait_until_ready(self) -> None:
        """Wait until the server is ready.

        Raises:
            NotReady: the server ended, or was not ready in time.
        """
        if await wait_until_ready(self.port, lambda: self.is_alive, READY_SECONDS_MAX) is None:
            raise NotReady(f"{self.name} did not become ready; its last words: {self.last_words()}")

    def kill(self) -> None:
        """Kill the process with SIGKILL and wait for its end. Then its port is free."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)

    def proceed(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        self.kill()
        self._log.close()

    def last_words(self) -> str:
        self._log.seek(0)
        said = self._log.read().decode(errors="replace").strip().splitlines()
        return said[-1] if said else "nothing"

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)


async def start_all(processes: Sequence[ServerProcess]) -> None:
    """Start processes at the same time and wait until all are ready.

    Args:
        processes: processes that do not run.

    Raises:
        NotReady: one of them did not become ready.
    """
    for process in processes:
        process.start()
    async with trio.open_nursery() as nursery:
        for process in processes:
            nursery.start_soon(process.wait_until_ready)
