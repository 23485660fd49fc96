"""Tests an endpoint behind TLS: trusted and untrusted certificates, and a cancel in the middle of a response."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trustme

from trioserve.api.routes import App
from trioserve.contracts.endpoint import EndpointId
from trioserve.http.server import FrontendServer
from trioserve.proxy.remote_endpoint import EndpointAddress, RemoteEndpoint, Unreachable
from trioserve.testing.fake_engine import FakeEngine, open_fake_engine

JSON = [("content-type", "application/json")]
BODY = b'{"prompt": "hello", "max_tokens": 50, "stream": true}'


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@asynccontextmanager
async def served(authority: trustme.CA) -> AsyncIterator[tuple[FakeEngine, EndpointAddress]]:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    async with open_fake_engine(step_seconds=0.02) as fake, trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        server = FrontendServer(App(fake), ssl_context=context)
        await nursery.start(server.serve, listeners)
        port = listeners[0].socket.getsockname()[1]
        yield fake, EndpointAddress.parse(f"https://127.0.0.1:{port}")
        nursery.cancel_scope.cancel()


async def test_cancel_reaches_an_endpoint_behind_tls_at_once(authority):
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    async with served(authority) as (fake, address):
        remote = RemoteEndpoint(EndpointId("a"), address, ssl_context=trusting)
        for _ in range(2):  # The second request opens a new connection, because the first connection was closed.
            async with remote.request(
                "POST", "/v1/completions", [("content-type", "application/json")], BODY
            ) as response:
                assert response.status == 200
                assert b"data: " in (await response.next_piece() or b"")
                assert fake.stats().blocks_used > 0
            with trio.fail_after(10):
                while fake.stats().blocks_used:  # Wait until the running step ends.
                    await trio.lowlevel.checkpoint()
            fake.assert_all_free()
        remote.close()


async def test_endpoint_with_an_untrusted_certificate_is_unreachable(authority):
    async with served(authority) as (fake, address):
        remote = RemoteEndpoint(EndpointId("a"), address)
        with pytest.raises(Unreachable, match=r'"a".*cannot be reached: .*certificate'):
            async with remote.request("POST", "/v1/completions", [], BODY):
                pytest.fail("was answered")
        fake.assert_all_free()
