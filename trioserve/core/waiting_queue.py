"""Queue of waiting requests, sorted by priority and then by arrival. Joining at the end and leaving are O(1)."""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from trioserve.contracts.ids import RequestId
from trioserve.core.request_state import RequestLife

__all__ = ["WaitingQueue"]

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
