"""Translates a body of the Messages API to a turn: messages, sampling, reasoning and tools. Does no I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from trioserve.api.anthropic.chat_messages import chat_messages, chat_tools
from trioserve.api.anthropic.request_types import MESSAGES_RANGES, CountTokensBody, MessagesBody, OutputFormat
from trioserve.api.anthropic.surface import THREAD_UNSUPPORTED
from trioserve.api.deadline_fields import deadlines_of
from trioserve.api.error_responses import refusal
from trioserve.api.openai.request_types import check_cache_salt
from trioserve.api.turn.messages import check_messages
from trioserve.api.turn.turn_request import Reasoning, TurnRequest
from trioserve.api.unread_fields import UNSET_VALUES
from trioserve.api.whole_response import ResponseShape
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.request import PRIORITY_MAX, PRIORITY_MIN
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.structured_output import StructuredOutput
from trioserve.text.chat_messages import check_shape
from trioserve.text.tool_choice import ToolChoice, ToolMode, checked_tools

if TYPE_CHECKING:
    from trioserve.http.headers import Headers

__all__ = ["counted_turn", "message_turn"]

TOOL_MODES = {"auto": ToolMode.AUTO, "any": ToolMode.REQUIRED, "tool": ToolMode.NAMED, "none": ToolMode.NONE}
UNSUPPORTED = {
    "container": "this server does not run programs",
    "mcp_servers": "this server does not call MCP servers: list the tools, and call them yourself",
}


def message_turn(body: MessagesBody, headers: Headers, defaults: SamplingParams) -> TurnRequest:
    """Translate the body of a message request.

    If max_tokens does not fit into the context beside the prompt, it is reduced. Clients of this API send the limit of
    their usual models, and a response that ends early reports it.

    Args:
        body: The body.
        headers: Request headers.
        defaults: The server's default sampling options.

    Raises:
        InvalidRequest: A field cannot be served. The error names the field.
    """
    for field, reason in UNSUPPORTED.items():
        if getattr(body, field) not in UNSET_VALUES:
            raise InvalidRequest(f"{field} is not supported: {reason}", param=field)
    if body.thread is not None:
        message = "thread is not supported: this server stores no conversations, send all messages"
        raise refusal(THREAD_UNSUPPORTED, message, param="thread")
    _check_range("max_tokens", body.max_tokens)
    if body.priority is not None and not PRIORITY_MIN <= body.priority <= PRIORITY_MAX:
        raise InvalidRequest(
            f"priority is {body.priority}, allowed is {PRIORITY_MIN} to {PRIORITY_MAX}", param="priority"
        )
    check_cache_salt(body.cache_salt)
    given: dict[str, object] = {
        name: value for name in ("temperature", "top_p", "top_k", "seed") if (value := getattr(body, name)) is not None
    }
    given |= {"n": 1, "logprobs": None, "prompt_logprobs": None}
    given |= {"max_tokens": body.max_tokens, "clamp_max_tokens": True}
    if body.stop_sequences is not None:
        given["stop"] = tuple(body.stop_sequences)
    try:
        sampling = msgspec.structs.replace(defaults, **given)
    except InvalidRequest as error:
        if error.param != "stop":
            raise
        raise InvalidRequest(str(error), param="stop_sequences") from None
    return msgspec.structs.replace(
        _turn(body, sampling, tokens_max=body.max_tokens),
        priority=body.priority,
        cache_salt=body.cache_salt,
        deadlines=deadlines_of(body, headers),
        shape=ResponseShape(is_streamed=bool(body.stream)),
    )


def counted_turn(body: CountTokensBody, defaults: SamplingParams) -> TurnRequest:
    """Return the turn for a request that only counts prompt tokens.

    Args:
        body: The body.
        defaults: The server's default sampling options.

    Raises:
        InvalidRequest: A field cannot be served. The error names the field.
    """
    return _turn(body, defaults, tokens_max=None)


def _turn(body: CountTokensBody, sampling: SamplingParams, *, tokens_max: int | None) -> TurnRequest:
    for index, edit in enumerate((body.context_management and body.context_management.edits) or ()):
        if str(edit.get("type")).startswith("compact"):
            param = f"context_management.edits[{index}]"
            raise InvalidRequest(f"{param} is not supported: this server does not summarise a context", param=param)
    messages = check_messages(chat_messages(body))
    tools = _tools(body)
    continues = body.messages[-1].role == "assistant"
    return TurnRequest(
        messages=messages,
        sampling=sampling,
        tools=tools,
        tool_choice=_tool_choice(body),
        parallel_tool_calls=not (body.tool_choice and body.tool_choice.disable_parallel_tool_use),
        structured=_structured(body),
        reasoning=_reasoning(body, tokens_max),
        add_generation_prompt=not continues,
        continue_final_message=continues,
    )


def _tools(body: CountTokensBody) -> list[dict[str, Any]] | None:
    try:
        return checked_tools(chat_tools(body.tools))
    except InvalidRequest as error:
        # Replace OpenAI's field names by those of this API.
        message, param = (
            text.replace(".function.parameters", ".input_schema").replace(".function.", ".")
            for text in (str(error), error.param or "tools")
        )
        raise InvalidRequest(message, param=param) from None


def _tool_choice(body: CountTokensBody) -> ToolChoice:
    choice = body.tool_choice
    if choice is None:
        return ToolChoice()
    names = [tool.name for tool in body.tools or ()]
    if choice.type in ("any", "tool") and not names:
        raise InvalidRequest(f'tool_choice is "{choice.type}", but there are no tools: send tools', param="tool_choice")
    if choice.type == "tool":
        if choice.name not in names:
            raise InvalidRequest(
                f"tool_choice names {choice.name if choice.name is None else choice.name[:200]!r}, but the tools are: "
                + ", ".join(names),
                param="tool_choice.name",
            )
        return ToolChoice(mode=ToolMode.NAMED, name=choice.name)
    return ToolChoice(mode=TOOL_MODES[choice.type])


def _structured(body: CountTokensBody) -> StructuredOutput | None:
    wanted: OutputFormat | None = body.output_format
    field = "output_format"
    if body.output_config is not None and body.output_config.format is not None:
        wanted, field = body.output_config.format, "output_config.format"
    if wanted is None:
        return None
    check_shape(wanted.schema, f"{field}.schema")
    return StructuredOutput.json(wanted.schema, param=f"{field}.schema", strict=False)


def _reasoning(body: CountTokensBody, tokens_max: int | None) -> Reasoning:
    effort = None if body.output_config is None else body.output_config.effort
    thinking = body.thinking
    if thinking is None or thinking.type in ("adaptive", "between_tools"):
        return Reasoning(effort=effort)
    if thinking.type == "disabled":
        return Reasoning(is_on=False)
    budget = thinking.budget_tokens
    if budget is None:
        raise InvalidRequest(
            'budget_tokens is missing: thinking of type "enabled" needs it',
            param="thinking.budget_tokens",
        )
    _check_range("Thinking.budget_tokens", budget, param="thinking.budget_tokens")
    if tokens_max is not None and budget >= tokens_max:
        raise InvalidRequest(
            f"budget_tokens is {budget}, but must be less than max_tokens, which is {tokens_max}",
            param="thinking.budget_tokens",
        )
    return Reasoning(is_on=True, effort=effort, budget_tokens=budget)


def _check_range(field: str, value: int, *, param: str | None = None) -> None:
    allowed = MESSAGES_RANGES[field]
    if not allowed.holds(value):
        raise InvalidRequest(f"{field.rpartition('.')[2]} is {value}, allowed is {allowed}", param=param or field)
