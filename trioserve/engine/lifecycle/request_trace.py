"""Records a request as a trace span, with a child span per stage: queue, tokenize, wait, prefill, decode, hold.

Names follow OpenTelemetry's conventions for generative AI. The span ends after the caller's scope, the core's state of
the request, and the holds of the request's blocks have all ended.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

import msgspec

from trioserve.contracts.events import FinishReason
from trioserve.contracts.output import AnyDelta, Delta
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.tracing import NO_SPAN, Attributes, Span, Tracer

__all__ = ["NO_TRACE", "RequestTrace", "SpannedRequest", "request_span", "sampling_attributes"]

DeltaT = TypeVar("DeltaT", bound=AnyDelta)


class Traced(Protocol):
    """The attributes of a request that the trace needs."""

    id: str
    priority: int
    part_of: Span


class RequestTrace:
    """Receives the events of a request, in the order in which they happen. This base class ignores the events, for
    requests without a trace.
    """

    __slots__ = ()

    def leased(self) -> None:
        """Note that the request left the queue."""

    def prepared(self, prompt_tokens: int) -> None:
        """Note that the request is tokenized and was added to the core.

        Args:
            prompt_tokens: number of prompt tokens.
        """

    def runs(self) -> None:
        """Note that the request is in a step. This method may be called more than once."""

    def first_token(self) -> None: ...

    def cancelled(self, reason: str) -> None:
        """Note that the request was ended from outside before its own end.

        Args:
            reason: the finish reason.
        """

    def freed(self) -> None:
        """Note that the core has no sequence of the request any more."""

    def held(self) -> None:
        """Note that a connector holds blocks of the request for another engine."""

    def released(self) -> None:
        """Note that none of the request's blocks is held any more."""

    def failed(self, error: Exception) -> None: ...

    def ended(self, delta: DeltaT) -> DeltaT:
        """Note the last delta of a choice or image.

        Returns:
            The delta. If another engine will read the KV, the delta then contains the trace context.
        """
        return delta

    def left(self, *, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> None:
        """Note that the caller's scope has ended.

        Args:
            prompt_tokens: number of prompt tokens, 0 if the request was not tokenized.
            completion_tokens: sampled tokens.
            cached_tokens: prompt tokens found in the prefix cache.
        """


NO_TRACE = RequestTrace()


class SpannedRequest(RequestTrace):
    """Records the events of a request in a trace span.

    Args:
        span: a span that begins together with the request.
        is_pooling: True if the request has no output tokens.
    """

    __slots__ = (
        "_error",
        "_has_run",
        "_has_token",
        "_is_cancelled",
        "_is_gone",
        "_is_held",
        "_is_left",
        "_is_pooling",
        "_reasons",
        "_span",
        "_stage",
    )

    def __init__(self, span: Span, *, is_pooling: bool = False) -> None:
        self._span = span
        self._error: str | None = None
        self._is_pooling = is_pooling
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
        if not (self._has_token or self._is_pooling):
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

    def ended(self, delta: DeltaT) -> DeltaT:
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
    """Return the sampling options that the caller set, as trace attributes.

    Stop strings and schemas are never included, because they contain the caller's text.

    Args:
        sampling: sampling options.
    """
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


def request_span(
    tracer: Tracer,
    request: Traced,
    operation: str,
    *,
    model_name: str,
    attributes: Attributes,
    traceparent: str | None = None,
) -> Span:
    """Begin a span for a request that has just entered the queue.

    Args:
        tracer: creates the span.
        operation: operation name from OpenTelemetry's conventions for generative AI.
        model_name: name of the model or adapter.
        attributes: further attributes.
        traceparent: trace context of the other engine that handed the request over. None: there is none.
    """
    return tracer.begin(
        f"{operation} {model_name}",
        parent=request.part_of,
        traceparent=traceparent,
        attributes={
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "trioserve",
            "gen_ai.request.model": model_name,
            "gen_ai.response.model": model_name,
            "trioserve.request.id": request.id,
            "trioserve.priority": request.priority,
            **attributes,
        },
    )
