"""Snapshots of a router for its live page: endpoints, queues, and the position of each request.

Like engine/live_feed, a snapshot is computed when a reader asks. Without readers, only the history is recorded.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import msgspec
import trio

from trioserve.admission.admission_scope import AdmissionScope
from trioserve.admission.feeds import History, Watchers, tenant_name
from trioserve.admission.model_runs import ModelRuns
from trioserve.contracts.endpoint import EndpointId
from trioserve.contracts.events import Phase
from trioserve.contracts.extras import VERSION
from trioserve.contracts.page import ENDED_SECONDS, REQUESTS_SHOWN_MAX, PageSnapshot, RequestShown, ServerShown
from trioserve.metrics.metric import HistogramWindow
from trioserve.metrics.registry import Metrics
from trioserve.proxy.fleet import EndpointSpec, Fleet

__all__ = ["RouterFeed"]

GAUGES_SECONDS = 1.0  # The metrics that are computed on demand are updated at most this often.
HISTORY_SERIES = ("requests_per_second", "queue_wait_p50", "queue_wait_p95", "queue", "running")
SHARES = (0.5, 0.95)


class RouterFeed:
    """Source of the router's live page. All methods run in the thread of the router's Trio program.

    Args:
        fleet: Endpoints of the router.
        metrics: Metrics of the router.
        process: Name of this process of the router. None: the router has only one.
        models: Models that are loaded on demand. None: there are none.

    Attributes:
        leaving: Set when the router accepts no new requests.
    """

    def __init__(
        self,
        fleet: Fleet,
        metrics: Metrics,
        *,
        process: str | None = None,
        models: ModelRuns[EndpointSpec] | None = None,
    ) -> None:
        self._models = models
        self.leaving = trio.Event()
        self._process = process
        self._fleet = fleet
        self._dispatch = fleet.dispatch
        self._dispatch.on_drain = self.leaving.set
        self._metrics = metrics
        self._started_at: float | None = None
        self._watchers = Watchers(self._forget)
        # The dict has the requests of the last snapshot.
        self._seen: dict[str, tuple[AdmissionScope, RequestShown]] = {}
        self._ended: dict[str, tuple[str | None, RequestShown]] = {}
        # For each endpoint, its health and the time of the last change. The time is None if the change was not seen.
        self._health: dict[str, tuple[str, float | None]] = {}
        self._gauges_at = 0.0
        self._history: History | None = None

    def watching(self) -> AbstractContextManager[None]:
        """Scope of a reader. State for snapshots is kept while at least one reader is in this scope."""
        return self._watchers.watching()

    def _forget(self) -> None:
        for kept in (self._seen, self._ended, self._health):
            kept.clear()

    async def keep_history(self, interval_seconds: float) -> None:
        """Add points to the history until cancelled.

        Args:
            interval_seconds: Time between two points.
        """
        self._history = History(interval_seconds, HISTORY_SERIES)
        wait = HistogramWindow(self._metrics.queue_wait_seconds)
        admissions = self._dispatch.stats().admissions_total
        at = trio.current_time()
        self._started_at = at
        while True:
            at += interval_seconds
            await trio.sleep_until(at)
            stats = self._dispatch.stats()
            before, admissions = admissions, stats.admissions_total
            values = [(admissions - before) / interval_seconds, *wait.take(SHARES), stats.waiting, self._in_flight()]
            self._history.note(dict(zip(HISTORY_SERIES, values, strict=True)), trio.current_time())

    def snapshot(self, owner: str | None, *, sees_counts: bool = True) -> PageSnapshot:
        """Make a snapshot of the router, in the same format as LiveFeed makes for an engine.

        Args:
            owner: Caller whose requests are included. None: requests of all callers.
            sees_counts: Whether statistics, history, endpoints and queues are included.
        """
        now = trio.current_time()
        requests, request_count = self._requests(owner, now)
        stats = self._dispatch.stats()
        return PageSnapshot(
            now=round(now, 3),
            server=ServerShown(
                kind="router",
                model=", ".join(self._fleet.models()),
                version=VERSION,
                is_draining=self._dispatch.is_draining,
                sees="all" if owner is None else "own",
                started_at=self._started_at,
                process=self._process,
            ),
            requests=requests,
            request_count=request_count,
            stats=self._stats(now) if sees_counts else {},
            history=self._history.shown() if self._history is not None and sees_counts else None,
            endpoints=self._endpoints(now) if sees_counts else None,
            queues={
                "waiting": stats.waiting,
                "waiting_prompt_tokens": stats.waiting_prompt_tokens,
                "continuing": stats.continuing,
                "moving": stats.moving,
            }
            if sees_counts
            else None,
            models=self._shown_models(now) if sees_counts and self._models is not None else None,
        )

    def _shown_models(self, now: float) -> dict[str, dict[str, object]]:
        assert self._models is not None
        return {
            name: {
                "state": status.state,
                "reason": status.reason,
                "progress": status.progress,
                "since_at": round(now - status.state_seconds, 1),
                "bytes": status.bytes,
                "waiting": status.waiting,
                "leases": status.leases,
                "pinned": status.is_pinned,
                "failure": status.failure,
                "unloads_at": None if status.unloads_in_seconds is None else round(now + status.unloads_in_seconds, 1),
            }
            for name, status in self._models.statuses().items()
        }

    def _stats(self, now: float) -> dict[str, float]:
        stats, metrics = self._dispatch.stats(), self._metrics
        if now - self._gauges_at >= GAUGES_SECONDS:
            self._gauges_at = now
            metrics.refresh()
        return {
            "running": self._in_flight(),
            "waiting": stats.waiting,
            "leases": sum(stats.leases.values()),
            "admissions_total": stats.admissions_total,
            "retries_total": stats.retries_total,
            "rejections_total": sum(stats.rejections_total.values()),
            "continued_total": stats.continuations_total,
            "moved_total": stats.moves_total,
            "connections": metrics.total("connections_open"),
            "websockets": metrics.total("websockets_open"),
        }

    def _in_flight(self) -> int:
        return sum(state.in_flight for state in self._dispatch.endpoints)

    def _endpoints(self, now: float) -> dict[str, dict[str, object]]:
        loads = {state.id: state.load for state in self._dispatch.endpoints}
        shown: dict[str, dict[str, object]] = {}
        for described in self._fleet.described():
            id = EndpointId(str(described.pop("id")))
            del described["object"]
            health = str(described["health"])
            known = self._health.get(id)
            if known is None or known[0] != health:
                self._health[id] = health, None if known is None else round(now, 3)
            load = loads.get(id)
            shown[id] = {
                **described,
                "health_since_at": self._health[id][1],
                "load": load and {"running": load.running, "waiting": load.waiting, "kv_usage": load.kv_usage},
            }
        for gone in self._health.keys() - shown.keys():
            del self._health[gone]
        return shown

    def _requests(self, owner: str | None, now: float) -> tuple[dict[str, RequestShown], int]:
        seen: dict[str, tuple[AdmissionScope, RequestShown]] = {}
        for admission in self._dispatch.live_admissions():
            if admission.id is not None:
                key = admission.id if admission.id not in seen else f"{admission.id}~{admission.index}"
                seen[key] = admission, _shown(admission)
        for key in self._seen.keys() - seen.keys():
            admission, shown = self._seen[key]
            if admission.end_reason is not None:
                outcome = "cancelled"
            else:  # The router does not know whether the client received the whole response.
                outcome = "finished" if admission.refusal is None else "error"
            ended = msgspec.structs.replace(shown, state="finished", outcome=outcome, ended_at=round(now, 4))
            self._ended[key] = admission.owner, ended
        self._seen = seen
        over = [key for key, (_, shown) in self._ended.items() if now - (shown.ended_at or now) >= ENDED_SECONDS]
        for key in [*over, *list(self._ended)[:-REQUESTS_SHOWN_MAX]]:
            self._ended.pop(key, None)
        live = {key: shown for key, (admission, shown) in seen.items() if owner in (None, admission.owner)}
        ended_own = {key: shown for key, (whose, shown) in self._ended.items() if owner in (None, whose)}
        rows = [*(row for row in ended_own.items() if row[0] not in live), *live.items()]
        return dict(rows[-REQUESTS_SHOWN_MAX:]), len(live)


def _shown(admission: AdmissionScope) -> RequestShown:
    if admission.has_token:
        phase = Phase.DECODE
    else:
        phase = Phase.QUEUED if admission.is_queued else Phase.PREFILL
    return RequestShown(
        id=admission.id or "",
        state="queued" if admission.is_queued else "running",
        phase=phase.value,
        entered_at=round(admission.entered_at, 4),
        running_at=None if admission.is_queued else round(admission.leased_at, 4),
        prompt_tokens=admission.prompt_tokens,
        tenant=tenant_name(admission.owner, admission.tenant),
        priority=admission.priority,
        choices=admission.sequence_count,
        endpoint=None if admission.is_queued else admission.endpoint,
    )
