"""The engine as a Trio program sees it: ask for text, abort by id, drain, and one place where its faults rise.

Decisions are the core's and tensors the executor's. Here requests for text are prepared. How any request gets in and
out is EngineShell's, and how an engine lives and breaks EngineLife's.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any, Literal, cast

import msgspec
import trio
from msgspec import UNSET

from trioserve.admission.image_decoder import ImageDecoder
from trioserve.admission.prompt_encoder import PromptEncoder
from trioserve.admission.router_metrics import show_router
from trioserve.admission.text_threads import TextRunner, TextThreads
from trioserve.contracts.adapter import AdapterId
from trioserve.contracts.arguments import refuse, to_bool, to_float, to_str
from trioserve.contracts.deadlines import Deadlines
from trioserve.contracts.endpoint import EndpointLoad
from trioserve.contracts.errors import InvalidRequest, Overloaded
from trioserve.contracts.events import FinishReason, HandOverOutcome
from trioserve.contracts.images import ImageEncoder
from trioserve.contracts.kv_transfer import EngineRole, RunningConnector, Started
from trioserve.contracts.kv_transfer_params import KVTransferParams
from trioserve.contracts.live import LiveRequestView
from trioserve.contracts.partial import CutOff
from trioserve.contracts.pooling import PoolingParams, TextPair
from trioserve.contracts.prompt import ChatPrompt, Cut, Prompt
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.resume import Resume
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.stats import EngineStats
from trioserve.contracts.thinking import ThoughtOutcome
from trioserve.contracts.tracing import NO_SPAN, NO_TRACER, Span
from trioserve.contracts.weights import WEIGHT_GROUP, WeightGroup
from trioserve.core.encoder_outputs import EncoderOutputs
from trioserve.core.engine import EngineCore
from trioserve.engine.adapters import Adapters, show_adapters
from trioserve.engine.connector_metrics import show_connector
from trioserve.engine.delivery import Delivery
from trioserve.engine.engine_parts import EngineParts, Guard, Nap, no_parts
from trioserve.engine.guide_preparation import GuidePreparation
from trioserve.engine.image_encoding import ImageEncoding
from trioserve.engine.kv_events import KvEvents
from trioserve.engine.live_feed import EngineLook, LiveFeed
from trioserve.engine.model_description import ModelDescription
from trioserve.engine.open_request import Choice, OpenRequest, view_of
from trioserve.engine.part_stream import PartStream
from trioserve.engine.pooled_preparation import (
    check_can_be_pooled,
    check_can_generate,
    checked_inputs,
    name_of_input,
    pooled_sequences,
)
from trioserve.engine.pooled_request import PooledRequest
from trioserve.engine.pooled_stream import PooledStream
from trioserve.engine.request_preparation import (
    RequestPreparation,
    checked_kv_transfer,
    checked_prompt,
    instance_of,
    text_or_none,
)
from trioserve.engine.request_stream import RequestStream
from trioserve.engine.settings import EngineSettings
from trioserve.engine.shell.engine_life import SERVER_STOPPING
from trioserve.engine.shell.engine_loop import EngineLoop, StepRunner, WhenIdle
from trioserve.engine.shell.engine_shell import EngineShell, new_request_id
from trioserve.engine.shell.request_trace import NO_TRACE, RequestTrace, SpannedRequest, sampling_attributes
from trioserve.engine.shell.requests_by_id import RequestsById
from trioserve.engine.shell.step_times import StepTimes
from trioserve.engine.weight_updates import WEIGHTS_REPLACED, GivenSource, WeightPlace, WeightUpdates
from trioserve.metrics.engine_gauges import EngineGauges
from trioserve.metrics.registry import Metrics
from trioserve.text.guide_factory import GuideFactory
from trioserve.text.response_families import ResponseFamilies
from trioserve.text.restraints import with_tool_choice
from trioserve.text.tokenizer import Tokenizer
from trioserve.trio_tools.errors_unwrapped import errors_unwrapped
from trioserve.trio_tools.interrupts import uninterrupted
from trioserve.trio_tools.media_fetcher import MediaFetcher
from trioserve.vision.image_prompt import ImageReader

__all__ = ["Engine", "ModelDescription"]

logger = logging.getLogger(__name__)

ADAPTER_UNLOADED = "adapter_unloaded"
WEIGHTS_REPLACED_MESSAGE = "the weights were replaced, and this request ended with what it had"


@uninterrupted
class Engine(EngineShell[OpenRequest, Choice, EngineRequest, EngineParts]):
    """Made by open_engine.

    kv_events: what came and went in the prefix cache; None where nobody is told. connector: the core's; it runs as long
    as this does. role: what routers are told; None where KV neither comes from other engines nor goes to them.
    families: how the model writes calls and thoughts; None: as its chat template says. readers_first and when_idle: see
    EngineLoop. guides: makes those of requests, and the core their masks; None: no request has any. image_encoder: of a
    model that is described to see images. media: fetches those that are elsewhere; None: nobody does. adapters: what
    there is of LoRA; None: nothing. guard, nap, weights: see EngineParts.
    """

    _delivery: Delivery

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
        new_request_id: Callable[[], str] = new_request_id,
        connector: RunningConnector | None = None,
        role: EngineRole | None = None,
        families: ResponseFamilies | None = None,
        readers_first: bool = False,
        when_idle: WhenIdle | None = None,
        guides: GuideFactory | None = None,
        image_encoder: ImageEncoder | None = None,
        image_decoder: ImageDecoder | None = None,
        media: MediaFetcher | None = None,
        adapters: Adapters | None = None,
        guard: Guard | None = None,
        nap: Nap[EngineParts] | str = "this engine cannot give its KV cache back alone",
        weights: WeightPlace | str = "this engine has none",
    ) -> None:
        super().__init__(
            metrics=metrics,
            settings=settings,
            sequences_max=core.settings.max_num_seqs,
            new_request_id=new_request_id,
        )
        self.model = self._first_model = model
        self._weights = WeightUpdates(
            weights,
            self._pausing,
            self._gate,
            computes=lambda: self._is_running,
            check_may_replace=self._check_may_replace,
            end_begun=lambda: self._end_begun(WEIGHTS_REPLACED_MESSAGE, WEIGHTS_REPLACED),
            take_weights=self._take_weights,
            note_ended=self._note_update_ended,
        )
        self.adapters = adapters or Adapters()
        self.role = role
        self.tokenizer = tokenizer
        self.families = families or ResponseFamilies(tokenizer)
        defaults = default_sampling or SamplingParams()
        if defaults.max_tokens is not None:  # a limit that the operator set refuses no prompt that leaves less room
            defaults = msgspec.structs.replace(defaults, clamp_max_tokens=True)
        self.default_sampling = defaults
        self._draw_bits = secrets.randbits if settings.seed is None else Random(settings.seed).getrandbits
        # finished and left, and what is held of them is still to be read
        self._kept_holds = RequestsById[OpenRequest]()
        self.step_times = StepTimes()
        self._text_threads = text_threads
        self._image_reader: ImageReader | None = None
        self._images: ImageEncoding | None = None
        if model.images is not None:
            assert image_decoder is not None, "the model sees images, and nothing decodes them"
            self._image_reader = ImageReader(model.images, image_decoder.limits)
            self._images = ImageEncoding(model.images, image_decoder, metrics, self._wait_until_open)
        self._prompts = self._encoder(text_threads, media)
        self._preparation = RequestPreparation(model, tokenizer, role=role)
        self._guides = GuidePreparation(guides, text_threads, metrics)
        self.kv_events: KvEvents | None = None
        self.live_feed = LiveFeed(
            model, self._requests, self._kept_holds, metrics, self.step_times, self._look, trio.current_time()
        )
        self._forget_connector: Callable[[], None] = lambda: None
        self._install(EngineParts(core, steps, connector, readers_first, when_idle, image_encoder, guard, nap, weights))
        self._show_sleep()
        self._show_weights()
        metrics.on_scrape(self._set_gauges)
        show_router(metrics, self.dispatch)
        show_adapters(metrics, self.adapters, self._requests)

    def _install(self, parts: EngineParts) -> None:
        """From here on it computes with these, and nothing of those before is known any more."""
        core, steps, connector, readers_first, when_idle, image_encoder, guard, nap, _ = parts
        self._guard = guard
        self._why_no_nap = nap if isinstance(nap, str) else None
        if self._images is not None:
            self._images.encoder = image_encoder
        metrics, settings = self.metrics, self._settings
        self._core = core
        self._connector = connector
        self._delivery = Delivery(
            core,
            metrics,
            wake=self.wake,
            step_watch=self.step_watch,
            cancels=self.live_feed,
            weight_version=self._weights.stamped_version,
        )
        self.live_feed.install(core, connector)
        self._install_loop(
            EngineLoop(
                core,
                steps,
                self._delivery,
                readers_first=readers_first,
                when_idle=when_idle,
                after_step=self._after_step,
                step_times=self.step_times,
                gate=self._gate,
            )
        )
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
        """Raises StartupError, too, and has not started, if the connector cannot start."""
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

    def close(self) -> None:
        super().close()
        self._core.progress(trio.current_time())  # what the connector lets go of at once is free

    async def keep_deadlines(self) -> None:
        """It lets go of adapters that nobody uses, too."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.adapters.keep)
            await super().keep_deadlines()

    @property
    def _is_busy(self) -> bool:
        return bool(self._requests or self._kept_holds)

    def _note_broken(self) -> None:
        self._kept_holds.clear()  # nobody will report their end

    def _note_leaving(self) -> None:
        self.live_feed.leave()

    def _note_over(self) -> None:
        super()._note_over()
        if self.kv_events is not None:
            self.kv_events.end()

    def _take_down(self) -> Callable[[Choice], EngineRequest | None]:
        lives = {live.request.id: live for live in self._core.live_requests()}
        self._kept_holds.clear()
        self._install(no_parts(self._core.settings))

        def continued(choice: Choice) -> EngineRequest | None:
            live = lives.get(choice.sequence_id)
            count = choice.output.token_count
            if live is None or (count and count >= live.request.output_tokens_max):
                return None
            known = live.tokens[live.prompt_count :][:count]
            return self._preparation.continued(choice.request, live.request, known)

        return continued

    def _ended_given_up(self, choice: Choice) -> bool:
        if choice.request.is_given_away:  # it was to end with this step, and its other choices have
            choice.request.push_end(choice, FinishReason.HANDED_OVER)
        return choice.request.is_given_away

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

    def reopen(self, parts: EngineParts) -> None:
        if self._weights.install(parts.weights):
            self.model = self._first_model
            self._show_weights()
        super().reopen(parts)

    def _begin_carried(self) -> None:
        for request in self._carried:
            request.use_weights(self._weights.version)
        super()._begin_carried()

    async def _pause_and_sleep(self, level: int, mode: str) -> None:
        async with self._weights.turn:
            if mode == "wait" and self._weights.is_half and self._has_begun():
                # It would have the turn of the update that alone lets them end.
                raise InvalidRequest(
                    "the weights came only in part, and what has begun cannot end: replace them first, or let it sleep "
                    "with another mode",
                    param="mode",
                )
            self._check_may_pause(mode)  # an engine that drains by now is to end what it has
            await super()._pause_and_sleep(level, mode)

    def _end_begun_unless_it_goes_on(self) -> None:
        if not self._weights.is_under_way:
            super()._end_begun_unless_it_goes_on()

    # --- weights ---

    async def update_weights(
        self,
        source: GivenSource,
        *,
        version: str | None = None,
        in_flight: Literal["keep", "recompute", "abort"] = "keep",
    ) -> str:
        """Replace the model's weights between two steps, tensor by tensor. Returns their version. A second one waits
        for the first; an engine that was paused before stays so. What comes meanwhile waits, as in a pause.

        source: where they are; all tensors of the model, by the names of its checkpoint, in bfloat16, float16 or
            float32. A path is that of a directory or a file from which the model could be opened; SharedWeights lie in
            shared memory, and BroadcastWeights are sent (init_weights_update_group).
        version: what the new ones are called in deltas; the prefix cache takes equal versions for equal weights.
            Default: a new name.
        in_flight: what becomes of requests that have begun: "keep" goes on with the KV that it has, "recompute"
            computes that anew, and "abort" ends them with what they have.

        Raises InvalidRequest, and has changed nothing, for weights that are not this model's, or cannot be replaced
        here. Raises WeightsLost where they came only in part: then the engine holds everything up until another update
        is whole. Leaving while they are written waits for that, unless they are sent. Raises Draining, EngineReopening
        and EngineFault.
        """
        self._own_run.check("engine.update_weights")
        return await self._weights.update(source, version, in_flight)

    async def init_weights_update_group(self, group: WeightGroup) -> None:
        """Join a group of torch.distributed in which a trainer is going to send weights. Returns when all are there.
        Raises InvalidRequest, also if they do not come in time."""
        self._own_run.check("engine.init_weights_update_group")
        await self._weights.join_group(instance_of(WeightGroup, "group", group, group))

    async def destroy_weights_update_group(self, group_name: str = WEIGHT_GROUP) -> None:
        """Leave it, after an update that is under way. Raises InvalidRequest if there is none of this name."""
        self._own_run.check("engine.destroy_weights_update_group")
        await self._weights.leave_group(group_name)

    @property
    def weight_version(self) -> str:
        """Of the weights that it computes with: "default" until they are replaced."""
        return self._weights.shown_version

    @property
    def has_half_weights(self) -> bool:
        return self._weights.is_half

    def _check_may_replace(self) -> None:
        """Raises what refuses it."""
        if self.fault is not None:
            raise self.fault
        if self.draining:
            raise self._admission.refused_draining()
        if self.sleep_level:
            raise InvalidRequest("the engine sleeps, and has no weights to replace: wake it up first")
        if not self._is_running:
            raise self._admission.refused_reopening()

    def _take_weights(self, version: str, recomputes: bool) -> None:
        """No step is in flight."""
        self.model = self._first_model.with_weights(version)
        if recomputes:
            self._core.preempt_all(trio.current_time())
        for request in self._requests:
            request.use_weights(version)
        self._delivery.use_weights(version)
        self._show_weights()

    def _show_weights(self) -> None:
        self.metrics.weights_info.clear()
        self.metrics.weights_info.labels(self.weight_version).set(1)

    def _note_update_ended(self) -> None:
        if self.draining:
            self._end_begun_unless_it_goes_on()
        self.load_changes.note()

    def _gives_away(self, request: OpenRequest) -> bool:
        """Whether another engine goes on with it from here on, or does already."""
        if request.is_given_away:
            return True
        return request.is_resumable and not request.is_finished and self._delivery.hand_over(request)

    # --- paused ---

    async def pause_generation(
        self, mode: Literal["abort", "wait", "keep", "retract"] = "abort", *, clear_cache: bool = False
    ) -> None:
        """As every engine pauses. With "retract", requests that have begun are kept, and give their blocks back: they
        are computed again when it goes on, with the tokens that they have, and their streams go on with the same ones.

        clear_cache: what was computed is no hit afterwards, and so nothing that goes on uses any of it: "keep" is
        "retract" then. What a connector keeps elsewhere it keeps.
        """
        self._own_run.check("engine.pause_generation")
        kept: Literal["abort", "wait", "keep"] = "keep" if mode == "retract" else mode
        self._check_may_pause(kept)
        retracts = mode == "retract" or (to_bool("clear_cache", clear_cache) and mode == "keep")
        if retracts or clear_cache:
            self._pausing.when_at_rest(lambda: self._give_back(retracts=retracts, forgets=clear_cache))
        await super().pause_generation(kept)

    def reset_prefix_cache(self, *, retract: bool = False) -> None:
        """What was computed is no hit for anybody any more; requests that run keep what they use. What a connector
        keeps elsewhere it keeps. retract: whoever runs gives that back, too, and computes it again; of an engine that
        pauses, with no step in flight. Raises InvalidRequest."""
        self._own_run.check("engine.reset_prefix_cache")
        if to_bool("retract", retract) and not (self.is_paused and self._give_back(retracts=True, forgets=True)):
            raise InvalidRequest("the engine computes: pause it before requests that run give back what they use")
        self._core.forget_prefixes()

    def _give_back(self, *, retracts: bool, forgets: bool) -> bool:
        """Whether it could be done, since no step is in flight."""
        if self._core.flights:
            return False
        if retracts:
            self._core.preempt_all(trio.current_time())
        if forgets:
            self._core.forget_prefixes()
        return True

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
        keep_logprobs: bool = False,
        adapter: str | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        strict: bool | None = None,
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
            keep_logprobs: those that were given are kept as long as the scope, where sampling asks for them: for
                cut_off, and for a response that goes on with them.
            adapter: the name of a LoRA adapter (load_adapter). Entering raises UnknownModel if none is loaded under it.
            tool_choice: which of the ChatPrompt's tools may or must be called, in the shape of OpenAI's API: "auto",
                "none", "required", or a dict that names a function or allowed ones. Default: "auto".
            strict: True: calls fit the schemas of their functions. False: free calls need not. Default: as each
                function of the tools says by its own `strict`.
            part_of: the span of what it is made for, where requests are traced.

        Raises:
            InvalidRequest: an argument has a wrong type; its `param` names it. What is wrong with the values (a token
                id that the model does not have, a prompt that is too long) rises on entering.
        """
        sampling = self._bounded(instance_of(SamplingParams, "sampling", sampling, self.default_sampling))
        prompt = checked_prompt(prompt)
        prompt, sampling = with_tool_choice(prompt, sampling, self.families, self.tokenizer, tool_choice, strict)
        if resume is not None and not isinstance(resume, Resume):
            refuse("resume", resume, "a Resume, or None")
        request = OpenRequest(
            prompt,
            sampling,
            **self._scope_arguments(
                request_id=request_id,
                priority=priority,
                deadlines=deadlines,
                owner=owner,
                tenant=tenant,
                part_of=part_of,
            ),
            cache_salt=text_or_none("cache_salt", cache_salt),
            add_special_tokens=to_bool("add_special_tokens", add_special_tokens),
            kv_transfer=checked_kv_transfer(kv_transfer),
            cut=cut,
            resume=resume,
            seed=self._seed_of(sampling, resume),
            is_resumable=to_bool("resumable", resumable),
            keep_logprobs=to_bool("keep_logprobs", keep_logprobs),
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
        # Without a number of its own the request asks for as many as fit.
        clamp = asked is None or sampling.clamp_max_tokens
        return msgspec.structs.replace(sampling, max_tokens=tokens_max, clamp_max_tokens=clamp)

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
        request = PooledRequest(
            checked,
            instance_of(PoolingParams, "pooling", pooling, PoolingParams()),
            name_of=name_of or name_of_input(len(checked)),
            cut=cut,
            sequence_count_max=max(1, self._core.settings.max_num_seqs // 2),
            **self._scope_arguments(
                request_id=request_id,
                priority=priority,
                deadlines=deadlines,
                owner=owner,
                tenant=tenant,
                part_of=part_of,
            ),
            cache_salt=text_or_none("cache_salt", cache_salt),
            add_special_tokens=to_bool("add_special_tokens", add_special_tokens),
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
        return PartStream(stream, self.families, tools)

    def cut_off(
        self, request_ids: Iterable[str], reason: FinishReason = FinishReason.ABORT, *, owner: str | None = None
    ) -> dict[str, CutOff]:
        """Abort, and get what there is of each request: exactly what its reader was given, or is by the end of its
        stream, and how it goes on: `engine.generate(..., resume=partial.resume)`, also after the weights were replaced.
        What the step in flight computes of it is nobody's. Log probabilities are there where it was asked to keep
        them. Otherwise as `abort`.
        """
        request_ids = (request_ids,) if isinstance(request_ids, str) else list(request_ids)
        outcomes = self.abort(request_ids, reason, owner=owner)
        return {
            request_id: CutOff(
                outcome=outcome,
                partials=tuple(
                    request.partial()
                    for request in self._requests.of(request_id)
                    if request.generates and owner in (None, request.owner)
                ),
            )
            for request_id, outcome in outcomes.items()
        }

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

    def stats(self) -> EngineStats:
        """How many sequences run and wait, and what the KV blocks are: a frozen snapshot."""
        self._own_run.check_process("engine.stats")
        return self._core.stats()

    def load(self) -> EndpointLoad:
        """How much there is to do, as a router asks. Waiting are those being tokenized, too."""
        self._own_run.check_process("engine.load")
        stats = self._core.stats()
        return EndpointLoad(
            running=stats.running_count,
            waiting=stats.waiting_count + self._preparing_count,
            max_num_seqs=self._core.settings.max_num_seqs,
            kv_usage=stats.kv_usage,
            role=UNSET if self.role is None else self.role,
            fingerprint=UNSET if self.model.fingerprint is None else self.model.fingerprint,
            weight_version=self._weights.stamped_version or UNSET,
        )

    # --- how a request gets in and out; see EngineShell ---

    def _new_choices(self, request: OpenRequest) -> list[Choice]:
        if request.adapter is not None:
            request.adapter_lease = self.adapters.acquire(request.adapter)
            request.adapter_digest = request.adapter_lease.ref.digest
        return self._preparation.new_choices(request)

    async def _prepare(self, request: OpenRequest) -> None:
        try:
            await self._prepare_in_turn(request)
        except Overloaded as refusal:
            self.metrics.requests_rejected_total.labels(refusal.reason).inc()
            raise

    async def _prepare_in_turn(self, request: OpenRequest) -> None:
        """Do what costs time before the core has the request, at each stage in turn with other tenants."""
        request.guides = await self._guides.prepare(request.sampling, request.cache_salt, tenant=request.tenant)
        prompts = self._prompts.within(self._text_threads.of_tenant(request.tenant))
        await request.tokenize(prompts)
        if request.resume is not None:
            await self._take_known(request, request.resume, prompts)
        if self._images is not None and request.images:
            self._preparation.check_room(request)
            await self._wait_until_admitted()
            await self._images.prepare(request)

    def _release(self, request: OpenRequest) -> None:
        self._release_outputs(request)
        self._release_adapter(request)

    def _release_prepared(self, request: OpenRequest) -> None:
        self._release_outputs(request)

    def _end_holds(self, request: OpenRequest) -> None:
        self._delivery.end_holds(request)

    def _leave_holds(self, request: OpenRequest) -> None:
        if request.is_hold_kept and request.is_held and self.fault is None:
            self._kept_holds.add(request)
            request.on_released = lambda: self._forget_hold(request)
        else:
            self._delivery.end_holds(request)
            self.live_feed.note_left(request)

    def _note_left(self, request: OpenRequest) -> None:
        request.trace.left(
            prompt_tokens=request.prompt_token_count,
            completion_tokens=request.completion_token_count,
            cached_tokens=request.cached_token_count,
        )

    def _known(self, request_id: str) -> list[OpenRequest]:
        return [*self._requests.of(request_id), *self._kept_holds.of(request_id)]

    def _release_outputs(self, request: OpenRequest) -> None:
        """The core has nothing of it any more: what the model made of its images others may have."""
        if self._images is not None:
            self._images.release(request)

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
        request.use_weights(self._weights.version)
        sequences = (
            pooled_sequences(self.model, request)
            if isinstance(request, PooledRequest)
            else self._preparation.sequences(request)
        )
        request.trace.prepared(request.prompt_token_count)
        return sequences

    async def _take_known(self, request: OpenRequest, resume: Resume, prompts: PromptEncoder) -> None:
        """Put the choices where they stood: here if that is soon done, else where long texts are worked on."""
        known = self._preparation.known_output(request, resume)
        request.take_known(await prompts.run(known.choices, size=known.size))
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

    def _release_adapter(self, request: OpenRequest) -> None:
        lease, request.adapter_lease = request.adapter_lease, None
        if lease is not None:
            self.adapters.release(lease)

    def _trace(self, request: OpenRequest) -> RequestTrace:
        """To be made when it has entered the queue."""
        if self.tracer is NO_TRACER:
            return NO_TRACE
        is_pooled = isinstance(request, PooledRequest)
        operation = "chat" if isinstance(request.prompt, ChatPrompt) else "text_completion"
        span = self._span_of(
            request,
            "embeddings" if is_pooled else operation,
            model_name=request.adapter or self.model.name,
            attributes={} if is_pooled else sampling_attributes(request.sampling),
            traceparent=None if request.kv_transfer is None else request.kv_transfer.traceparent,
        )
        return SpannedRequest(span, is_pooled=is_pooled) if span.is_recording else NO_TRACE

    def _look(self) -> EngineLook:
        return EngineLook(
            is_draining=self.draining,
            restarts=self._restarts.taken_count,
            preparing_count=self._preparing_count,
            held_count=self._delivery.held_count,
            role=self.role,
        )

    def _set_gauges(self) -> None:
        stats = self._core.stats()
        self._show_shell(
            running_count=stats.running_count, waiting_count=stats.waiting_count, deferred_count=stats.remote_kv_count
        )
        self._gauges.show(stats, held_count=self._delivery.held_count)
