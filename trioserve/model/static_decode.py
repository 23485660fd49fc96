"""Decode steps whose tensors have fixed addresses and shapes, so that a device can replay a recording of them.

A step of n rows is computed with the next larger size of a ladder. Rows after n are padding: they attend to nothing,
write into a block that no request owns, and their tokens are ignored. One copy sends the step to the device, and one
copy returns the chosen tokens. Between the copies the host neither waits nor decides, because no grid, size or
allocation depends on the step. It does not wait before the next step either, because the tokens are already on the
device. Prompts, draft tokens, logprobs and changed logits need steps of other shapes.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from trioserve.contracts.step import ScheduledChunk
from trioserve.contracts.token_masks import TokenMasks
from trioserve.model.decoder import Decoder
from trioserve.model.kv_storage import KVStorage
from trioserve.model.mask_rows import masked_rows
from trioserve.model.sampled_ids import fetch_samples, keep_ids
from trioserve.model.samples import ReadSamples
from trioserve.model.static_inputs import StaticInputs
from trioserve.model.step_tensors import AttentionTensors, DecodeTables, StepTensors, TableWalk
from trioserve_kernels.paged import DecodeWork, split_count

__all__ = ["ROWS_MAX", "CudaGraphRecorder", "Recorder", "Recording", "StaticDecode", "row_sizes"]

# Larger steps take so long that launching their kernels one by one costs nothing, and each size takes memory.
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
    """Recorder of device work, so that it can be repeated without the host."""

    def __call__(self, compute: Callable[[], Tensor]) -> Recording:
        """Record a computation.

        All recordings of one recorder share memory. The device replays one after the other, and each output must be
        copied before the next replay.

        Args:
            compute: may be run before it is recorded, so its inputs must be defined.
        """
        ...


def row_sizes(rows_max: int) -> tuple[int, ...]:
    """Return the ladder of row counts: 1, 2, 4, 8, multiples of 8 up to 128, then multiples of 16, and rows_max as the
    last.

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
        rows_max: most rows of a step. Values above ROWS_MAX mean ROWS_MAX.
        kept_max: most tokens that a step of any shape chooses.
        context_tokens_max: longest context in tokens.
        record: recorder of steps. None computes each step operator by operator.

    Attributes:
        sizes: ladder of row counts.
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
        # with a window, blocks are freed early, and a context may be longer than the pool
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
        """int64 [kept_max], tokens that the last step chose. Steps of other shapes must write their tokens here,
        too.
        """
        return self._inputs.kept_ids

    def takes(self, chunks: Sequence[ScheduledChunk]) -> bool:
        """Return True if `launch` can compute these chunks: not too many, and each a decode of one token.

        A chunk with an adapter needs a step of its own shape, because the rows of an adapter have no fixed count.

        Args:
            chunks: chunks that need nothing but a token, see is_chosen_alone.
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
        """Record a step of every size, if there is a recorder. Call it before the first request, because it takes
        seconds.

        Only the spare block is written.
        """
        if self._record is None:
            return
        # Record the largest first: the memory that it needs is large enough for the others.
        for rows in reversed(self.sizes):
            self._inputs.send(rows, self._inputs.fill((), rows, {}))
            self._recordings[rows] = self._record(functools.partial(self._compute, rows))

    def launch(
        self, chunks: Sequence[ScheduledChunk], awaited: Mapping[int, int], masks: TokenMasks | None = None
    ) -> ReadSamples:
        """Start a step: write the KV of every chunk's token, attend, and choose tokens. Return at once.

        The samples of the previous step may still be unread, but those of the step before it must have been read.

        Args:
            chunks: at least one chunk that `takes` accepts.
            awaited: for each chunk whose token the previous step chose, by its index, the token's row in that step.
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
            token_ids=inputs.id_places,  # placeholder: _compute replaces it by the token ids at these places
            positions=inputs.positions,
            slots=inputs.slots,
            cleared_slots=None,
            attention={window: AttentionTensors((), (), TableWalk(window, decodes, None)) for window in windows},
            first_rows=tuple(range(rows)),
        )


class CudaGraphRecorder:
    """Recorder that captures CUDA graphs.

    The graphs share one memory pool for intermediate results. Together they need little more than the largest graph.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch has no annotations here
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], Tensor]) -> Recording:
        # Libraries allocate a workspace per stream, so the warm-up has to run on the stream of the capture.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            compute()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # In torch's default mode a capture fails when any thread of the process makes a call that cannot be captured,
        # such as an allocation. Other threads do not use this stream.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            output = compute()
        return Recording(output, graph.replay)
