"""The Llama family (Llama, Mistral, SmolLM): how layers are joined, and one step through all of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from trioserve.contracts.step import IsAbandoned, never_abandoned
from trioserve.model.attention import attend
from trioserve.model.kv_storage import KVStorage
from trioserve.model.layers import Embedding, Linear, Norm, RotaryAngles
from trioserve.model.model_config import ModelConfig
from trioserve.model.step_tensors import StepTensors
from trioserve.model.torch_formats import TensorSlot
from trioserve_kernels import Kernels

__all__ = ["LlamaLayer", "LlamaModel"]


class LlamaLayer:
    """One decoder layer: norm, attention, norm, gated MLP, each pair around a residual sum."""

    def __init__(
        self, config: ModelConfig, index: int, kernels: Kernels, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._kernels = kernels
        self._eps = config.rms_norm_eps
        self._window = config.sliding_windows[index]
        self._head_dim = config.head_dim
        self._rotated_heads = config.head_count + config.kv_head_count
        self._kv_heads = config.kv_head_count
        self._query_size = config.head_count * config.head_dim
        self._kv_size = 2 * config.kv_head_count * config.head_dim
        hidden, middle = config.hidden_size, config.intermediate_size
        name = f"layers.{index}"
        keys = config.kv_head_count * config.head_dim
        self._input_norm = Norm(f"{name}.input_norm", hidden, dtype=dtype, device=device)
        self._post_norm = Norm(f"{name}.post_norm", hidden, dtype=dtype, device=device)
        self._qkv = Linear(
            hidden,
            {f"{name}.q_proj": self._query_size, f"{name}.k_proj": keys, f"{name}.v_proj": keys},
            bias=config.attention_bias,
            dtype=dtype,
            device=device,
            kernels=kernels,
        )
        self._output = Linear(
            self._query_size,
            {f"{name}.o_proj": hidden},
            bias=config.attention_output_bias,
            dtype=dtype,
            device=device,
            kernels=kernels,
        )
        self._gate_up = Linear(
            hidden,
            {f"{name}.gate_proj": middle, f"{name}.up_proj": middle},
            bias=config.mlp_bias,
            dtype=dtype,
            device=device,
            kernels=kernels,
        )
        self._down = Linear(
            middle,
            {f"{name}.down_proj": hidden},
            bias=config.mlp_bias,
            dtype=dtype,
            device=device,
            kernels=kernels,
        )

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self._qkv, self._output, self._gate_up, self._down

    def slots(self) -> Iterator[TensorSlot]:
        for part in (self._input_norm, self._qkv, self._output, self._post_norm, self._gate_up, self._down):
            yield from part.slots()

    def __call__(
        self,
        hidden: Tensor,
        product: Tensor | None,
        step: StepTensors,
        cos: Tensor,
        sin: Tensor,
        pages: Tensor,
        slots_of_layer: Tensor,
    ) -> Tensor:
        """Writes the step's keys and values into the layer's cache.

        hidden: [T, hidden_size], changed in place. product: what is still to be added to it, and what comes back is:
        the residual sum is taken together with the norm that follows it.
        """
        kernels = self._kernels
        qkv = self._qkv(kernels.add_rms_norm_(hidden, product, self._input_norm.weight, self._eps))
        queries, keys_values = torch.split(qkv, [self._query_size, self._kv_size], -1)
        # Queries and keys lie side by side, so they are turned together and in place.
        self.prepare_heads_(qkv.view(qkv.shape[0], -1, self._head_dim)[:, : self._rotated_heads])
        kernels.rotary_and_store_kv_(qkv, cos, sin, slots_of_layer, step.slots, self._kv_heads)
        if step.cleared_slots is not None:
            kernels.clear_slots_(slots_of_layer, step.cleared_slots)
        product = self._output(attend(kernels, queries, keys_values, pages, step.attention[self._window]))
        gate_up = self._gate_up(kernels.add_rms_norm_(hidden, product, self._post_norm.weight, self._eps))
        return self._down(kernels.silu_and_mul(gate_up))

    def prepare_heads_(self, heads: Tensor) -> None:
        """What a family does, in place, to query and key heads [T, H + K, D] before they are turned: here nothing."""


class LlamaModel:
    """Embedding, layers, last norm and output projection. Knows tensors, not the lives of requests."""

    layer_type: type[LlamaLayer] = LlamaLayer

    def __init__(self, config: ModelConfig, kernels: Kernels, *, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self.kernels = kernels
        self._embedding = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self._layers = [
            self.layer_type(config, index, kernels, dtype=dtype, device=device) for index in range(config.layer_count)
        ]
        self._norm = Norm("norm", config.hidden_size, dtype=dtype, device=device)
        self._head = Linear(
            config.hidden_size,
            {"lm_head": config.vocab_size},
            bias=False,
            dtype=dtype,
            device=device,
            kernels=kernels,
        )
        self._rotary = RotaryAngles(config, dtype=dtype, device=device)

    @property
    def linears(self) -> tuple[Linear, ...]:
        """A product of each shape: layers have the same."""
        return (*self._layers[0].linears, self._head)

    def slots(self) -> Iterator[TensorSlot]:
        """A place for every tensor of the checkpoint."""
        tied = self.config.tie_word_embeddings
        yield from self._embedding.slots(tied=self._head if tied else None)
        for layer in self._layers:
            yield from layer.slots()
        yield from self._norm.slots()
        if not tied:
            yield from self._head.slots()

    def forward(
        self, step: StepTensors, storage: KVStorage[Tensor], is_abandoned: IsAbandoned = never_abandoned
    ) -> Tensor | None:
        """Compute every row of the step and write its KV. Returns [T, hidden_size] after the last layer; None if it was
        abandoned, which is asked before each layer."""
        hidden = self._embedding(step.token_ids)
        cos, sin = self._rotary.cos_sin(step.positions)
        product = None
        for layer, pages in zip(self._layers, storage.pages, strict=True):
            if is_abandoned():
                return None
            slots_of_layer = pages.view(pages.shape[0] * storage.block_size, -1)
            product = layer(hidden, product, step, cos, sin, pages, slots_of_layer)
        return hidden if product is None else hidden.add_(product)

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] as forward returns it, to [n, vocab_size]."""
        return self._head(self.normed(hidden))

    def normed(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] as forward returns it, after the last norm."""
        normed: Tensor = self.kernels.rms_norm(hidden, self._norm.weight, self.config.rms_norm_eps)
        return normed
