"""Converts a StepPlan to index tensors, which contain the KV slot of each token and the tokens that it attends to.

The tensors are created once per step, and every layer reads them. The first rows of a step are the chunks of one token
(decodes), longest context first. Then the other chunks follow in the order of the plan, including decodes with draft
tokens. Tokens of a chunk are consecutive rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from msgspec import structs
from torch import Tensor

from trioserve.contracts.prompt import row_positions
from trioserve.contracts.step import ScheduledChunk, StateSpan
from trioserve.model.layer_config import AttentionConfig, LatentAttentionConfig
from trioserve.model.model_config import CrossAttention, ModelConfig
from trioserve.model.step_rows import given_rows, rotary_positions, row_ends
from trioserve.model.torch_step.adapters import AdapterRows
from trioserve.model.torch_step.formats import Sending
from trioserve_kernels.flash_prompts import FlashPrompts
from trioserve_kernels.paged import DECODE_PARTS_MAX, DecodeWork, chunk_tile_tokens, latent_parts_max, split_count
from trioserve_kernels.reference import decode_mask, prompt_mask

__all__ = [
    "AttentionKind",
    "AttentionTensors",
    "ChunkTables",
    "PackedChunks",
    "DecodeGroup",
    "DecodeTables",
    "EncodedRows",
    "HeadShape",
    "PromptPart",
    "StepShape",
    "StateRows",
    "StateSteps",
    "StepTensors",
    "TableWalk",
    "attention_kinds",
    "build_step_tensors",
]

# Bytes of gathered contexts in one group of decodes. On a CPU, small groups are faster, because their contexts fit in
# the caches: 64 sequences of 256 tokens take 1.5 ms per layer in four groups, and 2.3 ms in one group. A GPU needs few
# large launches, so its limit only restricts temporary memory.
GATHERED_BYTES_MAX = {"cpu": 4 * 2**20, "cuda": 256 * 2**20}
# Attention of a long chunk is computed in several calls. The first rows then skip the keys of later rows.
PART_ROWS_MAX = {"cpu": 256, "cuda": 2_048}
PADDED_BLOCKS_MIN = 8  # Contexts of up to 8 blocks form one group, because a call costs more than their padding.

# Rows of an average chunk for flash attention. Gathering the keys and values of a context takes about as long as
# attention of a hundred rows, and flash attention saves a quarter to a half of the time of attention (estimated).
FLASH_ROWS_MIN = 512

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Heads of attention in some layers.

    Attributes:
        latent_dim: size of a value, if the KV cache has latents. Else, a value has head_dim numbers.
    """

    head_count: int
    kv_head_count: int
    head_dim: int
    latent_dim: int | None = None

    @classmethod
    def of(cls, attention: AttentionConfig | LatentAttentionConfig) -> HeadShape:
        if isinstance(attention, LatentAttentionConfig):
            return cls(attention.head_count, 1, attention.entry_dim, attention.latent_dim)
        return cls(attention.head_count, attention.kv_head_count, attention.head_dim)

    def work(self, rows: int, context_max: int, windows: Sequence[int | None], device: torch.device) -> DecodeWork:
        """Return buffers for decodes.

        Args:
            rows: largest number of decodes.
            context_max: longest context in tokens.
            windows: attention windows of the layers.
        """
        parts_max = DECODE_PARTS_MAX if self.latent_dim is None else latent_parts_max(self.head_count)
        parts = max(split_count(context_max, window, parts_max) for window in windows)
        return DecodeWork.make(rows, self.head_count, parts, self.latent_dim or self.head_dim, device)


AttentionKind = tuple[int | None, HeadShape]
"""Window of some layers, and their heads."""


def attention_kinds(config: ModelConfig) -> tuple[AttentionKind, ...]:
    """Return the distinct kinds of attention, in the order of the layers.

    Args:
        config: model.
    """
    return tuple(dict.fromkeys((attention.window, HeadShape.of(attention)) for attention in config.attentions))


@dataclass(frozen=True, slots=True)
class StepShape:
    """Properties of the model and its kernels on which a step's tensors depend.

    Attributes:
        token_kv_bytes: bytes of one token's KV in one layer, the most of all layers.
        kinds: distinct kinds of attention in the model's layers.
        sections: distinct attention sections of the model's layers, in tokens. Each is a multiple of block_size, or as
            long as the context. In a model with sections, all layers have equal heads.
        walks: the kernels read block tables themselves. They need no masks and no groups.
        flash: flash attention for long prompt chunks by heads, beside kernels that read block tables. These kernels
            compute all other chunks.
        cross: rows of an encoder at the first positions of each sequence. A sequence without given rows, as in a
            warm-up, has the most rows. Only for kernels that do not walk. None: the model has no encoder.
    """

    block_size: int
    hidden_size: int
    token_kv_bytes: int
    kinds: tuple[AttentionKind, ...]
    dtype: torch.dtype
    device: torch.device
    sections: tuple[int, ...] = ()
    walks: bool = False
    flash: Mapping[HeadShape, FlashPrompts] = field(default_factory=dict)
    cross: CrossAttention | None = None


@dataclass(frozen=True, slots=True)
class _Span:
    """Consecutive tokens of one sequence. Positions count from the first block of the sequence's block table.

    Attributes:
        ends: position after the last token that each row attends to. None: each row attends up to its own token.
    """

    start: int
    row_count: int
    block_table: Sequence[int]
    ends: Int32Array | None = None

    def end_of(self, position: int) -> int:
        """Return the position after the last token that a row attends to."""
        return position + 1 if self.ends is None else int(self.ends[position - self.start])

    def in_sections(self, section: int, block_size: int) -> Iterator[_Span]:
        """Split the span by sections. In each result, positions count from the first block of its section."""
        end = self.start + self.row_count
        for base in range(self.start // section * section, end, section):
            first, last = max(self.start, base), min(end, base + section)
            yield _Span(first - base, last - first, self.block_table[base // block_size :])


@dataclass(frozen=True, slots=True)
class DecodeTables:
    """All decodes of a step, for kernels that read block tables.

    Attributes:
        block_tables: int32 [n, width], 0 after a row's last block.
        contexts: int32 [n], number of tokens that each row attends to.
        context_max: largest number in contexts.
        work: buffers for partial results.
    """

    block_tables: Tensor
    contexts: Tensor
    context_max: int
    work: DecodeWork


@dataclass(frozen=True, slots=True)
class PackedChunks:
    """Contexts of all chunks of a step, one after the other, for flash attention.

    Attributes:
        flash: computes the attention.
        slots: int64 [sum of contexts], KV slot of each token. None if every chunk is its whole context.
        context_starts: int32 [n + 1], first place of each context, and the sum of contexts.
        rows_max: rows of the longest chunk.
        context_max: tokens of the longest context.
    """

    flash: FlashPrompts
    slots: Tensor | None
    context_starts: Tensor
    rows_max: int
    context_max: int


@dataclass(frozen=True, slots=True)
class ChunkTables:
    """All chunks of a step except decodes, as paged_chunks_ accepts them.

    Attributes:
        block_tables: int32 [n, width], 0 after a row's last block.
        contexts: int32 [n], number of tokens that the last row of each chunk attends to.
        row_starts: int32 [n + 1], first row of each chunk, and the row after the last chunk. The first row after the
            decodes is row 0. In a padded step, the first row of the step is row 0.
        tiles: int32 [tiles, 2], chunk index of each tile, and the tile's first row in the chunk.
        packed: contexts for flash attention, or None.
    """

    block_tables: Tensor
    contexts: Tensor
    row_starts: Tensor
    tiles: Tensor
    packed: PackedChunks | None = None


@dataclass(frozen=True, slots=True)
class TableWalk:
    """All rows of a step (decodes, then chunks) for one attention window, for kernels that read block tables.

    Attributes:
        is_padded: the step has a fixed shape with chunks. Chunks begin after the last decode, also if there are fewer
            decodes than their tables. Further rows belong to no sequence, and their attention must be a number, because
            a mixture of experts could not route NaN.
    """

    window: int | None
    decodes: DecodeTables | None
    chunks: ChunkTables | None
    is_padded: bool = False


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decodes whose attention is computed in one call. They are the rows first to end - 1.

    Attributes:
        block_table: int64 [end - first, width]. Shorter rows repeat their last block, so no sequence reads a block of
            another sequence.
        mask: [end - first, 1, 1, width * block_size], additive, in the step's dtype.
    """

    first: int
    end: int
    block_table: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Consecutive tokens of one chunk whose attention is computed in one call. They are the rows first to end - 1.

    Attributes:
        block_table: int64 [width], blocks that contain the context. None if these rows are the whole context, so that
            no blocks are gathered.
        context: number of tokens of the gathered blocks that are used.
        mask: [end - first, context], additive, in the step's dtype. None means a causal mask.
    """

    first: int
    end: int
    block_table: Tensor | None
    context: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionTensors:
    """Tensors that define which tokens each row of a step attends to, for one window.

    Attributes:
        walk: tables for kernels that read block tables directly, or None. With a walk, decode_groups is empty, and
            prompt_parts has only the chunks of a step whose rows attend to later rows.
        selected: rows that attend to selected tokens. Their block tables contain slots of single tokens, in any order.
    """

    decode_groups: tuple[DecodeGroup, ...]
    prompt_parts: tuple[PromptPart, ...]
    walk: TableWalk | None = None
    selected: tuple[DecodeGroup, ...] = ()


@dataclass(frozen=True, slots=True)
class StateRows:
    """Rows of a step whose chunk has one row and one state span.

    Attributes:
        rows: int64 [n], row indexes. None: these are all rows of the step, in order.
        reads: int64 [n], state slots to read.
        writes: int64 [n], state slots to write.
        past_count: int64 [n, 1, 1], number of tokens before the row. If there are none, the state is zeros, and `reads`
            has an arbitrary slot.
    """

    rows: Tensor | None
    reads: Tensor
    writes: Tensor
    past_count: Tensor

    def take(self, values: Tensor) -> Tensor:
        """Return these rows.

        Args:
            values: [T, ...], a value for each row of the step.

        Returns:
            [n, ...].
        """
        return values if self.rows is None else values.index_select(0, self.rows)

    def put(self, result: Tensor, values: Tensor) -> None:
        """Write values to these rows.

        Args:
            result: [T, ...], which is changed in place.
            values: [n, ...].
        """
        if self.rows is None:
            result.copy_(values)
        else:
            result.index_copy_(0, self.rows, values)


@dataclass(frozen=True, slots=True)
class StateSteps:
    """State slots that a step reads and writes.

    Attributes:
        rows: chunks with one row and one span. None if no chunk is like this.
        spans: first row and spans of each chunk that is not in `rows`.
    """

    rows: StateRows | None
    spans: tuple[tuple[int, tuple[StateSpan, ...]], ...]


@dataclass(frozen=True, slots=True)
class EncodedRows:
    """Rows of encoders whose cross-attention keys and values a step computes.

    Attributes:
        slots: int64 [n], KV slot of each row.
        rows: float32 [n, hidden_size].
    """

    slots: Tensor
    rows: Tensor


@dataclass(frozen=True, slots=True)
class StepTensors:
    """Index tensors of one step of T rows.

    Attributes:
        token_ids: int64 [T].
        positions: int64 [T], or [3, T] if the step has images with positions in a grid, see rotary_positions.
        slots: int64 [T], block * block_size + offset of each token in the KV cache.
        cleared_slots: int64 [n], unused slots of every block that this step begins and does not fill. None if no such
            slots exist, or if the kernels never read unused slots.
        attention: attention tensors by kind of attention.
        first_rows: first row of each chunk, in the order of the given chunks.
        states: state slots to read and write. None for a model without states.
        given: indexes of rows with given embeddings, int64 [n], and these embeddings, float32 [n, width], see StepRows.
        adapters: rows that use an adapter. None if no row uses an adapter.
        sections: attention tensors by section.
        encoded: rows of encoders that are no rows of the step. None if the step has no such rows.
        cross: rows of an encoder that each row attends to. None for a model without cross attention.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    cleared_slots: Tensor | None
    attention: dict[AttentionKind, AttentionTensors]
    first_rows: tuple[int, ...]
    states: StateSteps | None = None
    given: tuple[Tensor, Tensor] | None = None
    adapters: AdapterRows | None = None
    sections: dict[int, AttentionTensors] = field(default_factory=dict)
    encoded: EncodedRows | None = None
    cross: AttentionTensors | None = None


def build_step_tensors(chunks: Sequence[ScheduledChunk], shape: StepShape, sending: Sending) -> StepTensors:
    """Create the index tensors of a step.

    Args:
        chunks: at least one chunk. Each has a count of at least 1 and a block table that covers its last token. A chunk
            that awaits its token gets token id 0.
        shape: properties of the model and the kernels.
        sending: transfer to which the tensors are added. The result's tensors are defined after `sending.send`.
    """
    if shape.cross is not None:
        return _with_encoded(chunks, shape, shape.cross, sending)
    return _decoder_tensors(chunks, shape, sending)


def _decoder_tensors(chunks: Sequence[ScheduledChunk], shape: StepShape, sending: Sending) -> StepTensors:
    order = _row_order(chunks)
    first_rows = [0] * len(chunks)
    token_ids: list[int] = []
    positions, slots, cleared = [], [], []
    for index in order:
        chunk = chunks[index]
        first_rows[index] = len(token_ids)
        end = chunk.start + chunk.row_count
        token_ids.extend((0,) if chunk.awaits_token else chunk.row_tokens)
        indexes = np.arange(chunk.start, end, dtype=np.int64)
        positions.append(rotary_positions(chunk) if chunk.request.given else indexes)
        slots.append(_slots(chunk, indexes, shape.block_size))
        cleared.append(_slots_after_last(chunk, shape.block_size))
    if any(own.ndim == 2 for own in positions):
        positions = [np.broadcast_to(own, (3, own.shape[-1])) for own in positions]
    after_last = np.concatenate(cleared)
    spans = [
        _Span(chunks[at].start, chunks[at].row_count, chunks[at].block_table, row_ends(chunks[at])) for at in order
    ]
    count = sum(span.row_count == 1 for span in spans)
    # An attention section is a fixed range of positions. A row attends only to the earlier tokens of its section, as if
    # the sequence began with the section.
    parts = {
        section: [part for span in spans for part in span.in_sections(section, shape.block_size)]
        for section in shape.sections
    }
    if shape.walks:
        attention = _walks(spans, count, shape.kinds, shape, sending)
        in_section = [(None, heads) for _, heads in shape.kinds[:1]]
        sections = {
            section: next(iter(_walks(parts[section], count, in_section, shape, sending).values())) for section in parts
        }
    else:
        windows = dict.fromkeys(window for window, _ in shape.kinds)
        by_window = {window: _attention_tensors(spans, count, shape, window) for window in windows}
        attention = {kind: by_window[kind[0]] for kind in shape.kinds}
        sections = {section: _attention_tensors(parts[section], count, shape, None) for section in parts}
    return StepTensors(
        token_ids=sending.add(np.array(token_ids, dtype=np.int64)),
        positions=sending.add(np.concatenate(positions, axis=-1)),
        slots=sending.add(np.concatenate(slots)),
        cleared_slots=sending.add(after_last) if after_last.size and not shape.walks else None,
        attention=attention,
        first_rows=tuple(first_rows),
        states=_state_steps(chunks, first_rows, sending) if chunks[0].states else None,
        given=_given(chunks, first_rows, sending),
        sections=sections,
    )


def _with_encoded(
    chunks: Sequence[ScheduledChunk], shape: StepShape, cross: CrossAttention, sending: Sending
) -> StepTensors:
    """Create the index tensors of a step whose sequences begin with rows of an encoder.

    The rows of the step are the decoder's tokens. Their positions, and the blocks of self-attention, count from the
    decoder's first token.
    """
    size = shape.block_size
    row_counts = [chunk.request.given[0].count if chunk.request.given else cross.rows_max for chunk in chunks]
    firsts = [row_positions(count, size) for count in row_counts]
    encoded = _encoded_rows(chunks, firsts, shape, sending)
    places = [place for place, chunk in enumerate(chunks) if chunk.start + chunk.row_count > firsts[place]]
    if not places:
        empty = torch.empty(0, dtype=torch.int64, device=shape.device)
        return StepTensors(empty, empty, empty, None, {}, (0,) * len(chunks), encoded=encoded)
    parts = [_decoder_part(chunks[place], firsts[place], size) for place in places]
    step = _decoder_tensors(parts, replace(shape, cross=None), sending)
    first_rows = [0] * len(chunks)
    for place, row in zip(places, step.first_rows, strict=True):
        # Counted from this row, the chunk's last row is the decoder's last row.
        first_rows[place] = row - max(0, firsts[place] - chunks[place].start)
    seen = [
        _SeenRows(parts[at].row_count, row_counts[places[at]], chunks[places[at]].block_table)
        for at in _row_order(parts)
    ]
    return replace(step, first_rows=tuple(first_rows), encoded=encoded, cross=_cross_tensors(seen, shape))


class _SeenRows(NamedTuple):
    """Rows of an encoder that the decoder's tokens of one chunk attend to.

    Attributes:
        token_count: tokens of the chunk.
        row_count: rows of the encoder.
        block_table: blocks of the sequence, which begin with the blocks of the rows.
    """

    token_count: int
    row_count: int
    block_table: Sequence[int]

    def blocks(self, block_size: int, width: int | None = None) -> list[int]:
        """Return the blocks of the rows. The last block is repeated up to `width` blocks."""
        own = [self.block_table[at] for at in range(-(-self.row_count // block_size))]
        return own if width is None else own + own[-1:] * (width - len(own))


def _decoder_part(chunk: ScheduledChunk, first: int, block_size: int) -> ScheduledChunk:
    """Return the chunk of the decoder's tokens, as if the sequence began with them and had no given rows."""
    start = max(chunk.start, first)
    return structs.replace(
        chunk,
        request=structs.replace(chunk.request, given=()),
        tokens=chunk.tokens[first:],
        start=start - first,
        count=chunk.start + chunk.count - start,
        block_table=chunk.block_table[first // block_size :],
    )


def _encoded_rows(
    chunks: Sequence[ScheduledChunk], ends: Sequence[int], shape: StepShape, sending: Sending
) -> EncodedRows | None:
    """Return the encoders' rows of all chunks, and rows of zeros up to the end of their last block.

    The zeros give finite keys and values. Masked attention reads these slots, and numbers that are not finite would
    reach its result.

    Args:
        ends: position of the decoder's first token in each chunk's sequence.
    """
    slots, first_rows, count = [], [], 0
    for chunk, end in zip(chunks, ends, strict=True):
        first_rows.append(count)
        positions = np.arange(chunk.start, min(end, chunk.start + chunk.row_count), dtype=np.int64)
        if positions.size:
            slots.append(_slots(chunk, positions, shape.block_size))
            count += positions.size
    if not count:
        return None
    rows = np.zeros((count, shape.hidden_size), dtype=np.float32)
    given = given_rows(chunks, first_rows)
    if given is not None:
        rows[given.rows] = given.values
    return EncodedRows(sending.add(np.concatenate(slots)), sending.add(rows))


def _cross_tensors(seen: Sequence[_SeenRows], shape: StepShape) -> AttentionTensors:
    """Return tensors with which each row attends to all rows of its encoder.

    Args:
        seen: the encoder's rows of each chunk, in the order of the step's rows. Chunks of one token are first.
    """
    size = shape.block_size
    groups: list[DecodeGroup] = []
    parts: list[PromptPart] = []
    decodes = [one for one in seen if one.token_count == 1]
    width = max((-(-one.row_count // size) for one in decodes), default=1)
    together = max(1, GATHERED_BYTES_MAX[shape.device.type] // (width * size * shape.token_kv_bytes))
    for row in range(0, len(decodes), together):
        group = decodes[row : row + together]
        table = np.array([one.blocks(size, width) for one in group], dtype=np.int64)
        ends = torch.tensor([one.row_count for one in group], device=shape.device)
        mask = decode_mask(torch.zeros_like(ends), ends, width * size, shape.dtype)
        groups.append(DecodeGroup(row, row + len(group), _tensor(table, shape.device), mask))
    row = len(decodes)
    for one in seen[len(decodes) :]:
        mask = torch.zeros(one.token_count, one.row_count, dtype=shape.dtype, device=shape.device)
        blocks = _tensor(np.array(one.blocks(size), dtype=np.int64), shape.device)
        parts.append(PromptPart(row, row + one.token_count, blocks, one.row_count, mask))
        row += one.token_count
    return AttentionTensors(tuple(groups), tuple(parts))


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
    chunks: Sequence[ScheduledChunk], first_rows: Sequence[int], sending: Sending
) -> tuple[Tensor, Tensor] | None:
    found = given_rows(chunks, first_rows)
    return None if found is None else (sending.add(found.rows.astype(np.int64)), sending.add(found.values))


def _row_order(chunks: Sequence[ScheduledChunk]) -> list[int]:
    decodes = [index for index, chunk in enumerate(chunks) if chunk.row_count == 1]
    decodes.sort(key=lambda index: -chunks[index].start)
    return decodes + [index for index, chunk in enumerate(chunks) if chunk.row_count > 1]


def _slots(chunk: ScheduledChunk | _Span, positions: Int64Array, block_size: int) -> Int64Array:
    first = chunk.start // block_size
    table = _block_array(chunk, first)
    return table[positions // block_size - first] * block_size + positions % block_size


def _slots_after_last(chunk: ScheduledChunk, block_size: int) -> Int64Array:
    """Return the unused slots of the last block if this chunk begins the block, else an empty array. int64 [n]."""
    end = chunk.start + chunk.row_count
    begun = (end - 1) // block_size * block_size
    if begun < chunk.start or end % block_size == 0:
        return np.empty(0, dtype=np.int64)
    block = chunk.block_table[begun // block_size]
    return np.arange(block * block_size + end - begun, (block + 1) * block_size, dtype=np.int64)


def _walks(
    spans: Sequence[_Span],
    decode_count: int,
    kinds: Sequence[AttentionKind],
    shape: StepShape,
    sending: Sending,
) -> dict[AttentionKind, AttentionTensors]:
    """Create the tables for kernels that read block tables.

    Args:
        spans: spans in the order of their rows, decodes first.

    Returns:
        Tables by kind of attention. All windows share the tensors, because only the size of the window differs. Heads
        have their own tiles and work buffers.
    """
    decodes, chunks = spans[:decode_count], spans[decode_count:]
    walks: dict[AttentionKind, AttentionTensors] = {}
    decode_tables: DecodeTables | None = None
    chunk_tables: ChunkTables | None = None
    needs_masks = any(chunk.ends is not None for chunk in chunks)  # The kernels for block tables have no masks.
    for heads in dict.fromkeys(heads for _, heads in kinds):
        windows = [window for window, others in kinds if others == heads]
        if decodes:
            decode_tables = _decode_tables(decodes, windows, shape, heads, sending, decode_tables)
        if chunks and not needs_masks:
            chunk_tables = _chunk_tables(chunks, shape, heads, sending, chunk_tables)
        for window in windows:
            parts = _prompt_parts(chunks, decode_count, shape, window) if needs_masks else ()
            walks[window, heads] = AttentionTensors((), parts, TableWalk(window, decode_tables, chunk_tables))
    return walks


def _decode_tables(
    chunks: Sequence[_Span],
    windows: Sequence[int | None],
    shape: StepShape,
    heads: HeadShape,
    sending: Sending,
    other: DecodeTables | None,
) -> DecodeTables:
    """Return the tables of decodes. `other` are the tables of the same decodes for other heads, or None."""
    contexts = [chunk.start + 1 for chunk in chunks]
    if other is not None:
        return replace(other, work=heads.work(len(chunks), max(contexts), windows, shape.device))
    return DecodeTables(
        sending.add(_block_tables(chunks, shape.block_size)),
        sending.add(np.array(contexts, dtype=np.int32)),
        max(contexts),
        heads.work(len(chunks), max(contexts), windows, shape.device),
    )


def _chunk_tables(
    chunks: Sequence[_Span], shape: StepShape, heads: HeadShape, sending: Sending, other: ChunkTables | None
) -> ChunkTables:
    """Return the tables of chunks. `other` are the tables of the same chunks for other heads, or None."""
    tile_tokens = chunk_tile_tokens(heads.head_count // heads.kv_head_count)
    tiles = [(index, first) for index, chunk in enumerate(chunks) for first in range(0, chunk.row_count, tile_tokens)]
    packed = _packed_chunks(chunks, shape, shape.flash.get(heads), sending)
    if other is not None:
        return replace(other, tiles=sending.add(np.array(tiles, dtype=np.int32)), packed=packed)
    row_starts = np.cumsum([0, *(chunk.row_count for chunk in chunks)], dtype=np.int32)
    return ChunkTables(
        sending.add(_block_tables(chunks, shape.block_size)),
        sending.add(np.array([chunk.start + chunk.row_count for chunk in chunks], dtype=np.int32)),
        sending.add(row_starts),
        sending.add(np.array(tiles, dtype=np.int32)),
        packed,
    )


def _packed_chunks(
    chunks: Sequence[_Span], shape: StepShape, flash: FlashPrompts | None, sending: Sending
) -> PackedChunks | None:
    """Return the contexts of chunks for flash attention. None if other kernels compute the chunks faster."""
    if flash is None or not flash.is_usable:
        return None
    rows = [chunk.row_count for chunk in chunks]
    if sum(rows) < FLASH_ROWS_MIN * len(rows):
        return None
    contexts = [chunk.start + chunk.row_count for chunk in chunks]
    slots = None
    if contexts != rows:
        if sum(contexts) * shape.token_kv_bytes > GATHERED_BYTES_MAX["cuda"]:
            return None
        places = zip(chunks, contexts, strict=True)
        found = [
            _slots(_Span(0, count, chunk.block_table), np.arange(count, dtype=np.int64), shape.block_size)
            for chunk, count in places
        ]
        slots = sending.add(np.concatenate(found))
    context_starts = sending.add(np.cumsum([0, *contexts], dtype=np.int32))
    return PackedChunks(flash, slots, context_starts, max(rows), max(contexts))


def _block_tables(chunks: Sequence[_Span], block_size: int) -> Int32Array:
    widths = [(chunk.start + chunk.row_count - 1) // block_size + 1 for chunk in chunks]
    tables = np.zeros((len(chunks), max(widths)), dtype=np.int32)
    for table, chunk, width in zip(tables, chunks, widths, strict=True):
        table[:width] = chunk.block_table[:width]
    return tables


def _attention_tensors(
    spans: Sequence[_Span], decode_count: int, shape: StepShape, window: int | None
) -> AttentionTensors:
    """Divide the rows of a step into groups of decodes and pieces of prompts.

    Args:
        spans: spans in the order of their rows, decodes first.
    """
    groups = []
    row = 0
    for group in _decode_groups(spans[:decode_count], shape, window):
        groups.append(_decode_group(group, row, shape, window))
        row += len(group)
    return AttentionTensors(tuple(groups), _prompt_parts(spans[decode_count:], row, shape, window))


def _prompt_parts(chunks: Sequence[_Span], row: int, shape: StepShape, window: int | None) -> tuple[PromptPart, ...]:
    """Divide chunks whose first row is `row` into pieces."""
    parts = []
    for chunk in chunks:
        end = chunk.start + chunk.row_count
        for start in range(chunk.start, end, PART_ROWS_MAX[shape.device.type]):
            part_end = min(start + PART_ROWS_MAX[shape.device.type], end)
            parts.append(_prompt_part(chunk, start, part_end, row, shape, window))
            row += part_end - start
    return tuple(parts)


def _decode_groups(decodes: Sequence[_Span], shape: StepShape, window: int | None) -> list[list[_Span]]:
    """Group decodes of similar length. In a group, less than half of each row is padding, and the gathered bytes are
    limited.
    """
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
    if start == 0 and sees_all and chunk.ends is None:
        return PromptPart(row, row + end, None, end, None)
    first_block = _first_seen(start, window) // shape.block_size
    base = first_block * shape.block_size
    seen_end, ends = chunk.end_of(end - 1), None
    if chunk.ends is not None:
        own = chunk.ends[start - chunk.start : end - chunk.start]
        ends = _tensor(own.astype(np.int64) - base, shape.device)
    blocks = _block_array(chunk, first_block)[: (seen_end - 1) // shape.block_size + 1 - first_block]
    mask = prompt_mask(start - base, end - start, seen_end - base, window, shape.dtype, shape.device, ends)
    return PromptPart(row, row + end - start, _tensor(blocks, shape.device), seen_end - base, mask)


def _first_seen(position: int, window: int | None) -> int:
    return 0 if window is None else max(0, position - window + 1)


def _block_array(chunk: ScheduledChunk | _Span, first_block: int) -> Int64Array:
    return np.array(chunk.block_table[first_block:], dtype=np.int64)


def _tensor(values: Int32Array | Int64Array, device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device, non_blocking=True)
