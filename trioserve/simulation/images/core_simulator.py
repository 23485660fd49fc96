"""Runs one history against one IterativeCore, and checks all contracts after every event.

The invariants (iterative_invariants.py) read the core's own state. The fake executor records the content of every slot.
StepRules records the requests and the reported events, and decides in which order requests may be computed. The
simulator checks the remaining rules: the results of aborts and updates, and that the core is empty at the end.

Rules of a step:

- A step computes one phase, stays within its work limit, and leaves out no request that would fit. The cost of partial
  results counts as work too, except for a request that is alone in the step.
- A phase with work waits for at most two steps of other phases.
- A request with a slot is left out of at most as many steps of its phase as there are other slots.
- The queue is served by priority, then by arrival.
- A request loses its slot only to a request of a better priority. The last request in order loses its slot first, and
  only if a slot for its latent is free.

The generator reads which requests are live and which step is in flight, but no internal state of the core.

A history of a core of iterative requests, as data: its limits, then its events.

    iterative slots=2 kept=1 work=4
    arrive id="a" steps=3 guided=true
    begin
    abort ids=["a"]
    forward
    update

A history stays valid when events are removed from it. For example, an update without a step does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from random import Random
from typing import Any, Literal

import msgspec

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.events import AbortOutcome, AbortResult, FinishReason, IterativePhase, RequestFinished
from trioserve.contracts.ids import RequestId
from trioserve.contracts.image_generation import (
    IterativeEvent,
    IterativePlan,
    IterativeRequest,
    IterativeResult,
    OutputReady,
    StepDone,
)
from trioserve.contracts.request import PRIORITY_MAX, PRIORITY_MIN
from trioserve.core.iterative_core import IterativeCore
from trioserve.core.settings import IterativeSettings
from trioserve.simulation.runs import EventSimulation, Trace
from trioserve.testing.fake_image_engine import FakeIterativeExecutor, latent_after
from trioserve.testing.invariants import check_iterative_core, check_iterative_idle

__all__ = ["ExpectedIteration", "IterativeGenerator", "IterativeSimulation", "StepRules"]


class IterativeWorld(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="iterative"):
    """Limits of the core.

    Attributes:
        slots: number of slots for running requests.
        kept: number of slots for latents that are kept for preempted requests.
        work: maximum work of one step.
    """

    slots: int = 1
    kept: int = 0
    work: int = 2


class Arrive(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="arrive"):
    """A request arrives. A second request with the same id is ignored.

    Attributes:
        encode: work of encoding.
        denoise: work of one denoising step.
        decode: work of decoding.
    """

    id: str
    steps: int = 1
    seed: int = 0
    priority: int = 0
    guided: bool = False
    encode: int = 1
    denoise: int = 1
    decode: int = 1
    partial_every: int | None = None

    def can_run(self, world: IterativeWorld) -> bool:
        rows = 2 if self.guided else 1
        return (
            self.steps >= 1
            and PRIORITY_MIN <= self.priority <= PRIORITY_MAX
            and max(self.encode, rows * self.denoise, self.decode) <= world.work
            and (self.partial_every is None or self.partial_every >= 1)
        )


class Abort(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="abort"):
    ids: tuple[str, ...]
    reason: FinishReason = FinishReason.ABORT


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """Plan a step, unless a step is in flight."""


class Fail(msgspec.Struct, frozen=True, kw_only=True, tag="fail"):
    """Requests fail in the step in flight. Nothing happens if the step does not contain them or is already computed.

    Attributes:
        ids: the requests.
    """

    ids: tuple[str, ...]


class Forward(msgspec.Struct, frozen=True, tag="forward"):
    """Compute the forward pass of the step in flight."""


class Update(msgspec.Struct, frozen=True, tag="update"):
    """Let the core process the result of the step in flight."""


IterativeSimulationEvent = Arrive | Abort | Begin | Fail | Forward | Update


class IterativeHistory(msgspec.Struct, frozen=True):
    world: IterativeWorld
    events: tuple[IterativeSimulationEvent, ...]


ENCODE, DENOISE, DECODE = IterativePhase.ENCODE, IterativePhase.DENOISE, IterativePhase.DECODE
OTHER_PHASES = 2


class ExpectedIteration:
    """Expected state of one request.

    Attributes:
        place: "line" if the request is in the queue, "slot" if it has a slot, "kept" if it was preempted and its latent
            is kept.
        left_out: number of consecutive steps of its phase that did not compute the request while it had a slot.
        has_had_turn: True if the request was computed since it got its current slot.
        stood_still: number of consecutive steps that did not compute the request while it was the first of all requests
            and had a slot or could have had one.
        preempted_count: how often the request lost its slot.
        is_computed: True if the step in flight computes the request.
    """

    def __init__(self, request: IterativeRequest, arrival_index: int) -> None:
        self.request = request
        self.order = (request.priority, arrival_index)
        self.place: Literal["line", "slot", "kept"] = "line"
        self.is_encoded = False
        self.steps_done = 0
        self.left_out = 0
        self.has_had_turn = False
        self.stood_still = 0
        self.preempted_count = 0
        self.is_computed = False
        self.aborted_for: FinishReason | None = None
        self.finished: RequestFinished | None = None

    @property
    def due(self) -> IterativePhase:
        if not self.is_encoded:
            return ENCODE
        return DENOISE if self.steps_done < self.request.step_count else DECODE

    @property
    def phase(self) -> IterativePhase:
        """Phase that the event for the request's end reports."""
        return IterativePhase.QUEUED if self.place == "line" else self.due

    @property
    def cost(self) -> int:
        rows = 2 if self.request.is_guided and self.due is DENOISE else 1
        return rows * {ENCODE: self.request.encode_work, DECODE: self.request.decode_work}.get(
            self.due, self.request.denoise_work
        )

    @property
    def whole_cost(self) -> int:
        """Cost of the request's next step, including the partial result after that step."""
        return self.cost + (self.request.decode_work if self.wants_partial else 0)

    @property
    def can_leave(self) -> bool:
        """True if the request may lose its slot to a request of a better priority."""
        return self.due is DENOISE and self.has_had_turn

    @property
    def wants_partial(self) -> bool:
        """True if the request's next step ends with a partial result."""
        done = self.steps_done + 1
        every = self.request.partial_every
        return self.due is DENOISE and every is not None and done % every == 0 and done != self.request.step_count


class StepRules:
    """Checks the rules of each step.

    Args:
        world: the limits of the core.
    """

    def __init__(self, world: IterativeWorld) -> None:
        self._world = world
        self._holders: dict[int, str] = {}  # request of each slot in use
        self._waited = dict.fromkeys(
            (ENCODE, DENOISE, DECODE), 0
        )  # number of steps for which each phase has waited with work

    def begin(self, plan: IterativePlan, live: Mapping[str, ExpectedIteration]) -> None:
        """Record a step that begins, and assert that it keeps every rule.

        Args:
            plan: the step that begins.
            live: state of every request that has not ended.
        """
        self._seat(plan, live)
        self._check_works(plan, live)
        self._check_line(plan, live.values())
        self._check_turns(plan, live.values())
        self._check_first(live.values())
        for work in plan.works:
            # The other checks need the value from before this step, because a plan assigns slots before it computes
            # requests.
            live[work.request.id].has_had_turn = True

    def leave(self, name: str) -> None:
        """Free the slot of a request that has ended.

        Args:
            name: the request's id.
        """
        self._holders = {slot: holder for slot, holder in self._holders.items() if holder != name}

    def _seat(self, plan: IterativePlan, live: Mapping[str, ExpectedIteration]) -> None:
        admitted = [live[name] for name in plan.admitted]
        preempted = [live[name] for name in plan.preempted]
        assert len(set(plan.admitted)) == len(admitted), "a request that is already admitted is admitted again"
        assert len(set(plan.preempted)) == len(preempted) <= len(admitted), (
            "a preemption freed a slot, but no request got it"
        )
        staying = [entry for entry in live.values() if entry.place == "slot" and entry not in preempted]
        for entry in preempted:
            name = entry.request.id
            assert entry.place == "slot", f"{name} is preempted, but has no slot"
            assert entry.due is DENOISE, f"{name} is preempted, but only its decoding is left"
            assert min(other.order[0] for other in admitted) < entry.order[0], (
                f"{name} is preempted by a request of equal priority"
            )
            assert entry.has_had_turn, f"{name} is preempted, but was not computed since it got its slot"
            entry.preempted_count += 1
            assert entry.preempted_count <= entry.request.step_count, f"{name} is preempted too often"
            for other in staying:
                assert not other.can_leave or other.order < entry.order, (
                    f"{name} is preempted, but is not the last in order"
                )
        moved = [self._move(source=move.source, target=move.target) for move in plan.moves]
        restored = [entry.request.id for entry in admitted if entry.place == "kept"]
        assert sorted(moved) == sorted([*plan.preempted, *restored]), f"{moved} are moved"
        for entry in preempted:
            entry.place = "kept"
            entry.left_out = 0
        for entry in admitted:
            assert entry.place != "slot", f"{entry.request.id} gets a slot, but has one already"
            entry.place = "slot"
            entry.left_out = 0
            entry.has_had_turn = False
        assert self._count("slot", live.values()) <= self._world.slots, "more requests run than there are slots"
        assert self._count("kept", live.values()) <= self._world.kept, (
            "more latents are kept than there are slots for kept latents"
        )

    def _move(self, *, source: int, target: int) -> str:
        slots = self._world.slots
        assert (source < slots) != (target < slots), (
            f"{source} to {target} is not a move between a slot and a kept slot"
        )
        assert target not in self._holders, f"{self._holders[target]} has slot {target}, and it is overwritten"
        name = self._holders.pop(source)  # A KeyError in this line means that the plan moves an empty slot.
        self._holders[target] = name
        return name

    def _check_works(self, plan: IterativePlan, live: Mapping[str, ExpectedIteration]) -> None:
        assert plan.works, "a step has no requests"
        computed = [live[work.request.id] for work in plan.works]
        assert len({id(entry) for entry in computed}) == len(computed), "a request is computed twice in one step"
        for work, entry in zip(plan.works, computed, strict=True):
            name = work.request.id
            assert entry.place == "slot", f"{name} is computed without a slot"
            assert entry.due is plan.phase, f"{name} is to {entry.due.value}, in a step to {plan.phase.value}"
            assert work.step == entry.steps_done * (entry.due is DENOISE), f"{name}: step {work.step}"
            assert work.wants_partial == entry.wants_partial, f"{name}: a partial result after {work.step + 1} steps"
            if entry.due is ENCODE:
                assert work.slot not in self._holders, f"{self._holders[work.slot]} has slot {work.slot}"
                assert 0 <= work.slot < self._world.slots, f"{name}: slot {work.slot}"
                self._holders[work.slot] = name
            assert self._holders[work.slot] == name, f"{name} is computed in a slot of {self._holders[work.slot]}"
        assert plan.work_count == sum(entry.cost for entry in computed), f"{plan.work_count} is not what it costs"
        assert plan.work_count <= self._world.work, f"a step costs {plan.work_count}"
        left = self._world.work - sum(entry.whole_cost for entry in computed)
        assert left >= 0 or len(computed) == 1, f"with its partial results a step costs {self._world.work - left}"
        for entry in live.values():
            if entry.place == "slot" and entry.due is plan.phase and entry not in computed:
                entry.left_out += 1
                assert entry.due is not ENCODE, f"{entry.request.id} has a slot, but is not encoded"
                assert entry.whole_cost > left, f"{entry.request.id} would fit into the step, but is left out"
                assert entry.left_out < self._world.slots, f"{entry.request.id} was left out {entry.left_out} times"
        for entry in computed:
            entry.is_computed = True
            entry.left_out = 0

    def _check_line(self, plan: IterativePlan, live: Iterable[ExpectedIteration]) -> None:
        line = [entry for entry in live if entry.place != "slot"]
        admitted = [entry for entry in live if entry.request.id in plan.admitted]
        for entry in admitted:
            passed = [other.request.id for other in line if other.order < entry.order]
            assert not passed, f"{entry.request.id} gets a slot before {passed}"
        head = self._head_with_room(live)
        if head is None:
            return
        assert not head.is_encoded, f"{head.request.id} could continue, but waits"
        if plan.phase is ENCODE:
            assert head.cost > self._world.work - plan.work_count, f"{head.request.id} could be encoded, but waits"

    def _check_turns(self, plan: IterativePlan, live: Iterable[ExpectedIteration]) -> None:
        due = {entry.due for entry in live if entry.place == "slot" and not entry.is_computed}
        if self._head_with_room(live) is not None:
            due.add(ENCODE)
        for phase in self._waited:
            self._waited[phase] = self._waited[phase] + 1 if phase in due and phase is not plan.phase else 0
            assert self._waited[phase] <= OTHER_PHASES, f"to {phase.value} waits for {self._waited[phase]} other steps"

    def _check_first(self, live: Iterable[ExpectedIteration]) -> None:
        """Check that the first of all requests makes progress.

        It may wait for one turn of every slot in every phase, and for one more turn until a request may lose its slot.
        """
        first = min(live, key=lambda entry: entry.order)
        is_held_up = first.place == "slot" or (
            self._count("kept", live) < self._world.kept
            and any(entry.order[0] > first.order[0] and entry.due is DENOISE for entry in live if entry.place == "slot")
        )
        for entry in live:
            continues = entry is not first or entry.is_computed or not is_held_up
            entry.stood_still = 0 if continues else entry.stood_still + 1
        steps_max = (OTHER_PHASES + 1) * (self._world.slots + 1)
        assert first.stood_still <= steps_max, f"{first.request.id} is the first in order, but makes no progress"

    def _head_with_room(self, live: Iterable[ExpectedIteration]) -> ExpectedIteration | None:
        """Return the head of the queue, or None if no slot is free for it and no request may lose its slot to it."""
        head = min((entry for entry in live if entry.place != "slot"), key=lambda entry: entry.order, default=None)
        if head is None or self._count("slot", live) < self._world.slots:
            return head
        can_keep = self._count("kept", live) < self._world.kept
        worse = [entry for entry in live if entry.place == "slot" and entry.order[0] > head.order[0]]
        return head if can_keep and any(entry.can_leave for entry in worse) else None

    @staticmethod
    def _count(place: str, live: Iterable[ExpectedIteration]) -> int:
        return sum(entry.place == place for entry in live)


STEPS_TO_END_MAX = 5_000  # No history needs this many steps. A request that has not ended by then never ends.
NOW = 0.0  # The core of image requests does not use the time.


class IterativeSimulation(EventSimulation[IterativeWorld]):
    """One run of the core.

    Args:
        world: the limits of the core.
        trace: called with a line for each effect.

    Attributes:
        live: expected state of each request that has not ended, in order of arrival.
        plan: the step in flight.
        is_computed: True if the forward pass of `plan` has ended. An abandoned forward pass ends without a result.
    """

    def __init__(self, world: IterativeWorld, *, trace: Trace | None = None) -> None:
        super().__init__(world, trace)
        self.core = IterativeCore(
            IterativeSettings(slot_count=world.slots, kept_slot_count=world.kept, step_work_max=world.work)
        )
        self.executor = FakeIterativeExecutor(world.slots + world.kept)
        self.entries: dict[str, ExpectedIteration] = {}
        self.live: dict[str, ExpectedIteration] = {}
        self.plan: IterativePlan | None = None
        self.is_computed = False
        self._result: IterativeResult | None = None
        self._failing: dict[str, str] = {}
        self._rules = StepRules(world)

    def apply(self, event: IterativeSimulationEvent) -> None:
        """Apply one event.

        Raises:
            AssertionError: a contract is broken. Exceptions of the core pass through too.
        """
        _HANDLERS[type(event)](self, event)
        self._check()
        self._count("events")

    def run_to_end(self) -> None:
        """Run until every request has ended, then check that the core is empty."""
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

    # --- Events ---

    def _arrive(self, event: Arrive) -> None:
        if event.id in self.entries:
            return  # An engine never passes the same id to its core twice.
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
            assert not can_run, f"{event.id} could run, but was refused"
            self._count("refused: invalid")
            return
        assert can_run, f"{event.id} can never run, but was accepted"
        self._count("requests")
        self.entries[event.id] = self.live[event.id] = ExpectedIteration(request, len(self.entries))

    def _abort(self, event: Abort) -> None:
        ids = [RequestId(name) for name in event.ids]
        results = self.core.abort(ids, event.reason, now=NOW)
        assert list(results) == list(dict.fromkeys(ids)), f"an abort of {ids} returns results for {list(results)}"
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
            assert result == expected, f"the abort of {name} returns {result}, expected is {expected}"

    def _begin(self, _event: Begin) -> None:
        if self.plan is not None:
            return
        plan = self.core.schedule(NOW)
        if plan is None:
            assert not self.live, f"{', '.join(self.live)} are live, but nothing is computed"
            return
        self._log_line(_plan_line(plan))
        assert plan.step_index == self.counts.get("steps", 0), f"step {plan.step_index} is repeated or too early"
        self._count("steps")
        self._count(f"steps to {plan.phase.value}")
        self._count("preempted", len(plan.preempted))
        steps = {work.step for work in plan.works}
        self._count("steps at different timesteps", len(steps) > 1)
        self._count("latents moved back into a slot", len(plan.moves) - len(plan.preempted))
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
        self._result = self.executor.execute(self.plan, self.core.flights.abandonment(self.plan))
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
            self._log_line(f"  {event}")
        assert events == expected, f"reported events are {events}, expected are {expected}"
        self._failing.clear()

    def _expected_events(self, plan: IterativePlan, *, is_dropped: bool) -> list[IterativeEvent]:
        """Return the events that the core must report at the end of a step.

        Requests that were aborted during the step come first.
        """
        entries = [self.live[work.request.id] for work in plan.works]
        events: list[IterativeEvent] = []
        staying = []
        for entry in entries:
            entry.is_computed = False
            if entry.aborted_for is not None:
                events.append(self._ended(entry, entry.aborted_for))
            else:
                staying.append(entry)
        assert not (is_dropped and staying), "a step was abandoned, but a request waits for it"
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

    # --- Rules ---

    def _check(self) -> None:
        core = self.core
        check_iterative_core(core)
        names = [live.request.id for live in core.live_requests()]
        assert names == list(self.live), f"the core has {names}, but no end was reported for {list(self.live)}"
        places = [entry.place for entry in self.live.values()]
        stats = core.stats()
        counted = (stats.running_count, stats.waiting_count, stats.slots_used, stats.kept_used)
        expected = (
            places.count("slot"),
            len(places) - places.count("slot"),
            places.count("slot"),
            places.count("kept"),
        )
        assert counted == expected, (
            f"running, waiting, slots, kept latents: the core counted {counted}, the simulation {expected}"
        )
        if self.plan is not None:
            is_abandoned = all(self.entries[work.request.id].aborted_for for work in self.plan.works)
            assert core.flights.is_abandoned(self.plan) == is_abandoned, f"is_abandoned should be {is_abandoned}"


def _moment(entry: ExpectedIteration | None) -> str:
    """Return a name for the moment of an abort in the life of its request."""
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
    """Format a plan as a line: preempted requests (-a), moves (source>target), and work (request[step]@slot)."""
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


STEPS_MAX = 6
INVALID_SHARE = 0.03


class IterativeGenerator:
    """Generates one history.

    Args:
        rng: source of all random choices, used in the order of the calls.
    """

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self.world = IterativeWorld(slots=rng.randint(1, 5), kept=rng.choice((0, 1, 1, 2, 4)), work=rng.randint(2, 9))
        wildness = rng.random()
        self._abort_chance = rng.choice((0.0, 0.05, 0.2)) * wildness
        self._fail_chance = rng.choice((0.0, 0.0, 0.05)) * wildness
        self._arrival_chance = rng.choice((0.1, 0.25, 0.4))
        self._live_max = rng.choice((3, 6, 12))
        self._priorities = rng.choice(((0,), (0, 0, -1), (-1, 0, 1)))
        self._cost_max = rng.choice((1, 2, self.world.work))
        self._arrivals = 0

    def next_event(self, simulation: IterativeSimulation) -> IterativeSimulationEvent:
        rng = self._rng
        if len(simulation.live) < self._live_max and rng.random() < self._arrival_chance:
            return self._arrive()
        if rng.random() < self._abort_chance and simulation.entries:
            return self._abort(simulation)
        plan = simulation.plan
        if plan is None:
            return Begin()
        if simulation.is_computed:
            return Update()
        if rng.random() < self._fail_chance:
            return Fail(ids=(rng.choice(plan.works).request.id,))
        return Forward()

    def _arrive(self) -> Arrive:
        rng, world = self._rng, self.world
        self._arrivals += 1
        is_valid = rng.random() >= INVALID_SHARE
        cost_max = min(self._cost_max, world.work) if is_valid else world.work + 1
        denoise = rng.randint(1, cost_max)
        return Arrive(
            id=f"r{self._arrivals}",
            steps=rng.randint(1 if is_valid else 0, STEPS_MAX),
            seed=rng.getrandbits(16),
            priority=rng.choice(self._priorities),
            guided=rng.random() < 0.4 and (2 * denoise <= world.work or not is_valid),
            encode=rng.randint(1, cost_max),
            denoise=denoise,
            decode=rng.randint(1, cost_max),
            partial_every=rng.choice((None, None, 1, 2, 3)),
        )

    def _abort(self, simulation: IterativeSimulation) -> Abort:
        rng = self._rng
        # An abort mostly names a live request, sometimes all requests of the step, and sometimes an unknown id.
        names: list[str] = list(simulation.live) if rng.random() < 0.8 else list(simulation.entries)
        if simulation.plan is not None and rng.random() < 0.3:
            names = [work.request.id for work in simulation.plan.works]
        elif not names or rng.random() < 0.05:
            names = [f"r{self._arrivals}0"]
        else:
            names = [rng.choice(names) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
        reason = rng.choice((FinishReason.ABORT, FinishReason.ABORT, FinishReason.DEADLINE))
        return Abort(ids=tuple(names), reason=reason)
