"""The connector contract: who may call what, how often and in which order, while KV blocks travel between engines.

A connector is the synchronous half of a transport. The core asks it and tells it; it answers at once, and does its
moving elsewhere. What it has to report comes later, as TransferEvents that it keeps until it is asked for its progress.

    the core calls                      how often, per request
    num_matched_tokens                  any number of times before it runs for the first time
    start_load                          at most once, after a match
    load_abandoned                      at most once, while a load is out
    request_finished                    exactly once, before its blocks are let go
    request_aborted_after_finish        at most once, while it holds blocks of a finished request
    hold_expired                        at most once for each hold, and then nothing more about that hold

    transfer_params                     at most once, right after request_finished was answered with True
    progress                            once a step, and whenever the connector has called `wake`

    progress reports                    how often
    Released                            once for each request_finished that it answered with True
    StillRead                           any number of times before that
    Loaded or LoadFailed                once for each start_load, also after load_abandoned
    nothing                             about a hold after hold_expired

A hold is what keeps blocks of a request that is over from being used for anything else: SEND while the connector reads
them, LOAD while it may still write a load that nobody waits for. Every hold ends by its report or by its deadline,
whichever comes first; a sign of life from whoever reads a SEND (StillRead) moves the deadline. Nobody is raised at for
a broken promise: it is counted (TransferFault), logged once, and life goes on.

Where every layer of the model has a sliding window (ConnectorSetup.window_tokens), a request has no blocks behind it:
the first places of a block table may be NO_BLOCK. A connector that keeps to these rules has `knows_windows`; an engine
with such a model refuses to start with any other.

    request_finished    there is a block in each place that the token before the last of `tokens` sees. What is not
                        there cannot be held, saved or sent; a far reader that asks for it is refused.
    num_matched_tokens  so many tokens can be loaded if the blocks are to be had that the window reaches from their end,
                        and that the request does not have yet, whatever became of those before them.
    start_load          there is a block in each place that the token behind the load sees. Nothing is loaded to where
                        there is none.
    Loaded              the count is from the start of the load as ever. If the window reaches further back from there
                        than what was loaded, the core takes nothing of it.

A connector is made by a factory, `ConnectorFactory`, which is found by its name among the entry points of the group
`trioserve.connectors`. What waits (sockets, threads) belongs into its `run`, a task of the engine.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec

from trioserve.contracts.events import FinishReason
from trioserve.contracts.ids import BlockIndex, RequestId
from trioserve.contracts.kv_transfer_params import KVTransferParams
from trioserve.contracts.request import EngineRequest

__all__ = [
    "ConnectorFactory",
    "ConnectorSetup",
    "EngineRole",
    "HoldKind",
    "KVConnector",
    "KVLayout",
    "KVPages",
    "LoadFailed",
    "Loaded",
    "Released",
    "RunningConnector",
    "Started",
    "StillRead",
    "TransferEvent",
    "TransferFault",
]

EngineRole = Literal["prefill", "decode", "both"]
"""What an engine is meant for when prompts are computed in one place and responses in another. It is a router's hint:
an engine of any role can do everything, so that a transfer that fails costs time and not a response."""


class HoldKind(enum.Enum):
    SEND = "send"  # the connector reads blocks of a finished request
    LOAD = "load"  # the connector may still write into blocks whose load was abandoned


class Released(msgspec.Struct, frozen=True):
    """The connector reads no block of this finished request any more."""

    request_id: RequestId


class StillRead(msgspec.Struct, frozen=True):
    """Somebody still waits for the blocks of this finished request, or reads them: the hold's deadline starts anew."""

    request_id: RequestId


class Loaded(msgspec.Struct, frozen=True):
    """The load is over, and nothing more is written. token_count: how many tokens arrived, in order and without gaps
    from the start of the load; at most as many as were asked for. What is missing is computed."""

    request_id: RequestId
    token_count: int


class LoadFailed(msgspec.Struct, frozen=True):
    """The load is over, nothing of it counts, and nothing more is written. message: why, for the log and for the
    client."""

    request_id: RequestId
    message: str = "no reason was given"


TransferEvent = Released | StillRead | Loaded | LoadFailed


class TransferFault(enum.Enum):
    """What went wrong between core and connector; the label of `transfer_faults_total`."""

    LOAD_FAILED = "load_failed"  # reported so by the connector
    LOAD_EXPIRED = "load_expired"  # nothing was reported until the request's patience ended
    HOLD_EXPIRED = "hold_expired"  # nothing was reported until the hold's deadline
    LATE = "late"  # a report about a hold that had expired
    DOUBLE = "double"  # a report about something that was reported before
    UNKNOWN = "unknown"  # a report about something that the core never heard of, or has forgotten
    BAD_COUNT = "bad_count"  # a number of tokens that cannot be
    RAISED = "raised"  # the connector raised instead of answering


class KVConnector(Protocol):
    """What the core needs of a connector. Every call is synchronous, short, and must not call the core back.

    A request is named by its id, which is never used twice while one of its transfers is out.
    """

    def num_matched_tokens(self, request: EngineRequest, computed_count: int) -> int:
        """How many tokens of the prompt, from position `computed_count` on, the connector could load; 0: none.

        Has no side effect and may be called again, with the same or another computed_count. A larger number than the
        prompt has is cut: at least the last token is always computed here. What comes back and is no count is taken for
        0.
        """
        ...

    def start_load(
        self, request: EngineRequest, block_table: Sequence[BlockIndex], computed_count: int, token_count: int
    ) -> None:
        """Begin to load the KV of positions computed_count .. computed_count + token_count - 1.

        block_table: the request's blocks, position p in block_table[p // block_size]; computed_count is a multiple of
        the block size. The connector may write to these positions, and to nothing else, until it reports Loaded or
        LoadFailed, or is told hold_expired. If it raises instead, the core takes that for a load that is out and will
        never be reported.
        """
        ...

    def load_abandoned(self, request_id: RequestId) -> None:
        """Nobody waits for this load any more: the request was aborted, or it took too long. Stop what can be stopped,
        and report Loaded or LoadFailed once nothing more is written. Until then, or until hold_expired, the blocks that
        it may write to are held. A request that goes on computes its prompt in other blocks."""
        ...

    def request_finished(
        self,
        request: EngineRequest,
        block_table: Sequence[BlockIndex],
        tokens: Sequence[int],
        reason: FinishReason,
    ) -> bool:
        """The request is over, whatever became of it. Called for every request, also for one that never ran.

        block_table: the blocks that hold the KV of `tokens`, the first tokens of prompt and output; both are empty when
        nothing was computed. True: the connector holds these blocks; it may read them until it reports Released or is
        told hold_expired. False: they are let go when this returns. An exception is taken for False.
        A load that was still out has been abandoned before this call.
        """
        ...

    def transfer_params(self, request_id: RequestId) -> KVTransferParams | None:
        """What the other side has to know to read the blocks that are held of this request; the client gets it with the
        end of its response. None: nobody has to know anything."""
        ...

    def request_aborted_after_finish(self, request_id: RequestId) -> None:
        """Somebody aborted a finished request whose blocks the connector holds (SEND): nobody wants the transfer any
        more. Stop what can be stopped, and report Released as always."""
        ...

    def hold_expired(self, request_id: RequestId, kind: HoldKind) -> None:
        """The deadline has passed, and the core takes the blocks back: they will hold another request's KV soon.

        From this return on the connector must neither read nor write them, and must see to it that a far reader which
        is in the middle of it notices (an epoch, a checksum) and throws away what it has got.
        """
        ...

    def progress(self) -> Iterable[TransferEvent]:
        """What has happened since the last call, in order."""
        ...


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """How KV lies in a block: for each layer [block_size, part_count, kv_head_count, head_dim] numbers of `dtype`, so
    that a token's numbers in a layer are token_bytes side by side.

    layer_count: of layers that keep something; those that see what another one keeps do not count.
    part_count: 2, keys at index 0 and values at index 1; 1, latents from which both are computed.
    model: tells models apart whose shapes are equal; engines exchange KV only if they agree on it.
    dtype: float32, bfloat16 or float16; or int8 or fp8, where a head's numbers have their scale behind them, a
    bfloat16.
    """

    model: str
    layer_count: int
    block_size: int
    kv_head_count: int
    head_dim: int
    dtype: str
    part_count: int = 2

    @property
    def token_bytes(self) -> int:
        """Of one token in one layer."""
        if self.dtype in ("int8", "fp8"):
            return self.part_count * self.kv_head_count * (self.head_dim + 2)
        return self.part_count * self.kv_head_count * self.head_dim * (4 if self.dtype == "float32" else 2)


class KVPages(Protocol):
    """The KV cache of an engine as bytes. Whoever reads or writes a block must have it, by the rules above."""

    @property
    def layout(self) -> KVLayout: ...

    @property
    def block_count(self) -> int: ...

    def view(self, layer: int, block: BlockIndex) -> memoryview | None:
        """One block of one layer, block_size * token_bytes bytes, to be read and written where it lies; None where it
        is on a device that the host cannot address."""
        ...

    def read(self, layer: int, block: BlockIndex) -> memoryview:
        """The same bytes, to be read only; a copy where `view` is None."""
        ...

    def write(self, layer: int, block: BlockIndex, start: int, content: memoryview) -> None:
        """Put bytes into a block, from byte `start` of it on."""
        ...


class Started(Protocol):
    """How a task says that it is ready; trio's TaskStatus."""

    def started(self, value: Any = None) -> None: ...


class RunningConnector(KVConnector, Protocol):
    """A connector with a life of its own beside the synchronous calls. knows_windows: it keeps to the rules for models
    whose layers all have a sliding window."""

    knows_windows: bool

    def run(self, *, task_status: Started) -> Coroutine[Any, Any, None]:
        """Runs as a task of the engine from before its first step until it is cancelled, after its last; the calls
        above may come at any time in between, from the same thread. Says `started` when it can be reached; raises
        StartupError before that. What it raises later is a fault of the engine, so what happens to one transfer or one
        peer must end there."""
        ...

    def counts(self) -> Mapping[str, float]:
        """Totals since the start: blocks and bytes sent and received, and what else there is, by their names in
        metrics/catalogue.py without "kv_transfer_"."""
        ...


class ConnectorSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What a factory gets. engine_id: new with each start of an engine. pages: its KV cache. options:
    kv_connector_extra_config, as it was given. window_tokens: where every layer of the model has a sliding window the
    largest of them, else None: the token at p sees positions p - window_tokens + 1 to p. wake: to be called, in the
    engine's thread, when `progress` has something to tell."""

    engine_id: str
    role: EngineRole
    pages: KVPages
    options: Mapping[str, Any]
    wake: Callable[[], None]
    window_tokens: int | None = None


ConnectorFactory = Callable[[ConnectorSetup], RunningConnector]
"""Raises StartupError for options that it does not know or cannot use."""
