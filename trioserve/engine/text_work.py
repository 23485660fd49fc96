"""Prepares text and pooling requests for an engine, creates their sequences, and releases their resources.

`EngineLifecycle` runs the engine. It calls `TextWork` when a request enters, gets its lease, begins, and leaves.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple

import trio

from trioserve.admission.file_decoders import AudioDecoder, ImageDecoder
from trioserve.admission.prompt_encoder import PromptEncoder
from trioserve.admission.text_threads import TextRunner, TextThreads
from trioserve.contracts.errors import Overloaded
from trioserve.contracts.kv_transfer import EngineRole, RunningConnector
from trioserve.contracts.media import ImageEncoder
from trioserve.contracts.page import EngineStats
from trioserve.contracts.prompt import ChatPrompt, InputEncoder
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.resume import Resume
from trioserve.contracts.tracing import NO_TRACER
from trioserve.core.engine import EngineCore
from trioserve.core.settings import CoreSettings
from trioserve.engine.adapters import Adapters
from trioserve.engine.delivery import Delivery
from trioserve.engine.engine_metrics import show_connector
from trioserve.engine.image_encoding import ImageEncoding, InputEncoding, RowEncoding, SoundEncoding
from trioserve.engine.kv_cache import KvEvents, KvLimit, KvRelease
from trioserve.engine.lifecycle.engine_loop import StepRunner, WhenIdle
from trioserve.engine.lifecycle.request_trace import (
    NO_TRACE,
    RequestTrace,
    SpannedRequest,
    request_span,
    sampling_attributes,
)
from trioserve.engine.lifecycle.step_times import StepTimes
from trioserve.engine.lifecycle.work import Guard, Host, NoSteps
from trioserve.engine.live_feed import EngineStatus, LiveFeed
from trioserve.engine.model_description import ModelDescription
from trioserve.engine.open_request import Choice, OpenRequest
from trioserve.engine.pooling_request import PoolingRequest, check_can_be_pooled, check_can_generate, pooling_sequences
from trioserve.engine.request_preparation import RequestPreparation
from trioserve.engine.sessions import SessionTable
from trioserve.engine.settings import EngineSettings
from trioserve.engine.structured_output import GuidePreparation
from trioserve.engine.weight_updates import WeightTarget
from trioserve.metrics.engine_gauges import EngineGauges
from trioserve.metrics.registry import Metrics
from trioserve.text.guide_factory import GuideFactory
from trioserve.text.response_parsers.registry import ResponseFamilies
from trioserve.text.tokenizer import Tokenizer
from trioserve.trio_tools.interrupts import uninterrupted
from trioserve.trio_tools.media_fetcher import MediaFetcher
from trioserve.vision.image_prompt import ImageReader, SoundReader

__all__ = ["EngineParts", "OpenParts", "TextWork"]


class EngineParts(NamedTuple):
    """Objects that an engine opens together. `Engine` and `EngineLoop` document the fields that have no description
    here.

    Attributes:
        core: the scheduler and owner of the KV blocks.
        steps: computes the plans of the core.
        connector: moves KV blocks to and from other engines. None: no connector.
        readers_first: see `EngineLoop`.
        when_idle: see `EngineLoop`.
        image_encoder: computes the embeddings of images in prompts. None: the model reads no images.
        row_encoder: computes the rows of an encoder. None: the model has none.
        guard: waits until one of the computing processes is lost. None: only a failed step can report such a loss.
        cache_release: releases only the KV cache. If this is impossible, a sentence that gives the reason.
        weights: replaces the weights. If this is impossible, a sentence that gives the reason. The object stays the
            same as long as the weights stay loaded.
    """

    core: EngineCore
    steps: StepRunner
    connector: RunningConnector | None = None
    readers_first: bool = False
    when_idle: WhenIdle | None = None
    image_encoder: ImageEncoder | None = None
    guard: Guard | None = None
    cache_release: KvRelease[EngineParts] | str = "this engine cannot release its KV cache alone"
    weights: WeightTarget | str = "this engine has no weights"
    row_encoder: InputEncoder | None = None


OpenParts = Callable[[], AbstractAsyncContextManager[EngineParts]]
"""Opens the parts, with model, threads and memory. Leaving the context frees all of them, also after a fault."""


@uninterrupted
class TextWork:
    """Implements `Work` for an engine for text. `Engine` documents the arguments."""

    part_name = "sequences"

    def __init__(
        self,
        *,
        model: ModelDescription,
        core_settings: CoreSettings,
        tokenizer: Tokenizer,
        text_threads: TextThreads,
        metrics: Metrics,
        settings: EngineSettings,
        role: EngineRole | None,
        families: ResponseFamilies,
        guides: GuideFactory | None,
        image_decoder: ImageDecoder | None,
        audio_decoder: AudioDecoder | None,
        media: MediaFetcher | None,
        adapters: Adapters,
    ) -> None:
        self.model = self._first_model = model
        self.metrics = metrics
        self.tokenizer = tokenizer
        self.families = families
        self.adapters = adapters
        self.role = role
        self.step_times = StepTimes()
        self.tasks: Sequence[Callable[[], Awaitable[None]]] = (adapters.keep,)
        self.kv_events: KvEvents | None = None
        self._core_settings = core_settings
        self._settings = settings
        self._text_threads = text_threads
        self._image_reader: ImageReader | None = None
        self._sound_reader: SoundReader | None = None
        self._audio_decoder = audio_decoder
        self.encoding: InputEncoding | None = None
        if model.images is not None:
            assert image_decoder is not None, "the model reads images, and there is no decoder for them"
            self._image_reader = ImageReader(model.images, image_decoder.limits)
            self.encoding = ImageEncoding(model.images, image_decoder, metrics, self._wait_until_open)
        if model.sounds is not None:
            assert audio_decoder is not None, "the model hears sounds, and there is no decoder for them"
            self._sound_reader = SoundReader(model.sounds, audio_decoder.limits)
            self.encoding = SoundEncoding(model.sounds, audio_decoder, metrics, self._wait_until_open)
        if model.encoder is not None:
            self.encoding = RowEncoding(model.encoder, metrics, self._wait_until_open)
        self.prompts = self.encoder(text_threads, media)
        self._preparation = RequestPreparation(model, tokenizer, role=role)
        self.guides = GuidePreparation(guides, text_threads, metrics)
        self.sessions = SessionTable(settings, core_settings.sessions_max, metrics)
        self.kv_limit = KvLimit(self._wait_until_open)
        self._forget_connector: Callable[[], None] = lambda: None

    # --- opening ---

    def attach(self, engine: Host) -> None:
        self._engine = engine
        self.sessions.attach(engine.call_at)
        self.live_feed = LiveFeed(
            self.model,
            engine.requests,
            engine.kept_holds,
            self.metrics,
            self.step_times,
            self._status,
            trio.current_time(),
        )

    def install(self, parts: EngineParts) -> tuple[EngineCore, Delivery]:
        core, _, connector, *_ = parts
        metrics = self.metrics
        if self.encoding is not None:
            self.encoding.encoder = parts.row_encoder if self.model.encoder is not None else parts.image_encoder
        self._core = core
        self._delivery = Delivery(
            core,
            metrics,
            wake=self._engine.wake,
            step_watch=self._engine.step_watch,
            cancels=self.live_feed,
            weight_version=self._engine.weight_updates.stamped_version,
        )
        self.live_feed.install(core, connector)
        self.sessions.install(core, self._delivery)
        self.kv_limit.install(core, parts.cache_release)
        if self._settings.kv_events_max:
            self.kv_events = KvEvents(
                core.cache,
                model=self.model.name,
                block_size=core.settings.block_size,
                window_tokens=core.settings.window_tokens,
                events_max=self._settings.kv_events_max,
            )
        self._gauges = EngineGauges(metrics, core.stats())
        self._forget_connector()
        self._forget_connector = (lambda: None) if connector is None else show_connector(metrics, connector.counts)
        self.show_weights()
        return core, self._delivery

    def no_parts(self) -> EngineParts:
        return EngineParts(EngineCore(self._core_settings), NoSteps())

    def continued(self) -> Callable[[Choice], EngineRequest | None]:
        lives = {live.request.id: live for live in self._core.live_requests()}

        def continued(choice: Choice) -> EngineRequest | None:
            live = lives.get(choice.sequence_id)
            count = choice.output.token_count
            if live is None or (count and count >= live.request.output_tokens_max):
                return None
            known = live.tokens[live.prompt_count :][:count]
            return self._preparation.continued(choice.request, live.request, known)

        return continued

    def use_weights(self, version: str | None, *, recomputes: bool = False) -> None:
        if version is None:
            self.model = self._first_model
            return
        self.model = self._first_model.with_weights(version)
        if recomputes:
            self._core.preempt_all(trio.current_time())
        for request in self._engine.requests:
            request.use_weights(version)
        self._delivery.use_weights(version)
        self.show_weights()

    def show_weights(self) -> None:
        self.metrics.weights_info.clear()
        self.metrics.weights_info.labels(self._engine.weight_updates.shown_version).set(1)

    # --- the stages of a request ---

    def check(self, request: OpenRequest) -> None:
        if isinstance(request, PoolingRequest):
            check_can_be_pooled(self.model, request.params, request.inputs)
        else:
            if self.model.pooled is not None:
                check_can_generate(self.model)
            self._preparation.check(request)

    def begin(self, request: OpenRequest, *, is_waiting: bool) -> list[Choice]:
        if self._engine.tracer is not NO_TRACER:
            request.trace = self._trace(request)
        if request.asked_session is not None:
            request.session = request.turn_of = self.sessions.begin_turn(request, request.asked_session)
        if request.adapter is not None:
            request.adapter_lease = self.adapters.acquire(request.adapter)
            request.adapter_digest = request.adapter_lease.ref.digest
        return self._preparation.new_choices(request)

    async def prepare(self, request: OpenRequest) -> None:
        try:  # In each stage of this expensive preparation, tenants take turns.
            request.guides = await self.guides.prepare(request.sampling, request.cache_salt, tenant=request.tenant)
            prompts = self.prompts.of_tenant(request.tenant)
            await request.tokenize(prompts)
            if request.resume is not None:
                await self._replay_known(request, request.resume, prompts)
            if self.encoding is not None and (request.images or request.encoder_input is not None):
                self._preparation.check_room(request)
                await self._engine.wait_until_admitted()
                await self.encoding.prepare(request)
        except Overloaded as refusal:
            self.metrics.requests_rejected_total.labels(refusal.reason).inc()
            raise

    def sequences(self, request: OpenRequest) -> list[tuple[Choice, EngineRequest]]:
        sequences = (
            pooling_sequences(self.model, request)
            if isinstance(request, PoolingRequest)
            else self._preparation.sequences(request)
        )
        request.trace.prepared(request.prompt_token_count)
        return sequences

    def release(self, request: OpenRequest) -> None:
        if self.encoding is not None:
            self.encoding.release(request)  # Other requests can then use the memory of these embeddings.
        session, request.session = request.session, None
        if session is not None:
            self.sessions.end_turn(request, session)
        lease, request.adapter_lease = request.adapter_lease, None
        if lease is not None:
            self.adapters.release(lease)

    def keeps_hold(self, request: OpenRequest) -> bool:
        return request.is_hold_kept and request.is_held

    def try_hand_over(self, request: OpenRequest) -> bool:
        if request.is_handed_over:
            return True
        return request.is_resumable and not request.is_finished and self._delivery.hand_over(request)

    async def _replay_known(self, request: OpenRequest, resume: Resume, prompts: PromptEncoder) -> None:
        """Replay the known tokens of each choice. A short replay runs in this thread, a long one in a text thread."""
        known = self._preparation.resumed_output(request, resume)
        request.take_known(await prompts.run(known.choices, size=known.size))
        self.metrics.resumed_requests_total.inc()
        self.metrics.resumed_tokens_total.inc(sum(map(len, resume.token_ids)))
        if request.is_finished:
            request.on_gone()  # All choices are complete, so nothing will be computed.

    def encoder(self, texts: TextRunner, media: MediaFetcher | None = None) -> PromptEncoder:
        model = self.model
        return PromptEncoder(
            self.tokenizer,
            texts,
            vocab_size=model.vocab_size,
            context_tokens_max=model.context_tokens_max,
            tool_family=self.families.tool_family,
            images=self._image_reader,
            sounds=self._sound_reader,
            audio_decoder=self._audio_decoder,
            media=media,
            encoder=model.encoder,
            block_size=self._core_settings.block_size,
        )

    def _trace(self, request: OpenRequest) -> RequestTrace:
        """Begin the trace of a request that has entered the queue."""
        is_pooling = isinstance(request, PoolingRequest)
        operation = "chat" if isinstance(request.prompt, ChatPrompt) else "text_completion"
        span = request_span(
            self._engine.tracer,
            request,
            "embeddings" if is_pooling else operation,
            model_name=request.adapter or self.model.name,
            attributes={} if is_pooling else sampling_attributes(request.sampling),
            traceparent=None if request.kv_transfer is None else request.kv_transfer.traceparent,
        )
        return SpannedRequest(span, is_pooling=is_pooling) if span.is_recording else NO_TRACE

    async def _wait_until_open(self) -> None:
        await self._engine.wait_until_open()

    # --- observers ---

    def note_left(self, request: OpenRequest) -> None:
        self.live_feed.note_left(request)

    def note_leaving(self) -> None:
        self.live_feed.leave()

    def note_stopped(self) -> None:
        self.kv_limit.note_change()
        if self.kv_events is not None:
            self.kv_events.end()

    def show(self, stats: EngineStats) -> int:
        self._gauges.show(stats, held_count=self._delivery.held_count)
        return stats.remote_kv_count

    def _status(self) -> EngineStatus:
        return EngineStatus(
            is_draining=self._engine.draining,
            restarts=self._engine.restarts.taken_count,
            preparing_count=self._engine.preparing_count,
            held_count=self._delivery.held_count,
            role=self.role,
        )
