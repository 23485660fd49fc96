"""Tests streams that leave an endpoint on purpose. A stream first gets a lease at another endpoint, or leaves without a
lease at the deadline.
"""

from __future__ import annotations

import math

import pytest

from trioserve.router.endpoint_state import Fault
from trioserve.router.ticket import TicketState


def leases(router):
    return dict(router.core.stats().leases)


def streaming(router, *, can_resume=True, **fields):
    """Return a ticket whose client has received output."""
    ticket = router.sent(**fields)
    router.core.first_token(ticket, router.now, can_resume=can_resume)
    return ticket


def empty(router, id, *, seconds=10.0):
    router.core.drain_endpoint(id, router.now, move_seconds=seconds)


def arrive(router, ticket):
    """Let a stream move to its next endpoint and resume there."""
    router.core.moved(ticket, router.now)
    router.core.sent(ticket)
    router.core.first_token(ticket, router.now, can_resume=True)


def test_stream_has_its_next_lease_before_it_leaves_its_endpoint(make_router):
    router = make_router()
    a = router.endpoint("a")
    ticket = streaming(router)
    router.endpoint("b")
    empty(router, a)
    assert router.to_move == [ticket]
    assert (ticket.endpoint, ticket.next_lease.endpoint) == ("a", "b")
    assert leases(router) == {"a": 1, "b": 1}
    router.core.moved(ticket, router.now)
    assert router.gone == ["a"]
    assert (ticket.state, ticket.endpoint, ticket.next_lease) == (TicketState.LEASED, "b", None)
    router.core.sent(ticket)
    router.core.first_token(ticket, router.now, can_resume=True)
    router.leave(ticket)
    assert leases(router) == {"b": 0}
    assert router.core.stats().moves_total == 1
    assert router.core.next_tick(router.now) == math.inf


def test_stream_keeps_running_if_no_other_endpoint_has_a_free_slot(make_router):
    router = make_router()
    a = router.endpoint("a", leases_max=1)
    ticket = streaming(router)
    router.endpoint("b", leases_max=1)
    other = router.sent()
    empty(router, a)
    assert router.to_move == []
    assert router.core.stats().moving == 1
    router.after(5)
    assert ticket.state is TicketState.LEASED
    router.leave(other)
    assert ticket.next_lease.endpoint == "b"


def test_stream_that_ends_before_it_leaves_its_endpoint_releases_both_leases(make_router):
    router = make_router()
    a = router.endpoint("a")
    ticket = streaming(router)
    router.endpoint("b")
    empty(router, a)
    router.leave(ticket)
    router.core.moved(ticket, router.now)
    assert leases(router) == {"b": 0}
    assert router.gone == ["a"]


def test_stream_whose_endpoint_breaks_uses_its_next_lease(make_router):
    router = make_router()
    a = router.endpoint("a")
    ticket = streaming(router)
    router.endpoint("b")
    empty(router, a)
    assert router.core.failed(ticket, Fault.BROKE, router.now, token_count=20)
    assert (ticket.state, ticket.endpoint) == (TicketState.LEASED, "b")
    assert leases(router) == {"b": 1}
    assert router.core.stats().continuations_total == 1


def test_stream_that_must_not_resume_releases_both_leases(make_router):
    router = make_router(breaks_max=1)
    a = router.endpoint("a")
    ticket = streaming(router)
    router.endpoint("b")
    empty(router, a)
    assert not router.core.failed(ticket, Fault.BROKE, router.now, token_count=20)
    assert leases(router) == {"b": 0}


def test_moving_stream_whose_lease_ended_at_its_first_token_holds_a_new_lease_until_it_resumes(make_router):
    router = make_router(lease_until="first_token")
    a = router.endpoint("a")
    ticket = streaming(router)
    b = router.endpoint("b")
    empty(router, a)
    assert leases(router) == {"a": 0, "b": 1}
    arrive(router, ticket)
    assert ticket.state is TicketState.RUNNING_FREE
    assert leases(router) == {"b": 0}
    assert router.core.endpoints[b].in_flight == 1


def test_number_of_streams_that_move_at_the_same_time_is_limited(make_router):
    router = make_router(moves_at_once_max=2)
    a = router.endpoint("a")
    tickets = [streaming(router) for _ in range(5)]
    router.endpoint("b")
    empty(router, a)
    assert router.to_move == tickets[:2]
    arrive(router, tickets[0])
    assert router.to_move == tickets[:3]
    router.leave(tickets[1])
    assert router.to_move == tickets[:4]
    router.core.failed(tickets[2], Fault.BROKE, router.now)
    assert router.to_move == tickets[:4], "the stream still moves"


def test_stream_that_begins_at_an_endpoint_that_is_being_emptied_moves_too(make_router):
    router = make_router()
    a = router.endpoint("a")
    ticket = router.sent()
    router.endpoint("b")
    empty(router, a)
    assert router.to_move == []
    router.core.first_token(ticket, router.now, can_resume=True)
    assert router.to_move == [ticket]


@pytest.mark.parametrize("how", ["cannot go on", "pinned"])
def test_stream_that_cannot_resume_elsewhere_stays_at_its_endpoint(make_router, how):
    router = make_router()
    a = router.endpoint("a")
    streaming(router, can_resume=how != "cannot go on", pinned="a" if how == "pinned" else None)
    router.endpoint("b")
    empty(router, a)
    router.after(60)
    assert router.to_move == []
    assert leases(router) == {"a": 1, "b": 0}


def test_stream_that_cannot_leave_releases_its_next_lease(make_router):
    router = make_router(moves_at_once_max=1)
    a = router.endpoint("a")
    first, second = streaming(router), streaming(router)
    router.endpoint("b")
    empty(router, a)
    router.core.stays(first, router.now)
    assert router.to_move == [first, second]
    assert (first.endpoint, first.next_lease) == ("a", None)
    assert leases(router) == {"a": 2, "b": 1}


def test_remaining_requests_leave_without_a_lease_at_the_deadline(make_router):
    router = make_router()
    a = router.endpoint("a", leases_max=4)
    stream, unbegun, stuck = streaming(router), router.sent(), streaming(router, can_resume=False)
    router.endpoint("b", leases_max=1)
    other = router.sent()
    empty(router, a, seconds=5)
    router.after(4.9)
    assert router.to_move == []
    router.after(0.2)
    assert router.to_move == [stream, unbegun]
    assert router.core.failed(stream, Fault.LEAVING, router.now)
    assert router.core.failed(unbegun, Fault.LEAVING, router.now)
    assert stream.state is unbegun.state is TicketState.WAITING
    router.leave(other)
    assert stream.endpoint == "b", "this stream has waited longer"
    router.leave(stream)
    assert unbegun.endpoint == "b", "a request without a token is served before newcomers, like a stream"
    assert stuck.endpoint == "a"
    router.after(3)
    assert len(router.to_move) == 2, "each request is asked to move once"


def test_requests_stay_after_the_move_deadline_if_no_other_endpoint_serves_the_model(make_router):
    router = make_router()
    a = router.endpoint("a")
    streaming(router)
    empty(router, a, seconds=1)
    router.after(2)
    assert router.to_move == []


def test_endpoint_that_is_added_again_keeps_its_requests(make_router):
    router = make_router()
    a = router.endpoint("a", leases_max=2)
    tickets = [streaming(router), streaming(router)]
    router.endpoint("b", leases_max=1)
    empty(router, a)
    assert router.to_move == tickets[:1]
    router.endpoint("a", leases_max=2)
    router.leave(tickets[0])
    assert router.to_move == tickets[:1]
    assert router.core.stats().moving == 0
    assert router.core.next_tick(router.now) == math.inf


def test_streams_that_wait_to_resume_are_served_before_streams_that_wait_to_move(make_router):
    router = make_router()
    a = router.endpoint("a", leases_max=2)
    moving, broken = streaming(router), streaming(router)
    router.endpoint("b", leases_max=1)
    other = router.sent()
    empty(router, a)
    assert router.core.failed(broken, Fault.BROKE, router.now, token_count=20)
    router.leave(other)
    assert broken.endpoint == "b"
    router.leave(broken)
    assert moving.next_lease.endpoint == "b"


def test_draining_endpoint_can_be_emptied_later(make_router):
    router = make_router()
    a = router.endpoint("a")
    ticket = streaming(router)
    router.endpoint("b")
    router.core.drain_endpoint(a, router.now)
    assert router.to_move == []
    empty(router, a)
    assert router.to_move == [ticket]


def test_stream_moves_to_an_endpoint_with_the_same_fingerprint(make_router):
    router = make_router()
    a = router.endpoint("a")
    router.core.note_fingerprint(a, "x")
    ticket = streaming(router)
    router.core.note_fingerprint(router.endpoint("b"), "y")
    router.core.note_fingerprint(router.endpoint("c"), "x")
    empty(router, a)
    assert ticket.next_lease.endpoint == "c"


def test_streams_are_moved_off_a_stopping_endpoint_until_it_passes_a_health_check(make_router):
    router = make_router()
    a = router.endpoint("a")
    first, second = streaming(router), streaming(router)
    router.endpoint("b", leases_max=1)
    router.core.note_leaving(a, router.now, move_seconds=10)
    assert router.to_move == [first]
    router.after(5)
    router.core.note_leaving(a, router.now, move_seconds=10)
    assert router.enter().state is TicketState.WAITING
    router.core.note_health(a, True, router.now)
    router.leave(first)
    assert router.to_move == [first]
    assert second.endpoint == "a"
    assert router.gone == []
    assert router.core.next_tick(router.now) == math.inf


def test_repeated_leaving_report_does_not_move_the_deadline(make_router):
    router = make_router()
    a = router.endpoint("a")
    unbegun = router.sent()
    router.endpoint("b")
    router.core.note_leaving(a, router.now, move_seconds=10)
    router.after(9)
    router.core.note_leaving(a, router.now, move_seconds=10)
    router.after(2)
    assert router.to_move == [unbegun]


def test_hung_endpoint_is_ejected_at_once_until_it_passes_a_check(make_router):
    router = make_router(failures_max=3)
    a = router.endpoint("a")
    router.core.note_health(a, False, router.now, is_hung=True)
    state = router.core.endpoints[a]
    assert not state.accepts_requests
    assert state.hangs_total == 1
    router.core.note_health(a, False, router.now, is_hung=True)
    assert state.hangs_total == 1
    router.core.note_health(a, True, router.now)
    assert state.accepts_requests


def moved(router, id):
    state = router.core.endpoints[id]
    return state.moved_from_total, state.moved_to_total


@pytest.mark.parametrize("way", ["moved", "broke_off_on_the_way", "broke_off_and_waited"])
def test_each_endpoint_counts_the_streams_that_left_and_the_streams_that_arrived(make_router, way):
    router = make_router()
    a = router.endpoint("a", leases_max=2)
    ticket, other = streaming(router), streaming(router)
    if way == "broke_off_and_waited":
        assert router.core.failed(ticket, Fault.BROKE, router.now, token_count=20)
        assert moved(router, a) == (0, 0)  # The stream has not resumed yet.
        b = router.endpoint("b", leases_max=1)
    else:
        b = router.endpoint("b", leases_max=1)
        empty(router, a)
        assert moved(router, b) == (0, 0)  # The stream has only a lease at this endpoint, and has not moved yet.
        if way == "moved":
            router.core.moved(ticket, router.now)
        else:
            assert router.core.failed(ticket, Fault.BROKE, router.now, token_count=20)
    assert ticket.endpoint == b
    assert (moved(router, a), moved(router, b)) == ((1, 0), (0, 1))
    router.leave(other)
    router.leave(ticket)
