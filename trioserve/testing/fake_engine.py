"""An engine without weights: everything is real but the model, and a test can say what it says and when it steps."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import cache
from hashlib import blake2b
from typing import Literal, NamedTuple

import trio

from trioserve.admission.text_threads import TextThreads
from trioserve.contracts.adapter import AdapterId
from trioserve.contracts.deadlines import Deadlines
from trioserve.contracts.errors import ModelLoadError
from trioserve.contracts.images import ImageLimits
from trioserve.contracts.kv_transfer import EngineRole, RunningConnector
from trioserve.contracts.step import StepPlan, StepResult
from trioserve.core.engine import EngineCore
from trioserve.core.settings import CoreSettings
from trioserve.engine.adapters import Adapters, ReadAdapter
from trioserve.engine.engine import Engine, ModelDescription
from trioserve.engine.engine_parts import EngineParts
from trioserve.engine.mask_rows import MasksAtOnce
from trioserve.engine.model_description import PooledModel
from trioserve.engine.open_request import OpenRequest
from trioserve.engine.settings import EngineSettings
from trioserve.engine.shell.supervisor import supervise
from trioserve.metrics.registry import Metrics
from trioserve.testing.accounting import assert_all_free
from trioserve.testing.byte_tokenizer import BYTE_VOCAB_SIZE, END_TOKEN_ID, IMAGE_CHAT_TEMPLATE, byte_tokenizer
from trioserve.testing.controlled_steps import ControlledSteps
from trioserve.testing.fake_executor import EMBEDDING_SIZE, FakeExecutor, FakeModel
from trioserve.testing.fake_image_encoder import FAKE_IMAGES, FakeImageEncoder
from trioserve.testing.fake_nap import FakeNap
from trioserve.testing.fake_weights import FakeWeightPlace
from trioserve.testing.gated_core import GatedCore
from trioserve.testing.inline_pictures import InlineDecoder
from trioserve.testing.inline_texts import InlineTexts
from trioserve.testing.invariants import check_idle
from trioserve.testing.own_seeds import next_own_seed
from trioserve.testing.scripted_model import NextToken, Response, answering, following
from trioserve.testing.stepped_by_hand import InjectedFault, SteppedByHand
from trioserve.text.form_compiler import FormCompiler
from trioserve.text.guide_factory import GuideFactory
from trioserve.text.response_families import Leniency, ResponseFamilies
from trioserve.text.tokenizer import Tokenizer
from trioserve.trio_tools.errors_unwrapped import errors_unwrapped
from trioserve.trio_tools.media_fetcher import MediaFetcher
from trioserve.trio_tools.own_run import opened_once

__all__ = ["FakeEngine", "InjectedFault", "byte_form_compiler", "fake_adapter_digest", "open_fake_engine"]


NewConnector = Callable[[FakeExecutor, Callable[[], None]], RunningConnector]


class FakeEngine(SteppedByHand[StepPlan], Engine):
    """Made by open_fake_engine: an Engine, and what a test needs besides.

    core, steps, executor, connector, image_encoder, image_decoder: its inside, to look at. weights: where they are
    replaced; see FakeWeightPlace.
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
        self._look_into(parts)
        core = self.core
        super().__init__(
            model=ModelDescription(
                served_names=served_names,
                source="fake",
                context_tokens_max=core.settings.context_tokens_max,
                vocab_size=BYTE_VOCAB_SIZE + sees_images,
                images=FAKE_IMAGES if sees_images else None,
                eos_token_ids=(END_TOKEN_ID,),
                created_at=0,
                fingerprint="fake+exact",
                pooled=PooledModel(
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
            nap=parts.nap,
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
        self._look_into(parts)
        super().reopen(parts)

    def _look_into(self, parts: EngineParts) -> None:
        core, steps = parts.core, parts.steps
        assert isinstance(core, GatedCore)
        assert isinstance(steps, ControlledSteps)
        assert isinstance(steps.executor, FakeExecutor)
        self.core, self.steps, self.executor, self.connector = core, steps, steps.executor, parts.connector
        assert isinstance(parts.weights, FakeWeightPlace)
        self.weights = parts.weights
        assert parts.image_encoder is None or isinstance(parts.image_encoder, FakeImageEncoder)
        self.image_encoder = parts.image_encoder

    # --- what is left ---

    @property
    def current_core(self) -> EngineCore:
        """`core`, but of an engine that sleeps or is opened anew one that has nobody."""
        return self._core

    @property
    def turn_owner(self) -> trio.lowlevel.Task | None:
        """The task that replaces the weights, or puts it to sleep."""
        return self._weights.turn.statistics().owner

    @property
    def is_replacing_weights(self) -> bool:
        """Whether new weights are being written, or are there only in part."""
        return self._pausing.is_replacing

    @property
    def open_requests(self) -> list[OpenRequest]:
        """Those that are entered and not left."""
        return list(self._requests)

    def assert_all_free(self) -> None:
        """Assert that nothing of any request is left: no KV block, no place, no state. See testing.assert_all_free."""
        assert_all_free(self)
        check_idle(self.core)
        if self.image_outputs is not None:
            self.image_outputs.check()


class _FakeAdapter(NamedTuple):
    digest: str
    rank_max: int = 8
    byte_count: int = 1024


def fake_adapter_digest(path: str) -> str:
    """Of the adapter that an engine without weights finds at this path."""
    return blake2b(path.encode(), digest_size=16).hexdigest()


def _fake_adapter_reader(seconds: float) -> ReadAdapter:
    async def read(path: str, is_checked: bool) -> _FakeAdapter:
        await trio.sleep(seconds)
        if "missing" in path:
            raise ModelLoadError(f"{path} has no adapter_config.json: a test wants it so")
        return _FakeAdapter(fake_adapter_digest(path))

    return read


class _FakeAdapterPlace:
    def __init__(self, executor: FakeExecutor) -> None:
        self._executor = executor

    async def add(self, id: AdapterId, content: object) -> None:
        await trio.lowlevel.checkpoint()
        self._executor.adapters.add(id)

    async def remove(self, id: AdapterId) -> None:
        await trio.lowlevel.checkpoint()
        self._executor.adapters.discard(id)


@cache
def byte_form_compiler() -> FormCompiler:
    """All fake engines have the same vocabulary."""
    return FormCompiler(byte_tokenizer(), vocab_size=BYTE_VOCAB_SIZE, end_token_ids=(END_TOKEN_ID,))


@opened_once
async def open_fake_engine(
    *,
    block_count: int = 64,
    block_size: int = 4,
    context_tokens_max: int = 128,
    max_num_seqs: int = 8,
    step_tokens_max: int = 32,
    wide_prompt_stretch: float = 1.5,
    enable_prefix_caching: bool = True,
    speculative_ngram: int = 0,
    draft_model_tokens: int = 0,
    overlap_steps: bool = False,
    state_slots: int = 0,
    snapshot_slots: int = 0,
    waiting_requests_max: int = 16,
    waiting_prompt_tokens_max: int = 1_000_000,
    waiting_seconds_max: float = 600.0,
    tool_call_parser: str = "auto",
    tool_call_leniency: Leniency = "strict",
    reasoning_parser: str = "auto",
    kv_events_max: int = 0,
    step_seconds: float = 0.0,
    paused: bool = False,
    response: Response | None = None,
    next_token: NextToken | None = None,
    model: FakeModel | None = None,
    tokenizer: Tokenizer | None = None,
    served_names: tuple[str, ...] = ("fake",),
    new_executor: Callable[..., FakeExecutor] = FakeExecutor,
    deadlines: Deadlines | None = None,
    deadlines_max: Deadlines | None = None,
    step_seconds_max: float | None = None,
    connector: NewConnector | None = None,
    role: EngineRole = "both",
    hold_seconds_max: float = 10.0,
    remote_kv_seconds_max: float = 10.0,
    held_share_max: float = 0.5,
    load_failure_policy: Literal["recompute", "fail"] = "recompute",
    encoder: Literal["embed", "score"] | None = None,
    engine_restarts: int = 0,
    opening_seconds: float = 0.0,
    image_limits: ImageLimits | None = None,
    media: MediaFetcher | None = None,
    adapters: Mapping[str, str] | None = None,
    adapters_max: int = 8,
    adapter_seconds: float = 0.0,
    tile_seconds: float = 0.0,
    new_text_threads: type[TextThreads] = InlineTexts,
    seed: int | None = None,
) -> AsyncIterator[FakeEngine]:
    """An engine as open_engine gives it, but for the model: bytes are tokens, and a forward pass takes step_seconds.

    The limits are the engine's: KV blocks and tokens in each, tokens of prompt and response, requests that run, tokens
    a step computes (a longer prompt comes in chunks, as wide as wide_prompt_stretch lets them be), draft tokens of a
    request in a step, from its own text (speculative_ngram) or by a draft model that is right and wrong by turns
    (draft_model_tokens), requests that wait, the tokens of their prompts and for how long, changes of the prefix cache
    that are kept for `GET /kv_events` (0: it is off). overlap_steps: a step is planned while another runs, unless the
    engine is paused. state_slots, snapshot_slots: above 0 the model has layers that keep a state, in so many slots, and
    so many copies of such for the prefix cache.
    tool_call_parser, reasoning_parser: how it writes calls of tools and thoughts: names of families; "auto" takes the
    common format for calls, and no thoughts. tool_call_leniency: "lenient" reads bare and fenced JSON as calls, too.
    paused: no step begins until step(), held_step() or resume(). What it says, of these at most one: `response`, a text
    or a function of the prompt's text; `next_token`, a function of the tokens so far; `model`. Otherwise it follows
    from the prompt, but looks random. tokenizer: a byte_tokenizer with another chat template. served_names: the model's
    names. new_executor: FakeExecutor, or what checks less. deadlines, deadlines_max: defaults and upper limits for
    every request. step_seconds_max: how old a step may get; None and 0: as in EngineSettings. connector: makes one from
    the executor and what wakes the engine, such as ScriptedConnector; with it go the engine's role, how long blocks are
    held and KV is waited for, the share of the pool that may be held, and what becomes of a request whose KV does not
    come.

    engine_restarts: how often it is opened anew after a fault, which takes opening_seconds and leaves the KV empty. So
    does waking up, of every level.

    adapters: LoRA adapters that are loaded at the start, each name with a path. Others may be loaded while it runs:
    every path is one, whose digest follows from the path, and what it says from the digest. adapters_max: so many.
    adapter_seconds: what reading one takes, in the clock's time.

    encoder: it plays one that continues no text, keeps no KV, and gives vectors, or scores of pairs. Any other gives
    vectors besides; they follow from the prompt and from what is asked.

    image_limits: its model sees images, as many and as large ones; None: it reads text alone. media: fetches those that
    are elsewhere. tile_seconds: what encoding a tile takes, in the clock's time.

    new_text_threads: InlineTexts works on texts, images and forms in the event loop, so that a clock that jumps does
    not run on meanwhile; TextThreads in real threads, as open_engine does.

    seed: of the seeds of requests that name none; None: one that is the same in every run, and another one for each
    engine that a Trio program opens.

    Inside, the KV blocks are watched: a step that reads a block that another request wrote to is an AssertionError.
    Leaving does what leaving open_engine does.
    """
    given = [choice for choice in (response, next_token, model) if choice is not None]
    assert len(given) <= 1, "give one of response, next_token and model, or none"
    if response is not None:
        model = answering(response)
    elif next_token is not None:
        model = following(next_token)
    keeps_kv = encoder is None
    block_count = block_count if keeps_kv else 0
    core_settings = CoreSettings(
        block_count=block_count,
        block_size=block_size,
        context_tokens_max=context_tokens_max,
        max_num_seqs=max_num_seqs,
        step_tokens_max=step_tokens_max,
        wide_prompt_stretch=wide_prompt_stretch,
        enable_prefix_caching=enable_prefix_caching and keeps_kv,
        keeps_kv=keeps_kv,
        overlap_steps=overlap_steps,
        state_slot_count=state_slots,
        snapshot_slot_count=snapshot_slots,
        draft_tokens_max=speculative_ngram or draft_model_tokens,
        draft_source="model" if draft_model_tokens else "text",
        hold_seconds_max=hold_seconds_max,
        remote_kv_seconds_max=remote_kv_seconds_max,
        held_share_max=held_share_max,
        load_failure_policy=load_failure_policy,
    )
    settings = EngineSettings(
        waiting_requests_max=waiting_requests_max,
        waiting_prompt_tokens_max=waiting_prompt_tokens_max,
        waiting_seconds_max=waiting_seconds_max,
        kv_events_max=kv_events_max,
        deadlines=deadlines or Deadlines(),
        deadlines_max=deadlines_max or Deadlines(),
        step_seconds_max=step_seconds_max,
        restarts_max=engine_restarts,
        seed=next_own_seed() if seed is None else seed,
    )

    @asynccontextmanager
    async def open_parts() -> AsyncIterator[EngineParts]:
        if opened:
            await trio.sleep(opening_seconds)
            if opened[0].broken_openings:
                opened[0].broken_openings -= 1
                raise InjectedFault("a test broke the opening")
        adapter_place: list[_FakeAdapterPlace] = []
        weights = FakeWeightPlace()

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
            adapter_place[:] = [_FakeAdapterPlace(executor)]
            steps = ControlledSteps(executor, seconds=seconds)
            weights.attach(executor)
            return EngineParts(core, steps, connects, image_encoder=images, nap=FakeNap(made_anew), weights=weights)

        async def made_anew() -> EngineParts:
            await trio.sleep(opening_seconds)
            parts = made()
            await fake_adapters.attach(adapter_place[0])
            return parts

        images = None if image_limits is None else FakeImageEncoder(tile_seconds=tile_seconds)
        parts = made()
        await fake_adapters.attach(adapter_place[0])
        try:
            yield parts
        finally:
            fake_adapters.detach()
            if images is not None:
                images.close()

    opened: list[FakeEngine] = []
    fake_adapters = Adapters(
        _fake_adapter_reader(adapter_seconds), adapters_max=adapters_max, reserved_names=served_names
    )

    def make_engine(parts: EngineParts) -> FakeEngine:
        engine = FakeEngine(
            parts,
            text_threads,
            settings,
            role=None if parts.connector is None else role,
            served_names=served_names,
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
            for name, path in (adapters or {}).items():
                await engine.load_adapter(name, path)
            yield engine
            nursery.cancel_scope.cancel()
