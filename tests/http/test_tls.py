"""Tests TLS: versions, protocols, and client certificates, with a certificate authority of the test."""

from __future__ import annotations

import functools
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
import trustme
from trio.testing import memory_stream_pair, wait_all_tasks_blocked

from trioserve.contracts.errors import StartupError
from trioserve.http.listener import tls_context
from trioserve.http.server import FrontendServer
from trioserve.testing.memory_server import MemoryWebSocket

REQUEST = b"GET / HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n"


async def respond_ok(exchange):
    await exchange.respond(200, [], b"ok")


class Files:
    """Files of a certificate authority and of a certificate that it signed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.authority = trustme.CA()
        issued = self.authority.issue_cert("test")
        self.certificate, self.key, self.ca = (directory / name for name in ("certificate.pem", "key.pem", "ca.pem"))
        issued.cert_chain_pems[0].write_to_path(self.certificate)
        issued.private_key_pem.write_to_path(self.key)
        self.authority.cert_pem.write_to_path(self.ca)

    def server_context(self, **options: object) -> ssl.SSLContext:
        return tls_context(self.certificate, self.key, **options)

    def client_context(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        return context


@pytest.fixture
def files(tmp_path) -> Files:
    return Files(tmp_path)


@pytest.fixture
def connect(autojump_clock, nursery) -> Callable[..., object]:
    """Return a function connect(server, client_context) that connects a TLS stream to the server."""

    def connect_to(server: FrontendServer, context: ssl.SSLContext) -> trio.SSLStream:
        ours, theirs = memory_stream_pair()
        nursery.start_soon(server.serve_connection, theirs)
        return trio.SSLStream(ours, context, server_hostname="test", https_compatible=True)

    return connect_to


async def fetch(stream) -> bytes:
    await stream.send_all(REQUEST)
    received = b""
    while piece := await stream.receive_some():
        received += piece
    await stream.aclose()
    return received


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_server_accepts_current_tls_versions(autojump_clock, files, connect, version):
    server = FrontendServer(respond_ok, ssl_context=files.server_context())
    context = files.client_context()
    context.minimum_version = context.maximum_version = version
    assert (await fetch(connect(server, context))).endswith(b"ok")


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated:DeprecationWarning")
async def test_server_refuses_old_tls_versions(autojump_clock, files, connect):
    client_context, server_context = files.client_context(), files.server_context()
    for context in (client_context, server_context):
        context.set_ciphers("DEFAULT:@SECLEVEL=0")  # Without this setting, OpenSSL itself refuses old versions.
    client_context.minimum_version = client_context.maximum_version = ssl.TLSVersion.TLSv1_1
    server = FrontendServer(respond_ok, ssl_context=server_context)
    with pytest.raises(trio.BrokenResourceError):
        await fetch(connect(server, client_context))
    await wait_all_tasks_blocked()
    assert server.counters().connections_refused_total["tls_handshake"] == 1
    # The server's minimum version causes the refusal. Without it, both sides would agree on this version.
    server_context.minimum_version = ssl.TLSVersion.TLSv1_1
    assert (await fetch(connect(server, client_context))).endswith(b"ok")


# --- a client that uses another protocol than its port ---


async def speak(server: FrontendServer, opening: bytes, peer: str) -> None:
    """Send the first bytes of a client, and read until the server closes."""
    ours, theirs = memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(functools.partial(server.serve_connection, theirs, peer=peer))
        await ours.send_all(opening)
        await ours.send_eof()
        while await ours.receive_some():
            pass
        await ours.aclose()


@pytest.mark.parametrize("opening", [b"GET", b"POST", b"DELETE", b"OPTIONS", b"CONNECT", b"PRI"])
async def test_plain_http_at_a_port_with_tls_leaves_one_log_line(autojump_clock, files, caplog, opening):
    server = FrontendServer(respond_ok, ssl_context=files.server_context())
    await speak(server, opening + b" / HTTP/1.1\r\nhost: test\r\n\r\n", "10.1.2.3:456")
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        (
            "WARNING",
            "a client does not speak TLS at a port with TLS: give the client a URL that begins with https:// "
            "peer=10.1.2.3:456",
        )
    ]


async def test_tls_at_a_plain_port_leaves_one_log_line(autojump_clock, caplog):
    client = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), client, server_hostname="test").do_handshake()
    await speak(FrontendServer(respond_ok), client.read(), "10.1.2.3:456")
    assert [record.getMessage() for record in caplog.records] == [
        "a client speaks TLS at a port without TLS: give the client a URL that begins with http:// peer=10.1.2.3:456"
    ]


async def test_clients_without_tls_leave_three_log_lines_and_then_one_a_minute(autojump_clock, files, caplog):
    server = FrontendServer(respond_ok, ssl_context=files.server_context())

    async def lines_of_ten_clients() -> int:
        caplog.clear()
        for _ in range(10):
            await speak(server, REQUEST, "10.1.2.3:456")
        return len(caplog.records)

    assert await lines_of_ten_clients() == 3
    await trio.sleep(60)
    assert await lines_of_ten_clients() == 1
    assert server.counters().connections_refused_total["tls_handshake"] == 20


# --- client certificates ---


def shown(files: Files, who: str) -> ssl.SSLContext:
    """Return the TLS context of a client. The client has a certificate of this authority, a certificate of another
    authority, or no certificate.
    """
    context = files.client_context()
    if who != "nobody":
        signer = files.authority if who == "ours" else trustme.CA()
        signer.issue_cert("client@example.org").configure_cert(context)
    return context


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize(
    "wanted, who, served",
    [
        ("none", "nobody", True),
        ("none", "strangers", True),
        ("optional", "nobody", True),
        ("optional", "ours", True),
        ("optional", "strangers", False),
        ("required", "nobody", False),
        ("required", "ours", True),
        ("required", "strangers", False),
    ],
)
async def test_client_certificates_are_required_or_optional_as_configured(
    autojump_clock, files, connect, version, wanted, who, served
):
    options = {} if wanted == "none" else {"ca_certificates": files.ca, "client_certificates": wanted}
    server = FrontendServer(respond_ok, ssl_context=files.server_context(**options))
    context = shown(files, who)
    context.minimum_version = context.maximum_version = version
    if served:
        assert (await fetch(connect(server, context))).endswith(b"ok")
    else:
        with pytest.raises(trio.BrokenResourceError):
            await fetch(connect(server, context))
    await wait_all_tasks_blocked()
    counters = server.counters()
    assert counters.exchanges_total == served
    assert counters.connections_refused_total["tls_handshake"] == (not served)
    assert (counters.connections_open, counters.connections_failed_total) == (0, 0)


@pytest.mark.parametrize("options", [{"ca_certificates": "ca"}, {"client_certificates": "required"}])
def test_incomplete_options_for_client_certificates_are_a_startup_error(files, options):
    options = {name: files.ca if value == "ca" else value for name, value in options.items()}
    with pytest.raises(StartupError, match="both are needed"):
        files.server_context(**options)


def test_error_for_a_certificate_without_a_key_names_the_flag(files):
    with pytest.raises(StartupError, match="--ssl-keyfile"):
        tls_context(files.certificate)


@pytest.mark.parametrize("content", [None, "", "no certificate"])
def test_unusable_ca_file_is_a_startup_error(files, content):
    path = files.directory / "other.pem"
    if content is not None:
        path.write_text(content)
    with pytest.raises(StartupError, match=r"other\.pem"):
        files.server_context(ca_certificates=path, client_certificates="required")


@pytest.mark.parametrize("http", [1, 2])
async def test_websockets_work_over_tls(files, connect, autojump_clock, http):
    async def echo(exchange):
        websocket = await exchange.accept_websocket()
        while True:
            await websocket.send(await websocket.receive())

    server = FrontendServer(echo, ssl_context=files.server_context())
    context = files.client_context()
    context.set_alpn_protocols(["h2"] if http == 2 else ["http/1.1"])
    async with connect(server, context) as stream:
        websocket = MemoryWebSocket(stream, http=http)
        await websocket.open("/")
        for message in ("text", bytes(200_000)):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(websocket.send, message)
                assert await websocket.receive() == message
        assert (await websocket.close()).code == 1000
    await wait_all_tasks_blocked()
    assert server.counters().websockets_open == 0
