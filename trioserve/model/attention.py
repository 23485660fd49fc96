"""Paged attention of one step in one layer: grouping of rows, and choice of the kernel for each group. Kernels do the
arithmetic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trioserve.model.step_tensors import AttentionTensors, TableWalk
from trioserve_kernels import Kernels
from trioserve_kernels.kv_format import decode, encode, head_dim_of, is_coded
from trioserve_kernels.paged import split_count

__all__ = ["attend"]


def attend(
    kernels: Kernels,
    queries: Tensor,
    keys_values: Tensor,
    pages: Tensor,
    tensors: AttentionTensors,
    score_cap: float | None = None,
    sinks: Tensor | None = None,
    latent_dim: int | None = None,
) -> Tensor:
    """Attend each row to its own sequence, up to the row itself.

    Decodes read their block tables, several at a time. A part of a prompt is computed alone: over its own rows if they
    are its whole context, else over its gathered blocks. Fused kernels read the tables themselves.

    Args:
        kernels: kernels that compute.
        queries: [T, H * D], rotated.
        keys_values: [T, 2 * K * D], keys then values of this step's tokens, rotated. `pages` already contains them.
            With latents it is [T, D].
        pages: [blocks, block_size, 2, K, D], for 8 bits see kv_format.py. With latents it holds latents.
        tensors: what each row sees.
        score_cap: bound of scores, see AttentionConfig.
        sinks: float32 [H], or None.
        latent_dim: size of latents. None: pages hold keys and values.

    Returns:
        [T, H * D], or with latents [T, H * latent_dim]. The caller may overwrite it.
    """
    if tensors.walk is not None:
        if latent_dim is not None:
            return _walk_latents(kernels, queries, pages, tensors.walk, latent_dim)
        return _walk(kernels, queries, pages, tensors.walk, score_cap, sinks)
    groups, parts = tensors.decode_groups, tensors.prompt_parts
    if len(groups) == 1 and not parts:
        return kernels.paged_attention_decode(
            queries, pages, groups[0].block_table, groups[0].mask, score_cap, sinks, latent_dim
        )
    attended = _attended(queries, pages, latent_dim)
    for group in groups:
        attended[group.first : group.end] = kernels.paged_attention_decode(
            queries[group.first : group.end], pages, group.block_table, group.mask, score_cap, sinks, latent_dim
        )
    for part in parts:
        if part.block_table is None:
            context = keys_values[part.first : part.end].view(-1, *pages.shape[2:-1], head_dim_of(pages))
            if is_coded(pages):  # encode as the cache does, so that later parts of the prompt see equal numbers
                context = decode(encode(context, pages.dtype).view(pages.dtype), queries.dtype)
        else:
            context = kernels.gather_context(pages, part.block_table, queries.dtype)[: part.context]
        attended[part.first : part.end] = kernels.attention_prompt(
            queries[part.first : part.end], context, part.mask, score_cap, sinks, latent_dim
        )
    return attended


def _attended(queries: Tensor, pages: Tensor, latent_dim: int | None) -> Tensor:
    """Return an uninitialised tensor for the results of all rows."""
    size = queries.shape[1] if latent_dim is None else queries.shape[1] // pages.shape[-1] * latent_dim
    return queries.new_empty(queries.shape[0], size)


def _walk_latents(kernels: Kernels, queries: Tensor, pages: Tensor, walk: TableWalk, latent_dim: int) -> Tensor:
    attended = _attended(queries, pages, latent_dim)
    decodes, chunks = walk.decodes, walk.chunks
    count = 0
    if decodes is not None:
        count = decodes.contexts.shape[0]
        starts = torch.arange(count + 1, dtype=torch.int32)
        kernels.paged_latents_(
            attended[:count], queries[:count], pages, decodes.block_tables, decodes.contexts, starts, latent_dim
        )
    if chunks is not None:
        kernels.paged_latents_(
            attended[count:],
            queries[count:],
            pages,
            chunks.block_tables,
            chunks.contexts,
            chunks.row_starts,
            latent_dim,
        )
    return attended


def _walk(
    kernels: Kernels, queries: Tensor, pages: Tensor, walk: TableWalk, score_cap: float | None, sinks: Tensor | None
) -> Tensor:
    attended = queries.new_empty(queries.shape)
    decodes, chunks = walk.decodes, walk.chunks
    count = 0
    if decodes is not None:
        count = decodes.contexts.shape[0]
        kernels.paged_decode_(
            attended[:count],
            queries[:count],
            pages,
            decodes.block_tables,
            decodes.contexts,
            walk.window,
            split_count(decodes.context_max, walk.window),
            decodes.work,
            score_cap,
            sinks,
        )
    if chunks is not None:
        kernels.paged_chunks_(
            attended[count:],
            queries[count:],
            pages,
            chunks.block_tables,
            chunks.contexts,
            chunks.row_starts,
            chunks.tiles,
            walk.window,
            score_cap,
            sinks,
        )
    return attended
