"""The life of any engine: it runs, pauses, sleeps, drains, breaks, and is reopened. All faults of an engine end here.

`EngineShell` and its subclasses define requests, and how a core gets them.
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
from trioserve.engine.lifecycle.core_delivery import CoreDelivery
from trioserve.engine.lifecycle.engine_loop import EngineLoop
from trioserve.engine.lifecycle.load_changes import LoadChanges
from trioserve.engine.lifecycle.pausing import PauseState, Pausing
from trioserve.engine.lifecycle.request_admission import RequestAdmission
from trioserve.engine.lifecycle.request_scope import RequestPart, RequestScope, ScopeState
from trioserve.engine.lifecycle.requests_by_id import RequestsById
from trioserve.engine.lifecycle.restarts import LONE_FAULTS_MAX, Readmission, RestartBudget
from trioserve.engine.lifecycle.sleeping import LEVELS, Sleeping
from trioserve.engine.lifecycle.step_gate import StepGate
from trioserve.engine.lifecycle.step_watch import StepWatch
from trioserve.engine.settings import EngineSettings
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
"""Waits until the processes that compute are lost, also while the engine is idle, and raises the reason."""

ScopeT = TypeVar("ScopeT", bound=RequestScope[Any, Any, Any])
PartT = TypeVar("PartT", bound=RequestPart[Any])
AskedT = TypeVar("AskedT")
PartsT = TypeVar("PartsT")


@uninterrupted
class EngineLife(ABC, Generic[ScopeT, PartT, AskedT, PartsT]):
    """The life of an engine. Every method belongs to the thread of the Trio program that opened the engine.

    The type parameters are: ScopeT, its requests. PartT, the parts of a request. AskedT, what the core gets for a part.
    PartsT, the parts of the engine that are lost with a fault and rebuilt when it is reopened.

    Args:
        metrics: registry of the engine's metrics.
        settings: limits of the engine.
        sequences_max: most sequences that run at a time.
        lent_max: further leases for requests that must not wait in the queue.
    """

    _delivery: CoreDelivery[ScopeT, PartT, Any, Any]
    _loop: EngineLoop[Any, Any, Any]
    _why_no_cache_release: str | None = None  # None: sleep level 1 is possible. A string says why it is not.
    _guard: Guard | None = None

    def __init__(self, *, metrics: Metrics, settings: EngineSettings, sequences_max: int, lent_max: int = 0) -> None:
        self._own_run = OwnRun()
        self.metrics = metrics
        self._settings = settings
        self.draining = False
        self.fault: EngineFault | None = None
        self.on_fault: Callable[[], Awaitable[None]] | None = None  # passes the fault on to the clients
        self.step_watch = StepWatch(settings.step_seconds_max)
        self._requests = RequestsById[ScopeT]()  # entered and not left
        self._preparing_count = 0
        self._leased_count = 0  # sequences among these whose request has its lease
        self._deadline_keeper = DeadlineKeeper()
        self.dispatch = local_dispatch(sequences_max, settings, lent_max=lent_max)
        self._admission = RequestAdmission(self.dispatch, metrics)
        self._is_running = False
        self._idle = trio.Event()
        self._restarts = RestartBudget(settings.restarts_max)
        self._readmission = Readmission[ScopeT](
            self._begin, end=self._end_poisoned, has_brought=lambda: self._delivery.has_brought
        )
        self._last_fault: EngineFault | None = None  # the engine was reopened after this fault
        self._carried: list[ScopeT] = []  # requests to resume in the reopened engine
        self._reopened = trio.Event()
        self.reopens_at: float | None = None  # set while the engine is broken or asleep: the earliest time to reopen it
        self._gate = StepGate()
        self._pausing = Pausing(self._gate, self._has_begun, self._on_resume)
        self._sleeping = Sleeping()
        self._is_paused_by_sleep = False
        self.instance = secrets.token_hex(8)
        """Random name of this engine. It stays the same when the engine is reopened."""
        self.load_changes = LoadChanges()
        self._steps_scope = trio.CancelScope()
        self._outer_error: Exception | None = None  # error of the connector or of the guard
        self._shell_gauges = ShellGauges(metrics)

    # --- different for each kind of engine ---

    @abstractmethod
    def _install(self, parts: PartsT) -> None:
        """Use new parts, and forget the previous ones. Calls `_install_loop`."""

    @abstractmethod
    def _take_down(self) -> Callable[[PartT], AskedT | None]:
        """Drop the parts that broke.

        Returns:
            A function that returns, for each part that the core had, how the part continues in the next core. None
            means that this is unknown, so the request ends with an error.
        """

    @abstractmethod
    def _begin_next(self, request: ScopeT) -> None:
        """Hand the next sequence of a request to the core."""

    @abstractmethod
    def _set_gauges(self) -> None:
        """Update the gauges. Called before the metrics are shown."""

    @abstractmethod
    def abort_all(self, message: str) -> None:
        """End every request. Each reader gets a last delta with finish reason ABORT and a message, unless it had its
        last one.

        Args:
            message: message for the readers.
        """

    def _ended_given_up(self, choice: PartT) -> bool:
        """Return True if a sequence was about to end when its core was lost, so that it need not be resumed."""
        return False

    def _note_leaving(self) -> None:
        """Notify subscribers that the engine accepts no new requests, or has broken."""

    def _note_broken(self) -> None:
        """Note that the engine has broken for good. The core will report nothing more."""

    def _note_over(self) -> None:
        """Note that no more steps will come from these parts, or that the engine drains."""
        self.load_changes.end()

    @property
    def _is_busy(self) -> bool:
        """True while a request is entered, or its blocks are held."""
        return bool(self._requests)

    # --- running ---

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
        """Run the engine's main task until it is cancelled. Then it waits for the step in flight, and releases
        everything.

        The task returns when the engine sleeps, or broke and can be reopened. Then `reopens_at` is set, and its
        requests wait.

        Args:
            task_status: notified when the engine runs.

        Raises:
            EngineFault: the engine broke for good. Every reader has this error, and `on_fault` had up to
                `grace_seconds_max` to pass it on.
        """
        await self._run_steps(task_status)

    async def _run_guard(self, guard: Guard, scope: trio.CancelScope) -> None:
        """Run the guard until its scope is cancelled. Its error stops the steps."""
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
                        # Shielded, so that the guard is cancelled only after the loop, and the error of the step in
                        # flight is not hidden.
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
            # Log the fault here, where it is handled. The traceback must not live longer, because it refers to the
            # model.
            logger.exception("the engine broke, and is being reopened restarts=%d", self._restarts.taken_count)
            self._carry_requests(fault)
        finally:
            self._is_running = False
            self._note_over()
            if self.fault is None and self.reopens_at is None:
                self.close()

    async def _fail(self, fault: EngineFault) -> None:
        """Notify all requests and subscribers that the engine broke for good."""
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
                    logger.exception("the fault could not be passed on")  # This error must not hide the fault.

    def close(self) -> None:
        """End all requests, because nothing more is computed. Each reader gets a last delta, and everything is
        released.
        """
        self.reopens_at = None
        self._reopened.set()
        self._pausing.end()
        self._sleeping.end()
        self.abort_all("the engine was closed")

    # --- reopened after a fault ---

    def _is_to_be_reopened(self, fault: EngineFault, *, has_progress: bool) -> bool:
        now = trio.current_time()
        seconds = self._restarts.take(now, has_progress=has_progress)
        if seconds is None:
            return False
        self.reopens_at = now + seconds
        self.metrics.engine_restarts_total.inc()
        return True

    def _carry_requests(self, fault: EngineFault | None) -> None:
        """Take the unfinished sequences from a core that broke or goes to sleep, to resume them in the next core.

        Blocks that were held are lost.

        Args:
            fault: the fault. None: the engine goes to sleep, and no step is in flight.
        """
        delivery = self._delivery
        self._set_gauges()  # publish the counts so far, because the next core starts from zero
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
        """End a request that broke the engine: all failed steps had it, and one of them had no other request."""
        logger.error("request ended: it was in %d steps that failed request=%s", request.fault_count, request.id)
        self.metrics.requests_poisoned_total.inc()
        self._restarts.forgive(request.fault_count)
        message = (
            f"the engine broke {request.fault_count} times in steps that computed this request, also in a step that "
            f"computed nothing else; it was ended so that other requests continue: {self._last_fault}"
        )
        self._end_with_error(request, message, stop_reason=REQUEST_POISONED)

    def _end_with_error(self, request: ScopeT, message: str, *, stop_reason: str | None = None) -> None:
        """End a request that the core does not have."""
        self._delivery.note_lost(request)
        self._delivery.end_with_final_delta(request, FinishReason.ERROR, message, stop_reason=stop_reason)

    def reopen(self, parts: PartsT) -> None:
        """Use new parts. The caller then calls `run`.

        Args:
            parts: the new parts.
        """
        assert self.reopens_at is not None, "the engine did not break"
        self._install(parts)
        self.reopens_at = None

    async def reopening_failed(self, error: Exception) -> None:
        """Handle an error while the engine was reopened.

        Args:
            error: the error.

        Raises:
            EngineFault: no further attempt is allowed.
        """
        fault = EngineFault(f"the engine could not be reopened: {type(error).__name__}: {error}")
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
        """Hand sequences of a request to the core, up to the number that it may have at a time."""
        while request.upcoming and request.core_count < request.sequence_count:
            self._begin_next(request)

    async def keep_deadlines(self) -> None:
        """End requests whose deadline has passed. This is the engine's second task, and runs until it is cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.dispatch.run)
            await self._deadline_keeper.run()

    @property
    def ready(self) -> bool:
        """True if the engine would admit a new request, unless its queue is full."""
        return self._is_open and not self._pausing.holds_up and self.step_watch.overdue() is None

    @property
    def _is_open(self) -> bool:
        """True if the engine continues the requests that it has accepted."""
        return self._is_running and not self.draining and self.fault is None

    def drain(self) -> None:
        """Stop accepting requests. Requests that have not begun to run are refused. Running requests continue.

        If the engine is paused, running requests cannot continue. They end with their partial results.
        """
        self._own_run.check("engine.drain")
        self.draining = True
        self._reopened.set()  # requests that wait for the reopened engine have not begun to run
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
        """End begun requests if they cannot continue, because the server is shutting down."""
        if not self._gate.is_open:
            self._end_begun("the server is shutting down, and its engine is paused", SERVER_STOPPING)

    @abstractmethod
    def stats(self) -> EngineStats | IterativeStats:
        """Return counts from the core."""

    async def wait_until_idle(self) -> None:
        """Wait until no request is entered, no block is held for another engine, and all KV blocks are free.

        Blocks of a request that left during a step are free when that step ends. To wait for the end of a server, call
        drain() first.
        """
        self._own_run.check("engine.wait_until_idle")
        while self._is_busy or self._computes:
            if self._idle.is_set():  # otherwise another task waits for the same event
                self._idle = trio.Event()
            await self._idle.wait()

    async def wait_all_free(self) -> None:
        """Wait until everything that requests had is free. An alias of `wait_until_idle` for tests."""
        await self.wait_until_idle()

    @property
    def _computes(self) -> bool:
        """True if the core still has sequences, including sequences whose readers left during the step in flight."""
        if not self._is_running or self.fault is not None:
            return False
        stats = self.stats()
        return stats.running_count + stats.waiting_count > 0

    def _note_idle(self) -> None:
        if not (self._idle.is_set() or self._is_busy or self._computes):
            self._idle.set()

    def wake(self) -> None:
        """Wake the step loop, because there may be something to do. Costs nothing while steps run.

        A connector calls this when it has something to report.
        """
        self._loop.wake()

    def _after_step(self) -> None:
        if not self._idle.is_set():
            self._note_idle()
        self._readmission.look()
        self._pausing.look()
        self.load_changes.note()

    # --- paused ---

    async def pause_generation(self, mode: Literal["abort", "wait", "keep"] = "abort") -> None:
        """Begin no further step until `resume_generation`. Return when no step is in flight, or when the engine was
        resumed.

        New requests wait, and all deadlines continue to count. A request that is left during the pause ends at once. If
        the caller stops waiting, the engine still pauses.

        Args:
            mode: what happens to begun requests. "abort" ends them with their partial results. "wait" lets them end
                first, and meanwhile no new request begins. "keep" suspends them until the engine is resumed. If the
                engine is paused already, only the aborts of "abort" happen.

        Raises:
            InvalidRequest: an argument is not allowed.
            Draining: the server is shutting down.
            EngineFault: the engine is broken.
        """
        self._own_run.check("engine.pause_generation")
        self._check_may_pause(mode)
        self._is_paused_by_sleep = False
        await self._pause(mode)

    async def _pause(self, mode: str) -> None:
        was = self._pausing.state
        self._pausing.pause(drains=mode == "wait")
        if mode == "abort":
            self._end_begun("the engine was paused, and this request ended with its partial result", PAUSED)
        if self._pausing.state is not was:
            logger.info("pauses mode=%s", mode)
        self.load_changes.note()
        await self._pausing.wait_until_paused()

    def resume_generation(self) -> None:
        """Resume steps. No effect if the engine is not paused."""
        self._own_run.check("engine.resume_generation")
        if self._pausing.state is not PauseState.RUNS:
            logger.info("resumes")
        self._is_paused_by_sleep = False
        self._pausing.resume()

    @property
    def has_half_weights(self) -> bool:
        """True after an update of the weights failed halfway. Nothing is computed until another update is complete."""
        return False

    @property
    def is_paused(self) -> bool:
        """True if no step begins until `resume_generation`."""
        return self._pausing.state is PauseState.PAUSED

    @property
    def holds_up(self) -> bool:
        """True if new requests wait, because the engine is paused or about to be."""
        return self._pausing.holds_up

    async def sleep(self, level: int = 1, mode: Literal["abort", "wait", "keep"] = "abort") -> None:
        """Release memory until `wake_up`.

        The engine pauses first, as in `pause_generation`. If the caller stops waiting during the pause, the pause is
        undone. The method returns when the memory is released, or when the engine was resumed before. If the engine
        sleeps already, its level does not change. Blocks that are held for other engines are lost.

        Args:
            level: 1 releases the KV cache, and keeps the weights. 2 also releases the weights and everything else that
                the engine opened. Then `wake_up` reads the model again.
            mode: what happens to begun requests, as in `pause_generation`. Kept requests are computed again after
                `wake_up`, and their streams continue with the same tokens.

        Raises:
            InvalidRequest: an argument is not allowed, or this engine does not support level 1.
            Draining: the server is shutting down.
            EngineReopening: the engine broke, and is being reopened.
            EngineFault: the engine is broken.
        """
        self._own_run.check("engine.sleep")
        level = to_int("level", level)
        if level not in LEVELS:
            refuse("level", level, "1 or 2")
        self._check_may_pause(mode)
        if level == 1 and self._why_no_cache_release is not None and not self.sleep_level:
            raise InvalidRequest(f"{self._why_no_cache_release}: it can sleep at level 2", param="level")
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
        """Begin to sleep. No step is in flight."""
        logger.info("falls asleep level=%d", level)
        self._sleeping.fall_asleep(level)
        self._pausing.set_asleep(True)
        self._show_sleep()
        self._steps_scope.cancel()

    async def wake_up(self) -> None:
        """Allocate the memory again, with an empty prefix cache. Return when the engine runs again.

        An engine that was paused when it fell asleep is paused afterwards. The call has no effect if the engine is
        awake. If the caller stops waiting, the engine still wakes up.

        Raises:
            EngineFault: there is not enough memory, or the model cannot be read.
        """
        self._own_run.check("engine.wake_up")
        if self.sleep_level:
            self._sleeping.wake()
            await self._sleeping.wait_until_up()
        if self.fault is not None:
            raise self.fault

    @property
    def is_sleeping(self) -> bool:
        """True from the moment when the engine begins to release memory until all memory is allocated again."""
        return self.sleep_level > 0

    @property
    def sleep_level(self) -> int:
        """Sleep level of the engine. 0: awake."""
        return self._sleeping.level

    async def sleep_on(self) -> None:
        """Note that the memory is released, and wait until it must be allocated again."""
        self._sleeping.note_down()
        await self._sleeping.wait_until_woken()
        # Otherwise an attempt to wake up failed, and reopens_at has the time of the next attempt.
        if self.reopens_at == math.inf:
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

    def _on_resume(self) -> None:
        self.step_watch.note_unblocked(trio.current_time())
        self.load_changes.note()
        self.wake()

    async def _wait_until_admitted(self) -> None:
        """Wait until new requests are computed, or the engine accepts no more requests."""
        while self._pausing.holds_up or self.reopens_at is not None:
            if self.draining or self.fault is not None:
                return
            await self._pausing.wait_until_admitted()
            if self.reopens_at is not None:
                await self._reopened.wait()

    # --- what it shows ---

    def _waiting_since(self) -> float | None:
        """Return when the oldest unfinished request entered, or None if there is none, or if steps are blocked."""
        if not self._gate.is_open:
            return None
        return min((request.entered_at for request in self._requests if not request.is_finished), default=None)

    def _show_shell(self, *, running_count: int, waiting_count: int, deferred_count: int) -> None:
        """Update the gauges that every engine has.

        Args:
            running_count: sequences that run.
            waiting_count: sequences that wait in the core.
            deferred_count: sequences among these that wait for something else than free blocks or slots.
        """
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
