"""A request that is read before it can enter is counted meanwhile, and given up without a trace."""

from __future__ import annotations

import pytest

from trioserve.contracts.endpoint import RoutedRequest
from trioserve.contracts.errors import Draining, NoEndpoint, Overloaded

REQUEST = RoutedRequest(model="m")


def prepare(router, count: int = 1) -> None:
    for _ in range(count):
        router.core.prepare(REQUEST, router.now)


def test_as_many_are_read_as_there_is_room_for_in_the_line_and_at_the_endpoints(make_router):
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


def test_those_in_line_are_counted_with_those_that_are_read(make_router):
    router = make_router(queue_requests_max=2)
    router.endpoint("a", leases_max=1)
    _holder, _waiter = router.enter(), router.enter()
    prepare(router)
    with pytest.raises(Overloaded):
        prepare(router)
    assert router.core.stats().waiting == 2


def test_without_a_line_a_free_seat_is_still_worth_reading_for(make_router):
    router = make_router(queue_requests_max=0)
    router.endpoint("a", leases_max=1)
    prepare(router)
    with pytest.raises(Overloaded):
        prepare(router)
    router.core.prepared(REQUEST)
    router.enter()
    with pytest.raises(Overloaded):
        prepare(router)


def test_nothing_is_read_that_nobody_would_take(make_router):
    router = make_router()
    with pytest.raises(NoEndpoint):
        prepare(router)
    router.endpoint("a")
    router.core.drain(router.now)
    with pytest.raises(Draining):
        prepare(router)
    assert router.core.stats().waiting == 0


def test_other_models_are_not_counted(make_router):
    router = make_router(queue_requests_max=1)
    router.endpoint("a", leases_max=1)
    router.endpoint("b", leases_max=1, models="other")
    prepare(router, 2)
    router.core.prepare(RoutedRequest(model="other"), router.now)
