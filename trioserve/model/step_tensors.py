"""A StepPlan as index tensors: where each token is written, what each one sees. Every shape and dtype is written here.

Computed once a step, read by every layer. Rows of a step: first all chunks of one token (decodes), longest context
first, then the other chunks in the plan's order, decodes with a draft among them; a chunk's tokens are consecutive
rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trioserve.contracts.step import ScheduledChunk, StateSpan
from trioserve.model.given_rows import given_rows
from trioserve.model.host_to_device import Sending
from trioserve.model.torch_adapters import AdapterRows
from trioserve_kernels.paged import DecodeWork, chunk_tile_tokens, split_count
from trioserve_kernels.reference import decode_mask, prompt_mask

__all__ = [
    "AttentionTensors",
    "ChunkTables",
    "DecodeGroup",
    "DecodeTables",
    "HeadShape",
    "PromptPart",
    "StepShape",
    "StateRows",
    "StateSteps",
    "StepTensors",
    "TableWalk",
    "build_step_tensors",
]

# Decodes whose gathered contexts fit the CPU's caches together run faster than all at once (64 sequences of 256 tokens:
# 1.5 ms a layer in four groups, 2.3 ms in one). A GPU wants few large launches; there the bound is on transient memory.
GATHERED_BYTES_MAX = {"cpu": 4 * 2**20, "cuda": 256 * 2**20}
# A long chunk is attended in parts: the first rows need not look at keys that only the last ones see.
PART_ROWS_MAX = {"cpu": 256, "cuda": 2_048}
PADDED_BLOCKS_MIN = 8  # shorter contexts than this are padded together: one more call costs more than their padding

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class HeadShape:
    head_count: int
    kv_head_count: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class StepShape:
    """What the tensors depend on besides the plan. windows, sections: the distinct ones of the model's layers; sections
    are whole numbers of blocks, or as long as the context. walked_heads: set if the kernels are fused and walk block
    tables themselves; these need no masks and no groups."""

    block_size: int
    hidden_size: int
    token_kv_bytes: int  # of one token in one layer
    windows: tuple[int | None, ...]
    dtype: torch.dtype
    device: torch.device
    sections: tuple[int, ...] = ()
    walked_heads: HeadShape | None = None


@dataclass(frozen=True, slots=True)
class _Span:
    """Consecutive tokens of one sequence, seen from where its block table begins."""

    start: int
    row_count: int
    block_table: Sequence[int]

    def in_sections(self, section: int, block_size: int) -> Iterator[_Span]:
        """Those of each section it reaches, seen from where that begins."""
        end = self.start + self.row_count
        for base in range(self.start // section * section, end, section):
            first, last = max(self.start, base), min(end, base + section)
            yield _Span(first - base, last - first, self.block_table[base // block_size :])


@dataclass(frozen=True, slots=True)
class DecodeTables:
    """All decodes of a step. block_tables: int32 [n, width], 0 behind a row's last block; contexts: int32 [n]."""

    block_tables: Tensor
    contexts: Tensor
    context_max: int
    work: DecodeWork


@dataclass(frozen=True, slots=True)
class ChunkTables:
    """All chunks of a step, their rows counted from the first chunk's: as paged_chunks_ takes them, all int32."""

    block_tables: Tensor
    contexts: Tensor
    row_starts: Tensor
    tiles: Tensor


@dataclass(frozen=True, slots=True)
class TableWalk:
    """The rows of a step under one sliding window, for kernels that walk block tables: decodes, then chunks."""

    window: int | None
    decodes: DecodeTables | None
    chunks: ChunkTables | None


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decodes attended in one call: rows first .. end - 1.

    block_table: int64 [end - first, width]; rows shorter than width repeat their last block, so that no sequence ever
    touches a block of another one. mask: [end - first, 1, 1, width * block_size], additive, in the step's dtype.
    """

    first: int
    end: int
    block_table: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Consecutive tokens of one chunk, attended in one call: rows first .. end - 1.

    block_table: int64 [width], the blocks that hold the context; None when the context is these rows themselves, which
    then need no gathering. context: tokens to use of the gathered blocks. mask: [end - first, context], additive, in
    the step's dtype; None for plain causal.
    """

    first: int
    end: int
    block_table: Tensor | None
    context: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionTensors:
    """What the rows of a step see under one sliding window (None: everything before them)."""

    decode_groups: tuple[DecodeGroup, ...]
    prompt_parts: tuple[PromptPart, ...]
    walk: TableWalk | None = None  # in the place of both


@dataclass(frozen=True, slots=True)
class StateRows:
    """Rows of a step that have a chunk of their own, with one span. rows, reads, writes: int64 [n]. past_count: int64
    [n, 1, 1], tokens before it; where it is 0 reads is any slot, and the state is zeros."""

    rows: Tensor
    reads: Tensor
    writes: Tensor
    past_count: Tensor


@dataclass(frozen=True, slots=True)
class StateSteps:
    """Which states a step reads and writes, of a model with layers that keep some. rows: None if there are none. spans:
    of each other chunk, its first row and its spans."""

    rows: StateRows | None
    spans: tuple[tuple[int, tuple[StateSpan, ...]], ...]


@dataclass(frozen=True, slots=True)
class StepTensors:
    """token_ids, positions, slots: int64 [T]; slot = block * block_size + offset. cleared_slots: int64 [n], behind the
    last token of every block that this step begins and does not fill; None if there are none, or if the kernels never
    read them. attention: by window; sections: by section. first_rows: for each chunk in the order that was given, its
    first row. states: None of a model without. given: rows whose embeddings are not their tokens': int64 [n], and
    float32 [n, hidden_size]. adapters: of the rows that have one; None: none has."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    cleared_slots: Tensor | None
    attention: dict[int | None, AttentionTensors]
    first_rows: tuple[int, ...]
    states: StateSteps | None = None
    given: tuple[Tensor, Tensor] | None = None
    adapters: AdapterRows | None = None
    sections: dict[int, AttentionTensors] = field(default_factory=dict)


def build_step_tensors(chunks: Sequence[ScheduledChunk], shape: StepShape, sending: Sending) -> StepTensors:
    """chunks: at least one, each with count >= 1 and a block table that covers its last token; one that awaits its
    token gets id 0. What comes back has its values when `sending` has been sent."""
    order = _row_order(chunks)
    first_rows = [0] * len(chunks)
    token_ids: list[int] = []
    positions, slots, cleared = [], [], []
    for index in order:
        chunk = chunks[index]
        first_rows[index] = len(token_ids)
        end = chunk.start + chunk.row_count
        token_ids.extend((0,) if chunk.awaits_token else chunk.row_tokens)
        chunk_positions = np.arange(chunk.start, end, dtype=np.int64)
        positions.append(chunk_positions)
        slots.append(_slots(chunk, chunk_positions, shape.block_size))
        cleared.append(_slots_behind(chunk, shape.block_size))
    behind = np.concatenate(cleared)
    spans = [_Span(chunks[at].start, chunks[at].row_count, chunks[at].block_table) for at in order]
    count = sum(span.row_count == 1 for span in spans)
    # What a row of a section sees is what a row of a sequence that begins with it would.
    parts = {
        section: [part for span in spans for part in span.in_sections(section, shape.block_size)]
        for section in shape.sections
    }
    if shape.walked_heads is None:
        attention = {window: _attention_tensors(spans, count, shape, window) for window in shape.windows}
        sections = {section: _attention_tensors(parts[section], count, shape, None) for section in parts}
    else:
        attention = _walks(spans, count, shape.windows, shape, shape.walked_heads, sending)
        sections = {
            section: _walks(parts[section], count, (None,), shape, shape.walked_heads, sending)[None]
            for section in parts
        }
    return StepTensors(
        token_ids=sending.add(np.array(token_ids, dtype=np.int64)),
        positions=sending.add(np.concatenate(positions)),
        slots=sending.add(np.concatenate(slots)),
        cleared_slots=sending.add(behind) if behind.size and shape.walked_heads is None else None,
        attention=attention,
        first_rows=tuple(first_rows),
        states=_state_steps(chunks, first_rows, sending) if chunks[0].states else None,
        given=_given(chunks, first_rows, shape, sending),
        sections=sections,
    )


def _state_steps(chunks: Sequence[ScheduledChunk], first_rows: Sequence[int], sending: Sending) -> StateSteps:
    singles: list[tuple[int, int, StateSpan]] = []
    others: list[tuple[int, tuple[StateSpan, ...]]] = []
    for chunk, row in zip(chunks, first_rows, strict=True):
        if chunk.row_count == len(chunk.states) == 1:
            singles.append((row, chunk.start, chunk.states[0]))
        else:
            others.append((row, chunk.states))
    rows = None
    if singles:
        reads = [span.writes if span.reads is None else span.reads for _row, _start, span in singles]
        rows = StateRows(
            sending.add(np.array([row for row, _start, _span in singles], dtype=np.int64)),
            sending.add(np.array(reads, dtype=np.int64)),
            sending.add(np.array([span.writes for _row, _start, span in singles], dtype=np.int64)),
            sending.add(np.array([[[start]] for _row, start, _span in singles], dtype=np.int64)),
        )
    return StateSteps(rows, tuple(others))


def _given(
    chunks: Sequence[ScheduledChunk], first_rows: Sequence[int], shape: StepShape, sending: Sending
) -> tuple[Tensor, Tensor] | None:
    found = given_rows(chunks, first_rows, shape.hidden_size)
    return None if found is None else (sending.add(found.rows.astype(np.int64)), sending.add(found.values))


def _row_order(chunks: Sequence[ScheduledChunk]) -> list[int]:
    decodes = [index for index, chunk in enumerate(chunks) if chunk.row_count == 1]
    decodes.sort(key=lambda index: -chunks[index].start)
    return decodes + [index for index, chunk in enumerate(chunks) if chunk.row_count > 1]


def _slots(chunk: ScheduledChunk, positions: Int64Array, block_size: int) -> Int64Array:
    first = chunk.start // block_size
    table = _block_array(chunk, first)
    return table[positions // block_size - first] * block_size + positions % block_size


def _slots_behind(chunk: ScheduledChunk, block_size: int) -> Int64Array:
    """The free slots of the last block, if this chunk begins it."""
    end = chunk.start + chunk.row_count
    begun = (end - 1) // block_size * block_size
    if begun < chunk.start or end % block_size == 0:
        return np.empty(0, dtype=np.int64)
    block = chunk.block_table[begun // block_size]
    return np.arange(block * block_size + end - begun, (block + 1) * block_size, dtype=np.int64)


def _walks(
    spans: Sequence[_Span],
    decode_count: int,
    windows: Sequence[int | None],
    shape: StepShape,
    heads: HeadShape,
    sending: Sending,
) -> dict[int | None, AttentionTensors]:
    """spans: in the order of their rows, decodes first. Windows differ in a number alone, so they share the tensors."""
    decodes, chunks = spans[:decode_count], spans[decode_count:]
    decode_tables = _decode_tables(decodes, windows, shape, heads, sending) if decodes else None
    chunk_tables = _chunk_tables(chunks, shape, heads, sending) if chunks else None
    return {window: AttentionTensors((), (), TableWalk(window, decode_tables, chunk_tables)) for window in windows}


def _decode_tables(
    chunks: Sequence[_Span], windows: Sequence[int | None], shape: StepShape, heads: HeadShape, sending: Sending
) -> DecodeTables:
    contexts = [chunk.start + 1 for chunk in chunks]
    parts_max = max(split_count(max(contexts), window) for window in windows)
    return DecodeTables(
        sending.add(_block_tables(chunks, shape.block_size)),
        sending.add(np.array(contexts, dtype=np.int32)),
        max(contexts),
        DecodeWork.make(len(chunks), heads.head_count, parts_max, heads.head_dim, shape.device),
    )


def _chunk_tables(chunks: Sequence[_Span], shape: StepShape, heads: HeadShape, sending: Sending) -> ChunkTables:
    tile_tokens = chunk_tile_tokens(heads.head_count // heads.kv_head_count)
    tiles = [(index, first) for index, chunk in enumerate(chunks) for first in range(0, chunk.row_count, tile_tokens)]
    row_starts = np.cumsum([0, *(chunk.row_count for chunk in chunks)], dtype=np.int32)
    return ChunkTables(
        sending.add(_block_tables(chunks, shape.block_size)),
        sending.add(np.array([chunk.start + chunk.row_count for chunk in chunks], dtype=np.int32)),
        sending.add(row_starts),
        sending.add(np.array(tiles, dtype=np.int32)),
    )


def _block_tables(chunks: Sequence[_Span], block_size: int) -> Int32Array:
    widths = [(chunk.start + chunk.row_count - 1) // block_size + 1 for chunk in chunks]
    tables = np.zeros((len(chunks), max(widths)), dtype=np.int32)
    for table, chunk, width in zip(tables, chunks, widths, strict=True):
        table[:width] = chunk.block_table[:width]
    return tables


def _attention_tensors(
    spans: Sequence[_Span], decode_count: int, shape: StepShape, window: int | None
) -> AttentionTensors:
    """spans: in the order of their rows, decodes first."""
    groups, parts = [], []
    row = 0
    for group in _decode_groups(spans[:decode_count], shape, window):
        groups.append(_decode_group(group, row, shape, window))
        row += len(group)
    for chunk in spans[decode_count:]:
        end = chunk.start + chunk.row_count
        for start in range(chunk.start, end, PART_ROWS_MAX[shape.device.type]):
            part_end = min(start + PART_ROWS_MAX[shape.device.type], end)
            parts.append(_prompt_part(chunk, start, part_end, row, shape, window))
            row += part_end - start
    return AttentionTensors(tuple(groups), tuple(parts))


def _decode_groups(decodes: Sequence[_Span], shape: StepShape, window: int | None) -> list[list[_Span]]:
    """Neighbours in length go together, as long as less than half of a row is padding and the bytes are in bounds."""
    groups: list[list[_Span]] = []
    narrowest = widest = 0
    block_bytes = shape.token_kv_bytes * shape.block_size
    for chunk in decodes:
        width = chunk.start // shape.block_size + 1 - _first_seen(chunk.start, window) // shape.block_size
        if groups:
            low, high = min(narrowest, width), max(widest, width)
            fits = (len(groups[-1]) + 1) * high * block_bytes <= GATHERED_BYTES_MAX[shape.device.type]
            if fits and (high <= PADDED_BLOCKS_MIN or low * 2 > high):
                groups[-1].append(chunk)
                narrowest, widest = low, high
                continue
        groups.append([chunk])
        narrowest = widest = width
    return groups


def _decode_group(group: Sequence[_Span], row: int, shape: StepShape, window: int | None) -> DecodeGroup:
    size = shape.block_size
    first_blocks = [_first_seen(chunk.start, window) // size for chunk in group]
    width = max(chunk.start // size + 1 - first for chunk, first in zip(group, first_blocks, strict=True))
    table = np.empty((len(group), width), dtype=np.int64)
    visible_from, visible_to = [], []
    for index, (chunk, first) in enumerate(zip(group, first_blocks, strict=True)):
        blocks = chunk.block_table[first : chunk.start // size + 1]
        table[index, : len(blocks)] = blocks
        table[index, len(blocks) :] = blocks[-1]
        visible_from.append(_first_seen(chunk.start, window) - first * size)
        visible_to.append(chunk.start + 1 - first * size)
    visible = _tensor(np.array((visible_from, visible_to), dtype=np.int64), shape.device)
    mask = decode_mask(visible[0], visible[1], width * size, shape.dtype)
    return DecodeGroup(row, row + len(group), _tensor(table, shape.device), mask)


def _prompt_part(chunk: _Span, start: int, end: int, row: int, shape: StepShape, window: int | None) -> PromptPart:
    sees_all = window is None or end <= window
    if start == 0 and sees_all:
        return PromptPart(row, row + end, None, end, None)
    first_block = _first_seen(start, window) // shape.block_size
    base = first_block * shape.block_size
    blocks = _block_array(chunk, first_block)[: (end - 1) // shape.block_size + 1 - first_block]
    mask = prompt_mask(start - base, end - start, end - base, window, shape.dtype, shape.device)
    return PromptPart(row, row + end - start, _tensor(blocks, shape.device), end - base, mask)


def _first_seen(position: int, window: int | None) -> int:
    return 0 if window is None else max(0, position - window + 1)


def _block_array(chunk: ScheduledChunk | _Span, first_block: int) -> Int64Array:
    return np.array(chunk.block_table[first_block:], dtype=np.int64)


def _tensor(values: Int32Array | Int64Array, device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device, non_blocking=True)
