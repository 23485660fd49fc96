"""The core's calls to the connector, and the effects of the connector's reports. The table shows who owns the blocks.

| event                            | owner before         | owner after                | the blocks are free           |
|----------------------------------|----------------------|----------------------------|-------------------------------|
| a request ends, not held         | the request          | nobody                     | at once                       |
| a request ends, held             | the request          | the connector (SEND)       | at Released, or deadline      |
| an abort after that              | the connector (SEND) | unchanged, notified once   | as before                     |
| a load begins                    | the request          | the request                | when it ends                  |
| a load arrives                   | the request          | the request                | when it ends                  |
| a load fails                     | the request          | nobody                     | at once                       |
| a load takes too long            | the request          | the connector (LOAD)       | at its report, or deadline    |
| a request ends while it loads    | the request          | the connector (LOAD, SEND) | at both reports, or deadlines |
| a late, second or unknown report | any                  | unchanged                  | as before                     |

A block may also have other users or holds. Then it is free when the last of them is released. Blocks of a pending load
count as used while their request waits for the load, and as held afterwards.

Requests that wait for KV from other engines (`RemoteLoads`) change their states as follows:

    WAITING ──begin──► WAITING_FOR_REMOTE_KV ──arrived──► WAITING, with computed blocks, in the queue `ready`
                                             ──given_up──► WAITING, without blocks, and never asks again

A loading request owns every block that its known tokens need. When its KV has arrived, it only needs a batch slot. So
requests with loaded KV cannot deadlock with each other or with running requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import msgspec

from trioserve.contracts.events import FinishReason
from trioserve.contracts.ids import RequestId
from trioserve.contracts.kv_transfer import (
    HoldKind,
    KVConnector,
    Loaded,
    LoadFailed,
    Released,
    StillRead,
    TransferEvent,
    TransferFault,
)
from trioserve.contracts.request import EngineRequest, KVTransferParams
from trioserve.core.block_holds import BlockHolds
from trioserve.core.connector_guard import ConnectorGuard, TransferFaults
from trioserve.core.kv_blocks import BlockPool
from trioserve.core.request_state import LiveRequest, RequestStatus
from trioserve.core.settings import CoreSettings
from trioserve.core.waiting_queue import WaitingQueue

__all__ = ["PendingLoad", "RemoteLoads", "Transfers", "Unserved"]


class PendingLoad(msgspec.Struct, frozen=True):
    """A load for which a request waits.

    Attributes:
        token_count: number of requested tokens after the request's computed_count.
        deadline: time at which the request stops waiting, in seconds of the core's clock.
        is_prefetch: True if no request waits for the load, because it is a prefetch (prefetches.py).
    """

    live: LiveRequest
    token_count: int
    deadline: float
    is_prefetch: bool = False


class RemoteLoads:
    """The KV loads of one engine.

    Args:
        settings: limits of the engine core.
        connector: loads the KV.

    Cost:
        O(1), plus the number of blocks of the request. Joining `ready` also costs O(requests of this priority in
        `ready`).
    """

    def __init__(self, settings: CoreSettings, connector: ConnectorGuard) -> None:
        self._settings = settings
        self._connector = connector
        # The dict stays sorted by deadline, because all loads have equal time limits.
        self._pending: OrderedDict[RequestId, PendingLoad] = OrderedDict()
        self._prefetch_count = 0
        self.ready = WaitingQueue[LiveRequest]()

    @property
    def pending_count(self) -> int:
        """Return the number of loads for which requests wait."""
        return len(self._pending) - self._prefetch_count

    @property
    def pending(self) -> list[LiveRequest]:
        """Return the requests that wait for a load."""
        return [load.live for load in self._pending.values() if not load.is_prefetch]

    @property
    def is_full(self) -> bool:
        """True if max_num_seqs loads are pending. Additional loads would only take blocks from running requests.

        The scheduler reads this only when the batch has a free slot. `ready` is then empty.
        """
        return self.pending_count >= self._settings.max_num_seqs

    def matched_count(self, live: LiveRequest, computed_count: int) -> int:
        """Return how many tokens the connector could load.

        Args:
            live: a request that waits.
            computed_count: number of known tokens whose KV is in this engine.

        Returns:
            Number of tokens after the computed tokens that can be loaded. 0 if the request already had a load or has
            already run.
        """
        if live.load_was_tried or live.status is not RequestStatus.WAITING or live.needs_every_row:
            return 0
        return self._connector.num_matched_tokens(live.request, computed_count)

    def begin(self, live: LiveRequest, token_count: int, now: float, *, is_prefetch: bool = False) -> None:
        """Start a load. From now on, the connector may write to the request's blocks.

        Args:
            live: a waiting request. Its blocks and computed_count are set.
            token_count: number of tokens to load after computed_count.
            now: time in seconds.
            is_prefetch: True for a prefetch.
        """
        live.load_was_tried = True
        live.wants_load = False  # If this load fails, the request computes its KV and never waits for a load again.
        live.move(RequestStatus.WAITING_FOR_REMOTE_KV)
        request_id = live.request.id
        deadline = now + self._settings.remote_kv_seconds_max
        self._pending[request_id] = PendingLoad(live, token_count, deadline, is_prefetch)
        self._prefetch_count += is_prefetch
        if not self._connector.start_load(live.request, tuple(live.blocks), live.computed_count, token_count):
            # The load expires at once, because the connector may have written to the blocks but will not report an end.
            self._pending[request_id] = PendingLoad(live, token_count, now, is_prefetch)
            self._pending.move_to_end(request_id, last=False)

    def take(self, request_id: RequestId) -> PendingLoad | None:
        """End the wait for a load.

        Args:
            request_id: id of any request.

        Returns:
            The load. None if the request has no pending load.
        """
        load = self._pending.pop(request_id, None)
        self._prefetch_count -= load is not None and load.is_prefetch
        return load

    def arrived(self, live: LiveRequest, token_count: int) -> None:
        """Move a request whose KV has arrived to `ready`. Requests in `ready` start before requests without KV.

        Args:
            live: a request whose load was removed with `take`.
            token_count: number of loaded tokens.
        """
        blocks = live.blocks
        live.loaded_token_count = token_count
        live.computed_count += token_count
        computed_block_count = -(-live.computed_count // self._settings.block_size)
        live.blocks, live.reserved_blocks = blocks[:computed_block_count], blocks[computed_block_count:]
        live.move(RequestStatus.WAITING)
        self.ready.put_back(live)

    def pop_ready(self) -> list[LiveRequest]:
        """Remove all requests from `ready`, and return them."""
        ready = list(self.ready)
        for live in ready:
            self.ready.remove(live)
        return ready

    def overdue(self, now: float) -> list[PendingLoad]:
        """Return overdue loads. They stay pending until take() is called.

        Args:
            now: time in seconds.
        """
        overdue = []
        for load in self._pending.values():
            if load.deadline > now:
                break
            overdue.append(load)
        return overdue

    def next_deadline(self) -> float | None:
        return next(iter(self._pending.values())).deadline if self._pending else None


Unserved = tuple[LiveRequest, str]
"""A request that waited for KV and does not get it, with the reason."""


class Transfers:
    """All KV transfers between an engine and its connector.

    Args:
        settings: limits of the engine core.
        pool: the pool that owns the blocks.
        connector: moves KV between engines.

    Cost:
        O(1), plus the number of blocks of the request.
    """

    def __init__(self, settings: CoreSettings, pool: BlockPool, connector: KVConnector) -> None:
        self._settings = settings
        self._pool = pool
        self.faults = TransferFaults()
        self._connector = ConnectorGuard(connector, self.faults)
        self.holds = BlockHolds(pool, settings.hold_seconds_max, self.faults)
        self.loads = RemoteLoads(settings, self._connector)
        self.loaded_tokens_total = 0
        self.holds_refused_total = 0
        self._held_blocks_max = int(settings.block_count * settings.held_share_max)
        # Called with a prefetch that has ended, the number of tokens that arrived, and the time.
        self.on_prefetched: Callable[[LiveRequest, int, float], None] = lambda live, token_count, now: None

    def request_ends(self, live: LiveRequest, reason: FinishReason, now: float) -> KVTransferParams | None:
        """Notify the connector that a request has ended. Hold the request's blocks if the connector needs them.

        If too many blocks are already held, the connector is not informed that the request asks to hold its blocks. A
        request that is handed over to another engine is reported to the connector as one that stopped normally and asks
        to hold its blocks.

        Args:
            live: a request that ends. It still has its blocks. Call this once per request.
            reason: the finish reason.
            now: time in seconds.

        Returns:
            Parameters with which another engine can read the held blocks. None if no blocks are held for another
            engine.
        """
        self._abandon(live, now)
        settings, computed_count = self._settings, live.computed_count
        if live.absent_block_count > settings.first_block_kept(computed_count):
            # The request has not run, and has no blocks for some tokens. So its KV is useless for another engine.
            computed_count = 0
        table = tuple(live.blocks[: settings.blocks_for(computed_count)])
        blocks = table[live.absent_block_count :]
        tokens = tuple(live.tokens[:computed_count])
        request = live.request
        if reason is FinishReason.HANDED_OVER:
            request, reason = _with_hold(request), FinishReason.STOP
        if _wants_hold(request) and self._pool.held_count + len(blocks) > self._held_blocks_max:
            self.holds_refused_total += 1
            request = _without_hold(request)
        if not self._connector.request_finished(request, table, tokens, reason):
            return None
        self.holds.add(live.request.id, HoldKind.SEND, blocks, now)
        return self._connector.transfer_params(live.request.id)

    def aborted_after_finish(self, request_id: RequestId) -> None:
        """Notify the connector once of an abort, if the connector holds blocks of the request.

        Args:
            request_id: id of any request that is not live.
        """
        hold = self.holds.get(request_id, HoldKind.SEND)
        if hold is not None and not hold.is_aborted:
            hold.is_aborted = True
            self._connector.request_aborted_after_finish(request_id)

    def progress(self, now: float) -> list[Unserved]:
        """Handle all pending reports of the connector.

        Args:
            now: time in seconds.

        Returns:
            Requests whose KV will not arrive.
        """
        return [unserved for event in self._connector.progress() for unserved in self.report(event, now)]

    def report(self, event: TransferEvent, now: float) -> list[Unserved]:
        """Handle one report of the connector.

        Args:
            event: the report.
            now: time in seconds.

        Returns:
            The request if its KV will not arrive. Otherwise empty.
        """
        request_id = event.request_id
        if isinstance(event, StillRead):
            self.holds.extend(request_id, HoldKind.SEND, now)
            return []
        if isinstance(event, Released):
            self.holds.report_end(request_id, HoldKind.SEND)
            return []
        load = self.loads.take(request_id)
        if load is None:
            self.holds.report_end(request_id, HoldKind.LOAD)
            return []
        self.holds.note_ended(request_id, HoldKind.LOAD)
        problem = self._problem(event, load)
        if not load.is_prefetch and problem is not None:
            return [(load.live, problem)]
        token_count = event.token_count if isinstance(event, Loaded) and problem is None else 0
        if load.is_prefetch:
            self.on_prefetched(load.live, token_count, now)
            return []
        self.loaded_tokens_total += token_count
        self.loads.arrived(load.live, token_count)
        return []

    def _problem(self, event: Loaded | LoadFailed, load: PendingLoad) -> str | None:
        """Return why a load that has ended is useless, and count faults. None if it is useful."""
        request_id = event.request_id
        if not isinstance(event, Loaded):
            self.faults.count(TransferFault.LOAD_FAILED, f"{request_id}: {event.message}")
            return event.message
        if not isinstance(event.token_count, int) or not 0 <= event.token_count <= load.token_count:
            message = f"the connector reported {event.token_count} tokens, but {load.token_count} were requested"
            self.faults.count(TransferFault.BAD_COUNT, f"{request_id}: {message}")
            return message
        if event.token_count == 0:
            return "no tokens arrived"
        end = load.live.computed_count + event.token_count
        if self._settings.first_block_read(end) < load.live.absent_block_count:
            # The request has only the blocks that the window at the end of the whole load reaches.
            message = f"only {event.token_count} of {load.token_count} tokens arrived, too few for the sliding window"
            self.faults.count(TransferFault.LOAD_FAILED, f"{request_id}: {message}")
            return message
        return None

    def expire(self, now: float) -> list[Unserved]:
        """End overdue loads and holds.

        Args:
            now: time in seconds.

        Returns:
            Requests whose KV will not arrive.
        """
        unserved = []
        for load in self.loads.overdue(now):
            live = load.live
            message = f"it did not arrive within {self._settings.remote_kv_seconds_max} seconds"
            self.faults.count(TransferFault.LOAD_EXPIRED, f"{live.request.id}: {message}")
            self._abandon(live, now)
            if load.is_prefetch:
                self.on_prefetched(live, 0, now)
            else:
                unserved.append((live, message))
        for hold in self.holds.expire(now):
            self._connector.hold_expired(hold.request_id, hold.kind)
        return unserved

    def abandon_loads(self, now: float) -> list[LiveRequest]:
        """End the wait for all loads.

        Args:
            now: time in seconds.

        Returns:
            The requests that waited for a load.
        """
        lives = self.loads.pending
        for live in lives:
            self._abandon(live, now)
        return lives

    def next_deadline(self) -> float | None:
        """Return the time at which expire() must be called. None if no hold and no load is pending."""
        deadlines = [self.holds.next_deadline(), self.loads.next_deadline()]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def _abandon(self, live: LiveRequest, now: float) -> None:
        """End the wait for a load, if a load is pending. Blocks that the connector may still write to are held."""
        request_id = live.request.id
        if self.loads.take(request_id) is None:
            return
        written = live.blocks[max(live.absent_block_count, live.computed_count // self._settings.block_size) :]
        self.holds.add(request_id, HoldKind.LOAD, written, now)
        self._connector.load_abandoned(request_id)


def _wants_hold(request: EngineRequest) -> bool:
    return request.kv_transfer is not None and request.kv_transfer.do_remote_decode


def _with_hold(request: EngineRequest) -> EngineRequest:
    kv_transfer = msgspec.structs.replace(request.kv_transfer or KVTransferParams(), do_remote_decode=True)
    return msgspec.structs.replace(request, kv_transfer=kv_transfer)


def _without_hold(request: EngineRequest) -> EngineRequest:
    """Remove the field that asks to hold blocks from the transfer parameters. The other fields stay, so that the engine
    whose blocks were read can release them.
    """
    assert request.kv_transfer is not None
    kv_transfer = msgspec.structs.replace(request.kv_transfer, do_remote_decode=False)
    return msgspec.structs.replace(request, kv_transfer=kv_transfer)
