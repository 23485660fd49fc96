"""Tests how several routers divide an endpoint's leases without communicating."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioserve.contracts.endpoint import EndpointId
from trioserve.router.peer_shares import lease_share

E = EndpointId("e")
names = st.sets(st.text(max_size=6), min_size=1, max_size=20)


def shares(routers: set[str] | list[str], endpoint: EndpointId, leases_max: int) -> dict[str, int]:
    return {own: lease_share(own, routers, endpoint, leases_max) for own in routers}


@given(routers=names, endpoint=st.text(max_size=6), leases_max=st.integers(1, 100))
def test_lease_shares_add_up_to_the_limit_or_each_share_is_one(routers, endpoint, leases_max):
    given_out = shares(routers, EndpointId(endpoint), leases_max)
    assert sum(given_out.values()) == max(leases_max, len(routers))
    assert max(given_out.values()) - min(given_out.values()) <= 1


@given(routers=names, leases_max=st.integers(1, 100))
def test_no_lease_share_becomes_smaller_when_a_router_ends(routers, leases_max):
    before = shares(routers, E, leases_max)
    for gone in routers:
        left = routers - {gone}
        assert all(lease_share(own, left, E, leases_max) >= before[own] for own in left)


def test_lease_share_is_the_same_if_the_router_is_in_its_own_list_of_peers():
    assert lease_share("a", ["b", "c"], E, 7) == lease_share("a", ["c", "b", "a"], E, 7)


def test_remaining_leases_go_to_different_routers_at_different_endpoints():
    routers = [f"r{index}" for index in range(4)]
    extra = Counter(
        router
        for index in range(400)
        for router, share in shares(routers, EndpointId(f"e{index}"), 5).items()
        if share == 2
    )
    assert sum(extra.values()) == 400
    assert min(extra.values()) > 70


def test_lease_limit_below_one_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        lease_share("a", [], E, 0)
