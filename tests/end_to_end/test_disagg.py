"""Tests `trioserve disagg`, which starts a router, a prefill server and a decode server.

The processes and the model are real, and KV moves over a socket.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator

import pytest

START_SECONDS_MAX = 180
PROMPT = "The history of the steam engine begins in antiquity, when Hero of Alexandria described a small turbine. " * 3


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class Three:
    """Runs `trioserve disagg`.

    Attributes:
        router, prefill, decode: port of each of the three processes.
        lines: lines of stderr so far.
    """

    def __init__(self) -> None:
        self.router, self.prefill, self.decode = free_ports(3)
        command = [sys.executable, "-m", "trioserve", "disagg", "--router-args", f"--port {self.router}"]
        command += ["--prefill-port", str(self.prefill), "--decode-port", str(self.decode)]
        command += ["--server-args", "--kv-cache-memory 0.25 --dtype float32 --quantization none"]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        self.lines: list[str] = []
        self._is_ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._is_ready.wait(START_SECONDS_MAX), "".join(self.lines)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if line.startswith("all three accept requests"):
                self._is_ready.set()
        self._is_ready.set()

    def ask(self, port: int, path: str = "/v1/completions", **fields: object):
        body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, **fields} if "v1/c" in path else None
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data=data)
        with urllib.request.urlopen(request, timeout=60) as response:
            return dict(response.headers), response.read().decode()

    def metric(self, port: int, name: str) -> float:
        [value] = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", self.ask(port, "/metrics")[1], re.MULTILINE)
        return float(value)

    def process_of(self, name: str) -> int:
        [found] = [match[1] for line in self.lines if (match := re.match(rf"{name}: process (\d+): ", line))]
        return int(found)

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(60)
        self._reader.join(10)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code


@pytest.fixture
def three() -> Iterator[Three]:
    started = Three()
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.stop()


def is_free(port: int) -> bool:
    with socket.socket() as attempt:
        return attempt.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.slow
def test_pair_responds_like_one_server_and_prefill_server_takes_over_after_a_kill(three):
    headers, paired = three.ask(three.router)
    assert (headers["x-trioserve-prefill-endpoint"], headers["x-trioserve-endpoint"]) == ("prefill", "decode")
    received = three.metric(three.decode, "trioserve:kv_transfer_blocks_received_total")
    assert received > 0
    assert three.metric(three.decode, "trioserve:kv_transfer_bytes_received_total") > 0
    alone = json.loads(three.ask(three.prefill)[1])
    assert json.loads(paired)["choices"][0]["text"] == alone["choices"][0]["text"]
    streamed = three.ask(three.router, stream=True, cache_salt="anew")[1]
    texts = [json.loads(line[6:])["choices"][0]["text"] for line in streamed.splitlines() if line.startswith("data: {")]
    assert "".join(texts) == alone["choices"][0]["text"]
    assert three.metric(three.decode, "trioserve:kv_transfer_blocks_received_total") > received

    os.kill(three.process_of("decode"), signal.SIGKILL)
    headers, whole = three.ask(three.router, cache_salt="once more")
    assert headers["x-trioserve-endpoint"] == "prefill"
    assert json.loads(whole)["choices"][0]["text"] == alone["choices"][0]["text"]
    assert three.metric(three.prefill, "trioserve:num_requests_running") == 0

    assert three.stop() == 1, "a server was lost"
    assert all(is_free(port) for port in (three.router, three.prefill, three.decode))


@pytest.mark.slow
def test_sigterm_stops_the_router_first_and_frees_all_ports(three):
    assert three.stop() == 0
    ends = [line.split(":")[0] for line in three.lines if line.rstrip().endswith(": stopped")]
    assert ends[0] == "router"
    assert sorted(ends) == ["decode", "prefill", "router"]
    assert all(is_free(port) for port in (three.router, three.prefill, three.decode))


@pytest.mark.slow
def test_port_in_use_ends_all_three_processes_with_one_message():
    router, prefill, decode = free_ports(3)
    with socket.create_server(("127.0.0.1", decode)):
        command = [sys.executable, "-m", "trioserve", "disagg", "--router-args", f"--port {router}"]
        ran = subprocess.run(
            [*command, "--prefill-port", str(prefill), "--decode-port", str(decode)],
            capture_output=True,
            text=True,
            timeout=START_SECONDS_MAX,
            check=False,
        )
    assert ran.returncode == 1
    assert re.search(rf"decode: trioserve: .*{decode}", ran.stderr), ran.stderr
    assert "router:" not in ran.stderr
    assert is_free(prefill)
