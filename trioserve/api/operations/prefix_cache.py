"""POST /reset_prefix_cache, as in vLLM, and SGLang's /flush_cache: what was computed is no hit any more.

They are the admin's: whoever may empty the cache has everybody wait longer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trioserve.api.caller import check_is_admin
from trioserve.api.query import Query
from trioserve.contracts.errors import InvalidRequest

if TYPE_CHECKING:
    from trioserve.api.request_context import RequestContext

__all__ = ["flush_cache", "reset_prefix_cache"]


async def reset_prefix_cache(context: RequestContext) -> None:
    """Responds when it is done, at once. reset_running_requests is for an engine that pauses."""
    _check_may(context)
    query = Query(context.exchange.query)
    if query.flag("reset_external", False):
        raise InvalidRequest("what a connector keeps elsewhere it keeps: leave it out", param="reset_external")
    context.engine.reset_prefix_cache(retract=query.flag("reset_running_requests", False))
    await context.respond_json({"status": "ok"})


async def flush_cache(context: RequestContext) -> None:
    """The same with SGLang's name. Requests that run keep what they use, and go on."""
    _check_may(context)
    context.engine.reset_prefix_cache()
    await context.respond_json({"message": "Cache flushed.", "status": "ok"})


def _check_may(context: RequestContext) -> None:
    check_is_admin(context.caller, "the cache is emptied with the admin's API key: see --admin-api-key")
