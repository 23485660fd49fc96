"""Starts servers as users do: as separate processes, with the real model, on real sockets."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator

import pytest

START_SECONDS_MAX = 120  # The limit is long, because other work may use the machine, and its disk cache may be cold.


class ServerProcess:
    """A process that runs `python -m trioserve`.

    Args:
        flags: command-line flags after the command.
        command: "serve" or "route".

    Attributes:
        lines: lines of stderr so far.
        url: base URL of the server, or "" until the server accepts connections.
    """

    def __init__(self, *flags: str, command: str = "serve") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "trioserve", command, "--port", "0", *flags],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        self.lines: list[str] = []
        self.url = ""
        self._is_serving = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_until_serving(self) -> None:
        assert self._is_serving.wait(START_SECONDS_MAX), "".join(self.lines)
        assert self.url, "".join(self.lines)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, wait until the process ends, and return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(START_SECONDS_MAX)
        self._reader.join(10)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code

    def metric(self, series: str) -> float:
        """Return the value of one metric series.

        Args:
            series: name and labels without `model_name` and `engine`, such as `trioserve:kv_blocks{state="used"}`.
        """
        name, _brace, labels = series.partition("{")
        wanted = {*filter(None, labels.rstrip("}").split(",")), 'model_name="smollm2"'}
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as response:
            for line in response.read().decode().splitlines():
                found = re.fullmatch(r"([\w:]+)\{(.*)\} (\S+)", line)
                if found and found[1] == name and {*found[2].split(",")} - {'engine="0"'} == wanted:
                    return float(found[3])
        raise KeyError(series)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            found = re.search(r"serving .* at (http\S+)", line)
            if found and not self.url:  # Models that the server starts later report their own addresses.
                self.url = found[1]
                self._is_serving.set()
        self._is_serving.set()


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    """Share one server among all tests that leave its state unchanged."""
    process = ServerProcess("--max-num-seqs", "16")
    try:
        process.wait_until_serving()
        yield process
    finally:
        process.stop()


def _started_servers() -> Iterator[Callable[..., ServerProcess]]:
    started: list[ServerProcess] = []

    def start(*flags: str, command: str = "serve") -> ServerProcess:
        started.append(ServerProcess(*flags, command=command))
        started[-1].wait_until_serving()
        return started[-1]

    yield start
    for process in started:
        process.stop(signal.SIGKILL)


@pytest.fixture
def start_server() -> Iterator[Callable[..., ServerProcess]]:
    """Start servers for one test, which may stop them."""
    yield from _started_servers()


@pytest.fixture(scope="module")
def start_shared_server() -> Iterator[Callable[..., ServerProcess]]:
    """Start servers for all tests of a file. The tests must leave the state of the servers unchanged."""
    yield from _started_servers()
