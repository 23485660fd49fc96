"""What this machine has: where the model runs, in which number format, and how many KV blocks fit."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
from pathlib import Path
from types import ModuleType
from typing import Literal, NamedTuple

from trioserve.contracts.errors import StartupError
from trioserve.model.kv_format import KvFormat, head_bytes, kv_format_of
from trioserve.model.model_config import AttentionConfig, LatentAttentionConfig, LayerConfig, MlpConfig, ModelConfig
from trioserve.model.number_formats import VALUE_BYTES, Dtype
from trioserve.model.settings import ModelSettings

__all__ = [
    "DeviceType",
    "CacheSize",
    "attended_token_flops",
    "cache_size",
    "default_thread_count",
    "free_host_bytes",
    "has_torch",
    "kv_block_bytes",
    "multiplies_bfloat16",
    "pick_device",
    "pick_dtype",
    "pick_vision_dtype",
    "set_torch_threads",
    "take_gpu",
    "takes_every_cpu",
    "step_weight_bytes",
    "token_flops",
    "torch_now",
    "with_images",
]

logger = logging.getLogger(__name__)

DeviceType = Literal["cpu", "cuda"]

KV_CACHE_BYTES_MAX_CPU = 4 * 2**30  # the rest of a host's memory is not ours to take unasked
KV_CACHE_SHARE_CPU = 0.25  # of what is free
SNAPSHOTS_MAX = 1_024  # of states; small ones would else take memory that is better used for blocks
BFLOAT16_FEATURES = frozenset(("avx512_bf16", "amx_bf16", "bf16"))  # as Linux names them, on x86-64 and on ARM
FREE_BLOCKS_TOKENS, FREE_BLOCKS_TOKENS_MAX = 2**20, 2**24  # of blocks without memory; their books take some


def has_torch() -> bool:
    """Whether torch is installed, which is an extra. Does not import it."""
    return importlib.util.find_spec("torch") is not None


def torch_now(purpose: str = "this") -> ModuleType:
    """torch, imported by now at the latest. That takes seconds and 200 MiB, and the native kernels do without it: only
    what cannot go on without torch asks. purpose: what it is needed for, the beginning of a sentence. Raises
    StartupError where it is not installed."""
    if not has_torch():
        raise StartupError(f"{purpose} needs torch, which is not installed: pip install 'trioserve[torch]'")
    # Read by OpenMP when torch is first imported: threads that wait for each other give the core back soon, so that a
    # busy event loop on the other core costs a step little.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    import torch

    return torch


def set_torch_threads(settings: ModelSettings) -> None:
    """Have torch compute with settings.threads threads, if they are set; otherwise its own default stays. Call it in
    the thread that will compute: OpenMP keeps the number for each thread that calls it."""
    if settings.threads is not None:
        torch_now().set_num_threads(settings.threads)


def pick_device(settings: ModelSettings) -> DeviceType:
    """The device that the settings name. Raises StartupError if CUDA is asked for and there is none."""
    if settings.device == "cuda":
        if not torch_now("device cuda").cuda.is_available():
            raise StartupError("device is cuda, but torch sees no CUDA device here: use device cpu or auto")
        return "cuda"
    is_wanted = settings.device == "auto" and _has_cuda_driver()
    if is_wanted and not has_torch():
        logger.warning("a GPU may be here, and is left alone: to use it, pip install 'trioserve[gpu]'")
        return "cpu"
    return "cuda" if is_wanted and torch_now().cuda.is_available() else "cpu"


def take_gpu(settings: ModelSettings, index: int) -> None:
    """Have a rank compute on a GPU of its own, if the settings name CUDA. Call it in the thread that computes.

    Args:
        index: the rank's place among the ranks of this machine.

    Raises:
        StartupError: there are no GPUs here, or fewer than ranks.
    """
    if settings.device != "cuda":
        return
    pick_device(settings)
    cuda = torch_now().cuda
    if index >= (count := cuda.device_count()):
        raise StartupError(
            f"device is cuda, and each rank needs a GPU of its own, but torch sees {count} here for {index + 1} ranks "
            "or more: use fewer ranks, or device cpu"
        )
    cuda.set_device(index)


def _has_cuda_driver() -> bool:
    """Without this library torch sees no CUDA device either; looking for it takes no import of torch."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def default_thread_count(root: Path = Path("/")) -> int:
    """torch's own default: OMP_NUM_THREADS, or one thread for each core that this process may run on."""
    wanted = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if wanted.isdecimal() and int(wanted) > 0:
        return int(wanted)
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    return len({_core_of(cpu, root) for cpu in os.sched_getaffinity(0)})


def takes_every_cpu(settings: ModelSettings, device: DeviceType) -> bool:
    """Whether a step leaves no CPU of this process to anybody else, not even the second half of a core."""
    if device != "cpu" or not hasattr(os, "sched_getaffinity"):
        return False
    return (settings.threads or default_thread_count()) >= len(os.sched_getaffinity(0))


def _core_of(cpu: int, root: Path) -> str:
    """The same text for all CPUs of one core: they share what computes, so they count once."""
    try:
        return (root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text(encoding="ascii")
    except OSError:
        return str(cpu)


def pick_dtype(config: ModelConfig, settings: ModelSettings, device: DeviceType) -> Dtype:
    """The number format of weights, activations and KV.

    auto takes the checkpoint's own, but bfloat16 for a float16 one on a CPU: few CPUs multiply float16, and torch's way
    around takes several times as long; and bfloat16 where quantized weights are demanded, which need it.
    """
    if settings.dtype != "auto":
        return settings.dtype
    is_replaced = device == "cpu" and (settings.demands_quantized or config.dtype_name == "float16")
    return "bfloat16" if is_replaced else config.dtype_name


def kv_block_bytes(config: ModelConfig, block_size: int, dtype: Dtype, kv_format: KvFormat = "plain") -> int:
    """What one block takes: what is kept of block_size tokens in all layers."""
    entries = (entry for entry in config.kv_entries if entry is not None)
    return block_size * sum(
        entry.part_count * entry.head_count * head_bytes(entry.head_dim, dtype, kv_format) for entry in entries
    )


def step_weight_bytes(config: ModelConfig, dtype: Dtype) -> int:
    """What a decode step has to read of the weights: all but an embedding table that is not the output layer, too."""
    return (_layer_weights(config) + config.vocab_count * config.hidden_size) * VALUE_BYTES[dtype]


def token_flops(config: ModelConfig) -> int:
    """What the layers' matrix products of one token take, a multiplication and an addition counting as two."""
    return 2 * _layer_weights(config)


def attended_token_flops(config: ModelConfig) -> int:
    """What attention takes for one token that another one sees, in all layers: its score, and its part of the sum."""
    return 2 * sum(map(_attended_numbers, config.layers))


def _layer_weights(config: ModelConfig) -> int:
    """That a token is multiplied with: of a mixture, those of the experts that it is sent to."""
    hidden, streams = config.hidden_size, config.streams
    own = sum(_attention_weights(layer, config) + hidden * _mlp_columns(layer) for layer in config.layers)
    own += 2 * hidden * sum(layer.laurel_rank for layer in config.layers)
    if streams is None:
        return own
    # Of each layer the projection of its inputs, what they are gated by, and their way back.
    return own + hidden * (3 * config.layer_count * streams.input_size + 2 * (streams.count - 1) * hidden)


def _attended_numbers(layer: LayerConfig) -> int:
    """Of a token's query, and of what it adds up."""
    attention = layer.attention
    if isinstance(attention, AttentionConfig):
        return 2 * attention.query_size
    if isinstance(attention, LatentAttentionConfig):
        return attention.head_count * (attention.entry_dim + attention.latent_dim)
    return 0


def _attention_weights(layer: LayerConfig, config: ModelConfig) -> int:
    """Of what is in its place or beside it, too."""
    attention, recurrent, hidden = layer.attention, layer.recurrent, config.hidden_size
    states = 0 if recurrent is None else hidden * (recurrent.projected_size + recurrent.inner_size)
    if isinstance(attention, AttentionConfig):
        gates = attention.query_size if attention.has_gate else 0
        return states + hidden * (attention.query_size + attention.projected_size + gates)
    if not isinstance(attention, LatentAttentionConfig):
        return states
    rank = attention.query_rank
    queries = hidden * attention.query_size if rank is None else rank * (hidden + attention.query_size)
    heads = attention.head_count * attention.latent_dim * (attention.plain_dim + attention.value_dim)
    return queries + heads + hidden * (attention.entry_dim + attention.value_size)


def _mlp_columns(layer: LayerConfig) -> int:
    mlp = layer.mlp
    if mlp is None:
        return 0
    if isinstance(mlp, MlpConfig):
        return 3 * mlp.intermediate_size
    return mlp.expert_count + 3 * (mlp.experts_per_token * mlp.intermediate_size + mlp.shared_size)


def pick_vision_dtype(dtype: Dtype, device: DeviceType, root: Path = Path("/")) -> Dtype:
    """The number format in which torch encodes images. dtype: the model's, which is taken, but float32 for bfloat16 on
    a CPU that does not multiply bfloat16: it takes torch half the time (AVX-512) or a quarter (AVX2)."""
    is_replaced = device == "cpu" and dtype == "bfloat16" and not multiplies_bfloat16(root)
    return "float32" if is_replaced else dtype


def with_images(arithmetic: str, dtype: Dtype, vision_dtype: Dtype | None) -> str:
    """StepModel.arithmetic of a model that computes in `dtype`, and whose images are encoded in vision_dtype; None: it
    sees none."""
    return arithmetic if vision_dtype in (None, dtype) else f"{arithmetic}, images in {vision_dtype}"


def multiplies_bfloat16(root: Path = Path("/")) -> bool:
    """Whether this machine's CPU has instructions for that. False where Linux does not say."""
    try:
        lines = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    features = next((line.split() for line in lines if line.startswith(("flags", "Features"))), [])
    return not BFLOAT16_FEATURES.isdisjoint(features)


class CacheSize(NamedTuple):
    """Of a model's cache: KV blocks, slots for the states of sequences that run, and slots for copies of such."""

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
) -> CacheSize:
    """What of it fits; call it when the weights are loaded. Raises StartupError if not even one block or state does.

    In all it has kv_cache_bytes if that is set. Else on a CPU 4 GiB or a quarter of the free memory, whichever is less;
    on CUDA memory_share of the whole less what is in use. Of these, states have half at most, and copies of states a
    quarter. Where no layer has attention, blocks take no memory, and there are as many as a context has, or more: they
    only name what lies before a copy of a state. More than sequences of the model's whole context could ever fill is
    not avoided here: the core limits how many run. draft_block_bytes: of a draft model, for each block;
    draft_block_count: blocks that only the draft model has.
    """
    budget = settings.kv_cache_bytes
    if budget is None and device == "cuda":
        free, total = torch_now().cuda.mem_get_info()
        budget = int(settings.memory_share * total) - (total - free)
    elif budget is None:
        budget = min(KV_CACHE_BYTES_MAX_CPU, int(KV_CACHE_SHARE_CPU * free_host_bytes())) // settings.ranks_here
    elif device != "cuda" and budget > (free := free_host_bytes()):
        raise StartupError(
            f"the KV cache is to have {budget / 2**30:.1f} GiB, but {free / 2**30:.1f} GiB are free: ask for less"
        )
    budget -= draft_block_count * draft_block_bytes
    states = snapshots = 0
    if config.state_bytes:
        states = min(settings.max_num_seqs, budget // 2 // config.state_bytes)
        if states < 1:
            raise StartupError(
                f"the cache may take {max(budget, 0)} bytes, of which states have half, but those of one sequence need "
                f"{config.state_bytes}: give it more memory, or use a smaller model"
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
    """Memory that this process may still take: what the kernel calls available, or what is left of the process's
    control group where that is less."""
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
    """Limit less use of the control group (version 2, then 1) that a container sees as its own; no limit is 2 ** 63.

    Pages of files count as free: they are the first to go, and a model that was just read has filled them.
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
