"""Attention of prompt chunks by torch's flash attention for sequences of different lengths.

torch's operator reads pages of 256 tokens at least, so the keys and values of the chunks' contexts are gathered before,
unless each chunk is its whole context. It exists for CUDA only, in 16 bits, without sinks and without a cap of scores.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from trioserve_kernels import reference

__all__ = ["FlashPrompts", "pick_flash_prompts"]

logger = logging.getLogger(__name__)

HEAD_DIM_MAX, HEAD_DIM_UNIT = 256, 8
CAUSAL = (-1, 0)
ERROR_MAX = 0.02  # for numbers around 1. bfloat16 has 8 bits.
# A mistake of the caller or a missing operator. Errors of the device are AcceleratorError, and end the process.
REFUSALS = (ImportError, NotImplementedError, RuntimeError, TypeError, ValueError)


class FlashPrompts:
    """Calls torch's operator. After a refused call, `is_usable` is False, and other kernels must compute.

    Args:
        head_dim: numbers of a head.
    """

    def __init__(self, head_dim: int) -> None:
        self.is_usable = True
        self._head_dim = head_dim

    def __call__(
        self,
        attended: Tensor,
        queries: Tensor,
        keys_values: Tensor,
        row_starts: Tensor,
        context_starts: Tensor,
        rows_max: int,
        context_max: int,
    ) -> bool:
        """Compute attention of chunks. Each row attends to its context up to its own token.

        Args:
            attended: output, [T, H * D].
            queries: [T, H * D].
            keys_values: [sum of contexts, 2, K, D], of one chunk after the other.
            row_starts: int32 [n + 1], first row of each chunk, and T. A chunk's rows are the last ones of its context.
            context_starts: int32 [n + 1], place of the first token of each context, and the sum of contexts.
            rows_max: rows of the longest chunk.
            context_max: tokens of the longest context.

        Returns:
            False if the call was refused. `attended` is then unchanged.
        """
        if not self.is_usable:
            return False
        by_head = queries.view(len(queries), -1, self._head_dim)
        keys, values = keys_values.unbind(1)
        try:
            from torch.nn.attention.varlen import varlen_attn

            result = varlen_attn(
                by_head,
                keys,
                values,
                row_starts,
                context_starts,
                rows_max,
                context_max,
                window_size=CAUSAL,
                enable_gqa=True,
            )
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except REFUSALS as error:
            self.is_usable = False
            reason = str(error).partition("\n")[0]
            logger.warning("torch's flash attention refuses prompts, so Triton's kernel computes them: %s", reason)
            return False
        assert isinstance(result, Tensor), "the call asks for no other results"
        attended.view(by_head.shape).copy_(result)
        return True


def pick_flash_prompts(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> FlashPrompts | None:
    """Return torch's flash attention if the device has it, and if its results equal those of the reference.

    Args:
        heads: query heads.
        kv_heads: heads of keys and values.
        head_dim: numbers of a head.
        dtype: number format.
        device: device that computes.
    """
    if dtype not in (torch.bfloat16, torch.float16) or head_dim > HEAD_DIM_MAX or head_dim % HEAD_DIM_UNIT:
        return None
    flash = FlashPrompts(head_dim)
    counts, contexts = (3, 40), (3, 75)
    draw = torch.Generator().manual_seed(1)
    queries = torch.randn(sum(counts), heads * head_dim, generator=draw).to(dtype).to(device)
    keys_values = torch.randn(sum(contexts), 2, kv_heads, head_dim, generator=draw).to(dtype).to(device)
    got = torch.empty_like(queries)
    row_starts = torch.tensor((0, counts[0], sum(counts)), dtype=torch.int32, device=device)
    context_starts = torch.tensor((0, contexts[0], sum(contexts)), dtype=torch.int32, device=device)
    if not flash(got, queries, keys_values, row_starts, context_starts, max(counts), max(contexts)):
        return None
    wanted = torch.empty_like(queries)
    row = place = 0
    for count, context in zip(counts, contexts, strict=True):
        mask = reference.prompt_mask(context - count, count, context, None, dtype, device)
        found = reference.attention_prompt(queries[row : row + count], keys_values[place : place + context], mask)
        wanted[row : row + count] = found
        row, place = row + count, place + context
    error = float((got.float() - wanted.float()).abs().max())
    if error <= ERROR_MAX * max(1.0, float(wanted.float().abs().max())):
        return flash
    logger.warning("torch's flash attention gives wrong results here (off by %.2g), so Triton's kernel computes", error)
    return None
