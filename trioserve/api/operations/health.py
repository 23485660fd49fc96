"""Health, readiness, load, version, metrics, tasks and steps, for operators and their machines."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import trio

from trioserve.api.engine_context import EngineContext
from trioserve.api.error_responses import REASON_HEADER
from trioserve.api.openai import response_types
from trioserve.api.operations.kv_events import load_report
from trioserve.api.route_table import Operation
from trioserve.contracts.version import VERSION
from trioserve.engine.lifecycle.step_times import step_trace
from trioserve.trio_tools.task_tree import task_tree

if TYPE_CHECKING:
    from trioserve.api.request_context import RequestContext
    from trioserve.api.responder import Responder

__all__ = ["OPERATIONS", "read_health", "read_load", "read_metrics", "read_ready", "read_tasks", "read_version"]

STEP_OVERDUE = "step_overdue"


async def read_health(context: EngineContext) -> None:
    """Respond with 200 while the event loop runs and no step hangs, for systems that restart dead servers.

    A restart ends every stream. So when a step hangs, /ready fails early, and /health fails much later.

    Args:
        context: the request.
    """
    overdue = context.engine.step_watch.overdue()
    if overdue is None or not context.engine.step_watch.hangs():
        await context.respond_json({"status": "alive", **_store_trouble(context)})
        return
    status = {"status": "hangs", "reason": STEP_OVERDUE, "message": overdue}
    await context.respond_json(status, status=503, headers=((REASON_HEADER, STEP_OVERDUE),))


async def read_ready(context: EngineContext) -> None:
    """Respond with 200 if the server accepts requests, otherwise 503 with the reason, for load balancers.

    Args:
        context: the request.
    """
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
    """Return the reason why the store fails, or no field. The reason is only information, because requests are served
    without the store.
    """
    trouble = context.store_trouble
    return {} if trouble is None else {"store": trouble}


async def read_load(context: EngineContext) -> None:
    """Send the load, which routers read several times a second. This costs a hundredth of the CPU time of /metrics.

    If the router sends its name, the response lists other routers that have asked recently.

    Args:
        context: the request.
    """
    await context.respond_json(load_report(context, is_asked=True))


async def read_version(context: EngineContext) -> None:
    await context.respond_json({"version": VERSION})


async def read_metrics(context: EngineContext) -> None:
    metrics = context.engine.metrics
    await context.respond_bytes(metrics.expose(), metrics.content_type)


TASKS_PATH = "/debug/tasks"
STEPS_PATH = "/debug/steps"


async def read_tasks(context: Responder) -> None:
    """Send the tree of Trio tasks, each with the source line and the function in which the task waits. See TaskTree.

    Args:
        context: the request.

    Raises:
        Refusal: the caller is not the admin (403).
    """
    await context.respond_json(task_tree())


async def read_steps(context: RequestContext) -> None:
    """Send the last 1,000 steps as a trace for ui.perfetto.dev.

    Args:
        context: the request.

    Raises:
        Refusal: the caller is not the admin (403).
    """
    made = await trio.to_thread.run_sync(partial(step_trace, context.engine.step_times.latest()))
    await context.respond_bytes(made, "application/json")


OPERATIONS: tuple[Operation[RequestContext], ...] = (
    Operation(
        method="GET",
        path="/health",
        handler=read_health,
        summary="Check that the process is alive and its engine does not hang",
        needs_key=False,
        is_polled=True,
        response=response_types.Alive,
        not_ready=response_types.Hangs,
    ),
    Operation(
        method="GET",
        path="/ready",
        handler=read_ready,
        summary="Check that the server accepts requests",
        needs_key=False,
        is_polled=True,
        response=response_types.Ready,
        not_ready=response_types.NotReady,
    ),
    Operation(
        method="GET",
        path="/load",
        handler=read_load,
        summary="Read the load",
        needs_key=False,
        is_polled=True,
        response=response_types.Load,
    ),
    Operation(
        method="GET",
        path="/version",
        handler=read_version,
        summary="Version of the server",
        needs_key=False,
        is_polled=True,
        response=response_types.Version,
    ),
    Operation(
        method="GET",
        path="/metrics",
        handler=read_metrics,
        summary="Metrics, in Prometheus' text format",
        needs_key=False,
        is_polled=True,
        response="text/plain",
    ),
    Operation(
        method="GET",
        path="/debug/tasks",
        handler=read_tasks,
        summary="Read the tree of Trio tasks with their stacks",
        is_operators=True,
        admin_action="this page",
        response="application/json",
        errors=(400, 403),
    ),
    Operation(
        method="GET",
        path="/debug/steps",
        handler=read_steps,
        summary="Read the last 1,000 steps, for ui.perfetto.dev",
        is_operators=True,
        admin_action="this page",
        description="In the Trace Event Format.",
        response="application/json",
        errors=(400, 403),
    ),
)
