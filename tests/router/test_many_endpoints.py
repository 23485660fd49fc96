"""Tests routers with many endpoints, and many routers with the same endpoints.

For each request, a router looks at a bounded number of endpoints. Independent routers choose different endpoints.
"""

from __future__ import annotations

import random
from collections import Counter
from itertools import islice

import pytest

from trioserve.contracts.endpoint import EndpointId, EndpointLoad, RoutedRequest
from trioserve.router.candidates import Ring
from trioserve.router.core import RouterCore
from trioserve.router.endpoint_state import EndpointState
from trioserve.router.policies import LOOKS_MAX, POLICIES, Candidate, LeastLoaded, Policy
from trioserve.router.settings import RouterSettings
from trioserve.router.ticket import TicketState

NOW = 100.0
ROUTERS = 64


def ids(count: int) -> list[EndpointId]:
    return [EndpointId(f"e{index}") for index in range(count)]


def router_of(count: int, *, policy=LeastLoaded, seed: int = 0, **settings) -> RouterCore:
    core = RouterCore(
        RouterSettings(slow_start_seconds=0, **settings), policy, on_change=print, rng=random.Random(seed)
    )
    for id in ids(count):
        core.add_endpoint(id, ["m"], NOW)
        core.note_health(id, True, NOW)
    return core


def request(**fields) -> RoutedRequest:
    return RoutedRequest(model="m", **fields)


# --- independent routers ---


def test_routers_that_see_the_same_idle_endpoints_choose_different_endpoints():
    """64 routers choose at the same moment. If ties were broken by position, all routers would choose the first
    endpoint.
    """
    routers = [router_of(LOOKS_MAX, seed=seed) for seed in range(ROUTERS)]
    taken = Counter(router.enter(request(), NOW).endpoint for router in routers)
    assert max(taken.values()) <= 12
    assert len(taken) == LOOKS_MAX


def test_router_always_uses_the_same_tie_breaking_order():
    router = router_of(8, seed=3)
    first = router.enter(request(), NOW)
    router.leave(first, NOW)
    assert router.enter(request(), NOW).endpoint == first.endpoint


@pytest.mark.parametrize("count", [LOOKS_MAX, 32])
@pytest.mark.parametrize("policy", ["least_loaded", "session", "prefix_aware", "kv_aware"])
def test_routers_do_not_all_choose_the_least_loaded_endpoint_of_a_report(policy, count):
    """All routers get reports in which one endpoint is idle.

    Until that endpoint's next report, no router knows about the requests that other routers send to it.
    """
    taken: Counter[EndpointId] = Counter()
    for seed in range(ROUTERS):
        router = router_of(count, policy=POLICIES[policy], seed=seed)
        for id in ids(count):
            running = 0 if id == "e7" else 8
            load = EndpointLoad(running=running, waiting=0, max_num_seqs=16)
            router.note_load(id, load, NOW, sent_when_asked=0)
        taken[router.enter(request(), NOW).endpoint] += 1
    assert taken["e7"] < 22
    assert len(taken) > LOOKS_MAX / 2


def test_both_random_candidates_are_drawn_from_all_endpoints_if_there_are_few():
    router = router_of(6, policy=POLICIES["power_of_two"])
    taken = Counter()
    for _ in range(300):
        ticket = router.enter(request(), NOW)
        taken[ticket.endpoint] += 1
        router.leave(ticket, NOW)
    assert len(taken) == 5  # Ties are broken by a fixed order. In this order, the last endpoint is never preferred.


def test_single_router_finds_the_least_loaded_endpoint():
    router = router_of(LOOKS_MAX)
    endpoints = [router.enter(request(), NOW).endpoint for _ in range(3 * LOOKS_MAX)]
    assert set(Counter(endpoints).values()) == {3}


def test_work_of_other_routers_counts_as_load():
    router = router_of(2)
    router.note_load(ids(2)[0], EndpointLoad(running=5, waiting=0, max_num_seqs=16), NOW, sent_when_asked=0)
    assert {router.enter(request(), NOW).endpoint for _ in range(5)} == {"e1"}


def test_policy_with_the_same_seed_makes_the_same_choices():
    def choices(seed: int) -> list[str | None]:
        router = router_of(40, seed=seed)
        return [router.enter(request(), NOW).endpoint for _ in range(100)]

    assert choices(5) == choices(5) != choices(6)


@pytest.mark.parametrize("policy", ["session", "prefix_aware", "kv_aware"])
def test_every_router_sends_a_session_or_prefix_to_the_same_endpoint(policy):
    endpoints = set()
    for seed in range(8):
        router = router_of(200, policy=POLICIES[policy], seed=seed)
        endpoints.add(router.enter(request(session="s", prefix=(b"name",)), NOW).endpoint)
    assert len(endpoints) <= (1 if policy == "session" else 2)


# --- free slots that all routers see in the same report ---


def router_beside(others: int, *, running: int, own: int = 0, seed: int = 0) -> RouterCore:
    """Return one of several routers of an endpoint that has 16 slots and lets 4 more sequences wait.

    Args:
        others: number of other routers.
        running: sequences that run at the endpoint.
        own: sequences of `running` that belong to this router.
    """
    router = router_of(1, seed=seed, leases_max=64, waiting_depth_max=4)
    router.set_lease_share(EndpointId("e0"), 64 // (others + 1), NOW)
    for _ in range(own):
        router.sent(router.enter(request(), NOW))
    load = EndpointLoad(running=min(16, running), waiting=max(0, running - 16), max_num_seqs=16)
    router.note_load(EndpointId("e0"), load, NOW, sent_when_asked=own)
    return router


def leases_of(router: RouterCore, count: int, now: float = NOW) -> int:
    """Return how many of `count` new requests get a lease."""
    return sum(router.enter(request(), now).state is TicketState.LEASED for _ in range(count))


def test_routers_that_see_the_same_free_slots_divide_these_slots():
    """The endpoint has three free slots, and requests wait at each of 16 routers. Without sharing, the routers would
    grant 48 leases.
    """
    given = [leases_of(router_beside(15, running=17, seed=seed), 4) for seed in range(16)]
    assert 1 <= sum(given) <= 8
    assert max(given) <= 1


def test_router_with_most_of_the_work_gets_most_of_the_free_slots():
    assert leases_of(router_beside(15, running=4, own=2, seed=1), 4) < 4
    assert leases_of(router_beside(1, running=4, own=4), 32) >= 12


def test_single_router_uses_all_free_slots():
    router = router_of(1, leases_max=64, waiting_depth_max=4)
    load = EndpointLoad(running=16, waiting=1, max_num_seqs=16)
    router.note_load(EndpointId("e0"), load, NOW, sent_when_asked=0)
    assert leases_of(router, 4) == 3


def test_any_router_may_use_unused_free_slots_after_a_random_time():
    """The next report of an unchanged endpoint may be a second away."""
    routers = [router_beside(63, running=18, seed=seed) for seed in range(64)]
    waiting = [(router, router.enter(request(), NOW)) for router in routers]
    left = [(router, ticket) for router, ticket in waiting if ticket.state is TicketState.WAITING]
    assert len(left) > 48
    moments = [router.next_tick(NOW) for router, _ in left]
    assert min(moments) >= NOW + 0.3
    assert max(moments) < NOW + 0.6
    assert len(set(moments)) > len(left) / 2  # The routers do not all use the free slots at the same time.
    for (router, ticket), moment in zip(left, moments, strict=True):
        router.tick(moment)
        assert ticket.state is TicketState.LEASED


def test_load_report_of_a_draining_endpoint_is_accepted():
    router = router_beside(3, running=4, own=1)
    router.drain_endpoint(EndpointId("e0"), NOW)
    router.note_load(EndpointId("e0"), EndpointLoad(running=1, waiting=0, max_num_seqs=16), NOW, sent_when_asked=1)
    assert router.endpoints[EndpointId("e0")].in_flight == 1


def test_router_reuses_the_slots_of_its_own_ended_requests_at_once():
    router = router_of(1, leases_max=64, waiting_depth_max=0)
    router.set_lease_share(EndpointId("e0"), 4, NOW)
    tickets = [router.enter(request(), NOW) for _ in range(2)]
    for ticket in tickets:
        router.sent(ticket)
    router.note_load(EndpointId("e0"), EndpointLoad(running=16, waiting=0, max_num_seqs=16), NOW, sent_when_asked=2)
    following = router.enter(request(), NOW)
    assert following.state is TicketState.WAITING
    router.leave(tickets[0], NOW)
    assert following.endpoint == "e0"


# --- the cost of a request ---


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("leases_max", [1, 64])
def test_router_looks_at_a_bounded_number_of_endpoints_for_each_request(policy, leases_max, monkeypatch):
    looks = 0
    has_room = EndpointState.has_room

    def counted(state: EndpointState, sequences: int, now: float) -> bool:
        nonlocal looks
        looks += 1
        return has_room(state, sequences, now)

    router = router_of(1000, policy=POLICIES[policy], leases_max=leases_max)
    monkeypatch.setattr(EndpointState, "has_room", counted)
    tickets = []
    for index in range(1100):  # There are more requests than leases, so some requests wait.
        asked = request(session=f"s{index % 300}", prefix=(b"system prompt", b"%d" % (index % 7)))
        tickets.append(router.enter(asked, NOW))
    for ticket in tickets:
        if ticket.state is TicketState.LEASED:
            router.sent(ticket)
            router.first_token(ticket, NOW)
        router.leave(ticket, NOW)
    assert looks / len(tickets) < 100
    assert router.next_tick(NOW) > NOW


def test_last_free_endpoint_of_many_is_found():
    router = router_of(300, leases_max=1)
    taken = {router.enter(request(), NOW).endpoint for _ in range(300)}
    assert len(taken) == 300
    assert router.enter(request(), NOW).state is TicketState.WAITING


def test_session_whose_endpoints_are_full_goes_to_another_endpoint():
    router = router_of(300, policy=POLICIES["session"], leases_max=1)
    tickets = [router.enter(request(session="one and the same"), NOW) for _ in range(300)]
    assert all(ticket.state is TicketState.LEASED for ticket in tickets)


# --- third-party policies ---


class Watching(Policy):
    """A third-party policy that iterates over all candidates and chooses the last one with a free slot."""

    seen: list[list[Candidate]]

    def __init__(self, rng: object) -> None:
        self.seen = []

    def choose(self, request, candidates):
        assert len(candidates) == len(list(candidates))
        assert candidates[0] in candidates
        self.seen.append(list(candidates))
        return next(candidate.id for candidate in reversed(candidates) if candidate.has_room)


def test_policy_may_iterate_over_all_candidates_in_order_of_addition():
    router = router_of(50, policy=Watching, leases_max=1)
    assert [router.enter(request(), NOW).endpoint for _ in range(3)] == ["e49", "e48", "e47"]
    last = router.policy.seen[-1]
    assert [candidate.id for candidate in last] == ids(50)
    assert [candidate.id for candidate in last if not candidate.has_room] == ["e48", "e49"]


class Odd(LeastLoaded):
    """A third-party policy that calls another policy with some of the candidates."""

    def choose(self, request, candidates):
        return super().choose(request, [one for one in candidates if int(one.id[1:]) % 2])


def test_policy_may_call_another_policy_with_a_plain_list():
    router = router_of(10, policy=Odd)
    assert {router.enter(request(), NOW).endpoint for _ in range(20)} == {"e1", "e3", "e5", "e7", "e9"}


# --- the hash ring ---


def test_adding_or_removing_an_endpoint_keeps_the_ring_order_of_the_other_endpoints():
    ring = Ring()
    for id in ids(50):
        ring.add(id)
    before = {key: list(ring.around(key)) for key in "abcdefgh"}
    assert all(sorted(order) == sorted(ids(50)) for order in before.values())
    ring.remove(EndpointId("e13"))
    ring.add(EndpointId("another"))
    for key, order in before.items():
        after = [id for id in ring.around(key) if id != "another"]
        assert after == [id for id in order if id != "e13"]


def test_hash_ring_spreads_keys_evenly_over_endpoints():
    ring = Ring()
    for id in ids(100):
        ring.add(id)
    homes = Counter(next(ring.around(f"session {index}")) for index in range(10_000))
    assert len(homes) == 100
    assert max(homes.values()) < 150
    seconds = Counter(list(islice(ring.around(f"session {index}"), 2))[1] for index in range(3_000))
    assert max(seconds.values()) < 100


def test_empty_hash_ring_yields_no_endpoint():
    assert list(Ring().around("a")) == []


# --- one endpoint ---


class NoChoice(LeastLoaded):
    """Policy that fails the test if the router calls it."""

    def choose(self, request, candidates):
        raise AssertionError("a policy was asked although there is one endpoint")


def test_policy_is_not_asked_if_one_endpoint_serves_the_model():
    router = router_of(1, policy=NoChoice, leases_max=2)
    tickets = [router.enter(request(), NOW) for _ in range(3)]
    assert [ticket.state for ticket in tickets] == [TicketState.LEASED, TicketState.LEASED, TicketState.WAITING]
    router.leave(tickets[0], NOW)
    assert tickets[2].state is TicketState.LEASED


def test_large_request_gets_the_only_endpoint_with_one_free_slot():
    router = router_of(1, policy=NoChoice, leases_max=4)
    first = router.enter(request(sequences=3), NOW)
    large = router.enter(request(sequences=3), NOW)
    assert (first.state, large.state) == (TicketState.LEASED, TicketState.LEASED)
    small = router.enter(request(), NOW)
    router.leave(first, NOW)
    assert small.state is TicketState.LEASED


def test_only_endpoint_of_a_model_is_tried_again_when_it_is_no_longer_busy():
    router = router_of(1, policy=NoChoice)
    endpoint = router.endpoints[ids(1)[0]]
    endpoint.note_busy(NOW, 5.0)
    waiting = router.enter(request(), NOW)
    assert waiting.state is TicketState.WAITING
    assert router.next_tick(NOW) == NOW + 5.0
    router.tick(NOW + 5.0)
    assert waiting.state is TicketState.LEASED
