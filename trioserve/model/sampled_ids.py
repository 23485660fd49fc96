"""What a step chose, on its way to the host: one copy, begun at once and waited for when the tokens are asked for.

On the device it stays, too: the ids are kept where the next step finds them, which is begun before the host has them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trioserve.model.samples import NOT_FINITE, NOTHING_ALLOWED, ReadSamples, Samples
from trioserve_kernels.reference import Flaw

__all__ = ["fetch_samples", "keep_ids"]


def keep_ids(kept_ids: Tensor, chosen: Tensor) -> None:
    """For the next step, on the device. kept_ids: int64 [n or more]; chosen: int64 [2, n], as choose_tokens gives it. A
    row that failed has some id of the vocabulary, whose step comes to nothing."""
    kept_ids[: chosen.shape[1]].copy_(chosen[0])


def fetch_samples(chosen: Tensor, count: int) -> ReadSamples:
    """Begin to bring back what was chosen for the first `count` rows. chosen: as above; may be overwritten by what is
    begun from now on. Nothing was hidden but by masks. To be read once."""
    is_cuda = chosen.device.type == "cuda"
    there = torch.empty(chosen.shape, dtype=torch.int64, pin_memory=is_cuda)
    there.copy_(chosen, non_blocking=True)
    arrived = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    if arrived is not None:
        arrived.record()

    def read() -> Samples:
        if arrived is not None:
            arrived.synchronize()
        ids, flaws = there[:, :count].tolist()
        errors = {
            row: NOTHING_ALLOWED if flaw == Flaw.ALL_HIDDEN else NOT_FINITE for row, flaw in enumerate(flaws) if flaw
        }
        return Samples([None if row in errors else ids[row] for row in range(count)], errors=errors)

    return read
