"""A model's own prediction layer (multi-token prediction, MTP) as a draft model.

The row for a token embeds the next token and reads the model's last hidden state at the token. Each is normalized, and
eh_proj projects both together. For positions that the model has not computed, the head's own last output replaces the
hidden state. The row then passes through a layer like the model's, which a StepModel computes with its own KV. As in an
EAGLE-3 head, a row has the position of the token before the one it embeds.

Source: DeepSeek-V3's technical report (arXiv:2412.19437), section 2.2. There the hidden state comes first, but eh_proj
of the released checkpoints expects the embedding first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from trioserve.contracts.given_rows import GivenRows
from trioserve.contracts.ids import RequestId
from trioserve.contracts.step import IsAbandoned, ScheduledChunk
from trioserve.contracts.token_masks import TokenMasks
from trioserve.model.drafts.mtp_checkpoint import MtpCheckpoint
from trioserve.model.sampler import sample
from trioserve.model.samples import ComputedStep, Samples, is_largest_wanted
from trioserve.model.step_model import StepModel
from trioserve.model.torch_formats import TORCH_DTYPES

__all__ = ["MtpHead"]


class MtpHead:
    """A draft model for DraftModel that also reads hidden states of the target model.

    Args:
        checkpoint: the prediction layer and the tensors around it.
        layer: computes the layer. This object closes it.

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
        self._hidden: dict[RequestId, Tensor] = {}  # of each request, at the positions of its next rows

    def allocate_kv(self, block_count: int) -> None:
        self._layer.allocate_kv(block_count)

    @torch.inference_mode()
    def take_tapped(self, tapped: Mapping[RequestId, Any]) -> None:
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
        """Copy rows to the head's device and dtype, because the model reuses its own buffers."""
        tensor = torch.from_numpy(rows) if isinstance(rows, np.ndarray) else rows
        return tensor.to(self._device, self._norm.dtype, copy=True)

    def _normed(self, rows: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(rows, weight.shape, weight, self._eps)


def _given(chunk: ScheduledChunk, values: Any) -> ScheduledChunk:
    """Return a chunk one position earlier that reads `values` instead of embeddings, so its token ids are unused."""
    start, end = chunk.start - 1, chunk.start - 1 + chunk.count
    rows = GivenRows(start, chunk.count, bytes(16), np.ascontiguousarray(values[: chunk.count]))
    tokens = [0] * end
    request = msgspec.structs.replace(chunk.request, given=(rows,))
    return ScheduledChunk(request, tokens, start, chunk.count, chunk.block_table, samples=False)


def _samples(logits: Tensor, chunks: Sequence[ScheduledChunk]) -> Samples:
    if all(is_largest_wanted(chunk) for chunk in chunks):
        finite = logits.isfinite().all(-1).tolist()
        ids = logits.argmax(-1).tolist()
        return Samples([token if good else None for token, good in zip(ids, finite, strict=True)])
    return sample(logits.float(), chunks)
