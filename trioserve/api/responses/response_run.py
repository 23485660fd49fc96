"""A response while the engine generates it.

A response is stored when it is complete, before its client gets the end. If the client leaves, the request is cancelled
and nothing is stored. A background response continues. If the disk is full, the store keeps the response in memory. If
that memory is full, the client still gets the response, with `store` set to false.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from trioserve.api.error_responses import ErrorResponse, error_response
from trioserve.api.generation import PARTIAL_FINISH, KeepAlive, Usage
from trioserve.api.openai.logprobs import chat_tokens
from trioserve.api.openai.response_types import ChatToken
from trioserve.api.responses.events import Ended, ResponseEvents
from trioserve.api.responses.plan import PlannedResponse
from trioserve.api.responses.response_object import SERVER_ERROR
from trioserve.api.responses.response_types import ResponseEvent, ResponseObject
from trioserve.api.responses.stored_responses import KIND, StoredResponse, stored_bytes
from trioserve.api.streams.cursors import ResumeBody
from trioserve.api.streams.resumption import Resumption
from trioserve.api.turn.chat_turn import ChatTurn, chat_turn
from trioserve.contracts.errors import DiskFull, StoreFault
from trioserve.contracts.output import Delta
from trioserve.store.stored_objects import Change, DeleteObject, PutObject
from trioserve.text.response_parts import ResponsePart

if TYPE_CHECKING:
    from trioserve.api.request_context import RequestContext

__all__ = ["ResponseRun"]

Send = Callable[[list[ResponseEvent], Delta], Awaitable[None]]
"""Function that receives the events of one piece, and the delta."""


class ResponseRun:
    """One chat turn in the engine, and the events of its response. The caller enters `turn` before it calls `read`.

    The request handler or a background task runs the response, and decides where the events are sent.

    Args:
        context: The request.
        planned: The response.
        resumption: Resume state. None if the response can neither resume nor be resumed.

    Attributes:
        turn: The chat turn. Its scope owns the requests in the engine.
        events: The events of the response.

    Raises:
        InvalidRequest: The caller may not use one of the options.
    """

    def __init__(self, context: RequestContext, planned: PlannedResponse, resumption: Resumption | None = None) -> None:
        self.planned = planned
        self._resumption = resumption
        self._stop_reason: str | None = None
        self.turn: ChatTurn = chat_turn(context, planned.turn, resumption)
        self._clock = context.clock_and_ids
        tokenizer = context.engine.tokenizer

        def logprobs_of(delta: Delta) -> list[ChatToken]:
            return chat_tokens(tokenizer, delta.logprobs or ())

        self.events = ResponseEvents(
            planned.head, logprobs_of=logprobs_of if planned.head.body.wants_logprobs else None
        )

    async def read(self, send: Send | None, *, keep_alive: KeepAlive | None = None) -> None:
        """Read the turn to its end.

        Args:
            send: Receives the events of each piece (possibly none) and its delta. None: no events are sent.
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

    async def skip_known(self) -> list[ResponseEvent]:
        """Process the known part of a resumed response. Return its events."""
        events: list[ResponseEvent] = []

        def take(parts: list[ResponsePart], delta: Delta) -> None:
            self._note(delta)
            events.extend(self.events.take(parts, delta))

        await self.turn.skip_known(take)
        return events

    def _note(self, delta: Delta) -> None:
        if delta.finish_reason is not None:
            # An int is a stop token. Partial results have no stop token.
            self._stop_reason = delta.stop_reason if isinstance(delta.stop_reason, str) else None

    def complete(self) -> Ended:
        """Return the last events and the response after the turn has ended."""
        usage = self._end()
        finish = self.turn.choices[0].finish_reason
        if finish == PARTIAL_FINISH:
            return self.events.end_partial(self._stop_reason, self._resume_state(), usage=usage)
        return self.events.complete(finish, usage, self._clock.unix_seconds())

    def _end(self) -> Usage:
        """Record the weight versions, and return the token counts."""
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

    def end_steered(self) -> Ended:
        """Return the last events and the response that was cut for new input of its user."""
        return self.events.end_steered(usage=self._end())

    def snapshot(self) -> ResponseObject:
        """Return the current response object."""
        return self.planned.head.object(self.events.status, output=self.events.output)

    def stored(self, response: ResponseObject) -> StoredResponse:
        return StoredResponse(response=response, input=self.planned.input)

    async def store(self, context: RequestContext, response: ResponseObject) -> None:
        """Store a complete response if its request asks for that. Call this before its client gets the end.

        Args:
            context: The request.
            response: The response object. If disk and memory of the store are full, its field `store` becomes False,
                and so does that of the last event, which contains this object.
        """
        store, head = context.services.store, self.planned.head
        if not head.stores:
            return
        assert store is not None
        kept = PutObject(kind=KIND, id=head.id, owner=context.owner, body=stored_bytes(self.stored(response)))
        changes: tuple[Change, ...] = (kept,)
        if head.body.resume is not None and await store.get(KIND, kept.id, owner=context.owner) is not None:
            # An earlier run was stored, but its client lost the connection. This response replaces that run.
            changes = (DeleteObject(kind=KIND, id=kept.id), kept)
        try:
            await store.settle(*changes)
        except (DiskFull, StoreFault):
            response.store = False


def _code(error: ErrorResponse) -> str:
    """Return the error code, under OpenAI's name if OpenAI's API has one."""
    if error.status == 429:
        code = "rate_limit_exceeded"
    elif error.code is not None:
        return error.code
    else:
        code = "invalid_prompt" if error.status < 500 else SERVER_ERROR
    return code
