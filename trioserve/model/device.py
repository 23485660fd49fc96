"""Properties of this machine: the device, its number format, its GPUs, and the number of KV blocks that fit.

For GPUs: whether torch can use one, which GPU a rank takes, and the limits that fit a GPU.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from trioserve.contracts.errors import GpuLost, StartupError
from trioserve.contracts.extras import install_command
from trioserve.model.encoder_config import EncoderConfig
from trioserve.model.layer_config import (
    AttentionConfig,
    DeltaNetConfig,
    LatentAttentionConfig,
    LayerConfig,
    MlpConfig,
    SelectiveScanConfig,
    SharedBlock,
)
from trioserve.model.model_config import ModelConfig
from trioserve.model.number_formats import VALUE_BYTES, Dtype, KvFormat, head_bytes, kv_format_of
from trioserve.model.settings import MAX_NUM_SEQS_GPU, ModelSettings

if TYPE_CHECKING:
    import torch

__all__ = [
    "STEP_TOKENS_GPU",
    "CacheSize",
    "DeviceType",
    "attended_token_flops",
    "cache_size",
    "default_thread_count",
    "driver_version",
    "free_host_bytes",
    "has_cuda_driver",
    "has_torch",
    "kv_block_bytes",
    "lost_gpu",
    "multiplies_bfloat16",
    "new_event",
    "pick_device",
    "pick_dtype",
    "pick_encoder_dtype",
    "pick_vision_dtype",
    "set_torch_threads",
    "step_weight_bytes",
    "take_gpu",
    "takes_every_cpu",
    "token_flops",
    "torch_now",
    "why_no_gpu",
    "with_device_defaults",
    "with_images",
]

logger = logging.getLogger(__name__)


DeviceType = Literal["cpu", "cuda"]

# Unless kv_cache_bytes is set, the KV cache is not larger than this, because other programs also need memory.
KV_CACHE_BYTES_MAX_CPU = 4 * 2**30
KV_CACHE_SHARE_CPU = 0.25  # fraction of the free memory that the KV cache may use
SNAPSHOTS_MAX = 1_024  # Copies of states. KV blocks use the memory of further copies better.
# Linux uses these names for the CPU features that multiply bfloat16 numbers, on x86-64 and on ARM.
BFLOAT16_FEATURES = frozenset(("avx512_bf16", "amx_bf16", "bf16"))
# If no layer has attention, blocks need no KV memory. These are then the minimum and the maximum of their tokens. The
# maximum exists because the bookkeeping of a block needs some memory.
FREE_BLOCKS_TOKENS, FREE_BLOCKS_TOKENS_MAX = 2**20, 2**24


def has_torch() -> bool:
    """Return True if torch, an optional dependency, is installed. The function does not import torch."""
    return importlib.util.find_spec("torch") is not None


def torch_now(purpose: str = "this") -> ModuleType:
    """Import torch and return it.

    The import takes seconds and 200 MiB, and the native kernels work without torch. Call this function only where torch
    is required.

    Args:
        purpose: beginning of the error message: a phrase that names the feature that needs torch.

    Raises:
        StartupError: torch is not installed.
    """
    if not has_torch():
        raise StartupError(f"{purpose} needs torch, which is not installed: {install_command('torch')}")
    # OpenMP reads this variable when torch is first imported. With a low number, waiting threads stop spinning early,
    # so they do not compete with the event loop for a core.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    import torch

    return torch


def set_torch_threads(settings: ModelSettings) -> None:
    """Set the number of torch's threads from settings.threads. None keeps torch's default.

    Call this function in the thread that will compute, because OpenMP stores the number for each calling thread.

    Args:
        settings: settings of the model.
    """
    if settings.threads is not None:
        torch_now().set_num_threads(settings.threads)


def default_thread_count(root: Path = Path("/")) -> int:
    """Return torch's default number of threads: OMP_NUM_THREADS, or one for each core that this process may use.

    Args:
        root: root of the file system to read.
    """
    wanted = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if wanted.isdecimal() and int(wanted) > 0:
        return int(wanted)
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    return len({_core_of(cpu, root) for cpu in os.sched_getaffinity(0)})


def takes_every_cpu(settings: ModelSettings, device: DeviceType) -> bool:
    """Return True if a step uses every CPU of this process, including both hardware threads of each core.

    Args:
        settings: settings of the model.
        device: device that computes.
    """
    if device != "cpu" or not hasattr(os, "sched_getaffinity"):
        return False
    return (settings.threads or default_thread_count()) >= len(os.sched_getaffinity(0))


def _core_of(cpu: int, root: Path) -> str:
    """Return a string that is equal for all CPUs of one core. They share execution units, so they count as one."""
    try:
        return (root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text(encoding="ascii")
    except OSError:
        return str(cpu)


def pick_dtype(config: ModelConfig, settings: ModelSettings, device: DeviceType) -> Dtype:
    """Return the number format of weights, activations and KV.

    "auto" selects the checkpoint's format, with two exceptions on a CPU. float16 becomes bfloat16, because few CPUs can
    multiply float16 numbers and torch's emulation takes several times as long. If the settings require quantized
    weights, the format is also bfloat16.

    Args:
        config: model to compute.
        settings: settings of the model.
        device: device that computes.
    """
    if settings.dtype != "auto":
        return settings.dtype
    is_replaced = device == "cpu" and (settings.demands_quantized or config.dtype_name == "float16")
    return "bfloat16" if is_replaced else config.dtype_name


def pick_encoder_dtype(config: EncoderConfig, settings: ModelSettings, device: DeviceType) -> Dtype:
    """Return the number format of an encoder of texts.

    "auto" selects the checkpoint's format on a GPU. On a CPU it selects float32, because encoders are small, and their
    vectors should be precise.

    Args:
        config: encoder.
        settings: settings of the model.
        device: device that computes.
    """
    if settings.dtype != "auto":
        return settings.dtype
    return "float32" if device == "cpu" else config.dtype_name


def kv_block_bytes(config: ModelConfig, block_size: int, dtype: Dtype, kv_format: KvFormat = "plain") -> int:
    """Return the bytes of one KV block in all layers.

    Args:
        config: model whose KV is stored.
        block_size: tokens in one block.
        dtype: number format of the model.
        kv_format: number format of the KV cache.
    """
    entries = (entry for entry in config.kv_entries if entry is not None)
    return block_size * sum(
        entry.part_count * entry.head_count * head_bytes(entry.head_dim, dtype, kv_format) for entry in entries
    )


def step_weight_bytes(config: ModelConfig, dtype: Dtype) -> int:
    """Return the bytes of weights that a decode step reads. The embedding table counts only if it is also the output
    layer.

    Args:
        config: model to compute.
        dtype: number format of the weights.
    """
    return (_layer_weights(config) + config.vocab_count * config.hidden_size) * VALUE_BYTES[dtype]


def token_flops(config: ModelConfig) -> int:
    """Return the floating-point operations of the layers' matrix products for one token.

    A multiplication and an addition count as two.

    Args:
        config: model to compute.
    """
    return 2 * _layer_weights(config)


def attended_token_flops(config: ModelConfig) -> int:
    """Return the floating-point operations of attention in all layers for one pair of tokens.

    These operations compute the score of a query with one attended token, and add that token's value to the weighted
    sum.

    Args:
        config: model to compute.
    """
    return 2 * sum(map(_attended_numbers, config.layers))


def _layer_weights(config: ModelConfig) -> int:
    """Return the number of weights that one token is multiplied with. Only the chosen experts of a mixture count."""
    hidden, streams = config.hidden_size, config.streams
    own = sum(_attention_weights(layer, config) + hidden * _mlp_columns(layer) for layer in config.layers)
    own += 2 * hidden * sum(layer.laurel_rank for layer in config.layers)
    own += sum(_block_weights(layer, layer.block, hidden) for layer in config.layers if layer.block is not None)
    if streams is None:
        return own
    # With residual streams, each layer also has three projections: to the inputs, to their gate, and back.
    return own + hidden * (3 * config.layer_count * streams.input_size + 2 * (streams.count - 1) * hidden)


def _attended_numbers(layer: LayerConfig) -> int:
    """Return the size of all heads' queries, plus the size of the values that one attended token contributes.

    With an indexer, all tokens count as attended, also those that it does not select.
    """
    attention = layer.attention
    if isinstance(attention, AttentionConfig):
        return attention.query_size + attention.attended_size
    if isinstance(attention, LatentAttentionConfig):
        index_numbers = 0 if (indexer := attention.indexer) is None else indexer.head_count * indexer.head_dim
        return attention.head_count * (attention.entry_dim + attention.latent_dim) + index_numbers
    return 0


def _attention_weights(layer: LayerConfig, config: ModelConfig) -> int:
    """Return the number of weights of a layer's attention or recurrence, including a state space beside attention."""
    attention, recurrent, hidden = layer.attention, layer.recurrent, config.hidden_size
    states = 0 if recurrent is None else hidden * (recurrent.projected_size + recurrent.inner_size)
    if isinstance(recurrent, SelectiveScanConfig):
        states += recurrent.channel_count * (sum(recurrent.selected_sizes) + recurrent.rank)
    if isinstance(recurrent, DeltaNetConfig):
        states += recurrent.rank * sum(recurrent.latent_sizes.values())
    if isinstance(attention, AttentionConfig):
        return states + hidden * (attention.attended_size + attention.projected_size + attention.gate_size)
    if not isinstance(attention, LatentAttentionConfig):
        return states
    rank = attention.query_rank
    queries = hidden * attention.query_size if rank is None else rank * (hidden + attention.query_size)
    heads = attention.head_count * attention.latent_dim * (attention.plain_dim + attention.value_dim)
    if (indexer := attention.indexer) is not None and rank is not None:
        queries += rank * indexer.head_count * indexer.head_dim + hidden * (indexer.head_dim + indexer.head_count)
    return queries + heads + hidden * (attention.entry_dim + attention.value_size)


def _block_weights(layer: LayerConfig, block: SharedBlock, hidden: int) -> int:
    """Return the number of weights of a shared block that a plain layer does not have: a second half of the inputs of
    attention, adapters, and the projection of the result.
    """
    assert isinstance(layer.attention, AttentionConfig), "checked by LayerConfig"
    adapters = sum(block.rank * sum(sizes) for sizes in block.adapters(layer, hidden).values())
    return hidden * (layer.attention.projected_size + hidden) + adapters


def _mlp_columns(layer: LayerConfig) -> int:
    plain = 3 * layer.mlp.intermediate_size if isinstance(layer.mlp, MlpConfig) else 0
    if (mlp := layer.experts) is None:
        return plain
    middle = mlp.experts_per_token * mlp.intermediate_size + mlp.shared_size
    return plain + mlp.choice_count + (2 + mlp.has_gate) * middle


def pick_vision_dtype(dtype: Dtype, device: DeviceType, root: Path = Path("/")) -> Dtype:
    """Return the number format in which torch encodes images.

    The format is the model's, except on a CPU without instructions for bfloat16 products. On such a CPU, torch needs
    only half of the time with float32 (AVX-512), or a quarter (AVX2).

    Args:
        dtype: number format of the model.
        device: device that encodes images.
        root: root of the file system to read.
    """
    is_replaced = device == "cpu" and dtype == "bfloat16" and not multiplies_bfloat16(root)
    return "float32" if is_replaced else dtype


def with_images(arithmetic: str, dtype: Dtype, vision_dtype: Dtype | None) -> str:
    """Return a description of a model's arithmetic, including the arithmetic of its image encoder.

    Args:
        arithmetic: StepModel.arithmetic of the model.
        dtype: number format of the model.
        vision_dtype: number format of the image encoder. None if there is no encoder.
    """
    return arithmetic if vision_dtype in (None, dtype) else f"{arithmetic}, images in {vision_dtype}"


def multiplies_bfloat16(root: Path = Path("/")) -> bool:
    """Return True if Linux lists instructions that multiply bfloat16 among the features of this CPU.

    Args:
        root: root of the file system to read.
    """
    try:
        lines = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    features = next((line.split() for line in lines if line.startswith(("flags", "Features"))), [])
    return not BFLOAT16_FEATURES.isdisjoint(features)


class CacheSize(NamedTuple):
    """Size of a model's cache.

    Attributes:
        block_count: KV blocks.
        state_slot_count: slots for the states of running sequences.
        snapshot_slot_count: slots for copies of states.
    """

    block_count: int
    state_slot_count: int
    snapshot_slot_count: int


def cache_size(
    config: ModelConfig,
    settings: ModelSettings,
    device: DeviceType,
    dtype: Dtype,
    *,
    draft_block_bytes: int = 0,
    draft_block_count: int = 0,
    used_bytes: int = 0,
) -> CacheSize:
    """Return the size of the largest cache that fits. Call this function after the weights are loaded.

    The budget is kv_cache_bytes if this setting is set. Otherwise, on a CPU the budget is 4 GiB or a quarter of the
    free memory, whichever is less. On CUDA, the budget is memory_share of the whole memory minus used_bytes.
    States use at most half of the budget, and copies of states a quarter.

    If no layer has attention, blocks need no memory, and only identify the tokens before a copy of a state. There are
    then enough blocks for one context, or more. The cache may have more blocks than the running sequences can fill,
    because the core limits the number of running sequences.

    Args:
        config: model whose KV is stored.
        settings: settings of the model.
        device: device that computes.
        dtype: number format of the model.
        draft_block_bytes: additional bytes that a draft model needs for each block.
        draft_block_count: number of additional blocks that only the draft model has.
        used_bytes: memory of a GPU that everything but the cache needs: weights, graphs, and the largest step.

    Raises:
        StartupError: not even one block or one state fits.
    """
    budget = settings.kv_cache_bytes
    if budget is None and device == "cuda":
        budget = int(settings.memory_share * torch_now().cuda.mem_get_info()[1]) - used_bytes
    elif budget is None:
        budget = min(KV_CACHE_BYTES_MAX_CPU, int(KV_CACHE_SHARE_CPU * free_host_bytes())) // settings.ranks_here
    elif device != "cuda" and budget > (free := free_host_bytes()):
        raise StartupError(
            f"the KV cache is set to {budget / 2**30:.1f} GiB, but {free / 2**30:.1f} GiB are free: set it to less"
        )
    budget -= draft_block_count * draft_block_bytes
    states = snapshots = 0
    if config.state_bytes:
        states = min(settings.sequences_max, budget // 2 // config.state_bytes)
        if states < 1:
            raise StartupError(
                f"the cache may take {max(budget, 0)} bytes, half of them for states, but the states of one sequence "
                f"need {config.state_bytes}: give it more memory, or use a smaller model"
            )
        snapshots = min(SNAPSHOTS_MAX, budget // 4 // config.state_bytes)
        budget -= (states + snapshots) * config.state_bytes
    block_bytes = kv_block_bytes(config, settings.block_size, dtype, kv_format_of(settings)) + draft_block_bytes
    if block_bytes == 0:
        tokens = min(max(config.context_tokens_max, FREE_BLOCKS_TOKENS), FREE_BLOCKS_TOKENS_MAX)
        return CacheSize(-(-tokens // settings.block_size), states, snapshots)
    if budget < block_bytes:
        raise StartupError(
            f"the KV cache may take {max(budget, 0)} bytes, but one block of {settings.block_size} tokens needs "
            f"{block_bytes}: give it more memory, or use a smaller model"
        )
    return CacheSize(budget // block_bytes, states, snapshots)


def free_host_bytes(root: Path = Path("/")) -> int:
    """Return the memory that this process may still allocate.

    The result is the available memory that Linux reports. If the process's control group may use less memory, the
    result is the unused part of the group's limit.

    Args:
        root: root of the file system to read.
    """
    return min(_available_bytes(root), _cgroup_bytes(root))


def _available_bytes(root: Path) -> int:
    try:
        for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cgroup_bytes(root: Path) -> int:
    """Return the limit minus the usage of a container's control group (version 2, else 1), or 2 ** 63 without a limit.

    Cached pages of files count as free memory, because Linux evicts them first. After a model was read, most of the
    used memory consists of such pages.
    """
    for folder, limit, used in (
        ("sys/fs/cgroup", "memory.max", "memory.current"),
        ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            limit_bytes = (root / folder / limit).read_text(encoding="ascii").strip()
            used_bytes = int((root / folder / used).read_text(encoding="ascii"))
            statistics = (root / folder / "memory.stat").read_text(encoding="ascii").splitlines()
        except OSError:
            continue
        if limit_bytes != "max":
            file_bytes = sum(
                int(line.split()[1]) for line in statistics if line.startswith(("inactive_file ", "active_file "))
            )
            return max(0, int(limit_bytes) - max(0, used_bytes - file_bytes))
    return 2**63


# A prompt chunk of 2,048 tokens uses the matrix units of a GPU well. More tokens per step need more memory for
# activations, which large GPUs have.
STEP_TOKENS_GPU, STEP_TOKENS_LARGE_GPU = 2_048, 8_192
LARGE_GPU_BYTES = 70 * 2**30

CUDA_ERROR_NO_DEVICE = 100
# Errors of the CUDA runtime after which every call of the same process fails, from NVIDIA's description of cudaError.
STICKY_CODES = frozenset((214, 220, 226, 700, 702, 709, 710, *range(714, 720), 721))
# Triton and NCCL raise errors without a code. These texts identify the errors above.
STICKY_TEXTS = (
    "illegal memory access",
    "illegal instruction",
    "illegal address",
    "misaligned address",
    "device-side assert",
    "unspecified launch failure",
    "uncorrectable ECC",
    "uncorrectable NVLink",
    "hardware stack error",
    "invalid program counter",
    "operation not supported on global/shared address space",
    "launch timed out and was terminated",
)
# With fewer cores, a thread that spins while the GPU computes takes a core that the event loop needs. Blocking instead
# costs some microseconds at the end of a step.
SPINNING_CORES_MIN = 4


def pick_device(settings: ModelSettings) -> DeviceType:
    """Return the device that the settings select.

    With "auto", a GPU that torch cannot use is logged once as a warning, and the CPU computes.

    Args:
        settings: settings of the model.

    Raises:
        StartupError: device is cuda, and torch cannot use a GPU.
    """
    if settings.device == "cuda":
        torch_now("device cuda")
        if (reason := why_no_gpu()) is not None:
            raise StartupError(f"device is cuda, but torch cannot use a GPU here: {reason}; or use device cpu or auto")
        return "cuda"
    if settings.device == "cpu" or not has_cuda_driver():
        return "cpu"
    if not has_torch():
        _warn_once(f"to use it, {install_command('gpu')}")
        return "cpu"
    if (reason := why_no_gpu()) is None:
        return "cuda"
    if _driver_status() != CUDA_ERROR_NO_DEVICE:
        _warn_once(reason)
    return "cpu"


def take_gpu(settings: ModelSettings, index: int) -> ModelSettings:
    """Select a separate GPU for each rank if the device is CUDA. Call this function in the thread that computes.

    Args:
        settings: settings of the model.
        index: number of the rank among the ranks of this machine.

    Returns:
        The settings with the device that the rank uses.

    Raises:
        StartupError: there are fewer GPUs than ranks on this machine.
    """
    device = pick_device(settings)
    if device == "cuda":
        cuda = torch_now().cuda
        if index >= (count := cuda.device_count()):
            raise StartupError(
                f"device is {settings.device}, and each rank needs a GPU of its own, but torch sees {count} here for "
                f"{index + 1} ranks or more: use fewer ranks, or device cpu"
            )
        cuda.set_device(index)
    return msgspec.structs.replace(settings, device=device)


def with_device_defaults(settings: ModelSettings) -> ModelSettings:
    """Return settings in which the device, the sequences and the tokens of a step are chosen.

    On a GPU, MAX_NUM_SEQS_GPU sequences run at a time, and a step computes STEP_TOKENS_GPU tokens, or
    STEP_TOKENS_LARGE_GPU if the GPU has at least LARGE_GPU_BYTES of memory. Given values are kept.

    Args:
        settings: settings of the model.

    Raises:
        StartupError: device is cuda, and torch cannot use a GPU.
    """
    device = pick_device(settings)
    sequences, tokens = settings.max_num_seqs, settings.max_num_batched_tokens
    if device == "cuda":
        if tokens is None:
            is_large = torch_now().cuda.mem_get_info()[1] >= LARGE_GPU_BYTES
            tokens = max(STEP_TOKENS_LARGE_GPU if is_large else STEP_TOKENS_GPU, sequences or 0)
        if sequences is None:
            sequences = min(MAX_NUM_SEQS_GPU, tokens)
    return msgspec.structs.replace(
        settings,
        device=device,
        max_num_seqs=sequences or settings.sequences_max,
        max_num_batched_tokens=tokens or settings.step_tokens_max,
    )


def has_cuda_driver() -> bool:
    """Return True if the CUDA driver's library is present. Without this library, torch finds no CUDA device.

    The check does not import torch, which takes seconds.
    """
    return _libcuda() is not None


def driver_version(root: Path = Path("/")) -> str:
    """Describe the NVIDIA driver: its version, and the highest CUDA version that it supports.

    Args:
        root: root of the file system to read.
    """
    try:
        text = (root / "proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found = re.search(r"\b\d+\.\d+(?:\.\d+)?\b", text)
    cuda = _driver_cuda()
    supported = "an unknown CUDA version" if cuda is None else f"CUDA up to {cuda[0]}.{cuda[1]}"
    return f"driver {'of unknown version' if found is None else found[0]}, for {supported}"


def why_no_gpu(root: Path = Path("/")) -> str | None:
    """Return the reason why torch cannot use a GPU, and what to do. None if torch can use one. Torch is imported.

    Args:
        root: root of the file system to read.
    """
    torch = torch_now()
    if torch.cuda.is_available():
        return None
    wanted = torch.version.cuda
    versions = f"torch {torch.__version__} is built for {'CUDA ' + wanted if wanted else 'CPUs only'}"
    if not has_cuda_driver():
        return f"{versions}, and the library libcuda.so.1 of NVIDIA's driver is not here: install the driver"
    versions = f"{versions}, {driver_version(root)}"
    supported = _driver_cuda()
    if wanted is None:
        return f"{versions}: {install_command('gpu')}, from an index with CUDA builds of torch"
    # A driver supports all versions of CUDA with its own major version.
    if supported is not None and supported[0] < int(wanted.partition(".")[0]):
        newer = " (580 or newer for CUDA 13)" if wanted.startswith("13.") else ""
        return f"{versions}: install a newer driver{newer}, or a torch that is built for CUDA {supported[0]}"
    status = _driver_status()
    if status == CUDA_ERROR_NO_DEVICE:
        return f"{versions}, and the driver shows no GPU to this process: check CUDA_VISIBLE_DEVICES and nvidia-smi"
    return (
        f"{versions}, and the driver reports error {status}: check nvidia-smi, and that this user may open /dev/nvidia*"
    )


@contextmanager
def lost_gpu() -> Iterator[None]:
    """Replace an error after which this process can no longer use its GPU. Also a decorator.

    Raises:
        GpuLost: torch, Triton or NCCL raised such an error. All other errors are unchanged.
    """
    try:
        yield
    except RuntimeError as error:
        code = getattr(error, "error_code", None)
        if code not in STICKY_CODES and not any(text in str(error) for text in STICKY_TEXTS):
            raise
        raise GpuLost(f"this process can no longer use its GPU: {str(error).partition(chr(10))[0]}") from error


def new_event() -> torch.cuda.Event:
    """Return an event of the current GPU. A thread that waits for it spins, or blocks if there are few cores."""
    make: Any = torch_now().cuda.Event
    event: torch.cuda.Event = make(blocking=_core_count() < SPINNING_CORES_MIN)
    return event


def _core_count() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def _warn_once(reason: str) -> None:
    logger.warning("a GPU may be present but is not used: %s", reason)


def _libcuda() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _driver_cuda() -> tuple[int, int] | None:
    """Return the highest CUDA version that the driver supports. None if the driver does not report it."""
    library, version = _libcuda(), ctypes.c_int()
    if library is None or library.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return version.value // 1000, version.value % 1000 // 10


def _driver_status() -> int | None:
    """Return the result of the driver's start, a CUresult. 0 is success. None without a driver."""
    library = _libcuda()
    return None if library is None else int(library.cuInit(0))
