"""Who shares an endpoint, as each router sees it: dying, coming back, and partitions."""

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


def test_two_routers_share_the_limit():
    a, b = settled("a", "b"), settled("b", "a")
    assert a.share(E, LIMIT, SETTLE_SECONDS) + b.share(E, LIMIT, SETTLE_SECONDS) == LIMIT


def test_a_router_that_is_alone_has_all_at_once():
    shares = shares_of("a", "b")
    shares.note_alive("b", False)
    assert shares.share(E, LIMIT, 0.1) == LIMIT


def test_one_that_has_just_come_gives_one_lease():
    shares = shares_of("a", "b")
    assert shares.share(E, LIMIT, SETTLE_SECONDS - 0.1) == 1
    assert shares.share(E, LIMIT, SETTLE_SECONDS) > 1


def test_one_that_does_not_know_its_name_gives_one_lease():
    shares = PeerShares(None)
    shares.set_peers(["a", "b"])
    shares.share(E, LIMIT, 0.0)
    assert shares.share(E, LIMIT, 100.0) == 1


def test_the_share_of_a_dead_router_is_the_others_when_the_endpoint_has_not_heard_from_it():
    shares = settled("a", "b")
    shares.note_report(E, {"a": 0.0, "b": 0.2}, 10.0)
    shares.note_alive("b", False)
    last_heard = 10.0 - 0.2
    assert shares.share(E, LIMIT, last_heard + HEARD_SECONDS - 0.01) < LIMIT
    assert shares.share(E, LIMIT, last_heard + HEARD_SECONDS) == LIMIT


def test_routers_that_cannot_see_each_other_share_what_both_reach():
    a, b = settled("a", "b"), settled("b", "a")
    for moment in range(1, 100):
        for shares, other in ((a, "b"), (b, "a")):
            shares.note_alive(other, False)
            shares.note_report(E, {"a": 0.1, "b": 0.2}, float(moment))
        if moment >= SETTLE_SECONDS:
            assert a.share(E, LIMIT, moment + 0.5) + b.share(E, LIMIT, moment + 0.5) == LIMIT


def test_an_endpoint_that_one_router_does_not_reach_is_the_others_when_they_cannot_see_each_other():
    a = settled("a", "b")
    a.note_alive("b", False)
    a.note_report(E, {"a": 0.0, "b": 60.0}, 3.0)
    assert a.share(E, LIMIT, 3.0) == LIMIT


def test_one_that_is_heard_again_has_its_share_at_once_and_gives_little_itself():
    a, b = settled("a", "b"), settled("b", "a")
    a.note_alive("b", False)
    a.note_report(E, {"b": 60.0}, 100.0)
    assert a.share(E, LIMIT, 100.0) == LIMIT
    a.note_report(E, {"b": 0.1}, 101.0)
    b.note_report(E, {"a": 0.1, "b": 0.0}, 101.0)  # its first report in a hundred seconds
    assert b.share(E, LIMIT, 101.0 + SETTLE_SECONDS - 0.1) == 1
    assert a.share(E, LIMIT, 103.0) + b.share(E, LIMIT, 103.0) == LIMIT


def test_names_of_nobody_here_do_not_count():
    shares = settled("a", "b")
    shares.note_alive("b", False)
    shares.note_report(E, {"c": 0.0, "a": 0.0}, 3.0)
    assert shares.share(E, LIMIT, 3.0) == LIMIT


def test_what_is_gone_is_forgotten():
    shares = settled("a", "b")
    shares.note_report(E, {"b": 0.0}, 3.0)
    shares.forget([])
    shares.note_alive("b", False)
    assert shares.routers_at(E, 3.0) == []


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_nobody_has_nothing(limit):
    assert settled("a", "b", "c").share(E, limit, 10.0) >= 1
