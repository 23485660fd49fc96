"""POST /v1/responses: whole, streamed, or begun in the background; and POST /v1/responses/input_tokens.

A response is stored when it is complete, and before its client is told so. A client that leaves ends the response like
everywhere, and nothing of it is kept; a background response goes on. Where the disk is full it is kept in memory until
there is room; if that is full, too, the client gets the response all the same, with `store` false.
"""

from __future__ import annotations

from trioserve.api.error_responses import ErrorResponse
from trioserve.api.responses.events import Event, event_bytes
from trioserve.api.responses.items import item_id, item_place, response_id
from trioserve.api.responses.plan import plan_prompt, plan_response
from trioserve.api.responses.request_types import InputTokensBody, ResponsesBody
from trioserve.api.responses.response_run import ResponseRun
from trioserve.api.responses.stored_responses import KIND, stored_bytes
from trioserve.api.resumption import Resumption
from trioserve.api.server_context import ServerContext
from trioserve.api.surface import OpenAISurface
from trioserve.api.whole_response import LargeJson
from trioserve.contracts.errors import DiskFull, InvalidRequest, StoreFault
from trioserve.contracts.output import Delta
from trioserve.store.stored_objects import Change, DeleteObject, PutObject

__all__ = ["count_input_tokens", "create_response"]

NUMBER_DIGITS_MAX = 9


async def create_response(context: ServerContext) -> None:
    body = await context.body(ResponsesBody)
    key = _key(context, body)
    planned = await plan_response(context, body, response_id(key))
    if body.background:
        await context.server.background.begin(context, planned)
        return
    # The last event repeats all log probabilities, and routers do not keep those of tokens that are known.
    is_streamed = bool(body.stream) and not body.wants_logprobs
    resumption = Resumption(
        context,
        body.resume,
        planned.turn.sampling,
        is_streamed=is_streamed,
        gives_partial=bool(body.return_partial),
        repeats=True,
    )
    run = ResponseRun(context, planned, resumption)
    async with run.turn as turn:
        begun = run.events.begin()
        if body.stream:
            ids = resumption.group_ids()

            async def start_events() -> None:
                context.surface = _StreamSurface(run)
                head = resumption.headers([turn.stream], id=key, created=planned.head.created_at)
                await context.start_events(head)

            await context.begin_events(turn.wait_until_begun, start_events)

            async def send(events: list[Event], delta: Delta) -> None:
                piece = b"".join(map(event_bytes, events))
                if ids is not None:
                    piece = ids.group(piece, 0, delta, b" %d" % run.events.next_number)
                if piece:
                    await context.exchange.send(piece)

            known = await run.skip_known()
            if resumption.state is None:  # what its client has was another stream
                start = b"".join(map(event_bytes, [*begun, *known]))
                await context.exchange.send(start if ids is None else ids.begin(start, b"%d" % run.events.next_number))
            else:
                run.events.go_on_at(_number(resumption.state))
            await run.read(send, keep_alive=context.keep_alive)
        else:
            await run.skip_known()
            await run.read(None)
    # The engine's part is over, and its scope left.
    last, response = run.complete()
    if planned.head.stores:
        assert context.store is not None
        kept = PutObject(kind=KIND, id=planned.head.id, owner=context.owner, body=stored_bytes(run.stored(response)))
        changes: tuple[Change, ...] = (kept,)
        if body.resume is not None and await context.store.get(KIND, kept.id, owner=context.owner) is not None:
            changes = (DeleteObject(kind=KIND, id=kept.id), kept)  # it was complete, and its client lost
        try:
            await context.store.settle(*changes)
        except (DiskFull, StoreFault):
            # The disk takes nothing, and the store's memory is full, too. The client gets what was computed.
            response["store"] = False  # the last event has the same object
    if body.stream:
        end = b"".join(map(event_bytes, last))
        await context.finish(end if ids is None else ids.last(end))
    else:
        large = LargeJson()
        for item in response["output"]:
            for part in item.get("content") or ():
                if part.get("logprobs"):
                    weight = 1 + (body.top_logprobs or 0)
                    part["logprobs"] = await large.add(part["logprobs"], list, item_weight=weight)
        await context.respond_large(large, response)


def _key(context: ServerContext, body: ResponsesBody) -> str:
    """Of the response's id. Raises InvalidRequest."""
    resume = body.resume
    if resume is None:
        return context.clock_and_ids.new_request_id()
    if body.background:
        raise InvalidRequest(
            "resume is set, but a background response goes on by itself: leave one out", param="resume"
        )
    _number(resume.state or "0")
    if resume.id is None:
        return context.clock_and_ids.new_request_id()
    if item_place(item_id("message", response_id(resume.id), 0)) is None:
        raise InvalidRequest("resume.id is not what the head of the response said", param="resume.id")
    return resume.id


def _number(state: str) -> int:
    """Raises InvalidRequest."""
    if not (state.isascii() and state.isdigit() and len(state) <= NUMBER_DIGITS_MAX):
        raise InvalidRequest(f"resume.state is {state[:80]!r}, allowed is what the last id said", param="resume.state")
    return int(state)


async def count_input_tokens(context: ServerContext) -> None:
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
