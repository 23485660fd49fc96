"""One response while it is made: a turn of the engine and the events that come of it. Who sends them is decided by who
runs it: the request that asked, or the background."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from trioserve.api.error_responses import ErrorResponse, error_response
from trioserve.api.generation import CUT_OFF, KeepAlive, Usage
from trioserve.api.openai.logprobs import chat_logprobs
from trioserve.api.responses.events import Event, ResponseEvents
from trioserve.api.responses.plan import PlannedResponse
from trioserve.api.responses.stored_responses import StoredResponse
from trioserve.api.resume_body import ResumeBody
from trioserve.api.resumption import Resumption
from trioserve.api.turn.chat_turn import ChatTurn, chat_turn
from trioserve.contracts.output import Delta
from trioserve.text.response_parts import ResponsePart

if TYPE_CHECKING:
    from trioserve.api.request_context import RequestContext

__all__ = ["ResponseRun"]

Send = Callable[[list[Event], Delta], Awaitable[None]]

Ended = tuple[list[Event], dict[str, Any]]
"""The last events, and the whole response."""


class ResponseRun:
    """turn: to be entered by whoever runs it. Raises InvalidRequest for what the caller may not ask for."""

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
        """To the end of the turn, which is entered. send: gets the events of each
        piece, perhaps none, and the piece; None: nobody wants them. Raises what ChatTurn.read raises."""

        async def take(_: int, parts: list[ResponsePart], delta: Delta) -> None:
            self._note(delta)
            events = self.events.take(parts, delta)
            if send is not None:
                await send(events, delta)

        await self.turn.read(take, keep_alive=keep_alive)

    async def skip_known(self) -> list[Event]:
        """Put the events where they stood, where the response goes on. Returns those so far."""
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
        usage = self._end()
        finish = self.turn.choices[0].finish_reason
        if finish == CUT_OFF:
            return self.events.cut_off(self._stop_reason, self._behind(), usage=usage)
        return self.events.complete(finish, usage, self._clock.unix_seconds())

    def _end(self) -> Usage:
        """What it has come to."""
        self.events.weight_versions = self.turn.stream.weight_versions()
        return self.turn.usage()

    def _behind(self) -> ResumeBody | None:
        """How it goes on, where its client wants to know."""
        resumption = self._resumption
        return resumption.behind([self.turn.stream]) if resumption is not None and resumption.gives_partial else None

    def fail(self, error: Exception | ErrorResponse) -> Ended:
        """For what broke it off."""
        told = error if isinstance(error, ErrorResponse) else error_response(error)
        return self.events.fail(told.message, _code(told), usage=self._end())

    def cancel(self) -> Ended:
        return self.events.cancel(self._behind(), usage=self._end())

    def snapshot(self) -> dict[str, Any]:
        """The response of this moment."""
        return self.planned.head.object(self.events.status, output=self.events.output)

    def stored(self, response: dict[str, Any]) -> StoredResponse:
        return StoredResponse(response=response, input=self.planned.input)


def _code(error: ErrorResponse) -> str:
    """Return the code under OpenAI's name where its clients know one."""
    if error.status == 429:
        code = "rate_limit_exceeded"
    elif error.code is not None:
        return error.code
    else:
        code = "invalid_prompt" if error.status < 500 else "server_error"
    return code
