"""Starts Ray on this machine in a separate process, and checks at the end that no process remains."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

MARK = "TRIOSERVE_RAY_MARK"  # Name of an environment variable that every process of a test has.
SECONDS_MAX = 120


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = why_skipped()
    for item in items:
        if reason is not None and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


def why_skipped() -> str | None:
    if importlib.util.find_spec("ray") is None:
        return "ray is not installed: make ray-tests"
    return None if os.environ.get("TRIOSERVE_RAY") else "starts Ray, which takes a minute: make ray-tests"


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Poll until the condition holds, because another process has no event to wait for.

    Args:
        condition: called again and again.
        what: description of the condition for the error message.
    """
    deadline = time.monotonic() + SECONDS_MAX
    while not condition():
        assert time.monotonic() < deadline, f"still waiting: {what}"


def marked_processes(mark: str, title: str = "") -> list[int]:
    """Return the ids of processes of a test.

    Args:
        mark: value of the variable MARK in the environment of the processes.
        title: part of the command line; "" matches all processes.
    """
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_marked = f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0")
            if is_marked and title.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


@contextlib.contextmanager
def ray_environment() -> Iterator[dict[str, str]]:
    """Give the environment for a process that starts Ray.

    At the end, fail if processes with this environment still run, and kill them.
    """
    # The path is short, because Ray puts sockets into this folder, and their paths must be short.
    folder = Path(tempfile.mkdtemp(prefix="ray"))
    mark = uuid.uuid4().hex
    settings = {
        MARK: mark,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TMPDIR": str(folder),
        "RAY_AUTH_TOKEN": uuid.uuid4().hex,
    }
    try:
        yield {**os.environ, **settings}
        wait_until(lambda: not marked_processes(mark), "for processes of Ray to end")
    finally:
        kill_marked(mark)
        shutil.rmtree(folder, ignore_errors=True)


def kill_marked(mark: str) -> None:
    for process_id in marked_processes(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process_id, signal.SIGKILL)


class Program:
    """A process that reads orders as lines of JSON, and responds to each order with a line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def order(self, **order: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise AssertionError("the program is over")


@contextlib.contextmanager
def ray_nodes() -> Iterator[tuple[Program, dict[str, str]]]:
    """Run two_nodes.py. Give the program, and the environment for processes that connect to its cluster."""
    with ray_environment() as environment:
        process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("two_nodes.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        try:
            program = Program(process)
            environment["RAY_ADDRESS"] = program.answer()["address"]
            yield program, environment
        finally:
            kill_marked(environment[MARK])  # Without its head node, a cluster needs a minute to end.
            process.communicate()


def node_of(process_id: int) -> int:
    """Return the process id of the raylet that started a process."""
    return int(Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[1])


class Cluster(Program):
    """A process that runs program.py, with Ray and Ray Serve.

    Attributes:
        port: port of Serve on 127.0.0.1.
    """

    def __init__(self, process: subprocess.Popen[str], port: int, mark: str) -> None:
        super().__init__(process)
        self.port = port
        self._mark = mark

    def replicas(self, name: str) -> list[int]:
        """Return the process ids of the replicas of an application."""
        return marked_processes(self._mark, f"ServeReplica:{name}:")


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with ray_environment() as environment:
        process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("program.py"), str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        try:
            yield Cluster(process, port, environment[MARK])
        finally:
            process.communicate(timeout=SECONDS_MAX)
