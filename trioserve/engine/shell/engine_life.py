"""An engine's life, whatever it computes: it runs, pauses, sleeps, drains, breaks, and is opened anew. One place where
its faults rise.

What requests are, and how a core gets them, is EngineShell's and that of the engines themselves.
"""

from __future__ import annotations

import logging
import math
import secrets
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, Literal, TypeVar

import trio

from trioserve.admission.local_endpoint import local_dispatch
from trioserve.contracts.arguments import refuse, to_int
from trioserve.contracts.errors import EngineFault, InvalidRequest, RankLost
from trioserve.contracts.events import FinishReason
from trioserve.contracts.iterative import IterativeStats
from trioserve.contracts.output import REQUEST_POISONED
from trioserve.contracts.stats import EngineStats
from trioserve.engine.settings import EngineSettings
from trioserve.engine.shell.core_delivery import CoreDelivery
from trioserve.engine.shell.engine_loop import EngineLoop
from trioserve.engine.shell.load_changes import LoadChanges
from trioserve.engine.shell.pausing import PauseState, Pausing
from trioserve.engine.shell.request_admission import RequestAdmission
from trioserve.engine.shell.request_scope import RequestPart, RequestScope, ScopeState
from trioserve.engine.shell.requests_by_id import RequestsById
from trioserve.engine.shell.restarts import LONE_FAULTS_MAX, Readmission, RestartBudget
from trioserve.engine.shell.sleeping import LEVELS, Sleeping
from trioserve.engine.shell.step_gate import StepGate
from trioserve.engine.shell.step_watch import StepWatch
from trioserve.metrics.engine_gauges import ShellGauges
from trioserve.metrics.registry import Metrics
from trioserve.trio_tools.deadline_keeper import DeadlineKeeper
from trioserve.trio_tools.errors_unwrapped import errors_unwrapped
from trioserve.trio_tools.interrupts import uninterrupted
from trioserve.trio_tools.own_run import OwnRun

__all__ = ["PAUSED", "SERVER_STOPPING", "EngineLife", "Guard"]

logger = logging.getLogger(__name__)

SERVER_STOPPING = "server_stopping"
PAUSED = "paused"
PAUSE_MODES = ("abort", "wait", "keep")

Guard = Callable[[], Coroutine[Any, Any, None]]
"""Waits until what computes is gone, also while there is nothing to compute, and raises why."""

ScopeT = TypeVar("ScopeT", bound=RequestScope[Any, Any, Any])
PartT = TypeVar("PartT", bound=RequestPart[Any])
AskedT = TypeVar("AskedT")
PartsT = TypeVar("PartsT")


@uninterrupted
class EngineLife(ABC, Generic[ScopeT, PartT, AskedT, PartsT]):
    """ScopeT: its requests. PartT: what each consists of, and AskedT: what the core gets for it. PartsT: what goes with
    a fault, and is there anew when the engine is opened anew.

    sequences_max: so many may run at a time. lent_max: so many more leases there are for who is not to wait in the
    queue.
    """

    _delivery: CoreDelivery[ScopeT, PartT, Any, Any]
    _loop: EngineLoop[Any, Any, Any]
    _why_no_nap: str | None = None  # None: level 1 of sleep is to be had
    _guard: Guard | None = None

    def __init__(self, *, metrics: Metrics, settings: EngineSettings, sequences_max: int, lent_max: int = 0) -> None:
        self._own_run = OwnRun()
        self.metrics = metrics
        self._settings = settings
        self.draining = False
        self.fault: EngineFault | None = None
        self.on_fault: Callable[[], Awaitable[None]] | None = None  # has the clients told
        self.step_watch = StepWatch(settings.step_seconds_max)
        self._requests = RequestsById[ScopeT]()  # entered and not left
        self._preparing_count = 0
        self._leased_count = 0  # of these, the ones whose turn has come
        self._deadline_keeper = DeadlineKeeper()
        self.dispatch = local_dispatch(sequences_max, settings, lent_max=lent_max)
        self._admission = RequestAdmission(self.dispatch, metrics)
        self._is_running = False
        self._idle = trio.Event()
        self._restarts = RestartBudget(settings.restarts_max)
        self._readmission = Readmission[ScopeT](
            self._begin, end=self._end_poisoned, has_brought=lambda: self._delivery.has_brought
        )
        self._last_fault: EngineFault | None = None  # that the engine was opened again after
        self._carried: list[ScopeT] = []  # who goes on when the engine was opened anew
        self._reopened = trio.Event()
        self.reopens_at: float | None = None  # it broke, and is to be opened anew, not before this time of Trio's clock
        self._gate = StepGate()
        self._pausing = Pausing(self._gate, self._has_begun, self._go_on)
        self._sleeping = Sleeping()
        self._is_paused_by_sleep = False
        self.instance = secrets.token_hex(8)
        """Names this engine from here to its end, also when it is opened anew in between."""
        self.load_changes = LoadChanges()
        self._steps_scope = trio.CancelScope()
        self._outer_error: Exception | None = None  # of the connector, or of what computes
        self._shell_gauges = ShellGauges(metrics)

    # --- what is other for each kind ---

    @abstractmethod
    def _install(self, parts: PartsT) -> None:
        """From here on it computes with these, and nothing of those before is known any more. Calls _install_loop."""

    @abstractmethod
    def _take_down(self) -> Callable[[PartT], AskedT | None]:
        """Let go of the parts that broke. Returns what tells, for each sequence that the core had, how it goes on in
        another one; None: it ended in what broke, and nobody can say how."""

    @abstractmethod
    def _begin_next(self, request: ScopeT) -> None:
        """The core gets one more of its sequences."""

    @abstractmethod
    def _set_gauges(self) -> None:
        """Before the metrics are shown."""

    @abstractmethod
    def abort_all(self, message: str) -> None:
        """End every request; each reader gets a last delta with finish_reason ABORT and the message, unless it had
        one."""

    def _ended_given_up(self, choice: PartT) -> bool:
        """Whether a sequence was about to end when its core was given up, and is over with that."""
        return False

    def _note_leaving(self) -> None:
        """It takes nothing new any more, or has broken: whoever follows it is told."""

    def _note_broken(self) -> None:
        """It has broken for good: nothing that the core had will be reported."""

    def _note_over(self) -> None:
        """Its steps have ended, or it leaves: nothing more changes."""
        self.load_changes.end()

    @property
    def _is_busy(self) -> bool:
        """Whether somebody has something of it."""
        return bool(self._requests)

    # --- the life of the engine ---

    def _install_loop(self, loop: EngineLoop[Any, Any, Any]) -> None:
        self._loop = loop
        self.load_changes = LoadChanges()
        self._steps_scope = trio.CancelScope()
        self._outer_error = None

    async def run(
        self,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """The engine's own task. Ends when cancelled, after the step in flight, with all that requests had back.
        Returns when it broke and is to be opened anew (reopens_at): its requests wait for that.

        Raises EngineFault when it is not: every reader has the fault by then, and `on_fault` had grace_seconds_max to
        pass it on.
        """
        await self._run_steps(task_status)

    async def _run_guard(self, guard: Guard, scope: trio.CancelScope) -> None:
        """Until the scope is cancelled."""
        with scope:
            try:
                await guard()
            except Exception as error:
                self._outer_error = self._outer_error or error
                self._steps_scope.cancel()

    async def _run_loop(self) -> None:
        with self._steps_scope:
            if self._guard is None:
                await self._loop.run()
            else:
                with errors_unwrapped():
                    async with trio.open_nursery() as nursery:
                        # Shielded, so that being cancelled does not hide what the step in flight raises then.
                        scope = trio.CancelScope(shield=True)
                        nursery.start_soon(self._run_guard, self._guard, scope)
                        try:
                            await self._loop.run()
                        finally:
                            scope.cancel()
        if self._outer_error is not None:
            raise self._outer_error
        assert self.sleep_level, "the step loop has ended without a reason"

    async def _run_steps(self, task_status: trio.TaskStatus[None]) -> None:
        self._is_running = True
        self._begin_carried()
        task_status.started()
        try:
            await self._run_loop()
            self.reopens_at = math.inf
            self._carry_requests(None)
        except Exception as error:
            is_of_steps = self._outer_error is None or isinstance(self._outer_error, RankLost)
            what = "a step of the engine" if is_of_steps else "the connector"
            fault = EngineFault(f"{what} failed: {type(error).__name__}: {error}")
            if not self._is_to_be_reopened(fault, has_progress=self._delivery.has_brought):
                await self._fail(fault)
                raise fault from error
            # Here, where it is handled: nothing may keep the frames of the step, which have the model.
            logger.exception("the engine broke, and is opened anew restarts=%d", self._restarts.taken_count)
            self._carry_requests(fault)
        finally:
            self._is_running = False
            self._note_over()
            if self.fault is None and self.reopens_at is None:
                self.close()

    async def _fail(self, fault: EngineFault) -> None:
        """It broke for good: everybody is told."""
        if self._restarts.ended_by:
            fault.args = (f"{fault}; {self._restarts.ended_by}",)
        self.fault = fault
        self.reopens_at = None
        self._reopened.set()
        self._pausing.end()
        self._sleeping.end()
        self._note_broken()
        self._note_idle()
        self._note_over()
        self._note_leaving()
        for request in self._requests:
            request.fail(fault)
        if self.on_fault is not None:
            with trio.move_on_after(self._settings.grace_seconds_max):
                try:
                    await self.on_fault()
                except Exception:
                    logger.exception("the fault could not be passed on")  # and must not be hidden by this

    def close(self) -> None:
        """Nothing more is computed: every reader gets a last delta, and all that requests had is back."""
        self.reopens_at = None
        self._reopened.set()
        self._pausing.end()
        self._sleeping.end()
        self.abort_all("the engine was closed")

    # --- opened anew after a fault ---

    def _is_to_be_reopened(self, fault: EngineFault, *, has_progress: bool) -> bool:
        now = trio.current_time()
        seconds = self._restarts.take(now, has_progress=has_progress)
        if seconds is None:
            return False
        self.reopens_at = now + seconds
        self.metrics.engine_restarts_total.inc()
        return True

    def _carry_requests(self, fault: EngineFault | None) -> None:
        """Take from a core that broke what it knows of its requests, and let it go: from here on each of their
        sequences is one that the core is still to get, with what it had. What was held is lost. fault: None: it did not
        break, and no step is in flight."""
        delivery = self._delivery
        self._set_gauges()  # what it has counted so far
        self._reopened = trio.Event()
        suspect_ids = delivery.ids_in_flight()
        choices = delivery.give_up()
        continued = self._take_down()
        self._note_over()
        self.step_watch.forget(trio.current_time())
        requests: dict[ScopeT, list[tuple[PartT, AskedT]]] = {}
        lost: list[ScopeT] = []
        for choice in choices:
            request: ScopeT = choice.request
            carried = requests.setdefault(request, [])
            if choice.is_ended or request.scope is ScopeState.LEFT or self._ended_given_up(choice):
                continue
            goes_on = continued(choice)
            if goes_on is None:
                lost.append(request)
            else:
                carried.append((choice, goes_on))
        for request in self._readmission.stop():
            requests.setdefault(request, [])
        self._last_fault = fault or self._last_fault
        for request, carried in requests.items():
            if any(choice.sequence_id in suspect_ids for choice, _ in carried):
                own_ids = {choice.sequence_id for choice in request.choices}
                request.note_fault(is_alone=own_ids >= suspect_ids)
            request.carry(carried)
            if fault is not None and request in lost:
                self._end_with_error(request, f"the engine broke, and this request cannot be resumed: {fault}")
            elif fault is not None and request.lone_fault_count >= LONE_FAULTS_MAX:
                self._end_poisoned(request)
            elif not request.upcoming:
                request.on_gone()
        self._carried = [request for request in requests if request.upcoming]
        self._note_idle()

    def _end_poisoned(self, request: ScopeT) -> None:
        """End a request that broke the engine: the failed steps had it, and one of them had nothing else."""
        logger.error("request ended: it was in %d steps that failed request=%s", request.fault_count, request.id)
        self.metrics.requests_poisoned_total.inc()
        self._restarts.forgive(request.fault_count)
        message = (
            f"the engine broke {request.fault_count} times in steps that computed this request, also where it was "
            f"alone in one; it was ended so that the others go on: {self._last_fault}"
        )
        self._end_with_error(request, message, stop_reason=REQUEST_POISONED)

    def _end_with_error(self, request: ScopeT, message: str, *, stop_reason: str | None = None) -> None:
        """End a request that the core does not have."""
        self._delivery.note_lost(request)
        self._delivery.end_with_final_delta(request, FinishReason.ERROR, message, stop_reason=stop_reason)

    def reopen(self, parts: PartsT) -> None:
        """Go on with these; run is called next."""
        assert self.reopens_at is not None, "the engine did not break"
        self._install(parts)
        self.reopens_at = None

    async def reopening_failed(self, error: Exception) -> None:
        """It could not be opened anew. Raises EngineFault if it is not to be tried again."""
        fault = EngineFault(f"the engine could not be opened anew: {type(error).__name__}: {error}")
        if not self._is_to_be_reopened(fault, has_progress=False):
            await self._fail(fault)
            raise fault from error
        logger.error("%s", fault, exc_info=error)

    def _begin_carried(self) -> None:
        carried, self._carried = self._carried, []
        self._readmission.start(carried)
        self._reopened.set()
        if self.sleep_level:
            self._note_awake()

    def _begin(self, request: ScopeT) -> None:
        """The core gets as many of its sequences as it may have at a time."""
        while request.upcoming and request.core_count < request.sequence_count:
            self._begin_next(request)

    async def keep_deadlines(self) -> None:
        """The engine's other task, beside run: ends requests whose time has come. Runs until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.dispatch.run)
            await self._deadline_keeper.run()

    @property
    def ready(self) -> bool:
        """Whether a new request would be taken, a full queue apart."""
        return self._is_open and not self._pausing.holds_up and self.step_watch.overdue() is None

    @property
    def _is_open(self) -> bool:
        """Whether it goes on with what it has taken."""
        return self._is_running and not self.draining and self.fault is None

    def drain(self) -> None:
        """Take nothing new; requests that have not begun to run are refused, the others go on. Where they cannot, since
        the engine is paused, they end with what they have."""
        self._own_run.check("engine.drain")
        self.draining = True
        self._reopened.set()  # who waits for it has not begun to run
        self._pausing.end()
        self.dispatch.drain()
        self._note_over()
        self._note_leaving()
        for request in self._requests:
            if request.has_begun and not request.has_run:
                self._delivery.end(request, FinishReason.ABORT)
                request.fail(self._admission.refused_draining())
        self._end_begun_unless_it_goes_on()

    def _end_begun_unless_it_goes_on(self) -> None:
        """The server is leaving."""
        if not self._gate.is_open:
            self._end_begun("the server is leaving, and its engine is paused", SERVER_STOPPING)

    @abstractmethod
    def stats(self) -> EngineStats | IterativeStats:
        """How much the core has."""

    async def wait_until_idle(self) -> None:
        """Wait until no request is entered, nothing is held for another engine, and all KV blocks are free.

        Blocks of a request that left during a step are free when that step ends. To wait for the end of a server, call
        drain() first.
        """
        self._own_run.check("engine.wait_until_idle")
        while self._is_busy or self._computes:
            if self._idle.is_set():  # otherwise somebody else waits for it, too
                self._idle = trio.Event()
            await self._idle.wait()

    async def wait_all_free(self) -> None:
        """Wait until everything that requests had is free: the same as wait_until_idle, named for tests."""
        await self.wait_until_idle()

    @property
    def _computes(self) -> bool:
        """Whether the core still has sequences, also such whose readers have left during the step in flight."""
        if not self._is_running or self.fault is not None:
            return False
        stats = self.stats()
        return stats.running_count + stats.waiting_count > 0

    def _note_idle(self) -> None:
        if not (self._idle.is_set() or self._is_busy or self._computes):
            self._idle.set()

    def wake(self) -> None:
        """There may be something for the step loop to do; a connector calls this when it has something to report.
        Costs nothing while steps run."""
        self._loop.wake()

    def _after_step(self) -> None:
        if not self._idle.is_set():
            self._note_idle()
        self._readmission.look()
        self._pausing.look()
        self.load_changes.note()

    # --- paused ---

    async def pause_generation(self, mode: Literal["abort", "wait", "keep"] = "abort") -> None:
        """Begin no further step until resume_generation. Returns when none is in flight, or it was resumed meanwhile.
        Leaving earlier takes nothing back. Requests that come wait for it; their deadlines count, and so do those of
        all others. Whoever leaves is out at once.

        mode: what becomes of requests that have begun: "abort" ends them with what they have; "wait" lets them end
        first, and nothing new begins meanwhile; "keep" has their streams pause. An engine that pauses already stays as
        it is, but for what "abort" ends. Raises InvalidRequest, Draining and EngineFault.
        """
        self._own_run.check("engine.pause_generation")
        self._check_may_pause(mode)
        self._is_paused_by_sleep = False
        await self._pause(mode)

    async def _pause(self, mode: str) -> None:
        was = self._pausing.state
        self._pausing.pause(drains=mode == "wait")
        if mode == "abort":
            self._end_begun("the engine was paused, and this request ended with what it had", PAUSED)
        if self._pausing.state is not was:
            logger.info("pauses mode=%s", mode)
        self.load_changes.note()
        await self._pausing.wait_until_paused()

    def resume_generation(self) -> None:
        """Go on; nothing to do if it is not paused."""
        self._own_run.check("engine.resume_generation")
        if self._pausing.state is not PauseState.RUNS:
            logger.info("resumes")
        self._is_paused_by_sleep = False
        self._pausing.resume()

    @property
    def has_half_weights(self) -> bool:
        """Whether an update of the weights has ended halfway, so that nothing is computed until another one is
        whole."""
        return False

    @property
    def is_paused(self) -> bool:
        """Whether no step begins until resume_generation."""
        return self._pausing.state is PauseState.PAUSED

    @property
    def holds_up(self) -> bool:
        """Whether requests that come wait: it is paused, or about to be."""
        return self._pausing.holds_up

    async def sleep(self, level: int = 1, mode: Literal["abort", "wait", "keep"] = "abort") -> None:
        """Give memory back until wake_up. Pauses first, as pause_generation does; who leaves meanwhile takes that back.
        Returns when the memory is given back, or it was resumed before. An engine that sleeps already stays as it is.
        What is held for other engines is given up.

        level: 1 gives the KV cache back and keeps the weights; 2 gives the weights back, too, and all else that opening
        the engine takes: on wake-up the model is read anew. mode: what becomes of requests that have begun. Those that
        are kept are computed again on wake-up, and their streams go on with the same tokens. Raises InvalidRequest,
        also where level 1 is not to be had; Draining, EngineReopening and EngineFault.
        """
        self._own_run.check("engine.sleep")
        level = to_int("level", level)
        if level not in LEVELS:
            refuse("level", level, "1 or 2")
        self._check_may_pause(mode)
        if level == 1 and self._why_no_nap is not None and not self.sleep_level:
            raise InvalidRequest(f"{self._why_no_nap}: it can sleep at level 2", param="level")
        while self._sleeping.is_waking:
            await self._sleeping.wait_until_up()
        await self._pause_and_sleep(level, mode)
        await self._sleeping.wait_until_down()
        if self.fault is not None:
            raise self.fault

    async def _pause_and_sleep(self, level: int, mode: str) -> None:
        if not self.sleep_level:
            await self._pause_for_sleep(mode)
            if self._pausing.state is PauseState.PAUSED and not self.sleep_level:
                self._fall_asleep(level)

    async def _pause_for_sleep(self, mode: str) -> None:
        if self._pausing.state is PauseState.RUNS:
            self._is_paused_by_sleep = True
        try:
            await self._pause(mode)
            if self.fault is not None:
                raise self.fault
            if not (self._is_running or self.sleep_level):
                raise self._admission.refused_reopening()
        except BaseException:
            if self._is_paused_by_sleep and not self.sleep_level:
                self.resume_generation()
            raise

    def _fall_asleep(self, level: int) -> None:
        """No step is in flight."""
        logger.info("falls asleep level=%d", level)
        self._sleeping.fall_asleep(level)
        self._pausing.set_asleep(True)
        self._show_sleep()
        self._steps_scope.cancel()

    async def wake_up(self) -> None:
        """Take the memory again, with an empty prefix cache. Returns when it goes on; an engine that was paused when it
        fell asleep is paused then. Nothing to do if it is awake. Leaving earlier takes nothing back. Raises
        EngineFault if the memory cannot be had, or the model cannot be read."""
        self._own_run.check("engine.wake_up")
        if self.sleep_level:
            self._sleeping.wake()
            await self._sleeping.wait_until_up()
        if self.fault is not None:
            raise self.fault

    @property
    def is_sleeping(self) -> bool:
        """Whether it has given memory back, or is about to, until all is there again."""
        return self.sleep_level > 0

    @property
    def sleep_level(self) -> int:
        """0 while it is awake."""
        return self._sleeping.level

    async def sleep_on(self) -> None:
        """The memory is given back: returns when it is to be taken again, by reopen."""
        self._sleeping.note_down()
        await self._sleeping.wait_until_woken()
        if self.reopens_at == math.inf:  # otherwise taking it has failed, and is to be tried again then
            self.reopens_at = trio.current_time()

    def _note_awake(self) -> None:
        logger.info("awake")
        self._sleeping.note_up()
        self._pausing.set_asleep(False)
        if self._is_paused_by_sleep:
            self.resume_generation()
        self._show_sleep()

    def _show_sleep(self) -> None:
        for level, name in {0: "awake", **LEVELS}.items():
            self.metrics.engine_sleep_state.labels(name).set(level == self.sleep_level)

    def _check_may_pause(self, mode: str) -> None:
        if mode not in PAUSE_MODES:
            refuse("mode", mode, f"one of {', '.join(PAUSE_MODES)}")
        if self.fault is not None:
            raise self.fault
        if self.draining:
            raise self._admission.refused_draining()

    def _has_begun(self) -> bool:
        return any(request.has_begun for request in self._requests)

    def _end_begun(self, message: str, stop_reason: str) -> None:
        for request in self._requests:
            if request.has_begun:
                self._delivery.end_with_final_delta(request, FinishReason.ABORT, message, stop_reason=stop_reason)

    def _go_on(self) -> None:
        self.step_watch.note_going_on(trio.current_time())
        self.load_changes.note()
        self.wake()

    async def _wait_until_admitted(self) -> None:
        """Returns when it computes what is new, or takes nothing any more."""
        while self._pausing.holds_up or self.reopens_at is not None:
            if self.draining or self.fault is not None:
                return
            await self._pausing.wait_until_admitted()
            if self.reopens_at is not None:
                await self._reopened.wait()

    # --- what it shows ---

    def _waiting_since(self) -> float | None:
        """When the first of those that wait or run has come; None if nobody does, or they are to wait."""
        if not self._gate.is_open:
            return None
        return min((request.entered_at for request in self._requests if not request.is_finished), default=None)

    def _show_shell(self, *, running_count: int, waiting_count: int, deferred_count: int) -> None:
        """What every engine shows of itself. Of those that wait in the core deferred_count wait for something else than
        room."""
        now = trio.current_time()
        self._shell_gauges.show(
            running_count=running_count,
            waiting_count=waiting_count + self._preparing_count,
            deferred_count=deferred_count + self._leased_count,
            live_count=len(self._requests),
            task_count=trio.lowlevel.current_statistics().tasks_living,
            step_seconds=self.step_watch.age_seconds(now),
            step_seconds_max=self.step_watch.seconds_max,
            no_progress_seconds=self.step_watch.idle_seconds(now, self._waiting_since()),
        )
