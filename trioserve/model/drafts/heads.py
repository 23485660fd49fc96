"""Draft models in torch that read hidden states of the target model: EAGLE-3 heads and prediction layers (MTP).

An EAGLE-3 head is one layer that predicts the target model's next hidden state. The head's row for a token reads the
embedding of the next token and the target model's hidden states at the token. For positions that the target model has
not computed, the head's own last output replaces these hidden states. Therefore, the head's KV of a token also depends
on the next token. If the prefix cache shares a block, the KV of the block's last token may depend on the next token of
another request. This can only make a draft token worse.

A prediction layer (multi-token prediction, MTP) is trained with the model. The row for a token embeds the next token
and reads the model's last hidden state at the token. Both are normalized, concatenated, and projected with eh_proj. For
positions that the model has not computed, the head's own last output replaces the hidden state. The row then passes
through a layer like the model's layers. A separate StepModel with its own KV computes this layer. As in an EAGLE-3
head, a row has the position of its token, and embeds the next token.

Source: DeepSeek-V3's technical report (arXiv:2412.19437), section 2.2. In the report, the hidden state precedes the
embedding. eh_proj of the released checkpoints expects the embedding first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from trioserve.contracts.errors import ModelLoadError
from trioserve.contracts.guide import TokenMasks
from trioserve.contracts.ids import RequestId
from trioserve.contracts.media import GivenRows
from trioserve.contracts.step import IsAbandoned, ScheduledChunk
from trioserve.model.drafts.checkpoints import EagleCheckpoint, MtpCheckpoint
from trioserve.model.layer_config import AttentionConfig
from trioserve.model.model_config import ModelConfig
from trioserve.model.number_formats import VALUE_BYTES, Dtype
from trioserve.model.step_model import ComputedStep, Samples, StepModel, is_largest_wanted
from trioserve.model.torch_step.formats import TORCH_DTYPES
from trioserve.model.torch_step.rotary import rotary_frequencies
from trioserve.model.torch_step.sampler import sample

__all__ = ["EagleHead", "MtpHead"]

# Logit of tokens outside of the head's vocabulary. The number is finite and less than any computed logit.
FAR_BELOW = -1e30


class EagleHead:
    """EAGLE-3 head as a draft model for DraftModel.

    Args:
        checkpoint: files of the head.
        target: description of the target model.
        embedding: the target model's embedding [vocab_size, hidden_size], for a head that has no embedding.
        dtype: dtype of weights and KV.
        device: device of weights and KV.
        block_size: tokens of one KV block.

    Raises:
        ModelLoadError: a tensor is missing, unknown, or has the wrong shape.
    """

    def __init__(
        self,
        checkpoint: EagleCheckpoint,
        target: ModelConfig,
        embedding: Tensor,
        *,
        dtype: Dtype,
        device: torch.device,
        block_size: int,
    ) -> None:
        self.config = checkpoint.config
        self.dtype = dtype
        self._block_size = block_size
        self._device = device
        self._norms_residual = checkpoint.norms_residual
        attention, mlp = self.config.layers[0].attention, self.config.layers[0].mlp
        assert isinstance(attention, AttentionConfig), "an EAGLE-3 layer has ordinary attention"
        assert mlp is not None, "an EAGLE-3 layer has an MLP"
        heads = self.config.heads
        self._head_count, self._kv_head_count, self._head_dim = heads.head_count, heads.kv_head_count, heads.head_dim
        size, middle = self.config.hidden_size, mlp.intermediate_size
        stored = checkpoint.tensors()

        def take(name: str, *shape: int) -> Tensor:
            tensor = stored.pop(name, None)
            if tensor is None:
                raise ModelLoadError(f"{checkpoint.path} has no {name}: the EAGLE-3 head is incomplete")
            if tuple(tensor.shape) != shape:
                raise ModelLoadError(
                    f"{name} in {checkpoint.path} has shape {list(tensor.shape)}, but config.json requires "
                    f"{list(shape)}"
                )
            values = torch.from_numpy(tensor)
            return values.to(device, TORCH_DTYPES[dtype] if values.is_floating_point() else values.dtype)

        layer, queries, keys = "midlayer", attention.query_size, attention.key_size
        self._fc = take("fc.weight", size, 3 * target.hidden_size)
        self._embedding_norm = take(f"{layer}.input_layernorm.weight", size)
        self._hidden_norm = take(f"{layer}.hidden_norm.weight", size)
        self._qkv = torch.cat(
            [
                take(f"{layer}.self_attn.{part}_proj.weight", count, 2 * size)
                for part, count in (("q", queries), ("k", keys), ("v", keys))
            ]
        )
        self._output = take(f"{layer}.self_attn.o_proj.weight", size, queries)
        self._mlp_norm = take(f"{layer}.post_attention_layernorm.weight", size)
        self._gate_up = torch.cat([take(f"{layer}.mlp.{part}_proj.weight", middle, size) for part in ("gate", "up")])
        self._down = take(f"{layer}.mlp.down_proj.weight", size, middle)
        self._norm = take("norm.weight", size)
        self._head = take("lm_head.weight", checkpoint.vocab_size, size)
        self._token_ids = torch.arange(checkpoint.vocab_size, device=device)
        if "d2t" in stored:
            self._token_ids = self._token_ids + take("d2t", checkpoint.vocab_size).to(torch.int64)
        elif checkpoint.vocab_size != target.vocab_size:
            raise ModelLoadError(f"{checkpoint.path} has no d2t, which maps its vocabulary to the model's")
        if not 0 <= int(self._token_ids.min()) <= int(self._token_ids.max()) < target.vocab_size:
            raise ModelLoadError(f"d2t in {checkpoint.path} names tokens that the model does not have")
        self._vocab_size = target.vocab_size
        own = "embed_tokens.weight" in stored
        self._embedding = take("embed_tokens.weight", target.vocab_size, size) if own else embedding
        if self._embedding.shape[1] != size:
            raise ModelLoadError(
                f"the EAGLE-3 head in {checkpoint.path} has hidden_size {size}, and the model's embedding "
                f"{self._embedding.shape[1]}: name the head that was trained for this model"
            )
        if stored:
            raise ModelLoadError(f"{checkpoint.path} has {min(stored)}, which is not a tensor of an EAGLE-3 head")
        frequencies, magnitudes = rotary_frequencies(attention.rotary, self._head_dim)
        self._frequencies = torch.from_numpy(frequencies).to(device)
        self._magnitudes = torch.from_numpy(magnitudes).to(device)
        self._pages: Tensor | None = None
        # Hidden states of each request, at the positions of the rows that are computed next.
        self._hidden: dict[RequestId, Tensor] = {}

    @property
    def block_bytes(self) -> int:
        return 2 * self._kv_head_count * self._head_dim * self._block_size * VALUE_BYTES[self.dtype]

    def allocate_kv(self, block_count: int) -> None:
        shape = (block_count * self._block_size, 2, self._kv_head_count, self._head_dim)
        self._pages = torch.zeros(shape, dtype=TORCH_DTYPES[self.dtype], device=self._device)

    @torch.inference_mode()
    def pass_hidden_states(self, tapped: Mapping[RequestId, Any]) -> None:
        """Project and store the hidden states of the step that just ended.

        Args:
            tapped: for each request, the inputs of the tapped layers, float [rows, layers * hidden_size].
        """
        self._hidden = {}
        for request_id, rows in tapped.items():
            tensor = torch.from_numpy(rows) if isinstance(rows, np.ndarray) else rows
            self._hidden[request_id] = linear(tensor.to(self._device, self._fc.dtype), self._fc)

    @torch.inference_mode()
    def compute(
        self, chunks: Sequence[ScheduledChunk], is_abandoned: IsAbandoned, masks: TokenMasks | None = None
    ) -> ComputedStep | None:
        """Compute the rows of the chunks. Each row's position is one before that of its token.

        Args:
            chunks: one per request. Their rows read tapped hidden states, or this head's last output.
            is_abandoned: returns True if the result is no longer needed.
            masks: not used.

        Returns:
            Sampled tokens of the chunks that sample, or None if the step was abandoned.
        """
        if is_abandoned():
            return None
        token_ids = [token for chunk in chunks for token in chunk.row_tokens]
        positions = torch.cat([torch.arange(chunk.start, chunk.start + chunk.count) for chunk in chunks]) - 1
        given = torch.cat([self._hidden[chunk.request.id][: chunk.count] for chunk in chunks])
        hidden = self._layer(torch.tensor(token_ids, device=self._device), given, positions.to(self._device), chunks)
        ends = np.cumsum([chunk.count for chunk in chunks]).tolist()
        for chunk, end in zip(chunks, ends, strict=True):
            self._hidden[chunk.request.id] = hidden[end - 1 : end]
        sampling = [(chunk, end - 1) for chunk, end in zip(chunks, ends, strict=True) if chunk.samples]
        if not sampling:
            return ComputedStep(None)
        last = hidden[torch.tensor([row for _chunk, row in sampling], device=self._device)]
        logits = linear(self._normed(last, self._norm), self._head)
        return ComputedStep(_samples(logits, [chunk for chunk, _row in sampling], self._token_ids, self._vocab_size))

    def claim_memory(self) -> bool:
        return False

    def warm_up(self) -> None:
        """Do nothing, because nothing is prepared ahead."""

    def close(self) -> None:
        self._pages = None
        self._hidden = {}

    def _layer(self, token_ids: Tensor, given: Tensor, positions: Tensor, chunks: Sequence[ScheduledChunk]) -> Tensor:
        assert self._pages is not None, "compute before allocate_kv"
        normed = self._normed(given, self._hidden_norm)
        residual = normed if self._norms_residual else given
        embedded = self._normed(self._embedding[token_ids], self._embedding_norm)
        qkv = linear(torch.cat((embedded, normed), -1), self._qkv).view(len(token_ids), -1, self._head_dim)
        parts = [self._head_count, self._kv_head_count, self._kv_head_count]
        queries, keys, values = torch.split(qkv, parts, 1)
        angles = positions.to(torch.float32)[:, None] * self._frequencies
        cos, sin = (angles.cos() * self._magnitudes)[:, None], (angles.sin() * self._magnitudes)[:, None]
        queries, keys = _rotated(queries, cos, sin), _rotated(keys, cos, sin)
        attended, first = [], 0
        for chunk in chunks:
            rows = slice(first, first + chunk.count)
            first += chunk.count
            slots = self._slots(chunk)
            own = slots[chunk.start - 1 :]
            self._pages[own, 0], self._pages[own, 1] = keys[rows], values[rows]
            attended.append(self._attended(queries[rows], self._pages[slots], chunk.start - 1))
        hidden = residual + linear(torch.cat(attended), self._output)
        gate, up = linear(self._normed(hidden, self._mlp_norm), self._gate_up).chunk(2, -1)
        return hidden + linear(silu(gate) * up, self._down)

    def _slots(self, chunk: ScheduledChunk) -> Tensor:
        """Return the KV slots of positions 0 to start + count - 2. The last `count` slots belong to the new rows.

        Returns:
            int64 [start + count - 1], on the head's device.
        """
        count = chunk.start + chunk.count - 1
        blocks = torch.tensor(chunk.block_table[: -(-count // self._block_size)])
        slots = (blocks[:, None] * self._block_size + torch.arange(self._block_size)).view(-1)[:count]
        return slots.to(self._device)

    def _attended(self, queries: Tensor, context: Tensor, start: int) -> Tensor:
        """Compute attention: each query attends to all positions up to and including its own position.

        Args:
            queries: [rows, heads, head_dim] at the positions from `start`.
            context: keys and values, [positions, 2, kv_heads, head_dim].
            start: position of the first query.

        Returns:
            [rows, heads * head_dim].
        """
        rows, group = queries.shape[0], self._head_count // self._kv_head_count
        keys, values = context.repeat_interleave(group, 2).permute(1, 2, 0, 3)
        positions = torch.arange(context.shape[0], device=self._device)
        seen = positions[None] <= positions[start:, None]
        attended = scaled_dot_product_attention(queries.transpose(0, 1)[None], keys[None], values[None], attn_mask=seen)
        return attended[0].transpose(0, 1).reshape(rows, -1)

    def _normed(self, rows: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(rows, weight.shape, weight, self.config.norm_eps)


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embeddings to the pairs j and j + half of each head.

    Args:
        heads: [rows, heads, head_dim].
        cos: float32 [rows, 1, head_dim / 2].
        sin: float32 [rows, 1, head_dim / 2].

    Returns:
        Same shape and dtype as `heads`.
    """
    first, second = heads.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(heads.dtype)


class MtpHead:
    """Prediction layer (MTP) as a draft model for DraftModel.

    Args:
        checkpoint: the prediction layer and its additional tensors.
        layer: model that computes the layer. This object closes the model.

    Raises:
        ModelLoadError: a tensor is missing or has the wrong shape.
    """

    def __init__(self, checkpoint: MtpCheckpoint, layer: StepModel) -> None:
        config = checkpoint.config
        self._layer = layer
        self._device = torch.device(layer.device)
        self._eps = config.norm_eps
        dtype, size, vocab = TORCH_DTYPES[layer.dtype], config.hidden_size, config.vocab_size

        def kept(values: Any) -> Tensor:
            return torch.from_numpy(values).to(self._device, dtype)

        self._token_norm = kept(checkpoint.read("enorm", size))
        self._hidden_norm = kept(checkpoint.read("hnorm", size))
        self._projection = kept(checkpoint.read("eh_proj", size, 2 * size))
        self._norm = kept(checkpoint.read("shared_head.norm", size))
        self._model_norm = kept(checkpoint.read_shared("norm.weight"))
        self._embedding = kept(checkpoint.read_or_shared("embed_tokens", "embed.weight", vocab, size))
        own_head = "embed.weight" if config.tie_word_embeddings else "lm_head.weight"
        self._head = kept(checkpoint.read_or_shared("shared_head.head", own_head, vocab, size))
        layer.tapped_layers = (layer.config.layer_count,)
        # Hidden states of each request, at the positions of the rows that are computed next.
        self._hidden: dict[RequestId, Tensor] = {}

    def allocate_kv(self, block_count: int) -> None:
        self._layer.allocate_kv(block_count)

    @torch.inference_mode()
    def pass_hidden_states(self, tapped: Mapping[RequestId, Any]) -> None:
        """Normalize and store the hidden states of the step that just ended.

        Args:
            tapped: for each request, the output of the target model's last layer, float [rows, hidden_size].
        """
        self._hidden = {id: self._normed(self._kept(rows), self._model_norm) for id, rows in tapped.items()}

    @torch.inference_mode()
    def compute(
        self, chunks: Sequence[ScheduledChunk], is_abandoned: IsAbandoned, masks: TokenMasks | None = None
    ) -> ComputedStep | None:
        """Compute the rows of the chunks. Each row's position is one before that of its token.

        Args:
            chunks: one per request. Their rows read tapped hidden states, or this head's last output.
            is_abandoned: returns True if the result is no longer needed.
            masks: not used.

        Returns:
            Sampled tokens of the chunks that sample, or None if the step was abandoned.
        """
        token_ids = [token for chunk in chunks for token in chunk.row_tokens]
        embedded = self._embedding[torch.tensor(token_ids, device=self._device)]
        hidden = torch.cat([self._hidden[chunk.request.id][: chunk.count] for chunk in chunks])
        both = torch.cat((self._normed(embedded, self._token_norm), self._normed(hidden, self._hidden_norm)), -1)
        values = linear(both, self._projection).float().cpu().numpy()
        firsts = np.cumsum([0, *(chunk.count for chunk in chunks)]).tolist()
        rows = [_given(chunk, values[first:]) for chunk, first in zip(chunks, firsts, strict=False)]
        computed = self._layer.compute(rows, is_abandoned)
        if computed is None:
            return None
        assert computed.tapped is not None, "__init__ set tapped_layers"
        for chunk, result in zip(chunks, computed.tapped, strict=True):
            self._hidden[chunk.request.id] = self._kept(result[-1:])
        sampling = [chunk for chunk in chunks if chunk.samples]
        if not sampling:
            return ComputedStep(None)
        last = torch.cat([self._hidden[chunk.request.id] for chunk in sampling])
        return ComputedStep(_samples(linear(self._normed(last, self._norm), self._head), sampling))

    def claim_memory(self) -> bool:
        return self._layer.claim_memory()

    def warm_up(self) -> None:
        self._layer.warm_up()

    def close(self) -> None:
        self._layer.close()

    def _kept(self, rows: Any) -> Tensor:
        """Copy rows to the head's device and dtype. A copy is needed because the model reuses its buffers."""
        tensor = torch.from_numpy(rows) if isinstance(rows, np.ndarray) else rows
        return tensor.to(self._device, self._norm.dtype, copy=True)

    def _normed(self, rows: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(rows, weight.shape, weight, self._eps)


def _given(chunk: ScheduledChunk, values: Any) -> ScheduledChunk:
    """Return the chunk moved to the previous position, with `values` in place of embeddings. Token ids are unused."""
    start, end = chunk.start - 1, chunk.start - 1 + chunk.count
    rows = GivenRows(start, chunk.count, bytes(16), np.ascontiguousarray(values[: chunk.count]))
    tokens = [0] * end
    request = msgspec.structs.replace(chunk.request, given=(rows,))
    return ScheduledChunk(request, tokens, start, chunk.count, chunk.block_table, samples=False)


def _samples(
    logits: Tensor, chunks: Sequence[ScheduledChunk], token_ids: Tensor | None = None, vocab_size: int = 0
) -> Samples:
    """Sample one draft token for each chunk.

    Args:
        logits: [chunks, tokens that the head can propose].
        token_ids: int64, the target model's id of each token that the head can propose. None: the head and the target
            model have equal ids.
        vocab_size: number of tokens of the target model. Not used without `token_ids`.
    """
    if all(is_largest_wanted(chunk) for chunk in chunks):
        finite = logits.isfinite().all(-1).tolist()
        chosen = logits.argmax(-1)
        ids = (chosen if token_ids is None else token_ids[chosen]).tolist()
        return Samples([token if good else None for token, good in zip(ids, finite, strict=True)])
    if token_ids is None:
        return sample(logits.float(), chunks)
    every = torch.full((len(chunks), vocab_size), FAR_BELOW, dtype=torch.float32, device=logits.device)
    every[:, token_ids] = logits.float()
    return sample(every, chunks)
