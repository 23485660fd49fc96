"""Ids of requests that ended recently, so that a late abort gets "already finished" instead of "unknown"."""

from __future__ import annotations

from collections import OrderedDict

__all__ = ["EndedIds"]

ENDED_IDS_MAX = 10_000


class EndedIds:
    """The latest ENDED_IDS_MAX ids, with the owners that used them. The owner None stands for requests without an
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
