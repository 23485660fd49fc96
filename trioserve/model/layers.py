"""The parts that every model is made of: linear layers, norms, embedding, rotary angles. How they are joined is settled
in decoder.py."""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from trioserve.model.model_config import AttentionConfig, ModelConfig, RotaryConfig, Temperature
from trioserve.model.rotary import rotary_frequencies
from trioserve.model.torch_adapters import AdapterRows
from trioserve.model.torch_formats import TensorSlot
from trioserve_kernels import Kernels, reference
from trioserve_kernels.four_bits import FourBitWeight, join, weight_of_blocks

__all__ = [
    "Angles",
    "Embedding",
    "HeadNorms",
    "Linear",
    "MakeLinear",
    "Norm",
    "RotaryAngles",
    "Sinks",
    "temperature_factors",
]

ANGLE_TABLE_BYTES_MAX = 2**26  # as much as contexts of 131,072 take with heads of 128 numbers in half formats


class Linear:
    """y = x W^T + b. Several projections of one input are one product, their outputs side by side.

    outputs: the number of output features by the projection's name, in the order of the outputs. block_type: what all
    of them are stored as, if W stays in 4 bits; see four_bits.py.

    On an x86 CPU whose oneDNN takes the dtype, W is kept in oneDNN's own packed order, not the plain one: a decode
    step is bound by reading W once, and packed a step takes a sixth less time. The operators are those torch.compile
    uses when it freezes weights; where torch lacks them the plain order stays.
    """

    def __init__(
        self,
        inputs: int,
        outputs: Mapping[str, int],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels | None = None,
        block_type: str | None = None,
    ) -> None:
        """kernels: None multiplies in plain torch."""
        self._block_type = block_type
        self._four_bit_linear = reference.four_bit_linear if kernels is None else kernels.four_bit_linear
        self._four_bit_parts: dict[str, FourBitWeight] = {}
        self._four_bits: FourBitWeight | None = None
        self._linear = reference.linear if kernels is None else kernels.linear
        self.inputs = inputs
        self._outputs = dict(outputs)
        self._dtype = dtype
        self._device = device
        self._weight: Tensor | None = None
        self._packed = False
        self._bias = torch.empty(sum(outputs.values()), dtype=dtype, device=device) if bias else None
        self._missing = set(outputs)

    @property
    def outputs(self) -> int:
        return sum(self._outputs.values())

    @property
    def saved_bytes(self) -> int:
        """By which W in 4 bits is smaller than in the dtype."""
        if self._four_bits is None:
            return 0
        return self.outputs * self.inputs * self._dtype.itemsize - self._four_bits.byte_count

    def slots(self) -> Iterator[TensorSlot]:
        first = 0
        for name, size in self._outputs.items():
            fill = functools.partial(self._fill, name, first)
            slot = TensorSlot(f"{name}.weight", (size, self.inputs), self._dtype, fill)
            if self._block_type is not None:
                fill_blocks = functools.partial(self._fill_blocks, self._block_type, name)
                slot = slot._replace(block_type=self._block_type, fill_blocks=fill_blocks)
            yield slot
            if self._bias is not None:
                yield TensorSlot(f"{name}.bias", (size,), self._dtype, self._bias[first : first + size].copy_)
            first += size

    def take(self, weight: Tensor) -> None:
        """Use this [out, in] tensor, of the layer's dtype and device, as the whole weight. It must not change."""
        self._packed = _can_pack(weight)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None) if self._packed else weight

    def __call__(self, values: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        """[n, in] to [n, out]."""
        if self._four_bits is not None:
            outputs = self._four_bit_linear(values, self._four_bits, self._bias)
        else:
            assert self._weight is not None, "a linear layer computes before its weight was loaded"
            product = _packed_product if self._packed else functional.linear
            outputs = self._linear(values, self._weight, self._bias, product)
        if adapters is not None:
            adapters.add_(outputs, values, self._outputs)
        return outputs

    def _fill_blocks(self, block_type: str, name: str, blocks: Tensor) -> None:
        """Take one projection's blocks; with the last one the weight is complete."""
        self._four_bit_parts[name] = weight_of_blocks(block_type, blocks.to(self._device))
        self._missing.discard(name)
        if not self._missing:
            self._four_bits = join([self._four_bit_parts.pop(each) for each in self._outputs])

    def _fill(self, name: str, first: int, tensor: Tensor) -> None:
        """Copy one projection's rows in; with the last one the weight is complete. The next one then begins another
        weight, in the old one's place, of which every projection has to come."""
        if not self._missing:
            self._missing = set(self._outputs)
            if self._packed:
                self._weight = None  # of oneDNN's order, and the new one comes in the plain one
        if self._weight is None:
            # Not before: while the file's order lets it, only one unpacked weight exists at a time.
            rows = sum(self._outputs.values())
            self._weight = torch.empty(rows, self.inputs, dtype=self._dtype, device=self._device)
        self._weight[first : first + self._outputs[name]].copy_(tensor)
        self._missing.discard(name)
        if not self._missing:
            self.take(self._weight)


Angles = tuple[Tensor, Tensor]
"""Cosines and sines of a step's rows; see RotaryAngles."""
MakeLinear = Callable[..., Linear]
"""Of one layer: inputs, has_bias, and the outputs of each projection by its name."""


class Embedding:
    """Token ids to rows of a table, or of a part of it."""

    def __init__(
        self, rows: int, columns: int, *, dtype: torch.dtype, device: torch.device, first: int | None = None
    ) -> None:
        """first: the token of the first row, where the table is a part; None: every token has a row."""
        self._first = first
        self.weight = torch.empty(rows, columns, dtype=dtype, device=device)

    def slots(self, *, tied: Linear | None) -> Iterator[TensorSlot]:
        """tied: the output projection that is to use the same weight."""

        def fill(tensor: Tensor) -> None:
            self.weight.copy_(tensor)
            if tied is not None:
                tied.take(self.weight)

        yield TensorSlot("embed.weight", tuple(self.weight.shape), self.weight.dtype, fill)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """int64 [n] to [n, columns], a copy that may be changed. Tokens without a row have zeros."""
        if self._first is None:
            return functional.embedding(token_ids, self.weight)
        places = token_ids - self._first
        is_foreign = (places < 0) | (places >= self.weight.shape[0])
        rows = functional.embedding(places.masked_fill(is_foreign, 0), self.weight)
        return rows.masked_fill_(is_foreign[:, None], 0.0)


class Norm:
    """RMS norm, or LayerNorm without a bias, whichever the model has, and its weight."""

    def __init__(
        self,
        name: str,
        size: int,
        config: ModelConfig,
        kernels: Kernels,
        *,
        dtype: torch.dtype,
        device: torch.device,
        eps: float | None = None,
    ) -> None:
        """eps: None is the model's."""
        self._name = name
        self._kernels = kernels
        self._kind, self._eps = config.norm, config.norm_eps if eps is None else eps
        self.weight = torch.empty(size, dtype=dtype, device=device)

    def slots(self) -> Iterator[TensorSlot]:
        yield TensorSlot(f"{self._name}.weight", tuple(self.weight.shape), self.weight.dtype, self.weight.copy_)

    def __call__(self, values: Tensor) -> Tensor:
        """Over the last dimension."""
        if self._kind == "layer":
            return functional.layer_norm(values, self.weight.shape, self.weight, None, self._eps)
        return self._kernels.rms_norm(values, self.weight, self._eps)

    def of_sum(self, hidden: Tensor, product: Tensor | None) -> Tensor:
        """Adds product to hidden, in place, and returns the norm of the sum."""
        if self._kind == "rms":
            return self._kernels.add_rms_norm_(hidden, product, self.weight, self._eps)
        return self(hidden if product is None else hidden.add_(product))


class HeadNorms:
    """The norms of queries and keys before they are turned: of each head, or of all of a row's heads together. Those of
    each head are RMS norms or LayerNorms, as the model's are."""

    def __init__(
        self,
        layer: str,
        attention: AttentionConfig,
        config: ModelConfig,
        kernels: Kernels,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        assert config.norm == "rms" or attention.qk_norm == "heads", "no family has another one"
        self._kernels = kernels
        self._kind, self._eps = config.norm, config.norm_eps
        self._is_by_head, self._is_shared = attention.qk_norm != "row", attention.qk_norm == "head"
        self._has_weights = attention.qk_norm != "unit"
        self._head_dim, self._query_size = attention.head_dim, attention.query_size
        self._size = attention.query_size + (attention.key_size if attention.kv_from is None else 0)
        # A number for every one that is normed, so that queries and keys of a head norm are normed together.
        self._weights = torch.empty(self._size, dtype=dtype, device=device)
        self._places = {f"{layer}.q_norm.weight": self._weights[: self._query_size]}
        if attention.kv_from is None:
            self._places[f"{layer}.k_norm.weight"] = self._weights[self._query_size :]

    def slots(self) -> Iterator[TensorSlot]:
        for name, place in self._places.items() if self._has_weights else ():
            rows = place.view(-1, self._head_dim) if self._is_shared else place
            yield TensorSlot(name, tuple(rows.shape[-1:]), place.dtype, rows.copy_)

    def __call__(self, qkv: Tensor) -> None:
        """qkv: [T, (H + 2 K) * D]; queries and keys are normed in place."""
        heads = qkv[:, : self._size]
        if self._is_by_head:
            by_head = heads.view(qkv.shape[0], -1, self._head_dim)
            if self._kind == "layer":
                normed = functional.layer_norm(by_head, (self._head_dim,), None, None, self._eps)
            else:
                normed = self._kernels.rms_norm(by_head, None, self._eps)
            if not self._has_weights:
                by_head.copy_(normed)
                return
            torch.mul(normed, self._weights.view(-1, self._head_dim), out=by_head)
            return
        for part in (slice(0, self._query_size), slice(self._query_size, None)):
            heads[:, part] = self._kernels.rms_norm(heads[:, part].contiguous(), self._weights[part], self._eps)


class Sinks:
    """A number for each head that stands in its softmax, beside the scores."""

    def __init__(self, layer: str, attention: AttentionConfig, *, device: torch.device) -> None:
        self._name = f"{layer}.sinks.weight"
        self.values = torch.empty(attention.head_count, dtype=torch.float32, device=device)

    def slots(self) -> Iterator[TensorSlot]:
        yield TensorSlot(self._name, tuple(self.values.shape), self.values.dtype, self.values.copy_)


class RotaryAngles:
    """Cosine and sine of every position's angles (RoFormer, arXiv 2104.09864), with the scaling the config names.

    They are looked up where a table of them takes little memory: in a decode step on a GPU, two small kernels in the
    place of eight.
    """

    def __init__(
        self, rotary: RotaryConfig | None, config: ModelConfig, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        head_dim = config.kv_attention.turned_dim
        plain, magnitudes = (torch.from_numpy(part) for part in rotary_frequencies(rotary, head_dim))
        self._dtype = dtype
        # Both halves of a head turn by the same angles, the first one backwards: see rotary_ in the kernels.
        self._frequencies = torch.cat((plain, plain)).to(device)
        self._magnitudes = torch.cat((magnitudes, magnitudes)).to(device)
        self._signs = torch.cat((-magnitudes, magnitudes)).to(device)
        self._table: tuple[Tensor, Tensor] | None = None
        if 2 * config.context_tokens_max * head_dim * dtype.itemsize <= ANGLE_TABLE_BYTES_MAX:
            self._table = self._computed(torch.arange(config.context_tokens_max, device=device))

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions: int64 [T], all within the model's longest context. Returns two tensors [T, 1, head_dim], the first
        half of sine negated."""
        if self._table is None:
            return self._computed(positions)
        cos, sin = self._table
        return cos.index_select(0, positions), sin.index_select(0, positions)

    def _computed(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions.to(torch.float32)[:, None, None] * self._frequencies
        if angles.device.type == "cpu":
            # torch's cosine of a number depends on where in a vector it stands. In float64 numpy's is off by so little
            # that what it is rounded to does not.
            exact = angles.numpy().astype(np.float64)
            cos, sin = (torch.from_numpy(function(exact).astype(np.float32)) for function in (np.cos, np.sin))
            return (cos * self._magnitudes).to(self._dtype), (sin * self._signs).to(self._dtype)
        return (angles.cos() * self._magnitudes).to(self._dtype), (angles.sin() * self._signs).to(self._dtype)


def temperature_factors(positions: Tensor, temperature: Temperature) -> Tensor:
    """Of the queries at these positions (int64 [T]), float32 [T]."""
    # In float64, where torch's results depend on a number's place by less than rounding leaves of them.
    steps = ((positions + temperature.first) // temperature.interval).double()
    return (steps.log1p() * temperature.scale + 1.0).float()


def _packed_product(values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(values, weight, bias, "none", [], "")
    return product


def _can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or platform.machine() not in ("x86_64", "AMD64"):
        return False
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        return False
    operators = torch.ops.mkldnn
    if not (hasattr(operators, "_reorder_linear_weight") and hasattr(operators, "_linear_pointwise")):
        return False
    if weight.dtype == torch.bfloat16:
        return bool(operators._is_mkldnn_bf16_supported())
    if weight.dtype == torch.float16:
        return bool(operators._is_mkldnn_fp16_supported())
    return weight.dtype == torch.float32
