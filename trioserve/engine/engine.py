"""The engine as a Trio program sees it: ask for text, abort by id, drain, and one place where its faults rise.

Decisions are the core's and tensors the executor's. Here requests are prepared, events become text, and every way out
of a request leads to one synchronous call.
"""

from __future__ import annotations

import functools
import logging
import math
import secrets
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any, Literal, cast

import msgspec
import trio
from msgspec import UNSET

from trioserve.admission.dispatch import AdmissionScope
from trioserve.admission.ended_ids import EndedIds
from trioserve.admission.local_endpoint import local_dispatch
from trioserve.admission.prompt_encoder import PromptEncoder
from trioserve.admission.router_metrics import show_router
from trioserve.admission.text_threads import TextRunner, TextThreads
from trioserve.contracts.adapter import AdapterId
from trioserve.contracts.arguments import refuse, to_bool, to_float, to_int, to_str
from trioserve.contracts.deadlines import NO_DEADLINES, Deadline, Deadlines
from trioserve.contracts.endpoint import EndpointLoad
from trioserve.contracts.errors import EngineFault, InvalidRequest, Overloaded, RankLost
from trioserve.contracts.events import (
    AbortOutcome,
    FinishReason,
    HandOverOutcome,
)
from trioserve.contracts.images import ImageEncoder, ImageLimits
from trioserve.contracts.kv_transfer import EngineRole, RunningConnector, Started
from trioserve.contracts.kv_transfer_params import KVTransferParams
from trioserve.contracts.live import LiveRequestView
from trioserve.contracts.output import REQUEST_POISONED
from trioserve.contracts.pooling import PoolingParams, TextPair
from trioserve.contracts.prompt import ChatPrompt, Cut, Prompt
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.resume import Resume
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.stats import EngineStats
from trioserve.contracts.thinking import ThoughtOutcome
from trioserve.contracts.tracing import NO_SPAN, NO_TRACER, Attributes, Span, Tracer
from trioserve.core.encoder_outputs import EncoderOutputs
from trioserve.core.engine import EngineCore
from trioserve.engine.adapter_metrics import show_adapters
from trioserve.engine.adapters import Adapters
from trioserve.engine.connector_metrics import show_connector
from trioserve.engine.delivery import Delivery
from trioserve.engine.engine_loop import EngineLoop, StepRunner, WhenIdle
from trioserve.engine.engine_parts import EngineParts, Guard, Nap, no_parts
from trioserve.engine.guide_preparation import GuidePreparation
from trioserve.engine.image_encoding import ImageEncoding
from trioserve.engine.kv_events import KvEvents
from trioserve.engine.live_feed import EngineLook, LiveFeed
from trioserve.engine.live_view import view_of
from trioserve.engine.load_changes import LoadChanges
from trioserve.engine.model_description import ModelDescription
from trioserve.engine.open_request import Choice, OpenRequest
from trioserve.engine.part_stream import PartStream
from trioserve.engine.pausing import PauseState, Pausing
from trioserve.engine.pooled_preparation import (
    check_can_be_pooled,
    check_can_generate,
    checked_inputs,
    name_of_input,
    pooled_sequences,
)
from trioserve.engine.pooled_request import PooledRequest
from trioserve.engine.pooled_stream import PooledStream
from trioserve.engine.request_admission import RequestAdmission
from trioserve.engine.request_preparation import (
    RequestPreparation,
    checked_kv_transfer,
    checked_prompt,
    instance_of,
    text_or_none,
)
from trioserve.engine.request_stream import RequestStream
from trioserve.engine.request_trace import NO_TRACE, RequestTrace, SpannedRequest, sampling_attributes
from trioserve.engine.requests_by_id import RequestsById
from trioserve.engine.restarts import FAULTS_OF_ONE_MAX, Readmission, RestartBudget
from trioserve.engine.settings import EngineSettings
from trioserve.engine.shell.request_scope import ScopeState
from trioserve.engine.sleeping import LEVELS, Sleeping
from trioserve.engine.step_gate import StepGate
from trioserve.engine.step_times import StepTimes
from trioserve.engine.step_watch import StepWatch
from trioserve.metrics.engine_gauges import EngineGauges
from trioserve.metrics.registry import Metrics
from trioserve.text.guide_factory import GuideFactory
from trioserve.text.response_families import ResponseFamilies
from trioserve.text.tokenizer import Tokenizer
from trioserve.trio_tools.deadline_keeper import Alarm, DeadlineKeeper
from trioserve.trio_tools.errors_unwrapped import errors_unwrapped
from trioserve.trio_tools.media_fetcher import MediaFetcher
from trioserve.trio_tools.own_run import OwnRun
from trioserve.vision.image_prompt import ImageReader

__all__ = ["Engine", "ModelDescription"]

logger = logging.getLogger(__name__)

SERVER_STOPPING = "server_stopping"
ADAPTER_UNLOADED = "adapter_unloaded"
PAUSED = "paused"
PAUSE_MODES = ("abort", "wait", "keep")


def _new_request_id() -> str:
    return f"req-{secrets.token_hex(12)}"


class Engine:
    """Made by open_engine. Every method belongs to the thread of the Trio program that opened it.

    new_request_id: for requests whose caller gives none. kv_events: what came and went in the prefix cache; None where
    nobody is told. connector: the core's; it runs as long as this does. role: what routers are told; None where KV
    neither comes from other engines nor goes to them. families: how the model writes calls and thoughts; None: as its
    chat template says. readers_first and when_idle: see EngineLoop. guides: makes those of requests, and the core their
    masks; None: no request has any. image_encoder: of a model that is described to see images. media: fetches those
    that are elsewhere; None: nobody does. adapters: what there is of LoRA; None: nothing. guard, nap: see EngineParts.
    """

    def __init__(
        self,
        *,
        model: ModelDescription,
        core: EngineCore,
        steps: StepRunner,
        tokenizer: Tokenizer,
        text_threads: TextThreads,
        metrics: Metrics,
        settings: EngineSettings,
        default_sampling: SamplingParams | None = None,
        new_request_id: Callable[[], str] = _new_request_id,
        connector: RunningConnector | None = None,
        role: EngineRole | None = None,
        families: ResponseFamilies | None = None,
        readers_first: bool = False,
        when_idle: WhenIdle | None = None,
        guides: GuideFactory | None = None,
        image_encoder: ImageEncoder | None = None,
        image_limits: ImageLimits | None = None,
        media: MediaFetcher | None = None,
        adapters: Adapters | None = None,
        guard: Guard | None = None,
        nap: Nap | str = "this engine cannot give its KV cache back alone",
    ) -> None:
        self._own_run = OwnRun()
        self.model = model
        self.adapters = adapters or Adapters()
        self.role = role
        self.tokenizer = tokenizer
        self.families = families or ResponseFamilies(tokenizer)
        self.metrics = metrics
        self.default_sampling = default_sampling or SamplingParams()
        self._draw_bits = secrets.randbits if settings.seed is None else Random(settings.seed).getrandbits
        self.draining = False
        self.fault: EngineFault | None = None
        self.on_fault: Callable[[], Awaitable[None]] | None = None  # has the clients told
        self._kept_holds = RequestsById[
            OpenRequest
        ]()  # finished and left, and what is held of them is still to be read
        self.step_watch = StepWatch(settings.step_seconds_max)
        self.step_times = StepTimes()
        self.tracer: Tracer = NO_TRACER
        self._text_threads = text_threads
        self._image_reader: ImageReader | None = None
        self._images: ImageEncoding | None = None
        if model.images is not None:
            limits = image_limits or ImageLimits()
            self._image_reader = ImageReader(model.images, limits)
            self._images = ImageEncoding(model.images, limits, text_threads, metrics, self._wait_until_open)
        self._prompts = self._encoder(text_threads, media)
        self._preparation = RequestPreparation(model, tokenizer, role=role)
        self._guides = GuidePreparation(guides, text_threads, metrics)
        self._settings = settings
        self._new_request_id = new_request_id
        self._requests = RequestsById[OpenRequest]()  # entered and not left
        self._ended_ids = EndedIds()
        self._preparing_count = 0
        self._leased_count = 0  # of these, the ones whose turn has come
        self._deadline_keeper = DeadlineKeeper()
        self.dispatch = local_dispatch(core.settings.max_num_seqs, settings)
        self._admission = RequestAdmission(self.dispatch, metrics)
        self._is_running = False
        self._idle = trio.Event()
        self._restarts = RestartBudget(settings.restarts_max)
        self._readmission = Readmission(self._begin)
        self._carried: list[OpenRequest] = []  # who goes on when the engine was opened anew
        self._reopened = trio.Event()
        self.reopens_at: float | None = None  # it broke, and is to be opened anew, not before this time of Trio's clock
        self._gate = StepGate()
        self._pausing = Pausing(self._gate, self._has_begun, self._go_on)
        self._sleeping = Sleeping()
        self._is_paused_by_sleep = False
        self.kv_events: KvEvents | None = None
        self.live_feed = LiveFeed(
            model, self._requests, self._kept_holds, metrics, self.step_times, self._look, trio.current_time()
        )
        self._forget_connector: Callable[[], None] = lambda: None
        self._install(EngineParts(core, steps, connector, readers_first, when_idle, image_encoder, guard, nap))
        self._show_sleep()
        metrics.on_scrape(self._set_gauges)
        show_router(metrics, self.dispatch)
        show_adapters(metrics, self.adapters, self._requests)

    def _install(self, parts: EngineParts) -> None:
        """From here on it computes with these, and nothing of those before is known any more."""
        core, steps, connector, readers_first, when_idle, image_encoder, guard, nap = parts
        self._guard = guard
        self._why_no_nap = nap if isinstance(nap, str) else None
        if self._images is not None:
            self._images.encoder = image_encoder
        metrics, settings = self.metrics, self._settings
        self._core = core
        self._connector = connector
        self._delivery = Delivery(core, metrics, wake=self.wake, step_watch=self.step_watch, cancels=self.live_feed)
        self.live_feed.install(core, connector)
        self._loop = EngineLoop(
            core,
            steps,
            self._delivery,
            readers_first=readers_first,
            when_idle=when_idle,
            after_step=self._after_step,
            step_times=self.step_times,
            gate=self._gate,
        )
        self.load_changes = LoadChanges()
        self._steps_scope = trio.CancelScope()
        self._outer_error: Exception | None = None  # of the connector, or of what computes
        if settings.kv_events_max:
            self.kv_events = KvEvents(
                core.cache,
                model=self.model.name,
                block_size=core.settings.block_size,
                window_tokens=core.settings.window_tokens,
                events_max=settings.kv_events_max,
            )
        self._gauges = EngineGauges(metrics, core.stats())
        self._forget_connector()
        self._forget_connector = (lambda: None) if connector is None else show_connector(metrics, connector.counts)

    # --- the life of the engine ---

    async def run(
        self,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """The engine's own task. Ends when cancelled, after the step in flight, with every block back. Returns when a
        step or the connector failed and the engine is to be opened anew (reopens_at): its requests wait for that.

        Raises EngineFault when it is not: every reader has the fault by then, and `on_fault` had grace_seconds_max to
        pass it on. Raises StartupError, and has not started, if the connector cannot start.
        """
        if self._connector is None:
            await self._run_steps(task_status)
            return
        with errors_unwrapped():
            async with trio.open_nursery() as nursery:
                scope = trio.CancelScope()
                place = await nursery.start(self._run_connector, self._connector, scope)
                listens = "" if place is None else f" listens={place}"
                logger.info("connector runs connector=%s role=%s%s", type(self._connector).__name__, self.role, listens)
                scope.shield = True  # it is there as long as the core may call it: until the step in flight is over
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
                # A promise that it broke: what is held and loaded has its deadlines.
                logger.warning("connector ended by itself connector=%s", type(connector).__name__)
        except Exception as error:
            if not self._is_running:
                raise
            if self.fault is not None:
                logger.exception("the connector failed beside a step")
            self._outer_error = error  # rises where a step's would, once the step in flight is over
            self._steps_scope.cancel()

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
            self._end_kv_events()
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
        self._kept_holds.clear()  # nobody will report their end
        self._note_idle()
        self._end_kv_events()
        self.live_feed.leave()
        for request in self._requests:
            request.fail(fault)
        if self.on_fault is not None:
            with trio.move_on_after(self._settings.grace_seconds_max):
                try:
                    await self.on_fault()
                except Exception:
                    logger.exception("the fault could not be passed on")  # and must not be hidden by this

    def close(self) -> None:
        """Nothing more is computed: every reader gets a last delta, and every block is back."""
        self.reopens_at = None
        self._reopened.set()
        self._pausing.end()
        self._sleeping.end()
        self.abort_all("the engine was closed")
        self._core.progress(trio.current_time())  # what the connector lets go of at once is free

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
        sequences is one that the core is still to get, with the tokens that it had. What was held is lost. fault: None:
        it did not break, and no step is in flight."""
        core, delivery = self._core, self._delivery
        self._set_gauges()  # what it has counted so far
        self._reopened = trio.Event()
        lives = {live.request.id: live for live in core.live_requests()}
        suspect_ids = delivery.ids_in_flight()
        choices = delivery.give_up()
        self._kept_holds.clear()
        self._install(no_parts(core.settings))
        self._end_kv_events()
        self.step_watch.forget(trio.current_time())
        requests: dict[OpenRequest, list[tuple[Choice, EngineRequest]]] = {}
        lost: list[OpenRequest] = []
        for choice in choices:
            request = choice.request
            carried = requests.setdefault(request, [])
            if choice.is_ended or request.scope is ScopeState.LEFT:
                continue
            if request.is_given_away:  # it was to end with this step, and its other choices have
                request.push_end(choice, FinishReason.HANDED_OVER)
                continue
            live = lives.get(choice.sequence_id)
            count = choice.output.token_count
            if live is None or (count and count >= live.request.output_tokens_max):
                lost.append(request)  # it ended in what broke, and nobody can say how
            else:
                known = live.tokens[live.prompt_count :][:count]
                carried.append((choice, self._preparation.continued(request, live.request, known)))
        for request in self._readmission.stop():
            requests.setdefault(request, [])
        for request, carried in requests.items():
            if any(choice.sequence_id in suspect_ids for choice, _ in carried):
                request.fault_count += 1
            request.carry(carried)
            if fault is not None and (request in lost or request.fault_count >= FAULTS_OF_ONE_MAX):
                self._end_poisoned(request, fault)
            elif not request.upcoming:
                request.on_gone()
        self._carried = [request for request in requests if request.upcoming]
        self._note_idle()

    def _end_poisoned(self, request: OpenRequest, fault: EngineFault) -> None:
        """It was in each step that failed."""
        logger.error("request ended: it was in %d steps that failed request=%s", request.fault_count, request.id)
        self.metrics.requests_poisoned_total.inc()
        message = (
            f"the engine broke {request.fault_count} times in steps that computed this request, which was ended so "
            f"that the others go on: {fault}"
        )
        self._delivery.note_lost(request)
        self._delivery.end_with_final_delta(request, FinishReason.ERROR, message, stop_reason=REQUEST_POISONED)

    def reopen(self, parts: EngineParts) -> None:
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

    def _begin(self, request: OpenRequest) -> None:
        """The core gets as many of its sequences as it may have at a time."""
        while request.upcoming and request.core_count < request.sequence_count:
            self._begin_next(request)

    async def keep_deadlines(self) -> None:
        """The engine's other task, beside run: ends requests whose time has come, and lets go of what nobody uses. Runs
        until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.dispatch.run)
            nursery.start_soon(self.adapters.keep)
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
        self._end_kv_events()
        self.live_feed.leave()
        for request in self._requests:
            if (request.core_count or request.upcoming) and not request.has_run:
                self._delivery.end(request, FinishReason.ABORT)
                request.fail(self._admission.refused_draining())
        if not self._gate.is_open:
            self._end_begun("the server is leaving, and its engine is paused", SERVER_STOPPING)

    def abort_all(self, message: str, *, hands_over: bool = False) -> None:
        """End every request, and every hold; each reader gets a last delta with finish_reason ABORT and the message,
        unless it had one. Where the request may go on elsewhere its stop_reason says why it should.

        hands_over: with a connector, those are given away as by `hand_over`, and so is what was before: it is held
        until it was fetched or somebody closes the engine."""
        hands_over = hands_over and self._connector is not None and self.step_watch.overdue() is None
        for request in self._requests:
            if hands_over and self._gives_away(request):
                continue
            stop_reason = SERVER_STOPPING if request.is_resumable else None
            self._delivery.end_with_final_delta(request, FinishReason.ABORT, message, stop_reason=stop_reason)
            self._delivery.end_holds(request)
        for request in self._kept_holds:
            if not (hands_over and request.is_given_away):
                self._delivery.end_holds(request)

    def _gives_away(self, request: OpenRequest) -> bool:
        """Whether another engine goes on with it from here on, or does already."""
        if request.is_given_away:
            return True
        return request.is_resumable and not request.is_finished and self._delivery.hand_over(request)

    async def wait_until_idle(self) -> None:
        """Returns when no request is entered, and nothing is held for another engine. For use after drain()."""
        while self._requests or self._kept_holds:
            if self._idle.is_set():  # otherwise somebody else waits for it, too
                self._idle = trio.Event()
            await self._idle.wait()

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
        if not self.sleep_level:
            await self._pause_for_sleep(mode)
            if self._pausing.state is PauseState.PAUSED and not self.sleep_level:
                self._fall_asleep(level)
        await self._sleeping.wait_until_down()
        if self.fault is not None:
            raise self.fault

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
        return any(request.core_count or request.upcoming for request in self._requests)

    def _end_begun(self, message: str, stop_reason: str) -> None:
        for request in self._requests:
            if request.core_count or request.upcoming:
                self._delivery.end_with_final_delta(request, FinishReason.ABORT, message, stop_reason=stop_reason)

    def _go_on(self) -> None:
        self.step_watch.note_going_on(trio.current_time())
        self.load_changes.note()
        self.wake()

    # --- requests ---

    def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        add_special_tokens: bool = True,
        deadlines: Deadlines | None = None,
        owner: str | None = None,
        tenant: str | None = None,
        kv_transfer: KVTransferParams | None = None,
        cut: Cut | None = None,
        resume: Resume | None = None,
        resumable: bool = False,
        adapter: str | None = None,
        part_of: Span = NO_SPAN,
    ) -> RequestStream:
        """A request, to be entered with `async with`; until then it holds nothing.

        Args:
            prompt: text, token ids (a list, or an array of one dimension), or a ChatPrompt.
            sampling: how tokens are chosen and when to stop. Default: default_sampling, whose max_tokens is also the
                most that any request gets.
            request_id: the caller's own; it need not be unique, and an abort by it ends all that bear it. Default: a
                new one.
            priority: PRIORITY_MIN to PRIORITY_MAX (-100 to 100), a lower number runs sooner.
            cache_salt: prefix blocks are shared only between requests with equal salts.
            add_special_tokens: of a prompt that is text, begin it as the model's tokenizer says; a chat's template does
                that itself.
            deadlines: in seconds from entering; what passes one ends with finish_reason DEADLINE. Default: those that
                the engine was opened with, whose limits go for all.
            owner: who may see it and abort it by its id, besides those who may see everything.
            tenant: the queue is fair between them. Default: the owner.
            kv_transfer: whether the KV of its prompt is to be taken from another engine (of n choices the first one
                takes it, the others compute it or hit), or held for one (n = 1; see RequestStream).
            cut: what becomes of a prompt that is too long. Default: entering raises ContextTooLong.
            resume: the response so far, given by another stream of the same request (RequestStream.resume_state): it
                goes on behind it. The stream gives what is new; its counts are those of the whole response.
            resumable: whoever ends it by another way than its own (an abort, a deadline) wants it to go on: what is
                held back of its text then is not given, so that nothing is given twice.
            adapter: the name of a LoRA adapter (load_adapter). Entering raises UnknownModel if none is loaded under it.
            part_of: the span of what it is made for, where requests are traced.

        Raises:
            InvalidRequest: an argument has a wrong type; its `param` names it. What is wrong with the values (a token
                id that the model does not have, a prompt that is too long) rises on entering.
        """
        own_deadlines = instance_of(Deadlines, "deadlines", deadlines, NO_DEADLINES)
        owner = text_or_none("owner", owner)
        sampling = self._bounded(instance_of(SamplingParams, "sampling", sampling, self.default_sampling))
        if resume is not None and not isinstance(resume, Resume):
            refuse("resume", resume, "a Resume, or None")
        request = OpenRequest(
            checked_prompt(prompt),
            sampling,
            request_id=text_or_none("request_id", request_id) or self._new_request_id(),
            priority=to_int("priority", priority),
            cache_salt=text_or_none("cache_salt", cache_salt),
            add_special_tokens=to_bool("add_special_tokens", add_special_tokens),
            deadlines=own_deadlines.within(self._settings.deadlines, self._settings.deadlines_max),
            owner=owner,
            tenant=text_or_none("tenant", tenant) or owner or "",
            kv_transfer=checked_kv_transfer(kv_transfer),
            cut=cut,
            resume=resume,
            seed=self._seed_of(sampling, resume),
            is_resumable=to_bool("resumable", resumable),
            part_of=part_of,
            adapter=text_or_none("adapter", adapter),
        )
        return RequestStream(request, submit=self._submit, leave=self._leave, own_run=self._own_run)

    def _seed_of(self, sampling: SamplingParams, resume: Resume | None) -> int:
        """A response that goes on has the seed with which it began."""
        if resume is not None and resume.seed is not None:
            return resume.seed
        return self._draw_bits(64) if sampling.seed is None else sampling.seed

    def _bounded(self, sampling: SamplingParams) -> SamplingParams:
        tokens_max, asked = self.default_sampling.max_tokens, sampling.max_tokens
        if tokens_max is None or (asked is not None and asked <= tokens_max):
            return sampling
        return msgspec.structs.replace(sampling, max_tokens=tokens_max)

    def embed(
        self,
        inputs: Prompt | Sequence[Prompt] | TextPair | Sequence[TextPair],
        pooling: PoolingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        add_special_tokens: bool = True,
        cut: Cut | None = None,
        name_of: Callable[[int], str] | None = None,
        deadlines: Deadlines | None = None,
        owner: str | None = None,
        tenant: str | None = None,
        adapter: str | None = None,
        part_of: Span = NO_SPAN,
    ) -> PooledStream:
        """A request whose inputs become vectors or scores: `vectors = await engine.embed(texts)`, or enter it with
        `async with`, as generate's. Until then it holds nothing. However many inputs it has, it is one scope, with one
        place in the queue and one lease, and at most half of what may run at a time is its own.

        Args:
            inputs: one prompt or several (INPUTS_MAX, 2048, at most), as generate takes them; a list of whole numbers
                is one. For scores, a TextPair or several.
            pooling: what is made of them. Default: vectors, as the model's makers recommend.
            cut: what becomes of an input that is too long. Default: entering raises ContextTooLong, which names it.
            name_of: what an input is called in an error, by its index. Default: input[index].
            deadlines: as for generate; the first vector stands for the first token.

        The others are generate's. Raises InvalidRequest for an argument of a wrong type.
        """
        checked = checked_inputs(inputs)
        own_deadlines = instance_of(Deadlines, "deadlines", deadlines, NO_DEADLINES)
        owner = text_or_none("owner", owner)
        request = PooledRequest(
            checked,
            instance_of(PoolingParams, "pooling", pooling, PoolingParams()),
            name_of=name_of or name_of_input(len(checked)),
            cut=cut,
            sequence_count_max=max(1, self._core.settings.max_num_seqs // 2),
            request_id=text_or_none("request_id", request_id) or self._new_request_id(),
            priority=to_int("priority", priority),
            cache_salt=text_or_none("cache_salt", cache_salt),
            add_special_tokens=to_bool("add_special_tokens", add_special_tokens),
            deadlines=own_deadlines.within(self._settings.deadlines, self._settings.deadlines_max),
            owner=owner,
            tenant=text_or_none("tenant", tenant) or owner or "",
            part_of=part_of,
            adapter=text_or_none("adapter", adapter),
        )
        return PooledStream(request, submit=self._submit, leave=self._leave, own_run=self._own_run)

    def read_parts(self, stream: RequestStream, *, tools: Sequence[Mapping[str, Any]] | None = None) -> PartStream:
        """What a chat's response consists of: content, thoughts and calls, as the model's family writes them.

        Args:
            stream: entered, and read by nobody else.
            tools: those of its prompt; without any, nothing is a call.

        Raises:
            InvalidRequest: a tool has another shape than OpenAI's.
        """
        return PartStream(stream, self.families, self.tokenizer, tools)

    def abort(
        self, request_ids: Iterable[str], reason: FinishReason = FinishReason.ABORT, *, owner: str | None = None
    ) -> dict[str, AbortOutcome]:
        """End requests by the ids their callers gave. Never waits. A reader gets what came before and a last delta with
        the reason; the blocks are back at once, or right after the step in flight. What is held of one that had
        finished comes back when the connector lets it go, which it is told to do.

        request_ids: one id will do, too. owner: only theirs; those of others are unknown. No id is an error: what
        became of each is what is returned. Raises InvalidRequest, and has ended nothing, for arguments of another type.
        """
        self._own_run.check("engine.abort")
        if isinstance(request_ids, str):  # otherwise each of its letters were an id
            request_ids = (request_ids,)
        request_ids = [to_str("request_ids", request_id, verb="holds") for request_id in request_ids]
        reason = instance_of(FinishReason, "reason", reason, FinishReason.ABORT)
        outcomes = {}
        for request_id in dict.fromkeys(request_ids):
            requests = [*self._requests.of(request_id), *self._kept_holds.of(request_id)]
            requests = [request for request in requests if owner in (None, request.owner)]
            unfinished = [request for request in requests if not request.is_finished]
            for request in unfinished:
                self._delivery.end_with_final_delta(request, reason, "the request was aborted by its id")
            for request in requests:
                self._delivery.end_holds(request)
            if unfinished:
                outcomes[request_id] = AbortOutcome.ABORTED
            elif requests or self._ended_ids.knows(request_id, owner=owner):
                outcomes[request_id] = AbortOutcome.ALREADY_FINISHED
            else:
                outcomes[request_id] = AbortOutcome.UNKNOWN
        return outcomes

    def hand_over(self, request_ids: Iterable[str], *, owner: str | None = None) -> dict[str, HandOverOutcome]:
        """Give requests away that run, for another engine to go on with them, by the ids that their callers gave. Never
        waits. A reader gets what came before and, at the latest after the step in flight, a last delta with HANDED_OVER
        and how the KV can be had, if a connector holds it now: until it was fetched, or kv_hold_timeout has passed.
        Only requests that were made `resumable` are given away.

        request_ids: one id will do, too. owner: only theirs; those of others are unknown. No id is an error.
        """
        self._own_run.check("engine.hand_over")
        if isinstance(request_ids, str):
            request_ids = (request_ids,)
        outcomes = {}
        for request_id in dict.fromkeys(to_str("request_ids", request_id, verb="holds") for request_id in request_ids):
            requests = [request for request in self._requests.of(request_id) if owner in (None, request.owner)]
            resumable = [request for request in requests if request.is_resumable and not request.is_finished]
            answers = [self._delivery.hand_over(request) for request in resumable]
            if any(answers):
                outcomes[request_id] = HandOverOutcome.HANDED_OVER
            else:
                outcomes[request_id] = HandOverOutcome.NOT_POSSIBLE if requests else HandOverOutcome.UNKNOWN
        return outcomes

    def end_thoughts(self, request_ids: Iterable[str], *, owner: str | None = None) -> dict[str, ThoughtOutcome]:
        """Have the thoughts of requests end with the next token, by the ids that their callers gave; what follows them
        is written as ever. Never waits. Only a request whose sampling says how its thoughts end (thinking) can be
        asked.

        request_ids: one id will do, too. owner: only theirs; those of others are unknown. No id is an error.
        """
        if isinstance(request_ids, str):
            request_ids = (request_ids,)
        outcomes = {}
        for request_id in dict.fromkeys(to_str("request_ids", request_id, verb="holds") for request_id in request_ids):
            requests = [request for request in self._requests.of(request_id) if owner in (None, request.owner)]
            answers = [request.end_thoughts() for request in requests]
            if any(answers):
                outcomes[request_id] = ThoughtOutcome.ENDING
            else:
                outcomes[request_id] = ThoughtOutcome.NO_THOUGHT if requests else ThoughtOutcome.UNKNOWN
        return outcomes

    def live_requests(self, *, owner: str | None = None) -> list[LiveRequestView]:
        """Every request that is entered and not left, or held, oldest first. owner: only theirs."""
        self._own_run.check("engine.live_requests")
        sequences = {live.request.id: live for live in self._core.live_requests()}
        requests = [*self._requests, *self._kept_holds]
        requests = [request for request in requests if owner in (None, request.owner)]
        now = trio.current_time()
        return [
            view_of(
                request,
                [sequences.get(choice.sequence_id) for choice in request.choices],
                now,
                held_block_count=self._delivery.held_block_count(request),
            )
            for request in sorted(requests, key=lambda request: request.entered_at)
        ]

    async def load_adapter(self, name: str, path: str, *, replaces: bool = False) -> None:
        """Load a LoRA adapter, a directory that peft has saved, under a name that requests may then give. replaces: it
        may take over the name of another one: requests that have that keep it. Raises AdapterRefused, and
        ModelLoadError for what cannot be computed here."""
        self._own_run.check("engine.load_adapter")
        name, path = to_str("name", name), to_str("path", path)
        await self.adapters.load(name, path, replaces=to_bool("replaces", replaces), is_checked=False)

    async def unload_adapter(self, name: str, *, seconds: float | None = None) -> None:
        """Nobody gets it from here on; returns when nobody has it any more, and its memory is free. Leaving earlier
        changes nothing about that. seconds: then requests that still have it are ended. Raises UnknownModel."""
        self._own_run.check("engine.unload_adapter")
        deadline = None if seconds is None else to_float("seconds", seconds)
        ids = self.adapters.retire(to_str("name", name))
        if deadline is not None:
            if not 0 <= deadline < math.inf:
                refuse("seconds", seconds, "a number of seconds")
            self._deadline_keeper.set(trio.current_time() + deadline, lambda: self._end_users(name, ids))
        await self.adapters.wait_until_forgotten(ids)

    def _end_users(self, name: str, ids: Collection[AdapterId]) -> None:
        for request in self._requests:
            if request.adapter_ref is not None and request.adapter_ref.id in ids and not request.is_finished:
                message = f"the adapter {name} was unloaded, and the time in which this request could end is over"
                self._delivery.end_with_final_delta(request, FinishReason.ABORT, message, stop_reason=ADAPTER_UNLOADED)

    async def encode(self, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt. Raises InvalidRequest; ContextTooLong for one that is refused without counting."""
        self._own_run.check("engine.encode")
        return await self._prompts.encode(checked_prompt(prompt), add_special_tokens=add_special_tokens)

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of token ids. Raises InvalidRequest for an id that the model does not have."""
        self._own_run.check("engine.decode")
        return await self._prompts.decode(token_ids, skip_special_tokens=skip_special_tokens)

    @contextmanager
    def tokenizing(self, *, owner: str | None = None) -> Iterator[PromptEncoder]:
        """Tokens of texts, and texts of tokens, for their own sake: beside all requests, and delaying none. Few may do
        this at a time, and fewer of one owner; otherwise the encoder raises Overloaded."""
        try:
            with self._text_threads.aside(owner) as texts:
                yield self._encoder(texts)
        except Overloaded as refusal:
            self.metrics.requests_rejected_total.labels(refusal.reason).inc()
            raise

    def call_at(self, at: float, function: Callable[[], None]) -> Alarm:
        """Have `function` called at a time of Trio's clock, by the engine's one task for this. It must not wait or
        raise. Raises InvalidRequest for what is no time or no function."""
        at = to_float("at", at)
        if math.isnan(at):
            refuse("at", at, "a time of Trio's clock")
        if not callable(function):
            refuse("function", function, "a function without parameters")
        return self._deadline_keeper.set(at, function)

    def stats(self) -> EngineStats:
        """How many sequences run and wait, and what the KV blocks are: a frozen snapshot."""
        return self._core.stats()

    def load(self) -> EndpointLoad:
        """How much there is to do, as a router asks. Waiting are those being tokenized, too."""
        stats = self._core.stats()
        return EndpointLoad(
            running=stats.running_count,
            waiting=stats.waiting_count + self._preparing_count,
            max_num_seqs=self._core.settings.max_num_seqs,
            kv_usage=stats.kv_usage,
            role=UNSET if self.role is None else self.role,
            fingerprint=UNSET if self.model.fingerprint is None else self.model.fingerprint,
        )

    def wake(self) -> None:
        """There may be something for the step loop to do; a connector calls this when it has something to report.
        Costs nothing while steps run."""
        self._loop.wake()

    # --- called by RequestStream ---

    async def _submit(self, request: OpenRequest) -> None:
        """Take a place in the queue, wait for a lease, prepare, and hand the sequences to the core. Holds nothing when
        it raises."""
        count = request.sequence_count
        self._check(request)
        self._check_open(count)
        admission = self._admission.begin(request)
        request.on_gone = lambda: self._leave_queue(request, admission)
        self._requests.add(request)
        request.trace = self._trace(request)
        try:  # from here on there is something to be given back
            if request.adapter is not None:
                request.adapter_lease = self.adapters.acquire(request.adapter)
                request.adapter_digest = request.adapter_lease.ref.digest
            request.choices = self._preparation.new_choices(request)
            request.begin_next = lambda: self._begin_next(request)
            self._set_alarms(request)
            self._preparing_count += count
            self.load_changes.note()
            try:
                with request.preparation:
                    await self._admission.lease(request, admission)
                    request.is_leased = True
                    self._leased_count += count
                    request.trace.leased()
                    request.guides = await self._guides.prepare(request.sampling)
                    await request.tokenize(self._prompts)
                    if request.resume is not None:
                        await self._take_known(request, request.resume)
                    if self._images is not None and request.images:
                        self._preparation.check_room(request)
                        await self._wait_until_admitted()
                        await self._images.prepare(request)
                    await self._wait_until_admitted()
            finally:
                self._preparing_count -= count
                self._leased_count -= count if request.is_leased else 0
                self.load_changes.note()
            if request.is_finished:
                return  # aborted meanwhile; its reader finds the final delta
            if not self._is_open:
                raise self.fault or self._admission.refused_draining()
            sequences = self._sequences(request)
            choices = [choice for choice in request.choices if not choice.is_ended]
            request.trace.prepared(request.prompt_token_count)
            request.upcoming.extend(zip(choices, sequences, strict=True))
            self._begin(request)
        except BaseException:
            self._leave(request)
            raise
        self._loop.wake()

    def _leave(self, request: OpenRequest) -> None:
        """The one way out of a request's scope. Synchronous; nothing to do when it has finished and is not held."""
        self._delivery.end(request, FinishReason.ABORT)
        if not request.core_count:
            self._release_outputs(request)
        request.cancel_alarms()
        if request.is_hold_kept and request.is_held and self.fault is None:
            self._kept_holds.add(request)
            request.on_released = lambda: self._forget_hold(request)
        else:
            self._delivery.end_holds(request)
            self.live_feed.note_left(request)
        self._requests.remove(request)
        self._ended_ids.note(request.id, request.owner)
        if self.fault is not None:
            request.trace.freed()  # a core that broke says nothing any more
            self._release_adapter(request)
        request.trace.left(
            prompt_tokens=request.prompt_token_count,
            completion_tokens=request.completion_token_count,
            cached_tokens=request.cached_token_count,
        )
        self.load_changes.note()
        self._note_idle()

    # --- inside ---

    def _release_outputs(self, request: OpenRequest) -> None:
        """The core has nothing of it any more: what the model made of its images others may have."""
        if self._images is not None:
            self._images.release(request)

    async def _wait_until_admitted(self) -> None:
        """Returns when it computes what is new, or takes nothing any more."""
        while self._pausing.holds_up or self.reopens_at is not None:
            if self.draining or self.fault is not None:
                return
            await self._pausing.wait_until_admitted()
            if self.reopens_at is not None:
                await self._reopened.wait()

    async def _wait_until_open(self) -> None:
        """Raises what refuses a request if it does not compute any more."""
        await self._wait_until_admitted()
        if not self._is_open:
            raise self.fault or self._admission.refused_draining()

    @property
    def image_outputs(self) -> EncoderOutputs | None:
        """Who uses what of images, for a look; None: it sees none."""
        return None if self._images is None else self._images.outputs

    def _check(self, request: OpenRequest) -> None:
        if isinstance(request, PooledRequest):
            check_can_be_pooled(self.model, request.params, request.inputs)
        else:
            check_can_generate(self.model)
            self._preparation.check(request)

    def _sequences(self, request: OpenRequest) -> list[EngineRequest]:
        if isinstance(request, PooledRequest):
            return pooled_sequences(self.model, request)
        return self._preparation.sequences(request)

    async def _take_known(self, request: OpenRequest, resume: Resume) -> None:
        """Put the choices where they stood: here if that is soon done, else where long texts are worked on."""
        known = self._preparation.known_output(request, resume)
        request.take_known(await self._prompts.run(known.choices, size=known.size))
        self.metrics.resumed_requests_total.inc()
        self.metrics.resumed_tokens_total.inc(sum(map(len, resume.token_ids)))
        if request.is_finished:
            request.on_gone()  # there is nothing left to do

    def _begin_next(self, request: OpenRequest) -> None:
        """The core gets one more of its sequences."""
        choice, sequence = request.upcoming.popleft()
        self._core.add(sequence)
        self._delivery.add(choice)

    def _encoder(self, texts: TextRunner, media: MediaFetcher | None = None) -> PromptEncoder:
        model = self.model
        return PromptEncoder(
            self.tokenizer,
            texts,
            vocab_size=model.vocab_size,
            context_tokens_max=model.context_tokens_max,
            tool_family=self.families.tool_family,
            images=self._image_reader,
            media=media,
        )

    def _forget_hold(self, request: OpenRequest) -> None:
        if self.fault is None:
            self._kept_holds.remove(request)
            self.live_feed.note_left(request)
            self._note_idle()

    def _leave_queue(self, request: OpenRequest, admission: AdmissionScope) -> None:
        """The core has nothing of it any more: its place or its lease is another's."""
        if admission.is_queued:
            self._delivery.note_left_queue(request.sequence_count)
        self.dispatch.leave(admission)
        self._release_outputs(request)
        self._release_adapter(request)
        request.trace.freed()
        self._readmission.look()
        self._pausing.look()

    def _release_adapter(self, request: OpenRequest) -> None:
        lease, request.adapter_lease = request.adapter_lease, None
        if lease is not None:
            self.adapters.release(lease)

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
        live_max = self._core.settings.max_num_seqs + self._settings.waiting_requests_max
        if count > live_max:
            raise InvalidRequest(f"n is {count}, but at most {live_max} sequences may run and wait here", param="n")

    def _trace(self, request: OpenRequest) -> RequestTrace:
        """To be made when it has entered the queue."""
        if self.tracer is NO_TRACER:
            return NO_TRACE
        is_pooled = isinstance(request, PooledRequest)
        operation = "chat" if isinstance(request.prompt, ChatPrompt) else "text_completion"
        attributes: Attributes = {
            "gen_ai.operation.name": "embeddings" if is_pooled else operation,
            "gen_ai.provider.name": "trioserve",
            "gen_ai.request.model": request.adapter or self.model.name,
            "gen_ai.response.model": request.adapter or self.model.name,
            "trioserve.request.id": request.id,
            "trioserve.priority": request.priority,
            **({} if is_pooled else sampling_attributes(request.sampling)),
        }
        span = self.tracer.begin(
            f"{attributes['gen_ai.operation.name']} {self.model.name}",
            parent=request.part_of,
            traceparent=None if request.kv_transfer is None else request.kv_transfer.traceparent,
            attributes=attributes,
        )
        return SpannedRequest(span, is_pooled=is_pooled) if span.is_recording else NO_TRACE

    def _set_alarms(self, request: OpenRequest) -> None:
        for deadline in Deadline:
            seconds = request.deadlines.seconds(deadline)
            if seconds is not None:
                ring = functools.partial(self._pass_deadline, request, deadline, seconds)
                request.alarms[deadline] = self._deadline_keeper.set(request.entered_at + seconds, ring)

    def _pass_deadline(self, request: OpenRequest, deadline: Deadline, seconds: float) -> None:
        if not request.is_finished:
            self.metrics.deadlines_passed_total.labels(deadline.value).inc()
            message = f"the request's {deadline.value} of {seconds:g} s has passed"
            self._delivery.end_with_final_delta(request, FinishReason.DEADLINE, message, stop_reason=deadline.value)

    def _waiting_since(self) -> float | None:
        """When the first of those that wait or run has come; None if nobody does, or they are to wait."""
        if not self._gate.is_open:
            return None
        return min((request.entered_at for request in self._requests if not request.is_finished), default=None)

    def _after_step(self) -> None:
        self._readmission.look()
        self._pausing.look()
        self.load_changes.note()

    def _end_kv_events(self) -> None:
        self.load_changes.end()
        if self.kv_events is not None:
            self.kv_events.end()

    def _note_idle(self) -> None:
        if not (self._requests or self._kept_holds):
            self._idle.set()

    def _look(self) -> EngineLook:
        return EngineLook(
            is_draining=self.draining,
            restarts=self._restarts.taken_count,
            preparing_count=self._preparing_count,
            held_count=self._delivery.held_count,
            role=self.role,
        )

    def _set_gauges(self) -> None:
        now = trio.current_time()
        self._gauges.show(
            self._core.stats(),
            preparing_count=self._preparing_count,
            leased_count=self._leased_count,
            live_count=len(self._requests),
            held_count=self._delivery.held_count,
            task_count=trio.lowlevel.current_statistics().tasks_living,
            step_seconds=self.step_watch.age_seconds(now),
            step_seconds_max=self.step_watch.seconds_max,
            no_progress_seconds=self.step_watch.idle_seconds(now, self._waiting_since()),
        )
