"""Tests of many requests in far too small pools. The requests preempt each other, and all responses are right."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

BLOCK_SIZE = 2

arrivals = st.lists(
    st.tuples(
        st.integers(0, 3),  # Number of steps before the request arrives.
        st.integers(1, 9),  # Number of prompt tokens.
        st.integers(3, 12),  # Number of output tokens.
        st.integers(-1, 1),  # priority
        st.sampled_from("xy"),  # One of the two prefixes that prompts have.
    ),
    min_size=4,
    max_size=9,
)


@pytest.mark.slow
@pytest.mark.parametrize("caching", [True, False])
@given(crowd=arrivals, block_count=st.integers(11, 14), seats=st.integers(2, 5), more_step_tokens=st.integers(0, 6))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_request_in_a_crowded_pool_gets_its_response(drive, caching, crowd, block_count, seats, more_step_tokens):
    driver = drive(
        block_count=block_count,
        block_size=BLOCK_SIZE,
        max_num_seqs=seats,
        step_tokens_max=seats + more_step_tokens,
        enable_prefix_caching=caching,
    )
    for index, (steps, prompt_count, output_count, priority, family) in enumerate(crowd):
        for _ in range(steps):
            driver.step()
        prompt = range(ord(family), ord(family) + prompt_count)
        driver.add(f"r{index}", prompt, output_count, priority=priority)
    driver.run()
    event("preempted" if driver.core.stats().preemptions_total else "not preempted")
