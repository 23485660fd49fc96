"""Loads a model into this process, and connects it with the compute thread."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import trio

from trioserve.assemble_model import LoadProgress, LoadReport, ModelFiles
from trioserve.connectors.settings import ConnectorSettings
from trioserve.contracts.kv_transfer import BlockCopies, KVPages
from trioserve.contracts.media import ImageEncoder
from trioserve.contracts.prompt import InputEncoder
from trioserve.contracts.weights import AdapterId, BroadcastWeights, SharedWeights, WeightSource
from trioserve.core.settings import CoreSettings
from trioserve.engine.adapters import AdapterTarget
from trioserve.engine.between_steps import (
    SentWeights,
    ThreadedCopies,
    ThreadedEncoder,
    ThreadedWeights,
    WrittenWeights,
)
from trioserve.engine.kv_cache import KvRelease
from trioserve.engine.lifecycle.engine_loop import LaunchedSteps, StepRunner, ThreadedExecutor, WhenIdle
from trioserve.engine.lifecycle.work import Guard
from trioserve.engine.text_work import EngineParts
from trioserve.engine.weight_updates import WeightTarget
from trioserve.model.kv_storage import CudaPages
from trioserve.model.loading.checkpoint import Checkpoint
from trioserve.model.loading.encoder_directory import EncoderDirectory
from trioserve.model.loading.stored_tensor import AdapterWeights
from trioserve.model.settings import DraftSettings
from trioserve.model.trainer_groups import TrainerGroups, arriving_tensors
from trioserve.options.engine import EngineOptions
from trioserve.ranks.ranked_runner import RankedRunner
from trioserve.trio_tools.interrupts import uninterrupted
from trioserve.trio_tools.worker_thread import LongJob, WorkerThread

if TYPE_CHECKING:
    from trioserve.model.drafts.checkpoints import DraftSource
    from trioserve.model.encoder_runner import EncoderRunner
    from trioserve.model.runner import ModelRunner

    Runner = ModelRunner | EncoderRunner | RankedRunner

__all__ = [
    "Computing",
    "LocalModel",
    "Runner",
    "cache_release_of",
    "copies_of",
    "core_settings",
    "image_encoder_of",
    "overlaps_steps",
    "window_tokens_of",
]

logger = logging.getLogger("trioserve.assemble")


class Computing(NamedTuple):
    """The loaded model and its access from the engine. `EngineParts` documents the fields."""

    runner: Runner
    steps: StepRunner
    adapters: AdapterTarget
    claim_memory: WhenIdle
    weights: WeightTarget | str
    image_encoder: ImageEncoder | None = None
    guard: Guard | None = None
    row_encoder: InputEncoder | None = None


@uninterrupted
class LocalModel:
    """Loads the model into this process, in the compute thread.

    Args:
        options: the options of the engine.
        files: the model's files.
        compute: the compute thread.
        groups: groups with trainers that send new weights.
        report: receives the progress of loading.
    """

    def __init__(
        self,
        options: EngineOptions,
        files: ModelFiles,
        compute: WorkerThread,
        groups: TrainerGroups,
        report: LoadReport,
    ) -> None:
        self._options = options
        self._files = files
        self._compute = compute
        self._groups = groups
        self._report = report

    @asynccontextmanager
    async def loaded(
        self, checkpoint: Checkpoint | EncoderDirectory, draft: DraftSource | None
    ) -> AsyncIterator[Computing]:
        """Load the model, and unload it at the end of the scope.

        Args:
            checkpoint: the model.
            draft: source of draft tokens other than the request's own text.
        """
        options, compute = self._options, self._compute
        runners: list[ModelRunner | EncoderRunner] = []
        try:
            runner = await self._load(checkpoint, draft, runners)
            yield Computing(
                runner,
                _steps(runner, compute, overlap_steps=overlaps_steps(options, runner)),
                _AdapterTarget(runner, compute),
                lambda: compute.run(runner.claim_memory),
                _weight_target(runner, compute, self._groups, options.max_model_len),
                image_encoder_of(runner, compute),
                row_encoder=_row_encoder_of(runner, compute),
            )
        finally:
            for made in runners:
                await compute.run(made.close)  # A cancel does not interrupt this call.

    async def _load(
        self,
        checkpoint: Checkpoint | EncoderDirectory,
        draft: DraftSource | None,
        runners: list[ModelRunner | EncoderRunner],
    ) -> ModelRunner | EncoderRunner:
        """Load the weights in the compute thread. Prepare the tokenizer and grammars at the same time.

        The caller must close the entries of `runners`, also when this function raises.
        """
        job = LongJob()
        weights_come, token = trio.Event(), trio.lowlevel.current_trio_token()

        def report(progress: LoadProgress) -> None:
            job.check()
            self._report(progress)

        def note_weights_come() -> None:
            token.run_sync_soon(weights_come.set, idempotent=True)

        def read(done: int, total: int) -> None:
            note_weights_come()
            report(LoadProgress(f"loading {self._options.model}", done, total))

        def compiling(sentence: str, seconds: float) -> None:
            report(LoadProgress(sentence, seconds))

        def load_runner() -> ModelRunner | EncoderRunner:
            # This function runs in the compute thread, because it may import torch, which only that thread may use.
            runner: ModelRunner | EncoderRunner
            if isinstance(checkpoint, EncoderDirectory):
                from trioserve.model.encoder_runner import EncoderRunner

                runner = EncoderRunner.load(checkpoint, self._options.model_settings(), progress=read)
            else:
                from trioserve.model.runner import ModelRunner

                runner = ModelRunner.load(
                    checkpoint, self._options.model_settings(), draft=draft, progress=read, on_compile=compiling
                )
            runners.append(runner)
            note_weights_come()  # A fast load may not have reported any progress.
            runner.allocate_kv(runner.block_count)
            if runner.device != "cpu":  # The warm-up compiles kernels, which takes time.
                report(LoadProgress(f"warming up {self._options.model}", 0))
            runner.warm_up()
            return runner

        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._files.prepare_texts, checkpoint, weights_come)
            return await job.run(self._compute, load_runner)


class _CacheRelease:
    """Releases and allocates the KV cache in the compute thread."""

    def __init__(self, runner: ModelRunner, compute: WorkerThread, new_parts: Callable[[], EngineParts]) -> None:
        self._runner = runner
        self._compute = compute
        self._new_parts = new_parts

    async def release_cache(self) -> None:
        await self._compute.run(self._runner.release_kv)

    async def limit_blocks(self, count: int) -> None:
        await self._compute.run(self._runner.limit_blocks, count)

    async def rebuild_parts(self) -> EngineParts:
        await self._compute.run(self._runner.allocate_kv, self._runner.block_count)
        return self._new_parts()


def cache_release_of(
    runner: Runner, compute: WorkerThread, new_parts: Callable[[], EngineParts]
) -> KvRelease[EngineParts] | str:
    """Return the object that releases the KV cache, or the reason why the cache cannot be released.

    Args:
        runner: the loaded model.
        compute: the compute thread.
        new_parts: creates new parts of the engine after the cache was allocated again.
    """
    from trioserve.model.runner import ModelRunner

    if isinstance(runner, RankedRunner):
        return "a model in ranks cannot release its KV cache alone"
    if not isinstance(runner, ModelRunner):
        return "an encoder has no KV cache to release"
    return runner.why_kept or _CacheRelease(runner, compute, new_parts)


def _weight_target(
    runner: ModelRunner | EncoderRunner, compute: WorkerThread, groups: TrainerGroups, context_tokens: int | None
) -> WeightTarget | str:
    from trioserve.model.runner import ModelRunner

    if not isinstance(runner, ModelRunner):
        return "the model is an encoder"

    def read(source: WeightSource) -> WrittenWeights:
        from trioserve.model.weight_replacement import StoredWeights

        assert not isinstance(source, BroadcastWeights), "these weights are sent"
        where = source if isinstance(source, SharedWeights) else Path(source)
        return StoredWeights(runner, where, context_tokens=context_tokens)

    def check_sent(source: BroadcastWeights) -> SentWeights:
        from trioserve.model.weight_replacement import ArrivingWeights

        return ArrivingWeights(runner, arriving_tensors(source))

    return ThreadedWeights(read, check_sent, groups, compute)


class _AdapterTarget:
    """Adds and removes adapters in the compute thread, between two steps."""

    def __init__(self, runner: ModelRunner | EncoderRunner, compute: WorkerThread) -> None:
        self._runner = runner
        self._compute = compute

    async def add(self, id: AdapterId, content: AdapterWeights) -> None:
        await self._compute.run(self._runner.add_adapter, id, content)

    async def remove(self, id: AdapterId) -> None:
        await self._compute.run(self._runner.remove_adapter, id)


def overlaps_steps(options: EngineOptions, runner: Runner) -> bool:
    """Return True if the next step is planned while one is computed.

    Without the option, steps overlap where a device computes launched steps. Draft tokens exclude overlapping steps.

    Args:
        options: the options of the engine.
        runner: the loaded model.
    """
    if options.overlap_steps is not None:
        return options.overlap_steps
    return runner.launches and options.drafts() is None


def _steps(runner: ModelRunner | EncoderRunner, compute: WorkerThread, *, overlap_steps: bool) -> StepRunner:
    if overlap_steps and runner.launches:
        return LaunchedSteps(runner, compute)
    return ThreadedExecutor(runner, compute, takes_cpu=runner.takes_every_cpu and not overlap_steps)


def image_encoder_of(runner: Runner, compute: WorkerThread) -> ImageEncoder | None:
    """Return the object that computes image embeddings, or None for a model that reads no images.

    Args:
        runner: the loaded model.
        compute: the compute thread.
    """
    vision = getattr(runner, "vision", None)
    return None if vision is None else ThreadedEncoder(vision.begin, compute)


def _row_encoder_of(runner: Runner, compute: WorkerThread) -> InputEncoder | None:
    encoder = getattr(runner, "row_encoder", None)
    return None if encoder is None else ThreadedEncoder(encoder.begin, compute)


def copies_of(pages: KVPages, compute: WorkerThread) -> BlockCopies | None:
    """Return the object that copies blocks of a device for connectors, or None if the host can address the blocks.

    Args:
        pages: KV cache of the engine.
        compute: the compute thread.
    """
    return ThreadedCopies(pages, compute) if isinstance(pages, CudaPages) else None


def core_settings(
    options: EngineOptions,
    transfers: ConnectorSettings | None,
    drafts: DraftSettings | None,
    runner: Runner,
    checkpoint: Checkpoint | EncoderDirectory,
    draft: DraftSource | None,
) -> CoreSettings:
    """Return the limits of the core of a loaded model.

    Args:
        options: the options of the engine.
        transfers: settings of the connector. None for no connector.
        drafts: settings of draft tokens. None for no draft tokens.
        runner: the loaded model.
        checkpoint: the checkpoint of the model.
        draft: source of draft tokens other than the request's own text.

    Raises:
        StartupError: the options do not fit the model.
    """
    context_tokens_max = checkpoint.config.context_tokens_max
    pool_tokens = runner.block_count * runner.block_size
    window_tokens = None
    if draft is None:  # A draft model may attend to more tokens than the sliding window of the model.
        window_tokens = window_tokens_of(checkpoint)
    if options.max_model_len is not None:
        options.model_settings().check_context(context_tokens_max)
        context_tokens_max = options.max_model_len
    elif isinstance(checkpoint, EncoderDirectory):
        context_tokens_max = checkpoint.config.context_tokens_default
    elif window_tokens is None or window_tokens + runner.step_tokens_max > pool_tokens - 2 * runner.block_size:
        # Without the option, use the context that fits. A model with a long context must also start on a small machine.
        if pool_tokens < context_tokens_max:
            logger.info(
                "the context is %d tokens, as many as the KV cache holds; the model supports %d: "
                "raise --kv-cache-memory for more",
                pool_tokens,
                context_tokens_max,
            )
        context_tokens_max = min(context_tokens_max, pool_tokens)
    keeps_kv, overlaps = not isinstance(checkpoint, EncoderDirectory), overlaps_steps(options, runner)
    if 0 < runner.state_slot_count < runner.max_num_seqs:
        logger.warning(
            "the cache's memory (--kv-cache-memory) holds the states of few sequences sequences_max=%d",
            runner.state_slot_count,
        )
    return CoreSettings(
        block_count=runner.block_count,
        block_size=runner.block_size,
        context_tokens_max=context_tokens_max,
        max_num_seqs=runner.max_num_seqs,
        # An encoder computes a whole prompt in one step, so a step must have space for the longest prompt.
        step_tokens_max=max(runner.step_tokens_max, 0 if keeps_kv else context_tokens_max),
        wide_prompt_stretch=options.wide_prompt_stretch,
        enable_prefix_caching=options.enable_prefix_caching and keeps_kv,
        session_retention=options.session_retention,
        session_share_max=options.session_kv_share,
        cold_turn_seconds=options.cold_turn_seconds,
        session_prefetch=options.session_prefetch,
        overlap_steps=overlaps,
        steps_apart=overlaps and options.pipeline_parallel_size > 1,
        draft_tokens_max=drafts.token_count if drafts is not None and keeps_kv else 0,
        draft_source="text" if draft is None else draft.kind,
        draft_context_tokens_max=None if draft is None else draft.context_tokens_max,
        keeps_kv=keeps_kv,
        window_tokens=window_tokens,
        state_slot_count=runner.state_slot_count,
        snapshot_slot_count=runner.snapshot_slot_count if options.enable_prefix_caching else 0,
        hold_seconds_max=options.kv_hold_timeout,
        remote_kv_seconds_max=options.kv_load_timeout,
        held_share_max=options.kv_held_share,
        load_failure_policy="recompute" if transfers is None else transfers.load_failure_policy,
    )


def window_tokens_of(checkpoint: Checkpoint | EncoderDirectory) -> int | None:
    """Return the largest sliding window in tokens, or None if a layer has no window.

    Args:
        checkpoint: checkpoint of the model.
    """
    window_max = None if isinstance(checkpoint, EncoderDirectory) else checkpoint.config.window_max
    return None if window_max is None else max(window_max, 2)
