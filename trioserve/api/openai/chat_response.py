"""JSON of a whole chat completion, and functions for choices that streams use too."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from trioserve.api.generation import PARTIAL_FINISH, transfer_fields
from trioserve.api.openai.logprobs import chat_tokens, prompt_logprobs
from trioserve.api.openai.request_types import ChatBody
from trioserve.api.turn.turn_choice import CollectedChoice, TurnFinish
from trioserve.api.whole_response import LargeJson

if TYPE_CHECKING:
    from trioserve.api.streams.resumption import Resumption
    from trioserve.api.turn.chat_turn import ChatTurn
    from trioserve.text.tokenizer import Tokenizer

__all__ = ["echo_of", "finish_shown", "whole_response"]


async def whole_response(
    large: LargeJson,
    tokenizer: Tokenizer,
    body: ChatBody,
    turn: ChatTurn,
    head: dict[str, object],
    resumption: Resumption,
    choices: list[CollectedChoice],
) -> dict[str, object]:
    """Make the whole response. The caller must send it with `large`, which has its large lists.

    Args:
        large: encodes large lists.
        tokenizer: tokenizer of the model.
        body: body of the request.
        turn: output of the model.
        head: fields before the choices.
        resumption: makes the partial result of an aborted response.
        choices: complete choices.
    """
    stream = turn.stream

    async def logprobs_of(choice: CollectedChoice) -> dict[str, object] | None:
        if not body.logprobs:
            return None
        weight = 1 + (body.top_logprobs or 0)
        content = await large.add(choice.logprobs, functools.partial(chat_tokens, tokenizer), item_weight=weight)
        return {"content": content, "refusal": None}

    response = {
        **head,
        "choices": [
            {
                "index": index,
                "message": _message(body, choice),
                "logprobs": await logprobs_of(choice),
                "finish_reason": finish_shown(body, choice.finish_reason),
                "stop_reason": choice.stop_reason,
                **({"token_ids": choice.token_ids} if body.return_token_ids else {}),
                **({"weight_versions": choice.weight_versions} if choice.weight_versions else {}),
            }
            for index, choice in enumerate(choices)
        ],
        "usage": turn.usage(),
        **transfer_fields(choice.kv_transfer for choice in choices),
    }
    if any(choice.finish_reason == PARTIAL_FINISH for choice in choices):
        response["resume"] = resumption.behind([stream])
    if body.return_token_ids:
        response["prompt_token_ids"] = stream.prompt_token_ids
    if stream.prompt_logprobs is not None:
        write = functools.partial(prompt_logprobs, tokenizer)
        weight = 1 + (body.prompt_logprobs or 0)
        response["prompt_logprobs"] = await large.add(stream.prompt_logprobs, write, item_weight=weight)
    return response


def finish_shown(body: ChatBody, reason: TurnFinish | None) -> str | None:
    """Return the finish reason that the client knows: "function_call" if the request has `functions`.

    Args:
        body: body of the request.
        reason: finish reason of the choice. None: it has not ended.
    """
    return "function_call" if reason == "tool_calls" and body.functions else reason


def echo_of(body: ChatBody) -> str:
    """Return the text that the response repeats: with `echo`, the last message if it is the assistant's.

    Args:
        body: body of the request.
    """
    last: dict[str, Any] = body.messages[-1]
    if not body.echo or last["role"] != "assistant":
        return ""
    content = last.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _message(body: ChatBody, choice: CollectedChoice) -> dict[str, object]:
    echo = echo_of(body)
    content = choice.content
    message: dict[str, object] = {
        "role": "assistant",
        "content": echo + (content or "") if echo else content,
        "refusal": None,
    }
    if choice.reasoning is not None and body.include_reasoning is not False:
        message["reasoning_content"] = message["reasoning"] = choice.reasoning
    if choice.tool_calls and body.functions:
        [call] = choice.tool_calls
        message["function_call"] = {"name": call.name, "arguments": call.arguments}
    elif choice.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in choice.tool_calls
        ]
    return message
