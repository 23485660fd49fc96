"""Copy of sampled token ids to the host. The copy starts at once, and the reader waits for it.

The ids also stay on the device, because the next step may begin before the host has them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trioserve.model.samples import NOT_FINITE, NOTHING_ALLOWED, ReadSamples, Samples
from trioserve_kernels.reference import Flaw

__all__ = ["fetch_samples", "keep_ids"]


def keep_ids(kept_ids: Tensor, chosen: Tensor) -> None:
    """Keep the sampled ids on the device for the next step.

    Args:
        kept_ids: int64 [n or more], overwritten from index 0.
        chosen: int64 [2, n], as choose_tokens returns it. A row that failed has any id of the vocabulary. The step that
            uses this id is dropped for its request.
    """
    kept_ids[: chosen.shape[1]].copy_(chosen[0])


def fetch_samples(chosen: Tensor, count: int) -> ReadSamples:
    """Start to copy sampled ids to the host.

    Args:
        chosen: int64 [2, n], as choose_tokens returns it. Work that is launched after this call may overwrite it. Only
            masks may have hidden tokens.
        count: read the first `count` rows.

    Returns:
        A function that waits for the copy. Call it only once.
    """
    is_cuda = chosen.device.type == "cuda"
    there = torch.empty(chosen.shape, dtype=torch.int64, pin_memory=is_cuda)
    there.copy_(chosen, non_blocking=True)
    arrived = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]  # torch has no annotations here
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
