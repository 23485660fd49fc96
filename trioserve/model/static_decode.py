"""Layers of decode steps whose tensors have fixed addresses and shapes. A device can therefore replay a recorded step.

A step of n rows is padded to the next larger row count in a list. Padding rows attend to no tokens and write to a block
that no request owns, and their results are ignored. One copy sends the step's inputs to the device. The host does not
wait afterwards, because no grid, size or allocation depends on the step. The host also does not wait before the next
step, because the chosen tokens are already on the device. Prompts need steps with different shapes, which are not
computed in this module.

A draft token is a row of its own: it is a decode whose context ends with this token. A recorded step ends with the
hidden states of all rows. The head and the sampling follow outside of it, so a row may ask for logprobs, penalties or
masks without changing the shape of the layers.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trioserve.contracts.step import ScheduledChunk
from trioserve.model.decoder import Decoder
from trioserve.model.kv_storage import KVStorage
from trioserve.model.step_tensors import AttentionTensors, DecodeTables, HeadShape, StepTensors, TableWalk
from trioserve.model.torch_formats import ALIGNMENT_BYTES
from trioserve_kernels.paged import DecodeWork

__all__ = [
    "InputTensors",
    "StaticInputs",
    "ROWS_MAX",
    "CudaGraphRecorder",
    "Recorder",
    "Replay",
    "StaticDecode",
    "row_sizes",
]

_Array = npt.NDArray[np.generic]

HOST_BUFFERS = 2  # The host may write the inputs of a step before the device has read the previous step's inputs.
# Number format of each field, in the order of the buffer. The first field must be known_ids.
FIELDS: dict[str, type[np.generic]] = {
    "known_ids": np.int64,
    "id_places": np.int64,
    "positions": np.int64,
    "slots": np.int64,
    "contexts": np.int32,
}


@dataclass(frozen=True, slots=True)
class InputTensors:
    """Inputs on the device for n rows.

    Attributes:
        ids: int64 [n or more], ids that the last step chose, then ids that the host knows.
        id_places: int64 [n], for each row, the index of its token in ids.
        positions: int64 [n].
        slots: int64 [n].
        contexts: int32 [n], 0 in a padding row.
        block_tables: int32 [n, width_max]. Only the blocks of a row's context are defined.
    """

    ids: Tensor
    id_places: Tensor
    positions: Tensor
    slots: Tensor
    contexts: Tensor
    block_tables: Tensor


class _Layout:
    """Offsets in bytes of the fields of a step."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.offsets: dict[str, int] = {}
        end = 0
        for name, dtype in FIELDS.items():
            self.offsets[name] = end
            end += rows * np.dtype(dtype).itemsize
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
        spare_block: block that padding rows write to.
        device: device of the tensors.

    Attributes:
        kept_ids: int64 [kept_max], on the device: ids that the last step chose. The step's computation writes them.
        tensors: InputTensors by number of rows.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        kept_max: int,
        width_max: int,
        block_size: int,
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
        self.tensors = {rows: self._tensors(layout, width_max) for rows, layout in layouts.items()}
        self._sides = itertools.cycle(
            [
                _HostSide(layouts, byte_count, width_max, kept_max, block_size, spare_block, device)
                for _ in range(HOST_BUFFERS)
            ]
        )
        self._side = next(self._sides)

    def fill(self, chunks: Sequence[ScheduledChunk], rows: int, awaited: Mapping[int, int]) -> int:
        """Write the inputs of a step into host memory. Rows after the last chunk are padding.

        Args:
            chunks: decodes, one for each row. A row computes the last token of its chunk.
            rows: number of rows, including padding.
            awaited: row of the chunk's token in the last step, by the chunk's index. Only contains chunks whose token
                the last step chose.

        Returns:
            Number of blocks in the longest block table.
        """
        self._side = next(self._sides)
        return self._side.fill(chunks, rows, awaited)

    def send(self, rows: int, width: int) -> None:
        """Start to copy the inputs that `fill` has written, without waiting.

        Args:
            rows: number of rows of the step.
            width: result of fill.
        """
        end = self._layouts[rows].end(width)
        self._device[self._sent_from : self._sent_from + end].copy_(self._side.buffer[:end], non_blocking=True)

    def _tensors(self, layout: _Layout, width_max: int) -> InputTensors:
        rows = layout.rows
        sent = self._device[self._sent_from :]
        fields = {
            name: sent[offset : offset + rows * np.dtype(dtype).itemsize].view(_TORCH_TYPES[dtype])
            for (name, dtype), offset in zip(FIELDS.items(), layout.offsets.values(), strict=True)
        }
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
        device: torch.device,
    ) -> None:
        # With pinned memory, a copy to the device runs in the background, and the host can continue.
        self.buffer = torch.zeros(byte_count, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._kept_max = kept_max
        self._block_size = block_size
        self._spare_slot = spare_block * block_size
        self._arrays = {rows: _arrays(layout, self.buffer.numpy(), width_max) for rows, layout in layouts.items()}
        # The following fields describe the buffer's content: number of rows, and each row's block table.
        self._filled_rows = 0
        self._tables: list[list[int]] = []

    def fill(self, chunks: Sequence[ScheduledChunk], rows: int, awaited: Mapping[int, int]) -> int:
        fields, tables = self._arrays[rows]
        if rows != self._filled_rows:
            self._filled_rows, self._tables = rows, [[] for _ in range(rows)]
        blocks: list[int] = []
        width_max = 0
        for row, chunk in enumerate(chunks):
            width = (chunk.start + chunk.count - 1) // self._block_size + 1
            self._fill_table(tables[:, row], row, chunk.block_table[:width])
            blocks.append(chunk.block_table[width - 1])
            width_max = max(width_max, width)
        count = len(chunks)
        positions = np.array([chunk.start + chunk.count - 1 for chunk in chunks], dtype=np.int64)
        fields["positions"][:count] = positions
        fields["contexts"][:count] = positions + 1
        fields["slots"][:count] = np.array(blocks, dtype=np.int64) * self._block_size + positions % self._block_size
        fields["known_ids"][:count] = [
            0 if place in awaited else chunk.tokens[chunk.start + chunk.count - 1] for place, chunk in enumerate(chunks)
        ]
        fields["id_places"][:] = np.arange(self._kept_max, self._kept_max + rows)
        for place, row in awaited.items():
            fields["id_places"][place] = row
        for name in ("known_ids", "positions", "contexts"):
            fields[name][count:] = 0
        fields["slots"][count:] = self._spare_slot
        return width_max

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
    np.int64: torch.int64,
    np.int32: torch.int32,
}


def _arrays(
    layout: _Layout, host: npt.NDArray[np.uint8], width_max: int
) -> tuple[dict[str, _Array], npt.NDArray[np.int32]]:
    """Return views of the host buffer: the fields by name, and the block tables int32 [width_max, rows]."""
    arrays: dict[str, _Array] = {}
    for name, dtype in FIELDS.items():
        offset = layout.offsets[name]
        arrays[name] = host[offset : offset + layout.rows * np.dtype(dtype).itemsize].view(dtype)
    tables = host[layout.tables_offset : layout.end(width_max)].view(np.int32)
    return arrays, tables.reshape(width_max, layout.rows)


# Each recorded size needs memory. A larger step takes so long that launching its kernels one by one does not slow it.
ROWS_MAX = 512


Replay = Callable[[], None]
"""Starts a recorded computation again, with the recorded addresses, and does not wait for it."""


class Recorder(Protocol):
    """Records device work, so that the device can repeat the work without the host."""

    def __call__(self, compute: Callable[[], object]) -> Replay:
        """Record a computation.

        All recordings of one recorder share memory for intermediate results, and the device replays them one after the
        other.

        Args:
            compute: function to record. The recorder may also run it before recording, so its inputs must be defined.
                Its results must lie in tensors that exist before.
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
        self._replays: dict[int, Replay] = {}
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
            spare_block=storage.block_count,
            device=model.device,
        )
        windows, heads = config.windows, HeadShape.of(config.kv_attention)
        work = heads.work(rows_max, self._context_tokens_max, windows, model.device)
        self._steps = {rows: self._step(rows, windows, work) for rows in self.sizes}
        self._hidden = torch.empty(rows_max, config.hidden_size, dtype=model.dtype, device=model.device)

    @property
    def kept_ids(self) -> Tensor:
        """int64 [kept_max], tokens that the last step chose. The code that samples writes them."""
        return self._inputs.kept_ids

    def takes(self, chunks: Sequence[ScheduledChunk]) -> bool:
        """Return True if `launch` can compute these chunks: each is a decode, and there are not too many rows.

        Chunks with an adapter are not possible, because the number of an adapter's rows would have to be fixed.

        Args:
            chunks: chunks of a step.
        """
        return sum(chunk.row_count for chunk in chunks) <= self.sizes[-1] and all(
            chunk.samples
            and chunk.count == 1
            and chunk.start + chunk.row_count <= self._context_tokens_max
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
            self._replays[rows] = self._record(functools.partial(self._compute, rows))

    def launch(
        self, chunks: Sequence[ScheduledChunk], awaited: Mapping[int, int]
    ) -> tuple[Tensor, Callable[[], Tensor]]:
        """Start a step that writes the KV of each row's token. Do not wait for its end.

        When step n starts, the samples of step n - 2 must have been read. Those of step n - 1 may still be unread.

        Args:
            chunks: sampled_rows of at least one chunk that `takes` accepts.
            awaited: row of a row's token in the previous step, by the row. Only contains rows whose token the previous
                step chose.

        Returns:
            Hidden states after the last layer, [len(chunks), hidden_size], which the next launch overwrites, and a
            function that returns the input token of each row, int64 [len(chunks)], until kept_ids change.
        """
        rows = self.sizes[bisect.bisect_left(self.sizes, len(chunks))]
        self._inputs.send(rows, self._inputs.fill(chunks, rows, awaited))
        self._replays.get(rows, functools.partial(self._compute, rows))()
        inputs = self._inputs.tensors[rows]
        return self._hidden[: len(chunks)], lambda: inputs.ids.index_select(0, inputs.id_places[: len(chunks)])

    def _compute(self, rows: int) -> Tensor:
        """Compute the layers of a step, and return a view of its hidden states, [rows, hidden_size]."""
        inputs = self._inputs.tensors[rows]
        step = replace(self._steps[rows], token_ids=inputs.ids.index_select(0, inputs.id_places))
        hidden = self._model.forward(step, self._storage)
        assert hidden is not None, "a launched step is never abandoned"
        return self._hidden[:rows].copy_(hidden)

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

    def __call__(self, compute: Callable[[], object]) -> Replay:
        # Libraries allocate a workspace for each stream, so the warm-up must run on the stream of the capture.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            compute()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # In torch's default mode, a capture fails if another thread of the process makes a call that cannot be
        # captured, such as an allocation. "thread_local" is safe because other threads do not use this stream.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            compute()
        replay: Replay = graph.replay
        return replay
