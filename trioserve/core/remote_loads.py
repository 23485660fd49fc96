"""Which requests wait for KV from elsewhere, until when, and which have got it and wait to run.

    WAITING ──begin──► WAITING_FOR_REMOTE_KV ──arrived──► WAITING, with computed blocks, in the queue `ready`
                                             ──given_up──► WAITING, without blocks, and never asks again

A request that loads owns every block that its known tokens need, so that one whose KV has arrived needs nothing more
than a place in the batch: requests with loaded KV cannot lock each other, or those that run, out of the pool.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from trioserve.contracts.ids import RequestId
from trioserve.core.connector_guard import ConnectorGuard
from trioserve.core.live_request import LiveRequest
from trioserve.core.request_state import RequestStatus
from trioserve.core.settings import CoreSettings
from trioserve.core.waiting_queue import WaitingQueue

__all__ = ["PendingLoad", "RemoteLoads"]


class PendingLoad(msgspec.Struct, frozen=True):
    """token_count: how many were asked for, from the request's computed_count on. deadline: when its patience ends."""

    live: LiveRequest
    token_count: int
    deadline: float


class RemoteLoads:
    """All calls are O(1) plus the blocks of the request, but for its place in the queue."""

    def __init__(self, settings: CoreSettings, connector: ConnectorGuard) -> None:
        self._settings = settings
        self._connector = connector
        # All are equally patient, so that the first one to begin is the first one to be overdue.
        self._pending: OrderedDict[RequestId, PendingLoad] = OrderedDict()
        self.ready = WaitingQueue[LiveRequest]()

    @property
    def pending_count(self) -> int:
        return len(self._pending)

    @property
    def pending(self) -> list[LiveRequest]:
        """Who waits for KV."""
        return [load.live for load in self._pending.values()]

    @property
    def is_full(self) -> bool:
        """As many load as can run: more would only keep blocks from those that do. (Who is asked for this has room for
        a place, so nobody is `ready` at that moment.)"""
        return len(self._pending) >= self._settings.max_num_seqs

    def matched_count(self, live: LiveRequest, computed_count: int) -> int:
        """How many tokens from computed_count on could be loaded; 0 for one that has been loaded or has run before."""
        if live.asked_remote or live.status is not RequestStatus.WAITING or live.needs_every_row:
            return 0
        return self._connector.num_matched_tokens(live.request, computed_count)

    def begin(self, live: LiveRequest, token_count: int, now: float) -> None:
        """The request's blocks and computed_count are set; the connector writes from now on."""
        live.asked_remote = True
        live.wants_load = False  # if this one fails it computes, and waits for no other's
        live.move(RequestStatus.WAITING_FOR_REMOTE_KV)
        request_id = live.request.id
        deadline = now + self._settings.remote_kv_seconds_max
        self._pending[request_id] = PendingLoad(live, token_count, deadline)
        if not self._connector.start_load(live.request, tuple(live.blocks), live.computed_count, token_count):
            # Nobody will report an end, but it may have begun to write: its patience is over at once.
            self._pending[request_id] = PendingLoad(live, token_count, now)
            self._pending.move_to_end(request_id, last=False)

    def take(self, request_id: RequestId) -> PendingLoad | None:
        """The load that is out for this request, which is not waited for from now on; None if there is none."""
        return self._pending.pop(request_id, None)

    def arrived(self, live: LiveRequest, token_count: int) -> None:
        """`token_count` tokens more of a request are computed: it waits to run, before those that have nothing."""
        blocks = live.blocks
        live.loaded_token_count = token_count
        live.computed_count += token_count
        computed_block_count = -(-live.computed_count // self._settings.block_size)
        live.blocks, live.reserved_blocks = blocks[:computed_block_count], blocks[computed_block_count:]
        live.move(RequestStatus.WAITING)
        self.ready.put_back(live)

    def take_ready(self) -> list[LiveRequest]:
        """Those whose KV has arrived, which are not `ready` from now on."""
        ready = list(self.ready)
        for live in ready:
            self.ready.remove(live)
        return ready

    def overdue(self, now: float) -> list[LiveRequest]:
        """Those whose patience has ended. They are still waited for: take() them."""
        overdue = []
        for load in self._pending.values():
            if load.deadline > now:
                break
            overdue.append(load.live)
        return overdue

    def next_deadline(self) -> float | None:
        return next(iter(self._pending.values())).deadline if self._pending else None
