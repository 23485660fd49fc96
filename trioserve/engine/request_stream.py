"""The caller's side of a request for text or pooling, and the parts of a chat response."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from trioserve.contracts.arguments import refuse
from trioserve.contracts.events import FinishReason, TokenLogprob
from trioserve.contracts.output import Delta
from trioserve.contracts.pooling import PoolingResult
from trioserve.contracts.resume import Resume
from trioserve.contracts.weights import WeightVersions
from trioserve.engine.lifecycle.request_scope import ScopeStream, error_of
from trioserve.engine.open_request import OpenRequest
from trioserve.engine.pooling_request import PoolingRequest
from trioserve.text.response_parsers.offered_tools import offered_tools
from trioserve.text.response_parsers.registry import ResponseFamilies
from trioserve.text.response_parts import ResponseParser, ResponsePart
from trioserve.trio_tools.interrupts import uninterrupted
from trioserve.trio_tools.own_run import OwnRun

__all__ = ["RequestStream", "PoolingStream", "ChoiceParts", "PartStream", "ReadStream"]


@uninterrupted
class RequestStream(ScopeStream[OpenRequest, Delta]):
    """A response as a stream of deltas: `async with engine.generate(...) as stream: async for delta in stream: ...`.

    `ScopeStream` documents entering, iterating and leaving. Entering can also raise ContextTooLong.

    A connector may hold blocks of the finished response for another engine. Then `is_held` is True, and the last delta
    has `kv_transfer`. Leaving the scope ends the hold. There are two ways to let the other engine read the blocks: call
    `wait_until_released` inside the scope, or call `keep_hold`, after which the hold outlives the scope. A hold uses no
    slot and no lease.
    """

    @property
    def choice_count(self) -> int:
        """Number of requested choices (`n`)."""
        return self._request.choice_count

    @property
    def known(self) -> tuple[Delta, ...]:
        """Deltas of the earlier part of a resumed response (see `Engine.generate`), sorted by choice.

        Together, these deltas contain all known tokens. Iteration does not yield them again. They are
        available once the stream is entered.
        """
        return self._request.known

    def forget_known(self) -> None:
        """Drop the known deltas to save memory, because no reader will need them."""
        self._request.known = ()

    @property
    def ignored_keywords(self) -> tuple[str, ...]:
        """Paths of the schema keywords that the output may violate, because they are not enforced. Available after
        entering.
        """
        guides = self._request.guides
        return () if guides is None else guides.ignored_keywords

    @property
    def seed(self) -> int:
        """Seed of the first choice."""
        return self._request.seed

    @property
    def adapter_digest(self) -> str | None:
        """Digest of the LoRA adapter. None: no adapter, or not entered yet."""
        return self._request.adapter_digest

    @property
    def prompt_digest(self) -> str | None:
        """Digest of the prompt's tokens (see `Resume`). None until the stream is entered."""
        return self._request.prompt_digest

    def await_tools(self, tools: Sequence[str]) -> None:
        """Note the tools that the complete response calls, see `LiveSession.await_tools`. No effect without a session.

        Args:
            tools: names of the called tools, at least one.
        """
        if self._request.turn_of is not None:
            self._request.turn_of.await_tools(tools)

    def resume_state(self) -> Resume:
        """Return the state with which the same request can be resumed after the last delta that was read.

        Resume in this engine or in another one: `engine.generate(..., resume=stream.resume_state())`. This method may
        be called at any time, even after the stream failed or its scope ended. The resumed request computes unread
        tokens again.
        """
        return self._request.resume_state()

    def weight_versions(self, index: int = 0) -> WeightVersions:
        """Return which weight versions sampled the tokens of a choice that were read.

        Args:
            index: index of the choice.

        Returns:
            Runs of (version, token count). Empty: the weights with which the engine was opened sampled all tokens.
        """
        return self._request.weight_versions_of(index)

    @property
    def completion_token_count(self) -> int:
        """Number of tokens sampled so far in all choices, including tokens that the client does not receive."""
        return self._request.completion_token_count

    @property
    def prompt_token_count(self) -> int:
        """Number of prompt tokens. Available after entering."""
        return self._request.prompt_token_count

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """Token ids of the prompt. Available after entering."""
        return self._request.prompt_token_ids

    @property
    def cached_token_count(self) -> int:
        """Number of prompt tokens found in the prefix cache. Available when the first choice has ended."""
        return self._request.cached_token_count

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprob | None, ...] | None:
        """Log probabilities of the prompt's tokens, if requested. They are complete when the first output token
        arrives.
        """
        return self._request.prompt_logprobs

    @property
    def is_held(self) -> bool:
        """True while a connector holds blocks of a finished choice for another engine."""
        return self._request.is_held

    async def wait_until_released(self) -> None:
        """Wait until no block of this request is held for another engine.

        The wait ends when the blocks were read or aborted, or when their time has passed. If no block is held, the
        method returns at once.

        Raises:
            EngineFault: the engine broke while blocks were held.
            AlreadyEnded: the scope is not entered, and blocks are held.
        """
        await self._request.wait_until_released()

    def keep_hold(self) -> None:
        """Keep blocks held after the scope has ended, until they are read, aborted by id, or expired.

        Call this after another engine has learned how to read the blocks.
        """
        self._request.is_hold_kept = True

    def drop_hold(self) -> None:
        """End the hold when the scope is left, because no other engine has learned how to read the blocks."""
        self._request.is_hold_kept = False


@uninterrupted
class PoolingStream(RequestStream):
    """The results of a pooled request: `vectors = await engine.embed(texts)`.

    To see the progress and the token counts, use `async with engine.embed(texts) as stream: vectors = await
    stream.results()`.

    Entering raises the same errors as for `RequestStream`. Iteration yields one delta per input, in the order in which
    the inputs end. The delta contains the input's index and finish reason. `results` iterates itself.
    """

    def __init__(
        self,
        request: PoolingRequest,
        *,
        submit: Callable[[OpenRequest], Awaitable[None]],
        leave: Callable[[OpenRequest], None],
        own_run: OwnRun,
    ) -> None:
        super().__init__(request, submit=submit, leave=leave, own_run=own_run)
        self._inputs = request

    def __await__(self) -> Generator[Any, Any, tuple[PoolingResult, ...]]:
        return self._all().__await__()

    async def _all(self) -> tuple[PoolingResult, ...]:
        async with self:
            return await self.results()

    async def results(self) -> tuple[PoolingResult, ...]:
        """Wait for the results of all inputs.

        Returns:
            One result per input, in the order of the inputs.

        Raises:
            RequestFailed, RequestAborted, DeadlinePassed: an input ended without a result. The first failed input
                decides which error is raised.
            EngineFault: the engine broke.
        """
        async for delta in self:
            if (error := error_of(delta)) is not None:
                raise error
        return self.pooled

    @property
    def pooled(self) -> tuple[PoolingResult, ...]:
        """Results of a stream that was read completely and without an error, in the order of the inputs."""
        found = tuple(choice.pooled for choice in self._inputs.choices if choice.pooled is not None)
        assert len(found) == len(self._inputs.inputs), "an input has no result"
        return found

    @property
    def input_token_counts(self) -> tuple[int, ...]:
        """Number of tokens of each input. Available after entering."""
        return self._inputs.input_token_counts


class ReadStream(Protocol):
    """The methods of `RequestStream` that `PartStream` needs, for Trio and for asyncio."""

    def __anext__(self) -> Awaitable[Delta]: ...

    @property
    def prompt_token_ids(self) -> tuple[int, ...]: ...

    @property
    def known(self) -> tuple[Delta, ...]: ...


class ChoiceParts(msgspec.Struct, frozen=True):
    """New content, reasoning or tool calls of one choice.

    Attributes:
        index: index of the choice.
        parts: the new parts. May be empty.
        delta: the delta that contains these parts as text. The last delta of a choice has a finish_reason.
    """

    index: int
    parts: list[ResponsePart]
    delta: Delta


@uninterrupted
class PartStream:
    """Splits a response into content, reasoning and tool calls: `async for parts in engine.read_parts(stream,
    tools=...)`.

    Use this class inside the stream's scope, instead of iterating over the stream. Iteration raises the errors of the
    stream. A complete tool call ends with a `ToolCallEnd`. If a choice is aborted or passes its deadline, text that the
    parser has held back is dropped.
    """

    def __init__(
        self,
        stream: ReadStream,
        families: ResponseFamilies,
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> None:
        """Store the stream, and check the tools.

        Args:
            stream: the entered stream.
            families: response formats of the model.
            tools: tools of the request, in OpenAI's format. None: no tools.

        Raises:
            InvalidRequest: an entry of `tools` is not a function tool.
        """
        for tool in tools or ():
            function = tool.get("function") if isinstance(tool, Mapping) else None
            if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
                refuse("tools", tool, 'a list of {"type": "function", "function": {"name": ...}}', verb="holds")
        self._stream = stream
        self._families = families
        self._tools = offered_tools(tools)
        self._parsers: dict[int, ResponseParser] = {}

    def __aiter__(self) -> PartStream:
        return self

    async def __anext__(self) -> ChoiceParts:
        delta = await self._stream.__anext__()
        parser = self._parsers.get(delta.index)
        if parser is None:
            parser = self._parsers[delta.index] = self._families.new_parser(
                self._tools, prompt_token_ids=self._stream.prompt_token_ids
            )
            for known in self._stream.known:  # The reader got these parts from an earlier stream.
                if known.index == delta.index and known.text:
                    parser.feed(known.text)
        parts = parser.feed(delta.text) if delta.text else []
        if delta.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            parts += parser.end()
        return ChoiceParts(delta.index, parts, delta)
