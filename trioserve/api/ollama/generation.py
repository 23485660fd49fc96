"""Handlers of POST /api/chat and /api/generate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trioserve.api.ollama import response_types
from trioserve.api.ollama.answer import Answer, Piece, chat_piece, iso_time, loaded, text_piece
from trioserve.api.ollama.models import requested_model
from trioserve.api.ollama.request_types import OLLAMA_RANGES, OllamaAnswerBody, OllamaChatBody, OllamaGenerateBody
from trioserve.api.ollama.surface import LINE_KEEP_ALIVE, LINES_TYPE, line
from trioserve.api.ollama.turn import chat_request, text_request
from trioserve.api.request_context import RequestContext
from trioserve.api.route_table import GENERATES, Forwarding, Operation
from trioserve.api.sse import KEEP_ALIVE, data_event
from trioserve.api.streams.cursors import DETACH_HEADER
from trioserve.api.streams.resumption import Resumption
from trioserve.api.surface import OPENAI
from trioserve.api.turn.chat_turn import chat_turn
from trioserve.contracts.output import Delta

if TYPE_CHECKING:
    from trioserve.api.turn.turn_request import TurnRequest
    from trioserve.text.response_parts import ResponsePart

__all__ = ["OPERATIONS", "chat", "generate"]


async def chat(context: RequestContext) -> None:
    body = await context.body(OllamaChatBody)
    model = requested_model(context, body.model)
    request = chat_request(body, context.exchange.headers, context.engine, model)
    if body.messages:
        await _answer(context, body, request, model, chat_piece)
    else:
        await _say_loaded(context, body, model, chat_piece)


async def generate(context: RequestContext) -> None:
    body = await context.body(OllamaGenerateBody)
    model = requested_model(context, body.model)
    request = text_request(body, context.exchange.headers, context.engine, model)
    if body.prompt or body.suffix:
        await _answer(context, body, request, model, text_piece)
    else:
        await _say_loaded(context, body, model, text_piece)


async def _say_loaded(context: RequestContext, body: OllamaAnswerBody, model: str, piece: Piece) -> None:
    """Answer a request without a prompt. Never streamed, as in Ollama's API."""
    await context.respond_json(loaded(_head(body, model, context.clock_and_ids.unix_seconds()), piece))


def _head(body: OllamaAnswerBody, model: str, created: int) -> dict[str, Any]:
    return {"model": body.model or model, "created_at": iso_time(created)}


async def _answer(
    context: RequestContext, body: OllamaAnswerBody, request: TurnRequest, model: str, piece: Piece
) -> None:
    resumption = Resumption(context, body.resume, request.sampling, is_streamed=body.is_streamed)
    # A stream that can be resumed or detached needs ids. So its lines become server-sent events with the same values.
    has_events = resumption.is_asked or context.exchange.headers.get(DETACH_HEADER) is not None
    written = data_event if has_events else line
    answer = Answer(
        _head(body, model, resumption.created),
        piece,
        context.engine.tokenizer,
        wants_logprobs=bool(body.logprobs),
        earlier_seconds=max(0.0, context.clock_and_ids.wall_clock() - resumption.created) if body.resume else 0.0,
    )
    async with chat_turn(context, request, resumption) as turn:
        comment = KEEP_ALIVE if has_events else LINE_KEEP_ALIVE

        async def start_events() -> None:
            if has_events:
                context.surface = OPENAI
                await context.start_events(resumption.headers([turn.stream]))
            else:
                await context.start_events(media_type=LINES_TYPE)

        if body.is_streamed:
            await context.begin_events(turn.wait_until_begun, start_events, comment=comment)
        else:
            await turn.wait_until_begun()
        answer.begin()
        if body.is_streamed:
            ids = resumption.group_ids()

            async def send(index: int, parts: list[ResponsePart], delta: Delta) -> None:
                fields = answer.next(parts, delta)
                data = b"" if fields is None else written(fields)
                if ids is not None:
                    data = ids.group(data, index, delta)
                if data:
                    await context.exchange.send(data)

            await turn.skip_known(answer.skip)
            await turn.read(send, keep_alive=context.keep_alive_with(comment))
        else:
            [choice] = await turn.collect(answer.note)
    # The turn is left first, so that a slow client does not hold blocks of the engine.
    if body.is_streamed:
        end = written(answer.end(turn))
        await context.finish(end if ids is None else ids.last(end))
    else:
        await context.respond_json(answer.whole(turn, choice))


OPERATIONS: tuple[Operation[RequestContext], ...] = (
    Operation(
        method="POST",
        path="/api/chat",
        handler=chat,
        summary="Answer a chat, in Ollama's shape",
        forwarding=Forwarding.BY_MODEL,
        description="Fields have the meaning of Ollama's API. Options that are not listed here are ignored or refused. "
        "Options for loading a model are ignored. Without messages, the model computes nothing.",
        body=OllamaChatBody,
        ranges=OLLAMA_RANGES,
        response=response_types.OllamaChatLine,
        line=response_types.OllamaChatLine,
        errors=GENERATES,
        error=response_types.OllamaError,
        takes_deadlines=True,
    ),
    Operation(
        method="POST",
        path="/api/generate",
        handler=generate,
        summary="Answer a prompt, or continue a text, in Ollama's shape",
        forwarding=Forwarding.BY_MODEL,
        description="Common fields work as in /api/chat.",
        body=OllamaGenerateBody,
        ranges=OLLAMA_RANGES,
        response=response_types.OllamaTextLine,
        line=response_types.OllamaTextLine,
        errors=GENERATES,
        error=response_types.OllamaError,
        takes_deadlines=True,
    ),
)
