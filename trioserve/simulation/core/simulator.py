"""Runs one history with one core. After every event, all rules are checked.

The checks have independent sources. The invariants (invariants.py) read the core's own data. The fake executor records
the content of every KV slot. The expected sequences (expected.py) record requests, their reference responses and the
core's events. The step rules (step_rules.py) decide in which order requests may be computed. This file checks the
remaining rules: the results and effects of aborts, and that the core is empty at the end.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import msgspec

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.events import AbortOutcome, AbortResult, EngineEvent, FinishReason, RequestFinished
from trioserve.contracts.ids import BlockIndex, RequestId, hash_block
from trioserve.contracts.pooling import Pooling
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.step import StepPlan, StepResult
from trioserve.core.engine import EngineCore
from trioserve.core.prefix_cache import PrefixChain
from trioserve.core.request_state import LiveRequest
from trioserve.core.settings import CoreSettings, DraftSourceName
from trioserve.simulation.core.expected import ExpectedSequence, LateMasks, ResidencyBook, WatchedGuide
from trioserve.simulation.core.history import (
    Abort,
    Ahead,
    Arrive,
    Begin,
    Break,
    Drain,
    EndSession,
    Event,
    Fail,
    Forget,
    Forward,
    HintSession,
    Inquire,
    LimitBlocks,
    OpenSession,
    Report,
    Retract,
    Update,
    Wait,
    World,
    abort_moment,
    plan_line,
)
from trioserve.simulation.core.session_watch import SessionWatch
from trioserve.simulation.core.step_rules import check_begun_step, check_no_request_could_start, check_no_step_ahead
from trioserve.simulation.core.transfer_watch import TransferWatch
from trioserve.simulation.reference_engine import ReferenceEngine, ReferenceResponse, poor_hash
from trioserve.simulation.runs import EventSimulation, Trace
from trioserve.testing.fake_executor import FakeExecutor, FakeModel
from trioserve.testing.invariants import check_core, check_idle

__all__ = ["Simulation"]

STEPS_TO_END_MAX = 20_000  # No history needs this many steps. A core that does is in an endless loop.
CATCH_UP_TOKENS_MAX = 5  # tokens that a draft model computes in one step, so few that a prompt takes several steps
ALL_REQUESTS = ""  # key of the drain's deadline in the list of deadlines


class Flight(msgspec.Struct):
    """A step in flight.

    Attributes:
        plan: the step.
        tables: block tables of the step's chunks at the time of the plan.
        result: result of the forward pass. None: the forward pass has not ended, or was abandoned.
        is_computed: True if the forward pass has ended.
        failing: requests that fail in this step.
    """

    plan: StepPlan
    tables: list[list[int]]
    result: StepResult | None = None
    is_computed: bool = False
    failing: set[str] = msgspec.field(default_factory=set)


class Simulation(EventSimulation[World]):
    """Runs one history, one event at a time.

    Args:
        world: the engine and the model.
        trace: receives a line of text for each effect. None: no trace.

    Attributes:
        now: current time, in seconds.
        live: sequences that have not ended, in order of arrival.
        entries: all sequences.
        flights: the steps in flight, oldest first.
        transfers: checks the connector. None: there is no connector.
        is_draining: True after a drain began.
    """

    def __init__(self, world: World, *, trace: Trace | None = None) -> None:
        super().__init__(world, trace)
        self.now = 0.0
        model = FakeModel(vocab_size=world.vocab_size, stop_token_id=0, stop_period=world.stop_period)
        block_count = world.block_count if world.keeps_kv else 0
        self.executor = FakeExecutor(
            block_count=block_count,
            block_size=world.block_size,
            model=model,
            keeps_kv=world.keeps_kv,
            state_slot_count=world.states + world.snapshots,
            has_draft_model=world.drafts_by_model,
            window_tokens=world.window_tokens,
        )
        self.transfers = TransferWatch(world, self.executor) if world.has_connector else None
        self._masks = LateMasks(world.vocab_size)
        self.core = EngineCore(
            CoreSettings(
                block_count=block_count,
                block_size=world.block_size,
                keeps_kv=world.keeps_kv,
                state_slot_count=world.states,
                snapshot_slot_count=world.snapshots,
                context_tokens_max=world.context_tokens_max,
                max_num_seqs=world.max_num_seqs,
                step_tokens_max=world.step_tokens_max,
                enable_prefix_caching=world.enable_prefix_caching,
                overlap_steps=world.overlaps,
                steps_apart=world.apart,
                overtakes_max=world.overtakes_max,
                draft_tokens_max=world.draft_tokens,
                draft_step_tokens_max=world.draft_step_tokens,
                draft_source=_draft_source(world),
                draft_catch_up_tokens_max=CATCH_UP_TOKENS_MAX,
                window_tokens=world.window_tokens,
                hold_seconds_max=world.hold_seconds,
                remote_kv_seconds_max=world.load_seconds,
                load_failure_policy="fail" if world.fails_without_kv else "recompute",
                session_share_max=world.session_share,
                cold_turn_seconds=world.cold_turn_seconds,
                session_prefetch=world.prefetches,
            ),
            hash_block=poor_hash if world.has_poor_hash else hash_block,
            connector=None if self.transfers is None else self.transfers.connector,
            mask_maker=self._masks,
        )
        self._residency = ResidencyBook(self.core.cache)
        self._sessions = SessionWatch(world)
        self.entries: dict[str, ExpectedSequence] = {}
        self.live: dict[str, ExpectedSequence] = {}
        self.flights: list[Flight] = []
        self.is_draining = False
        self._reference = ReferenceEngine(model)
        self._deadlines: list[tuple[float, int, str]] = []

    def apply(self, event: Event) -> None:
        """Apply one event. Raise AssertionError if a rule is broken. Errors of the core pass through."""
        _HANDLERS[type(event)](self, event)
        if type(event) not in _CHECKED_ELSEWHERE:
            self._check()
        self._count("events")

    def run_to_end(self) -> None:
        """Run until every request has ended, then check that the core is empty."""
        for _ in range(STEPS_TO_END_MAX):
            if not self.flights and self.live:
                self.apply(Begin())
            if self.flights:
                self.apply(Ahead())
                self.apply(Forward())
                self.apply(Update())
                continue
            # Nothing can be computed, so all remaining requests and holds wait for a deadline.
            deadline = self.core.next_deadline()
            if deadline is None:
                break
            self.apply(Wait(seconds=max(0.0, deadline - self.now)))
        assert not self.live, f"these requests do not end: {', '.join(self.live)}"
        if self.transfers is not None:
            self.transfers.check_end(self.core, self.entries)
        self._count("blocks retained at the end", self._sessions.check_end(self.core, self.now))
        check_idle(self.core)
        self._masks.fill_until(None)
        stats = self.core.stats()
        looked_up = [entry for entry in self.entries.values() if entry.cached_count is not None and self._hits(entry)]
        assert stats.prefix_hit_tokens_total == sum(entry.cached_count or 0 for entry in looked_up), stats
        of_sessions = [entry.cached_count or 0 for entry in looked_up if entry.request.session is not None]
        assert stats.session_hit_tokens_total == sum(of_sessions), stats
        assert stats.session_hits_total == sum(count > 0 for count in of_sessions), stats
        self._count("prompt tokens found in spared blocks", stats.spared_tokens_total)
        assert stats.turns_deferred_total == self.counts.get("turns deferred", 0), stats
        for kind, total in stats.evictions_total.items():
            self._count(f"evicted blocks: {kind.value}", total)
        assert stats.prefix_query_tokens_total == sum(len(entry.request.known_token_ids) for entry in looked_up), stats
        assert stats.preemptions_total == self.counts.get("preempted", 0), stats
        assert stats.blocks_given_back_total == 0 or self.world.window_tokens is not None, stats
        self._count("blocks freed behind a window", stats.blocks_given_back_total)
        assert stats.steps_total == self.counts.get("steps", 0), stats
        counts = (stats.drafts_total, stats.draft_tokens_total, stats.accepted_tokens_total)
        entries = self.entries.values()
        expected = tuple(sum(entry.draft_counts[index] for entry in entries) for index in range(3))
        assert counts == expected, (
            f"drafts, draft tokens, accepted tokens: the core counts {counts}, expected are {expected}"
        )
        forced = sum(entry.forced_count for entry in entries)
        assert stats.forced_tokens_total == forced, (
            f"the core counts {stats.forced_tokens_total} forced tokens, expected are {forced}"
        )
        self._count("forced tokens", forced)
        self._count("drafts", counts[0])
        self._count("draft tokens", counts[1])
        self._count("draft tokens that were right", counts[2])

    # --- Events ---

    def _arrive(self, event: Arrive) -> None:
        names = event.sequence_ids
        if self.is_draining:
            self._count("refused: draining", len(names))
            return
        if any(name in self.entries for name in names):
            return  # The layers above an engine ensure that ids are unique, so the core never sees the same id twice.
        sampling = SamplingParams(
            temperature=event.temperature,
            min_tokens=event.min_tokens,
            logprobs=event.logprobs,
            prompt_logprobs=event.prompt_logprobs,
        )
        can_run = event.can_run(self.world)
        pooling = None
        if event.pooled is not None:
            pooling = Pooling(task="embed", method="last", normalize=False, is_whole=event.pooled == "whole")
        for index, name in enumerate(names):
            request = EngineRequest(
                id=RequestId(name),
                prompt_token_ids=event.prompt,
                sampling=sampling,
                output_tokens_max=event.output if pooling is None else 0,
                stop_token_ids=frozenset(event.stops),
                seed=event.seed + index,
                priority=event.priority,
                cache_salt=event.salt,
                pooling=pooling,
                guide=WatchedGuide(event.guide) if event.guide else None,
                session=event.session,
            )
            response = None
            if event.known and pooling is None:
                response = self._reference.response(request) if can_run else None
                request = _begun_elsewhere(request, response, event.known)
                self._count("requests that resume a response")
            try:
                self.core.add(request)
            except InvalidRequest:
                assert not can_run, f"{name} could run, but was refused"
                self._count("refused: invalid")
                continue
            assert can_run, f"{name} can never run, but was accepted"
            self._count("requests" if pooling is None else f"pooled requests: {event.pooled}")
            entry = ExpectedSequence(request, len(self.entries), response or self._reference.response(request))
            if self.transfers is not None:
                self.transfers.note_arrival(name, event)
            self.entries[name] = self.live[name] = entry
            if event.session is not None:
                self._sessions.note_arrival(name, event.session, event.priority, self.now)
                self._count("requests of sessions")
            if event.timeout is not None:
                heapq.heappush(self._deadlines, (self.now + event.timeout, len(self.entries), name))

    def _abort(self, event: Abort) -> None:
        self._abort_all(event.ids, event.reason)

    def _begin(self, _event: Begin) -> None:
        if self.flights:
            return
        self._inquire(Inquire())
        plan = self.core.schedule(self.now)
        if self._trace is not None:
            self._trace(plan_line(plan))
        if plan is None:
            is_awaited = self.core.next_deadline() is not None
            assert is_awaited or not self.live, f"{', '.join(self.live)} have not ended, but nothing is computed"
            self._check_sessions()
            check_no_request_could_start(self.core, self._may_load, self._may_defer, self._awaits_prefetch)
            self._count("steps with nothing to compute")
            for entry in self.live.values():
                if entry.is_running:  # A load took the request's blocks, so the core preempted the request.
                    entry.is_running = False
                    self._count("preempted")
            return
        self._take_plan(plan)

    def _ahead(self, _event: Ahead) -> None:
        if not self.world.overlaps or len(self.flights) != 1:
            return
        plan = self.core.schedule_ahead(self.now)
        if self._trace is not None:
            self._trace(plan_line(plan))
        if plan is None:
            self._count("steps not planned ahead")
            check_no_step_ahead(self.core, self.live)
            self._check_sessions()
            return
        self._count("steps planned apart" if self.world.apart else "steps planned ahead")
        self._take_plan(plan)

    def _take_plan(self, plan: StepPlan) -> None:
        self._count("steps")
        for name in plan.preempted:
            assert self.live[name].is_running, f"{name} was preempted, but does not run"
            self.live[name].is_running = False
            self._count("preempted")
        for name in plan.admitted:
            assert not self.live[name].is_running, f"{name} is admitted twice"
            self.live[name].is_running = True
        check_begun_step(
            self.core,
            plan,
            self.live,
            self.transfers,
            knows_hashes=not self.world.has_poor_hash,
            computed=[chunk for flight in self.flights for chunk in flight.plan.chunks],
        )
        for chunk in plan.chunks:
            self.live[chunk.request.id].record_chunk(chunk)
            self._count("snapshots written", max(0, len(chunk.states) - 1))
            reads = chunk.states[0].reads if chunk.states else None
            self._count("snapshots that requests start from", reads is not None and reads >= self.world.states)
            if chunk.draft_task is not None:
                self._count("draft tasks" if chunk.draft_task.end is None else "draft tasks that only catch up")
        self._check_sessions()
        self.flights.append(Flight(plan, [list(chunk.block_table) for chunk in plan.chunks]))

    def _fail(self, event: Fail) -> None:
        flight = self._next_to_compute()
        if flight is None:
            return
        for chunk in flight.plan.chunks:
            name = chunk.request.id
            if name in event.ids:
                self.executor.errors[name] = f"{name} is broken"
                flight.failing.add(name)
                self._count("failed")

    def _forward(self, _event: Forward) -> None:
        flight = self._next_to_compute()
        if flight is None:
            return
        plan = flight.plan
        entries = [self.entries[chunk.request.id] for chunk in plan.chunks]
        is_awaited = any(entry.aborted_for is None and entry.finished is None for entry in entries)
        assert self.core.flights.is_abandoned(plan) != is_awaited, (
            f"step {plan.step_index} is abandoned, or a request waits for it: {is_awaited}"
        )
        if is_awaited and plan.masks is not None:
            self._masks.fill_until(plan.masks)
        flight.result = self.executor.execute(plan, self.core.flights.abandonment(plan))
        flight.is_computed = True

    def _next_to_compute(self) -> Flight | None:
        return next((flight for flight in self.flights if not flight.is_computed), None)

    def _update(self, _event: Update) -> None:
        if not self.flights or not self.flights[0].is_computed:
            return
        flight = self.flights.pop(0)
        plan, result = flight.plan, flight.result
        for name in flight.failing & self.live.keys():
            self.live[name].message = f"{name} is broken"
        entries = [self.entries[chunk.request.id] for chunk in plan.chunks]
        counts_before = [entry.output_count for entry in entries]
        self._count("surplus tokens", sum(entry.has_surplus for entry in entries))
        if result is None:
            self._count("steps abandoned")
            self._take(self.core.drop_plan(plan, self.now))
        else:
            self._take(self.core.update_from_output(plan, result, self.now))
        for chunk, entry, count_before in zip(plan.chunks, entries, counts_before, strict=True):
            entry.record_update(chunk, count_before)
            entry.proposed = () if result is None else result.proposed.get(entry.request.id, ())

    def _wait(self, event: Wait) -> None:
        until = self.now + event.seconds
        while True:
            deadline = self._deadlines[0][0] if self._deadlines else math.inf
            core_deadline = self.core.next_deadline()
            if core_deadline is not None and core_deadline <= min(deadline, until):
                self.now = max(self.now, core_deadline)
                self._expire()
            elif deadline <= until:
                self.now = max(self.now, deadline)
                name = heapq.heappop(self._deadlines)[2]
                self._abort_all(list(self.live) if name == ALL_REQUESTS else [name], FinishReason.DEADLINE)
                self._check()
            else:
                self.now = until
                return

    def _expire(self) -> None:
        if self.transfers is not None:
            self.transfers.overdue(self.live, self.now)
        protected = self._sessions.protected_blocks(self.core, self.now)
        self._take(self.core.expire(self.now))
        deadline = self.core.next_deadline()
        assert deadline is None or deadline > self.now, f"the deadline {deadline} has passed, but expire() left it"
        self._check()
        self._check_prefetches(protected)
        if self.transfers is not None:
            self.transfers.check_expired(self.now)

    def _report(self, event: Report) -> None:
        if self.transfers is not None:
            self._count(f"reports: {event.what}{', when asked' if event.waits else ''}")
            self._check_prefetches()
            self._take(self.transfers.report(self.core, event, self.live, self.now))

    def _inquire(self, _event: Inquire) -> None:
        if self.transfers is not None:
            self._check_prefetches()
            self._take(self.transfers.ask(self.core, self.now))

    def _break(self, event: Break) -> None:
        if self.transfers is not None:
            self.transfers.record_break(event)

    def _drain(self, event: Drain) -> None:
        self.is_draining = True
        self._abort_all([name for name, entry in self.live.items() if entry.cached_count is None], FinishReason.ABORT)
        heapq.heappush(self._deadlines, (self.now + event.seconds, 0, ALL_REQUESTS))

    def _retract(self, _event: Retract) -> None:
        if self.flights:
            return
        ran = {name for name, entry in self.live.items() if entry.is_running}
        cached = {name: self._cached_block_count(entry) for name, entry in self.live.items()}
        preempted = self.core.preempt_all(self.now)
        assert len(preempted) == len(ran), f"{ran} ran, but {preempted} were preempted"
        assert set(preempted) == ran, f"{ran} ran, but {preempted} were preempted"
        assert self.core.stats().blocks_used == 0, f"no request runs, but {self.core.stats()}"
        for name, entry in self.live.items():
            entry.record_retraction()
            assert self._cached_block_count(entry) >= cached[name], (
                f"computed blocks of {name} were removed from the prefix cache"
            )
        self._count("retractions")
        self._count("preempted", len(preempted))

    def _forget(self, _event: Forget) -> None:
        used = self.core.stats().blocks_used
        self.core.forget_prefixes()
        self._sessions.note_forgotten()
        assert not self.core.cache.resident_hashes(), "the prefix cache still has blocks after forget_prefixes"
        stats = self.core.stats()
        assert (stats.blocks_used, stats.blocks_cached) == (used, 0), (
            f"{used} blocks were in use before, and now {stats}"
        )
        self._count("prefixes forgotten")

    def _limit_blocks(self, event: LimitBlocks) -> None:
        claimed = [block for block in range(self.world.block_count) if not self.core.pool.is_idle(BlockIndex(block))]
        self.core.limit_blocks(event.count)
        table = range(self.world.block_count)
        for block in table[event.count :]:
            if block not in claimed:  # Its memory may be released.
                self.executor.spoil(table, block * self.world.block_size, self.world.block_size)
        free_count = self.core.stats().blocks_free + self.core.stats().blocks_cached
        usable = [block for block in table[: event.count] if block not in claimed]
        assert free_count == len(usable), f"{free_count} blocks are available, but {usable} have no claims"
        self._count("limits")

    def _open_session(self, event: OpenSession) -> None:
        self._sessions.open(self.core, event, self.now)
        self._sessions.check(self.core, self.now)
        self._count("sessions opened")

    def _end_session(self, event: EndSession) -> None:
        self._sessions.end(self.core, event, self.now)
        self._check_prefetches()
        self._sessions.check(self.core, self.now)
        self._count("sessions ended")

    def _hint_session(self, event: HintSession) -> None:
        protected = self._sessions.protected_blocks(self.core, self.now)
        self._sessions.hint(self.core, event, self.now)
        self._check_prefetches(protected)
        self._sessions.check(self.core, self.now)
        self._count("hints")

    # --- Helpers ---

    def _check_prefetches(self, protected: Collection[int] = ()) -> None:
        if self.transfers is not None:
            self._count("prefetches", self._sessions.check_prefetches(self.transfers, protected))

    def _awaits_prefetch(self, live: LiveRequest) -> bool:
        return self.transfers is not None and self.transfers.awaits(live.request, live.tokens)

    def _check_sessions(self) -> None:
        self._sessions.check(self.core, self.now)
        self._count("turns deferred", self._sessions.check_deferred(self.core, self.live, self.now))

    def _may_load(self, live: LiveRequest) -> bool:
        return self.transfers is not None and self.transfers.could_load(live.request.id)

    def _may_defer(self, live: LiveRequest) -> bool:
        return self._sessions.may_defer(self.core, self.live[live.request.id])

    def _hits(self, entry: ExpectedSequence) -> bool:
        return self.world.enable_prefix_caching and not entry.needs_every_row

    def _take(self, events: Iterable[EngineEvent]) -> None:
        for event in events:
            if self._trace is not None:
                self._trace(f"  {event}")
            self.entries[event.request_id].take(event)
            if type(event) is RequestFinished:
                self._note_end(event)

    def _abort_all(self, names: Sequence[str], reason: FinishReason) -> None:
        ids = [RequestId(name) for name in names]
        cached = {name: self._cached_block_count(entry) for name in ids if (entry := self.live.get(name)) is not None}
        ended_before = {name for name in ids if name in self.entries and name not in self.live}
        results = self.core.abort(ids, reason, now=self.now)
        assert list(results) == list(dict.fromkeys(ids)), f"an abort of {ids} returns results for {list(results)}"
        for name, result in results.items():
            if self._trace is not None:
                self._trace(f"  {name}: {result}")
            entry = self.entries.get(name)
            self._count(f"aborts: {abort_moment(entry)}")
            if entry is None:
                assert result == AbortResult(AbortOutcome.UNKNOWN), (
                    f"{name} never arrived, but its abort returns {result}"
                )
                continue
            entry.record_abort(result, reason)
            if result.finished is not None:
                self._note_end(result.finished)
        if self.transfers is not None:
            self.transfers.note_abort(ended_before)
        for name, before in cached.items():
            after = self._cached_block_count(self.entries[name])
            assert after >= before, f"the abort of {name} removed {before - after} blocks from the prefix cache"

    def _cached_block_count(self, entry: ExpectedSequence) -> int:
        """Return the number of blocks that the prefix cache has for the sequence's known tokens."""
        if entry.cached_count is None or not self._hits(entry):
            return 0
        return len(self.core.cache.match(PrefixChain(entry.request.cache_salt), entry.known))

    def _note_end(self, event: RequestFinished) -> None:
        del self.live[event.request_id]
        self._sessions.note_end(event.request_id, self.now)
        self._count(f"ended: {event.reason.value}")
        if self.transfers is not None:
            self.transfers.check_params(event)

    def _check(self) -> None:
        self._count("checks of every contract")
        core = self.core
        check_core(core)
        self._residency.check()
        names = {live.request.id for live in core.live_requests()}
        assert names == self.live.keys(), (
            f"{sorted(names ^ self.live.keys())}: the core's requests differ from those of its events"
        )
        running_count = sum([entry.is_running for entry in self.live.values()])
        assert len(core.scheduler.running) == running_count, (
            f"{running_count} requests were reported to run, but {core.stats()}"
        )
        if self.transfers is not None:
            self.transfers.check(core, self.now)
        for flight in self.flights:
            for chunk, table in zip(flight.plan.chunks, flight.tables, strict=True):
                name = chunk.request.id
                assert chunk.block_table == table, f"{name}: its blocks changed while the step runs"
                seen_from = 0 if self.world.window_tokens is None else chunk.start - self.world.window_tokens + 1
                for block in table[max(0, seen_from) // self.world.block_size :]:
                    assert core.pool.user_count(BlockIndex(block)) > 0, (
                        f"block {block} of {name} was freed while the step runs"
                    )


def _draft_source(world: World) -> DraftSourceName:
    if world.drafts_by_head:
        return "head"
    return "model" if world.drafts_by_model else "text"


def _begun_elsewhere(request: EngineRequest, response: ReferenceResponse | None, count: int) -> EngineRequest:
    """Return the request as one that resumes a response after `count` known tokens.

    The last token of the response is never among the known tokens. `response` is None if the request can never run.
    """
    known = (0,) * count if response is None else response.token_ids[: min(count, len(response.token_ids) - 1)]
    if response is not None and request.guide is not None:
        for token_id in known:
            request.guide.accept(token_id)
    return msgspec.structs.replace(request, resumed_output=known)


_HANDLERS: dict[type[Event], Callable[[Simulation, Any], None]] = {
    Arrive: Simulation._arrive,
    Abort: Simulation._abort,
    Begin: Simulation._begin,
    Ahead: Simulation._ahead,
    Fail: Simulation._fail,
    Forward: Simulation._forward,
    Update: Simulation._update,
    Wait: Simulation._wait,
    Drain: Simulation._drain,
    Report: Simulation._report,
    Inquire: Simulation._inquire,
    Break: Simulation._break,
    Retract: Simulation._retract,
    Forget: Simulation._forget,
    LimitBlocks: Simulation._limit_blocks,
    OpenSession: Simulation._open_session,
    EndSession: Simulation._end_session,
    HintSession: Simulation._hint_session,
}

# The core does not see Forward, Fail and Break. The handler of Wait checks the rules after each deadline that passes.
_CHECKED_ELSEWHERE = frozenset((Forward, Fail, Break, Wait))
