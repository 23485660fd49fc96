"""What operators and their machines ask: is it alive, may traffic come, which version, how is it doing."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from trioserve.api.error_responses import REASON_HEADER
from trioserve.api.request_context import Call

__all__ = ["VERSION", "read_health", "read_load", "read_metrics", "read_ready", "read_version"]


STEP_OVERDUE = "step_overdue"


async def read_health(call: Call) -> None:
    """200 as long as the event loop turns, unless a step hangs: who restarts dead servers asks this.

    A restart ends every stream, so a step has to be much older for this than for /ready.
    """
    overdue = call.engine.step_watch.overdue()
    if overdue is None or not call.engine.step_watch.hangs():
        await call.response({"status": "alive"})
        return
    status = {"status": "hangs", "reason": STEP_OVERDUE, "message": overdue}
    await call.response(status, status=503, headers=((REASON_HEADER, STEP_OVERDUE),))


async def read_ready(call: Call) -> None:
    """200 if requests are taken, else 503 and the reason: who spreads traffic asks this."""
    message = None
    if call.engine.fault is not None:
        reason = "engine_fault"
    elif call.engine.draining:
        reason = "draining"
    elif (message := call.engine.step_watch.overdue()) is not None:
        reason = STEP_OVERDUE
    elif not call.engine.ready:
        reason = "loading"
    else:
        await call.response({"ready": True})
        return
    status = {"ready": False, "reason": reason, **({} if message is None else {"message": message})}
    await call.response(status, status=503, headers=((REASON_HEADER, reason),))


async def read_load(call: Call) -> None:
    """What a router asks for several times a second; /metrics has all of it and costs a hundred times as much."""
    await call.response(call.engine.load())


async def read_version(call: Call) -> None:
    await call.response({"version": VERSION})


async def read_metrics(call: Call) -> None:
    metrics = call.engine.metrics
    await call.response_bytes(metrics.expose(), metrics.content_type)


def _version() -> str:
    try:
        return version("trioserve")
    except PackageNotFoundError:  # run from a source tree
        return "unknown"


VERSION = _version()
