"""Who still needs the blocks of a request that is over, and until when. Lets each go exactly once.

A hold is known by its request and its kind: SEND while the connector reads the blocks, LOAD while it may still write
into them. A request may have one of each, and a block may have several holds, and users besides: it can be had again
when the last claim on it is gone (kv_blocks). A hold ends by its report or by its deadline, whichever comes first; what
is reported later, twice, or about nothing is counted and changes nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

import msgspec

from trioserve.contracts.ids import BlockIndex, RequestId
from trioserve.contracts.kv_transfer import HoldKind, TransferFault
from trioserve.core.kv_blocks import BlockPool
from trioserve.core.transfer_faults import TransferFaults

__all__ = ["BlockHolds", "Hold"]

ENDED_MAX = 10_000  # so long a report that comes again is told from one about nothing

HoldKey = tuple[RequestId, HoldKind]


class Hold(msgspec.Struct):
    """blocks may be none: then there is only somebody to wait for. is_aborted: its connector was told so."""

    request_id: RequestId
    kind: HoldKind
    blocks: Sequence[BlockIndex]
    deadline: float
    is_aborted: bool = False


class BlockHolds:
    """All calls are O(1) plus the blocks of the hold. seconds_max: how long a hold lasts from its last sign of life."""

    def __init__(self, pool: BlockPool, seconds_max: float, faults: TransferFaults) -> None:
        self._pool = pool
        self._seconds_max = seconds_max
        self._faults = faults
        # All last equally long from their last sign of life, so that they stand in the order in which they expire.
        self._holds: OrderedDict[HoldKey, Hold] = OrderedDict()
        self._ended: OrderedDict[HoldKey, bool] = OrderedDict()  # whether it expired
        # Its blocks are back; the flag says whether it expired. Must not call the core.
        self.on_end: Callable[[Hold, bool], None] = lambda hold, expired: None

    def __len__(self) -> int:
        return len(self._holds)

    def __iter__(self) -> Iterator[Hold]:
        """Those that last, the first one to expire first; for a look, not for a change."""
        return iter(self._holds.values())

    def has(self, request_id: RequestId) -> bool:
        """Whether any hold of this request lasts."""
        return any((request_id, kind) in self._holds for kind in HoldKind)

    def get(self, request_id: RequestId, kind: HoldKind) -> Hold | None:
        return self._holds.get((request_id, kind))

    def add(self, request_id: RequestId, kind: HoldKind, blocks: Sequence[BlockIndex], now: float) -> None:
        """From now on these blocks are held. Their user is still there, and releases them as always."""
        key = (request_id, kind)
        assert key not in self._holds, f"{request_id} is held twice ({kind.value})"
        self._pool.hold(blocks)
        self._holds[key] = Hold(request_id, kind, blocks, now + self._seconds_max)

    def let_go(self, request_id: RequestId, kind: HoldKind) -> None:
        """The connector has reported the end of something. If that was no hold, the report is counted and ignored."""
        hold = self._holds.pop((request_id, kind), None)
        if hold is None:
            self._count_stray(request_id, kind)
        else:
            self._end(hold, expired=False)

    def extend(self, request_id: RequestId, kind: HoldKind, now: float) -> None:
        """Somebody still needs the hold: its deadline starts anew. Of an unknown one this is counted; of one that has
        ended it is ignored, since signs of life and the end may cross."""
        key = (request_id, kind)
        hold = self._holds.get(key)
        if hold is not None:
            hold.deadline = now + self._seconds_max
            self._holds.move_to_end(key)
        elif key not in self._ended:
            self._count_stray(request_id, kind)

    def expire(self, now: float) -> list[Hold]:
        """End every hold whose deadline has come; its blocks are back when this returns."""
        expired = []
        while self._holds:
            hold = next(iter(self._holds.values()))
            if hold.deadline > now:
                break
            del self._holds[hold.request_id, hold.kind]
            self._end(hold, expired=True)
            self._faults.count(
                TransferFault.HOLD_EXPIRED, f"{hold.request_id}: no end of its {hold.kind.value} was reported in time"
            )
            expired.append(hold)
        return expired

    def next_deadline(self) -> float | None:
        return next(iter(self._holds.values())).deadline if self._holds else None

    def note_ended(self, request_id: RequestId, kind: HoldKind) -> None:
        """Something was reported that never became a hold; a second report of it is a double one."""
        self._remember((request_id, kind), expired=False)

    def _end(self, hold: Hold, *, expired: bool) -> None:
        self._pool.let_go(hold.blocks)
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
            self._faults.count(TransferFault.UNKNOWN, f"{request_id}: the end of a {kind.value} that is not known")
        elif expired:
            self._ended[key] = False  # a late report is a report: the next one is a double
            self._faults.count(TransferFault.LATE, f"{request_id}: the end of its {kind.value} came after the deadline")
        else:
            self._faults.count(TransferFault.DOUBLE, f"{request_id}: the end of its {kind.value} was reported twice")
