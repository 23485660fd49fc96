"""A transport that connects httpx clients, such as the official openai client, to a server in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import httpx

from trioserve.testing.memory_client import ConnectionLost, MemoryClient, MemoryResponse

__all__ = ["MemoryTransport"]

# MemoryClient writes these headers itself.
OF_THE_CONNECTION = ("host", "connection", "content-length", "transfer-encoding")


class MemoryTransport(httpx.AsyncBaseTransport):
    """Transport for httpx.AsyncClient(transport=MemoryTransport(server.client), base_url="http://memory").

    Each request has its own HTTP/1.1 connection. If a caller closes a response before its end, the connection is
    closed. Timeouts of httpx are ignored, so use a cancel scope instead.

    Args:
        new_client: opens a connection, for example `server.client`.
    """

    def __init__(self, new_client: Callable[[], MemoryClient]) -> None:
        self._new_client = new_client

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = await request.aread()
        headers = {name: value for name, value in request.headers.items() if name not in OF_THE_CONNECTION}
        client = self._new_client()
        async with AsyncExitStack() as stack:
            stack.callback(client.close)
            try:
                response = await stack.enter_async_context(
                    client.ask(request.url.raw_path.decode(), body or None, method=request.method, headers=headers)
                )
                await response.head()
            except ConnectionLost as error:
                raise httpx.RemoteProtocolError(str(error), request=request) from error
            return httpx.Response(
                response.status or 0, headers=response.headers, stream=_Body(response, stack.pop_all()), request=request
            )
        raise AssertionError("unreachable: the exit stack suppresses no exception")


class _Body(httpx.AsyncByteStream):
    def __init__(self, response: MemoryResponse, stack: AsyncExitStack) -> None:
        self._response = response
        self._stack = stack

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for piece in self._response.pieces():
                yield piece
        except ConnectionLost as error:
            raise httpx.RemoteProtocolError(str(error)) from error

    async def aclose(self) -> None:
        await self._stack.aclose()
