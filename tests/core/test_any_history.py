"""Random histories of arrivals, aborts, failures and steps, in pools that are too small.

The histories run with and without a connector that reports late, twice, never, or for unknown requests. The invariants
hold after every event. Every response equals the response of the same request alone. When all requests have ended, no
block is in use.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from trioserve.contracts.events import AbortOutcome, EngineEvent, FinishReason, PromptLogprobs, TokensReady
from trioserve.contracts.ids import NO_BLOCK, BlockHash, RequestId, hash_block
from trioserve.contracts.kv_transfer import HoldKind, KVConnector, TransferEvent, TransferFault
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.step import StepPlan
from trioserve.core.engine import EngineCore
from trioserve.core.request_state import RequestStatus
from trioserve.core.settings import CoreSettings
from trioserve.simulation.core.expected import ResidencyBook
from trioserve.simulation.reference_engine import ReferenceEngine, ReferenceResponse
from trioserve.testing.fake_executor import FakeExecutor, FakeModel
from trioserve.testing.invariants import check_core, check_idle
from trioserve.testing.scripted_connector import FakeConnector, FakeLoad

pytestmark = pytest.mark.slow

VOCAB_SIZE = 4  # The vocabulary is small, so that by chance prompts share prefixes and responses repeat prompts.
CALLS = [name for name in vars(KVConnector) if not name.startswith("_")]
HoldKey = tuple[str, HoldKind]
HOLD_SECONDS_MAX, REMOTE_KV_SECONDS_MAX = 8.0, 4.0
STEPS_MAX = (
    5_000  # No history needs nearly so many steps. A request that has not ended after this many steps will never end.
)

tokens = st.integers(0, VOCAB_SIZE - 1)


def poor_hash(parent: BlockHash, token_ids) -> BlockHash:
    """Return a hash that ignores most of the prefix, so that different prefixes often collide."""
    return BlockHash(bytes([parent[-1] % 2, token_ids[-1] % 2]))


class ExpectedSequence:
    """The expected events of one request, and the events that the core has reported."""

    def __init__(self, request: EngineRequest, response: ReferenceResponse) -> None:
        self.request = request
        self.response = response
        self.token_ids: list[int] = []
        self.logprob_count = 0
        self.prompt_logprobs: list[object] = []
        self.reason: FinishReason | None = None
        self.aborted_for: FinishReason | None = None
        self.fails = False

    def take(self, event: EngineEvent) -> None:
        assert self.reason is None, f"{event} after the end"
        if isinstance(event, TokensReady):
            assert self.aborted_for is None, "a token after the abort"
            self.token_ids += event.token_ids
            assert (event.logprobs is None) == (self.response.logprobs is None)
            for logprob in event.logprobs or ():
                assert logprob == self.response.logprobs[self.logprob_count]
                self.logprob_count += 1
        elif isinstance(event, PromptLogprobs):
            assert self.aborted_for is None, "prompt logprobs after the abort"
            assert not self.token_ids, "prompt logprobs after the first token"
            self.prompt_logprobs += event.logprobs
        else:
            self._end(event.reason, event.stop_token_id)
        assert tuple(self.token_ids) == self.response.token_ids[: len(self.token_ids)]
        expected = self.response.prompt_logprobs or ()
        assert tuple(self.prompt_logprobs) == expected[: len(self.prompt_logprobs)]

    def _end(self, reason: FinishReason, stop_token_id: int | None) -> None:
        self.reason = reason
        if self.aborted_for is not None:
            assert reason is self.aborted_for, "the reason is that of the first abort"
        elif self.fails:
            assert reason is FinishReason.ERROR
        else:
            assert (reason, stop_token_id) == (self.response.reason, self.response.stop_token_id)
            assert tuple(self.token_ids) == self.response.token_ids
            assert tuple(self.prompt_logprobs) == (self.response.prompt_logprobs or ())


class CoreHistory(RuleBasedStateMachine):
    """A core with random requests. Records the events that the core must return."""

    plan: StepPlan | None = None
    now = 0.0

    @initialize(
        block_size=st.integers(1, 4),
        block_count=st.integers(3, 10),
        seats=st.integers(1, 5),
        more_step_tokens=st.integers(0, 8),
        caching=st.sampled_from([True, True, True, False]),
        hash_function=st.sampled_from([hash_block, poor_hash]),
        stop_period=st.integers(1, 6),
        policy=st.sampled_from(["recompute", "recompute", "fail"]),
        draft_tokens_max=st.sampled_from([0, 0, 2, 6]),
        overtakes_max=st.sampled_from([0, 1, 2, 64]),
        window_tokens=st.sampled_from([None, None, 2, 3, 5]),
    )
    def begin(
        self,
        block_size,
        block_count,
        seats,
        more_step_tokens,
        caching,
        hash_function,
        stop_period,
        policy,
        draft_tokens_max,
        overtakes_max,
        window_tokens,
    ):
        model = FakeModel(vocab_size=VOCAB_SIZE, stop_token_id=0, stop_period=stop_period)
        self.executor = FakeExecutor(
            block_count=block_count, block_size=block_size, model=model, window_tokens=window_tokens
        )
        self.reference = ReferenceEngine(model)
        self.entries: dict[str, ExpectedSequence] = {}
        self.connector = self.make_connector()
        self.core = EngineCore(
            CoreSettings(
                block_count=block_count,
                block_size=block_size,
                context_tokens_max=block_count * block_size,
                max_num_seqs=seats,
                step_tokens_max=seats + more_step_tokens,
                enable_prefix_caching=caching,
                hold_seconds_max=HOLD_SECONDS_MAX,
                remote_kv_seconds_max=REMOTE_KV_SECONDS_MAX,
                load_failure_policy=policy,
                draft_tokens_max=draft_tokens_max,
                overtakes_max=overtakes_max,
                window_tokens=window_tokens,
            ),
            hash_block=hash_function,
            connector=self.connector,
        )
        self.residency = ResidencyBook(self.core.cache)

    def make_connector(self) -> FakeConnector | None:
        return None

    def alive(self) -> list[str]:
        return [name for name, entry in self.entries.items() if entry.reason is None]

    @rule(
        data=st.data(),
        own=st.lists(tokens, max_size=6),
        priority=st.sampled_from([0, 0, 0, -1, 1]),
        salt=st.sampled_from([None, None, None, None, None, "", "s"]),
        stops=st.sampled_from([frozenset(), frozenset(), frozenset({0}), frozenset({1, 2})]),
        min_tokens=st.sampled_from([0, 0, 2]),
        logprobs=st.sampled_from([None, None, 1]),
        prompt_logprobs=st.sampled_from([None, None, None, 1]),
        temperature=st.sampled_from([0.0, 1.0]),
        seed=st.integers(0, 1),
    )
    def arrive(self, data, own, priority, salt, stops, min_tokens, logprobs, prompt_logprobs, temperature, seed):
        prompt = own or [0]
        if self.entries and data.draw(st.sampled_from([True, True, False]), label="shares a prefix"):
            # The prompt is an earlier prompt with a part of its response, like the next turn of a chat.
            earlier = self.entries[data.draw(st.sampled_from(sorted(self.entries)), label="with")]
            whole = [*earlier.request.prompt_token_ids, *earlier.response.token_ids]
            prompt = whole[: data.draw(st.integers(1, len(whole)), label="of it")] + own
        room = self.core.settings.context_tokens_max - 1
        prompt = prompt[:room]
        request = EngineRequest(
            id=RequestId(f"r{len(self.entries)}"),
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(
                temperature=temperature, min_tokens=min_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs
            ),
            output_tokens_max=data.draw(st.integers(1, min(24, room + 1 - len(prompt))), label="output_tokens_max"),
            stop_token_ids=stops,
            seed=seed,
            priority=priority,
            cache_salt=salt,
        )
        self.note_arrival(data, request)
        self.core.add(request)
        self.entries[request.id] = ExpectedSequence(request, self.reference.response(request))

    def note_arrival(self, data, request: EngineRequest) -> None:
        """Record more facts about a new request. Subclasses override this method."""

    @precondition(lambda self: self.plan is None)
    @rule()
    def schedule(self):
        before = self.core.stats()
        self.plan = self.core.schedule(self.now)
        if self.plan is None:
            is_waiting = self.core.next_deadline() is not None
            assert is_waiting or not self.alive(), "requests live, but nothing is computed or awaited"
            assert self.core.schedule(self.now) is None, "a second call finds work that the first one missed"
            return
        assert 1 <= self.plan.token_count <= self.core.settings.step_tokens_max
        assert len(set(self.plan.preempted)) == len(self.plan.preempted)
        assert self.core.stats().preemptions_total == before.preemptions_total + len(self.plan.preempted)
        assert self.core.stats().running_count == (
            before.running_count + len(self.plan.admitted) - len(self.plan.preempted)
        )
        self.check_order(self.plan)

    def check_order(self, plan: StepPlan) -> None:
        lives = {live.request.id: live for live in self.core.live_requests()}
        running = [live.order for live in lives.values() if live.status is RequestStatus.RUNNING]
        admitted = [lives[name].order for name in plan.admitted]
        if self.connector is not None:
            # Requests with loaded KV start first.
            # If the connector holds so many blocks that every running request is preempted, waiting requests may start
            # in the same step.
            started = [lives[name] for name in plan.admitted]
            assert admitted == sorted(admitted) or any(live.loaded_token_count for live in started)
            assert not (admitted and plan.preempted) or len(admitted) == len(running)
            return
        assert admitted == sorted(admitted)
        for name in plan.preempted:
            assert lives[name].order > max(running), "a request was preempted for a later one"
        if admitted and not self.core.settings.enable_prefix_caching:
            for live in lives.values():
                if live.status is not RequestStatus.RUNNING and live.order < admitted[-1]:
                    assert live.status is RequestStatus.WAITING, "a started request was overtaken"
                    needed = self.core.settings.blocks_for(len(live.tokens))
                    assert needed > self.core.pool.available_count, "a request that fits was overtaken"
                    assert live.overtaken_count <= self.core.settings.overtakes_max

    @precondition(lambda self: self.plan is None)
    @rule(count=st.integers(2, 6))
    def some_steps(self, count):
        for _ in range(count):
            self.schedule()
            if self.plan is None:
                break
            check_core(self.core)
            self.finish_step()
            check_core(self.core)

    @precondition(lambda self: self.plan is not None)
    @rule(data=st.data(), has_failures=st.sampled_from([False, False, False, True]))
    def update(self, data, has_failures):
        names = sorted(chunk.request.id for chunk in self.plan.chunks)
        if has_failures:
            for name in data.draw(st.sets(st.sampled_from(names), min_size=1), label="fail"):
                self.executor.errors[name] = "broken"
                self.entries[name].fails = True
        self.finish_step()

    def finish_step(self):
        plan, self.plan = self.plan, None
        events = self.core.update_from_output(plan, self.executor.execute(plan), self.now)
        ended = [event.request_id for event in events if not isinstance(event, TokensReady | PromptLogprobs)]
        assert len(set(ended)) == len(ended)
        for event in events:
            self.entries[event.request_id].take(event)
        for chunk in plan.chunks:
            entry = self.entries[chunk.request.id]
            assert entry.reason is not None or (entry.aborted_for is None and not entry.fails)

    @precondition(lambda self: self.entries)
    @rule(
        data=st.data(),
        unknown=st.sampled_from([(), ("nobody",)]),
        reason=st.sampled_from([FinishReason.ABORT, FinishReason.DEADLINE, FinishReason.STOP]),
    )
    def abort(self, data, unknown, reason):
        names = data.draw(st.sets(st.sampled_from(sorted(self.entries)), max_size=2), label="abort")
        in_flight = {chunk.request.id for chunk in self.plan.chunks} if self.plan else set()
        results = self.core.abort([*unknown, *sorted(names)], reason, now=self.now)
        assert set(results) == names | set(unknown)
        for name in unknown:
            assert results[name].outcome is AbortOutcome.UNKNOWN
        for name in names:
            entry, result = self.entries[name], results[name]
            if entry.reason is not None:
                assert (result.outcome, result.finished) == (AbortOutcome.ALREADY_FINISHED, None)
                continue
            assert result.outcome is AbortOutcome.ABORTED
            entry.aborted_for = entry.aborted_for or reason
            assert (result.finished is None) == (name in in_flight), "only requests in a step may have to wait"
            if result.finished is not None:
                entry.take(result.finished)

    @invariant()
    def everything_holds(self):
        if hasattr(self, "core"):
            check_core(self.core)
            self.residency.check()
            assert {live.request.id for live in self.core.live_requests()} == set(self.alive())

    def teardown(self):
        if not hasattr(self, "core"):
            return
        for _ in range(STEPS_MAX):
            if self.plan is not None:
                self.finish_step()
                check_core(self.core)
            self.schedule()
            if self.plan is None and not self.advance_wait():
                break
        assert not self.alive(), "the history does not end"
        check_idle(self.core)

    def advance_wait(self) -> bool:
        """If no step can be planned, let time pass or send a report. Return False if no report and no deadline is
        pending.
        """
        assert self.core.next_deadline() is None
        return False


class ConnectedHistory(CoreHistory):
    """A history with a connector. Holds and loads end in any order. The connector reports for any of them, or never."""

    def make_connector(self) -> FakeConnector | None:
        self.matches: dict[str, int] = {}
        self.wants_to_hold: dict[str, bool] = {}
        self.pending_since: dict[HoldKey | str, float] = {}  # Holds are stored by key, and pending loads by name.
        # For each ended hold: True if a report ended it, False if its deadline did.
        self.by_report: dict[HoldKey, bool] = {}
        return FakeConnector(
            self.executor,
            matched_count=lambda request, computed_count: self.matches[request.id],
            holds=lambda request, reason: self.wants_to_hold[request.id],
        )

    def note_arrival(self, data, request: EngineRequest) -> None:
        self.matches[request.id] = data.draw(st.sampled_from([0, 1, 2, 5, 100, -1]), label="match")
        self.wants_to_hold[request.id] = data.draw(st.sampled_from([False, False, True]), label="wants to hold")

    @rule(calls=st.sampled_from([set(), set(), *({call} for call in CALLS)]))
    def break_calls(self, calls):
        self.connector.raises = calls

    @precondition(lambda self: self.entries)
    @rule(
        data=st.data(),
        is_stray=st.sampled_from([False, False, False, True]),
        token_count=st.sampled_from([None, None, None, 0, 1, 2, 99, -1]),
        fails=st.sampled_from([False, False, True]),
    )
    def report(self, data, is_stray, token_count, fails):
        out = self.pending()
        if is_stray or not out:
            out = [(name, kind) for kind in HoldKind for name in [*sorted(self.entries), "nobody"]]
        self.report_end(data.draw(st.sampled_from(out), label="report"), token_count, fails=fails)

    def pending(self) -> list[HoldKey]:
        """Return the holds and loads whose end the connector may report."""
        return [
            *((name, HoldKind.SEND) for name in sorted(self.connector.sends)),
            *((name, HoldKind.LOAD) for name in sorted(self.connector.loads)),
        ]

    def report_end(self, key: HoldKey, token_count: int | None, *, fails: bool) -> None:
        """Report the end of a hold or load, whether it is pending or not."""
        self.note_pending()
        name, kind = key
        load = self.connector.loads.get(name)
        event: TransferEvent
        expected: list[TransferFault] = []
        if kind is HoldKind.SEND:
            event = self.connector.released(RequestId(name))
        elif fails:
            event = self.connector.load_failed(RequestId(name))
            expected = [TransferFault.LOAD_FAILED]
        else:
            event = self.connector.loaded(RequestId(name), token_count)
            if load is not None and not 0 <= event.token_count <= load.token_count:
                expected = [TransferFault.BAD_COUNT]
            elif load is not None and event.token_count > 0 and self.lacks_a_block(load, event.token_count):
                expected = [TransferFault.LOAD_FAILED]
        if key in self.pending_since:
            expected = []  # Any report ends the hold.
        elif kind is HoldKind.SEND or name not in self.pending_since:
            expected = [self.stray_fault(key)]
        if expected != [TransferFault.UNKNOWN]:
            self.by_report[key] = True
        before = self.faults()
        self.take_unserved(self.core.on_transfer(event, self.now), {name})
        assert self.faults() - before == Counter(expected)

    def lacks_a_block(self, load: FakeLoad, token_count: int) -> bool:
        """Return True if the window of a partly loaded prompt begins in a block that was never allocated."""
        window = self.core.settings.window_tokens
        first = 0 if window is None else max(0, load.start + token_count - window + 1)
        return NO_BLOCK in load.block_table[first // self.core.settings.block_size :]

    @rule(seconds=st.sampled_from([0.5, 3.0, 9.0]))
    def pass_time(self, seconds):
        self.note_pending()
        self.now += seconds
        late = {key for key, since in self.pending_since.items() if since + self.seconds_allowed(key) <= self.now}
        late_loads = {key for key in late if isinstance(key, str)}
        late_holds = late - late_loads
        expired_before, before = len(self.connector.expired), self.faults()
        self.take_unserved(self.core.expire(self.now), late_loads)
        assert sorted(map(str, self.connector.expired[expired_before:])) == sorted(map(str, late_holds))
        assert all(self.connector.loads[name].is_abandoned for name in late_loads)
        expected = {TransferFault.LOAD_EXPIRED: len(late_loads), TransferFault.HOLD_EXPIRED: len(late_holds)}
        assert self.faults() - before == +Counter(expected)
        self.by_report.update(dict.fromkeys(late_holds, False))
        self.note_pending()
        deadline = self.core.next_deadline()
        assert deadline is None or deadline > self.now, "a hold or load is overdue"

    def advance_wait(self) -> bool:
        deadline = self.core.next_deadline()
        if deadline is None:
            return False
        key, others = self.pending()[0], self.pending()[1:]
        way = int(key[0].removeprefix("r")) % 5
        if way == 4 and not others:
            self.pass_time(deadline - self.now)
        else:
            key = key if way != 4 else others[0]
            self.report_end(key, 1 if way == 3 else None, fails=way == 2)
        return True

    def seconds_allowed(self, key: HoldKey | str) -> float:
        return REMOTE_KV_SECONDS_MAX if isinstance(key, str) else HOLD_SECONDS_MAX

    def stray_fault(self, key: HoldKey) -> TransferFault:
        if key not in self.by_report:
            return TransferFault.UNKNOWN
        return TransferFault.DOUBLE if self.by_report[key] else TransferFault.LATE

    def faults(self) -> Counter[TransferFault]:
        """Return the counts of the faults that reports have caused."""
        totals = Counter(self.core.stats().transfer_faults_total)
        assert totals.pop(TransferFault.RAISED) == self.connector.raised_count
        return totals

    def take_unserved(self, events: list[EngineEvent], names: set[str]) -> None:
        for event in events:
            assert self.core.settings.load_failure_policy == "fail"
            assert event.request_id in names
            self.entries[event.request_id].fails = True
            self.entries[event.request_id].take(event)

    @invariant()
    def note_pending(self):
        """Check that the core and the connector agree on pending holds, loads and ends. Record when each of them
        began.
        """
        if not hasattr(self, "core"):
            return
        self.connector.check()
        ended = {name: entry.reason for name, entry in self.entries.items() if entry.reason is not None}
        assert self.connector.finished == ended
        waited_for = {name for name, load in self.connector.loads.items() if not load.is_abandoned}
        held = {(name, HoldKind.LOAD) for name in self.connector.loads if name not in waited_for}
        held |= {(name, HoldKind.SEND) for name in self.connector.sends}
        assert {(hold.request_id, hold.kind) for hold in self.core.transfers.holds} == held
        assert self.core.stats().remote_kv_count == len(waited_for)
        # If start_load raised an error, the load is overdue from the start.
        load_since = self.now - (REMOTE_KV_SECONDS_MAX if "start_load" in self.connector.raises else 0.0)
        since = dict.fromkeys(held, self.now) | dict.fromkeys(waited_for, load_since)
        self.pending_since = {key: self.pending_since.get(key, begun) for key, begun in since.items()}


MANY = settings(
    max_examples=200,
    stateful_step_count=50,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow],
)
TestAnyHistory = CoreHistory.TestCase
TestAnyHistory.settings = MANY
TestAnyConnectedHistory = ConnectedHistory.TestCase
TestAnyConnectedHistory.settings = MANY
