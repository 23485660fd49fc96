"""Computes the paged attention of one step in one layer: groups the rows and chooses a kernel for each group. The
kernels do the arithmetic.

Multi-head latent attention (MLA, arXiv 2405.04434) projects queries into the space of the latents, which all heads
share. Afterwards it projects the attended latents to the values of each head. Therefore, the keys and values of single
heads are never computed.

In sparse attention, an indexer first selects the tokens that each row attends to, see IndexerConfig.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from trioserve.model.layer_config import LatentAttentionConfig
from trioserve.model.model_config import ModelConfig
from trioserve.model.torch_step.formats import TensorSlot
from trioserve.model.torch_step.layers import Angles, Linear, MakeLinear, Norm
from trioserve.model.torch_step.step_tensors import (
    GATHERED_BYTES_MAX,
    AttentionTensors,
    ChunkTables,
    DecodeGroup,
    HeadShape,
    StepTensors,
    TableWalk,
)
from trioserve_kernels import Kernels
from trioserve_kernels.kv_format import decode, encode, head_dim_of, is_coded
from trioserve_kernels.paged import latent_parts_max, split_count
from trioserve_kernels.reference import prompt_mask

__all__ = ["attend", "LatentAttention"]

INDEX_NORM_EPS = 1e-6


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
    elif len(groups) == 1 and not parts and not tensors.selected:
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
    tokens = pages.flatten(0, 1)[:, None]  # blocks of one token
    for group in tensors.selected:
        attended[group.first : group.end] = kernels.paged_attention_decode(
            queries[group.first : group.end], tokens, group.block_table, group.mask, score_cap, sinks, latent_dim
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


class Indexer:
    """Selects the tokens that each row of a step attends to, see IndexerConfig.

    Args:
        name: name of the layer.
        linear: makes the projections.
        hidden: size of a row.
        attention: attention of the layer, which has an indexer.
        kernels: kernels that compute.
    """

    def __init__(
        self,
        name: str,
        linear: MakeLinear,
        hidden: int,
        attention: LatentAttentionConfig,
        kernels: Kernels,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        assert attention.indexer is not None, "a layer without an indexer"
        assert attention.query_rank is not None, "checked by LatentAttentionConfig"
        self._kernels, self._config, self._turned_dim = kernels, attention.indexer, attention.turned_dim
        self._entry_bytes = attention.entry_dim * dtype.itemsize
        size, count = attention.indexer.head_dim, attention.indexer.head_count
        self._queries = linear(attention.query_rank, False, index_q_proj=count * size)
        self._keys = linear(hidden, False, index_k_proj=size, index_weight_proj=count)
        self._name = f"{name}.index_k_norm"
        self._norm = torch.empty(2, size, dtype=dtype, device=device)
        self.linears = (self._queries, self._keys)

    def slots(self) -> Iterator[TensorSlot]:
        for kind, values in zip(("weight", "bias"), self._norm, strict=True):
            yield TensorSlot(f"{self._name}.{kind}", tuple(values.shape), values.dtype, values.copy_)
        for part in self.linears:
            yield from part.slots()

    def keys_weights(self, normed: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """Return the keys of rows [T, head_dim], and the weights of their queries [T, head_count].

        Args:
            normed: [T, hidden_size].
            angles: cosines and sines of the rows.
        """
        keys, weights = torch.split(self._keys(normed), [self._config.head_dim, self._config.head_count], -1)
        keys = functional.layer_norm(keys, keys.shape[1:], self._norm[0], self._norm[1], INDEX_NORM_EPS)
        return self._rotated(keys[:, None], angles)[:, 0], weights

    def select(
        self,
        query_latents: Tensor,
        weights: Tensor,
        angles: Angles,
        keys: Tensor,
        step_slots: Tensor,
        block_size: int,
        tensors: AttentionTensors,
    ) -> AttentionTensors:
        """Replace the contexts that are longer than the number of selected tokens by the selected tokens.

        Args:
            query_latents: [T, query_rank].
            weights: [T, head_count].
            angles: cosines and sines of the rows.
            keys: [slots, head_dim], cached keys, which include those of this step.
            step_slots: see StepTensors.slots.
            block_size: tokens in a block.
            tensors: all tokens of the contexts.
        """
        heads = self._queries(query_latents).view(len(query_latents), -1, self._config.head_dim)
        queries, count = self._rotated(heads, angles), self._config.token_count
        offsets = torch.arange(block_size, device=keys.device)
        groups, parts, selected = [], [], []
        for group in tensors.decode_groups:
            if group.mask.shape[-1] <= count:
                groups.append(group)
                continue
            slots = (group.block_table[..., None] * block_size + offsets).flatten(1)
            selected.append((group.first, group.end, slots, group.mask[:, 0, 0]))
        for part in tensors.prompt_parts:
            if part.context <= count:
                parts.append(part)
                continue
            slots, mask = step_slots[part.first : part.end], part.mask
            if part.block_table is not None:
                slots = (part.block_table[:, None] * block_size + offsets).flatten()[: part.context]
            if mask is None:
                mask = prompt_mask(0, len(slots), len(slots), None, queries.dtype, keys.device)
            selected.append((part.first, part.end, slots, mask))
        found = [
            self._group(first, end, queries, weights, keys, slots, mask)
            for start, last, all_slots, masks in selected
            for first, end, slots, mask in self._divided(start, last, all_slots, masks)
        ]
        return AttentionTensors(tuple(groups), tuple(parts), selected=tuple(found))

    def _divided(self, start: int, last: int, slots: Tensor, mask: Tensor) -> Iterator[tuple[int, int, Tensor, Tensor]]:
        """Divide rows into groups whose scores and attended tokens are few bytes.

        Args:
            start: first row.
            last: row after the last one.
            slots: int64 [rows, context], or [context] if all rows have the same context.
            mask: [rows, context], additive.
        """
        row_bytes = 4 * slots.shape[-1] * self._config.head_count + self._config.token_count * self._entry_bytes
        count = max(1, GATHERED_BYTES_MAX[slots.device.type] // row_bytes)
        for first in range(0, last - start, count):
            end = min(first + count, last - start)
            yield start + first, start + end, slots if slots.ndim == 1 else slots[first:end], mask[first:end]

    def _group(
        self, first: int, end: int, queries: Tensor, weights: Tensor, keys: Tensor, slots: Tensor, mask: Tensor
    ) -> DecodeGroup:
        """Select tokens of the rows from `first` to `end` - 1. For `slots` and `mask`, see _divided."""
        seen = keys[slots].float()
        # The original divides scores by a constant. A positive factor changes no selection.
        scores = (queries[first:end].float() @ seen.transpose(-1, -2)).relu_()
        scores = (weights[first:end, None].float() @ scores)[:, 0].add_(mask)
        places = _largest(scores, self._config.token_count)
        own = slots[places] if slots.ndim == 1 else slots.gather(1, places)
        return DecodeGroup(first, end, own, mask.gather(1, places)[:, None, None])

    def _rotated(self, heads: Tensor, angles: Angles) -> Tensor:
        """Rotate heads [T, H, head_dim] in place by the positions of their rows."""
        turned = heads[..., : self._turned_dim]
        if self._config.has_adjacent_pairs:
            turned.copy_(torch.cat((turned[..., ::2], turned[..., 1::2]), -1))
        self._kernels.rotary_(turned, *angles)
        return heads


def _largest(scores: Tensor, count: int) -> Tensor:
    """Return the places of the largest scores of each row. Of equal scores, the earlier ones count as larger.

    Many scores are 0. With topk alone, the selection would depend on the length of the row.

    Args:
        scores: float32 [n, context].
        count: number of places.

    Returns:
        int64 [n, count], in any order.
    """
    bits = (scores + 0.0).view(torch.int32)  # This sum replaces -0.0, whose bits differ from those of 0.0.
    ordered = (bits ^ ((bits >> 31) & 0x7FFF_FFFF)).long() << 32  # Integers in the order of the scores.
    earlier = torch.arange(scores.shape[1] - 1, -1, -1, device=scores.device)
    return (ordered + earlier).topk(count, sorted=False).indices


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
        self._indexer: Indexer | None = None
        if attention.indexer is not None:
            self._indexer = Indexer(name, linear, hidden, attention, kernels, dtype=dtype, device=device)
        self._own_linears = (self._down, *up, self._output)
        self.linears = (*self._own_linears, *(() if self._indexer is None else self._indexer.linears))

    def slots(self) -> Iterator[TensorSlot]:
        for norm in (self._query_norm, self._latent_norm):
            if norm is not None:
                yield from norm.slots()
        for module, weight in (("k_b_proj", self._key_up), ("v_b_proj", self._value_up)):
            rows = weight.flatten(0, 1)
            yield TensorSlot(f"{self._name}.{module}.weight", tuple(rows.shape), weight.dtype, rows.copy_)
        for part in (*self._own_linears, self._indexer):
            if part is not None:
                yield from part.slots()

    def __call__(
        self,
        normed: Tensor,
        step: StepTensors,
        angles: Angles,
        pages: Tensor,
        slots_of_layer: Tensor,
        selected: AttentionTensors | None,
    ) -> tuple[Tensor, AttentionTensors | None]:
        """Compute attention, and write the step's entries into the KV cache.

        Args:
            normed: [T, hidden_size].
            pages: KV buffer of the layer.
            slots_of_layer: the buffer of `pages` with the shape [slots, numbers of a token].
            selected: tokens that the last earlier indexer has selected. None: there was none.

        Returns:
            Result of attention [T, hidden_size], and the tokens that the last indexer has selected.
        """
        kernels, attention = self._kernels, self._config
        down = self._down(normed)
        raw, latents, turned = torch.split(
            down, [down.shape[1] - attention.entry_dim, attention.latent_dim, attention.turned_dim], -1
        )
        kernels.rotary_(turned[:, None], *angles)
        entries = torch.cat((self._latent_norm(latents.contiguous()), turned), -1)
        stored, weights = entries, None
        if self._indexer is not None:
            index_keys, weights = self._indexer.keys_weights(normed, angles)
            stored = torch.cat((entries, index_keys), -1)
        kernels.store_kv_(slots_of_layer, stored, step.slots)
        if step.cleared_slots is not None:
            kernels.clear_slots_(slots_of_layer, step.cleared_slots)
        if self._query_norm is not None:
            raw = self._query_norm(raw.contiguous())
        tensors = step.attention[attention.window, self._heads]
        if self._indexer is not None and weights is not None:
            keys = slots_of_layer[:, attention.entry_dim :]
            selected = self._indexer.select(raw, weights, angles, keys, step.slots, pages.shape[1], tensors)
        if attention.is_sparse:
            assert selected is not None, "checked by ModelConfig"
            tensors, pages = selected, pages[..., : attention.entry_dim]
        queries = self._queries(raw if self._query_up is None else self._query_up(raw), angles)
        rows = attend(kernels, queries, entries, pages, tensors, attention.score_cap, latent_dim=attention.latent_dim)
        values = kernels.linear_by_head(rows.view(len(rows), attention.head_count, -1), self._value_up)
        return self._output(values.reshape(len(rows), -1)), selected

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
