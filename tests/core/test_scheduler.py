"""Tests of plans, step by step. conftest.py explains the notation of the cases."""

from __future__ import annotations

import pytest

# Defaults of the cases: block_size 4, step_tokens_max 8, max_num_seqs 4, block_count 64.


@pytest.mark.parametrize(
    ("script", "expect"),
    [
        pytest.param("", ".", id="no requests"),
        pytest.param("a:1", "a0*", id="one token"),
        pytest.param("a:8", "a0-7*", id="a prompt that fits one step"),
        pytest.param("a:12>3", "a0-7 | a8-11* | a12* | a13*", id="a longer prompt in chunks, then decodes"),
        pytest.param("a:12 b:3", "a0-7 | a8-11* b0-2*", id="the rest of the budget goes to the next request"),
        pytest.param("a:3 b:12", "a0-2* b0-4 | b5-11*", id="the last request gets a part"),
        pytest.param("a:3>4 | b:20", "a0-2* | a3* b0-6 | a4* b7-13 | a5* b14-19*", id="decodes before prompts"),
        pytest.param(
            "a:1>2 b:1>2 c:1>2 d:1>2 e:1", "a0* b0* c0* d0* | a1* b1* c1* d1* | e0*", id="four places in the batch"
        ),
        pytest.param("| | a:2", ". | . | a0-1*", id="steps without requests"),
    ],
)
def test_a_step_serves_decodes_first_then_prompts_within_the_budget(check, script, expect):
    check(script, expect)


def test_a_prompt_progresses_even_if_decodes_leave_one_token(check):
    check(
        "a:1>9 b:1>9 c:1>9 | d:4",
        "a0* b0* c0* | a1* b1* c1* d0 | a2* b2* c2* d1 | a3* b3* c3* d2 | a4* b4* c4* d3* | "
        "a5* b5* c5* | a6* b6* c6* | a7* b7* c7* | a8* b8* c8*",
        step_tokens_max=4,
    )


@pytest.mark.parametrize(
    ("script", "expect"),
    [
        pytest.param("a:8 b:8@-1 c:8@1 d:8@-1", "b0-7* | d0-7* | a0-7* | c0-7*", id="by priority, then by arrival"),
        pytest.param("a:8 | b:8@5 | c:8@-5", "a0-7* | b0-7* | c0-7*", id="no waiting for later requests"),
        pytest.param("a:8 b:8 c:8 | !b", "a0-7* | c0-7*", id="an aborted request is skipped"),
        pytest.param("a:8 b:8 c:8 | !b !c", "a0-7* | .", id="all waiting requests are aborted"),
    ],
)
def test_waiting_requests_start_in_order(check, script, expect):
    check(script, expect)


@pytest.mark.parametrize(
    ("script", "block_count", "expect"),
    [
        pytest.param(
            "a:4>6 b:4>6",
            3,
            "a0-3* b0-3* | -b a4* | a5* | a6* | a7* | a8* | b0-4* | b5* | b6* | b7* | b8*",
            id="the later request is preempted and starts again",
        ),
        pytest.param(
            "a:4>6 b:4>6@-1",
            3,
            "b0-3* a0-3* | -a b4* | b5* | b6* | b7* | b8* | a0-4* | a5* | a6* | a7* | a8*",
            id="the request of worse priority, even if it came first",
        ),
        pytest.param(
            "a:4>6@-1 b:8>4",
            4,
            "a0-3* b0-3 | a4* b4-7* | -b a5* | a6* | a7* | a8* | b4-8* | b9* | b10*",
            id="the request that needs a block, and its other blocks stay cached",
        ),
        pytest.param(
            "a:3>9 | c:17@-1",
            6,
            # In the fourth step, a's decode is already planned when c needs a block.
            "a0-2* | a3* c0-6 | a4* c7-13 | -a c14-16* | a4-5* | a6* | a7* | a8* | a9* | a10*",
            id="a request whose chunk is already planned",
        ),
        pytest.param(
            "v:3>9@1 | u:3>4 w:3>4 | p:12",
            7,
            # In the fourth step, p gets the token that was planned for v, so p5-10 is computed instead of p5-9.
            "v0-2* | v3* u0-2* w0-2* | v4* u3* w3* p0-4 | -v u4* w4* p5-10 | u5* w5* p11* | "
            "v0-5* | v6* | v7* | v8* | v9* | v10*",
            id="its share of the budget goes to another request",
        ),
        pytest.param(
            "a:4>6 b:4>2 c:1",
            3,
            "a0-3* b0-3* | -b a4* | a5* | a6* | a7* | a8* | b0-4* c0*",
            id="it waits before later requests",
        ),
        pytest.param(
            "a:4>3 b:8>3@1 | | c:1@-1",
            4,
            "a0-3* b0-3 | a4* b4-7* | -b a5* | c0* b8* | b9*",
            id="no request starts in the same step",
        ),
    ],
)
def test_the_last_request_in_order_is_preempted_if_blocks_run_out(check, script, block_count, expect):
    driver = check(script, expect, block_count=block_count)
    assert driver.core.stats().preemptions_total == sum(word.startswith("-") for word in expect.split())


@pytest.mark.parametrize(
    ("script", "expect"),
    [
        pytest.param(
            "a:8>5 b:9 c:1", "a0-7* | a8* | a9* | a10* | a11* | b0-7 | b8* c0*", id="the whole prompt or nothing"
        ),
        pytest.param("a:8>5 b:a8+1 c:1", "a0-7* | a8* b8* | a9* c0* | a10* | a11*", id="shared blocks cost nothing"),
    ],
)
def test_a_request_starts_when_its_whole_prompt_fits(check, script, expect):
    check(script, expect, block_count=4, overtakes_max=0)


@pytest.mark.parametrize(
    ("overtakes_max", "expect"),
    [
        pytest.param(0, "a0-7* | a8* | a9* | b0-7 | b8* c0* | d0* e0*", id="never"),
        pytest.param(1, "a0-7* | a8* c0* | a9* | b0-7 | b8* d0* | e0*", id="once"),
        pytest.param(3, "a0-7* | a8* c0* | a9* d0* | b0-7 | b8* e0*", id="as often as possible"),
    ],
)
def test_a_request_that_does_not_fit_is_overtaken_overtakes_max_times(check, overtakes_max, expect):
    check("a:8>3 b:9 c:1 d:1 e:1", expect, block_count=4, max_num_seqs=2, overtakes_max=overtakes_max)


def test_overtaking_is_also_limited_within_one_step(check):
    expect = "a0-7* | a8* c0* d0* | a9* | a10* | b0-7 | b8* e0*"
    check("a:8>4 | b:9 c:1 d:1 e:1", expect, block_count=5, overtakes_max=2)


@pytest.mark.parametrize(
    ("script", "expect"),
    [
        pytest.param("a:12 b:a8+4 c:a8+2", "a0-11* | b8-11* c8-9*", id="two wait for a third"),
        pytest.param("a:12 b:a8+4 d:4", "a0-11* d0-3* | b8-11*", id="others start meanwhile"),
        pytest.param(
            "a:12 b:a8+4 d:4 e:4 f:4", "a0-11* d0-3* e0-3* | b8-11* f0-3*", id="limited by places in the batch"
        ),
        pytest.param("a:12 b:a8+4#x c:a8+2#x", "a0-11* b0-11* | c8-9*", id="under one salt only"),
        pytest.param("a:12 b:a8+4=p c:a8+2", "a0-11* b0-11* | c8-9*", id="no waiting with prompt logprobs"),
        pytest.param("a:12 b:a3+9", "a0-11* b0-11*", id="no waiting for less than a block"),
        pytest.param("a:4 b:a4+0", "a0-3* b0-3*", id="no waiting if no block would be left to compute"),
        pytest.param("a:12 b:a8+4 ~a", "a0-11* | b8-11*", id="blocks of an aborted request count"),
        pytest.param(
            "a:12 b:a8+4 c:a8+2 ?a",
            "a0-11* | b0-11* | c8-9*",
            id="if the third fails, the next one computes the prefix",
        ),
    ],
)
def test_equal_prefixes_of_one_step_are_computed_once(check, script, expect):
    check(script, expect, step_tokens_max=40)


def test_equal_prefixes_are_computed_separately_without_prefix_caching(check):
    driver = check("a:12 b:a8+4 | c:a8+4", "a0-11* b0-11* | c0-11*", step_tokens_max=40, enable_prefix_caching=False)
    assert driver.core.stats().blocks_cached == 0


@pytest.mark.parametrize(
    ("script", "expect"),
    [
        pytest.param("a:8 | b:8 | c:4 | d:b8+1", "a0-7* | b0-7* | c0-3* | d8*", id="the latest prefix stays"),
        pytest.param("a:8 | b:8 | c:4 | d:a8+1", "a0-7* | b0-7* | c0-3* | d4-8*", id="the oldest prefix loses its end"),
        pytest.param("a:8 | b:8 | c:8 | d:a8+1", "a0-7* | b0-7* | c0-7* | d0-7 | d8*", id="then its start"),
        pytest.param(
            "a:8 | b:8 | d:a8+1 | c:4 | e:a8+1",
            "a0-7* | b0-7* | d8* | c0-3* | e8*",
            id="a hit makes a prefix the latest",
        ),
    ],
)
def test_the_least_recently_used_prefix_is_evicted_from_its_end(check, script, expect):
    # The 9 tokens of d need a third block, which is also evicted from the cache.
    check(script, expect, block_count=4)
