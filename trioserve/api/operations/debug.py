"""What the process does, for its operator: the tasks that live and what each waits for, and where the time of the last
steps went."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import trio

from trioserve.api.caller import check_is_admin
from trioserve.engine.shell.step_trace import step_trace
from trioserve.trio_tools.task_tree import task_tree

if TYPE_CHECKING:
    from trioserve.api.request_context import RequestContext
    from trioserve.api.responder import Responder

__all__ = ["STEPS_PATH", "TASKS_PATH", "read_steps", "read_tasks"]

TASKS_PATH = "/debug/tasks"
STEPS_PATH = "/debug/steps"
ADMINS = "what the process does is shown with the admin's API key: see --admin-api-key"


async def read_tasks(context: Responder) -> None:
    """The tree of Trio tasks, each with the place and the function in which it waits; see TaskTree."""
    check_is_admin(context.caller, ADMINS)
    await context.respond_json(task_tree())


async def read_steps(context: RequestContext) -> None:
    """The last 1,000 steps as a trace for ui.perfetto.dev."""
    check_is_admin(context.caller, ADMINS)
    made = await trio.to_thread.run_sync(partial(step_trace, context.engine.step_times.latest()))
    await context.respond_bytes(made, "application/json")
