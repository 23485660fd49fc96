"""Tests of limits that contradict each other. The error message says what to change."""

from __future__ import annotations

import pytest

from trioserve.contracts.errors import StartupError
from trioserve.core.settings import CoreSettings

GOOD = {
    "block_count": 4,
    "block_size": 16,
    "context_tokens_max": 64,
    "max_num_seqs": 2,
    "step_tokens_max": 2,
}


def test_consistent_core_limits_are_accepted():
    assert CoreSettings(**GOOD).enable_prefix_caching


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *[({name: 0}, f"{name} is 0") for name in GOOD],
        *[({name: -1}, f"{name} is -1") for name in GOOD],
        ({"step_tokens_max": 1}, "raise --max-num-batched-tokens or lower --max-num-seqs"),
        ({"context_tokens_max": 65}, "holds 64 tokens, less than the 65 of one full context"),
        ({"block_count": 3}, "holds 48 tokens"),
        ({"window_tokens": 1}, "window_tokens is 1"),
        ({"context_tokens_max": 1000, "window_tokens": 48}, "lower --max-num-batched-tokens or --max-model-len"),
    ],
)
def test_contradicting_core_limits_are_refused(change, message):
    with pytest.raises(StartupError, match=message):
        CoreSettings(**{**GOOD, **change})


def test_context_may_be_longer_than_the_pool_with_a_sliding_window():
    limits = CoreSettings(**{**GOOD, "context_tokens_max": 100_000, "window_tokens": 46})
    assert limits.blocks_held_max(100_000) == 4, "46 tokens of the window and 2 of the step"
    assert limits.blocks_held_max(33) == 3
    assert [limits.first_block_read(position) for position in (0, 45, 46, 60, 61, 77)] == [0, 0, 0, 0, 1, 2]
    assert limits.first_block_kept(61) == 0, "the last of 61 tokens attends to positions 15 to 60"
    assert limits.first_block_kept(62) == 1
