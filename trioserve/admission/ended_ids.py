"""Which requests have ended lately, so that a late abort is told "already finished" and not "unknown"."""

from __future__ import annotations

from collections import OrderedDict

__all__ = ["EndedIds"]

ENDED_IDS_MAX = 10_000


class EndedIds:
    """The latest ids, with the owners that used them. None is the owner of requests that are nobody's."""

    def __init__(self) -> None:
        self._owners: OrderedDict[str, set[str | None]] = OrderedDict()

    def note(self, id: str, owner: str | None) -> None:
        self._owners.setdefault(id, set()).add(owner)
        self._owners.move_to_end(id)
        if len(self._owners) > ENDED_IDS_MAX:
            self._owners.popitem(last=False)

    def knows(self, id: str, *, owner: str | None) -> bool:
        """owner: only whether one of theirs bore the id; None: whether any did."""
        owners = self._owners.get(id, set())
        return bool(owners) if owner is None else owner in owners
