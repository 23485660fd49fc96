"""Admits the requests of an engine to its queue, or refuses them. Each refused request is counted once."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from typing import TypedDict

from trioserve.admission.admission_scope import AdmissionScope
from trioserve.admission.dispatch import Dispatch
from trioserve.contracts.arguments import check_texts, to_int
from trioserve.contracts.deadlines import NO_DEADLINES, Deadlines
from trioserve.contracts.errors import Draining, EngineReopening, Overloaded, StepOverdue
from trioserve.contracts.tracing import Span
from trioserve.engine.lifecycle.request_scope import AnyScope
from trioserve.engine.request_preparation import instance_of
from trioserve.engine.settings import EngineSettings
from trioserve.metrics.registry import Metrics

__all__ = ["RequestAdmission", "ScopeArguments", "new_request_id"]

logger = logging.getLogger(__name__)

RETRY_SECONDS = 5.0
NO_TEXTS: Mapping[str, str | None] = {}


def new_request_id() -> str:
    return f"req-{secrets.token_hex(12)}"


class ScopeArguments(TypedDict):
    """Arguments that are common to all requests, see `RequestScope`."""

    request_id: str
    priority: int
    deadlines: Deadlines
    owner: str | None
    tenant: str
    part_of: Span


class RequestAdmission:
    """Gives each request a position in the queue, and later a lease.

    Args:
        dispatch: the queue before the engine.
        metrics: counts refusals.
        settings: limits of the engine.
        new_request_id: makes the id of a request whose caller gives none.
    """

    def __init__(
        self, dispatch: Dispatch, metrics: Metrics, settings: EngineSettings, new_request_id: Callable[[], str]
    ) -> None:
        self._dispatch = dispatch
        self._metrics = metrics
        self._settings = settings
        self._new_request_id = new_request_id

    def arguments(
        self,
        *,
        request_id: str | None,
        priority: int,
        deadlines: Deadlines | None,
        owner: str | None,
        tenant: str | None,
        part_of: Span,
        texts: Mapping[str, str | None] = NO_TEXTS,
    ) -> ScopeArguments:
        """Check the arguments of a caller, and apply the engine's defaults and limits.

        Args:
            request_id: id of the request. None: a new one.
            priority: a lower number runs sooner.
            deadlines: deadlines of the request. None: the engine's.
            owner: user who may see and abort the request.
            tenant: the queue is fair between tenants. None: the owner.
            part_of: parent span of the request's trace.
            texts: further arguments that must be texts or None, by name.

        Raises:
            InvalidRequest: an argument has a wrong type.
        """
        asked = instance_of(Deadlines, "deadlines", deadlines, NO_DEADLINES)
        check_texts(request_id=request_id, owner=owner, tenant=tenant, **texts)
        return ScopeArguments(
            request_id=request_id or self._new_request_id(),
            priority=to_int("priority", priority),
            deadlines=asked.within(self._settings.deadlines, self._settings.deadlines_max),
            owner=owner,
            tenant=tenant or owner or "",
            part_of=part_of,
        )

    def begin(self, request: AnyScope) -> AdmissionScope:
        """Put a request into the queue. It may get its lease at once.

        Returns:
            The admission. The caller must later pass it to the `leave` method of the dispatch.

        Raises:
            Overloaded: the queue is full. Nothing needs to be released.
        """
        try:
            return self._dispatch.begin(request.routed())
        except Overloaded as refusal:
            self._note(request, refusal)
            raise

    async def lease(self, request: AnyScope, admission: AdmissionScope) -> None:
        """Wait until the request gets its lease, and mark the lease as used.

        Args:
            admission: the result of `begin`.

        Raises:
            Overloaded: the queue is drained, the request waited too long, or another request displaced it.
        """
        try:
            await admission.lease()
            if admission.is_queued:  # This is False if the request was ended right after it got the lease.
                admission.sent()
        except Overloaded as refusal:
            self._note(request, refusal)
            raise

    def refused_draining(self) -> Draining:
        self._metrics.requests_rejected_total.labels("draining").inc()
        return Draining(
            "the server is shutting down and accepts no new requests: send the request to another server",
            reason="draining",
            retry_after_seconds=RETRY_SECONDS,
        )

    def refused_reopening(self) -> EngineReopening:
        self._metrics.requests_rejected_total.labels("engine_reopening").inc()
        return EngineReopening(
            "the engine broke and is being reopened: "
            "send the request to another server, or to this one again when it is ready",
            reason="engine_reopening",
            retry_after_seconds=RETRY_SECONDS,
        )

    def refused_overdue(self, overdue: str) -> StepOverdue:
        """Return the refusal for a request that arrives while the step in flight is overdue. Count the refusal.

        Args:
            overdue: sentence that describes the overdue step.
        """
        self._metrics.requests_rejected_total.labels("step_overdue").inc()
        return StepOverdue(
            f"{overdue}: send the request to another server, or to this one again when it is ready",
            reason="step_overdue",
            retry_after_seconds=RETRY_SECONDS,
        )

    def _note(self, request: AnyScope, refusal: Overloaded) -> None:
        self._metrics.requests_rejected_total.labels(refusal.reason).inc()
        logger.info("refused request=%s reason=%s", request.id, refusal.reason)
