"""Builds an engine from its parts. This is the only module that knows every package."""

from __future__ import annotations

import functools
import inspect
import logging
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, ParamSpec, TypeVar

import msgspec
import trio

from trioserve.admission.image_decoder import ImageDecoder
from trioserve.admission.text_threads import TextThreads
from trioserve.asyncio.engine import Engine as AsyncioEngine
from trioserve.asyncio.threaded_engine import EngineT, opened_in_a_thread
from trioserve.asyncio.trio_thread import TrioThread
from trioserve.commands.prompt_naming import load_tokenizer
from trioserve.connectors.registry import find_connector
from trioserve.connectors.settings import ConnectorSettings, connector_settings
from trioserve.contracts.adapter import AdapterId
from trioserve.contracts.errors import InvalidRequest, ModelLoadError, StartupError
from trioserve.contracts.images import ImageEncoder, ImageProcessing
from trioserve.contracts.kv_transfer import ConnectorSetup, RunningConnector
from trioserve.contracts.weights import BroadcastWeights, SharedWeights, WeightSource
from trioserve.core.engine import EngineCore
from trioserve.core.settings import CoreSettings
from trioserve.engine.adapters import Adapters, AdapterTarget
from trioserve.engine.engine import Engine, ModelDescription
from trioserve.engine.engine_parts import CacheRelease, EngineParts, Guard
from trioserve.engine.guide_preparation import show_masks
from trioserve.engine.kv_events import EVENTS_MAX
from trioserve.engine.lifecycle.engine_loop import StepRunner, ThreadedExecutor, WhenIdle
from trioserve.engine.lifecycle.launched_steps import LaunchedSteps
from trioserve.engine.lifecycle.supervisor import supervise
from trioserve.engine.mask_thread import MaskThread
from trioserve.engine.model_description import PoolingModel
from trioserve.engine.rank_metrics import show_ranks
from trioserve.engine.threaded_image_encoder import ThreadedImageEncoder
from trioserve.engine.threaded_weights import SentWeights, ThreadedWeights, WrittenWeights
from trioserve.engine.weight_updates import WeightTarget
from trioserve.metrics.registry import Metrics
from trioserve.model.adapter_weights import AdapterWeights
from trioserve.model.diffusion.directory import is_image_model
from trioserve.model.drafts.eagle_checkpoint import EagleCheckpoint
from trioserve.model.drafts.settings import DraftSettings
from trioserve.model.drafts.vocabulary import check_same_tokens
from trioserve.model.fingerprint import fingerprint_of
from trioserve.model.loading.adapter_directory import allowed_directory, read_adapter
from trioserve.model.loading.checkpoint import Checkpoint, open_checkpoint
from trioserve.model.loading.default_model import DOWNLOAD_THREAD, recommended_sampling, resolve_model
from trioserve.model.loading.encoder_directory import EncoderDirectory, opened_encoder
from trioserve.model.loading.generation_defaults import GenerationDefaults, generation_defaults
from trioserve.model.loading.settings import generation_settings, lora_modules
from trioserve.model.loading.weights_name import weights_name
from trioserve.model.model_config import ModelConfig
from trioserve.model.number_formats import Dtype
from trioserve.model.parallel.shares import share_of
from trioserve.model.parallel.stages import cache_shares, stage_configs
from trioserve.model.settings import ModelSettings
from trioserve.model.trainer_groups import TrainerGroups, arriving_tensors
from trioserve.options.engine import EngineOptions
from trioserve.options.option import about, checked_parameters, parameters_of
from trioserve.proxy.discovery.ray import check_ray_is_installed
from trioserve.ranks.door import wait_for_ranks
from trioserve.ranks.group import open_ranks
from trioserve.ranks.host import free_port, host_ranks
from trioserve.ranks.messages import DraftSetup, Progress, RankSetup
from trioserve.ranks.placed import PlacedRanks, RanksWanted, placed_ranks
from trioserve.ranks.ranked_runner import RankedRunner
from trioserve.ranks.ranked_weights import RankedWeights
from trioserve.text.chat_template import chat_template_text
from trioserve.text.grammar_compiler import GrammarCompiler
from trioserve.text.guide_factory import GuideFactory
from trioserve.text.response_families import ResponseFamilies
from trioserve.text.response_parsers.registry import named_families
from trioserve.text.tokenizer import Tokenizer
from trioserve.trio_tools.errors_unwrapped import errors_unwrapped
from trioserve.trio_tools.interrupts import uninterrupted, uninterrupted_context
from trioserve.trio_tools.media_fetcher import MediaFetcher
from trioserve.trio_tools.own_run import check_is_in_trio, opened_once
from trioserve.trio_tools.worker_thread import LongJob, WorkerThread, call_abandonable
from trioserve.vision.image_file import why_no_images
from trioserve.vision.image_prompt import IMAGE_SIGN

if TYPE_CHECKING:
    from trioserve.model.encoder_runner import EncoderRunner
    from trioserve.model.runner import DraftSource, ModelRunner

    Runner = ModelRunner | EncoderRunner | RankedRunner

__all__ = [
    "for_asyncio",
    "LoadProgress",
    "LoadReport",
    "Loaded",
    "LoggedProgress",
    "default_served_name",
    "open_asyncio_engine",
    "open_configured_engine",
    "open_engine",
]

P = ParamSpec("P")
AsyncioT = TypeVar("AsyncioT")
logger = logging.getLogger(__name__)

ADAPTER_THREAD = "trioserve-adapter"


class LoadProgress(msgspec.Struct, frozen=True):
    """Progress of loading.

    Attributes:
        what: current activity, for people.
        done: bytes so far, or seconds so far if `total` is None.
        total: bytes in total. None: the duration is unknown.
    """

    what: str
    done: float
    total: int | None = None


LoadReport = Callable[[LoadProgress], None]
"""Receives the progress of loading. Called from the thread that loads, first before the activity begins."""


class LoggedProgress:
    """Logs each activity of loading once, when it begins.

    Args:
        report: receives all progress, too. None: the log is enough.
    """

    def __init__(self, report: LoadReport | None) -> None:
        self._report = report
        self._what = ""

    def __call__(self, progress: LoadProgress) -> None:
        if progress.what != self._what:
            self._what = progress.what
            logger.info("%s", progress.what)
        if self._report is not None:
            self._report(progress)


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """Result of loading, for display: where the model runs, and the size of its KV cache."""

    model_path: Path
    device: str
    dtype: str
    computed_by: str
    context_tokens_max: int
    model_context_tokens_max: int
    block_count: int
    block_size: int
    kv_cache_bytes: int
    kv_dtype: str
    load_seconds: float


@dataclass(frozen=True, kw_only=True)
class EngineParameters(EngineOptions):
    """Parameters of `open_engine`: the options of an engine, and `progress`."""

    progress: Annotated[
        LoadReport | None,
        about(
            "function that receives the progress of the start as LoadProgress: fetching the model, compiling the "
            "kernels once, loading the weights; another thread calls it, several times per second; an exception from "
            "it ends the start; the log has a line for each activity in any case; default: none"
        ),
    ] = None


@opened_once
@parameters_of(EngineParameters)
async def open_engine(**options: Any) -> AsyncIterator[Engine]:
    """Open an engine in the scope of an `async with`, in the caller's own Trio program.

    Inside, `engine.generate(...)` makes a request. Leaving ends every request and waits for the step in flight. No task
    and no thread remains. No signal handler is installed. A fault of the engine cancels the body, and is raised here as
    EngineFault, unless `engine_restarts` allows to reopen the engine. The parameters are the options of `trioserve
    serve` that concern an engine. `speculative_config`, `override_generation_config`, `limit_mm_per_prompt` and
    `kv_transfer_config` can be dicts instead of JSON.

    Args:
        options: the fields of EngineParameters. `help()` and the Python reference describe them.

    Raises:
        ModelLoadError: the model cannot be loaded.
        StartupError: a parameter has a wrong type or is out of range. The message says what is allowed.
        EngineFault: a step or the connector failed, at any time, and the engine is not reopened again.
    """
    check_is_in_trio("trioserve.open_engine")
    progress = LoggedProgress(options.pop("progress", None))
    async with open_configured_engine(checked_parameters(EngineOptions, options), on_progress=progress) as engine:
        yield engine


def for_asyncio(
    opens: Callable[P, AbstractAsyncContextManager[EngineT]], new: Callable[[TrioThread, EngineT], AsyncioT]
) -> Callable[P, AbstractAsyncContextManager[AsyncioT]]:
    """Make a function that opens an engine for asyncio programs, in a thread of its own.

    Args:
        opens: opens an engine for Trio programs.
        new: makes the asyncio engine.

    Returns:
        The function, with the parameters of `opens`.
    """

    @functools.wraps(opens)
    def open_for_asyncio(*args: P.args, **kwargs: P.kwargs) -> AbstractAsyncContextManager[AsyncioT]:
        inspect.signature(opens).bind(*args, **kwargs)  # raise TypeError here, and not in the thread
        return opened_in_a_thread(functools.partial(opens, *args, **kwargs), new)

    open_for_asyncio.__doc__ = f"""Open an engine for an asyncio program.

    The engine runs in a thread of its own. The context gives a trioserve.asyncio.{getattr(new, "__name__", "Engine")}.
    The description for Trio programs also applies:

    {opens.__doc__}"""
    return open_for_asyncio


open_asyncio_engine = for_asyncio(open_engine, AsyncioEngine)
"""The function `trioserve.asyncio.open_engine`."""


@uninterrupted_context
async def open_configured_engine(
    config: EngineOptions,
    *,
    on_progress: LoadReport | None = None,
    on_loaded: Callable[[Loaded], None] = lambda loaded: None,
) -> AsyncIterator[Engine]:
    """Open an engine from its options.

    Args:
        config: the options.
        on_progress: receives the progress of loading. None: each activity is logged.
        on_loaded: called once when the model is loaded.

    Raises:
        ModelLoadError: the model cannot be loaded.
        StartupError: an option is wrong.
        EngineFault: the engine broke, and is not reopened again.
    """
    if is_image_model(config.model):
        raise StartupError(
            f"{config.model} generates images, but an engine for text was requested: start `trioserve serve` with it, "
            "or open it with trioserve.open_image_engine"
        )
    try:
        named_families(config.tool_call_parser, config.reasoning_parser, None)
    except InvalidRequest as error:  # check now, before the model is loaded
        raise StartupError(str(error)) from None
    transfers = connector_settings(config.kv_transfer_config, config.role)
    if transfers is not None:
        find_connector(transfers.connector)
    modules = lora_modules(config.lora_modules)
    with errors_unwrapped():
        async with TextThreads() as text:
            opening = _Opening(config, transfers, text, on_progress or LoggedProgress(None), on_loaded)
            with closing(opening.trainer_groups), closing(opening.image_decoder):
                async with trio.open_nursery() as nursery:
                    engine = await nursery.start(supervise, opening.open_parts, opening.make_engine)
                    nursery.start_soon(engine.keep_deadlines)
                    for module in modules:
                        await engine.load_adapter(module.name, module.path)
                    yield engine
                    nursery.cancel_scope.cancel()


@uninterrupted
class _Opening:
    """Opens the parts of one engine, first and after each fault.

    Each opening reads the model and allocates its memory. Threads for text, metrics and the tokenizer are made only
    once.
    """

    def __init__(
        self,
        config: EngineOptions,
        transfers: ConnectorSettings | None,
        text: TextThreads,
        on_progress: LoadReport,
        on_loaded: Callable[[Loaded], None],
    ) -> None:
        self._config = config
        self._chat_template: str | None = None
        self._transfers = transfers
        self._text = text
        self._on_progress = on_progress
        self._on_loaded = on_loaded
        self._path: Path | None = None
        self._drafts = config.drafts()
        self._draft_path: Path | None = None
        self._tokenizer_path: Path | None = None
        self._checkpoint: Checkpoint | EncoderDirectory | None = None
        self._generation = generation_settings(config.generation_config, config.override_generation_config)
        self._defaults: GenerationDefaults | None = None
        self._arithmetic = ""
        self._is_batch_invariant = False
        self._weights_name: str | None = None
        self._tokenizer_name = ""
        self._fingerprint: str | None = None
        self._executor: str | None = None
        self._compiler: GrammarCompiler | None = None
        self._served_names = config.served_model_name or (default_served_name(config.model),)
        self._metrics = Metrics(self._served_names[0])
        self._engine: Engine | None = None
        self._adapters = Adapters(
            self._read_adapter if config.enable_lora or config.lora_modules else None,
            adapters_max=max(config.max_loras, config.max_cpu_loras or 0, len(config.lora_modules)),
            reserved_names=self._served_names,
        )
        self._adapter_dtype: Dtype = "float32"
        self.trainer_groups = TrainerGroups()
        self.image_decoder = ImageDecoder(config.image_limits(), self._metrics)

    @asynccontextmanager
    async def open_parts(self) -> AsyncIterator[EngineParts]:
        """Open the parts, and close them on leaving. Raises ModelLoadError and StartupError."""
        config, text, started_at = self._config, self._text, time.perf_counter()
        async with WorkerThread("compute") as compute, AsyncExitStack() as scopes:
            if config.chat_template is not None:  # check first, because the template is used much later
                self._chat_template = await text.run_cancellable(chat_template_text, config.chat_template)
            if self._path is None:
                self._path = await self._fetched(config.model, revision=config.revision)
                if config.tokenizer is not None:
                    self._tokenizer_path = await self._fetched(config.tokenizer, with_weights=False)
                if self._drafts is not None and self._drafts.model is not None:
                    self._draft_path = await self._fetched(self._drafts.model, revision=self._drafts.revision)
                if self._drafts is not None and self._drafts.ignored:
                    logger.warning("of --speculative-config ignored=%s", ",".join(self._drafts.ignored))
            uses_further = self._drafts is not None and self._drafts.source == "mtp"
            checkpoint = await text.run_cancellable(_opened, self._path, config.max_model_len, uses_further)
            draft = await text.run_cancellable(self._open_draft, checkpoint)
            self._defaults = await text.run_cancellable(self._read_defaults, checkpoint)
            async with self._computing(checkpoint, draft, compute) as computing:
                runner = computing.runner
                masks = scopes.enter_context(MaskThread(checkpoint.config.vocab_size))
                settings = _core_settings(config, self._transfers, self._drafts, runner, checkpoint, draft)

                def new_parts() -> EngineParts:
                    connector = self._connector(checkpoint, runner, None if draft else _window_tokens(checkpoint))
                    return EngineParts(
                        EngineCore(settings, connector=connector, mask_maker=masks),
                        computing.steps,
                        connector,
                        readers_first=runner.device == "cpu",
                        when_idle=computing.claim_memory,
                        image_encoder=computing.image_encoder,
                        guard=computing.guard,
                        cache_release=_cache_release_of(runner, compute, new_parts),
                        weights=computing.weights,
                    )

                self._note_model(checkpoint, runner)
                self._report_loaded(runner, settings, checkpoint, time.perf_counter() - started_at)
                self._show(runner, finds_prefixes=settings.enable_prefix_caching)
                scopes.callback(show_masks(self._metrics, masks))
                await self._adapters.attach(computing.adapters)
                scopes.callback(self._adapters.detach)
                yield new_parts()  # not stored in a variable, which would keep them in memory

    def make_engine(self, parts: EngineParts) -> Engine:
        """Make the engine from its first parts.

        Args:
            parts: result of the first `open_parts`.
        """
        core, steps, connector, readers_first, when_idle, image_encoder, guard, cache_release, weights = parts
        config, checkpoint, compiler, settings = self._config, self._checkpoint, self._compiler, core.settings
        assert checkpoint is not None, "no parts were opened"
        assert self._defaults is not None, "no parts were opened"
        assert compiler is not None, "no parts were opened"
        self._engine = Engine(
            model=ModelDescription(
                served_names=self._served_names,
                source=config.model,
                context_tokens_max=settings.context_tokens_max,
                vocab_size=checkpoint.config.vocab_size,
                eos_token_ids=self._defaults.eos_token_ids,
                created_at=int(time.time()),
                pooled=_pooling_model(checkpoint, settings),
                arithmetic=self._arithmetic,
                batch_invariant=self._is_batch_invariant,
                fingerprint=self._fingerprint,
                executor=self._executor,
                family=_family(checkpoint),
                weight_bytes=checkpoint.weight_bytes,
                images=self._images(checkpoint, image_encoder, compiler.tokenizer),
            ),
            core=core,
            steps=steps,
            tokenizer=compiler.tokenizer,
            text_threads=self._text,
            metrics=self._metrics,
            settings=msgspec.structs.replace(
                config.engine_settings(),
                kv_events_max=EVENTS_MAX if config.kv_events else 0,
                step_seconds_max=config.step_timeout,
                restarts_max=config.engine_restarts,
                seed=config.seed,
            ),
            default_sampling=self._defaults.sampling,
            connector=connector,
            role=None if self._transfers is None else self._transfers.shown_role,
            families=ResponseFamilies(
                compiler.tokenizer,
                tool_call_parser=config.tool_call_parser,
                tool_call_leniency=config.tool_call_leniency,
                reasoning_parser=config.reasoning_parser,
            ),
            readers_first=readers_first,
            when_idle=when_idle,
            guides=GuideFactory(compiler),
            image_encoder=image_encoder,
            image_decoder=self.image_decoder,
            media=MediaFetcher(config.allowed_media_domains, self.image_decoder.limits.image_bytes_max)
            if config.allowed_media_domains
            else None,
            adapters=self._adapters,
            guard=guard,
            cache_release=cache_release,
            weights=weights,
        )
        return self._engine

    async def _read_adapter(self, path: str, is_checked: bool) -> AdapterWeights:
        # Reading files may hang and cannot be stopped from outside. So it runs in a thread that is not waited for.
        return await call_abandonable(self._adapter_from, path, is_checked, thread_name=ADAPTER_THREAD)

    def _adapter_from(self, path: str, is_checked: bool) -> AdapterWeights:
        checkpoint, config = self._checkpoint, self._config
        assert checkpoint is not None, "adapters are loaded when the engine is open"
        if isinstance(checkpoint, EncoderDirectory):
            raise ModelLoadError("an encoder does not support LoRA adapters: leave out --enable-lora")
        directory = Path(path)
        if is_checked:
            directory = allowed_directory(directory, [Path(allowed) for allowed in config.adapter_directories])
        return read_adapter(directory, checkpoint.config, dtype=self._adapter_dtype, rank_max=config.max_lora_rank)

    def _images(
        self, checkpoint: Checkpoint | EncoderDirectory, encoder: ImageEncoder | None, tokenizer: Tokenizer
    ) -> ImageProcessing | None:
        """Return how the model expects images, or None if it is served without images."""
        if encoder is None or isinstance(checkpoint, EncoderDirectory) or checkpoint.vision is None:
            return None
        processing = checkpoint.vision.processing
        reason = why_no_images()
        if tokenizer.added_token_id(IMAGE_SIGN) != processing.image_token_id:
            reason = f"its tokenizer has another token for {IMAGE_SIGN} than image_token_id {processing.image_token_id}"
        if reason is not None:
            logger.warning("images are not served: %s", reason)
            return None
        return processing

    async def _fetched(self, name: str, *, with_weights: bool = True, revision: str | None = None) -> Path:
        """Return the path of a model, and download it first if it is not on this machine.

        Nothing can interrupt a read from the network, so the download has a thread that is not waited for. If the
        start is cancelled, the thread ends when it next receives bytes.
        """
        job = LongJob()

        def report(done: int, total: int) -> None:
            job.check()
            self._on_progress(LoadProgress(f"fetching {name}", done, total or None))

        resolve = functools.partial(resolve_model, with_weights=with_weights, revision=revision, progress=report)
        try:
            return await call_abandonable(resolve, name, thread_name=DOWNLOAD_THREAD)
        finally:
            job.cancel()

    def _read_defaults(self, checkpoint: Checkpoint | EncoderDirectory) -> GenerationDefaults:
        return generation_defaults(checkpoint, self._generation, recommended=recommended_sampling(self._config.model))

    def _make_tokenizer(self, checkpoint: Checkpoint | EncoderDirectory) -> Tokenizer:
        config, path = self._config, self._tokenizer_path
        tokenizer = _make_tokenizer(checkpoint) if path is None else load_tokenizer(path)
        if tokenizer.vocab_size > checkpoint.config.vocab_size and path is not None:
            raise StartupError(
                f"--tokenizer {config.tokenizer} has {tokenizer.vocab_size} tokens, but the model has "
                f"{checkpoint.config.vocab_size}: set it to the tokenizer with which the model was trained"
            )
        if self._chat_template is not None:
            tokenizer.use_chat_template(self._chat_template)
        if config.control_tokens_in_text == "parse":
            tokenizer.parse_control_tokens_in_chats()
        return tokenizer

    def _open_draft(self, checkpoint: Checkpoint | EncoderDirectory) -> DraftSource | None:
        """Open the source of draft tokens. Raises StartupError if the model does not support it."""
        drafts, path = self._drafts, self._draft_path
        if drafts is None or drafts.source == "text" or isinstance(checkpoint, EncoderDirectory):
            return None
        from trioserve.model.drafts.draft_sources import draft_source

        name = drafts.model or drafts.source
        draft = draft_source(name, path, checkpoint, self._draft_settings(drafts), drafts.token_count)
        if path is not None and not isinstance(draft.checkpoint, EagleCheckpoint):
            check_same_tokens(_make_tokenizer(checkpoint), load_tokenizer(path), name)
        return draft

    def _draft_settings(self, drafts: DraftSettings) -> ModelSettings:
        return msgspec.structs.replace(
            self._config.model_settings(), quantization=drafts.quantization, context_tokens_max=None
        )

    @asynccontextmanager
    async def _computing(
        self, checkpoint: Checkpoint | EncoderDirectory, draft: DraftSource | None, compute: WorkerThread
    ) -> AsyncIterator[_Computing]:
        """Load the model, in the compute thread or in ranks. Leaving unloads it."""
        if self._config.rank_count > 1:
            async with self._in_ranks(checkpoint, compute) as computing:
                yield computing
            return
        runners: list[ModelRunner | EncoderRunner] = []
        try:
            runner = await self._load(checkpoint, draft, compute, runners)
            yield _Computing(
                runner,
                _steps(runner, compute, overlap_steps=self._config.overlap_steps),
                _AdapterTarget(runner, compute),
                lambda: compute.run(runner.claim_memory),
                _weight_target(runner, compute, self.trainer_groups, self._config.max_model_len),
                _image_encoder(runner, compute),
            )
        finally:
            for made in runners:
                await compute.run(made.close)  # completes even when cancelled

    @asynccontextmanager
    async def _in_ranks(
        self, checkpoint: Checkpoint | EncoderDirectory, compute: WorkerThread
    ) -> AsyncIterator[_Computing]:
        """Load the model in ranks. The compute thread of this process computes image embeddings."""
        config = self._config
        if isinstance(checkpoint, EncoderDirectory):
            name = "--tensor-parallel-size" if config.tensor_parallel_size > 1 else "--pipeline-parallel-size"
            raise StartupError(f"{name} is set, but an encoder runs in one process: leave it out")
        stages = stage_configs(checkpoint, config.pipeline_parallel_size)
        for stage in stages:  # check before any rank starts
            share_of(stage, 0, config.tensor_parallel_size, expert_parallel=config.enable_expert_parallel)
        async with self._placed() as placed, self._grouped(checkpoint, stages, compute, placed) as computing:
            yield computing

    @asynccontextmanager
    async def _placed(self) -> AsyncIterator[PlacedRanks | None]:
        """Return the ranks that Ray placed. None: ranks run on this machine and on the named ones."""
        config = self._config
        if config.distributed_executor_backend == "mp":
            yield None
            return
        check_ray_is_installed()
        wanted = RanksWanted(
            count=config.rank_count,
            model=config.model,
            revision=config.revision,
            cpus=_placed_cpus(config),
            gpus=1 if config.device == "cuda" else 0,
            address=config.ray_address,
        )
        async with placed_ranks(wanted) as placed:
            yield placed

    @asynccontextmanager
    async def _grouped(
        self, checkpoint: Checkpoint, stages: Sequence[ModelConfig], compute: WorkerThread, placed: PlacedRanks | None
    ) -> AsyncIterator[_Computing]:
        config = self._config
        weights_come = trio.Event()

        def report(progress: Progress) -> None:
            weights_come.set()
            if self._engine is None:
                what = progress.what or f"loading {config.model}"
                self._on_progress(LoadProgress(what, progress.done, progress.total))

        count = config.rank_count
        here = count // config.nnodes
        elsewhere: dict[int, socket.socket] = {}
        setups = self._rank_setups(here, stages) if placed is None else self._placed_setups(placed, stages)
        if placed is not None:
            here, elsewhere = 0, await placed.come(on_wait=self._log_awaited)
        elif config.nnodes > 1:
            assert config.ranks_key is not None, "checked by Config"
            elsewhere = await wait_for_ranks(
                config.master_addr, config.master_port, range(here, count), config.ranks_key, on_wait=self._log_awaited
            )
        with host_ranks(
            here,
            elsewhere=elsewhere,
            shows_kv=self._transfers is not None,
            stage_count=len(stages),
            at_once=config.ranks_at_once,
        ) as ranks:
            async with open_ranks(
                setups,
                ranks.make_links,
                answer_seconds_max=config.step_timeout,
                find_missing=ranks.find_missing,
                on_progress=report,
            ) as group:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._prepare_texts, checkpoint, weights_come)
                    await group.load()
                    weights_come.set()
                from trioserve.model.runner import FIXED_BY_IMAGES, load_vision

                loaded = group.loaded
                vision = await compute.run(
                    load_vision,
                    checkpoint,
                    config.model_settings(),
                    loaded.dtype,
                    loaded.device if placed is None else "cpu",  # the GPUs of Ray belong to the ranks
                )
                runner = RankedRunner(
                    loaded,
                    group.ranks,
                    ranks.kv_memories,
                    vision,
                    config.block_size,
                    config.tensor_parallel_size,
                )
                logger.info("the model is in ranks pids=%s", ",".join(map(str, group.pids)))
                image_encoder = _image_encoder(runner, compute)
                with ExitStack() as scopes:
                    scopes.callback(show_ranks(self._metrics, group))
                    weights = RankedWeights(
                        group, self.trainer_groups, why_fixed=None if vision is None else FIXED_BY_IMAGES
                    )
                    yield _Computing(runner, group, group, group.claim_memory, weights, image_encoder, group.guard)

    def _log_awaited(self, awaited: list[int]) -> None:
        if awaited:
            logger.info("waiting for ranks of other machines ranks=%s", ",".join(map(str, awaited)))

    def _rank_setups(self, here: int, stages: Sequence[ModelConfig]) -> list[RankSetup]:
        """Return the setup of each rank.

        Args:
            here: ranks per machine.
            stages: the part of the model that each stage computes.
        """
        config, drafts = self._config, self._drafts
        whole = config.model_settings()
        stage_size = config.tensor_parallel_size
        settings = [
            msgspec.structs.replace(
                whole,
                threads=None if config.threads is None else max(1, config.threads // config.ranks_at_once),
                kv_cache_bytes=None
                if whole.kv_cache_bytes is None
                else int(whole.kv_cache_bytes * share * len(stages) / here),
                ranks_here=here,
            )
            for share in cache_shares(stages)
        ]
        draft = None
        if drafts is not None and drafts.source != "text":
            draft = DraftSetup(
                name=drafts.model or drafts.source,
                path=None if self._draft_path is None else str(self._draft_path),
                settings=self._draft_settings(drafts),
                token_count=drafts.token_count,
            )
        is_far = config.nnodes > 1
        is_split = is_far and len(stages) == 1  # ranks of one stage are on several machines
        meeting_ports = [config.master_port + 1 + stage if is_far else free_port() for stage in range(len(stages))]
        return [
            RankSetup(
                rank=rank,
                size=config.rank_count,
                stage_count=len(stages),
                meeting_host=config.master_addr if is_split else "127.0.0.1",
                meeting_port=meeting_ports[rank // stage_size],
                path=str(self._path),
                settings=settings[rank // stage_size],
                context_tokens=config.max_model_len,
                uses_further_layers=drafts is not None and drafts.source == "mtp",
                expert_parallel=config.enable_expert_parallel,
                draft=draft if rank == 0 else None,
                log_level=logging.getLogger("trioserve").getEffectiveLevel(),
            )
            for rank in range(config.rank_count)
        ]

    def _placed_setups(self, placed: PlacedRanks, stages: Sequence[ModelConfig]) -> list[RankSetup]:
        """Return the setup of each rank that Ray placed. Ranks on one node divide the options of a machine among
        themselves.
        """
        setups: list[RankSetup] = []
        for setup in self._rank_setups(1, stages):
            settings, beside = setup.settings, placed.count_beside(setup.rank)
            settings = msgspec.structs.replace(
                settings,
                device="cuda" if settings.device == "cuda" else "cpu",  # the device that Ray reserved
                threads=_placed_cpus(self._config),
                kv_cache_bytes=None if settings.kv_cache_bytes is None else settings.kv_cache_bytes // beside,
                ranks_here=beside,
            )
            first = placed.nodes[setup.stage * setup.stage_size]
            setups.append(
                msgspec.structs.replace(setup, settings=settings, meeting_host=first.address, meeting_port=first.port)
            )
        return setups

    async def _prepare_texts(self, checkpoint: Checkpoint | EncoderDirectory, weights_come: trio.Event) -> None:
        """Prepare the tokenizer, grammars and the weights' name while the weights are read."""
        # The libraries for tokens and grammars hold the GIL for tenths of a second. Reading weights does not need the
        # GIL once it has begun.
        await weights_come.wait()
        assert self._defaults is not None, "they are read with the checkpoint"
        is_first = self._compiler is None
        if self._compiler is None:
            tokenizer = await self._text.run_cancellable(self._make_tokenizer, checkpoint)
        else:
            tokenizer = self._compiler.tokenizer
        if not isinstance(checkpoint, EncoderDirectory):
            found = await self._text.run_cancellable(tokenizer.end_token_ids)
            self._defaults = self._defaults.with_ends(found, vocab_size=checkpoint.config.vocab_size)
            if is_first and not self._defaults.eos_token_ids:
                logger.warning(
                    "no end token in the model's files: responses end at max_tokens or a stop string; name one as "
                    "eos_token_id in generation_config.json"
                )
        if is_first:
            ends = self._defaults.eos_token_ids
            self._compiler = await self._text.run_cancellable(_make_compiler, checkpoint, tokenizer, ends)
            self._tokenizer_name = await self._text.run_cancellable(tokenizer.name)
        # This comes last, when most of the weights are in the page cache.
        self._weights_name = await self._text.run_cancellable(_weights_name, checkpoint)

    async def _load(
        self,
        checkpoint: Checkpoint | EncoderDirectory,
        draft: DraftSource | None,
        compute: WorkerThread,
        runners: list[ModelRunner | EncoderRunner],
    ) -> ModelRunner | EncoderRunner:
        """Load the weights in the compute thread, and prepare the texts meanwhile.

        The caller must close the entries of `runners`, also when this function raises.
        """
        job = LongJob()
        weights_come, token = trio.Event(), trio.lowlevel.current_trio_token()

        def report(progress: LoadProgress) -> None:
            job.check()
            if self._engine is None:
                self._on_progress(progress)

        def note_weights_come() -> None:
            token.run_sync_soon(weights_come.set, idempotent=True)

        def read(done: int, total: int) -> None:
            note_weights_come()
            report(LoadProgress(f"loading {self._config.model}", done, total))

        def compiling(sentence: str, seconds: float) -> None:
            report(LoadProgress(sentence, seconds))

        def load_runner() -> ModelRunner | EncoderRunner:
            # Runs in the compute thread, because it may import torch there.
            runner: ModelRunner | EncoderRunner
            if isinstance(checkpoint, EncoderDirectory):
                from trioserve.model.encoder_runner import EncoderRunner

                runner = EncoderRunner.load(checkpoint, self._config.model_settings(), progress=read)
            else:
                from trioserve.model.runner import ModelRunner

                runner = ModelRunner.load(
                    checkpoint, self._config.model_settings(), draft=draft, progress=read, on_compile=compiling
                )
            runners.append(runner)
            note_weights_come()  # in case that nothing reported progress
            runner.allocate_kv(runner.block_count)
            if runner.device != "cpu":  # kernels are compiled, which takes time
                report(LoadProgress(f"warming up {self._config.model}", 0))
            runner.warm_up()
            return runner

        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._prepare_texts, checkpoint, weights_come)
            return await job.run(compute, load_runner)

    def _note_model(self, checkpoint: Checkpoint | EncoderDirectory, runner: Runner) -> None:
        """Note the properties of the loaded model. Raises StartupError if its files have changed since the first
        opening.
        """
        assert self._defaults is not None, "they are read with the checkpoint"
        # Without KV from elsewhere, the engine is batch-invariant whenever its kernels are, even if the option is off.
        is_invariant = self._config.batch_invariant or (runner.is_batch_invariant and self._transfers is None)
        found = self._fingerprint_with(runner, self._defaults, is_batch_invariant=is_invariant)
        if self._engine is not None and found != self._fingerprint:
            raise StartupError(
                f"{self._path} has changed since the engine was opened, and streams cannot be resumed with another "
                "model: restart the server"
            )
        self._checkpoint, self._fingerprint, self._adapter_dtype = checkpoint, found, runner.dtype
        self._executor = f"{runner.dtype} on {runner.device} by {runner.computed_by}"
        self._arithmetic, self._is_batch_invariant = runner.arithmetic, is_invariant

    def _fingerprint_with(
        self, runner: Runner, defaults: GenerationDefaults, *, is_batch_invariant: bool
    ) -> str | None:
        """Return the fingerprint, or None for an encoder, which has no responses to resume."""
        if self._weights_name is None:
            return None
        config = self._config
        return fingerprint_of(
            weights=self._weights_name,
            arithmetic=runner.arithmetic,
            dtype=runner.dtype,
            batch_invariant=is_batch_invariant,
            tokenizer=self._tokenizer_name,
            others=(
                defaults.eos_token_ids,
                dict(defaults.named),
                config.tool_call_parser,
                config.tool_call_leniency,
                config.reasoning_parser,
            ),
        )

    def _connector(
        self, checkpoint: Checkpoint | EncoderDirectory, runner: Runner, window_tokens: int | None
    ) -> RunningConnector | None:
        transfers = self._transfers
        if transfers is None:
            return None
        make_connector = find_connector(transfers.connector)
        if transfers.ignored:
            logger.warning("of --kv-transfer-config ignored=%s", ",".join(transfers.ignored))
        if isinstance(checkpoint, EncoderDirectory):
            raise StartupError("an encoder has no KV to exchange: leave out --kv-transfer-config")
        if checkpoint.config.state_bytes:
            raise StartupError(
                "this model's layers have a state in addition to their KV, which connectors do not transfer: leave out "
                "--kv-transfer-config"
            )
        assert self._weights_name is not None, "set when the weights are read"
        connector = make_connector(
            ConnectorSetup(
                engine_id=secrets.token_hex(16),
                role=transfers.role,
                pages=runner.kv_pages(self._weights_name),
                options=transfers.options,
                wake=self._wake,
                window_tokens=window_tokens,
            )
        )
        if window_tokens is not None and not getattr(connector, "knows_windows", False):
            raise StartupError(
                f'every layer of this model has a sliding window, and the connector "{transfers.connector}" does not '
                "support missing blocks before the window (knows_windows): use another connector"
            )
        return connector

    def _wake(self) -> None:
        if self._engine is not None:
            self._engine.wake()

    def _show(self, runner: Runner, *, finds_prefixes: bool) -> None:
        metrics = self._metrics
        metrics.cache_config_info.clear()
        metrics.cache_config_info.labels(
            str(runner.block_size), str(runner.block_count), str(runner.kv_dtype), str(finds_prefixes)
        ).set(1)
        metrics.batch_invariant.set(self._is_batch_invariant)
        metrics.step_weight_bytes.set(runner.step_weight_bytes)
        metrics.token_kv_bytes.set(runner.kv_cache_bytes / max(1, runner.block_count * runner.block_size))
        metrics.token_flops.set(runner.token_flops)
        metrics.attended_token_flops.set(runner.attended_token_flops)

    def _report_loaded(
        self, runner: Runner, settings: CoreSettings, checkpoint: Checkpoint | EncoderDirectory, seconds: float
    ) -> None:
        if self._engine is not None:
            logger.info("the engine was reopened seconds=%.1f", seconds)
            return
        assert self._path is not None
        self._on_loaded(
            Loaded(
                model_path=self._path,
                device=runner.device,
                computed_by=runner.computed_by,
                dtype=runner.dtype,
                context_tokens_max=settings.context_tokens_max,
                model_context_tokens_max=checkpoint.config.context_tokens_max,
                block_count=runner.block_count,
                block_size=runner.block_size,
                kv_cache_bytes=runner.kv_cache_bytes,
                kv_dtype=runner.kv_dtype,
                load_seconds=seconds,
            )
        )


class _Computing(NamedTuple):
    """The loaded model. `EngineParts` documents the fields."""

    runner: Runner
    steps: StepRunner
    adapters: AdapterTarget
    claim_memory: WhenIdle
    weights: WeightTarget | str
    image_encoder: ImageEncoder | None = None
    guard: Guard | None = None


class _CacheRelease:
    """Releases and allocates the KV cache in the compute thread."""

    def __init__(self, runner: ModelRunner, compute: WorkerThread, new_parts: Callable[[], EngineParts]) -> None:
        self._runner = runner
        self._compute = compute
        self._new_parts = new_parts

    async def release_cache(self) -> None:
        await self._compute.run(self._runner.release_kv)

    async def rebuild_parts(self) -> EngineParts:
        await self._compute.run(self._runner.allocate_kv, self._runner.block_count)
        return self._new_parts()


def _cache_release_of(
    runner: Runner, compute: WorkerThread, new_parts: Callable[[], EngineParts]
) -> CacheRelease[EngineParts] | str:
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

    def look(source: WeightSource) -> WrittenWeights:
        from trioserve.model.weight_replacement import StoredWeights

        assert not isinstance(source, BroadcastWeights), "these weights are sent"
        where = source if isinstance(source, SharedWeights) else Path(source)
        return StoredWeights(runner, where, context_tokens=context_tokens)

    def look_at_sent(source: BroadcastWeights) -> SentWeights:
        from trioserve.model.weight_replacement import ArrivingWeights

        return ArrivingWeights(runner, arriving_tensors(source))

    return ThreadedWeights(look, look_at_sent, groups, compute)


class _AdapterTarget:
    """Adds and removes adapters in the compute thread, between two steps."""

    def __init__(self, runner: ModelRunner | EncoderRunner, compute: WorkerThread) -> None:
        self._runner = runner
        self._compute = compute

    async def add(self, id: AdapterId, content: AdapterWeights) -> None:
        await self._compute.run(self._runner.add_adapter, id, content)

    async def remove(self, id: AdapterId) -> None:
        await self._compute.run(self._runner.remove_adapter, id)


def _opened(path: Path, context_tokens: int | None, uses_further_layers: bool = False) -> Checkpoint | EncoderDirectory:
    return opened_encoder(path) or open_checkpoint(
        path, context_tokens=context_tokens, uses_further_layers=uses_further_layers
    )


def _weights_name(checkpoint: Checkpoint | EncoderDirectory) -> str | None:
    """Return the weights' name, or None for an encoder, which neither resumes responses nor exchanges KV."""
    return None if isinstance(checkpoint, EncoderDirectory) else weights_name(checkpoint)


def _family(checkpoint: Checkpoint | EncoderDirectory) -> str:
    return checkpoint.config.family


def _pooling_model(checkpoint: Checkpoint | EncoderDirectory, settings: CoreSettings) -> PoolingModel:
    size, whole_tokens_max = checkpoint.config.hidden_size, settings.whole_tokens_max
    if not isinstance(checkpoint, EncoderDirectory):
        return PoolingModel(
            embedding_size=size, whole_tokens_max=whole_tokens_max, continues_texts=checkpoint.continues_texts
        )
    encoder = checkpoint.config
    return PoolingModel(
        embedding_size=size,
        method=encoder.method,
        normalize=encoder.normalize,
        is_encoder=True,
        continues_texts=False,
        scores_pairs=encoder.scores_pairs,
        whole_tokens_max=whole_tokens_max,
    )


def _placed_cpus(config: EngineOptions) -> int:
    """Return the CPUs to reserve for each rank. Ray does not enforce the number, so each rank has as many threads."""
    return 1 if config.threads is None else max(1, config.threads // config.tensor_parallel_size)


def _steps(runner: ModelRunner | EncoderRunner, compute: WorkerThread, *, overlap_steps: bool) -> StepRunner:
    if overlap_steps and runner.launches:
        return LaunchedSteps(runner, compute)
    return ThreadedExecutor(runner, compute, takes_cpu=runner.takes_every_cpu and not overlap_steps)


def _image_encoder(runner: Runner, compute: WorkerThread) -> ImageEncoder | None:
    vision = getattr(runner, "vision", None)
    return None if vision is None else ThreadedImageEncoder(vision.begin, compute)


def _make_compiler(
    checkpoint: Checkpoint | EncoderDirectory, tokenizer: Tokenizer, end_token_ids: tuple[int, ...]
) -> GrammarCompiler:
    compiler = GrammarCompiler(tokenizer, vocab_size=checkpoint.config.vocab_size, end_token_ids=end_token_ids)
    reason = None if isinstance(checkpoint, EncoderDirectory) else compiler.load()
    if reason is not None:
        logger.warning("structured output is not available: %s", reason)
    return compiler


def _make_tokenizer(checkpoint: Checkpoint | EncoderDirectory) -> Tokenizer:
    if checkpoint.gguf_metadata is not None:
        return Tokenizer.from_gguf(checkpoint.gguf_metadata)
    assert checkpoint.tokenizer_directory is not None
    return Tokenizer.from_directory(checkpoint.tokenizer_directory)


def _core_settings(
    config: EngineOptions,
    transfers: ConnectorSettings | None,
    drafts: DraftSettings | None,
    runner: Runner,
    checkpoint: Checkpoint | EncoderDirectory,
    draft: DraftSource | None,
) -> CoreSettings:
    context_tokens_max = checkpoint.config.context_tokens_max
    pool_tokens = runner.block_count * runner.block_size
    window_tokens = None
    if draft is None:  # a draft model may attend to more tokens
        window_tokens = _window_tokens(checkpoint)
    if config.max_model_len is not None:
        if config.max_model_len > context_tokens_max:
            raise StartupError(
                f"--max-model-len is {config.max_model_len}, but the model supports only {context_tokens_max} tokens"
            )
        context_tokens_max = config.max_model_len
    elif isinstance(checkpoint, EncoderDirectory):
        context_tokens_max = checkpoint.config.context_tokens_default
    elif window_tokens is None or window_tokens + config.max_num_batched_tokens > pool_tokens - 2 * runner.block_size:
        # Without the option, use what fits. A model with a long context must still start on a small machine.
        if pool_tokens < context_tokens_max:
            logger.info(
                "the context is %d tokens, as many as the KV cache holds; the model supports %d: "
                "raise --kv-cache-memory for more",
                pool_tokens,
                context_tokens_max,
            )
        context_tokens_max = min(context_tokens_max, pool_tokens)
    keeps_kv = not isinstance(checkpoint, EncoderDirectory)
    if 0 < runner.state_slot_count < config.max_num_seqs:
        logger.warning(
            "the cache's memory (--kv-cache-memory) holds the states of few sequences sequences_max=%d",
            runner.state_slot_count,
        )
    return CoreSettings(
        block_count=runner.block_count,
        block_size=runner.block_size,
        context_tokens_max=context_tokens_max,
        max_num_seqs=config.max_num_seqs,
        # An encoder computes whole prompts, so a step must have space for the longest one.
        step_tokens_max=max(config.max_num_batched_tokens, 0 if keeps_kv else context_tokens_max),
        wide_prompt_stretch=config.wide_prompt_stretch,
        enable_prefix_caching=config.enable_prefix_caching and keeps_kv,
        overlap_steps=config.overlap_steps,
        steps_apart=config.overlap_steps and config.pipeline_parallel_size > 1,
        draft_tokens_max=drafts.token_count if drafts is not None and keeps_kv else 0,
        draft_source="text" if draft is None else draft.kind,
        draft_context_tokens_max=None if draft is None else draft.context_tokens_max,
        keeps_kv=keeps_kv,
        window_tokens=window_tokens,
        state_slot_count=runner.state_slot_count,
        snapshot_slot_count=runner.snapshot_slot_count if config.enable_prefix_caching else 0,
        hold_seconds_max=config.kv_hold_timeout,
        remote_kv_seconds_max=config.kv_load_timeout,
        held_share_max=config.kv_held_share,
        load_failure_policy="recompute" if transfers is None else transfers.load_failure_policy,
    )


def _window_tokens(checkpoint: Checkpoint | EncoderDirectory) -> int | None:
    """Return the largest sliding window, or None if a layer has no window."""
    window_max = None if isinstance(checkpoint, EncoderDirectory) else checkpoint.config.window_max
    return None if window_max is None else max(window_max, 2)


def default_served_name(model: str) -> str:
    """Return the name of a model that has no configured name.

    Args:
        model: the option --model.
    """
    return Path(model).name.removesuffix(".gguf") or model
