"""Handlers of Ollama's POST /api/chat, /api/generate, /api/embed and /api/embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from trioserve.api.embeddings.embeddings import add_vectors, pool
from trioserve.api.ollama import answer as types
from trioserve.api.ollama.answer import Answer, Head, Piece, chat_piece, iso_time, loaded, nanoseconds, text_piece
from trioserve.api.ollama.bodies import (
    OLLAMA_RANGES,
    OllamaAnswerBody,
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
)
from trioserve.api.ollama.models import requested_model
from trioserve.api.ollama.turn import chat_request, text_request
from trioserve.api.openai.request_types import check_cache_salt
from trioserve.api.request_context import RequestContext
from trioserve.api.route_table import GENERATES, Forwarding, Operation
from trioserve.api.sse import KEEP_ALIVE, data_event
from trioserve.api.streams.cursors import DETACH_HEADER
from trioserve.api.streams.resumption import Resumption
from trioserve.api.surface import LINE_KEEP_ALIVE, LINES_TYPE, OPENAI, OllamaError, line
from trioserve.api.turn.chat_turn import chat_turn
from trioserve.api.whole_response import LargeJson
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.output import Delta
from trioserve.contracts.pooling import INPUTS_MAX, PoolingParams

if TYPE_CHECKING:
    from trioserve.api.turn.chat_turn import TurnRequest
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
    """Answer a request without a prompt. As in Ollama's API, the response is never streamed."""
    await context.respond_json(loaded(_head(body, model, context.clock_and_ids.unix_seconds()), piece))


def _head(body: OllamaAnswerBody, model: str, created: int) -> Head:
    return Head(body.model or model, iso_time(created))


async def _answer(
    context: RequestContext, body: OllamaAnswerBody, request: TurnRequest, model: str, piece: Piece
) -> None:
    resumption = Resumption(context, body.resume, request.sampling, is_streamed=body.is_streamed)
    # A stream that can be resumed or detached needs event ids. So its lines are sent as server-sent events with the
    # same values.
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
                answered = answer.next(parts, delta)
                data = b"" if answered is None else written(answered)
                if ids is not None:
                    data = ids.group(data, index, delta)
                if data:
                    await context.exchange.send(data)

            await turn.skip_known(answer.skip)
            await turn.read(send, keep_alive=context.keep_alive_with(comment))
        else:
            [choice] = await turn.collect(answer.note)
    # The code above has left the turn's scope, so that a slow client does not hold blocks of the engine.
    if body.is_streamed:
        end = written(answer.end(turn))
        await context.finish(end if ids is None else ids.last(end))
    else:
        await context.respond_json(answer.whole(turn, choice))


async def embed(context: RequestContext) -> None:
    """Answer with one vector for each text. All vectors are normalized to length 1.

    Args:
        context: The request.
    """
    began_at = trio.current_time()
    body = await context.body(OllamaEmbedBody)
    model = requested_model(context, body.model)
    check_cache_salt(body.cache_salt)
    inputs = [body.input] if isinstance(body.input, str) else body.input
    if not 1 <= len(inputs) <= INPUTS_MAX:
        raise InvalidRequest(f"input has {len(inputs)} entries, allowed are 1 to {INPUTS_MAX}", param="input")
    response = await pool(
        context,
        body,
        inputs,
        PoolingParams(normalize=True, dimensions=body.dimensions),
        name_of=lambda index: "input" if isinstance(body.input, str) else f"input[{index}]",
        is_base64=False,
    )
    large = LargeJson()
    await context.respond_large(
        large,
        types.OllamaEmbeddings(
            model=body.model or model,
            embeddings=await add_vectors(large, response.pooled, lambda _, vector: vector.values()),
            total_duration=nanoseconds(trio.current_time() - began_at),
            load_duration=0,
            prompt_eval_count=response.usage.prompt_tokens,
        ),
    )


async def embed_one(context: RequestContext) -> None:
    """Answer an embedding request of the older kind, which has one text.

    The vector is normalized only if the model's configuration says so.

    Args:
        context: The request.
    """
    body = await context.body(OllamaEmbeddingsBody)
    requested_model(context, body.model)
    check_cache_salt(body.cache_salt)
    response = await pool(context, body, [body.prompt], PoolingParams(), name_of=lambda _: "prompt")
    await context.respond_json(types.OllamaEmbedding(embedding=response.pooled[0].values()))


OPERATIONS: tuple[Operation[RequestContext], ...] = (
    Operation(
        method="POST",
        path="/api/chat",
        handler=chat,
        summary="Answer a chat, in Ollama's format",
        forwarding=Forwarding.BY_MODEL,
        description="Fields have the meaning of Ollama's API. Options that are not listed here are ignored or refused. "
        "Options for loading a model are ignored. Without messages, the model computes nothing.",
        body=OllamaChatBody,
        ranges=OLLAMA_RANGES,
        response=types.OllamaChatLine,
        line=types.OllamaChatLine,
        errors=GENERATES,
        error=OllamaError,
        takes_deadlines=True,
    ),
    Operation(
        method="POST",
        path="/api/generate",
        handler=generate,
        summary="Answer a prompt, or continue a text, in Ollama's format",
        forwarding=Forwarding.BY_MODEL,
        description="Common fields work as in /api/chat.",
        body=OllamaGenerateBody,
        ranges=OLLAMA_RANGES,
        response=types.OllamaTextLine,
        line=types.OllamaTextLine,
        errors=GENERATES,
        error=OllamaError,
        takes_deadlines=True,
    ),
    Operation(
        method="POST",
        path="/api/embed",
        handler=embed,
        summary="Make vectors of texts, in Ollama's format",
        forwarding=Forwarding.BY_MODEL,
        body=OllamaEmbedBody,
        response=types.OllamaEmbeddings,
        errors=GENERATES,
        error=OllamaError,
        takes_deadlines=True,
    ),
    Operation(
        method="POST",
        path="/api/embeddings",
        handler=embed_one,
        summary="Make a vector of one text, in Ollama's older shape",
        forwarding=Forwarding.BY_MODEL,
        body=OllamaEmbeddingsBody,
        response=types.OllamaEmbedding,
        errors=GENERATES,
        error=OllamaError,
        takes_deadlines=True,
    ),
)
