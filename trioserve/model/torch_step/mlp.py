"""MLPs and mixtures of experts in torch: the part of a layer after attention."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from trioserve.model.layer_config import XIELU_NUMBERS, Activation, ExpertsConfig
from trioserve.model.torch_step.adapters import AdapterRows
from trioserve.model.torch_step.formats import TensorSlot
from trioserve.model.torch_step.layers import Linear, MakeLinear, Norm
from trioserve_kernels import Kernels
from trioserve_kernels.four_bits import FourBitWeight, join, weight_of_blocks

__all__ = ["Experts", "Mlp", "Xielu"]


class Xielu:
    """Activation xIELU of one layer (arXiv 2411.13010).

    Args:
        layer: name of the layer.
        dtype: number format of the four numbers.
        device: device of the numbers.
    """

    def __init__(self, layer: str, *, dtype: torch.dtype, device: torch.device) -> None:
        self._numbers = {f"{layer}.xielu.{name}": torch.empty(1, dtype=dtype, device=device) for name in XIELU_NUMBERS}

    def slots(self) -> Iterator[TensorSlot]:
        for name, number in self._numbers.items():
            yield TensorSlot(name, (1,), number.dtype, number.copy_)

    def __call__(self, values: Tensor) -> Tensor:
        # The position of a number in a tensor can change torch's result slightly. In float64, the later rounding
        # removes this difference, so the result of a row does not depend on the batch.
        alpha_p, alpha_n, beta, eps = (number.double() for number in self._numbers.values())
        exact = values.double()
        below = (torch.minimum(exact, eps).expm1() - exact) * (beta + functional.softplus(alpha_n))
        curved = torch.where(exact > 0, exact.square() * functional.softplus(alpha_p), below)
        return (curved + exact * beta).to(values.dtype)


class Mlp:
    """MLP of one layer with or without a gate, see MlpConfig."""

    def __init__(
        self,
        linear: MakeLinear,
        prefix: str,
        hidden: int,
        middle: int,
        activation: Activation | Literal["xielu"],
        kernels: Kernels,
        *,
        xielu: Xielu | None = None,
        has_bias: bool = False,
        has_gate: bool = True,
        cutoff: float | None = None,
        limit: float | None = None,
    ) -> None:
        self._limit = limit
        self._kernels = kernels
        self._xielu = xielu
        self._activation: Activation = "silu" if activation == "xielu" else activation  # xielu replaces it
        self._middle, self._cutoff, self._has_gate = middle, cutoff, has_gate
        names = (f"{prefix}gate_proj", f"{prefix}up_proj") if has_gate else (f"{prefix}up_proj",)
        self._gate_up = linear(hidden, has_bias, **dict.fromkeys(names, middle))
        self._down = linear(middle, has_bias, **{f"{prefix}down_proj": hidden})
        self.linears = (self._gate_up, self._down)

    @property
    def saved_bytes(self) -> int:
        return sum(linear.saved_bytes for linear in self.linears)

    def slots(self) -> Iterator[TensorSlot]:
        for part in (self._xielu, *self.linears):
            if part is not None:
                yield from part.slots()

    def __call__(self, values: Tensor, adapters: AdapterRows | None = None, added: Tensor | None = None) -> Tensor:
        """Compute the MLP.

        Args:
            values: [T, hidden_size].
            adapters: rows that use an adapter.
            added: [T, 2 * intermediate_size], numbers that are added to the projections to gate and up.
        """
        gate_up = self._gate_up(values, adapters)
        if added is not None:
            gate_up += added
        if self._cutoff is not None:
            _apply_cutoff(gate_up[:, : self._middle], self._cutoff)
        if self._xielu is not None:
            return self._down(self._xielu(gate_up), adapters)
        if not self._has_gate:
            return self._down(self._kernels.activate(gate_up, self._activation), adapters)
        return self._down(_gated(gate_up, self._activation, self._limit, self._kernels), adapters)


def _gated(gate_up: Tensor, activation: Activation, limit: float | None, kernels: Kernels) -> Tensor:
    """Return activation(gate) * up, [n, middle].

    Args:
        gate_up: [n, 2 * middle].
        limit: see MlpConfig.
    """
    if limit is None:
        return kernels.activate_and_mul(gate_up, activation)
    gate, up = gate_up.chunk(2, -1)
    active = kernels.activate(gate.contiguous(), activation).clamp_(max=limit)
    return active.mul_(up.clamp(-limit, limit))


def _apply_cutoff(gates: Tensor, cutoff: float) -> None:
    """Subtract mean + cutoff * standard deviation of the row from each gate, in place. Negative results become 0."""
    # The position of a number in a tensor can change torch's result slightly. In float64, the later rounding removes
    # this difference, so the result of a row does not depend on the batch.
    exact = gates.double()
    mean = exact.mean(-1, keepdim=True)
    deviation = (exact - mean).square().mean(-1, keepdim=True).sqrt()
    gates.sub_((mean + deviation * cutoff).to(gates.dtype)).relu_()


class _GroupedLinear:
    """One linear layer of all experts of a rank. Their weights are adjacent: [experts, out, in].

    Args:
        names: name of each expert, such as layers.0.experts.7.
        inputs: number of input features.
        outputs: number of output features of each projection, by its name.
        has_bias: the experts have biases.
        dtype: number format of weights, inputs and outputs.
        device: device of the weights.
        kernels: kernels that multiply.
        block_types: block types of the matrices that stay in 4 bits, by name.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        inputs: int,
        outputs: Mapping[str, int],
        has_bias: bool,
        *,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels,
        block_types: Mapping[str, str],
    ) -> None:
        self.inputs, self.outputs = inputs, sum(outputs.values())
        self._kernels = kernels
        self._names, self._projections = names, dict(outputs)
        self._dtype, self._device = dtype, device
        # Experts of different types are stored in the dtype.
        kept = {block_types.get(f"{name}.{each}.weight") for name in names for each in outputs}
        self._block_type = kept.pop() if len(kept) == 1 else None
        self._weight: Tensor | FourBitWeight | None = None
        self._four_bit_parts: dict[tuple[int, str], FourBitWeight] = {}
        self._bias = torch.empty(len(names), self.outputs, dtype=dtype, device=device) if has_bias else None

    @property
    def saved_bytes(self) -> int:
        """Bytes by which the weights in 4 bits are smaller than in the dtype."""
        if not isinstance(self._weight, FourBitWeight):
            return 0
        return len(self._names) * self.outputs * self.inputs * self._dtype.itemsize - self._weight.byte_count

    def slots(self) -> Iterator[TensorSlot]:
        for expert, name in enumerate(self._names):
            first = 0
            for each, size in self._projections.items():
                fill = functools.partial(self._fill, expert, first)
                slot = TensorSlot(f"{name}.{each}.weight", (size, self.inputs), self._dtype, fill)
                if self._block_type is not None:
                    fill_blocks = functools.partial(self._fill_blocks, self._block_type, expert, each)
                    slot = slot._replace(block_type=self._block_type, fill_blocks=fill_blocks)
                yield slot
                if self._bias is not None:
                    place = self._bias[expert, first : first + size]
                    yield TensorSlot(f"{name}.{each}.bias", (size,), self._dtype, place.copy_)
                first += size

    def __call__(self, values: Tensor, ends: Tensor) -> Tensor:
        """Multiply the rows of each expert with its weight.

        Args:
            values: [n, in], rows in the order of their experts.
            ends: int32 [experts], the row after the last row of each expert.

        Returns:
            [n, out]. Rows after the last expert are undefined.
        """
        assert self._weight is not None, "experts were called before their weights were loaded"
        return self._kernels.grouped_linear(values, self._weight, ends, self._bias)

    def of_first(self, values: Tensor) -> Tensor:
        """Multiply rows with the weight of the first expert: [n, in] to [n, out]."""
        ends = torch.full((len(self._names),), len(values), dtype=torch.int32, device=values.device)
        return self(values, ends)

    def _fill(self, expert: int, first: int, tensor: Tensor) -> None:
        if not isinstance(self._weight, Tensor):
            shape = (len(self._names), self.outputs, self.inputs)
            self._weight = torch.empty(shape, dtype=self._dtype, device=self._device)
        self._weight[expert, first : first + len(tensor)].copy_(tensor)

    def _fill_blocks(self, block_type: str, expert: int, projection: str, blocks: Tensor) -> None:
        """Store the 4-bit blocks of one projection. The weight is complete after the last projection."""
        parts = self._four_bit_parts
        parts[expert, projection] = weight_of_blocks(block_type, blocks.to(self._device))
        if len(parts) == len(self._names) * len(self._projections):
            self._weight = join([parts[at, each] for at in range(len(self._names)) for each in self._projections])
            parts.clear()


def _chosen_in_turn(logits: Tensor, count: int, nearness: float) -> tuple[Tensor, Tensor]:
    """Choose experts one after the other, see ExpertsConfig.scoring.

    Args:
        logits: float32 [T, experts].
        count: number of experts to choose.
        nearness: see ExpertsConfig.

    Returns:
        Weights and indexes of the chosen experts, each [T, count].
    """
    weights, chosen, left = [], [], logits
    for _ in range(count):
        best, index = left.max(-1, keepdim=True)
        is_far = (best - logits) / torch.maximum(logits.abs(), best) > nearness
        weights.append(left.masked_fill(is_far, float("-inf")).softmax(-1).gather(-1, index))
        chosen.append(index)
        left = left.scatter(-1, index, float("-inf"))
    return torch.cat(weights, -1), torch.cat(chosen, -1)


class Experts:
    """Mixture of experts of one layer.

    The rows are sorted by expert, and one product multiplies the rows of all experts. Which rows chose an expert stays
    on the device: nothing is read back, and the number of launches is constant. A row sums its experts' results in the
    order of its own scores, so other rows of the step do not change the result. Other ranks may have other experts, and
    compute the partial sums of these experts.

    Args:
        experts: experts of this rank.
        norm: makes a norm of the layer, given its module.
        block_types: block types of the matrices that stay in 4 bits, by name.
    """

    def __init__(
        self,
        linear: MakeLinear,
        name: str,
        hidden: int,
        mlp: ExpertsConfig,
        experts: range,
        kernels: Kernels,
        *,
        norm: Callable[[str], Norm],
        dtype: torch.dtype,
        device: torch.device,
        block_types: Mapping[str, str],
    ) -> None:
        self._mlp = mlp
        self._name = name
        self._kernels = kernels
        self._norms: dict[str, Norm] = {}
        self._expert_scale: Tensor | None = None
        if mlp.has_own_norms:
            modules = ("router_norm", "experts_norm", "experts_output_norm", "shared_output_norm")
            self._norms = {module: norm(module) for module in modules}
            self._expert_scale = torch.empty(mlp.expert_count, dtype=torch.float32, device=device)
        self._first, self._is_whole = experts.start, len(experts) == mlp.choice_count
        self._numbers = torch.arange(len(experts), device=device)
        self._router = linear(hidden, mlp.has_router_bias, router=mlp.choice_count)
        self._score_bias: Tensor | None = None
        if mlp.has_score_bias:
            self._score_bias = torch.empty(mlp.choice_count, dtype=torch.float32, device=device)
        grouped = functools.partial(
            _GroupedLinear,
            tuple(f"{name}.experts.{expert}" for expert in experts),
            has_bias=mlp.has_bias,
            dtype=dtype,
            device=device,
            kernels=kernels,
            block_types=block_types,
        )
        middle = mlp.intermediate_size
        parts = ("gate_proj", "up_proj") if mlp.has_gate else ("up_proj",)
        self._gate_up = grouped(inputs=hidden, outputs=dict.fromkeys(parts, middle))
        self._down = grouped(inputs=middle, outputs={"down_proj": hidden})
        self._shared: Mlp | None = None
        self._shared_gate: Linear | None = None
        if mlp.shared_size:
            self._shared = Mlp(
                linear,
                "shared.",
                hidden,
                mlp.shared_size,
                mlp.activation,
                kernels,
                has_gate=mlp.has_gate,
                limit=mlp.shared_limit,
            )
        if mlp.has_shared_gate:
            self._shared_gate = linear(hidden, False, shared_gate=1)
        shared = () if self._shared is None else self._shared.linears
        gate = () if self._shared_gate is None else (self._shared_gate,)
        self.linears = (self._router, *shared, *gate)

    @property
    def saved_bytes(self) -> int:
        experts = self._gate_up.saved_bytes + self._down.saved_bytes
        shared = 0 if self._shared is None else self._shared.saved_bytes
        return experts * self._mlp.experts_per_token // self._mlp.expert_count + shared

    @property
    def products(self) -> dict[tuple[int, int], Callable[[Tensor], Tensor]]:
        """Products of the experts by the sizes of their inputs and outputs."""
        return {(each.inputs, each.outputs): each.of_first for each in (self._gate_up, self._down)}

    def slots(self) -> Iterator[TensorSlot]:
        for part in (*self.linears, self._gate_up, self._down, *self._norms.values()):
            yield from part.slots()
        for kind, numbers in (("score_bias", self._score_bias), ("expert_scale", self._expert_scale)):
            if numbers is not None:
                yield TensorSlot(f"{self._name}.router.{kind}", tuple(numbers.shape), numbers.dtype, numbers.copy_)

    def _choose(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Choose experts for each row.

        Args:
            values: [T, hidden_size].

        Returns:
            Weights and indexes of the chosen experts, each [T, experts_per_token].
        """
        mlp = self._mlp
        products = self._router(values).float()
        if mlp.logit_cap is not None:
            products = (products.double() / mlp.logit_cap).tanh().mul_(mlp.logit_cap).float()
        if mlp.scoring == "sparsemixer":
            return _chosen_in_turn(products, mlp.experts_per_token, mlp.nearness)
        # The position of a number in a tensor can change torch's result slightly. In float64, the later rounding
        # removes this difference, so the result of a row does not depend on the batch.
        scores = products.softmax(-1) if mlp.scoring == "softmax" else products.double().sigmoid().float()
        ranked = scores if self._score_bias is None else scores + self._score_bias
        if mlp.groups_per_token < mlp.group_count:
            groups = ranked.view(len(ranked), mlp.group_count, -1)
            best = groups.topk(mlp.group_leaders, dim=-1).values.sum(-1).topk(mlp.groups_per_token, dim=-1).indices
            is_left_out = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter_(-1, best, False)
            ranked = groups.masked_fill(is_left_out[..., None], float("-inf")).flatten(-2)
        chosen = ranked.topk(mlp.experts_per_token, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if mlp.normalizes:
            # The small number avoids a division by 0, because all sigmoids of a row may be 0.
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        if self._expert_scale is not None:
            weights = weights * self._expert_scale[chosen]
        return weights * mlp.scale, chosen

    def __call__(self, values: Tensor, adapters: AdapterRows | None = None, hidden: Tensor | None = None) -> Tensor:
        """Compute the mixture of experts.

        Args:
            values: [T, hidden_size].
            adapters: ignored, because adapters have no weights for experts.
            hidden: [T, hidden_size], the rows before the norm whose results are `values`. Experts with norms of their
                own need them.

        Returns:
            [T, hidden_size].
        """
        mixed = values
        if self._norms:
            assert hidden is not None, "experts with norms of their own read the hidden state"
            weights, chosen = self._choose(self._norms["router_norm"](hidden))
            mixed = self._norms["experts_norm"](hidden)
        else:
            weights, chosen = self._choose(values)
        identity_weights: Tensor | None = None
        if self._mlp.identity_count and self._mlp.has_identity_results:
            identity_weights = weights.masked_fill(chosen < self._mlp.expert_count, 0.0).sum(-1, keepdim=True)
        if not self._is_whole:
            chosen = chosen - self._first
            is_foreign = (chosen < 0) | (chosen >= len(self._numbers))
            # Rows of identity experts and of other ranks' experts are sorted to the end, where no group has them.
            chosen = chosen.masked_fill(is_foreign, len(self._numbers))
        found, order = chosen.flatten().sort(stable=True)
        ends = torch.searchsorted(found, self._numbers, right=True, out_int32=True)
        given = mixed.index_select(0, order // self._mlp.experts_per_token)
        if self._mlp.weighs_inputs:
            given.mul_(weights.flatten().index_select(0, order)[:, None].to(given.dtype))
            weights = torch.ones_like(weights)
        if not self._is_whole:
            weights = weights.masked_fill(is_foreign, 0.0)
        middle = self._gate_up(given, ends)
        if self._mlp.has_gate:
            middle = _gated(middle, self._mlp.activation, self._mlp.limit, self._kernels)
        else:
            middle = self._kernels.activate(middle, self._mlp.activation)
        products = torch.empty_like(given).index_copy_(0, order, self._down(middle, ends))
        result = self._kernels.weighted_sum(products.view(*chosen.shape, -1), weights)
        if identity_weights is not None:
            result += values * identity_weights.to(values.dtype)
        if self._norms:
            result = self._norms["experts_output_norm"](result)
        if self._shared is not None:
            shared = self._shared(values)
            if self._norms:
                shared = self._norms["shared_output_norm"](shared)
            if self._shared_gate is not None:
                shared = self._shared_gate(values).double().sigmoid().to(shared.dtype) * shared
            result += shared
        return result
