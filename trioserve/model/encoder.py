"""The BERT family in plain torch: all tokens of a text see each other, and nothing of them is kept.

Texts of different lengths are one batch: their tokens lie one behind the other in every product, and only attention
looks at texts one by one, those of about the same length together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from trioserve.contracts.step import IsAbandoned, never_abandoned
from trioserve.model.encoder_config import EncoderActivation, EncoderConfig
from trioserve.model.layers import Linear
from trioserve.model.torch_formats import TensorSlot

__all__ = ["Encoder", "EncodedText"]

PADDED_TOKENS_MIN = 16  # shorter texts are looked at as if they had so many: fewer groups of different lengths

ACTIVATIONS: dict[EncoderActivation, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda values: functional.gelu(values, approximate="tanh"),
    "relu": functional.relu,
    "silu": functional.silu,
}


class EncodedText(NamedTuple):
    """first_segment_tokens: of a pair of texts, how many tokens are of the first; None: there is one."""

    token_ids: Sequence[int]
    first_segment_tokens: int | None = None


class _Group(NamedTuple):
    """Texts of about the same length. rows: int64 [texts, tokens], the row of each token, of padding that of some
    other; mask: bool [texts, 1, 1, tokens], where there is a token; None: everywhere. kept: int64 [n], the places in
    rows, as one list, where there is one; targets: int64 [n], their rows."""

    rows: Tensor
    mask: Tensor | None
    kept: Tensor
    targets: Tensor


class Encoder:
    """Weights, and one step through all layers."""

    def __init__(self, config: EncoderConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        hidden = config.hidden_size
        self._embedding = _Parameter("embed.weight", (config.vocab_size, hidden), dtype, device)
        self._positions = _Parameter("positions.weight", (config.position_count, hidden), dtype, device)
        self._types = _Parameter("types.weight", (config.type_count, hidden), dtype, device)
        self._norm = _LayerNorm("norm", config, dtype, device)
        self._layers = [_Layer(config, index, dtype, device) for index in range(config.layer_count)]
        self._head_dense = self._head_out = None
        if config.scores_pairs:
            self._head_dense = Linear(hidden, {"head_dense": hidden}, bias=True, dtype=dtype, device=device)
            self._head_out = Linear(hidden, {"head_out": 1}, bias=True, dtype=dtype, device=device)

    def slots(self) -> Iterator[TensorSlot]:
        """A place for every tensor of the checkpoint."""
        for parameter in (self._embedding, self._positions, self._types):
            yield from parameter.slots()
        yield from self._norm.slots()
        for layer in self._layers:
            yield from layer.slots()
        for head in (self._head_dense, self._head_out):
            if head is not None:
                yield from head.slots()

    def forward(self, texts: Sequence[EncodedText], is_abandoned: IsAbandoned = never_abandoned) -> Tensor | None:
        """[tokens of all texts, hidden_size] after the last layer, text after text; None if it was abandoned, which is
        asked before each layer."""
        token_ids, positions, types = self._inputs(texts)
        hidden = functional.embedding(token_ids, self._embedding.weight)
        hidden += functional.embedding(positions, self._positions.weight)
        hidden += functional.embedding(types, self._types.weight)
        hidden = self._norm(hidden)
        groups = _groups([len(text.token_ids) for text in texts], self.device)
        for layer in self._layers:
            if is_abandoned():
                return None
            hidden = layer(hidden, groups)
        return hidden

    def scores(self, first_rows: Tensor) -> Tensor:
        """first_rows: [texts, hidden_size], of each text that of its first token. float32 [texts]."""
        assert self._head_dense is not None, "there is no head that scores"
        assert self._head_out is not None, "there is no head that scores"
        found = self._head_out(torch.tanh(self._head_dense(first_rows))).to(torch.float32)[:, 0]
        return torch.sigmoid(found) if self.config.applies_sigmoid else found

    def _inputs(self, texts: Sequence[EncodedText]) -> tuple[Tensor, Tensor, Tensor]:
        token_ids = np.concatenate([np.asarray(text.token_ids, dtype=np.int64) for text in texts])
        places = [np.arange(len(text.token_ids), dtype=np.int64) for text in texts]
        positions = np.concatenate(places) + self.config.position_offset
        types = np.zeros_like(token_ids)
        if self.config.type_count > 1:
            segments = [
                place >= (len(text.token_ids) if text.first_segment_tokens is None else text.first_segment_tokens)
                for place, text in zip(places, texts, strict=True)
            ]
            types = np.concatenate(segments).astype(np.int64)
        inputs = torch.from_numpy(np.stack((token_ids, positions, types))).to(self.device)
        return inputs[0], inputs[1], inputs[2]


class _Layer:
    def __init__(self, config: EncoderConfig, index: int, dtype: torch.dtype, device: torch.device) -> None:
        hidden, middle = config.hidden_size, config.intermediate_size
        name = f"layers.{index}"
        self._heads = config.head_count
        self._head_dim = config.head_dim
        self._activate = ACTIVATIONS[config.activation]

        def linear(inputs: int, outputs: dict[str, int]) -> Linear:
            named = {f"{name}.{module}": size for module, size in outputs.items()}
            return Linear(inputs, named, bias=True, dtype=dtype, device=device)

        self._qkv = linear(hidden, {"q_proj": hidden, "k_proj": hidden, "v_proj": hidden})
        self._output = linear(hidden, {"o_proj": hidden})
        self._up = linear(hidden, {"up_proj": middle})
        self._down = linear(middle, {"down_proj": hidden})
        self._attention_norm = _LayerNorm(f"{name}.attention_norm", config, dtype, device)
        self._output_norm = _LayerNorm(f"{name}.output_norm", config, dtype, device)

    def slots(self) -> Iterator[TensorSlot]:
        for part in (self._qkv, self._output, self._attention_norm, self._up, self._down, self._output_norm):
            yield from part.slots()

    def __call__(self, hidden: Tensor, groups: Sequence[_Group]) -> Tensor:
        """hidden: [T, hidden_size]."""
        hidden = self._attention_norm(hidden + self._output(self._attend(self._qkv(hidden), groups)))
        return self._output_norm(hidden + self._down(self._activate(self._up(hidden))))

    def _attend(self, qkv: Tensor, groups: Sequence[_Group]) -> Tensor:
        """qkv: [T, 3 * hidden_size]. [T, hidden_size]."""
        attended = qkv.new_empty(qkv.shape[0], self._heads * self._head_dim)
        for group in groups:
            texts, tokens = group.rows.shape
            parts = qkv[group.rows.view(-1)].view(texts, tokens, 3, self._heads, self._head_dim)
            queries, keys, values = parts.permute(2, 0, 3, 1, 4)
            found = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=group.mask)
            found = found.transpose(1, 2).reshape(texts * tokens, -1)
            attended.index_copy_(0, group.targets, found if group.mask is None else found[group.kept])
        return attended


class _Parameter:
    """One tensor that is used as it is."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._name = name
        self.weight = torch.empty(shape, dtype=dtype, device=device)

    def slots(self) -> Iterator[TensorSlot]:
        yield TensorSlot(self._name, tuple(self.weight.shape), self.weight.dtype, self.weight.copy_)


class _LayerNorm:
    def __init__(self, name: str, config: EncoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._size = (config.hidden_size,)
        self._eps = config.norm_eps
        self._weight = _Parameter(f"{name}.weight", self._size, dtype, device)
        self._bias = _Parameter(f"{name}.bias", self._size, dtype, device)

    def slots(self) -> Iterator[TensorSlot]:
        yield from self._weight.slots()
        yield from self._bias.slots()

    def __call__(self, values: Tensor) -> Tensor:
        return functional.layer_norm(values, self._size, self._weight.weight, self._bias.weight, self._eps)


def _groups(lengths: Sequence[int], device: torch.device) -> list[_Group]:
    """Texts whose lengths have the same next power of two: padding takes less than half of a group."""
    firsts = np.cumsum([0, *lengths[:-1]])
    by_size: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        by_size.setdefault(max(PADDED_TOKENS_MIN, 1 << (length - 1).bit_length()), []).append(index)
    groups = []
    for indexes in by_size.values():
        counts = np.array([lengths[index] for index in indexes])
        places = np.arange(counts.max())
        is_token = places[None, :] < counts[:, None]
        rows = np.where(is_token, firsts[indexes][:, None] + places[None, :], firsts[indexes][:, None])
        kept = np.flatnonzero(is_token)
        mask = None if is_token.all() else torch.from_numpy(is_token[:, None, None, :]).to(device)
        groups.append(
            _Group(
                torch.from_numpy(rows).to(device),
                mask,
                torch.from_numpy(kept).to(device),
                torch.from_numpy(rows.reshape(-1)[kept]).to(device),
            )
        )
    return groups
