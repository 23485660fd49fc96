"""Builds an engine from its parts. Only this module and the other assemble modules import from every package."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import trio

from trioserve.admission.file_decoders import AudioDecoder, ImageDecoder
from trioserve.admission.text_threads import TextThreads
from trioserve.assemble_compute import LocalModel, cache_release_of, copies_of, core_settings, window_tokens_of
from trioserve.assemble_model import LoadProgress, LoadReport, LoggedProgress, ModelFiles, default_served_name
from trioserve.assemble_ranks import RankedModel
from trioserve.asyncio.engine import Engine as AsyncioEngine
from trioserve.asyncio.engine import for_asyncio
from trioserve.connectors.settings import ConnectorSettings, connector_settings, find_connector
from trioserve.contracts.errors import InvalidRequest, StartupError
from trioserve.contracts.kv_transfer import ConnectorSetup, RunningConnector
from trioserve.contracts.media import SoundProcessing
from trioserve.core.engine import EngineCore
from trioserve.core.settings import CoreSettings
from trioserve.engine.adapters import Adapters
from trioserve.engine.engine import Engine, ModelDescription
from trioserve.engine.kv_cache import EVENTS_MAX
from trioserve.engine.lifecycle.supervisor import supervise
from trioserve.engine.model_description import PoolingModel
from trioserve.engine.structured_output import MaskThread, show_masks
from trioserve.engine.text_work import EngineParts
from trioserve.metrics.registry import Metrics
from trioserve.model.diffusion.directory import is_image_model
from trioserve.model.loading.checkpoint import Checkpoint
from trioserve.model.loading.encoder_directory import EncoderDirectory
from trioserve.model.settings import lora_modules
from trioserve.model.trainer_groups import TrainerGroups
from trioserve.options.engine import EngineOptions
from trioserve.options.option import about, checked_parameters, parameters_of
from trioserve.text.guide_factory import GuideFactory
from trioserve.text.response_parsers.registry import ResponseFamilies, named_families
from trioserve.trio_tools.errors_unwrapped import errors_unwrapped
from trioserve.trio_tools.interrupts import uninterrupted, uninterrupted_context
from trioserve.trio_tools.media_fetcher import MediaFetcher
from trioserve.trio_tools.own_run import check_is_in_trio, opened_once
from trioserve.trio_tools.worker_thread import WorkerThread

if TYPE_CHECKING:
    from trioserve.assemble_compute import Runner

__all__ = [
    "EngineParameters",
    "Loaded",
    "open_asyncio_engine",
    "open_configured_engine",
    "open_engine",
]

logger = logging.getLogger(__name__)


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """Result of loading that is shown to users: where the model runs, and the size of its KV cache."""

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

    Inside of the scope, `engine.generate(...)` creates a request. The exit of the scope ends every request and waits
    for the running step. No task and no thread remains. No signal handler is installed. A fault of the engine cancels
    the body, and the scope raises EngineFault, unless `engine_restarts` allows to reopen the engine. The parameters are
    the options of `trioserve serve` that concern an engine. `speculative_config`, `override_generation_config`,
    `limit_mm_per_prompt` and `kv_transfer_config` can be dicts instead of JSON.

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
        on_progress: receives the progress of loading. None logs each activity.
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
    except InvalidRequest as error:  # The check is made here, so that the error appears before the model is loaded.
        raise StartupError(str(error)) from None
    transfers = connector_settings(config.kv_transfer_config, config.role)
    if transfers is not None:
        find_connector(transfers.connector)
    modules = lora_modules(config.lora_modules)
    with errors_unwrapped():
        async with TextThreads() as text:
            opening = _Opening(config, transfers, text, on_progress or LoggedProgress(None), on_loaded)
            with closing(opening.trainer_groups), closing(opening.image_decoder), closing(opening.audio_decoder):
                async with trio.open_nursery() as nursery:
                    engine = await nursery.start(supervise, opening.open_parts, opening.make_engine)
                    nursery.start_soon(engine.keep_deadlines)
                    for module in modules:
                        await engine.load_adapter(module.name, module.path)
                    yield engine
                    nursery.cancel_scope.cancel()


@uninterrupted
class _Opening:
    """Opens the parts of one engine, at the start and again after each fault.

    Each opening reads the model and allocates its memory. The threads for text, the metrics and the tokenizer are
    created only once.
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
        self._transfers = transfers
        self._text = text
        self._on_progress = on_progress
        self._on_loaded = on_loaded
        self._files = ModelFiles(config, text, self._report)
        self._arithmetic = ""
        self._is_batch_invariant = False
        self._fingerprint: str | None = None
        self._executor: str | None = None
        self._served_names = config.served_model_name or (default_served_name(config.model),)
        self._metrics = Metrics(self._served_names[0])
        self._engine: Engine | None = None
        self._adapters = Adapters(
            self._files.read_adapter if config.accepts_adapters else None,
            adapters_max=max(config.max_loras, config.max_cpu_loras or 0, len(config.lora_modules)),
            reserved_names=self._served_names,
        )
        self.trainer_groups = TrainerGroups()
        self.image_decoder = ImageDecoder(config.image_limits(), self._metrics)
        self.audio_decoder = AudioDecoder(config.audio_limits(), self._metrics)

    def _report(self, progress: LoadProgress) -> None:
        if self._engine is None:  # When an engine is reopened, another log line reports this.
            self._on_progress(progress)

    def _model(self, compute: WorkerThread) -> LocalModel | RankedModel:
        """Return the object that loads the model, either into the compute thread or into ranks."""
        config, groups = self._config, self.trainer_groups
        if config.rank_count == 1:
            return LocalModel(config, self._files, compute, groups, self._report)
        return RankedModel(
            config,
            self._files,
            compute,
            groups,
            self._report,
            metrics=self._metrics,
            shows_kv=self._transfers is not None,
        )

    @asynccontextmanager
    async def open_parts(self) -> AsyncIterator[EngineParts]:
        """Open the parts, and close them at the end of the scope. Raises ModelLoadError and StartupError."""
        config, started_at = self._config, time.perf_counter()
        async with WorkerThread("compute") as compute, AsyncExitStack() as scopes:
            checkpoint, draft = await self._files.open()
            model = self._model(compute)
            async with model.loaded(checkpoint, draft) as computing:
                runner = computing.runner
                masks = scopes.enter_context(MaskThread(checkpoint.config.vocab_size))
                settings = core_settings(config, self._transfers, self._files.drafts, runner, checkpoint, draft)

                def new_parts() -> EngineParts:
                    connector = self._connector(
                        checkpoint, runner, compute, None if draft else window_tokens_of(checkpoint)
                    )
                    return EngineParts(
                        EngineCore(settings, connector=connector, mask_maker=masks),
                        computing.steps,
                        connector,
                        readers_first=runner.device == "cpu",
                        when_idle=computing.claim_memory,
                        image_encoder=computing.image_encoder,
                        guard=computing.guard,
                        cache_release=cache_release_of(runner, compute, new_parts),
                        weights=computing.weights,
                        row_encoder=computing.row_encoder,
                    )

                if self._engine is None:
                    logger.info(
                        "limits of a step max_num_seqs=%d max_num_batched_tokens=%d overlap_steps=%s kernels=%s",
                        settings.max_num_seqs,
                        settings.step_tokens_max,
                        "on" if settings.overlap_steps else "off",
                        runner.computed_by,
                    )
                self._note_model(runner)
                self._report_loaded(runner, settings, checkpoint, time.perf_counter() - started_at)
                self._show(runner, finds_prefixes=settings.enable_prefix_caching)
                scopes.callback(show_masks(self._metrics, masks))
                await self._adapters.attach(computing.adapters)
                scopes.callback(self._adapters.detach)
                yield new_parts()  # A local variable would keep the parts in memory, so the code uses none.

    def make_engine(self, parts: EngineParts) -> Engine:
        """Create the engine from its first parts.

        Args:
            parts: result of the first `open_parts`.
        """
        core, *_ = parts
        config, files, settings = self._config, self._files, core.settings
        checkpoint, defaults, compiler = files.checkpoint, files.defaults, files.compiler
        assert checkpoint is not None, "no parts were opened"
        assert defaults is not None, "no parts were opened"
        assert compiler is not None, "no parts were opened"
        media = files.media_processing(checkpoint, parts.image_encoder, compiler.tokenizer)
        self._engine = Engine(
            model=ModelDescription(
                served_names=self._served_names,
                source=config.model,
                context_tokens_max=settings.context_tokens_max,
                vocab_size=checkpoint.config.vocab_size,
                eos_token_ids=defaults.eos_token_ids,
                created_at=int(time.time()),
                pooled=_pooling_model(checkpoint, settings),
                arithmetic=self._arithmetic,
                batch_invariant=self._is_batch_invariant,
                fingerprint=self._fingerprint,
                executor=self._executor,
                family=checkpoint.config.family,
                weight_bytes=checkpoint.weight_bytes,
                images=None if isinstance(media, SoundProcessing) else media,
                sounds=media if isinstance(media, SoundProcessing) else None,
                encoder=None
                if isinstance(checkpoint, EncoderDirectory) or checkpoint.encoder is None
                else checkpoint.encoder.processing,
            ),
            core=core,
            steps=parts.steps,
            tokenizer=compiler.tokenizer,
            text_threads=self._text,
            metrics=self._metrics,
            settings=msgspec.structs.replace(
                config.engine_settings(),
                kv_events_max=EVENTS_MAX if config.kv_events else 0,
                step_seconds_max=config.step_timeout,
                restarts_max=config.engine_restarts,
                seed=config.seed,
                session_idle_seconds=config.session_idle_seconds,
            ),
            default_sampling=defaults.sampling,
            connector=parts.connector,
            role=None if self._transfers is None else self._transfers.shown_role,
            families=ResponseFamilies(
                compiler.tokenizer,
                tool_call_parser=config.tool_call_parser,
                tool_call_leniency=config.tool_call_leniency,
                reasoning_parser=config.reasoning_parser,
            ),
            readers_first=parts.readers_first,
            when_idle=parts.when_idle,
            guides=GuideFactory(compiler),
            image_encoder=parts.image_encoder,
            row_encoder=parts.row_encoder,
            image_decoder=self.image_decoder,
            audio_decoder=self.audio_decoder,
            media=MediaFetcher(config.allowed_media_domains, self.image_decoder.limits.image_bytes_max)
            if config.allowed_media_domains
            else None,
            adapters=self._adapters,
            guard=parts.guard,
            cache_release=parts.cache_release,
            weights=parts.weights,
        )
        return self._engine

    def _note_model(self, runner: Runner) -> None:
        """Record the properties of the loaded model. Raises StartupError if the model's files have changed since the
        first opening.
        """
        # If the engine reads no KV from other engines, it is batch-invariant whenever its kernels are batch-invariant,
        # even if the option is off.
        is_invariant = self._config.batch_invariant or (runner.is_batch_invariant and self._transfers is None)
        found = self._files.fingerprint(runner.arithmetic, runner.dtype, is_batch_invariant=is_invariant)
        if self._engine is not None and found != self._fingerprint:
            raise StartupError(
                f"{self._files.path} has changed since the engine was opened, and streams cannot be resumed with "
                "another model: restart the server"
            )
        self._fingerprint, self._files.adapter_dtype = found, runner.dtype
        self._executor = f"{runner.dtype} on {runner.device} by {runner.computed_by}"
        self._arithmetic, self._is_batch_invariant = runner.arithmetic, is_invariant

    def _connector(
        self,
        checkpoint: Checkpoint | EncoderDirectory,
        runner: Runner,
        compute: WorkerThread,
        window_tokens: int | None,
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
        if checkpoint.config.common_kv_entry is None:
            raise StartupError(
                "the size of a token's KV differs from layer to layer, and connectors transfer only layers of one "
                "size: leave out --kv-transfer-config"
            )
        pages = runner.kv_pages(self._files.weights_name)
        connector = make_connector(
            ConnectorSetup(
                engine_id=secrets.token_hex(16),
                role=transfers.role,
                pages=pages,
                copies=copies_of(pages, compute),
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
        assert self._files.path is not None
        self._on_loaded(
            Loaded(
                model_path=self._files.path,
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


def _pooling_model(checkpoint: Checkpoint | EncoderDirectory, settings: CoreSettings) -> PoolingModel | None:
    if not isinstance(checkpoint, EncoderDirectory) and checkpoint.encoder is not None:
        return None
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
        label_count=encoder.label_count,
        whole_tokens_max=whole_tokens_max,
    )
