"""Layers of steps whose tensors have fixed addresses and shapes. A device can therefore replay a recorded step.

A step of n rows is padded to the next larger size in a list. Padding rows attend to no tokens and write to a block that
no request owns, and their results are ignored. One copy sends the step's inputs to the device. The host does not wait
afterwards, because no grid, size or allocation depends on the step. The host also does not wait before the next step,
because the chosen tokens are already on the device.

There are sizes for steps of decodes, and sizes for steps with prompt chunks beside decodes. A draft token is a row of
its own: it is a decode whose context ends with this token. Steps with adapters have sizes of their own, so that other
steps do not pay for adapters. A recorded step ends with the hidden states of all rows. The
head and the sampling follow outside of it, so a row may ask for logprobs, penalties or masks without changing the shape
of the layers.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from trioserve.contracts.step import ScheduledChunk
from trioserve.contracts.weights import AdapterId
from trioserve.model.kv_storage import KVStorage, StateStorage
from trioserve.model.torch_step.adapters import AdapterColumns
from trioserve.model.torch_step.decoder import Decoder
from trioserve.model.torch_step.formats import ALIGNMENT_BYTES
from trioserve.model.torch_step.static_inputs import InputTensors, StaticInputs, StaticRows, StepSize
from trioserve.model.torch_step.step_tensors import (
    AttentionKind,
    AttentionTensors,
    ChunkTables,
    DecodeTables,
    StateRows,
    StateSteps,
    StepTensors,
    TableWalk,
    attention_kinds,
)
from trioserve_kernels.paged import chunk_tile_tokens

__all__ = [
    "RECORD_SECONDS_MAX",
    "ROWS_MAX",
    "CudaGraphRecorder",
    "Recorder",
    "Replay",
    "StaticDecode",
    "prompt_row_sizes",
    "row_sizes",
]

logger = logging.getLogger(__name__)

# Each recorded size needs memory. A larger step takes so long that launching its kernels one by one does not slow it.
ROWS_MAX = 512
# Recorded row counts of steps with prompt chunks. At most half of a step is padding. Only a step of the smallest size
# may have more, and it takes no longer than reading the weights. Larger steps are not recorded: they compute for so
# long that launching their kernels takes no extra time.
PROMPT_ROWS = (64, 128, 256, 512, 1_024, 2_048)
PROMPT_CHUNKS_MAX = 16  # Prompt chunks of one step. A step with more chunks is launched kernel by kernel.
# Recording stops after this time, and a step uses the next larger size that is recorded. A size takes 0.1 to 0.3 s.
RECORD_SECONDS_MAX = 60.0


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


def prompt_row_sizes(rows_max: int) -> tuple[int, ...]:
    """Return the row counts of steps with prompt chunks: each of PROMPT_ROWS up to the first that rows_max fits in.

    Args:
        rows_max: largest number of rows of a step. 0: no steps with prompt chunks.
    """
    return tuple(rows for before, rows in zip((0, *PROMPT_ROWS), PROMPT_ROWS, strict=False) if before < rows_max)


def adapter_row_sizes(rows_max: int) -> tuple[int, ...]:
    """Return the row counts of decodes with adapters: powers of 2, and rows_max.

    They are few, because every recorded size needs seconds and memory, and only some steps have adapters.

    Args:
        rows_max: largest row count.
    """
    return (*(1 << power for power in range((rows_max - 1).bit_length())), rows_max)


class StaticDecode:
    """Steps of fixed shape of one model over one KV cache with a spare block.

    Args:
        model: model that computes.
        storage: KV cache.
        states: state slots, of which the last one is a spare slot. None for a model without states. With states, and
            with attention in sections, only steps of decodes have a fixed shape, because the spans of a prompt differ
            in number and length.
        rows_max: largest number of decodes of a step. Values above ROWS_MAX mean ROWS_MAX.
        kept_max: largest number of tokens that a step of any shape chooses.
        context_tokens_max: longest context in tokens.
        prompt_rows_max: largest number of rows of a step with prompt chunks. 0: only steps of decodes.
        adapters: adapters of the steps. None: a step with an adapter has no fixed shape.
        record: recorder of steps. None computes each step operator by operator.
        record_seconds_max: time after which record_all stops. None: record_all does not stop, because ranks must record
            the same steps.

    Attributes:
        sizes: sizes of a step, see row_sizes, prompt_row_sizes and adapter_row_sizes. Sizes with adapters come last,
            and sizes of decodes come before sizes with prompt chunks.
    """

    def __init__(
        self,
        model: Decoder,
        storage: KVStorage[Tensor],
        *,
        rows_max: int,
        kept_max: int,
        context_tokens_max: int,
        states: StateStorage[Tensor] | None = None,
        prompt_rows_max: int = 0,
        adapters: AdapterColumns | None = None,
        record: Recorder | None = None,
        record_seconds_max: float | None = None,
    ) -> None:
        assert storage.has_spare, "padding rows need a spare block to write to"
        config = model.config
        self._model = model
        self._storage = storage
        self._states = states
        self._adapters = adapters
        self._record = record
        self._record_seconds_max = record_seconds_max
        self._replays: dict[StepSize, Replay] = {}
        # With a sliding window, blocks outside of the window are freed, so a context may be longer than the KV cache.
        if config.window_max is None:
            context_tokens_max = min(context_tokens_max, storage.block_count * storage.block_size)
        self._context_tokens_max = context_tokens_max
        kinds = attention_kinds(config)
        decodes_max = min(rows_max, ROWS_MAX)
        tile_tokens = {chunk_tile_tokens(heads.head_count // heads.kv_head_count) for _, heads in kinds} or {1}
        # The inputs of a recorded step have one list of tiles, so all layers must have tiles of one size.
        has_prompts = states is None and not config.sections and len(tile_tokens) == 1
        self.sizes = [StepSize(rows, rows) for rows in row_sizes(decodes_max)]
        # If the tables of chunks began at another place, Triton would compile the kernels once more.
        decode_tables = decodes_max + -decodes_max % (ALIGNMENT_BYTES // 4)
        self.sizes += [
            StepSize(rows, min(rows, decode_tables), PROMPT_CHUNKS_MAX, min(tile_tokens))
            for rows in prompt_row_sizes(prompt_rows_max if has_prompts else 0)
        ]
        if adapters is not None:
            few = adapter_row_sizes(decodes_max)
            self.sizes += [replace(size, has_adapters=True) for size in self.sizes if size.chunks or size.rows in few]
        self._inputs = StaticInputs(
            self.sizes,
            kept_max=kept_max,
            width_max=-(-self._context_tokens_max // storage.block_size),
            block_size=storage.block_size,
            spare_block=storage.block_count,
            spare_state=0 if states is None else states.slot_count - 1,
            device=model.device,
        )
        # A section is part of the context, so it needs no more parts.
        self._work = {
            heads: heads.work(decode_tables, self._context_tokens_max, config.windows, model.device)
            for heads in dict.fromkeys(heads for _, heads in kinds)
        }
        self._steps = {size: self._step(size, kinds) for size in self.sizes}
        hidden_rows = max(size.rows for size in self.sizes)
        self._hidden = torch.empty(hidden_rows, config.hidden_size, dtype=model.dtype, device=model.device)

    @property
    def kept_ids(self) -> Tensor:
        """int64 [kept_max], tokens that the last step chose. The code that samples writes them."""
        return self._inputs.kept_ids

    def record_all(self) -> None:
        """Record a step of every size, if there is a recorder. Call this method before the first request, because it
        takes seconds.

        The recorded steps write only to the spare block.
        """
        if self._record is None:
            return
        begun_at = time.perf_counter()
        seconds = 0.0
        # The largest step is recorded first, because its memory is then large enough for all smaller steps.
        for size in sorted(self.sizes, key=lambda size: size.rows, reverse=True):
            if self._record_seconds_max is not None and seconds > self._record_seconds_max:
                break
            self._inputs.send(size, self._inputs.fill(StaticRows(()), size, {}))
            self._replays[size] = self._record(functools.partial(self._compute, size))
            seconds = time.perf_counter() - begun_at
        left = [size.rows for size in self.sizes if size not in self._replays]
        self.sizes = [size for size in self.sizes if size in self._replays]
        plain = [size for size in self.sizes if not size.has_adapters]
        logger.info(
            "recorded %d steps in %.1f s: decodes of up to %d rows, prompts beside decodes in %s rows, %d of the steps "
            "with adapters%s",
            len(self._replays),
            seconds,
            max((size.rows for size in plain if not size.chunks), default=0),
            ", ".join(str(size.rows) for size in plain if size.chunks) or "no",
            len(self.sizes) - len(plain),
            f"; {len(left)} steps of {max(left)} rows and fewer are left out to bound the time" if left else "",
        )

    def launch(
        self, chunks: Sequence[ScheduledChunk], awaited: Mapping[int, int]
    ) -> tuple[Tensor, Callable[[], Tensor]] | None:
        """Start a step that writes the KV of each row's token. Do not wait for its end.

        When step n starts, the samples of step n - 2 must have been read. Those of step n - 1 may still be unread.

        Args:
            chunks: at least one chunk.
            awaited: row of the chunk's token in the previous step, by the chunk's index. Only contains chunks whose
                token the previous step chose.

        Returns:
            Hidden states of the sampled rows after the last layer, [n, hidden_size], or of any row if none is sampled,
            which the next launch overwrites, and a function that returns the input token of each sampled row, int64
            [n], until kept_ids change. None if no size fits the chunks, if their adapters do not fit together, or if a
            chunk has given embeddings.
        """
        if not all(map(self._takes, chunks)):
            return None
        rows = StaticRows(chunks)
        adapters = dict.fromkeys(chunk.request.adapter.id for chunk in chunks if chunk.request.adapter is not None)
        size = self._size(rows, has_adapters=bool(adapters))
        if size is None:
            return None
        if self._adapters is not None and adapters and not self._adapters.place(adapters):
            return None
        awaited_rows = {rows.first_rows[place]: kept for place, kept in awaited.items()}
        self._inputs.send(size, self._inputs.fill(rows, size, awaited_rows))
        self._replays.get(size, functools.partial(self._compute, size))()
        inputs = self._inputs.tensors[size]
        count = len(rows.sampled)
        if rows.sampled == list(range(count)):
            hidden = self._hidden[: max(count, 1)]
            return hidden, lambda: inputs.ids.index_select(0, inputs.id_places[:count])
        sampled = inputs.sampled[:count]
        hidden = self._hidden.index_select(0, sampled)
        return hidden, lambda: inputs.ids.index_select(0, inputs.id_places.index_select(0, sampled))

    def forget_adapter(self, id: AdapterId) -> None:
        """Free the columns of an adapter that is no longer loaded.

        Args:
            id: number of the adapter.
        """
        if self._adapters is not None:
            self._adapters.forget(id)

    def _takes(self, chunk: ScheduledChunk) -> bool:
        """Return True if a chunk can be part of a step of fixed shape."""
        return (
            chunk.start + chunk.row_count <= self._context_tokens_max
            and len(chunk.states) <= 1
            and not (chunk.states and chunk.draft)
            and all(rows.end <= chunk.start for rows in chunk.request.given)
        )

    def _size(self, rows: StaticRows, *, has_adapters: bool) -> StepSize | None:
        """Return the smallest size that fits the rows. None if there is none."""
        fitting = (
            size
            for size in self.sizes
            if bool(size.chunks) == bool(rows.prompts)
            and size.has_adapters == has_adapters
            and rows.count <= size.rows
            and len(rows.decodes) <= size.decodes
            and len(rows.prompts) <= size.chunks
        )
        return next(fitting, None)

    def _compute(self, size: StepSize) -> Tensor:
        """Compute the layers of a step, and return a view of its hidden states, [rows, hidden_size]."""
        inputs = self._inputs.tensors[size]
        step = replace(self._steps[size], token_ids=inputs.ids.index_select(0, inputs.id_places))
        if self._model.config.sections:
            step = replace(step, sections=self._sections(inputs))
        if size.has_adapters:
            assert self._adapters is not None, "a size with adapters needs their columns"
            step = replace(step, adapters=self._adapters.rows(inputs.adapters))
        hidden = self._model.forward(step, self._storage, states=self._states)
        assert hidden is not None, "a launched step is never abandoned"
        return self._hidden[: size.rows].copy_(hidden)

    def _sections(self, inputs: InputTensors) -> dict[int, AttentionTensors]:
        """Compute the tables of decodes whose attention begins with a section of the context, on the device."""
        (work,) = self._work.values()  # In a model with sections, all layers have equal heads.
        block_size, width_max = self._storage.block_size, inputs.block_tables.shape[1]
        found = {}
        for section in self._model.config.sections:
            context_max = min(section, self._context_tokens_max)
            begins = inputs.positions // section * section
            contexts = (inputs.contexts - begins).clamp_(min=0).to(torch.int32)  # 0 for a table without a sequence
            columns = torch.arange(-(-context_max // block_size), device=self._model.device)
            places = (begins[:, None] // block_size + columns).clamp_(max=width_max - 1)
            tables = inputs.block_tables.gather(1, places)
            walk = TableWalk(None, DecodeTables(tables, contexts, context_max, work), None)
            found[section] = AttentionTensors((), (), walk)
        return found

    def _step(self, size: StepSize, kinds: Sequence[AttentionKind]) -> StepTensors:
        inputs, count = self._inputs.tensors[size], size.decodes
        tables, contexts = inputs.block_tables, inputs.contexts
        decodes = {
            heads: DecodeTables(tables[:count], contexts[:count], self._context_tokens_max, work)
            for heads, work in self._work.items()
        }
        chunks = None
        if size.chunks:
            chunks = ChunkTables(tables[count:], contexts[count:], inputs.row_starts, inputs.tiles)
        states = None
        if self._states is not None:
            rows = StateRows(None, inputs.state_reads, inputs.state_writes, inputs.positions[:, None, None])
            states = StateSteps(rows, ())
        return StepTensors(
            token_ids=inputs.id_places,  # A placeholder, which _compute replaces by the token ids at these indexes.
            positions=inputs.positions,
            slots=inputs.slots,
            cleared_slots=None,
            attention={
                (window, heads): AttentionTensors(
                    (), (), TableWalk(window, decodes[heads], chunks, is_padded=chunks is not None)
                )
                for window, heads in kinds
            },
            first_rows=(),
            states=states,
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
