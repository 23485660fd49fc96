"""Servers of this project that a measurement starts as processes, and their CPU time and memory."""

from __future__ import annotations

import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import IO

import trio

from trioserve.bench.client import Failure
from trioserve.bench.runner import EXIT_UNREACHABLE, CannotMeasure, ask, http1_client
from trioserve.bench.settings import Target

__all__ = ["ServerProcess", "cpu_seconds", "memory_bytes", "start_all"]

POLL_SECONDS = 0.005  # seconds between two checks of readiness. The measured duration has an error of this size.
STOP_SECONDS_MAX = 15.0


class ServerProcess:
    """One server, which can be killed and started again on the same port. As a context, it starts and terminates.

    Args:
        name: name for messages and for the log file.
        words: words of the command line without the port.
        log_directory: directory for the output. None: a temporary file keeps it.
        folder: folder in which it runs. None: that of this process.
        environment: its environment. None: that of this process.
        program: words before the words of the command line.
        ready_path: path that answers 200 as soon as the server is ready.

    Attributes:
        port: its port at 127.0.0.1.
    """

    def __init__(
        self,
        name: str,
        words: Sequence[str],
        *,
        log_directory: pathlib.Path | None = None,
        folder: str | None = None,
        environment: Mapping[str, str] | None = None,
        program: Sequence[str] = (sys.executable, "-m", "trioserve"),
        ready_path: str = "/ready",
    ) -> None:
        self.name = name
        self.port = _free_port()
        self._words = [*program, *words]
        self._ready_path = ready_path
        self._folder, self._environment = folder, environment
        self._log: IO[bytes]
        if log_directory is None:
            self._log = tempfile.TemporaryFile()  # noqa: SIM115  # close() closes it
        else:
            self._log = (log_directory / f"{name}.log").open("w+b")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        self._process = subprocess.Popen(
            [*self._words, "--port", str(self.port)],
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )

    async def wait_until_ready(self, seconds_max: float) -> float:
        """Return the time of the first 200 of the ready path, by time.perf_counter.

        Args:
            seconds_max: maximum time to wait, in seconds.

        Raises:
            CannotMeasure: the server ended, or was not ready in time.
        """
        target = Target.from_url(self.url)
        client = http1_client(target)
        with trio.move_on_after(seconds_max):
            while self.is_alive:
                # A connection that is opened while the model loads waits in the backlog. It is the first one to be
                # served.
                response = await ask(client, target, self._ready_path, seconds_max=seconds_max)
                if not isinstance(response, Failure) and response.status == 200:
                    ready_at = time.perf_counter()
                    await client.aclose()
                    return ready_at
                await trio.sleep(POLL_SECONDS)
        raise self.not_ready()

    def not_ready(self) -> CannotMeasure:
        """Return the error with the last line of the server's log."""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines() or ["nothing"]
        return CannotMeasure(
            f"{self.name} did not become ready; the last line of its log: {lines[-1]}", EXIT_UNREACHABLE
        )

    def kill(self) -> None:
        """Kill the process with SIGKILL and wait for its end. Then its port is free."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)

    def proceed(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def close(self) -> None:
        self.kill()
        self._log.close()

    def __enter__(self) -> ServerProcess:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            pass  # close() kills the process.
        finally:
            self.close()


async def start_all(processes: Sequence[ServerProcess], *, seconds_max: float) -> None:
    """Start processes at the same time and wait until all are ready.

    Args:
        processes: processes that do not run.
        seconds_max: maximum time to wait, in seconds.

    Raises:
        CannotMeasure: one of them did not become ready.
    """
    for process in processes:
        process.start()
    async with trio.open_nursery() as nursery:
        for process in processes:
            nursery.start_soon(process.wait_until_ready, seconds_max)


def _free_port() -> int:
    """Return a TCP port on which no process listens at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def cpu_seconds(pid: int) -> float | None:
    """Return the CPU time of all threads of a process, to some hundredths of a second. None: the system does not report
    it.

    Args:
        pid: the process.
    """
    try:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
    except OSError:
        return None
    user, system = fields.split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def memory_bytes(pid: int, root: pathlib.Path = pathlib.Path("/")) -> tuple[int | None, int | None, int | None]:
    """Return the resident, the proportional and the highest resident memory in bytes. None: the system does not report
    it.

    Args:
        pid: the process.
        root: root of the file system, for tests.
    """
    status = _kibibytes(root / f"proc/{pid}/status")
    return status.get("VmRSS"), _kibibytes(root / f"proc/{pid}/smaps_rollup").get("Pss"), status.get("VmHWM")


def _kibibytes(path: pathlib.Path) -> dict[str, int]:
    """Read lines such as "VmRSS:   1234 kB", and return bytes by name. Return {} if the file does not exist."""
    try:
        lines = path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return {}
    named = (line.partition(":") for line in lines if line.endswith(" kB"))
    return {name: int(value.split()[0]) * 1024 for name, _colon, value in named}
