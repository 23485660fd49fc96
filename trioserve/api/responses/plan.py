"""Turns a request body into a planned response. Errors of the body are raised before any resources are reserved."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from trioserve.api.openai.request_types import deadlines_of
from trioserve.api.responses.input_items import checked_items, messages_of
from trioserve.api.responses.request_types import InputTokensBody, PromptBody, ResponsesBody, TextFormat
from trioserve.api.responses.response_object import ResponseHead, with_ids
from trioserve.api.responses.response_types import InputItem
from trioserve.api.responses.stored_responses import EarlierResponses, KeptResponses
from trioserve.api.responses.tools import Tools, parse_tools
from trioserve.api.session_fields import retention_seconds
from trioserve.api.turn.chat_turn import Reasoning, TurnRequest
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.structured_output import StructuredOutput
from trioserve.text.chat_messages import check_shape

if TYPE_CHECKING:
    from trioserve.api.request_context import RequestContext

__all__ = ["PlannedResponse", "plan_prompt", "plan_response"]

FORMAT_NAME_CHARACTERS_MAX = 64  # OpenAI's API has the same limit.


class PlannedResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A response that can begin.

    Attributes:
        head: The unchanging properties of the response.
        turn: The request for the engine.
        input: The body's own input items with ids, as they are stored and listed.
        earlier: The items of all earlier responses that this response continues.
    """

    head: ResponseHead
    turn: TurnRequest
    input: list[InputItem]
    earlier: list[InputItem]


async def plan_response(
    context: RequestContext, body: ResponsesBody, response: str, *, kept: KeptResponses | None = None
) -> PlannedResponse:
    """Check a request and plan its response.

    Args:
        context: The request.
        body: The body.
        response: Id for the response.
        kept: Responses that the caller's connection keeps. None: the request has no connection of its own.

    Raises:
        InvalidRequest: The body is invalid.
        UnknownModel: The model is not served.
        Refusal: An earlier response or item does not exist (404).
    """
    model = context.model_name(body.model)
    body.check()
    sampling = body.sampling(context.engine.default_sampling)
    earlier, own, tools, turn = await _plan(context, body, sampling, kept)
    turn = msgspec.structs.replace(
        turn,
        structured=structured_output(body.text.format if body.text is not None else None),
        priority=body.priority,
        cache_salt=body.cache_salt,
        cache_key=body.prompt_cache_key,
        retention_seconds=retention_seconds(body.prompt_cache_retention),
        deadlines=deadlines_of(body, context.exchange.headers),
        reasoning=msgspec.structs.replace(turn.reasoning, budget_tokens=body.thinking_token_budget),
    )
    if not body.generates:
        # The next prompt repeats this one up to its last message, without the beginning of a response.
        sampling = msgspec.structs.replace(sampling, max_tokens=0, min_tokens=0, clamp_max_tokens=False)
        turn = msgspec.structs.replace(turn, sampling=sampling, add_generation_prompt=False)
    head = ResponseHead(
        id=response,
        created_at=_created_at(context, body),
        model=model,
        body=body,
        tools=tools,
        sampling=sampling,
        stores=body.stores and context.services.store is not None,
    )
    return PlannedResponse(head=head, turn=turn, input=with_ids(own, response), earlier=earlier)


def _created_at(context: RequestContext, body: ResponsesBody) -> int:
    if body.resume is not None and body.resume.created is not None:
        return body.resume.created
    return context.clock_and_ids.unix_seconds()


async def plan_prompt(context: RequestContext, body: InputTokensBody) -> TurnRequest:
    """Return the turn for a request that only counts prompt tokens.

    Args:
        context: The request.
        body: The body.

    Raises:
        TrioserveError: As plan_response.
    """
    context.model_name(body.model)
    body.check()
    return (await _plan(context, body, context.engine.default_sampling))[3]


async def _plan(
    context: RequestContext, body: PromptBody, sampling: SamplingParams, kept: KeptResponses | None = None
) -> tuple[list[InputItem], list[InputItem], Tools, TurnRequest]:
    """Return the items of earlier responses, the body's own items, its tools, and the turn."""
    responses = EarlierResponses(context.services.store, context.owner, kept)
    tools = parse_tools(body.tools, body.tool_choice)
    check_shape(body.chat_template_kwargs, "chat_template_kwargs")
    checked = checked_items(body.input)
    earlier: list[InputItem] = []
    if body.previous_response_id is not None:
        earlier = await responses.items_before(body.previous_response_id)
    own = await responses.resolved(checked)
    messages = messages_of([*earlier, *own], body.instructions)
    if not messages:
        raise InvalidRequest("there is no input: send a text, or at least one item", param="input")
    turn = TurnRequest(
        messages=messages,
        sampling=sampling,
        tools=tools.as_functions(),
        tool_choice=tools.choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning=Reasoning(effort=None if body.reasoning is None else body.reasoning.effort),
        template_arguments=body.chat_template_kwargs or {},
    )
    return earlier, own, tools, turn


def structured_output(text_format: TextFormat | None) -> StructuredOutput | None:
    """Return the schema for the output text, or None for free text.

    Args:
        text_format: Field "text.format".

    Raises:
        InvalidRequest: The format is invalid.
    """
    if text_format is None or text_format.type == "text":
        return None
    if text_format.type == "json_object":
        return StructuredOutput.json_object(param="text.format")
    if text_format.schema is None:
        raise InvalidRequest("text.format.schema is missing: json_schema needs one", param="text.format.schema")
    if text_format.name is not None and not 1 <= len(text_format.name) <= FORMAT_NAME_CHARACTERS_MAX:
        raise InvalidRequest(
            f"text.format.name has {len(text_format.name)} characters, allowed are 1 to {FORMAT_NAME_CHARACTERS_MAX}",
            param="text.format.name",
        )
    check_shape(text_format.schema, "text.format.schema")
    return StructuredOutput.json(text_format.schema, param="text.format.schema", strict=text_format.strict is True)
