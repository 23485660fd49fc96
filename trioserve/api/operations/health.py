"""Health, readiness, load, version, metrics, tasks and steps, for operators and their machines."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, Literal

import trio
from msgspec import UNSET, UnsetType

from trioserve.api.error_responses import REASON_HEADER
from trioserve.api.operations.kv_events import load_report
from trioserve.api.request_context import EngineContext
from trioserve.api.response import Response
from trioserve.api.route_table import Operation
from trioserve.contracts.endpoint import EndpointLoad
from trioserve.contracts.extras import VERSION
from trioserve.engine.lifecycle.step_times import step_trace
from trioserve.trio_tools.task_tree import task_tree

if TYPE_CHECKING:
    from trioserve.api.request_context import RequestContext
    from trioserve.api.responder import Responder

__all__ = [
    "OPERATIONS",
    "Alive",
    "NotReady",
    "Ready",
    "Version",
    "read_health",
    "read_load",
    "read_metrics",
    "read_ready",
    "read_tasks",
    "read_version",
]

STEP_OVERDUE: Final = "step_overdue"


class Alive(Response, tag_field="status", tag="alive"):
    """Response of a living server.

    Attributes:
        store: reason why the store's disk refuses writes. Unset: it works.
    """

    store: str | UnsetType = UNSET


class Hangs(Response, tag_field="status", tag="hangs"):
    """Response of a server whose engine hangs.

    Attributes:
        message: age of the step in flight.
    """

    reason: Literal["step_overdue"]
    message: str


class Ready(Response):
    """Response of a server that accepts requests.

    Attributes:
        store: reason why the store's disk refuses writes. Unset: it works.
    """

    ready: Literal[True]
    store: str | UnsetType = UNSET


class NotReady(Response):
    """Response of a server that accepts no requests.

    Attributes:
        reason: "loading", "draining", "engine_fault", "engine_reopening", "sleeping", "weights_in_part", "paused" or
            "step_overdue".
        message: age of the step in flight, with "step_overdue" only.
    """

    ready: Literal[False]
    reason: str
    message: str | UnsetType = UNSET


class Version(Response):
    version: str


async def read_health(context: EngineContext) -> None:
    """Respond with 200 while the event loop runs and no step hangs, for systems that restart dead servers.

    A restart ends every stream. So when a step hangs, /ready fails early, and /health fails much later.

    Args:
        context: the request.
    """
    overdue = context.engine.step_watch.overdue()
    if overdue is None or not context.engine.step_watch.hangs():
        await context.respond_json(Alive(store=_store_trouble(context)))
        return
    hangs = Hangs(reason=STEP_OVERDUE, message=overdue)
    await context.respond_json(hangs, status=503, headers=((REASON_HEADER, STEP_OVERDUE),))


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
    elif context.engine.blocks_admission:
        reason = "paused"
    elif (message := context.engine.step_watch.overdue()) is not None:
        reason = STEP_OVERDUE
    elif not context.engine.ready:
        reason = "loading"
    else:
        await context.respond_json(Ready(ready=True, store=_store_trouble(context)))
        return
    not_ready = NotReady(ready=False, reason=reason, message=UNSET if message is None else message)
    await context.respond_json(not_ready, status=503, headers=((REASON_HEADER, reason),))


def _store_trouble(context: EngineContext) -> str | UnsetType:
    """Return the reason why the store fails, or UNSET. The reason is only information, because requests are served
    without the store.
    """
    trouble = context.store_trouble
    return UNSET if trouble is None else trouble


async def read_load(context: EngineContext) -> None:
    """Send the load, which routers read several times a second. This costs a hundredth of the CPU time of /metrics.

    If the router sends its name, the response lists other routers that have asked recently.

    Args:
        context: the request.
    """
    await context.respond_json(load_report(context, is_asked=True))


async def read_version(context: EngineContext) -> None:
    await context.respond_json(Version(version=VERSION))


async def read_metrics(context: EngineContext) -> None:
    metrics = context.engine.metrics
    await context.respond_bytes(metrics.expose(), metrics.content_type)


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
        response=Alive,
        not_ready=Hangs,
    ),
    Operation(
        method="GET",
        path="/ready",
        handler=read_ready,
        summary="Check that the server accepts requests",
        needs_key=False,
        is_polled=True,
        response=Ready,
        not_ready=NotReady,
    ),
    Operation(
        method="GET",
        path="/load",
        handler=read_load,
        summary="Read the load",
        needs_key=False,
        is_polled=True,
        response=EndpointLoad,
    ),
    Operation(
        method="GET",
        path="/version",
        handler=read_version,
        summary="Version of the server",
        needs_key=False,
        is_polled=True,
        response=Version,
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
