"""The requests that live at this moment: to be listed, and to be aborted by id.

With API keys, a key sees and aborts the requests that it made, and an admin key all of them; the ids of others are
unknown to it. Without keys everybody sees everything.
"""

from __future__ import annotations

from trioserve.api.engine_context import EngineContext
from trioserve.api.error_responses import Refusal, refusal
from trioserve.api.openai.request_types import AbortBody, decode_body
from trioserve.api.request_context import RequestContext
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.events import AbortOutcome
from trioserve.contracts.live import LiveRequestView

__all__ = [
    "REQUEST_PATH",
    "abort_request",
    "abort_requests",
    "checked_ids",
    "list_requests",
    "respond_aborted",
    "unknown_request",
]

REQUEST_PATH = "/v1/requests/"
"""What follows is the request's id, slashes included."""


ABORTS_MAX = 1000  # ids in one call; each answers with a line


async def list_requests(context: RequestContext) -> None:
    views = context.engine.live_requests(owner=context.owner)
    await context.respond_json({"object": "list", "data": [_shown(view) for view in views]})


async def abort_request(context: EngineContext) -> None:
    """Answers 200 with what it did; 404 if no request of this caller bears the id."""
    request_id = context.exchange.path.removeprefix(REQUEST_PATH)
    outcome = context.engine.abort([request_id], owner=context.owner)[request_id]
    if outcome is AbortOutcome.UNKNOWN:
        raise unknown_request(request_id)
    await context.respond_json({"id": request_id, "object": "request.abort", "result": outcome.value})


def unknown_request(request_id: str) -> Refusal:
    """404: for an id that no live request of this caller bears."""
    return refusal(
        "request_not_found",
        f"no request with the id {request_id!r} is known; every response has its id in X-Request-Id",
    )


async def abort_requests(context: EngineContext) -> None:
    """Answers with a result for each id, in the order in which they came."""
    body = decode_body(await context.exchange.body(), AbortBody)
    if body.return_partial:
        raise InvalidRequest(
            "return_partial is set, and only an engine that makes text has what there is of a request: ask that",
            param="return_partial",
        )
    await respond_aborted(context, body)


async def respond_aborted(context: EngineContext, body: AbortBody) -> None:
    """End the requests that are named, without what there is of them."""
    outcomes = context.engine.abort(checked_ids(body.ids), owner=context.owner, min_age_seconds=body.min_age_seconds)
    await context.respond_json(
        {
            "object": "list",
            "data": [
                {"id": request_id, "object": "request.abort", "result": outcome.value}
                for request_id, outcome in outcomes.items()
            ],
        }
    )


def checked_ids(ids: list[str]) -> list[str]:
    """Raises InvalidRequest."""
    if not 1 <= len(ids) <= ABORTS_MAX:
        raise InvalidRequest(f"ids has {len(ids)} entries, allowed are 1 to {ABORTS_MAX}", param="ids")
    return ids


def _shown(view: LiveRequestView) -> dict[str, object]:
    return {
        "id": view.id,
        "object": "request",
        "state": view.state,
        "phase": view.phase.value,
        "priority": view.priority,
        "age_seconds": round(view.age_seconds, 3),
        "prompt_tokens": view.prompt_token_count,
        "completion_tokens": view.completion_token_count,
        "blocks": view.block_count,
    }
