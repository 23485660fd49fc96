"""A decoder-only model in torch: executes the description of any family, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from trioserve.contracts.step import IsAbandoned, never_abandoned
from trioserve.model.attention import attend
from trioserve.model.kv_storage import KVStorage
from trioserve.model.layers import Embedding, HeadNorms, Linear, Norm, RotaryAngles
from trioserve.model.model_config import LayerConfig, ModelConfig
from trioserve.model.step_tensors import StepTensors
from trioserve.model.torch_formats import TensorSlot
from trioserve_kernels import Kernels

__all__ = ["Decoder"]

Angles = tuple[Tensor, Tensor]


class _Layer:
    """Attention and MLP, with the norms and sums around them that the description names."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        layer: LayerConfig,
        kernels: Kernels,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._kernels = kernels
        self._layer = layer
        attention, mlp = layer.attention, layer.mlp
        self.rotary = attention.rotary
        self._head_dim = attention.head_dim
        self._kv_heads = attention.kv_head_count
        self._query_size = attention.query_size
        self._kv_size = 2 * attention.key_size
        self._query_factor = attention.query_factor
        hidden, middle, keys = config.hidden_size, mlp.intermediate_size, attention.key_size
        name = f"layers.{index}"

        def norm(module: str, is_there: bool) -> Norm | None:
            if not is_there:
                return None
            return Norm(f"{name}.{module}", hidden, config, kernels, dtype=dtype, device=device)

        def linear(inputs: int, has_bias: bool, **outputs: int) -> Linear:
            named = {f"{name}.{module}": size for module, size in outputs.items()}
            return Linear(inputs, named, bias=has_bias, dtype=dtype, device=device, kernels=kernels)

        self._attention_norm = norm("attention_norm", layer.has_input_norms)
        self._attention_output_norm = norm("attention_output_norm", layer.has_output_norms)
        self._mlp_norm = norm("mlp_norm", layer.has_input_norms and not layer.is_parallel)
        self._mlp_output_norm = norm("mlp_output_norm", layer.has_output_norms)
        self._qkv = linear(hidden, attention.has_bias, q_proj=self._query_size, k_proj=keys, v_proj=keys)
        self._head_norms: HeadNorms | None = None
        if attention.qk_norm != "none":
            self._head_norms = HeadNorms(name, attention, config, kernels, dtype=dtype, device=device)
        self._output = linear(self._query_size, attention.has_output_bias, o_proj=hidden)
        self._gate_up = linear(hidden, mlp.has_bias, gate_proj=middle, up_proj=middle)
        self._down = linear(middle, mlp.has_bias, down_proj=hidden)

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self._qkv, self._output, self._gate_up, self._down

    def slots(self) -> Iterator[TensorSlot]:
        for part in (
            self._attention_norm,
            self._attention_output_norm,
            self._mlp_norm,
            self._mlp_output_norm,
            self._head_norms,
            *self.linears,
        ):
            if part is not None:
                yield from part.slots()

    def __call__(
        self,
        hidden: Tensor,
        product: Tensor | None,
        step: StepTensors,
        angles: Angles,
        pages: Tensor,
        slots_of_layer: Tensor,
    ) -> Tensor:
        """Writes the step's keys and values into the layer's cache.

        hidden: [T, hidden_size], changed in place. product: what is still to be added to it, and what comes back is:
        the residual sum is taken together with the norm that follows it.
        """
        normed = _added(hidden, product, self._attention_norm)
        attended = self._attended(normed, step, angles, pages, slots_of_layer)
        if self._layer.is_parallel:
            attended += self._gated(normed)
            return self._scaled(attended)
        attended = self._scaled(_normed(attended, self._attention_output_norm))
        normed = _added(hidden, attended, self._mlp_norm)
        return self._scaled(_normed(self._gated(normed), self._mlp_output_norm))

    def _attended(
        self, normed: Tensor, step: StepTensors, angles: Angles, pages: Tensor, slots_of_layer: Tensor
    ) -> Tensor:
        kernels, attention = self._kernels, self._layer.attention
        qkv = self._qkv(normed)
        queries, keys_values = torch.split(qkv, [self._query_size, self._kv_size], -1)
        if self._head_norms is not None:
            self._head_norms(qkv)
        # Queries and keys lie side by side, so they are turned together and in place.
        kernels.rotary_and_store_kv_(qkv, *angles, slots_of_layer, step.slots, self._kv_heads)
        if self._query_factor != 1.0:
            queries.mul_(self._query_factor)
        if step.cleared_slots is not None:
            kernels.clear_slots_(slots_of_layer, step.cleared_slots)
        rows = attend(kernels, queries, keys_values, pages, step.attention[attention.window], attention.score_cap)
        return self._output(rows)

    def _gated(self, normed: Tensor) -> Tensor:
        return self._down(self._kernels.activate_and_mul(self._gate_up(normed), self._layer.mlp.activation))

    def _scaled(self, product: Tensor) -> Tensor:
        scale = self._layer.residual_scale
        return product if scale == 1.0 else product.mul_(scale)


def _added(hidden: Tensor, product: Tensor | None, norm: Norm | None) -> Tensor:
    """The norm of what hidden then is; without one, hidden itself, which must not be changed while this is used."""
    if norm is not None:
        return norm.of_sum(hidden, product)
    return hidden if product is None else hidden.add_(product)


def _normed(product: Tensor, norm: Norm | None) -> Tensor:
    return product if norm is None else norm(product)


class Decoder:
    """Embedding, layers, last norm and output projection. Knows tensors, not the lives of requests."""

    def __init__(self, config: ModelConfig, kernels: Kernels, *, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self.kernels = kernels
        self._embedding = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self._layers = [
            _Layer(config, index, layer, kernels, dtype=dtype, device=device)
            for index, layer in enumerate(config.layers)
        ]
        self._norm = Norm("norm", config.hidden_size, config, kernels, dtype=dtype, device=device)
        self._head = Linear(
            config.hidden_size,
            {"lm_head": config.vocab_size},
            bias=False,
            dtype=dtype,
            device=device,
            kernels=kernels,
        )
        self._rotaries = {
            rotary: RotaryAngles(rotary, config, dtype=dtype, device=device) for rotary in config.rotaries
        }

    @property
    def linears(self) -> tuple[Linear, ...]:
        """A product of each shape."""
        linears = [*(linear for layer in self._layers for linear in layer.linears), self._head]
        return tuple({(linear.inputs, linear.outputs): linear for linear in linears}.values())

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
        if self.config.embedding_scale != 1.0:
            # Rounded first, as the makers of such models do.
            hidden *= torch.tensor(self.config.embedding_scale, dtype=hidden.dtype, device=hidden.device)
        angles = {rotary: angles.cos_sin(step.positions) for rotary, angles in self._rotaries.items()}
        product = None
        for layer, pages in zip(self._layers, storage.pages, strict=True):
            if is_abandoned():
                return None
            slots_of_layer = pages.view(pages.shape[0] * storage.block_size, -1)
            product = layer(hidden, product, step, angles[layer.rotary], pages, slots_of_layer)
        return hidden if product is None else hidden.add_(product)

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] as forward returns it, to [n, vocab_size]."""
        logits = self._head(self.normed(hidden))
        if self.config.logit_scale != 1.0:
            logits = logits * self.config.logit_scale
        cap = self.config.logit_cap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def normed(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] as forward returns it, after the last norm."""
        return self._norm(hidden)
