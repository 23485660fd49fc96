"""Tests listening sockets: addresses, ports in use, and unusable TLS files."""

from __future__ import annotations

import socket
import sys

import pytest
import trustme

from trioserve.contracts.errors import StartupError
from trioserve.http.limits import FrontendLimits
from trioserve.http.listener import addresses, open_listeners, open_shared_listeners, tls_context


def close(listeners):
    for listener in listeners:
        listener.socket.close()


@pytest.fixture
def has_ipv6():
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6")


@pytest.mark.parametrize("host, prefix", [("127.0.0.1", "127.0.0.1:"), ("localhost", "127.0.0.1:"), (None, "0.0.0.0:")])
async def test_listener_at_an_ipv4_address_reports_this_address(host, prefix):
    listeners = await open_listeners(host, 0)
    assert any(address.startswith(prefix) for address in addresses(listeners))
    close(listeners)


@pytest.mark.parametrize("host", ["::1", "[::1]"])
async def test_listener_at_an_ipv6_address_reports_this_address_in_brackets(has_ipv6, host):
    listeners = await open_listeners(host, 0)
    assert [address.rpartition(":")[0] for address in addresses(listeners)] == ["[::1]"]
    close(listeners)


async def test_every_address_of_a_host_gets_the_same_port(has_ipv6):
    listeners = await open_listeners(None, 0)
    assert len({listener.socket.getsockname()[1] for listener in listeners}) == 1
    close(listeners)


@pytest.mark.parametrize("host", ["::", "[::]", "0::0"])
async def test_listener_at_the_ipv6_wildcard_also_accepts_ipv4(has_ipv6, host):
    listeners = await open_listeners(host, 0)
    port = listeners[0].socket.getsockname()[1]
    assert {address.rpartition(":")[0] for address in addresses(listeners)} == {"[::]", "0.0.0.0"}
    for address in ("127.0.0.1", "::1"):
        socket.create_connection((address, port), timeout=5).close()
    close(listeners)


async def test_port_in_use_is_a_startup_error():
    listeners = await open_listeners("127.0.0.1", 0)
    port = listeners[0].socket.getsockname()[1]
    with pytest.raises(StartupError, match=rf"^127\.0\.0\.1 port {port} is in use by another program: .*another port$"):
        await open_listeners("127.0.0.1", port)
    close(listeners)


@pytest.mark.parametrize(
    "host, port, said",
    [
        ("127.0.0.1", 65536, "port is 65536, allowed is 0 to 65535"),
        ("127.0.0.1", -1, "port is -1"),
        ("192.0.2.1", 0, "'192.0.2.1' is not an address of this machine"),
        ("no.such.host.invalid", 0, "'no.such.host.invalid' cannot be resolved"),
    ],
)
async def test_unusable_address_is_a_startup_error(host, port, said):
    with pytest.raises(StartupError, match=said):
        await open_listeners(host, port)


async def test_send_buffer_of_the_kernel_is_bounded():
    listeners = await open_listeners("127.0.0.1", 0, limits=FrontendLimits(socket_buffer_bytes=40_000))
    # Linux doubles the size that a program sets.
    assert listeners[0].socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) <= 2 * 40_000
    close(listeners)


@pytest.mark.parametrize(
    "name, value",
    [("streams_max", 0), ("stall_seconds_max", -1), ("head_bytes_max", 10), ("unknown_exchanges_share_max", 1.5)],
)
def test_listener_limit_out_of_range_is_a_startup_error(name, value):
    with pytest.raises(StartupError, match=f"{name} is {value}"):
        FrontendLimits(**{name: value})


def test_unusable_tls_files_are_startup_errors(tmp_path):
    one, other = trustme.CA().issue_cert("one"), trustme.CA().issue_cert("other")
    certificate, key, text = tmp_path / "certificate.pem", tmp_path / "key.pem", tmp_path / "text.pem"
    one.cert_chain_pems[0].write_to_path(certificate)
    other.private_key_pem.write_to_path(key)
    text.write_text("not a certificate")
    with pytest.raises(StartupError, match="does not exist"):
        tls_context(tmp_path / "nothing.pem")
    with pytest.raises(StartupError, match="cannot be used"):
        tls_context(text)
    with pytest.raises(StartupError, match="cannot be used"):
        tls_context(certificate, key)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="SO_REUSEPORT spreads connections on Linux alone")
def test_tls_12_offers_only_ciphers_that_http2_allows(tmp_path):
    authority = trustme.CA()
    pem = tmp_path / "server.pem"
    authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(str(pem))
    ciphers = [each for each in tls_context(pem).get_ciphers() if each["protocol"] == "TLSv1.2"]
    assert ciphers
    assert all(each["aead"] and each["name"].startswith("ECDHE-") for each in ciphers)


async def test_port_shared_by_server_processes_refuses_other_programs():
    shared = await open_shared_listeners("127.0.0.1", 0, 3)
    try:
        [port] = {listener.socket.getsockname()[1] for listeners in shared for listener in listeners}
        for count in (1, 2):
            with pytest.raises(StartupError, match="in use by another program"):
                await open_shared_listeners("127.0.0.1", port, count)
    finally:
        for listeners in shared:
            close(listeners)
