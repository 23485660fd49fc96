"""Queue of waiting requests, sorted by priority and then by arrival. Joining at the end and leaving are O(1).

A turn of a session is cold if its session is new, or if more than half of its prompt must be computed because blocks
were evicted. A cold turn that starts at once may evict the blocks of sessions that return soon. Their next turns are
then cold, too, and evict others. DeferredTurns are cold turns that wait for a limited time instead, while warm turns
run. This limits the number of sessions whose KV is in the pool.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from trioserve.contracts.ids import RequestId
from trioserve.core.request_state import LiveRequest, RequestLife
from trioserve.core.settings import CoreSettings

__all__ = ["DeferredTurns", "WaitingQueue"]

Life = TypeVar("Life", bound=RequestLife[Any])


class WaitingQueue(Generic[Life]):
    """The waiting requests of a core, sorted by priority and then by arrival."""

    def __init__(self) -> None:
        # There is one OrderedDict per priority in use.
        # A plain dict is slow to find its next entry after many of its first entries were removed.
        self._queues: dict[int, OrderedDict[RequestId, Life]] = {}
        self._priorities: list[int] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Life]:
        """Iterate over the requests in order. The queue must not be changed during the iteration."""
        for priority in self._priorities:
            yield from self._queues[priority].values()

    def add(self, live: Life) -> None:
        """Add a request at the end of its priority.

        Args:
            live: a new request.
        """
        self._queue(live.request.priority)[live.request.id] = live
        self._count += 1

    def put_back(self, live: Life) -> None:
        """Return a request to its position by arrival, before all later requests. The cost is O(earlier requests of the
        same priority).

        Args:
            live: a request that was in the queue before.
        """
        queue = self._queue(live.request.priority)
        earlier = []
        for other in queue.values():
            if other.arrival_index > live.arrival_index:
                break
            earlier.append(other)
        queue[live.request.id] = live
        queue.move_to_end(live.request.id, last=False)
        for other in reversed(earlier):
            queue.move_to_end(other.request.id, last=False)
        self._count += 1

    def remove(self, live: Life) -> None:
        priority = live.request.priority
        queue = self._queues[priority]
        del queue[live.request.id]
        self._count -= 1
        if not queue:
            del self._queues[priority]
            self._priorities.remove(priority)

    def _queue(self, priority: int) -> OrderedDict[RequestId, Life]:
        queue = self._queues.get(priority)
        if queue is None:
            queue = self._queues[priority] = OrderedDict()
            insort(self._priorities, priority)
        return queue


class DeferredTurns:
    """Cold turns that are deferred, each for a limited time. Other requests do not wait for them.

    Args:
        settings: limits of the engine core. At most max_num_seqs turns are deferred at a time, because the scheduler
            looks at each of them when it plans a step.

    Attributes:
        turns: the deferred turns by request id, each with the blocks that `defer` received.
        total: turns that were deferred.
    """

    def __init__(self, settings: CoreSettings) -> None:
        self._seconds_max = settings.cold_turn_seconds
        self._count_max = settings.max_num_seqs
        self.turns: dict[RequestId, tuple[LiveRequest, int]] = {}
        self.total = 0

    def __iter__(self) -> Iterator[LiveRequest]:
        return (live for live, _blocks_wanted in self.turns.values())

    def blocks_wanted(self, live: LiveRequest) -> int | None:
        """Return how many blocks a deferred turn needs, as `defer` received it. None if the turn is not deferred.

        Args:
            live: any request.
        """
        turn = self.turns.get(live.request.id)
        return None if turn is None else turn[1]

    def defer(self, live: LiveRequest, blocks_wanted: int, now: float) -> bool:
        """Defer a turn, or leave it deferred.

        Args:
            live: a request of the waiting queue.
            blocks_wanted: blocks that the turn needs, without cached blocks that it shares with an expected session.
            now: time in seconds.

        Returns:
            False if the turn may start now, because it was deferred long enough or too many turns are deferred.
        """
        if live.request.id not in self.turns:
            if live.deferred_until is None:
                if not self._seconds_max or len(self.turns) >= self._count_max:
                    return False
                live.deferred_until = now + self._seconds_max
                self.total += 1
            if live.deferred_until <= now:
                return False
        self.turns[live.request.id] = (live, blocks_wanted)
        return True

    def discard(self, live: LiveRequest) -> None:
        """End the deferral of a turn, if it is deferred.

        Args:
            live: any request.
        """
        self.turns.pop(live.request.id, None)

    def expire(self, now: float) -> None:
        """End the deferral of turns that were deferred long enough.

        Args:
            now: time in seconds.
        """
        for live in [live for live in self if _end(live) <= now]:
            self.discard(live)

    def next_deadline(self) -> float:
        """Return the time at which the first deferral ends. Infinite if no turn is deferred."""
        return min(map(_end, self), default=math.inf)


def _end(live: LiveRequest) -> float:
    assert live.deferred_until is not None
    return live.deferred_until
