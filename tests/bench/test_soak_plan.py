"""Tests of the plan of a soak: equal seeds give equal clients, and all moments and ways of leaving occur."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from trioserve.bench.settings import SoakSettings
from trioserve.bench.soak_plan import LeaveMethod, Moment, SoakPlan


def plan_of(**changes) -> SoakPlan:
    return SoakPlan(SoakSettings(**{"requests": 2000, "warmup_requests": 10, **changes}), model="m")


def clients(plan: SoakPlan, *, control: bool = False):
    return [one for piece in plan.slices() if piece.is_control == control for one in plan.requests(piece)]


def body(client) -> dict:
    return json.loads(client.planned.body)


def test_seed_decides_the_clients_of_a_soak():
    assert clients(plan_of(requests=50)) == clients(plan_of(requests=50))
    assert clients(plan_of(requests=50)) != clients(plan_of(requests=50, seed=1))


@pytest.mark.parametrize("requests", [2, 299, 10_000])
def test_soak_slices_alternate_and_have_the_requested_number_of_requests(requests):
    slices = plan_of(requests=requests).slices()
    assert [piece.is_control for piece in slices] == [False, True] * (len(slices) // 2)
    assert sum(len(piece.request_indices) for piece in slices if not piece.is_control) == requests
    indices = [index for piece in slices for index in piece.request_indices]
    # Indexes follow the 10 of the warm-up, and no index is used twice.
    assert indices == list(range(10, 10 + len(indices)))


def test_requested_share_of_clients_leaves_at_every_moment_and_in_every_way():
    made = clients(plan_of(requests=4000))
    leaves = [one.leave for one in made if one.leave is not None]
    # For 4000 draws with probability one half, the standard deviation is 32.
    assert len(leaves) == pytest.approx(2000, abs=160)
    assert set(Counter(leave.moment for leave in leaves)) == set(Moment)
    assert set(Counter(leave.way for leave in leaves)) == set(LeaveMethod)
    for one in made:
        if one.leave is not None:
            assert (one.leave.way in (LeaveMethod.RESET, LeaveMethod.HANG_UP)) == (one.http == 2)


def test_no_client_leaves_with_abort_fraction_0():
    assert all(one.leave is None for one in clients(plan_of(abort_fraction=0.0)))


def test_leaving_client_requested_more_tokens():
    for one in clients(plan_of(output_tokens=5)):
        if one.leave is not None:
            assert body(one)["max_tokens"] == 5
            assert one.leave.after_tokens is None or 1 <= one.leave.after_tokens < 5
            assert (one.leave.after_tokens is not None) == (one.leave.moment is Moment.TOKENS)
            assert one.planned.abort_after_tokens == one.leave.after_tokens


def test_client_that_leaves_during_its_body_withholds_some_bytes():
    for one in clients(plan_of()):
        early = one.leave is not None and one.leave.moment is Moment.BODY
        assert 1 <= one.withheld_bytes <= len(one.planned.body) if early else one.withheld_bytes == 0


def test_lengths_stay_within_the_settings_and_some_prompts_are_long():
    made = clients(plan_of(prompt_tokens=8, long_prompt_tokens=100, output_tokens=4))
    lengths = [len(body(one)["prompt"]) for one in made]
    assert {length for length in lengths if length <= 8} == set(range(1, 9))
    assert all(50 <= length <= 100 for length in lengths if length > 8)
    # 2000 draws with LONG_PROMPT_SHARE = 0.03: 60 are expected, with a standard deviation of 7.6.
    assert 25 < sum(length > 8 for length in lengths) < 95
    assert {body(one)["max_tokens"] for one in made if one.leave is None} == {1, 2, 3, 4}


def test_control_clients_stay_and_request_only_the_tokens_they_would_have_received():
    plan = plan_of(output_tokens=9)
    for piece in plan.slices():
        if not piece.is_control:
            continue
        # `_request` returns each client as it behaves outside of the control.
        originals = [plan._request(index) for index in piece.request_indices]
        for original, one in zip(originals, plan.requests(piece), strict=True):
            assert one.leave is None
            assert one.withheld_bytes == 0
            if original.leave is None:
                assert one == original
            elif original.leave.moment is Moment.BODY or (
                original.leave.moment is Moment.WAIT and original.leave.delay < 1.0
            ):
                assert one.planned is None
                assert one.delay == original.leave.delay
            else:
                assert body(one)["prompt"] == body(original)["prompt"]
                assert body(one)["max_tokens"] == (original.leave.after_tokens or 1)
                assert one.planned.abort_after_tokens is None
            assert one.is_survivor == (original.leave is None)
