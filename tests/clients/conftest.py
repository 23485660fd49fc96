"""Starts servers for the clients in this folder. Each server is a process that runs `python -m trioserve scripted`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest

START_SECONDS_MAX = 120
RULES = Path(__file__).parent / "rules.json"


def scripted_server(*flags: str) -> AbstractContextManager[str]:
    """Start a scripted server with these flags and give its URL."""
    return running("scripted", "--script", str(RULES), *flags)


@contextmanager
def running(*arguments: str) -> Iterator[str]:
    """Start a server and give its URL. If the server does not start, the error shows its output."""
    process = subprocess.Popen(
        [sys.executable, "-m", "trioserve", *arguments, "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    lines: list[str] = []
    urls: list[str] = []
    is_serving = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r" at (http://\S+)", line):
                urls.append(found[1])
                is_serving.set()
        is_serving.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert is_serving.wait(START_SECONDS_MAX), "".join(lines)
        assert urls, "".join(lines)
        yield urls[0]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(START_SECONDS_MAX)
        reader.join(10)
        assert process.stderr is not None
        process.stderr.close()


@pytest.fixture(scope="session")
def server_url() -> Iterator[Callable[..., str]]:
    """Return a function that starts a server with flags and returns its URL. Calls with equal flags share a server."""
    urls: dict[tuple[str, ...], str] = {}
    with ExitStack() as servers:

        def url(*flags: str) -> str:
            if flags not in urls:
                urls[flags] = servers.enter_context(scripted_server(*flags))
            return urls[flags]

        yield url


@pytest.fixture(scope="session")
def router_url(server_url: Callable[..., str]) -> Iterator[str]:
    """Start a router that sends requests to two servers in turn, and give its URL."""
    endpoints = [server_url(), server_url("--max-num-seqs", "16")]
    flags = [flag for name, url in zip("ab", endpoints, strict=True) for flag in ("--endpoint", f"{name}={url}")]
    with running("route", "--policy", "round_robin", *flags) as url:
        deadline = time.monotonic() + START_SECONDS_MAX
        while True:
            try:
                urllib.request.urlopen(f"{url}/ready", timeout=10).close()
                break
            except urllib.error.HTTPError:  # The router has not checked its endpoints yet.
                assert time.monotonic() < deadline, "no endpoint became ready"
        yield url
