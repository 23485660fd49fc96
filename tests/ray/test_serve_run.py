"""Tests `serve run` with the application trioserve.ray:app, from its start to Ctrl-C."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from .conftest import SECONDS_MAX, ray_environment, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TOKENS = 4000  # The response has more tokens than can be computed before Ray Serve ends.


def serves(port: int) -> bool:
    try:
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
    except OSError:
        return False


def test_ctrl_c_breaks_streams_and_leaves_no_process(tmp_path: Path):
    """The proxy of Serve ends first and breaks all connections, so no stream gets its end or an error event.

    The client detects the broken stream, because the end of the response body is missing.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    application = {"name": "llm", "route_prefix": "/", "import_path": "trioserve.ray:app", "args": {"max_num_seqs": 8}}
    config = tmp_path / "serve.yaml"
    config.write_text(json.dumps({"http_options": {"host": "127.0.0.1", "port": port}, "applications": [application]}))
    with ray_environment() as environment:
        process = subprocess.Popen(
            [Path(sys.executable).with_name("serve"), "run", config],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        wait_until(lambda: process.poll() is not None or serves(port), "for the application")
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS_MAX)) as connection:
            body = {"prompt": "Once upon a time", "stream": True, "ignore_eos": True, "max_tokens": TOKENS}
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
            assert response.readline().startswith(b"data: ")
            process.send_signal(signal.SIGINT)
            with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
                response.read()
            response.close()
        assert process.wait(SECONDS_MAX) == 0
