"""GET /kv_events: which blocks are in the prefix cache, and each change from then on, for routers.

A server-sent event each, as in contracts/kv_events. Names of blocks tell nothing of their tokens, but whoever knows a
prompt can see whether somebody has sent it; so where keys tell callers apart, only the admin reads them.

With `?load=only` it is the load alone, for routers that would ask for it several times a second otherwise: when it has
changed, and every now and then, so that silence means something. A reader that is slow gets the last one.
"""

from __future__ import annotations

import msgspec
import trio

from trioserve.api.caller import check_is_admin
from trioserve.api.engine_context import EngineContext
from trioserve.api.error_responses import refusal
from trioserve.api.operations.routers_heard import ROUTER_HEADER
from trioserve.api.query import Query
from trioserve.api.request_context import RequestContext
from trioserve.api.sse import KEEP_ALIVE, encode
from trioserve.contracts.endpoint import EndpointLoad
from trioserve.contracts.errors import Draining
from trioserve.contracts.kv_events import LoadReported

__all__ = ["ALIVE_SECONDS", "LOAD_ALIVE_SECONDS", "LOAD_SECONDS_MIN", "stream_kv_events", "stream_load", "told_load"]

ALIVE_SECONDS = 2.0  # between two signs of life, if nothing else is to be said: what is silent is soon not believed
LOAD_SECONDS_MIN = 0.1  # between two loads: more often than a router would ask, and few for it to read
LOAD_ALIVE_SECONDS = 1.0  # a router believes a load for two
DRAIN_RETRY_SECONDS = 5.0


async def stream_kv_events(context: RequestContext) -> None:
    """Until the reader leaves, or the engine does."""
    if Query(context.exchange.query).choice("load", ("none", "only"), "none") == "only":
        await _stream_load(context)
        return
    check_is_admin(context.caller, "which blocks are cached is told to the admin's API key: see --admin-api-key")
    events = context.engine.kv_events
    if events is None:
        raise refusal("kv_events_off", "this server does not tell which blocks it has: start it with --kv-events")
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


async def stream_load(context: EngineContext) -> None:
    """The same of an engine without a prefix cache: its load, and nothing else."""
    if Query(context.exchange.query).choice("load", ("none", "only"), "none") != "only":
        raise refusal(
            "kv_events_off", "this server has no blocks that it could tell of; /kv_events?load=only is its load"
        )
    await _stream_load(context)


async def _stream_load(context: EngineContext) -> None:
    engine = context.engine
    changes = engine.load_changes
    if changes.is_over:
        raise Draining("the server is leaving", reason="draining", retry_after_seconds=DRAIN_RETRY_SECONDS)
    with changes.reading():
        await context.start_events()
        while context.exchange.method != "HEAD" and not changes.is_over:
            load = told_load(context)
            await context.exchange.send(b"data: " + encode(LoadReported(load=load)) + b"\n\n")
            alive_at = trio.current_time() + LOAD_ALIVE_SECONDS
            await trio.sleep(LOAD_SECONDS_MIN)
            with trio.move_on_at(alive_at):
                while not changes.is_over and _as_much(load) == _as_much(engine.load()):
                    await changes.wait()
    await context.finish()


def told_load(context: EngineContext, *, is_asked: bool = False) -> EndpointLoad:
    """With the clock, and for a router that says its name, with those that the server has heard from. is_asked: it asks
    right now, and so it lives. One that is only told may be gone, and its connection not know."""
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
        context.routers_heard.note(router)
    return msgspec.structs.replace(load, routers=context.routers_heard.told())


def _as_much(load: EndpointLoad) -> tuple[object, ...]:
    """What is worth telling. How full the KV cache is changes with every step, and goes along."""
    return load.running, load.waiting, load.max_num_seqs, load.role, load.fingerprint, load.weight_version
