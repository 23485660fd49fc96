"""Tests HTTP/2 with clients that do not use h2: nghttp and h2load, of nghttp2.

The server runs on the library h2. A test client that also uses h2 could not find a mistake of h2. On Debian and Ubuntu,
the package nghttp2-client provides both programs.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import ssl
import subprocess
import urllib.parse
import urllib.request
from pathlib import Path

import h2.connection
import h2.events
import pytest
import trustme

SECONDS_MAX = 120  # seconds in which even a slow client on a busy machine must end

pytestmark = pytest.mark.skipif(
    not (shutil.which("nghttp") and shutil.which("h2load")),
    reason="nghttp and h2load are not installed: apt-get install nghttp2-client",
)


def nghttp(*arguments: str) -> str:
    """Run nghttp and fail unless every request was answered.

    Returns:
        Standard output: every frame with `-v`, otherwise the bodies of the responses.
    """
    ran = subprocess.run(
        ["nghttp", *arguments], capture_output=True, text=True, timeout=SECONDS_MAX, check=False, errors="replace"
    )
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr
    assert "not processed" not in ran.stderr, ran.stderr
    return ran.stdout


def h2load(*arguments: str) -> dict[str, int]:
    """Run h2load and return the numbers of its summary: total, succeeded, failed, errored, timeout, 2xx, 5xx, ..."""
    ran = subprocess.run(["h2load", *arguments], capture_output=True, text=True, timeout=SECONDS_MAX, check=False)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr
    summary = "".join(line for line in ran.stdout.splitlines() if line.startswith(("requests:", "status codes:")))
    return {name: int(number) for number, name in re.findall(r"(\d+) (\w+)", summary)}


def texts(output: str) -> list[str]:
    """Return the text of each event in the output of nghttp."""
    lines = re.findall(r"^data: (\{.*\})$", output, re.MULTILINE)
    return [json.loads(line)["choices"][0]["text"] for line in lines]


@pytest.fixture
def body_file(tmp_path: Path):
    """Give a function that writes the JSON body of a completion with given fields, and returns the path of the file."""

    def write(**fields: object) -> str:
        path = tmp_path / f"body-{len(list(tmp_path.iterdir()))}.json"
        base = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "ignore_eos": True, "stream": True}
        path.write_text(json.dumps({**base, **fields}))
        return str(path)

    return write


def check_nothing_is_left(server) -> None:
    """Check that no connection, request or block is left, and that no connection was refused as malformed."""
    # The request for these metrics uses the one open connection. Other connections may still be closing.
    assert any(server.metric("trioserve:connections_open") == 1 for _ in range(1000))
    assert server.metric("trioserve:num_requests_running") == 0
    assert server.metric('trioserve:kv_blocks{state="used"}') == 0
    assert server.metric('trioserve:connections_refused_total{reason="malformed"}') == 0
    assert server.metric('trioserve:connections_refused_total{reason="control_frames"}') == 0
    assert server.process.poll() is None


# --- Single requests ---


def test_nghttp_gets_the_response_to_a_get_request(server):
    assert json.loads(nghttp(server.url + "/health")) == {"status": "alive"}
    check_nothing_is_left(server)


def test_streamed_events_arrive_in_separate_data_frames(server, body_file):
    """Scenario S25 of tests/README.md: the id is in the head, which comes before the first token."""
    output = nghttp("-v", "-d", body_file(), server.url + "/v1/completions")
    lengths = [int(n) for n in re.findall(r"recv DATA frame <length=(\d+),", output)]
    assert len(lengths) >= 8  # The end of the stream may be in the same frame as the last token.
    assert "END_STREAM" in output.rpartition("recv DATA")[2]
    assert output.count("recv HEADERS") == 1
    assert output.index("x-request-id: ") < output.index("recv DATA")
    assert len(texts(output)) == 8
    assert "data: [DONE]" in output
    check_nothing_is_left(server)


@pytest.mark.parametrize(
    "manner",
    [
        ["--continuation"],
        ["--padding=200"],
        ["--window-bits=5"],
        ["--connection-window-bits=16", "--window-bits=8"],
        ["--header-table-size=0"],
        ["--header-table-size=1000000", "--encoder-header-table-size=0"],
        ["--trailer=x-checksum: 1"],
        ["--expect-continue"],
        ["--no-content-length"],
        ["--no-dep"],
        ["--weight=1"],
        ["--no-rfc7540-pri"],
        ["--peer-max-concurrent-streams=1", "--multiply=3"],
        ["--multiply=16"],
    ],
    ids=" ".join,
)
def test_response_is_the_same_with_each_http2_option(server, body_file, manner):
    path = body_file(max_tokens=4)
    plain = nghttp("-d", path, server.url + "/v1/completions")
    output = nghttp(*manner, "-d", path, server.url + "/v1/completions")
    times = next((int(flag.partition("=")[2]) for flag in manner if flag.startswith("--multiply")), 1)
    assert sorted(texts(output)) == sorted(texts(plain) * times)
    assert output.count("data: [DONE]") == times
    check_nothing_is_left(server)


def test_upgrade_to_h2c_is_ignored_and_answered_over_http_1(server):
    """RFC 9113 removed the upgrade to h2c. A client that offers the upgrade gets its response over HTTP/1.1."""
    ran = subprocess.run(
        ["nghttp", "-u", server.url + "/health"], capture_output=True, text=True, timeout=SECONDS_MAX, check=False
    )
    assert "HTTP Upgrade failed" in ran.stdout + ran.stderr
    check_nothing_is_left(server)


# --- Load ---


@pytest.mark.parametrize("shape", [["-c1", "-m100"], ["-c16", "-m1"], ["-c8", "-m32"], ["-c8", "--h1"]], ids=" ".join)
def test_every_request_of_a_load_of_small_requests_is_answered(server, shape):
    numbers = h2load("-n1000", *shape, server.url + "/version")
    assert (numbers["succeeded"], numbers["2xx"], numbers["failed"]) == (1000, 1000, 0)
    check_nothing_is_left(server)


@pytest.mark.parametrize("shape", [["-c1", "-m32"], ["-c8", "-m4"], ["-c2", "-m16", "-w6"]], ids=" ".join)
def test_every_stream_of_a_load_of_streams_is_answered(server, body_file, shape):
    path = body_file(max_tokens=4)
    numbers = h2load("-n64", *shape, "-d", path, server.url + "/v1/completions")
    assert (numbers["succeeded"], numbers["2xx"], numbers["failed"]) == (64, 64, 0)
    check_nothing_is_left(server)


def test_streams_beyond_the_limit_are_refused_and_the_others_answered(server):
    """h2load opens all streams before it has read the limit of the server."""
    series = 'trioserve:streams_refused_total{reason="streams_max"}'
    before = server.metric(series)
    numbers = h2load("-n600", "-c1", "-m600", server.url + "/health")
    refused = server.metric(series) - before
    assert refused <= 600 - 256
    assert (numbers["succeeded"], numbers["failed"]) == (600 - refused, refused)
    check_nothing_is_left(server)


# --- Disconnects and drain ---


def wait_until_running(server, count: int) -> None:
    for _ in range(5000):
        if server.metric("trioserve:num_requests_running") == count:
            return
    raise AssertionError(f"{server.metric('trioserve:num_requests_running')} run, not {count}")


def test_killed_http2_client_ends_its_requests(server, body_file):
    """Scenario S11 of tests/README.md: a killed client ends its requests."""
    path = body_file(max_tokens=4000)
    client = subprocess.Popen(
        ["nghttp", "-n", "-m4", "-d", path, server.url + "/v1/completions"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until_running(server, 4)
    finally:
        client.kill()
        client.wait()
    wait_until_running(server, 0)
    check_nothing_is_left(server)


@pytest.mark.slow
def test_drain_completes_streams_and_then_sends_goaway(start_server, body_file):
    """Scenario S21 of tests/README.md: nghttp closes after its last response. A client that stays connected gets
    GOAWAY.
    """
    server = start_server()
    path = body_file(max_tokens=400)
    client = subprocess.Popen(
        ["nghttp", "-v", "-d", path, server.url + "/v1/completions"],
        stdout=subprocess.PIPE,
        text=True,
    )
    with StayingClient(server.url) as staying:
        staying.post("/v1/completions", Path(path).read_bytes())
        wait_until_running(server, 2)
        server.process.send_signal(signal.SIGTERM)
        events = staying.events_until_closed()
    output, _ = client.communicate(timeout=SECONDS_MAX)
    assert client.returncode == 0
    assert len(texts(output)) > 30
    assert "[DONE]" in output
    assert "recv GOAWAY" not in output.partition("[DONE]")[0]
    ended = next(index for index, event in enumerate(events) if isinstance(event, h2.events.StreamEnded))
    assert b"[DONE]" in b"".join(event.data for event in events[:ended] if isinstance(event, h2.events.DataReceived))
    goaways = [(i, event) for i, event in enumerate(events) if isinstance(event, h2.events.ConnectionTerminated)]
    assert [(i > ended, event.error_code, event.last_stream_id) for i, event in goaways] == [(True, 0, 1)]
    assert server.process.wait(SECONDS_MAX) == 0


class StayingClient:
    """An HTTP/2 connection that the client keeps open until the server closes it."""

    def __init__(self, url: str) -> None:
        address = urllib.parse.urlsplit(url)
        assert address.hostname is not None
        self._socket = socket.create_connection((address.hostname, address.port), timeout=SECONDS_MAX)
        self._protocol = h2.connection.H2Connection()
        self._protocol.initiate_connection()

    def __enter__(self) -> StayingClient:
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()

    def post(self, path: str, body: bytes) -> None:
        head = [(":method", "POST"), (":scheme", "http"), (":authority", "127.0.0.1"), (":path", path)]
        self._protocol.send_headers(1, [*head, ("content-type", "application/json")])
        self._protocol.send_data(1, body, end_stream=True)
        self._socket.sendall(self._protocol.data_to_send())

    def events_until_closed(self) -> list[h2.events.Event]:
        events: list[h2.events.Event] = []
        while received := self._socket.recv(65536):
            events += (came := self._protocol.receive_data(received))
            for event in came:
                if isinstance(event, h2.events.DataReceived) and event.flow_controlled_length:
                    self._protocol.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            if not any(isinstance(event, h2.events.ConnectionTerminated) for event in events):
                self._socket.sendall(self._protocol.data_to_send())
        return events


# --- TLS, and pages in browsers ---


@pytest.mark.slow
def test_tls_negotiates_http2_and_requires_a_client_certificate(start_server, body_file, tmp_path):
    authority = trustme.CA()
    server_files, client_files = (
        authority.issue_cert("127.0.0.1"),
        authority.issue_cert("client@example.org"),
    )
    for name, issued in (("server", server_files), ("client", client_files)):
        issued.cert_chain_pems[0].write_to_path(tmp_path / f"{name}.pem")
        issued.private_key_pem.write_to_path(tmp_path / f"{name}.key")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    server = start_server(
        *("--ssl-certfile", str(tmp_path / "server.pem"), "--ssl-keyfile", str(tmp_path / "server.key")),
        *("--ssl-ca-certs", str(tmp_path / "ca.pem"), "--ssl-client-certs", "required"),
        *("--cors-origin", "https://chat.example.org"),
    )
    assert server.url.startswith("https://")
    shows = ["-y", "--cert", str(tmp_path / "client.pem"), "--key", str(tmp_path / "client.key")]
    url = server.url + "/v1/completions"
    output = nghttp("-v", *shows, "-H", "origin: https://chat.example.org", "-d", body_file(), url)
    assert "The negotiated protocol: h2" in output
    assert "access-control-allow-origin: https://chat.example.org" in output
    assert len(texts(output)) == 8
    ran = subprocess.run(
        ["nghttp", "-y", server.url + "/health"], capture_output=True, text=True, timeout=SECONDS_MAX, check=False
    )
    assert "alive" not in ran.stdout
    context = ssl.create_default_context(cafile=tmp_path / "ca.pem")
    context.load_cert_chain(tmp_path / "client.pem", tmp_path / "client.key")
    with urllib.request.urlopen(server.url + "/health", context=context, timeout=SECONDS_MAX) as response:
        assert json.loads(response.read()) == {"status": "alive"}  # urllib supports only HTTP/1.1.
    preflight = {"origin": "https://chat.example.org", "access-control-request-method": "POST"}
    asked = urllib.request.Request(url, method="OPTIONS", headers=preflight)
    with urllib.request.urlopen(asked, context=context, timeout=SECONDS_MAX) as response:
        assert response.status == 204
    with urllib.request.urlopen(server.url + "/metrics", context=context, timeout=SECONDS_MAX) as response:
        assert re.search(
            rb'trioserve:http_requests_total\{.*path="/v1/completions",status="204"\} 1\.0', response.read()
        )
    assert server.stop() == 0
