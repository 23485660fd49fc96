"""What was seen of each slice of a soak, and which of its responses count: those that no other slice has touched."""

from __future__ import annotations

import array
from collections.abc import Sequence

from trioserve.bench.soak.plan import Slice
from trioserve.bench.soak.verdict import Round

__all__ = ["SliceBook", "rounds_from"]


class SliceBook:
    """began_at: when its first client came. started_count: clients that have come."""

    def __init__(self, piece: Slice) -> None:
        self.piece = piece
        self.began_at: float | None = None
        self.started_count = 0
        self._responses: list[tuple[int, float, array.array[float]]] = []

    def start(self, now_seconds: float) -> int:
        """A client comes. Returns its number within the slice."""
        if self.began_at is None:
            self.began_at = now_seconds
        self.started_count += 1
        return self.started_count - 1

    def note_response(self, number: int, now_seconds: float, gaps_seconds: array.array[float]) -> None:
        """A client that stayed has its whole response."""
        self._responses.append((number, now_seconds, gaps_seconds))

    def settled_gaps(self, first_number: int, ended_at: float) -> array.array[float]:
        """Of the responses whose clients came no sooner than this one, and that were complete by then."""
        gaps = array.array("d")
        for number, responded_at, gaps_seconds in self._responses:
            if number >= first_number and responded_at <= ended_at:
                gaps.extend(gaps_seconds)
        return gaps


def rounds_from(books: Sequence[SliceBook], *, settled_number: int, all_sent_at: float) -> list[Round]:
    """books: of slices with leavers and of the control, in turn. settled_number: of each slice the first client that
    counts; by then those of the slice before have gone. all_sent_at: when the last client of all had come."""
    ends = [*(book.began_at or all_sent_at for book in books[1:]), all_sent_at]
    gaps = [book.settled_gaps(settled_number, ended_at) for book, ended_at in zip(books, ends, strict=True)]
    return [Round(soak_gaps, control_gaps) for soak_gaps, control_gaps in zip(gaps[::2], gaps[1::2], strict=True)]
