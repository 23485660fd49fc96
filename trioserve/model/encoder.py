"""Encoder models in torch: each token of a text attends to all tokens of the text, and no KV is stored.

The layers are those of BERT, of its variants with rotary positions, and of ModernBERT. Texts of different lengths form
one batch. Matrix products compute the tokens of all texts as one list of rows, without padding. Only attention pads
texts, in groups of similar length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from trioserve.contracts.step import IsAbandoned, never_abandoned
from trioserve.model.encoder_config import EncoderActivation, EncoderConfig, Matrix, ModernLayers
from trioserve.model.torch_step.formats import TensorSlot
from trioserve.model.torch_step.layers import Linear
from trioserve.model.torch_step.rotary import rotary_frequencies

__all__ = [
    "ACTIVATIONS",
    "BertLayer",
    "Group",
    "LayerNorm",
    "ModernBertLayer",
    "Parameter",
    "groups_of",
    "Encoder",
    "EncodedText",
]

PADDED_TOKENS_MIN = 16  # Shorter texts are padded to this length, so there are fewer groups of different lengths.
# Queries per call of sliding-window attention. With fewer queries, the calls would cost more than masked keys do.
NEIGHBOURS_TOKENS_MIN = 256

ACTIVATIONS: dict[EncoderActivation, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda values: functional.gelu(values, approximate="tanh"),
    "relu": functional.relu,
    "silu": functional.silu,
}


class Group(NamedTuple):
    """Texts of similar length.

    Attributes:
        rows: int64 [texts, tokens], index of each token's row in the batch. Padding has the row of the first token.
        mask: bool [texts, 1, 1, tokens], True for a token, False for padding. None: there is no padding.
        kept: int64 [n], indexes of all tokens in the flattened `rows`, without padding.
        targets: int64 [n], rows of these tokens in the batch.
    """

    rows: Tensor
    mask: Tensor | None
    kept: Tensor
    targets: Tensor


class BertLayer:
    """BERT's layer: a norm after attention, and a norm after the MLP. RotatedLayers describes its variants."""

    def __init__(self, config: EncoderConfig, index: int, dtype: torch.dtype, device: torch.device) -> None:
        name = f"layers.{index}"
        self._heads = config.head_count
        self._activate = ACTIVATIONS[config.activation]
        self._qkv, self._output, self._up, self._down = _linears(name, config, dtype, device)
        self._frequencies, self._has_gate = None, False
        if config.rotated is not None:
            frequencies, _magnitudes = rotary_frequencies(config.rotated.rotary, config.head_dim)
            self._frequencies = torch.from_numpy(frequencies).to(device)
            self._has_gate = bool(config.rotated.gated)
        self._attention_norm = LayerNorm(f"{name}.attention_norm", config, dtype, device)
        self._output_norm = LayerNorm(f"{name}.output_norm", config, dtype, device)

    def slots(self) -> Iterator[TensorSlot]:
        for part in (self._qkv, self._output, self._attention_norm, self._up, self._down, self._output_norm):
            yield from part.slots()

    def __call__(self, hidden: Tensor, groups: Sequence[Group]) -> Tensor:
        """Compute the layer.

        Args:
            hidden: [T, hidden_size].
            groups: groups of the texts.

        Returns:
            [T, hidden_size].
        """
        attended = _attended(self._qkv(hidden), groups, self._heads, self._frequencies)
        hidden = self._attention_norm(hidden + self._output(attended))
        middle = self._up(hidden)
        if self._has_gate:
            up, gate = middle.chunk(2, -1)
            middle = up * self._activate(gate)
        else:
            middle = self._activate(middle)
        return self._output_norm(hidden + self._down(middle))


class ModernBertLayer:
    """ModernBERT's layer, see ModernLayers. The first layer has no norm before attention, because the embeddings are
    already normalized.
    """

    def __init__(
        self, config: EncoderConfig, layers: ModernLayers, index: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        name = f"layers.{index}"
        self._heads = config.head_count
        self._reach = layers.reaches[index]
        frequencies, _magnitudes = rotary_frequencies(layers.rotaries[index], config.head_dim)
        self._frequencies = torch.from_numpy(frequencies).to(device)
        self._activate = ACTIVATIONS[config.activation]
        self._qkv, self._output, self._gate_up, self._down = _linears(name, config, dtype, device)
        self._attention_norm = LayerNorm(f"{name}.attention_norm", config, dtype, device) if index else None
        self._mlp_norm = LayerNorm(f"{name}.mlp_norm", config, dtype, device)

    def slots(self) -> Iterator[TensorSlot]:
        for part in (self._attention_norm, self._qkv, self._output, self._mlp_norm, self._gate_up, self._down):
            if part is not None:
                yield from part.slots()

    def __call__(self, hidden: Tensor, groups: Sequence[Group]) -> Tensor:
        """Compute the layer.

        Args:
            hidden: [T, hidden_size].
            groups: groups of the texts.

        Returns:
            [T, hidden_size].
        """
        qkv = self._qkv(hidden if self._attention_norm is None else self._attention_norm(hidden))
        hidden = hidden + self._output(_attended(qkv, groups, self._heads, self._frequencies, self._reach))
        gate, up = self._gate_up(self._mlp_norm(hidden)).chunk(2, -1)
        return hidden + self._down(self._activate(gate) * up)


def _attended(
    qkv: Tensor,
    groups: Sequence[Group],
    head_count: int,
    frequencies: Tensor | None = None,
    reach: int | None = None,
) -> Tensor:
    """Compute attention: each token attends to the tokens of its text.

    Args:
        qkv: [T, 3 * hidden_size].
        frequencies: float32 [head_dim / 2], rotary frequencies. None: no rotation.
        reach: number of tokens on either side that a token attends to. None: all tokens of the text.

    Returns:
        [T, hidden_size].
    """
    attended = qkv.new_empty(qkv.shape[0], qkv.shape[1] // 3)
    for group in groups:
        texts, tokens = group.rows.shape
        parts = qkv[group.rows.view(-1)].view(texts, tokens, 3, head_count, -1)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        if frequencies is not None:
            queries, keys = _rotated(queries, frequencies), _rotated(keys, frequencies)
        if reach is None or reach >= tokens - 1:
            found = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=group.mask)
        else:
            found = _attended_nearby(queries, keys, values, group.mask, reach)
        found = found.transpose(1, 2).reshape(texts * tokens, -1)
        attended.index_copy_(0, group.targets, found if group.mask is None else found[group.kept])
    return attended


def _attended_nearby(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, reach: int) -> Tensor:
    """Compute attention in a sliding window, for some queries at a time and only with the keys in their windows.

    For a long text, time and memory then grow with its length, not with the square of its length.

    Args:
        queries: [texts, heads, tokens, head_dim].
        keys: same shape as queries.
        values: same shape as queries.
    """
    found = torch.empty_like(queries)
    tokens = queries.shape[2]
    places = torch.arange(tokens, device=queries.device)
    stride = max(2 * reach, NEIGHBOURS_TOKENS_MIN)
    for first in range(0, tokens, stride):
        own = slice(first, min(first + stride, tokens))
        seen = slice(max(0, own.start - reach), min(tokens, own.stop + reach))
        is_near = (places[own, None] - places[None, seen]).abs() <= reach
        if mask is not None:
            is_near = is_near & mask[..., seen]
        found[:, :, own] = functional.scaled_dot_product_attention(
            queries[:, :, own], keys[:, :, seen], values[:, :, seen], attn_mask=is_near
        )
    return found


def _rotated(heads: Tensor, frequencies: Tensor) -> Tensor:
    """Apply rotary position embeddings to heads (RoFormer, arXiv 2104.09864).

    Args:
        heads: [texts, heads, tokens, head_dim].
    """
    places = torch.arange(heads.shape[2], dtype=torch.float32, device=heads.device)
    angles = torch.outer(places, frequencies)
    cosines, sines = angles.cos(), angles.sin()
    first, second = heads.float().chunk(2, -1)
    turned = torch.cat((first * cosines - second * sines, second * cosines + first * sines), -1)
    return turned.to(heads.dtype)


class Parameter:
    """One tensor that is used unchanged."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._name = name
        self.weight = torch.empty(shape, dtype=dtype, device=device)

    def slots(self) -> Iterator[TensorSlot]:
        yield TensorSlot(self._name, tuple(self.weight.shape), self.weight.dtype, self.weight.copy_)


class LayerNorm:
    """LayerNorm with a bias, unless the config disables biases of norms."""

    def __init__(self, name: str, config: EncoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._size = (config.hidden_size,)
        self._eps = config.norm_eps
        self._weight = Parameter(f"{name}.weight", self._size, dtype, device)
        has_bias = config.modern is None or config.modern.norm_bias
        self._bias = Parameter(f"{name}.bias", self._size, dtype, device) if has_bias else None

    def slots(self) -> Iterator[TensorSlot]:
        yield from self._weight.slots()
        if self._bias is not None:
            yield from self._bias.slots()

    def __call__(self, values: Tensor) -> Tensor:
        bias = None if self._bias is None else self._bias.weight
        return functional.layer_norm(values, self._size, self._weight.weight, bias, self._eps)


def groups_of(lengths: Sequence[int], device: torch.device) -> list[Group]:
    """Group texts whose lengths have the same next power of two, so less than half of the rows of a group is padding.

    Args:
        lengths: tokens of each text.
        device: device of the tensors.
    """
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
            Group(
                torch.from_numpy(rows).to(device),
                mask,
                torch.from_numpy(kept).to(device),
                torch.from_numpy(rows.reshape(-1)[kept]).to(device),
            )
        )
    return groups


def _linears(name: str, config: EncoderConfig, dtype: torch.dtype, device: torch.device) -> list[Linear]:
    """Return the matrices of a layer, in the order of LayerMatrices."""

    def linear(matrix: Matrix) -> Linear:
        named = {f"{name}.{module}": size for module, size in matrix.outputs.items()}
        return Linear(matrix.inputs, named, bias=matrix.has_bias, dtype=dtype, device=device)

    return [linear(matrix) for matrix in config.matrices]


class EncodedText(NamedTuple):
    """Tokens of one text, or of a pair of texts.

    Attributes:
        token_ids: tokens of the text or the pair.
        first_segment_tokens: number of tokens of the pair's first text. None: there is only one text.
    """

    token_ids: Sequence[int]
    first_segment_tokens: int | None = None


class Encoder:
    """Weights of an encoder, and the computation of one step."""

    def __init__(self, config: EncoderConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        hidden, modern = config.hidden_size, config.modern
        self._embedding = Parameter("embed.weight", (config.vocab_size, hidden), dtype, device)
        self._norm = LayerNorm("norm", config, dtype, device)
        self._positions = self._types = self._final_norm = None
        self._layers: list[BertLayer] | list[ModernBertLayer]
        if config.has_position_table:
            self._positions = Parameter("positions.weight", (config.position_count, hidden), dtype, device)
        if modern is None:
            if config.type_count:
                self._types = Parameter("types.weight", (config.type_count, hidden), dtype, device)
            self._layers = [BertLayer(config, index, dtype, device) for index in range(config.layer_count)]
        else:
            self._layers = [ModernBertLayer(config, modern, i, dtype, device) for i in range(config.layer_count)]
            self._final_norm = LayerNorm("final_norm", config, dtype, device)
        self._head = _Head(config, dtype, device) if config.scores_pairs or config.label_count else None

    def slots(self) -> Iterator[TensorSlot]:
        """Yield a slot for every tensor of the checkpoint."""
        for part in (self._embedding, self._positions, self._types, self._norm, *self._layers, self._final_norm):
            if part is not None:
                yield from part.slots()
        if self._head is not None:
            yield from self._head.slots()

    def forward(self, texts: Sequence[EncodedText], is_abandoned: IsAbandoned = never_abandoned) -> Tensor | None:
        """Compute all layers.

        Args:
            texts: texts of the step.
            is_abandoned: polled before each layer.

        Returns:
            [tokens of all texts, hidden_size] after the last layer, in the order of the texts. None if the step was
            abandoned.
        """
        token_ids, positions, types = self._inputs(texts)
        hidden = functional.embedding(token_ids, self._embedding.weight)
        for table, indexes in ((self._positions, positions), (self._types, types)):
            if table is not None:
                hidden += functional.embedding(indexes, table.weight)
        hidden = self._norm(hidden)
        groups = groups_of([len(text.token_ids) for text in texts], self.device)
        for layer in self._layers:
            if is_abandoned():
                return None
            hidden = layer(hidden, groups)
        return hidden if self._final_norm is None else self._final_norm(hidden)

    def scores(self, texts: Sequence[Tensor]) -> Tensor:
        """Score texts with the head.

        Args:
            texts: for each text its rows of forward's result, [tokens, hidden_size].

        Returns:
            float32 [texts].
        """
        assert self._head is not None, "the model has no scoring head"
        pooled = [rows.mean(0) if self.config.method == "mean" else rows[0] for rows in texts]
        found = self._head(torch.stack(pooled)).to(torch.float32)[:, 0]
        return torch.sigmoid(found) if self.config.applies_sigmoid else found

    def labels(self, hidden: Tensor) -> Tensor:
        """Return the probability of each label for each token.

        Args:
            hidden: rows of forward's result, [tokens, hidden_size].

        Returns:
            float32 [tokens, label_count].
        """
        assert self._head is not None, "the model has no head that labels tokens"
        found = self._head(hidden).to(torch.float32)
        return torch.sigmoid(found) if self.config.label_count == 1 else found.softmax(-1)

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


class _Head:
    """Head that scores texts or labels tokens, with two products. Between them, BERT has tanh, and ModernBERT has a
    configured activation and a norm. BERT's head that labels tokens has only the second product.
    """

    def __init__(self, config: EncoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        hidden, modern = config.hidden_size, config.modern
        has_bias = modern is None or modern.head_bias
        self._dense = None
        if modern is not None or not config.label_count:
            self._dense = Linear(hidden, {"head_dense": hidden}, bias=has_bias, dtype=dtype, device=device)
        self._activate = torch.tanh if modern is None else ACTIVATIONS[modern.head_activation]
        self._norm = None if modern is None else LayerNorm("head_norm", config, dtype, device)
        self._out = Linear(hidden, {"head_out": config.label_count or 1}, bias=True, dtype=dtype, device=device)

    def slots(self) -> Iterator[TensorSlot]:
        for part in (self._dense, self._norm, self._out):
            if part is not None:
                yield from part.slots()

    def __call__(self, pooled: Tensor) -> Tensor:
        """Score pooled rows, or label rows of tokens.

        Args:
            pooled: [rows, hidden_size].

        Returns:
            [rows, 1], or [rows, label_count].
        """
        values = pooled if self._dense is None else self._activate(self._dense(pooled))
        return self._out(values if self._norm is None else self._norm(values))
