"""The books of streams that broke off at a simulated router: who of them may go on, when, and before whom.

Kept from what was asked and told alone. A stream comes before the newcomers of its priority, but not more than some in
a row while they wait; of two streams of one priority the one that broke off first comes first.
"""

from __future__ import annotations

from collections import Counter

from trioserve.simulation.router.endpoint_book import EndpointBook
from trioserve.simulation.router.history import RouterWorld
from trioserve.simulation.router.queue_rules import ExpectedRequest

__all__ = ["ContinuedBook", "may_try"]

# Of a turn: what is nearer to a whole one than the first is one for certain, and beyond the second certainly none. The
# sums of time that both sides make differ by far less.
CERTAIN, POSSIBLE = 1 - 5e-10, 1 - 2e-9


class ContinuedBook:
    """total, refused: streams that went on, and that may not, by the reason."""

    def __init__(self, world: RouterWorld, now: float) -> None:
        self.total = 0
        self.refused: Counter[str] = Counter()
        self._world = world
        self._rows: Counter[str] = Counter()  # by model: that went on since a newcomer began, while some waited
        self._turns_max = max(1.0, world.continuations_per_second_max)
        self._turns = self._turns_max
        self._turns_at = now

    def must_have_turn(self, now: float) -> bool:
        """Whether the bound of streams a second lets one go on."""
        return self._turns_left(now) >= CERTAIN

    def is_before(self, other: ExpectedRequest, entry: ExpectedRequest, now: float) -> bool:
        """Whether `other` waits, and has to get what both may have. Both are newcomers or streams of one model."""
        mine, theirs = entry.request.priority, other.request.priority
        is_newcomers_turn = self._rows[entry.request.model] >= self._world.continuations_in_a_row_max
        if not other.is_continuing:
            is_before = theirs < mine or (theirs == mine and is_newcomers_turn)
            return entry.is_continuing and other.is_queued and is_before
        if not self.must_have_turn(now):
            return False
        if entry.is_continuing:
            return (theirs, other.failed_index or 0) < (mine, entry.failed_index or 0)
        return theirs < mine or (theirs == mine and not is_newcomers_turn)

    def note_newcomer(self, entry: ExpectedRequest) -> None:
        """One gets a lease out of a queue."""
        self._rows[entry.request.model] = 0

    def note_granted(self, entry: ExpectedRequest, has_newcomers: bool, now: float) -> None:
        """A stream gets a lease to go on with. Asserts that it may at this moment."""
        left = self._turns_left(now)
        assert left >= POSSIBLE, f"{entry.name} goes on, and so many have a second ago: {left} turns are left"
        self._turns, self._turns_at = max(0.0, left - 1), now
        self._rows[entry.request.model] = self._rows[entry.request.model] + 1 if has_newcomers else 0
        entry.continuations += 1
        self.total += 1

    def refusal(self, entry: ExpectedRequest, fault: str, *, is_served: bool) -> str | None:
        """Its stream broke off. Why it may not go on, if so."""
        world = self._world
        if fault in ("broke", "hung"):
            has_got_on = entry.tokens >= entry.tokens_at_break + world.progress_tokens_min
            entry.breaks = 1 if has_got_on else entry.breaks + 1
        entry.tokens_at_break = entry.tokens
        reason = None
        if entry.breaks >= world.breaks_max:
            reason = "poisoned"
        elif entry.continuations >= world.continuations_max:
            reason = "too_many"
        elif entry.request.pinned is not None or not is_served:
            reason = "no_endpoint"
        if reason is not None:
            self.refused[reason] += 1
        return reason

    def _turns_left(self, now: float) -> float:
        more = (now - self._turns_at) * self._world.continuations_per_second_max
        return min(self._turns_max, self._turns + more)


def may_try(book: EndpointBook, entry: ExpectedRequest) -> bool:
    """Whether what the endpoint did to it before speaks for a second time there."""
    return book.id not in entry.tried or (entry.has_token and book.checks > entry.tried[book.id])
