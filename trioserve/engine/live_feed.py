"""The current state of an engine for the status page: blocks, requests, and the blocks that cancelled requests have
freed.

The state is collected when a client requests it. Without clients, only the history is recorded, with one point every 5
seconds. Ended and cancelled requests are recorded only while a client is inside `watching`.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

import msgspec
import trio

from trioserve.admission.feeds import History, Watchers, tenant_name
from trioserve.contracts.events import FinishReason, Phase
from trioserve.contracts.extras import VERSION
from trioserve.contracts.ids import BlockIndex, RequestId
from trioserve.contracts.kv_transfer import RunningConnector
from trioserve.contracts.page import (
    ENDED_SECONDS,
    REQUESTS_SHOWN_MAX,
    Freed,
    PageSnapshot,
    RequestShown,
    ServerShown,
    StepsShown,
)
from trioserve.core.engine import EngineCore
from trioserve.core.request_state import LiveRequest, RequestStatus
from trioserve.engine.lifecycle.request_scope import RequestsById
from trioserve.engine.lifecycle.step_times import StepTimes
from trioserve.engine.model_description import ModelDescription
from trioserve.engine.open_request import OpenRequest
from trioserve.metrics.metric import HistogramWindow
from trioserve.metrics.registry import Metrics

__all__ = ["EngineStatus", "LiveFeed"]

STEPS_SECONDS = 1.0  # Step durations are summed over this period.
GAUGES_SECONDS = 1.0  # Number of seconds between two refreshes of the gauges.
HISTORY_SERIES = (
    "tokens_per_second",
    "ttft_p50",
    "ttft_p95",
    "itl_p50",
    "itl_p95",
    "queue",
    "running",
    "kv_usage",
)
SHARES = (0.5, 0.95)
OUTCOMES = {
    FinishReason.STOP: "finished",
    FinishReason.LENGTH: "finished",
    FinishReason.ABORT: "cancelled",
    FinishReason.DEADLINE: "deadline",
    FinishReason.ERROR: "error",
    FinishReason.HANDED_OVER: "handed_over",
}


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """State that the engine itself adds to a snapshot.

    Attributes:
        is_draining: True if the engine accepts no new requests.
        restarts: number of times that the engine was reopened.
        preparing_count: number of sequences that are not in the core yet.
        held_count: number of ended sequences whose blocks are held for another engine.
        role: role in KV exchange. None: the engine does not exchange KV.
    """

    is_draining: bool
    restarts: int
    preparing_count: int
    held_count: int
    role: str | None


class _Cancel:
    """A cancelled request that still has some of its blocks.

    Args:
        key: key of the request on the status page.
        blocks: all blocks that its sequences had when it was cancelled.
        sequence_count: number of its sequences that still have blocks.
    """

    __slots__ = ("blocks", "key", "seconds", "sequence_count", "steps")

    def __init__(self, key: str, blocks: frozenset[BlockIndex], sequence_count: int) -> None:
        self.key = key
        self.blocks = blocks
        self.sequence_count = sequence_count
        self.steps = 0
        self.seconds = 0.0


class _Watched:
    """State of a request that is kept from one snapshot to the next.

    Attributes:
        key: key of the request on the status page.
        blocks: blocks at the last snapshot.
        runs: the same blocks as runs of consecutive blocks.
        shown: row of this request in the last snapshot.
        mark: values from which the row was created. The row is created again if they change. None: create it each time.
    """

    __slots__ = ("blocks", "entered_at", "key", "mark", "runs", "shown", "tenant")

    def __init__(self, key: str, request: OpenRequest) -> None:
        self.key = key
        self.entered_at = round(request.entered_at, 4)
        self.tenant = tenant_name(request.owner, request.tenant)
        self.blocks: list[BlockIndex] = []
        self.runs: tuple[tuple[int, int], ...] = ()
        self.mark: tuple[object, ...] | None = None
        self.shown: RequestShown | None = None


class LiveFeed:
    """Creates snapshots of an engine for the status page. Call every method in the thread of the engine's Trio program.

    Args:
        model: description of the model.
        requests: requests whose scope is entered.
        kept_holds: requests whose scope has ended, but whose blocks are held.
        metrics: registry of the engine's metrics.
        step_times: times of the engine's steps.
        status: returns the engine's state that is not in the core or the requests, see EngineStatus.
        started_at: time at which the engine started, in seconds of Trio's clock.

    Attributes:
        leaving: set when the engine does not accept new requests any more.
    """

    def __init__(
        self,
        model: ModelDescription,
        requests: RequestsById[OpenRequest],
        kept_holds: RequestsById[OpenRequest],
        metrics: Metrics,
        step_times: StepTimes,
        status: Callable[[], EngineStatus],
        started_at: float,
    ) -> None:
        self.leaving = trio.Event()
        self._model = model
        self._requests = requests
        self._kept_holds = kept_holds
        self._metrics = metrics
        self._step_times = step_times
        self._status = status
        self._started_at = started_at
        self._watchers = Watchers(self._forget_all)
        self._watched: dict[OpenRequest, _Watched] = {}
        self._keys: set[str] = set()  # in use
        # For each ended request: its owner, and its row on the status page.
        self._ended: OrderedDict[str, tuple[str | None, RequestShown]] = OrderedDict()
        self._outcomes: dict[str, str] = {}
        self._cancels: dict[RequestId, _Cancel] = {}
        self._freed: dict[str, Freed] = {}
        self._step_marks: deque[tuple[float, tuple[float, ...]]] = deque()
        self._gauges_at = 0.0
        self._history: History | None = None

    def install(self, core: EngineCore, connector: RunningConnector | None) -> None:
        """Use new parts. Forget the cancelled requests of the old parts.

        Args:
            core: the new core.
            connector: the new connector. None: no connector.
        """
        self._core = core
        self._connector = connector
        self._cancels.clear()

    def watching(self) -> AbstractContextManager[None]:
        """Count a client while the context is entered. Ended requests are recorded as long as there are clients."""
        return self._watchers.watching()

    # --- called by the engine ---

    def note_cancelled(self, request: OpenRequest, ids: Sequence[RequestId], reason: FinishReason) -> None:
        """Note that a request was ended from outside.

        Args:
            ids: the request's sequences in the core, which still have their blocks.
            reason: the finish reason.
        """
        if not self._watchers or request.is_finished:
            return
        key = self._of(request).key
        self._outcomes.setdefault(key, OUTCOMES[reason])
        blocks: frozenset[BlockIndex] = frozenset().union(*map(self._core.blocks_of, ids))
        if not ids:
            self._freed.setdefault(key, Freed(0, 0, 0.0))
            return
        cancel = _Cancel(key, blocks, len(ids))
        for sequence_id in ids:
            self._cancels.setdefault(sequence_id, cancel)

    def note_freed(self, sequence_id: RequestId, steps: int, seconds: float) -> None:
        """Note that all blocks of a cancelled sequence are free.

        Args:
            steps: steps that ended between cancel and release.
            seconds: time between cancel and release.
        """
        cancel = self._cancels.pop(sequence_id, None)
        if cancel is None:
            return
        cancel.sequence_count -= 1
        cancel.steps, cancel.seconds = max(cancel.steps, steps), max(cancel.seconds, seconds)
        if cancel.sequence_count:
            return
        freed = Freed(self._core.idle_block_count(cancel.blocks), cancel.steps, round(cancel.seconds, 6))
        self._freed[cancel.key] = freed
        ended = self._ended.get(cancel.key)
        if ended is not None:
            owner, shown = ended
            self._ended[cancel.key] = owner, msgspec.structs.replace(shown, freed=freed)

    def note_left(self, request: OpenRequest) -> None:
        """Note that the scope of a request has ended, and none of its blocks are held."""
        if not self._watchers:
            return
        watched = self._of(request)
        shown = self._shown(request, watched, [], now=trio.current_time(), is_left=True)
        del self._watched[request]
        self._ended[watched.key] = request.owner, shown
        if len(self._ended) > REQUESTS_SHOWN_MAX:
            self._forget_ended()

    def leave(self) -> None:
        """Note that the engine accepts no new requests, or has broken."""
        self.leaving.set()

    # --- history ---

    async def keep_history(self, interval_seconds: float) -> None:
        """Record a point of the history at fixed intervals until cancelled.

        Args:
            interval_seconds: time between two points.
        """
        self._history = History(interval_seconds, HISTORY_SERIES)
        ttft = HistogramWindow(self._metrics.time_to_first_token_seconds)
        itl = HistogramWindow(self._metrics.inter_token_latency_seconds)
        tokens = self._metrics.total("generation_tokens_total")
        at = trio.current_time()
        while True:
            at += interval_seconds
            await trio.sleep_until(at)
            before, tokens = tokens, self._metrics.total("generation_tokens_total")
            stats = self._core.stats()
            values = [
                round((tokens - before) / interval_seconds, 3),
                *ttft.take(SHARES),
                *itl.take(SHARES),
                stats.waiting_count + self._status().preparing_count,
                stats.running_count,
                round(stats.kv_usage, 4),
            ]
            self._history.note(dict(zip(HISTORY_SERIES, values, strict=True)), trio.current_time())

    # --- snapshots ---

    def snapshot(self, owner: str | None, *, sees_counts: bool = True) -> PageSnapshot:
        """Create a snapshot. The caller must be inside `watching`.

        Args:
            owner: show only requests of this user. None: all requests.
            sees_counts: True to include counts over the requests of all users, and the state of each block.
        """
        now = trio.current_time()
        status = self._status()
        requests, request_count = self._shown_requests(owner, now)
        stats = self._stats(status, now)
        core = self._core
        return PageSnapshot(
            now=round(now, 3),
            server=ServerShown(
                kind="engine",
                model=self._model.name,
                version=VERSION,
                executor=self._model.executor,
                max_num_seqs=core.settings.max_num_seqs,
                max_model_len=core.settings.context_tokens_max,
                block_size=core.settings.block_size,
                block_count=core.settings.block_count,
                role=status.role,
                is_draining=status.is_draining,
                restarts=status.restarts,
                sees="all" if owner is None else "own",
                started_at=_moment(self._started_at),
            ),
            blocks=core.block_states() if sees_counts else None,
            requests=requests,
            request_count=request_count,
            stats=stats if sees_counts else {name: stats[name] for name in stats if name.startswith("blocks_")},
            steps=self._steps(now) if sees_counts else None,
            history=self._history.shown() if self._history is not None and sees_counts else None,
            transfers=self._transfers(status) if sees_counts else None,
        )

    def _shown_requests(self, owner: str | None, now: float) -> tuple[dict[str, RequestShown], int]:
        self._forget_ended(now)
        lives = {live.request.id: live for live in self._core.live_requests()}
        requests = [*self._kept_holds, *self._requests]
        if owner is not None:
            requests = [request for request in requests if request.owner == owner]
        shown = {}
        for request in requests[-REQUESTS_SHOWN_MAX:]:
            watched = self._of(request)
            if len(request.choices) == 1:  # This is the usual case.
                live = lives.get(request.choices[0].sequence_id)
                own = [] if live is None else [live]
                mark = None if live is not None and live.status is RequestStatus.RUNNING else self._mark(request, live)
            else:
                own = [lives[choice.sequence_id] for choice in request.choices if choice.sequence_id in lives]
                mark = None
            if mark is None or mark != watched.mark or watched.shown is None:
                watched.mark, watched.shown = mark, self._shown(request, watched, own, now=now)
            shown[watched.key] = watched.shown
        room = REQUESTS_SHOWN_MAX - len(shown)
        ended = [(key, row) for key, (whose, row) in self._ended.items() if owner in (None, whose)]
        shown.update(ended[-room:] if room else ())
        return shown, len(requests)

    def _mark(self, request: OpenRequest, live: LiveRequest | None) -> tuple[object, ...] | None:
        """Return values that change whenever the status row of a request with one choice changes.

        There may be hundreds of requests whose rows do not change. None means that the row must always be created
        again.
        """
        if request.is_finished:
            return None if request.is_held else (len(self._freed), request.ended_at)
        if live is None:
            return request.is_leased, len(request.prompt_token_ids)
        blocks = live.absent_block_count, len(live.blocks), len(live.reserved_blocks)
        return live, live.status, *blocks, len(live.tokens), request.has_run

    def _shown(
        self, request: OpenRequest, watched: _Watched, lives: list[LiveRequest], *, now: float, is_left: bool = False
    ) -> RequestShown:
        outcome, held_until = None, None
        is_over = request.is_finished or is_left
        blocks: Sequence[BlockIndex] = ()
        if is_over:
            state = "finished"
            outcome = self._outcomes.get(watched.key)
            if outcome is None:
                reason = request.end_reason
                outcome = "cancelled" if reason is None else OUTCOMES[reason]
            if request.is_held and not is_left:
                state = "held"
                blocks, held_until = self._held(request)
        elif not lives:
            state = "preparing" if request.is_leased else "queued"
        else:
            state = "running" if any(live.status is RequestStatus.RUNNING for live in lives) else "waiting"
        if lives:
            blocks = _blocks_of(lives)
        first_token_at = min(
            (choice.first_token_at for choice in request.choices if choice.first_token_at is not None), default=None
        )
        if first_token_at is not None:
            phase = Phase.DECODE
        else:
            phase = Phase.PREFILL if request.has_run else Phase.QUEUED
        cached = request.cached_token_count
        if lives and not cached:
            cached = min(lives[0].cached_token_count or 0, lives[0].prompt_count)
        return RequestShown(
            id=request.id,
            state=state,
            phase=phase.value,
            entered_at=watched.entered_at,
            running_at=_moment(request.running_at),
            first_token_at=_moment(first_token_at),
            ended_at=_moment(now if request.ended_at is None else request.ended_at) if is_over else None,
            outcome=outcome,
            prompt_tokens=request.prompt_token_count,
            completion_tokens=request.completion_token_count,
            cached_tokens=cached,
            deadline_at=None if is_over or not request.alarms else _next_deadline(request),
            tenant=watched.tenant,
            priority=request.priority,
            choices=request.choice_count,
            blocks=_runs(watched, blocks),
            held_until=held_until,
            freed=self._freed.get(watched.key) if self._freed else None,
        )

    def _held(self, request: OpenRequest) -> tuple[list[BlockIndex], float | None]:
        holds = [self._core.hold_of(choice.sequence_id) for choice in request.choices if choice.is_held]
        blocks = dict.fromkeys(block for hold in holds if hold is not None for block in hold.blocks)
        until = max((hold.deadline for hold in holds if hold is not None), default=None)
        return list(blocks), _moment(until)

    def _stats(self, status: EngineStatus, now: float) -> dict[str, float]:
        stats, metrics = self._core.stats(), self._metrics
        if now - self._gauges_at >= GAUGES_SECONDS:
            self._gauges_at = now
            metrics.refresh()
        return {
            "running": stats.running_count,
            "waiting": stats.waiting_count + status.preparing_count,
            "blocks_free": stats.blocks_free,
            "blocks_cached": stats.blocks_cached,
            "blocks_used": stats.blocks_used,
            "blocks_held": stats.blocks_held,
            "blocks_retired": self._core.settings.block_count - stats.blocks_total,
            "preemptions_total": stats.preemptions_total,
            "steps_total": stats.steps_total,
            "prefix_query_tokens_total": stats.prefix_query_tokens_total,
            "prefix_hit_tokens_total": stats.prefix_hit_tokens_total,
            "prompt_tokens_total": metrics.total("prompt_tokens_total"),
            "generation_tokens_total": metrics.total("generation_tokens_total"),
            "aborts_total": metrics.total("aborts_total"),
            "connections": metrics.total("connections_open"),
            "websockets": metrics.total("websockets_open"),
            "sessions": stats.sessions_active + stats.sessions_waiting,
            "retained_blocks": stats.blocks_retained,
        }

    def _steps(self, now: float) -> StepsShown:
        times, marks = self._step_times, self._step_marks
        totals = (
            times.count,
            times.schedule_seconds,
            times.forward_seconds,
            times.update_seconds,
            times.deliver_seconds,
        )
        marks.append((now, totals))
        while len(marks) > 2 and marks[1][0] <= now - STEPS_SECONDS:
            marks.popleft()
        count, *seconds = (new - old for new, old in zip(totals, marks[0][1], strict=True))
        schedule, forward, update, deliver = (round(value, 6) for value in seconds)
        return StepsShown(
            count=int(count),
            schedule_seconds=schedule,
            forward_seconds=forward,
            update_seconds=update,
            deliver_seconds=deliver,
        )

    def _transfers(self, status: EngineStatus) -> dict[str, object] | None:
        """Return counts of KV transfers. None if the engine has no connector."""
        if self._connector is None:
            return None
        stats = self._core.stats()
        return {
            "holds": status.held_count,
            "loads_waiting": stats.remote_kv_count,
            "holds_refused_total": stats.holds_refused_total,
            "loaded_tokens_total": stats.loaded_tokens_total,
            "faults": {fault.value: total for fault, total in stats.transfer_faults_total.items() if total},
            "counts": dict(self._connector.counts()),
        }

    # --- helpers ---

    def _of(self, request: OpenRequest) -> _Watched:
        watched = self._watched.get(request)
        if watched is None:
            key, number = request.id, 1
            while key in self._keys:  # Several requests may have the same id.
                number += 1
                key = f"{request.id}~{number}"
            self._keys.add(key)
            watched = self._watched[request] = _Watched(key, request)
        return watched

    def _forget_ended(self, now: float | None = None) -> None:
        """Forget requests that ended long ago. If `now` is None, forget the request that ended first."""
        while self._ended:
            key, (_, shown) = next(iter(self._ended.items()))
            if now is not None and shown.ended_at is not None and now - shown.ended_at < ENDED_SECONDS:
                return
            del self._ended[key]
            self._keys.discard(key)
            self._outcomes.pop(key, None)
            self._freed.pop(key, None)
            if now is None:
                return

    def _forget_all(self) -> None:
        for kept in (self._watched, self._keys, self._ended, self._outcomes, self._cancels, self._freed):
            kept.clear()
        self._step_marks.clear()


def _blocks_of(lives: list[LiveRequest]) -> Sequence[BlockIndex]:
    """Return the blocks of several sequences. A block that several sequences use is returned once."""
    if len(lives) == 1 and not lives[0].reserved_blocks and not lives[0].absent_block_count:
        return lives[0].blocks
    return list(dict.fromkeys(block for live in lives for block in live.own_blocks))


def _runs(watched: _Watched, blocks: Sequence[BlockIndex]) -> tuple[tuple[int, int], ...]:
    """Return (first block, count) for each run of consecutive block indexes in a block table.

    Usually the blocks are the same as in the last snapshot, or a few blocks were appended.
    """
    known = watched.blocks
    if len(blocks) == len(known) and blocks == known:
        return watched.runs
    count = len(known)
    if count and count < len(blocks) and blocks[:count] == known:
        watched.runs = (*watched.runs[:-1], *_joined(blocks[count:], watched.runs[-1:]))
    else:
        watched.runs = tuple(_joined(blocks))
    watched.blocks = list(blocks)
    return watched.runs


def _joined(blocks: Iterable[BlockIndex], runs: Sequence[tuple[int, int]] = ()) -> list[tuple[int, int]]:
    joined = list(runs)
    for block in blocks:
        if joined and joined[-1][0] + joined[-1][1] == block:
            joined[-1] = joined[-1][0], joined[-1][1] + 1
        else:
            joined.append((block, 1))
    return joined


def _next_deadline(request: OpenRequest) -> float | None:
    return _moment(min((alarm.at for alarm in request.alarms.values() if alarm.ring is not None), default=None))


def _moment(at: float | None) -> float | None:
    return None if at is None else round(at, 4)
