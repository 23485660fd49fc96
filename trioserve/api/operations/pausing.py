"""POST /pause, /resume and GET /is_paused, as in vLLM, and SGLang's /pause_generation and /continue_generation.

They need the admin's key, since a pause blocks all callers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from trioserve.api.caller import check_is_admin
from trioserve.api.openai import response_types
from trioserve.api.openai.request_types import PauseBody, decode_body
from trioserve.api.query import Query
from trioserve.api.route_table import READS_BODY, Operation

if TYPE_CHECKING:
    from trioserve.api.engine_context import EngineContext, PauseMode

__all__ = ["OPERATIONS", "continue_generation", "pause", "pause_generation", "read_is_paused", "resume"]

MODES: dict[str, Literal["abort", "wait", "keep"]] = {"abort": "abort", "wait": "wait", "keep": "keep"}
SGLANG_MODES: dict[str, PauseMode] = {"abort": "abort", "in_place": "keep", "retract": "retract"}


async def pause(context: EngineContext) -> None:
    """Pause the engine. Responds when no step is in flight, and with mode=wait when running requests have ended.

    As in vLLM, the prefix cache is emptied unless the caller sends clear_cache=false.

    Args:
        context: the request.

    Raises:
        InvalidRequest: the query has a bad value.
        Refusal: the caller is not the admin (403).
    """
    _check_may(context)
    query = Query(context.exchange.query)
    waits = query.flag("wait_for_inflight_requests", False)  # vLLM's older name of mode=wait
    mode = "wait" if waits else query.choice("mode", tuple(MODES), "abort")
    await context.pause(MODES[mode], clear_cache=query.flag("clear_cache", True))
    await context.respond_json({"status": "paused"})


async def resume(context: EngineContext) -> None:
    _check_may(context)
    context.engine.resume_generation()
    await context.respond_json({"status": "resumed"})


async def read_is_paused(context: EngineContext) -> None:
    _check_may(context)
    await context.respond_json({"is_paused": context.engine.is_paused})


async def pause_generation(context: EngineContext) -> None:
    """Pause the engine, with SGLang's name and optional body.

    Args:
        context: the request.

    Raises:
        InvalidRequest: the body has a bad value.
        Refusal: the caller is not the admin (403).
    """
    _check_may(context)
    raw = await context.exchange.body()
    body = decode_body(raw, PauseBody) if raw else PauseBody()
    await context.pause(SGLANG_MODES[body.mode], clear_cache=False)
    await context.respond_json({"message": "Generation paused successfully.", "status": "ok"})


async def continue_generation(context: EngineContext) -> None:
    _check_may(context)
    context.engine.resume_generation()
    await context.respond_json({"message": "Generation continued successfully.", "status": "ok"})


def _check_may(context: EngineContext) -> None:
    check_is_admin(context.caller, "pausing the engine needs the admin's API key: see --admin-api-key")


OPERATIONS: tuple[Operation[EngineContext], ...] = (
    Operation(
        method="POST",
        path="/pause",
        handler=pause,
        summary="Begin no more steps until /resume",
        is_operators=True,
        description="Needs the admin's key, if there are keys. Responds when no step is in flight. New requests wait.",
        response=response_types.PauseStatus,
        errors=(400, 403, 503),
        query={
            "mode": (
                "how to treat running requests: end them with their partial results, wait for them, or pause them",
                {"type": "string", "enum": ["abort", "wait", "keep"], "default": "abort"},
            ),
            "wait_for_inflight_requests": ("the older name of mode=wait", {"type": "boolean", "default": False}),
            "clear_cache": (
                "true: empty the prefix cache, and recompute the KV of paused requests",
                {"type": "boolean", "default": True},
            ),
        },
    ),
    Operation(
        method="POST",
        path="/resume",
        handler=resume,
        summary="Resume after a pause",
        is_operators=True,
        response=response_types.PauseStatus,
        errors=(400, 403),
    ),
    Operation(
        method="GET",
        path="/is_paused",
        handler=read_is_paused,
        summary="Say if the engine is paused",
        response=response_types.IsPaused,
        errors=(400, 403),
    ),
    Operation(
        method="POST",
        path="/pause_generation",
        handler=pause_generation,
        summary="Pause (SGLang's name of /pause)",
        is_operators=True,
        body=PauseBody,
        response=response_types.PauseChanged,
        errors=(*READS_BODY, 403),
    ),
    Operation(
        method="POST",
        path="/continue_generation",
        handler=continue_generation,
        summary="Resume after a pause (SGLang's name of /resume)",
        is_operators=True,
        response=response_types.PauseChanged,
        errors=(400, 403),
    ),
)
