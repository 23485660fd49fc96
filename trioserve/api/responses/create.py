"""POST /v1/responses: whole, streamed, or begun in the background; and POST /v1/responses/input_tokens.

A response is stored when it is complete, and before its client is told so. A client that leaves ends the response like
everywhere, and nothing of it is kept; a background response goes on.
"""

from __future__ import annotations

from trioserve.api.error_responses import ErrorResponse
from trioserve.api.request_context import RequestContext
from trioserve.api.responses.events import Event, event_bytes
from trioserve.api.responses.items import response_id
from trioserve.api.responses.plan import plan_prompt, plan_response
from trioserve.api.responses.request_types import InputTokensBody, ResponsesBody
from trioserve.api.responses.response_run import ResponseRun
from trioserve.api.responses.stored_responses import KIND, stored_bytes
from trioserve.api.surface import OpenAISurface
from trioserve.store.stored_objects import PutObject

__all__ = ["count_input_tokens", "create_response"]


async def create_response(context: RequestContext) -> None:
    body = await context.body(ResponsesBody)
    planned = await plan_response(context, body, response_id(context.clock_and_ids.new_request_id()))
    if body.background:
        await context.background.begin(context, planned)
        return
    run = ResponseRun(context, planned)
    async with run.turn as turn:
        if body.stream:
            await turn.wait_until_begun()
            context.surface = _StreamSurface(run)
            await context.start_events()

            async def send(events: list[Event]) -> None:
                await context.exchange.send(b"".join(map(event_bytes, events)))

            await send(run.events.begin())
            await run.read(send, keep_alive=context.keep_alive)
        else:
            run.events.begin()
            await run.read(None)
    # The engine's part is over, and its scope left.
    last, response = run.complete()
    if planned.head.stores:
        assert context.store is not None
        kept = PutObject(kind=KIND, id=planned.head.id, owner=context.owner, body=stored_bytes(run.stored(response)))
        await context.store.write(kept)
    if body.stream:
        await context.finish(b"".join(map(event_bytes, last)))
    else:
        await context.respond_json(response)


async def count_input_tokens(context: RequestContext) -> None:
    """How many tokens a response's prompt would have."""
    turn = await plan_prompt(context, await context.body(InputTokensBody))
    with context.engine.tokenizing(owner=context.owner) as texts:
        token_ids = await texts.encode(turn.prompt(), add_special_tokens=False)
    await context.respond_json({"object": "response.input_tokens", "input_tokens": len(token_ids)})


class _StreamSurface(OpenAISurface):
    """A stream that breaks off ends with `response.failed`, whatever it was."""

    def __init__(self, run: ResponseRun) -> None:
        self._run = run

    def event(self, error: ErrorResponse, request_id: str) -> bytes:
        events, _response = self._run.fail(error)
        return b"".join(map(event_bytes, events))
