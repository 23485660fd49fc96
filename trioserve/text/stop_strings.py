"""Finds a stop string even when it straddles deltas, and says how much text may be shown meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopStringFinder"]


class StopStringFinder:
    """Scans a text that arrives in pieces for the first of several stop strings.

    First is the one that is complete first; of those complete at the same character, the longest. So where the text
    ends does not depend on how it was cut into pieces, and no token is computed to see whether a longer stop string
    would have followed. Held back is the longest end of the text that begins a stop string, and nothing more: at most
    the longest stop string less one character. Work per piece is bounded by the lengths of the piece and the strings.

    found: the stop string that was found, else None. After it was found, feed must not be called again.
    """

    __slots__ = ("_held", "_stops", "found")

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string would end every text at once"
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str, *, may_complete: bool = True) -> str:
        """Takes the next piece and returns what can be shown now; when `found` is set, the text ends with it.

        may_complete: whether a stop string may become complete in this piece. If not, it may still begin here.
        """
        assert self.found is None, "fed after a stop string was found"
        if not text:
            return ""
        buffer = self._held + text
        if may_complete:
            stop, end = self._first_match(buffer)
            if stop is not None:
                self.found, self._held = stop, ""
                return buffer[: end - len(stop)]
        shown_count = self._beginning_of_held(buffer)
        self._held = buffer[shown_count:]
        return buffer[:shown_count]

    def flush(self) -> str:
        """The text held back, once it is known that nothing follows."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, buffer: str) -> tuple[str | None, int]:
        """The stop string that is complete first, and where it ends."""
        first: str | None = None
        first_end = len(buffer)
        for stop in self._stops:
            # A match must end in the new text: what is held may hold a stop string that was not allowed to complete.
            start = buffer.find(stop, max(0, len(self._held) + 1 - len(stop)))
            if start < 0:
                continue
            end = start + len(stop)
            if first is None or end < first_end or (end == first_end and len(stop) > len(first)):
                first, first_end = stop, end
        return first, first_end

    def _beginning_of_held(self, buffer: str) -> int:
        """Where the longest end of the buffer starts that is a proper beginning of a stop string."""
        begin = len(buffer)
        for stop in self._stops:
            start = buffer.find(stop[0], max(0, len(buffer) + 1 - len(stop)))
            while 0 <= start < begin:
                if stop.startswith(buffer[start:]):
                    begin = start
                    break
                start = buffer.find(stop[0], start + 1)
        return begin
