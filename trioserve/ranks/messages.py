"""The messages between a server and its ranks, and their framing on a byte stream.

The server sends every order to all ranks. Each rank answers its orders one after the other. A frame is a length of four
bytes, little-endian, then the message.

The message of a step's plan, `WirePlan`, contains only data that the computation needs. Only the tokens that a step
reads are sent: the tokens that the step computes, and the tokens that penalties count. The decoded sequences have their
full length, with zeros for tokens that were not sent. So a rank keeps no state of a request between steps.
"""

from __future__ import annotations

import array
import functools
import logging
import operator
import struct
from collections.abc import Iterator, Sequence
from typing import Any, Literal, cast, overload

import msgspec

from trioserve.contracts.guide import TokenMasks
from trioserve.contracts.ids import BlockIndex, RequestId
from trioserve.contracts.kv_transfer import KVLayout
from trioserve.contracts.media import GivenRows
from trioserve.contracts.pooling import Pooling
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import CHOOSING_FIELDS, SamplingParams
from trioserve.contracts.step import DraftTask, ScheduledChunk, StateSpan, StepPlan, StepResult
from trioserve.contracts.weights import AdapterId, AdapterRef, BroadcastWeights, SharedWeights
from trioserve.model.number_formats import Dtype
from trioserve.model.settings import ModelSettings

__all__ = [
    "FRAME_BYTES_MAX",
    "Abandon",
    "AddAdapter",
    "Allocate",
    "Answer",
    "CheckWeights",
    "Claim",
    "ConfirmWeights",
    "DraftSetup",
    "Fault",
    "FrameReader",
    "Loaded",
    "Log",
    "Masks",
    "Order",
    "PartialTokens",
    "Ping",
    "Pong",
    "Progress",
    "PutWeights",
    "RankPlace",
    "RankSetup",
    "Refusal",
    "RemoveAdapter",
    "Report",
    "Run",
    "WarmUp",
    "WireMatrix",
    "WirePlan",
    "WriteWeights",
    "decode_order",
    "decode_report",
    "encode",
    "framed",
    "plan_from_wire",
    "plan_to_wire",
]


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


# --- messages from the server to a rank ---


class DraftSetup(msgspec.Struct, frozen=True, kw_only=True):
    """A draft model (see drafts.checkpoints.DraftSource).

    Attributes:
        name: the method of speculative decoding.
        path: the directory of the draft model. None if the further layer of the model itself proposes tokens.
        settings: how the draft model computes.
        token_count: draft tokens per step.
    """

    name: str
    path: str | None
    settings: ModelSettings
    token_count: int


class RankPlace(msgspec.Struct, frozen=True, kw_only=True):
    """The resources of a rank on its machine. The process that starts the rank passes them on the command line.

    Attributes:
        local_rank: number among the ranks of this machine, and index of the rank's GPU.
        path: the model's directory on this machine. None uses the path in RankSetup.
        memory: file descriptor of the memory that all ranks of the stage share. None if the ranks use
            torch.distributed.
        before: file descriptor of the socket to the previous stage. None if there is no previous stage, or if it is on
            another machine.
        behind: file descriptor of the socket to the next stage. None if there is no next stage, or if it is on another
            machine.
        kv_memory: file descriptor of the KV cache's memory, which the server also reads. None for private memory.
        cpus: CPUs that the rank may use. Empty if the rank may use all CPUs of its parent process.
    """

    local_rank: int
    path: str | None = None
    memory: int | None = None
    before: int | None = None
    behind: int | None = None
    kv_memory: int | None = None
    cpus: tuple[int, ...] = ()


class RankSetup(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first message of the server to a rank. It describes the model, and the shards that the rank loads.

    Attributes:
        rank: number of the rank, from 0. The first ranks belong to the first stage.
        size: number of all ranks.
        path: the model's directory, unless RankPlace has one.
        settings: how the rank computes, including the threads and the memory that the rank may use.
        context_tokens: see open_checkpoint.
        uses_further_layers: see open_checkpoint.
        expert_parallel: True if each rank has whole experts instead of a shard of each expert.
        stage_count: number of stages, which compute one after the other.
        meeting_host: address where torch.distributed connects ranks that share no memory.
        meeting_port: port at meeting_host.
        draft: the draft model, for rank 0 only.
        log_level: level of the logging module.
    """

    rank: int
    size: int
    path: str
    settings: ModelSettings
    context_tokens: int | None
    uses_further_layers: bool
    expert_parallel: bool
    stage_count: int = 1
    meeting_host: str = "127.0.0.1"
    meeting_port: int = 0
    draft: DraftSetup | None = None
    log_level: int = logging.INFO

    @property
    def stage_size(self) -> int:
        """Number of ranks that divide the weights of one stage."""
        return self.size // self.stage_count

    @property
    def stage(self) -> int:
        return self.rank // self.stage_size

    @property
    def rank_in_stage(self) -> int:
        return self.rank % self.stage_size


class Allocate(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Order to allocate the KV cache. Each count is the smallest count that any rank reported.

    Attributes:
        serial: number of the order.
        block_count: blocks of the KV cache.
        state_slot_count: number of states of running sequences. 0 if the model has no states.
        snapshot_slot_count: number of saved states.
        behind: for each rank, host and port of its peer in the next stage. None if there is no next stage, or if it is
            on the same machine.
        stage_key: secret that both peers must know (see stage_meeting).
    """

    serial: int
    block_count: int
    state_slot_count: int
    snapshot_slot_count: int
    behind: tuple[tuple[str, int] | None, ...] = ()
    stage_key: bytes = b""


class WarmUp(msgspec.Struct, frozen=True, tag=True):
    serial: int


class Claim(msgspec.Struct, frozen=True, tag=True):
    """Order to claim a part of the memory (see ModelRunner.claim_memory)."""

    serial: int


class WireMatrix(msgspec.Struct, frozen=True, array_like=True):
    """The bytes and shapes of both matrices of an AdapterMatrix."""

    name: str
    a: bytes
    a_shape: tuple[int, int]
    b: bytes
    b_shape: tuple[int, int]


class AddAdapter(msgspec.Struct, frozen=True, tag=True):
    """Order to load an adapter. The order contains the whole adapter, and each rank keeps its own shard."""

    serial: int
    id: AdapterId
    digest: str
    dtype: Dtype
    matrices: tuple[WireMatrix, ...]


class RemoveAdapter(msgspec.Struct, frozen=True, tag=True):
    serial: int
    id: AdapterId


class CheckWeights(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Order to check new weights while steps continue, and to remember them. The model does not change yet.

    Exactly one of path, shared and sent is set.

    Attributes:
        serial: number of the order.
        offer: number that identifies these weights in later orders, until the next check.
        path: directory of a checkpoint.
        shared: weights in shared memory.
        sent: names and shapes of weights that follow in PutWeights.
        is_named: True if the answer must contain the name of the weights (see weights_name).
    """

    serial: int
    offer: int
    path: str | None = None
    shared: SharedWeights | None = None
    sent: BroadcastWeights | None = None
    is_named: bool = False


class ConfirmWeights(msgspec.Struct, frozen=True, tag=True):
    """Order to check again that the weights have not changed. WriteWeights follows if all ranks confirm this."""

    serial: int
    offer: int


class WriteWeights(msgspec.Struct, frozen=True, tag=True):
    """Order to replace the model's weights by the checked weights."""

    serial: int
    offer: int


class PutWeights(msgspec.Struct, frozen=True, tag=True):
    """Order with the next bytes of a tensor from a trainer. After the last bytes, each rank stores its shard.

    Attributes:
        serial: number of the order.
        offer: number of the weights in CheckWeights.
        name: name of the tensor.
        part: the next bytes of the tensor.
        is_last: True if these bytes complete the tensor.
    """

    serial: int
    offer: int
    name: str
    part: bytes
    is_last: bool


class Run(msgspec.Struct, frozen=True, tag=True):
    """Order to compute a step."""

    serial: int
    plan: WirePlan


class Masks(msgspec.Struct, frozen=True, tag=True):
    """The token masks of a step, sent after its plan.

    Attributes:
        serial: number of the Run.
        bits: uint32 [mask_rows, mask_words].
    """

    serial: int
    bits: bytes


class Abandon(msgspec.Struct, frozen=True, tag=True):
    """Order to stop computing the step with this serial, because its result is not needed."""

    serial: int


class Ping(msgspec.Struct, frozen=True, tag=True):
    serial: int


Order = (
    RankSetup
    | Allocate
    | WarmUp
    | Claim
    | AddAdapter
    | RemoveAdapter
    | CheckWeights
    | ConfirmWeights
    | WriteWeights
    | PutWeights
    | Run
    | Masks
    | Abandon
    | Ping
)


# --- messages from a rank to the server ---


class Progress(msgspec.Struct, frozen=True, tag=True):
    """Report of the progress of loading (see LoadProgress).

    Attributes:
        what: description of the current work. Empty while weights are read.
        done: bytes read so far, or seconds spent so far if `total` is None.
        total: bytes of all weights. None if the size of the work is not known.
    """

    what: str
    done: float
    total: int | None


class Loaded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Report that the rank has read its weights. Fields that are not listed have the same meaning as in ModelRunner.

    Attributes:
        block_count: blocks that fit into this rank's memory.
        state_slot_count: states that fit into this rank's memory.
        snapshot_slot_count: saved states that fit into this rank's memory.
        block_bytes: bytes of a block in this rank.
        layout: layout of this rank's shard of the KV cache, without the model's name. None if the rank's layers have
            no KV.
        kv_heads: index of the first KV head of this rank, and its number of KV heads.
        stage_port: port where the rank listens for its peer of the previous stage. None if the peer is on the same
            machine.
    """

    device: Literal["cpu", "cuda"]
    dtype: Dtype
    kv_dtype: str
    computed_by: str
    arithmetic: str
    is_batch_invariant: bool
    launches: bool
    max_num_seqs: int
    step_tokens_max: int
    block_count: int
    state_slot_count: int
    snapshot_slot_count: int
    block_bytes: int
    step_weight_bytes: int
    token_flops: int
    attended_token_flops: int
    layout: KVLayout | None = None
    kv_heads: tuple[int, int] = (0, 0)
    stage_port: int | None = None


class Refusal(msgspec.Struct, frozen=True):
    """Report that the rank refuses an order and has changed nothing. Contains the message of an InvalidRequest."""

    message: str
    param: str | None


class Answer(msgspec.Struct, frozen=True, tag=True):
    """Report that the rank has finished the order with this serial.

    Attributes:
        serial: number of the order.
        value: the result of an order that is not a step: a name, an error text, a flag or a refusal.
        result: the result of a step. Only the first rank of the last stage sends it. None if the step was abandoned.
        digest: checksum of the chosen tokens. All ranks of the last stage send it, and all values must be equal.
        seconds: duration of the step, and the time spent in collectives, including waits.
    """

    serial: int
    value: bool | str | Refusal | None = None
    result: StepResult | None = None
    digest: int | None = None
    seconds: tuple[float, float] = (0.0, 0.0)


class Pong(msgspec.Struct, frozen=True, tag=True):
    serial: int


class Fault(msgspec.Struct, frozen=True, tag=True):
    """Report that the rank has failed, before its process ends.

    Attributes:
        doing: when the rank failed, such as "while it loaded".
        kind: class name of the exception.
        message: text of the exception.
    """

    doing: str
    kind: str
    message: str


class Log(msgspec.Struct, frozen=True, tag=True):
    level: int
    name: str
    message: str


Report = Progress | Loaded | Answer | Pong | Fault | Log


_encoder = msgspec.msgpack.Encoder()
_order_decoder: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
_report_decoder: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)


def encode(message: Any) -> bytes:
    return _encoder.encode(message)


def decode_order(message: bytes) -> Order:
    """Decode a message to a rank.

    Args:
        message: bytes of one frame.

    Raises:
        msgspec.ValidationError: the bytes are not an order.
    """
    return _order_decoder.decode(message)


def decode_report(message: bytes) -> Report:
    """Decode a message from a rank.

    Args:
        message: bytes of one frame.

    Raises:
        msgspec.ValidationError: the bytes are not a report.
    """
    return _report_decoder.decode(message)


# --- framing ---

FRAME_BYTES_MAX = 2**31 - 1  # The largest message contains an adapter, and has some hundred megabytes.
LENGTH = struct.Struct("<I")


def framed(message: bytes) -> bytes:
    """Return a message with its length before it.

    Args:
        message: at most FRAME_BYTES_MAX bytes.

    Raises:
        ValueError: the message is too long.
    """
    if len(message) > FRAME_BYTES_MAX:
        raise ValueError(f"a message has {len(message)} bytes, {FRAME_BYTES_MAX} are allowed")
    return LENGTH.pack(len(message)) + message


class FrameReader:
    """Splits a byte stream into messages, and keeps an incomplete last message until its other bytes arrive."""

    def __init__(self) -> None:
        self._unread = bytearray()

    def feed(self, received: bytes) -> Iterator[bytes]:
        """Yield the messages that are complete now.

        Args:
            received: the next bytes of the stream.

        Raises:
            ValueError: a length is above FRAME_BYTES_MAX. The peer does not use this protocol.
        """
        unread = self._unread
        unread += received
        first = 0
        while len(unread) - first >= LENGTH.size:
            (length,) = LENGTH.unpack_from(unread, first)
            if length > FRAME_BYTES_MAX:
                raise ValueError(f"a message announces {length} bytes, {FRAME_BYTES_MAX} are allowed")
            end = first + LENGTH.size + length
            if len(unread) < end:
                break
            message = bytes(memoryview(unread)[first + LENGTH.size : end])
            first = end
            yield message
        del unread[:first]
