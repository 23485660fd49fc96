"""Encoders in plain torch: all tokens of a text see each other, and no state is kept.

Texts of different lengths form one batch. Their tokens follow each other in every product. Only attention computes
texts separately, in groups of similar length. encoder_layers.py has the layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from trioserve.contracts.step import IsAbandoned, never_abandoned
from trioserve.model.encoder_config import EncoderConfig
from trioserve.model.encoder_layers import ACTIVATIONS, BertLayer, LayerNorm, ModernBertLayer, Parameter, groups_of
from trioserve.model.layers import Linear
from trioserve.model.torch_formats import TensorSlot

__all__ = ["Encoder", "EncodedText"]


class EncodedText(NamedTuple):
    """Tokens of one text, or of a pair of texts.

    Attributes:
        token_ids: tokens of the text or the pair.
        first_segment_tokens: number of tokens of the pair's first text. None: there is one text.
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
        if modern is None:
            self._positions = Parameter("positions.weight", (config.position_count, hidden), dtype, device)
            self._types = Parameter("types.weight", (config.type_count, hidden), dtype, device)
            self._layers = [BertLayer(config, index, dtype, device) for index in range(config.layer_count)]
        else:
            self._layers = [ModernBertLayer(config, modern, i, dtype, device) for i in range(config.layer_count)]
            self._final_norm = LayerNorm("final_norm", config, dtype, device)
        self._head = _Head(config, dtype, device) if config.scores_pairs else None

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
            [tokens of all texts, hidden_size] after the last layer, text after text. None if the step was abandoned.
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
    """Scoring head. BERT's has tanh between two products. ModernBERT's has its own activation and then a norm between
    them.
    """

    def __init__(self, config: EncoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        hidden, modern = config.hidden_size, config.modern
        has_bias = modern is None or modern.head_bias
        self._dense = Linear(hidden, {"head_dense": hidden}, bias=has_bias, dtype=dtype, device=device)
        self._activate = torch.tanh if modern is None else ACTIVATIONS[modern.head_activation]
        self._norm = None if modern is None else LayerNorm("head_norm", config, dtype, device)
        self._out = Linear(hidden, {"head_out": 1}, bias=True, dtype=dtype, device=device)

    def slots(self) -> Iterator[TensorSlot]:
        for part in (self._dense, self._norm, self._out):
            if part is not None:
                yield from part.slots()

    def __call__(self, pooled: Tensor) -> Tensor:
        """Score pooled rows.

        Args:
            pooled: [texts, hidden_size].

        Returns:
            [texts, 1].
        """
        values = self._activate(self._dense(pooled))
        return self._out(values if self._norm is None else self._norm(values))
