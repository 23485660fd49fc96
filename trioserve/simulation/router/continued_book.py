"""Records of streams that break off or are moved in a simulated router, and the rules for resuming them.

The records use only requests and reports. A stream, or a request that lost its endpoint before its first token, is
served before newcomers of its priority. While newcomers wait, only a limited number of such requests is served in a
row. Streams that broke off are served before streams that must move. Within each of the two groups, the order is that
of the breaks or moves.

Functions of this module also decide which endpoint may compute which stage of a disaggregated request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from trioserve.contracts.endpoint import EndpointId, Stage
from trioserve.router.ticket import Break
from trioserve.simulation.router.endpoint_book import EndpointBook
from trioserve.simulation.router.history import RouterWorld
from trioserve.simulation.router.queue_rules import ExpectedRequest

__all__ = ["ContinuedBook", "check_place", "has_next_stage", "has_pair", "may_do", "may_try"]

# The limit of resumed streams per second is a token bucket. If it contains at least CERTAIN tokens, one more stream
# certainly may resume. Below POSSIBLE, it certainly may not. Between the two values, rounding errors decide, because
# the router and these records add times in different orders.
CERTAIN, POSSIBLE = 1 - 5e-10, 1 - 2e-9


class ContinuedBook:
    """Records of streams that break off or are moved.

    Args:
        world: the router's settings.
        now: start time.

    Attributes:
        total: number of resumed streams.
        refused: number of streams that may not be resumed, by reason.
        deadlines: deadlines of the endpoints whose streams must move. None: the deadline has passed.
        on_the_way: streams that are being moved and have not arrived.
        moves: number of moves so far.
    """

    def __init__(self, world: RouterWorld, now: float) -> None:
        self.total = 0
        self.refused: Counter[str] = Counter()
        self.deadlines: dict[str, float | None] = {}
        self.on_the_way: set[str] = set()
        self.moves = 0
        self._moving_count = 0
        self._world = world
        # For each model: the number of requests in a row that were served before waiting newcomers.
        self._rows: Counter[str] = Counter()
        self._turns_max = max(1.0, world.continuations_per_second_max)
        self._turns = self._turns_max
        self._turns_at = now

    def must_have_turn(self, now: float) -> bool:
        """Return True if the limit of resumed streams per second certainly allows one more stream.

        Args:
            now: the time.
        """
        return self._turns_left(now) >= CERTAIN

    def is_before(self, other: ExpectedRequest, entry: ExpectedRequest, now: float) -> bool:
        """Return True if `other` must be served before `entry`. Both requests wait for the same model.

        Args:
            other: a request.
            entry: another request.
            now: the time.
        """
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
        """True if one more stream may move now."""
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
        """Record that a request's endpoint has begun or resumed the response.

        Args:
            entry: the request.
        """
        self.on_the_way.discard(entry.name)
        self.note_movable(entry)

    def note_movable(self, entry: ExpectedRequest) -> None:
        """Mark a stream that must move from now on, if its endpoint empties and its response can be resumed.

        Args:
            entry: the request.
        """
        is_there = entry.state in ("leased", "running_free") and entry.endpoint in self.deadlines
        if is_there and entry.is_answered and entry.can_resume and entry.next is None and entry.request.pinned is None:
            self._moving_count += not entry.is_moving
            entry.moving_index = entry.moving_index if entry.is_moving else self._moving_count
            entry.is_moving, entry.stage = True, None

    def note_next(self, entry: ExpectedRequest, has_newcomers: bool) -> None:
        """Record that a stream gets a second lease, to move to another endpoint. Assert that the lease is allowed.

        Args:
            entry: the request.
            has_newcomers: True if newcomers wait for the request's model.
        """
        assert entry.is_moving, f"{entry.name} gets a second lease, but need not move"
        assert self.may_move, f"{entry.name} moves, although {len(self.on_the_way)} streams already do"
        entry.is_moving = False
        self.on_the_way.add(entry.name)
        self._rows[entry.request.model] = self._rows[entry.request.model] + 1 if has_newcomers else 0
        self.moves += 1

    def note_newcomer(self, entry: ExpectedRequest) -> None:
        """Record that a newcomer gets a lease from a queue.

        Args:
            entry: the request.
        """
        self._rows[entry.request.model] = 0

    def note_turn(self, entry: ExpectedRequest, now: float) -> None:
        """Record that a stream is resumed after a break.

        Args:
            entry: the request.
            now: the time.
        """
        self._turns, self._turns_at = max(0.0, self._turns_left(now) - 1), now
        entry.continuations += 1
        self.total += 1

    def note_ahead(self, entry: ExpectedRequest, has_newcomers: bool) -> None:
        """Record that a request that lost its endpoint before its first token gets another endpoint.

        Args:
            entry: the request.
            has_newcomers: True if newcomers wait for the request's model.
        """
        self._rows[entry.request.model] = self._rows[entry.request.model] + 1 if has_newcomers else 0

    def note_granted(self, entry: ExpectedRequest, has_newcomers: bool, now: float) -> None:
        """Record that a stream that broke off gets a lease. Assert that the limit per second allows it.

        Args:
            entry: the request.
            has_newcomers: True if newcomers wait for the request's model.
            now: the time.
        """
        left = self._turns_left(now)
        assert left >= POSSIBLE, f"{entry.name} is resumed beyond the limit per second: {left} turns are left"
        self.note_turn(entry, now)
        self._rows[entry.request.model] = self._rows[entry.request.model] + 1 if has_newcomers else 0

    def note_break(self, entry: ExpectedRequest, fault: str, book: EndpointBook, *, is_certain: bool) -> None:
        """Record that an endpoint broke off a response, or failed before its first token.

        Args:
            entry: the request.
            fault: name of the fault.
            book: the endpoint.
            is_certain: True if the endpoint reported this request as the cause.
        """
        if fault in ("broke", "hung", "failed"):
            if entry.tokens >= entry.tokens_at_break + self._world.progress_tokens_min:
                entry.broken.clear()
            clock = None if is_certain else book.clock
            entry.broken.append(Break(EndpointId(book.id), clock, book.checks, book.suspects_seen <= 1))
        entry.tokens_at_break = entry.tokens

    def judge(self, entry: ExpectedRequest, endpoints: Mapping[str, EndpointBook]) -> None:
        """Decide whether a request counts as the cause of its endpoints' failures.

        The request is on trial while a report that is needed for the decision has not arrived.

        Args:
            entry: the request.
        """
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
        """Return the reason why a stream that broke off may not be resumed.

        The result is None if the stream may be resumed or is on trial.

        Args:
            entry: the request.
            endpoints: books of all endpoints, by id.
            is_served: True if an endpoint serves the stream's model.
        """
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
        """Forget how many requests were served before newcomers, for all models except those in `models`.

        Args:
            models: models that an endpoint serves or a live request needs.
        """
        for model in [model for model in self._rows if model not in models]:
            del self._rows[model]

    def _turns_left(self, now: float) -> float:
        more = (now - self._turns_at) * self._world.continuations_per_second_max
        return min(self._turns_max, self._turns + more)


def may_try(book: EndpointBook, entry: ExpectedRequest) -> bool:
    """Return True if the earlier failures of a request do not forbid an endpoint.

    Args:
        book: the endpoint.
        entry: the request.
    """
    if book.id not in entry.tried:
        return True
    return book.checks > entry.tried[book.id] and (entry.has_token or book.id not in entry.failed_by)


def may_do(book: EndpointBook, entry: ExpectedRequest) -> bool:
    """Return True if an endpoint may compute the next stage of a request.

    Args:
        book: the endpoint.
        entry: the request.
    """
    return book.is_meant_for(entry.stage) and not (entry.stage is Stage.DECODE and book.id == entry.prefilled_by)


def has_pair(serving: Iterable[EndpointBook], tried: Collection[str] = ()) -> bool:
    """Return True if one endpoint may prefill and another endpoint may decode.

    Args:
        serving: endpoints that serve the model.
        tried: endpoints that must not be used.
    """
    available = [book for book in serving if book.is_given and book.id not in tried]
    return any(
        first is not second and first.is_meant_for(Stage.PREFILL) and second.is_meant_for(Stage.DECODE)
        for first in available
        for second in available
    )


def has_next_stage(entry: ExpectedRequest, serving: Iterable[EndpointBook]) -> bool:
    """Return True if an endpoint can still compute the stage for which a request waits.

    Args:
        entry: the request.
        serving: endpoints that serve the request's model.
    """
    if entry.stage is Stage.PREFILL:
        return has_pair(serving, entry.tried)
    return entry.is_held and any(
        book.is_given and book.id not in entry.tried and may_do(book, entry) for book in serving
    )


def check_place(entry: ExpectedRequest, book: EndpointBook, taking: Iterable[EndpointBook]) -> None:
    """Check that a request may get a lease at an endpoint.

    Args:
        entry: the request.
        book: the endpoint.
        taking: all endpoints that must accept the request.
    """
    assert may_do(book, entry), f"{entry.name} is in stage {entry.stage}, but gets {book.id}, which is for {book.role}"
    if entry.stage is not None:
        return
    nearest = [other.id for other in taking if other.id == entry.prefilled_by]
    if nearest:
        assert book.id in nearest, f"{entry.name} has its prompt at {nearest[0]}, but gets {book.id}"
    elif book.role == "prefill" and book.id != entry.prefilled_by:
        beside = [other.id for other in taking if other.role != "prefill"]
        assert not beside, f"{entry.name} gets {book.id}, which is for prompts, but {beside} could accept it"
