"""Options of engines, for text and for images, and of ranks, the processes that compute one model together."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from trioserve.connectors.settings import connector_settings
from trioserve.contracts.errors import StartupError
from trioserve.contracts.image_generation import ImageRequestLimits
from trioserve.contracts.media import AudioLimits, ImageLimits
from trioserve.core.settings import CoreSettings, DraftSourceName, check_overlap
from trioserve.engine.settings import RESTARTS_MAX
from trioserve.model.settings import (
    BLOCK_SIZE_MAX,
    DRAFT_TOKENS_MAX,
    THREADS_MAX,
    CpuKernelsName,
    DeviceName,
    DraftSettings,
    DtypeName,
    GpuKernelsName,
    KvCacheDtypeName,
    ModelSettings,
    QuantizationName,
    draft_settings,
    generation_settings,
    lora_modules,
)
from trioserve.options.option import about
from trioserve.options.router import ChatOptions, ClusterOptions
from trioserve.options.server import QUEUE, QueueOptions

if TYPE_CHECKING:
    from pathlib import Path

    TextOrPath = str | Path
else:
    TextOrPath = str  # A path is converted to a text before the options are checked.

__all__ = ["ComputeOptions", "EngineOptions", "ImageEngineOptions", "ImageOptions", "RANKS_MAX", "STEP_PIXELS"]


RANKS_MAX = 64  # No supported model has more KV heads that could be distributed.


@dataclass(frozen=True, kw_only=True)
class RankOptions(ClusterOptions):
    """Options of a model that several processes compute together."""

    # fmt: off
    tensor_parallel_size: Annotated[int, about(
        "processes, called ranks, that compute the model together, each with a part of every layer: one per GPU, or on "
        "a CPU one per group of cores", "N", ge=1, le=RANKS_MAX)] = 1
    pipeline_parallel_size: Annotated[int, about(
        "stages into which the model's layers are split; the stages compute one after the other, each with "
        "--tensor-parallel-size ranks", "N", ge=1, le=RANKS_MAX)] = 1
    enable_expert_parallel: Annotated[bool, about(
        "give each rank whole experts of a mixture of experts, instead of a part of each")] = False
    distributed_executor_backend: Annotated[Literal["mp", "ray"], about(
        "how ranks are started: mp starts them on this machine and on those of --nnodes, ray on free nodes of a Ray "
        "cluster; ray needs the extra ray")] = "mp"
    nnodes: Annotated[int, about(
        "number of machines with ranks, each with the same number of ranks; start serve --headless on all but one",
        "N", ge=1, le=RANKS_MAX)] = 1
    master_addr: Annotated[str, about(
        "address or name of the server's machine for ranks on other machines; with a name, the server listens for them "
        "at all of its addresses", "ADDRESS")] = "127.0.0.1"
    master_port: Annotated[int, about(
        "TCP port of the server for ranks; torch.distributed uses the next port, too", "PORT", ge=1, le=65534)] = 29500
    ranks_key: Annotated[str | None, about(
        "shared secret of the server and its ranks on other machines; default: none, and ranks on other machines are "
        "refused", "KEY")] = None
    # fmt: on

    @property
    def rank_count(self) -> int:
        """Number of processes that compute the model together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def check_ranks(self, drafts: DraftSettings | None, *, node_rank: int = 0, headless: bool = False) -> None:
        """Check the options of ranks.

        Args:
            drafts: settings of draft tokens.
            node_rank: number of this machine.
            headless: True if this machine has only ranks.

        Raises:
            StartupError: these options cannot be combined.
        """
        size = self.rank_count
        if self.pipeline_parallel_size > 1:
            self._check_stages(drafts)
        if self.distributed_executor_backend == "ray":
            self._check_ranks_of_ray(drafts, headless)
        if self.nnodes > 1 or headless:
            if size % self.nnodes or size == 1:
                raise StartupError(
                    f"--nnodes is {self.nnodes}, and there are {size} ranks: give each machine the same number of "
                    f"ranks, such as {self.nnodes} in all"
                )
            if node_rank >= self.nnodes:
                raise StartupError(f"--node-rank is {node_rank}, allowed are 0 to {self.nnodes - 1}: see --nnodes")
            if headless != (node_rank > 0):
                raise StartupError(
                    f"--node-rank is {node_rank}, and --headless is {'given' if headless else 'not given'}: "
                    "the server is node 0, and all others are headless"
                )
            if not self.ranks_key:
                raise StartupError(
                    "--ranks-key is not given, so every client that reaches --master-port could act as a rank: give "
                    "all machines the same key, better in the variable TRIOSERVE_RANKS_KEY than on the command line"
                )
        if size > 1 and not sys.platform.startswith("linux"):
            name, count = "--tensor-parallel-size", self.tensor_parallel_size
            if count == 1:
                name, count = "--pipeline-parallel-size", self.pipeline_parallel_size
            raise StartupError(
                f"{name} is {count}, but ranks need Linux, which ends them with the server: leave it out"
            )

    def _check_stages(self, drafts: DraftSettings | None) -> None:
        asked = f"--pipeline-parallel-size is {self.pipeline_parallel_size}"
        if self.rank_count > RANKS_MAX:
            raise StartupError(
                f"{asked} and --tensor-parallel-size {self.tensor_parallel_size}, which are {self.rank_count} ranks: "
                f"at most {RANKS_MAX} are allowed"
            )
        if self.pipeline_parallel_size % self.nnodes:
            raise StartupError(
                f"{asked} and --nnodes {self.nnodes}, but each machine must have the same number of stages: use a "
                f"multiple of {self.nnodes}"
            )
        if drafts is not None and drafts.source != "text":
            raise StartupError(
                f"{asked}, but {drafts.model or drafts.source} can draft only for a model in one stage: leave one of "
                "them out, or use --speculative-ngram"
            )

    def _check_ranks_of_ray(self, drafts: DraftSettings | None, headless: bool) -> None:
        asked = "--distributed-executor-backend is ray, and"
        if self.nnodes > 1 or headless:
            raise StartupError(f"{asked} Ray itself chooses machines: leave out --nnodes, --node-rank and --headless")
        if self.rank_count == 1:
            raise StartupError(
                f"{asked} there is only one rank, which always runs in the server: leave the backend out, or let Ray "
                "place the whole server (`trioserve ray up`)"
            )
        if drafts is not None and drafts.model is not None:
            raise StartupError(
                f"{asked} {drafts.model} would draft, but it is read only on the server's machine: leave one of them "
                "out, or use --speculative-ngram"
            )


# Eight rows of a megapixel. In 16 bits, their activations need 20 GiB in a network such as SDXL's.
STEP_PIXELS = 8 * 2**20

MODEL = ModelSettings()
CORE = CoreSettings(block_count=2**20, context_tokens_max=1)
"""Settings whose defaults are the defaults of options. The number of blocks and the context have no default."""


@dataclass(frozen=True, kw_only=True)
class ComputeOptions(QueueOptions):
    """Options of every engine, for text or images."""

    # fmt: off
    served_model_name: Annotated[tuple[str, ...], about(
        "model names that requests may use; default: the last part of --model", "NAME")] = ()
    dtype: Annotated[DtypeName, about(
        "data type of weights and KV cache; auto uses the checkpoint's")] = MODEL.dtype
    device: Annotated[DeviceName, about(
        "device that computes; auto uses a GPU if there is one")] = MODEL.device
    threads: Annotated[Annotated[int, Meta(ge=1, le=THREADS_MAX)] | None, about(
        "CPU threads of a forward pass; default: one per core", "N")] = None
    max_num_seqs: Annotated[Annotated[int, Meta(ge=1, le=4096)] | None, about(
        "sequences that run at a time; default: 64, or 256 for text on a GPU", "N")] = None
    step_timeout: Annotated[Annotated[float, Meta(ge=0, le=86400)] | None, about(
        "longest time of one step in seconds; during a longer step /ready fails and new requests are refused, and "
        "after five times as long /health fails, too; 0: no limit; default: 60, or ten times the longest step so far "
        "if that is more", "SECONDS")] = None
    engine_restarts: Annotated[int, about(
        "how often within ten minutes the engine is reopened after a fault; its streams pause and resume; 0: the first "
        "fault ends the server", "N", ge=0, le=RESTARTS_MAX)] = 3
    seed: Annotated[int | None, about(
        "source of the seeds of requests that set none: equal requests in equal order get equal seeds; default: random",
        "N")] = None
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class ImageOptions(ComputeOptions):
    """Options of an engine that generates images."""

    # fmt: off
    max_image_pixels: Annotated[int, about(
        "highest width times height of a generated image", "PIXELS", ge=1)] = ImageRequestLimits().pixels_max
    max_image_steps: Annotated[int, about(
        "highest number of denoising steps of a request for images", "N", ge=1)] = ImageRequestLimits().steps_max
    max_images: Annotated[int, about(
        "highest number of images (n) of a request", "N", ge=1)] = ImageRequestLimits().n_max
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class ImageEngineOptions(ImageOptions):
    """Parameters of `trioserve.open_image_engine`."""

    # fmt: off
    model: Annotated[TextOrPath, about(
        "directory in the format of diffusers' save_pretrained", "MODEL")] = field(kw_only=False)
    kept_slots: Annotated[int | None, about(
        "further images whose latents are kept while requests with a lower priority number use their slots; default: "
        "max_num_seqs", "N")] = None
    step_pixels: Annotated[int, about(
        "most pixels of all rows of one forward pass; an image with guidance has two rows; this limits the memory of a "
        "step, and how long an abort waits", "PIXELS")] = STEP_PIXELS
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class EngineOptions(ComputeOptions, RankOptions, ChatOptions):
    """Options of an engine for text. They are also the parameters of `trioserve.open_engine`.

    The defaults fit a small machine without a GPU.
    """

    # fmt: off
    model: Annotated[str, about(
        "model to serve: smollm2, a directory with safetensors, a .gguf file, or a hub name", "MODEL",
        )] = field(default="smollm2", kw_only=False)
    tokenizer: Annotated[str | None, about(
        "tokenizer and chat template to use: a directory, a .gguf file or a hub name; default: the model's own",
        "MODEL")] = None
    revision: Annotated[str | None, about(
        "branch, tag or commit of a hub model; default: its main branch", "NAME")] = None
    chat_template: Annotated[str | None, about(
        "file with a chat template, or the template itself, to use instead of the model's; default: the model's",
        "FILE")] = None
    cpu_kernels: Annotated[CpuKernelsName, about(
        "kernels for the CPU; auto uses native kernels, compiled at the first start, if possible")] = MODEL.cpu_kernels
    gpu_kernels: Annotated[GpuKernelsName, about(
        "kernels for the GPU; triton records decode steps as CUDA graphs, and has not been tried on a GPU yet; auto "
        "uses triton if it works here and supports the model, otherwise torch, with a warning",
        )] = MODEL.gpu_kernels
    quantization: Annotated[QuantizationName, about(
        "how native kernels store weights: file keeps the bits of a quantized file, int8 and int4 quantize any "
        "checkpoint, none uses --dtype; auto uses file if possible, otherwise none")] = MODEL.quantization
    kv_cache_dtype: Annotated[KvCacheDtypeName, about(
        "data type of keys and values; int8 and fp8 (e4m3) store twice as many tokens in the same memory; auto uses "
        "--dtype")] = MODEL.kv_cache_dtype
    max_model_len: Annotated[Annotated[int, Meta(ge=2)] | None, about(
        "most tokens of prompt and response together, such as 8192, 32k or 32K; auto and default: as many as the model "
        "supports and the KV cache holds", "TOKENS")] = None
    max_num_batched_tokens: Annotated[Annotated[int, Meta(ge=1)] | None, about(
        "tokens computed in one step; longer prompts are computed in chunks; default: 512, or 2048 on a GPU, or 8192 "
        "on a GPU with 70 GiB or more", "TOKENS")] = None
    wide_prompt_stretch: Annotated[float, about(
        "how much longer a step may take while it computes prompt tokens and other requests get tokens: a smaller "
        "factor gives these a steadier pace, a larger factor computes prompts sooner",
        "FACTOR", gt=1, le=1000)] = CORE.wide_prompt_stretch
    block_size: Annotated[int, about(
        "tokens in one KV block", "TOKENS", ge=1, le=BLOCK_SIZE_MAX)] = CORE.block_size
    kv_cache_memory: Annotated[Annotated[float, Meta(gt=0)] | None, about(
        "memory for the KV cache in GiB; default: at most 4 on a CPU, the free memory on a GPU", "GIB")] = None
    gpu_memory_utilization: Annotated[float, about(
        "share of the GPU's memory for weights and KV cache, above 0 and up to 1", "SHARE", gt=0, le=1,
        )] = MODEL.memory_share
    enforce_eager: Annotated[bool, about(
        "launch every kernel of a step separately, without CUDA graphs; saves their memory, and seconds at the start",
        )] = False
    mixed_graphs: Annotated[bool, about(
        "also record steps with prompt chunks as CUDA graphs, up to 2,048 tokens; off saves seconds at the start",
        )] = MODEL.mixed_graphs
    flash_prompts: Annotated[bool, about(
        "on a GPU, use torch's flash attention for long prompts in steps without CUDA graphs, if it works there",
        )] = MODEL.flash_prompts
    batch_invariant: Annotated[bool, about(
        "make the bits of a response depend only on its own tokens and the weights, not on other requests of the "
        "batch; the server refuses to start if this is not possible")] = False
    enable_prefix_caching: Annotated[bool, about(
        "keep full blocks, so that prompts with the same beginning share them")] = CORE.enable_prefix_caching
    session_retention: Annotated[bool, about(
        "evict the cached blocks of a session that waits for its next turn later than other blocks; off evicts all "
        "blocks by recency")] = CORE.session_retention
    session_kv_share: Annotated[float, about(
        "share of the KV cache that the waiting sessions of one tenant may retain; blocks above it are evicted by "
        "recency", "SHARE", gt=0, le=1)] = CORE.session_share_max
    cold_turn_seconds: Annotated[float, about(
        "how long a turn of a session whose blocks were evicted waits at most before it evicts blocks of sessions that "
        "return soon; 0: it does not wait", "SECONDS", ge=0, le=3600)] = CORE.cold_turn_seconds
    session_prefetch: Annotated[bool, about(
        "load the evicted blocks of a waiting session from the KV connector shortly before its next turn, if the time "
        "of the turn is known; without a connector that keeps blocks, such as host, it has no effect"
        )] = CORE.session_prefetch
    overlap_steps: Annotated[bool | None, about(
        "plan the next step while one is computed; shortens the gap between two forward passes, but the end of a "
        "response is noticed one step later; not with --speculative-ngram; with --pipeline-parallel-size, two steps of "
        "different requests are computed at a time; default: on if Triton's kernels compute on a GPU without draft "
        "tokens")] = None
    speculative_ngram: Annotated[int, about(
        "draft tokens per request and step that are taken from the request's own text; speeds up a few streams that "
        "repeat parts of their prompts; 0: off", "TOKENS", ge=0, le=DRAFT_TOKENS_MAX)] = 0
    speculative_model: Annotated[str | None, about(
        "small model with the same vocabulary that proposes draft tokens, which the model verifies in a step; named as "
        "--model, or mtp for the model's own prediction layer; default: none", "NAME")] = None
    speculative_tokens: Annotated[int, about(
        "draft tokens per request and step; fewer or none are drafted if more do not pay off",
        "TOKENS", ge=1, le=DRAFT_TOKENS_MAX)] = 4
    speculative_quantization: Annotated[QuantizationName, about(
        "how the weights of --speculative-model are stored, as --quantization")] = MODEL.quantization
    speculative_config: Annotated[str | dict[str, Any] | None, about(
        """JSON as in vLLM, instead of the other --speculative flags, such as {"model": "NAME", """
        """"num_speculative_tokens": 4}; default: none""", "JSON")] = None
    tool_call_parser: Annotated[str, about(
        "format in which the model writes tool calls: auto uses the format of its chat template, none leaves tool "
        "calls as text, otherwise a family, such as hermes, mistral or llama3_json", "NAME")] = "auto"
    tool_call_leniency: Annotated[Literal["strict", "lenient"], about(
        "texts that are read as tool calls: strict reads those that the model's format marks; lenient also reads bare "
        "or fenced JSON if the response contains nothing else, for models that forget the marks; then an example that "
        "a user asks for may run as a call", "NAME")] = "strict"
    reasoning_parser: Annotated[str, about(
        "format in which the model writes its reasoning: auto uses the format of its chat template, none leaves "
        "reasoning in the text, otherwise a family, such as qwen3 or deepseek_r1", "NAME")] = "auto"
    generation_config: Annotated[str, about(
        "sampling options of requests that set none: auto uses the recommendation of the model's makers, vllm the "
        "neutral temperature 1, otherwise a directory with a generation_config.json, whose max_new_tokens also limits "
        "every request", "DIR")] = "auto"
    override_generation_config: Annotated[str | dict[str, Any] | None, about(
        """JSON with fields of the generation config to replace, such as {"temperature": 0.5}; default: none""",
        "JSON")] = None
    allowed_media_domains: Annotated[tuple[str, ...], about(
        "hosts, with all their subdomains, from which the server fetches images that a request names by an http or "
        "https URL; default: nothing is fetched", "HOST")] = ()
    limit_mm_per_prompt: Annotated[str | dict[str, int] | None, about(
        """JSON as in vLLM: most images or sounds per prompt, for models that read them, such as {"image": 4} or """
        """{"audio": 2}; default: 8""",
        "JSON")] = None
    image_decode_timeout: Annotated[float, about(
        "longest time in seconds to decode one image of a request; after that the request fails with 400, and the "
        "decoding process is killed", "SECONDS", gt=0, le=3600)] = ImageLimits().decode_seconds_max
    max_audio_seconds: Annotated[float, about(
        "longest recording that a model hears", "SECONDS", gt=0, le=86400)] = AudioLimits().seconds_max
    audio_decode_timeout: Annotated[float, about(
        "longest time in seconds to decode one recording of a request; after that the request fails with 400, and the "
        "decoding process is killed", "SECONDS", gt=0, le=3600)] = AudioLimits().decode_seconds_max
    enable_lora: Annotated[bool, about(
        "accept LoRA adapters, which requests choose by their model name; on if --lora-modules is set")] = False
    lora_modules: Annotated[tuple[str, ...], about(
        """adapters to load at the start, as NAME=PATH or as JSON: {"name": NAME, "path": PATH}; PATH is a directory """
        "in the format of peft; default: none", "NAME=PATH")] = ()
    max_loras: Annotated[int, about(
        "adapters that may be loaded; one step may use any number of them", "N", ge=1, le=4096)] = 64
    max_cpu_loras: Annotated[Annotated[int, Meta(ge=1, le=4096)] | None, about(
        "vLLM's other name for --max-loras: the larger of both applies, because adapters are not kept in two kinds of "
        "memory here; default: --max-loras", "N")] = None
    max_lora_rank: Annotated[int, about("highest rank of an adapter", "N", ge=1, le=1024)] = 256
    max_lora_graph_rank: Annotated[int, about(
        "highest sum of the ranks of all adapters in one step that uses CUDA graphs; other steps launch every kernel "
        "separately; 0 saves the memory of these graphs and of their copies of adapters", "N", ge=0, le=4096)] = 256
    kv_events: Annotated[bool, about(
        "publish at /kv_events which blocks the prefix cache holds, for a router with --policy kv_aware")] = False
    kv_transfer_config: Annotated[str | dict[str, Any] | None, about(
        """JSON as in vLLM: how KV blocks move to and from other engines, such as {"kv_connector": "tcp", "kv_role": """
        """"kv_both"}; default: no transfer""", "JSON")] = None
    role: Annotated[Literal["prefill", "decode", "both"], about(
        "role of this engine, for routers; prefill or decode without --kv-transfer-config uses the connector tcp",
        )] = "both"
    kv_hold_timeout: Annotated[float, about(
        "seconds that KV blocks of a finished request are held for another engine that does not contact this one",
        "SECONDS", gt=0, le=3600)] = CORE.hold_seconds_max
    kv_load_timeout: Annotated[float, about(
        "seconds that a request waits for KV from another engine, before kv_load_failure_policy of "
        "--kv-transfer-config applies", "SECONDS", gt=0, le=3600)] = CORE.remote_kv_seconds_max
    kv_held_share: Annotated[float, about(
        "share of the KV cache that may be held for other engines; above it, responses have no kv_transfer_params",
        "SHARE", gt=0, le=1)] = CORE.held_share_max
    session_idle_seconds: Annotated[float, about(
        "seconds without a request after which a session that a client has named, such as by X-Session-Id, ends and "
        "gives up its place in the prefix cache; a request that asks for a longer retention extends it",
        "SECONDS", gt=0, le=86400)] = QUEUE.session_idle_seconds
    # fmt: on

    def __post_init__(self) -> None:
        self.check_engine()

    def check_engine(self, *, node_rank: int = 0, headless: bool = False) -> None:
        """Check combinations of options, before the model is loaded.

        Args:
            node_rank: number of this machine among `nnodes`.
            headless: True if this machine has only ranks.

        Raises:
            StartupError: options cannot be combined, or have a wrong format.
        """
        drafts = self.drafts()
        self.check_ranks(drafts, node_rank=node_rank, headless=headless)
        if drafts is not None:
            source: DraftSourceName = "head" if drafts.source == "mtp" else drafts.source
            check_overlap(self.overlap_steps is True, drafts.token_count, source)
        connector_settings(self.kv_transfer_config, self.role)
        generation_settings(self.generation_config, self.override_generation_config)
        self.image_limits()
        lora_modules(self.lora_modules)

    @property
    def ranks_at_once(self) -> int:
        """Number of ranks on one machine that compute at the same time: all ranks, or the ranks of one stage."""
        here = self.rank_count // self.nnodes
        return here if self.overlap_steps else min(here, self.tensor_parallel_size)

    @property
    def accepts_adapters(self) -> bool:
        return self.enable_lora or bool(self.lora_modules)

    @property
    def adapter_directories(self) -> tuple[str, ...]:
        """Directories from which the admin of a server may load adapters. Empty if any directory is allowed."""
        return ()

    def drafts(self) -> DraftSettings | None:
        """Return the settings of draft tokens.

        Returns:
            The settings, or None if there are no draft tokens.

        Raises:
            StartupError: the options cannot be combined.
        """
        return draft_settings(
            ngram=self.speculative_ngram,
            model=self.speculative_model,
            token_count=self.speculative_tokens,
            quantization=self.speculative_quantization,
            given=self.speculative_config,
        )

    def image_limits(self) -> ImageLimits:
        """Return the limits of images in prompts.

        Raises:
            StartupError: `limit_mm_per_prompt` has a wrong format.
        """
        count = self._media_limits().get("image", ImageLimits().images_max)
        return ImageLimits(images_max=count, decode_seconds_max=self.image_decode_timeout)

    def _media_limits(self) -> dict[str, int]:
        given: object = self.limit_mm_per_prompt
        if given is None:
            return {}
        if isinstance(given, str):
            try:
                given = msgspec.json.decode(given)
            except msgspec.DecodeError as error:
                raise StartupError(
                    f"""--limit-mm-per-prompt is not JSON ({error}): write it like {{"image": 4}}"""
                ) from None
        if (
            not isinstance(given, Mapping)
            or not set(given) <= {"image", "audio"}
            or not all(isinstance(count, int) and not isinstance(count, bool) for count in given.values())
        ):
            raise StartupError(
                f"""--limit-mm-per-prompt is {given!r}, it must be like {{"image": 4, "audio": 2}}: images and """
                "sounds are the only media here"
            )
        return dict(given)

    def audio_limits(self) -> AudioLimits:
        """Return the limits of recordings.

        Raises:
            StartupError: `limit_mm_per_prompt` has a wrong format.
        """
        return AudioLimits(
            sounds_max=self._media_limits().get("audio", AudioLimits().sounds_max),
            seconds_max=self.max_audio_seconds,
            decode_seconds_max=self.audio_decode_timeout,
        )

    def model_settings(self) -> ModelSettings:
        """Return the settings that determine how the model is computed.

        Raises:
            StartupError: a value is out of range, or values contradict each other.
        """
        drafts = self.drafts()
        return ModelSettings(
            dtype=self.dtype,
            device=self.device,
            block_size=self.block_size,
            kv_cache_bytes=None if self.kv_cache_memory is None else int(self.kv_cache_memory * 2**30),
            memory_share=self.gpu_memory_utilization,
            threads=self.threads,
            cpu_kernels=self.cpu_kernels,
            gpu_kernels=self.gpu_kernels,
            quantization=self.quantization,
            kv_cache_dtype=self.kv_cache_dtype,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            context_tokens_max=self.max_model_len,
            draft_tokens=0 if drafts is None else drafts.token_count,
            enforce_eager=self.enforce_eager,
            mixed_graphs=self.mixed_graphs,
            flash_prompts=self.flash_prompts,
            max_lora_graph_rank=self.max_lora_graph_rank if self.accepts_adapters else 0,
            batch_invariant=self.batch_invariant,
        )
