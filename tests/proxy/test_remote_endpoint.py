"""Tests the HTTP client of one endpoint: the bytes of requests, and the reuse of connections."""

from __future__ import annotations

import contextlib

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.contracts.endpoint import EndpointId
from trioserve.contracts.errors import EndpointLost, InvalidRequest, StartupError
from trioserve.proxy.remote_endpoint import EndpointAddress, RemoteEndpoint, Unreachable
from trioserve.testing.memory_client import MemoryEnd, memory_connection

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Server:
    """Server that accepts connections. The test writes the responses."""

    def __init__(self) -> None:
        self.ends: list[MemoryEnd] = []
        self.remote = RemoteEndpoint(
            EndpointId("a"),
            EndpointAddress(scheme="http", host="far", port=80, path="/base"),
            headers=(("authorization", "Bearer key"),),
            open_stream=self.connect,
        )

    async def connect(self) -> trio.abc.Stream:
        client, end = memory_connection()
        self.ends.append(end)
        return client

    async def ask(self, response: bytes, *, closes: bool = False, more: tuple[tuple[str, str], ...] = ()) -> bytes:
        """Send a request and return the body of its response. The response comes over the newest connection.

        Args:
            response: Bytes of the response.
            closes: Whether the server closes the connection after the response.
            more: Further headers of the request.
        """
        body: list[bytes | None] = []

        async def request() -> None:
            async with self.remote.request("POST", "/v1/x", [("x-a", "b"), *more], b"{}") as got:
                body.append(await got.whole(1000))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(request)
            await wait_all_tasks_blocked()
            with contextlib.suppress(trio.BrokenResourceError):  # The client may have closed the connection.
                await self.ends[-1].send_all(response)
                if closes:
                    await self.ends[-1].send_eof()
        assert body[0] is not None
        return body[0]


async def test_request_has_the_given_method_path_headers_and_body_and_only_the_key_of_the_endpoint():
    server = Server()
    keys_of_the_client = (("authorization", "Bearer any"), ("x-api-key", "any"))
    assert await server.ask(OK, more=keys_of_the_client) == b"ok"
    assert await server.ends[0].receive_some(1000) == (
        b"POST /base/v1/x HTTP/1.1\r\nhost: far\r\nsec-trioserve-client: router\r\n"
        b"authorization: Bearer key\r\nx-a: b\r\ncontent-length: 2\r\n\r\n{}"
    )


@pytest.mark.parametrize(
    ("response", "closes", "connections"),
    [
        (OK, False, 1),
        (OK + b"more than was asked for", False, 2),
        (b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok", False, 2),
        (b"HTTP/1.1 200 OK\r\n\r\nok", True, 2),
    ],
)
async def test_connection_is_reused_only_after_an_unambiguous_end(response, closes, connections):
    server = Server()
    assert await server.ask(response, closes=closes) == b"ok"
    assert await server.ask(OK) == b"ok"
    assert len(server.ends) == connections


async def test_early_response_is_read_and_its_connection_not_reused():
    server = Server()

    async def connect() -> trio.abc.Stream:
        client, end = memory_connection()
        await end.send_all(b"HTTP/1.1 413 Too Large\r\ncontent-length: 0\r\n\r\n")
        await client.send_eof()  # After this, the server cannot receive more bytes.
        return client

    server.remote._open_stream = connect
    async with server.remote.request("POST", "/v1/x", [], b"{}") as response:
        assert response.status == 413
        assert await response.whole(1000) == b""
    assert not server.remote._idle


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/v1/x", [("x-a", "b\r\nx-c: d")]),
        ("/v1/x", [("x-a", "b\nGET / HTTP/1.1")]),
        ("/v1/x", [("x-a: 1\r\nx-b", "c")]),
        ("/v1/x", [("x a", "b")]),
        ("/v1/x", [("x-a", "\0")]),
        ("/v1/x", [("x-a", "\u20ac")]),
        ("/v1/x y", []),
        ("/v1/x\r\nx: y", []),
    ],
)
async def test_header_or_path_with_invalid_characters_is_not_sent(path, headers):
    server = Server()
    with pytest.raises(InvalidRequest):
        async with server.remote.request("POST", path, headers, b"{}"):
            pass
    assert server.ends == []


async def test_response_that_is_not_http_counts_as_a_lost_endpoint():
    server = Server()
    with pytest.raises(BaseExceptionGroup) as raised:
        await server.ask(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")
    assert raised.group_contains(
        EndpointLost, match='"a" sent a response that no inference server sends: the response begins with'
    )


async def test_client_of_a_removed_endpoint_keeps_no_connection():
    server = Server()

    async def remove() -> None:
        await wait_all_tasks_blocked()
        server.remote.close()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(remove)
        assert await server.ask(OK) == b"ok"
    assert not server.remote._idle


async def test_endpoint_with_an_invalid_host_name_is_unreachable():
    remote = RemoteEndpoint(EndpointId("a"), EndpointAddress.parse("http://" + "a" * 64 + ".example:8000"))
    with pytest.raises(Unreachable, match="cannot be reached"):
        async with remote.request("GET", "/load", [], b""):
            pass


def test_endpoint_url_with_port_0_is_refused():
    with pytest.raises(StartupError, match="port 0"):
        EndpointAddress.parse("http://far:0")
