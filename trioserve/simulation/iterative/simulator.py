"""One history against one IterativeCore: every event is applied, and after every event all contracts are checked.

The invariants (iterative_invariants.py) read the core's own books. The fake executor knows what lies in every slot; the
books what was asked and told, and who may be computed before whom. Here the rest is checked: what an abort and an
update answer, and that nothing is left at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.events import AbortOutcome, AbortResult, FinishReason, IterativePhase, RequestFinished
from trioserve.contracts.ids import RequestId
from trioserve.contracts.iterative import (
    IterativeEvent,
    IterativePlan,
    IterativeRequest,
    IterativeResult,
    OutputReady,
    StepDone,
)
from trioserve.core.iterative.engine import IterativeCore
from trioserve.core.iterative.settings import IterativeSettings
from trioserve.simulation.iterative.books import ExpectedIteration, StepRules
from trioserve.simulation.iterative.history import (
    Abort,
    Arrive,
    Begin,
    Fail,
    Forward,
    IterativeSimulationEvent,
    IterativeWorld,
    Update,
)
from trioserve.simulation.verdict import Trace
from trioserve.testing.fake_iterative_executor import FakeIterativeExecutor, latent_after
from trioserve.testing.iterative_invariants import check_iterative_core, check_iterative_idle

__all__ = ["IterativeSimulation"]

STEPS_TO_END_MAX = 5_000  # far more than any history needs; who is not done then is in a circle
NOW = 0.0  # nothing in this core depends on time


class IterativeSimulation:
    """live: what is expected of whoever has not ended, in order of arrival. plan: the one in flight. is_computed: its
    forward pass has ended, with a result unless it was abandoned. counts: of what came to pass."""

    def __init__(self, world: IterativeWorld, *, trace: Trace | None = None) -> None:
        self.world = world
        self.core = IterativeCore(
            IterativeSettings(slot_count=world.slots, kept_slot_count=world.kept, step_work_max=world.work)
        )
        self.executor = FakeIterativeExecutor(world.slots + world.kept)
        self.entries: dict[str, ExpectedIteration] = {}
        self.live: dict[str, ExpectedIteration] = {}
        self.plan: IterativePlan | None = None
        self.is_computed = False
        self.counts: dict[str, int] = {}
        self._result: IterativeResult | None = None
        self._failing: dict[str, str] = {}
        self._rules = StepRules(world)
        self._trace = trace

    def apply(self, event: IterativeSimulationEvent) -> None:
        """Let one event happen. Raises whatever the core raises, and AssertionError when a contract is broken."""
        _HANDLERS[type(event)](self, event)
        self._check()
        self._count("events")

    def run_to_end(self) -> None:
        """Let everybody finish; then nothing may be left."""
        for _ in range(STEPS_TO_END_MAX):
            if self.plan is None and not self.live:
                break
            for event in (Begin(), Forward(), Update()):
                self.apply(event)
        assert not self.live, f"no end is in sight for {', '.join(self.live)}"
        check_iterative_idle(self.core)
        stats = self.core.stats()
        counted = (stats.steps_total, stats.denoised_total, stats.preemptions_total)
        expected = tuple(self.counts.get(what, 0) for what in ("steps", "denoising steps", "preempted"))
        assert counted == expected, f"steps, denoising steps, preemptions: {counted} are counted, {expected} came"

    # --- what happens ---

    def _arrive(self, event: Arrive) -> None:
        if event.id in self.entries:
            return  # the engine's own ids are unique
        request = IterativeRequest(
            id=RequestId(event.id),
            step_count=event.steps,
            seed=event.seed,
            priority=event.priority,
            is_guided=event.guided,
            encode_work=event.encode,
            denoise_work=event.denoise,
            decode_work=event.decode,
            partial_every=event.partial_every,
        )
        can_run = event.can_run(self.world)
        try:
            self.core.add(request)
        except InvalidRequest:
            assert not can_run, f"{event.id} could run, and was refused"
            self._count("refused: invalid")
            return
        assert can_run, f"{event.id} can never run, and was taken"
        self._count("requests")
        self.entries[event.id] = self.live[event.id] = ExpectedIteration(request, len(self.entries))

    def _abort(self, event: Abort) -> None:
        ids = [RequestId(name) for name in event.ids]
        results = self.core.abort(ids, event.reason, now=NOW)
        assert list(results) == list(dict.fromkeys(ids)), f"an abort of {ids} answers for {list(results)}"
        for name, result in results.items():
            entry = self.entries.get(name)
            self._count(f"aborts: {_moment(entry)}")
            if entry is None:
                expected = AbortResult(AbortOutcome.UNKNOWN)
            elif entry.finished is not None:
                expected = AbortResult(AbortOutcome.ALREADY_FINISHED)
            elif entry.is_computed:
                entry.aborted_for = entry.aborted_for or event.reason
                expected = AbortResult(AbortOutcome.ABORTED)
            else:
                expected = AbortResult(AbortOutcome.ABORTED, self._ended(entry, event.reason))
            assert result == expected, f"{name}: the abort says {result}, expected is {expected}"

    def _begin(self, _event: Begin) -> None:
        if self.plan is not None:
            return
        plan = self.core.schedule(NOW)
        if plan is None:
            assert not self.live, f"{', '.join(self.live)} live, and nothing is computed"
            return
        self._say(_plan_line(plan))
        assert plan.step_index == self.counts.get("steps", 0), f"step {plan.step_index} comes again, or too early"
        self._count("steps")
        self._count(f"steps to {plan.phase.value}")
        self._count("preempted", len(plan.preempted))
        steps = {work.step for work in plan.works}
        self._count("steps at different timesteps", len(steps) > 1)
        self._count("latents that came back", len(plan.moves) - len(plan.preempted))
        self._rules.begin(plan, self.live)
        self.plan, self.is_computed = plan, False

    def _fail(self, event: Fail) -> None:
        if self.plan is None or self.is_computed:
            return
        for work in self.plan.works:
            if work.request.id in event.ids:
                self._failing[work.request.id] = f"{work.request.id} is broken"

    def _forward(self, _event: Forward) -> None:
        if self.plan is None or self.is_computed:
            return
        self.executor.errors.update({RequestId(name): message for name, message in self._failing.items()})
        self._result = self.executor.execute(self.plan, self.core.abandonment(self.plan))
        self.is_computed = True

    def _update(self, _event: Update) -> None:
        if self.plan is None or not self.is_computed:
            return
        plan, result, self.plan, self._result = self.plan, self._result, None, None
        expected = self._expected_events(plan, is_dropped=result is None)
        if result is None:
            self._count("steps abandoned")
            events = self.core.drop_plan(plan, NOW)
        else:
            events = self.core.update_from_output(plan, result, NOW)
        for event in events:
            self._say(f"  {event}")
        assert events == expected, f"told is {events}, expected is {expected}"
        self._failing.clear()

    def _expected_events(self, plan: IterativePlan, *, is_dropped: bool) -> list[IterativeEvent]:
        """First the ends of those that were aborted meanwhile."""
        entries = [self.live[work.request.id] for work in plan.works]
        events: list[IterativeEvent] = []
        staying = []
        for entry in entries:
            entry.is_computed = False
            if entry.aborted_for is not None:
                events.append(self._ended(entry, entry.aborted_for))
            else:
                staying.append(entry)
        assert not (is_dropped and staying), "a step was given up, and somebody waits for it"
        for entry in staying:
            request = entry.request
            if request.id in self._failing:
                events.append(self._ended(entry, FinishReason.ERROR, self._failing[request.id]))
            elif entry.due is IterativePhase.ENCODE:
                entry.is_encoded = True
            elif entry.due is IterativePhase.DENOISE:
                wants_partial = entry.wants_partial
                entry.steps_done += 1
                self._count("denoising steps")
                self._count("partial results", wants_partial)
                partial = latent_after(request, entry.steps_done) if wants_partial else None
                events.append(StepDone(request.id, entry.steps_done, partial))
            else:
                events.append(OutputReady(request.id, latent_after(request, request.step_count)))
                events.append(self._ended(entry, FinishReason.STOP))
        return events

    def _ended(self, entry: ExpectedIteration, reason: FinishReason, message: str | None = None) -> RequestFinished:
        name = entry.request.id
        entry.finished = RequestFinished(request_id=name, reason=reason, phase=entry.phase, message=message)
        del self.live[name]
        self._rules.leave(name)
        self._count(f"ended: {reason.value}")
        return entry.finished

    # --- what has to hold ---

    def _check(self) -> None:
        core = self.core
        check_iterative_core(core)
        names = [live.request.id for live in core.live_requests()]
        assert names == list(self.live), f"{names} live, and {list(self.live)} have not been told to have ended"
        places = [entry.place for entry in self.live.values()]
        stats = core.stats()
        counted = (stats.running_count, stats.waiting_count, stats.slots_used, stats.kept_used)
        expected = (
            places.count("slot"),
            len(places) - places.count("slot"),
            places.count("slot"),
            places.count("kept"),
        )
        assert counted == expected, f"run, wait, slots, kept: {counted} are counted, {expected} were told"
        if self.plan is not None:
            is_abandoned = all(self.entries[work.request.id].aborted_for for work in self.plan.works)
            assert core.is_abandoned(self.plan) == is_abandoned, "whether the step is waited for"

    def _count(self, what: str, count: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + count

    def _say(self, line: str) -> None:
        if self._trace is not None:
            self._trace(line)


def _moment(entry: ExpectedIteration | None) -> str:
    """When an abort comes, seen from its request."""
    if entry is None:
        return "unknown id"
    if entry.finished is not None:
        return "too late"
    if entry.aborted_for is not None:
        return "repeated"
    if entry.place == "kept":
        return "preempted"
    return f"{'in a step' if entry.is_computed else 'between steps'}, {entry.phase.value}"


def _plan_line(plan: IterativePlan) -> str:
    """Who lost its slot (-a), what is moved where, and who computes which step in which slot."""
    lost = [f"-{name}" for name in plan.preempted]
    moves = [f"{move.source}>{move.target}" for move in plan.moves]
    works = [f"{work.request.id}[{work.step}]@{work.slot}" for work in plan.works]
    return f"  step {plan.step_index} to {plan.phase.value}: {' '.join(lost + moves + works)}"


_HANDLERS: dict[type, Callable[[IterativeSimulation, Any], None]] = {
    Arrive: IterativeSimulation._arrive,
    Abort: IterativeSimulation._abort,
    Begin: IterativeSimulation._begin,
    Fail: IterativeSimulation._fail,
    Forward: IterativeSimulation._forward,
    Update: IterativeSimulation._update,
}
