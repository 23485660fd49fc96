"""How the model is run: number format, device, and the memory its KV cache may take. Checked here, without torch."""

from __future__ import annotations

import math
from typing import Literal, get_args

import msgspec

from trioserve.contracts.errors import StartupError

__all__ = ["CpuKernelsName", "DeviceName", "DtypeName", "KvCacheDtypeName", "ModelSettings", "QuantizationName"]

DtypeName = Literal["auto", "bfloat16", "float16", "float32"]
DeviceName = Literal["auto", "cpu", "cuda"]
CpuKernelsName = Literal["auto", "native", "torch"]
GpuKernelsName = Literal["torch", "triton"]
QuantizationName = Literal["auto", "none", "file", "int8", "int4"]
KvCacheDtypeName = Literal["auto", "int8", "fp8"]

BLOCK_SIZE_MAX = 256  # tokens; a block is the unit of sharing, and of waste at the end of each sequence
THREADS_MAX = 1_024


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True):
    """dtype: auto is the checkpoint's own (device.py has the one exception). device: auto is CUDA where there is one.

    block_size: tokens in one KV block. kv_cache_bytes: size of the whole KV cache; None sizes it by the machine's
    memory. memory_share: of a GPU's memory, the part that weights, KV cache and everything else may fill together.
    kv_cache_dtype: of keys and values; auto is the dtype, fp8 is e4m3.
    threads: of computing on the CPU; None takes torch's default, one per core.
    cpu_kernels: what computes on the CPU; auto is native, compiled if need be, or plain torch where that cannot be had.
    gpu_kernels: what computes on a GPU.
    ranks_here: processes that compute together on this machine and share its memory, this one among them.
    max_num_seqs: as many sequences are computed at a time. context_tokens_max: of each at most so many tokens;
    None is what the model takes. Steps that are prepared ahead are made for these.
    enforce_eager: no step is prepared ahead: no CUDA graphs.
    batch_invariant: the bits of a row depend on its own tokens and the weights alone.
    quantization: of weights in the native kernels' memory; auto is settled in quantization.py.
    Raises StartupError, naming the field, when a value is out of range.
    """

    dtype: DtypeName = "auto"
    device: DeviceName = "auto"
    block_size: int = 16
    kv_cache_bytes: int | None = None
    kv_cache_dtype: KvCacheDtypeName = "auto"
    memory_share: float = 0.9
    threads: int | None = None
    cpu_kernels: CpuKernelsName = "auto"
    gpu_kernels: GpuKernelsName = "torch"
    quantization: QuantizationName = "auto"
    max_num_seqs: int = 64
    context_tokens_max: int | None = None
    enforce_eager: bool = False
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
            ("context_tokens_max", self.context_tokens_max),
        ):
            if value is not None and value < 1:
                raise StartupError(f"{name} is {value}, allowed is 1 or more")
        if self.threads is not None and not 1 <= self.threads <= THREADS_MAX:
            raise StartupError(f"threads is {self.threads}, allowed is 1 to {THREADS_MAX}")

    @property
    def demands_quantized(self) -> bool:
        """Whether quantized weights are demanded, so that there is nothing to fall back to."""
        return self.quantization not in ("auto", "none")

    def _check_quantization(self) -> None:
        if self.quantization == "file" and self.device == "cuda":
            if self.gpu_kernels != "triton":
                raise StartupError(
                    "quantization is file and gpu_kernels is torch, which dequantizes weights: take gpu_kernels "
                    "triton, or quantization none"
                )
            return
        for name, value, allowed in (
            ("dtype", self.dtype, ("auto", "bfloat16")),
            ("device", self.device, ("auto", "cpu")),
            ("cpu_kernels", self.cpu_kernels, ("auto", "native")),
        ):
            if value not in allowed:
                raise StartupError(
                    f"quantization is {self.quantization} and {name} is {value}, but quantized weights are computed "
                    f"with on the CPU alone, by the native kernels and in bfloat16: take {name} "
                    f"{' or '.join(allowed)}, or quantization none"
                )


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise StartupError(f"{name} is {value!r}, allowed is one of {', '.join(allowed)}")
