"""The messages between a server and its ranks.

The server sends every order to all ranks. Each rank answers its orders one after the other.
"""

from __future__ import annotations

import logging
from typing import Any, Literal

import msgspec

from trioserve.contracts.adapter import AdapterId
from trioserve.contracts.kv_transfer import KVLayout
from trioserve.contracts.step import StepResult
from trioserve.contracts.weights import BroadcastWeights, SharedWeights
from trioserve.model.number_formats import Dtype
from trioserve.model.settings import ModelSettings
from trioserve.ranks.plan_wire import WirePlan

__all__ = [
    "Abandon",
    "AddAdapter",
    "Allocate",
    "Answer",
    "CheckWeights",
    "Claim",
    "ConfirmWeights",
    "DraftSetup",
    "Fault",
    "Loaded",
    "Log",
    "Masks",
    "Order",
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
    "WriteWeights",
    "decode_order",
    "decode_report",
    "encode",
]


# --- to a rank ---


class DraftSetup(msgspec.Struct, frozen=True, kw_only=True):
    """A draft model, see drafts.checkpoints.DraftSource.

    Attributes:
        name: the method of speculative decoding.
        path: the directory of the draft model. None: the further layer of the model itself.
        settings: how the draft model computes.
        token_count: draft tokens per step.
    """

    name: str
    path: str | None
    settings: ModelSettings
    token_count: int


class RankPlace(msgspec.Struct, frozen=True, kw_only=True):
    """The place of a rank on its machine, passed by the process that starts it there.

    Attributes:
        local_rank: number among the ranks of this machine, and index of its GPU.
        path: the model's directory on this machine. None: the path in RankSetup.
        memory: file descriptor of the memory that all ranks of its stage share. None: they use torch.distributed.
        before: file descriptor of the socket to the previous stage. None: there is none, or it is on another machine.
        behind: file descriptor of the socket to the next stage. None: there is none, or it is on another machine.
        kv_memory: file descriptor of the memory of its KV cache, which the server reads too. None: private memory.
        cpus: CPUs that the rank may use. Empty: all that its parent may use.
    """

    local_rank: int
    path: str | None = None
    memory: int | None = None
    before: int | None = None
    behind: int | None = None
    kv_memory: int | None = None
    cpus: tuple[int, ...] = ()


class RankSetup(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first message of the server to a rank: which part of which model to load.

    Attributes:
        rank: number of the rank, from 0. The first ranks belong to the first stage.
        size: number of all ranks.
        path: the model's directory, unless RankPlace has one.
        settings: how the rank computes, with its own share of threads and memory.
        context_tokens: see open_checkpoint.
        uses_further_layers: see open_checkpoint.
        expert_parallel: each rank has whole experts instead of a part of each expert.
        stage_count: number of stages, which compute one after the other.
        meeting_host: address where torch.distributed connects ranks that share no memory.
        meeting_port: port for meeting_host.
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
    """Allocate the KV cache. The counts are the smallest that any rank reported.

    Attributes:
        serial: number of the order.
        block_count: blocks of the KV cache.
        state_slot_count: states of running sequences. 0: the model has none.
        snapshot_slot_count: saved states.
        behind: for each rank, host and port of its peer in the next stage. None: no next stage on another machine.
        stage_key: secret that both peers must know, see stage_meeting.
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
    """Claim a part of the memory, see ModelRunner.claim_memory."""

    serial: int


class WireMatrix(msgspec.Struct, frozen=True, array_like=True):
    """The bytes and shapes of both parts of an AdapterMatrix."""

    name: str
    a: bytes
    a_shape: tuple[int, int]
    b: bytes
    b_shape: tuple[int, int]


class AddAdapter(msgspec.Struct, frozen=True, tag=True):
    """Load an adapter. The order contains all of it, and each rank keeps its own shard."""

    serial: int
    id: AdapterId
    digest: str
    dtype: Dtype
    matrices: tuple[WireMatrix, ...]


class RemoveAdapter(msgspec.Struct, frozen=True, tag=True):
    serial: int
    id: AdapterId


class CheckWeights(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Check new weights while steps continue, and remember them. The model does not change yet.

    Exactly one of path, shared and sent is set.

    Attributes:
        serial: number of the order.
        offer: number of these weights in later orders, until the next check.
        path: directory of a checkpoint.
        shared: weights in shared memory.
        sent: names and shapes of weights that follow in PutWeights.
        is_named: the answer contains the name of the weights, see weights_name.
    """

    serial: int
    offer: int
    path: str | None = None
    shared: SharedWeights | None = None
    sent: BroadcastWeights | None = None
    is_named: bool = False


class ConfirmWeights(msgspec.Struct, frozen=True, tag=True):
    """Check again that the checked weights have not changed. WriteWeights follows if all ranks agree."""

    serial: int
    offer: int


class WriteWeights(msgspec.Struct, frozen=True, tag=True):
    """Replace the model's weights by the checked ones."""

    serial: int
    offer: int


class PutWeights(msgspec.Struct, frozen=True, tag=True):
    """The next bytes of a tensor that a trainer sends. After the last bytes, each rank stores its shard of the tensor.

    Attributes:
        serial: number of the order.
        offer: number of the weights in CheckWeights.
        name: name of the tensor.
        part: bytes that continue the previous part.
        is_last: the tensor is complete.
    """

    serial: int
    offer: int
    name: str
    part: bytes
    is_last: bool


class Run(msgspec.Struct, frozen=True, tag=True):
    """Compute a step."""

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
    """Stop computing the step with this serial, because its result is not needed."""

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


# --- from a rank ---


class Progress(msgspec.Struct, frozen=True, tag=True):
    """Progress of loading, see LoadProgress.

    Attributes:
        what: what is being done. Empty while weights are read.
        done: bytes read so far, or seconds if total is None.
        total: bytes of all weights. None: the work has no known size.
    """

    what: str
    done: float
    total: int | None


class Loaded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The rank has read its weights. The fields have the meaning of ModelRunner's, except for those listed here.

    Attributes:
        block_count: blocks that fit into this rank's memory.
        state_slot_count: states that fit into this rank's memory.
        snapshot_slot_count: saved states that fit into this rank's memory.
        block_bytes: bytes of a block in this rank.
        layout: layout of this rank's part of the KV cache, without the model's name. None: its layers have no KV.
        kv_heads: index of the first KV head of this rank, and its number of KV heads.
        stage_port: port where it listens for its peer of the previous stage. None: that is on the same machine.
    """

    device: Literal["cpu", "cuda"]
    dtype: Dtype
    kv_dtype: str
    computed_by: str
    arithmetic: str
    is_batch_invariant: bool
    launches: bool
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
    """The text of an InvalidRequest. The rank refuses the order, and nothing has changed."""

    message: str
    param: str | None


class Answer(msgspec.Struct, frozen=True, tag=True):
    """The rank has finished the order with this serial.

    Attributes:
        serial: number of the order.
        value: the order's own result: a name, an error text, a flag or a refusal.
        result: the step's result, from the first rank of the last stage only. None: the step was abandoned.
        digest: checksum of the chosen tokens, from all ranks of the last stage. It must be equal in all of them.
        seconds: duration of the step, and the part of it spent in collectives, waiting included.
    """

    serial: int
    value: bool | str | Refusal | None = None
    result: StepResult | None = None
    digest: int | None = None
    seconds: tuple[float, float] = (0.0, 0.0)


class Pong(msgspec.Struct, frozen=True, tag=True):
    serial: int


class Fault(msgspec.Struct, frozen=True, tag=True):
    """The rank has failed, and its process ends.

    Attributes:
        doing: when it failed, as the end of a sentence: "while it loaded".
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
        msgspec.ValidationError: the bytes are no order.
    """
    return _order_decoder.decode(message)


def decode_report(message: bytes) -> Report:
    """Decode a message from a rank.

    Args:
        message: bytes of one frame.

    Raises:
        msgspec.ValidationError: the bytes are no report.
    """
    return _report_decoder.decode(message)
