"""Records of recent requests with bounded memory: the ids that ended, and the times at which requests were sent."""

from __future__ import annotations

import bisect
from collections import OrderedDict

__all__ = ["EndedIds", "SentTimes"]


ENDED_IDS_MAX = 10_000


class EndedIds:
    """The latest ENDED_IDS_MAX ids of ended requests, with their owners. The owner is None for requests without an
    owner.
    """

    def __init__(self) -> None:
        self._owners: OrderedDict[str, set[str | None]] = OrderedDict()

    def note(self, id: str, owner: str | None) -> None:
        self._owners.setdefault(id, set()).add(owner)
        self._owners.move_to_end(id)
        if len(self._owners) > ENDED_IDS_MAX:
            self._owners.popitem(last=False)

    def knows(self, id: str, *, owner: str | None) -> bool:
        """Return True if a request with this id ended recently.

        Args:
            id: Id of the request.
            owner: Consider only requests of this owner. None for all owners.
        """
        owners = self._owners.get(id, set())
        return bool(owners) if owner is None else owner in owners


KEPT_SECONDS = 10.0  # The router uses a load report for two seconds.


class SentTimes:
    """The times at which recent requests were sent, in seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._before = 0  # Number of requests that were sent before the first time in the deque.

    def note(self, now: float) -> None:
        """Note that a request is being sent.

        Args:
            now: Current time.
        """
        self._times.append(now)
        if len(self._times) > 64 and self._times[len(self._times) // 2] < now - KEPT_SECONDS:
            half = len(self._times) // 2
            self._before += half
            del self._times[:half]

    def count_at(self, moment: float) -> int:
        """Return the number of requests that were sent before a given time.

        Args:
            moment: A recent time. If it is earlier than all stored times, the count is unknown, and 0 is returned.
        """
        if self._before and self._times and moment < self._times[0]:
            return 0
        return self._before + bisect.bisect_right(self._times, moment)
