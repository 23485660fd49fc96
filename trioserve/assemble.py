"""The only place that knows every room: builds the parts and hands them to each other."""

from __future__ import annotations

import functools
import inspect
import logging
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, ParamSpec, TypeVar

import msgspec
import trio

from trioserve.admission.image_decoder import ImageDecoder
from trioserve.admission.text_threads import TextThreads
from trioserve.asyncio.engine import Engine as AsyncioEngine
from trioserve.asyncio.threaded_engine import EngineT, opened_in_a_thread
from trioserve.asyncio.trio_thread import TrioThread
from trioserve.commands.prompt_naming import load_tokenizer
from trioserve.config import Config, drafts_of, engine_settings, image_limits, make_config
from trioserve.connectors.registry import find_connector
from trioserve.connectors.settings import ConnectorSettings, connector_settings
from trioserve.contracts.adapter import AdapterId
from trioserve.contracts.errors import InvalidRequest, ModelLoadError, StartupError
from trioserve.contracts.images import ImageEncoder, ImageLimits, ImageProcessing
from trioserve.contracts.kv_transfer import ConnectorSetup, RunningConnector
from trioserve.contracts.weights import BroadcastWeights, SharedWeights, WeightSource
from trioserve.core.engine import EngineCore
from trioserve.core.settings import CoreSettings
from trioserve.engine.adapters import AdapterPlace, Adapters
from trioserve.engine.engine import Engine, ModelDescription
from trioserve.engine.engine_parts import CacheRelease, EngineParts, Guard
from trioserve.engine.guide_preparation import show_masks
from trioserve.engine.kv_events import EVENTS_MAX
from trioserve.engine.mask_thread import MaskThread
from trioserve.engine.model_description import PooledModel
from trioserve.engine.rank_metrics import show_ranks
from trioserve.engine.shell.engine_loop import StepRunner, ThreadedExecutor, WhenIdle
from trioserve.engine.shell.launched_steps import LaunchedSteps
from trioserve.engine.shell.supervisor import supervise
from trioserve.engine.threaded_image_encoder import ThreadedImageEncoder
from trioserve.engine.threaded_weights import SentWeights, ThreadedWeights, WrittenWeights
from trioserve.engine.weight_updates import WeightPlace
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
from trioserve.proxy.discovery.ray import check_ray_is_installed
from trioserve.ranks.door import wait_for_ranks
from trioserve.ranks.group import open_ranks
from trioserve.ranks.host import free_port, host_ranks
from trioserve.ranks.messages import DraftSetup, Progress, RankSetup
from trioserve.ranks.placed import PlacedRanks, RanksWanted, placed_ranks
from trioserve.ranks.ranked_runner import RankedRunner
from trioserve.ranks.ranked_weights import RankedWeights
from trioserve.text.chat_template_file import chat_template_text
from trioserve.text.grammar_compiler import GrammarCompiler
from trioserve.text.guide_factory import GuideFactory
from trioserve.text.response_families import ResponseFamilies
from trioserve.text.response_parsers.registry import named_families
from trioserve.text.tokenizer import Tokenizer
from trioserve.trio_tools.daemon_thread import call_abandonable
from trioserve.trio_tools.errors_unwrapped import errors_unwrapped
from trioserve.trio_tools.interrupts import uninterrupted, uninterrupted_context
from trioserve.trio_tools.long_job import LongJob
from trioserve.trio_tools.media_fetcher import MediaFetcher
from trioserve.trio_tools.own_run import check_is_in_trio, opened_once
from trioserve.trio_tools.worker_thread import WorkerThread
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
    """what: is being done, for people. done: bytes, of `total`; where that is None, seconds, and nobody knows how many
    more it takes."""

    what: str
    done: float
    total: int | None = None


LoadReport = Callable[[LoadProgress], None]
"""Called from the thread that loads, compiles or fetches, and for the first time before it begins to."""


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """What came of loading, for whoever shows it: where it runs, and how much KV cache it has."""

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


@opened_once
async def open_engine(
    model: str = "smollm2",
    *,
    served_model_name: tuple[str, ...] = (),
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto",
    device: Literal["auto", "cpu", "cuda"] = "auto",
    threads: int | None = None,
    cpu_kernels: Literal["auto", "native", "torch"] = "auto",
    gpu_kernels: Literal["torch", "triton"] = "torch",
    quantization: Literal["auto", "none", "file", "int8", "int4"] = "auto",
    kv_cache_dtype: Literal["auto", "int8", "fp8"] = "auto",
    max_model_len: int | None = None,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 512,
    wide_prompt_stretch: float = 1.5,
    block_size: int = 16,
    kv_cache_memory: float | None = None,
    gpu_memory_utilization: float = 0.9,
    enforce_eager: bool = False,
    batch_invariant: bool = False,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    enable_expert_parallel: bool = False,
    distributed_executor_backend: Literal["mp", "ray"] = "mp",
    ray_address: str | None = None,
    nnodes: int = 1,
    master_addr: str = "127.0.0.1",
    master_port: int = 29500,
    ranks_key: str | None = None,
    enable_prefix_caching: bool = True,
    overlap_steps: bool = False,
    speculative_ngram: int = 0,
    speculative_model: str | None = None,
    speculative_tokens: int = 4,
    speculative_quantization: Literal["auto", "none", "file", "int8", "int4"] = "auto",
    speculative_config: str | dict[str, Any] | None = None,
    step_timeout: float | None = None,
    engine_restarts: int = 3,
    tool_call_parser: str = "auto",
    tool_call_leniency: Literal["strict", "lenient"] = "strict",
    reasoning_parser: str = "auto",
    generation_config: str = "auto",
    override_generation_config: str | dict[str, Any] | None = None,
    limit_mm_per_prompt: str | dict[str, int] | None = None,
    image_decode_timeout: float = ImageLimits().decode_seconds_max,
    allowed_media_domains: tuple[str, ...] = (),
    tokenizer: str | None = None,
    revision: str | None = None,
    chat_template: str | None = None,
    control_tokens_in_text: Literal["keep-as-text", "parse"] = "keep-as-text",
    seed: int | None = None,
    enable_lora: bool = False,
    lora_modules: tuple[str, ...] = (),
    max_loras: int = 64,
    max_cpu_loras: int | None = None,
    max_lora_rank: int = 256,
    kv_events: bool = False,
    kv_transfer_config: str | dict[str, Any] | None = None,
    role: Literal["prefill", "decode", "both"] = "both",
    kv_hold_timeout: float = 10.0,
    kv_load_timeout: float = 10.0,
    kv_held_share: float = 0.5,
    max_queued_requests: int = 256,
    max_queued_tokens: int = 1_000_000,
    max_queue_wait: float = 300.0,
    queue_timeout: float | None = None,
    ttft_timeout: float | None = None,
    request_timeout: float | None = None,
    max_queue_timeout: float | None = None,
    max_ttft_timeout: float | None = None,
    max_request_timeout: float | None = None,
) -> AsyncIterator[Engine]:
    """An engine in the scope of this `async with`, in the caller's own Trio program.

    Inside, `engine.generate(...)` gives a request. Leaving ends every request, waits for the step in flight, and leaves
    no task and no thread behind. No signal handler is installed. A fault of the engine cancels the body and rises here
    as EngineFault, unless engine_restarts let it be opened anew. The parameters are those options of `trioserve serve`
    that concern an engine.

    Args:
        model: what to serve: "smollm2", a directory with safetensors, a .gguf file, or a hub name.
        served_model_name: its names. Default: the last part of model.
        dtype: type of weights and KV cache; "auto" takes the checkpoint's.
        device: where to compute; "auto" takes a GPU if there is one.
        threads: CPU threads of a forward pass. Default: one per core.
        cpu_kernels: what computes on a CPU; "auto" takes native kernels if they can be had.
        gpu_kernels: what computes on a GPU.
        quantization: how native kernels keep weights; "auto" keeps a quantized file's bits, else dtype.
        kv_cache_dtype: of keys and values; "auto" takes dtype.
        max_model_len: tokens of prompt and response together. Default: what the model takes and the KV cache holds.
        max_num_seqs: sequences that are computed at a time.
        max_num_batched_tokens: tokens computed in one step; longer prompts are computed in chunks.
        wide_prompt_stretch: how much longer a step may take, as a factor above 1, for prompts that need several, while
            others get tokens in it.
        block_size: tokens in one KV block.
        kv_cache_memory: KV cache in GiB. Default: on a CPU at most 4, on a GPU what is left.
        gpu_memory_utilization: share of the GPU's memory for weights and KV cache, above 0 and up to 1.
        enforce_eager: compute without CUDA graphs.
        batch_invariant: compute so that the bits of a response depend on its own tokens and the weights alone.
        tensor_parallel_size: processes that compute the model together, each with a part of every layer.
        pipeline_parallel_size: stages that compute one after the other, each with some of the layers, and in as many
            processes.
        enable_expert_parallel: each of them has whole experts of a mixture, and not a part of each.
        distributed_executor_backend: where they are: "mp" has them on this machine, "ray" on the nodes of a Ray cluster
            that have room.
        ray_address: the cluster, such as 10.0.0.7:6379. Default: what RAY_ADDRESS says, or this machine's.
        nnodes: machines that these are on, as many on each; on the others `serve --headless` keeps them.
        master_addr, master_port: where they come to this one; torch.distributed takes the next port, too.
        ranks_key: what they have to know.
        enable_prefix_caching: prompts with the same beginning share its KV blocks.
        overlap_steps: plan the next step while one is computed; not with drafts. With several stages, compute two at a
            time, of different requests.
        speculative_ngram: draft tokens of a request in a step, taken from its own text; 0 is off.
        speculative_model: a small model of the same vocabulary that drafts tokens, which a step verifies; "mtp" is the
            model's own further layer; None is off.
        speculative_tokens: that it may draft for a request in a step; fewer, or none, where more do not pay.
        speculative_quantization: how its weights are kept, as quantization.
        speculative_config: the same as vLLM takes it, as a dict or as JSON.
        step_timeout: seconds that one step may take; a longer one refuses new requests until it ends; 0 is no limit.
            Default: 60, or ten times the longest step so far if that is more.
        engine_restarts: how often within ten minutes the engine is opened anew, in the same scope, when it breaks: its
            streams pause and go on. 0: the first fault rises.
        tool_call_parser, reasoning_parser: how the model writes calls of tools and thoughts, the names of families;
            "auto" takes what its chat template shows, "none" leaves them in the text.
        tool_call_leniency: "strict" takes calls in the model's own format. "lenient" also takes bare or fenced JSON, if
            the response has nothing else.
        generation_config: what a request's sampling is where nothing is said of it, engine.default_sampling: "auto" is
            what the model's makers recommend, "vllm" the neutral temperature 1, else a directory with a
            generation_config.json. Its max_new_tokens is also the most that any request gets.
        tokenizer: whose tokenizer and chat template it has, named like a model. Default: its own.
        revision: branch, tag or commit of a model of the hub.
        chat_template: a file with the chat template, or the template itself, instead of the model's.
        control_tokens_in_text: what becomes of control tokens that the texts of a chat spell out: "keep-as-text" keeps
            them ordinary text, "parse" makes them control tokens.
        seed: from which the seeds of requests come that name none. Default: random.
        limit_mm_per_prompt: images that one prompt may have, as a dict or as JSON, such as {"image": 4}. Default: 8.
        image_decode_timeout: seconds that decoding one image may take. A longer one fails its request.
        allowed_media_domains: hosts from which images are fetched, with all below them. Default: nothing is fetched.
        enable_lora: take LoRA adapters: engine.load_adapter, and `adapter` of a request.
        lora_modules: adapters to load at the start, each "name=path"; a path is a directory that peft has saved.
        max_loras, max_cpu_loras: adapters that may be loaded; the larger one counts.
        max_lora_rank: rank that an adapter may have.
        override_generation_config: fields of it to set, as a dict or as JSON, such as {"temperature": 0.5}.
        kv_events: keep a record of what the prefix cache holds, for a router.
        kv_transfer_config: how KV blocks travel to and from other engines, as a dict or as JSON; None: not at all.
        role: what a router should use this engine for.
        kv_hold_timeout: seconds that blocks are held for another engine without a sign of life from it.
        kv_load_timeout: seconds that a request waits for KV from another engine.
        kv_held_share: share of the KV cache that may be held for other engines, above 0 and up to 1.
        max_queued_requests: sequences that may wait; for more, entering a request raises Overloaded.
        max_queued_tokens: tokens of prompt that may wait.
        max_queue_wait: seconds that any request may wait in the queue.
        queue_timeout, ttft_timeout, request_timeout: deadlines in seconds of requests that have none of their own: to
            begin to run, to have a first token, to be complete. None: no deadline.
        max_queue_timeout, max_ttft_timeout, max_request_timeout: the most seconds that a request's own may be.

    Raises:
        ModelLoadError: the model cannot be loaded.
        StartupError: a parameter has a wrong type or is out of range; the message names it and what it takes.
        EngineFault: a step or the connector failed, at any time, and it is not opened anew (any more).
    """
    options = locals()  # the parameters, and nothing else yet: each is an option of the same name
    check_is_in_trio("trioserve.open_engine")
    async with open_configured_engine(make_config(**options)) as engine:
        yield engine


def for_asyncio(
    opens: Callable[P, AbstractAsyncContextManager[EngineT]], new: Callable[[TrioThread, EngineT], AsyncioT]
) -> Callable[P, AbstractAsyncContextManager[AsyncioT]]:
    """The same for asyncio programs, in a thread of its own. new: what they get."""

    @functools.wraps(opens)
    def open_for_asyncio(*args: P.args, **kwargs: P.kwargs) -> AbstractAsyncContextManager[AsyncioT]:
        inspect.signature(opens).bind(*args, **kwargs)  # a TypeError rises here, and not in a thread
        return opened_in_a_thread(functools.partial(opens, *args, **kwargs), new)

    open_for_asyncio.__doc__ = f"""An engine for an asyncio program: what is said here of one for Trio goes for it, too.

    It runs in a thread of its own, and gives a trioserve.asyncio.{getattr(new, "__name__", "Engine")}.

    {opens.__doc__}"""
    return open_for_asyncio


open_asyncio_engine = for_asyncio(open_engine, AsyncioEngine)
"""trioserve.asyncio.open_engine."""


@uninterrupted_context
async def open_configured_engine(
    config: Config,
    *,
    on_progress: LoadReport | None = None,
    on_loaded: Callable[[Loaded], None] = lambda loaded: None,
) -> AsyncIterator[Engine]:
    """The same from a Config, with a look at the loading. on_progress: None tells what takes long in the log."""
    if is_image_model(config.model):
        raise StartupError(
            f"{config.model} makes pictures, and texts are asked for: start `trioserve serve` with it, or open it with "
            "trioserve.open_image_engine"
        )
    try:
        named_families(config.tool_call_parser, config.reasoning_parser, None)
    except InvalidRequest as error:  # now, and not when the model has been loaded
        raise StartupError(str(error)) from None
    transfers = connector_settings(config.kv_transfer_config, config.role)
    if transfers is not None:
        find_connector(transfers.connector)
    modules = lora_modules(config.lora_modules)
    with errors_unwrapped():
        async with TextThreads() as text:
            opening = _Opening(config, transfers, text, on_progress, on_loaded)
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
    """How an engine is opened, and opened anew: the model is read and its memory taken each time. What texts need and
    the metrics are made once, since they do not break with it."""

    def __init__(
        self,
        config: Config,
        transfers: ConnectorSettings | None,
        text: TextThreads,
        on_progress: LoadReport | None,
        on_loaded: Callable[[Loaded], None],
    ) -> None:
        self._config = config
        self._chat_template: str | None = None
        self._transfers = transfers
        self._text = text
        self._on_progress = on_progress
        self._on_loaded = on_loaded
        self._path: Path | None = None
        self._drafts = drafts_of(config)
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
        self.image_decoder = ImageDecoder(image_limits(config), self._metrics)

    @asynccontextmanager
    async def open_parts(self) -> AsyncIterator[EngineParts]:
        """Raises ModelLoadError and StartupError."""
        config, text, started_at = self._config, self._text, time.perf_counter()
        async with WorkerThread("compute") as compute, AsyncExitStack() as scopes:
            if config.chat_template is not None:  # first of all, since it may be long until it is used
                self._chat_template = await text.run_cancellable(chat_template_text, config.chat_template)
            if self._path is None:
                # It may be a download, which nothing can end from outside: not in a thread that leaving waits for.
                resolve = functools.partial(
                    resolve_model, revision=config.revision, progress=self._fetching(config.model)
                )
                self._path = await call_abandonable(resolve, config.model, thread_name=DOWNLOAD_THREAD)
                if config.tokenizer is not None:
                    resolve = functools.partial(
                        resolve_model, with_weights=False, progress=self._fetching(config.tokenizer)
                    )
                    self._tokenizer_path = await call_abandonable(
                        resolve, config.tokenizer, thread_name=DOWNLOAD_THREAD
                    )
                if self._drafts is not None and self._drafts.model is not None:
                    resolve = functools.partial(
                        resolve_model, revision=self._drafts.revision, progress=self._fetching(self._drafts.model)
                    )
                    self._draft_path = await call_abandonable(resolve, self._drafts.model, thread_name=DOWNLOAD_THREAD)
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
                        cache_release=_cache_release(runner, compute, new_parts),
                        weights=computing.weights,
                    )

                self._note_model(checkpoint, runner)
                self._tell_loaded(runner, settings, checkpoint, time.perf_counter() - started_at)
                self._show(runner, finds_prefixes=settings.enable_prefix_caching)
                scopes.callback(show_masks(self._metrics, masks))
                await self._adapters.attach(computing.adapters)
                scopes.callback(self._adapters.detach)
                yield new_parts()  # and no name for them here, since what has one is not given back

    def make_engine(self, parts: EngineParts) -> Engine:
        """To be called when they have been opened first."""
        core, steps, connector, readers_first, when_idle, image_encoder, guard, cache_release, weights = parts
        config, checkpoint, compiler, settings = self._config, self._checkpoint, self._compiler, core.settings
        assert checkpoint is not None, "nothing was opened"
        assert self._defaults is not None, "nothing was opened"
        assert compiler is not None, "nothing was opened"
        self._engine = Engine(
            model=ModelDescription(
                served_names=self._served_names,
                source=config.model,
                context_tokens_max=settings.context_tokens_max,
                vocab_size=checkpoint.config.vocab_size,
                eos_token_ids=self._defaults.eos_token_ids,
                created_at=int(time.time()),
                pooled=_pooled_model(checkpoint, settings),
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
                engine_settings(config),
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
        # Files that hang cannot be ended from outside: not in a thread that leaving waits for.
        return await call_abandonable(self._adapter_from, path, is_checked, thread_name=ADAPTER_THREAD)

    def _adapter_from(self, path: str, is_checked: bool) -> AdapterWeights:
        checkpoint, config = self._checkpoint, self._config
        assert checkpoint is not None, "adapters are loaded when the engine is open"
        if isinstance(checkpoint, EncoderDirectory):
            raise ModelLoadError("an encoder takes no LoRA adapters: leave out --enable-lora")
        directory = Path(path)
        if is_checked:
            directory = allowed_directory(directory, [Path(allowed) for allowed in config.allowed_lora_path])
        return read_adapter(directory, checkpoint.config, dtype=self._adapter_dtype, rank_max=config.max_lora_rank)

    def _images(
        self, checkpoint: Checkpoint | EncoderDirectory, encoder: ImageEncoder | None, tokenizer: Tokenizer
    ) -> ImageProcessing | None:
        """How the model wants images; None: it is served without."""
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

    def _fetching(self, name: str) -> Callable[[int, int], None] | None:
        on_progress = self._on_progress
        if on_progress is None:
            return None
        return lambda done, total: on_progress(LoadProgress(f"fetching {name}", done, total))

    def _read_defaults(self, checkpoint: Checkpoint | EncoderDirectory) -> GenerationDefaults:
        return generation_defaults(checkpoint, self._generation, recommended=recommended_sampling(self._config.model))

    def _make_tokenizer(self, checkpoint: Checkpoint | EncoderDirectory) -> Tokenizer:
        config, path = self._config, self._tokenizer_path
        tokenizer = _make_tokenizer(checkpoint) if path is None else load_tokenizer(path)
        if tokenizer.vocab_size > checkpoint.config.vocab_size and path is not None:
            raise StartupError(
                f"--tokenizer {config.tokenizer} has {tokenizer.vocab_size} tokens, but the model has "
                f"{checkpoint.config.vocab_size}: name the tokenizer that it was made with"
            )
        if self._chat_template is not None:
            tokenizer.use_chat_template(self._chat_template)
        if config.control_tokens_in_text == "parse":
            tokenizer.parse_control_tokens_in_chats()
        return tokenizer

    def _open_draft(self, checkpoint: Checkpoint | EncoderDirectory) -> DraftSource | None:
        """Raises StartupError if nothing can be drafted for this model."""
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
            _model_settings(self._config), quantization=drafts.quantization, context_tokens_max=None
        )

    @asynccontextmanager
    async def _computing(
        self, checkpoint: Checkpoint | EncoderDirectory, draft: DraftSource | None, compute: WorkerThread
    ) -> AsyncIterator[_Computing]:
        """The model, loaded: in the compute thread, or in ranks. Leaving lets it go."""
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
                _AdapterPlace(runner, compute),
                lambda: compute.run(runner.claim_memory),
                _weight_place(runner, compute, self.trainer_groups, self._config.max_model_len),
                _image_encoder(runner, compute),
            )
        finally:
            for made in runners:
                await compute.run(made.close)  # ends also when cancelled

    @asynccontextmanager
    async def _in_ranks(
        self, checkpoint: Checkpoint | EncoderDirectory, compute: WorkerThread
    ) -> AsyncIterator[_Computing]:
        """compute: for what makes rows of images, which is here."""
        config = self._config
        if isinstance(checkpoint, EncoderDirectory):
            name = "--tensor-parallel-size" if config.tensor_parallel_size > 1 else "--pipeline-parallel-size"
            raise StartupError(f"{name} is given, but an encoder is computed by one process: leave it out")
        stages = stage_configs(checkpoint, config.pipeline_parallel_size)
        for stage in stages:  # said before any starts
            share_of(stage, 0, config.tensor_parallel_size, expert_parallel=config.enable_expert_parallel)
        async with self._placed() as placed, self._grouped(checkpoint, stages, compute, placed) as computing:
            yield computing

    @asynccontextmanager
    async def _placed(self) -> AsyncIterator[PlacedRanks | None]:
        """The ranks, where Ray places them; None: they are here, and on machines that are named."""
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

        def tell(progress: Progress) -> None:
            weights_come.set()
            if self._engine is None and self._on_progress is not None:
                what = progress.what or f"loading {config.model}"
                self._on_progress(LoadProgress(what, progress.done, progress.total))

        count = config.rank_count
        here = count // config.nnodes
        elsewhere: dict[int, socket.socket] = {}
        setups = self._rank_setups(here, stages) if placed is None else self._placed_setups(placed, stages)
        if placed is not None:
            here, elsewhere = 0, await placed.come(on_wait=self._tell_waits)
        elif config.nnodes > 1:
            assert config.ranks_key is not None, "checked by Config"
            elsewhere = await wait_for_ranks(
                config.master_addr, config.master_port, range(here, count), config.ranks_key, on_wait=self._tell_waits
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
                on_progress=tell,
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
                    _model_settings(config),
                    loaded.dtype,
                    loaded.device if placed is None else "cpu",  # GPUs that Ray gives are the ranks'
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

    def _tell_waits(self, awaited: list[int]) -> None:
        if awaited:
            logger.info("waits for ranks of other machines ranks=%s", ",".join(map(str, awaited)))

    def _rank_setups(self, here: int, stages: Sequence[ModelConfig]) -> list[RankSetup]:
        """here: how many there are on each machine. stages: what of the model each of them computes."""
        config, drafts = self._config, self._drafts
        whole = _model_settings(config)
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
        is_split = is_far and len(stages) == 1  # what adds up is on several machines
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
        """A rank that shares its node with others has a part of what the options say of a machine."""
        setups: list[RankSetup] = []
        for setup in self._rank_setups(1, stages):
            settings, beside = setup.settings, placed.count_beside(setup.rank)
            settings = msgspec.structs.replace(
                settings,
                device="cuda" if settings.device == "cuda" else "cpu",  # the one for which Ray has kept room
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
        """At the same time as the weights are read: their name, and the first time the tokenizer and what forms need of
        it."""
        # The libraries for tokens and forms hold the GIL for tenths of a second. Reading weights does not need it,
        # once it has begun.
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
        # Last, when the weights have been read from the disk, or most of them.
        self._weights_name = await self._text.run_cancellable(_weights_name, checkpoint)

    async def _load(
        self,
        checkpoint: Checkpoint | EncoderDirectory,
        draft: DraftSource | None,
        compute: WorkerThread,
        runners: list[ModelRunner | EncoderRunner],
    ) -> ModelRunner | EncoderRunner:
        """Weights in the compute thread, and beside them what texts need. What is put in `runners` is the caller's to
        close, also when this raises."""
        job = LongJob()
        weights_come, token = trio.Event(), trio.lowlevel.current_trio_token()

        def tell(progress: LoadProgress) -> None:
            job.check()
            if self._engine is None and self._on_progress is not None:
                self._on_progress(progress)

        def tell_weights_come() -> None:
            token.run_sync_soon(weights_come.set, idempotent=True)

        def read(done: int, total: int) -> None:
            tell_weights_come()
            tell(LoadProgress(f"loading {self._config.model}", done, total))

        def compiling(sentence: str, seconds: float) -> None:
            if self._on_progress is None and not seconds:
                logger.info("%s", sentence)
            tell(LoadProgress(sentence, seconds))

        def load_runner() -> ModelRunner | EncoderRunner:
            # In the thread that will use it, since it may import torch.
            runner: ModelRunner | EncoderRunner
            if isinstance(checkpoint, EncoderDirectory):
                from trioserve.model.encoder_runner import EncoderRunner

                runner = EncoderRunner.load(checkpoint, _model_settings(self._config), progress=read)
            else:
                from trioserve.model.runner import ModelRunner

                runner = ModelRunner.load(
                    checkpoint, _model_settings(self._config), draft=draft, progress=read, on_compile=compiling
                )
            runners.append(runner)
            tell_weights_come()  # also where nobody told of them
            runner.allocate_kv(runner.block_count)
            if runner.device != "cpu":  # where kernels are compiled, which takes its time
                tell(LoadProgress(f"warming {self._config.model} up", 0))
            runner.warm_up()
            return runner

        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._prepare_texts, checkpoint, weights_come)
            return await job.run(compute, load_runner)

    def _note_model(self, checkpoint: Checkpoint | EncoderDirectory, runner: Runner) -> None:
        """Raises StartupError if its files have become another model's since the engine was opened first."""
        assert self._defaults is not None, "they are read with the checkpoint"
        # Unasked, too, where all that is computed here is so: KV from elsewhere might not be.
        is_invariant = self._config.batch_invariant or (runner.is_batch_invariant and self._transfers is None)
        found = self._fingerprint_with(runner, self._defaults, is_batch_invariant=is_invariant)
        if self._engine is not None and found != self._fingerprint:
            raise StartupError(
                f"{self._path} has changed since the engine was opened, and streams cannot go on with another model: "
                "start the server anew"
            )
        self._checkpoint, self._fingerprint, self._adapter_dtype = checkpoint, found, runner.dtype
        self._executor = f"{runner.dtype} on {runner.device} by {runner.computed_by}"
        self._arithmetic, self._is_batch_invariant = runner.arithmetic, is_invariant

    def _fingerprint_with(
        self, runner: Runner, defaults: GenerationDefaults, *, is_batch_invariant: bool
    ) -> str | None:
        """None for an encoder, which has no responses to go on with."""
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
            raise StartupError("an encoder keeps no KV to exchange: leave out --kv-transfer-config")
        if checkpoint.config.state_bytes:
            raise StartupError(
                "this model's layers keep a state beside their KV, which connectors do not carry: leave out "
                "--kv-transfer-config"
            )
        assert self._weights_name is not None, "it comes with the weights"
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
                "say that it can do without the blocks behind it (knows_windows): take another connector"
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

    def _tell_loaded(
        self, runner: Runner, settings: CoreSettings, checkpoint: Checkpoint | EncoderDirectory, seconds: float
    ) -> None:
        if self._engine is not None:
            logger.info("the engine was opened anew seconds=%.1f", seconds)
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
    """What computes, as the rest of an engine sees it; see EngineParts."""

    runner: Runner
    steps: StepRunner
    adapters: AdapterPlace
    claim_memory: WhenIdle
    weights: WeightPlace | str
    image_encoder: ImageEncoder | None = None
    guard: Guard | None = None


class _Nap:
    """The KV cache goes and comes in the compute thread."""

    def __init__(self, runner: ModelRunner, compute: WorkerThread, new_parts: Callable[[], EngineParts]) -> None:
        self._runner = runner
        self._compute = compute
        self._new_parts = new_parts

    async def release_cache(self) -> None:
        await self._compute.run(self._runner.release_kv)

    async def rebuild_parts(self) -> EngineParts:
        await self._compute.run(self._runner.allocate_kv, self._runner.block_count)
        return self._new_parts()


def _cache_release(
    runner: Runner, compute: WorkerThread, new_parts: Callable[[], EngineParts]
) -> CacheRelease[EngineParts] | str:
    from trioserve.model.runner import ModelRunner

    if isinstance(runner, RankedRunner):
        return "a model in ranks cannot give its KV cache back alone"
    if not isinstance(runner, ModelRunner):
        return "an encoder has no KV cache to give back"
    return runner.why_kept or _Nap(runner, compute, new_parts)


def _weight_place(
    runner: ModelRunner | EncoderRunner, compute: WorkerThread, groups: TrainerGroups, context_tokens: int | None
) -> WeightPlace | str:
    from trioserve.model.runner import ModelRunner

    if not isinstance(runner, ModelRunner):
        return "an encoder keeps its weights"

    def look(source: WeightSource) -> WrittenWeights:
        from trioserve.model.weight_replacement import StoredWeights

        assert not isinstance(source, BroadcastWeights), "those are sent"
        where = source if isinstance(source, SharedWeights) else Path(source)
        return StoredWeights(runner, where, context_tokens=context_tokens)

    def look_at_sent(source: BroadcastWeights) -> SentWeights:
        from trioserve.model.weight_replacement import ArrivingWeights

        return ArrivingWeights(runner, arriving_tensors(source))

    return ThreadedWeights(look, look_at_sent, groups, compute)


class _AdapterPlace:
    """The model, for adapters: they come and go in the compute thread, between two steps."""

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
    """None for an encoder, which neither goes on with responses nor exchanges KV."""
    return None if isinstance(checkpoint, EncoderDirectory) else weights_name(checkpoint)


def _family(checkpoint: Checkpoint | EncoderDirectory) -> str:
    return checkpoint.config.family


def _pooled_model(checkpoint: Checkpoint | EncoderDirectory, settings: CoreSettings) -> PooledModel:
    size, whole_tokens_max = checkpoint.config.hidden_size, settings.whole_tokens_max
    if not isinstance(checkpoint, EncoderDirectory):
        return PooledModel(
            embedding_size=size, whole_tokens_max=whole_tokens_max, continues_texts=checkpoint.continues_texts
        )
    encoder = checkpoint.config
    return PooledModel(
        embedding_size=size,
        method=encoder.method,
        normalize=encoder.normalize,
        is_encoder=True,
        continues_texts=False,
        scores_pairs=encoder.scores_pairs,
        whole_tokens_max=whole_tokens_max,
    )


def _placed_cpus(config: Config) -> int:
    """Of each rank that Ray places, which Ray counts and does not enforce: so many threads it has, too."""
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
        logger.warning("no structured output: %s", reason)
    return compiler


def _make_tokenizer(checkpoint: Checkpoint | EncoderDirectory) -> Tokenizer:
    if checkpoint.gguf_metadata is not None:
        return Tokenizer.from_gguf(checkpoint.gguf_metadata)
    assert checkpoint.tokenizer_directory is not None
    return Tokenizer.from_directory(checkpoint.tokenizer_directory)


def _model_settings(config: Config) -> ModelSettings:
    return ModelSettings(
        dtype=config.dtype,
        device=config.device,
        block_size=config.block_size,
        kv_cache_bytes=None if config.kv_cache_memory is None else int(config.kv_cache_memory * 2**30),
        memory_share=config.gpu_memory_utilization,
        threads=config.threads,
        cpu_kernels=config.cpu_kernels,
        gpu_kernels=config.gpu_kernels,
        quantization=config.quantization,
        kv_cache_dtype=config.kv_cache_dtype,
        max_num_seqs=config.max_num_seqs,
        context_tokens_max=config.max_model_len,
        enforce_eager=config.enforce_eager,
        batch_invariant=config.batch_invariant,
    )


def _core_settings(
    config: Config,
    transfers: ConnectorSettings | None,
    drafts: DraftSettings | None,
    runner: Runner,
    checkpoint: Checkpoint | EncoderDirectory,
    draft: DraftSource | None,
) -> CoreSettings:
    context_tokens_max = checkpoint.config.context_tokens_max
    pool_tokens = runner.block_count * runner.block_size
    window_tokens = None
    if draft is None:  # that one may see more
        window_tokens = _window_tokens(checkpoint)
    if config.max_model_len is not None:
        if config.max_model_len > context_tokens_max:
            raise StartupError(
                f"--max-model-len is {config.max_model_len}, but the model was made for {context_tokens_max} tokens"
            )
        context_tokens_max = config.max_model_len
    elif isinstance(checkpoint, EncoderDirectory):
        context_tokens_max = checkpoint.config.context_tokens_default
    elif window_tokens is None or window_tokens + config.max_num_batched_tokens > pool_tokens - 2 * runner.block_size:
        # Without a wish, what fits: a long context alone must not keep a small machine from serving.
        if pool_tokens < context_tokens_max:
            logger.info(
                "the context is %d tokens, as many as the KV cache holds, of the %d that the model takes: "
                "--kv-cache-memory gives it more",
                pool_tokens,
                context_tokens_max,
            )
        context_tokens_max = min(context_tokens_max, pool_tokens)
    keeps_kv = not isinstance(checkpoint, EncoderDirectory)
    if 0 < runner.state_slot_count < config.max_num_seqs:
        logger.warning(
            "the states of more sequences do not fit the cache's memory (--kv-cache-memory) sequences_max=%d",
            runner.state_slot_count,
        )
    return CoreSettings(
        block_count=runner.block_count,
        block_size=runner.block_size,
        context_tokens_max=context_tokens_max,
        max_num_seqs=config.max_num_seqs,
        # An encoder's prompts are computed whole, so that a step has room for the longest one.
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
    """The largest sliding window, where every layer has one."""
    window_max = None if isinstance(checkpoint, EncoderDirectory) else checkpoint.config.window_max
    return None if window_max is None else max(window_max, 2)


def default_served_name(model: str) -> str:
    """The name clients use when the configuration gives none."""
    return Path(model).name.removesuffix(".gguf") or model
