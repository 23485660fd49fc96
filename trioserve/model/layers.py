"""The parts that every model is made of: linear layers, norms, embedding, rotary angles. How they are joined is settled
in families/."""

from __future__ import annotations

import functools
import math
import platform
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from trioserve.model.model_config import ModelConfig, RopeScaling
from trioserve.model.weights import Slot

__all__ = ["Embedding", "Linear", "Norm", "RotaryAngles", "rotary_frequencies"]


class Linear:
    """y = x W^T + b. Several projections of one input are one product, their outputs side by side.

    outputs: the number of output features by the projection's name, in the order of the outputs.

    On an x86 CPU whose oneDNN takes the dtype, W is kept in oneDNN's own packed order, not the plain one: a decode
    step is bound by reading W once, and packed a step takes a sixth less time. The operators are those torch.compile
    uses when it freezes weights; where torch lacks them the plain order stays.
    """

    def __init__(
        self, inputs: int, outputs: Mapping[str, int], *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._inputs = inputs
        self._outputs = dict(outputs)
        self._dtype = dtype
        self._device = device
        self._weight: Tensor | None = None
        self._packed = False
        self._bias = torch.empty(sum(outputs.values()), dtype=dtype, device=device) if bias else None
        self._missing = set(outputs)

    def slots(self) -> Iterator[Slot]:
        first = 0
        for name, size in self._outputs.items():
            yield Slot(f"{name}.weight", (size, self._inputs), functools.partial(self._fill, name, first))
            if self._bias is not None:
                yield Slot(f"{name}.bias", (size,), self._bias[first : first + size].copy_)
            first += size

    def take(self, weight: Tensor) -> None:
        """Use this [out, in] tensor, of the layer's dtype and device, as the whole weight. It must not change."""
        self._packed = _can_pack(weight)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None) if self._packed else weight

    def __call__(self, values: Tensor) -> Tensor:
        """[n, in] to [n, out]."""
        if self._packed:
            product: Tensor = torch.ops.mkldnn._linear_pointwise(values, self._weight, self._bias, "none", [], "")
            return product
        assert self._weight is not None, "a linear layer computes before its weight was loaded"
        return functional.linear(values, self._weight, self._bias)

    def _fill(self, name: str, first: int, tensor: Tensor) -> None:
        """Copy one projection's rows in; with the last one the weight is complete."""
        if self._weight is None:
            # Not before: while the file's order lets it, only one unpacked weight exists at a time.
            rows = sum(self._outputs.values())
            self._weight = torch.empty(rows, self._inputs, dtype=self._dtype, device=self._device)
        self._weight[first : first + self._outputs[name]].copy_(tensor)
        self._missing.discard(name)
        if not self._missing:
            self.take(self._weight)


class Embedding:
    """Token ids to rows of a table."""

    def __init__(self, rows: int, columns: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(rows, columns, dtype=dtype, device=device)

    def slots(self, *, tied: Linear | None) -> Iterator[Slot]:
        """tied: the output projection that is to use the same weight."""

        def fill(tensor: Tensor) -> None:
            self.weight.copy_(tensor)
            if tied is not None:
                tied.take(self.weight)

        yield Slot("embed.weight", tuple(self.weight.shape), fill)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """int64 [n] to [n, columns], a copy that may be changed."""
        return functional.embedding(token_ids, self.weight)


class Norm:
    """The weight of one RMS norm."""

    def __init__(self, name: str, size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self._name = name
        self.weight = torch.empty(size, dtype=dtype, device=device)

    def slots(self) -> Iterator[Slot]:
        yield Slot(f"{self._name}.weight", tuple(self.weight.shape), self.weight.copy_)


class RotaryAngles:
    """Cosine and sine of every position's angles (RoFormer, arXiv 2104.09864), with the scaling the config names."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        frequencies, self._magnitude = rotary_frequencies(config)
        # Both halves of a head turn by the same angles, the first one backwards: see rotary_ in the kernels.
        self._frequencies = torch.cat((frequencies, frequencies)).to(device)
        ones = torch.ones_like(frequencies)
        self._signs = torch.cat((-ones, ones)).to(device) * self._magnitude

    def cos_sin(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions: int64 [T]. Returns two tensors [T, 1, head_dim], the first half of sine negated."""
        angles = positions.to(torch.float32)[:, None, None] * self._frequencies
        return (angles.cos() * self._magnitude).to(dtype), (angles.sin() * self._signs).to(dtype)


def rotary_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """float32 [head_dim / 2], radians a token, and what cosine and sine are multiplied by."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    plain = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return plain, 1.0
    if scaling.kind == "linear":
        return plain / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3_frequencies(plain, scaling), 1.0
    return _yarn_frequencies(plain, scaling, config)


def _llama3_frequencies(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """As in Meta's Llama 3.1: slow turns are stretched, fast ones stay, and between the two it is a linear blend."""
    if scaling.frequency_factors is not None:
        return plain / torch.tensor(scaling.frequency_factors, dtype=torch.float32)
    turns = scaling.original_context_tokens * plain / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return (1 - kept) * plain / scaling.factor + kept * plain


def _yarn_frequencies(plain: Tensor, scaling: RopeScaling, config: ModelConfig) -> tuple[Tensor, float]:
    """YaRN, arXiv 2309.00071: as llama3, but the blend is linear in the index, and attention gets a temperature."""

    def index_of(turns: float) -> float:
        """The index (not rounded) whose angle makes this many turns over the original context."""
        wavelength = scaling.original_context_tokens / (turns * 2 * math.pi)
        return config.head_dim * math.log(wavelength) / (2 * math.log(config.rope_theta))

    first = max(math.floor(index_of(scaling.beta_fast)), 0)
    last = min(math.ceil(index_of(scaling.beta_slow)), config.head_dim - 1)
    ramp = (torch.arange(plain.shape[0], dtype=torch.float32) - first) / max(last - first, 0.001)
    stretched = ramp.clamp(0.0, 1.0)
    magnitude = scaling.attention_factor
    if magnitude is None:
        magnitude = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
    return stretched * plain / scaling.factor + (1 - stretched) * plain, magnitude


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
