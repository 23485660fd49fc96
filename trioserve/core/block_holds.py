"""Holds on the blocks of finished requests, each with a deadline. Each hold ends exactly once.

A hold is identified by its request and its kind. SEND means that the connector reads the blocks. LOAD means that the
connector may still write to the blocks. A request may have one hold of each kind. A block may have several holds and
several users at the same time. The block is free when its last claim is released (kv_blocks.py). A hold ends at the
connector's report or at its deadline, whichever comes first. Reports that are late, repeated or unknown are counted and
ignored.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

import msgspec

from trioserve.contracts.ids import BlockIndex, RequestId
from trioserve.contracts.kv_transfer import HoldKind, TransferFault
from trioserve.core.connector_guard import TransferFaults
from trioserve.core.kv_blocks import BlockPool

__all__ = ["BlockHolds", "Hold"]

ENDED_MAX = 10_000  # Maximum number of ended holds that are kept, so that a repeated report does not count as unknown.

HoldKey = tuple[RequestId, HoldKind]


class Hold(msgspec.Struct):
    """Blocks that a connector still reads or writes after their request has finished.

    Attributes:
        blocks: the held blocks. If there are none, the hold only records that a report is expected.
        deadline: time at which the hold ends without a report, in seconds of the core's clock.
        is_aborted: True if the connector was notified that the request was aborted after its end.
    """

    request_id: RequestId
    kind: HoldKind
    blocks: Sequence[BlockIndex]
    deadline: float
    is_aborted: bool = False


class BlockHolds:
    """All holds on blocks in an engine.

    Args:
        pool: the pool that counts the blocks.
        seconds_max: seconds that a hold lasts after its start or its latest StillRead report.
        faults: counts reports that are late, repeated or unknown.

    Cost:
        O(1) plus the blocks of the hold.
    """

    def __init__(self, pool: BlockPool, seconds_max: float, faults: TransferFaults) -> None:
        self._pool = pool
        self._seconds_max = seconds_max
        self._faults = faults
        # Sorted by deadline, because holds have equal durations, and a StillRead report moves its hold to the end.
        self._holds: OrderedDict[HoldKey, Hold] = OrderedDict()
        self._ended: OrderedDict[HoldKey, bool] = OrderedDict()  # The value is True if the hold expired.
        # Called after the blocks are released, with True if the hold expired. The function must not call the core.
        self.on_end: Callable[[Hold, bool], None] = lambda hold, expired: None

    def __len__(self) -> int:
        return len(self._holds)

    def __iter__(self) -> Iterator[Hold]:
        """Iterate over the current holds, sorted by deadline. The caller must not change them."""
        return iter(self._holds.values())

    def has(self, request_id: RequestId) -> bool:
        """Return True if the request has a hold of any kind.

        Args:
            request_id: id of a finished request.
        """
        return any((request_id, kind) in self._holds for kind in HoldKind)

    def get(self, request_id: RequestId, kind: HoldKind) -> Hold | None:
        return self._holds.get((request_id, kind))

    def add(self, request_id: RequestId, kind: HoldKind, blocks: Sequence[BlockIndex], now: float) -> None:
        """Add a hold to blocks. The request that uses the blocks must still release them.

        Args:
            request_id: id of the request that owns the blocks. The request must not have a hold of this kind.
            kind: SEND or LOAD.
            blocks: blocks that the request uses.
            now: time in seconds.
        """
        key = (request_id, kind)
        assert key not in self._holds, f"{request_id} is held twice ({kind.value})"
        self._pool.hold(blocks)
        self._holds[key] = Hold(request_id, kind, blocks, now + self._seconds_max)

    def report_end(self, request_id: RequestId, kind: HoldKind) -> None:
        """End a hold, because the connector reported its end. If there is no such hold, the report is counted and
        ignored.

        Args:
            request_id: id of the request that the report names.
            kind: kind of the hold that the report ends.
        """
        hold = self._holds.pop((request_id, kind), None)
        if hold is None:
            self._count_stray(request_id, kind)
        else:
            self._end(hold, expired=False)

    def extend(self, request_id: RequestId, kind: HoldKind, now: float) -> None:
        """Restart the deadline of a hold, because the connector reported that the blocks are still read.

        A report for an unknown hold is counted. A report for an ended hold is ignored, because the connector may have
        sent it just before the hold ended.

        Args:
            request_id: id of the request that the report names.
            kind: kind of the hold.
            now: time in seconds.
        """
        key = (request_id, kind)
        hold = self._holds.get(key)
        if hold is not None:
            hold.deadline = now + self._seconds_max
            self._holds.move_to_end(key)
        elif key not in self._ended:
            self._count_stray(request_id, kind)

    def expire(self, now: float) -> list[Hold]:
        """End every hold whose deadline has passed.

        Args:
            now: time in seconds.

        Returns:
            The holds that ended. Their blocks are already released.
        """
        expired = []
        while self._holds:
            hold = next(iter(self._holds.values()))
            if hold.deadline > now:
                break
            del self._holds[hold.request_id, hold.kind]
            self._end(hold, expired=True)
            self._faults.count(
                TransferFault.HOLD_EXPIRED, f"{hold.request_id}: no report of its {hold.kind.value} came in time"
            )
            expired.append(hold)
        return expired

    def next_deadline(self) -> float | None:
        return next(iter(self._holds.values())).deadline if self._holds else None

    def note_ended(self, request_id: RequestId, kind: HoldKind) -> None:
        """Remember the end of a load that never became a hold. A second report of this end then counts as repeated.

        Args:
            request_id: id of the request that the report names.
            kind: kind of hold that a second report would end.
        """
        self._remember((request_id, kind), expired=False)

    def _end(self, hold: Hold, *, expired: bool) -> None:
        self._pool.unhold(hold.blocks)
        self._remember((hold.request_id, hold.kind), expired=expired)
        self.on_end(hold, expired)

    def _remember(self, key: HoldKey, *, expired: bool) -> None:
        self._ended[key] = expired
        self._ended.move_to_end(key)
        if len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)

    def _count_stray(self, request_id: RequestId, kind: HoldKind) -> None:
        key = (request_id, kind)
        expired = self._ended.get(key)
        if expired is None:
            self._faults.count(TransferFault.UNKNOWN, f"{request_id}: the end of an unknown {kind.value} was reported")
        elif expired:
            self._ended[key] = False  # The next report for this hold counts as repeated.
            self._faults.count(TransferFault.LATE, f"{request_id}: the end of its {kind.value} came after the deadline")
        else:
            self._faults.count(TransferFault.DOUBLE, f"{request_id}: the end of its {kind.value} was reported twice")
