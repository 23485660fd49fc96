"""Keeps the values of the last 15 minutes, at equal intervals, so that a page can show them when it is opened."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from trioserve.contracts.page import HISTORY_POINTS_MAX, HistoryShown

__all__ = ["History"]


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
