"""Tests how a server starts, refuses to start, drains and ends by a signal, as users see it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest

RESPONSE_SECONDS_MAX = 120


def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trioserve", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=RESPONSE_SECONDS_MAX,
        check=False,
    )


def check_refusal(result: subprocess.CompletedProcess[str], *words: str) -> None:
    """Check that a program failed with one sentence and no traceback.

    Args:
        result: the program, after its end. Lines of progress and warnings may come before the sentence.
        words: words that the sentence must contain.
    """
    assert result.returncode != 0
    assert "Traceback" not in result.stderr
    *before, sentence = result.stderr.strip().splitlines()
    assert all(line.startswith("loading ") or " WARNING trioserve." in line for line in before), result.stderr
    assert sentence.startswith("trioserve: ")
    for word in words:
        assert word in sentence


@pytest.mark.slow
def test_server_with_native_kernels_loads_no_torch_and_logs_its_start_seconds(server):
    if not any("native kernels" in line for line in server.lines):
        pytest.skip("no native kernels here")
    assert server.metric("trioserve:step_weight_bytes") > 0
    maps = Path(f"/proc/{server.process.pid}/maps").read_text()
    assert "libtorch" not in maps
    assert re.search(r"\(ready after \d+\.\d s; Ctrl-C stops\)", "".join(server.lines))


@pytest.mark.slow
def test_wrong_model_path_is_refused_with_one_sentence():
    check_refusal(run("--model", "/nowhere/at-all", "--port", "0"), "/nowhere/at-all", "not found")


@pytest.mark.slow
def test_directory_without_weights_is_refused_with_one_sentence(tmp_path: Path):
    check_refusal(run("--model", str(tmp_path), "--port", "0"), str(tmp_path), "no weights")


@pytest.mark.slow
def test_truncated_model_file_is_refused_with_one_sentence(tmp_path: Path):
    from trioserve.model.loading.default_model import find_default_model

    whole = find_default_model("smollm2")
    assert whole is not None
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(whole.read_bytes()[:50_000_000])
    check_refusal(run("--model", str(damaged), "--port", "0"), "damaged.gguf")


@pytest.mark.slow
def test_corrupt_model_file_is_refused_with_one_sentence(tmp_path: Path):
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF" + bytes(range(256)) * 100)
    check_refusal(run("generate", "--model", str(damaged), "hello"), "damaged.gguf")


@pytest.mark.slow
def test_unknown_architecture_is_refused_with_one_sentence(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "xlnet", "architectures": ["XLNetLMHeadModel"]}))
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    check_refusal(run("--model", str(tmp_path), "--port", "0"), "XLNet", "Llama")


@pytest.mark.slow
def test_port_in_use_is_refused_with_one_sentence_before_the_model_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run("--port", str(port))
    check_refusal(result, str(port), "in use")
    assert "loading" not in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--max-num-seqs", "0"], ["--max-num-seqs", "'0'"]),
        (["--port", "http"], ["--port", "'http'"]),
        (["--max-num-batched-tokens", "8"], ["--max-num-batched-tokens", "--max-num-seqs"]),
        (["--max-model-len", "100000"], ["--max-model-len", "8192"]),
        (["--kv-cache-memory", "0.01", "--max-model-len", "8192"], ["KV cache", "8192"]),
        (["--kv-cache-memory", "-1"], ["--kv-cache-memory", "'-1'"]),
        (["--kv-cache-memory", "100000"], ["KV cache", "are free"]),
        (["--ssl-certfile", "/nowhere.pem"], ["/nowhere.pem"]),
        (["--ssl-keyfile", "/nowhere.pem"], ["--ssl-certfile"]),
        (["--ssl-ca-certs", "/nowhere.pem"], ["--ssl-certfile"]),
        (["--ssl-client-certs", "required"], ["--ssl-certfile"]),
        (["--cors-origin", "chat.example.org"], ["CORS origin", "https://"]),
        (["--max-connections", "0"], ["--max-connections", "'0'"]),
        (["--stall-timeout", "0"], ["--stall-timeout", "'0'"]),
        (["--api-key", "k\u00e9y"], ["API key"]),
        (["--config", "/nowhere.toml"], ["/nowhere.toml"]),
    ],
)
def test_bad_option_is_refused_with_one_sentence(flags, words):
    check_refusal(run("--port", "0", *flags), *words)


@pytest.mark.slow
def test_generate_command_answers_one_prompt():
    result = run("generate", "--temperature", "0", "--max-tokens", "16", "What is 2 + 2?")
    assert result.returncode == 0
    assert "4" in result.stdout


@pytest.mark.slow
def test_generate_command_reads_a_raw_prompt_from_standard_input():
    result = run("generate", "--raw", "--temperature", "0", "--max-tokens", "8", "-", stdin="1, 2, 3, 4,")
    assert result.returncode == 0
    assert "5" in result.stdout


@pytest.mark.slow
def test_chat_command_keeps_earlier_turns():
    said = "The password is swordfish.\nRepeat the password.\n/new\nHi\n"
    result = run("chat", "--temperature", "0", "--max-tokens", "20", stdin=said)
    assert result.returncode == 0
    assert "swordfish" in result.stdout.splitlines()[1]


def stream(url: str, max_tokens: int) -> list[bytes]:
    """Send a streamed completion and return the lines of its events."""
    body = json.dumps({"prompt": "Once", "max_tokens": max_tokens, "stream": True, "ignore_eos": True}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", data=body, headers={"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=RESPONSE_SECONDS_MAX) as response:
        return [line for line in response if line.strip()]


class Client(threading.Thread):
    """Reads one stream in the background."""

    def __init__(self, url: str, max_tokens: int) -> None:
        super().__init__(daemon=True)
        self.url = url
        self.max_tokens = max_tokens
        self.events: list[bytes] = []
        self.error: OSError | None = None
        self.start()

    def run(self) -> None:
        try:
            self.events = stream(self.url, self.max_tokens)
        except OSError as error:
            self.error = error


def wait_until_running(server, count: int) -> None:
    for _ in range(2000):
        if server.metric("trioserve:num_requests_running") == count:
            return
    raise AssertionError("no request runs")


ASKS_AND_READS_THE_HEAD = """
import json, sys, urllib.request
body = {"prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "stream": sys.argv[2] == "streamed"}
answer = urllib.request.urlopen(sys.argv[1] + "/v1/completions", data=json.dumps(body).encode())
sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["streamed", "whole"])
def test_killed_client_ends_its_request_and_frees_its_blocks(server, how):
    """Scenarios S11 and S28 of tests/README.md: SIGKILL kills a client over HTTP/1.1 while the client reads nothing."""
    used_before = server.metric('trioserve:kv_blocks{state="used"}')
    with subprocess.Popen(
        [sys.executable, "-c", ASKS_AND_READS_THE_HEAD, server.url, how], stdin=subprocess.PIPE
    ) as client:
        try:
            wait_until_running(server, 1)
            assert server.metric('trioserve:kv_blocks{state="used"}') > used_before
        finally:
            client.kill()
    wait_until_running(server, 0)
    assert server.metric('trioserve:kv_blocks{state="used"}') == used_before


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_drains_until_running_requests_finish(start_server, number):
    """Scenario S21 of tests/README.md: after a signal to end, running streams still complete."""
    server = start_server()
    client = Client(server.url, max_tokens=400)
    wait_until_running(server, 1)
    assert server.stop(number) == 0
    client.join(RESPONSE_SECONDS_MAX)
    assert client.error is None
    assert client.events[-1].strip() == b"data: [DONE]"
    assert len(client.events) > 30


@pytest.mark.slow
def test_drain_deadline_ends_a_request_with_an_error_event(start_server):
    """Scenario S21 of tests/README.md: a stream that is too long for the drain ends with an error event."""
    server = start_server("--drain-timeout", "0.2")
    client = Client(server.url, max_tokens=5000)
    wait_until_running(server, 1)
    assert server.stop() == 0
    client.join(RESPONSE_SECONDS_MAX)
    last = json.loads(client.events[-1].removeprefix(b"data: "))
    assert "shutting down" in last["error"]["message"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_while_loading_ends_at_once_with_exit_code_128_plus_signal(number):
    process = subprocess.Popen([sys.executable, "-m", "trioserve", "--port", "0"], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    with process.stderr:
        assert "loading" in process.stderr.readline()
        process.send_signal(number)
        rest = process.stderr.read()
    assert process.wait(RESPONSE_SECONDS_MAX) == 128 + number
    assert "Traceback" not in rest
    assert "serving" not in rest


def closed_stderr() -> tuple[str, int | None]:
    return "exec 0<&- 1>&- 2>&-; ", None


def full_disk() -> tuple[str, int | None]:
    return "", os.open("/dev/full", os.O_WRONLY)


def pipe_without_reader() -> tuple[str, int | None]:
    reader, writer = os.pipe()
    os.close(reader)
    return "", writer


def full_pipe() -> tuple[str, int | None]:
    _reader, writer = os.pipe()  # The read end of the pipe stays open, but no process reads from it.
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)
    return "", writer


@pytest.mark.slow
@pytest.mark.parametrize("log", [closed_stderr, full_disk, pipe_without_reader, full_pipe])
def test_server_without_a_usable_stderr_serves_and_stops_with_0(log, tmp_path: Path):
    redirection, stderr = log()
    socket_path = tmp_path / "server.sock"
    command = f"{redirection}exec {sys.executable} -m trioserve scripted --uds {socket_path}"
    with subprocess.Popen(["bash", "-c", command], stderr=stderr, stdout=stderr, stdin=subprocess.DEVNULL) as process:
        try:
            for _ in range(3000):
                with socket.socket(socket.AF_UNIX) as client:
                    try:
                        client.connect(str(socket_path))
                    except OSError:
                        assert process.poll() is None, "the server ended while it started"
                        threading.Event().wait(0.02)
                        continue
                    client.sendall(b"GET /ready HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
                    if client.recv(4096).startswith(b"HTTP/1.1 200"):
                        break
            else:
                raise AssertionError("the server never became ready")
            process.send_signal(signal.SIGTERM)
            assert process.wait(RESPONSE_SECONDS_MAX) == 0
        finally:
            process.kill()
            if stderr is not None:
                os.close(stderr)


@pytest.mark.slow
def test_low_limit_of_open_files_is_refused_with_one_sentence():
    limited = ["bash", "-c", 'ulimit -n 12; exec "$@"', "bash", sys.executable, "-m", "trioserve", "--port", "0"]
    result = subprocess.run(limited, capture_output=True, text=True, timeout=RESPONSE_SECONDS_MAX, check=False)
    check_refusal(result, "too many open files", "12", "ulimit -n")


@pytest.mark.slow
def test_hypercorn_serves_the_same_api(start_server):
    server = start_server("--frontend", "hypercorn")
    assert stream(server.url, max_tokens=3)[-1].strip() == b"data: [DONE]"
    assert any("hypercorn" in line.lower() for line in server.lines)
    assert server.stop() == 0


@pytest.mark.slow
@pytest.mark.parametrize("frontend", ["native", "hypercorn"])
def test_client_that_stopped_reading_does_not_delay_the_shutdown(start_server, frontend):
    """Scenario S50 of tests/README.md: a client that reads nothing cannot block the shutdown."""
    server = start_server("--frontend", frontend, "--drain-timeout", "0.5")
    host, port = server.url.removeprefix("http://").split(":")
    # Each step sends about 20 KB, so the socket buffers of a client that does not read fill up after a few steps.
    wide = {"prompt": "Once", "max_tokens": 4000, "n": 8, "logprobs": 20, "stream": True, "ignore_eos": True}
    body = json.dumps(wide).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    with socket.socket() as stalled:
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.connect((host, int(port)))
        stalled.sendall(head + body)
        wait_until_running(server, 8)
        tokens_before = server.metric("trioserve:generation_tokens_total")
        while server.metric("trioserve:generation_tokens_total") < tokens_before + 8 * 40:
            pass
        assert server.stop() == 0


@pytest.mark.slow
def test_output_into_a_closed_pipe_prints_no_traceback():
    with subprocess.Popen(
        [sys.executable, "-m", "trioserve", "generate", "--max-tokens", "30", "hi"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
    assert process.returncode != 0
