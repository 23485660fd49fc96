"""Tests the endpoint that each policy chooses, and the state that each policy keeps."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from trioserve.contracts.endpoint import EndpointId, RoutedRequest
from trioserve.router.continuation import RetryBudget
from trioserve.router.policies import POLICIES, Candidate
from trioserve.router.residency import PrefixIndex


def candidates(**loads: float | None) -> list[Candidate]:
    """Return candidates with these loads. A candidate with load None has no free slot."""
    return [
        Candidate(id=EndpointId(id), load=1.0 if load is None else load, has_room=load is not None)
        for id, load in loads.items()
    ]


def request(**fields: object) -> RoutedRequest:
    return RoutedRequest(model="m", **fields)  # type: ignore[arg-type]


def make(name: str, seed: int = 0):
    return POLICIES[name](random.Random(seed))


@pytest.mark.parametrize("name", POLICIES)
def test_policy_chooses_only_endpoints_with_a_free_slot(name):
    policy = make(name)
    rng = random.Random(1)
    for _ in range(300):
        loads = {f"e{index}": rng.choice([None, rng.random()]) for index in range(rng.randrange(1, 6))}
        if all(load is None for load in loads.values()):
            continue
        asked = request(session=rng.choice([None, "s"]), prefix=(b"p",))
        chosen = policy.choose(asked, candidates(**loads))
        assert loads[chosen] is not None
        policy.note_sent(asked, chosen)
        policy.note_resident(chosen, 16, [b"p"])
        policy.note_stored(chosen, [b"q"])


def test_round_robin_chooses_endpoints_in_turn_and_skips_full_endpoints():
    policy = make("round_robin")
    assert [policy.choose(request(), candidates(a=0, b=0, c=0)) for _ in range(4)] == ["a", "b", "c", "a"]
    assert policy.choose(request(), candidates(a=0, b=None, c=0)) == "c"


def test_least_loaded_chooses_the_least_loaded_endpoint():
    assert make("least_loaded").choose(request(), candidates(a=0.5, b=0.2, c=None)) == "b"


def test_power_of_two_never_chooses_the_busiest_endpoint_and_spreads_requests_over_the_others():
    policy = make("power_of_two")
    counts = Counter(policy.choose(request(), candidates(a=0.9, b=0.5, c=0.1)) for _ in range(600))
    assert counts["a"] == 0
    assert 150 < counts["b"] < 250
    assert 350 < counts["c"] < 450


def test_power_of_two_repeats_its_choices_with_the_same_seed():
    def run() -> list[str]:
        policy = make("power_of_two", seed=7)
        return [policy.choose(request(), candidates(a=0, b=0, c=0, d=0)) for _ in range(50)]

    assert run() == run()


def test_session_keeps_its_endpoint_if_other_endpoints_are_added_or_removed():
    policy = make("session")
    everyone = candidates(a=0, b=0, c=0, d=0)
    homes = {f"s{index}": policy.choose(request(session=f"s{index}"), everyone) for index in range(400)}
    assert min(Counter(homes.values()).values()) > 60
    fewer = [candidate for candidate in everyone if candidate.id != "c"]
    for session, home in homes.items():
        if home != "c":
            assert policy.choose(request(session=session), fewer) == home


def test_session_moves_if_its_endpoint_is_far_above_the_average_load():
    policy = make("session")
    home = policy.choose(request(session="s"), candidates(a=0, b=0))
    other = "b" if home == "a" else "a"
    assert policy.choose(request(session="s"), candidates(**{home: 0.24, other: 0.0})) == home
    assert policy.choose(request(session="s"), candidates(**{home: 0.9, other: 0.1})) == other


def test_requests_without_a_session_go_to_the_least_loaded_endpoint():
    assert make("session").choose(request(), candidates(a=0.5, b=0.1)) == "b"


def test_prefix_goes_to_the_endpoint_with_the_longest_match():
    policy = make("prefix_aware")
    policy.note_sent(request(prefix=(b"1", b"2")), EndpointId("a"))
    policy.note_sent(request(prefix=(b"1",)), EndpointId("b"))
    assert policy.choose(request(prefix=(b"1", b"2", b"3")), candidates(a=0.2, b=0.0)) == "a"
    assert policy.choose(request(prefix=(b"9",)), candidates(a=0.2, b=0.0)) == "b"


def test_prefix_match_does_not_outweigh_high_load():
    policy = make("prefix_aware")
    policy.note_sent(request(prefix=(b"1",)), EndpointId("a"))
    assert policy.choose(request(prefix=(b"1",)), candidates(a=0.5, b=0.0)) == "b"


def test_policy_forgets_an_endpoint_that_lost_its_blocks():
    policy = make("prefix_aware")
    policy.note_sent(request(prefix=(b"1",)), EndpointId("a"))
    policy.forget(EndpointId("a"))
    assert policy.choose(request(prefix=(b"1",)), candidates(a=0.2, b=0.0)) == "b"


A, B = EndpointId("a"), EndpointId("b")


def test_kv_aware_prefers_reported_blocks_to_sent_prefixes():
    policy = make("kv_aware")
    asked = request(prefix=(b"p",), blocks={16: (b"1", b"2")})
    for endpoint in (A, B):
        policy.note_resident(endpoint, 16, [])
    policy.note_sent(asked, A)
    policy.note_stored(B, [b"1", b"2"])
    assert policy.choose(asked, candidates(a=0.0, b=0.2)) == "b"
    policy.note_removed(B, [b"1", b"2"])
    policy.note_stored(A, [b"1"])
    assert policy.choose(asked, candidates(a=0.2, b=0.0)) == "a"


def test_kv_aware_ignores_resident_blocks_after_a_missing_block():
    policy = make("kv_aware")
    policy.note_resident(A, 16, [b"1", b"3", b"4", b"5"])
    policy.note_resident(B, 16, [b"1", b"2"])
    asked = request(blocks={16: (b"1", b"2", b"3", b"4", b"5")})
    assert policy.choose(asked, candidates(a=0.0, b=0.2)) == "b"


def test_kv_aware_compares_tokens_if_block_sizes_differ():
    policy = make("kv_aware")
    policy.note_resident(A, 16, [b"1", b"2", b"3"])
    policy.note_resident(B, 64, [b"x"])
    assert policy.block_sizes() == {16, 64}
    asked = request(blocks={16: (b"1", b"2", b"3", b"4"), 64: (b"x",)})
    assert policy.choose(asked, candidates(a=0.0, b=0.2)) == "b"


def test_kv_aware_match_does_not_outweigh_high_load():
    policy = make("kv_aware")
    policy.note_resident(A, 16, [b"1"])
    policy.note_resident(B, 16, [])
    assert policy.choose(request(blocks={16: (b"1",)}), candidates(a=0.2, b=0.0)) == "a"
    assert policy.choose(request(blocks={16: (b"1",)}), candidates(a=0.5, b=0.0)) == "b"
    assert policy.choose(request(blocks={16: (b"1",)}), candidates(a=None, b=0.9)) == "b"


def test_kv_aware_guesses_like_prefix_aware_without_reports():
    policy = make("kv_aware")
    asked = request(prefix=(b"p",), blocks={16: (b"1",)})
    policy.note_sent(asked, A)
    assert policy.choose(asked, candidates(a=0.2, b=0.0)) == "a"
    assert policy.choose(request(), candidates(a=0.2, b=0.0)) == "b"


def test_kv_aware_compares_a_guess_with_a_report():
    policy = make("kv_aware")
    policy.note_resident(A, 16, [b"1", b"2", b"3"])
    asked = request(prefix=(b"p",), blocks={16: (b"1", b"2", b"3")})
    policy.note_sent(asked, B)  # The prefix is estimated as 32 tokens.
    assert policy.choose(asked, candidates(a=0.2, b=0.0)) == "a"
    policy.note_removed(A, [b"2"])
    assert policy.choose(asked, candidates(a=0.0, b=0.2)) == "b"


def test_kv_aware_follows_an_equal_prefix_that_is_still_computed():
    policy = make("kv_aware")
    asked = request(prefix=(b"p",), blocks={16: (b"1",)})
    for endpoint in (A, B):
        policy.note_resident(endpoint, 16, [])
    policy.note_sent(asked, A)
    assert policy.choose(asked, candidates(a=0.1, b=0.0)) == "a"


def test_kv_aware_forgets_the_blocks_of_an_endpoint_that_stopped_reporting():
    policy = make("kv_aware")
    policy.note_resident(A, 16, [b"1"])
    policy.note_unknown(A)
    assert policy.block_sizes() == frozenset()
    policy.note_stored(A, [b"1"])  # A change is ignored if no complete list was reported before.
    assert policy.choose(request(blocks={16: (b"1",)}), candidates(a=0.2, b=0.0)) == "b"


def test_prefix_match_ends_at_the_first_missing_block():
    index = PrefixIndex()
    index.add(EndpointId("a"), [b"1", b"2", b"3"])
    index.add(EndpointId("b"), [b"2", b"3"])
    index.add(EndpointId("c"), [b"1"])
    assert index.match([b"1", b"2", b"9", b"3"]) == {"a": 2, "c": 1}
    assert index.match([b"9", b"1"]) == {}


def test_prefix_index_is_bounded_and_removes_the_first_block_of_a_prefix_last():
    index = PrefixIndex(blocks_max=4)
    index.add(EndpointId("a"), [b"1", b"2", b"3"])
    index.add(EndpointId("a"), [b"8", b"9"])
    assert len(index) == 4
    assert index.match([b"1", b"2", b"3"]) == {"a": 2}


def test_retry_budget_allows_a_share_of_the_requests_plus_a_minimum_rate():
    budget = RetryBudget(0.1, 1.0)
    taken = sum(budget.take(0.0) for _ in range(100))
    assert taken == 10  # The budget has saved this number of retries.
    for _ in range(20):
        budget.note_request()
    assert [budget.take(0.0) for _ in range(3)] == [True, True, False]
    assert budget.take(1.0)
    assert not budget.take(1.0)


def test_zero_retry_budget_allows_no_retry():
    budget = RetryBudget(0.0, 0.0)
    assert not budget.take(0.0)
    assert not budget.take(1000.0)
