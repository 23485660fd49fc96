"""The KV tensors of all layers and their layout. Who may use which block is settled in the core."""

from __future__ import annotations

import torch
from torch import Tensor

from trioserve.model.model_config import ModelConfig

__all__ = ["KVStorage"]


class KVStorage:
    """One buffer a layer, each [blocks, block_size, 2, kv_heads, head_dim], keys at index 0 and values at index 1.

    One buffer for all layers would be copied whole by compilers that index it. Within a layer a token's keys and values
    lie side by side: one row to write, and one contiguous block to gather. `pages` and `slots` are two views of the
    same memory: by block, and by token (slot = block * block_size + offset). The native CPU kernels read and write the
    same layout, so a block is copied in and out alike, whatever computes. The memory comes uninitialised; who begins a
    block clears what lies behind its last token, unless the kernels never read that.
    """

    def __init__(
        self, config: ModelConfig, *, block_count: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.block_count = block_count
        self.block_size = block_size
        shape = (block_count, block_size, 2, config.kv_head_count, config.head_dim)
        self.pages: tuple[Tensor, ...] = tuple(
            torch.empty(shape, dtype=dtype, device=device) for _ in range(config.layer_count)
        )
        self.slots: tuple[Tensor, ...] = tuple(pages.view(block_count * block_size, -1) for pages in self.pages)
