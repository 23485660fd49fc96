"""POST /v1/chat/completions: a chat in, the assistant's next message out, whole or piece by piece.

Tools are shown to the model through its chat template. Their calls are not parsed out of the response: what the model
writes arrives as text, in content, with tool_choice "auto" as without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trioserve.api.deadline_fields import deadlines_of
from trioserve.api.generation import (
    Choice,
    collect,
    read_streams,
    transfer_fields,
    usage_of,
    wait_until_released,
)
from trioserve.api.openai.chat_prompt import chat_prompt
from trioserve.api.openai.logprobs import chat_logprobs, prompt_logprobs
from trioserve.api.openai.request_types import ChatBody
from trioserve.api.request_context import RequestContext
from trioserve.api.sse import DONE, ChunkWriter, encode, one_line_json, transfer_field
from trioserve.api.turn.chat_turn import chat_turn
from trioserve.api.turn.turn_request import TurnRequest
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.output import Delta
from trioserve.contracts.sampling import SAMPLING_RANGES, SamplingParams

if TYPE_CHECKING:
    from trioserve.engine.request_stream import RequestStream

__all__ = ["create_chat_completion"]

TEXT_END = b'},"logprobs":null,"finish_reason":null}'


async def create_chat_completion(context: RequestContext) -> None:
    body = await context.body(ChatBody)
    model = context.model_name(body.model)
    _check(body)
    prompt = chat_prompt(body, trust_chat_template=context.trust_chat_template)
    sampling = _sampling(body, context.engine.default_sampling)
    head: dict[str, object] = {
        "id": f"chatcmpl-{context.request_id}",
        "object": "chat.completion.chunk" if body.stream else "chat.completion",
        "created": context.clock_and_ids.unix_seconds(),
        "model": model,
    }
    request = TurnRequest(
        messages=prompt.messages,
        tools=prompt.tools,
        sampling=sampling,
        template_arguments=prompt.template_arguments,
        chat_template=prompt.chat_template,
        add_generation_prompt=prompt.add_generation_prompt,
        continue_final_message=prompt.continue_final_message,
        priority=body.priority,
        cache_salt=body.cache_salt,
        deadlines=deadlines_of(body, context.exchange.headers),
        kv_transfer_params=body.kv_transfer_params,
    )
    async with chat_turn(context, request) as turn:
        stream = turn.stream
        if body.stream:
            await turn.wait_until_begun()
            await context.start_events()
            events = _ChatEvents(context, body, stream, head)

            async def send(_: int, delta: Delta) -> None:
                if piece := events.of(delta):
                    await context.exchange.send(piece)

            await read_streams([stream], send, keep_alive=context.keep_alive)
            if stream.is_held:
                await wait_until_released(stream, context.keep_alive)
        else:
            [choices] = await collect([stream], sampling.n)
            if stream.is_held:  # a client that leaves before it knows of the hold ends it
                await context.respond_json(_whole(context, body, stream, head, choices))
                stream.keep_hold()
    # The engine's part is over, and its scope left: a slow client keeps nothing but its own bytes waiting.
    if body.stream:
        await context.finish(events.end())
    elif context.status is None:
        await context.respond_json(_whole(context, body, stream, head, choices))


def _check(body: ChatBody) -> None:
    body.check()
    if body.modalities not in (None, [], ["text"]):
        raise InvalidRequest('modalities must be ["text"]: nothing else is produced here', param="modalities")
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
    for field in ("max_tokens", "max_completion_tokens"):  # the old name of the same thing, and the one that counts
        tokens_max = getattr(body, field)
        if tokens_max is not None:
            if tokens_max < 1:
                raise InvalidRequest(f"{field} is {tokens_max}, allowed is 1 or more", param=field)
            given["max_tokens"] = tokens_max
    if body.logprobs:
        given["logprobs"] = body.top_logprobs or 0
    return body.sampling(defaults, **given)


def _whole(
    context: RequestContext, body: ChatBody, stream: RequestStream, head: dict[str, object], choices: list[Choice]
) -> dict[str, object]:
    tokenizer = context.engine.tokenizer
    echo = _echo(body)
    response = {
        **head,
        "choices": [
            {
                "index": index,
                "message": {"role": "assistant", "content": echo + choice.text, "refusal": None},
                "logprobs": chat_logprobs(tokenizer, choice.logprobs) if body.logprobs else None,
                "finish_reason": choice.finish_reason.value if choice.finish_reason else None,
                "stop_reason": choice.stop_reason,
                **({"token_ids": choice.token_ids} if body.return_token_ids else {}),
            }
            for index, choice in enumerate(choices)
        ],
        "usage": usage_of([stream]),
        **transfer_fields(choices),
    }
    if body.return_token_ids:
        response["prompt_token_ids"] = stream.prompt_token_ids
    if stream.prompt_logprobs is not None:
        response["prompt_logprobs"] = prompt_logprobs(tokenizer, stream.prompt_logprobs)
    return response


class _ChatEvents:
    """The events of one streamed chat completion. What is the same in every event of a choice is built once."""

    def __init__(self, context: RequestContext, body: ChatBody, stream: RequestStream, head: dict[str, object]) -> None:
        self._tokenizer = context.engine.tokenizer
        self._body = body
        self._stream = stream
        self._writer = ChunkWriter(head, null_usage=body.wants_usage)
        self._content_heads: dict[int, bytes] = {}
        # For events of nothing but text, if the client wants no more.
        self._around_text: dict[int, tuple[bytes, bytes]] = {}
        self._wants_text_only = not (body.logprobs or body.return_token_ids or body.wants_continuous_usage)
        self._has_one_choice = stream.choice_count == 1
        self._last = b""

    def of(self, delta: Delta) -> bytes:
        """The events of one delta; nothing if there is nothing to show yet. Those with which the only choice ends are
        in `end`: one write less, but for a response that goes on, since its KV is held."""
        around = self._around_text.get(delta.index)
        if around is not None and delta.finish_reason is None:
            return around[0] + one_line_json(delta.text) + around[1] if delta.text else b""
        events = []
        content_head = self._content_heads.get(delta.index)
        if content_head is None:
            content_head = self._content_heads[delta.index] = b'{"index":%d,"delta":{"content":' % delta.index
            events.append(self._first(delta.index))
            if self._wants_text_only:
                self._around_text[delta.index] = self._writer.around(content_head, TEXT_END)
        extras = self._extras(delta)
        if delta.text or extras is not None:
            tail = TEXT_END if extras is None else extras
            events.append(self._chunk(content_head + encode(delta.text) + tail))
        if delta.finish_reason is not None:
            events.append(
                self._chunk(
                    b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":%b,"stop_reason":%b}'
                    % (delta.index, encode(delta.finish_reason.value), encode(delta.stop_reason)),
                    transfer_field(delta),
                )
            )
        if delta.finish_reason is not None and self._has_one_choice and delta.kv_transfer is None:
            self._last = b"".join(events)
            return b""
        return b"".join(events)

    def end(self) -> bytes:
        usage = self._writer.chunk(b"", usage=usage_of([self._stream])) if self._body.wants_usage else b""
        return self._last + usage + DONE

    def _first(self, index: int) -> bytes:
        """The role, and what came before the response."""
        fields = b""
        if self._body.return_token_ids and len(self._content_heads) == 1:
            fields = b',"prompt_token_ids":' + encode(self._stream.prompt_token_ids)
        return self._chunk(
            b'{"index":%d,"delta":{"role":"assistant","content":%b},"logprobs":null,"finish_reason":null}'
            % (index, encode(_echo(self._body))),
            fields,
        )

    def _extras(self, delta: Delta) -> bytes | None:
        """The end of a content chunk that has more than text in it."""
        logprobs = delta.logprobs if self._body.logprobs else None
        token_ids = delta.token_ids if self._body.return_token_ids else ()
        if not logprobs and not token_ids:
            return None
        return b'},"logprobs":%b,"finish_reason":null%b}' % (
            encode(chat_logprobs(self._tokenizer, logprobs)) if logprobs else b"null",
            b',"token_ids":' + encode(token_ids) if token_ids else b"",
        )

    def _chunk(self, choice: bytes, fields: bytes = b"") -> bytes:
        usage = usage_of([self._stream]) if self._body.wants_continuous_usage else None
        return self._writer.chunk(choice, usage=usage, fields=fields)


def _echo(body: ChatBody) -> str:
    """With `echo` the response begins with the last message, if that was the assistant's too."""
    last: dict[str, Any] = body.messages[-1]
    if not body.echo or last["role"] != "assistant":
        return ""
    content = last.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
