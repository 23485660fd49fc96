"""The engine as a Trio program sees it: ask for text, abort by id, drain, and one place where its faults rise.

Decisions are the core's and tensors the executor's. Here requests are prepared, events become text, and every way out
of a request leads to one synchronous call.
"""

from __future__ import annotations

import functools
import itertools
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar, cast

import msgspec
import trio
from msgspec import UNSET

from trioserve.contracts.deadlines import Deadline, Deadlines
from trioserve.contracts.endpoint import EndpointLoad
from trioserve.contracts.errors import ContextTooLong, Draining, EngineFault, InvalidRequest, Overloaded, StepOverdue
from trioserve.contracts.events import (
    AbortOutcome,
    FinishReason,
)
from trioserve.contracts.ids import RequestId
from trioserve.contracts.kv_transfer import EngineRole, RunningConnector, Started
from trioserve.contracts.kv_transfer_params import KVTransferParams
from trioserve.contracts.live import LiveRequestView
from trioserve.contracts.prompt import Prompt
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.stats import EngineStats
from trioserve.core.engine import EngineCore
from trioserve.metrics.registry import Metrics
from trioserve.runtime.connector_metrics import show_connector
from trioserve.runtime.deadline_keeper import Alarm, DeadlineKeeper
from trioserve.runtime.delivery import Delivery
from trioserve.runtime.dispatch import Turn
from trioserve.runtime.ended_ids import EndedIds
from trioserve.runtime.engine_loop import EngineLoop, StepRunner, WhenIdle
from trioserve.runtime.errors_unwrapped import errors_unwrapped
from trioserve.runtime.kept_holds import KeptHolds
from trioserve.runtime.kv_events import KvEvents
from trioserve.runtime.live_view import view_of
from trioserve.runtime.local_endpoint import local_dispatch, local_request
from trioserve.runtime.prompt_encoder import PromptEncoder
from trioserve.runtime.request_stream import Choice, RequestStream
from trioserve.runtime.router_metrics import show_router
from trioserve.runtime.settings import RuntimeSettings
from trioserve.runtime.step_watch import StepWatch
from trioserve.runtime.worker_thread import WorkerThread
from trioserve.text.output import ChoiceOutput
from trioserve.text.tokenizer import Tokenizer

__all__ = ["Engine", "ModelDescription"]

logger = logging.getLogger(__name__)

SEED_STRIDE = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: seeds of a request's choices lie far apart

T = TypeVar("T")


class ModelDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What is served. name is the first of served_names; source is what it was loaded from, as it was named;
    created_at is in seconds since 1970."""

    served_names: tuple[str, ...]
    source: str
    context_tokens_max: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    created_at: int

    @property
    def name(self) -> str:
        return self.served_names[0]


def _new_request_id() -> str:
    return f"req-{secrets.token_hex(12)}"


class Engine:
    """Made by open_engine. Every method belongs to the thread of the Trio program that opened it.

    new_request_id: for requests whose caller gives none. kv_events: what came and went in the prefix cache; None where
    nobody is told. connector: the core's; it runs as long as this does. role: what routers are told; None where KV
    neither comes from other engines nor goes to them. readers_first and when_idle: see EngineLoop.
    """

    def __init__(
        self,
        *,
        model: ModelDescription,
        core: EngineCore,
        steps: StepRunner,
        tokenizer: Tokenizer,
        text_thread: WorkerThread,
        metrics: Metrics,
        settings: RuntimeSettings,
        default_sampling: SamplingParams | None = None,
        new_request_id: Callable[[], str] = _new_request_id,
        connector: RunningConnector | None = None,
        role: EngineRole | None = None,
        readers_first: bool = False,
        when_idle: WhenIdle | None = None,
    ) -> None:
        self.model = model
        self.role = role
        self.tokenizer = tokenizer
        self.metrics = metrics
        self.default_sampling = default_sampling or SamplingParams()
        self.draining = False
        self.fault: EngineFault | None = None
        self.on_fault: Callable[[], Awaitable[None]] | None = None  # passes the last words on
        self._core = core
        self._connector = connector
        self._kept_holds = KeptHolds()
        self.step_watch = StepWatch(settings.step_seconds_max)
        self._delivery = Delivery(core, metrics, wake=self.wake, step_watch=self.step_watch)
        self._loop = EngineLoop(core, steps, self._delivery, readers_first=readers_first, when_idle=when_idle)
        self._prompts = PromptEncoder(
            tokenizer, text_thread, vocab_size=model.vocab_size, context_tokens_max=model.context_tokens_max
        )
        self._text_thread = text_thread
        self._settings = settings
        self._new_request_id = new_request_id
        self._streams: dict[str, list[RequestStream]] = {}  # entered and not left, by the id that callers know
        self._ended_ids = EndedIds()
        self._preparing_count = 0
        self._sequence_numbers = itertools.count()
        self._deadline_keeper = DeadlineKeeper()
        self.dispatch = local_dispatch(core.settings.running_requests_max, settings)
        self._is_running = False
        self._steps_scope = trio.CancelScope()
        self._connector_error: Exception | None = None
        self._idle = trio.Event()
        self.kv_events: KvEvents | None = None
        if settings.kv_events_max:
            self.kv_events = KvEvents(
                core.cache,
                model=model.name,
                block_size=core.settings.block_size,
                events_max=settings.kv_events_max,
            )
        self._stats_seen = core.stats()
        metrics.on_scrape(self._set_gauges)
        if connector is not None:
            show_connector(metrics, connector.counts)
        show_router(metrics, self.dispatch)

    # --- the life of the engine ---

    async def run(
        self,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """The engine's own task. Ends when cancelled, after the step in flight, with every block back.

        Raises EngineFault when a step or the connector failed: every reader has the fault by then, and `on_fault` had
        last_words_seconds_max to pass it on. Raises StartupError, and has not started, if the connector cannot start.
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
            self._connector_error = error  # rises where a step's would, once the step in flight is over
            self._steps_scope.cancel()

    async def _run_steps(self, task_status: trio.TaskStatus[None]) -> None:
        self._is_running = True
        task_status.started()
        try:
            with self._steps_scope:
                await self._loop.run()
            assert self._connector_error is not None
            raise self._connector_error
        except Exception as error:
            what = "a step of the engine" if self._connector_error is None else "the connector"
            fault = EngineFault(f"{what} failed: {type(error).__name__}: {error}")
            self.fault = fault
            self._kept_holds.clear()  # nobody will report their end
            self._note_idle()
            self._end_kv_events()
            for stream in self._live_streams():
                stream.fail(fault)
            if self.on_fault is not None:
                with trio.move_on_after(self._settings.last_words_seconds_max):
                    try:
                        await self.on_fault()
                    except Exception:
                        logger.exception("the fault could not be passed on")  # and must not be hidden by this
            raise fault from error
        finally:
            self._is_running = False
            self._end_kv_events()
            if self.fault is None:
                self.abort_all("the engine was closed")
                self._core.progress(trio.current_time())  # what the connector lets go of at once is free

    async def keep_deadlines(self) -> None:
        """The engine's other task, beside run: ends requests whose time has come. Runs until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.dispatch.run)
            await self._deadline_keeper.run()

    @property
    def ready(self) -> bool:
        """Whether a new request would be taken, a full line apart."""
        return self._is_open and self.step_watch.overdue() is None

    @property
    def _is_open(self) -> bool:
        """Whether it goes on with what it has taken."""
        return self._is_running and not self.draining and self.fault is None

    def drain(self) -> None:
        """Take nothing new; requests that have not begun to run are refused, the others go on."""
        self.draining = True
        self.dispatch.drain()
        self._end_kv_events()
        queued = {live.request.id for live in self._core.live_requests() if live.cached_token_count is None}
        for stream in self._live_streams():
            if all(choice.sequence_id in queued for choice in stream.choices):
                self._delivery.end(stream, FinishReason.ABORT)
                stream.fail(self._refused_draining())

    def abort_all(self, message: str) -> None:
        """End every request, and every hold; each reader gets a last delta with finish_reason ABORT and the message,
        unless it had one."""
        for stream in self._live_streams():
            self._delivery.end_with_last_word(stream, FinishReason.ABORT, message)
            self._delivery.end_holds(stream)
        for stream in self._kept_holds:
            self._delivery.end_holds(stream)

    async def wait_until_idle(self) -> None:
        """Returns when no request stream is entered, and nothing is held for another engine. For use after drain()."""
        while self._streams or self._kept_holds:
            if self._idle.is_set():  # otherwise somebody else waits for it, too
                self._idle = trio.Event()
            await self._idle.wait()

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
    ) -> RequestStream:
        """A request, to be entered with `async with`. request_id: the caller's own; it need not be unique, and an abort
        by it ends all that bear it. priority: PRIORITY_MIN to PRIORITY_MAX, a lower number runs sooner. cache_salt:
        prefix blocks are shared only between requests with equal salts. add_special_tokens: of a prompt that is text,
        begin it as the model's tokenizer says; a chat's template does that itself. deadlines: in seconds from entering;
        what passes one ends with finish_reason DEADLINE. owner: who may see it and abort it by its id, besides those
        who may see everything. tenant: the line is fair between them; default: the owner. kv_transfer: whether the KV
        of its prompt is to be taken from another engine (of n choices the first one takes it, the others compute it or
        hit), or held for one (n = 1; see RequestStream)."""
        return RequestStream(
            self,
            prompt,
            sampling or self.default_sampling,
            request_id=request_id or self._new_request_id(),
            priority=priority,
            cache_salt=cache_salt,
            add_special_tokens=add_special_tokens,
            deadlines=(deadlines or Deadlines()).within(self._settings.deadlines, self._settings.deadlines_max),
            owner=owner,
            tenant=tenant or owner or "",
            kv_transfer=kv_transfer,
        )

    def abort(
        self, request_ids: Iterable[str], reason: FinishReason = FinishReason.ABORT, *, owner: str | None = None
    ) -> dict[str, AbortOutcome]:
        """End requests by the ids their callers gave. Never waits, never raises. A reader gets what came before and a
        last delta with the reason; the blocks are back at once, or right after the step in flight. What is held of one
        that had finished comes back when the connector lets it go, which it is told to do. owner: only theirs; those of
        others are unknown."""
        outcomes = {}
        for request_id in dict.fromkeys(request_ids):
            streams = [*self._streams.get(request_id, ()), *self._kept_holds.of(request_id)]
            streams = [stream for stream in streams if owner in (None, stream.owner)]
            unfinished = [stream for stream in streams if not stream.is_finished]
            for stream in unfinished:
                self._delivery.end_with_last_word(stream, reason, "the request was aborted by its id")
            for stream in streams:
                self._delivery.end_holds(stream)
            if unfinished:
                outcomes[request_id] = AbortOutcome.ABORTED
            elif streams or self._ended_ids.knows(request_id, owner=owner):
                outcomes[request_id] = AbortOutcome.ALREADY_FINISHED
            else:
                outcomes[request_id] = AbortOutcome.UNKNOWN
        return outcomes

    def live_requests(self, *, owner: str | None = None) -> list[LiveRequestView]:
        """Every request that is entered and not left, or held, oldest first. owner: only theirs."""
        sequences = {live.request.id: live for live in self._core.live_requests()}
        streams = [*self._live_streams(), *self._kept_holds]
        streams = [stream for stream in streams if owner in (None, stream.owner)]
        now = trio.current_time()
        return [
            view_of(
                stream,
                [sequences.get(choice.sequence_id) for choice in stream.choices],
                now,
                held_block_count=self._delivery.held_block_count(stream),
            )
            for stream in sorted(streams, key=lambda stream: stream.entered_at)
        ]

    async def encode(self, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt. Raises InvalidRequest; ContextTooLong for one that is refused without counting."""
        return await self._prompts.encode(prompt, add_special_tokens=add_special_tokens)

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of token ids. Raises InvalidRequest for an id that the model does not have."""
        return await self._prompts.decode(token_ids, skip_special_tokens=skip_special_tokens)

    async def in_text_thread(self, function: Callable[..., T], *arguments: object) -> T:
        """Call a function of values where long texts are tokenized: for what would hold up the event loop. A cancelled
        caller leaves at once, and what the function makes of it is thrown away."""
        return await self._text_thread.run_cancellable(function, *arguments)

    def call_at(self, at: float, function: Callable[[], None]) -> Alarm:
        """Have `function` called at a time of Trio's clock, by the engine's one task for this. It must not wait or
        raise."""
        return self._deadline_keeper.set(at, function)

    def stats(self) -> EngineStats:
        return self._core.stats()

    def load(self) -> EndpointLoad:
        """How much there is to do, as a router asks. Waiting are those being tokenized, too."""
        stats = self._core.stats()
        return EndpointLoad(
            running=stats.running_count,
            waiting=stats.waiting_count + self._preparing_count,
            seats=self._core.settings.running_requests_max,
            kv_usage=stats.kv_usage,
            role=UNSET if self.role is None else self.role,
        )

    def wake(self) -> None:
        """There may be something for the step loop to do; a connector calls this when it has something to report.
        Costs nothing while steps run."""
        self._loop.wake()

    # --- called by RequestStream ---

    async def submit(self, stream: RequestStream) -> None:
        """Take a place in line, wait for a lease, prepare, and hand the sequences to the core. Holds nothing when it
        raises."""
        count = stream.sampling.n
        self._check_vocabulary(stream.sampling)
        self._check_kv_transfer(stream)
        self._check_open(count)
        turn = self._turn(stream)
        stream.on_gone = lambda: self._leave_line(stream, turn)
        stream.choices = [self._new_choice(stream, index) for index in range(count)]
        self._streams.setdefault(stream.id, []).append(stream)
        self._set_alarms(stream)
        try:
            self._preparing_count += count
            try:
                with stream.preparation:
                    await self._lease(stream, turn)
                    token_ids = await self.encode(stream.prompt, add_special_tokens=stream.add_special_tokens)
                    stream.prompt_token_ids = tuple(token_ids)
            finally:
                self._preparing_count -= count
            if stream.is_finished:
                return  # aborted meanwhile; its reader finds the last words
            if not self._is_open:
                raise self.fault or self._refused_draining()
            self._add_sequences(stream)
        except BaseException:
            self.leave(stream)
            raise
        self._loop.wake()

    def leave(self, stream: RequestStream) -> None:
        """The one way out of a request's scope. Synchronous; nothing to do when it has finished and is not held."""
        self._delivery.end(stream, FinishReason.ABORT)
        stream.cancel_alarms()
        if stream.is_hold_kept and stream.is_held and self.fault is None:
            self._kept_holds.add(stream)
            stream.on_released = lambda: self._forget_hold(stream)
        else:
            self._delivery.end_holds(stream)
        streams = self._streams[stream.id]
        streams.remove(stream)
        if not streams:
            del self._streams[stream.id]
        self._ended_ids.note(stream.id, stream.owner)
        self._note_idle()

    # --- inside ---

    def _forget_hold(self, stream: RequestStream) -> None:
        if self.fault is None:
            self._kept_holds.remove(stream)
            self._note_idle()

    def _check_kv_transfer(self, stream: RequestStream) -> None:
        asked = stream.kv_transfer
        if asked is None or not (asked.do_remote_decode or asked.do_remote_prefill):
            stream.kv_transfer = None
        elif self.role is None:
            raise InvalidRequest(
                "kv_transfer_params ask for KV to be exchanged with another engine, but this server was started "
                "without a connector that does: leave them out, or start it with --kv-transfer-config",
                param="kv_transfer_params",
            )
        elif asked.do_remote_decode and stream.sampling.n > 1:
            raise InvalidRequest(
                f"n is {stream.sampling.n}, but with do_remote_decode it must be 1: one sequence is held for another "
                "engine",
                param="n",
            )

    def _leave_line(self, stream: RequestStream, turn: Turn) -> None:
        """The core has nothing of it any more: its place or its lease is another's."""
        if turn.is_in_line:
            self._delivery.note_left_line(stream.sampling.n)
        self.dispatch.leave(turn)

    def _check_open(self, count: int) -> None:
        if self.fault is not None:
            raise self.fault
        if not self._is_open:
            raise self._refused_draining()
        overdue = self.step_watch.overdue()
        if overdue is not None:
            raise self._refused_overdue(overdue)
        live_max = self._core.settings.running_requests_max + self._settings.waiting_requests_max
        if count > live_max:
            raise InvalidRequest(f"n is {count}, but at most {live_max} sequences may run and wait here", param="n")

    def _turn(self, stream: RequestStream) -> Turn:
        request = local_request(
            stream.prompt, tenant=stream.tenant, priority=stream.priority, sequences=stream.sampling.n
        )
        try:
            return self.dispatch.begin(request)
        except Overloaded as refusal:
            self._note_refusal(stream, refusal)
            raise

    async def _lease(self, stream: RequestStream, turn: Turn) -> None:
        try:
            await turn.lease()
            if turn.is_in_line:  # otherwise it was ended just when it had got one
                turn.sent()
        except Overloaded as refusal:  # the line is drained, or it waited too long, or had to make room
            self._note_refusal(stream, refusal)
            raise

    def _note_refusal(self, stream: RequestStream, refusal: Overloaded) -> None:
        self.metrics.requests_rejected_total.labels(refusal.reason).inc()
        logger.info("refused request=%s reason=%s", stream.id, refusal.reason)

    def _check_vocabulary(self, sampling: SamplingParams) -> None:
        vocab_size = self.model.vocab_size
        for param, token_ids in (
            ("logit_bias", sampling.logit_bias or ()),
            ("stop_token_ids", sampling.stop_token_ids),
        ):
            for token_id in token_ids:
                if token_id >= vocab_size:
                    raise InvalidRequest(
                        f"{param} names token id {token_id}, this model's are 0 to {vocab_size - 1}", param=param
                    )

    def _refused_draining(self) -> Draining:
        self.metrics.requests_rejected_total.labels("draining").inc()
        return Draining(
            "the server is leaving and takes no new requests: ask another one",
            reason="draining",
            retry_after_seconds=5.0,
        )

    def _refused_overdue(self, overdue: str) -> StepOverdue:
        self.metrics.requests_rejected_total.labels("step_overdue").inc()
        return StepOverdue(
            f"{overdue}: ask another server, or this one again when it is ready",
            reason="step_overdue",
            retry_after_seconds=5.0,
        )

    def _new_choice(self, stream: RequestStream, index: int) -> Choice:
        # The number makes the id unique even when callers repeat theirs.
        sequence_id = RequestId(f"{next(self._sequence_numbers)}/{stream.id}/{index}")
        output = ChoiceOutput(self.tokenizer, stream.sampling, index=index)
        return Choice(stream, index, sequence_id, output, is_mute=stream.sampling.max_tokens == 0)

    def _add_sequences(self, stream: RequestStream) -> None:
        sampling = stream.sampling
        room = self.model.context_tokens_max - len(stream.prompt_token_ids)
        if room < 1:
            raise ContextTooLong(
                f"the prompt has {len(stream.prompt_token_ids)} tokens, and with at least one of answer this model "
                f"takes {self.model.context_tokens_max}: shorten it",
                param="prompt",
            )
        stop_token_ids = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stop_token_ids |= frozenset(self.model.eos_token_ids)
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        for choice in stream.choices:
            self._core.add(
                EngineRequest(
                    id=choice.sequence_id,
                    prompt_token_ids=stream.prompt_token_ids,
                    sampling=sampling,
                    output_tokens_max=room if sampling.max_tokens is None else max(1, sampling.max_tokens),
                    stop_token_ids=stop_token_ids,
                    seed=(seed + choice.index * SEED_STRIDE) % 2**64,
                    priority=stream.priority,
                    cache_salt=stream.cache_salt,
                    # What one choice has loaded, the others may hit.
                    kv_transfer=stream.kv_transfer if choice.index == 0 else None,
                )
            )
            self._delivery.add(choice)

    def _set_alarms(self, stream: RequestStream) -> None:
        for deadline in Deadline:
            seconds = stream.deadlines.seconds(deadline)
            if seconds is not None:
                ring = functools.partial(self._pass_deadline, stream, deadline, seconds)
                stream.alarms[deadline] = self._deadline_keeper.set(stream.entered_at + seconds, ring)

    def _pass_deadline(self, stream: RequestStream, deadline: Deadline, seconds: float) -> None:
        if not stream.is_finished:
            self.metrics.deadlines_passed_total.labels(deadline.value).inc()
            message = f"the request's {deadline.value} of {seconds:g} s has passed"
            self._delivery.end_with_last_word(stream, FinishReason.DEADLINE, message, stop_reason=deadline.value)

    def _live_streams(self) -> list[RequestStream]:
        return [stream for streams in self._streams.values() for stream in streams]

    def _waiting_since(self) -> float | None:
        """When the first of those that wait or run has come; None if nobody does."""
        return min((stream.entered_at for stream in self._live_streams() if not stream.is_finished), default=None)

    def _end_kv_events(self) -> None:
        if self.kv_events is not None:
            self.kv_events.end()

    def _note_idle(self) -> None:
        if not (self._streams or self._kept_holds):
            self._idle.set()

    def _set_gauges(self) -> None:
        stats, seen = self._core.stats(), self._stats_seen
        self._stats_seen = stats
        metrics = self.metrics
        metrics.num_requests_running.set(stats.running_count)
        metrics.num_requests_waiting.set(stats.waiting_count + self._preparing_count)
        metrics.live_requests.set(sum(len(streams) for streams in self._streams.values()))
        now = trio.current_time()
        metrics.step_age_seconds.set(self.step_watch.age_seconds(now))
        metrics.step_age_seconds_max.set(self.step_watch.seconds_max)
        metrics.no_progress_seconds.set(self.step_watch.idle_seconds(now, self._waiting_since()))
        metrics.tasks.set(trio.lowlevel.current_statistics().tasks_living)
        metrics.kv_cache_usage_perc.set(stats.kv_usage)
        metrics.kv_blocks.labels("free").set(stats.blocks_free)
        metrics.kv_blocks.labels("cached").set(stats.blocks_cached)
        metrics.kv_blocks.labels("used").set(stats.blocks_used)
        metrics.kv_blocks.labels("held").set(stats.blocks_held)
        metrics.num_preemptions_total.inc(stats.preemptions_total - seen.preemptions_total)
        metrics.prefix_cache_queries_total.inc(stats.prefix_query_tokens_total - seen.prefix_query_tokens_total)
        metrics.prefix_cache_hits_total.inc(stats.prefix_hit_tokens_total - seen.prefix_hit_tokens_total)
        metrics.spec_decode_num_drafts_total.inc(stats.drafts_total - seen.drafts_total)
        metrics.spec_decode_num_draft_tokens_total.inc(stats.draft_tokens_total - seen.draft_tokens_total)
        metrics.spec_decode_num_accepted_tokens_total.inc(stats.accepted_tokens_total - seen.accepted_tokens_total)
        metrics.kv_transfer_loads_waiting.set(stats.remote_kv_count)
        metrics.kv_transfer_requests_held.set(self._delivery.held_count)
        metrics.kv_transfer_loaded_tokens_total.inc(stats.loaded_tokens_total - seen.loaded_tokens_total)
        metrics.kv_transfer_holds_refused_total.inc(stats.holds_refused_total - seen.holds_refused_total)
        for fault, total in stats.transfer_faults_total.items():
            metrics.transfer_faults_total.labels(fault.value).inc(total - seen.transfer_faults_total[fault])
