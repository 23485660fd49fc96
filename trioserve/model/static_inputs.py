"""What a step of fixed shape is told: buffers in the host's memory, their twin on the device, views of both.

Each number of rows has a layout of its own in the same bytes. Block tables come last and are turned, all first blocks
before all second ones: so a step copies one piece of memory, as long as its widest table asks for.

The device's buffer begins with the ids that the last step chose, which never leave it. Right behind them come those
that the host knows, so that a row's token is found by one number, whoever has it.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trioserve.contracts.request import EngineRequest
from trioserve.contracts.step import ScheduledChunk
from trioserve.contracts.token_masks import mask_words
from trioserve.model.gumbel import draw_words
from trioserve.model.host_to_device import ALIGNMENT_BYTES
from trioserve.model.mask_rows import MaskedRows
from trioserve.model.samples import draw_parameters

__all__ = ["InputTensors", "StaticInputs"]

_Array = npt.NDArray[np.generic]

HOST_BUFFERS = 2  # one step may be filled in while the device has not yet read the one before
# Numbers of a row in each field, in the order of the buffer; known_ids are the first.
FIELDS: dict[str, tuple[type[np.generic], int]] = {
    "known_ids": (np.int64, 1),
    "id_places": (np.int64, 1),
    "parameters": (np.float64, 4),
    "words": (np.int64, 1),
    "positions": (np.int64, 1),
    "slots": (np.int64, 1),
    "contexts": (np.int32, 1),
    "mask_places": (np.int32, 1),
}


@dataclass(frozen=True, slots=True)
class InputTensors:
    """On the device, for n rows: ids int64 [n or more], what the last step chose and what is known; id_places int64
    [n], where among them a row's token stands; parameters float64 [n, 4] and words int64 [n] as choose_tokens takes
    them; positions, slots int64 [n]; contexts int32 [n], 0 in a row that stands for nobody; mask_places int32 [n],
    each row's row of the mask bits, below 0 where it has none; block_tables int32
    [n, width_max], of which only what a row's context needs means anything."""

    ids: Tensor
    id_places: Tensor
    parameters: Tensor
    words: Tensor
    positions: Tensor
    slots: Tensor
    contexts: Tensor
    mask_places: Tensor
    block_tables: Tensor


class _Layout:
    """Where the fields of a step of `rows` rows lie, in bytes."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.offsets: dict[str, int] = {}
        end = 0
        for name, (dtype, columns) in FIELDS.items():
            self.offsets[name] = end
            end += rows * columns * np.dtype(dtype).itemsize
            end += -end % ALIGNMENT_BYTES
        self.tables_offset = end

    def end(self, width: int) -> int:
        """Where block tables of this width end."""
        return self.tables_offset + width * self.rows * np.dtype(np.int32).itemsize


class StaticInputs:
    """fill, then send, then compute what reads `tensors` of as many rows. When a step is filled in, the device has read
    what was sent for the one before the last.

    kept_ids: int64 [kept_max], on the device: what the last step chose, for whoever computes to write. mask_bits: int32
    [rows, words of a mask], on the device; sent in a copy of their own, and only by steps that have masks."""

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        kept_max: int,
        width_max: int,
        block_size: int,
        vocab_size: int,
        spare_block: int,
        device: torch.device,
    ) -> None:
        """sizes: the numbers of rows that steps have. kept_max: the most ids that any step chooses. spare_block: where
        rows that stand for nobody write."""
        layouts = {rows: _Layout(rows) for rows in sizes}
        self._layouts = layouts
        kept_max += kept_max % 2  # the fields behind them stay aligned
        self._sent_from = kept_max * np.dtype(np.int64).itemsize
        byte_count = max(layout.end(width_max) for layout in layouts.values())
        self._device = torch.zeros(self._sent_from + byte_count, dtype=torch.uint8, device=device)
        self.kept_ids = self._device[: self._sent_from].view(torch.int64)
        self.mask_bits = torch.zeros(max(sizes), mask_words(vocab_size), dtype=torch.int32, device=device)
        self.tensors = {rows: self._tensors(layout, width_max) for rows, layout in layouts.items()}
        self._sides = itertools.cycle(
            [
                _HostSide(layouts, byte_count, width_max, kept_max, block_size, spare_block, self.mask_bits)
                for _ in range(HOST_BUFFERS)
            ]
        )
        self._side = next(self._sides)

    def fill(
        self,
        chunks: Sequence[ScheduledChunk],
        rows: int,
        awaited: Mapping[int, int],
        masked: MaskedRows | None = None,
    ) -> int:
        """Write the step into the host's memory; the rows behind the last chunk stand for nobody. awaited: of chunks
        whose token the last step chose, by their place, the row that it had there. masked: of those that have a mask.
        Returns the width of the widest block table."""
        self._side = next(self._sides)
        return self._side.fill(chunks, rows, awaited, masked)

    def send(self, rows: int, width: int) -> None:
        """Copy what fill has written. Does not wait for the copy."""
        end = self._layouts[rows].end(width)
        self._device[self._sent_from : self._sent_from + end].copy_(self._side.buffer[:end], non_blocking=True)
        if self._side.mask_count:
            self.mask_bits[: self._side.mask_count].copy_(self._side.filled_masks(), non_blocking=True)

    def _tensors(self, layout: _Layout, width_max: int) -> InputTensors:
        rows = layout.rows
        sent = self._device[self._sent_from :]
        fields = {
            name: sent[offset : offset + rows * columns * np.dtype(dtype).itemsize].view(_TORCH_TYPES[dtype])
            for (name, (dtype, columns)), offset in zip(FIELDS.items(), layout.offsets.values(), strict=True)
        }
        fields["parameters"] = fields["parameters"].view(rows, -1)
        known_ids = fields.pop("known_ids")
        ids = self._device[: self._sent_from + known_ids.nbytes].view(torch.int64)
        tables = sent[layout.tables_offset : layout.end(width_max)].view(torch.int32)
        return InputTensors(ids, **fields, block_tables=tables.view(width_max, rows).t())


class _HostSide:
    """A buffer in the host's memory, and what stands in it.

    A request keeps its place and its blocks from step to step as a rule, so only what differs is written.
    """

    def __init__(
        self,
        layouts: Mapping[int, _Layout],
        byte_count: int,
        width_max: int,
        kept_max: int,
        block_size: int,
        spare_block: int,
        mask_bits: Tensor,
    ) -> None:
        # Pinned, so that the copy neither waits for the device nor is waited for.
        self._is_pinned = mask_bits.device.type == "cuda"
        self.buffer = torch.zeros(byte_count, dtype=torch.uint8, pin_memory=self._is_pinned)
        self._mask_shape = mask_bits.shape
        self._masks: Tensor | None = None  # int32, made for the first step that has some
        self.mask_count = 0
        self._kept_max = kept_max
        self._block_size = block_size
        self._spare_slot = spare_block * block_size
        self._arrays = {rows: _arrays(layout, self.buffer.numpy(), width_max) for rows, layout in layouts.items()}
        # For how many rows, of which requests, and each row's block table.
        self._filled_rows = 0
        self._requests: list[EngineRequest] = []
        self._seeds = np.empty(0, dtype=np.uint64)
        self._tables: list[list[int]] = []

    def filled_masks(self) -> Tensor:
        """int32 [mask_count, words]."""
        assert self._masks is not None, "a step without masks"
        return self._masks[: self.mask_count]

    def _fill_masks(self, places: _Array, masked: MaskedRows | None) -> None:
        if masked is None:
            if self.mask_count:
                self.mask_count = 0
                places[:] = -1
            return
        if self._masks is None:
            self._masks = torch.zeros(self._mask_shape, dtype=torch.int32, pin_memory=self._is_pinned)
        self.mask_count = len(masked.rows)
        self._masks[: self.mask_count].numpy()[:] = masked.bits.view(np.int32)
        places[:] = -1
        places[: len(masked.places)] = masked.places

    def fill(
        self,
        chunks: Sequence[ScheduledChunk],
        rows: int,
        awaited: Mapping[int, int],
        masked: MaskedRows | None = None,
    ) -> int:
        fields, tables = self._arrays[rows]
        requests = [chunk.request for chunk in chunks]
        if rows != self._filled_rows:
            self._filled_rows, self._tables = rows, [[] for _ in range(rows)]
            self._fill_requests(fields, requests)
            fields["mask_places"][:] = -1  # another layout: what lies here is something else
        elif len(requests) != len(self._requests) or not all(map(operator.is_, requests, self._requests)):
            self._fill_requests(fields, requests)
        self._fill_masks(fields["mask_places"], masked)
        blocks: list[int] = []
        width_max = 0
        for row, chunk in enumerate(chunks):
            width = chunk.start // self._block_size + 1
            self._fill_table(tables[:, row], row, chunk.block_table[:width])
            blocks.append(chunk.block_table[width - 1])
            width_max = max(width_max, width)
        count = len(chunks)
        positions = np.array([chunk.start for chunk in chunks], dtype=np.int64)
        fields["positions"][:count] = positions
        fields["contexts"][:count] = positions + 1
        fields["slots"][:count] = np.array(blocks, dtype=np.int64) * self._block_size + positions % self._block_size
        fields["known_ids"][:count] = [
            0 if place in awaited else chunk.tokens[chunk.start] for place, chunk in enumerate(chunks)
        ]
        fields["id_places"][:] = np.arange(self._kept_max, self._kept_max + rows)
        for place, row in awaited.items():
            fields["id_places"][place] = row
        fields["words"][:count] = draw_words(self._seeds, positions + 1)
        return width_max

    def _fill_requests(self, fields: Mapping[str, _Array], requests: list[EngineRequest]) -> None:
        """What of the rows stays the same as long as they have the same requests; the padding among it."""
        count = len(requests)
        self._requests = requests
        self._seeds = np.array([request.seed for request in requests], dtype=np.uint64)
        for name in FIELDS:
            if name != "mask_places":
                fields[name][count:] = self._spare_slot if name == "slots" else 0
        if requests:
            fields["parameters"][:count] = [draw_parameters(request.sampling) for request in requests]

    def _fill_table(self, column: npt.NDArray[np.int32], row: int, table: Sequence[int]) -> None:
        """Not even the same request has to have the same blocks: it may have lost them and got others."""
        there = self._tables[row]
        if there == table:
            return
        kept = len(there) if table[: len(there)] == there else 0
        column[kept : len(table)] = table[kept:]
        self._tables[row] = list(table)


_TORCH_TYPES: dict[type[np.generic], torch.dtype] = {
    np.float64: torch.float64,
    np.int64: torch.int64,
    np.int32: torch.int32,
}


def _arrays(
    layout: _Layout, host: npt.NDArray[np.uint8], width_max: int
) -> tuple[dict[str, _Array], npt.NDArray[np.int32]]:
    """The host's views: the fields, and the block tables, int32 [width_max, rows]."""
    arrays: dict[str, _Array] = {}
    for name, (dtype, columns) in FIELDS.items():
        offset = layout.offsets[name]
        part = host[offset : offset + layout.rows * columns * np.dtype(dtype).itemsize].view(dtype)
        arrays[name] = part.reshape(layout.rows, columns) if columns > 1 else part
    tables = host[layout.tables_offset : layout.end(width_max)].view(np.int32)
    return arrays, tables.reshape(width_max, layout.rows)
