"""POST /sleep and /wake_up, and GET /is_sleeping, as in vLLM: the engine gives memory back for a while.

They are the admin's, as a pause is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trioserve.api.caller import check_is_admin
from trioserve.api.operations.pausing import MODES
from trioserve.api.query import Query
from trioserve.contracts.errors import InvalidRequest

if TYPE_CHECKING:
    from trioserve.api.engine_context import EngineContext

__all__ = ["read_is_sleeping", "sleep", "wake_up"]


async def sleep(context: EngineContext) -> None:
    """Responds when the memory is given back."""
    _check_may(context)
    query = Query(context.exchange.query)
    level = query.number("level", 1, low=1, high=2)
    await context.engine.sleep(level, MODES[query.choice("mode", tuple(MODES), "abort")])
    await _respond(context)


async def wake_up(context: EngineContext) -> None:
    """Responds when all of it is there again."""
    _check_may(context)
    if Query(context.exchange.query).text("tags") is not None:
        raise InvalidRequest("all memory is taken again at once: leave tags out", param="tags")
    await context.engine.wake_up()
    await _respond(context)


async def read_is_sleeping(context: EngineContext) -> None:
    _check_may(context)
    await _respond(context)


async def _respond(context: EngineContext) -> None:
    await context.respond_json({"is_sleeping": context.engine.is_sleeping})


def _check_may(context: EngineContext) -> None:
    check_is_admin(context.caller, "the engine sleeps with the admin's API key: see --admin-api-key")
