"""Operators pause the engine, put it to sleep and empty its prefix cache, with the paths of vLLM and SGLang.

All these paths need the admin's key, since they concern all callers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from trioserve.api.form import Query
from trioserve.api.openai.request_types import PauseBody, decode_body
from trioserve.api.response import Response
from trioserve.api.route_table import READS_BODY, Operation
from trioserve.contracts.errors import InvalidRequest

if TYPE_CHECKING:
    from trioserve.api.request_context import EngineContext, PauseMode, RequestContext

__all__ = ["OPERATIONS", "continue_generation", "pause", "pause_generation", "read_is_paused", "resume"]

MODES: dict[str, Literal["abort", "wait", "keep"]] = {"abort": "abort", "wait": "wait", "keep": "keep"}
SGLANG_MODES: dict[str, PauseMode] = {"abort": "abort", "in_place": "keep", "retract": "retract"}


class PauseStatus(Response):
    status: Literal["paused", "resumed"]


class CacheReset(Response, tag_field="status", tag="ok"):
    """Response after the prefix cache was emptied."""


class IsPaused(Response):
    is_paused: bool


class IsSleeping(Response):
    is_sleeping: bool


class KvCacheSize(Response):
    tokens: int
    tokens_max: int


class PauseChanged(Response, tag_field="status", tag="ok"):
    message: str


async def pause(context: EngineContext) -> None:
    """Pause the engine. Responds when no step is in flight, and with mode=wait when running requests have ended.

    As in vLLM, the prefix cache is emptied unless the caller sends clear_cache=false.

    Args:
        context: the request.

    Raises:
        InvalidRequest: the query has a bad value.
        Refusal: the caller is not the admin (403).
    """
    query = Query(context.exchange.query)
    # The field wait_for_inflight_requests is vLLM's older name of mode=wait.
    waits = query.flag("wait_for_inflight_requests", False)
    mode = query.choice("mode", tuple(MODES), "abort")
    await context.pause(MODES["wait" if waits else mode], clear_cache=query.flag("clear_cache", True))
    await context.respond_json(PauseStatus(status="paused"))


async def resume(context: EngineContext) -> None:
    context.engine.resume_generation()
    await context.respond_json(PauseStatus(status="resumed"))


async def read_is_paused(context: EngineContext) -> None:
    await context.respond_json(IsPaused(is_paused=context.engine.is_paused))


async def pause_generation(context: EngineContext) -> None:
    """Pause the engine, with SGLang's name and optional body.

    Args:
        context: the request.

    Raises:
        InvalidRequest: the body has a bad value.
        Refusal: the caller is not the admin (403).
    """
    raw = await context.exchange.body()
    body = decode_body(raw, PauseBody) if raw else PauseBody()
    await context.pause(SGLANG_MODES[body.mode], clear_cache=False)
    await context.respond_json(PauseChanged(message="Generation paused successfully."))


async def continue_generation(context: EngineContext) -> None:
    context.engine.resume_generation()
    await context.respond_json(PauseChanged(message="Generation continued successfully."))


async def sleep(context: EngineContext) -> None:
    """Let the engine sleep. Responds when the memory is free.

    Args:
        context: the request.

    Raises:
        InvalidRequest: the query has a bad value.
        Refusal: the caller is not the admin (403).
    """
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
    if Query(context.exchange.query).text("tags") is not None:
        raise InvalidRequest(
            "tags are not supported, since all memory is allocated together: leave tags out", param="tags"
        )
    await context.engine.wake_up()
    await _respond(context)


async def read_is_sleeping(context: EngineContext) -> None:
    await _respond(context)


async def _respond(context: EngineContext) -> None:
    await context.respond_json(IsSleeping(is_sleeping=context.engine.is_sleeping))


async def reset_prefix_cache(context: RequestContext) -> None:
    """Empty the prefix cache at once. reset_running_requests needs a paused engine.

    Args:
        context: the request.

    Raises:
        InvalidRequest: the query has a bad value.
        Refusal: the caller is not the admin (403).
    """
    query = Query(context.exchange.query)
    if query.flag("reset_external", False):
        raise InvalidRequest(
            "reset_external is not supported, since the caches of connectors cannot be emptied: leave it out",
            param="reset_external",
        )
    context.engine.reset_prefix_cache(retract=query.flag("reset_running_requests", False))
    await context.respond_json(CacheReset())


async def flush_cache(context: RequestContext) -> None:
    """Empty the prefix cache, with SGLang's name. Running requests keep their blocks and continue.

    Args:
        context: the request.

    Raises:
        Refusal: the caller is not the admin (403).
    """
    context.engine.reset_prefix_cache()
    await context.respond_json(PauseChanged(message="Cache flushed."))


async def limit_kv_cache(context: RequestContext) -> None:
    """Limit the KV cache to some tokens, or return its size if the caller sends no limit.

    Responds when the memory of the rest was released, which may have to wait for running requests. If the client leaves
    before, the former limit is restored.

    Args:
        context: the request.

    Raises:
        InvalidRequest: tokens is out of range, or the engine cannot release a part of its KV cache.
        Refusal: the caller is not the admin (403).
    """
    engine = context.engine
    if Query(context.exchange.query).text("tokens") is not None:
        await engine.limit_kv_cache(Query(context.exchange.query).number("tokens", 1, low=1, high=2**40))
    tokens, tokens_max = engine.kv_cache_tokens
    await context.respond_json(KvCacheSize(tokens=tokens, tokens_max=tokens_max))


OPERATIONS: tuple[Operation[RequestContext], ...] = (
    Operation(
        method="POST",
        path="/pause",
        handler=pause,
        summary="Begin no more steps until /resume",
        admin_action="pausing the engine",
        is_operators=True,
        description="Responds when no step is in flight. New requests wait.",
        response=PauseStatus,
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
        admin_action="pausing the engine",
        is_operators=True,
        response=PauseStatus,
        errors=(400, 403),
    ),
    Operation(
        method="GET",
        path="/is_paused",
        handler=read_is_paused,
        summary="Say if the engine is paused",
        admin_action="pausing the engine",
        response=IsPaused,
        errors=(400, 403),
    ),
    Operation(
        method="POST",
        path="/pause_generation",
        handler=pause_generation,
        summary="Pause (SGLang's name of /pause)",
        admin_action="pausing the engine",
        is_operators=True,
        body=PauseBody,
        response=PauseChanged,
        errors=(*READS_BODY, 403),
    ),
    Operation(
        method="POST",
        path="/continue_generation",
        handler=continue_generation,
        summary="Resume after a pause (SGLang's name of /resume)",
        admin_action="pausing the engine",
        is_operators=True,
        response=PauseChanged,
        errors=(400, 403),
    ),
    Operation(
        method="POST",
        path="/sleep",
        handler=sleep,
        summary="Free memory until /wake_up",
        admin_action="sleeping",
        is_operators=True,
        description="Pauses first. Responds when the memory is free. New requests wait.",
        response=IsSleeping,
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
        admin_action="sleeping",
        is_operators=True,
        response=IsSleeping,
        errors=(400, 403, 503),
    ),
    Operation(
        method="GET",
        path="/is_sleeping",
        handler=read_is_sleeping,
        summary="Say if the engine sleeps",
        admin_action="sleeping",
        response=IsSleeping,
        errors=(400, 403),
    ),
    Operation(
        method="POST",
        path="/reset_prefix_cache",
        handler=reset_prefix_cache,
        summary="Empty the prefix cache",
        admin_action="emptying the cache",
        is_operators=True,
        description="Running requests keep their blocks.",
        response=CacheReset,
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
        admin_action="emptying the cache",
        is_operators=True,
        response=PauseChanged,
        errors=(400, 403),
    ),
    Operation(
        method="POST",
        path="/kv_cache",
        handler=limit_kv_cache,
        summary="Limit the KV cache, and free the memory of the rest",
        admin_action="limiting the KV cache",
        is_operators=True,
        response=KvCacheSize,
        errors=(400, 403, 503),
        query={
            "tokens": (
                "tokens that the cache may hold, from one full context to the size at the start; without it, only the "
                "size is returned",
                {"type": "integer", "minimum": 1},
            ),
        },
    ),
)
