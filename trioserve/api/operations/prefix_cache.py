"""POST /reset_prefix_cache, as in vLLM, and SGLang's /flush_cache: empties the prefix cache.

They need the admin's key, since all callers' requests are slower with an empty cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trioserve.api.caller import check_is_admin
from trioserve.api.openai import response_types
from trioserve.api.query import Query
from trioserve.api.route_table import Operation
from trioserve.contracts.errors import InvalidRequest

if TYPE_CHECKING:
    from trioserve.api.request_context import RequestContext

__all__ = ["OPERATIONS", "flush_cache", "reset_prefix_cache"]


async def reset_prefix_cache(context: RequestContext) -> None:
    """Empty the prefix cache at once. reset_running_requests needs a paused engine.

    Args:
        context: the request.

    Raises:
        InvalidRequest: the query has a bad value.
        Refusal: the caller is not the admin (403).
    """
    _check_may(context)
    query = Query(context.exchange.query)
    if query.flag("reset_external", False):
        raise InvalidRequest(
            "reset_external is not supported, since the caches of connectors cannot be emptied: leave it out",
            param="reset_external",
        )
    context.engine.reset_prefix_cache(retract=query.flag("reset_running_requests", False))
    await context.respond_json({"status": "ok"})


async def flush_cache(context: RequestContext) -> None:
    """Empty the prefix cache, with SGLang's name. Running requests keep their blocks and continue.

    Args:
        context: the request.

    Raises:
        Refusal: the caller is not the admin (403).
    """
    _check_may(context)
    context.engine.reset_prefix_cache()
    await context.respond_json({"message": "Cache flushed.", "status": "ok"})


def _check_may(context: RequestContext) -> None:
    check_is_admin(context.caller, "emptying the cache needs the admin's API key: see --admin-api-key")


OPERATIONS: tuple[Operation[RequestContext], ...] = (
    Operation(
        method="POST",
        path="/reset_prefix_cache",
        handler=reset_prefix_cache,
        summary="Empty the prefix cache",
        is_operators=True,
        description="Needs the admin's key, if there are keys. Running requests keep their blocks.",
        response=response_types.CacheReset,
        errors=(400, 403),
        query={
            "reset_running_requests": (
                "true: recompute the KV of paused requests; only for a paused engine",
                {"type": "boolean", "default": False},
            ),
            "reset_external": (
                "refused: the caches of connectors cannot be emptied",
                {"type": "boolean", "default": False},
            ),
        },
    ),
    Operation(
        method="POST",
        path="/flush_cache",
        handler=flush_cache,
        summary="Empty the prefix cache (SGLang's name of /reset_prefix_cache)",
        is_operators=True,
        response=response_types.PauseChanged,
        errors=(400, 403),
    ),
)
