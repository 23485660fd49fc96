"""Whether what a simulated router says to those whom it refuses, or takes into its queue, is true."""

from __future__ import annotations

from trioserve.contracts.errors import Draining, NoEndpoint, Overloaded, QueueWaitOver, RequestPoisoned, TrioserveError
from trioserve.simulation.router.books import RouterBooks
from trioserve.simulation.router.queue_rules import ExpectedRequest

__all__ = ["check_refused_at_the_door", "check_refused_in_queue", "check_taken_into_queue"]

RETRY_SECONDS_MAX = 60.0


def check_refused_at_the_door(books: RouterBooks, entry: ExpectedRequest, refusal: Overloaded) -> None:
    """`enter` raised this."""
    name, reason = entry.name, refusal.reason
    _check_retry_after(refusal)
    serving = books.serving(entry)
    if isinstance(refusal, Draining) or books.is_draining:
        assert isinstance(refusal, Draining), f"{name} is told {reason} by a router that leaves"
        assert books.is_draining, f"{name} is told that the router leaves"
        return
    if reason == "no_endpoint":
        usable = [book.id for book in serving if book.health != "ejected"]
        is_starting = entry.request.pinned is not None and serving and not serving[0].is_given
        assert not usable or is_starting, f"{name} is told that there is no endpoint, and there are {usable}"
        return
    if entry.request.pinned is not None:
        assert reason == "pinned_endpoint_overloaded", f"{name} is pinned, and told {reason}"
        assert serving, f"{name} is told that {entry.request.pinned} is full, which does not serve it"
        assert serving[0].is_given, f"{name} is told that {serving[0].id} is full, which is {serving[0].health}"
    else:
        assert reason == "queue_full", f"{name} is told {reason}"
        assert books.is_queue_full(entry), f"{name} is told that the queue is full"
        most = [other for other in books.waiting if books.is_most_in_queue(other, entry)]
        is_room_made = bool(most) and all(books.makes_room(other, entry) for other in most)
        assert not is_room_made, f"{name} is refused, and {most[0].name} would have to make room"
    taking = books.taking(entry, books.now)
    assert not taking, f"{name} is refused, and {taking} could take it"


def check_taken_into_queue(books: RouterBooks, entry: ExpectedRequest, *, is_served: bool) -> None:
    """`enter` took it into the queue. is_served: it is out of it already."""
    assert is_served or not books.is_queue_full(entry), f"{entry.name} is in a queue that was full"
    usable = [book for book in books.serving(entry) if book.health != "ejected"]
    assert usable, f"{entry.name} waits, and no endpoint may ever take it"


def check_refused_in_queue(books: RouterBooks, entry: ExpectedRequest, refusal: TrioserveError | None) -> None:
    """It was in the queue, or had a lease and was not sent, and was told this."""
    name = entry.name
    assert refusal is not None, f"{name} has ended, and nobody says why"
    if isinstance(refusal, Draining):
        assert books.is_draining, f"{name} is told that the router leaves"
        assert not entry.is_sent, f"{name} is at its endpoint, and refused"
        assert entry.prefilled_by is None, f"{name} has its prompt computed, and is refused"
        assert not entry.has_token, f"the stream of {name} is to go on, and it is refused"
        assert not entry.is_lost, f"{name} lost its endpoint, and is refused"
        return
    assert entry.state == "waiting", f"{name} is {entry.state}, and refused"
    if isinstance(refusal, RequestPoisoned):
        is_over = entry.is_on_trial and entry.deadline <= books.now
        assert entry.is_condemned or is_over, f"{name} is taken for the cause of the end of endpoints"
        return
    assert not entry.is_condemned, f"{name} is the cause of the end of endpoints, and told {refusal!r}"
    if isinstance(refusal, QueueWaitOver):
        assert entry.own_deadline <= books.now, f"{name} is told that its time is over"
        assert not entry.has_token, f"{name} has a token, and is told that its time in the queue is over"
        return
    assert isinstance(refusal, Overloaded), f"{name} is refused with {refusal!r}"
    _check_retry_after(refusal)
    if isinstance(refusal, NoEndpoint) and refusal.reason == "endpoint_lost":
        assert entry.is_lost, f"{name} is told that its endpoint was lost"
        assert not entry.has_token, f"{name} has a token, and is told what one without a token is told"
        assert entry.wait_ends_at <= books.now, f"{name} is told that it waited too long for another endpoint"
        return
    if isinstance(refusal, NoEndpoint):
        left = [book.id for book in books.serving(entry) if entry.has_token or book.id not in entry.failed_by]
        assert not left, f"{name} is told that there is no endpoint, and there are {left}"
        return
    if refusal.reason == "queue_full":
        entering = books.entering
        assert entering is not None, f"{name} has to make room, and nobody comes"
        assert books.is_queue_full(entering), f"{name} has to make room in a queue that has some"
        assert books.is_most_in_queue(entry, entering), f"{name} has to make room for {entering.name}"
        assert books.makes_room(entry, entering), f"{entering.name} finds no room where {name} has left"
        return
    reason = "continuation_wait_over" if entry.has_token else "queue_wait_over"
    assert refusal.reason == reason, f"{name} is told {refusal.reason}"
    assert entry.wait_ends_at <= books.now, f"{name} is told that it waited too long"
    assert not entry.is_on_trial, f"{name} is on trial, and told that it waited too long"


def _check_retry_after(refusal: Overloaded) -> None:
    seconds = refusal.retry_after_seconds
    assert 1 <= seconds <= RETRY_SECONDS_MAX, f"{refusal.reason}: try again in {seconds} s"
