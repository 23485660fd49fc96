"""Tests a router with two processes, as users start it, before a fake endpoint that computes nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import ssl
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
import trustme

from trioserve.bench.router.fake_endpoint import FakeEndpoints, FakeEndpointSettings

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux spreads connections over processes"),
]

WAIT_SECONDS_MAX = 60
TWO = ("--router-processes", "2")
CONNECTIONS = 32  # The probability that one process gets all of these streams is 2**-31.


def ask(method: str, url: str, body: object = None, **headers: str) -> dict:
    """Send one request over its own connection, so that either process may get it."""
    data = None if body is None else json.dumps(body).encode()
    named = {"content-type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    request = urllib.request.Request(url, data, named, method=method)
    try:
        with urllib.request.urlopen(request, timeout=WAIT_SECONDS_MAX) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        return json.load(error)


def wait_until(condition: Callable[[], bool]) -> None:
    """Poll until the condition holds, because another process has no event to wait for."""
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.05)


class Stream(threading.Thread):
    """Sends one streamed request and reads the response in a thread.

    Attributes:
        text: bytes received so far.
        has_begun: set once the first line arrived or the request failed.
    """

    def __init__(self, url: str, id: str, max_tokens: int) -> None:
        super().__init__(daemon=True)
        body = {"model": "fake", "prompt": "x", "max_tokens": max_tokens, "stream": True}
        self.request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"x-request-id": id}, method="POST"
        )
        self.id = id
        self.text = b""
        self.has_begun = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            with urllib.request.urlopen(self.request, timeout=WAIT_SECONDS_MAX) as response:
                for line in response:
                    self.text += line
                    self.has_begun.set()
        except (OSError, ValueError):  # The stream broke. Tests check the text that was received so far.
            pass
        self.has_begun.set()

    @property
    def is_whole(self) -> bool:
        return b"[DONE]" in self.text


@pytest.fixture
def endpoint():
    """Give the URL of a fake endpoint."""
    fake = FakeEndpoints(FakeEndpointSettings(event_seconds=0.05))
    ours, its = socket.socketpair()
    thread = threading.Thread(target=fake.serve, args=(its,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{fake.ports[0]}"
    ours.close()
    thread.join(WAIT_SECONDS_MAX)
    fake.close()
    its.close()


@pytest.fixture
def router(start_server, endpoint):
    started = start_server(f"--endpoint=a={endpoint}", *TWO, command="route")
    wait_until(lambda: by_process(started.url, "trioserve_router:endpoint_healthy") == {"1": 1.0, "2": 1.0})
    return started


def pids_of(router) -> list[int]:
    [told] = [line for line in router.lines if line.startswith("the router runs in 2 processes: ")]
    return [int(pid) for pid in told.rpartition(":")[2].split(",")]


def is_gone(pid: int) -> bool:
    """Return True if the process has ended, even if it is still a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in ("Z", "X")


def by_process(url: str, name: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=WAIT_SECONDS_MAX) as response:
        page = response.read().decode()
    assert page.count(f"# TYPE {name} ") == 1
    return {
        process: float(value)
        for process, value in re.findall(rf'^{name}{{process="(\d)"[^}}]*}} (\S+)$', page, re.MULTILINE)
    }


def start_streams(router, max_tokens: int) -> list[Stream]:
    """Start streams and check that each of the two processes has some of them."""
    streams = [Stream(router.url, f"stream-{index}", max_tokens) for index in range(CONNECTIONS)]
    for stream in streams:
        assert stream.has_begun.wait(WAIT_SECONDS_MAX)
    admitted = by_process(router.url, "trioserve_router:admissions_total")
    assert sum(admitted.values()) == CONNECTIONS
    assert all(admitted.values()), "one process has all of them"
    return streams


def test_both_processes_serve_at_one_port_and_sigterm_drains_both(router):
    assert {each["id"] for each in ask("GET", f"{router.url}/endpoints")["data"]} == {"a"}
    pids = pids_of(router)
    streams = start_streams(router, 100)
    assert router.stop() == 0
    for stream in streams:
        stream.join(WAIT_SECONDS_MAX)
        assert stream.is_whole, stream.text[-300:]
    assert all(map(is_gone, pids))


def test_lists_and_aborts_cover_the_requests_of_both_router_processes(router):
    streams = start_streams(router, 10_000)
    listed = {each["id"] for each in ask("GET", f"{router.url}/v1/requests")["data"]}
    assert listed == {stream.id for stream in streams}
    [described] = ask("GET", f"{router.url}/endpoints")["data"]
    assert described["leases"] == CONNECTIONS
    one_by_one, together = streams[: CONNECTIONS // 2], streams[CONNECTIONS // 2 :]
    for stream in one_by_one:
        assert ask("DELETE", f"{router.url}/v1/requests/{stream.id}")["result"] == "aborted"
    ids = [stream.id for stream in together]
    results = ask("POST", f"{router.url}/v1/requests/abort", {"ids": [*ids, "unknown"]})["data"]
    assert [each["result"] for each in results] == ["aborted"] * len(ids) + ["unknown"]
    for stream in streams:
        stream.join(WAIT_SECONDS_MAX)
        assert b"request_aborted" in stream.text
    nobody = ask("DELETE", f"{router.url}/v1/requests/unknown")
    assert nobody["error"]["code"] == "request_not_found"
    assert router.stop() == 0


def test_adding_or_draining_an_endpoint_applies_to_both_processes(router, endpoint):
    assert ask("POST", f"{router.url}/endpoints", {"url": endpoint, "id": "b"})["id"] == "b"
    for _ in range(CONNECTIONS):
        assert {each["id"] for each in ask("GET", f"{router.url}/endpoints")["data"]} == {"a", "b"}
    assert ask("DELETE", f"{router.url}/endpoints/b")["draining"]
    wait_until(
        lambda: all(
            {each["id"] for each in ask("GET", f"{router.url}/endpoints")["data"]} == {"a"} for _ in range(CONNECTIONS)
        )
    )
    assert router.stop() == 0


def test_child_processes_end_when_their_parent_is_killed(router):
    pids = pids_of(router)
    assert not any(map(is_gone, pids))
    router.process.send_signal(signal.SIGKILL)
    wait_until(lambda: all(map(is_gone, pids)))


def test_death_of_one_process_is_logged_and_the_other_one_drains(router):
    streams = start_streams(router, 200)
    first, second = pids_of(router)
    os.kill(first, signal.SIGKILL)
    assert router.process.wait(WAIT_SECONDS_MAX) == 1
    assert is_gone(second)
    for stream in streams:
        stream.join(WAIT_SECONDS_MAX)
    assert 0 < sum(stream.is_whole for stream in streams) < CONNECTIONS
    router.stop()
    told = "trioserve: process 1 of this router was killed by SIGKILL; the other processes drain and end\n"
    assert told in router.lines


def test_both_processes_of_a_router_serve_tls(start_server, endpoint, tmp_path):
    authority = trustme.CA()
    certificate = tmp_path / "server.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(certificate)
    context = ssl.create_default_context()
    authority.configure_trust(context)
    router = start_server(f"--endpoint={endpoint}", f"--ssl-certfile={certificate}", *TWO, command="route")
    assert router.url.startswith("https://")
    seen = set()
    while seen != {"1", "2"}:
        with urllib.request.urlopen(f"{router.url}/ui/events", timeout=WAIT_SECONDS_MAX, context=context) as events:
            snapshot = next(json.loads(line[5:]) for line in events if line.startswith(b"data:"))
        seen.add(snapshot["server"]["process"].removesuffix(" of 2"))
    assert router.stop() == 0


def test_port_of_another_router_with_processes_is_refused(router, endpoint, start_server):
    port = router.url.rpartition(":")[2]
    with pytest.raises(AssertionError, match="in use by another program"):
        start_server(f"--port={port}", f"--endpoint={endpoint}", *TWO, command="route")
    assert router.stop() == 0
