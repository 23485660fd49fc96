"""Grammars for a chat's response: the schema of its content, forced and strict calls, and the end of reasoning."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec

from trioserve.contracts.arguments import to_bool
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.prompt import ChatPrompt, Prompt
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.structured_output import FormKind, StructuredOutput
from trioserve.contracts.thinking import Thinking
from trioserve.text.response_families import ResponseFamilies
from trioserve.text.response_parsers.call_forms import JsonOf
from trioserve.text.response_parsers.forced_calls import calls_or_json, forced_calls, strict_calls
from trioserve.text.response_parsers.offered_tools import offered_tools
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
    """Add to the sampling what a chat asks of its response: its schema, forced or strict calls, and a budget.

    Schemas and calls begin behind the reasoning of a model that reasons. Its reasoning can be ended, by its budget or
    from outside, whether or not there is a budget.

    Args:
        tools: those that the model is shown, checked.
        structured: the form of content that is no reasoning and no call.
        reasoning_tokens_max: the reasoning ends after as many tokens. None: no budget.

    Raises:
        InvalidRequest: the model, or the combination of fields, cannot be restrained so.
    """
    form = _form(families, tokenizer, tools, tool_choice, structured, may_repeat=parallel_tool_calls)
    tags = families.thought_tags
    if form is not None and form is structured and families.content_begin is not None:
        form = msgspec.structs.replace(form, free_until=families.content_begin)
    elif form is not None and tags is not None and families.content_begin is None:
        form = msgspec.structs.replace(form, free_until=tags.closing[0])
    if tags is None:
        return sampling if form is None else msgspec.structs.replace(sampling, structured=form)
    thinking = sampling.thinking or Thinking(
        begin="" if tags.begins_inside else tags.opening[0],
        end=tags.closing[0],
        tokens_max=reasoning_tokens_max,
    )
    return msgspec.structs.replace(sampling, structured=form, thinking=thinking)


def with_tool_choice(
    prompt: Prompt,
    sampling: SamplingParams,
    families: ResponseFamilies,
    tokenizer: Tokenizer,
    tool_choice: object,
    strict: bool | None,
) -> tuple[Prompt, SamplingParams]:
    """Apply a program's tool_choice and strict to its chat, with the meaning that they have over HTTP.

    Nothing changes without either of them, if no function asks for strict, or if the sampling forces calls already.

    Args:
        strict: of all functions. None: as each function says.

    Raises:
        InvalidRequest: the choice does not go with the prompt or its tools.
    """
    if strict is not None:
        to_bool("strict", strict)
    if not isinstance(prompt, ChatPrompt):
        if tool_choice is not None or strict is not None:
            param = "strict" if tool_choice is None else "tool_choice"
            raise InvalidRequest(f"{param} is for tools, and the prompt is no ChatPrompt: leave it out", param=param)
        return prompt, sampling
    tools, structured = prompt.tools, sampling.structured
    if structured is not None and structured.kind is FormKind.TOOL_CALLS:
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
    # The template gets the tools as they were sent: some print all their fields.
    return msgspec.structs.replace(prompt, tools=choice.offered(tools and list(tools))), restrained_sampling


def _is_strict(tool: dict[str, Any]) -> bool:
    function = tool.get("function")
    return isinstance(function, dict) and function.get("strict") is True


def _form(
    families: ResponseFamilies,
    tokenizer: Tokenizer,
    shown: list[dict[str, Any]] | None,
    choice: ToolChoice,
    structured: StructuredOutput | None,
    *,
    may_repeat: bool,
) -> StructuredOutput | None:
    """What follows the reasoning."""
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
            "a call cannot be forced here, since this server reads none from responses (--tool-call-parser none): "
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
            f"the schemas of the tools are too long to be kept to: {error}; send fewer tools, or shorter schemas",
            param="tools",
        ) from None


def _check_channels(structured: StructuredOutput | None) -> None:
    """What may be written is decided for each message, and what the model will write next is its own choice."""
    if structured is not None:
        raise InvalidRequest(
            f"{structured.param} and tools are both set: this model's responses can have a form, or calls; "
            'send tool_choice "none", "required", or one of the two',
            param=structured.param,
        )


def _schema_of(form: StructuredOutput) -> dict[str, Any]:
    """Raises InvalidRequest for a form that is no JSON."""
    if form.kind is FormKind.JSON_OBJECT:
        return {"type": "object"}
    if form.kind is not FormKind.JSON_SCHEMA:
        raise InvalidRequest(
            f"{form.param} asks for a {form.kind.value}, and there are tools: with tools a response can be free, or "
            'JSON; send tool_choice "none", or one of the two',
            param=form.param,
        )
    schema = json.loads(form.source)
    if not isinstance(schema, dict):
        raise InvalidRequest("a JSON schema has to be an object", param=form.param)
    return schema
