"""Decode steps whose tensors have fixed addresses and shapes, so that a device can replay them as recorded.

A step of n rows is computed at the next larger size of a ladder. The rows behind n stand for nobody: they attend to
nothing, write into a block that no request owns, and what is chosen for them is not looked at. One copy tells the
device the step, one brings back what it chose; between the two the host neither waits nor decides, since no grid, no
size and no allocation depends on the step. Nor does it wait before the next step, whose tokens are on the device
already. All else (prompts, drafts, logprobs, changed logits) is for other steps.
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

# Larger steps compute for so long that launching their kernels one by one costs nothing; and each size takes memory.
ROWS_MAX = 512


@dataclass(frozen=True, slots=True)
class Recording:
    """replay computes again what was recorded, from the same addresses into `output`, and does not wait for it."""

    output: Tensor
    replay: Callable[[], None]


class Recorder(Protocol):
    """Records what a function has a device compute, so that it can be repeated without the host."""

    def __call__(self, compute: Callable[[], Tensor]) -> Recording:
        """compute may be run before it is recorded; what it reads must be there, then. Recordings of one recorder share
        memory: the device replays one after the other, and copies one's output before the next."""
        ...


def row_sizes(rows_max: int) -> tuple[int, ...]:
    """The ladder: 1, 2, 4, 8, then multiples of 8 up to 128, of 16 beyond, and rows_max itself as the last."""
    ladder = (1, 2, 4, *range(8, 129, 8), *range(144, rows_max + 1, 16))
    return (*(size for size in ladder if size < rows_max), rows_max)


class StaticDecode:
    """The decode steps of one model over one KV cache, which has a spare block."""

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
        """rows_max: the most rows a step may have; above ROWS_MAX it is that. kept_max: the most tokens that a step of
        any shape chooses. context_tokens_max: the longest context. record: None computes each step anew, operator by
        operator."""
        assert storage.has_spare, "rows that stand for nobody need a block to write to"
        config = model.config
        self._model = model
        self._storage = storage
        self._record = record
        self._recordings: dict[int, Recording] = {}
        if config.window_max is None:  # otherwise blocks come back, and a context may be longer than the pool
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
        """int64 [kept_max]: what the last step chose. Steps of other shapes are to write theirs there, too."""
        return self._inputs.kept_ids

    def takes(self, chunks: Sequence[ScheduledChunk]) -> bool:
        """Whether `launch` can answer for all of these: as many decodes as there is room for. chunks: each asks for
        nothing but a token (is_chosen_alone). One with an adapter is computed in a step of its own shape: which rows
        have which adapter is no fixed size."""
        return len(chunks) <= self.sizes[-1] and all(
            chunk.samples
            and chunk.row_count == 1
            and chunk.start < self._context_tokens_max
            and chunk.request.adapter is None
            and all(rows.end <= chunk.start for rows in chunk.request.given)
            for chunk in chunks
        )

    def record_all(self) -> None:
        """Record a step of every size, if there is a recorder: before the first request, since it takes seconds. No
        block but the spare one is written."""
        if self._record is None:
            return
        # The largest first: what the others need finds room in its memory.
        for rows in reversed(self.sizes):
            self._inputs.send(rows, self._inputs.fill((), rows, {}))
            self._recordings[rows] = self._record(functools.partial(self._compute, rows))

    def launch(
        self, chunks: Sequence[ScheduledChunk], awaited: Mapping[int, int], masks: TokenMasks | None = None
    ) -> ReadSamples:
        """Write the KV of every chunk's token, attend, and choose; returns at once. chunks: at least one, such that it
        takes them. awaited: of those whose token the last step chose, by their place, the row that they had there.
        masks: of those that have a mask_row; waits until they are filled. At most the step before this one has not been
        read."""
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
        """int64 [2, rows], as choose_tokens gives it."""
        inputs = self._inputs.tensors[rows]
        step = replace(self._steps[rows], token_ids=inputs.ids.index_select(0, inputs.id_places))
        hidden = self._model.forward(step, self._storage)
        assert hidden is not None, "nobody may abandon it"
        chosen = self._model.kernels.choose_tokens(
            self._model.logits(hidden), inputs.parameters, inputs.words, (self._inputs.mask_bits, inputs.mask_places)
        )
        keep_ids(self._inputs.kept_ids, chosen)
        return chosen

    def _step(self, rows: int, windows: Sequence[int | None], work: DecodeWork) -> StepTensors:
        inputs = self._inputs.tensors[rows]
        decodes = DecodeTables(inputs.block_tables, inputs.contexts, self._context_tokens_max, work)
        return StepTensors(
            token_ids=inputs.id_places,  # in the place of what they lead to in each step
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
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
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
