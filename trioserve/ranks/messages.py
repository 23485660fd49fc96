"""What a server and its ranks say to each other. An order goes to every rank, and each answers it, in order."""

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
    """A draft model, see runner.DraftSource. path: None for the model's own further layer."""

    name: str
    path: str | None
    settings: ModelSettings
    token_count: int


class RankPlace(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank is told of its machine, by whoever starts it there. path: of the model; None: as the server says.
    local_rank: among the ranks of this machine, which is its GPU's index. memory: the file descriptor of what all ranks
    of its stage share; None: they meet over torch.distributed. before, behind: those of its sockets to the stages
    before and behind its own; None: there is none, or it is on another machine. kv_memory: of the memory in which its
    KV cache lies, so that the server reads it; None: nobody does. cpus: that it may use; empty: all that its parent
    may."""

    local_rank: int
    path: str | None = None
    memory: int | None = None
    before: int | None = None
    behind: int | None = None
    kv_memory: int | None = None
    cpus: tuple[int, ...] = ()


class RankSetup(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All that a rank is told by its server. context_tokens, uses_further_layers: see open_checkpoint. settings: with
    the threads and the memory that this rank may have. draft: for rank 0 alone. meeting_host, meeting_port: where ranks
    that share no memory find each other. stage_count: of the stages that compute one after the other; the first ranks
    are those of the first stage."""

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
        """How many ranks divide the layers of a stage among them."""
        return self.size // self.stage_count

    @property
    def stage(self) -> int:
        return self.rank // self.stage_size

    @property
    def rank_in_stage(self) -> int:
        return self.rank % self.stage_size


class Allocate(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Make the KV cache: the least that any rank has room for. behind: by rank, the address of the one in its place of
    the next stage, if that is on another machine; both meet by stage_key, see stage_meeting."""

    serial: int
    block_count: int
    state_slot_count: int
    snapshot_slot_count: int
    behind: tuple[tuple[str, int] | None, ...] = ()
    stage_key: bytes = b""


class WarmUp(msgspec.Struct, frozen=True, tag=True):
    serial: int


class Claim(msgspec.Struct, frozen=True, tag=True):
    """See ModelRunner.claim_memory."""

    serial: int


class WireMatrix(msgspec.Struct, frozen=True, array_like=True):
    """An AdapterMatrix: the bytes of a and b, and their shapes."""

    name: str
    a: bytes
    a_shape: tuple[int, int]
    b: bytes
    b_shape: tuple[int, int]


class AddAdapter(msgspec.Struct, frozen=True, tag=True):
    """The whole adapter, of which each rank takes its part."""

    serial: int
    id: AdapterId
    digest: str
    dtype: Dtype
    matrices: tuple[WireMatrix, ...]


class RemoveAdapter(msgspec.Struct, frozen=True, tag=True):
    serial: int
    id: AdapterId


class CheckWeights(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Look at new weights while steps go on, and keep what was found: nothing changes. offer: a number by which they
    are known from then on, until others are looked at. One of these says where they are: path, of files; shared; or
    sent, by PutWeights. is_named: what stands in the files is told, by the name of weights_name."""

    serial: int
    offer: int
    path: str | None = None
    shared: SharedWeights | None = None
    sent: BroadcastWeights | None = None
    is_named: bool = False


class ConfirmWeights(msgspec.Struct, frozen=True, tag=True):
    """Look whether those that were looked at still are what they were: all are about to be told to write."""

    serial: int
    offer: int


class WriteWeights(msgspec.Struct, frozen=True, tag=True):
    """Put those that were looked at into the places of the old ones."""

    serial: int
    offer: int


class PutWeights(msgspec.Struct, frozen=True, tag=True):
    """The next bytes of a tensor that is sent. With the last ones it is put into its places, as far as they are
    here."""

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
    """Of the step with this serial. bits: uint32 [mask_rows, mask_words]."""

    serial: int
    bits: bytes


class Abandon(msgspec.Struct, frozen=True, tag=True):
    """Nobody waits for the step with this serial."""

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
    """Of loading, see LoadProgress. total: None: `done` counts seconds."""

    what: str
    done: float
    total: int | None


class Loaded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The weights are there. What there is of a ModelRunner that others ask for; block_count, state_slot_count and
    snapshot_slot_count: as many as this rank has room for. block_bytes: of a block, in this rank. layout: of its part
    of the KV cache, without the model's name; None: it keeps none. kv_heads: of all heads of keys and values the first
    that is here, and how many are. stage_port: where it waits for the rank of the stage before, if that is on another
    machine."""

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
    """An InvalidRequest: what was asked for cannot be, and nothing has changed."""

    message: str
    param: str | None


class Answer(msgspec.Struct, frozen=True, tag=True):
    """The order with this serial is done. value: what came of it. result: of a step, in the first rank of the last
    stage; None: it was abandoned. digest: of a step, in all ranks of that stage, what they have to agree about.
    seconds: of a step, what it took, and how much of that the ranks did together, waiting for each other included."""

    serial: int
    value: bool | str | Refusal | None = None
    result: StepResult | None = None
    digest: int | None = None
    seconds: tuple[float, float] = (0.0, 0.0)


class Pong(msgspec.Struct, frozen=True, tag=True):
    serial: int


class Fault(msgspec.Struct, frozen=True, tag=True):
    """It cannot go on, and ends. kind: the name of the exception's class."""

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
    """Raises msgspec.ValidationError, as decode_report does."""
    return _order_decoder.decode(message)


def decode_report(message: bytes) -> Report:
    return _report_decoder.decode(message)
