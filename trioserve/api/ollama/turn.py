"""Translates a body of Ollama's API to a turn: a chat, or a text to continue. Does no I/O."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from trioserve.api.ollama.bodies import (
    NUM_PREDICT_MIN,
    SAMPLING_OPTIONS,
    OllamaAnswerBody,
    OllamaChatBody,
    OllamaGenerateBody,
    OllamaMessage,
    OllamaOptions,
)
from trioserve.api.openai.chat_prompt import gap_of
from trioserve.api.openai.request_types import check_cache_salt, deadlines_of
from trioserve.api.turn.chat_turn import Reasoning, TurnRequest
from trioserve.api.turn.messages import check_messages, image_part, joined_content
from trioserve.api.whole_response import ResponseShape
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.structured_output import StructuredOutput
from trioserve.text.chat_messages import check_shape
from trioserve.text.tool_choice import checked_tools

if TYPE_CHECKING:
    from trioserve.engine.engine import Engine
    from trioserve.http.exchange import Headers

__all__ = ["chat_request", "text_request"]


def content_with_images(text: str, images: list[str] | None) -> str | list[dict[str, Any]]:
    """Return a message content with the images before the text.

    Args:
        text: The text.
        images: Images as base64, without the prefix of a data URL. Later code detects their format.
    """
    return joined_content([*(image_part(f"data:image/*;base64,{image}") for image in images or ()), text], "\n")


def chat_messages(messages: list[OllamaMessage], new_call_id: Callable[[str], str]) -> list[dict[str, Any]]:
    """Translate messages to OpenAI's chat format.

    Args:
        messages: The messages.
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
        body: The body.
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
        body: The body.

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
        body: The body.
        headers: Request headers.
        engine: The engine.
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
        body: The body.
        headers: Request headers.
        engine: The engine.
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
