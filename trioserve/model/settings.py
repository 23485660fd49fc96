"""Defines and checks the settings of a model, such as number format, device and KV cache memory, without torch.

The module also checks the options for sampling defaults (--generation-config, --override-generation-config), for
adapters that are loaded at start (--lora-modules), and of speculative decoding (--speculative-ngram, -model and
-config).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from trioserve.contracts.arguments import closest_name
from trioserve.contracts.errors import InvalidRequest, StartupError
from trioserve.contracts.sampling import SamplingParams

__all__ = [
    "DRAFT_TOKENS_MAX",
    "GENERATION_FIELDS",
    "MAX_NUM_SEQS_CPU",
    "MAX_NUM_SEQS_GPU",
    "STEP_TOKENS_CPU",
    "CpuKernelsName",
    "DeviceName",
    "DraftSettings",
    "DtypeName",
    "GenerationSettings",
    "GpuKernelsName",
    "KvCacheDtypeName",
    "LoraModule",
    "ModelSettings",
    "QuantizationName",
    "draft_settings",
    "generation_settings",
    "lora_modules",
]


DtypeName = Literal["auto", "bfloat16", "float16", "float32"]
DeviceName = Literal["auto", "cpu", "cuda"]
CpuKernelsName = Literal["auto", "native", "torch"]
GpuKernelsName = Literal["auto", "torch", "triton"]
QuantizationName = Literal["auto", "none", "file", "int8", "int4"]
KvCacheDtypeName = Literal["auto", "int8", "fp8"]

# Limit in tokens. Only whole blocks can be shared, and unused slots in a sequence's last block are wasted memory.
BLOCK_SIZE_MAX = 256
THREADS_MAX = 1_024
GRAPH_RANK_MAX = 4_096  # With more, a step with adapters would take longer than kernel by kernel.
# Defaults of a CPU: with more sequences or tokens, steps get longer without more tokens per second.
MAX_NUM_SEQS_CPU, STEP_TOKENS_CPU = 64, 512
# A decode step reads all weights once for any number of rows. Up to this number, a GPU computes further rows in less
# time than it reads the weights.
MAX_NUM_SEQS_GPU = 256


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that define how a model is computed.

    Attributes:
        dtype: number format of weights, activations and KV. "auto" selects the checkpoint's format, with the exceptions
            that pick_dtype documents.
        device: "auto" selects CUDA if there is a CUDA device.
        block_size: tokens in one KV block, 1 to BLOCK_SIZE_MAX.
        kv_cache_bytes: size of the whole KV cache. None: the size depends on the machine's free memory.
        kv_cache_dtype: number format of keys and values. "auto" selects dtype, and "fp8" means e4m3.
        memory_share: fraction of a GPU's memory that this process may use for weights, KV cache and all other tensors.
        threads: number of threads that compute on the CPU. None selects torch's default, which is one per core.
        cpu_kernels: kernels that compute on the CPU. "auto" selects native kernels (compiled if needed), or torch if
            native kernels are not available.
        gpu_kernels: kernels that compute on a GPU. "auto" selects Triton's kernels if the steps of the model can be
            launched with them on this machine, or torch otherwise.
        quantization: quantization of the weights in memory. settle_quantization defines the meaning of "auto".
        max_num_seqs: number of sequences that run at the same time. CUDA graphs are captured for up to this number, and
            for the draft tokens of these sequences. None: the default of the device, see with_device_defaults.
        max_num_batched_tokens: number of tokens that one step computes. None: the default of the device.
        context_tokens_max: longest sequence in tokens. None selects the model's limit.
        draft_tokens: largest number of draft tokens of a sequence in one step.
        enforce_eager: do not use CUDA graphs.
        mixed_graphs: also use CUDA graphs for steps with prompt chunks. False: only for decodes.
        flash_prompts: also use torch's flash attention for long prompts on a GPU, if it works there. False: only the
            kernels of gpu_kernels.
        max_lora_graph_rank: largest sum of the ranks of all adapters of one step in a CUDA graph. 0: a step with an
            adapter uses no CUDA graph.
        batch_invariant: the bits of a row depend only on its own tokens and the weights.
        ranks_here: number of processes on this machine, including this one, that compute one model together and share
            the machine's memory.

    Raises:
        StartupError: a value is out of range. The message names the field.
    """

    dtype: DtypeName = "auto"
    device: DeviceName = "auto"
    block_size: int = 16
    kv_cache_bytes: int | None = None
    kv_cache_dtype: KvCacheDtypeName = "auto"
    memory_share: float = 0.9
    threads: int | None = None
    cpu_kernels: CpuKernelsName = "auto"
    gpu_kernels: GpuKernelsName = "auto"
    quantization: QuantizationName = "auto"
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    context_tokens_max: int | None = None
    draft_tokens: int = 0
    enforce_eager: bool = False
    mixed_graphs: bool = True
    flash_prompts: bool = True
    max_lora_graph_rank: int = 0
    batch_invariant: bool = False
    ranks_here: int = 1

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, get_args(DtypeName))
        _one_of("device", self.device, get_args(DeviceName))
        _one_of("cpu_kernels", self.cpu_kernels, get_args(CpuKernelsName))
        _one_of("gpu_kernels", self.gpu_kernels, get_args(GpuKernelsName))
        _one_of("quantization", self.quantization, get_args(QuantizationName))
        _one_of("kv_cache_dtype", self.kv_cache_dtype, get_args(KvCacheDtypeName))
        if self.demands_quantized:
            self._check_quantization()
        if not 1 <= self.block_size <= BLOCK_SIZE_MAX:
            raise StartupError(f"block_size is {self.block_size} tokens, allowed is 1 to {BLOCK_SIZE_MAX}")
        if self.kv_cache_bytes is not None and self.kv_cache_bytes < 1:
            raise StartupError(f"kv_cache_bytes is {self.kv_cache_bytes}, allowed is 1 or more")
        if not (math.isfinite(self.memory_share) and 0.0 < self.memory_share <= 1.0):
            raise StartupError(f"memory_share is {self.memory_share}, allowed is above 0 and at most 1")
        for name, value in (
            ("max_num_seqs", self.max_num_seqs),
            ("max_num_batched_tokens", self.max_num_batched_tokens),
            ("context_tokens_max", self.context_tokens_max),
        ):
            if value is not None and value < 1:
                raise StartupError(f"{name} is {value}, allowed is 1 or more")
        if not 0 <= self.max_lora_graph_rank <= GRAPH_RANK_MAX:
            raise StartupError(f"max_lora_graph_rank is {self.max_lora_graph_rank}, allowed is 0 to {GRAPH_RANK_MAX:,}")
        if self.threads is not None and not 1 <= self.threads <= THREADS_MAX:
            raise StartupError(f"threads is {self.threads}, allowed is 1 to {THREADS_MAX}")

    @property
    def sequences_max(self) -> int:
        """Number of sequences that run at the same time. The default is that of a CPU."""
        return MAX_NUM_SEQS_CPU if self.max_num_seqs is None else self.max_num_seqs

    @property
    def step_tokens_max(self) -> int:
        """Number of tokens that one step computes. The default is that of a CPU."""
        return STEP_TOKENS_CPU if self.max_num_batched_tokens is None else self.max_num_batched_tokens

    @property
    def demands_quantized(self) -> bool:
        """True if the settings require quantized weights, which must then not be replaced by another format."""
        return self.quantization not in ("auto", "none")

    def check_context(self, supported_tokens: int) -> None:
        """Check that a model supports the longest sequence of these settings.

        Args:
            supported_tokens: longest sequence that the model supports.

        Raises:
            StartupError: the model supports less.
        """
        if self.context_tokens_max is not None and self.context_tokens_max > supported_tokens:
            raise StartupError(
                f"--max-model-len is {self.context_tokens_max}, but the model supports only {supported_tokens} tokens"
            )

    def _check_quantization(self) -> None:
        if self.quantization == "file" and self.device == "cuda":
            if self.gpu_kernels == "torch":
                raise StartupError(
                    "quantization is file and gpu_kernels is torch, which dequantizes weights: use gpu_kernels "
                    "triton, or quantization none"
                )
            return
        for name, value, allowed in (
            ("dtype", self.dtype, ("auto", "bfloat16")),
            ("device", self.device, ("cpu", "auto")),
            ("cpu_kernels", self.cpu_kernels, ("auto", "native")),
        ):
            if value not in allowed:
                raise StartupError(
                    f"quantization is {self.quantization} and {name} is {value}, but only the native kernels compute "
                    f"with quantized weights, on the CPU and in bfloat16: use {name} "
                    f"{' or '.join(allowed)}, or quantization none"
                )


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise StartupError(f"{name} is {value!r}, allowed is one of {', '.join(allowed)}")


GENERATION_FLAG = "--override-generation-config"
LORA_EXAMPLE = """write it like sql=/adapters/sql, or like {"name": "sql", "path": "/adapters/sql"}"""
GENERATION_EXAMPLE = '{"temperature": 0.5, "top_p": 0.9}'

GENERATION_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Sampling fields of generation_config.json, and their names in SamplingParams. The list is vLLM's."""


class GenerationSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Source of the sampling defaults.

    Attributes:
        is_neutral: ignore the checkpoint's recommendations.
        directory: directory whose generation_config.json replaces the checkpoint's. None: use the checkpoint's file.
        override: values that replace values from files, with the names of SamplingParams.
    """

    is_neutral: bool = False
    directory: Path | None = None
    override: Mapping[str, float | int] = msgspec.field(default_factory=dict)


class LoraModule(msgspec.Struct, frozen=True, kw_only=True):
    """Adapter that is loaded at start.

    Attributes:
        name: name that requests use.
        path: directory of the adapter.
        base_model_name: name of the adapter's model, which is only shown to users.
    """

    name: str
    path: str
    base_model_name: str | None = None


def lora_modules(given: Iterable[str]) -> tuple[LoraModule, ...]:
    """Parse the values of --lora-modules.

    Args:
        given: values, of which each is "name=path", or JSON with the fields of LoraModule.

    Raises:
        StartupError: a value is wrong, or a name occurs twice.
    """
    modules: dict[str, LoraModule] = {}
    for text in given:
        try:
            if text.lstrip().startswith("{"):
                module = msgspec.json.decode(text, type=LoraModule)
            else:
                name, equals, path = text.partition("=")
                module = LoraModule(name=name, path=path) if equals else LoraModule(name="", path="")
        except msgspec.DecodeError as error:
            raise StartupError(f"--lora-modules {text!r}: {error}; {LORA_EXAMPLE}") from None
        if not module.name or not module.path:
            raise StartupError(f"--lora-modules {text!r} has no name and path: {LORA_EXAMPLE}")
        if module.name in modules:
            raise StartupError(f"--lora-modules names {module.name!r} twice")
        modules[module.name] = module
    return tuple(modules.values())


def generation_settings(source: str, override: str | Mapping[str, Any] | None) -> GenerationSettings:
    """Parse --generation-config and --override-generation-config.

    Args:
        source: auto, vllm or a directory.
        override: JSON string, its decoded value, or None.

    Raises:
        StartupError: a value is wrong.
    """
    fields = _override(override)
    if source in ("auto", "vllm"):
        return GenerationSettings(is_neutral=source == "vllm", override=fields)
    return GenerationSettings(directory=Path(source), override=fields)


def _override(given: str | Mapping[str, Any] | None) -> dict[str, float | int]:
    if given is None:
        return {}
    value: object = given
    if isinstance(given, str):
        try:
            value = msgspec.json.decode(given)
        except msgspec.DecodeError as error:
            raise StartupError(f"{GENERATION_FLAG} is no JSON ({error}): write it like {GENERATION_EXAMPLE}") from None
    if not isinstance(value, Mapping):
        raise StartupError(f"{GENERATION_FLAG} is {value!r}, it must be an object like {GENERATION_EXAMPLE}")
    fields: dict[str, float | int] = {}
    for name, requested in value.items():
        if name not in GENERATION_FIELDS:
            closest = closest_name(str(name), GENERATION_FIELDS)
            hint = f"did you mean {closest}?" if closest else f"there are: {', '.join(GENERATION_FIELDS)}"
            raise StartupError(f"{GENERATION_FLAG} has {name!r}, which it does not accept: {hint}")
        if requested is not None:
            fields[GENERATION_FIELDS[name]] = requested
    try:
        msgspec.convert(fields, SamplingParams)
    except (InvalidRequest, msgspec.ValidationError) as error:
        raise StartupError(f"{GENERATION_FLAG}: {error}") from None
    return fields


DRAFT_FLAG = "--speculative-config"
DRAFT_EXAMPLE = '{"model": "NAME", "num_speculative_tokens": 4}'
# With one known token, a sequence has 16 rows per step. Computing more rows costs about as much time as it saves.
DRAFT_TOKENS_MAX = 15

MTP = "mtp"
MTP_METHODS = (MTP, "deepseek_mtp", "glm4_moe_mtp")  # Older versions of vLLM use the longer names.
IGNORED = frozenset({"prompt_lookup_max", "prompt_lookup_min", "disable_padded_drafter_batch"})
"""Keys of vLLM that have no meaning here, or whose values are found automatically."""


class DraftSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Checked options of speculative decoding.

    Attributes:
        source: "text" copies draft tokens from the request's own tokens. "model" uses a draft model or a head: its
            files define which of the two. "mtp" uses the target model's own prediction layer.
        token_count: largest number of draft tokens of a request in one step, 1 to DRAFT_TOKENS_MAX.
        model: name of the draft model. None for the sources "text" and "mtp".
        revision: revision of the draft model. None for the default revision.
        quantization: how the draft model's weights are stored in memory.
        ignored: keys of vLLM that have no effect in this server, for a log line.
    """

    source: Literal["text", "model", "mtp"]
    token_count: int
    model: str | None = None
    revision: str | None = None
    quantization: QuantizationName = "auto"
    ignored: tuple[str, ...] = ()

    def settings_of_draft(self, settings: ModelSettings) -> ModelSettings:
        """Return the settings with which the draft model is computed.

        Args:
            settings: settings of the target model.
        """
        return msgspec.structs.replace(
            settings,
            quantization=self.quantization,
            context_tokens_max=None,
            draft_tokens=0,
            max_lora_graph_rank=0,  # The draft model has no adapters.
        )


def draft_settings(
    *, ngram: int, model: str | None, token_count: int, quantization: str, given: str | Mapping[str, Any] | None
) -> DraftSettings | None:
    """Check the options of speculative decoding.

    Args:
        ngram: number of draft tokens per step that are copied from the request's own tokens. 0 disables them.
        model: name of a draft model, "mtp", or None.
        token_count: number of draft tokens of `model` per step.
        quantization: how the weights of `model` are stored in memory.
        given: JSON object in vLLM's format or its decoded value, or None. It excludes `ngram` and `model`.

    Returns:
        The settings, or None if there is no speculative decoding.

    Raises:
        StartupError: options contradict each other or a value is not allowed.
    """
    if given is not None:
        if ngram or model is not None:
            raise StartupError(
                f"{DRAFT_FLAG} already names the source of draft tokens: "
                "remove --speculative-ngram and --speculative-model"
            )
        return _from_config(_fields(given))
    if model is not None:
        if ngram:
            raise StartupError("--speculative-model and --speculative-ngram were both given: remove one of them")
        source: Literal["model", "mtp"] = "mtp" if model == MTP else "model"
        name = None if source == "mtp" else model
        return DraftSettings(
            source=source, token_count=token_count, model=name, quantization=_quantization(quantization)
        )
    return DraftSettings(source="text", token_count=ngram) if ngram else None


def _from_config(fields: dict[str, Any]) -> DraftSettings:
    method, model = fields.pop("method", None), fields.pop("model", None)
    count = fields.pop("num_speculative_tokens", None)
    if type(count) is not int or not 1 <= count <= DRAFT_TOKENS_MAX:
        raise StartupError(
            f"num_speculative_tokens in {DRAFT_FLAG} is {count!r}, allowed is 1 to {DRAFT_TOKENS_MAX}, "
            f"as in {DRAFT_EXAMPLE}"
        )
    ignored = tuple(sorted(IGNORED & fields.keys()))
    for name in ignored:
        del fields[name]
    if model in ("ngram", "[ngram]"):  # Older versions of vLLM use these names.
        method, model = "ngram", None
    if method == "ngram":
        _nothing_else(fields)
        return DraftSettings(source="text", token_count=count, ignored=ignored)
    if method not in (None, "draft_model", "eagle3", *MTP_METHODS):
        raise StartupError(
            f'method in {DRAFT_FLAG} is {method!r}, allowed is "draft_model", "eagle3", "mtp" or "ngram"'
        )
    is_own = method in MTP_METHODS or (method is None and model == MTP)
    if is_own and model not in (None, MTP):
        raise StartupError(f'{DRAFT_FLAG} has method {method!r}, which uses the model\'s own layer: remove "model"')
    if not is_own and (not isinstance(model, str) or not model):
        raise StartupError(f'{DRAFT_FLAG} has no "model": add one, as in {DRAFT_EXAMPLE}')
    devices = fields.pop("draft_tensor_parallel_size", 1)
    if devices != 1:
        raise StartupError(
            f"draft_tensor_parallel_size in {DRAFT_FLAG} is {devices!r}, "
            "but the draft model runs on one device: remove it"
        )
    revision, quantization = fields.pop("revision", None), fields.pop("quantization", None)
    _nothing_else(fields)
    if revision is not None and not isinstance(revision, str):
        raise StartupError(f"revision in {DRAFT_FLAG} is {revision!r}, but it must be a string")
    return DraftSettings(
        source="mtp" if is_own else "model",
        token_count=count,
        model=None if is_own else model,
        revision=revision,
        quantization=_quantization("auto" if quantization is None else quantization),
        ignored=ignored,
    )


def _fields(given: str | Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(given, str):
        return dict(given)
    try:
        fields = msgspec.json.decode(given)
    except msgspec.DecodeError as error:
        raise StartupError(f"{DRAFT_FLAG} is not JSON ({error}): give an object, such as {DRAFT_EXAMPLE}") from None
    if not isinstance(fields, dict):
        raise StartupError(f"{DRAFT_FLAG} is not a JSON object: give one, such as {DRAFT_EXAMPLE}")
    return fields


def _nothing_else(fields: Mapping[str, Any]) -> None:
    if fields:
        raise StartupError(f"{DRAFT_FLAG} has {', '.join(sorted(fields))}, which is not supported: remove it")


def _quantization(name: object) -> QuantizationName:
    if name not in get_args(QuantizationName):
        raise StartupError(
            f"the quantization of the draft model is {name!r}, allowed is one of "
            f"{', '.join(get_args(QuantizationName))}"
        )
    return name  # type: ignore[return-value]  # checked above
