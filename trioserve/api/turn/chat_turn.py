"""One turn of a conversation as a scope: what all chat-like APIs are made of.

`async with chat_turn(context, request) as turn:` takes a place in the queue; leaving ends what still runs, in whichever
way. Inside, the response is read once: with `read`, piece by piece and in order, or with `collect`, whole.

    async with chat_turn(context, request) as turn:
        await turn.wait_until_begun()
        await turn.read(take, keep_alive=context.keep_alive)    # await take(choice_index, parts, delta)
    turn.usage()

A turn without a request of HTTP (a background task) is made with ChatTurn itself, which takes how its stream is made.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TYPE_CHECKING

import msgspec

from trioserve.api.generation import (
    IsPartial,
    KeepAlive,
    Usage,
    never_partial,
    read_streams,
    usage_of,
    wait_until_begun,
)
from trioserve.api.resumption import Resumption, skip_known
from trioserve.api.turn.turn_choice import CollectedChoice, TurnChoice
from trioserve.api.turn.turn_request import TurnRequest
from trioserve.api.whole_response import ResponseBound
from trioserve.contracts.output import Delta
from trioserve.text.response_parsers.offered_tools import offered_tools
from trioserve.text.response_parts import ResponseParser, ResponsePart
from trioserve.text.restraints import restrained

if TYPE_CHECKING:
    from trioserve.api.request_context import RequestContext
    from trioserve.contracts.prompt import Prompt
    from trioserve.contracts.sampling import SamplingParams
    from trioserve.engine.engine import Engine
    from trioserve.engine.request_stream import RequestStream

__all__ = ["ChatTurn", "Generate", "Take", "chat_turn"]

Generate = Callable[["Prompt", "SamplingParams"], "RequestStream"]
"""A request to the engine in the caller's name, as RequestContext.generate makes it."""

Take = Callable[[int, list[ResponsePart], Delta], Awaitable[None]]
"""choice_index, the parts that are new, and the delta that brought them: its token_ids, logprobs, and whether it is the
choice's last one (finish_reason; then ChatTurn.choices[choice_index].finish_reason is the one to show)."""


def chat_turn(context: RequestContext, request: TurnRequest, resumption: Resumption | None = None) -> ChatTurn:
    """A turn in this caller's name. resumption: None where it neither began elsewhere nor goes on there. Raises
    InvalidRequest."""

    def generate(prompt: Prompt, sampling: SamplingParams) -> RequestStream:
        if resumption is None:
            return context.generate(prompt, sampling, request, request.deadlines, cut=request.cut, shape=request.shape)
        return context.generate(
            prompt,
            resumption.seeded(sampling),
            request,
            request.deadlines,
            cut=request.cut,
            resume=resumption.resume(),
            resumable=resumption.is_resumable,
            keep_logprobs=resumption.gives_partial,
            shape=request.shape,
        )

    new_id = None if resumption is None else resumption.new_ids()
    return ChatTurn(
        context.engine,
        request,
        generate,
        new_id=new_id or (lambda _: context.clock_and_ids.new_request_id()),
        is_partial=never_partial if resumption is None else resumption.is_partial,
        may_go_on=resumption is not None and resumption.is_resumable,
        bound=context.response_bound,
    )


class ChatTurn:
    """stream: the engine's side; held KV, prompt tokens and their log probabilities are its own. choices: by index;
    there once it is entered. is_partial: see read_streams. may_go_on: see TurnChoice. is_plain: nothing is parsed out
    of the response: its deltas may as well be read from the stream as they are.

    Entering raises what entering a RequestStream raises, and then holds nothing.
    """

    def __init__(
        self,
        engine: Engine,
        request: TurnRequest,
        generate: Generate,
        *,
        new_id: Callable[[int], str],
        is_partial: IsPartial = never_partial,
        may_go_on: bool = False,
        bound: ResponseBound | None = None,
    ) -> None:
        self._bound = bound or ResponseBound()
        self.is_partial = is_partial
        self._may_go_on = may_go_on
        self._engine = engine
        self._request = request
        self._new_id = new_id
        self._tools = offered_tools(request.offered_tools)
        families = engine.families
        has_tools = bool(self._tools)
        if request.plain_prompt is not None:
            sampling = msgspec.structs.replace(request.sampling, structured=request.structured)
        else:
            sampling = restrained(
                request.sampling,
                families,
                engine.tokenizer,
                tools=request.offered_tools,
                tool_choice=request.tool_choice,
                structured=request.structured,
                parallel_tool_calls=request.parallel_tool_calls,
                reasoning_tokens_max=request.reasoning.budget_tokens,
            )
        self.is_plain = request.plain_prompt is not None or not families.needs_parser(has_tools=has_tools)
        if not self.is_plain and families.needs_special_tokens(has_tools=has_tools):
            sampling = msgspec.structs.replace(sampling, skip_special_tokens=False)
        plain = request.plain_prompt
        self.stream = generate(request.prompt() if plain is None else plain, sampling)
        self.choices: list[TurnChoice] = []

    async def __aenter__(self) -> ChatTurn:
        await self.stream.__aenter__()
        try:
            self._bound.check_prompts(self._request.sampling, self._request.shape, self.stream.prompt_token_count)
        except BaseException:
            await self.stream.__aexit__(None, None, None)
            raise
        self.choices = [
            TurnChoice(
                index,
                None if self.is_plain else self._new_parser(),
                calls_max=None if self._request.parallel_tool_calls else 1,
                new_call_id=functools.partial(self._new_call_id, index),
                may_go_on=self._may_go_on,
            )
            for index in range(self.stream.choice_count)
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stream.__aexit__(kind, error, traceback)

    async def wait_until_begun(self) -> None:
        """Returns when the request runs, and so its response may begin with status 200. Raises what ended it in the
        queue."""
        await wait_until_begun(self.stream)

    async def skip_known(self, skip: Callable[[list[ResponsePart], Delta], object]) -> None:
        """Give `skip` what the response so far gave, where it goes on: as `read` would, and without showing it."""
        await skip_known([self.stream], lambda _, delta: skip(self.choices[delta.index].take(delta), delta))

    async def read(self, take: Take, *, keep_alive: KeepAlive | None = None) -> None:
        """Give every piece to `take(choice_index, parts, delta)`, one at a time, until all choices have ended. A piece
        may have no parts.

        Raises what read_streams raises: so a choice that was aborted, or whose deadline has passed, ends with an error,
        after what it had said; a call that it had begun has no ToolCallEnd then.
        """

        async def take_delta(_: int, delta: Delta) -> None:
            await take(delta.index, self.choices[delta.index].take(delta), delta)

        async def take_counted(stream_index: int, delta: Delta) -> None:
            self._bound.take(delta)
            await take_delta(stream_index, delta)

        take_next = take_delta if self._request.shape.is_streamed else take_counted
        await read_streams([self.stream], take_next, keep_alive=keep_alive, is_partial=self.is_partial)

    async def collect(self, note: Callable[[Delta], None] = lambda _: None) -> list[CollectedChoice]:
        """Every choice, complete, with what was known of it. note: called when a delta comes. Raises what `read`
        raises."""
        collected = [CollectedChoice() for _ in self.choices]
        await self.skip_known(lambda parts, delta: collected[delta.index].take(self.choices[delta.index], parts, delta))

        async def take(index: int, parts: list[ResponsePart], delta: Delta) -> None:
            note(delta)
            collected[index].take(self.choices[index], parts, delta)

        await self.read(take)
        return collected

    def _new_parser(self) -> ResponseParser:
        return self._engine.families.new_parser(self._tools, prompt_token_ids=self.stream.prompt_token_ids)

    def _new_call_id(self, choice_index: int) -> str:
        return self._engine.families.call_id(self._new_id(choice_index))

    def usage(self) -> Usage:
        """Tokens so far, of all choices."""
        return usage_of([self.stream], reasoning_token_count=sum(c.reasoning_token_count for c in self.choices))
