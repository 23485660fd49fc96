"""What operators and their machines ask: is it alive, may traffic come, which version, how is it doing."""

from __future__ import annotations

from trioserve.api.engine_context import EngineContext
from trioserve.api.error_responses import REASON_HEADER
from trioserve.api.operations.kv_events import told_load
from trioserve.contracts.version import VERSION

__all__ = ["read_health", "read_load", "read_metrics", "read_ready", "read_version"]


STEP_OVERDUE = "step_overdue"


async def read_health(context: EngineContext) -> None:
    """200 as long as the event loop turns, unless a step hangs: who restarts dead servers asks this.

    A restart ends every stream, so a step has to be much older for this than for /ready.
    """
    overdue = context.engine.step_watch.overdue()
    if overdue is None or not context.engine.step_watch.hangs():
        await context.respond_json({"status": "alive", **_store_trouble(context)})
        return
    status = {"status": "hangs", "reason": STEP_OVERDUE, "message": overdue}
    await context.respond_json(status, status=503, headers=((REASON_HEADER, STEP_OVERDUE),))


async def read_ready(context: EngineContext) -> None:
    """200 if requests are taken, else 503 and the reason: who spreads traffic asks this."""
    message = None
    if context.engine.fault is not None:
        reason = "engine_fault"
    elif context.engine.draining:
        reason = "draining"
    elif context.engine.is_sleeping:
        reason = "sleeping"
    elif context.engine.reopens_at is not None:
        reason = "engine_reopening"
    elif context.engine.has_half_weights:
        reason = "weights_in_part"
    elif context.engine.holds_up:
        reason = "paused"
    elif (message := context.engine.step_watch.overdue()) is not None:
        reason = STEP_OVERDUE
    elif not context.engine.ready:
        reason = "loading"
    else:
        await context.respond_json({"ready": True, **_store_trouble(context)})
        return
    status = {"ready": False, "reason": reason, **({} if message is None else {"message": message})}
    await context.respond_json(status, status=503, headers=((REASON_HEADER, reason),))


def _store_trouble(context: EngineContext) -> dict[str, str]:
    """Requests are served without the store, so its trouble is no reason to restart, or to send traffic elsewhere."""
    trouble = context.store_trouble
    return {} if trouble is None else {"store": trouble}


async def read_load(context: EngineContext) -> None:
    """What a router asks for several times a second; /metrics has all of it and costs a hundred times as much. To one
    that says its name it tells which others it has heard from."""
    await context.respond_json(told_load(context, is_asked=True))


async def read_version(context: EngineContext) -> None:
    await context.respond_json({"version": VERSION})


async def read_metrics(context: EngineContext) -> None:
    metrics = context.engine.metrics
    await context.respond_bytes(metrics.expose(), metrics.content_type)
