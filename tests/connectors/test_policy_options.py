"""Tests the options of the stream connectors. An invalid option is refused at the start with one sentence."""

from __future__ import annotations

import pytest

from trioserve.connectors.settings import StreamOptions, is_loopback, read_options
from trioserve.connectors.stream.transport import make_connector
from trioserve.contracts.errors import StartupError
from trioserve.contracts.kv_transfer import ConnectorSetup
from trioserve.testing.connector_conformance.side import MemoryPages


def make(options):
    return make_connector(
        ConnectorSetup(engine_id="e", role="both", pages=MemoryPages(2), options=options, wake=lambda: None)
    )


@pytest.mark.parametrize(
    ("options", "expect"),
    [
        ({"hots": "127.0.0.1"}, "hots"),
        ({"port": "8000"}, "port"),
        ({"port": 65_536}, "port is 65536"),
        ({"port": -1}, "port is -1"),
        ({"host": "0.0.0.0"}, "there is no key"),
        ({"host": "::"}, "there is no key"),
        ({"host": "node.example"}, "there is no key"),
        ({"key": "short"}, "key has 5 bytes"),
        ({"key": "k" * 16, "key_file": "k"}, "both given"),
        ({"key_file": "/nowhere/at/all"}, "/nowhere/at/all cannot be read"),
        ({"certfile": "c"}, "certfile and keyfile"),
        ({"ca_certs": "c"}, "certfile and keyfile"),
        ({"certfile": "/nowhere/c", "keyfile": "/nowhere/k"}, "cannot be used"),
        ({"peers": ["10.0.0.0/99"]}, "10.0.0.0/99"),
        ({"reads_max": 0}, "reads_max is 0"),
        ({"connections_max": 0}, "connections_max is 0"),
        ({"chunk_bytes": 0}, "chunk_bytes is 0"),
        ({"chunk_bytes": 10**9}, "chunk_bytes"),
    ],
)
def test_invalid_option_of_a_stream_connector_is_refused(options, expect):
    with pytest.raises(StartupError, match=expect):
        make(options)


def test_white_space_around_a_key_is_ignored(tmp_path):
    path = tmp_path / "key"
    path.write_bytes(b"  0123456789abcdef\n")
    options = read_options(StreamOptions, {"key_file": str(path), "host": "0.0.0.0"})
    assert options.read_key() == b"0123456789abcdef"
    path.write_bytes(b"\n")
    with pytest.raises(StartupError, match="has 0 bytes"):
        options.read_key()
    assert read_options(StreamOptions, {}).read_key() == b""


def test_readers_get_the_configured_or_detected_address():
    assert read_options(StreamOptions, {}).advertised == "127.0.0.1"
    options = read_options(StreamOptions, {"key": "k" * 16, "host": "0.0.0.0", "advertised_host": "node1"})
    assert options.advertised == "node1"


@pytest.mark.parametrize(
    ("host", "expect"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("10.0.0.1", False), ("x", False)],
)
def test_loopback_addresses_are_recognized(host, expect):
    assert is_loopback(host) == expect
