"""Operations of the Responses API: create a response, read, cancel and delete it, and list its input.

A response is stored when it is complete, before its client gets the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trioserve.api.error_responses import ErrorResponse
from trioserve.api.form import Query
from trioserve.api.responses.events import event_bytes
from trioserve.api.responses.request_types import RESPONSES_REFUSED, InputTokensBody, ResponsesBody
from trioserve.api.responses.response_object import FINAL, failed_object, item_id, item_place, response_id
from trioserve.api.responses.response_run import ResponseRun, plan_prompt, plan_response
from trioserve.api.responses.response_types import (
    DeletedResponse,
    InputTokens,
    MessageItem,
    OutputTextPart,
    ResponseEvent,
    ResponseItems,
    ResponseObject,
)
from trioserve.api.responses.stored_responses import KIND, StoredResponse, not_found, read_stored
from trioserve.api.route_table import GENERATES, READS_BODY, Forwarding, Operation
from trioserve.api.server_context import ServerContext
from trioserve.api.streams.detached_stream import split_events
from trioserve.api.streams.resumption import Resumption
from trioserve.api.surface import OpenAISurface
from trioserve.api.whole_response import LargeJson
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.output import Delta
from trioserve.contracts.request import PRIORITY_MAX, PRIORITY_MIN
from trioserve.contracts.sampling import SAMPLING_RANGES, Range
from trioserve.store.stored_objects import DeleteObject, StoredObject

if TYPE_CHECKING:
    from trioserve.api.server_context import ServerContext

__all__ = [
    "cancel_response",
    "count_input_tokens",
    "create_response",
    "delete_response",
    "list_input_items",
    "read_response",
    "serve_connection",
]


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
    # A stream with log probabilities cannot be resumed, because its last event repeats all of them, and routers do not
    # keep the log probabilities of known tokens.
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

            async def send(events: list[ResponseEvent], delta: Delta) -> None:
                piece = b"".join(map(event_bytes, events))
                if ids is not None:
                    piece = ids.group(piece, 0, delta, b" %d" % run.events.next_number)
                if piece:
                    await context.exchange.send(piece)

            known = await run.skip_known()
            if resumption.state is None:  # The client has received no events of this stream yet.
                start = b"".join(map(event_bytes, [*begun, *known]))
                await context.exchange.send(start if ids is None else ids.begin(start, b"%d" % run.events.next_number))
            else:
                run.events.continue_at(_number(resumption.state))
            await run.read(send, keep_alive=context.keep_alive)
        else:
            await run.skip_known()
            await run.read(None)
    # The code above has left the turn's scope, so that a slow store or client does not hold blocks of the engine.
    last, response = run.complete()
    await run.store(context, response)
    if body.stream:
        end = b"".join(map(event_bytes, last))
        await context.finish(end if ids is None else ids.last(end))
    else:
        large = LargeJson()
        for item in response.output:
            for part in item.content if isinstance(item, MessageItem) else ():
                if isinstance(part, OutputTextPart) and part.logprobs:
                    weight = 1 + (body.top_logprobs or 0)
                    part.logprobs = await large.add(part.logprobs, list, item_weight=weight)
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


async def serve_connection(context: ServerContext) -> None:
    """Serve a websocket connection, on which a client creates any number of responses.

    Args:
        context: The request that opens the websocket.
    """
    await context.server.connections.serve(context)


async def count_input_tokens(context: ServerContext) -> None:
    """Answer with the number of tokens that a response's prompt would have.

    Args:
        context: The request.
    """
    turn = await plan_prompt(context, await context.body(InputTokensBody))
    with context.engine.tokenizing(owner=context.owner) as texts:
        token_ids = await texts.encode(turn.prompt(), add_special_tokens=False)
    await context.respond_json(InputTokens(input_tokens=len(token_ids)))


class _StreamSurface(OpenAISurface):
    """Error format of a stream. Every error becomes the event `response.failed`."""

    def __init__(self, run: ResponseRun) -> None:
        self._run = run

    def event(self, error: ErrorResponse, request_id: str) -> bytes:
        events, _response = self._run.fail(error)
        return b"".join(map(event_bytes, events))


PAGE_ITEMS_MAX = 100  # OpenAI's API has the same limit.
PAGE_ITEMS = 20


async def read_response(context: ServerContext) -> None:
    """Send a response. With `stream=true`, send its events from the beginning or after the number `starting_after`.

    Args:
        context: The request.
    """
    response_id, query = _response_id(context), Query(context.exchange.query)
    if query.text("stream") in ("true", "1"):
        await _stream(context, response_id, query.number("starting_after", -1, low=0, high=2**53))
        return
    live = context.server.background.find(response_id, context.owner)
    if live is not None:
        await context.respond_json(live.snapshot())
        return
    await context.respond_json(_ended_response(read_stored(await _kept(context, response_id))))


async def delete_response(context: ServerContext) -> None:
    """Delete a response. A running background response is cancelled first.

    Args:
        context: The request.
    """
    response_id = _response_id(context)
    live = context.server.background.find(response_id, context.owner)
    if live is not None:
        live.scope.cancel()
        await live.done.wait()
    await _kept(context, response_id)
    assert context.services.store is not None
    await context.services.store.settle(DeleteObject(kind=KIND, id=response_id))
    await context.respond_json(DeletedResponse(id=response_id, deleted=True))


async def cancel_response(context: ServerContext) -> None:
    """Cancel a background response. A response that has ended does not change.

    A response without `background` ends when its client closes the connection, so it cannot be cancelled here.

    Args:
        context: The request.
    """
    response_id = _response_id(context)
    live = context.server.background.find(response_id, context.owner)
    if live is not None:
        live.scope.cancel()
        await live.done.wait()
        await context.respond_json(live.response)
        return
    response = _ended_response(read_stored(await _kept(context, response_id)))
    if not response.background:
        raise InvalidRequest(
            f"the response {response_id} was created without background=true, so it cannot be cancelled",
            param="response_id",
        )
    await context.respond_json(response)


async def list_input_items(context: ServerContext) -> None:
    """Send a page of the response's own input items, last item first unless `order=asc`.

    Args:
        context: The request.
    """
    response_id, query = _response_id(context), Query(context.exchange.query)
    live = context.server.background.find(response_id, context.owner)
    if live is not None:
        items = live.run.planned.input
    else:
        items = read_stored(await _kept(context, response_id)).input
    order = query.choice("order", ("asc", "desc"), "desc")
    limit = query.number("limit", PAGE_ITEMS, low=1, high=PAGE_ITEMS_MAX)
    if order == "desc":
        items = items[::-1]
    after = query.text("after")
    if after is not None:
        indices = [index for index, item in enumerate(items) if item.id == after]
        if not indices:
            raise InvalidRequest(f"after is {after[:80]!r}, but this response's input has no such item", param="after")
        items = items[indices[0] + 1 :]
    page = items[:limit]
    await context.respond_json(
        ResponseItems(
            data=page,
            first_id=page[0].id if page else None,
            last_id=page[-1].id if page else None,
            has_more=len(items) > limit,
        )
    )


async def _stream(context: ServerContext, response_id: str, after: int) -> None:
    live = context.server.background.find(response_id, context.owner)
    if live is not None and live.log is not None:
        if after > live.log.last:
            raise InvalidRequest(
                f"starting_after is {after}, but the last event so far is {live.log.last}", param="starting_after"
            )
        await context.start_events()
        await live.log.follow(
            after, context.exchange.send, silent_seconds_max=context.services.rules.keep_alive_seconds
        )
        await context.finish()
        return
    kept = None if live is not None else await _kept(context, response_id)
    if kept is None or not kept.blob_bytes:
        raise InvalidRequest(
            f"the events of the response {response_id} are not stored: send background=true and stream=true when you "
            "create a response",
            param="stream",
        )
    events = await _kept_events(context, kept)
    if after >= len(events):
        raise InvalidRequest(
            f"starting_after is {after}, but the last event is {len(events) - 1}", param="starting_after"
        )
    await context.start_events()
    for begin in range(after + 1, len(events), EVENTS_OF_A_WRITE):
        await context.exchange.send(b"".join(events[begin : begin + EVENTS_OF_A_WRITE]))
    await context.finish()


EVENTS_OF_A_WRITE = 64


async def _kept_events(context: ServerContext, kept: StoredObject) -> list[bytes]:
    assert context.services.store is not None
    pieces: list[bytes] = []
    offset = 0
    while offset < kept.blob_bytes:
        piece = await context.services.store.read_blob(KIND, kept.id, owner=context.owner, offset=offset)
        if not piece:
            raise not_found(kept.id)  # The response was deleted while its events were read.
        pieces.append(piece)
        offset += len(piece)
    return split_events(b"".join(pieces))


async def _kept(context: ServerContext, response_id: str) -> StoredObject:
    """Return the stored response.

    Raises:
        Refusal: The caller has no such response (404).
    """
    kept = (
        None
        if context.services.store is None
        else await context.services.store.get(KIND, response_id, owner=context.owner)
    )
    if kept is None:
        raise not_found(response_id)
    return kept


def _ended_response(stored: StoredResponse) -> ResponseObject:
    """Return the response object to send. The caller knows that the response does not run any more."""
    return stored.response if stored.response.status in FINAL else failed_object(stored.response)


def _response_id(context: ServerContext) -> str:
    return context.exchange.path.split("/")[3]


ID = "the response's id"
STORED = (401, 404, 500)
RANGES = {name: allowed for name, allowed in SAMPLING_RANGES.items() if name in ResponsesBody.__struct_fields__} | {
    "max_output_tokens": Range(1, None),
    "max_tool_calls": Range(1, None),
    "thinking_token_budget": Range(0, None),
    "top_logprobs": SAMPLING_RANGES["logprobs"],
    "priority": Range(PRIORITY_MIN, PRIORITY_MAX),
}


OPERATIONS: tuple[Operation[ServerContext], ...] = (
    Operation(
        method="POST",
        path="/v1/responses",
        handler=create_response,
        summary="Respond to items, in the shape of OpenAI's Responses API",
        forwarding=Forwarding.BY_MODEL,
        description="Fields have OpenAI's meaning. Fields that are not listed here are ignored or refused. The "
        "response is stored unless store is false. Tools that a server would have to run, such as web_search, are "
        "ignored.",
        body=ResponsesBody,
        ranges=RANGES,
        refused=RESPONSES_REFUSED,
        response=ResponseObject,
        named_events=(ResponseEvent,),
        errors=(*GENERATES, 507),
        takes_deadlines=True,
    ),
    Operation(
        method="GET",
        path="/v1/responses",
        handler=serve_connection,
        summary="Open a websocket on which a client creates responses",
        description="Each message of the client is JSON of the type response.create, response.cancel or "
        "response.steer. Each message of the server is an event of a response, or an error.",
        errors=(400, 426, 429, 503),
        is_websocket=True,
    ),
    Operation(
        method="POST",
        path="/v1/responses/input_tokens",
        handler=count_input_tokens,
        summary="Count the tokens of a response's input",
        forwarding=Forwarding.BY_MODEL,
        body=InputTokensBody,
        refused=RESPONSES_REFUSED,
        response=InputTokens,
        errors=(*READS_BODY, 404, 500),
    ),
    Operation(
        method="GET",
        path="/v1/responses/{response}",
        handler=read_response,
        summary="Read a stored response or a running background response",
        forwarding=Forwarding.KEPT,
        description="With stream=true, the events of a response that was created with background and stream.",
        response=ResponseObject,
        query={
            "stream": ("send the events instead of the response", {"type": "boolean"}),
            "starting_after": ("send only events after the event with this number", {"type": "integer", "minimum": 0}),
        },
        errors=(400, *STORED),
        path_parameter=ID,
    ),
    Operation(
        method="DELETE",
        path="/v1/responses/{response}",
        handler=delete_response,
        summary="Delete a response",
        forwarding=Forwarding.KEPT,
        description="A running background response is cancelled first.",
        response=DeletedResponse,
        errors=(400, *STORED, 507),
        path_parameter=ID,
    ),
    Operation(
        method="POST",
        path="/v1/responses/{response}/cancel",
        handler=cancel_response,
        summary="Cancel a background response",
        forwarding=Forwarding.KEPT,
        description="Its blocks are free at the next step. A response that has ended does not change.",
        response=ResponseObject,
        errors=(400, *STORED),
        path_parameter=ID,
    ),
    Operation(
        method="GET",
        path="/v1/responses/{response}/input_items",
        handler=list_input_items,
        summary="List the items of a response's own input",
        forwarding=Forwarding.KEPT,
        response=ResponseItems,
        query={
            "limit": ("number of items on a page", {"type": "integer", "minimum": 1, "maximum": 100}),
            "order": ("desc: last item first; asc: first item first", {"enum": ["desc", "asc"]}),
            "after": ("send only items after the item with this id", {"type": "string"}),
        },
        errors=(400, *STORED),
        path_parameter=ID,
    ),
)
