"""Conversion of a body into a turn of a chat: messages, tools, reasoning and template options.

The older fields `functions` and `function_call`, and their messages, are translated to tools.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast, get_args

from trioserve.api.openai.request_types import ChatBody, TokenizeBody
from trioserve.api.openai.structured_fields import structured_output_of
from trioserve.api.turn.chat_turn import Reasoning, ReasoningEffort, TurnRequest
from trioserve.api.turn.messages import check_messages
from trioserve.contracts.arguments import shown
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.prompt import ChatPrompt, Cut
from trioserve.contracts.sampling import THINKING_TOKENS_MAX, SamplingParams
from trioserve.text.chat_messages import check_shape
from trioserve.text.fill_in_middle import fill_in_middle
from trioserve.text.response_parsers.offered_tools import ToolChoice, checked_tools, tool_choice_of

if TYPE_CHECKING:
    from trioserve.text.fill_in_middle import FillInMiddle
    from trioserve.text.tokenizer import Tokenizer

__all__ = ["AS_FITS", "chat_prompt", "gap_of", "prompt_cut", "turn_request"]

AS_FITS = -1


def prompt_cut(asked: int | None, context_tokens_max: int, response_tokens_max: int | None) -> Cut | None:
    """Read truncate_prompt_tokens: how many tokens at the prompt's end to keep.

    Args:
        asked: value of the field. -1: as many as fit beside the response. None: a prompt that is too long is refused.
        context_tokens_max: length of the model's context.
        response_tokens_max: longest response. None: no limit.

    Raises:
        InvalidRequest: the value is out of range.
    """
    if asked is None:
        return None
    if asked != AS_FITS and not 1 <= asked <= context_tokens_max:
        raise InvalidRequest(
            f"truncate_prompt_tokens is {asked}, allowed is 1 to {context_tokens_max}, or -1 for as many as fit",
            param="truncate_prompt_tokens",
        )
    # If the response alone is too long for the context, a later check refuses the request.
    fitting = max(1, context_tokens_max - max(1, response_tokens_max or 1))
    return Cut(fitting if asked == AS_FITS else asked, "left")


def gap_of(tokenizer: Tokenizer, suffix: str | None) -> FillInMiddle | None:
    """Return the format in which the model is asked to fill the gap before a suffix.

    Args:
        tokenizer: tokenizer of the model.
        suffix: text after the gap. None or empty: no gap.

    Returns:
        The format, or None if there is no gap.

    Raises:
        InvalidRequest: the model was not trained to fill gaps.
    """
    if not suffix:
        return None
    gap = fill_in_middle(tokenizer)
    if gap is None:
        raise InvalidRequest(
            "suffix is not supported by this model: its vocabulary has no tokens for filling gaps, such as "
            "<|fim_prefix|>; leave it out, or serve a model that was trained for it",
            param="suffix",
        )
    return gap


_BUDGETS = ("thinking_token_budget", "thinking_budget", "max_reasoning_tokens")
_EFFORTS = get_args(ReasoningEffort)


def chat_prompt(body: ChatBody | TokenizeBody, *, trust_chat_template: bool) -> ChatPrompt:
    """Make the prompt of a chat, which the model's template turns into text.

    Args:
        body: body of the request.
        trust_chat_template: True: the body may have its own template.

    Raises:
        InvalidRequest: see turn_request.
    """
    return turn_request(body, SamplingParams(), trust_chat_template=trust_chat_template).prompt()


def turn_request(body: ChatBody | TokenizeBody, sampling: SamplingParams, *, trust_chat_template: bool) -> TurnRequest:
    """Make the turn that a body asks for, without fields for the engine such as priority.

    Args:
        body: body of the request.
        sampling: sampling parameters of the request.
        trust_chat_template: True: the body may have its own template.

    Raises:
        InvalidRequest: a template could not use the value, or fields conflict. The error names the field by its path.
    """
    for field in ("functions", "chat_template_kwargs"):
        # This check must be first: the checks below print bad values, and printing is recursive.
        if value := getattr(body, field):
            check_shape(value, field)
    messages = check_messages(_with_new_names(body.messages))
    tools = checked_tools(_tools(body) if body.functions else body.tools)
    if body.chat_template is not None and not trust_chat_template:
        raise InvalidRequest(
            "chat_template is refused: this server accepts no templates in requests "
            "(its operator can allow them with trust_request_chat_template)",
            param="chat_template",
        )
    if body.add_special_tokens:
        raise InvalidRequest(
            "add_special_tokens is for plain prompts: a chat template writes its own special tokens",
            param="add_special_tokens",
        )
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt are both set: send one",
            param="continue_final_message",
        )
    return TurnRequest(
        messages=messages,
        sampling=sampling,
        tools=tools,
        tool_choice=(
            tool_choice_of(body.tool_choice, tools)
            if body.function_call is None
            else _old_tool_choice(body, body.function_call, tools)
        ),
        structured=structured_output_of(body) if isinstance(body, ChatBody) else None,
        reasoning=_reasoning(body),
        template_arguments=body.chat_template_kwargs or {},
        chat_template=body.chat_template,
        add_generation_prompt=not continues and body.add_generation_prompt is not False,
        continue_final_message=continues,
    )


def _tools(body: ChatBody | TokenizeBody) -> list[dict[str, Any]]:
    """Translate functions to tools."""
    if body.tools:
        raise InvalidRequest("functions is the old name of tools, and both are set: send one", param="functions")
    return [{"type": "function", "function": function} for function in body.functions or ()]


def _old_tool_choice(
    body: ChatBody | TokenizeBody, old: str | dict[str, Any], tools: list[dict[str, Any]] | None
) -> ToolChoice:
    """Translate function_call to a tool choice."""
    if body.tool_choice is not None:
        raise InvalidRequest(
            "function_call is the old name of tool_choice, and both are set: send one", param="function_call"
        )
    if old in ("auto", "none"):
        return tool_choice_of(old, tools)
    if isinstance(old, dict) and isinstance(old.get("name"), str):
        return tool_choice_of({"type": "function", "function": old}, tools)
    raise InvalidRequest(
        f'function_call is {shown(old)}, allowed are "auto", "none" and {{"name": "..."}}', param="function_call"
    )


def _with_new_names(messages: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Translate old names in messages: function_call to tool calls, and reasoning to the name that templates read."""
    for message in messages or ():
        if "function_call" in message or message.get("role") == "function":
            messages = _with_tool_calls(messages or [])
            break
    for message in messages or ():
        if isinstance(message.get("reasoning"), str):
            return _with_reasoning(messages or [])
    return messages


def _with_tool_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Translate messages with function_call to messages with tool calls.

    A function_call becomes a tool call. The next message, with the role function, becomes its result.
    """
    translated: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        new = dict(message)
        call = new.pop("function_call", None)
        if call is not None and not new.get("tool_calls"):
            new["tool_calls"] = [{"id": f"call_{index}", "type": "function", "function": call}]
        if new.get("role") == "function":
            before = translated[-1].get("tool_calls") if translated else None
            if not isinstance(before, list) or not before or not isinstance(before[0], dict):
                raise InvalidRequest(
                    f"messages[{index}] has the role function, but the message before it has no function_call",
                    param=f"messages[{index}].role",
                )
            new["role"], new["tool_call_id"] = "tool", before[0].get("id")
        translated.append(new)
    return translated


def _with_reasoning(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Copy the reasoning of earlier messages from its second name to the name that templates read."""
    return [
        {**message, "reasoning_content": message["reasoning"]}
        if isinstance(message.get("reasoning"), str) and message.get("reasoning_content") is None
        else message
        for message in messages
    ]


def _reasoning(body: ChatBody | TokenizeBody) -> Reasoning:
    effort = body.reasoning_effort
    if effort is not None and effort not in _EFFORTS:
        raise InvalidRequest(
            f"reasoning_effort is {shown(effort)}, allowed are {', '.join(_EFFORTS)}", param="reasoning_effort"
        )
    return Reasoning(
        is_on=body.enable_thinking,
        effort=cast("ReasoningEffort | None", effort),
        budget_tokens=_budget(body) if isinstance(body, ChatBody) else None,
    )


def _budget(body: ChatBody) -> int | None:
    """Return the token budget of the reasoning. None: no limit."""
    given: dict[str, int] = {}
    for field in _BUDGETS:
        value = getattr(body, field)
        if value is None:
            continue
        for other in given:
            raise InvalidRequest(f"{other} and {field} mean the same, and both are set: send one", param=field)
        if value < 0:
            raise InvalidRequest(f"{field} is {value}, allowed is 0 to {THINKING_TOKENS_MAX}", param=field)
        given[field] = value
    return next(iter(given.values()), None)
