"""The Qwen family: Qwen2 is a Llama with biases, which the config says; Qwen3 norms each query and key head."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from trioserve.model.families.llama import LlamaLayer, LlamaModel
from trioserve.model.model_config import ModelConfig
from trioserve.model.torch_formats import TensorSlot
from trioserve_kernels import Kernels

__all__ = ["Qwen3Layer", "Qwen3Model"]


class Qwen3Layer(LlamaLayer):
    """A Llama layer that RMS-norms queries and keys per head before they are turned."""

    def __init__(
        self, config: ModelConfig, index: int, kernels: Kernels, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(config, index, kernels, dtype=dtype, device=device)
        # One weight row for every head that is turned, so that queries and keys are normed together.
        self._head_weights = torch.empty(self._rotated_heads, config.head_dim, dtype=dtype, device=device)
        self._head_names = {
            f"layers.{index}.q_norm": slice(0, config.head_count),
            f"layers.{index}.k_norm": slice(config.head_count, None),
        }

    def slots(self) -> Iterator[TensorSlot]:
        yield from super().slots()
        for name, rows in self._head_names.items():
            place = self._head_weights[rows]
            yield TensorSlot(f"{name}.weight", (self._head_dim,), place.dtype, place.copy_)

    def prepare_heads_(self, heads: Tensor) -> None:
        torch.mul(self._kernels.rms_norm(heads, None, self._eps), self._head_weights, out=heads)


class Qwen3Model(LlamaModel):
    layer_type = Qwen3Layer
