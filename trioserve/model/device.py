"""What this machine has: where the model runs, in which number format, and how many KV blocks fit."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from trioserve.contracts.errors import StartupError
from trioserve.model.model_config import ModelConfig
from trioserve.model.settings import ModelSettings

__all__ = ["free_host_bytes", "kv_block_bytes", "kv_block_count", "step_weight_bytes", "pick_device", "pick_dtype"]

KV_CACHE_BYTES_MAX_CPU = 4 * 2**30  # the rest of a host's memory is not ours to take unasked
KV_CACHE_SHARE_CPU = 0.25  # of what is free


def pick_device(settings: ModelSettings) -> torch.device:
    """The device that the settings name. Raises StartupError if CUDA is asked for and there is none."""
    available = torch.cuda.is_available()
    if settings.device == "cuda" and not available:
        raise StartupError("device is cuda, but torch sees no CUDA device here: use device cpu or auto")
    if settings.device == "cpu" or not available:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def pick_dtype(config: ModelConfig, settings: ModelSettings, device: torch.device) -> torch.dtype:
    """The number format of weights, activations and KV.

    auto takes the checkpoint's own, but bfloat16 for a float16 one on a CPU: few CPUs multiply float16, and torch's way
    around takes several times as long.
    """
    name: str = settings.dtype
    if name == "auto":
        name = "bfloat16" if device.type == "cpu" and config.dtype_name == "float16" else config.dtype_name
    return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[name]


def kv_block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """What one block takes: keys and values of block_size tokens in all layers."""
    return 2 * config.layer_count * config.kv_head_count * config.head_dim * block_size * dtype.itemsize


def step_weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """What a decode step has to read of the weights: all but an embedding table that is not the output layer, too."""
    attention = config.hidden_size * config.head_dim * (2 * config.head_count + 2 * config.kv_head_count)
    mlp = 3 * config.hidden_size * config.intermediate_size
    return (config.layer_count * (attention + mlp) + config.vocab_size * config.hidden_size) * dtype.itemsize


def kv_block_count(config: ModelConfig, settings: ModelSettings, device: torch.device, dtype: torch.dtype) -> int:
    """How many KV blocks fit; call it when the weights are loaded. Raises StartupError if not even one does.

    kv_cache_bytes if it is set. Else on a CPU 4 GiB or a quarter of the free memory, whichever is less; on CUDA
    memory_share of the whole less what is in use. More than sequences of the model's whole context could ever fill is
    not avoided here: the core limits how many run.
    """
    budget = settings.kv_cache_bytes
    if budget is None and device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        budget = int(settings.memory_share * total) - (total - free)
    elif budget is None:
        budget = min(KV_CACHE_BYTES_MAX_CPU, int(KV_CACHE_SHARE_CPU * free_host_bytes()))
    elif device.type != "cuda" and budget > (free := free_host_bytes()):
        raise StartupError(
            f"the KV cache is to have {budget / 2**30:.1f} GiB, but {free / 2**30:.1f} GiB are free: ask for less"
        )
    block_bytes = kv_block_bytes(config, settings.block_size, dtype)
    if budget < block_bytes:
        raise StartupError(
            f"the KV cache may take {max(budget, 0)} bytes, but one block of {settings.block_size} tokens needs "
            f"{block_bytes}: give it more memory, or use a smaller model"
        )
    return budget // block_bytes


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
