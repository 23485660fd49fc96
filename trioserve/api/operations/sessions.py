"""Open sessions: list them, and end them or announce their next turns by their names.

With API keys, a key sees its own sessions, and the admin's key all sessions. Without keys, callers are distinguished by
the tenant that they name.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import trio

from trioserve.api.caller import CallerKind
from trioserve.api.error_responses import refusal
from trioserve.api.request_context import RequestContext
from trioserve.api.response import Response
from trioserve.api.route_table import READS_BODY, Forwarding, Operation
from trioserve.engine.sessions import LiveSession, SessionEnd

__all__ = ["OPERATIONS", "SESSION_PATH"]

SESSION_PATH = "/v1/sessions/"
"""Path before a session's name, which may have slashes."""


class ShownSession(Response, tag_field="object", tag="session"):
    """An open session.

    Attributes:
        id: name of the session: the value of X-Session-Id or of the field that named it, or a new name.
        turns: requests so far.
        running: requests that run or wait.
        age_seconds: time since the session opened.
        idle_seconds: time since its last request began or ended.
        idle_seconds_max: time without requests after which the session ends. null: it ends with its connection.
        retention_seconds: time without requests in which the prefix cache prefers to keep its blocks.
        blocks: blocks that it prefers to keep now.
    """

    id: str
    turns: int
    running: int
    age_seconds: float
    idle_seconds: float
    idle_seconds_max: float | None
    retention_seconds: float
    blocks: int


class ShownSessions(Response, tag_field="object", tag="list"):
    data: list[ShownSession]


class SessionHint(msgspec.Struct, frozen=True, kw_only=True):
    """Hint about the next turn of a session.

    Attributes:
        returns_in_seconds: estimated time until the next turn, for example while a tool runs.
    """

    returns_in_seconds: Annotated[float, msgspec.Meta(ge=0, le=86_400)]


class DeletedSession(Response, tag_field="object", tag="session"):
    id: str
    deleted: bool


async def list_sessions(context: RequestContext) -> None:
    now = trio.current_time()
    shown = [_shown(session, now) for session in context.engine.sessions if context.owner in (None, session.owner)]
    await context.respond_json(ShownSessions(data=shown))


def _shown(session: LiveSession, now: float) -> ShownSession:
    return ShownSession(
        id=session.name,
        turns=session.turn_count,
        running=len(session.turns),
        age_seconds=round(now - session.opened_at, 3),
        idle_seconds=round(now - session.used_at, 3),
        idle_seconds_max=session.idle_seconds,
        retention_seconds=session.retention.idle_seconds,
        blocks=session.retained_block_count,
    )


async def hint_session(context: RequestContext) -> None:
    """Note that a client expects to send the next turn of a session in some seconds.

    Args:
        context: the request.

    Raises:
        InvalidRequest: the body has a bad value.
        Refusal: the caller has no open session with this name (404).
    """
    hint = await context.body(SessionHint)
    _name, found = _named(context)
    for session in found:
        session.expect_turn(hint.returns_in_seconds)
    await context.respond_json(_shown(found[0], trio.current_time()))


async def delete_session(context: RequestContext) -> None:
    """End a session of the caller, or with the admin's key the sessions of all callers that have this name.

    Args:
        context: the request.

    Raises:
        Refusal: the caller has no open session with this name (404).
    """
    name, found = _named(context)
    for session in found:
        session.end(SessionEnd.DELETED)
    await context.respond_json(DeletedSession(id=name, deleted=True))


def _named(context: RequestContext) -> tuple[str, list[LiveSession]]:
    """Return the name in the path, and the caller's open sessions with this name, at least one.

    Raises:
        Refusal: there is none.
    """
    name = context.exchange.path.removeprefix(SESSION_PATH)
    if context.caller.kind is CallerKind.ADMIN:
        found = [session for session in context.engine.sessions if session.name == name]
    else:
        own = context.engine.sessions.find(name, identity=context.caller.tenant(context.named_tenant))
        found = [] if own is None else [own]
    if not found:
        raise refusal("session_not_found", f"you have no open session {name[:80]!r}: it has ended, or never began")
    return name, found


OPERATIONS: tuple[Operation[RequestContext], ...] = (
    Operation(
        method="GET",
        path="/v1/sessions",
        handler=list_sessions,
        summary="List open sessions",
        is_operators=True,
        description="Lists the sessions of the caller's key, or all sessions with the admin's key or without keys.",
        response=ShownSessions,
    ),
    Operation(
        method="POST",
        path=SESSION_PATH + "{session}",
        handler=hint_session,
        summary="Announce the next turn of a session",
        id_has_slashes=True,
        forwarding=Forwarding.STREAM,
        description="The preference for the session's blocks lasts longer. With --session-prefetch, evicted blocks are "
        "loaded from the KV connector shortly before the turn.",
        body=SessionHint,
        response=ShownSession,
        errors=(*READS_BODY, 404),
        path_parameter="the session's X-Session-Id, or the prompt_cache_key that named it",
    ),
    Operation(
        method="DELETE",
        path=SESSION_PATH + "{session}",
        handler=delete_session,
        summary="End a session",
        id_has_slashes=True,
        forwarding=Forwarding.STREAM,
        description="Its requests that run are aborted, and the prefix cache evicts its blocks first. The admin's key "
        "ends the sessions of all callers with this name.",
        response=DeletedSession,
        errors=(400, 404),
        path_parameter="the session's X-Session-Id, or the prompt_cache_key that named it",
    ),
)
