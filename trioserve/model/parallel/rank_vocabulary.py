"""Rows of the head that are in several ranks: each has the logits of some tokens, and what is chosen depends on all."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from trioserve.model.model_config import RankPart
from trioserve.model.parallel.collectives import Collectives
from trioserve.model.parallel.shares import vocab_runs

__all__ = ["RankVocabulary"]


class RankVocabulary:
    """What a rank finds out about the tokens of all. Every rank has to ask for the same."""

    def __init__(self, part: RankPart, vocab_size: int, collectives: Collectives) -> None:
        self._runs = vocab_runs(vocab_size, part.size)
        self._first = part.vocab_first
        self._collectives = collectives

    def logits(self, own: Tensor) -> Tensor:
        """own: [n, vocab_count], those of the rank's tokens. Returns [n, vocab_size]."""
        # All ranks give as many, and the first has most.
        padded = functional.pad(own, (0, self._runs[0][1] - own.shape[1]))
        gathered: Tensor = self._collectives.gather(padded.contiguous())
        return torch.cat([logits[:, :count] for logits, (_, count) in zip(gathered, self._runs, strict=True)], -1)

    def largest(self, own: Tensor) -> tuple[Tensor, Tensor]:
        """own: as above. Of each row the token with the largest logit, of equals the first, int64 [n], and whether all
        its logits are numbers, bool [n]. Less is sent for them than for logits."""
        best = own.max(-1)
        finite = own.isfinite().all(-1)
        # A float32 holds the logits of every format exactly, and all numbers of tokens.
        found = torch.stack((best.values.float(), (best.indices + self._first).float(), finite.float()), -1)
        values, ids, are_finite = self._collectives.gather(found).unbind(-1)
        rank = values.argmax(0)
        return ids.gather(0, rank[None])[0].to(torch.int64), are_finite.bool().all(0)
