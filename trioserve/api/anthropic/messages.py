"""Handlers of POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

from msgspec import UNSET, UnsetType

from trioserve.api.anthropic import bodies as types
from trioserve.api.anthropic.bodies import MESSAGES_RANGES, CountTokensBody, MessagesBody
from trioserve.api.anthropic.turn import counted_turn, message_turn
from trioserve.api.generation import PARTIAL_FINISH
from trioserve.api.request_context import RequestContext
from trioserve.api.response import encoded_value
from trioserve.api.route_table import GENERATES, READS_BODY, Forwarding, Operation
from trioserve.api.sse import KEEP_ALIVE
from trioserve.api.streams.cursors import ResumeBody
from trioserve.api.streams.resumption import Resumption
from trioserve.api.surface import MessagesError, ResumableSurface, event, own_statuses
from trioserve.api.turn.chat_turn import ChatTurn, chat_turn
from trioserve.contracts.output import Delta
from trioserve.text.response_parts import (
    ContentText,
    ReasoningText,
    ResponsePart,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)

__all__ = ["OPERATIONS", "BlockEvents", "ContentBlocks", "count_message_tokens", "create_message"]

SIGNATURE_BYTES = 24


class _OpenBlock:
    """A content block to which the response still adds text.

    Args:
        index: Index of the block.
        kind: Type of the block.
        call_index: Index of the tool call, for blocks of tool calls.

    Attributes:
        digest: Hash of the reasoning so far.
    """

    def __init__(self, index: int, kind: str, call_index: int | None = None) -> None:
        self.index = index
        self.kind = kind
        self.call_index = call_index
        self.digest = blake2b(digest_size=SIGNATURE_BYTES)

    def signature(self) -> str:
        """Return the signature of the reasoning.

        Clients send it back with the reasoning and require that it is not empty. The signature proves nothing, and the
        server does not check it.
        """
        return self.digest.hexdigest()


class BlockEvents:
    """Turns the parts of a response into events: content_block_start, content_block_delta and content_block_stop.

    A tool call that is incomplete at max_tokens gets a stop event, as in Anthropic's API. The stop_reason of the
    message says that the call is incomplete.

    Args:
        shows_reasoning: If False, a reasoning block has no text.
    """

    def __init__(self, *, shows_reasoning: bool = True) -> None:
        self._shows_reasoning = shows_reasoning
        self._count = 0
        self._open: _OpenBlock | None = None

    def of(self, parts: Iterable[ResponsePart]) -> bytes:
        return b"".join([piece for part in parts for piece in self._part(part)])

    def end(self) -> bytes:
        """Return the events that end the content of the message.

        A message without content gets one empty text block, because clients expect a block.
        """
        pieces = self._begin("text", types.TextContent(text="", citations=None)) if not self._count else []
        return b"".join([*pieces, *self._stop()])

    def _part(self, part: ResponsePart) -> list[bytes]:
        if isinstance(part, ContentText):
            pieces = self._begin("text", types.TextContent(text="", citations=None))
            return [*pieces, self._delta(types.TextDelta(text=part.text))] if part.text else pieces
        if isinstance(part, ReasoningText):
            pieces = self._begin("thinking", types.ThinkingContent(thinking="", signature=""))
            assert self._open is not None
            self._open.digest.update(part.text.encode("utf-8", "surrogatepass"))
            if self._shows_reasoning and part.text:
                pieces.append(self._delta(types.ThinkingDelta(thinking=part.text)))
            return pieces
        if isinstance(part, ToolCallBegin):
            assert part.id is not None
            block = types.ToolUseContent(id=part.id, name=part.name, input={}, caller=types.Caller())
            return self._begin("tool_use", block, part.index)
        is_open = self._open is not None and self._open.call_index == part.index
        assert is_open, "arguments or end of a tool call that is not the open block"
        if isinstance(part, ToolCallArguments):
            return [self._delta(types.InputJsonDelta(partial_json=part.text))]
        return self._stop()

    def _begin(self, kind: str, block: types.Content, call_index: int | None = None) -> list[bytes]:
        """Return the events that begin a content block, or none if a block of the same kind is already open."""
        if self._open is not None and self._open.kind == kind and self._open.call_index == call_index:
            return []
        stop = self._stop()
        self._open = _OpenBlock(self._count, kind, call_index)
        self._count += 1
        start = types.ContentBlockStart(index=self._open.index, content_block=block)
        return [*stop, event("content_block_start", start)]

    def _delta(
        self,
        delta: types.TextDelta | types.ThinkingDelta | types.SignatureDelta | types.InputJsonDelta,
    ) -> bytes:
        assert self._open is not None
        return event("content_block_delta", types.ContentBlockDelta(index=self._open.index, delta=delta))

    def _stop(self) -> list[bytes]:
        if self._open is None:
            return []
        pieces = []
        if self._open.kind == "thinking":
            pieces.append(self._delta(types.SignatureDelta(signature=self._open.signature())))
        pieces.append(event("content_block_stop", types.ContentBlockStop(index=self._open.index)))
        self._open = None
        return pieces


class ContentBlocks:
    """Collects the parts of a response into the content blocks of a whole message.

    An incomplete tool call is left out, because its input is not a JSON object.

    Args:
        shows_reasoning: If False, a reasoning block has no text.
    """

    def __init__(self, *, shows_reasoning: bool = True) -> None:
        self._shows_reasoning = shows_reasoning
        self._kind: str | None = None
        self._texts: list[str] = []
        self._call: ToolCallBegin | None = None
        self._blocks: list[types.Content] = []

    def take(self, parts: Iterable[ResponsePart]) -> None:
        for part in parts:
            if isinstance(part, ToolCallBegin):
                self._close()
                self._kind, self._call = "tool_use", part
            elif isinstance(part, ToolCallEnd):
                self._end_call()
            else:
                kind = {ContentText: "text", ReasoningText: "thinking"}.get(type(part), "tool_use")
                if kind != self._kind:
                    self._close()
                    self._kind = kind
                self._texts.append(part.text)

    def whole(self) -> list[types.Content]:
        """Return all blocks after the response has ended."""
        self._close()
        return self._blocks or [types.TextContent(text="", citations=None)]

    def _close(self) -> None:
        text = "".join(self._texts)
        if self._kind == "text":
            self._blocks.append(types.TextContent(text=text, citations=None))
        elif self._kind == "thinking":
            signature = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=SIGNATURE_BYTES).hexdigest()
            shown = text if self._shows_reasoning else ""
            self._blocks.append(types.ThinkingContent(thinking=shown, signature=signature))
        self._kind, self._call = None, None
        self._texts.clear()

    def _end_call(self) -> None:
        call = self._call
        assert call is not None
        assert call.id is not None
        # The arguments are the text of the model. In a complete call, they are one JSON object.
        given = encoded_value("".join(self._texts).encode() or b"{}")
        self._blocks.append(types.ToolUseContent(id=call.id, name=call.name, input=given, caller=types.Caller()))
        self._kind, self._call = None, None
        self._texts.clear()


PING = event("ping", types.Ping())
BEGUN = b"1"
"""Resume state of a stream whose message has begun."""


async def create_message(context: RequestContext) -> None:
    body = await context.body(MessagesBody)
    model = context.model_name(body.model)
    engine = context.engine
    request = message_turn(body, context.exchange.headers, engine.default_sampling)
    shows_reasoning = body.thinking is None or body.thinking.display != "omitted"
    resumption = Resumption(
        context,
        body.resume,
        request.sampling,
        is_streamed=bool(body.stream),
        gives_partial=bool(body.return_partial),
        repeats=True,
    )
    response = _Response(context, body, model, resumption)
    async with chat_turn(context, request, resumption) as turn:
        if body.stream:
            events = BlockEvents(shows_reasoning=shows_reasoning)
            ids = resumption.group_ids()

            async def start_events() -> None:
                if ids is not None:
                    context.surface = ResumableSurface()
                await context.start_events(resumption.headers([turn.stream]))

            await context.begin_events(turn.wait_until_begun, start_events)

            async def send(index: int, parts: list[ResponsePart], delta: Delta) -> None:
                response.note(delta)
                piece = events.of(parts)
                if ids is not None:
                    piece = ids.group(piece, index, delta)
                if piece:
                    await context.exchange.send(piece)

            known: list[bytes] = []

            def repeat_known(parts: list[ResponsePart], delta: Delta) -> None:
                response.note(delta)
                known.append(events.of(parts))

            await turn.skip_known(repeat_known)
            if resumption.state is None:  # The client has received no events of this stream yet.
                start = b"".join([response.start(turn), PING, *known])
                await context.exchange.send(start if ids is None else ids.begin(start, BEGUN))
            # In a resumable stream, only comments are allowed between two groups of events.
            await turn.read(send, keep_alive=context.keep_alive_with(PING if ids is None else KEEP_ALIVE))
        else:
            blocks = ContentBlocks(shows_reasoning=shows_reasoning)

            def take_known(parts: list[ResponsePart], delta: Delta) -> None:
                response.note(delta)
                blocks.take(parts)

            async def take(_index: int, parts: list[ResponsePart], delta: Delta) -> None:
                take_known(parts, delta)

            await turn.skip_known(take_known)
            await turn.read(take)
    # The code above has left the turn's scope, so that a slow client does not hold blocks of the engine.
    if body.stream:
        end = events.end() + response.end(turn)
        await context.finish(end if ids is None else ids.last(end))
    else:
        await context.respond_json(response.whole(turn, blocks.whole()))


async def count_message_tokens(context: RequestContext) -> None:
    body = await context.body(CountTokensBody)
    context.model_name(body.model)
    request = counted_turn(body, context.engine.default_sampling)
    with context.engine.tokenizing(owner=context.owner) as texts:
        token_ids = await texts.encode(request.prompt())
    await context.respond_json(types.MessageTokens(input_tokens=len(token_ids)))


class _Response:
    """Fields of a message other than its content."""

    def __init__(self, context: RequestContext, body: MessagesBody, model: str, resumption: Resumption) -> None:
        self._resumption = resumption
        self._id = f"msg_{context.request_id}"
        self._tokens_max = body.max_tokens
        self._model = model
        self._last: Delta | None = None

    def note(self, delta: Delta) -> None:
        self._last = delta

    def start(self, turn: ChatTurn) -> bytes:
        return event("message_start", types.MessageStart(message=self._begun(turn, [])))

    def end(self, turn: ChatTurn) -> bytes:
        delta = types.MessageDelta(
            delta=self._stop_delta(turn),
            usage=_usage(turn),
            weight_versions=turn.stream.weight_versions() or UNSET,
            resume=self._resume(turn),
        )
        return event("message_delta", delta) + event("message_stop", types.MessageStop())

    def whole(self, turn: ChatTurn, content: list[types.Content]) -> types.MessageResponse:
        message, stop = self._begun(turn, content), self._stop_delta(turn)
        message.stop_reason, message.stop_sequence = stop.stop_reason, stop.stop_sequence
        message.stop_details = stop.stop_details
        message.weight_versions = turn.stream.weight_versions() or UNSET
        message.resume = self._resume(turn)
        return message

    def _begun(self, turn: ChatTurn, content: list[types.Content]) -> types.MessageResponse:
        return types.MessageResponse(
            id=self._id,
            role="assistant",
            model=self._model,
            content=content,
            stop_reason=None,
            stop_sequence=None,
            stop_details=None,
            container=None,
            usage=_usage(turn),
        )

    def _stop_delta(self, turn: ChatTurn) -> types.StopDelta:
        reason, sequence = self._stop(turn)
        details = None
        if reason == PARTIAL_FINISH:
            stop_reason = None if self._last is None else self._last.stop_reason
            details = types.AbortDetails(reason=None if stop_reason is None else str(stop_reason))
        return types.StopDelta(stop_reason=reason, stop_sequence=sequence, stop_details=details, container=None)

    def _resume(self, turn: ChatTurn) -> ResumeBody | UnsetType:
        """Return the resume state of a partial result. UNSET if the message is complete."""
        is_partial = turn.choices[0].finish_reason == PARTIAL_FINISH
        return self._resumption.behind([turn.stream]) if is_partial else UNSET

    def _stop(self, turn: ChatTurn) -> tuple[types.StopReason, str | None]:
        """Return the stop reason, and the stop sequence that ended the message."""
        [choice] = turn.choices
        if choice.finish_reason == PARTIAL_FINISH:
            return PARTIAL_FINISH, None
        if choice.finish_reason == "tool_calls":
            return "tool_use", None
        if choice.finish_reason == "length":
            # A max_tokens that did not fit was reduced, so a shorter response means that the context is full.
            is_context_full = turn.stream.completion_token_count < self._tokens_max
            return "model_context_window_exceeded" if is_context_full else "max_tokens", None
        sequence = None if self._last is None else self._last.stop_reason
        return ("stop_sequence", sequence) if isinstance(sequence, str) else ("end_turn", None)


def _usage(turn: ChatTurn) -> types.MessageUsage:
    """Return the token counts. As in Anthropic's API, input_tokens excludes prompt tokens from the prefix cache."""
    usage = turn.usage()
    cached = turn.stream.cached_token_count
    thinking = sum(choice.reasoning_token_count for choice in turn.choices)
    return types.MessageUsage(
        input_tokens=usage.prompt_tokens - cached,
        cache_creation_input_tokens=0,
        cache_read_input_tokens=cached,
        cache_creation=None,
        output_tokens=usage.completion_tokens,
        output_tokens_details=types.OutputTokensDetails(thinking_tokens=thinking) if thinking else None,
        server_tool_use=None,
        service_tier="standard",
        inference_geo=None,
    )


OPERATIONS: tuple[Operation[RequestContext], ...] = (
    Operation(
        method="POST",
        path="/v1/messages",
        handler=create_message,
        summary="Answer a conversation, in Anthropic's format",
        forwarding=Forwarding.BY_MODEL,
        description="Fields have the meaning of Anthropic's Messages API. Fields that are not listed here are ignored "
        "or refused. All prefixes are cached; the longest ttl of cache_control says for how long the cache should "
        "prefer to keep the conversation.",
        body=MessagesBody,
        ranges=MESSAGES_RANGES,
        response=types.MessageResponse,
        named_events=(
            types.MessageStart,
            types.ContentBlockStart,
            types.ContentBlockDelta,
            types.ContentBlockStop,
            types.MessageDelta,
            types.MessageStop,
            types.Ping,
        ),
        errors=own_statuses(GENERATES),
        error=MessagesError,
        takes_deadlines=True,
    ),
    Operation(
        method="POST",
        path="/v1/messages/count_tokens",
        handler=count_message_tokens,
        summary="Count the tokens of a conversation, in Anthropic's format",
        forwarding=Forwarding.BY_MODEL,
        body=CountTokensBody,
        response=types.MessageTokens,
        errors=own_statuses((*READS_BODY, 404)),
        error=MessagesError,
    ),
)
