"""An engine without weights: only the model is fake. A test determines the output, and when a step runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from hashlib import blake2b
from typing import Literal, NamedTuple

import msgspec
import trio

from trioserve.admission.text_threads import TextThreads
from trioserve.contracts.errors import ModelLoadError
from trioserve.contracts.kv_transfer import EngineRole, RunningConnector
from trioserve.contracts.media import ImageLimits
from trioserve.contracts.step import StepPlan, StepResult
from trioserve.contracts.weights import AdapterId
from trioserve.core.engine import EngineCore
from trioserve.core.settings import CoreSettings
from trioserve.engine.adapters import Adapters, ReadAdapter
from trioserve.engine.engine import Engine, ModelDescription
from trioserve.engine.lifecycle.supervisor import supervise
from trioserve.engine.model_description import PoolingModel
from trioserve.engine.open_request import OpenRequest
from trioserve.engine.settings import EngineSettings, deadlines_of
from trioserve.engine.structured_output import MasksAtOnce
from trioserve.engine.text_work import EngineParts
from trioserve.metrics.registry import Metrics
from trioserve.model.settings import lora_modules as read_lora_modules
from trioserve.testing.accounting import WATCH, assert_all_free
from trioserve.testing.byte_tokenizer import BYTE_VOCAB_SIZE, END_TOKEN_ID, IMAGE_CHAT_TEMPLATE, byte_tokenizer
from trioserve.testing.fake_executor import EMBEDDING_SIZE, FakeExecutor, FakeModel
from trioserve.testing.fake_image_encoder import FAKE_IMAGES, FakeImageEncoder
from trioserve.testing.fake_weights import FakeCacheRelease, FakeWeightTarget, next_own_seed, options_named
from trioserve.testing.inline_work import InlineDecoder, InlineTexts
from trioserve.testing.invariants import check_idle
from trioserve.testing.scripted_model import NextToken, Response, answering, following
from trioserve.testing.stepped_by_hand import ControlledSteps, GatedCore, InjectedFault, ManualSteps
from trioserve.text.grammar_compiler import GrammarCompiler
from trioserve.text.guide_factory import GuideFactory
from trioserve.text.response_parsers.registry import Leniency, ResponseFamilies
from trioserve.text.tokenizer import Tokenizer
from trioserve.trio_tools.errors_unwrapped import errors_unwrapped
from trioserve.trio_tools.media_fetcher import MediaFetcher
from trioserve.trio_tools.own_run import opened_once

__all__ = ["FakeEngine", "InjectedFault", "byte_form_compiler", "fake_adapter_digest", "open_fake_engine"]


CONTEXT_TOKENS = 4096

NewConnector = Callable[[FakeExecutor, Callable[[], None]], RunningConnector]


class FakeEngine(ManualSteps[StepPlan], Engine):
    """An Engine without weights, with additional controls for tests. `open_fake_engine` creates it.

    Attributes:
        core: the scheduler core, whose steps a test can hold back.
        steps: the step runner.
        executor: the fake model's executor.
        connector: the KV connector, or None.
        image_encoder: the fake image encoder, or None if the model reads text only.
        image_decoder: decodes images in the event loop.
        weights: replaces the fake weights. See `FakeWeightTarget`.
    """

    core: GatedCore
    steps: ControlledSteps[StepPlan, StepResult]
    executor: FakeExecutor

    def __init__(
        self,
        parts: EngineParts,
        text_threads: TextThreads,
        settings: EngineSettings,
        *,
        role: EngineRole | None = None,
        served_names: tuple[str, ...] = ("fake",),
        tokenizer: Tokenizer | None = None,
        tool_call_parser: str = "auto",
        tool_call_leniency: Leniency = "strict",
        reasoning_parser: str = "auto",
        scores_pairs: bool = False,
        image_limits: ImageLimits | None = None,
        media: MediaFetcher | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        sees_images = parts.image_encoder is not None
        metrics = Metrics(served_names[0])
        self.image_decoder = InlineDecoder(image_limits or ImageLimits(), metrics)
        if tokenizer is None:
            tokenizer = byte_tokenizer(IMAGE_CHAT_TEMPLATE, has_images=True) if sees_images else byte_tokenizer()
        self._inspect(parts)
        core = self.core
        # The steps of some simulations are too small for a tile.
        is_bidirectional = core.settings.whole_tokens_max >= FAKE_IMAGES.tile_tokens
        images = msgspec.structs.replace(FAKE_IMAGES, is_bidirectional=is_bidirectional)
        super().__init__(
            model=ModelDescription(
                served_names=served_names,
                source="fake",
                context_tokens_max=core.settings.context_tokens_max,
                vocab_size=BYTE_VOCAB_SIZE + sees_images,
                images=images if sees_images else None,
                eos_token_ids=(END_TOKEN_ID,),
                created_at=0,
                fingerprint="fake+exact",
                pooled=PoolingModel(
                    embedding_size=EMBEDDING_SIZE,
                    method="last" if core.settings.keeps_kv else "mean",
                    is_encoder=not core.settings.keeps_kv,
                    continues_texts=core.settings.keeps_kv,
                    scores_pairs=scores_pairs,
                    whole_tokens_max=core.settings.whole_tokens_max,
                ),
            ),
            core=core,
            steps=self.steps,
            tokenizer=tokenizer,
            text_threads=text_threads,
            metrics=metrics,
            settings=settings,
            new_request_id=map("req-{}".format, itertools.count(1)).__next__,
            connector=parts.connector,
            role=role,
            guides=GuideFactory(byte_form_compiler()),
            adapters=adapters,
            cache_release=parts.cache_release,
            weights=parts.weights,
            families=ResponseFamilies(
                tokenizer,
                tool_call_parser=tool_call_parser,
                reasoning_parser=reasoning_parser,
                tool_call_leniency=tool_call_leniency,
            ),
            image_encoder=parts.image_encoder,
            image_decoder=self.image_decoder,
            media=media,
        )

    def reopen(self, parts: EngineParts) -> None:
        self._inspect(parts)
        super().reopen(parts)

    def _inspect(self, parts: EngineParts) -> None:
        core, steps = parts.core, parts.steps
        assert isinstance(core, GatedCore)
        assert isinstance(steps, ControlledSteps)
        assert isinstance(steps.executor, FakeExecutor)
        self.core, self.steps, self.executor, self.connector = core, steps, steps.executor, parts.connector
        assert isinstance(parts.weights, FakeWeightTarget)
        self.weights = parts.weights
        WATCH.add(self)
        assert parts.image_encoder is None or isinstance(parts.image_encoder, FakeImageEncoder)
        self.image_encoder = parts.image_encoder

    def _leave(self, request: OpenRequest) -> None:
        WATCH.note_leaving(self, request)
        super()._leave(request)

    # --- resources that are still in use ---

    @property
    def current_core(self) -> EngineCore:
        """The core that the engine uses now. While the engine sleeps or restarts, this core has no requests."""
        return self._core

    @property
    def turn_owner(self) -> trio.lowlevel.Task | None:
        """The task that replaces weights or puts the engine to sleep. None if no task does this."""
        return self.weight_updates.turn.statistics().owner

    @property
    def is_replacing_weights(self) -> bool:
        """True while new weights are being written, or after a replacement that was not completed."""
        return self._pausing.is_replacing

    @property
    def open_requests(self) -> list[OpenRequest]:
        """Requests of the engine whose scope has not ended."""
        return list(self.requests)

    def assert_all_free(self) -> None:
        """Assert that no request has a KV block, a slot or other state in the engine. See `testing.assert_all_free`."""
        assert_all_free(self)
        check_idle(self.core)
        if self.image_outputs is not None:
            self.image_outputs.check()


class _FakeAdapter(NamedTuple):
    digest: str
    rank_max: int = 8
    byte_count: int = 1024


def fake_adapter_digest(path: str) -> str:
    """Return the digest of the adapter that a fake engine finds at a path.

    Args:
        path: path of the adapter. Every path has an adapter, except for paths that contain "missing".
    """
    return blake2b(path.encode(), digest_size=16).hexdigest()


def _fake_adapter_reader(seconds: float) -> ReadAdapter:
    async def read(path: str, is_checked: bool) -> _FakeAdapter:
        await trio.sleep(seconds)
        if "missing" in path:
            raise ModelLoadError(f"{path} has no adapter_config.json: the fake reader refuses paths with 'missing'")
        return _FakeAdapter(fake_adapter_digest(path))

    return read


class _FakeAdapterTarget:
    def __init__(self, executor: FakeExecutor) -> None:
        self._executor = executor

    async def add(self, id: AdapterId, content: object) -> None:
        await trio.lowlevel.checkpoint()
        self._executor.adapters.add(id)

    async def remove(self, id: AdapterId) -> None:
        await trio.lowlevel.checkpoint()
        self._executor.adapters.discard(id)


@cache
def byte_form_compiler() -> GrammarCompiler:
    """Return the schema compiler that all fake engines share, because they have the same vocabulary."""
    return GrammarCompiler(byte_tokenizer(), vocab_size=BYTE_VOCAB_SIZE, end_token_ids=(END_TOKEN_ID,))


@opened_once
async def open_fake_engine(
    *,
    block_count: int | None = None,
    block_size: int = 4,
    max_model_len: int | None = None,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 32,
    wide_prompt_stretch: float = math.inf,
    enable_prefix_caching: bool = True,
    speculative_ngram: int = 0,
    draft_model_tokens: int = 0,
    overlap_steps: bool = False,
    state_slots: int = 0,
    snapshot_slots: int = 0,
    max_queued_requests: int = 16,
    max_queued_tokens: int = 1_000_000,
    max_queue_wait: float = 600.0,
    queue_timeout: float | None = None,
    ttft_timeout: float | None = None,
    request_timeout: float | None = None,
    max_queue_timeout: float | None = None,
    max_ttft_timeout: float | None = None,
    max_request_timeout: float | None = None,
    tool_call_parser: str = "auto",
    tool_call_leniency: Leniency = "strict",
    reasoning_parser: str = "auto",
    kv_events_max: int = 0,
    step_seconds: float = 0.0,
    step_cost: Callable[[StepPlan], float] | None = None,
    paused: bool = False,
    response: Response | None = None,
    next_token: NextToken | None = None,
    model: FakeModel | None = None,
    tokenizer: Tokenizer | None = None,
    served_model_name: tuple[str, ...] = ("fake",),
    new_executor: Callable[..., FakeExecutor] = FakeExecutor,
    step_timeout: float | None = None,
    connector: NewConnector | None = None,
    role: EngineRole = "both",
    kv_hold_timeout: float = 10.0,
    kv_load_timeout: float = 10.0,
    kv_held_share: float = 0.5,
    kv_load_failure_policy: Literal["recompute", "fail"] = "recompute",
    encoder: Literal["embed", "score"] | None = None,
    engine_restarts: int = 0,
    opening_seconds: float = 0.0,
    image_limits: ImageLimits | None = None,
    media: MediaFetcher | None = None,
    lora_modules: tuple[str, ...] = (),
    max_loras: int = 8,
    adapter_seconds: float = 0.0,
    tile_seconds: float = 0.0,
    new_text_threads: type[TextThreads] = InlineTexts,
    seed: int | None = None,
    sessions_max: int = 8192,
    session_idle_seconds: float = 600.0,
    cold_turn_seconds: float = 0.0,
    session_prefetch: bool = False,
) -> AsyncIterator[FakeEngine]:
    """Open an engine without weights. One byte is one token, and everything except the model is the code of
    open_engine.

    The fake model watches the KV blocks: a step that reads a block which another request overwrote raises
    AssertionError.
    Leaving the context manager does the same as leaving open_engine.

    Args:
        block_count: KV blocks in the pool. Default: as many as hold 4,096 tokens, or max_model_len if that is more.
        block_size: tokens in one KV block.
        max_model_len: tokens of prompt and response together. Default: 4,096, or the capacity of the pool if that is
            less.
        max_num_seqs: maximum number of sequences that are computed at the same time.
        max_num_batched_tokens: tokens computed in one step. Longer prompts are computed in chunks.
        wide_prompt_stretch: as in open_engine. Default: unlimited, so that no plan depends on the time of steps.
        enable_prefix_caching, overlap_steps, engine_restarts, step_timeout: as in open_engine. A paused engine plans no
            step ahead.
        speculative_ngram: draft tokens per request and step, copied from the request's own text. 0: off.
        draft_model_tokens: draft tokens per request and step from a draft model. Its drafts are by turns right, wrong,
            too long or empty. 0: off.
        state_slots, snapshot_slots: if above 0, the model has layers that keep one state per sequence. There are
            `state_slots` states, and the prefix cache keeps `snapshot_slots` copies.
        max_queued_requests, max_queued_tokens, max_queue_wait: maximum number of waiting requests, of prompt tokens of
            waiting requests, and of seconds that a request waits.
        queue_timeout, ttft_timeout, request_timeout: default deadlines in seconds. A request may name others.
        max_queue_timeout, max_ttft_timeout, max_request_timeout: the longest deadlines in seconds that a request may
            name.
        tool_call_parser, tool_call_leniency, reasoning_parser: formats in which the model writes tool calls and
            reasoning. "auto" reads the common format of tool calls, and no reasoning.
        kv_events_max: number of prefix cache changes that are kept for `GET /kv_events`. 0: off.
        step_seconds: seconds of one forward pass, by the clock of the Trio program.
        step_cost: returns additional seconds of a forward pass from its plan, as a cost model of a device. None: every
            forward pass takes step_seconds.
        paused: if True, no step begins until step(), held_step() or resume() is called.
        response: output of the model: a text, or a function of the prompt's text. Give at most one of response,
            next_token and model. Without any of them, the tokens look random and depend only on the prompt.
        next_token: function from the token ids of prompt and output so far to the next token id.
        model: the fake model itself.
        tokenizer: a byte_tokenizer, for example with another chat template.
        new_executor: FakeExecutor, or a subclass that checks less.
        connector: makes a KV connector from the executor and from the function that wakes the engine, for example
            ScriptedConnector.
        role, kv_hold_timeout, kv_load_timeout, kv_held_share: as in open_engine, for an engine with a connector.
        kv_load_failure_policy: "recompute" computes a prompt here if its KV does not arrive. "fail" fails the request.
        encoder: "embed" or "score" plays a model that keeps no KV and returns embeddings, or scores of pairs. None: a
            model that generates text.
        opening_seconds: seconds that a restart of the engine takes, after a fault or after sleep.
        image_limits: limits for images in prompts. None: the model reads text only.
        media: fetches images from URLs.
        lora_modules: LoRA adapters to load at the start, each as "name=path". Every path has an adapter, unless it
            contains "missing".
        max_loras: maximum number of loaded adapters.
        adapter_seconds: seconds that reading an adapter takes.
        tile_seconds: seconds that encoding an image tile takes.
        new_text_threads: InlineTexts processes texts, images and grammars in the event loop, so that an autojump clock
            does not run ahead. TextThreads uses real threads, as open_engine does.
        seed: source of the seeds of requests that have none. Default: the same in every run, but different for each
            engine of a Trio program.
        sessions_max: maximum number of open sessions. A caller with an identity may have half of them.
        session_idle_seconds, cold_turn_seconds, session_prefetch: as in open_engine.

    Raises:
        StartupError: an option is out of range, or two options contradict each other. The message uses the names of
            this function's parameters.
    """
    WATCH.note_use()
    given = [choice for choice in (response, next_token, model) if choice is not None]
    assert len(given) <= 1, "give one of response, next_token and model, or none"
    if response is not None:
        model = answering(response)
    elif next_token is not None:
        model = following(next_token)
    keeps_kv = encoder is None
    if block_count is None:
        block_count = -(-max(CONTEXT_TOKENS, max_model_len or 0) // max(1, block_size))
    if max_model_len is None:
        max_model_len = min(CONTEXT_TOKENS, block_count * block_size) if keeps_kv else CONTEXT_TOKENS
    block_count = block_count if keeps_kv else 0
    with options_named():
        modules = read_lora_modules(lora_modules)
        core_settings = CoreSettings(
            block_count=block_count,
            block_size=block_size,
            context_tokens_max=max_model_len,
            max_num_seqs=max_num_seqs,
            step_tokens_max=max_num_batched_tokens,
            wide_prompt_stretch=wide_prompt_stretch,
            enable_prefix_caching=enable_prefix_caching and keeps_kv,
            keeps_kv=keeps_kv,
            overlap_steps=overlap_steps,
            state_slot_count=state_slots,
            snapshot_slot_count=snapshot_slots,
            draft_tokens_max=speculative_ngram or draft_model_tokens,
            draft_source="model" if draft_model_tokens else "text",
            hold_seconds_max=kv_hold_timeout,
            remote_kv_seconds_max=kv_load_timeout,
            held_share_max=kv_held_share,
            load_failure_policy=kv_load_failure_policy,
            sessions_max=sessions_max,
            cold_turn_seconds=cold_turn_seconds,
            session_prefetch=session_prefetch,
        )
        settings = EngineSettings(
            waiting_requests_max=max_queued_requests,
            waiting_prompt_tokens_max=max_queued_tokens,
            waiting_seconds_max=max_queue_wait,
            kv_events_max=kv_events_max,
            deadlines=deadlines_of(queue_timeout, ttft_timeout, request_timeout),
            deadlines_max=deadlines_of(max_queue_timeout, max_ttft_timeout, max_request_timeout),
            step_seconds_max=step_timeout,
            restarts_max=engine_restarts,
            seed=next_own_seed() if seed is None else seed,
            session_idle_seconds=session_idle_seconds,
        )

    @asynccontextmanager
    async def open_parts() -> AsyncIterator[EngineParts]:
        if opened:
            await trio.sleep(opening_seconds)
            if opened[0].broken_openings:
                opened[0].broken_openings -= 1
                raise InjectedFault("a test made the restart fail")
        adapter_target: list[_FakeAdapterTarget] = []
        weights = FakeWeightTarget()

        def made() -> EngineParts:
            executor = new_executor(
                block_count=block_count,
                block_size=block_size,
                model=model or FakeModel(vocab_size=BYTE_VOCAB_SIZE - 1),
                keeps_kv=keeps_kv,
                has_draft_model=draft_model_tokens > 0,
                state_slot_count=state_slots + snapshot_slots,
            )
            connects = None if connector is None else connector(executor, lambda: opened[0].wake())
            core = GatedCore(
                core_settings,
                is_paused=opened[0].core.is_paused if opened else paused,
                connector=connects,
                mask_maker=MasksAtOnce(BYTE_VOCAB_SIZE),
            )
            seconds = opened[0].step_seconds if opened else step_seconds
            adapter_target[:] = [_FakeAdapterTarget(executor)]
            steps = ControlledSteps(executor, seconds=seconds, cost=step_cost)
            weights.attach(executor)
            return EngineParts(
                core, steps, connects, image_encoder=images, cache_release=FakeCacheRelease(remade), weights=weights
            )

        async def remade() -> EngineParts:
            await trio.sleep(opening_seconds)
            parts = made()
            await fake_adapters.attach(adapter_target[0])
            return parts

        images = None if image_limits is None else FakeImageEncoder(tile_seconds=tile_seconds)
        parts = made()
        await fake_adapters.attach(adapter_target[0])
        try:
            yield parts
        finally:
            fake_adapters.detach()
            if images is not None:
                images.close()

    opened: list[FakeEngine] = []
    fake_adapters = Adapters(
        _fake_adapter_reader(adapter_seconds), adapters_max=max_loras, reserved_names=served_model_name
    )

    def make_engine(parts: EngineParts) -> FakeEngine:
        engine = FakeEngine(
            parts,
            text_threads,
            settings,
            role=None if parts.connector is None else role,
            served_names=served_model_name,
            tokenizer=tokenizer,
            tool_call_parser=tool_call_parser,
            tool_call_leniency=tool_call_leniency,
            reasoning_parser=reasoning_parser,
            scores_pairs=encoder == "score",
            image_limits=image_limits,
            media=media,
            adapters=fake_adapters,
        )
        opened.append(engine)
        return engine

    with errors_unwrapped():
        async with new_text_threads() as text_threads, trio.open_nursery() as nursery:
            engine = await nursery.start(supervise, open_parts, make_engine)
            nursery.start_soon(engine.keep_deadlines)
            for module in modules:
                await engine.load_adapter(module.name, module.path)
            yield engine
            nursery.cancel_scope.cancel()
