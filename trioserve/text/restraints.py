"""Restrains the response to a chat: the schema of its content, forced and strict calls, and the length of reasoning."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec

from trioserve.contracts.arguments import to_bool
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.prompt import ChatPrompt, Prompt
from trioserve.contracts.sampling import SamplingParams, Thinking
from trioserve.contracts.structured_output import SchemaKind, StructuredOutput
from trioserve.text.response_parsers.call_format import JsonOf
from trioserve.text.response_parsers.forced_calls import calls_or_json, forced_calls, strict_calls
from trioserve.text.response_parsers.offered_tools import offered_tools
from trioserve.text.response_parsers.registry import ResponseFamilies
from trioserve.text.tool_choice import ToolChoice, ToolMode, checked_tools, tool_choice_of

if TYPE_CHECKING:
    from trioserve.text.tokenizer import Tokenizer

__all__ = ["restrained", "with_tool_choice"]


def restrained(
    sampling: SamplingParams,
    families: ResponseFamilies,
    tokenizer: Tokenizer,
    *,
    tools: list[dict[str, Any]] | None,
    tool_choice: ToolChoice,
    structured: StructuredOutput | None,
    parallel_tool_calls: bool = True,
    reasoning_tokens_max: int | None = None,
) -> SamplingParams:
    """Add the restraints of a chat to sampling parameters: schema, forced or strict calls, and the limit of reasoning.

    If the model writes reasoning, schemas and calls begin after the reasoning. A call of end_reasoning can end the
    reasoning early, even if it has no limit.

    Args:
        sampling: Sampling parameters of the request.
        families: Formats in which the model writes reasoning and calls.
        tokenizer: Tokenizer of the model.
        tools: Checked tools that the prompt shows to the model, or None.
        tool_choice: Calls that the request demands or forbids.
        structured: Required structure of the content, or None.
        parallel_tool_calls: True if the response may have several calls.
        reasoning_tokens_max: Token limit of the reasoning, or None for no limit.

    Raises:
        InvalidRequest: The model does not support the restraint, or the fields contradict each other.
    """
    restraint = _restraint(families, tokenizer, tools, tool_choice, structured, may_repeat=parallel_tool_calls)
    tags = families.reasoning_tags
    if restraint is not None and restraint is structured and families.content_begin is not None:
        restraint = msgspec.structs.replace(restraint, free_until=families.content_begin)
    elif restraint is not None and tags is not None and families.content_begin is None:
        restraint = msgspec.structs.replace(restraint, free_until=tags.closing[0])
    if tags is None:
        return sampling if restraint is None else msgspec.structs.replace(sampling, structured=restraint)
    thinking = sampling.thinking or Thinking(
        begin="" if tags.begins_inside else tags.opening[0],
        end=tags.closing[0],
        tokens_max=reasoning_tokens_max,
    )
    return msgspec.structs.replace(sampling, structured=restraint, thinking=thinking)


def with_tool_choice(
    prompt: Prompt,
    sampling: SamplingParams,
    families: ResponseFamilies,
    tokenizer: Tokenizer,
    tool_choice: object,
    strict: bool | None,
) -> tuple[Prompt, SamplingParams]:
    """Apply the arguments tool_choice and strict of a Python caller to a chat. Their meaning is the same as over HTTP.

    Nothing changes if both are None and no function is strict, or if the sampling parameters force calls already.

    Args:
        prompt: The prompt.
        sampling: Sampling parameters of the request.
        families: Formats in which the model writes reasoning and calls.
        tokenizer: Tokenizer of the model.
        tool_choice: Value in OpenAI's format, or None.
        strict: Value for all functions, or None to use the value of each function.

    Returns:
        The changed prompt and sampling parameters.

    Raises:
        InvalidRequest: The choice contradicts the prompt or its tools.
    """
    if strict is not None:
        to_bool("strict", strict)
    if not isinstance(prompt, ChatPrompt):
        if tool_choice is not None or strict is not None:
            param = "strict" if tool_choice is None else "tool_choice"
            raise InvalidRequest(f"{param} is for tools, and the prompt is not a ChatPrompt: omit it", param=param)
        return prompt, sampling
    tools, structured = prompt.tools, sampling.structured
    if structured is not None and structured.kind is SchemaKind.TOOL_CALLS:
        return prompt, sampling
    if tool_choice is None and strict is None and not any(map(_is_strict, tools or ())):
        return prompt, sampling
    checked = checked_tools(None if tools is None else list(tools))
    if checked is not None and strict is not None:
        checked = [{**tool, "function": {**tool["function"], "strict": strict}} for tool in checked]
    choice = tool_choice_of(tool_choice, checked)
    offered = choice.offered(checked)
    restrained_sampling = restrained(
        sampling, families, tokenizer, tools=offered, tool_choice=choice, structured=structured
    )
    # The template gets the unchanged tools of the caller, since some templates print all fields of a tool.
    return msgspec.structs.replace(prompt, tools=choice.offered(tools and list(tools))), restrained_sampling


def _is_strict(tool: dict[str, Any]) -> bool:
    function = tool.get("function")
    return isinstance(function, dict) and function.get("strict") is True


def _restraint(
    families: ResponseFamilies,
    tokenizer: Tokenizer,
    shown: list[dict[str, Any]] | None,
    choice: ToolChoice,
    structured: StructuredOutput | None,
    *,
    may_repeat: bool,
) -> StructuredOutput | None:
    """Return the required structure of the response after the reasoning, or None if every text is allowed."""
    if not shown:
        return structured
    tools = offered_tools(shown)
    mode = choice.mode
    if mode is ToolMode.NAMED:
        tools = [tool for tool in tools if tool.name == choice.name]
    is_forced = mode in (ToolMode.REQUIRED, ToolMode.NAMED)
    if not tools or not (is_forced or structured is not None or any(tool.strict for tool in tools)):
        return structured
    family = families.tool_family
    if family is None:
        if not is_forced:
            return structured
        raise InvalidRequest(
            "a call cannot be forced, since this server reads no calls from responses (--tool-call-parser none): "
            'send tool_choice "auto" or "none"',
            param="tool_choice",
        )
    special_token_ids = tokenizer.special_ids()
    may_repeat = may_repeat and mode is not ToolMode.NAMED
    try:
        if is_forced:
            return forced_calls(
                family,
                tools,
                may_repeat=may_repeat,
                special_token_ids=special_token_ids,
                reasoning_family=families.reasoning_family,
                begins_inside=True,
            )
        if families.content_begin is not None:
            _check_channels(structured)
            return None
        if structured is None:
            return strict_calls(family, tools, may_repeat=may_repeat, special_token_ids=special_token_ids)
        schema = JsonOf(_schema_of(structured), structured.strict)
        return calls_or_json(family, tools, schema, may_repeat=may_repeat, special_token_ids=special_token_ids)
    except InvalidRequest as error:
        if error.param != "tools":
            raise
        raise InvalidRequest(
            f"the schemas of the tools are too long to be enforced: {error}; send fewer tools, or shorter schemas",
            param="tools",
        ) from None


def _check_channels(structured: StructuredOutput | None) -> None:
    """Refuse a schema for the content, since a model with channels itself chooses the channel of its next message."""
    if structured is not None:
        raise InvalidRequest(
            f"{structured.param} and tools are both set: this model's responses can follow a schema or have calls, not "
            'both; send tool_choice "none" or "required", or only one of the two',
            param=structured.param,
        )


def _schema_of(structured: StructuredOutput) -> dict[str, Any]:
    """Return the JSON schema of structured output.

    Raises:
        InvalidRequest: The structured output is not JSON.
    """
    if structured.kind is SchemaKind.JSON_OBJECT:
        return {"type": "object"}
    if structured.kind is not SchemaKind.JSON_SCHEMA:
        raise InvalidRequest(
            f"{structured.param} asks for a {structured.kind.value}, and there are tools: a response with tools can be "
            'unrestrained or JSON; send tool_choice "none", or only one of the two',
            param=structured.param,
        )
    schema = json.loads(structured.source)
    if not isinstance(schema, dict):
        raise InvalidRequest("a JSON schema must be an object", param=structured.param)
    return schema
