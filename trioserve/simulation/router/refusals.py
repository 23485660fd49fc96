"""Checks that a simulated router refuses or queues requests for true reasons."""

from __future__ import annotations

from trioserve.contracts.errors import Draining, NoEndpoint, Overloaded, QueueWaitOver, RequestPoisoned, TrioserveError
from trioserve.simulation.router.books import RouterBooks
from trioserve.simulation.router.queue_rules import ExpectedRequest

__all__ = ["check_refused_at_the_door", "check_refused_in_queue", "check_taken_into_queue"]

RETRY_SECONDS_MAX = 60.0


def check_refused_at_the_door(books: RouterBooks, entry: ExpectedRequest, refusal: Overloaded) -> None:
    """Check the error that `enter` raised.

    Args:
        books: the records.
        entry: the request.
        refusal: the error.
    """
    name, reason = entry.name, refusal.reason
    _check_retry_after(refusal)
    serving = books.serving(entry)
    if isinstance(refusal, Draining) or books.is_draining:
        assert isinstance(refusal, Draining), f"{name} is refused with {reason} by a router that drains"
        assert books.is_draining, f"{name} is refused as if the router drained"
        return
    if reason == "no_endpoint":
        usable = [book.id for book in serving if book.health != "ejected"]
        is_starting = entry.request.pinned is not None and serving and not serving[0].is_given
        assert not usable or is_starting, f"{name} is refused since there is no endpoint, but there are {usable}"
        return
    if entry.request.pinned is not None:
        assert reason == "pinned_endpoint_overloaded", f"{name} is pinned, but refused with {reason}"
        assert serving, f"{name} is refused since {entry.request.pinned} is full, which does not serve its model"
        assert serving[0].is_given, f"{name} is refused since {serving[0].id} is full, which is {serving[0].health}"
    else:
        assert reason == "queue_full", f"{name} is refused with {reason}"
        assert books.is_queue_full(entry), f"{name} is refused since the queue is full, but it is not"
        most = [other for other in books.waiting if books.is_most_in_queue(other, entry)]
        must_displace = bool(most) and all(books.frees_place(other, entry) for other in most)
        assert not must_displace, (
            f"{name} is refused, but {most[0].name} should have been removed from the queue for it"
        )
    taking = books.taking(entry, books.now)
    assert not taking, f"{name} is refused, but {taking} could accept it"


def check_taken_into_queue(books: RouterBooks, entry: ExpectedRequest, *, is_served: bool) -> None:
    """Check a request that `enter` has put into the queue.

    Args:
        books: the records.
        entry: the request.
        is_served: True if it has already left the queue with a lease.
    """
    assert is_served or not books.is_queue_full(entry), f"{entry.name} was put into a full queue"
    usable = [book for book in books.serving(entry) if book.health != "ejected"]
    assert usable, f"{entry.name} waits, but no endpoint can ever accept it"


def check_refused_in_queue(books: RouterBooks, entry: ExpectedRequest, refusal: TrioserveError | None) -> None:
    """Check the refusal of a request that was in the queue, or had a lease and was not sent.

    Args:
        books: the records.
        entry: the request.
        refusal: the error.
    """
    name = entry.name
    assert refusal is not None, f"{name} has ended without a reason"
    if isinstance(refusal, Draining):
        assert books.is_draining, f"{name} is refused as if the router drained"
        assert not entry.is_sent, f"{name} is at its endpoint, but is refused"
        assert entry.prefilled_by is None, f"{name} has its prompt computed, but is refused"
        assert not entry.has_token, f"the stream of {name} must be resumed, but it is refused"
        assert not entry.is_lost, f"{name} lost its endpoint, but is refused"
        return
    assert entry.state == "waiting", f"{name} is {entry.state}, but is refused"
    if isinstance(refusal, RequestPoisoned):
        is_over = entry.is_on_trial and entry.deadline <= books.now
        assert entry.is_condemned or is_over, f"{name} is refused as the cause of broken endpoints, but it is not"
        return
    assert not entry.is_condemned, f"{name} is the cause of broken endpoints, but is refused with {refusal!r}"
    if isinstance(refusal, QueueWaitOver):
        assert entry.own_deadline <= books.now, f"{name} is refused since its deadline has passed, but it has not"
        assert not entry.has_token, f"{name} has a token, but is refused since its queue deadline has passed"
        return
    assert isinstance(refusal, Overloaded), f"{name} is refused with {refusal!r}"
    _check_retry_after(refusal)
    if isinstance(refusal, NoEndpoint) and refusal.reason == "endpoint_lost":
        assert entry.is_lost, f"{name} is refused since its endpoint was lost, but it was not"
        assert not entry.has_token, f"{name} has a token, but is refused like a request without a token"
        assert entry.wait_ends_at <= books.now, (
            f"{name} is refused since it waited too long for another endpoint, but it has time left"
        )
        return
    if isinstance(refusal, NoEndpoint):
        left = [book.id for book in books.serving(entry) if entry.has_token or book.id not in entry.failed_by]
        assert not left, f"{name} is refused since there is no endpoint, but there are {left}"
        return
    if refusal.reason == "queue_full":
        entering = books.entering
        assert entering is not None, f"{name} is removed from the queue, but no request arrives"
        assert books.is_queue_full(entering), f"{name} is removed from a queue that is not full"
        assert books.is_most_in_queue(entry, entering), f"{name} is wrongly removed from the queue for {entering.name}"
        assert books.frees_place(entry, entering), f"{name} is removed from the queue, but {entering.name} does not fit"
        return
    reason = "continuation_wait_over" if entry.has_token else "queue_wait_over"
    assert refusal.reason == reason, f"{name} is refused with {refusal.reason}, expected {reason}"
    assert entry.wait_ends_at <= books.now, f"{name} is refused since it waited too long, but it has time left"
    assert not entry.is_on_trial, f"{name} is on trial, but is refused since it waited too long"


def _check_retry_after(refusal: Overloaded) -> None:
    seconds = refusal.retry_after_seconds
    assert 1 <= seconds <= RETRY_SECONDS_MAX, f"{refusal.reason}: try again in {seconds} s"
