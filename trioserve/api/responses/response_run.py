"""One response while it is made, and the handlers of POST /v1/responses and POST /v1/responses/input_tokens.

A response is stored when it is complete, before its client gets the end. If the client leaves, the request is cancelled
and nothing is stored. A background response continues. If the disk is full, the store keeps the response in memory. If
that memory is full, the client still gets the response, with `store` set to false.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from trioserve.api.error_responses import ErrorResponse, error_response
from trioserve.api.generation import PARTIAL_FINISH, KeepAlive, Usage
from trioserve.api.openai.logprobs import chat_logprobs
from trioserve.api.responses.events import Event, ResponseEvents, event_bytes
from trioserve.api.responses.plan import PlannedResponse, plan_prompt, plan_response
from trioserve.api.responses.request_types import InputTokensBody, ResponsesBody
from trioserve.api.responses.response_object import item_id, item_place, response_id
from trioserve.api.responses.stored_responses import KIND, StoredResponse, stored_bytes
from trioserve.api.streams.cursors import ResumeBody
from trioserve.api.streams.resumption import Resumption
from trioserve.api.surface import OpenAISurface
from trioserve.api.turn.chat_turn import ChatTurn, chat_turn
from trioserve.api.whole_response import LargeJson
from trioserve.contracts.errors import DiskFull, InvalidRequest, StoreFault
from trioserve.contracts.output import Delta
from trioserve.store.stored_objects import Change, DeleteObject, PutObject
from trioserve.text.response_parts import ResponsePart

if TYPE_CHECKING:
    from trioserve.api.request_context import RequestContext
    from trioserve.api.server_context import ServerContext

__all__ = ["ResponseRun", "count_input_tokens", "create_response"]

Send = Callable[[list[Event], Delta], Awaitable[None]]
"""Function that receives the events of one piece, and the delta."""

Ended = tuple[list[Event], dict[str, Any]]
"""The last events, and the whole response."""


class ResponseRun:
    """A turn of the engine and the events that come from it. The caller enters `turn` before it calls `read`.

    The request handler or the background runs the response, and decides where the events go.

    Args:
        context: The request.
        planned: The response.
        resumption: Resume state. None if the response can neither resume nor be resumed.

    Attributes:
        turn: The turn.
        events: The events of the response.

    Raises:
        InvalidRequest: The caller may not use one of the options.
    """

    def __init__(self, context: RequestContext, planned: PlannedResponse, resumption: Resumption | None = None) -> None:
        self.planned = planned
        self._resumption = resumption
        self._stop_reason: int | str | None = None
        self.turn: ChatTurn = chat_turn(context, planned.turn, resumption)
        self._clock = context.clock_and_ids
        tokenizer = context.engine.tokenizer

        def logprobs_of(delta: Delta) -> list[dict[str, object]]:
            content: Any = chat_logprobs(tokenizer, delta.logprobs or ())["content"]
            return content  # type: ignore[no-any-return]  # its shape is in chat_logprobs

        self.events = ResponseEvents(
            planned.head, logprobs_of=logprobs_of if planned.head.body.wants_logprobs else None
        )

    async def read(self, send: Send | None, *, keep_alive: KeepAlive | None = None) -> None:
        """Read the turn to its end.

        Args:
            send: Receives the events of each piece (possibly none) and its delta. None: nobody wants events.
            keep_alive: Fills silences of the response. Default: nothing is sent.

        Raises:
            TrioserveError: As ChatTurn.read.
        """

        async def take(_: int, parts: list[ResponsePart], delta: Delta) -> None:
            self._note(delta)
            events = self.events.take(parts, delta)
            if send is not None:
                await send(events, delta)

        await self.turn.read(take, keep_alive=keep_alive)

    async def skip_known(self) -> list[Event]:
        """Process the known part of a resumed response. Return its events."""
        events: list[Event] = []

        def take(parts: list[ResponsePart], delta: Delta) -> None:
            self._note(delta)
            events.extend(self.events.take(parts, delta))

        await self.turn.skip_known(take)
        return events

    def _note(self, delta: Delta) -> None:
        if delta.finish_reason is not None:
            self._stop_reason = delta.stop_reason

    def complete(self) -> Ended:
        """Return the last events and the response after the turn has ended."""
        usage = self._end()
        finish = self.turn.choices[0].finish_reason
        if finish == PARTIAL_FINISH:
            return self.events.end_partial(self._stop_reason, self._resume_state(), usage=usage)
        return self.events.complete(finish, usage, self._clock.unix_seconds())

    def _end(self) -> Usage:
        """Note the weight versions. Return the token counts."""
        self.events.weight_versions = self.turn.stream.weight_versions()
        return self.turn.usage()

    def _resume_state(self) -> ResumeBody | None:
        """Return the state to resume the response, or None if the client did not ask for it."""
        resumption = self._resumption
        return resumption.behind([self.turn.stream]) if resumption is not None and resumption.gives_partial else None

    def fail(self, error: Exception | ErrorResponse) -> Ended:
        """Return the last events and the failed response.

        Args:
            error: Error that ended the response.
        """
        response = error if isinstance(error, ErrorResponse) else error_response(error)
        return self.events.fail(response.message, _code(response), usage=self._end())

    def cancel(self) -> Ended:
        """Return the last events and the response after its client has cancelled it."""
        return self.events.cancel(self._resume_state(), usage=self._end())

    def snapshot(self) -> dict[str, Any]:
        """Return the current response object."""
        return self.planned.head.object(self.events.status, output=self.events.output)

    def stored(self, response: dict[str, Any]) -> StoredResponse:
        return StoredResponse(response=response, input=self.planned.input)


def _code(error: ErrorResponse) -> str:
    """Return the error code, under OpenAI's name if OpenAI's API has one."""
    if error.status == 429:
        code = "rate_limit_exceeded"
    elif error.code is not None:
        return error.code
    else:
        code = "invalid_prompt" if error.status < 500 else "server_error"
    return code


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
        assert context.services.store is not None
        kept = PutObject(kind=KIND, id=planned.head.id, owner=context.owner, body=stored_bytes(run.stored(response)))
        changes: tuple[Change, ...] = (kept,)
        if body.resume is not None and await context.services.store.get(KIND, kept.id, owner=context.owner) is not None:
            changes = (
                DeleteObject(kind=KIND, id=kept.id),
                kept,
            )  # An earlier run was stored, but its client lost the connection. Replace it.
        try:
            await context.services.store.settle(*changes)
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
