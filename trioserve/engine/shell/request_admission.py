"""How a request of an engine gets its place and its lease, and what refuses it. Each refusal is counted once."""

from __future__ import annotations

import logging

from trioserve.admission.dispatch import AdmissionScope, Dispatch
from trioserve.contracts.errors import Draining, EngineReopening, Overloaded, StepOverdue
from trioserve.engine.shell.request_scope import AnyScope
from trioserve.metrics.registry import Metrics

__all__ = ["RequestAdmission"]

logger = logging.getLogger(__name__)

RETRY_SECONDS = 5.0


class RequestAdmission:
    """dispatch: the queue before the engine."""

    def __init__(self, dispatch: Dispatch, metrics: Metrics) -> None:
        self._dispatch = dispatch
        self._metrics = metrics

    def begin(self, request: AnyScope) -> AdmissionScope:
        """A place in the queue, or a lease at once. The caller owes the dispatch a `leave`. Raises Overloaded, and then
        holds nothing."""
        try:
            return self._dispatch.begin(request.routed())
        except Overloaded as refusal:
            self._note(request, refusal)
            raise

    async def lease(self, request: AnyScope, admission: AdmissionScope) -> None:
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

    def _note(self, request: AnyScope, refusal: Overloaded) -> None:
        self._metrics.requests_rejected_total.labels(refusal.reason).inc()
        logger.info("refused request=%s reason=%s", request.id, refusal.reason)
