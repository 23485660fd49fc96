"""Defines and checks the settings of a model, such as number format, device and KV cache memory, without torch."""

from __future__ import annotations

import math
from typing import Literal, get_args

import msgspec

from trioserve.contracts.errors import StartupError

__all__ = [
    "MAX_NUM_SEQS_CPU",
    "MAX_NUM_SEQS_GPU",
    "STEP_TOKENS_CPU",
    "CpuKernelsName",
    "DeviceName",
    "DtypeName",
    "GpuKernelsName",
    "KvCacheDtypeName",
    "ModelSettings",
    "QuantizationName",
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
