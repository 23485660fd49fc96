"""Conversion of a step's plan to a message and back. The message contains only data that the computation needs.

Only the tokens that a step reads are sent: the tokens that the step computes, and the tokens that penalties count. The
decoded sequences have their full length, with zeros for tokens that were not sent. So a rank keeps no state of a
request between steps.
"""

from __future__ import annotations

import array
import functools
import operator
from collections.abc import Iterator, Sequence
from typing import Any, cast, overload

import msgspec

from trioserve.contracts.guide import TokenMasks
from trioserve.contracts.ids import BlockIndex, RequestId
from trioserve.contracts.media import GivenRows
from trioserve.contracts.pooling import Pooling
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import CHOOSING_FIELDS, SamplingParams
from trioserve.contracts.step import DraftTask, ScheduledChunk, StateSpan, StepPlan
from trioserve.contracts.weights import AdapterRef

__all__ = ["PartialTokens", "WirePlan", "plan_from_wire", "plan_to_wire"]

SAMPLINGS_KEPT = 4096
_choosing = operator.attrgetter(*CHOOSING_FIELDS)


class WireGiven(msgspec.Struct, frozen=True, array_like=True):
    """The message for GivenRows.

    Attributes:
        grid: see GivenRows. Rows with a grid before the chunk are sent without values, because they determine the
            rotary positions of the chunk.
        sent_first: first position of the chunk with values.
        sent_count: number of positions with values.
        values: embeddings of the sent positions.
    """

    start: int
    count: int
    content: bytes
    grid: tuple[int, int] | None
    sent_first: int
    sent_count: int
    values: bytes
    is_bidirectional: bool


class WireChunk(msgspec.Struct, frozen=True, array_like=True):
    """The message for a ScheduledChunk. Fields that are not listed are copies of fields of the chunk or its request.

    Attributes:
        prompt_count: number of tokens of the prompt.
        sampling: an encoded WireSampling.
        first_token: position of the first token in `tokens`.
        token_count: number of known tokens of the sequence.
        tokens: int32, the known tokens from first_token to token_count.
        followers: int32, prompt tokens from start + 1 to start + count. Empty if no prompt logprobs are requested.
        block_table: int32, the blocks that the step uses.
    """

    request_id: RequestId
    prompt_count: int
    seed: int
    sampling: bytes
    start: int
    count: int
    first_token: int
    token_count: int
    tokens: bytes
    followers: bytes
    block_table: bytes
    samples: bool
    draft: tuple[int, ...] = ()
    awaits_token: bool = False
    mask_row: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    states: tuple[StateSpan, ...] = ()
    draft_task: DraftTask | None = None
    adapter: AdapterRef | None = None
    pooling: Pooling | None = None
    given: tuple[WireGiven, ...] = ()


class WirePlan(msgspec.Struct, frozen=True, array_like=True, tag="plan"):
    """The message for a StepPlan. The message Masks follows when the token masks are filled.

    Attributes:
        mask_rows: rows of the token masks. 0 if the step has no token masks.
        mask_words: 32-bit words per row.
    """

    step_index: int
    token_count: int
    is_ahead: bool
    mask_rows: int
    mask_words: int
    chunks: tuple[WireChunk, ...]


def plan_to_wire(plan: StepPlan, block_size: int) -> WirePlan:
    masks = plan.masks
    return WirePlan(
        plan.step_index,
        plan.token_count,
        plan.is_ahead,
        0 if masks is None else masks.row_count,
        0 if masks is None else masks.words_per_row,
        tuple(_chunk_to_wire(chunk, block_size) for chunk in plan.chunks),
    )


def _chunk_to_wire(chunk: ScheduledChunk, block_size: int) -> WireChunk:
    request, sampling = chunk.request, chunk.request.sampling
    end = chunk.start + chunk.row_count
    first = chunk.start
    if chunk.draft_task is not None:
        first = min(first, chunk.draft_task.start)
    if sampling.repetition_penalty != 1.0:
        first = 0
    elif sampling.presence_penalty != 0 or sampling.frequency_penalty != 0:
        first = min(first, len(request.prompt_token_ids))
    known = chunk.start if chunk.awaits_token else chunk.start + chunk.count
    asks_of_prompt = sampling.prompt_logprobs is not None
    followers = request.prompt_token_ids[chunk.start + 1 : chunk.start + chunk.count + 1] if asks_of_prompt else ()
    return WireChunk(
        request.id,
        len(request.prompt_token_ids),
        request.seed,
        msgspec.msgpack.encode(_choosing(sampling)),
        chunk.start,
        chunk.count,
        first,
        known,
        _packed(chunk.tokens[first:known]),
        _packed(followers),
        _packed(chunk.block_table[: -(-end // block_size)]),
        chunk.samples,
        chunk.draft,
        chunk.awaits_token,
        chunk.mask_row,
        tuple(request.stop_token_ids) if sampling.min_tokens else (),
        chunk.states,
        chunk.draft_task,
        request.adapter,
        request.pooling,
        tuple(_given_to_wire(request.given, chunk.start, end)),
    )


def _given_to_wire(given: Sequence[GivenRows], start: int, end: int) -> Iterator[WireGiven]:
    for rows in given:
        first, last = max(rows.start, start), min(rows.end, end)
        own = b""
        if first < last:
            values = memoryview(rows.values).cast("B")  # type: ignore[arg-type]  # values support the buffer protocol
            row_bytes = len(values) // rows.count
            own = values[(first - rows.start) * row_bytes : (last - rows.start) * row_bytes].tobytes()
        elif rows.grid is None or rows.start >= end:
            continue
        yield WireGiven(
            rows.start, rows.count, rows.content, rows.grid, first, max(last - first, 0), own, rows.is_bidirectional
        )


def _given_from_wire(wire: WireGiven) -> GivenRows:
    """Return the given rows. Values that were not sent are zeros, or are missing if no values were sent."""
    values: bytes | bytearray = wire.values
    if wire.sent_count not in (0, wire.count):
        row_bytes = len(wire.values) // wire.sent_count
        values = bytearray(wire.count * row_bytes)
        begin = (wire.sent_first - wire.start) * row_bytes
        values[begin : begin + len(wire.values)] = wire.values
    return GivenRows(wire.start, wire.count, wire.content, values, wire.grid, wire.is_bidirectional)


def plan_from_wire(wire: WirePlan, masks: TokenMasks | None) -> StepPlan:
    """Return the plan of a message.

    Args:
        wire: the message.
        masks: the step's token masks, which may be filled later. None if the step has no token masks.
    """
    return StepPlan(
        wire.step_index,
        tuple(map(_chunk_from_wire, wire.chunks)),
        wire.token_count,
        is_ahead=wire.is_ahead,
        masks=masks,
    )


def _chunk_from_wire(wire: WireChunk) -> ScheduledChunk:
    prompt = PartialTokens(wire.prompt_count, wire.start + 1, _unpacked(wire.followers))
    request = EngineRequest(
        id=wire.request_id,
        prompt_token_ids=cast(tuple[int, ...], prompt),
        sampling=_sampling(wire.sampling),
        output_tokens_max=0,
        stop_token_ids=frozenset(wire.stop_token_ids),
        seed=wire.seed,
        adapter=wire.adapter,
        pooling=wire.pooling,
        given=tuple(map(_given_from_wire, wire.given)),
    )
    return ScheduledChunk(
        request,
        PartialTokens(wire.token_count, wire.first_token, _unpacked(wire.tokens)),
        wire.start,
        wire.count,
        cast("Sequence[BlockIndex]", _unpacked(wire.block_table)),
        wire.samples,
        wire.draft,
        wire.awaits_token,
        wire.mask_row,
        wire.states,
        wire.draft_task,
    )


@functools.lru_cache(SAMPLINGS_KEPT)
def _sampling(encoded: bytes) -> SamplingParams:
    return SamplingParams(**dict(zip(CHOOSING_FIELDS, msgspec.msgpack.decode(encoded), strict=True)))


def _packed(numbers: Sequence[int]) -> bytes:
    return array.array("i", numbers).tobytes()


def _unpacked(content: bytes) -> array.array[int]:
    numbers = array.array("i")
    numbers.frombytes(content)
    return numbers


class PartialTokens(Sequence[int]):
    """A sequence of tokens in which only a range is known. All other tokens read as 0.

    Args:
        count: length of the sequence.
        first: position of the first known token.
        known: the known tokens.
    """

    __slots__ = ("_count", "_first", "_known")

    def __init__(self, count: int, first: int, known: Sequence[int]) -> None:
        self._count = count
        self._first = first
        self._known = known

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            begin, end, stride = index.indices(self._count)
            first = self._first
            if stride == 1 and begin >= first:
                return self._known[begin - first : max(end - first, 0)].tolist()  # type: ignore[attr-defined]
            return [self[place] for place in range(begin, end, stride)]
        # `range` handles negative indices, and raises IndexError for indices outside of the sequence.
        place = range(self._count)[index] - self._first
        return self._known[place] if 0 <= place < len(self._known) else 0
