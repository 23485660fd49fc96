"""Independent records of pauses, sleeps and new weights in a simulation of an engine.

The records follow from the operators' calls. They are compared with the engine after every turn of a task. The rules:
the engine pauses and sleeps as requested. During a pause, no step begins, and no new request gets to the core. Requests
that must end have ended. If an operator's call is cancelled, a pause or a sleep that has not begun is cancelled too.

While new weights are written, the engine pauses. Running requests then continue with the new weights, are computed
again, or end. Operators that replace weights or put the engine to sleep take turns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Literal, Protocol

import trio
from trio.lowlevel import Task

from trioserve.contracts.errors import Draining, EngineFault, InvalidRequest, WeightsLost
from trioserve.engine.lifecycle.request_scope import AnyScope
from trioserve.simulation.reference_engine import Swaps, source_of, version_of
from trioserve.simulation.stack.pause_plan import Halt, Pause, Resume, Sleep, Swap, Wake
from trioserve.testing.fake_engine import FakeEngine

__all__ = ["Pauses", "SwapPauses"]

STEPS_IN_FLIGHT_MAX = 2
ROUNDING_SECONDS = 1e-6


class HaltedCore(Protocol):
    @property
    def flights(self) -> Any:
        """The steps in flight, as a collection with a length."""
        ...

    def live_requests(self) -> Iterable[Any]: ...
    def stats(self) -> Any: ...


class HaltedEngine(Protocol):
    """Interface of a fake engine that can be paused. It may generate text or images."""

    @property
    def core(self) -> HaltedCore: ...
    @property
    def current_core(self) -> HaltedCore: ...
    @property
    def open_requests(self) -> Sequence[AnyScope]: ...
    @property
    def fault(self) -> EngineFault | None: ...
    @property
    def draining(self) -> bool: ...
    @property
    def ready(self) -> bool: ...
    @property
    def reopens_at(self) -> float | None: ...
    @property
    def is_paused(self) -> bool: ...
    @property
    def sleep_level(self) -> int: ...
    def pause_generation(self, mode: Literal["abort", "wait", "keep"]) -> Coroutine[Any, Any, None]: ...
    def resume_generation(self) -> None: ...
    def sleep(self, level: int, mode: Literal["abort", "wait", "keep"]) -> Coroutine[Any, Any, None]: ...
    def wake_up(self) -> Coroutine[Any, Any, None]: ...


class Pauses(trio.abc.Instrument):
    """Records of pauses and sleeps. The object is an instrument of trio.run that only observes.

    Args:
        log_line: receives trace lines.
        count: counts occurrences.
        note_ended: called with a request that is about to be ended, and its stop reason.
        step_seconds_max: maximum duration of a step.

    Attributes:
        state: "runs", "paused", or "drains" if running requests continue but no new requests begin.
        level: level of the engine's sleep. 0: the engine is awake.
        engine: the engine, or None. Set it after the engine was opened.
    """

    def __init__(
        self,
        *,
        log_line: Callable[[str], None],
        count: Callable[[str], None],
        note_ended: Callable[[AnyScope, str], None],
        step_seconds_max: float,
    ) -> None:
        self.engine: HaltedEngine | None = None
        self.state = "runs"
        self.level = 0
        self._log_line, self._count, self._note_ended = log_line, count, note_ended
        self._step_seconds_max = step_seconds_max
        self._is_of_sleep = False  # True if the engine pauses only for a sleep. It then resumes after the sleep.
        self._is_woken = False
        # Numbers of changes. A waiting operator compares them to find that other operators have acted before.
        self._changes = {"resumed": 0, "woken": 0, "slept": 0}
        self._admitted: set[str] = set()  # ids of the sequences that may be in the core during a pause
        # The core at the beginning of the pause, and its number of steps at that time.
        self._closed_at: tuple[HaltedCore, int] | None = None
        self._must_be_over: list[AnyScope] = []
        self._sleepers: dict[Task, Sleep] = {}  # Tasks that now call the engine's `sleep`, with the planned calls.
        self._asks_later: set[Task] = set()  # tasks of `_sleepers` that must first wait until the engine is awake
        self._violation: str | None = None

    @property
    def blocks_admission(self) -> bool:
        """True if no new request may begin."""
        return self.state != "runs" or self.level > 0

    @property
    def is_closed(self) -> bool:
        """True if no step may begin."""
        return self.state == "paused" or self.level > 0

    def check(self) -> None:
        """Assert that no rule was broken so far. This check is a separate call, since an instrument must not raise."""
        assert self._violation is None, self._violation

    # --- Operators ---

    async def operate(self, fake: HaltedEngine, halts: Iterable[Halt]) -> None:
        """Execute all planned calls of operators. Then wake the engine up and resume it.

        Args:
            fake: the engine.
            halts: the planned calls.
        """
        async with trio.open_nursery() as nursery:
            for halt in halts:
                nursery.start_soon(self._halt, fake, halt)
        if fake.fault is None:
            await self._wake(fake, Wake(at=0.0))
        if fake.fault is None:
            self._resume_engine(fake)
        await self._finish()
        self.check()

    async def _finish(self) -> None:
        """Finish replacements that still stop the engine after it was woken up and resumed."""

    async def _halt(self, fake: HaltedEngine, halt: Halt) -> None:
        await trio.sleep(halt.at)
        what = type(halt).__name__.lower()
        self._log_line(what)
        if isinstance(halt, Resume):
            self._resume_engine(fake)
            self._count("resumes")
            return
        is_over = fake.fault is not None or (fake.draining and not isinstance(halt, Wake))
        try:
            outcome = await self._act(fake, halt)
        except (Draining, EngineFault):
            is_late = fake.draining and self._waits_for_its_turn(halt)
            assert is_over or is_late or fake.fault is not None, f"the {what} is refused, but there is no reason"
            outcome = "refused"
        else:
            # A call that is cancelled after zero seconds ends at the first checkpoint, before the engine can refuse it.
            left_at_once = outcome == "left" and getattr(halt, "patience", None) == 0
            is_refused = is_over and fake.fault is None and not left_at_once
            assert not is_refused, f"the {what} must be refused, but is {outcome}"
        self._log_line(f"{what}: {outcome}")
        self._count(f"{what}s: {outcome}")
        self.check()

    async def _act(self, fake: HaltedEngine, halt: Halt) -> str:
        """Make one planned call and return its outcome. If the engine refuses the call, raise the engine's error."""
        if isinstance(halt, Pause):
            return await self._pause(fake, halt)
        if isinstance(halt, Sleep):
            return await self._sleep(fake, halt)
        assert isinstance(halt, Wake), f"{halt} is not an act for this engine"
        return await self._wake(fake, halt)

    async def _pause(self, fake: HaltedEngine, order: Pause) -> str:
        asked_at, resumed = trio.current_time(), self._changes["resumed"]
        if fake.fault is None and not fake.draining:
            self._is_of_sleep = False
            self._ask(fake, order.mode)
        with trio.move_on_after(math.inf if order.patience is None else order.patience) as scope:
            await self._pause_engine(fake, order)
        if scope.cancelled_caught:
            return "left"
        if fake.fault is not None or fake.draining or self._changes["resumed"] != resumed:
            return "overtaken"
        self.check()
        assert self.state == "paused", f"a pause has returned, but the engine {self.state}"
        assert not fake.current_core.flights, "a pause has returned, but a step is in flight"
        late_at = asked_at + STEPS_IN_FLIGHT_MAX * self._step_seconds_max + ROUNDING_SECONDS
        assert order.mode == "wait" or trio.current_time() <= late_at, "a pause takes longer than the steps in flight"
        self._check_retracted(order)
        return order.mode

    async def _pause_engine(self, fake: HaltedEngine, order: Pause) -> None:
        assert order.mode != "retract", "this engine cannot retract"
        await fake.pause_generation(order.mode)

    def _check_retracted(self, order: Pause) -> None:
        """Check, when a pause returns, that the engine has freed memory as requested."""

    async def _sleep(self, fake: HaltedEngine, order: Sleep) -> str:
        task, before = trio.lowlevel.current_task(), dict(self._changes)
        patience = order.patience
        if fake.fault is None and not fake.draining:
            self._sleepers[task] = order
            if self._waits_for_its_turn(order):
                self._asks_later.add(task)
            elif self.level and self._is_woken:
                # If the sleep is woken up and cancelled at the same time, these records cannot tell whether it was
                # requested before. So this operator does not cancel its call.
                self._asks_later.add(task)
                patience = None
            elif not self.level:
                self._ask_for_sleep(fake, order)
        try:
            with trio.move_on_after(math.inf if patience is None else patience) as scope:
                await fake.sleep(order.level, order.mode)
        finally:
            has_asked = task not in self._asks_later
            self._sleepers.pop(task, None)
            self._asks_later.discard(task)
        if scope.cancelled_caught:
            if has_asked and self._is_of_sleep and not self.level:
                self._resume()
            return "left"
        if fake.fault is not None or fake.draining:
            return "overtaken"
        if any(self._changes[what] != before[what] for what in ("resumed", "woken")):
            return "overtaken"
        self.check()
        assert self.level, "a sleep has returned, but the engine is awake"
        assert fake.current_core is not fake.core, "a sleep has returned, but its memory is not freed"
        return f"level {order.level}"

    async def _wake(self, fake: HaltedEngine, order: Wake) -> str:
        was, slept = self.level, self._changes["slept"]
        self._changes["woken"] += 1
        if self.level:
            self._is_woken = True
        with trio.move_on_after(math.inf if order.patience is None else order.patience) as scope:
            await fake.wake_up()
        if scope.cancelled_caught:
            return "left"
        is_up = not self.level or self._changes["slept"] != slept or fake.draining
        assert is_up, "the engine was woken up, but sleeps"
        return "done" if was else "nothing to do"

    # --- Records ---

    def _waits_for_its_turn(self, halt: Halt) -> bool:
        """Return True if a call must first wait until the calls of other operators return."""
        return False

    def _is_turn_of(self, task: Task) -> bool:
        """Return True if a task that waits for its turn now has its turn."""
        return not (self.level and self._is_woken)

    def note_drained(self, fake: HaltedEngine) -> None:
        """Record that the engine is about to drain. During a pause, running requests cannot continue, so they end.

        Args:
            fake: the engine.
        """
        if self.is_closed:
            self._end_for_drain(self._begun(fake))

    def _end_for_drain(self, begun: Iterable[AnyScope]) -> None:
        for request in begun:
            self._must_be_over.append(request)
            if request.has_run:
                self._note_ended(request, "server_stopping")

    def _ask(self, fake: HaltedEngine, mode: str) -> None:
        """Record that an operator requests a pause now."""
        begun = self._begun(fake)
        self._hold_up(begun)
        if mode != "wait":
            self._close(fake)
        elif self.state == "runs":
            self.state = "drains"
            self._settle(fake)
        if mode == "abort":
            for request in begun:
                self._must_be_over.append(request)
                self._note_ended(request, "paused")

    def _ask_for_sleep(self, fake: HaltedEngine, order: Sleep) -> None:
        self._is_of_sleep = self._is_of_sleep or self.state == "runs"
        self._ask(fake, order.mode)

    def _hold_up(self, begun: Iterable[AnyScope]) -> None:
        if not self.blocks_admission:
            self._admitted = {choice.sequence_id for request in begun for choice in request.choices}
            fake = self.engine
            assert fake is not None
            # The core may also still have sequences whose client has left.
            self._admitted |= {live.request.id for live in fake.current_core.live_requests()}

    def _close(self, fake: HaltedEngine) -> None:
        if not self.is_closed:
            self._closed_at = fake.current_core, fake.current_core.stats().steps_total
        self.state = "paused"

    def _resume(self) -> None:
        self.state, self._is_of_sleep = "runs", False
        self._changes["resumed"] += 1

    def _resume_engine(self, fake: HaltedEngine) -> None:
        self._resume()
        fake.resume_generation()

    def _begun(self, fake: HaltedEngine) -> list[AnyScope]:
        """Return the requests that are in the core, or were in the core and will be computed again."""
        ids = {live.request.id for live in fake.current_core.live_requests()}
        return [
            request
            for request in fake.open_requests
            if not request.is_finished
            and (request.upcoming or any(choice.sequence_id in ids for choice in request.choices))
        ]

    # --- Methods of a trio instrument ---

    def before_task_step(self, task: Task) -> None:
        fake = self.engine
        if fake is None or task not in self._asks_later or not self._is_turn_of(task):
            return
        self._asks_later.discard(task)
        if not self.level and fake.fault is None and not fake.draining:
            self._ask_for_sleep(fake, self._sleepers[task])

    def after_task_step(self, task: Task) -> None:
        fake = self.engine
        if fake is not None and fake.fault is None and self._violation is None:
            self._settle(fake)
            self._violation = self._follow(fake, task) or self._look(fake)
            if self._violation is not None:
                self._violation = f"at {trio.current_time():.3f}: {self._violation}"

    def _settle(self, fake: HaltedEngine) -> None:
        """Record that running requests may have ended.

        Requests whose client has left and that the step in flight computes do not count as running.
        """
        if self.state == "drains":
            lives = list(fake.current_core.live_requests())
            is_upcoming = any(request.upcoming for request in fake.open_requests)
            continues = is_upcoming or any(live.abort_reason is None for live in lives)
            if not (lives or is_upcoming) or (fake.is_paused and not continues):
                self._close(fake)

    def _follow(self, fake: HaltedEngine, task: Task) -> str | None:
        return self._follow_sleep(fake, task)

    def _follow_sleep(self, fake: HaltedEngine, task: Task) -> str | None:
        level = fake.sleep_level
        if level == self.level:
            return None
        if level:
            order = self._sleepers.get(task)
            if order is None or order.level != level or self.level:
                return f"the engine sleeps at level {level}, which no operator requested"
            if self.state != "paused" or fake.current_core.flights:
                return (
                    f"the engine falls asleep, but {self.state} with {len(fake.current_core.flights)} steps in flight"
                )
            self._is_woken = False
            self._changes["slept"] += 1
        elif not self._is_woken:
            return "the engine is awake, but no operator woke it up"
        self.level = level
        if not level and self._is_of_sleep:
            self._resume()
        return None

    def _look(self, fake: HaltedEngine) -> str | None:
        if fake.is_paused != (self.state == "paused"):
            return f"the engine {'pauses' if fake.is_paused else 'does not pause'}, but its state must be: {self.state}"
        unended = [request.id for request in self._must_be_over if not request.is_finished]
        self._must_be_over.clear()
        if unended:
            return f"{unended} must end with the pause, but have not"
        is_ready = not self.blocks_admission and not fake.draining and fake.reopens_at is None
        if fake.ready != is_ready:
            return (
                f"the engine reports {'ready' if fake.ready else 'not ready'}, but {self.state}, asleep: {self.level}"
            )
        if not self.blocks_admission:
            return None
        core = fake.current_core
        new = [live.request.id for live in core.live_requests() if live.request.id not in self._admitted]
        if new:
            return f"{new} began while the engine {self.state}, asleep: {self.level}"
        if not self.is_closed:
            return None
        if self._closed_at is None or self._closed_at[0] is not core:
            self._closed_at = core, 0
        begun = core.stats().steps_total - self._closed_at[1]
        return f"{begun} steps began in a pause" if begun else None


class SwapPauses(Pauses):
    """Records of pauses, sleeps and replacements of weights.

    Args:
        swaps: records of the weights and of the tokens that they give.
        **options: options of Pauses.

    Attributes:
        is_replacing: True while weights are written, and after only a part of the weights was written.
    """

    def __init__(self, *, swaps: Swaps, **options: Any) -> None:
        super().__init__(**options)
        self.is_replacing = False
        self._swaps = swaps
        self._updaters: dict[Task, Swap] = {}  # Tasks that now call `update_weights`, with the planned calls.
        self._updater: Task | None = None  # task of `_updaters` whose weights are being written
        self._begun_before: list[AnyScope] = []  # requests that ran before the current turn of an updating task

    @property
    def blocks_admission(self) -> bool:
        return super().blocks_admission or self.is_replacing

    @property
    def is_closed(self) -> bool:
        return super().is_closed or self.is_replacing

    @property
    def _fake(self) -> FakeEngine:
        assert isinstance(self.engine, FakeEngine)
        return self.engine

    async def _finish(self) -> None:
        if self.is_replacing and self._fake.fault is None and not self._fake.draining:
            await self._swap(Swap(at=0.0, number=1))

    async def _act(self, fake: HaltedEngine, halt: Halt) -> str:
        return await (self._swap(halt) if isinstance(halt, Swap) else super()._act(fake, halt))

    async def _sleep(self, fake: HaltedEngine, order: Sleep) -> str:
        try:
            return await super()._sleep(fake, order)
        except InvalidRequest:
            assert order.mode == "wait", "a sleep is refused that ends running requests, or keeps them"
            assert self._fake.has_half_weights, "a sleep is refused, although running requests can end"
            return "refused"

    async def _pause_engine(self, fake: HaltedEngine, order: Pause) -> None:
        await self._fake.pause_generation(order.mode, clear_cache=order.clears)

    def _check_retracted(self, order: Pause) -> None:
        stats = self._fake.current_core.stats()
        if order.mode == "retract" or (order.mode == "keep" and order.clears):
            assert stats.blocks_used == 0, f"all blocks must be freed, but {stats.blocks_used} are in use"
        if order.clears:
            assert stats.blocks_cached == 0, "the prefix cache must be empty"
            self._count("pauses that empty the cache")

    async def _swap(self, order: Swap) -> str:
        fake, task = self._fake, trio.lowlevel.current_task()
        if not self._updaters:  # All replacements that wait or run use the settings of the first one.
            fake.weights.seconds, fake.weights.breaks = order.seconds, order.breaks
        self._updaters[task] = order
        outcome = "left"
        try:
            with trio.move_on_after(math.inf if order.patience is None else order.patience):
                source, version = source_of(order.number), version_of(order.number)
                await fake.update_weights(source, version=version, in_flight=order.in_flight)
                outcome = order.in_flight
        except WeightsLost:
            assert fake.has_half_weights, "weights were lost, but the engine does not report it"
            outcome = "lost"
        finally:
            self._note_update_over(task, outcome)
        return outcome

    # --- Records ---

    def _waits_for_its_turn(self, halt: Halt) -> bool:
        return isinstance(halt, Swap | Sleep)

    def _is_turn_of(self, task: Task) -> bool:
        return self._fake.turn_owner is task

    def note_drained(self, fake: HaltedEngine) -> None:
        if self._updater is None:  # While weights are written, `_note_update_over` ends the requests later.
            super().note_drained(fake)

    def _note_update_over(self, task: Task, outcome: str) -> None:
        fake, order = self._fake, self._updaters.pop(task)
        is_whole = outcome == order.in_flight
        has_version = fake.weight_version == version_of(order.number)
        if self._updater is task:
            self._updater = None
            self.is_replacing = fake.has_half_weights and not is_whole
            # A cancelled call returns only after the weights are written.
            if is_whole or (outcome == "left" and has_version):
                self._swaps.replace(order.number, recomputes=is_whole and order.in_flight == "recompute")
            if fake.draining and self.is_closed:
                self._end_for_drain(self._begun_before)
        assert not is_whole or has_version, "the weights are new, but the version is old"

    # --- Methods of a trio instrument ---

    def before_task_step(self, task: Task) -> None:
        if task in self._updaters and self.engine is not None:
            self._begun_before = self._begun(self.engine)
        super().before_task_step(task)

    def _follow(self, fake: HaltedEngine, task: Task) -> str | None:
        return super()._follow(fake, task) or self._follow_swap(self._fake, task)

    def _follow_swap(self, fake: FakeEngine, task: Task) -> str | None:
        if self._begins_to_replace(fake, task):
            self._hold_up(self._begun_before)
            if not self.is_closed:
                self._closed_at = fake.current_core, fake.current_core.stats().steps_total
            self.is_replacing, self._updater = True, task
            if self._updaters[task].in_flight == "abort":
                for request in self._begun_before:
                    self._must_be_over.append(request)
                    self._note_ended(request, "weights_replaced")
        if fake.is_replacing_weights != self.is_replacing:
            return f"weights are {'' if fake.is_replacing_weights else 'not '}being replaced, expected is the opposite"
        if not self.level and fake.weight_version != self._swaps.version:
            return f"the engine has weights {fake.weight_version}, expected are {self._swaps.version}"
        return None

    def _begins_to_replace(self, fake: FakeEngine, task: Task) -> bool:
        if not fake.is_replacing_weights or self._updater is not None or task not in self._updaters:
            return False
        # If a part of the weights was written before, the engine already counts as replacing weights. Then the begin of
        # a new replacement can be seen only by the requests that it ends.
        ends = self.is_replacing and self._updaters[task].in_flight == "abort" and self._begun_before
        return not ends or any(request.is_finished for request in self._begun_before)
