"""One turn of a conversation as an async context manager. All chat-like APIs use it.

Entering the context puts the request into the queue. Leaving the context cancels all work that still runs. Inside of
the context, the caller reads the response once: piece by piece with `read`, or whole with `collect`.

    async with chat_turn(context, request) as turn:
        await turn.wait_until_begun()
        await turn.read(take, keep_alive=context.keep_alive)    # calls: await take(choice_index, parts, delta)
    turn.usage()

A turn that no HTTP request waits for (a background task) creates ChatTurn itself, with its own `generate`.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from trioserve.api.generation import (
    PARTIAL_FINISH,
    IsPartial,
    KeepAlive,
    Usage,
    is_partial,
    never_partial,
    read_streams,
    usage_of,
    wait_until_begun,
)
from trioserve.api.session_fields import conversation_key
from trioserve.api.streams.resumption import Resumption, skip_known
from trioserve.api.whole_response import ResponseBound, ResponseShape
from trioserve.contracts.deadlines import NO_DEADLINES, Deadlines
from trioserve.contracts.events import FinishReason, TokenLogprob
from trioserve.contracts.output import Delta
from trioserve.contracts.prompt import ChatPrompt, Cut
from trioserve.contracts.request import KVTransferParams
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.structured_output import StructuredOutput
from trioserve.contracts.weights import add_versions
from trioserve.text.response_parsers.offered_tools import ToolChoice, ToolMode, offered_tools
from trioserve.text.response_parts import (
    ContentText,
    ReasoningText,
    ResponseParser,
    ResponsePart,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from trioserve.text.restraints import restrained

if TYPE_CHECKING:
    from trioserve.api.request_context import RequestContext
    from trioserve.contracts.prompt import Prompt
    from trioserve.engine.engine import Engine
    from trioserve.engine.request_stream import RequestStream

__all__ = [
    "ChatTurn",
    "CollectedChoice",
    "Generate",
    "OpenCalls",
    "Reasoning",
    "ReasoningEffort",
    "Take",
    "ToolCall",
    "TurnChoice",
    "TurnFinish",
    "TurnRequest",
    "chat_turn",
]


TurnFinish = Literal["stop", "length", "tool_calls", "abort"]


class TurnChoice:
    """One choice while it is read.

    Args:
        index: Index of the choice.
        parser: Parser of the model family. None: all text is content.
        calls_max: Tool calls beyond this number are dropped. None: no limit.
        new_call_id: Returns an id for a call to which the model gave none.
        is_resumable: The client may resume an aborted choice and then gets only the rest. So at an abort, text that the
            parser holds back is not sent.

    Attributes:
        finish_reason: None until the last delta. "tool_calls" means that all calls are complete. With "length" the last
            call may be incomplete, and then it has no ToolCallEnd.
        tools: Names of the called tools so far.
        reasoning_token_count: Number of reasoning tokens so far. An estimate for deltas that contain reasoning and
            other text.
    """

    def __init__(
        self,
        index: int,
        parser: ResponseParser | None,
        *,
        calls_max: int | None,
        new_call_id: Callable[[], str],
        is_resumable: bool = False,
    ) -> None:
        self.index = index
        self.finish_reason: TurnFinish | None = None
        self.reasoning_token_count = 0
        self.tools: list[str] = []
        self._parser = parser
        self._calls_max = calls_max
        self._is_resumable = is_resumable
        self._new_call_id = new_call_id
        self._begun_count = self._ended_count = 0
        self._is_thinking = False

    def take(self, delta: Delta) -> list[ResponsePart]:
        """Return the parts of a delta. Empty while the parser holds text back.

        Args:
            delta: Next output of the choice.
        """
        if self._parser is None:
            if delta.finish_reason is not None:
                self.finish_reason = _turn_finish(delta.finish_reason)
            return [ContentText(delta.text)] if delta.text else []
        parsed = self._parser.feed(delta.text) if delta.text else []
        if delta.finish_reason is not None:
            if not (self._is_resumable and is_partial(delta.finish_reason)):
                parsed += self._parser.end()
        elif len(parsed) == 1 and type(parsed[0]) is ContentText:  # This is the usual case, and its code is kept fast.
            self._is_thinking = False
            return parsed
        self._count_reasoning(delta, parsed)
        parts = [part for part in map(self._shown_part, parsed) if part is not None]
        if delta.finish_reason is not None:
            self.finish_reason = _turn_finish(delta.finish_reason)
            if self.finish_reason == "stop" and self._begun_count and self._begun_count == self._ended_count:
                self.finish_reason = "tool_calls"
        return parts

    def _shown_part(self, part: ResponsePart) -> ResponsePart | None:
        """Return the part as the client gets it, or None if it is dropped."""
        if isinstance(part, ContentText | ReasoningText):
            return part
        if self._calls_max is not None and part.index >= self._calls_max:
            return None
        if isinstance(part, ToolCallBegin):
            self._begun_count += 1
            self.tools.append(part.name)
            return part if part.id is not None else msgspec.structs.replace(part, id=self._new_call_id())
        if isinstance(part, ToolCallEnd):
            self._ended_count += 1
        return part

    def _count_reasoning(self, delta: Delta, parts: Sequence[ResponsePart]) -> None:
        """Count the reasoning tokens of a delta. If the delta also has other text, estimate the count from the lengths
        of the texts.
        """
        reasoning = other = 0
        for part in parts:
            if isinstance(part, ReasoningText):
                reasoning += len(part.text)
                self._is_thinking = True
            else:
                other += len(part.text) if isinstance(part, ContentText | ToolCallArguments) else 1
                self._is_thinking = False
        if reasoning and other:
            self.reasoning_token_count += round(len(delta.token_ids) * reasoning / (reasoning + other))
        elif reasoning or (self._is_thinking and not other):
            self.reasoning_token_count += len(delta.token_ids)


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A complete tool call.

    Attributes:
        id: Id of the call.
        name: Name of the function.
        arguments: JSON text as the model wrote it.
    """

    id: str
    name: str
    arguments: str


class OpenCalls:
    """Tool calls whose parts arrive one by one."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[ToolCallBegin, list[str]]] = {}

    def take(self, part: ResponsePart) -> ToolCall | None:
        """Return the call that this part completes, or None.

        Args:
            part: Next part of the response. Parts of other kinds are ignored.
        """
        if isinstance(part, ToolCallBegin):
            self._open[part.index] = (part, [])
        elif isinstance(part, ToolCallArguments):
            self._open[part.index][1].append(part.text)
        elif isinstance(part, ToolCallEnd):
            begin, pieces = self._open.pop(part.index)
            assert begin.id is not None
            return ToolCall(id=begin.id, name=begin.name, arguments="".join(pieces))
        return None


class CollectedChoice:
    """One choice that is assembled from its parts.

    Attributes:
        tool_calls: The complete calls. Incomplete calls are left out.
        weight_versions: Weight version of the output tokens, in runs of tokens. See add_versions.
    """

    def __init__(self) -> None:
        self.contents: list[str] = []
        self.reasonings: list[str] = []
        self.tool_calls: list[ToolCall] = []
        self.token_ids: list[int] = []
        self.weight_versions: list[tuple[str, int]] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: TurnFinish | None = None
        self.stop_reason: int | str | None = None
        self.kv_transfer: KVTransferParams | None = None
        self.reasoning_token_count = 0
        self._open = OpenCalls()

    @property
    def content(self) -> str | None:
        """The content. None if the choice has tool calls and no content."""
        text = "".join(self.contents)
        return text if text or not self.tool_calls else None

    @property
    def reasoning(self) -> str | None:
        """The reasoning, or None if there is none."""
        return "".join(self.reasonings) or None

    def take(self, choice: TurnChoice, parts: Sequence[ResponsePart], delta: Delta) -> None:
        """Add the parts that TurnChoice made of a delta.

        Args:
            choice: The choice that made the parts.
            parts: The new parts.
        """
        for part in parts:
            if isinstance(part, ContentText):
                self.contents.append(part.text)
            elif isinstance(part, ReasoningText):
                self.reasonings.append(part.text)
            elif (call := self._open.take(part)) is not None:
                self.tool_calls.append(call)
        add_versions(self.weight_versions, len(self.token_ids), delta.weight_versions, len(delta.token_ids))
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or ()
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = choice.finish_reason, delta.stop_reason
            self.kv_transfer = delta.kv_transfer
            self.reasoning_token_count = choice.reasoning_token_count


def _turn_finish(reason: FinishReason) -> TurnFinish:
    """Return the finish reason for an end without tool calls.

    Aborts and deadlines raise errors earlier (see foreign_end), unless the client asked for partial results.
    """
    if is_partial(reason):
        return PARTIAL_FINISH
    return "length" if reason is FinishReason.LENGTH else "stop"


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Reasoning(msgspec.Struct, frozen=True, kw_only=True):
    """Options for the model's reasoning.

    Attributes:
        is_on: Reasoning on or off. None: the template's default.
        effort: Effort level, for templates that have one.
        budget_tokens: The reasoning ends after this number of tokens. None: no limit.
    """

    is_on: bool | None = None
    effort: ReasoningEffort | None = None
    budget_tokens: int | None = None

    def template_arguments(self) -> dict[str, Any]:
        """Return the template arguments, under the names that the templates of the model families use."""
        arguments: dict[str, Any] = {}
        is_on = self.is_on
        if self.effort is not None:
            arguments["reasoning_effort"] = self.effort
            if is_on is None:
                is_on = self.effort != "none"
        if is_on is not None:
            arguments["enable_thinking"] = arguments["thinking"] = is_on
        return arguments


class TurnRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for the assistant's next message, in `sampling.n` choices.

    Attributes:
        messages: Messages in the shape of OpenAI's chat API, checked with messages.check_messages. Tool calls are in
            "tool_calls", their results in messages of the role "tool".
        sampling: Sampling options.
        tools: Tools in OpenAI's format: {"type": "function", "function": {"name", "description", "parameters",
            "strict"}}. May include tools that tool_choice excludes.
        tool_choice: Tools that the model may or must call.
        parallel_tool_calls: True if the response may have more than one call.
        structured: Schema or grammar for the content. Reasoning and tool calls are exempt.
        reasoning: Options for the reasoning.
        template_arguments: Arguments for the chat template. They override those of `reasoning`.
        chat_template: Template that replaces the model's own.
        add_generation_prompt: See ChatPrompt.
        continue_final_message: See ChatPrompt.
        priority: See Engine.generate.
        cache_salt: See Engine.generate.
        deadlines: Deadlines of the request.
        kv_transfer_params: See Engine.generate.
        cut: Truncation of the prompt. See Engine.generate.
        plain_prompt: Prompt text that replaces the messages and uses no template. The whole response is content.
        shape: Properties of the response that bound its size.
        cache_key: Name of the session. None: the header may name one.
        retention_seconds: See NamesSession. If no name is known, the beginning of the conversation names the session.
    """

    messages: list[dict[str, Any]]
    sampling: SamplingParams
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    structured: StructuredOutput | None = None
    reasoning: Reasoning = Reasoning()
    template_arguments: dict[str, Any] = {}
    chat_template: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    priority: int | None = None
    cache_salt: str | None = None
    deadlines: Deadlines = NO_DEADLINES
    kv_transfer_params: KVTransferParams | None = None
    cut: Cut | None = None
    plain_prompt: str | None = None
    shape: ResponseShape = ResponseShape()
    cache_key: str | None = None
    retention_seconds: float | None = None

    @property
    def session_key(self) -> str | None:
        """Name of the session, see NamesSession."""
        if self.cache_key or self.retention_seconds is None:
            return self.cache_key
        return conversation_key(self.messages, self.tools)

    def prompt(self) -> ChatPrompt:
        """Return the prompt. Only for a turn with messages, not with plain_prompt."""
        return ChatPrompt(
            messages=self.messages,
            tools=self.tool_choice.shown(self.tools),
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template=self.chat_template,
            template_arguments=self.reasoning.template_arguments() | self.template_arguments,
        )


Generate = Callable[["Prompt", "SamplingParams"], "RequestStream"]
"""Function that creates the engine's stream for a request in the caller's name, such as RequestContext.generate."""

Take = Callable[[int, list[ResponsePart], Delta], Awaitable[None]]
"""Function that receives one piece of the response: the choice index, the new parts, and the delta that they come from.

The delta has the token ids and log probabilities. In the last delta of a choice, finish_reason is set. The finish
reason for the client is then ChatTurn.choices[choice_index].finish_reason.
"""


def chat_turn(context: RequestContext, request: TurnRequest, resumption: Resumption | None = None) -> ChatTurn:
    """Return a context manager that runs one request for the next message of a conversation.

    Args:
        context: The HTTP request. Its caller owns the request to the engine.
        request: Conversation so far, with the options for the next message.
        resumption: Resume state. None if the response neither continues an earlier response nor can be continued later.

    Raises:
        InvalidRequest: The request cannot be served.
    """
    forbids_calls = request.tool_choice.mode is ToolMode.NONE and request.plain_prompt is None and bool(request.tools)
    generate = functools.partial(
        context.generate,
        body=request,
        deadlines=request.deadlines,
        cut=request.cut,
        tool_choice="none" if forbids_calls else None,
        shape=request.shape,
    )
    if resumption is None or not resumption.is_on:
        return ChatTurn(
            context.engine,
            request,
            generate,
            new_id=lambda _: context.clock_and_ids.new_request_id(),
            bound=context.response_bound,
        )
    return ChatTurn(
        context.engine,
        msgspec.structs.replace(request, sampling=resumption.seeded(request.sampling)),
        functools.partial(
            generate,
            resume=resumption.resume(),
            resumable=resumption.is_resumable,
            keep_logprobs=resumption.gives_partial,
        ),
        new_id=resumption.new_id,
        is_partial=resumption.is_partial,
        is_resumable=resumption.is_resumable,
        bound=context.response_bound,
    )


class ChatTurn:
    """One turn: a request to the engine, and a parser for each of its choices.

    Entering raises the same errors as entering a RequestStream. If entering fails, no resources stay reserved.

    Args:
        engine: Engine that runs the request.
        request: The turn.
        generate: Creates the engine's stream.
        new_id: Returns a new id for a tool call, from a choice index.
        is_partial: Returns True for the last delta of an aborted choice if the client gets the partial result. See
            read_streams.
        is_resumable: The client may continue an interrupted response later. See TurnChoice.
        bound: Limit for the size of the whole response. Default: RESPONSE_BYTES_MAX.

    Attributes:
        stream: The engine's stream, with the prompt tokens, their log probabilities, and KV blocks held for another
            engine.
        choices: The choices by index. Empty until the turn is entered.
        is_plain: All text is content and needs no parser. The caller may read deltas directly from the stream.
    """

    def __init__(
        self,
        engine: Engine,
        request: TurnRequest,
        generate: Generate,
        *,
        new_id: Callable[[int], str],
        is_partial: IsPartial = never_partial,
        is_resumable: bool = False,
        bound: ResponseBound | None = None,
    ) -> None:
        self._bound = bound or ResponseBound()
        self.is_partial = is_partial
        self._is_resumable = is_resumable
        self._engine = engine
        self._request = request
        self._new_id = new_id
        prompt = request.prompt() if request.plain_prompt is None else None
        offered = None if prompt is None or request.tool_choice.mode is ToolMode.NONE else prompt.tools
        self._tools = offered_tools(offered) if offered else []
        families = engine.families
        has_tools = bool(self._tools)
        if prompt is None:
            sampling = msgspec.structs.replace(request.sampling, structured=request.structured)
        else:
            sampling = restrained(
                request.sampling,
                families,
                engine.tokenizer,
                tools=offered,
                tool_choice=request.tool_choice,
                structured=request.structured,
                parallel_tool_calls=request.parallel_tool_calls,
                reasoning_tokens_max=request.reasoning.budget_tokens,
            )
        self.is_plain = prompt is None or not families.needs_parser(has_tools=has_tools)
        if not self.is_plain and families.needs_special_tokens(has_tools=has_tools):
            sampling = msgspec.structs.replace(sampling, skip_special_tokens=False)
        self.stream = generate(prompt or request.plain_prompt or "", sampling)
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
                is_resumable=self._is_resumable,
            )
            for index in range(self.stream.choice_count)
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stream.__aexit__(kind, error, traceback)

    async def wait_until_begun(self) -> None:
        """Return when the request runs, so that the response may begin with status 200.

        Raises:
            TrioserveError: The request ended in the queue.
        """
        await wait_until_begun(self.stream)

    async def skip_known(self, skip: Callable[[list[ResponsePart], Delta], object]) -> None:
        """Process the known output of a resumed response without sending this output to the client.

        Args:
            skip: Receives the parts and the delta that `read` would pass to `take`.
        """
        await skip_known([self.stream], lambda _, delta: skip(self.choices[delta.index].take(delta), delta))

    def read(self, take: Take, *, keep_alive: KeepAlive | None = None) -> Awaitable[None]:
        """Pass each piece of the response to `take`, one at a time, until all choices have ended.

        If a choice is aborted or its deadline passes, `take` first gets its last text. A tool call that the choice had
        begun gets no ToolCallEnd.

        Args:
            take: Receives each piece. A piece may have no parts.
            keep_alive: Fills silences of the response. Default: nothing is sent.

        Raises:
            TrioserveError: A choice was aborted, its deadline passed, or its engine failed. See read_streams.
        """

        async def take_delta(_: int, delta: Delta) -> None:
            choice = self.choices[delta.index]
            parts = choice.take(delta)
            if choice.finish_reason == "tool_calls":
                self.stream.await_tools(choice.tools)
            await take(delta.index, parts, delta)

        async def take_counted(stream_index: int, delta: Delta) -> None:
            self._bound.take(delta)
            await take_delta(stream_index, delta)

        take_next = take_delta if self._request.shape.is_streamed else take_counted
        return read_streams([self.stream], take_next, keep_alive=keep_alive, is_partial=self.is_partial)

    async def collect(self, note: Callable[[Delta], None] = lambda _: None) -> list[CollectedChoice]:
        """Return all choices when they are complete. The choices of a resumed response include the known output.

        Args:
            note: Called with each new delta.

        Raises:
            TrioserveError: As `read`.
        """
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
        """Return the token counts of all choices so far."""
        return usage_of([self.stream], reasoning_token_count=sum(c.reasoning_token_count for c in self.choices))
