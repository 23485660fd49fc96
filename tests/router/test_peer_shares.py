"""Tests how each router finds the routers that share an endpoint, after failures, returns and partitions."""

from __future__ import annotations

import pytest

from trioserve.contracts.endpoint import EndpointId
from trioserve.router.peer_shares import HEARD_SECONDS, SETTLE_SECONDS, PeerShares

E = EndpointId("e")
LIMIT = 9


def shares_of(own: str, *others: str) -> PeerShares:
    shares = PeerShares(own)
    shares.set_peers([own, *others])
    shares.share(E, LIMIT, 0.0)
    return shares


def settled(own: str, *others: str) -> PeerShares:
    shares = shares_of(own, *others)
    shares.note_report(E, {}, 0.0)
    return shares


def test_two_routers_share_the_lease_limit_of_an_endpoint():
    a, b = settled("a", "b"), settled("b", "a")
    assert a.share(E, LIMIT, SETTLE_SECONDS) + b.share(E, LIMIT, SETTLE_SECONDS) == LIMIT


def test_single_router_has_the_whole_lease_limit_at_once():
    shares = shares_of("a", "b")
    shares.note_alive("b", False)
    assert shares.share(E, LIMIT, 0.1) == LIMIT


def test_new_router_grants_only_one_lease():
    shares = shares_of("a", "b")
    assert shares.share(E, LIMIT, SETTLE_SECONDS - 0.1) == 1
    assert shares.share(E, LIMIT, SETTLE_SECONDS) > 1


def test_router_without_a_known_name_grants_only_one_lease():
    shares = PeerShares(None)
    shares.set_peers(["a", "b"])
    shares.share(E, LIMIT, 0.0)
    assert shares.share(E, LIMIT, 100.0) == 1


def test_dead_router_loses_its_share_after_the_endpoint_has_not_heard_from_it_for_a_while():
    shares = settled("a", "b")
    shares.note_report(E, {"a": 0.0, "b": 0.2}, 10.0)
    shares.note_alive("b", False)
    last_heard = 10.0 - 0.2
    assert shares.share(E, LIMIT, last_heard + HEARD_SECONDS - 0.01) < LIMIT
    assert shares.share(E, LIMIT, last_heard + HEARD_SECONDS) == LIMIT


def test_routers_that_cannot_see_each_other_share_endpoints_that_both_reach():
    a, b = settled("a", "b"), settled("b", "a")
    for moment in range(1, 100):
        for shares, other in ((a, "b"), (b, "a")):
            shares.note_alive(other, False)
            shares.note_report(E, {"a": 0.1, "b": 0.2}, float(moment))
        if moment >= SETTLE_SECONDS:
            assert a.share(E, LIMIT, moment + 0.5) + b.share(E, LIMIT, moment + 0.5) == LIMIT


def test_partitioned_router_gets_the_whole_limit_of_an_endpoint_that_only_it_reaches():
    a = settled("a", "b")
    a.note_alive("b", False)
    a.note_report(E, {"a": 0.0, "b": 60.0}, 3.0)
    assert a.share(E, LIMIT, 3.0) == LIMIT


def test_rejoining_router_may_grant_one_lease_at_first_then_both_routers_share_the_limit():
    a, b = settled("a", "b"), settled("b", "a")
    a.note_alive("b", False)
    a.note_report(E, {"b": 60.0}, 100.0)
    assert a.share(E, LIMIT, 100.0) == LIMIT
    a.note_report(E, {"b": 0.1}, 101.0)
    b.note_report(E, {"a": 0.1, "b": 0.0}, 101.0)  # This is the first report to router b in a hundred seconds.
    assert b.share(E, LIMIT, 101.0 + SETTLE_SECONDS - 0.1) == 1
    assert a.share(E, LIMIT, 103.0) + b.share(E, LIMIT, 103.0) == LIMIT


def test_reports_about_unknown_routers_do_not_change_the_share_of_leases():
    shares = settled("a", "b")
    shares.note_alive("b", False)
    shares.note_report(E, {"c": 0.0, "a": 0.0}, 3.0)
    assert shares.share(E, LIMIT, 3.0) == LIMIT


def test_shares_of_removed_endpoints_are_deleted():
    shares = settled("a", "b")
    shares.note_report(E, {"b": 0.0}, 3.0)
    shares.forget([])
    shares.note_alive("b", False)
    assert shares.routers_at(E, 3.0) == []


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_every_router_may_grant_at_least_one_lease(limit):
    assert settled("a", "b", "c").share(E, limit, 10.0) >= 1
