"""The life of a request of an engine as a span: its queue, its preparation, its prompt, its tokens, its end, and the
moment at which nothing of it is left. Names as in OpenTelemetry's conventions for generative AI.

The span ends when three things are over: the caller's scope, what the core has of the request, and what is held of it.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from trioserve.contracts.events import FinishReason
from trioserve.contracts.output import AnyDelta, Delta
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.tracing import NO_SPAN, Span

__all__ = ["NO_TRACE", "RequestTrace", "SpannedRequest", "sampling_attributes"]

DeltaT = TypeVar("DeltaT", bound=AnyDelta)


class RequestTrace:
    """One that nobody follows. Told in the order in which things happen."""

    __slots__ = ()

    def leased(self) -> None:
        """Its time in the queue is over."""

    def prepared(self, prompt_tokens: int) -> None:
        """It is tokenized, and with the core."""

    def runs(self) -> None:
        """A step has it, perhaps not for the first time."""

    def first_token(self) -> None: ...

    def cancelled(self, reason: str) -> None:
        """It is ended from outside, before its own end."""

    def freed(self) -> None:
        """The core has nothing of it any more."""

    def held(self) -> None:
        """A connector holds blocks of it."""

    def released(self) -> None:
        """And holds none any more."""

    def failed(self, error: Exception) -> None: ...

    def told(self, delta: DeltaT) -> DeltaT:
        """Its reader gets this, the last delta of a part. Returns it with what whoever takes the KV is to know of the
        trace."""
        return delta

    def left(self, *, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> None:
        """The caller's scope is over."""


NO_TRACE = RequestTrace()


class SpannedRequest(RequestTrace):
    """span: begun when the request was entered. is_pooled: it has no tokens of its own."""

    __slots__ = (
        "_error",
        "_has_run",
        "_has_token",
        "_is_cancelled",
        "_is_gone",
        "_is_held",
        "_is_left",
        "_is_pooled",
        "_reasons",
        "_span",
        "_stage",
    )

    def __init__(self, span: Span, *, is_pooled: bool = False) -> None:
        self._span = span
        self._error: str | None = None
        self._is_pooled = is_pooled
        self._has_run = self._has_token = self._is_cancelled = self._is_gone = self._is_held = self._is_left = False
        self._reasons: list[str] = []
        self._stage: Span = NO_SPAN
        self._begin("queue")

    def _begin(self, stage: str) -> None:
        self._stage.end()
        self._span.event(stage)
        self._stage = self._span.child(stage)

    def _end_stage(self) -> None:
        self._stage.end()
        self._stage = NO_SPAN

    def leased(self) -> None:
        self._begin("tokenize")

    def prepared(self, prompt_tokens: int) -> None:
        self._span.note({"gen_ai.usage.input_tokens": prompt_tokens})
        self._stage.end()
        self._stage = self._span.child("wait")

    def runs(self) -> None:
        if not self._has_run:
            self._has_run = True
            self._begin("prefill")

    def first_token(self) -> None:
        if not (self._has_token or self._is_pooled):
            self._has_token = True
            self._span.event("first_token")
            self._begin("decode")

    def cancelled(self, reason: str) -> None:
        if not self._is_cancelled:
            self._is_cancelled = True
            self._end_stage()
            self._span.event("cancel", {"reason": reason})

    def freed(self) -> None:
        if self._is_gone:
            return
        self._is_gone = True
        if not self._is_held:
            self._end_stage()
            self._span.event("free")
            self._end_if_over()

    def held(self) -> None:
        self._is_held = True
        self._stage.end()
        self._span.event("hold")
        self._stage = self._span.child("hold")

    def released(self) -> None:
        if not self._is_held:
            return
        self._is_held = False
        self._end_stage()
        self._span.event("release")
        if self._is_gone:
            self._span.event("free")
            self._end_if_over()

    def failed(self, error: Exception) -> None:
        self._error = type(error).__name__

    def told(self, delta: DeltaT) -> DeltaT:
        if delta.finish_reason is not None:
            self._reasons.append(delta.finish_reason.value)
            if delta.finish_reason is FinishReason.ERROR:
                self._error = self._error or "request_failed"
        if not isinstance(delta, Delta) or delta.kv_transfer is None:
            return delta
        traceparent = dict(self._span.headers()).get("traceparent")
        return msgspec.structs.replace(
            delta, kv_transfer=msgspec.structs.replace(delta.kv_transfer, traceparent=traceparent)
        )

    def left(self, *, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> None:
        self._is_left = True
        self._span.note(
            {
                "gen_ai.usage.input_tokens": prompt_tokens,
                "gen_ai.usage.output_tokens": completion_tokens,
                "gen_ai.usage.cache_read.input_tokens": cached_tokens,
                "gen_ai.response.finish_reasons": self._reasons,
            }
        )
        self._end_if_over()

    def _end_if_over(self) -> None:
        if self._is_left and self._is_gone and not self._is_held:
            self._end_stage()
            self._span.end(self._error)


def sampling_attributes(sampling: SamplingParams) -> dict[str, int | float]:
    """What is known of how tokens are chosen, as far as it is said. Never stop strings or schemas: they are the
    caller's text."""
    attributes: dict[str, int | float | None] = {
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.choice.count": sampling.n,
    }
    return {name: value for name, value in attributes.items() if value is not None}
