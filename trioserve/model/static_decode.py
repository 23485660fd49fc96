"""Decode steps whose tensors have fixed addresses and shapes. A device can therefore replay a recorded step.

A step of n rows is padded to the next larger row count in a list. Padding rows attend to no tokens and write to a block
that no request owns, and their tokens are ignored. One copy sends the step's inputs to the device, and one copy returns
the chosen tokens. The host does not wait between the copies, because no grid, size or allocation depends on the step.
The host also does not wait before the next step, because the chosen tokens are already on the device. Prompts, draft
tokens, logprobs and changed logits need steps with different shapes, which are not computed in this module.

Each number of rows has its own layout of the same buffer. Block tables are last and transposed: the first blocks of all
rows precede the second blocks of all rows. Therefore, a step copies one range of memory, whose length depends on the
step's longest block table.

The device's buffer begins with the ids that the last step chose. These ids are not copied from the host. The ids that
the host knows follow directly, so one index can select a row's token from both lists.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trioserve.contracts.guide import TokenMasks, mask_words
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.step import ScheduledChunk
from trioserve.model.decoder import Decoder
from trioserve.model.kv_storage import KVStorage
from trioserve.model.sampler import draw_words, fetch_samples, keep_ids
from trioserve.model.step_model import ReadSamples, draw_parameters
from trioserve.model.step_rows import MaskedRows, masked_rows
from trioserve.model.step_tensors import AttentionTensors, DecodeTables, StepTensors, TableWalk
from trioserve.model.torch_formats import ALIGNMENT_BYTES
from trioserve_kernels.paged import DecodeWork, split_count

__all__ = [
    "InputTensors",
    "StaticInputs",
    "ROWS_MAX",
    "CudaGraphRecorder",
    "Recorder",
    "Recording",
    "StaticDecode",
    "row_sizes",
]

_Array = npt.NDArray[np.generic]

HOST_BUFFERS = 2  # The host may write the inputs of a step before the device has read the previous step's inputs.
# Number format and numbers per row of each field, in the order of the buffer. The first field must be known_ids.
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
        id_places: int64 [n], for each row, the index of its token in ids.
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
        """Return the offset after block tables of a given width."""
        return self.tables_offset + width * self.rows * np.dtype(np.int32).itemsize


class StaticInputs:
    """Inputs of steps. For each step call fill, then send, then start work that reads `tensors[number of rows]`.

    There are two host buffers. Before step n is filled, the device must have read the inputs of step n - 2.

    Args:
        sizes: possible numbers of rows.
        kept_max: largest number of ids that a step chooses.
        width_max: number of blocks in the longest block table.
        block_size: tokens in one KV block.
        vocab_size: tokens in the vocabulary.
        spare_block: block that padding rows write to.
        device: device of the tensors.

    Attributes:
        kept_ids: int64 [kept_max], on the device: ids that the last step chose. The step's computation writes them.
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
        kept_max += kept_max % 2  # An even number keeps the fields after kept_ids aligned.
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
        """Write the inputs of a step into host memory. Rows after the last chunk are padding.

        Args:
            chunks: decodes of one token.
            rows: number of rows, including padding.
            awaited: row of the chunk's token in the last step, by the chunk's index. Only contains chunks whose token
                the last step chose.
            masked: masks of the rows that have a mask.

        Returns:
            Number of blocks in the longest block table.
        """
        self._side = next(self._sides)
        return self._side.fill(chunks, rows, awaited, masked)

    def send(self, rows: int, width: int) -> None:
        """Start to copy the inputs that `fill` has written, without waiting.

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
    """Buffer in host memory. The class remembers the buffer's content and writes only differences.

    From one step to the next, most requests keep their row and their blocks.
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
        # With pinned memory, a copy to the device runs in the background, and the host can continue.
        self._is_pinned = mask_bits.device.type == "cuda"
        self.buffer = torch.zeros(byte_count, dtype=torch.uint8, pin_memory=self._is_pinned)
        self._mask_shape = mask_bits.shape
        self._masks: Tensor | None = None  # int32. Created for the first step with masks.
        self.mask_count = 0
        self._kept_max = kept_max
        self._block_size = block_size
        self._spare_slot = spare_block * block_size
        self._arrays = {rows: _arrays(layout, self.buffer.numpy(), width_max) for rows, layout in layouts.items()}
        # The following fields describe the buffer's content: number of rows, requests, and each row's block table.
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
            fields["mask_places"][:] = -1  # With the previous layout, these bytes belonged to a different field.
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
        """Write the blocks that differ from the row's last block table. After a preemption, a request has different
        blocks.
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
    """Return views of the host buffer: the fields by name, and the block tables int32 [width_max, rows]."""
    arrays: dict[str, _Array] = {}
    for name, (dtype, columns) in FIELDS.items():
        offset = layout.offsets[name]
        part = host[offset : offset + layout.rows * columns * np.dtype(dtype).itemsize].view(dtype)
        arrays[name] = part.reshape(layout.rows, columns) if columns > 1 else part
    tables = host[layout.tables_offset : layout.end(width_max)].view(np.int32)
    return arrays, tables.reshape(width_max, layout.rows)


# Each recorded size needs memory. A larger step takes so long that launching its kernels one by one does not slow it.
ROWS_MAX = 512


@dataclass(frozen=True, slots=True)
class Recording:
    """A recorded computation.

    Attributes:
        output: tensor that replay overwrites.
        replay: starts the recorded computation again, with the recorded addresses, and does not wait for it.
    """

    output: Tensor
    replay: Callable[[], None]


class Recorder(Protocol):
    """Records device work, so that the device can repeat the work without the host."""

    def __call__(self, compute: Callable[[], Tensor]) -> Recording:
        """Record a computation.

        All recordings of one recorder share memory. The device replays them one after the other, and each output must
        be copied before the next replay.

        Args:
            compute: function to record. The recorder may also run it before recording, so its inputs must be defined.
        """
        ...


def row_sizes(rows_max: int) -> tuple[int, ...]:
    """Return the list of row counts: 1, 2, 4, 8, multiples of 8 up to 128, then multiples of 16. The last row count is
    rows_max.

    Args:
        rows_max: largest row count.
    """
    ladder = (1, 2, 4, *range(8, 129, 8), *range(144, rows_max + 1, 16))
    return (*(size for size in ladder if size < rows_max), rows_max)


class StaticDecode:
    """Decode steps of one model over one KV cache with a spare block.

    Args:
        model: model that computes.
        storage: KV cache.
        rows_max: largest number of rows of a step. Values above ROWS_MAX mean ROWS_MAX.
        kept_max: largest number of tokens that a step of any shape chooses.
        context_tokens_max: longest context in tokens.
        record: recorder of steps. None computes each step operator by operator.

    Attributes:
        sizes: list of row counts, see row_sizes.
    """

    def __init__(
        self,
        model: Decoder,
        storage: KVStorage[Tensor],
        *,
        rows_max: int,
        kept_max: int,
        context_tokens_max: int,
        record: Recorder | None = None,
    ) -> None:
        assert storage.has_spare, "padding rows need a spare block to write to"
        config = model.config
        self._model = model
        self._storage = storage
        self._record = record
        self._recordings: dict[int, Recording] = {}
        # With a sliding window, blocks outside of the window are freed, so a context may be longer than the KV cache.
        if config.window_max is None:
            context_tokens_max = min(context_tokens_max, storage.block_count * storage.block_size)
        self._context_tokens_max = context_tokens_max
        self.sizes = row_sizes(min(rows_max, ROWS_MAX))
        rows_max = self.sizes[-1]
        self._inputs = StaticInputs(
            self.sizes,
            kept_max=kept_max,
            width_max=-(-self._context_tokens_max // storage.block_size),
            block_size=storage.block_size,
            vocab_size=config.vocab_size,
            spare_block=storage.block_count,
            device=model.device,
        )
        windows, heads = config.windows, config.heads
        parts_max = max(split_count(self._context_tokens_max, window) for window in windows)
        work = DecodeWork.make(rows_max, heads.head_count, parts_max, heads.head_dim, model.device)
        self._steps = {rows: self._step(rows, windows, work) for rows in self.sizes}

    @property
    def kept_ids(self) -> Tensor:
        """int64 [kept_max], tokens that the last step chose. Steps that other code computes must also write their
        tokens to this tensor.
        """
        return self._inputs.kept_ids

    def takes(self, chunks: Sequence[ScheduledChunk]) -> bool:
        """Return True if `launch` can compute these chunks: each decodes one token, and there are not too many.

        Chunks with an adapter are not possible, because the number of an adapter's rows would have to be fixed.

        Args:
            chunks: chunks that satisfy is_chosen_alone.
        """
        return len(chunks) <= self.sizes[-1] and all(
            chunk.samples
            and chunk.row_count == 1
            and chunk.start < self._context_tokens_max
            and chunk.request.adapter is None
            and all(rows.end <= chunk.start for rows in chunk.request.given)
            for chunk in chunks
        )

    def record_all(self) -> None:
        """Record a step of every size, if there is a recorder. Call this method before the first request, because it
        takes seconds.

        The recorded steps write only to the spare block.
        """
        if self._record is None:
            return
        # The largest step is recorded first, because its memory is then large enough for all smaller steps.
        for rows in reversed(self.sizes):
            self._inputs.send(rows, self._inputs.fill((), rows, {}))
            self._recordings[rows] = self._record(functools.partial(self._compute, rows))

    def launch(
        self, chunks: Sequence[ScheduledChunk], awaited: Mapping[int, int], masks: TokenMasks | None = None
    ) -> ReadSamples:
        """Start a step that writes the KV of each chunk's token and chooses the next tokens. Do not wait for its end.

        When step n starts, the samples of step n - 2 must have been read. Those of step n - 1 may still be unread.

        Args:
            chunks: at least one chunk that `takes` accepts.
            awaited: row of the chunk's token in the previous step, by the chunk's index. Only contains chunks whose
                token the previous step chose.
            masks: masks of chunks with a mask_row. The function waits for them.
        """
        rows = self.sizes[bisect.bisect_left(self.sizes, len(chunks))]
        masked = masked_rows(chunks, masks, self._model.config.vocab_size)
        self._inputs.send(rows, self._inputs.fill(chunks, rows, awaited, masked))
        recording = self._recordings.get(rows)
        if recording is None:
            chosen = self._compute(rows)
        else:
            recording.replay()
            chosen = recording.output
        return fetch_samples(chosen, len(chunks))

    def _compute(self, rows: int) -> Tensor:
        """Compute a step, and return the chosen tokens as choose_tokens does, int64 [2, rows]."""
        inputs = self._inputs.tensors[rows]
        step = replace(self._steps[rows], token_ids=inputs.ids.index_select(0, inputs.id_places))
        hidden = self._model.forward(step, self._storage)
        assert hidden is not None, "a launched step is never abandoned"
        chosen = self._model.kernels.choose_tokens(
            self._model.logits(hidden), inputs.parameters, inputs.words, (self._inputs.mask_bits, inputs.mask_places)
        )
        keep_ids(self._inputs.kept_ids, chosen)
        return chosen

    def _step(self, rows: int, windows: Sequence[int | None], work: DecodeWork) -> StepTensors:
        inputs = self._inputs.tensors[rows]
        decodes = DecodeTables(inputs.block_tables, inputs.contexts, self._context_tokens_max, work)
        return StepTensors(
            token_ids=inputs.id_places,  # A placeholder, which _compute replaces by the token ids at these indexes.
            positions=inputs.positions,
            slots=inputs.slots,
            cleared_slots=None,
            attention={window: AttentionTensors((), (), TableWalk(window, decodes, None)) for window in windows},
            first_rows=tuple(range(rows)),
        )


class CudaGraphRecorder:
    """Recorder that captures CUDA graphs.

    All graphs share one memory pool for intermediate results, which is little larger than the largest graph's memory.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch has no annotations here
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], Tensor]) -> Recording:
        # Libraries allocate a workspace for each stream, so the warm-up must run on the stream of the capture.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            compute()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # In torch's default mode, a capture fails if another thread of the process makes a call that cannot be
        # captured, such as an allocation. "thread_local" is safe because other threads do not use this stream.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            output = compute()
        return Recording(output, graph.replay)
