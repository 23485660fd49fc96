"""How a request of an engine gets its place and its lease, and what refuses it. Each refusal is counted once."""

from __future__ import annotations

import logging

from trioserve.admission.dispatch import AdmissionScope, Dispatch
from trioserve.admission.local_endpoint import local_request
from trioserve.contracts.errors import Draining, EngineReopening, Overloaded, StepOverdue
from trioserve.engine.open_request import OpenRequest
from trioserve.metrics.registry import Metrics

__all__ = ["RequestAdmission"]

logger = logging.getLogger(__name__)

RETRY_SECONDS = 5.0


class RequestAdmission:
    """dispatch: the queue before the engine."""

    def __init__(self, dispatch: Dispatch, metrics: Metrics) -> None:
        self._dispatch = dispatch
        self._metrics = metrics

    def begin(self, request: OpenRequest) -> AdmissionScope:
        """A place in the queue, or a lease at once. The caller owes the dispatch a `leave`. Raises Overloaded, and then
        holds nothing."""
        routed = local_request(
            request.prompts,
            tenant=request.tenant,
            priority=request.priority,
            sequences=max(1, request.sequence_count),
            known_tokens=0 if request.resume is None else sum(map(len, request.resume.token_ids)),
        )
        try:
            return self._dispatch.begin(routed)
        except Overloaded as refusal:
            self._note(request, refusal)
            raise

    async def lease(self, request: OpenRequest, admission: AdmissionScope) -> None:
        """Wait for the lease, and use it. Raises Overloaded: the queue is drained, or the request waited too long, or
        had to make room."""
        try:
            await admission.lease()
            if admission.is_queued:  # otherwise it was ended just when it had got one
                admission.sent()
        except Overloaded as refusal:
            self._note(request, refusal)
            raise

    def refused_draining(self) -> Draining:
        self._metrics.requests_rejected_total.labels("draining").inc()
        return Draining(
            "the server is leaving and takes no new requests: ask another one",
            reason="draining",
            retry_after_seconds=RETRY_SECONDS,
        )

    def refused_reopening(self) -> EngineReopening:
        self._metrics.requests_rejected_total.labels("engine_reopening").inc()
        return EngineReopening(
            "the engine broke and is being opened anew: ask another server, or this one again when it is ready",
            reason="engine_reopening",
            retry_after_seconds=RETRY_SECONDS,
        )

    def refused_overdue(self, overdue: str) -> StepOverdue:
        """overdue: what is said of the step that hangs."""
        self._metrics.requests_rejected_total.labels("step_overdue").inc()
        return StepOverdue(
            f"{overdue}: ask another server, or this one again when it is ready",
            reason="step_overdue",
            retry_after_seconds=RETRY_SECONDS,
        )

    def _note(self, request: OpenRequest, refusal: Overloaded) -> None:
        self._metrics.requests_rejected_total.labels(refusal.reason).inc()
        logger.info("refused request=%s reason=%s", request.id, refusal.reason)
