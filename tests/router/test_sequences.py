"""Tests requests with several sequences.

Such a request does not block slots that it does not use, and later requests do not overtake it.
"""

from __future__ import annotations

import pytest

from trioserve.contracts.endpoint import EndpointLoad
from trioserve.contracts.errors import InvalidRequest, Overloaded
from trioserve.router.core import Fault
from trioserve.router.ticket import TicketState

WAITING, LEASED = TicketState.WAITING, TicketState.LEASED


def leases(router):
    return dict(router.core.stats().leases)


def test_large_request_goes_to_an_endpoint_with_one_free_slot(make_router):
    router = make_router()
    a = router.endpoint("a", leases_max=4)
    holders = [router.enter() for _ in range(3)]
    large = router.enter(sequences=4)
    assert large.state is LEASED
    assert leases(router) == {"a": 4}  # Three sequences of the request wait for slots at this endpoint.
    assert router.core.endpoints[a].in_flight == 7
    router.leave(large, *holders)
    assert leases(router) == {"a": 0}


def test_free_slots_go_first_to_the_waiting_sequences_of_a_large_request(make_router):
    router = make_router()
    router.endpoint("a", leases_max=4)
    holders = [router.enter() for _ in range(3)]
    router.enter(sequences=3)
    later = router.enter()
    router.leave(holders[0], holders[1])
    assert (later.state, leases(router)) == (WAITING, {"a": 4})
    router.leave(holders[2])
    assert later.state is LEASED


def test_large_request_prefers_an_endpoint_with_slots_for_all_sequences(make_router):
    router = make_router()
    router.endpoint("a", leases_max=8)
    router.endpoint("b", leases_max=4)
    for _ in range(6):
        router.enter(pinned="a")
    router.enter(pinned="b")
    large = router.enter(sequences=3)
    assert large.endpoint == "b"


def test_later_requests_wait_only_for_slots_that_a_large_request_uses(make_router):
    router = make_router()
    router.endpoint("a", leases_max=4)
    long_one = router.enter()
    for _ in range(20):
        large, small = router.enter(sequences=4), router.enter()
        assert (large.state, small.state) == (LEASED, WAITING)
        router.leave(large)
        assert small.state is LEASED
        router.leave(small)
    assert long_one.state is LEASED


def test_no_request_overtakes_a_large_request(make_router):
    router = make_router()
    router.endpoint("a", leases_max=2)
    holders = [router.enter(), router.enter()]
    large, small = router.enter(sequences=2), router.enter()
    router.leave(holders[0])
    assert (large.state, small.state) == (LEASED, WAITING)


def test_request_larger_than_the_limit_shares_an_endpoint(make_router):
    router = make_router()
    router.endpoint("a", leases_max=2)
    other = router.enter()
    large = router.enter(sequences=8)
    assert (large.state, leases(router)) == (LEASED, {"a": 2})
    router.leave(other)
    assert router.enter().state is WAITING


def test_large_pinned_request_needs_one_free_slot(make_router):
    router = make_router()
    router.endpoint("a", leases_max=2)
    router.enter()
    assert router.enter(sequences=2, pinned="a").state is LEASED
    with pytest.raises(Overloaded, match='"a" that the request asks for has no room'):
        router.enter(sequences=2, pinned="a")


def test_large_request_that_failed_at_another_endpoint_needs_one_free_slot(make_router):
    router = make_router()
    router.endpoint("a", leases_max=4)
    router.endpoint("b", leases_max=4)
    holders = [router.enter(pinned="b") for _ in range(4)]
    large = router.sent(sequences=4)
    assert router.core.failed(large, Fault.BROKE, router.now)
    small = router.enter(pinned="a")
    router.leave(holders[0])
    assert (large.state, large.endpoint, small.endpoint) == (LEASED, "b", "a")


def test_large_request_goes_to_an_endpoint_where_one_more_sequence_may_wait(make_router):
    router = make_router(waiting_depth_max=1)
    a = router.endpoint("a", leases_max=20)
    router.core.note_load(a, EndpointLoad(running=2, waiting=0, max_num_seqs=2), router.now, sent_when_asked=0)
    large, small = router.enter(sequences=5), router.enter()
    assert (large.state, small.state) == (LEASED, WAITING)


@pytest.mark.parametrize("sequences", [0, 9, 2**31])
def test_request_with_too_many_sequences_is_refused_with_the_allowed_number(make_router, sequences):
    router = make_router(sequences_max=8)
    router.endpoint("a", leases_max=4)
    with pytest.raises(InvalidRequest, match=f"asks for {sequences} responses.* 1 to 8") as refusal:
        router.enter(sequences=sequences)
    assert refusal.value.param == "n"
    assert router.core.stats().waiting == 0
    assert router.enter(sequences=8).state is LEASED


def test_requests_that_wait_again_are_served_in_the_same_order_in_every_stage(make_router):
    """Requests with computed prompts keep arriving. A request that can use only one endpoint must not wait for all of
    these requests.
    """
    router = make_router()
    router.endpoint("p", role="prefill", leases_max=4)
    router.endpoint("d", role="both", leases_max=1)
    holder = router.enter(pinned="d")
    failed = router.sent(pinned=None)
    assert failed.endpoint == "p"
    assert router.core.failed(failed, Fault.BROKE, router.now)
    split = router.sent(can_be_disaggregated=True)
    router.core.prefilled(split, router.now)
    assert (failed.state, split.state) == (WAITING, WAITING)
    router.leave(holder)
    assert (failed.state, split.state) == (LEASED, WAITING)
