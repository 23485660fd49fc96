"""Paged attention of one step in one layer: which rows go together, and by which path. The numbers are the kernels'."""

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
    """Every row attends to its own sequence, up to itself.

    queries: [T, H * D], keys_values: [T, 2 * K * D] (keys, then values) of this step's tokens, rotated; they are in
    `pages` ([blocks, block_size, 2, K, D], of 8 bits see kv_format.py) already. sinks: float32 [H], of heads that have
    them. latent_dim: pages have latents, and keys_values is [T, D]. Returns [T, H * D], or of latents [T, H *
    latent_dim], which the caller may change.

    Decodes go through their block tables, several at a time. A part of a prompt goes alone: over its own rows where
    these are its whole context, else over its gathered blocks. Fused kernels walk all of these tables themselves.
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
            if is_coded(pages):  # as a later part of the prompt will find them
                context = decode(encode(context, pages.dtype).view(pages.dtype), queries.dtype)
        else:
            context = kernels.gather_context(pages, part.block_table, queries.dtype)[: part.context]
        attended[part.first : part.end] = kernels.attention_prompt(
            queries[part.first : part.end], context, part.mask, score_cap, sinks, latent_dim
        )
    return attended


def _attended(queries: Tensor, pages: Tensor, latent_dim: int | None) -> Tensor:
    """Room for what all rows attend to."""
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
