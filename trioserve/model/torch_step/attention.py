"""Computes the paged attention of one step in one layer: groups the rows and chooses a kernel for each group. The
kernels do the arithmetic.

Multi-head latent attention (MLA, arXiv 2405.04434) projects queries into the space of the latents, which all heads
share. Afterwards it projects the attended latents to the values of each head. Therefore, the keys and values of single
heads are never computed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from trioserve.model.layer_config import LatentAttentionConfig
from trioserve.model.model_config import ModelConfig
from trioserve.model.torch_step.formats import TensorSlot
from trioserve.model.torch_step.layers import Angles, Linear, MakeLinear, Norm
from trioserve.model.torch_step.step_tensors import AttentionTensors, ChunkTables, HeadShape, StepTensors, TableWalk
from trioserve_kernels import Kernels
from trioserve_kernels.kv_format import decode, encode, head_dim_of, is_coded
from trioserve_kernels.paged import latent_parts_max, split_count

__all__ = ["attend", "LatentAttention"]


def attend(
    kernels: Kernels,
    queries: Tensor,
    keys_values: Tensor,
    pages: Tensor,
    tensors: AttentionTensors,
    score_cap: float | None = None,
    sinks: Tensor | None = None,
    latent_dim: int | None = None,
    slopes: Tensor | None = None,
) -> Tensor:
    """Compute attention: each row attends to the tokens of its sequence up to and including its own token.

    Decodes of several sequences are computed together, directly from their block tables. Each prompt chunk is computed
    alone. If the chunk's rows are its whole context, it attends to these rows, else to its gathered blocks. Fused
    kernels read all block tables themselves.

    Args:
        kernels: kernels that compute.
        queries: [T, H * D], rotated.
        keys_values: [T, 2 * K * D], keys then values of this step's tokens, rotated. `pages` already contains them.
            With latents it is [T, D].
        pages: [blocks, block_size, 2, K, D]. For the 8-bit layout see KvFormat. With latents, pages contain latents.
        tensors: masks and block tables that define which tokens each row attends to.
        score_cap: bound of the attention scores, see AttentionConfig.
        sinks: float32 [H], or None.
        latent_dim: size of latents. None: pages hold keys and values.
        slopes: float32 [H], see AttentionConfig, or None.

    Returns:
        [T, H * D], or with latents [T, H * latent_dim]. The caller may overwrite it.
    """
    groups, parts = tensors.decode_groups, tensors.prompt_parts
    if tensors.walk is not None:
        if latent_dim is not None:
            return _walk_latents(kernels, queries, pages, tensors.walk, latent_dim)
        attended = _walk(kernels, queries, keys_values, pages, tensors.walk, score_cap, sinks, slopes)
    elif len(groups) == 1 and not parts:
        return kernels.paged_attention_decode(
            queries, pages, groups[0].block_table, groups[0].mask, score_cap, sinks, latent_dim, slopes
        )
    else:
        attended = _attended(queries, pages, latent_dim)
    for group in groups:
        attended[group.first : group.end] = kernels.paged_attention_decode(
            queries[group.first : group.end], pages, group.block_table, group.mask, score_cap, sinks, latent_dim, slopes
        )
    for part in parts:
        if part.block_table is None:
            context = keys_values[part.first : part.end].view(-1, *pages.shape[2:-1], head_dim_of(pages))
            # Round the context as the cache does, so that later chunks of the prompt attend to equal numbers.
            if is_coded(pages):
                context = decode(encode(context, pages.dtype).view(pages.dtype), queries.dtype)
        else:
            context = kernels.gather_context(pages, part.block_table, queries.dtype)[: part.context]
        attended[part.first : part.end] = kernels.attention_prompt(
            queries[part.first : part.end], context, part.mask, score_cap, sinks, latent_dim, slopes
        )
    return attended


def _attended(queries: Tensor, pages: Tensor, latent_dim: int | None) -> Tensor:
    """Return an uninitialised tensor for the attention results of all rows."""
    size = queries.shape[1] if latent_dim is None else queries.shape[1] // pages.shape[-1] * latent_dim
    return queries.new_empty(queries.shape[0], size)


def _walk_latents(kernels: Kernels, queries: Tensor, pages: Tensor, walk: TableWalk, latent_dim: int) -> Tensor:
    attended = _attended(queries, pages, latent_dim)
    decodes, chunks = walk.decodes, walk.chunks
    if walk.is_padded:
        attended.zero_()
    count = 0
    if decodes is not None:
        count = decodes.contexts.shape[0]
        heads = queries.shape[1] // head_dim_of(pages)
        kernels.paged_latents_(
            attended[:count],
            queries[:count],
            pages,
            decodes.block_tables,
            decodes.contexts,
            latent_dim,
            parts=split_count(decodes.context_max, None, latent_parts_max(heads)),
            work=decodes.work,
        )
    if chunks is not None:
        first = 0 if walk.is_padded else count
        kernels.paged_latents_(
            attended[first:],
            queries[first:],
            pages,
            chunks.block_tables,
            chunks.contexts,
            latent_dim,
            chunks.row_starts,
            chunks.tiles,
        )
    return attended


def _walk(
    kernels: Kernels,
    queries: Tensor,
    keys_values: Tensor,
    pages: Tensor,
    walk: TableWalk,
    score_cap: float | None,
    sinks: Tensor | None,
    slopes: Tensor | None,
) -> Tensor:
    attended = queries.new_empty(queries.shape)
    decodes, chunks = walk.decodes, walk.chunks
    if walk.is_padded:
        attended.zero_()
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
            slopes,
        )
    if chunks is not None:
        first = 0 if walk.is_padded else count  # Chunks overwrite the zeros of decode rows without a context.
        if (
            score_cap is None
            and sinks is None
            and slopes is None
            and _use_flash(attended[first:], queries[first:], keys_values[first:], pages, chunks, walk.window)
        ):
            return attended
        kernels.paged_chunks_(
            attended[first:],
            queries[first:],
            pages,
            chunks.block_tables,
            chunks.contexts,
            chunks.row_starts,
            chunks.tiles,
            walk.window,
            score_cap,
            sinks,
            slopes,
        )
    return attended


def _use_flash(
    attended: Tensor, queries: Tensor, keys_values: Tensor, pages: Tensor, chunks: ChunkTables, window: int | None
) -> bool:
    """Compute chunks by flash attention if they are packed and see their whole contexts. Return False if not."""
    packed = chunks.packed
    if packed is None or (window is not None and packed.context_max > window):
        return False
    if packed.slots is None:
        context = keys_values.view(len(keys_values), *pages.shape[2:])
    else:
        context = pages.flatten(0, 1).index_select(0, packed.slots)
    return packed.flash(
        attended, queries, context, chunks.row_starts, packed.context_starts, packed.rows_max, packed.context_max
    )


class LatentAttention:
    """Latent attention of one layer, see LatentAttentionConfig."""

    def __init__(
        self,
        name: str,
        linear: MakeLinear,
        config: ModelConfig,
        attention: LatentAttentionConfig,
        kernels: Kernels,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._kernels = kernels
        self._config, self._heads = attention, HeadShape.of(attention)
        self._name = name
        hidden, rank = config.hidden_size, attention.query_rank
        norm = functools.partial(
            Norm, config=config, kernels=kernels, dtype=dtype, device=device, eps=attention.norm_eps
        )
        self._query_up: Linear | None = None
        self._query_norm: Norm | None = None
        if rank is None:
            self._down = linear(hidden, False, q_proj=attention.query_size, kv_a_proj=attention.entry_dim)
        else:
            self._down = linear(hidden, False, q_a_proj=rank, kv_a_proj=attention.entry_dim)
            self._query_norm = norm(f"{name}.q_a_norm", rank)
            self._query_up = linear(rank, False, q_b_proj=attention.query_size)
        self._latent_norm = norm(f"{name}.kv_a_norm", attention.latent_dim)
        heads = attention.head_count
        self._key_up = torch.empty(heads, attention.latent_dim, attention.plain_dim, dtype=dtype, device=device)
        self._value_up = torch.empty(heads, attention.value_dim, attention.latent_dim, dtype=dtype, device=device)
        self._output = linear(attention.value_size, False, o_proj=hidden)
        up = () if self._query_up is None else (self._query_up,)
        self.linears = (self._down, *up, self._output)

    def slots(self) -> Iterator[TensorSlot]:
        for norm in (self._query_norm, self._latent_norm):
            if norm is not None:
                yield from norm.slots()
        for module, weight in (("k_b_proj", self._key_up), ("v_b_proj", self._value_up)):
            rows = weight.flatten(0, 1)
            yield TensorSlot(f"{self._name}.{module}.weight", tuple(rows.shape), weight.dtype, rows.copy_)
        for part in self.linears:
            yield from part.slots()

    def __call__(
        self, normed: Tensor, step: StepTensors, angles: Angles, pages: Tensor, slots_of_layer: Tensor
    ) -> Tensor:
        kernels, attention = self._kernels, self._config
        down = self._down(normed)
        raw, latents, turned = torch.split(
            down, [down.shape[1] - attention.entry_dim, attention.latent_dim, attention.turned_dim], -1
        )
        kernels.rotary_(turned[:, None], *angles)
        entries = torch.cat((self._latent_norm(latents.contiguous()), turned), -1)
        kernels.store_kv_(slots_of_layer, entries, step.slots)
        if step.cleared_slots is not None:
            kernels.clear_slots_(slots_of_layer, step.cleared_slots)
        if self._query_up is not None and self._query_norm is not None:
            raw = self._query_up(self._query_norm(raw.contiguous()))
        queries = self._queries(raw, angles)
        rows = attend(
            kernels,
            queries,
            entries,
            pages,
            step.attention[attention.window, self._heads],
            attention.score_cap,
            latent_dim=attention.latent_dim,
        )
        values = kernels.linear_by_head(rows.view(len(rows), attention.head_count, -1), self._value_up)
        return self._output(values.reshape(len(rows), -1))

    def _queries(self, raw: Tensor, angles: Angles) -> Tensor:
        """Return queries for entries that consist of a latent and a rotated key.

        Args:
            raw: [T, H * (plain_dim + turned_dim)].
            angles: cosines and sines of the rows.

        Returns:
            [T, H * entry_dim].
        """
        attention = self._config
        plain, turned = torch.split(
            raw.reshape(len(raw), attention.head_count, -1), [attention.plain_dim, attention.turned_dim], -1
        )
        queries = raw.new_empty(len(raw), attention.head_count, attention.entry_dim)
        queries[..., : attention.latent_dim] = self._kernels.linear_by_head(plain, self._key_up)
        heads = queries[..., attention.latent_dim :]
        heads.copy_(turned)
        self._kernels.rotary_(heads, *angles)
        return queries.mul_(attention.query_factor).flatten(1)
