"""Inputs of steps of fixed shape: buffers in host memory, their copy on the device, and views of both.

Each number of rows has its own layout in the same bytes. Block tables come last and are transposed: the first blocks of
all rows come before all second blocks. So a step copies one range of memory, whose length depends on the step's widest
table.

The device buffer begins with the ids that the last step chose, which never leave the device. The ids that the host
knows follow directly. So one index finds a row's token in either part.
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

HOST_BUFFERS = 2  # The host may fill in one step while the device has not yet read the previous one.
# Number format and numbers per row of each field, in the order of the buffer. known_ids must be first.
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
    """Inputs on the device for n rows.

    Attributes:
        ids: int64 [n or more], ids that the last step chose, then ids that the host knows.
        id_places: int64 [n], index in ids of each row's token.
        parameters: float64 [n, 4], as choose_tokens accepts them.
        words: int64 [n], as choose_tokens accepts them.
        positions: int64 [n].
        slots: int64 [n].
        contexts: int32 [n], 0 in a padding row.
        mask_places: int32 [n], index of each row's mask, or -1 for a row without a mask.
        block_tables: int32 [n, width_max]. Only the blocks of a row's context are defined.
    """

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
    """Offsets in bytes of the fields of a step."""

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
        """Return the offset after block tables of some width."""
        return self.tables_offset + width * self.rows * np.dtype(np.int32).itemsize


class StaticInputs:
    """Inputs of steps: fill, then send, then start work that reads `tensors` of this number of rows.

    When a step is filled in, the device must have read the inputs of the step before the previous one.

    Args:
        sizes: possible numbers of rows.
        kept_max: most ids that any step chooses.
        width_max: widest block table.
        block_size: tokens in one KV block.
        vocab_size: tokens in the vocabulary.
        spare_block: block that padding rows write to.
        device: device of the tensors.

    Attributes:
        kept_ids: int64 [kept_max], on the device: ids that the last step chose. The computation writes them.
        mask_bits: int32 [rows, words], on the device. Steps with masks send them in a separate copy.
        tensors: InputTensors by number of rows.
    """

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
        layouts = {rows: _Layout(rows) for rows in sizes}
        self._layouts = layouts
        kept_max += kept_max % 2  # so that the fields after kept_ids stay aligned
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
        """Write a step into host memory. Rows after the last chunk are padding.

        Args:
            chunks: decodes of one token.
            rows: number of rows, padding included.
            awaited: for each chunk whose token the last step chose, by its index, the token's row in that step.
            masked: masks of the rows that have one.

        Returns:
            Width of the widest block table.
        """
        self._side = next(self._sides)
        return self._side.fill(chunks, rows, awaited, masked)

    def send(self, rows: int, width: int) -> None:
        """Start to copy what fill has written, without waiting.

        Args:
            rows: number of rows of the step.
            width: result of fill.
        """
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
    """Buffer in host memory, and a record of its content.

    A request usually keeps its row and its blocks from step to step, so only differences are written.
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
        # Pinned memory lets the copy run without waiting for the device, and lets the host continue.
        self._is_pinned = mask_bits.device.type == "cuda"
        self.buffer = torch.zeros(byte_count, dtype=torch.uint8, pin_memory=self._is_pinned)
        self._mask_shape = mask_bits.shape
        self._masks: Tensor | None = None  # int32, made for the first step with masks
        self.mask_count = 0
        self._kept_max = kept_max
        self._block_size = block_size
        self._spare_slot = spare_block * block_size
        self._arrays = {rows: _arrays(layout, self.buffer.numpy(), width_max) for rows, layout in layouts.items()}
        # content of the buffer: number of rows, requests, and each row's block table
        self._filled_rows = 0
        self._requests: list[EngineRequest] = []
        self._seeds = np.empty(0, dtype=np.uint64)
        self._tables: list[list[int]] = []

    def filled_masks(self) -> Tensor:
        """Return the masks of the step, int32 [mask_count, words]."""
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
            fields["mask_places"][:] = -1  # another layout had other bytes here
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
        """Write the fields that depend only on the rows' requests, and the padding rows."""
        count = len(requests)
        self._requests = requests
        self._seeds = np.array([request.seed for request in requests], dtype=np.uint64)
        for name in FIELDS:
            if name != "mask_places":
                fields[name][count:] = self._spare_slot if name == "slots" else 0
        if requests:
            fields["parameters"][:count] = [draw_parameters(request.sampling) for request in requests]

    def _fill_table(self, column: npt.NDArray[np.int32], row: int, table: Sequence[int]) -> None:
        """Write the blocks that differ from the row's last table. A request may also have lost its blocks and got
        others.
        """
        known = self._tables[row]
        if known == table:
            return
        kept = len(known) if table[: len(known)] == known else 0
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
    """Return views of the host buffer: fields by name, and block tables int32 [width_max, rows]."""
    arrays: dict[str, _Array] = {}
    for name, (dtype, columns) in FIELDS.items():
        offset = layout.offsets[name]
        part = host[offset : offset + layout.rows * columns * np.dtype(dtype).itemsize].view(dtype)
        arrays[name] = part.reshape(layout.rows, columns) if columns > 1 else part
    tables = host[layout.tables_offset : layout.end(width_max)].view(np.int32)
    return arrays, tables.reshape(width_max, layout.rows)
