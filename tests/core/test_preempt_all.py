"""Everybody gives its blocks back at once and is computed anew; and what was computed is a hit for nobody any more."""

from __future__ import annotations

import pytest

from trioserve.contracts.ids import RequestId

# block_size is 4, step_tokens_max is 8, there are 4 seats and 64 blocks, unless a case says otherwise.


@pytest.mark.parametrize(
    ("script", "expect"),
    [
        pytest.param("^", ".", id="nobody"),
        pytest.param("a:4>3 | ^", "a0-3* | a4* | a5*", id="what is in the cache is not computed again"),
        pytest.param("a:3>3 | ^", "a0-2* | a0-3* | a4*", id="what is no full block is"),
        pytest.param("a:4>3 | ^ %", "a0-3* | a0-4* | a5*", id="all of it where the cache was emptied"),
        pytest.param("a:12>3 | ^ %", "a0-7 | a0-7 | a8-11* | a12* | a13*", id="in the middle of a prompt"),
        pytest.param("a:3>3 b:3>3 c:2 | ^", "a0-2* b0-2* c0-1* | a0-3* b0-3* | a4* b4*", id="in the order they had"),
        pytest.param("a:3>3 | b:3@-1 ^", "a0-2* | b0-2* a0-3* | a4*", id="behind whoever has a better priority"),
        pytest.param("a:3>3 | ^ !a", "a0-2* | .", id="who leaves then has nothing to give back"),
        pytest.param("a:3>3 | ^ ~a", "a0-2* | a0-3*", id="nor anything twice when it runs again"),
        pytest.param("a:12=p | ^", "a0-7 | a0-7 | a8-11*", id="its prompt's logprobs are told once"),
    ],
)
def test_everybody_is_computed_anew_with_the_tokens_it_has(check, script, expect):
    check(script, expect)


@pytest.mark.parametrize(
    ("script", "expect"),
    [
        pytest.param("a:12<8 | ^", ". | a0-7 | a8-11*", id="one that waits for its kv computes it"),
        pytest.param("a:12<8 | +a ^", ". | a0-7 | a8-11*", id="and so does one whose kv had come"),
        pytest.param("a:12<8 | ^ +a", ". | a0-7 | a8-11*", id="what comes too late is nobody's"),
        pytest.param("a:12<8>2 b:3>3 | +a ^", "b0-2* | a0-7 | a8-11* b0-3* | a12* b4*", id="in the order they had"),
    ],
)
def test_nobody_waits_for_kv_from_elsewhere(check, script, expect):
    check(script, expect, connected=True)


def test_it_counts_as_preemption_and_tells_who_ran(drive):
    driver = drive(max_num_seqs=2)
    for name in "abc":
        driver.add(name, range(5), 3)
    driver.step()
    driver.step()
    assert sorted(driver.preempt_all()) == ["a", "b"]
    assert driver.preempt_all() == []
    assert driver.core.stats().preemptions_total == 2
    driver.run()


def test_blocks_that_a_connector_writes_to_are_held_until_it_has_ended(drive):
    driver = drive(connected=True)
    driver.remote["a"] = 8
    driver.add("a", range(12))
    driver.step()
    driver.preempt_all()
    assert driver.core.stats().blocks_held == 3
    driver.report(driver.connector.loaded(RequestId("a"), None))
    assert driver.core.stats().blocks_held == 0
    driver.run()


def test_while_a_step_is_in_flight_it_is_refused(drive):
    driver = drive()
    driver.add("a", range(5), 3)
    plan = driver.core.schedule(driver.now)
    with pytest.raises(AssertionError, match="a step reads their blocks"):
        driver.core.preempt_all(driver.now)
    driver.take_result(plan, driver.executor.execute(plan))
    driver.run()


@pytest.mark.parametrize(
    ("script", "expect"),
    [
        pytest.param("a:8 | b:a8+1", "a0-7* | b8*", id="nothing forgotten"),
        pytest.param("a:8 | % b:a8+1", "a0-7* | b0-7 | b8*", id="of who has ended"),
        pytest.param("a:8>3 | % b:a8+1", "a0-7* | a8* b0-6 | a9* b7-8*", id="of who goes on with it"),
        pytest.param("a:8 | % b:a8+1 | | c:a8+1", "a0-7* | b0-7 | b8* | c8*", id="what is computed later is a hit"),
        pytest.param(
            "a:16 | % b:a8+1 | c:a16+1",
            "a0-7 | a8-15* | b0-7 | b8* c8-14 | c15-16*",
            id="nor what is published behind it, even where that is computed again",
        ),
    ],
)
def test_what_is_forgotten_is_a_hit_for_nobody(check, script, expect):
    check(script, expect)


def test_forgetting_frees_what_was_kept_and_leaves_what_is_used(drive):
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
    assert driver.core.cache.resident_hashes(), "what b publishes later can be evicted as ever"
