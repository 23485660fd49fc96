"""Tests of code that every server program uses: limits, and certificates that change while the server runs."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio
import trustme
from trio.testing import memory_stream_pair, wait_all_tasks_blocked

from trioserve.commands.serving import NativeFrontEnd, frontend_limits, server_tls
from trioserve.config import make_config
from trioserve.http.listener import open_listeners
from trioserve.http.server import FrontendServer
from trioserve.metrics.registry import Metrics


async def respond(exchange):
    await exchange.respond(200, [], b"ok")


class NotingServer(FrontendServer):
    """Server that sets an event when it gets a certificate. At its start, it reads the first certificate again."""

    def __init__(self, config) -> None:
        super().__init__(self._respond, ssl_context=server_tls(config))
        self.waits = trio.Event()  # set by a request to /wait
        self.proceed = trio.Event()
        self.begun = trio.Event()
        self.changed = trio.Event()

    async def _respond(self, exchange) -> None:
        if exchange.path == "/wait":
            self.waits.set()
            await self.proceed.wait()
        await respond(exchange)

    def use_tls(self, ssl_context: ssl.SSLContext) -> None:
        super().use_tls(ssl_context)
        (self.changed if self.begun.is_set() else self.begun).set()


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def issue(authority, tmp_path):
    """Write a certificate and its key where the server reads them."""

    def write(*, with_key: bool = True) -> None:
        issued = authority.issue_cert("test")
        issued.cert_chain_pems[0].write_to_path(tmp_path / "certificate.pem")
        if with_key:
            issued.private_key_pem.write_to_path(tmp_path / "key.pem")

    return write


@contextmanager
def noted_errors() -> Iterator[trio.Event]:
    """Return an event that the next error in the log sets."""
    event = trio.Event()
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: event.set()  # type: ignore[method-assign]
    logging.getLogger("trioserve").addHandler(handler)
    try:
        yield event
    finally:
        logging.getLogger("trioserve").removeHandler(handler)


async def connected(server: FrontendServer, authority: trustme.CA, nursery: trio.Nursery) -> trio.SSLStream:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    ours, theirs = memory_stream_pair()
    nursery.start_soon(server.serve_connection, theirs)
    client = trio.SSLStream(ours, context, server_hostname="test", https_compatible=True)
    await client.do_handshake()
    return client


async def shown_certificate(server: FrontendServer, authority: trustme.CA, nursery: trio.Nursery) -> bytes:
    client = await connected(server, authority, nursery)
    shown = client.getpeercert(binary_form=True)
    await client.aclose()
    assert shown is not None
    return shown


@pytest.mark.parametrize("is_asked", [True, False], ids=["after SIGHUP", "when a file has changed"])
async def test_new_connections_get_the_new_certificate(autojump_clock, authority, issue, tmp_path, is_asked):
    issue()
    config = make_config(ssl_certfile=str(tmp_path / "certificate.pem"), ssl_keyfile=str(tmp_path / "key.pem"))
    server = NotingServer(config)
    front_end = NativeFrontEnd(server, await open_listeners("127.0.0.1", 0), Metrics(None, parts=("frontend",)), config)
    async with trio.open_nursery() as nursery:
        await nursery.start(front_end.serve)
        await server.begun.wait()
        before = await shown_certificate(server, authority, nursery)
        assert await shown_certificate(server, authority, nursery) == before
        early = await connected(server, authority, nursery)
        await early.send_all(b"GET /wait HTTP/1.1\r\nhost: test\r\n\r\n")
        await server.waits.wait()
        issue()
        if is_asked:
            front_end.reload()
        await server.changed.wait()
        assert await shown_certificate(server, authority, nursery) != before
        server.proceed.set()
        received = b""
        while not received.endswith(b"ok"):
            received += await early.receive_some(1000)
        assert received.startswith(b"HTTP/1.1 200 ")
        nursery.cancel_scope.cancel()


async def test_certificate_that_changes_while_the_server_starts_is_used(autojump_clock, authority, issue, tmp_path):
    issue()
    config = make_config(ssl_certfile=str(tmp_path / "certificate.pem"), ssl_keyfile=str(tmp_path / "key.pem"))
    server = NotingServer(config)
    front_end = NativeFrontEnd(server, await open_listeners("127.0.0.1", 0), Metrics(None, parts=("frontend",)), config)
    async with trio.open_nursery() as nursery:
        before = await shown_certificate(server, authority, nursery)
        issue()
        await nursery.start(front_end.serve)
        await server.begun.wait()
        assert await shown_certificate(server, authority, nursery) != before
        nursery.cancel_scope.cancel()


def empty_the_file(path: Path) -> None:
    path.write_bytes(b"")


def put_a_folder_there(path: Path) -> None:
    path.unlink()
    path.mkdir()


def put_bytes_there(path: Path) -> None:
    path.write_bytes(bytes(range(256)))


@pytest.mark.parametrize("damage", [empty_the_file, put_a_folder_there, put_bytes_there, Path.unlink])
@pytest.mark.parametrize("option", ["ssl_certfile", "ssl_keyfile", "ssl_ca_certs"])
async def test_invalid_file_keeps_the_earlier_certificate_and_is_logged_once(
    autojump_clock, authority, issue, tmp_path, caplog, option, damage
):
    issue()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    paths = {"ssl_certfile": "certificate.pem", "ssl_keyfile": "key.pem", "ssl_ca_certs": "ca.pem"}
    config = make_config(**{name: str(tmp_path / path) for name, path in paths.items()}, ssl_client_certs="optional")
    server = NotingServer(config)
    front_end = NativeFrontEnd(server, await open_listeners("127.0.0.1", 0), Metrics(None, parts=("frontend",)), config)
    async with trio.open_nursery() as nursery:
        await nursery.start(front_end.serve)
        await server.begun.wait()
        before = await shown_certificate(server, authority, nursery)
        damage(tmp_path / paths[option])
        with noted_errors() as is_told:
            front_end.reload()
            await is_told.wait()
        await trio.sleep(60)
        assert [record.levelname for record in caplog.records if "TLS" in record.message] == ["ERROR"]
        assert paths[option] in caplog.text
        assert await shown_certificate(server, authority, nursery) == before
        nursery.cancel_scope.cancel()


async def test_new_certificate_is_used_only_with_its_key(autojump_clock, authority, issue, tmp_path, caplog):
    issue()
    config = make_config(ssl_certfile=str(tmp_path / "certificate.pem"), ssl_keyfile=str(tmp_path / "key.pem"))
    server = NotingServer(config)
    front_end = NativeFrontEnd(server, await open_listeners("127.0.0.1", 0), Metrics(None, parts=("frontend",)), config)
    async with trio.open_nursery() as nursery:
        await nursery.start(front_end.serve)
        await server.begun.wait()
        before = await shown_certificate(server, authority, nursery)
        issue(with_key=False)
        with noted_errors() as is_told:
            front_end.reload()
            await is_told.wait()
        assert "certificate.pem" in caplog.text
        assert await shown_certificate(server, authority, nursery) == before
        issue()
        await server.changed.wait()
        assert await shown_certificate(server, authority, nursery) != before
        nursery.cancel_scope.cancel()


async def test_reload_signal_without_tls_logs_one_line(caplog, autojump_clock):
    config = make_config()
    front_end = NativeFrontEnd(
        FrontendServer(respond), await open_listeners("127.0.0.1", 0), Metrics(None, parts=("frontend",)), config
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(front_end.serve)
        with caplog.at_level(logging.INFO):
            front_end.reload()
            await wait_all_tasks_blocked()
        assert "nothing to reload" in caplog.text
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(("keys", "allowed"), [((), 90), (("a",), 90), (("a", "b"), 50)])
def test_one_of_several_keys_may_open_half_of_all_websockets(keys, allowed):
    config = make_config(api_key=keys, max_websockets=100, max_websockets_per_caller=90)
    assert frontend_limits(config).websockets_per_caller_max == allowed


def test_options_about_connections_become_limits_of_the_front_end():
    limits = frontend_limits(make_config(keep_alive_timeout=5.0, ping_interval=6.0, ping_timeout=7.0))
    assert (limits.idle_seconds_max, limits.ping_seconds, limits.ping_answer_seconds_max) == (5.0, 6.0, 7.0)


def test_larger_request_bodies_have_more_time_unless_an_option_sets_the_time():
    assert frontend_limits(make_config()).body_seconds_max == 600
    assert frontend_limits(make_config(max_body_bytes=1_000_000_000)).body_seconds_max == 16_000
    assert frontend_limits(make_config(max_body_bytes=1_000_000_000, body_timeout=5.0)).body_seconds_max == 5
