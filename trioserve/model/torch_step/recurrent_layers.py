"""Recurrent layers in torch, which replace attention and have a state that summarizes a sequence.

Chunks of one token are computed together. A longer chunk is computed span by span, and a span is divided into pieces.
Within a piece, matrix products combine each token with all previous tokens of the piece, for all pieces together. Only
the state is passed from one piece to the next (the chunked scan of Mamba-2, arXiv 2405.21060). Numbers that depend on
earlier tokens are float32. Nothing is read from the device.

The gated delta rule (arXiv 2412.06464, see DeltaNetConfig) also divides longer chunks into pieces. Within a piece, each
token's change of a head's state depends on the changes of all previous tokens. The changes of a piece are the solution
of a triangular system of equations. It is solved for all pieces together, for the values and for the part that the
state before the piece is multiplied with (the WY form, arXiv 2406.06484).

If each row of a state has its own decay, no matrix product combines two tokens. Products of both keys and the decays
are then summed, in shorter pieces, because a piece has such products for all pairs of its tokens.

In a selective scan, each number of a state has its own decay, so no matrix product combines tokens. Within a piece,
states are combined in log2(tokens) rounds, and each round doubles the number of tokens that a state includes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from trioserve.model.layer_config import (
    DeltaNetConfig,
    LightningConfig,
    SelectiveScanConfig,
    ShortConvConfig,
    StateSpaceConfig,
)
from trioserve.model.model_config import ModelConfig
from trioserve.model.torch_step.formats import TensorSlot
from trioserve.model.torch_step.layers import Linear
from trioserve.model.torch_step.step_tensors import StateSteps

__all__ = ["PIECE_TOKENS", "Convolution", "ShortConv", "StateSpace", "SelectiveScan", "DeltaNet", "Lightning"]

# In longer pieces, the products of each token with all previous tokens would cost more than updating the state.
PIECE_TOKENS = 64
PIECE_TOKENS_OF_ROWS = 16  # if each row of a state has its own decay
# The states before all of these pieces are in memory at the same time: 70 MB with 32 heads of 128 x 128 numbers.
PIECES_AT_ONCE = 32


class Convolution:
    """Causal convolution of each channel with its own weights.

    Args:
        name: name of the layer, such as layers.0.
        channels: number of channels of each tensor with weights, by the tensor's name.
        kernel_size: number of tokens that the convolution reads.
        has_bias: add a bias to each channel.
        device: device of the weights.
    """

    def __init__(
        self, name: str, channels: Mapping[str, int], kernel_size: int, has_bias: bool, device: torch.device
    ) -> None:
        self._name, self._channels = name, dict(channels)
        count = sum(channels.values())
        self._weight = torch.empty(count, kernel_size, dtype=torch.float32, device=device)
        self._bias = torch.empty(count, dtype=torch.float32, device=device) if has_bias else None
        self._kept = (kernel_size - 1, count)

    @property
    def state_size(self) -> int:
        return self._kept[0] * self._kept[1]

    def slots(self) -> Iterator[TensorSlot]:
        for kind, values in (("weight", self._weight), ("bias", self._bias)):
            if values is not None:
                for name, part in zip(self._channels, torch.split(values, list(self._channels.values())), strict=True):
                    yield TensorSlot(f"{self._name}.{name}.{kind}", tuple(part.shape), torch.float32, part.copy_)

    def __call__(self, inputs: Tensor, steps: StateSteps, memory: Tensor) -> Tensor:
        """Convolve the rows of a step, and write the last inputs of each sequence.

        Args:
            inputs: float32 [T, channels].
            steps: state slots that the step reads and writes.
            memory: float32 [slots, state_size], which contains the last inputs of each sequence.

        Returns:
            float32 [T, channels].
        """
        states = memory.view(-1, *self._kept)
        result = torch.empty_like(inputs)
        if (own := steps.rows) is not None:
            before = torch.where(own.past_count > 0, states[own.reads], 0.0)
            window = torch.cat((before, own.take(inputs)[:, None]), 1)
            own.put(result, (window * self._weight.T).sum(1))
            states[own.writes] = window[:, 1:]
        for row, spans in steps.spans:
            for span in spans:
                before = inputs.new_zeros(self._kept) if span.reads is None else states[span.reads]
                window = torch.cat((before, inputs[row : row + span.count]))
                convolved = result[row : row + span.count].zero_()
                for index in range(self._weight.shape[1]):
                    convolved += window[index : index + span.count] * self._weight[:, index]
                states[span.writes] = window[span.count :]
                row += span.count
        return result if self._bias is None else result.add_(self._bias)


class ShortConv:
    """Short convolution of one layer, see ShortConvConfig."""

    def __init__(
        self, name: str, config: ModelConfig, layer: ShortConvConfig, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        size, has_bias = layer.channel_count, layer.has_bias
        self._input = _linear(f"{name}.in_proj", config.hidden_size, layer.projected_size, has_bias, dtype, device)
        self._conv = Convolution(name, {"conv": size}, layer.kernel_size, has_bias, device)
        self._output = _linear(f"{name}.out_proj", size, config.hidden_size, has_bias, dtype, device)
        self.linears = (self._input, self._output)

    def slots(self) -> Iterator[TensorSlot]:
        for part in (self._input, self._conv, self._output):
            yield from part.slots()

    def __call__(self, normed: Tensor, steps: StateSteps, memory: Tensor) -> Tensor:
        """Compute the layer, and write the states of the step.

        Args:
            normed: [T, hidden_size].
            steps: state slots that the step reads and writes.
            memory: float32 [slots, state_size], the layer's buffer of StateStorage.

        Returns:
            [T, hidden_size].
        """
        b, c, x = self._input(normed).float().chunk(3, -1)
        return self._output((self._conv(b * x, steps, memory) * c).to(normed.dtype))


class StateSpace:
    """State space of one layer, see StateSpaceConfig."""

    def __init__(
        self, name: str, config: ModelConfig, layer: StateSpaceConfig, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._layer = layer
        self._eps = layer.norm_eps or config.norm_eps
        self._input = _linear(
            f"{name}.in_proj", config.hidden_size, layer.projected_size, layer.has_bias, dtype, device
        )
        self._conv = Convolution(name, {"conv": layer.convolved_size}, layer.kernel_size, layer.has_conv_bias, device)
        self._output = _linear(f"{name}.out_proj", layer.inner_size, config.hidden_size, layer.has_bias, dtype, device)
        self._rates, self._skips, self._time_step_bias = (
            torch.empty(layer.head_count, dtype=torch.float32, device=device) for _ in range(3)
        )
        self._norm = torch.empty(layer.inner_size, dtype=torch.float32, device=device)
        self._vectors = {
            f"{name}.state.rates": self._rates,
            f"{name}.state.skips": self._skips,
            f"{name}.state.time_step_bias": self._time_step_bias,
        }
        if layer.norm != "none":
            self._vectors[f"{name}.gate_norm.weight"] = self._norm
        self.linears = (self._input, self._output)

    def slots(self) -> Iterator[TensorSlot]:
        for part in (self._input, self._conv, self._output):
            yield from part.slots()
        for name, vector in self._vectors.items():
            yield TensorSlot(name, tuple(vector.shape), torch.float32, vector.copy_)

    def __call__(self, normed: Tensor, steps: StateSteps, memory: Tensor) -> Tensor:
        """Compute the layer, and write the states of the step.

        Args:
            normed: [T, hidden_size].
            steps: state slots that the step reads and writes.
            memory: float32 [slots, state_size], the layer's buffer of StateStorage.

        Returns:
            [T, hidden_size].
        """
        layer = self._layer
        projected = self._input(normed).float()
        gate, convolved, time_steps = torch.split(
            projected, [layer.inner_size, layer.convolved_size, layer.head_count], -1
        )
        kept = self._conv.state_size
        convolved = functional.silu(self._conv(convolved.contiguous(), steps, memory[:, :kept]))
        vectors = layer.group_count * layer.vector_size
        x, b, c = torch.split(convolved, [layer.inner_size, vectors, vectors], -1)
        time_steps = functional.softplus(time_steps + self._time_step_bias)
        x = x.view(-1, layer.head_count, layer.head_dim)
        time_steps = time_steps.clamp(layer.time_step_min, layer.time_step_max)
        scanned = _scanned_rows(
            x * time_steps[..., None],
            self._repeated_for_heads(b),
            self._repeated_for_heads(c),
            time_steps * self._rates,
            steps,
            memory[:, kept:].view(-1, layer.head_count, layer.vector_size, layer.head_dim),
            x * self._skips[:, None],
        )
        mixed, gate = scanned.flatten(1), functional.silu(gate)
        if layer.norm == "gated":
            mixed = self._normed(mixed * gate)
        else:
            mixed = (mixed if layer.norm == "none" else self._normed(mixed)) * gate
        return self._output(mixed.to(normed.dtype))

    def _normed(self, values: Tensor) -> Tensor:
        groups = values.view(len(values), self._layer.group_count, -1)
        normal = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self._eps)
        return normal.flatten(1) * self._norm

    def _repeated_for_heads(self, vectors: Tensor) -> Tensor:
        """Repeat vectors of groups for each head: [T, heads, vector_size]."""
        groups = vectors.view(-1, self._layer.group_count, self._layer.vector_size)
        return groups.repeat_interleave(self._layer.head_count // self._layer.group_count, 1)


class SelectiveScan:
    """Selective state space of one layer, see SelectiveScanConfig."""

    def __init__(
        self, name: str, config: ModelConfig, layer: SelectiveScanConfig, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        def vector(*shape: int) -> Tensor:
            return torch.ones(*shape, dtype=torch.float32, device=device)

        self._layer = layer
        channels, sizes = layer.channel_count, layer.selected_sizes
        self._input = _linear(
            f"{name}.in_proj", config.hidden_size, layer.projected_size, layer.has_bias, dtype, device
        )
        self._conv = Convolution(name, {"conv": channels}, layer.kernel_size, layer.has_conv_bias, device)
        self._selection = _linear(f"{name}.selection_proj", channels, sum(sizes), False, dtype, device)
        self._time_steps = _linear(f"{name}.time_step_proj", layer.rank, channels, False, dtype, device)
        self._output = _linear(f"{name}.out_proj", channels, config.hidden_size, layer.has_bias, dtype, device)
        # Rates are stored like states: [vector_size, channels].
        self._rates, self._skips = vector(layer.vector_size, channels), vector(channels)
        self._time_step_bias = vector(channels)
        self._vectors = {
            f"{name}.state.rates": self._rates.T,
            f"{name}.state.skips": self._skips,
            f"{name}.state.time_step_bias": self._time_step_bias,
        }
        self._norms = [vector(size) for size in sizes]
        if layer.norm == "weighted":
            names = (f"{name}.{part}_norm.weight" for part in ("time_step", "b", "c"))
            self._vectors |= zip(names, self._norms, strict=True)
        self.linears = (self._input, self._selection, self._time_steps, self._output)

    def slots(self) -> Iterator[TensorSlot]:
        for part in (self._conv, *self.linears):
            yield from part.slots()
        for name, vector in self._vectors.items():
            yield TensorSlot(name, tuple(vector.shape), torch.float32, vector.copy_)

    def __call__(self, normed: Tensor, steps: StateSteps, memory: Tensor) -> Tensor:
        """Compute the layer, and write the states of the step.

        Args:
            normed: [T, hidden_size].
            steps: state slots that the step reads and writes.
            memory: float32 [slots, state_size], the layer's buffer of StateStorage.

        Returns:
            [T, hidden_size].
        """
        layer, kept = self._layer, self._conv.state_size
        x, gate = self._input(normed).float().chunk(2, -1)
        x = functional.silu(self._conv(x.contiguous(), steps, memory[:, :kept]))
        selected = self._selection(x.to(normed.dtype)).float()
        latent, b, c = torch.split(selected, list(layer.selected_sizes), -1)
        if layer.norm != "none":
            latent, b, c = map(self._normed, (latent, b, c), self._norms)
        time_steps = self._time_steps(latent.to(normed.dtype)).float()
        time_steps = functional.softplus(time_steps + self._time_step_bias)
        states = memory[:, kept:].view(-1, layer.vector_size, layer.channel_count)
        mixed = self._scanned(x, b, c, time_steps, steps, states) * functional.silu(gate)
        return self._output(mixed.to(normed.dtype))

    def _normed(self, values: Tensor, weights: Tensor) -> Tensor:
        return functional.rms_norm(values, weights.shape, weights, self._layer.norm_eps)

    def _scanned(
        self, x: Tensor, b: Tensor, c: Tensor, time_steps: Tensor, steps: StateSteps, states: Tensor
    ) -> Tensor:
        """Apply the state space to all rows.

        Args:
            x: [T, channels].
            b: [T, vector_size].
            c: [T, vector_size].
            time_steps: [T, channels].
            states: [slots, vector_size, channels].

        Returns:
            [T, channels].
        """
        result, scaled = x * self._skips, x * time_steps
        if (own := steps.rows) is not None:
            before = torch.where(own.past_count > 0, states[own.reads], 0.0)
            decays = (own.take(time_steps)[:, None] * self._rates).exp()
            after = before * decays + own.take(b)[..., None] * own.take(scaled)[:, None]
            states[own.writes] = after
            own.put(result, own.take(result) + (after * own.take(c)[..., None]).sum(-2))
        for row, spans in steps.spans:
            for span in spans:
                state = states.new_zeros(states.shape[1:]) if span.reads is None else states[span.reads]
                for first in range(row, row + span.count, PIECE_TOKENS):
                    part = slice(first, min(first + PIECE_TOKENS, row + span.count))
                    decays = (time_steps[part, None] * self._rates).exp()
                    found = _accumulated(decays, b[part, :, None] * scaled[part, None], state)
                    result[part] += (found * c[part, :, None]).sum(-2)
                    state = found[-1]
                states[span.writes] = state
                row += span.count
        return result


def _accumulated(decays: Tensor, added: Tensor, state: Tensor) -> Tensor:
    """Return the state after each token: its decay times the state before it, plus what the token adds.

    Args:
        decays: [t, ...], decay of each token. It is overwritten.
        added: [t, ...], numbers that each token adds. It is overwritten, too.
        state: [...], state before the tokens.

    Returns:
        [t, ...].
    """
    added[0].addcmul_(decays[0], state)
    reach = 1
    while reach < len(added):
        added[reach:] += decays[reach:] * added[:-reach]
        decays[reach:] = decays[reach:] * decays[:-reach]
        reach *= 2
    return added


def _parts(row: int, count: int) -> Iterator[slice]:
    """Divide the rows of a span into parts, whose pieces are computed together."""
    for first in range(row, row + count, PIECES_AT_ONCE * PIECE_TOKENS):
        yield slice(first, min(first + PIECES_AT_ONCE * PIECE_TOKENS, row + count))


def _pieces(values: Tensor, piece_tokens: int = PIECE_TOKENS) -> Tensor:
    """Divide rows into pieces. Padding rows are zeros, which change no state.

    Args:
        values: [t, heads, ...].
        piece_tokens: number of rows of a piece.

    Returns:
        [pieces, heads, piece_tokens, ...], or [1, heads, t, ...] if there is only one piece.
    """
    count = values.shape[0]
    size = min(count, piece_tokens)
    if missing := -count % size:
        values = torch.cat((values, values.new_zeros(missing, *values.shape[1:])))
    return values.view(-1, size, *values.shape[1:]).transpose(1, 2)


def _joined(pieces: Tensor, count: int) -> Tensor:
    """Join pieces [pieces, heads, tokens, n] to rows [count, heads, n]."""
    return pieces.transpose(1, 2).flatten(0, 1)[:count]


def _decays(exponents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the decays of each piece.

    Args:
        exponents: [pieces, heads, t].

    Returns:
        Decay between each token (row) and each previous token (column), [pieces, heads, t, t], with zeros above the
        diagonal, decay since the piece began [pieces, heads, t, 1], and decay until it ends [pieces, heads, t, 1].
    """
    sums = exponents.cumsum(-1)
    left = (sums[..., None] - sums[..., None, :]).tril().exp().tril()
    return left, sums.exp()[..., None], (sums[..., -1:] - sums).exp()[..., None]


def _scanned_rows(
    x: Tensor, b: Tensor, c: Tensor, exponents: Tensor, steps: StateSteps, states: Tensor, result: Tensor
) -> Tensor:
    """Apply a state space to all rows of a step.

    Args:
        x: [T, heads, head_dim], inputs that are multiplied by their time steps.
        b: [T, heads, vector_size].
        c: [T, heads, vector_size].
        exponents: [T, heads], logarithm of each row's decay.
        states: [slots, heads, vector_size, head_dim].
        result: [T, heads, head_dim], to which the outputs are added.

    Returns:
        `result`.
    """
    if (own := steps.rows) is not None:
        before = torch.where(own.past_count[..., None] > 0, states[own.reads], 0.0)
        decays = own.take(exponents).exp()[..., None, None]
        after = before * decays + own.take(b)[..., None] * own.take(x)[:, :, None]
        states[own.writes] = after
        own.put(result, own.take(result) + (after * own.take(c)[..., None]).sum(-2))
    for row, spans in steps.spans:
        for span in spans:
            state = states.new_zeros(states.shape[1:]) if span.reads is None else states[span.reads].clone()
            for part in _parts(row, span.count):
                result[part] += _scanned_states(x[part], b[part], c[part], exponents[part], state)
            states[span.writes] = state
            row += span.count
    return result


def _scanned_states(x: Tensor, b: Tensor, c: Tensor, exponents: Tensor, state: Tensor) -> Tensor:
    """Apply the state space to consecutive tokens of one sequence.

    Args:
        x: [t, heads, head_dim], inputs that are multiplied by their time steps.
        b: [t, heads, vector_size].
        c: [t, heads, vector_size].
        exponents: [t, heads], logarithm of each token's decay.
        state: [heads, vector_size, head_dim], state before the tokens. It is replaced by the state after them.

    Returns:
        [t, heads, head_dim].
    """
    count = x.shape[0]
    x, b, c, exponents = map(_pieces, (x, b, c, exponents))
    left, since, until = _decays(exponents)
    added = (b * until).transpose(-1, -2) @ x
    before = torch.empty_like(added)
    for piece, decay in enumerate(since[:, :, -1:]):
        before[piece] = state
        torch.addcmul(added[piece], state, decay, out=state)
    found = ((c @ b.transpose(-1, -2)) * left) @ x + (c @ before) * since
    return _joined(found, count)


def _linear(name: str, inputs: int, outputs: int, has_bias: bool, dtype: torch.dtype, device: torch.device) -> Linear:
    return Linear(inputs, {name: outputs}, bias=has_bias, dtype=dtype, device=device)


LEAST_LENGTH_SQUARE = 1e-6  # This number is added to the squared length of queries and keys.


class DeltaNet:
    """One layer with the gated delta rule, see DeltaNetConfig."""

    def __init__(
        self, name: str, config: ModelConfig, layer: DeltaNetConfig, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        def vector(count: int) -> Tensor:
            return torch.empty(count, dtype=torch.float32, device=device)

        self._layer, self._eps = layer, layer.norm_eps or config.norm_eps
        gate, *convolved, decay, share = layer.input_sizes.values()
        self._sizes = [gate, sum(convolved), decay, share]
        inputs = {f"{name}.{part}": size for part, size in layer.input_sizes.items()}
        self._input = Linear(config.hidden_size, inputs, bias=False, dtype=dtype, device=device)
        self._conv = Convolution(name, layer.conv_sizes, layer.kernel_size, False, device)
        outputs = {f"{name}.out_proj": config.hidden_size}
        self._output = Linear(layer.inner_size, outputs, bias=False, dtype=dtype, device=device)
        # Projections of the latents to z and to the decays.
        self._of_latents = [
            _linear(f"{name}.{part}", layer.rank, size, False, dtype, device)
            for part, size in layer.latent_sizes.items()
        ]
        self._rates, self._decay_bias, self._norm = map(vector, (layer.head_count, layer.decay_count, layer.head_dim))
        self._vectors = {
            f"{name}.state.rates": self._rates,
            f"{name}.state.time_step_bias": self._decay_bias,
            f"{name}.gate_norm.weight": self._norm,
        }
        self.linears = (self._input, *self._of_latents, self._output)

    def slots(self) -> Iterator[TensorSlot]:
        yield from self._conv.slots()
        for linear in self.linears:
            yield from linear.slots()
        for name, vector in self._vectors.items():
            yield TensorSlot(name, tuple(vector.shape), torch.float32, vector.copy_)

    def __call__(self, normed: Tensor, steps: StateSteps, memory: Tensor) -> Tensor:
        """Compute the layer, and write the states of the step.

        Args:
            normed: [T, hidden_size].
            steps: state slots that the step reads and writes.
            memory: float32 [slots, state_size], the layer's buffer of StateStorage.

        Returns:
            [T, hidden_size].
        """
        layer = self._layer
        gate, convolved, decays, shares = torch.split(self._input(normed), self._sizes, -1)
        if self._of_latents:
            gate, decays = (
                linear(latent.contiguous()) for linear, latent in zip(self._of_latents, (gate, decays), strict=True)
            )
        kept = self._conv.state_size
        convolved = functional.silu(self._conv(convolved.float().contiguous(), steps, memory[:, :kept]))
        vectors = layer.group_count * layer.vector_size
        queries, keys, values = torch.split(convolved, [vectors, vectors, layer.inner_size], -1)
        found = self._scanned(
            self._unit_vectors(queries) * layer.vector_size**-0.5,
            self._unit_vectors(keys),
            values.reshape(-1, layer.head_count, layer.head_dim),
            functional.softplus(decays.float() + self._decay_bias).view(len(normed), layer.head_count, -1)
            * self._rates[:, None],
            shares.float().sigmoid() * layer.share_scale,
            steps,
            memory[:, kept:].view(-1, layer.head_count, layer.vector_size, layer.head_dim),
        )
        found *= torch.rsqrt(found.square().mean(-1, keepdim=True) + self._eps) * self._norm
        gates = gate.float().sigmoid() if layer.rank else functional.silu(gate.float())
        return self._output((found.flatten(1) * gates).to(normed.dtype))

    def _unit_vectors(self, vectors: Tensor) -> Tensor:
        """Scale vectors to length 1, and repeat them for each value head. Returns [T, heads, vector_size]."""
        layer = self._layer
        groups = vectors.reshape(-1, layer.group_count, layer.vector_size)
        groups = groups * torch.rsqrt(groups.square().sum(-1, keepdim=True) + LEAST_LENGTH_SQUARE)
        count = layer.head_count // layer.group_count
        return groups.repeat(1, count, 1) if layer.has_heads_in_turn else groups.repeat_interleave(count, 1)

    def _scanned(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        exponents: Tensor,
        shares: Tensor,
        steps: StateSteps,
        states: Tensor,
    ) -> Tensor:
        """Apply the delta rule to all rows.

        Args:
            queries: [T, heads, vector_size].
            keys: [T, heads, vector_size].
            values: [T, heads, head_dim].
            exponents: [T, heads, 1] or [T, heads, vector_size], logarithm of each token's decay.
            shares: [T, heads], fraction of each token's update.
            states: [slots, heads, vector_size, head_dim].

        Returns:
            [T, heads, head_dim].
        """
        result = torch.empty_like(values)
        if (own := steps.rows) is not None:
            before = torch.where(own.past_count[..., None] > 0, states[own.reads], 0.0)
            before *= own.take(exponents).exp()[..., None]
            key = own.take(keys)[..., None]
            added = (own.take(values) - (before * key).sum(-2)) * own.take(shares)[..., None]
            after = before + key * added[:, :, None]
            states[own.writes] = after
            own.put(result, (after * own.take(queries)[..., None]).sum(-2))
        for row, spans in steps.spans:
            for span in spans:
                state = states.new_zeros(states.shape[1:]) if span.reads is None else states[span.reads].clone()
                for part in _parts(row, span.count):
                    result[part] = _scanned_deltas(
                        queries[part], keys[part], values[part], exponents[part], shares[part], state
                    )
                states[span.writes] = state
                row += span.count
        return result


def _scanned_deltas(
    queries: Tensor, keys: Tensor, values: Tensor, exponents: Tensor, shares: Tensor, state: Tensor
) -> Tensor:
    """Apply the delta rule to consecutive tokens of one sequence.

    With s the cumulative sums of the exponents in a piece, token i adds along k_i: u_i = share_i (v_i - exp(s_i)
    state^T k_i - sum over j < i of exp(s_i - s_j) (k_i k_j) u_j). The solution is linear in the state before the piece.

    Args:
        queries: [t, heads, vector_size].
        keys: [t, heads, vector_size].
        values: [t, heads, head_dim].
        exponents: [t, heads, 1] or [t, heads, vector_size], logarithm of each token's decay.
        shares: [t, heads], fraction of each token's update.
        state: [heads, vector_size, head_dim], state before the tokens. It is replaced by the state after them.

    Returns:
        [t, heads, head_dim].
    """
    count = queries.shape[0]
    has_one_decay = exponents.shape[-1] == 1
    size = PIECE_TOKENS if has_one_decay else PIECE_TOKENS_OF_ROWS
    parts = (queries, keys, values, exponents, shares[..., None])
    queries, keys, values, exponents, shares = (_pieces(part, size) for part in parts)
    if has_one_decay:
        left, since, until = _decays(exponents[..., 0])
        of_queries, of_keys = (part @ keys.transpose(-1, -2) * left for part in (queries, keys))
    else:
        sums = exponents.cumsum(-2)
        is_later = torch.ones(sums.shape[-2:-1] * 2, dtype=torch.bool, device=sums.device).triu(1)
        left = (sums[..., :, None, :] - sums[..., None, :, :]).masked_fill_(is_later[..., None], -math.inf).exp_()
        left *= keys[..., None, :, :]
        of_queries, of_keys = ((part[..., :, None, :] * left).sum(-1) for part in (queries, keys))
        since, until = sums.exp(), (sums[..., -1:, :] - sums).exp()
    # With unitriangular=True, the solver ignores the diagonal of the system and uses ones.
    system = of_keys * shares
    wanted = torch.cat((values, keys * since), -1) * shares
    solved: Tensor = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    added, of_state = torch.split(solved, [values.shape[-1], keys.shape[-1]], -1)
    kept = (keys * until).transpose(-1, -2)
    before = state.new_empty(len(keys), *state.shape)
    for piece, decay in enumerate(since[:, :, -1, :, None]):
        before[piece] = state
        added[piece].sub_(of_state[piece] @ state)
        torch.baddbmm(state * decay, kept[piece], added[piece], out=state)
    found = of_queries @ added + (queries * since) @ before
    return _joined(found, count)


class Lightning:
    """Lightning attention of one layer, see LightningConfig."""

    def __init__(
        self, name: str, config: ModelConfig, layer: LightningConfig, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._layer = layer
        sizes = {f"{name}.lightning_qkv": 3 * layer.inner_size, f"{name}.lightning_gate": layer.inner_size}
        self._input = Linear(config.hidden_size, sizes, bias=False, dtype=dtype, device=device)
        self._output = _linear(f"{name}.out_proj", layer.inner_size, config.hidden_size, False, dtype, device)
        self._exponents = -torch.tensor(layer.slopes, dtype=torch.float32, device=device)
        self._norm_name = f"{name}.gate_norm.weight"
        self._norm = torch.empty(layer.inner_size, dtype=torch.float32, device=device)
        self.linears = (self._input, self._output)

    def slots(self) -> Iterator[TensorSlot]:
        for linear in self.linears:
            yield from linear.slots()
        yield TensorSlot(self._norm_name, tuple(self._norm.shape), torch.float32, self._norm.copy_)

    def __call__(self, normed: Tensor, steps: StateSteps, memory: Tensor) -> Tensor:
        """Compute the layer, and write the states of the step.

        Args:
            normed: [T, hidden_size].
            steps: state slots that the step reads and writes.
            memory: float32 [slots, state_size], the layer's buffer of StateStorage.

        Returns:
            [T, hidden_size].
        """
        layer, (heads, dim) = self._layer, (self._layer.head_count, self._layer.head_dim)
        qkv, gate = torch.split(self._input(normed).float(), [3 * layer.inner_size, layer.inner_size], -1)
        # The rows of one head are adjacent: queries, keys, then values.
        queries, keys, values = functional.silu(qkv).view(-1, heads, 3, dim).unbind(2)
        exponents = self._exponents.expand(len(normed), heads)
        states = memory.view(-1, heads, dim, dim)
        found = _scanned_rows(values, keys, queries, exponents, steps, states, torch.zeros_like(values))
        mixed = functional.rms_norm(found.flatten(1), self._norm.shape, self._norm, layer.norm_eps)
        return self._output((mixed * gate.sigmoid()).to(normed.dtype))
