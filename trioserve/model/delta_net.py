"""Gated delta rule in torch (arXiv 2412.06464), in place of attention, see DeltaNetConfig.

Chunks of one token are computed together, and longer chunks in pieces. Within a piece, each token's change of a head's
state depends on the changes by the tokens before it. These changes are the solution of a triangular system of
equations. All numbers are float32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from trioserve.model.layers import Linear
from trioserve.model.model_config import DeltaNetConfig, ModelConfig
from trioserve.model.recurrent_layers import PIECE_TOKENS, Convolution
from trioserve.model.step_tensors import StateSteps
from trioserve.model.torch_formats import TensorSlot

__all__ = ["DeltaNet"]

LEAST_LENGTH_SQUARE = 1e-6  # added to the squared length of queries and keys


class DeltaNet:
    """One layer with the gated delta rule, see DeltaNetConfig."""

    def __init__(
        self, name: str, config: ModelConfig, layer: DeltaNetConfig, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        def vector(count: int) -> Tensor:
            return torch.empty(count, dtype=torch.float32, device=device)

        self._layer, self._eps = layer, config.norm_eps
        self._sizes = {
            "delta_gate": layer.inner_size,
            "delta_qkv": layer.convolved_size,
            "delta_decay": layer.head_count,
            "delta_share": layer.head_count,
        }
        inputs = {f"{name}.{part}": size for part, size in self._sizes.items()}
        self._input = Linear(config.hidden_size, inputs, bias=False, dtype=dtype, device=device)
        self._conv = Convolution(f"{name}.conv", layer.convolved_size, layer.kernel_size, False, device)
        outputs = {f"{name}.out_proj": config.hidden_size}
        self._output = Linear(layer.inner_size, outputs, bias=False, dtype=dtype, device=device)
        self._rates, self._decay_bias, self._norm = map(vector, (layer.head_count, layer.head_count, layer.head_dim))
        self._vectors = {
            f"{name}.state.rates": self._rates,
            f"{name}.state.time_step_bias": self._decay_bias,
            f"{name}.gate_norm.weight": self._norm,
        }
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
        gate, convolved, decays, shares = torch.split(self._input(normed).float(), list(self._sizes.values()), -1)
        kept = self._conv.state_size
        convolved = functional.silu(self._conv(convolved.contiguous(), steps, memory[:, :kept]))
        vectors = layer.group_count * layer.vector_size
        queries, keys, values = torch.split(convolved, [vectors, vectors, layer.inner_size], -1)
        found = self._scanned(
            self._unit_vectors(queries) * layer.vector_size**-0.5,
            self._unit_vectors(keys),
            values.reshape(-1, layer.head_count, layer.head_dim),
            functional.softplus(decays + self._decay_bias) * self._rates,
            shares.sigmoid(),
            steps,
            memory[:, kept:].view(-1, layer.head_count, layer.vector_size, layer.head_dim),
        )
        found *= torch.rsqrt(found.square().mean(-1, keepdim=True) + self._eps) * self._norm
        return self._output((found.flatten(1) * functional.silu(gate)).to(normed.dtype))

    def _unit_vectors(self, vectors: Tensor) -> Tensor:
        """Scale vectors to length 1 and repeat them for each value head: [T, heads, vector_size]."""
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
            exponents: [T, heads], logarithm of each token's decay.
            shares: [T, heads].
            states: [slots, heads, vector_size, head_dim].

        Returns:
            [T, heads, head_dim].
        """
        result = torch.empty_like(values)
        if (own := steps.rows) is not None:
            rows = own.rows
            before = torch.where(own.past_count[..., None] > 0, states[own.reads], 0.0)
            before *= exponents[rows].exp()[..., None, None]
            key = keys[rows][..., None]
            added = (values[rows] - (before * key).sum(-2)) * shares[rows][..., None]
            after = before + key * added[:, :, None]
            states[own.writes] = after
            result[rows] = (after * queries[rows][..., None]).sum(-2)
        for row, spans in steps.spans:
            for span in spans:
                state = states.new_zeros(states.shape[1:]) if span.reads is None else states[span.reads].clone()
                for first in range(row, row + span.count, PIECE_TOKENS):
                    piece = slice(first, min(first + PIECE_TOKENS, row + span.count))
                    result[piece] = _scanned_piece(
                        queries[piece], keys[piece], values[piece], exponents[piece], shares[piece], state
                    )
                states[span.writes] = state
                row += span.count
        return result


def _scanned_piece(
    queries: Tensor, keys: Tensor, values: Tensor, exponents: Tensor, shares: Tensor, state: Tensor
) -> Tensor:
    """Apply the delta rule to one piece of a sequence.

    With s the cumulative sums of the exponents, token i adds along k_i: u_i = share_i (v_i - exp(s_i) state^T k_i - sum
    over j < i of exp(s_i - s_j) (k_i k_j) u_j).

    Args:
        state: [heads, vector_size, head_dim], state before the piece. It is replaced by the state after the piece.

    Returns:
        [t, heads, head_dim].
    """
    sums = exponents.cumsum(0).T  # [heads, t]
    queries, keys, values = (numbers.transpose(0, 1) for numbers in (queries, keys, values))
    shares = shares.T[..., None]
    # decay from an earlier token to a later one, 0 above the diagonal
    left = (sums[:, :, None] - sums[:, None, :]).tril().exp().tril()
    since = sums.exp()[..., None]
    system = (keys @ keys.transpose(1, 2)) * left * shares  # unitriangular=True reads its diagonal as ones
    wanted = (values - (keys @ state) * since) * shares
    added: Tensor = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    found = ((queries @ keys.transpose(1, 2)) * left) @ added + (queries @ state) * since
    last = sums[:, -1:]
    state.mul_(last.exp()[..., None]).add_((keys * (last - sums).exp()[..., None]).transpose(1, 2) @ added)
    return found.transpose(0, 1)
