"""Inputs of steps of fixed shape: one buffer on the device, which each step overwrites with one copy.

Each size of a step has its own layout of the same buffer. Block tables are last and transposed: the first blocks of all
sequences precede the second blocks of all sequences. Therefore, a step copies one range of memory, whose length depends
on the step's longest block table.

The device's buffer begins with the ids that the last step chose. These ids are not copied from the host. The ids that
the host knows follow directly, so one index can select a row's token from both lists.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trioserve.contracts.step import ScheduledChunk
from trioserve.model.step_model import sampled_indexes, sampled_rows
from trioserve.model.step_rows import rotary_positions
from trioserve.model.torch_step.adapters import NO_ADAPTER
from trioserve.model.torch_step.formats import ALIGNMENT_BYTES

__all__ = ["InputTensors", "StaticInputs", "StaticRows", "StepSize"]

_Array = npt.NDArray[np.generic]

HOST_BUFFERS = 2  # The host may write the inputs of a step before the device has read the previous step's inputs.


@dataclass(frozen=True, slots=True)
class StepSize:
    """Size of a step of fixed shape.

    Attributes:
        rows: number of rows. Decodes are the first rows, then the rows of prompt chunks follow.
        decodes: largest number of decodes.
        chunks: largest number of prompt chunks. 0 for steps of decodes.
        tile_tokens: rows of one tile of a prompt chunk.
        has_adapters: rows may use adapters.
    """

    rows: int
    decodes: int
    chunks: int = 0
    tile_tokens: int = 1
    has_adapters: bool = False

    @property
    def chunk_tables(self) -> int:
        """Number of chunks with tables. The last chunk is always empty. Tiles after the last tile belong to it."""
        return self.chunks + 1 if self.chunks else 0

    @property
    def tiles(self) -> int:
        """Largest number of tiles of all prompt chunks together. The last tile of each chunk may be partly empty."""
        return self.rows // self.tile_tokens + self.chunks if self.chunks else 0

    @property
    def tables(self) -> int:
        """Number of block tables: of decodes, then of chunks."""
        return self.decodes + self.chunk_tables

    def fields(self) -> dict[str, tuple[type[np.generic], int]]:
        """Return number format and count of each field, in the order of the buffer. The first must be known_ids."""
        return {
            "known_ids": (np.int64, self.rows),
            "id_places": (np.int64, self.rows),
            "positions": (np.int64, self.rows),
            "slots": (np.int64, self.rows),
            "sampled": (np.int64, self.rows),
            "contexts": (np.int32, self.tables),
            "row_starts": (np.int32, self.chunk_tables + 1 if self.chunks else 0),
            "tiles": (np.int32, 2 * self.tiles),
            "state_reads": (np.int64, self.decodes),
            "state_writes": (np.int64, self.decodes),
            "adapters": (np.int32, self.rows if self.has_adapters else 0),
        }


class StaticRows:
    """Rows of a step, in the order of steps of fixed shape.

    Args:
        chunks: chunks of the step.

    Attributes:
        decodes: one chunk for each decode. A row computes the last token of its chunk. Each draft token is a row.
        prompts: all other chunks.
        count: number of rows.
        first_rows: first row of each chunk of the step.
        sampled: row of each of sampled_rows.
    """

    def __init__(self, chunks: Sequence[ScheduledChunk]) -> None:
        self.decodes: list[ScheduledChunk] = []
        self.prompts: list[ScheduledChunk] = []
        self.first_rows = [0] * len(chunks)
        for place, chunk in enumerate(chunks):
            if chunk.count == 1:
                self.first_rows[place] = len(self.decodes)
                self.decodes += sampled_rows([chunk]) if chunk.draft else [chunk]
        self.count = len(self.decodes)
        for place, chunk in enumerate(chunks):
            if chunk.count > 1:
                self.first_rows[place] = self.count
                self.prompts.append(chunk)
                self.count += chunk.count
        self.sampled = sampled_indexes(chunks, self.first_rows)

    @property
    def adapters(self) -> list[int]:
        """Number of each row's adapter, NO_ADAPTER for a row without one."""
        numbers = [_adapter_number(chunk) for chunk in self.decodes]
        for chunk in self.prompts:
            numbers += [_adapter_number(chunk)] * chunk.count
        return numbers


def _adapter_number(chunk: ScheduledChunk) -> int:
    return NO_ADAPTER if chunk.request.adapter is None else chunk.request.adapter.id


@dataclass(frozen=True, slots=True)
class InputTensors:
    """Inputs on the device of a step of n rows.

    Attributes:
        ids: int64 [n or more], ids that the last step chose, then ids that the host knows.
        id_places: int64 [n], for each row, the index of its token in ids.
        positions: int64 [n], see rotary_positions. No row belongs to an image.
        slots: int64 [n].
        sampled: int64 [n], indexes of the sampled rows. The rest is not defined.
        contexts: int32 [tables], 0 for a table without a sequence.
        row_starts: int32 [chunk tables + 1], first row of each prompt chunk.
        tiles: int32 [tiles, 2], see ChunkTables.
        state_reads: int64 [decodes], slot of each decode's state before the step. Not used by models without states.
        state_writes: int64 [decodes], slot of each decode's state after the step.
        adapters: int32 [n], number of each row's adapter, NO_ADAPTER for a row without one. Empty if the size has no
            adapters.
        block_tables: int32 [tables, width_max]. Only the blocks of a context are defined.
    """

    ids: Tensor
    id_places: Tensor
    positions: Tensor
    slots: Tensor
    sampled: Tensor
    contexts: Tensor
    row_starts: Tensor
    tiles: Tensor
    state_reads: Tensor
    state_writes: Tensor
    adapters: Tensor
    block_tables: Tensor


class _Layout:
    """Offsets in bytes of the fields of a step."""

    def __init__(self, size: StepSize) -> None:
        self.size = size
        self.parts: dict[str, tuple[type[np.generic], slice]] = {}
        end = 0
        for name, (dtype, count) in size.fields().items():
            byte_count = count * np.dtype(dtype).itemsize
            self.parts[name] = dtype, slice(end, end + byte_count)
            end += byte_count + -byte_count % ALIGNMENT_BYTES
        self.tables_offset = end

    def end(self, width: int) -> int:
        """Return the offset after block tables of a given width."""
        return self.tables_offset + width * self.size.tables * np.dtype(np.int32).itemsize


class StaticInputs:
    """Inputs of steps. For each step call fill, then send, then start work that reads the tensors of its size.

    There are two host buffers. Before step n is filled, the device must have read the inputs of step n - 2.

    Args:
        sizes: possible sizes of a step.
        kept_max: largest number of ids that a step chooses.
        width_max: number of blocks in the longest block table.
        block_size: tokens in one KV block.
        spare_block: block that padding rows write to.
        spare_state: state slot that padding rows write to.
        device: device of the tensors.

    Attributes:
        kept_ids: int64 [kept_max], on the device: ids that the last step chose. The code that samples writes them.
        tensors: InputTensors by size.
    """

    def __init__(
        self,
        sizes: Sequence[StepSize],
        *,
        kept_max: int,
        width_max: int,
        block_size: int,
        spare_block: int,
        spare_state: int = 0,
        device: torch.device,
    ) -> None:
        layouts = {size: _Layout(size) for size in sizes}
        self._layouts = layouts
        kept_max += kept_max % 2  # An even number keeps the fields after kept_ids aligned.
        self._sent_from = kept_max * np.dtype(np.int64).itemsize
        byte_count = max(layout.end(width_max) for layout in layouts.values())
        self._device = torch.zeros(self._sent_from + byte_count, dtype=torch.uint8, device=device)
        self.kept_ids = self._device[: self._sent_from].view(torch.int64)
        self.tensors = {size: self._tensors(layout, width_max) for size, layout in layouts.items()}
        self._sides = itertools.cycle(
            [
                _HostSide(layouts, byte_count, width_max, kept_max, block_size, spare_block, spare_state, device)
                for _ in range(HOST_BUFFERS)
            ]
        )
        self._side = next(self._sides)

    def fill(self, rows: StaticRows, size: StepSize, awaited: Mapping[int, int]) -> int:
        """Write the inputs of a step into host memory. Rows after the last row are padding.

        Args:
            rows: rows of the step, which fit the size.
            size: size of the step.
            awaited: for each row whose token the last step chose, the token's index in kept_ids.

        Returns:
            Number of blocks in the longest block table.
        """
        self._side = next(self._sides)
        return self._side.fill(rows, size, awaited)

    def send(self, size: StepSize, width: int) -> None:
        """Start to copy the inputs that `fill` has written, without waiting.

        Args:
            size: size of the step.
            width: result of fill.
        """
        end = self._layouts[size].end(width)
        self._device[self._sent_from : self._sent_from + end].copy_(self._side.buffer[:end], non_blocking=True)

    def _tensors(self, layout: _Layout, width_max: int) -> InputTensors:
        sent = self._device[self._sent_from :]
        fields = {name: sent[part].view(_TORCH_TYPES[dtype]) for name, (dtype, part) in layout.parts.items()}
        known_ids = fields.pop("known_ids")
        fields["tiles"] = fields["tiles"].view(-1, 2)
        ids = self._device[: self._sent_from + known_ids.nbytes].view(torch.int64)
        tables = sent[layout.tables_offset : layout.end(width_max)].view(torch.int32)
        return InputTensors(ids, **fields, block_tables=tables.view(width_max, layout.size.tables).t())


class _HostSide:
    """Buffer in host memory. The object keeps a copy of the block tables in the buffer and writes only differences.

    From one step to the next, most requests keep their row and their blocks.
    """

    def __init__(
        self,
        layouts: Mapping[StepSize, _Layout],
        byte_count: int,
        width_max: int,
        kept_max: int,
        block_size: int,
        spare_block: int,
        spare_state: int,
        device: torch.device,
    ) -> None:
        # With pinned memory, a copy to the device runs in the background, and the host can continue.
        self.buffer = torch.zeros(byte_count, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._kept_max = kept_max
        self._block_size = block_size
        self._spare_slot = spare_block * block_size
        self._spare_state = spare_state
        host = self.buffer.numpy()
        self._arrays: dict[StepSize, dict[str, _Array]] = {
            size: {name: host[part].view(dtype) for name, (dtype, part) in layout.parts.items()}
            for size, layout in layouts.items()
        }
        self._block_tables = {
            size: host[layout.tables_offset : layout.end(width_max)].view(np.int32).reshape(width_max, size.tables)
            for size, layout in layouts.items()
        }
        self._filled: StepSize | None = None
        self._tables: list[list[int]] = []  # The block tables in the buffer, with the layout of the size `_filled`.

    def fill(self, rows: StaticRows, size: StepSize, awaited: Mapping[int, int]) -> int:
        fields = self._arrays[size]
        if size != self._filled:
            self._filled, self._tables = size, [[] for _ in range(size.tables)]
        fields["contexts"][:] = 0
        width_max = self._fill_decodes(fields, rows.decodes, size, awaited)
        if size.chunks:
            width_max = max(width_max, self._fill_prompts(fields, rows, size))
        fields["id_places"][:] = np.arange(self._kept_max, self._kept_max + size.rows)
        for row, kept in awaited.items():
            fields["id_places"][row] = kept
        fields["sampled"][: len(rows.sampled)] = rows.sampled
        for name in ("known_ids", "positions"):
            fields[name][rows.count :] = 0
        fields["slots"][rows.count :] = self._spare_slot
        if size.has_adapters:
            fields["adapters"][: rows.count] = rows.adapters
            fields["adapters"][rows.count :] = NO_ADAPTER
        return width_max

    def _fill_decodes(
        self,
        fields: Mapping[str, _Array],
        decodes: Sequence[ScheduledChunk],
        size: StepSize,
        awaited: Mapping[int, int],
    ) -> int:
        indexes = np.array([chunk.start + chunk.count - 1 for chunk in decodes], dtype=np.int64)
        widths = (indexes // self._block_size + 1).tolist()
        blocks = []
        for row, (chunk, width) in enumerate(zip(decodes, widths, strict=True)):
            self._fill_table(size, row, chunk.block_table[:width])
            blocks.append(chunk.block_table[width - 1])
        count = len(decodes)
        fields["positions"][:count] = indexes
        for row, chunk in enumerate(decodes):
            if chunk.request.given:
                fields["positions"][row] = rotary_positions(chunk)[chunk.count - 1]
        fields["contexts"][:count] = indexes + 1
        fields["slots"][:count] = np.array(blocks, dtype=np.int64) * self._block_size + indexes % self._block_size
        fields["known_ids"][:count] = [
            0 if row in awaited else chunk.tokens[chunk.start + chunk.count - 1] for row, chunk in enumerate(decodes)
        ]
        states = [chunk.states[0] for chunk in decodes if chunk.states]
        fields["state_reads"][: len(states)] = [span.writes if span.reads is None else span.reads for span in states]
        fields["state_writes"][: len(states)] = [span.writes for span in states]
        for name in ("state_reads", "state_writes"):
            fields[name][len(states) :] = self._spare_state
        return max(widths, default=0)

    def _fill_prompts(self, fields: Mapping[str, _Array], rows: StaticRows, size: StepSize) -> int:
        row, width_max = len(rows.decodes), 0
        starts: list[int] = []
        tiles: list[tuple[int, int]] = []
        for place, chunk in enumerate(rows.prompts):
            end = chunk.start + chunk.count
            width = (end - 1) // self._block_size + 1
            width_max = max(width_max, width)
            self._fill_table(size, size.decodes + place, chunk.block_table[:width])
            here = slice(row, row + chunk.count)
            indexes = np.arange(chunk.start, end, dtype=np.int64)
            table = np.array(chunk.block_table[:width], dtype=np.int64)
            fields["positions"][here] = rotary_positions(chunk) if chunk.request.given else indexes
            fields["slots"][here] = table[indexes // self._block_size] * self._block_size + indexes % self._block_size
            fields["known_ids"][here] = chunk.tokens[chunk.start : end]
            fields["contexts"][size.decodes + place] = end
            starts.append(row)
            tiles += ((place, first) for first in range(0, chunk.count, size.tile_tokens))
            row += chunk.count
        fields["row_starts"][: len(starts)] = starts
        fields["row_starts"][len(starts) :] = row
        tiles += [(size.chunks, 0)] * (size.tiles - len(tiles))
        fields["tiles"][:] = np.array(tiles, dtype=np.int32).reshape(-1)
        return width_max

    def _fill_table(self, size: StepSize, index: int, table: Sequence[int]) -> None:
        """Write the blocks that differ from the last block table at this index. After a preemption, a request has
        different blocks.
        """
        known = self._tables[index]
        if known == table:
            return
        kept = len(known) if table[: len(known)] == known else 0
        self._block_tables[size][kept : len(table), index] = table[kept:]
        self._tables[index] = list(table)


_TORCH_TYPES: dict[type[np.generic], torch.dtype] = {
    np.int64: torch.int64,
    np.int32: torch.int32,
}
