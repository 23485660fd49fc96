"""Tests a server with two real models, mostly in processes of their own, and memory for one of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.conftest import ServerProcess
from trioserve.model.loading.default_model import find_default_model

PATH = "/v1/chat/completions"


@pytest.fixture(scope="module")
def hosted() -> Iterator[ServerProcess]:
    model = find_default_model("smollm2")
    server = ServerProcess(
        *("--model", f"a={model}", "--model", f"b={model},max_model_len=1024", "--models-memory", "0.9"),
        *("--kv-cache-memory", "0.25", "--max-queue-wait", "120"),
    )
    try:
        server.wait_until_serving()
        yield server
    finally:
        assert server.stop() == 0


def post(server: ServerProcess, path: str, body: object) -> object:
    # OpenAI's client sends a key even if the server needs none.
    headers = {"content-type": "application/json", "authorization": "Bearer any"}
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), headers)
    return urllib.request.urlopen(request, timeout=120)


def chat(server: ServerProcess, model: str, **fields: object) -> str:
    body = {"model": model, "messages": [{"role": "user", "content": "Count to ten."}], "temperature": 0, **fields}
    with post(server, PATH, body) as response:
        return json.load(response)["choices"][0]["message"]["content"]


def statuses(server: ServerProcess) -> dict[str, str]:
    with urllib.request.urlopen(f"{server.url}/v1/models", timeout=30) as response:
        return {each["id"]: each["status"]["value"] for each in json.load(response)["data"]}


def processes(server: ServerProcess) -> dict[str, int]:
    """Return the child processes of the server by their names. The process on standby has the interpreter's name."""
    found = {}
    for children in Path(f"/proc/{server.process.pid}/task").glob("*/children"):
        for pid in map(int, children.read_text().split()):
            with contextlib.suppress(OSError):  # The process has ended meanwhile.
                found[Path(f"/proc/{pid}/comm").read_text().strip()] = pid
    return found


def process_of(server: ServerProcess, name: str) -> int | None:
    """Return the child process of the server that serves a model, or None."""
    return processes(server).get(name)


def standby(server: ServerProcess) -> int:
    """Wait for the process on standby, and return its id."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for name, pid in processes(server).items():
            if name.startswith("python"):
                return pid
        time.sleep(0.05)
    raise AssertionError(f"no process on standby: {processes(server)}")


def test_load_uses_the_process_on_standby_unless_it_has_ended(hosted):
    for name, is_killed in (("a", False), ("b", True)):
        pid = standby(hosted)
        if is_killed:
            os.kill(pid, signal.SIGKILL)
        chat(hosted, name, max_tokens=4)
        assert (process_of(hosted, name) == pid) is not is_killed
    assert standby(hosted) != pid


def test_models_take_turns_in_the_memory(hosted):
    first = chat(hosted, "a", max_tokens=8)
    assert statuses(hosted) == {"a": "loaded", "b": "unloaded"}
    assert chat(hosted, "b", max_tokens=8) == first
    assert statuses(hosted) == {"a": "unloaded", "b": "loaded"}
    assert process_of(hosted, "a") is None


def test_models_take_turns_in_the_memory_of_one_process():
    model = find_default_model("smollm2")
    server = ServerProcess(
        *("--model", f"a={model}", "--model", f"b={model},max_model_len=1024", "--models-memory", "0.9"),
        *("--kv-cache-memory", "0.25", "--max-queue-wait", "120", "--no-model-processes"),
    )
    try:
        server.wait_until_serving()
        first = chat(server, "a", max_tokens=8)
        assert statuses(server) == {"a": "loaded", "b": "unloaded"}
        assert chat(server, "b", max_tokens=8) == first
        assert statuses(server) == {"a": "unloaded", "b": "loaded"}
        assert (process_of(server, "a"), process_of(server, "b")) == (None, None)
    finally:
        assert server.stop() == 0


def test_stream_survives_the_death_of_its_models_process(hosted):
    whole = chat(hosted, "a", max_tokens=200)
    killed = process_of(hosted, "a")
    assert killed is not None
    messages = [{"role": "user", "content": "Count to ten."}]
    body = {"model": "a", "messages": messages, "temperature": 0, "stream": True, "max_tokens": 200}
    said = ""
    with post(hosted, PATH, body) as stream:
        for line in stream:
            if line.startswith(b"data: {"):
                event, is_first = json.loads(line[6:]), not said
                assert "choices" in event, event
                said += event["choices"][0]["delta"].get("content") or ""
                if is_first and said:
                    os.kill(killed, signal.SIGKILL)
    assert said == whole
    assert process_of(hosted, "a") not in (None, killed)


def test_processes_of_models_end_with_the_server():
    server = ServerProcess("--model", f"a={find_default_model('smollm2')}", "--kv-cache-memory", "0.25")
    server.wait_until_serving()
    chat(server, "a", max_tokens=1)
    pid = process_of(server, "a")
    assert pid is not None
    server.stop(signal.SIGKILL)
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(f"/proc/{pid}").exists()
