"""Parts that live status pages share.

A bounded history of values that a page shows when it is opened, a counter of watching clients, and names of tenants
that do not reveal the API key.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from trioserve.contracts.page import HISTORY_POINTS_MAX, HistoryShown

__all__ = ["History", "Watchers", "tenant_name"]


class History:
    """A bounded history of named values. It uses a few kilobytes.

    Args:
        interval_seconds: time between two points, in seconds.
        names: names of the values of each point.
    """

    def __init__(self, interval_seconds: float, names: Sequence[str]) -> None:
        self._interval_seconds = interval_seconds
        self._points: dict[str, deque[float | None]] = {name: deque(maxlen=HISTORY_POINTS_MAX) for name in names}
        self._count = 0
        self._at = 0.0
        self._shown: HistoryShown | None = None

    def note(self, values: Mapping[str, float | None], now: float) -> None:
        """Add a point.

        Args:
            values: values by name. A name is missing if its value was not measured.
            now: time in seconds.
        """
        for name, points in self._points.items():
            points.append(values.get(name))
        self._count += 1
        self._at = now
        self._shown = None

    def shown(self) -> HistoryShown:
        """Return the history. The same object is returned until the next point is added."""
        if self._shown is None:
            self._shown = HistoryShown(
                interval_seconds=self._interval_seconds,
                at=self._at,
                number=self._count - 1,
                series={name: tuple(points) for name, points in self._points.items()},
            )
        return self._shown


class Watchers:
    """Counts the clients that watch a live page. The object is true while at least one client watches.

    Args:
        forget: Called when the last watcher has left.
    """

    def __init__(self, forget: Callable[[], None]) -> None:
        self._forget = forget
        self._count = 0

    def __bool__(self) -> bool:
        return self._count > 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count the caller as a watching client while the scope is open."""
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1
            if not self._count:
                self._forget()


CHARACTERS_MAX = 40


def tenant_name(owner: str | None, tenant: str) -> str | None:
    """Return the name of a tenant for display.

    Args:
        owner: Owner of the request. None if clients are not distinguished.
        tenant: Tenant in the queue. It begins with the owner if there is an owner.

    Returns:
        A hash of the owner, followed by the name that the owner gave the tenant. None if there is neither of them.
    """
    if owner is None:
        return tenant[:CHARACTERS_MAX] or None
    key = "key-" + hashlib.blake2b(owner.encode(), digest_size=3).hexdigest()
    named = tenant.removeprefix(owner).removeprefix("/")
    return f"{key}/{named[:CHARACTERS_MAX]}" if named else key
