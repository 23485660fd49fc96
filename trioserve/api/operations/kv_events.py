"""GET /kv_events: streams the blocks of the prefix cache and their changes, for routers.

Each change is a server-sent event, in the format of trioserve/contracts/endpoint.py. Block names reveal no tokens. But
a caller who knows a prompt can see whether it was sent before. So if there are keys, only the admin may read the
events.

With `?load=only`, the stream has the load instead, for routers that would otherwise poll /load. The stream sends the
load after a change and at regular times, so that silence means a failure. A slow reader gets only the latest load.
"""

from __future__ import annotations

import msgspec
import trio

from trioserve.api.caller import check_is_admin
from trioserve.api.error_responses import refusal
from trioserve.api.form import Query
from trioserve.api.request_context import ROUTER_HEADER, EngineContext, RequestContext
from trioserve.api.route_table import Operation
from trioserve.api.sse import KEEP_ALIVE, encode
from trioserve.contracts.endpoint import BlocksRemoved, BlocksStored, EndpointLoad, LoadReported, ResidencySnapshot
from trioserve.contracts.errors import Draining

__all__ = [
    "ALIVE_SECONDS",
    "LOAD_ALIVE_SECONDS",
    "LOAD_SECONDS_MIN",
    "OPERATIONS",
    "load_report",
    "stream_kv_events",
    "stream_load",
]

"""Request header with the name of the router."""


# The stream sends a keep-alive after this silence, because routers soon distrust a silent endpoint.
ALIVE_SECONDS = 2.0
# The shortest time between two load reports. It is shorter than the polling interval of routers.
LOAD_SECONDS_MIN = 0.1
LOAD_ALIVE_SECONDS = 1.0  # The longest time between two load reports. A router uses a report for at most two seconds.
DRAIN_RETRY_SECONDS = 5.0


async def stream_kv_events(context: RequestContext) -> None:
    """Stream the events until the reader leaves or the engine closes.

    Args:
        context: the request.

    Raises:
        Refusal: the caller is not the admin (403), or the server has no such events (404).
        Draining: the server is shutting down.
    """
    if Query(context.exchange.query).choice("load", ("none", "only"), "none") == "only":
        await _stream_load(context)
        return
    check_is_admin(context.caller, "reading the cached blocks needs the admin's API key: see --admin-api-key")
    events = context.engine.kv_events
    if events is None:
        raise refusal("kv_events_off", "this server does not report its KV blocks: start it with --kv-events")
    if events.is_over:
        raise Draining("the server is shutting down", reason="draining", retry_after_seconds=DRAIN_RETRY_SECONDS)
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


async def stream_load(context: EngineContext) -> None:
    """Stream the load of an engine without a prefix cache.

    Args:
        context: the request.

    Raises:
        Refusal: the request asks for block events (404).
        Draining: the server is shutting down.
    """
    if Query(context.exchange.query).choice("load", ("none", "only"), "none") != "only":
        raise refusal("kv_events_off", "this server has no KV blocks to report; /kv_events?load=only streams its load")
    await _stream_load(context)


async def _stream_load(context: EngineContext) -> None:
    engine = context.engine
    changes = engine.load_changes
    if changes.is_over:
        raise Draining("the server is shutting down", reason="draining", retry_after_seconds=DRAIN_RETRY_SECONDS)
    with changes.reading():
        await context.start_events()
        while context.exchange.method != "HEAD" and not changes.is_over:
            load = load_report(context)
            await context.exchange.send(b"data: " + encode(LoadReported(load=load)) + b"\n\n")
            alive_at = trio.current_time() + LOAD_ALIVE_SECONDS
            await trio.sleep(LOAD_SECONDS_MIN)
            with trio.move_on_at(alive_at):
                while not changes.is_over and _reported_parts(load) == _reported_parts(engine.load()):
                    await changes.wait()
    await context.finish()


def load_report(context: EngineContext, *, is_asked: bool = False) -> EndpointLoad:
    """Make the load report for a router.

    Args:
        context: the request. If its router header has a name, the report lists the routers that have asked recently.
        is_asked: True: the router has sent this request, so the router counts as alive. False: the report is pushed
            over a connection whose reader may be gone.
    """
    router = context.exchange.headers.get(ROUTER_HEADER)
    load = msgspec.structs.replace(
        context.engine.load(),
        clock=context.engine.load_changes.clock,
        told_at=trio.current_time(),
        instance=context.engine.instance,
    )
    if router is None:
        return load
    if is_asked:
        context.services.routers_heard.note(router)
    return msgspec.structs.replace(load, routers=context.services.routers_heard.seconds_since())


def _reported_parts(load: EndpointLoad) -> tuple[object, ...]:
    """Return the parts of the load whose change is reported. KV usage is left out, because it changes at every step."""
    return load.running, load.waiting, load.max_num_seqs, load.role, load.fingerprint, load.weight_version


OPERATIONS: tuple[Operation[RequestContext], ...] = (
    Operation(
        method="GET",
        path="/kv_events",
        handler=stream_kv_events,
        summary="Stream the blocks of the prefix cache, and their changes",
        is_polled=True,
        description="Sends a snapshot in one or more parts, then numbered changes. Another snapshot means that changes "
        "were missed. Needs a server with --kv-events and, if there are API keys, the admin's key. With ?load=only, it "
        "sends the load instead, as /load does: after changes at most ten times a second, and at least once a second. "
        "This works on every server, with any key.",
        response="text/event-stream",
        kinds=(ResidencySnapshot, BlocksStored, BlocksRemoved, LoadReported),
        errors=(400, 403, 404, 429, 503),
    ),
)
