"""A response: its plan, which is made from the request body, and the run in which the engine generates it.

Errors of the body are raised before any resources are reserved.

A response is stored when it is complete, before its client gets the end. If the client leaves, the request is cancelled
and nothing is stored. A background response continues. If the disk is full, the store keeps the response in memory. If
that memory is full, the client still gets the response, with `store` set to false.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import msgspec

from trioserve.api.error_responses import ErrorResponse, error_response
from trioserve.api.generation import PARTIAL_FINISH, KeepAlive, Usage
from trioserve.api.openai.request_types import deadlines_of
from trioserve.api.openai.response_types import ChatToken, chat_tokens
from trioserve.api.responses.events import Ended, ResponseEvents
from trioserve.api.responses.input_items import checked_items, messages_of
from trioserve.api.responses.request_types import InputTokensBody, PromptBody, ResponsesBody, TextFormat
from trioserve.api.responses.response_object import SERVER_ERROR, ResponseHead, with_ids
from trioserve.api.responses.response_types import InputItem, ResponseEvent, ResponseObject
from trioserve.api.responses.stored_responses import KIND, EarlierResponses, KeptResponses, StoredResponse, stored_bytes
from trioserve.api.responses.tools import Tools, parse_tools
from trioserve.api.session_fields import retention_seconds
from trioserve.api.streams.cursors import ResumeBody
from trioserve.api.streams.resumption import Resumption
from trioserve.api.turn.chat_turn import ChatTurn, Reasoning, TurnRequest, chat_turn
from trioserve.contracts.errors import DiskFull, InvalidRequest, StoreFault
from trioserve.contracts.output import Delta
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.structured_output import StructuredOutput
from trioserve.store.stored_objects import Change, DeleteObject, PutObject
from trioserve.text.chat_messages import check_shape
from trioserve.text.response_parts import ResponsePart

if TYPE_CHECKING:
    from trioserve.api.request_context import RequestContext

__all__ = ["PlannedResponse", "ResponseRun", "plan_prompt", "plan_response"]


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
        body: Fields of the request, decoded but not checked against each other.
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
        body: Fields of the request, decoded but not checked against each other.

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


Send = Callable[[list[ResponseEvent], Delta], Awaitable[None]]
"""Function that receives the events of one piece, and the delta."""


class ResponseRun:
    """One chat turn in the engine, and the events of its response. The caller enters `turn` before it calls `read`.

    The request handler or a background task runs the response, and decides where the events are sent.

    Args:
        context: The request.
        planned: The response.
        resumption: Resume state. None if the response can neither resume nor be resumed.

    Attributes:
        turn: The chat turn. Its scope owns the requests in the engine.
        events: The events of the response.

    Raises:
        InvalidRequest: The caller may not use one of the options.
    """

    def __init__(self, context: RequestContext, planned: PlannedResponse, resumption: Resumption | None = None) -> None:
        self.planned = planned
        self._resumption = resumption
        self._stop_reason: str | None = None
        self.turn: ChatTurn = chat_turn(context, planned.turn, resumption)
        self._clock = context.clock_and_ids
        tokenizer = context.engine.tokenizer

        def logprobs_of(delta: Delta) -> list[ChatToken]:
            return chat_tokens(tokenizer, delta.logprobs or ())

        self.events = ResponseEvents(
            planned.head, logprobs_of=logprobs_of if planned.head.body.wants_logprobs else None
        )

    async def read(self, send: Send | None, *, keep_alive: KeepAlive | None = None) -> None:
        """Read the turn to its end.

        Args:
            send: Receives the events of each piece (possibly none) and its delta. None: no events are sent.
            keep_alive: Fills silences of the response. Default: nothing is sent.

        Raises:
            TrioserveError: As ChatTurn.read.
        """

        async def take(_: int, parts: list[ResponsePart], delta: Delta) -> None:
            self._note(delta)
            events = self.events.take(parts, delta)
            if send is not None:
                await send(events, delta)

        await self.turn.read(take, keep_alive=keep_alive)

    async def skip_known(self) -> list[ResponseEvent]:
        """Process the known part of a resumed response. Return its events."""
        events: list[ResponseEvent] = []

        def take(parts: list[ResponsePart], delta: Delta) -> None:
            self._note(delta)
            events.extend(self.events.take(parts, delta))

        await self.turn.skip_known(take)
        return events

    def _note(self, delta: Delta) -> None:
        if delta.finish_reason is not None:
            # An int is a stop token. Partial results have no stop token.
            self._stop_reason = delta.stop_reason if isinstance(delta.stop_reason, str) else None

    def complete(self) -> Ended:
        """Return the last events and the response after the turn has ended."""
        usage = self._end()
        finish = self.turn.choices[0].finish_reason
        if finish == PARTIAL_FINISH:
            return self.events.end_partial(self._stop_reason, self._resume_state(), usage=usage)
        return self.events.complete(finish, usage, self._clock.unix_seconds())

    def _end(self) -> Usage:
        """Record the weight versions, and return the token counts."""
        self.events.weight_versions = self.turn.stream.weight_versions()
        return self.turn.usage()

    def _resume_state(self) -> ResumeBody | None:
        """Return the state to resume the response, or None if the client did not ask for it."""
        resumption = self._resumption
        return resumption.behind([self.turn.stream]) if resumption is not None and resumption.gives_partial else None

    def fail(self, error: Exception | ErrorResponse) -> Ended:
        """Return the last events and the failed response.

        Args:
            error: Error that ended the response.
        """
        response = error if isinstance(error, ErrorResponse) else error_response(error)
        return self.events.fail(response.message, _code(response), usage=self._end())

    def cancel(self) -> Ended:
        """Return the last events and the response after its client has cancelled it."""
        return self.events.cancel(self._resume_state(), usage=self._end())

    def end_steered(self) -> Ended:
        """Return the last events and the response that was cut for new input of its user."""
        return self.events.end_steered(usage=self._end())

    def snapshot(self) -> ResponseObject:
        """Return the current response object."""
        return self.planned.head.object(self.events.status, output=self.events.output)

    def stored(self, response: ResponseObject) -> StoredResponse:
        return StoredResponse(response=response, input=self.planned.input)

    async def store(self, context: RequestContext, response: ResponseObject) -> None:
        """Store a complete response if its request asks for that. Call this before its client gets the end.

        Args:
            context: The request.
            response: The response object. If disk and memory of the store are full, its field `store` becomes False,
                and so does that of the last event, which contains this object.
        """
        store, head = context.services.store, self.planned.head
        if not head.stores:
            return
        assert store is not None
        kept = PutObject(kind=KIND, id=head.id, owner=context.owner, body=stored_bytes(self.stored(response)))
        changes: tuple[Change, ...] = (kept,)
        if head.body.resume is not None and await store.get(KIND, kept.id, owner=context.owner) is not None:
            # An earlier run was stored, but its client lost the connection. This response replaces that run.
            changes = (DeleteObject(kind=KIND, id=kept.id), kept)
        try:
            await store.settle(*changes)
        except (DiskFull, StoreFault):
            response.store = False


def _code(error: ErrorResponse) -> str:
    """Return the error code, under OpenAI's name if OpenAI's API has one."""
    if error.status == 429:
        code = "rate_limit_exceeded"
    elif error.code is not None:
        return error.code
    else:
        code = "invalid_prompt" if error.status < 500 else SERVER_ERROR
    return code
