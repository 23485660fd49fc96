"""Tests of request states, and of properties that depend on a request's tokens."""

from __future__ import annotations

from itertools import product

import pytest

from trioserve.contracts.events import Phase
from trioserve.contracts.ids import RequestId
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.core.request_state import LiveRequest, RequestStatus

LEGAL = """
    waiting -> waiting_for_remote_kv running finished
    waiting_for_remote_kv -> waiting finished
    running -> preempted ended finished
    preempted -> running finished
    ended -> finished
    finished ->
"""


def live_request(prompt_count: int = 3, priority: int = 0, arrival_index: int = 0) -> LiveRequest:
    request = EngineRequest(
        id=RequestId("a"),
        prompt_token_ids=tuple(range(prompt_count)),
        sampling=SamplingParams(),
        output_tokens_max=8,
        stop_token_ids=frozenset(),
        seed=0,
        priority=priority,
    )
    return LiveRequest(request, arrival_index)


def legal_moves() -> set[tuple[RequestStatus, RequestStatus]]:
    lines = [line.split("->") for line in LEGAL.strip().splitlines()]
    return {(RequestStatus(old.strip()), RequestStatus(new)) for old, news in lines for new in news.split()}


@pytest.mark.parametrize(("old", "new"), list(product(RequestStatus, RequestStatus)), ids=lambda status: status.value)
def test_only_transitions_in_the_table_of_request_states_are_allowed(old, new):
    """Scenario S18 of tests/README.md: no transition leaves FINISHED."""
    live = live_request()
    live.status = old
    if (old, new) in legal_moves():
        live.move(new)
        assert live.status is new
    else:
        with pytest.raises(AssertionError, match=f"a: {old.value} -> {new.value}"):
            live.move(new)
        assert live.status is old


@pytest.mark.parametrize(
    ("output", "computed", "expect"),
    [(0, 0, (3, 0, 3)), (0, 2, (3, 0, 1)), (1, 3, (3, 1, 1)), (2, 0, (3, 2, 5))],
)
def test_known_tokens_that_are_not_computed_are_scheduled(output, computed, expect):
    live = live_request()
    live.tokens += [9] * output
    live.computed_count = computed
    assert (live.prompt_count, live.output_count, live.due_count) == expect


def test_requests_are_sorted_by_priority_then_arrival():
    urgent, early, late = live_request(priority=-1, arrival_index=9), live_request(), live_request(arrival_index=1)
    assert sorted([late, early, urgent], key=lambda live: live.order) == [urgent, early, late]


def test_request_phase_never_returns_to_an_earlier_phase():
    live = live_request()
    assert live.phase is Phase.QUEUED
    live.cached_token_count = 0  # The request has run.
    assert live.phase is Phase.PREFILL
    live.tokens.append(1)
    assert live.phase is Phase.DECODE
    live.status, live.computed_count = RequestStatus.PREEMPTED, 0
    assert live.phase is Phase.DECODE


def test_output_does_not_change_the_prompt_of_the_request():
    live = live_request()
    live.tokens.append(9)
    assert live.request.prompt_token_ids == (0, 1, 2)
