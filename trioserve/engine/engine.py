"""The engine for text as a Trio program uses it: generate, embed, abort by id, pause, sleep, drain.

`EngineLifecycle` runs the engine and its requests. `TextWork` prepares them for the core.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import Any, Literal

import msgspec
import trio
from msgspec import UNSET

from trioserve.admission.file_decoders import AudioDecoder, ImageDecoder
from trioserve.admission.prompt_encoder import PromptEncoder
from trioserve.admission.router_metrics import show_router
from trioserve.admission.text_threads import TextThreads
from trioserve.contracts.arguments import check_flags, check_texts, refuse, to_bool, to_float, to_int, to_str
from trioserve.contracts.deadlines import Deadlines
from trioserve.contracts.endpoint import EndpointLoad
from trioserve.contracts.errors import InvalidRequest, Overloaded
from trioserve.contracts.events import FinishReason, HandOverOutcome
from trioserve.contracts.kv_transfer import EngineRole, RunningConnector
from trioserve.contracts.media import ImageEncoder
from trioserve.contracts.page import EngineStats, LiveRequestView
from trioserve.contracts.pooling import PoolingParams, TextPair
from trioserve.contracts.prompt import Cut, InputEncoder, Prompt
from trioserve.contracts.request import KVTransferParams, Retention
from trioserve.contracts.resume import AbortResult, Resume
from trioserve.contracts.sampling import ReasoningOutcome, SamplingParams
from trioserve.contracts.tracing import NO_SPAN, Span
from trioserve.contracts.weights import WEIGHT_GROUP, AdapterId, WeightGroup
from trioserve.core.encoder_outputs import EncoderOutputs
from trioserve.core.engine import EngineCore
from trioserve.engine.adapters import Adapters, show_adapters
from trioserve.engine.delivery import Delivery
from trioserve.engine.kv_cache import KvEvents, KvRelease
from trioserve.engine.lifecycle.engine_lifecycle import EngineLifecycle
from trioserve.engine.lifecycle.engine_loop import StepRunner, WhenIdle
from trioserve.engine.lifecycle.request_admission import new_request_id
from trioserve.engine.lifecycle.work import Guard
from trioserve.engine.model_description import ModelDescription
from trioserve.engine.open_request import OpenRequest, view_of
from trioserve.engine.pooling_request import PoolingRequest, checked_inputs, name_of_input
from trioserve.engine.request_preparation import checked_kv_transfer, checked_prompt, instance_of
from trioserve.engine.request_stream import PartStream, PoolingStream, RequestStream
from trioserve.engine.session import Conversation, Session
from trioserve.engine.sessions import LiveSession, SessionName, SessionTable
from trioserve.engine.settings import EngineSettings
from trioserve.engine.text_work import EngineParts, TextWork
from trioserve.engine.weight_updates import GivenSource, WeightTarget
from trioserve.metrics.registry import Metrics
from trioserve.text.guide_factory import GuideFactory
from trioserve.text.response_parsers.registry import ResponseFamilies
from trioserve.text.restraints import with_tool_choice
from trioserve.text.tokenizer import Tokenizer
from trioserve.trio_tools.interrupts import uninterrupted
from trioserve.trio_tools.media_fetcher import MediaFetcher

__all__ = ["Engine", "ModelDescription"]

logger = logging.getLogger(__name__)

ADAPTER_UNLOADED = "adapter_unloaded"
WEIGHTS_REPLACED_MESSAGE = "the weights were replaced, and this request ended with its partial result"


@uninterrupted
class Engine(EngineLifecycle[OpenRequest, EngineParts]):
    """An engine that serves one model. `open_engine` creates it.

    Args:
        model: description of the model.
        core: scheduler and owner of the KV blocks.
        steps: computes the plans of the core.
        tokenizer: the model's tokenizer.
        text_threads: threads that tokenize and compile grammars.
        metrics: registry of the engine's metrics.
        settings: limits of the engine.
        default_sampling: sampling options of requests that have none. None: `SamplingParams()`.
        new_request_id: makes the id of a request whose caller gives none.
        connector: the core's connector. It runs as long as the engine. None: no connector.
        role: role in KV exchange, shown to routers. None: the engine does not exchange KV with others.
        families: formats in which the model writes tool calls and reasoning. None: detected from its chat template.
        readers_first: see `EngineLoop`.
        when_idle: see `EngineLoop`.
        guides: compiles grammars. None: requests with structured output are refused.
        image_encoder: computes embeddings of images. None: the model reads no images.
        row_encoder: computes the rows of an encoder. None: the model has none.
        image_decoder: decodes image files. Required if the model reads images.
        audio_decoder: decodes audio files. None: the model hears nothing.
        media: fetches images by URL. None: URLs are refused.
        adapters: LoRA adapters. None: adapters are disabled.
        guard: see `EngineParts`.
        cache_release: see `EngineParts`.
        weights: see `EngineParts`.
    """

    _core: EngineCore
    _delivery: Delivery
    audio_decoder: AudioDecoder | None

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
        row_encoder: InputEncoder | None = None,
        image_decoder: ImageDecoder | None = None,
        audio_decoder: AudioDecoder | None = None,
        media: MediaFetcher | None = None,
        adapters: Adapters | None = None,
        guard: Guard | None = None,
        cache_release: KvRelease[EngineParts] | str = "this engine cannot release its KV cache alone",
        weights: WeightTarget | str = "this engine has no weights",
    ) -> None:
        self.role = role
        self.tokenizer = tokenizer
        self.families = families or ResponseFamilies(tokenizer)
        self.adapters = adapters or Adapters()
        self._text_threads = text_threads
        self._texts = TextWork(
            model=model,
            core_settings=core.settings,
            tokenizer=tokenizer,
            text_threads=text_threads,
            metrics=metrics,
            settings=settings,
            role=role,
            families=self.families,
            guides=guides,
            image_decoder=image_decoder,
            audio_decoder=audio_decoder,
            media=media,
            adapters=self.adapters,
        )
        super().__init__(
            self._texts,
            EngineParts(
                core,
                steps,
                connector,
                readers_first,
                when_idle,
                image_encoder,
                guard,
                cache_release,
                weights,
                row_encoder,
            ),
            metrics=metrics,
            settings=settings,
            sequences_max=core.settings.max_num_seqs,
            new_request_id=new_request_id,
        )
        defaults = default_sampling or SamplingParams()
        # Without `clamp_max_tokens`, the operator's limit would refuse prompts that leave space for fewer tokens.
        if defaults.max_tokens is not None:
            defaults = msgspec.structs.replace(defaults, clamp_max_tokens=True)
        self.default_sampling = defaults
        self._draw_bits = secrets.randbits if settings.seed is None else Random(settings.seed).getrandbits
        self.audio_decoder = audio_decoder
        self.step_times = self._texts.step_times
        self.live_feed = self._texts.live_feed
        show_router(metrics, self.dispatch)
        show_adapters(metrics, self.adapters, self.requests)

    @property
    def model(self) -> ModelDescription:
        """Description of the model that is served. The model's version changes when its weights are replaced."""
        return self._texts.model

    @property
    def kv_events(self) -> KvEvents | None:
        """Record of the changes in the prefix cache, for subscribers. None: events are disabled."""
        return self._texts.kv_events

    # --- weights ---

    async def update_weights(
        self,
        source: GivenSource,
        *,
        version: str | None = None,
        in_flight: Literal["keep", "recompute", "abort"] = "keep",
    ) -> str:
        """Replace the model's weights between two steps, tensor by tensor.

        A second update waits until the first one ends. New requests wait during an update, as in a pause. An engine
        that was paused before the update stays paused after it. If the call is cancelled, it first finishes writing the
        weights. Only weights that a trainer sends are left incomplete.

        Args:
            source: the new weights: all tensors of the model, by the names of its checkpoint, in bfloat16, float16 or
                float32. A path names a directory or file from which the model could be opened. SharedWeights are in
                shared memory. BroadcastWeights are sent by a trainer (see `init_weights_update_group`).
            version: name of the new weights, shown in deltas. The prefix cache treats equal versions as equal weights.
                None: the engine generates a name.
            in_flight: what happens to in-flight requests. "keep" continues with the KV of the old weights. "recompute"
                computes the KV again. "abort" ends them with their partial results.

        Returns:
            The version.

        Raises:
            InvalidRequest: the weights do not fit this model, or cannot be replaced here. Nothing was changed.
            WeightsLost: only a part of the weights arrived. No step begins until another update is complete.
            Draining: the server is shutting down.
            EngineReopening: the engine broke, and is being reopened.
            EngineFault: the engine is broken.
        """
        self._own_run.check("engine.update_weights")
        return await self.weight_updates.update(source, version, in_flight)

    async def init_weights_update_group(self, group: WeightGroup) -> None:
        """Join a torch.distributed group in which a trainer will send weights. Return when all members have joined.

        Args:
            group: address, rank and size of the group.

        Raises:
            InvalidRequest: an argument is not allowed, or the members did not join in time.
        """
        self._own_run.check("engine.init_weights_update_group")
        await self.weight_updates.join_group(instance_of(WeightGroup, "group", group, group))

    async def destroy_weights_update_group(self, group_name: str = WEIGHT_GROUP) -> None:
        """Leave a group. If an update is running, wait until it ends.

        Raises:
            InvalidRequest: there is no such group.
        """
        self._own_run.check("engine.destroy_weights_update_group")
        await self.weight_updates.leave_group(group_name)

    @property
    def weight_version(self) -> str:
        """Version of the current weights. It is "default" until the weights are replaced."""
        return self.weight_updates.shown_version

    # --- pausing ---

    async def pause_generation(
        self, mode: Literal["abort", "wait", "keep", "retract"] = "abort", *, clear_cache: bool = False
    ) -> None:
        """Begin no further step until `resume_generation`. See `EngineLifecycle.pause_generation`.

        Args:
            mode: see `EngineLifecycle.pause_generation`. In addition, "retract" keeps in-flight requests and frees
                their blocks. When the engine is resumed, it computes their KV again, and their streams continue with
                the same tokens.
            clear_cache: True to empty the prefix cache. Then "keep" acts as "retract", so that no request uses old KV.
                Blocks that a connector stores elsewhere stay there.
        """
        self._own_run.check("engine.pause_generation")
        kept: Literal["abort", "wait", "keep"] = "keep" if mode == "retract" else mode
        self._check_may_pause(kept)
        retracts = mode == "retract" or (to_bool("clear_cache", clear_cache) and mode == "keep")
        if retracts or clear_cache:
            self._pausing.when_at_rest(lambda: self._free_blocks(retracts=retracts, forgets=clear_cache))
        await super().pause_generation(kept)

    def reset_prefix_cache(self, *, retract: bool = False) -> None:
        """Empty the prefix cache. Running requests keep their blocks. Blocks that a connector stores elsewhere are not
        removed.

        Args:
            retract: True to free the blocks of running requests, too. The engine computes them again later. It must be
                paused, and no step may be in flight.

        Raises:
            InvalidRequest: `retract` is True, and the engine computes.
        """
        self._own_run.check("engine.reset_prefix_cache")
        if to_bool("retract", retract) and not (self.is_paused and self._free_blocks(retracts=True, forgets=True)):
            raise InvalidRequest("the engine computes: pause it before you reset the cache with retract")
        self._core.forget_prefixes()

    def _free_blocks(self, *, retracts: bool, forgets: bool) -> bool:
        """Free blocks if no step is in flight. Return False if a step is in flight."""
        if self._core.flights:
            return False
        if retracts:
            self._core.preempt_all(trio.current_time())
        if forgets:
            self._core.forget_prefixes()
        return True

    # --- requests ---

    async def limit_kv_cache(self, tokens: int) -> None:
        """Use only a part of the KV cache from now on. Return when the memory of the rest was released.

        If the limit is lower than before, cached blocks beyond it are lost, and requests that use such blocks keep them
        until they end. A request that needs a further block meanwhile may be preempted, as in any full cache. A
        cancelled call restores the former limit. The limit stays in force after a restart of the engine and after a
        sleep.

        Args:
            tokens: KV of this many tokens, rounded up to whole blocks. From one full context to the size at the start.

        Raises:
            InvalidRequest: tokens is out of range, or this engine cannot release a part of its KV cache, such as one
                on a GPU.
            Draining: the engine is closed.
        """
        self._own_run.check("engine.limit_kv_cache")
        await self._texts.kv_limit.set(-(-tokens // self._core.settings.block_size))

    @property
    def kv_cache_tokens(self) -> tuple[int, int]:
        """Tokens that the KV cache may hold now, and tokens that it can hold without a limit."""
        pool, block_size = self._core.pool, self._core.settings.block_size
        return pool.limit * block_size, pool.block_count * block_size

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
        parallel_tool_calls: bool = True,
        session: LiveSession | SessionName | None = None,
        part_of: Span = NO_SPAN,
    ) -> RequestStream:
        """Create a request. It begins when the stream is entered with `async with`, and uses no resources before.

        Args:
            prompt: text, token ids (a list, or an array of one dimension), or a ChatPrompt.
            sampling: how tokens are chosen, and when to stop. Default: `default_sampling`, whose `max_tokens` also
                limits every request.
            request_id: the caller's id. It need not be unique: an abort by id ends all requests with this id. Default:
                a new id.
            priority: PRIORITY_MIN to PRIORITY_MAX (-100 to 100). A lower number runs sooner.
            cache_salt: requests share prefix blocks only if their salts are equal.
            add_special_tokens: True to begin a text prompt with the tokenizer's special tokens. Chat templates add them
                themselves.
            deadlines: limits in seconds, counted from entering. A request that passes a deadline ends with finish
                reason DEADLINE.
                Default: the engine's deadlines. The engine's maximum applies to all.
            owner: user who may see and abort the request by its id, besides users who may see all requests.
            tenant: the queue is fair between tenants. Default: the owner.
            kv_transfer: whether to load the KV of the prompt from another engine, or to hold the KV for another engine.
                With n choices, the first choice loads the KV, and the other choices use the prefix cache or compute.
                Holding requires n = 1, see `RequestStream`.
            cut: how to shorten a prompt that is too long. Default: entering raises ContextTooLong.
            resume: state of an earlier stream of the same request (`RequestStream.resume_state`). The stream continues
                after the tokens of that state. Deltas contain only new output. Counts include the known output.
            resumable: True if the caller will resume the request after an abort or a deadline. Then held-back text is
                not sent when the request ends, because the resumed response will contain it.
            keep_logprobs: True to store delivered log probabilities, if `sampling` requests them. Partial results and
                resumed responses then contain them.
            adapter: name of a LoRA adapter (`load_adapter`). Entering raises UnknownModel if it is not loaded.
            tool_choice: which tools of the ChatPrompt may or must be called, as in OpenAI's API: "auto", "none",
                "required", or a dict that names one function or several allowed ones. Default: "auto".
            strict: True: tool calls match the schemas of their functions. False: a tool call that `tool_choice` does
                not force need not match. Default: the `strict` field of each tool decides.
            parallel_tool_calls: False: a forced or strict response has at most one call. A session keeps only the first
                call of any response.
            session: the session that the request is a turn of, from `sessions`. Programs use `Engine.session` instead.
            part_of: parent span of the request's trace.

        Returns:
            The stream, to be entered.

        Raises:
            InvalidRequest: an argument has a wrong type. `param` names it. Wrong values (an unknown token id, a prompt
                that is too long) are reported on entering.
        """
        sampling = self._bounded(instance_of(SamplingParams, "sampling", sampling, self.default_sampling))
        prompt = checked_prompt(prompt)
        prompt, sampling = with_tool_choice(
            prompt,
            sampling,
            self.families,
            self.tokenizer,
            tool_choice,
            strict,
            parallel_tool_calls=parallel_tool_calls,
        )
        if resume is not None and not isinstance(resume, Resume):
            refuse("resume", resume, "a Resume, or None")
        check_flags(
            add_special_tokens=add_special_tokens,
            parallel_tool_calls=parallel_tool_calls,
            resumable=resumable,
            keep_logprobs=keep_logprobs,
        )
        new_request = session.new_request if isinstance(session, LiveSession) else None
        request: OpenRequest = (new_request or OpenRequest)(
            prompt,
            sampling,
            **self._admission.arguments(
                request_id=request_id,
                priority=priority,
                deadlines=deadlines,
                owner=owner,
                tenant=tenant,
                part_of=part_of,
                texts={"cache_salt": cache_salt, "adapter": adapter},
            ),
            cache_salt=cache_salt,
            add_special_tokens=add_special_tokens,
            kv_transfer=None if kv_transfer is None else checked_kv_transfer(kv_transfer),
            cut=cut,
            resume=resume,
            seed=self._seed_of(sampling, resume),
            is_resumable=resumable,
            keep_logprobs=keep_logprobs,
            adapter=adapter,
            session=session,
            calls_max=0 if tool_choice == "none" else None if parallel_tool_calls else 1,
        )
        return RequestStream(request, submit=self._submit, leave=self._leave, own_run=self._own_run)

    def _seed_of(self, sampling: SamplingParams, resume: Resume | None) -> int:
        """Return the seed of a request. A resumed response uses the seed of the earlier stream."""
        if resume is not None and resume.seed is not None:
            return resume.seed
        return self._draw_bits(64) if sampling.seed is None else sampling.seed

    def _bounded(self, sampling: SamplingParams) -> SamplingParams:
        tokens_max, asked = self.default_sampling.max_tokens, sampling.max_tokens
        if tokens_max is None or (asked is not None and asked <= tokens_max):
            return sampling
        # If the request has no limit of its own, its limit shrinks when the prompt leaves space for fewer tokens.
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
    ) -> PoolingStream:
        """Create a request that turns inputs into vectors or scores: `vectors = await engine.embed(texts)`.

        The request can also be entered with `async with`, as with `generate`, and uses no resources before. All inputs
        together are one request: they wait in the queue once, and use one lease. They use at most half of the engine's
        running sequences.

        Args:
            inputs: one prompt, or a list of up to INPUTS_MAX (2048) prompts, as for `generate`. A list of integers is
                one prompt. For scores: a TextPair, or several.
            pooling: what is computed. Default: vectors, as the model's makers recommend.
            request_id: see `generate`.
            priority: see `generate`.
            cache_salt: see `generate`.
            add_special_tokens: see `generate`.
            cut: how to shorten an input that is too long. Default: entering raises ContextTooLong, which names the
                input.
            name_of: returns the name of an input for error messages, by its index. Default: "input[index]".
            deadlines: see `generate`. The first vector counts as the first token.
            owner: see `generate`.
            tenant: see `generate`.
            adapter: see `generate`.
            part_of: see `generate`.

        Returns:
            The stream, to be awaited or entered.

        Raises:
            InvalidRequest: an argument has a wrong type.
        """
        checked = checked_inputs(inputs)
        check_flags(add_special_tokens=add_special_tokens)
        request = PoolingRequest(
            checked,
            instance_of(PoolingParams, "pooling", pooling, PoolingParams()),
            name_of=name_of or name_of_input(len(checked)),
            cut=cut,
            sequence_count_max=max(1, self._core.settings.max_num_seqs // 2),
            **self._admission.arguments(
                request_id=request_id,
                priority=priority,
                deadlines=deadlines,
                owner=owner,
                tenant=tenant,
                part_of=part_of,
                texts={"cache_salt": cache_salt, "adapter": adapter},
            ),
            cache_salt=cache_salt,
            add_special_tokens=add_special_tokens,
            adapter=adapter,
        )
        return PoolingStream(request, submit=self._submit, leave=self._leave, own_run=self._own_run)

    def session(
        self,
        *,
        priority: int = 0,
        tenant: str | None = None,
        retention: Retention | None = None,
        owner: str | None = None,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> Session:
        """Create a session: one conversation, whose turns send only what is new. Enter it with `async with`.

        Args:
            priority: priority of all turns, see `generate`.
            tenant: tenant of all turns, see `generate`.
            retention: how the prefix cache keeps the session's blocks between two turns. Default: `Retention()`.
            owner: owner of all turns, see `generate`.
            cache_salt: salt of all turns, see `generate`.
            adapter: adapter of all turns, see `generate`.

        Returns:
            The session, to be entered.

        Raises:
            InvalidRequest: an argument has a wrong type.
        """
        check_texts(owner=owner, tenant=tenant, cache_salt=cache_salt, adapter=adapter)
        identity = tenant or owner or ""
        retention = instance_of(Retention, "retention", retention, Retention(tenant=identity))
        return Session(
            self.sessions,
            SessionName(name="", identity=identity, owner=owner, retention=retention),
            partial(
                self.generate,
                priority=to_int("priority", priority),
                owner=owner,
                tenant=tenant,
                cache_salt=cache_salt,
                adapter=adapter,
            ),
            Conversation(self.tokenizer, self.families, self.metrics),
            self._own_run,
        )

    @property
    def sessions(self) -> SessionTable:
        """All open sessions."""
        return self._texts.sessions

    def read_parts(self, stream: RequestStream, *, tools: Sequence[Mapping[str, Any]] | None = None) -> PartStream:
        """Split the response of a chat into content, reasoning and tool calls, as the model's family writes them.

        Args:
            stream: an entered stream. No other task may read it.
            tools: the tools of the request's prompt. None: no text is parsed as a tool call.

        Returns:
            The parts, as an asynchronous iterator.

        Raises:
            InvalidRequest: a tool does not have OpenAI's format.
        """
        return PartStream(stream, self.families, tools)

    def abort_with_partial(
        self, request_ids: Iterable[str], reason: FinishReason = FinishReason.ABORT, *, owner: str | None = None
    ) -> dict[str, AbortResult]:
        """Abort requests, and return their partial results.

        A partial result is exactly the output that the reader has received, or will receive until the end of its
        stream. To resume a request: `engine.generate(..., resume=partial.resume)`. This is also possible after the
        weights were replaced. Results of the step in flight are dropped. Log probabilities are included if the request
        keeps them.

        Args:
            request_ids: ids of requests. A single string is one id. An unknown id is not an error.
            reason: finish reason of the last delta.
            owner: abort only requests of this user. None: all requests.

        Returns:
            The outcome and the partial results per id.

        Raises:
            InvalidRequest: an argument has a wrong type. Then no request was ended.
        """
        request_ids = (request_ids,) if isinstance(request_ids, str) else list(request_ids)
        outcomes = self.abort(request_ids, reason, owner=owner)
        return {
            request_id: AbortResult(
                outcome=outcome,
                partials=tuple(
                    request.partial()
                    for request in self.requests.of(request_id)
                    if request.generates and owner in (None, request.owner)
                ),
            )
            for request_id, outcome in outcomes.items()
        }

    def hand_over(self, request_ids: Iterable[str], *, owner: str | None = None) -> dict[str, HandOverOutcome]:
        """End running requests so that another engine can resume them. Never waits.

        A reader gets all earlier deltas, and then a last delta with finish reason HANDED_OVER, after the step in flight
        at the latest. If a connector holds the KV blocks, the delta says how to read the blocks. The hold ends when the
        blocks were read, or when `kv_hold_timeout` has passed. Only requests that were created with `resumable` are
        handed over.

        Args:
            request_ids: ids of requests. A single string is one id. An unknown id is not an error.
            owner: hand over only requests of this user. None: all requests.

        Returns:
            The outcome per id.
        """
        self._own_run.check("engine.hand_over")
        if isinstance(request_ids, str):
            request_ids = (request_ids,)
        outcomes = {}
        for request_id in dict.fromkeys(to_str("request_ids", request_id, verb="holds") for request_id in request_ids):
            requests = [request for request in self.requests.of(request_id) if owner in (None, request.owner)]
            resumable = [request for request in requests if request.is_resumable and not request.is_finished]
            answers = [self._delivery.hand_over(request) for request in resumable]
            if any(answers):
                outcomes[request_id] = HandOverOutcome.HANDED_OVER
            else:
                outcomes[request_id] = HandOverOutcome.NOT_POSSIBLE if requests else HandOverOutcome.UNKNOWN
        return outcomes

    def end_reasoning(self, request_ids: Iterable[str], *, owner: str | None = None) -> dict[str, ReasoningOutcome]:
        """End the reasoning of requests with the next token. The model then continues with the content. Never waits.

        This affects only requests whose sampling defines the end of reasoning (`thinking`).

        Args:
            request_ids: ids of requests. A single string is one id. An unknown id is not an error.
            owner: affect only requests of this user. None: all requests.

        Returns:
            The outcome per id.
        """
        if isinstance(request_ids, str):
            request_ids = (request_ids,)
        outcomes = {}
        for request_id in dict.fromkeys(to_str("request_ids", request_id, verb="holds") for request_id in request_ids):
            requests = [request for request in self.requests.of(request_id) if owner in (None, request.owner)]
            answers = [request.end_reasoning() for request in requests]
            if any(answers):
                outcomes[request_id] = ReasoningOutcome.ENDING
            else:
                outcomes[request_id] = ReasoningOutcome.NO_REASONING if requests else ReasoningOutcome.UNKNOWN
        return outcomes

    def live_requests(self, *, owner: str | None = None) -> list[LiveRequestView]:
        """Describe every request that is entered or whose blocks are held. The oldest request comes first.

        Args:
            owner: only requests of this user. None: all requests.
        """
        self._own_run.check("engine.live_requests")
        sequences = {live.request.id: live for live in self._core.live_requests()}
        requests = [*self.requests, *self.kept_holds]
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
        """Load a LoRA adapter under a name that requests can then use.

        Args:
            name: name of the adapter.
            path: directory in the format of peft.
            replaces: True to take over the name of a loaded adapter. Requests that use the old adapter keep it.

        Raises:
            AdapterRefused: the adapter cannot be loaded under this name, or there is not enough memory.
            ModelLoadError: this server cannot compute with the adapter.
        """
        self._own_run.check("engine.load_adapter")
        name, path = to_str("name", name), to_str("path", path)
        await self.adapters.load(name, path, replaces=to_bool("replaces", replaces), is_checked=False)

    async def unload_adapter(self, name: str, *, seconds: float | None = None) -> None:
        """Unload an adapter. New requests cannot use it. Return when no request uses it any more, and its memory is
        free.

        If the caller stops waiting, the adapter is still unloaded.

        Args:
            name: name of the adapter.
            seconds: time after which requests that still use the adapter are ended. None: no limit.

        Raises:
            UnknownModel: there is no such adapter.
        """
        self._own_run.check("engine.unload_adapter")
        deadline = None if seconds is None else to_float("seconds", seconds)
        ids = self.adapters.retire(to_str("name", name))
        if deadline is not None:
            if not 0 <= deadline < math.inf:
                refuse("seconds", seconds, "a number of seconds")
            self._deadline_keeper.set(trio.current_time() + deadline, lambda: self._end_users(name, ids))
        await self.adapters.wait_until_forgotten(ids)

    def _end_users(self, name: str, ids: Collection[AdapterId]) -> None:
        for request in self.requests:
            if request.adapter_ref is not None and request.adapter_ref.id in ids and not request.is_finished:
                message = f"the adapter {name} was unloaded, and the time in which this request could end is over"
                self._delivery.end_with_final_delta(request, FinishReason.ABORT, message, stop_reason=ADAPTER_UNLOADED)

    async def encode(self, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a prompt.

        Args:
            prompt: text, token ids, or a ChatPrompt.
            add_special_tokens: see `generate`.

        Raises:
            InvalidRequest: the prompt is not valid.
            ContextTooLong: the text is so long that it is not tokenized.
        """
        self._own_run.check("engine.encode")
        return await self._texts.prompts.encode(checked_prompt(prompt), add_special_tokens=add_special_tokens)

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids.

        Args:
            skip_special_tokens: True to leave out special tokens.

        Raises:
            InvalidRequest: the model does not have one of the ids.
        """
        self._own_run.check("engine.decode")
        return await self._texts.prompts.decode(token_ids, skip_special_tokens=skip_special_tokens)

    @contextmanager
    def tokenizing(self, *, owner: str | None = None) -> Iterator[PromptEncoder]:
        """Give the caller a tokenizer outside of requests, without delaying requests.

        Only a few callers may do this at a time, and even fewer callers of one owner. Additional callers get
        Overloaded.

        Args:
            owner: the user.
        """
        try:
            with self._text_threads.aside(owner) as texts:
                yield self._texts.encoder(texts)
        except Overloaded as refusal:
            self.metrics.requests_rejected_total.labels(refusal.reason).inc()
            raise

    def stats(self) -> EngineStats:
        """Return the numbers of sequences and KV blocks in each state, as a frozen snapshot."""
        self._own_run.check_process("engine.stats")
        return self._core.stats()

    def load(self) -> EndpointLoad:
        """Return the load of this engine, for a router. Requests that are being tokenized count as waiting."""
        self._own_run.check_process("engine.load")
        stats = self._core.stats()
        return EndpointLoad(
            running=stats.running_count,
            waiting=stats.waiting_count + self.preparing_count,
            max_num_seqs=self._core.settings.max_num_seqs,
            kv_usage=stats.kv_usage,
            role=UNSET if self.role is None else self.role,
            fingerprint=UNSET if self.model.fingerprint is None else self.model.fingerprint,
            weight_version=self.weight_updates.stamped_version or UNSET,
        )

    @property
    def image_outputs(self) -> EncoderOutputs | None:
        """Image embeddings and the requests that use them, for tests and the status page. None: the model reads no
        images.
        """
        return None if self._texts.encoding is None else self._texts.encoding.outputs
