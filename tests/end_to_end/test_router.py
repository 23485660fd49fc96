"""Tests a router before two servers, as separate processes. One test kills a server under load."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable

import pytest

WAIT_SECONDS_MAX = 120


def get(url: str) -> object:
    with urllib.request.urlopen(url, timeout=30) as response:
        return json.load(response)


def wait_until(condition: Callable[[], bool]) -> None:
    """Poll until the condition holds, because another process has no event to wait for."""
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.05)


class Asker(threading.Thread):
    """Sends one streamed request and reads the response in a thread.

    Attributes:
        endpoint: id of the endpoint that responded first, or "" before the response head.
        events: decoded events so far.
        is_done: True once the response is complete.
        error: exception that ended the response, or None.
    """

    def __init__(self, url: str, prompt: str, max_tokens: int) -> None:
        super().__init__(daemon=True)
        body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True, "temperature": 0}
        self.request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), method="POST")
        self.endpoint = ""
        self.events: list[dict[str, object]] = []
        self.is_done = False
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            with urllib.request.urlopen(self.request, timeout=WAIT_SECONDS_MAX) as response:
                self.endpoint = response.headers["x-trioserve-endpoint"]
                for line in response:
                    if line.strip() == b"data: [DONE]":
                        self.is_done = True
                    elif line.startswith(b"data: "):
                        self.events.append(json.loads(line[6:]))
        except (urllib.error.URLError, OSError) as error:
            self.error = error


@pytest.fixture
def fleet(start_server):
    """Give two servers, by endpoint id, and the router before them."""
    servers = {id: start_server("--max-num-seqs", "2", "--threads", "1") for id in "ab"}
    endpoints = [f"--endpoint={id}={server.url}" for id, server in servers.items()]
    router = start_server(
        *endpoints, "--endpoint-max-requests=2", "--health-interval=0.5", "--load-interval=0.2", command="route"
    )
    wait_until(lambda: all(each["health"] == "healthy" for each in get(f"{router.url}/endpoints")["data"]))
    return servers, router


@pytest.mark.slow
def test_kill_of_one_server_loses_no_stream(fleet):
    servers, router = fleet
    askers = [Asker(router.url, f"Story number {index}:", 200) for index in range(8)]
    wait_until(lambda: sum(bool(asker.events) for asker in askers) >= 4)
    begun = [asker for asker in askers if asker.events]
    assert {asker.endpoint for asker in begun} == {"a", "b"}
    servers["a"].process.send_signal(signal.SIGKILL)
    for asker in askers:
        asker.join(WAIT_SECONDS_MAX)
        assert not asker.is_alive(), "a client hangs"
    for asker in askers:
        assert asker.is_done, (asker.endpoint, asker.error, asker.events[-1:])
        assert not any("error" in event for event in asker.events)
    described = {each["id"]: each for each in get(f"{router.url}/endpoints")["data"]}
    assert [(each["leases"], each["in_flight"]) for each in described.values()] == [(0, 0), (0, 0)]
    wait_until(lambda: get(f"{router.url}/endpoints")["data"][0]["health"] in ("ejected", "probing"))
    wait_until(lambda: servers["b"].metric('trioserve:kv_blocks{state="used"}') == 0)
    assert router.stop() == 0


@pytest.mark.slow
def test_client_that_leaves_the_router_is_aborted_in_the_engine(fleet):
    servers, router = fleet
    body = {"prompt": "Count:", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(f"{router.url}/v1/completions", json.dumps(body).encode(), method="POST")
    with urllib.request.urlopen(request, timeout=WAIT_SECONDS_MAX) as response:
        server = servers[response.headers["x-trioserve-endpoint"]]
        response.readline()
        assert server.metric('trioserve:kv_blocks{state="used"}') > 0
    wait_until(lambda: server.metric('trioserve:kv_blocks{state="used"}') == 0)
    assert server.metric('trioserve:aborts_total{phase="decode"}') == 1
    assert router.stop() == 0


@pytest.fixture
def kv_aware_fleet(start_server):
    """Give two servers that publish events of their prefix caches, and a router that subscribes to the events."""
    servers = {id: start_server("--max-num-seqs", "2", "--threads", "1", "--kv-events") for id in "ab"}
    endpoints = [f"--endpoint={id}={server.url}" for id, server in servers.items()]
    router = start_server(*endpoints, "--policy", "kv_aware", "--tokenizer", "smollm2", command="route")

    def is_known(endpoint: dict) -> bool:
        return bool(endpoint["models"]) and endpoint["resident_blocks"] is not None

    wait_until(lambda: all(map(is_known, get(f"{router.url}/endpoints")["data"])))
    return servers, router


@pytest.mark.slow
def test_chat_goes_to_the_server_that_has_its_prefix_cached(kv_aware_fleet):
    servers, router = kv_aware_fleet
    story = "The keeper of the lighthouse at the end of the world writes down each ship that passes, and its colours. "

    def ask(question: str, query: str = "") -> str:
        messages = [{"role": "system", "content": story * 8}, {"role": "user", "content": question}]
        body = json.dumps({"messages": messages, "max_tokens": 1}).encode()
        request = urllib.request.Request(f"{router.url}/v1/chat/completions{query}", body, method="POST")
        with urllib.request.urlopen(request, timeout=WAIT_SECONDS_MAX) as response:
            return response.headers["x-trioserve-endpoint"]

    def resident() -> dict[str, int]:
        return {each["id"]: each["resident_blocks"] for each in get(f"{router.url}/endpoints")["data"]}

    assert ask("Which ships passed?", "?id=b") == "b"
    wait_until(lambda: resident()["b"] > 8)
    assert resident()["a"] == 0
    assert [ask(f"Which ships passed on day {day}?") for day in range(4)] == ["b"] * 4
    assert servers["b"].metric("trioserve:prefix_cache_hits_total") > 4 * 8 * 16
    assert router.stop() == 0
    assert [server.stop() for server in servers.values()] == [0, 0]


@pytest.mark.slow
def test_server_with_other_endpoints_routes_by_the_prefix_cache_of_its_own_engine(start_server):
    flags = ("--max-num-seqs", "2", "--threads", "1", "--kv-events")
    other = start_server(*flags)
    server = start_server(*flags, f"--endpoint=b={other.url}", "--policy", "kv_aware")

    def resident() -> dict[str, int | None]:
        return {each["id"]: each["resident_blocks"] for each in get(f"{server.url}/endpoints")["data"]}

    def ask(query: str = "") -> str:
        body = json.dumps({"prompt": "The lighthouse at the end of the world. " * 16, "max_tokens": 1}).encode()
        request = urllib.request.Request(f"{server.url}/v1/completions{query}", body, method="POST")
        with urllib.request.urlopen(request, timeout=WAIT_SECONDS_MAX) as response:
            return response.headers["x-trioserve-endpoint"]

    wait_until(lambda: resident() == {"b": 0, "local": 0})
    assert ask("?id=local") == "local"
    wait_until(lambda: (resident()["local"] or 0) > 4)
    assert [ask() for _ in range(3)] == ["local"] * 3
    assert [server.stop(), other.stop()] == [0, 0]


@pytest.mark.slow
def test_router_imports_no_torch_numpy_gguf_or_jinja2():
    code = (
        "import sys, trioserve.commands.route; sys.exit(bool({'torch', 'numpy', 'gguf', 'jinja2'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture
def mixed(start_server):
    """Give a server that routes to its own engine and to another server."""
    other = start_server("--max-num-seqs", "2", "--threads", "1")
    server = start_server(
        "--max-num-seqs=2",
        "--threads=1",
        f"--endpoint=other={other.url}",
        "--endpoint-max-requests=2",
        "--endpoint-max-waiting=0",
        "--health-interval=0.5",
    )
    wait_until(lambda: all(each["health"] == "healthy" for each in get(f"{server.url}/endpoints")["data"]))
    return server


@pytest.mark.slow
def test_local_engine_and_another_server_share_the_load(mixed):
    assert {each["id"] for each in get(f"{mixed.url}/endpoints")["data"]} == {"local", "other"}
    askers = [Asker(mixed.url, f"Story number {index}:", 40) for index in range(4)]
    for asker in askers:
        asker.join(WAIT_SECONDS_MAX)
        assert asker.is_done, (asker.error, asker.events[-1:])
    assert {asker.endpoint for asker in askers} == {"local", "other"}
    with urllib.request.urlopen(f"{mixed.url}/metrics", timeout=30) as response:
        text = response.read().decode()
    assert text.count("# TYPE trioserve:generation_tokens_total counter") == 1
    assert text.count("# TYPE trioserve_router:admissions_total counter") == 1
    assert text.count("# TYPE process_resident_memory_bytes gauge") == 1


@pytest.mark.slow
def test_client_that_leaves_frees_the_blocks_of_the_local_engine(mixed):
    body = {"prompt": "Count:", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(f"{mixed.url}/v1/completions?id=local", json.dumps(body).encode(), method="POST")
    with urllib.request.urlopen(request, timeout=WAIT_SECONDS_MAX) as response:
        assert response.headers["x-trioserve-endpoint"] == "local"
        response.readline()
        assert mixed.metric('trioserve:kv_blocks{state="used"}') > 0
    wait_until(lambda: mixed.metric('trioserve:kv_blocks{state="used"}') == 0)
    assert mixed.metric('trioserve:aborts_total{phase="decode"}') == 1
    assert mixed.stop() == 0
