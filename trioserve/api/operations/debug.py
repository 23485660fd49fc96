"""State of the process for its operator: all tasks and what each waits for, and the time of the last steps."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import trio

from trioserve.api.caller import check_is_admin
from trioserve.api.route_table import Operation
from trioserve.engine.lifecycle.step_times import step_trace
from trioserve.trio_tools.task_tree import task_tree

if TYPE_CHECKING:
    from trioserve.api.request_context import RequestContext
    from trioserve.api.responder import Responder

__all__ = ["OPERATIONS", "STEPS_PATH", "TASKS_PATH", "read_steps", "read_tasks"]

TASKS_PATH = "/debug/tasks"
STEPS_PATH = "/debug/steps"
NEEDS_ADMIN = "this page needs the admin's API key: see --admin-api-key"


async def read_tasks(context: Responder) -> None:
    """Send the tree of Trio tasks, each with the place and the function in which it waits. See TaskTree.

    Args:
        context: the request.

    Raises:
        Refusal: the caller is not the admin (403).
    """
    check_is_admin(context.caller, NEEDS_ADMIN)
    await context.respond_json(task_tree())


async def read_steps(context: RequestContext) -> None:
    """Send the last 1,000 steps as a trace for ui.perfetto.dev.

    Args:
        context: the request.

    Raises:
        Refusal: the caller is not the admin (403).
    """
    check_is_admin(context.caller, NEEDS_ADMIN)
    made = await trio.to_thread.run_sync(partial(step_trace, context.engine.step_times.latest()))
    await context.respond_bytes(made, "application/json")


OPERATIONS: tuple[Operation[RequestContext], ...] = (
    Operation(
        method="GET",
        path="/debug/tasks",
        handler=read_tasks,
        summary="Read the tree of Trio tasks with their stacks",
        is_operators=True,
        description="Needs the admin's key, if there are keys.",
        response="application/json",
        errors=(400, 403),
    ),
    Operation(
        method="GET",
        path="/debug/steps",
        handler=read_steps,
        summary="Read the last 1,000 steps, for ui.perfetto.dev",
        is_operators=True,
        description="In the Trace Event Format. Needs the admin's key, if there are keys.",
        response="application/json",
        errors=(400, 403),
    ),
)
