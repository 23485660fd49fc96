"""POST /v1/completions: continues one or more prompts, as a whole response or a stream.

Several prompts are one request, and each has its own stream. If one stream fails, the other streams are cancelled, and
the request fails with that error. In the response, choice i of a prompt has the index prompt_index * n + i.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, cast

import msgspec
from msgspec import UNSET

from trioserve.api.error_responses import HandedOver
from trioserve.api.generation import (
    PARTIAL_FINISH,
    Choice,
    Usage,
    collect,
    first_transfer,
    is_partial,
    read_streams,
    usage_of,
    wait_until_begun,
    wait_until_released,
)
from trioserve.api.openai import response_types as types
from trioserve.api.openai.chat_prompt import gap_of, prompt_cut
from trioserve.api.openai.request_types import GENERATION_RANGES, CompletionBody, deadlines_of
from trioserve.api.openai.response_types import (
    Completion,
    CompletionChoice,
    CompletionHead,
    LogprobsWriter,
    TextFinishReason,
    prompt_logprobs,
)
from trioserve.api.openai.structured_fields import structured_output_of
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
from trioserve.api.streams.resumption import Resumption, skip_known
from trioserve.api.whole_response import LargeJson, ResponseShape
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.events import FinishReason, TokenLogprob
from trioserve.contracts.output import Delta
from trioserve.contracts.sampling import CHOICES_MAX, SamplingParams

if TYPE_CHECKING:
    from trioserve.engine.request_stream import RequestStream

__all__ = ["OPERATIONS", "create_completion"]

PROMPTS_MAX = 128  # Evaluation tools send up to this number of prompts. Each prompt uses n places in the queue.

TextPrompt = str | list[int]


async def create_completion(context: RequestContext) -> None:
    body = await context.body(CompletionBody)
    model = context.model_name(body.model)
    _check(body)
    prompts = _prompts(body)
    sampling = _sampling(body, context.engine.default_sampling)
    if gap := gap_of(context.engine.tokenizer, body.suffix):
        prompts = [gap.prompt(_text(prompt), body.suffix or "") for prompt in prompts]
        ends = (*sampling.stop_token_ids, *gap.end_token_ids(context.engine.tokenizer))
        sampling = msgspec.structs.replace(sampling, stop_token_ids=ends)
    resumption = Resumption(
        context,
        body.resume,
        sampling,
        is_streamed=bool(body.stream),
        prompt_count=len(prompts),
        gives_partial=bool(body.return_partial),
    )
    head = CompletionHead(id=f"cmpl-{context.request_id}", created=resumption.created, model=model)
    deadlines = deadlines_of(body, context.exchange.headers)
    cut = prompt_cut(body.truncate_prompt_tokens, context.engine.model.context_tokens_max, sampling.max_tokens)
    shape = ResponseShape(
        is_streamed=bool(body.stream),
        prompt_count=len(prompts),
        prompt_copies=sampling.n,
        has_prompt_text=bool(body.echo),
        has_token_ids=bool(body.return_token_ids),
    )
    large = LargeJson()
    async with AsyncExitStack() as scopes:
        streams = [
            await scopes.enter_async_context(
                context.generate(
                    prompt,
                    resumption.seeded(sampling, index),
                    body,
                    deadlines,
                    add_special_tokens=body.add_special_tokens is not False,
                    cut=cut,
                    resume=resumption.resume(index),
                    resumable=resumption.is_resumable,
                    keep_logprobs=resumption.gives_partial,
                    shape=shape,
                )
            )
            for index, prompt in enumerate(prompts)
        ]
        resumption.check(streams)
        context.response_bound.check_prompts(sampling, shape, sum(stream.prompt_token_count for stream in streams))
        response = _Response(context, body, sampling.n if body.best_of is None else body.n or 1, streams, resumption)
        await response.read_echoes(prompts)
        if body.stream:
            await context.begin_events(
                lambda: wait_until_begun(streams[0]), lambda: context.start_events(resumption.headers(streams))
            )
            ids = resumption.group_ids()
            events = _CompletionEvents(response, head, holds_end=ids is None)
            await skip_known(streams, events.skip)

            async def send(stream_index: int, delta: Delta) -> None:
                if piece := events.of(stream_index, delta):
                    await context.exchange.send(piece)

            async def send_group(stream_index: int, delta: Delta) -> None:
                assert ids is not None
                index = events.choice_index(stream_index, delta)
                if piece := ids.group(events.of(stream_index, delta), index, delta):
                    await context.exchange.send(piece)

            try:
                await read_streams(
                    streams,
                    send if ids is None else send_group,
                    keep_alive=context.keep_alive,
                    is_partial=resumption.is_partial,
                )
            except HandedOver:
                if len(streams) == 1:
                    raise
                # The server that continues a response with several prompts cannot fetch their KV.
                for stream in streams:
                    stream.drop_hold()
                raise HandedOver(None) from None
            if streams[0].is_held:
                await wait_until_released(streams[0], context.keep_alive)
        else:
            collected = await collect(
                streams, sampling.n, bound=context.response_bound, is_partial=resumption.is_partial
            )
            if streams[0].is_held:  # If the client leaves before it has the response, the held blocks are released.
                await context.respond_large(large, await response.whole(large, head, collected))
                streams[0].keep_hold()
    # The engine requests have ended and their scopes are left. So a slow client delays only its own bytes.
    if body.stream:
        await context.finish(events.end() if ids is None else ids.last(events.end()))
    elif context.status is None:
        await context.respond_large(large, await response.whole(large, head, collected))


def _check(body: CompletionBody) -> None:
    body.check()
    if body.best_of is not None:
        _check_best_of(body, body.best_of)
    if body.suffix and body.echo:
        raise InvalidRequest(
            "echo is set, but a response that fills a gap does not continue the prompt: leave echo out", param="echo"
        )
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequest("max_tokens is 0, allowed is 1 or more (or 0 with echo)", param="max_tokens")
    if body.kv_transfer_params is not None and len(_prompts(body)) > 1:
        raise InvalidRequest(
            f"prompt has {len(_prompts(body))} prompts, but kv_transfer_params are for one: send prompts one by one",
            param="kv_transfer_params",
        )
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest("prompt_logprobs is not available when stream is true", param="prompt_logprobs")


def _check_best_of(body: CompletionBody, best_of: int) -> None:
    least = body.n or 1
    if not least <= best_of <= CHOICES_MAX:
        raise InvalidRequest(f"best_of is {best_of}, allowed is n, which is {least}, to {CHOICES_MAX}", param="best_of")
    if best_of > least and body.stream:
        raise InvalidRequest(
            f"best_of is {best_of}, but a stream cannot wait until all choices are complete: leave it out, or use n",
            param="best_of",
        )


def _text(prompt: TextPrompt) -> str:
    if not isinstance(prompt, str):
        raise InvalidRequest(
            "suffix is set, so prompt must be a text: it cannot be inserted into token ids", param="prompt"
        )
    return prompt


def _prompts(body: CompletionBody) -> list[TextPrompt]:
    """Convert the four types of `prompt` into a list of prompts."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest("prompt is an empty list", param="prompt")
    kind = type(prompt[0])
    if any(type(item) is not kind for item in prompt):
        raise InvalidRequest("prompt mixes strings, token ids and lists: it must be a list of one kind", param="prompt")
    if kind is int:
        return [cast("list[int]", prompt)]
    if len(prompt) > PROMPTS_MAX:
        raise InvalidRequest(f"prompt has {len(prompt)} prompts, at most {PROMPTS_MAX} are allowed", param="prompt")
    for index, item in enumerate(prompt):
        if not item and kind is list:
            raise InvalidRequest(f"prompt[{index}] has no tokens, at least one is needed", param=f"prompt[{index}]")
    return cast("list[TextPrompt]", prompt)


def _sampling(body: CompletionBody, defaults: SamplingParams) -> SamplingParams:
    given: dict[str, object] = {
        "max_tokens": body.max_tokens,
        "structured": structured_output_of(body),
    } | body.predicted_tokens()
    if body.logprobs is not None:
        given["logprobs"] = body.logprobs
        if body.echo and body.prompt_logprobs is None:
            given["prompt_logprobs"] = body.logprobs
    if body.best_of is not None and body.best_of > (body.n or 1):
        given["n"] = body.best_of
        given.setdefault("logprobs", 0)
    return body.sampling(defaults, **given)


def _best(choices: list[Choice], count: int) -> list[Choice]:
    """Select the choices for best_of: those with the highest mean log probability per token, best first."""
    if len(choices) <= count:
        return choices
    return sorted(choices, key=_logprob_of_a_token, reverse=True)[:count]


def _logprob_of_a_token(choice: Choice) -> float:
    return sum(token.logprob for token in choice.logprobs) / max(1, len(choice.logprobs))


def _finish_shown(reason: FinishReason | None) -> TextFinishReason | None:
    if reason is None:
        return None
    if is_partial(reason):
        return PARTIAL_FINISH
    return "length" if reason is FinishReason.LENGTH else "stop"


def _has_partial(choices: list[list[Choice]]) -> bool:
    return any(is_partial(choice.finish_reason) for of_stream in choices for choice in of_stream)


class _Response:
    """Functions that whole and streamed responses share: echoes, and the JSON of a choice."""

    def __init__(
        self,
        context: RequestContext,
        body: CompletionBody,
        choice_count: int,
        streams: Sequence[RequestStream],
        resumption: Resumption,
    ) -> None:
        self.resumption = resumption
        self.body = body
        self.streams = streams
        self.choice_count = choice_count
        self._engine = context.engine
        self.echoes = [""] * len(streams)

    async def read_echoes(self, prompts: Sequence[TextPrompt]) -> None:
        if self.body.echo:
            is_cut = self.body.truncate_prompt_tokens is not None
            self.echoes = [
                prompt if isinstance(prompt, str) and not is_cut else await self._engine.decode(stream.prompt_token_ids)
                for prompt, stream in zip(prompts, self.streams, strict=True)
            ]

    def new_logprobs(self, stream_index: int) -> LogprobsWriter:
        """Make the writer of log probabilities for one choice of this prompt."""
        stream = self.streams[stream_index]
        is_echoed = self.body.echo and self.body.logprobs is not None and stream.prompt_logprobs is not None
        return LogprobsWriter(
            self._engine.tokenizer,
            echo=self.echoes[stream_index],
            echo_tokens=len(stream.prompt_token_ids) if is_echoed else 0,
        )

    def echoed_logprobs(self, stream: RequestStream, logprobs: LogprobsWriter) -> types.CompletionLogprobs | None:
        """Return log probabilities of the prompt's tokens if the client asks for them and for the prompt, else None."""
        if not self.body.echo or self.body.logprobs is None or stream.prompt_logprobs is None:
            return None
        return logprobs.take(stream.prompt_token_ids, stream.prompt_logprobs)

    def usage(self) -> Usage:
        return usage_of(self.streams)

    async def whole(self, large: LargeJson, head: CompletionHead, collected: list[list[Choice]]) -> Completion:
        """Make the body of a whole response. The caller must send the body with `large`, which contains the large
        lists.

        Args:
            large: encodes large lists.
            head: fields that the response has in common with the events of a stream.
            collected: for each stream, all of its choices. With best_of, some of these choices are not shown, but may
                have partial results too.
        """
        choices = [_best(made, self.choice_count) for made in collected]
        return Completion(
            id=head.id,
            created=head.created,
            model=head.model,
            choices=[
                await self._choice(large, stream_index, choice_index, choice)
                for stream_index, of_stream in enumerate(choices)
                for choice_index, choice in enumerate(of_stream)
            ],
            usage=self.usage(),
            kv_transfer_params=first_transfer(choice.kv_transfer for choice in choices[0]),
            resume=self.resumption.behind(self.streams) if _has_partial(collected) else UNSET,
        )

    async def _choice(self, large: LargeJson, stream_index: int, choice_index: int, choice: Choice) -> CompletionChoice:
        stream = self.streams[stream_index]
        written = CompletionChoice(
            index=stream_index * self.choice_count + choice_index,
            text=self.echoes[stream_index] + choice.text,
            logprobs=await self._logprobs(large, stream_index, choice),
            finish_reason=_finish_shown(choice.finish_reason),
            stop_reason=choice.stop_reason,
            token_ids=choice.token_ids if self.body.return_token_ids else UNSET,
            weight_versions=choice.weight_versions or UNSET,
            prompt_token_ids=stream.prompt_token_ids if self.body.return_token_ids else UNSET,
        )
        if self.body.prompt_logprobs is not None and stream.prompt_logprobs is not None:
            write = functools.partial(prompt_logprobs, self._engine.tokenizer)
            weight = 1 + self.body.prompt_logprobs
            written.prompt_logprobs = await large.add(stream.prompt_logprobs, write, item_weight=weight)
        return written

    async def _logprobs(self, large: LargeJson, stream_index: int, choice: Choice) -> types.CompletionLogprobs | None:
        stream = self.streams[stream_index]
        if self.body.logprobs is None:
            return None
        token_ids: Sequence[int] = choice.token_ids
        of_tokens: Sequence[TokenLogprob | None] = choice.logprobs
        if self.body.echo and stream.prompt_logprobs is not None:
            token_ids, of_tokens = [*stream.prompt_token_ids, *token_ids], [*stream.prompt_logprobs, *of_tokens]
        logprobs = self.new_logprobs(stream_index)
        tokens = list(zip(token_ids, of_tokens, strict=True))
        weight = 1 + self.body.logprobs
        return await large.add_columns(tokens, logprobs.take_pairs, item_weight=weight)


class _CompletionEvents:
    """Writes the events of one streamed response.

    Args:
        response: functions for the JSON of a choice.
        head: fields that all events share.
        holds_end: True: if there is only one choice, `end` also returns the last events of this choice, which saves one
            write. This does not apply if KV is held, because the stream then stays open.
    """

    def __init__(self, response: _Response, head: CompletionHead, *, holds_end: bool) -> None:
        self._response = response
        self._body = response.body
        self._writer = ChunkWriter(head, null_usage=response.body.wants_usage)
        self._logprobs: dict[int, LogprobsWriter] = {}
        # For each choice, the bytes before and after the text in events that have only text.
        self._around_text: dict[int, tuple[bytes, bytes]] = {}
        self._wants_text_only = not (
            response.body.logprobs is not None or response.body.return_token_ids or response.body.wants_continuous_usage
        )
        self._holds_end = holds_end and response.choice_count * len(response.streams) == 1
        self._last = b""
        self._is_partial = False

    def of(self, stream_index: int, delta: Delta) -> bytes:
        """Return the events of one delta. The result is empty if the delta has nothing to send yet."""
        index = self.choice_index(stream_index, delta)
        around = self._around_text.get(index)
        if around is not None and delta.finish_reason is None:
            return around[0] + one_line_json(delta.text) + around[1] if delta.text else b""
        events = []
        if index not in self._logprobs:
            self._logprobs[index] = self._response.new_logprobs(stream_index)
            events.append(self._first(index, stream_index))
            self._begin(index)
        logprobs = None
        if self._body.logprobs is not None and delta.logprobs:
            logprobs = self._logprobs[index].take(delta.token_ids, delta.logprobs)
        token_ids = b""
        if self._body.return_token_ids and delta.token_ids:
            token_ids = token_ids_field(delta)
        if delta.text or delta.finish_reason is not None or logprobs is not None or token_ids:
            finish = b"null"
            if delta.finish_reason is not None:
                finish = encode(_finish_shown(delta.finish_reason)) + b',"stop_reason":' + encode(delta.stop_reason)
                # If the client asks for token ids, each event already has its own weight versions.
                if not self._body.return_token_ids:
                    finish += versions_field(self._response.streams[stream_index].weight_versions(delta.index))
                self._is_partial = self._is_partial or is_partial(delta.finish_reason)
            fields = transfer_field(delta)
            events.append(self._chunk(index, delta.text, logprobs, finish + token_ids, fields))
        if delta.finish_reason is not None and self._holds_end and delta.kv_transfer is None:
            self._last = b"".join(events)
            return b""
        return b"".join(events)

    def choice_index(self, stream_index: int, delta: Delta) -> int:
        """Return the index of the delta's choice in the response."""
        return stream_index * self._response.choice_count + delta.index

    def skip(self, stream_index: int, delta: Delta) -> None:
        """Process a known delta that the client already has. The choice continues after this delta."""
        index = self.choice_index(stream_index, delta)
        if index not in self._logprobs:
            self._logprobs[index] = self._response.new_logprobs(stream_index)
            if self._body.echo:
                self._logprobs[index].skip(self._response.streams[stream_index].prompt_token_ids)
            self._begin(index)
        if self._body.logprobs is not None:
            self._logprobs[index].skip(delta.token_ids)

    def _begin(self, index: int) -> None:
        if self._wants_text_only:
            self._around_text[index] = self._writer.around(
                b'{"index":%d,"text":' % index, b',"logprobs":null,"finish_reason":null}'
            )

    def end(self) -> bytes:
        last, response = self._last, self._response
        if self._is_partial:
            last += self._writer.chunk(b"", fields=resume_field(response.resumption.behind(response.streams)))
        usage = self._writer.chunk(b"", usage=response.usage()) if self._body.wants_usage else b""
        return last + usage + DONE

    def _first(self, index: int, stream_index: int) -> bytes:
        """Return the event with the prompt, if the client asks for the prompt or its tokens."""
        if not self._body.echo and not self._body.return_token_ids:
            return b""
        stream = self._response.streams[stream_index]
        prompt_token_ids = b""
        if self._body.return_token_ids:
            prompt_token_ids = b',"prompt_token_ids":' + encode(stream.prompt_token_ids)
        logprobs = self._response.echoed_logprobs(stream, self._logprobs[index])
        return self._chunk(index, self._response.echoes[stream_index], logprobs, b"null" + prompt_token_ids)

    def _chunk(
        self, index: int, text: str, logprobs: types.CompletionLogprobs | None, end: bytes, fields: bytes = b""
    ) -> bytes:
        """Write one event.

        Args:
            index: index of the choice in the response.
            text: new text.
            logprobs: log probabilities. None: not asked for.
            end: JSON of the finish reason, and further fields of the choice.
            fields: further fields of the chunk (see ChunkWriter).
        """
        choice = b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}' % (
            index,
            encode(text),
            b"null" if logprobs is None else encode(logprobs),
            end,
        )
        usage = self._response.usage() if self._body.wants_continuous_usage else None
        return self._writer.chunk(choice, usage=usage, fields=fields)


OPERATIONS: tuple[Operation[RequestContext], ...] = (
    Operation(
        method="POST",
        path="/v1/completions",
        handler=create_completion,
        summary="Continue one or more prompts",
        forwarding=Forwarding.BY_MODEL,
        description="Choice number prompt_index * n + i is choice i of that prompt. Other fields: as for chats.",
        body=CompletionBody,
        ranges=GENERATION_RANGES,
        response=Completion,
        event=Completion,
        errors=GENERATES,
        takes_deadlines=True,
    ),
)
