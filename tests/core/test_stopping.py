"""Tests of end conditions that depend on the last token."""

from __future__ import annotations

import pytest

from trioserve.contracts.ids import RequestId
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.core.guided_steps import finish_reason_of
from trioserve.core.request_state import LiveRequest


def check(output: list[int], expect: str | None, *, stops: set[int], tokens_max: int, tokens_min: int) -> None:
    """Check the finish reason of one output. The prompt is (7, 8), so the prompt may also contain stop tokens."""
    request = EngineRequest(
        id=RequestId("a"),
        prompt_token_ids=(7, 8),
        sampling=SamplingParams(min_tokens=tokens_min),
        output_tokens_max=tokens_max,
        stop_token_ids=frozenset(stops),
        seed=0,
    )
    live = LiveRequest(request, 0)
    live.tokens += output
    reason = finish_reason_of(live)
    assert (reason and reason.value) == expect


@pytest.mark.parametrize(
    ("output", "stops", "tokens_min", "expect"),
    [
        ([1], set(), 0, None),
        ([1, 2], set(), 0, None),
        ([1, 2, 3], set(), 0, "length"),
        ([7], {7}, 0, "stop"),
        ([1, 7], {7, 9}, 0, "stop"),
        ([1, 9], {7, 9}, 0, "stop"),
        ([1], {7, 8}, 0, None),
        ([1, 2, 7], {7}, 0, "stop"),  # Both conditions apply. The stop token is reported as the reason.
        # With min_tokens 2, the third token may end the request, but the second token may not.
        ([7], {7}, 2, None),
        ([1, 7], {7}, 2, None),
        ([1, 2, 7], {7}, 2, "stop"),
        ([7], {7}, 1, None),
        ([1, 7], {7}, 1, "stop"),
        ([1, 2, 7], {7}, 3, "length"),
        ([1, 2, 7], {7}, 99, "length"),
    ],
)
def test_stop_token_or_last_allowed_token_ends_a_request(output, stops, tokens_min, expect):
    check(output, expect, stops=stops, tokens_max=3, tokens_min=tokens_min)
