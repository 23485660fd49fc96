"""Loads of KV from other engines: which requests wait for a load, until when, and which requests have their loaded KV
and wait to run.

    WAITING ──begin──► WAITING_FOR_REMOTE_KV ──arrived──► WAITING, with computed blocks, in the queue `ready`
                                             ──given_up──► WAITING, without blocks, and never asks again

A loading request owns every block that its known tokens need. So a request whose KV has arrived needs nothing more than
a batch slot, and requests with loaded KV cannot deadlock with each other or with running requests.
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
