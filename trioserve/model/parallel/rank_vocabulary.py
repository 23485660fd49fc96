"""A head whose rows are divided among ranks: each rank has the logits of some tokens, and sampling needs all."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from trioserve.model.model_config import RankPart
from trioserve.model.parallel.collectives import Collectives
from trioserve.model.parallel.shares import vocab_runs

__all__ = ["RankVocabulary"]


class RankVocabulary:
    """Exchanges logits between ranks. All ranks must make the same calls.

    Args:
        part: the part of the model that this rank has.
        vocab_size: tokens of the whole vocabulary.
        collectives: connection to the other ranks.
    """

    def __init__(self, part: RankPart, vocab_size: int, collectives: Collectives) -> None:
        self._runs = vocab_runs(vocab_size, part.size)
        self._first = part.vocab_first
        self._collectives = collectives

    def logits(self, own: Tensor) -> Tensor:
        """Collect the logits of all tokens.

        Args:
            own: [n, vocab_count], logits of this rank's tokens.

        Returns:
            [n, vocab_size].
        """
        # All ranks must send the same size. The first rank has the most tokens.
        padded = functional.pad(own, (0, self._runs[0][1] - own.shape[1]))
        gathered: Tensor = self._collectives.gather(padded.contiguous())
        return torch.cat([logits[:, :count] for logits, (_, count) in zip(gathered, self._runs, strict=True)], -1)

    def largest(self, own: Tensor) -> tuple[Tensor, Tensor]:
        """Find the token with the largest logit in each row. Sends less than `logits`.

        Args:
            own: [n, vocab_count], logits of this rank's tokens.

        Returns:
            The token of each row, int64 [n]: the smallest number if logits are equal. And whether all logits of the row
            are finite, bool [n].
        """
        best = own.max(-1)
        finite = own.isfinite().all(-1)
        # float32 represents logits of every dtype exactly, and token numbers below 2**24.
        found = torch.stack((best.values.float(), (best.indices + self._first).float(), finite.float()), -1)
        values, ids, are_finite = self._collectives.gather(found).unbind(-1)
        rank = values.argmax(0)
        return ids.gather(0, rank[None])[0].to(torch.int64), are_finite.bool().all(0)
