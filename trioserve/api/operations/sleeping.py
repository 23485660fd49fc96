"""POST /sleep and /wake_up, and GET /is_sleeping, as in vLLM: free the engine's memory for a while.

They need the admin's key, as a pause does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trioserve.api.caller import check_is_admin
from trioserve.api.openai import response_types
from trioserve.api.operations.pausing import MODES
from trioserve.api.query import Query
from trioserve.api.route_table import Operation
from trioserve.contracts.errors import InvalidRequest

if TYPE_CHECKING:
    from trioserve.api.engine_context import EngineContext

__all__ = ["OPERATIONS", "read_is_sleeping", "sleep", "wake_up"]


async def sleep(context: EngineContext) -> None:
    """Let the engine sleep. Responds when the memory is free.

    Args:
        context: the request.

    Raises:
        InvalidRequest: the query has a bad value.
        Refusal: the caller is not the admin (403).
    """
    _check_may(context)
    query = Query(context.exchange.query)
    level = query.number("level", 1, low=1, high=2)
    await context.engine.sleep(level, MODES[query.choice("mode", tuple(MODES), "abort")])
    await _respond(context)


async def wake_up(context: EngineContext) -> None:
    """Wake the engine. Responds when all memory is allocated again.

    Args:
        context: the request.

    Raises:
        InvalidRequest: the query has vLLM's `tags`.
        Refusal: the caller is not the admin (403).
    """
    _check_may(context)
    if Query(context.exchange.query).text("tags") is not None:
        raise InvalidRequest(
            "tags are not supported, since all memory is allocated together: leave tags out", param="tags"
        )
    await context.engine.wake_up()
    await _respond(context)


async def read_is_sleeping(context: EngineContext) -> None:
    _check_may(context)
    await _respond(context)


async def _respond(context: EngineContext) -> None:
    await context.respond_json({"is_sleeping": context.engine.is_sleeping})


def _check_may(context: EngineContext) -> None:
    check_is_admin(context.caller, "sleeping needs the admin's API key: see --admin-api-key")


OPERATIONS: tuple[Operation[EngineContext], ...] = (
    Operation(
        method="POST",
        path="/sleep",
        handler=sleep,
        summary="Free memory until /wake_up",
        is_operators=True,
        description="Needs the admin's key, if there are keys. Pauses first. Responds when the memory is free. "
        "New requests wait.",
        response=response_types.IsSleeping,
        errors=(400, 403, 503),
        query={
            "level": (
                "1: free the KV cache, or latents; 2: free the weights too",
                {"type": "integer", "minimum": 1, "maximum": 2, "default": 1},
            ),
            "mode": (
                "how to treat running requests: end them with their partial results, wait for them, or recompute them "
                "afterwards",
                {"type": "string", "enum": ["abort", "wait", "keep"], "default": "abort"},
            ),
        },
    ),
    Operation(
        method="POST",
        path="/wake_up",
        handler=wake_up,
        summary="Allocate the memory again, and resume",
        is_operators=True,
        response=response_types.IsSleeping,
        errors=(400, 403, 503),
    ),
    Operation(
        method="GET",
        path="/is_sleeping",
        handler=read_is_sleeping,
        summary="Say if the engine sleeps",
        response=response_types.IsSleeping,
        errors=(400, 403),
    ),
)
