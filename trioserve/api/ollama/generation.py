"""Handlers of Ollama's POST /api/chat, /api/generate, /api/embed and /api/embeddings.

Each body becomes a turn: a chat, or a text to continue.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from trioserve.api.ollama import answer as types
from trioserve.api.ollama.answer import (
    NUM_PREDICT_MIN,
    OLLAMA_RANGES,
    SAMPLING_OPTIONS,
    Answer,
    Head,
    OllamaAnswerBody,
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    OllamaMessage,
    OllamaOptions,
    Piece,
    chat_piece,
    iso_time,
    loaded,
    nanoseconds,
    text_piece,
)
from trioserve.api.ollama.models import requested_model
from trioserve.api.openai.chat_prompt import gap_of
from trioserve.api.openai.embeddings import add_vectors, pool
from trioserve.api.openai.request_types import check_cache_salt, deadlines_of
from trioserve.api.request_context import RequestContext
from trioserve.api.route_table import GENERATES, Forwarding, Operation
from trioserve.api.sse import KEEP_ALIVE, data_event
from trioserve.api.streams.cursors import DETACH_HEADER
from trioserve.api.streams.resumption import Resumption
from trioserve.api.surface import LINE_KEEP_ALIVE, LINES_TYPE, OPENAI, OllamaError, line
from trioserve.api.turn.chat_turn import Reasoning, TurnRequest, chat_turn
from trioserve.api.turn.messages import check_messages, image_part, joined_content
from trioserve.api.whole_response import LargeJson, ResponseShape
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.output import Delta
from trioserve.contracts.pooling import INPUTS_MAX, PoolingParams
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.structured_output import StructuredOutput
from trioserve.text.chat_messages import check_shape
from trioserve.text.response_parsers.offered_tools import checked_tools

if TYPE_CHECKING:
    from trioserve.api.turn.chat_turn import TurnRequest
    from trioserve.engine.engine import Engine
    from trioserve.http.exchange import Headers
    from trioserve.text.response_parts import ResponsePart

__all__ = ["OPERATIONS", "chat", "generate"]


def content_with_images(text: str, images: list[str] | None) -> str | list[dict[str, Any]]:
    """Return a message content with the images before the text.

    Args:
        images: Images as base64, without the prefix of a data URL. Later code detects their format.
    """
    return joined_content([*(image_part(f"data:image/*;base64,{image}") for image in images or ()), text], "\n")


def chat_messages(messages: list[OllamaMessage], new_call_id: Callable[[str], str]) -> list[dict[str, Any]]:
    """Translate messages to OpenAI's chat format.

    Args:
        new_call_id: Returns an id that the model's template accepts, from letters and digits that are unique in the
            conversation.

    Raises:
        InvalidRequest: A tool result has no call. The error names the message.
    """
    translated: list[dict[str, Any]] = []
    unanswered: list[tuple[str, str]] = []  # The calls that have no result yet, as pairs of id and name.
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        translated_message: dict[str, Any] = {
            "role": message.role,
            "content": content_with_images(message.content or "", message.images),
        }
        if message.thinking:
            translated_message["reasoning_content"] = message.thinking
        if message.role == "tool":
            call_id, name = _answered(message, unanswered, path)
            translated_message |= {"tool_call_id": call_id, "name": name}
        elif message.tool_calls:
            calls = [
                (call.id or new_call_id(f"{index:05}{position:04}"), call.function)
                for position, call in enumerate(message.tool_calls)
            ]
            unanswered = [(call_id, function.name) for call_id, function in calls]
            translated_message["tool_calls"] = [
                {"id": call_id, "type": "function", "function": {"name": called.name, "arguments": called.arguments}}
                for call_id, called in calls
            ]
        translated.append(translated_message)
    return translated


def _answered(message: OllamaMessage, unanswered: list[tuple[str, str]], path: str) -> tuple[str, str]:
    """Return id and name of the call that a tool result belongs to, and remove the call from `unanswered`."""
    for position, (call_id, name) in enumerate(unanswered):
        if message.tool_call_id in (None, call_id) and message.tool_name in (None, name):
            return unanswered.pop(position)
    raise InvalidRequest(
        f"{path} is a tool result without a matching call. Earlier calls without a result are: "
        + (", ".join(name for _, name in unanswered) or "none"),
        param=path,
    )


OWN_NAMES = {"repetition_penalty": "options.repeat_penalty", "logprobs": "top_logprobs"}
NO_PENALTIES: dict[str, object] = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
ANY_SEED = -1
ALL_TOKENS = -1

# This server does not have these features. The listed values switch a feature off, and are accepted.
REFUSED_OPTIONS = {
    "mirostat": ((0,), "this server has no mirostat: leave it out, or send 0"),
    "typical_p": ((1,), "this server has no typical sampling: leave it out, or send 1"),
    "tfs_z": ((1,), "this server has no tail free sampling: leave it out, or send 1"),
}


def sampling_of(body: OllamaAnswerBody, defaults: SamplingParams) -> SamplingParams:
    """Return the server's default sampling options, overridden by the body's options.

    A num_predict that does not fit into the context beside the prompt is reduced.

    Args:
        defaults: The server's defaults.

    Raises:
        InvalidRequest: An option is not supported or out of range. The error names the field.
    """
    options = body.options or OllamaOptions()
    for name, (neutral, reason) in REFUSED_OPTIONS.items():
        if getattr(options, name) not in (None, *neutral):
            raise InvalidRequest(f"options.{name} is {getattr(options, name)}, but {reason}", param=f"options.{name}")
    given: dict[str, object] = {
        name: value for name in SAMPLING_OPTIONS if (value := getattr(options, name)) is not None
    } | {
        "n": 1,
        "prompt_logprobs": None,
        "logprobs": _logprobs(body),
    }
    if options.repeat_penalty is not None:
        given["repetition_penalty"] = options.repeat_penalty
    if options.seed == ANY_SEED:
        del given["seed"]
    if options.stop is not None:
        given["stop"] = (options.stop,) if isinstance(options.stop, str) else tuple(options.stop)
    if options.num_predict is not None:
        given |= {"max_tokens": _tokens_max(options.num_predict), "clamp_max_tokens": True}
    if options.repeat_last_n == 0:
        given |= NO_PENALTIES
    try:
        sampling = msgspec.structs.replace(defaults, **given)
    except InvalidRequest as error:
        name = error.param or ""
        field = OWN_NAMES.get(name, f"options.{name}")
        raise InvalidRequest(str(error).replace(name, field, 1), param=field) from None
    _check_window(options, sampling)
    return sampling


def structured_output(body: OllamaAnswerBody) -> StructuredOutput | None:
    """Return the schema for the output, or None for free text.

    Args:
        body: Request with the field `format`.

    Raises:
        InvalidRequest: The schema is too large or nested too deep.
    """
    if not isinstance(body.format, dict):
        return StructuredOutput.json_object(param="format") if body.format else None
    check_shape(body.format, "format")
    return StructuredOutput.json(body.format, param="format", strict=False)


def _logprobs(body: OllamaAnswerBody) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs is set, so logprobs must be true", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _tokens_max(num_predict: int) -> int | None:
    """Return the limit for output tokens. None: as many as fit."""
    if num_predict < NUM_PREDICT_MIN:
        raise InvalidRequest(
            f"options.num_predict is {num_predict}, allowed is {NUM_PREDICT_MIN} or more; values up to 0 mean as many "
            "tokens as fit",
            param="options.num_predict",
        )
    return num_predict if num_predict > 0 else None


def _check_window(options: OllamaOptions, sampling: SamplingParams) -> None:
    window = options.repeat_last_n
    is_penalized = any(getattr(sampling, name) != value for name, value in NO_PENALTIES.items())
    if window not in (None, 0, ALL_TOKENS) and is_penalized:
        raise InvalidRequest(
            f"options.repeat_last_n is {window}, but penalties of this server always count all tokens: leave it out, "
            "send -1 for all tokens, or send 0 for no penalties",
            param="options.repeat_last_n",
        )


REFUSED = {
    "template": "this server uses the model's own Jinja template: send raw and the whole prompt",
    "context": "send the conversation as messages to /api/chat",
}


def chat_request(body: OllamaChatBody, headers: Headers, engine: Engine, model: str) -> TurnRequest:
    """Translate the body of a chat request.

    Args:
        headers: Request headers.
        engine: Engine that will run the request. Its model decides which options exist.
        model: Name of the served model.

    Raises:
        InvalidRequest: A field cannot be served. The error names the field.
    """
    request = _request(body, headers, engine)
    messages = body.messages or []  # If there are no messages, the engine computes nothing.
    continues = bool(messages) and messages[-1].role == "assistant" and not messages[-1].tool_calls
    return msgspec.structs.replace(
        request,
        messages=check_messages(chat_messages(messages, engine.families.call_id)) if messages else [],
        tools=checked_tools([{"type": "function", **tool} for tool in body.tools or ()]),
        reasoning=_reasoning(body, engine, model),
        add_generation_prompt=not continues,
        continue_final_message=continues,
    )


def text_request(body: OllamaGenerateBody, headers: Headers, engine: Engine, model: str) -> TurnRequest:
    """Translate the body of a text request.

    The prompt becomes a message of the user, unless the prompt is raw or has a suffix.

    Args:
        headers: Request headers.
        engine: Engine that will run the request. Its model decides which options exist.
        model: Name of the served model.

    Raises:
        InvalidRequest: A field cannot be served. The error names the field.
    """
    for field, reason in REFUSED.items():
        if getattr(body, field):
            raise InvalidRequest(f"{field} is not supported: {reason}", param=field)
    request = _request(body, headers, engine)
    prompt = body.prompt or ""
    gap = gap_of(engine.tokenizer, body.suffix)
    if gap is not None or body.raw:
        _check_plain(body, "suffix" if gap is not None else "raw")
        sampling = request.sampling
        if gap is not None:
            prompt = gap.prompt(prompt, body.suffix or "")
            ends = (*sampling.stop_token_ids, *gap.end_token_ids(engine.tokenizer))
            sampling = msgspec.structs.replace(sampling, stop_token_ids=ends)
        return msgspec.structs.replace(request, plain_prompt=prompt, sampling=sampling)
    messages: list[dict[str, Any]] = [{"role": "user", "content": content_with_images(prompt, body.images)}]
    if body.system:
        messages.insert(0, {"role": "system", "content": body.system})
    return msgspec.structs.replace(request, messages=messages, reasoning=_reasoning(body, engine, model))


def _request(body: OllamaAnswerBody, headers: Headers, engine: Engine) -> TurnRequest:
    """Return a turn without messages, made from the fields that chat and text requests share."""
    check_cache_salt(body.cache_salt)
    return TurnRequest(
        messages=[],
        sampling=sampling_of(body, engine.default_sampling),
        structured=structured_output(body),
        priority=body.priority,
        cache_salt=body.cache_salt,
        deadlines=deadlines_of(body, headers),
        shape=ResponseShape(is_streamed=body.is_streamed),
    )


def _reasoning(body: OllamaAnswerBody, engine: Engine, model: str) -> Reasoning:
    think = body.think
    if think and engine.families.reasoning_family is None:
        raise InvalidRequest(f'"{model}" does not support thinking: leave think out, or send false', param="think")
    return Reasoning(is_on=think) if isinstance(think, bool) else Reasoning(effort=think)


def _check_plain(body: OllamaGenerateBody, reason: str) -> None:
    """Check a request whose prompt uses no template.

    Raises:
        InvalidRequest: A field is set that needs a template.
    """
    for field in ("system", "think", "images"):
        if getattr(body, field):
            raise InvalidRequest(
                f"{field} is set, but {reason} uses no template: leave out {field} or {reason}", param=field
            )


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
