"""The core's side of the connector contract: when the connector is asked or notified, and what its reports change.

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
count as used while their request waits for it, and as held afterwards.

Requests that wait for KV from other engines (`RemoteLoads`):

    WAITING ──begin──► WAITING_FOR_REMOTE_KV ──arrived──► WAITING, with computed blocks, in the queue `ready`
                                             ──given_up──► WAITING, without blocks, and never asks again

A loading request owns every block that its known tokens need. So a request whose KV has arrived needs nothing more than
a batch slot, and requests with loaded KV cannot deadlock with each other or with running requests.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from trioserve.contracts.events import FinishReason
from trioserve.contracts.ids import RequestId
from trioserve.contracts.kv_transfer import (
    HoldKind,
    KVConnector,
    Loaded,
    Released,
    StillRead,
    TransferEvent,
    TransferFault,
)
from trioserve.contracts.kv_transfer_params import KVTransferParams
from trioserve.contracts.request import EngineRequest
from trioserve.core.block_holds import BlockHolds
from trioserve.core.connector_guard import ConnectorGuard, TransferFaults
from trioserve.core.kv_blocks import BlockPool
from trioserve.core.live_request import LiveRequest
from trioserve.core.request_state import RequestStatus
from trioserve.core.settings import CoreSettings
from trioserve.core.waiting_queue import WaitingQueue

__all__ = ["PendingLoad", "RemoteLoads", "Transfers", "Unserved"]


class PendingLoad(msgspec.Struct, frozen=True):
    """A load that is waited for.

    Attributes:
        token_count: requested tokens, from the request's computed_count on.
        deadline: time at which the request stops waiting, in seconds of the core's clock.
    """

    live: LiveRequest
    token_count: int
    deadline: float


class RemoteLoads:
    """Loads of one engine.

    Args:
        settings: limits of the engine core.
        connector: loads the KV.

    Cost:
        O(1) plus the blocks of the request. Joining `ready` also costs the requests before it in its priority.
    """

    def __init__(self, settings: CoreSettings, connector: ConnectorGuard) -> None:
        self._settings = settings
        self._connector = connector
        # Sorted by deadline: all loads may take equally long.
        self._pending: OrderedDict[RequestId, PendingLoad] = OrderedDict()
        self.ready = WaitingQueue[LiveRequest]()

    @property
    def pending_count(self) -> int:
        return len(self._pending)

    @property
    def pending(self) -> list[LiveRequest]:
        """Return the requests that wait for KV."""
        return [load.live for load in self._pending.values()]

    @property
    def is_full(self) -> bool:
        """True if max_num_seqs loads are pending. More loads would only take blocks from running requests.

        The scheduler asks only when the batch has a free slot. Then `ready` is empty.
        """
        return len(self._pending) >= self._settings.max_num_seqs

    def matched_count(self, live: LiveRequest, computed_count: int) -> int:
        """Return how many tokens could be loaded.

        Args:
            live: a request that waits.
            computed_count: number of known tokens whose KV is in this engine.

        Returns:
            Number of tokens after the computed tokens that can be loaded. 0 if the request has loaded or run before.
        """
        if live.load_was_tried or live.status is not RequestStatus.WAITING or live.needs_every_row:
            return 0
        return self._connector.num_matched_tokens(live.request, computed_count)

    def begin(self, live: LiveRequest, token_count: int, now: float) -> None:
        """Start a load. The connector may write to the request's blocks from now on.

        Args:
            live: a waiting request. Its blocks and computed_count are set.
            token_count: tokens to load, from computed_count on.
            now: time in seconds.
        """
        live.load_was_tried = True
        live.wants_load = False  # if the load fails, the request computes its KV and never waits for a load again
        live.move(RequestStatus.WAITING_FOR_REMOTE_KV)
        request_id = live.request.id
        deadline = now + self._settings.remote_kv_seconds_max
        self._pending[request_id] = PendingLoad(live, token_count, deadline)
        if not self._connector.start_load(live.request, tuple(live.blocks), live.computed_count, token_count):
            # No end will be reported, but the connector may have written already: let the load expire at once.
            self._pending[request_id] = PendingLoad(live, token_count, now)
            self._pending.move_to_end(request_id, last=False)

    def take(self, request_id: RequestId) -> PendingLoad | None:
        """Stop waiting for a load.

        Args:
            request_id: id of any request.

        Returns:
            The load, or None if the request has no pending load.
        """
        return self._pending.pop(request_id, None)

    def arrived(self, live: LiveRequest, token_count: int) -> None:
        """Move a request whose KV has arrived to `ready`. Requests in `ready` start before requests without KV.

        Args:
            live: a request whose load was taken.
            token_count: tokens that were loaded.
        """
        blocks = live.blocks
        live.loaded_token_count = token_count
        live.computed_count += token_count
        computed_block_count = -(-live.computed_count // self._settings.block_size)
        live.blocks, live.reserved_blocks = blocks[:computed_block_count], blocks[computed_block_count:]
        live.move(RequestStatus.WAITING)
        self.ready.put_back(live)

    def take_ready(self) -> list[LiveRequest]:
        """Empty `ready`, and return its requests."""
        ready = list(self.ready)
        for live in ready:
            self.ready.remove(live)
        return ready

    def overdue(self, now: float) -> list[LiveRequest]:
        """Return requests whose load is overdue. The loads remain pending until take() is called.

        Args:
            now: time in seconds.
        """
        overdue = []
        for load in self._pending.values():
            if load.deadline > now:
                break
            overdue.append(load.live)
        return overdue

    def next_deadline(self) -> float | None:
        return next(iter(self._pending.values())).deadline if self._pending else None


Unserved = tuple[LiveRequest, str]
"""A request that waited for KV and does not get it, with the reason."""


class Transfers:
    """All transfers between an engine and its connector.

    Args:
        settings: limits of the engine core.
        pool: the pool that owns the blocks.
        connector: moves KV between engines.

    Cost:
        O(1) plus the blocks of the request.
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

    def request_ends(self, live: LiveRequest, reason: FinishReason, now: float) -> KVTransferParams | None:
        """Notify the connector of a request's end, and hold the blocks if the connector needs them.

        If too many blocks are held already, the connector does not learn that the request asks for a hold. To the
        connector, a request that is handed over looks like a request that stopped by itself and asks for a hold.

        Args:
            live: a request that ends. It still has its blocks. Call this once per request.
            reason: why it ends.
            now: time in seconds.

        Returns:
            Parameters with which another engine can read the held blocks, or None if no blocks are held for it.
        """
        self._abandon(live, now)
        settings, computed_count = self._settings, live.computed_count
        if live.absent_block_count > settings.first_block_kept(computed_count):
            # The request has not run, and has no blocks for some tokens, so another engine could not use its KV.
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
        """Notify the connector of an abort, once, if it holds blocks of the request.

        Args:
            request_id: id of any request that is not live.
        """
        hold = self.holds.get(request_id, HoldKind.SEND)
        if hold is not None and not hold.is_aborted:
            hold.is_aborted = True
            self._connector.request_aborted_after_finish(request_id)

    def progress(self, now: float) -> list[Unserved]:
        """Handle all reports that the connector has.

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
            The request, if the report means that its KV will not arrive.
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
        if not isinstance(event, Loaded):
            self.faults.count(TransferFault.LOAD_FAILED, f"{request_id}: {event.message}")
            return [(load.live, event.message)]
        if not isinstance(event.token_count, int) or not 0 <= event.token_count <= load.token_count:
            message = f"the connector reported {event.token_count} tokens, but {load.token_count} were requested"
            self.faults.count(TransferFault.BAD_COUNT, f"{request_id}: {message}")
            return [(load.live, message)]
        if event.token_count == 0:
            return [(load.live, "no tokens arrived")]
        end = load.live.computed_count + event.token_count
        if self._settings.first_block_read(end) < load.live.absent_block_count:
            # The request has only the blocks that the window reaches from the end of the whole load.
            message = f"only {event.token_count} of {load.token_count} tokens arrived, too few for the sliding window"
            self.faults.count(TransferFault.LOAD_FAILED, f"{request_id}: {message}")
            return [(load.live, message)]
        self.loaded_tokens_total += event.token_count
        self.loads.arrived(load.live, event.token_count)
        return []

    def expire(self, now: float) -> list[Unserved]:
        """End overdue loads and holds.

        Args:
            now: time in seconds.

        Returns:
            Requests whose KV will not arrive.
        """
        unserved = []
        for live in self.loads.overdue(now):
            message = f"it did not arrive within {self._settings.remote_kv_seconds_max} seconds"
            self.faults.count(TransferFault.LOAD_EXPIRED, f"{live.request.id}: {message}")
            self._abandon(live, now)
            unserved.append((live, message))
        for hold in self.holds.expire(now):
            self._connector.hold_expired(hold.request_id, hold.kind)
        return unserved

    def give_up_loads(self, now: float) -> list[LiveRequest]:
        """Stop waiting for all loads.

        Args:
            now: time in seconds.

        Returns:
            Requests that waited.
        """
        lives = self.loads.pending
        for live in lives:
            self._abandon(live, now)
        return lives

    def next_deadline(self) -> float | None:
        """Return the time at which expire() has work. Return None if no hold and no load is pending."""
        deadlines = [self.holds.next_deadline(), self.loads.next_deadline()]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def _abandon(self, live: LiveRequest, now: float) -> None:
        """Stop waiting for a load, if one is pending. Blocks that the connector may still write to are held."""
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
    """Remove the request for a hold. Other fields are kept, so that another engine whose blocks were read can release
    them.
    """
    assert request.kv_transfer is not None
    kv_transfer = msgspec.structs.replace(request.kv_transfer, do_remote_decode=False)
    return msgspec.structs.replace(request, kv_transfer=kv_transfer)
