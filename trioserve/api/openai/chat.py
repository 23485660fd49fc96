"""POST /v1/chat/completions: writes the assistant's next message, as a whole response or a stream.

The output is split into content, reasoning and tool calls (see trioserve/api/turn). If there is nothing to split, each
delta becomes an event directly, which is faster.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable

import msgspec

from trioserve.api.generation import read_streams, wait_until_released
from trioserve.api.openai import response_types
from trioserve.api.openai.chat_events import ChatEvents, whole_response
from trioserve.api.openai.chat_prompt import prompt_cut, turn_request
from trioserve.api.openai.request_types import GENERATION_RANGES, ChatBody, deadlines_of
from trioserve.api.request_context import RequestContext
from trioserve.api.route_table import GENERATES, Forwarding, Operation
from trioserve.api.streams.cursors import GroupIds
from trioserve.api.streams.resumption import Resumption
from trioserve.api.turn.chat_turn import ChatTurn, TurnRequest, chat_turn
from trioserve.api.whole_response import LargeJson, ResponseShape
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.output import Delta
from trioserve.contracts.sampling import SAMPLING_RANGES, SamplingParams
from trioserve.text.response_parts import ResponsePart

__all__ = ["OPERATIONS", "create_chat_completion"]


async def create_chat_completion(context: RequestContext) -> None:
    body = await context.body(ChatBody)
    model = context.model_name(body.model)
    request = _turn_request(context, body)
    resumption = Resumption(
        context,
        body.resume,
        request.sampling,
        is_streamed=bool(body.stream),
        gives_partial=bool(body.return_partial),
    )
    head = response_types.ChatChunkHead(id=f"chatcmpl-{context.request_id}", created=resumption.created, model=model)
    async with chat_turn(context, request, resumption) as turn:
        stream = turn.stream
        large = LargeJson()
        whole = functools.partial(whole_response, large, context.engine.tokenizer, body, turn, head, resumption)
        if body.stream:
            await context.begin_events(
                turn.wait_until_begun, lambda: context.start_events(resumption.headers([stream]))
            )
            ids = resumption.group_ids()
            events = ChatEvents(context.engine.tokenizer, body, turn, head, resumption, holds_end=ids is None)
            await turn.skip_known(events.skip)
            await _send_events(context, turn, events, ids)
            if stream.is_held:
                await wait_until_released(stream, context.keep_alive)
        else:
            choices = await turn.collect()
            if stream.is_held:  # If the client leaves before it has the response, the held blocks are released.
                await context.respond_large(large, await whole(choices))
                stream.keep_hold()
    # The engine request has ended and its scope is left. So a slow client delays only its own bytes.
    if body.stream:
        await context.finish(events.end() if ids is None else ids.last(events.end()))
    elif context.status is None:
        await context.respond_large(large, await whole(choices))


def _send_events(context: RequestContext, turn: ChatTurn, events: ChatEvents, ids: GroupIds | None) -> Awaitable[None]:
    exchange = context.exchange

    async def send_delta(_: int, delta: Delta) -> None:
        if piece := events.of(delta):
            await exchange.send(piece)

    async def send_parts(_: int, parts: list[ResponsePart], delta: Delta) -> None:
        if piece := events.of_parts(parts, delta):
            await exchange.send(piece)

    async def send_group(index: int, parts: list[ResponsePart], delta: Delta) -> None:
        assert ids is not None
        made = events.of(delta) if turn.is_plain else events.of_parts(parts, delta)
        if piece := ids.group(made, index, delta):
            await exchange.send(piece)

    if ids is not None:
        return turn.read(send_group, keep_alive=context.keep_alive)
    if turn.is_plain:
        return read_streams([turn.stream], send_delta, keep_alive=context.keep_alive, is_partial=turn.is_partial)
    return turn.read(send_parts, keep_alive=context.keep_alive)


def _turn_request(context: RequestContext, body: ChatBody) -> TurnRequest:
    _check(body)
    sampling = _sampling(body, context.engine.default_sampling)
    return msgspec.structs.replace(
        turn_request(body, sampling, trust_chat_template=context.services.trust_chat_template),
        # The API allows one call at a time for the older `functions`.
        parallel_tool_calls=body.parallel_tool_calls is not False and not body.functions,
        priority=body.priority,
        cache_salt=body.cache_salt,
        cache_key=body.session_key,
        retention_seconds=body.retention_seconds,
        deadlines=deadlines_of(body, context.exchange.headers),
        kv_transfer_params=body.kv_transfer_params,
        shape=ResponseShape(is_streamed=bool(body.stream), has_token_ids=bool(body.return_token_ids)),
        cut=None
        if body.truncate_prompt_tokens is None
        else prompt_cut(body.truncate_prompt_tokens, context.engine.model.context_tokens_max, sampling.max_tokens),
    )


def _check(body: ChatBody) -> None:
    body.check()
    if body.modalities not in (None, [], ["text"]):
        raise InvalidRequest('modalities must be ["text"]: the server produces only text', param="modalities")
    if body.top_logprobs is not None:
        if not body.logprobs and body.top_logprobs:
            raise InvalidRequest("top_logprobs is set, so logprobs must be true", param="top_logprobs")
        allowed = SAMPLING_RANGES["logprobs"]
        if not allowed.holds(body.top_logprobs):
            raise InvalidRequest(f"top_logprobs is {body.top_logprobs}, allowed is {allowed}", param="top_logprobs")
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest("prompt_logprobs is not available when stream is true", param="prompt_logprobs")


def _sampling(body: ChatBody, defaults: SamplingParams) -> SamplingParams:
    given: dict[str, object] = {}
    # The second name is the newer one, and its value replaces the value of the first name.
    for field in ("max_tokens", "max_completion_tokens"):
        tokens_max = getattr(body, field)
        if tokens_max is not None:
            if tokens_max < 1:
                raise InvalidRequest(f"{field} is {tokens_max}, allowed is 1 or more", param=field)
            given["max_tokens"] = tokens_max
    if "max_tokens" not in given:
        given |= body.predicted_tokens()
    if body.logprobs:
        given["logprobs"] = body.top_logprobs or 0
    return body.sampling(defaults, **given)


OPERATIONS: tuple[Operation[RequestContext], ...] = (
    Operation(
        method="POST",
        path="/v1/chat/completions",
        handler=create_chat_completion,
        summary="Answer a chat",
        forwarding=Forwarding.BY_MODEL,
        description="Fields, and their meanings, are OpenAI's and vLLM's. Fields that are not named here are "
        "ignored or refused.",
        body=ChatBody,
        ranges=GENERATION_RANGES,
        response=response_types.ChatCompletion,
        event=response_types.ChatCompletionChunk,
        errors=GENERATES,
        takes_deadlines=True,
    ),
)
