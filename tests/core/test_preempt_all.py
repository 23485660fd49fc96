"""Tests of preempting all requests at once, and of removing all cached blocks from the prefix cache."""

from __future__ import annotations

import pytest

from trioserve.contracts.ids import RequestId

# Defaults of the cases: block_size 4, step_tokens_max 8, max_num_seqs 4, block_count 64.


@pytest.mark.parametrize(
    ("script", "expect"),
    [
        pytest.param("^", ".", id="no requests"),
        pytest.param("a:4>3 | ^", "a0-3* | a4* | a5*", id="cached blocks are not computed again"),
        pytest.param("a:3>3 | ^", "a0-2* | a0-3* | a4*", id="tokens of a partial block are computed again"),
        pytest.param("a:4>3 | ^ %", "a0-3* | a0-4* | a5*", id="everything is computed again with an empty cache"),
        pytest.param("a:12>3 | ^ %", "a0-7 | a0-7 | a8-11* | a12* | a13*", id="in the middle of a prompt"),
        pytest.param("a:3>3 b:3>3 c:2 | ^", "a0-2* b0-2* c0-1* | a0-3* b0-3* | a4* b4*", id="in the old order"),
        pytest.param("a:3>3 | b:3@-1 ^", "a0-2* | b0-2* a0-3* | a4*", id="behind requests of better priority"),
        pytest.param("a:3>3 | ^ !a", "a0-2* | .", id="an abort afterwards"),
        pytest.param("a:3>3 | ^ ~a", "a0-2* | a0-3*", id="an abort when it runs again"),
        pytest.param("a:12=p | ^", "a0-7 | a0-7 | a8-11*", id="prompt logprobs are reported once"),
    ],
)
def test_preempted_requests_are_computed_again_with_their_tokens(check, script, expect):
    check(script, expect)


@pytest.mark.parametrize(
    ("script", "expect"),
    [
        pytest.param("a:12<8 | ^", ". | a0-7 | a8-11*", id="a request that waits for KV computes it"),
        pytest.param("a:12<8 | +a ^", ". | a0-7 | a8-11*", id="a request whose KV had arrived computes it"),
        pytest.param("a:12<8 | ^ +a", ". | a0-7 | a8-11*", id="a late load is ignored"),
        pytest.param("a:12<8>2 b:3>3 | +a ^", "b0-2* | a0-7 | a8-11* b0-3* | a12* b4*", id="in the old order"),
    ],
)
def test_preempt_all_cancels_kv_loads(check, script, expect):
    check(script, expect, connected=True)


def test_preempt_all_counts_preemptions_and_returns_running_ids(drive):
    driver = drive(max_num_seqs=2)
    for name in "abc":
        driver.add(name, range(5), 3)
    driver.step()
    driver.step()
    assert sorted(driver.preempt_all()) == ["a", "b"]
    assert driver.preempt_all() == []
    assert driver.core.stats().preemptions_total == 2
    driver.run()


def test_preempt_all_holds_blocks_that_a_load_may_write_to(drive):
    driver = drive(connected=True)
    driver.remote["a"] = 8
    driver.add("a", range(12))
    driver.step()
    driver.preempt_all()
    assert driver.core.stats().blocks_held == 3
    driver.report(driver.connector.loaded(RequestId("a"), None))
    assert driver.core.stats().blocks_held == 0
    driver.run()


def test_preempt_all_is_refused_while_a_step_is_in_flight(drive):
    driver = drive()
    driver.add("a", range(5), 3)
    plan = driver.core.schedule(driver.now)
    with pytest.raises(AssertionError, match="a step in flight reads the blocks"):
        driver.core.preempt_all(driver.now)
    driver.take_result(plan, driver.executor.execute(plan))
    driver.run()


@pytest.mark.parametrize(
    ("script", "expect"),
    [
        pytest.param("a:8 | b:a8+1", "a0-7* | b8*", id="without forgetting"),
        pytest.param("a:8 | % b:a8+1", "a0-7* | b0-7 | b8*", id="blocks of a finished request"),
        pytest.param("a:8>3 | % b:a8+1", "a0-7* | a8* b0-6 | a9* b7-8*", id="blocks of a running request"),
        pytest.param(
            "a:8 | % b:a8+1 | | c:a8+1", "a0-7* | b0-7 | b8* | c8*", id="blocks that are computed later are hits"
        ),
        pytest.param(
            "a:16 | % b:a8+1 | c:a16+1",
            "a0-7 | a8-15* | b0-7 | b8* c8-14 | c15-16*",
            id="blocks behind forgotten ones are no hits",
        ),
    ],
)
def test_prefixes_are_not_found_after_forget_prefixes(check, script, expect):
    check(script, expect)


def test_forget_prefixes_frees_cached_blocks_and_keeps_used_blocks(drive):
    driver = drive()
    driver.add("a", range(8))
    driver.add("b", range(100, 108), 9)
    driver.step()
    driver.step()
    before = driver.core.stats()
    assert before.blocks_cached == 2
    driver.core.forget_prefixes()
    after = driver.core.stats()
    assert (after.blocks_cached, after.blocks_used) == (0, before.blocks_used)
    driver.run()
    assert driver.core.cache.resident_hashes(), "blocks that b publishes later can be evicted"
