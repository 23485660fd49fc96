"""Handlers of POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trioserve.api.anthropic import response_types
from trioserve.api.anthropic.content_blocks import BlockEvents, ContentBlocks
from trioserve.api.anthropic.request_types import MESSAGES_RANGES, CountTokensBody, MessagesBody
from trioserve.api.anthropic.surface import ResumableSurface, event, own_statuses
from trioserve.api.anthropic.turn import counted_turn, message_turn
from trioserve.api.generation import PARTIAL_FINISH
from trioserve.api.request_context import RequestContext
from trioserve.api.route_table import GENERATES, READS_BODY, Forwarding, Operation
from trioserve.api.sse import KEEP_ALIVE
from trioserve.api.streams.resumption import Resumption
from trioserve.api.turn.chat_turn import ChatTurn, chat_turn
from trioserve.contracts.output import Delta

if TYPE_CHECKING:
    from trioserve.text.response_parts import ResponsePart

__all__ = ["OPERATIONS", "count_message_tokens", "create_message"]

PING = event("ping", {"type": "ping"})
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
            if resumption.state is None:  # the client has no events of this stream yet
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
    # The turn is left first, so that a slow client does not hold blocks of the engine.
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
    await context.respond_json({"input_tokens": len(token_ids)})


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
        message = self._message(turn, [], {"stop_reason": None, "stop_sequence": None, "stop_details": None})
        return event("message_start", {"type": "message_start", "message": message})

    def end(self, turn: ChatTurn) -> bytes:
        delta = {**self._stop_fields(turn), "container": None}
        value = {"type": "message_delta", "delta": delta, "usage": _usage(turn), **self._end_fields(turn)}
        return event("message_delta", value) + event("message_stop", {"type": "message_stop"})

    def whole(self, turn: ChatTurn, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._message(turn, content, self._stop_fields(turn)), **self._end_fields(turn)}

    def _message(self, turn: ChatTurn, content: list[dict[str, Any]], stop_fields: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            **stop_fields,
            "container": None,
            "usage": _usage(turn),
        }

    def _stop_fields(self, turn: ChatTurn) -> dict[str, Any]:
        reason, sequence = self._stop(turn)
        details = None
        if reason == PARTIAL_FINISH:
            details = {"type": PARTIAL_FINISH, "reason": None if self._last is None else self._last.stop_reason}
        return {"stop_reason": reason, "stop_sequence": sequence, "stop_details": details}

    def _end_fields(self, turn: ChatTurn) -> dict[str, Any]:
        """Return weight versions if the weights were replaced, and the resume state of a partial result."""
        fields: dict[str, Any] = {}
        if versions := turn.stream.weight_versions():
            fields["weight_versions"] = versions
        if turn.choices[0].finish_reason == PARTIAL_FINISH:
            fields["resume"] = self._resumption.behind([turn.stream])
        return fields

    def _stop(self, turn: ChatTurn) -> tuple[str, str | None]:
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


def _usage(turn: ChatTurn) -> dict[str, Any]:
    """Return token counts in Anthropic's way: prompt tokens from the prefix cache are not in input_tokens."""
    usage = turn.usage()
    cached = turn.stream.cached_token_count
    thinking = sum(choice.reasoning_token_count for choice in turn.choices)
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "cache_creation": None,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": thinking} if thinking else None,
        "server_tool_use": None,
        "service_tier": "standard",
        "inference_geo": None,
    }


OPERATIONS: tuple[Operation[RequestContext], ...] = (
    Operation(
        method="POST",
        path="/v1/messages",
        handler=create_message,
        summary="Answer a conversation, in Anthropic's shape",
        forwarding=Forwarding.BY_MODEL,
        description="Fields have the meaning of Anthropic's Messages API. Fields that are not listed here are ignored "
        "or refused. cache_control is ignored, because all prefixes are cached anyway.",
        body=MessagesBody,
        ranges=MESSAGES_RANGES,
        response=response_types.MessageResponse,
        named_events=(
            response_types.MessageStart,
            response_types.ContentBlockStart,
            response_types.ContentBlockDelta,
            response_types.ContentBlockStop,
            response_types.MessageDelta,
            response_types.MessageStop,
            response_types.Ping,
        ),
        errors=own_statuses(GENERATES),
        error=response_types.MessagesError,
        takes_deadlines=True,
    ),
    Operation(
        method="POST",
        path="/v1/messages/count_tokens",
        handler=count_message_tokens,
        summary="Count the tokens of a conversation, in Anthropic's shape",
        forwarding=Forwarding.BY_MODEL,
        body=CountTokensBody,
        response=response_types.MessageTokens,
        errors=own_statuses((*READS_BODY, 404)),
        error=response_types.MessagesError,
    ),
)
