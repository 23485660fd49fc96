"""What a turn asks of its tokens: the form of its content, calls that are forced, and when its thoughts have to end."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec

from trioserve.api.turn.turn_request import ToolMode, TurnRequest
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.structured_output import FormKind, StructuredOutput
from trioserve.contracts.thinking import Thinking
from trioserve.text.response_families import ResponseFamilies, offered_tools
from trioserve.text.response_parsers.call_forms import JsonOf
from trioserve.text.response_parsers.forced_calls import calls_or_json, forced_calls, strict_calls

if TYPE_CHECKING:
    from trioserve.text.tokenizer import Tokenizer

__all__ = ["restrained"]


def restrained(request: TurnRequest, families: ResponseFamilies, tokenizer: Tokenizer) -> SamplingParams:
    """The turn's sampling with all of it. A form begins behind the thought of a model that thinks aloud; and such a
    thought can be ended, by its budget or from outside, whether or not there is a budget. Raises InvalidRequest."""
    if request.plain_prompt is not None:
        return msgspec.structs.replace(request.sampling, structured=request.structured)
    form = _form(request, families, tokenizer)
    tags = families.thought_tags
    if form is not None and form is request.structured and families.content_begin is not None:
        form = msgspec.structs.replace(form, free_until=families.content_begin)
    elif form is not None and tags is not None and families.content_begin is None:
        form = msgspec.structs.replace(form, free_until=tags.closing[0])
    if tags is None:
        return request.sampling if form is None else msgspec.structs.replace(request.sampling, structured=form)
    thinking = Thinking(
        begin="" if tags.begins_inside else tags.opening[0],
        end=tags.closing[0],
        tokens_max=request.reasoning.budget_tokens,
    )
    return msgspec.structs.replace(request.sampling, structured=form, thinking=thinking)


def _form(request: TurnRequest, families: ResponseFamilies, tokenizer: Tokenizer) -> StructuredOutput | None:
    """Of what comes behind the thought."""
    tools = offered_tools(request.offered_tools)
    mode = request.tool_choice.mode
    if mode is ToolMode.NAMED:
        tools = [tool for tool in tools if tool.name == request.tool_choice.name]
    is_forced = mode in (ToolMode.REQUIRED, ToolMode.NAMED)
    if not tools or not (is_forced or request.structured is not None or any(tool.strict for tool in tools)):
        return request.structured
    family = families.tool_family
    if family is None:
        if not is_forced:
            return request.structured
        raise InvalidRequest(
            "a call cannot be forced here, since this server reads none from responses (--tool-call-parser none): "
            'send tool_choice "auto" or "none"',
            param="tool_choice",
        )
    special_token_ids = tokenizer.special_ids()
    may_repeat = request.parallel_tool_calls and mode is not ToolMode.NAMED
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
            _check_channels(request)
            return None
        if request.structured is None:
            return strict_calls(family, tools, may_repeat=may_repeat, special_token_ids=special_token_ids)
        schema = JsonOf(_schema_of(request.structured), request.structured.strict)
        return calls_or_json(family, tools, schema, may_repeat=may_repeat, special_token_ids=special_token_ids)
    except InvalidRequest as error:
        if error.param != "tools":
            raise
        raise InvalidRequest(
            f"the schemas of the tools are too long to be kept to: {error}; send fewer tools, or shorter schemas",
            param="tools",
        ) from None


def _check_channels(request: TurnRequest) -> None:
    """What may be written is decided for each message, and what the model will write next is its own choice."""
    if request.structured is not None:
        raise InvalidRequest(
            f"{request.structured.param} and tools are both set: this model's responses can have a form, or calls; "
            'send tool_choice "none", "required", or one of the two',
            param=request.structured.param,
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
