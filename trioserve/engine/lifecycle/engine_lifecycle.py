"""The lifecycle of any engine, and of the requests in it.

An engine runs, pauses, sleeps, drains, breaks, and is reopened. Every fault of an engine is handled in this module. A
request enters the queue, gets a lease, is prepared, joins the core, and leaves. However a request ends, one synchronous
call releases everything: `_leave`.

The engine's `Work` implements the part that differs between engines: generating texts, pooling, or generating images.
"""

from __future__ import annotations

import functools
import logging
import math
import secrets
from collections.abc import Awaitable, Callable, Iterable
from contextlib import nullcontext
from typing import Any, Generic, Literal, TypeVar, cast

import trio

from trioserve.admission.admission_scope import AdmissionScope
from trioserve.admission.dispatch import EndedIds
from trioserve.admission.local_endpoint import local_dispatch
from trioserve.contracts.arguments import refuse, to_float, to_int, to_str
from trioserve.contracts.deadlines import NO_DEADLINES, Deadline, passed_message
from trioserve.contracts.errors import EngineFault, GpuLost, InvalidRequest, RankLost
from trioserve.contracts.events import AbortOutcome, FinishReason
from trioserve.contracts.kv_transfer import EngineRole, RunningConnector, Started
from trioserve.contracts.output import REQUEST_POISONED
from trioserve.contracts.tracing import NO_TRACER, Tracer
from trioserve.engine.lifecycle.core_delivery import CoreDelivery
from trioserve.engine.lifecycle.engine_loop import EngineLoop
from trioserve.engine.lifecycle.load_changes import LoadChanges
from trioserve.engine.lifecycle.pausing import LEVELS, PauseState, Pausing, Sleeping, StepGate
from trioserve.engine.lifecycle.request_admission import RequestAdmission
from trioserve.engine.lifecycle.request_scope import RequestsById, RequestScope, ScopeState
from trioserve.engine.lifecycle.restarts import LONE_FAULTS_MAX, Readmission, RestartBudget
from trioserve.engine.lifecycle.step_times import StepWatch
from trioserve.engine.lifecycle.work import Guard, Parts, Work
from trioserve.engine.request_preparation import instance_of
from trioserve.engine.settings import EngineSettings
from trioserve.engine.weight_updates import WEIGHTS_REPLACED, WeightUpdates
from trioserve.metrics.engine_gauges import ShellGauges
from trioserve.metrics.registry import Metrics
from trioserve.trio_tools.deadline_keeper import Alarm, DeadlineKeeper
from trioserve.trio_tools.errors_unwrapped import errors_unwrapped
from trioserve.trio_tools.interrupts import uninterrupted
from trioserve.trio_tools.own_run import OwnRun

__all__ = ["PAUSED", "SERVER_STOPPING", "EngineLifecycle"]

logger = logging.getLogger(__name__)

SERVER_STOPPING = "server_stopping"
PAUSED = "paused"
PAUSE_MODES = ("abort", "wait", "keep")
WEIGHTS_REPLACED_MESSAGE = "the weights were replaced, and this request ended with its partial result"

ScopeT = TypeVar("ScopeT", bound=RequestScope[Any, Any, Any])
PartsT = TypeVar("PartsT", bound=Parts)


@uninterrupted
class EngineLifecycle(Generic[ScopeT, PartsT]):
    """Runs an engine and its requests. Call every method in the thread of the Trio program that opened the engine.

    Args:
        work: implements the preparation and computation of requests.
        parts: the objects of the first opening.
        metrics: registry of the engine's metrics.
        settings: limits of the engine.
        sequences_max: highest number of sequences that run at the same time.
        new_request_id: makes the id of a request whose caller gives none.
        lent_max: number of additional leases for requests that must not wait in the queue.

    Attributes:
        requests: requests whose scope is entered.
        kept_holds: requests whose scope has ended, but another engine still has to read their blocks.
        preparing_count: sequences of entered requests that are not in the core yet.
        weight_updates: replaces the weights.
        instance: random name of this engine. It stays the same when the engine is reopened.
        reopens_at: earliest time at which the engine is reopened. None unless the engine is broken or asleep.
        on_fault: reports a fault to the clients.
        role: role in KV exchange, shown to routers. None: the engine does not exchange KV with others.
    """

    _core: Any
    _delivery: CoreDelivery[ScopeT, Any, Any, Any]
    _loop: EngineLoop[Any, Any, Any]
    role: EngineRole | None = None

    def __init__(
        self,
        work: Work[ScopeT, PartsT],
        parts: PartsT,
        *,
        metrics: Metrics,
        settings: EngineSettings,
        sequences_max: int,
        new_request_id: Callable[[], str],
        lent_max: int = 0,
    ) -> None:
        self._own_run = OwnRun()
        self._work = work
        self.metrics = metrics
        self._settings = settings
        self.tracer: Tracer = NO_TRACER
        self.draining = False
        self.fault: EngineFault | None = None
        self.on_fault: Callable[[], Awaitable[None]] | None = None
        self.step_watch = StepWatch(settings.step_seconds_max)
        self.requests = RequestsById[ScopeT]()
        self.kept_holds = RequestsById[ScopeT]()
        self._ended_ids = EndedIds()
        self._live_max = sequences_max + settings.waiting_requests_max
        self.preparing_count = 0
        self._leased_count = 0  # Sequences among `preparing_count` whose request has a lease.
        self._deadline_keeper = DeadlineKeeper()
        self.dispatch = local_dispatch(
            sequences_max,
            waiting_requests_max=settings.waiting_requests_max,
            waiting_prompt_tokens_max=settings.waiting_prompt_tokens_max,
            waiting_seconds_max=settings.waiting_seconds_max,
            lent_max=lent_max,
        )
        self._admission = RequestAdmission(self.dispatch, metrics, settings, new_request_id)
        self._is_running = False
        self._idle = trio.Event()
        self.restarts = RestartBudget(settings.restarts_max)
        self._readmission = Readmission[ScopeT](
            self._begin, end=self._end_poisoned, has_progress=lambda: self._delivery.has_progress
        )
        self._last_fault: EngineFault | None = None  # The engine was last reopened after this fault.
        self._carried: list[ScopeT] = []  # Requests that the reopened engine will resume.
        self._reopened = trio.Event()
        self.reopens_at: float | None = None
        self.gate = StepGate()
        self._pausing = Pausing(self.gate, self._has_begun, self._on_resume)
        self._sleeping = Sleeping()
        self._is_paused_by_sleep = False
        self.weight_updates = WeightUpdates(
            parts.weights,
            self._pausing,
            self.gate,
            computes=lambda: self._is_running,
            check_may_replace=self._check_may_replace,
            end_begun=lambda: self._end_begun(WEIGHTS_REPLACED_MESSAGE, WEIGHTS_REPLACED),
            take_weights=lambda version, recomputes: work.use_weights(version, recomputes=recomputes),
            note_ended=self._note_update_ended,
        )
        self.instance = secrets.token_hex(8)
        self._outer_error: Exception | None = None  # An error of the connector or of the guard.
        self._shell_gauges = ShellGauges(metrics)
        work.attach(self)
        self._install(parts)
        self._show_sleep()
        metrics.on_scrape(self._set_gauges)

    # --- running ---

    def _install(self, parts: PartsT) -> None:
        """Use the objects of a new opening, and forget the old ones."""
        self._connector = parts.connector
        self._guard = parts.guard
        self._why_no_cache_release = parts.cache_release if isinstance(parts.cache_release, str) else None
        self._core, self._delivery = self._work.install(parts)
        self._loop = EngineLoop(
            self._core,
            parts.steps,
            self._delivery,
            readers_first=parts.readers_first,
            when_idle=parts.when_idle,
            after_step=self._after_step,
            step_times=self._work.step_times,
            gate=self.gate,
        )
        self.load_changes = LoadChanges()
        self._steps_scope = trio.CancelScope()
        self._outer_error = None

    async def run(
        self,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Run the engine's main task until it is cancelled. After a cancel, the task waits for the step in flight, and
        releases everything.

        The task returns when the engine sleeps, or when the engine broke and can be reopened. In both cases
        `reopens_at` is set, and the engine's requests wait.

        Args:
            task_status: notified when the engine runs.

        Raises:
            StartupError: the connector cannot start.
            EngineFault: the engine broke and cannot be reopened. Every reader has received this error. `on_fault` had
                up to `grace_seconds_max` to report it to the clients.
        """
        connector = self._connector
        if connector is None:
            await self._run_steps(task_status)
            return
        with errors_unwrapped():
            async with trio.open_nursery() as nursery:
                scope = trio.CancelScope()
                place = await nursery.start(self._run_connector, connector, scope)
                listens = "" if place is None else f" listens={place}"
                logger.info("connector runs connector=%s role=%s%s", type(connector).__name__, self.role, listens)
                # Shield the connector until the step in flight has ended, because the core may call it.
                scope.shield = True
                try:
                    await self._run_steps(task_status)
                finally:
                    scope.cancel()

    async def _run_connector(
        self, connector: RunningConnector, scope: trio.CancelScope, task_status: trio.TaskStatus[object]
    ) -> None:
        try:
            with scope:
                await connector.run(task_status=cast(Started, task_status))
                # A connector must run until it is cancelled. After this bug, deadlines still end its holds and loads.
                logger.warning("connector ended without a request to stop connector=%s", type(connector).__name__)
        except Exception as error:
            if not self._is_running:
                raise
            if self.fault is not None:
                logger.exception("the connector failed beside a step")
            # This error is raised when the step in flight has ended, like the error of a step.
            self._outer_error = error
            self._steps_scope.cancel()

    async def _run_guard(self, guard: Guard, scope: trio.CancelScope) -> None:
        """Run the guard until its scope is cancelled. An error of the guard stops the steps."""
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
                        # The scope is shielded, so that the guard is cancelled only after the loop.
                        # Otherwise a cancelled guard could hide the error of the step in flight.
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
            if isinstance(error, GpuLost):
                self.restarts.end("an engine that is reopened in this process could not use the GPU either")
            if not self._is_to_be_reopened(fault, has_progress=self._delivery.has_progress):
                await self._fail(fault)
                raise fault from error
            # Log the fault here, and drop its traceback. A stored traceback would keep the model's memory alive.
            logger.exception("the engine broke, and is being reopened restarts=%d", self.restarts.taken_count)
            self._carry_requests(fault)
        finally:
            self._is_running = False
            self._note_over()
            if self.fault is None and self.reopens_at is None:
                self.close()

    async def _fail(self, fault: EngineFault) -> None:
        """Notify all requests and subscribers that the engine broke and will not be reopened."""
        if self.restarts.ended_by:
            fault.args = (f"{fault}; {self.restarts.ended_by}",)
        self.fault = fault
        self.reopens_at = None
        self._reopened.set()
        self._pausing.end()
        self._sleeping.end()
        self.kept_holds.clear()  # Nothing will report the end of these holds.
        self._note_idle()
        self._note_over()
        self._work.note_leaving()
        for request in self.requests:
            request.fail(fault)
        if self.on_fault is not None:
            with trio.move_on_after(self._settings.grace_seconds_max):
                try:
                    await self.on_fault()
                except Exception:
                    # An error in the report must not hide the fault.
                    logger.exception("the fault could not be passed on")

    def close(self) -> None:
        """End all requests, because the engine will not compute any more. Each reader gets a last delta, and all
        resources are released.
        """
        self.reopens_at = None
        self._reopened.set()
        self._pausing.end()
        self._sleeping.end()
        self.abort_all("the engine was closed")
        self._core.progress(trio.current_time())  # This call frees blocks that the connector releases at once.

    def abort_all(self, message: str, *, hands_over: bool = False) -> None:
        """End every request and every hold. Each reader gets a last delta with finish reason ABORT, unless it already
        has a last delta.

        If another server can resume the request, the delta's stop reason contains this fact.

        Args:
            message: message for the readers.
            hands_over: True to hand requests over as `Engine.hand_over` does, if the engine has a connector. Blocks of
                these requests stay held until they are read or the engine is closed.
        """
        hands_over = hands_over and self._connector is not None and self.step_watch.overdue() is None
        for request in self.requests:
            if hands_over and self._work.try_hand_over(request):
                continue
            stop_reason = SERVER_STOPPING if request.is_resumable else None
            self._delivery.end_with_final_delta(request, FinishReason.ABORT, message, stop_reason=stop_reason)
            self._delivery.end_holds(request)
        for request in self.kept_holds:
            if not (hands_over and self._work.try_hand_over(request)):
                self._delivery.end_holds(request)

    # --- reopening after a fault ---

    def _is_to_be_reopened(self, fault: EngineFault, *, has_progress: bool) -> bool:
        now = trio.current_time()
        seconds = self.restarts.take(now, has_progress=has_progress)
        if seconds is None:
            return False
        self.reopens_at = now + seconds
        self.metrics.engine_restarts_total.inc()
        return True

    def _carry_requests(self, fault: EngineFault | None) -> None:
        """Remove the unfinished sequences from a core that broke or goes to sleep. The next core resumes them.

        Blocks that are held for other engines are lost.

        Args:
            fault: the fault. None: the engine goes to sleep, and no step is in flight.
        """
        delivery = self._delivery
        self._set_gauges()  # Publish the counts so far, because the counts of the next core start from zero.
        self._reopened = trio.Event()
        suspect_ids = delivery.ids_in_flight()
        choices = delivery.abandon()
        continued = self._work.continued()
        self.kept_holds.clear()
        self._install(self._work.no_parts())
        self._note_over()
        self.step_watch.forget(trio.current_time())
        requests: dict[ScopeT, list[tuple[Any, Any]]] = {}
        lost: list[ScopeT] = []
        for choice in choices:
            request: ScopeT = choice.request
            carried = requests.setdefault(request, [])
            if choice.is_ended or request.scope is ScopeState.LEFT:
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
        """End a request that broke the engine. Every failed step computed this request, and one of them computed
        nothing else.
        """
        logger.error("request ended: it was in %d steps that failed request=%s", request.fault_count, request.id)
        self.metrics.requests_poisoned_total.inc()
        self.restarts.forgive(request.fault_count)
        message = (
            f"the engine broke {request.fault_count} times in steps that computed this request, also in a step that "
            f"computed nothing else; it was ended so that other requests continue: {self._last_fault}"
        )
        self._end_with_error(request, message, stop_reason=REQUEST_POISONED)

    def _end_with_error(self, request: ScopeT, message: str, *, stop_reason: str | None = None) -> None:
        """End a request that is not in the core, with an error."""
        self._delivery.note_lost(request)
        self._delivery.end_with_final_delta(request, FinishReason.ERROR, message, stop_reason=stop_reason)

    def reopen(self, parts: PartsT) -> None:
        """Use the objects of a new opening. The caller then calls `run`.

        Args:
            parts: the new parts.
        """
        assert self.reopens_at is not None, "the engine did not break"
        if self.weight_updates.install(parts.weights):
            self._work.use_weights(None)
        self._install(parts)
        self.reopens_at = None

    async def reopening_failed(self, error: Exception) -> None:
        """Handle an error that happened while the engine was being reopened.

        Raises:
            EngineFault: no further restart is allowed.
        """
        fault = EngineFault(f"the engine could not be reopened: {type(error).__name__}: {error}")
        if not self._is_to_be_reopened(fault, has_progress=False):
            await self._fail(fault)
            raise fault from error
        logger.error("%s", fault, exc_info=error)

    def _begin_carried(self) -> None:
        carried, self._carried = self._carried, []
        for request in carried:
            request.use_weights(self.weight_updates.version)
        self._readmission.start(carried)
        self._reopened.set()
        if self.sleep_level:
            self._note_awake()

    def _begin(self, request: ScopeT) -> None:
        """Add sequences of a request to the core, until the request has its allowed number of sequences in the core."""
        while request.upcoming and request.core_count < request.sequence_count:
            choice, sequence = request.upcoming.popleft()
            self._core.add(sequence)
            self._delivery.add(choice)

    async def keep_deadlines(self) -> None:
        """End requests whose deadlines have passed, and run the engine's background tasks. Runs until cancelled."""
        async with trio.open_nursery() as nursery:
            for run in (*self._work.tasks, self.dispatch.run):
                nursery.start_soon(run)
            await self._deadline_keeper.run()

    @property
    def ready(self) -> bool:
        """True if the engine would admit a new request, unless its queue is full."""
        return self._is_open and not self._pausing.blocks_admission and self.step_watch.overdue() is None

    @property
    def _is_open(self) -> bool:
        """True if the engine continues its accepted requests."""
        return self._is_running and not self.draining and self.fault is None

    def drain(self) -> None:
        """Stop accepting requests. Requests that have not begun to run are refused. Running requests continue to their
        end.

        If the engine is paused, running requests cannot continue, so they end with their partial results.
        """
        self._own_run.check("engine.drain")
        self.draining = True
        # Wake the requests that wait for the reopened engine. They have not begun to run, so they are refused.
        self._reopened.set()
        self._pausing.end()
        self.dispatch.drain()
        self._note_over()
        self._work.note_leaving()
        for request in self.requests:
            if request.has_begun and not request.has_run:
                self._delivery.end(request, FinishReason.ABORT)
                request.fail(self._admission.refused_draining())
        self._end_begun_if_blocked()

    def _end_begun_if_blocked(self) -> None:
        """End in-flight requests if the server is shutting down and a pause blocks their steps."""
        if not self.gate.is_open and not self.weight_updates.is_updating:
            self._end_begun("the server is shutting down, and its engine is paused", SERVER_STOPPING)

    async def wait_until_idle(self) -> None:
        """Wait until no request is entered, no block is held for another engine, and all KV blocks are free.

        When a request leaves during a step, its blocks become free at the end of that step. To wait until a server has
        finished, call drain() first.
        """
        self._own_run.check("engine.wait_until_idle")
        while self._is_busy or self._computes:
            if self._idle.is_set():  # If the event is not set, another task already waits for it.
                self._idle = trio.Event()
            await self._idle.wait()

    async def wait_all_free(self) -> None:
        """Wait until all resources of requests are free. An alias of `wait_until_idle` for tests."""
        await self.wait_until_idle()

    @property
    def _computes(self) -> bool:
        """True if the core still has sequences, including sequences whose readers left during the step in flight."""
        if not self._is_running or self.fault is not None:
            return False
        stats = self._core.stats()
        return bool(stats.running_count + stats.waiting_count > 0)

    @property
    def _is_busy(self) -> bool:
        """True while a request is entered, or its blocks are held."""
        return bool(self.requests or self.kept_holds)

    def _note_over(self) -> None:
        """Note that these parts will compute no more steps, or that the engine drains."""
        self.load_changes.end()
        self._work.note_stopped()

    def _note_idle(self) -> None:
        if not (self._idle.is_set() or self._is_busy or self._computes):
            self._idle.set()

    def wake(self) -> None:
        """Wake the step loop, because there may be new work. This is cheap while steps run.

        A connector calls this method when it has events to report.
        """
        self._loop.wake()

    def _after_step(self) -> None:
        if not self._idle.is_set():
            self._note_idle()
        if not self._readmission.is_settled:
            self._readmission.advance()
        if self._pausing.state is not PauseState.RUNS:
            self._pausing.advance()
        self.load_changes.note()

    # --- pausing ---

    async def pause_generation(self, mode: Literal["abort", "wait", "keep"] = "abort") -> None:
        """Begin no further step until `resume_generation`. Return when no step is in flight, or when the engine was
        resumed.

        New requests wait, and all deadlines continue to count. A request that is cancelled during the pause ends at
        once. If the caller of this method is cancelled, the engine still pauses.

        Args:
            mode: what happens to in-flight requests. "abort" ends them with their partial results. "wait" lets them
                finish before the pause, and new requests do not begin meanwhile. "keep" suspends them until the engine
                is resumed. If the engine is already paused, "abort" still ends in-flight requests, and the other modes
                have no effect.

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
        """Let steps begin again after a pause. No effect if the engine is not paused."""
        self._own_run.check("engine.resume_generation")
        if self._pausing.state is not PauseState.RUNS:
            logger.info("resumes")
        self._is_paused_by_sleep = False
        self._pausing.resume()

    @property
    def has_half_weights(self) -> bool:
        """True if an update of the weights failed halfway. No step begins until another update is complete."""
        return self.weight_updates.is_half

    @property
    def is_paused(self) -> bool:
        """True if the engine is paused, so that no step begins until `resume_generation`."""
        return self._pausing.state is PauseState.PAUSED

    @property
    def blocks_admission(self) -> bool:
        """True if new requests must wait, because the engine is paused or will pause soon."""
        return self._pausing.blocks_admission

    async def sleep(self, level: int = 1, mode: Literal["abort", "wait", "keep"] = "abort") -> None:
        """Release memory until `wake_up`.

        The engine pauses first, as in `pause_generation`. If the caller is cancelled during the pause, the pause is
        undone. The method returns when the memory is released, or when the engine was resumed earlier. If the engine
        already sleeps, its level does not change. Blocks that are held for other engines are lost.

        Args:
            level: 1 releases the KV cache, and keeps the weights. 2 also releases the weights and everything else that
                the engine opened. Then `wake_up` reads the model again.
            mode: what happens to in-flight requests, as in `pause_generation`. Kept requests are computed again after
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
        async with self.weight_updates.turn if self.weight_updates.is_possible else nullcontext():
            if mode == "wait" and self.weight_updates.is_half and self._has_begun():
                # This call would wait for in-flight requests, which need an update to end, and would block that update.
                raise InvalidRequest(
                    "an update of the weights failed halfway, so begun requests cannot end: update the weights first, "
                    "or sleep with another mode",
                    param="mode",
                )
            # Check again, because an engine that started to drain meanwhile must finish its requests.
            self._check_may_pause(mode)
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
        """Begin to sleep. Call this when no step is in flight."""
        logger.info("falls asleep level=%d", level)
        self._sleeping.fall_asleep(level)
        self._pausing.set_asleep(True)
        self._show_sleep()
        self._steps_scope.cancel()

    async def wake_up(self) -> None:
        """Allocate the memory again, with an empty prefix cache. Return when the engine runs again.

        If the engine was paused before its sleep, it is paused again. The call has no effect if the engine is awake. If
        the caller is cancelled, the engine still wakes up.

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
        """Sleep level of the engine. It is 0 if the engine is awake."""
        return self._sleeping.level

    async def sleep_on(self) -> None:
        """Note that the memory is released. Then wait until the memory must be allocated again."""
        self._sleeping.note_down()
        await self._sleeping.wait_until_woken()
        # If the time is finite, an attempt to wake up has failed, and the time is that of the next attempt.
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
        return any(request.has_begun for request in self.requests)

    def _end_begun(self, message: str, stop_reason: str) -> None:
        for request in self.requests:
            if request.has_begun:
                self._delivery.end_with_final_delta(request, FinishReason.ABORT, message, stop_reason=stop_reason)

    def _on_resume(self) -> None:
        self.step_watch.note_unblocked(trio.current_time())
        self.load_changes.note()
        self.wake()

    async def wait_until_admitted(self) -> None:
        """Wait until new requests can be computed, or the engine does not accept requests any more."""
        while self._pausing.blocks_admission or self.reopens_at is not None:
            if self.draining or self.fault is not None:
                return
            await self._pausing.wait_until_admitted()
            if self.reopens_at is not None:
                await self._reopened.wait()

    # --- weights ---

    def _check_may_replace(self) -> None:
        """Raise an error if the weights cannot be replaced now."""
        if self.fault is not None:
            raise self.fault
        if self.draining:
            raise self._admission.refused_draining()
        if self.sleep_level:
            raise InvalidRequest("the engine sleeps, and its weights cannot be replaced: wake it up first")
        if not self._is_running:
            raise self._admission.refused_reopening()

    def _note_update_ended(self) -> None:
        if self.draining:
            self._end_begun_if_blocked()
        self.load_changes.note()

    # --- metrics ---

    def _waiting_since(self) -> float | None:
        """Return the time at which the oldest unfinished request entered. None: there is no request, or steps are
        blocked.
        """
        if not self.gate.is_open:
            return None
        return min((request.entered_at for request in self.requests if not request.is_finished), default=None)

    def _set_gauges(self) -> None:
        """Update the gauges. Called before each scrape of the metrics."""
        now = trio.current_time()
        stats = self._core.stats()
        deferred_count = self._work.show(stats)
        self._shell_gauges.show(
            running_count=stats.running_count,
            waiting_count=stats.waiting_count + self.preparing_count,
            deferred_count=deferred_count + self._leased_count,
            live_count=len(self.requests),
            task_count=trio.lowlevel.current_statistics().tasks_living,
            step_seconds=self.step_watch.age_seconds(now),
            step_seconds_max=self.step_watch.seconds_max,
            no_progress_seconds=self.step_watch.idle_seconds(now, self._waiting_since()),
        )

    # --- requests ---

    async def _submit(self, request: ScopeT) -> None:
        """Enter the queue, wait for a lease, prepare, and add the sequences to the core. If an error is raised, all
        resources are released.
        """
        count = request.sequence_count
        self._work.check(request)
        self._check_open(count)
        admission = self._admission.begin(request)
        request.on_gone = lambda: self._leave_queue(request, admission)
        self.requests.add(request)
        try:  # From this line on, an error must release resources.
            request.choices = self._work.begin(request, is_waiting=admission.is_waiting)
            request.begin_next = lambda: self._begin(request)
            if request.deadlines is not NO_DEADLINES:
                self._set_alarms(request)
            self.preparing_count += count
            self.load_changes.note()
            try:
                with request.preparation:
                    await self._admission.lease(request, admission)
                    request.is_leased = True
                    self._leased_count += count
                    request.trace.leased()
                    await self._work.prepare(request)
                    if not request.is_finished:  # A resumed response that is already complete needs no computation.
                        await self.wait_until_admitted()
            finally:
                self.preparing_count -= count
                self._leased_count -= count if request.is_leased else 0
                self.load_changes.note()
            if request.is_finished:
                return  # The request was aborted meanwhile, and its reader gets the final delta.
            if not self._is_open:
                raise self.fault or self._admission.refused_draining()
            request.use_weights(self.weight_updates.version)
            request.upcoming.extend(self._work.sequences(request))
            self._readmission.admit(request)
        except BaseException:
            self._leave(request)
            raise
        self._loop.wake()

    def _leave(self, request: ScopeT) -> None:
        """Leave a request's scope: abort its sequences, end or keep its holds, and release its resources.

        Every request ends with this synchronous call, also after an error or a cancel.
        """
        self._delivery.end(request, FinishReason.ABORT)
        request.cancel_alarms()
        if self._work.keeps_hold(request) and self.fault is None:
            self.kept_holds.add(request)
            request.on_released = lambda: self._forget_hold(request)
        else:
            self._delivery.end_holds(request)
            self._work.note_left(request)
        self.requests.remove(request)
        self._ended_ids.note(request.id, request.owner)
        if self.fault is not None:
            request.trace.freed()  # A broken core will not report that the blocks are free.
            self._work.release(request)
        request.trace.left(
            prompt_tokens=request.prompt_token_count,
            completion_tokens=request.completion_token_count,
            cached_tokens=request.cached_token_count,
        )
        self.load_changes.note()
        self._note_idle()

    def _forget_hold(self, request: ScopeT) -> None:
        """Forget a request whose scope has ended, because its blocks are not held any more."""
        if self.fault is None:
            self.kept_holds.remove(request)
            self._work.note_left(request)
            self._note_idle()

    def _leave_queue(self, request: ScopeT, admission: AdmissionScope) -> None:
        """Return the queue position or the lease, because the request has no sequences in the core any more."""
        if admission.is_queued:
            self._delivery.note_left_queue(request.sequence_count)
        self.dispatch.leave(admission)
        self._work.release(request)
        request.trace.freed()
        self._readmission.advance()
        self._pausing.advance()

    def abort(
        self,
        request_ids: Iterable[str],
        reason: FinishReason = FinishReason.ABORT,
        *,
        owner: str | None = None,
        min_age_seconds: float = 0.0,
    ) -> dict[str, AbortOutcome]:
        """End requests by the ids that their callers chose. Never waits.

        A reader gets all earlier deltas, and then a last delta with the reason. Blocks are free at once, or right after
        the step in flight. If blocks of a finished request are held, the connector is notified, and may release them
        later.

        Args:
            request_ids: ids of requests. A single string is one id. An unknown id is not an error.
            reason: finish reason of the last delta.
            owner: abort only requests of this user. Requests of other users are reported as unknown. None: all
                requests.
            min_age_seconds: abort only requests that were entered at least this long ago. Younger requests with the
                same id continue.

        Returns:
            The outcome per id.

        Raises:
            InvalidRequest: an argument has a wrong type. Then no request was ended.
        """
        self._own_run.check("engine.abort")
        if isinstance(request_ids, str):  # A string is iterable, and each of its letters would be taken as an id.
            request_ids = (request_ids,)
        request_ids = [to_str("request_ids", request_id, verb="holds") for request_id in request_ids]
        reason = instance_of(FinishReason, "reason", reason, FinishReason.ABORT)
        outcomes = {}
        entered_before = trio.current_time() - min_age_seconds
        for request_id in dict.fromkeys(request_ids):
            requests = [
                request
                for request in (*self.requests.of(request_id), *self.kept_holds.of(request_id))
                if owner in (None, request.owner) and (not min_age_seconds or request.entered_at <= entered_before)
            ]
            unfinished = [request for request in requests if not request.is_finished]
            for request in unfinished:
                self._delivery.end_with_final_delta(request, reason, "the request was aborted by its id")
            for request in requests:
                self._delivery.end_holds(request)
            if unfinished:
                outcomes[request_id] = AbortOutcome.ABORTED
            elif requests or self._ended_ids.has(request_id, owner=owner):
                outcomes[request_id] = AbortOutcome.ALREADY_FINISHED
            else:
                outcomes[request_id] = AbortOutcome.UNKNOWN
        return outcomes

    def call_at(self, at: float, function: Callable[[], None]) -> Alarm:
        """Call a function at a given time, from the engine's task for deadlines.

        Args:
            at: time of Trio's clock.
            function: called at this time. It must not wait or raise.

        Returns:
            An alarm that can be cancelled.

        Raises:
            InvalidRequest: an argument has a wrong type.
        """
        at = to_float("at", at)
        if math.isnan(at):
            refuse("at", at, "a time of Trio's clock")
        if not callable(function):
            refuse("function", function, "a function without parameters")
        return self._deadline_keeper.set(at, function)

    async def wait_until_open(self) -> None:
        """Wait until new requests are admitted. Raise an error if the engine is closed."""
        await self.wait_until_admitted()
        if not self._is_open:
            raise self.fault or self._admission.refused_draining()

    def _check_open(self, count: int) -> None:
        if self.fault is not None:
            raise self.fault
        if self.reopens_at is not None and not self.draining:
            if not self.sleep_level:
                raise self._admission.refused_reopening()
        elif not self._is_open:
            raise self._admission.refused_draining()
        overdue = self.step_watch.overdue()
        if overdue is not None:
            raise self._admission.refused_overdue(overdue)
        if count > self._live_max:
            raise InvalidRequest(
                f"n is {count}, but at most {self._live_max} {self._work.part_name} may run and wait here", param="n"
            )

    def _set_alarms(self, request: ScopeT) -> None:
        for deadline in Deadline:
            seconds = request.deadlines.seconds(deadline)
            if seconds is not None:
                on_deadline = functools.partial(self._pass_deadline, request, deadline, seconds)
                request.alarms[deadline] = self._deadline_keeper.set(request.entered_at + seconds, on_deadline)

    def _pass_deadline(self, request: ScopeT, deadline: Deadline, seconds: float) -> None:
        if not request.is_finished:
            self.metrics.deadlines_passed_total.labels(deadline.value).inc()
            message = passed_message(deadline, seconds, self._settings.deadlines_max)
            self._delivery.end_with_final_delta(request, FinishReason.DEADLINE, message, stop_reason=deadline.value)
