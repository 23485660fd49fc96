"""Ends the work of a Starlette or FastAPI handler when its client leaves.

The framework notifies a handler that streams its response. A handler that returns a whole response is not notified. It
would keep running and use its KV blocks although no client reads the response.
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
"""Status for logs: the client left before the response. Introduced by nginx, and never sent to a client."""


@asynccontextmanager
async def cancel_on_disconnect(request: Request) -> AsyncIterator[None]:
    """Cancel the body of an `async with` when the client leaves.

    Use it in a handler: `async with cancel_on_disconnect(request): ...`. The body is cancelled in the way that
    asyncio.timeout cancels. Then HTTPException with status 499 is raised, which the framework handles without a
    traceback in the log.

    Args:
        request: the handler's request. The request body is read first, and the handler can read it again.

    Raises:
        ClientDisconnect: the client left before the request body was complete.
        HTTPException: the client left. The status is 499.
    """
    await request.body()
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(None) as timeout:
            watcher = loop.create_task(_watch(request, timeout))
            try:
                yield
            finally:
                watcher.cancel()
                await asyncio.wait([watcher])
    except TimeoutError:
        if not timeout.expired():
            raise
        raise client_left() from None


def client_left() -> HTTPException:
    """Return the error that ends a handler whose client has left."""
    from starlette.exceptions import HTTPException

    return HTTPException(CLIENT_CLOSED_REQUEST, "the client has left")


async def _watch(request: Request, body_timeout: asyncio.Timeout) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    body_timeout.reschedule(asyncio.get_running_loop().time())
