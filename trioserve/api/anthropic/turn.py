"""From a body of the Messages API to a turn of a chat: what is asked of the model, its sampling, its thinking. Pure."""

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
SERVED_ELSEWHERE = {
    "container": "no programs of the model's are run here",
    "mcp_servers": "no servers are asked for tools here: list the tools, and call them yourself",
}


def message_turn(body: MessagesBody, headers: Headers, defaults: SamplingParams) -> TurnRequest:
    """Translate a message's body.

    max_tokens that do not fit beside the prompt mean as many as fit: clients of this API send what their usual models
    can do, and a response that ends early says so.

    Raises:
        InvalidRequest: A field cannot be served. It is named.
    """
    for field, reason in SERVED_ELSEWHERE.items():
        if getattr(body, field) not in UNSET_VALUES:
            raise InvalidRequest(f"{field} is not supported: {reason}", param=field)
    if body.thread is not None:
        message = "thread is not supported: no conversation is kept here, send all of its messages"
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
    """The turn that the same fields would be in a message, but for sampling. Raises InvalidRequest."""
    return _turn(body, defaults, tokens_max=None)


def _turn(body: CountTokensBody, sampling: SamplingParams, *, tokens_max: int | None) -> TurnRequest:
    for index, edit in enumerate((body.context_management and body.context_management.edits) or ()):
        if str(edit.get("type")).startswith("compact"):
            param = f"context_management.edits[{index}]"
            raise InvalidRequest(f"{param} is not supported: a context is not summarised here", param=param)
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
        # As the fields are called in this API.
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
        raise InvalidRequest(f'tool_choice is "{choice.type}", and there are no tools: send some', param="tool_choice")
    if choice.type == "tool":
        if choice.name not in names:
            raise InvalidRequest(
                f"tool_choice names {choice.name if choice.name is None else choice.name[:200]!r}, and the tools are: "
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
            'budget_tokens is missing: with thinking of type "enabled" it has to be there',
            param="thinking.budget_tokens",
        )
    _check_range("Thinking.budget_tokens", budget, param="thinking.budget_tokens")
    if tokens_max is not None and budget >= tokens_max:
        raise InvalidRequest(
            f"budget_tokens is {budget}, and has to be less than max_tokens, which is {tokens_max}",
            param="thinking.budget_tokens",
        )
    return Reasoning(is_on=True, effort=effort, budget_tokens=budget)


def _check_range(place: str, value: int, *, param: str | None = None) -> None:
    allowed = MESSAGES_RANGES[place]
    if not allowed.holds(value):
        raise InvalidRequest(f"{place.rpartition('.')[2]} is {value}, allowed is {allowed}", param=param or place)
