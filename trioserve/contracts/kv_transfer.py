"""The connector contract: who may call what, how often and in which order, while KV blocks travel between engines.

A connector is the synchronous half of a transport. The core asks it and tells it; it answers at once, and does its
moving elsewhere. What it has to report comes later, from outside these calls, as a TransferEvent.

    the core calls                      how often, per request
    num_matched_tokens                  any number of times before it runs for the first time
    start_load                          at most once, after a match
    load_abandoned                      at most once, while a load is out
    request_finished                    exactly once, before its blocks are let go
    request_aborted_after_finish        at most once, while it holds blocks of a finished request
    hold_expired                        at most once for each hold, and then nothing more about that hold

    the connector reports               how often
    Released                            once for each request_finished that it answered with True
    Loaded or LoadFailed                once for each start_load, also after load_abandoned
    nothing                             about a hold after hold_expired

A hold is what keeps blocks of a request that is over from being used for anything else: SEND while the connector reads
them, LOAD while it may still write a load that nobody waits for. Every hold ends by its report or by its deadline,
whichever comes first. Nobody is raised at for a broken promise: it is counted (TransferFault), and life goes on.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol

import msgspec

from trioserve.contracts.events import FinishReason
from trioserve.contracts.ids import BlockIndex, RequestId
from trioserve.contracts.request import EngineRequest

__all__ = ["HoldKind", "KVConnector", "LoadFailed", "Loaded", "Released", "TransferEvent", "TransferFault"]


class HoldKind(enum.Enum):
    SEND = "send"  # the connector reads blocks of a finished request
    LOAD = "load"  # the connector may still write into blocks whose load was abandoned


class Released(msgspec.Struct, frozen=True):
    """The connector reads no block of this finished request any more."""

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


TransferEvent = Released | Loaded | LoadFailed


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
        prompt has is cut: at least the last token is always computed here. An answer that is no count is taken for 0.
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
