"""The books of streams that break off or are moved at a simulated router: who may go on, when, and before whom.

Kept from what was asked and told alone. A stream, or a request without a token that lost its endpoint, comes before the
newcomers of its priority, but not more than some in a row while they wait; those that broke off come before those that
are to be moved, and of each kind of one priority the one that broke off, or was to be moved, first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from trioserve.contracts.endpoint import EndpointId
from trioserve.router.ticket import Break
from trioserve.simulation.router.endpoint_book import EndpointBook
from trioserve.simulation.router.history import RouterWorld
from trioserve.simulation.router.queue_rules import ExpectedRequest

__all__ = ["ContinuedBook", "may_try"]

# Of a turn: what is nearer to a whole one than the first is one for certain, and beyond the second certainly none. The
# sums of time that both sides make differ by far less.
CERTAIN, POSSIBLE = 1 - 5e-10, 1 - 2e-9


class ContinuedBook:
    """total, refused: streams that went on, and that may not, by the reason. deadlines: of endpoints that are emptied;
    None when it has passed. on_the_way: who has left, or is leaving, and not arrived. moves: how many ever did."""

    def __init__(self, world: RouterWorld, now: float) -> None:
        self.total = 0
        self.refused: Counter[str] = Counter()
        self.deadlines: dict[str, float | None] = {}
        self.on_the_way: set[str] = set()
        self.moves = 0
        self._moving_count = 0
        self._world = world
        self._rows: Counter[str] = Counter()  # by model: that went on since a newcomer began, while some waited
        self._turns_max = max(1.0, world.continuations_per_second_max)
        self._turns = self._turns_max
        self._turns_at = now

    def must_have_turn(self, now: float) -> bool:
        """Whether the bound of streams a second lets one go on."""
        return self._turns_left(now) >= CERTAIN

    def is_before(self, other: ExpectedRequest, entry: ExpectedRequest, now: float) -> bool:
        """Whether `other` waits, and has to get what both may have. Both ask for one model."""
        if other.is_on_trial:
            return False
        if other.is_again:
            return self._rank(other) < self._rank(entry)
        if other.is_continuing:
            may_have = self.must_have_turn(now)
        else:
            may_have = self.may_move if other.is_moving else other.is_queued
        are_newcomers = self._is_newcomer(other) and self._is_newcomer(entry)
        return may_have and not are_newcomers and self._rank(other) < self._rank(entry)

    @property
    def may_move(self) -> bool:
        """Whether one more may be on its way."""
        return len(self.on_the_way) < self._world.moves_at_once_max

    @staticmethod
    def _is_newcomer(entry: ExpectedRequest) -> bool:
        return entry.failed_index is None and not entry.is_moving

    def _rank(self, entry: ExpectedRequest) -> tuple[int, int, int]:
        if entry.is_continuing or entry.is_again:
            return (entry.request.priority, 1, entry.failed_index or 0)
        if entry.is_moving:
            return (entry.request.priority, 2, entry.moving_index)
        is_newcomers_turn = self._rows[entry.request.model] >= self._world.continuations_in_a_row_max
        return (entry.request.priority, 0 if is_newcomers_turn else 3, 0)

    def note_answered(self, entry: ExpectedRequest) -> None:
        """The endpoint of its lease has begun to answer, or to go on."""
        self.on_the_way.discard(entry.name)
        self.note_movable(entry)

    def note_movable(self, entry: ExpectedRequest) -> None:
        """It may have become one that is to leave."""
        is_there = entry.state in ("leased", "running_free") and entry.endpoint in self.deadlines
        if is_there and entry.is_answered and entry.can_go_on and entry.next is None and entry.request.pinned is None:
            self._moving_count += not entry.is_moving
            entry.moving_index = entry.moving_index if entry.is_moving else self._moving_count
            entry.is_moving, entry.stage = True, None

    def note_next(self, entry: ExpectedRequest, has_newcomers: bool) -> None:
        """It gets a lease elsewhere, to move to. Asserts that it may."""
        assert entry.is_moving, f"{entry.name} gets a second lease, and is not to move"
        assert self.may_move, f"{entry.name} is to move, and {len(self.on_the_way)} are on their way"
        entry.is_moving = False
        self.on_the_way.add(entry.name)
        self._rows[entry.request.model] = self._rows[entry.request.model] + 1 if has_newcomers else 0
        self.moves += 1

    def note_newcomer(self, entry: ExpectedRequest) -> None:
        """One gets a lease out of a queue."""
        self._rows[entry.request.model] = 0

    def note_turn(self, entry: ExpectedRequest, now: float) -> None:
        """It goes on after it broke off, with a lease that it had already."""
        self._turns, self._turns_at = max(0.0, self._turns_left(now) - 1), now
        entry.continuations += 1
        self.total += 1

    def note_ahead(self, entry: ExpectedRequest, has_newcomers: bool) -> None:
        """One that waits again without a token gets an endpoint, perhaps before newcomers."""
        self._rows[entry.request.model] = self._rows[entry.request.model] + 1 if has_newcomers else 0

    def note_granted(self, entry: ExpectedRequest, has_newcomers: bool, now: float) -> None:
        """A stream gets a lease to go on with. Asserts that it may at this moment."""
        left = self._turns_left(now)
        assert left >= POSSIBLE, f"{entry.name} goes on, and so many have a second ago: {left} turns are left"
        self.note_turn(entry, now)
        self._rows[entry.request.model] = self._rows[entry.request.model] + 1 if has_newcomers else 0

    def note_break(self, entry: ExpectedRequest, fault: str, book: EndpointBook, *, is_certain: bool) -> None:
        """An endpoint broke off its response, or never began it."""
        if fault in ("broke", "hung", "failed"):
            if entry.tokens >= entry.tokens_at_break + self._world.progress_tokens_min:
                entry.broken.clear()
            clock = None if is_certain else book.clock
            entry.broken.append(Break(EndpointId(book.id), clock, book.checks, book.suspects_seen <= 1))
        entry.tokens_at_break = entry.tokens

    def judge(self, entry: ExpectedRequest, endpoints: Mapping[str, EndpointBook]) -> None:
        """Whether it is on trial, or taken for the cause."""
        entry.is_on_trial = entry.is_condemned = False
        is_any_unknown = False
        for broken in list(entry.broken):
            book = endpoints.get(broken.endpoint)
            if broken.clock is None or book is None:
                continue
            if book.clock_checks <= broken.checks:
                is_any_unknown |= book.health != "draining"
            elif book.clock == broken.clock:
                entry.broken.remove(broken)
        if not entry.broken:
            return
        is_alone, world = entry.broken[-1].is_alone, self._world
        if entry.has_token:
            breaks_max = world.breaks_max if is_alone else world.breaks_max + 1
        else:
            breaks_max = world.attempts_max if is_alone else 2 * world.attempts_max
        if len(entry.broken) >= breaks_max:
            entry.is_on_trial, entry.is_condemned = is_any_unknown, not is_any_unknown
            if entry.is_condemned:
                self.refused["poisoned"] += 1

    def refusal(self, entry: ExpectedRequest, endpoints: Mapping[str, EndpointBook], *, is_served: bool) -> str | None:
        """Its stream broke off. Why it may not go on, if so; otherwise it may, or is on trial."""
        world = self._world
        self.judge(entry, endpoints)
        if entry.is_condemned:
            return "poisoned"
        reason = None
        if entry.continuations >= world.continuations_max:
            reason = "too_many"
        elif entry.request.pinned is not None or not is_served:
            reason = "no_endpoint"
        if reason is not None:
            self.refused[reason] += 1
        return reason

    def forget_all_but(self, models: Collection[str]) -> None:
        """Of any other nobody is left, and whoever comes next for it finds no row of streams."""
        for model in [model for model in self._rows if model not in models]:
            del self._rows[model]

    def _turns_left(self, now: float) -> float:
        more = (now - self._turns_at) * self._world.continuations_per_second_max
        return min(self._turns_max, self._turns + more)


def may_try(book: EndpointBook, entry: ExpectedRequest) -> bool:
    """Whether what the endpoint did to it before speaks for a second time there."""
    if book.id not in entry.tried:
        return True
    return book.checks > entry.tried[book.id] and (entry.has_token or book.id not in entry.failed_by)
