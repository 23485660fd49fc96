"""Runs one history against one IterativeCore, and checks all contracts after every event.

The invariants (iterative_invariants.py) read the core's own state. The fake executor knows the content of every slot.
The books (books.py) know the requests and the reported events, and which request may be computed before another. The
simulator checks the rest: the answers of an abort and an update, and that nothing is left at the end.
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
from trioserve.core.settings import IterativeSettings
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

STEPS_TO_END_MAX = 5_000  # far more than any history needs: a request that has not ended by then never ends
NOW = 0.0  # nothing in this core depends on time


class IterativeSimulation:
    """One run of the core.

    Args:
        world: the limits of the core.
        trace: called with a line for each effect.

    Attributes:
        live: expected state of each request that has not ended, in order of arrival.
        plan: the step in flight.
        is_computed: whether the forward pass of `plan` has ended. It has a result unless the step was abandoned.
        counts: counts of what happened, by name.
    """

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
        """Apply one event.

        Args:
            event: the event.

        Raises:
            AssertionError: a contract is broken. Exceptions of the core pass through too.
        """
        _HANDLERS[type(event)](self, event)
        self._check()
        self._count("events")

    def run_to_end(self) -> None:
        """Let every request finish, then check that nothing is left."""
        for _ in range(STEPS_TO_END_MAX):
            if self.plan is None and not self.live:
                break
            for event in (Begin(), Forward(), Update()):
                self.apply(event)
        assert not self.live, f"{', '.join(self.live)} did not end"
        check_iterative_idle(self.core)
        stats = self.core.stats()
        counted = (stats.steps_total, stats.denoised_total, stats.preemptions_total)
        expected = tuple(self.counts.get(what, 0) for what in ("steps", "denoising steps", "preempted"))
        assert counted == expected, (
            f"steps, denoising steps, preemptions: the core counted {counted}, the simulation {expected}"
        )

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
        assert can_run, f"{event.id} can never run, and was accepted"
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
            assert not self.live, f"{', '.join(self.live)} are live, and nothing is computed"
            return
        self._note(_plan_line(plan))
        assert plan.step_index == self.counts.get("steps", 0), f"step {plan.step_index} is repeated, or comes too early"
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
            self._note(f"  {event}")
        assert events == expected, f"reported events are {events}, expected are {expected}"
        self._failing.clear()

    def _expected_events(self, plan: IterativePlan, *, is_dropped: bool) -> list[IterativeEvent]:
        """Events that the end of a step must report. Requests aborted meanwhile end first."""
        entries = [self.live[work.request.id] for work in plan.works]
        events: list[IterativeEvent] = []
        staying = []
        for entry in entries:
            entry.is_computed = False
            if entry.aborted_for is not None:
                events.append(self._ended(entry, entry.aborted_for))
            else:
                staying.append(entry)
        assert not (is_dropped and staying), "a step was abandoned, and a request waits for it"
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
        assert names == list(self.live), f"{names} are live, and no end was reported for {list(self.live)}"
        places = [entry.place for entry in self.live.values()]
        stats = core.stats()
        counted = (stats.running_count, stats.waiting_count, stats.slots_used, stats.kept_used)
        expected = (
            places.count("slot"),
            len(places) - places.count("slot"),
            places.count("slot"),
            places.count("kept"),
        )
        assert counted == expected, f"run, wait, slots, kept: the core counted {counted}, the simulation {expected}"
        if self.plan is not None:
            is_abandoned = all(self.entries[work.request.id].aborted_for for work in self.plan.works)
            assert core.is_abandoned(self.plan) == is_abandoned, f"is_abandoned should be {is_abandoned}"

    def _count(self, what: str, count: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + count

    def _note(self, line: str) -> None:
        if self._trace is not None:
            self._trace(line)


def _moment(entry: ExpectedIteration | None) -> str:
    """Name the moment of an abort, as seen from its request."""
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
    """Format a plan: requests that lost their slot (-a), moves, and which request computes which step in which slot."""
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
