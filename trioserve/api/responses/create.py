"""Handlers of POST /v1/responses (whole, streamed, or in the background) and POST /v1/responses/input_tokens.

A response is stored when it is complete, before its client gets the end. If the client leaves, the request is cancelled
and nothing is stored. A background response continues. If the disk is full, the store keeps the response in memory. If
that memory is full, the client still gets the response, with `store` set to false.
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
    """Answer with a response to input items.

    Args:
        context: The request.
    """
    body = await context.body(ResponsesBody)
    key = _key(context, body)
    planned = await plan_response(context, body, response_id(key))
    if body.background:
        await context.server.background.begin(context, planned)
        return
    # A stream with log probabilities cannot be resumed: its last event repeats all of them, and routers do not keep
    # the log probabilities of known tokens.
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
            if resumption.state is None:  # the client has no events of this stream yet
                start = b"".join(map(event_bytes, [*begun, *known]))
                await context.exchange.send(start if ids is None else ids.begin(start, b"%d" % run.events.next_number))
            else:
                run.events.continue_at(_number(resumption.state))
            await run.read(send, keep_alive=context.keep_alive)
        else:
            await run.skip_known()
            await run.read(None)
    # The turn is left first, so that a slow store or client does not hold blocks of the engine.
    last, response = run.complete()
    if planned.head.stores:
        assert context.store is not None
        kept = PutObject(kind=KIND, id=planned.head.id, owner=context.owner, body=stored_bytes(run.stored(response)))
        changes: tuple[Change, ...] = (kept,)
        if body.resume is not None and await context.store.get(KIND, kept.id, owner=context.owner) is not None:
            changes = (
                DeleteObject(kind=KIND, id=kept.id),
                kept,
            )  # An earlier run was stored, but its client lost the connection. Replace it.
        try:
            await context.store.settle(*changes)
        except (DiskFull, StoreFault):
            # Disk and memory of the store are full. The client still gets the response.
            response["store"] = False  # The last event contains this object, so it changes, too.
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
    """Return the unique part of the response's id.

    Raises:
        InvalidRequest: The resume state is invalid.
    """
    resume = body.resume
    if resume is None:
        return context.clock_and_ids.new_request_id()
    if body.background:
        raise InvalidRequest(
            "resume is set, but a background response continues by itself: leave out resume or background",
            param="resume",
        )
    _number(resume.state or "0")
    if resume.id is None:
        return context.clock_and_ids.new_request_id()
    if item_place(item_id("message", response_id(resume.id), 0)) is None:
        raise InvalidRequest("resume.id is not the id from the head of the response", param="resume.id")
    return resume.id


def _number(state: str) -> int:
    """Return the event number in a resume state.

    Raises:
        InvalidRequest: The state is no number.
    """
    if not (state.isascii() and state.isdigit() and len(state) <= NUMBER_DIGITS_MAX):
        raise InvalidRequest(
            f"resume.state is {state[:80]!r}, allowed is the state from the last event id", param="resume.state"
        )
    return int(state)


async def count_input_tokens(context: ServerContext) -> None:
    """Answer with the number of tokens that a response's prompt would have.

    Args:
        context: The request.
    """
    turn = await plan_prompt(context, await context.body(InputTokensBody))
    with context.engine.tokenizing(owner=context.owner) as texts:
        token_ids = await texts.encode(turn.prompt(), add_special_tokens=False)
    await context.respond_json({"object": "response.input_tokens", "input_tokens": len(token_ids)})


class _StreamSurface(OpenAISurface):
    """Error format of a stream. Every error becomes the event `response.failed`."""

    def __init__(self, run: ResponseRun) -> None:
        self._run = run

    def event(self, error: ErrorResponse, request_id: str) -> bytes:
        events, _response = self._run.fail(error)
        return b"".join(map(event_bytes, events))
