"""Ends a handler's work when its client has left, for Starlette and what stands on it, such as FastAPI.

A handler that streams is told by the framework. One that gives its response whole is not: it would go on, and hold what
it holds, for nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.exceptions import HTTPException
    from starlette.requests import Request

__all__ = ["CLIENT_CLOSED_REQUEST", "cancel_on_disconnect", "client_left"]

CLIENT_CLOSED_REQUEST = 499
"""The status that nobody gets: in a log it says that the client had left. nginx has made it the custom."""


@asynccontextmanager
async def cancel_on_disconnect(request: Request) -> AsyncIterator[None]:
    """`async with cancel_on_disconnect(request): ...` in a handler. When the client leaves, the body of the `async
    with` is cancelled, as asyncio.timeout would, and HTTPException with the status 499 rises from it, which the
    framework handles without a traceback in the log.

    request: the handler's own. Its body is read first, and can be asked for again.

    Raises:
        ClientDisconnect: the client has left before its body was there.
    """
    await request.body()
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(None) as patience:
            watcher = loop.create_task(_watch(request, patience))
            try:
                yield
            finally:
                watcher.cancel()
                await asyncio.wait([watcher])
    except TimeoutError:
        if not patience.expired():
            raise
        raise client_left() from None


def client_left() -> HTTPException:
    """Make the error that ends a handler whose client has left."""
    from starlette.exceptions import HTTPException

    return HTTPException(CLIENT_CLOSED_REQUEST, "the client has left")


async def _watch(request: Request, patience: asyncio.Timeout) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    patience.reschedule(asyncio.get_running_loop().time())
