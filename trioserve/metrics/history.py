"""The last quarter of an hour in points at equal distances, so that whoever opens a page later sees it, too."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from trioserve.contracts.page import HISTORY_POINTS_MAX, HistoryShown

__all__ = ["History"]


class History:
    """names: of what each point holds. The cost is that of one point, and a few kilobytes."""

    def __init__(self, interval_seconds: float, names: Sequence[str]) -> None:
        self._interval_seconds = interval_seconds
        self._points: dict[str, deque[float | None]] = {name: deque(maxlen=HISTORY_POINTS_MAX) for name in names}
        self._count = 0
        self._at = 0.0
        self._shown: HistoryShown | None = None

    def note(self, values: Mapping[str, float | None], now: float) -> None:
        """One more point. What is not in `values` was not measured."""
        for name, points in self._points.items():
            points.append(values.get(name))
        self._count += 1
        self._at = now
        self._shown = None

    def shown(self) -> HistoryShown:
        """The same object until there is another point."""
        if self._shown is None:
            self._shown = HistoryShown(
                interval_seconds=self._interval_seconds,
                at=self._at,
                number=self._count - 1,
                series={name: tuple(points) for name, points in self._points.items()},
            )
        return self._shown
