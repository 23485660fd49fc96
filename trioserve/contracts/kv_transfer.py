"""The connector contract: which calls the core makes, how often and in which order, while KV blocks move between
engines.

A connector is the synchronous half of a transport. When the core calls it, the connector answers at once and moves the
data in another task or thread. Later, the connector reports by TransferEvents, which `progress` returns.

    the core calls                      how often, per request
    num_matched_tokens                  any number of times before it runs for the first time
    start_load                          at most once, after a match
    load_abandoned                      at most once, while a load is out
    request_finished                    exactly once, before its blocks are freed
    request_aborted_after_finish        at most once, while the connector holds blocks of a finished request
    hold_expired                        at most once for each hold. No other call about that hold follows.

    transfer_params                     at most once, right after request_finished returned True
    progress                            once in a step, and whenever the connector has called `wake`

    progress reports                    how often
    Released                            once for each request_finished that returned True
    StillRead                           any number of times before that
    Loaded or LoadFailed                once for each start_load, also after load_abandoned
    no report                           about a hold after hold_expired

A hold prevents the reuse of a finished request's blocks. SEND: the connector reads the blocks. LOAD: the connector may
still write an abandoned load. Every hold ends by its report or by its deadline, whichever comes first. A StillRead
report extends the deadline of a SEND. A connector that breaks a rule does not raise an error: the core counts a
TransferFault, logs it once, and continues.

If every layer of the model has a sliding window (ConnectorSetup.window_tokens), a request frees the blocks that its
window has passed: the first entries of a block table may be NO_BLOCK. A connector that follows the rules below sets
`knows_windows`. An engine with such a model refuses to start with any other connector.

    request_finished    The block table has a block for each position that the token before the last of `tokens` sees.
                        Missing blocks cannot be held, saved or sent. A remote reader that requests a missing block is
                        refused.
    num_matched_tokens  Counts tokens that can be loaded. Their blocks must be available within the window from their
                        end, unless the request already has them. Earlier blocks do not matter.
    start_load          The block table has a block for each position that the token after the load sees. The connector
                        loads nothing for entries without a block.
    Loaded              The count begins at the start of the load, as without windows. If the window reaches further
                        back from there than the loaded tokens, the core discards the load.

A factory, `ConnectorFactory`, makes connectors. The engine finds it by name among the entry points of the group
`trioserve.connectors`. Waiting (sockets, threads) belongs into the connector's `run`, a task of the engine.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec

from trioserve.contracts.events import FinishReason
from trioserve.contracts.ids import BlockIndex, RequestId
from trioserve.contracts.request import EngineRequest, KVTransferParams

__all__ = [
    "BlockCopies",
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
"""Purpose of an engine when prompts and responses are computed in different engines. A hint for routers.

An engine of any role can do everything, so a failed transfer costs time but no response.
"""


class HoldKind(enum.Enum):
    """Reason why a connector holds the blocks of a request."""

    SEND = "send"  # The connector reads the blocks of a finished request.
    LOAD = "load"  # The connector may still write into blocks whose load was abandoned.


class Released(msgspec.Struct, frozen=True):
    """The connector no longer reads blocks of this finished request."""

    request_id: RequestId


class StillRead(msgspec.Struct, frozen=True):
    """A remote engine still waits for the blocks of this finished request, or reads them. The hold's deadline starts
    again.
    """

    request_id: RequestId


class Loaded(msgspec.Struct, frozen=True):
    """A load has ended. The connector writes nothing more.

    Attributes:
        request_id: The request.
        token_count: Number of tokens that arrived, in order and without gaps from the start of the load. It is at most
            the requested count. The engine computes the missing tokens.
    """

    request_id: RequestId
    token_count: int


class LoadFailed(msgspec.Struct, frozen=True):
    """A load has failed. Its content is not used, and the connector writes nothing more.

    Attributes:
        request_id: The request.
        message: The reason, for the log and the client.
    """

    request_id: RequestId
    message: str = "no reason was given"


TransferEvent = Released | StillRead | Loaded | LoadFailed


class TransferFault(enum.Enum):
    """A fault between core and connector. The label of `transfer_faults_total`."""

    LOAD_FAILED = "load_failed"  # The connector reported that a load failed.
    LOAD_EXPIRED = "load_expired"  # The connector did not report before the load's deadline.
    HOLD_EXPIRED = "hold_expired"  # The connector did not report before the hold's deadline.
    LATE = "late"  # The connector sent a report about an expired hold.
    DOUBLE = "double"  # The connector sent a second report about one transfer.
    UNKNOWN = "unknown"  # The connector sent a report about a request that the core never had, or has forgotten.
    BAD_COUNT = "bad_count"  # The connector reported an impossible number of tokens.
    RAISED = "raised"  # A call to the connector raised an exception.


class KVConnector(Protocol):
    """The calls that the core makes to a connector.

    Every call is synchronous and short, and must not call the core. A request is named by its id. The id is not reused
    until all transfers of the request have ended.
    """

    def num_matched_tokens(self, request: EngineRequest, computed_count: int) -> int:
        """Return the number of prompt tokens that the connector could load.

        Has no side effect. The core may call it several times, with any computed_count.

        Args:
            request: Request that waits for its blocks. It may have a prefix in the engine's own cache.
            computed_count: First position to load. Earlier positions are computed already.

        Returns:
            Number of tokens that can be loaded from position computed_count on, or 0 if there are none. The core
            reduces a count that is too large, because it always computes the last token itself. The core treats a
            result that is not a count as 0.
        """
        ...

    def start_load(
        self, request: EngineRequest, block_table: Sequence[BlockIndex], computed_count: int, token_count: int
    ) -> None:
        """Begin to load the KV of positions computed_count .. computed_count + token_count - 1.

        The connector may write to these positions only, until it reports Loaded or LoadFailed, or until hold_expired.
        If this method raises, the core assumes a load that never reports.

        Args:
            request: Request that owns the blocks until the load has ended.
            block_table: The request's blocks. Position p is in block_table[p // block_size].
            computed_count: First position, a multiple of the block size.
            token_count: Number of positions.
        """
        ...

    def load_abandoned(self, request_id: RequestId) -> None:
        """Stop a load for which the request no longer waits, because it was aborted or the load took too long.

        The connector stops what it can. It reports Loaded or LoadFailed when nothing more is written. Until then, or
        until hold_expired, the core holds the blocks. If the request continues, it computes its prompt in other blocks.
        """
        ...

    def request_finished(
        self,
        request: EngineRequest,
        block_table: Sequence[BlockIndex],
        tokens: Sequence[int],
        reason: FinishReason,
    ) -> bool:
        """Decide whether to hold the blocks of a request that has ended.

        The core calls it for every request and every reason, also for a request that never ran. If a load of the
        request was still pending, the core has called load_abandoned before.

        Args:
            block_table: Blocks with the KV of `tokens`. Empty if nothing was computed.
            tokens: The first tokens of prompt and output. Empty if nothing was computed.
            reason: Why the request ended.

        Returns:
            True if the connector holds the blocks. It may read them until it reports Released, or until hold_expired.
            False to free the blocks at once. An exception counts as False.
        """
        ...

    def transfer_params(self, request_id: RequestId) -> KVTransferParams | None:
        """Return the parameters by which another engine reads the held blocks of a request.

        The client gets them at the end of the response.

        Returns:
            The parameters, or None if no other engine needs them.
        """
        ...

    def request_aborted_after_finish(self, request_id: RequestId) -> None:
        """Stop a transfer (SEND) because its finished request was aborted.

        The connector stops what it can, and reports Released as usual.
        """
        ...

    def hold_expired(self, request_id: RequestId, kind: HoldKind) -> None:
        """End a hold whose deadline passed. The core reuses the blocks for other requests.

        After this call, the connector must not read or write the blocks. If a remote reader is reading them, the
        connector must make sure that the reader notices (by an epoch or a checksum) and discards its data.

        Args:
            kind: Kind of the hold.
        """
        ...

    def progress(self) -> Iterable[TransferEvent]:
        """Return the events since the last call, in order."""
        ...


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Layout of KV in a block.

    Each layer of a block is [block_size, part_count, kv_head_count, head_dim] numbers of `dtype`. So the numbers of one
    token in one layer are token_bytes consecutive bytes.

    Attributes:
        model: Identifies the model. It distinguishes models with equal shapes. Engines exchange KV only if this name is
            equal.
        layer_count: Layers that store KV. A layer that reuses the KV of another layer does not count.
        block_size: Tokens in a block.
        kv_head_count: KV heads.
        head_dim: Numbers in a head.
        dtype: float32, bfloat16, float16, int8 or fp8. For int8 and fp8, a bfloat16 scale follows the numbers of each
            head.
        part_count: 2 for keys (index 0) and values (index 1). 1 for latents from which both are computed.
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
        """Return the bytes of one token in one layer."""
        if self.dtype in ("int8", "fp8"):
            return self.part_count * self.kv_head_count * (self.head_dim + 2)
        return self.part_count * self.kv_head_count * self.head_dim * (4 if self.dtype == "float32" else 2)


class KVPages(Protocol):
    """The KV cache of an engine as bytes. A connector may read or write a block only while it holds the block by the
    rules of this module.
    """

    @property
    def layout(self) -> KVLayout: ...

    @property
    def block_count(self) -> int: ...

    def view(self, layer: int, block: BlockIndex) -> memoryview | None:
        """Return the memory of one block in one layer, to read and write in place.

        Args:
            layer: Index of the layer.
            block: Index of the block.

        Returns:
            block_size * token_bytes bytes, or None if the host cannot address the device's memory.
        """
        ...

    def read(self, layer: int, block: BlockIndex) -> memoryview:
        """Return the bytes of one block in one layer, read-only.

        Args:
            layer: Index of the layer.
            block: Index of the block.

        Returns:
            block_size * token_bytes bytes. A copy if `view` returns None.
        """
        ...

    def write(self, layer: int, block: BlockIndex, start: int, content: memoryview) -> None:
        """Write bytes into a block.

        Args:
            layer: Index of the layer.
            block: Index of the block.
            start: First byte within the block.
            content: The bytes.
        """
        ...


class BlockCopies(Protocol):
    """Copies between the blocks of a device and host memory, many blocks of many layers at once.

    An engine has this object if the host cannot address its blocks (`KVPages.view` returns None). The number of device
    operations per call does not depend on the number of layers and blocks. No call blocks the Trio thread.

    Calls take effect in the order in which the device gets them, together with the steps of the engine. So a copy never
    overwrites a block that a later step has already written. A cancelled call returns at once. The copy may still run
    then, but its result is dropped.
    """

    def fetch(self, layers: range, blocks: Sequence[BlockIndex]) -> Awaitable[memoryview]:
        """Copy blocks to the host.

        Args:
            layers: Indexes of consecutive layers.
            blocks: Indexes of the blocks.

        Returns:
            The bytes, layer by layer, and block by block within a layer. Later changes of the blocks do not change it.
        """
        ...

    def store(
        self,
        layers: range,
        blocks: Sequence[BlockIndex],
        content: memoryview,
        last_token_count: int,
        is_wanted: Callable[[], bool],
    ) -> Awaitable[bool]:
        """Write blocks from the host. The blocks have the content after the return.

        Args:
            layers: Indexes of consecutive layers.
            blocks: Indexes of the blocks.
            content: The bytes, as `fetch` returns them. The caller must not change them afterwards.
            last_token_count: Number of tokens to write in the last block. All other blocks are written whole.
            is_wanted: Called before the copy begins, in the thread that computes. False: nothing is written. If the
                Trio thread makes it False before it frees a block, no later owner of the block sees the write.

        Returns:
            False if nothing was written.
        """
        ...


class Started(Protocol):
    """Object that a task calls when it is ready. Trio's TaskStatus has this method."""

    def started(self, value: Any = None) -> None: ...


class RunningConnector(KVConnector, Protocol):
    """A connector with a background task.

    Attributes:
        knows_windows: True if the connector follows the rules for models whose layers all have a sliding window.
    """

    knows_windows: bool

    def run(self, *, task_status: Started) -> Coroutine[Any, Any, None]:
        """Run the connector as a task of the engine, from before the first step until it is cancelled after the last
        step.

        Meanwhile, the core may make its synchronous calls at any time, from the same thread. An exception after the
        start is a fault of the engine. So `run` must itself handle the fault of a single transfer or peer.

        Args:
            task_status: `started` is called when other engines can reach the connector.

        Raises:
            StartupError: the connector cannot start.
        """
        ...

    def counts(self) -> Mapping[str, float]:
        """Return totals since the start, such as blocks and bytes sent and received.

        The keys are the metric names in metrics/registry.py without "kv_transfer_".
        """
        ...


class ConnectorSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of a connector factory.

    Attributes:
        engine_id: Id of the engine, which changes with each start.
        role: Purpose of the engine.
        pages: KV cache of the engine.
        copies: Copies blocks from and to a device. None if the host can address the blocks.
        options: Value of kv_connector_extra_config.
        wake: Function that the connector calls in the engine's thread when `progress` has events.
        window_tokens: Largest sliding window in tokens, if every layer of the model has one. None otherwise. The token
            at p sees positions p - window_tokens + 1 to p.
    """

    engine_id: str
    role: EngineRole
    pages: KVPages
    options: Mapping[str, Any]
    wake: Callable[[], None]
    window_tokens: int | None = None
    copies: BlockCopies | None = None


ConnectorFactory = Callable[[ConnectorSetup], RunningConnector]
"""Makes a connector. Raises StartupError for unknown or wrong options."""
