"""GET /kv_events: which blocks are in the prefix cache, and each change from then on, for routers.

A server-sent event each, as in contracts/kv_events. Names of blocks tell nothing of their tokens, but whoever knows a
prompt can see whether somebody has sent it; so where keys tell callers apart, only the admin reads them.
"""

from __future__ import annotations

import trio

from trioserve.api.caller import check_is_admin
from trioserve.api.error_responses import REASON_HEADER, ErrorResponse, Refusal
from trioserve.api.request_context import RequestContext
from trioserve.api.sse import KEEP_ALIVE, encode
from trioserve.contracts.errors import Draining

__all__ = ["ALIVE_SECONDS", "stream_kv_events"]

ALIVE_SECONDS = 2.0  # between two signs of life, if nothing else is to be said: what is silent is soon not believed
DRAIN_RETRY_SECONDS = 5.0


async def stream_kv_events(context: RequestContext) -> None:
    """Until the reader leaves, or the engine does."""
    check_is_admin(context.caller, "which blocks are cached is told to the admin's API key: see --admin-api-key")
    events = context.engine.kv_events
    if events is None:
        raise _refusal(404, "kv_events_off", "this server does not tell which blocks it has: start it with --kv-events")
    if events.is_over:
        raise Draining("the server is leaving", reason="draining", retry_after_seconds=DRAIN_RETRY_SECONDS)
    with events.reading() as reader:
        await context.start_events()
        while context.exchange.method != "HEAD":
            event = None
            with trio.move_on_after(ALIVE_SECONDS) as wait:
                event = await reader.next()
            if event is not None:
                await context.exchange.send(b"data: " + encode(event) + b"\n\n")
            elif wait.cancelled_caught:
                await context.exchange.send(KEEP_ALIVE)
            else:
                break
    await context.finish()


def _refusal(status: int, code: str, message: str) -> Refusal:
    return Refusal(
        ErrorResponse(
            status=status,
            type="invalid_request_error",
            code=code,
            message=message,
            headers=((REASON_HEADER, code),),
        )
    )
