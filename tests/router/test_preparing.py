"""Tests that the router counts a request while its body is read, and forgets the request if the client leaves."""

from __future__ import annotations

import pytest

from trioserve.contracts.endpoint import RoutedRequest
from trioserve.contracts.errors import Draining, NoEndpoint, Overloaded

REQUEST = RoutedRequest(model="m")


def prepare(router, count: int = 1) -> None:
    for _ in range(count):
        router.core.prepare(REQUEST, router.now)


def test_number_of_requests_being_read_is_limited_by_queue_and_free_slots(make_router):
    router = make_router(queue_requests_max=2)
    router.endpoint("a", leases_max=3)
    router.endpoint("b", leases_max=1)
    router.enter()
    prepare(router, 5)
    with pytest.raises(Overloaded) as refusal:
        prepare(router)
    assert refusal.value.reason == "queue_full"
    assert refusal.value.retry_after_seconds > 0
    assert router.core.stats().waiting == 5
    assert router.core.stats().rejections_total == {"queue_full": 1}
    router.core.prepared(REQUEST)
    prepare(router)


def test_limit_counts_waiting_requests_and_requests_that_are_being_read(make_router):
    router = make_router(queue_requests_max=2)
    router.endpoint("a", leases_max=1)
    _holder, _waiter = router.enter(), router.enter()
    prepare(router)
    with pytest.raises(Overloaded):
        prepare(router)
    assert router.core.stats().waiting == 2


def test_requests_are_read_for_free_slots_if_the_queue_limit_is_zero(make_router):
    router = make_router(queue_requests_max=0)
    router.endpoint("a", leases_max=1)
    prepare(router)
    with pytest.raises(Overloaded):
        prepare(router)
    router.core.prepared(REQUEST)
    router.enter()
    with pytest.raises(Overloaded):
        prepare(router)


def test_request_that_no_endpoint_would_accept_is_not_read(make_router):
    router = make_router()
    with pytest.raises(NoEndpoint):
        prepare(router)
    router.endpoint("a")
    router.core.drain(router.now)
    with pytest.raises(Draining):
        prepare(router)
    assert router.core.stats().waiting == 0


def test_requests_of_other_models_do_not_count_when_a_request_is_read(make_router):
    router = make_router(queue_requests_max=1)
    router.endpoint("a", leases_max=1)
    router.endpoint("b", leases_max=1, models="other")
    prepare(router, 2)
    router.core.prepare(RoutedRequest(model="other"), router.now)
