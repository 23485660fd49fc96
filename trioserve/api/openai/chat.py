"""POST /v1/chat/completions: writes the assistant's next message, as a whole response or a stream.

The output is split into content, reasoning and tool calls (see trioserve/api/turn). If there is nothing to split, each
delta becomes an event directly, which is faster.

In a stream, parts that all events of a choice share are encoded once.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Iterable
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET

from trioserve.api.generation import PARTIAL_FINISH, first_transfer, is_partial, read_streams, wait_until_released
from trioserve.api.openai import response_types
from trioserve.api.openai import response_types as types
from trioserve.api.openai.chat_prompt import prompt_cut, turn_request
from trioserve.api.openai.request_types import GENERATION_RANGES, ChatBody, deadlines_of
from trioserve.api.openai.response_types import ChatChunkHead, chat_logprobs, chat_tokens, prompt_logprobs
from trioserve.api.request_context import RequestContext
from trioserve.api.route_table import GENERATES, Forwarding, Operation
from trioserve.api.sse import (
    DONE,
    ChunkWriter,
    encode,
    one_line_json,
    resume_field,
    token_ids_field,
    transfer_field,
    versions_field,
)
from trioserve.api.streams.cursors import GroupIds
from trioserve.api.streams.resumption import Resumption
from trioserve.api.turn.chat_turn import ChatTurn, CollectedChoice, TurnFinish, TurnRequest, chat_turn
from trioserve.api.whole_response import LargeJson, ResponseShape
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.output import Delta
from trioserve.contracts.sampling import SAMPLING_RANGES, SamplingParams
from trioserve.text.response_parts import (
    ContentText,
    ReasoningText,
    ResponsePart,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)

if TYPE_CHECKING:
    from trioserve.api.streams.resumption import Resumption
    from trioserve.api.turn.chat_turn import ChatTurn
    from trioserve.text.tokenizer import Tokenizer

__all__ = ["OPERATIONS", "create_chat_completion"]


async def whole_response(
    large: LargeJson,
    tokenizer: Tokenizer,
    body: ChatBody,
    turn: ChatTurn,
    head: ChatChunkHead,
    resumption: Resumption,
    choices: list[CollectedChoice],
) -> types.ChatCompletion:
    """Make the body of a whole response. The caller must send the body with `large`, which contains the large lists.

    Args:
        large: encodes large lists.
        tokenizer: tokenizer of the model.
        body: body of the request.
        turn: output of the model.
        head: fields that the response has in common with the events of a stream.
        resumption: makes the partial result of an aborted response.
        choices: complete choices.
    """
    stream = turn.stream

    async def logprobs_of(choice: CollectedChoice) -> types.ChatLogprobs | None:
        if not body.logprobs:
            return None
        weight = 1 + (body.top_logprobs or 0)
        content = await large.add(choice.logprobs, functools.partial(chat_tokens, tokenizer), item_weight=weight)
        return types.ChatLogprobs(content=content, refusal=None)

    is_partial = any(choice.finish_reason == PARTIAL_FINISH for choice in choices)
    response = types.ChatCompletion(
        id=head.id,
        created=head.created,
        model=head.model,
        choices=[
            types.ChatChoice(
                index=index,
                message=_message(body, choice),
                logprobs=await logprobs_of(choice),
                finish_reason=finish_shown(body, choice.finish_reason),
                stop_reason=choice.stop_reason,
                token_ids=choice.token_ids if body.return_token_ids else UNSET,
                weight_versions=choice.weight_versions or UNSET,
            )
            for index, choice in enumerate(choices)
        ],
        usage=turn.usage(),
        prompt_token_ids=stream.prompt_token_ids if body.return_token_ids else UNSET,
        kv_transfer_params=first_transfer(choice.kv_transfer for choice in choices),
        resume=resumption.behind([stream]) if is_partial else UNSET,
    )
    if stream.prompt_logprobs is not None:
        write = functools.partial(prompt_logprobs, tokenizer)
        weight = 1 + (body.prompt_logprobs or 0)
        response.prompt_logprobs = await large.add(stream.prompt_logprobs, write, item_weight=weight)
    return response


def finish_shown(body: ChatBody, reason: TurnFinish | None) -> types.ChatFinishReason:
    """Return the finish reason for the client. It is "function_call" in place of "tool_calls" if the request has
    `functions`.

    Args:
        body: body of the request.
        reason: finish reason of the choice, which has ended.
    """
    assert reason is not None
    return "function_call" if reason == "tool_calls" and body.functions else reason


def echo_of(body: ChatBody) -> str:
    """Return the text that the response repeats. With `echo`, this is the last message if the assistant wrote that
    message.

    Args:
        body: body of the request.
    """
    last: dict[str, Any] = body.messages[-1]
    if not body.echo or last["role"] != "assistant":
        return ""
    content = last.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _message(body: ChatBody, choice: CollectedChoice) -> types.ChatMessage:
    echo = echo_of(body)
    content = choice.content
    message = types.ChatMessage(role="assistant", content=echo + (content or "") if echo else content, refusal=None)
    if choice.reasoning is not None and body.include_reasoning is not False:
        message.reasoning_content = message.reasoning = choice.reasoning
    if choice.tool_calls and body.functions:
        [call] = choice.tool_calls
        message.function_call = types.CalledFunction(name=call.name, arguments=call.arguments)
    elif choice.tool_calls:
        message.tool_calls = [
            types.ToolCall(id=call.id, function=types.CalledFunction(name=call.name, arguments=call.arguments))
            for call in choice.tool_calls
        ]
    return message


TEXT_END = b'},"logprobs":null,"finish_reason":null}'


class ChatEvents:
    """Writes the events of one streamed chat completion.

    For a plain turn, pass each delta to `of`, otherwise to `of_parts`. Then call `end`.

    Args:
        tokenizer: tokenizer of the model.
        body: body of the request.
        turn: output of the model.
        head: fields that all events share.
        resumption: makes the partial result of an aborted response.
        holds_end: True: if there is only one choice, `end` also returns the last events of this choice, which saves one
            write. This does not apply if KV is held, because the stream then stays open.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        body: ChatBody,
        turn: ChatTurn,
        head: ChatChunkHead,
        resumption: Resumption,
        *,
        holds_end: bool,
    ) -> None:
        self._resumption = resumption
        self._is_partial = False
        self._tokenizer = tokenizer
        self._body = body
        self._turn = turn
        self._writer = ChunkWriter(head, null_usage=body.wants_usage)
        self._content_heads: dict[int, bytes] = {}
        # For each choice, the bytes before and after the text in events that have only text.
        self._around_text: dict[int, tuple[bytes, bytes]] = {}
        self._wants_text_only = not (body.logprobs or body.return_token_ids or body.wants_continuous_usage)
        self._holds_end = holds_end and turn.stream.choice_count == 1
        self._last = b""

    def of(self, delta: Delta) -> bytes:
        """Return the events of one delta of a plain turn. The result is empty if the delta has nothing to send yet.

        Args:
            delta: output of a choice.
        """
        around = self._around_text.get(delta.index)
        if around is not None and delta.finish_reason is None:
            return around[0] + one_line_json(delta.text) + around[1] if delta.text else b""
        events = []
        content_head = self._content_heads.get(delta.index)
        if content_head is None:
            content_head = self._begin(delta.index)
            events.append(self._first(delta.index, b'"content":' + encode(echo_of(self._body))))
        extras = self._extras(delta)
        if delta.text or extras is not None:
            tail = TEXT_END if extras is None else extras
            events.append(self._chunk(content_head + encode(delta.text) + tail))
        finish = None
        if delta.finish_reason is not None:
            finish = PARTIAL_FINISH if is_partial(delta.finish_reason) else delta.finish_reason.value
        return self._ended(events, delta, finish)

    def of_parts(self, parts: list[ResponsePart], delta: Delta) -> bytes:
        """Return the events of one delta that was split into parts. The result is empty if the delta has nothing to
        send yet.

        A response that has only tool calls must not have even an empty content. So the first event is sent with the
        first part.

        Args:
            parts: parts of the delta.
            delta: output of a choice.
        """
        if self._body.include_reasoning is False:
            parts = [part for part in parts if not isinstance(part, ReasoningText)]
        around = self._around_text.get(delta.index)
        if around is not None and delta.finish_reason is None:
            if not parts:
                return b""
            if len(parts) == 1 and isinstance(parts[0], ContentText):
                return around[0] + one_line_json(parts[0].text) + around[1]
        changes = [change for part in parts if (change := self._change(part))]
        extras = self._extras(delta)
        events = []
        if delta.index not in self._content_heads:
            if not changes and extras is None and delta.finish_reason is None:
                return b""
            self._begin(delta.index)
            echo = echo_of(self._body)
            is_call = bool(parts) and not isinstance(parts[0], ContentText | ReasoningText) and not echo
            events.append(self._first(delta.index, b'"content":' + (b"null" if is_call else encode(echo))))
        if not changes and extras is not None:
            changes = [b""]
        for change in changes:
            tail, extras = (TEXT_END if extras is None else extras), None
            events.append(self._chunk(b'{"index":%d,"delta":{%b' % (delta.index, change) + tail))
        finish = None
        if delta.finish_reason is not None:
            finish = finish_shown(self._body, self._turn.choices[delta.index].finish_reason)
        return self._ended(events, delta, finish)

    def skip(self, parts: list[ResponsePart], delta: Delta) -> None:
        """Process a known delta that the client already has. The choice continues after this delta.

        Args:
            parts: parts of the delta.
            delta: known output of a choice.
        """
        if self._turn.is_plain:
            self.of(delta)
        else:
            self.of_parts(parts, delta)
        # Each known token has had an event before, perhaps one with only log probabilities, which are now unknown.
        if delta.index not in self._content_heads:
            self._begin(delta.index)
        self._last = b""

    def end(self) -> bytes:
        last = self._last
        if self._is_partial:
            last += self._writer.chunk(b"", fields=resume_field(self._resumption.behind([self._turn.stream])))
        usage = self._writer.chunk(b"", usage=self._turn.usage()) if self._body.wants_usage else b""
        return last + usage + DONE

    def _begin(self, index: int) -> bytes:
        content_head = self._content_heads[index] = b'{"index":%d,"delta":{"content":' % index
        if self._wants_text_only:
            self._around_text[index] = self._writer.around(content_head, TEXT_END)
        return content_head

    def _first(self, index: int, content: bytes) -> bytes:
        """Return the first event of a choice, with the role and echoed content."""
        fields = b""
        if self._body.return_token_ids and len(self._content_heads) == 1:
            fields = b',"prompt_token_ids":' + encode(self._turn.stream.prompt_token_ids)
        return self._chunk(b'{"index":%d,"delta":{"role":"assistant",%b' % (index, content) + TEXT_END, fields)

    def _change(self, part: ResponsePart) -> bytes:
        """Return the fields that show a part. The result is empty for the end of a call, because the next event shows
        the end.
        """
        if isinstance(part, ContentText):
            return b'"content":' + encode(part.text)
        if isinstance(part, ReasoningText):
            text = encode(part.text)
            return b'"reasoning_content":%b,"reasoning":%b' % (text, text)
        if isinstance(part, ToolCallEnd):
            return b""
        if self._body.functions:
            return b'"function_call":{%b}' % _function_fields(part)
        call = b""
        if isinstance(part, ToolCallBegin):
            call = b'"id":%b,"type":"function",' % encode(part.id)
        return b'"tool_calls":[{"index":%d,%b"function":{%b}}]' % (part.index, call, _function_fields(part))

    def _ended(self, events: Iterable[bytes], delta: Delta, finish: str | None) -> bytes:
        """Join the events, and add the last event of the choice if it has ended."""
        if finish is None:
            return b"".join(events)
        self._is_partial = self._is_partial or finish == PARTIAL_FINISH
        versions = b""
        # If the client asks for token ids, each event already has its own weight versions.
        if not self._body.return_token_ids:
            versions = versions_field(self._turn.stream.weight_versions(delta.index))
        end = self._chunk(
            b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":%b,"stop_reason":%b%b}'
            % (delta.index, encode(finish), encode(delta.stop_reason), versions),
            transfer_field(delta),
        )
        if self._holds_end and delta.kv_transfer is None:
            self._last = b"".join((*events, end))
            return b""
        return b"".join((*events, end))

    def _extras(self, delta: Delta) -> bytes | None:
        """Return the bytes after the text of a chunk with log probabilities or token ids. None: the chunk has only
        text.
        """
        logprobs = delta.logprobs if self._body.logprobs else None
        token_ids = delta.token_ids if self._body.return_token_ids else ()
        if not logprobs and not token_ids:
            return None
        return b'},"logprobs":%b,"finish_reason":null%b}' % (
            encode(chat_logprobs(self._tokenizer, logprobs)) if logprobs else b"null",
            token_ids_field(delta) if token_ids else b"",
        )

    def _chunk(self, choice: bytes, fields: bytes = b"") -> bytes:
        usage = self._turn.usage() if self._body.wants_continuous_usage else None
        return self._writer.chunk(choice, usage=usage, fields=fields)


def _function_fields(part: ToolCallBegin | ToolCallArguments) -> bytes:
    if isinstance(part, ToolCallBegin):
        return b'"name":%b,"arguments":""' % encode(part.name)
    return b'"arguments":' + encode(part.text)


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
        cache_key=body.prompt_cache_key,
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
