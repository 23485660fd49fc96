"""Translates a body of Ollama's API to a turn: a chat, or a text to continue. Does no I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from trioserve.api.deadline_fields import deadlines_of
from trioserve.api.ollama.chat_messages import chat_messages, content_with_images
from trioserve.api.ollama.request_types import OllamaAnswerBody, OllamaChatBody, OllamaGenerateBody
from trioserve.api.ollama.sampling import sampling_of, structured_output
from trioserve.api.openai.prompt_fields import gap_of
from trioserve.api.openai.request_types import check_cache_salt
from trioserve.api.turn.messages import check_messages
from trioserve.api.turn.turn_request import Reasoning, TurnRequest
from trioserve.api.whole_response import ResponseShape
from trioserve.contracts.errors import InvalidRequest
from trioserve.text.tool_choice import checked_tools

if TYPE_CHECKING:
    from trioserve.engine.engine import Engine
    from trioserve.http.headers import Headers

__all__ = ["chat_request", "text_request"]

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
    messages = body.messages or []  # without messages, nothing is computed
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

    The prompt becomes a message of the user, unless it is raw or has a suffix.

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
    """Return the turn for the common fields, without messages."""
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
