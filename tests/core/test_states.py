"""Tests of layers that keep a state: which request owns which slot, when snapshots are written, and which requests
start from a snapshot.

The fake executor represents a state by the digest of all tokens that it includes, and checks the digest before each
chunk.
"""

from __future__ import annotations

import pytest

from trioserve.contracts.errors import StartupError
from trioserve.contracts.ids import RequestId
from trioserve.core.engine import EngineCore
from trioserve.core.settings import CoreSettings
from trioserve.testing.fake_executor import FakeExecutor
from trioserve.testing.scripted_connector import FakeConnector

SLOTS = {"state_slot_count": 4, "snapshot_slot_count": 4, "step_tokens_max": 16}


def in_use(driver):
    stats = driver.core.stats()
    return stats.states_used, stats.snapshots_kept


@pytest.mark.parametrize(
    ("script", "expect"),
    [
        pytest.param("a:9 | b:a9+3", "a0-8* | b8-11*", id="from the end of the last full block"),
        pytest.param("a:8 | b:a8+3", "a0-7* | b4-10*", id="at least one token is computed"),
        pytest.param("a:3 | b:a3+5", "a0-2* | b0-7*", id="no snapshot without a full block"),
        pytest.param("a:9 | b:a6+3", "a0-8* | b0-8*", id="the shared prefix ends without a snapshot"),
        pytest.param("a:9 | b:a6+3 | c:a6+4", "a0-8* | b0-8* | c4-9*", id="a snapshot at the end of a shared prefix"),
        pytest.param("a:9#x | b:a9+3", "a0-8* | b0-11*", id="another salt"),
        pytest.param("a:9 | b:a9+3=p", "a0-8* | b0-11*", id="prompt logprobs need the whole prompt"),
        pytest.param("a:9 b:a9+0 c:a9+0", "a0-8* | b8* c8*", id="equal prompts wait for the first"),
        pytest.param("a:25 b:a25+0", "a0-15 | a16-24* | b24*", id="equal prompts wait for a prompt in chunks"),
        pytest.param(
            "a:9>6 | | | | | b:a9+9", "a0-8* | a9* | a10* | a11* | a12* | a13* b8-17*", id="decodes write no snapshots"
        ),
    ],
)
def test_prompt_starts_from_a_state_snapshot(check, script, expect):
    check(script, expect, **SLOTS)


def test_prompts_are_computed_from_the_start_without_snapshot_slots(check):
    check("a:9 | b:a9+3", "a0-8* | b0-11*", **{**SLOTS, "snapshot_slot_count": 0})


def test_no_state_snapshot_is_written_without_prefix_caching(check):
    driver = check("a:9 | b:a9+3", "a0-8* | b0-11*", **SLOTS, enable_prefix_caching=False)
    assert driver.core.stats().snapshots_total == 0


def test_state_slots_limit_the_running_requests(check):
    check("a:4>2 b:4>2 c:4>2", "a0-3* b0-3* | a4* b4* | c0-3* | c4*", **{**SLOTS, "state_slot_count": 2})


def test_the_least_recently_used_snapshot_is_evicted(check):
    # c replaces the snapshot of b, because the snapshot of a was used later.
    check(
        "a:5 | b:5 | d:a5+1 | c:5 | e:a5+2 | f:b5+2",
        "a0-4* | b0-4* | d4-5* | c0-4* | e4-6* | f0-6*",
        **{**SLOTS, "snapshot_slot_count": 2},
    )


def test_a_snapshot_that_is_read_is_not_evicted_in_the_same_step(check):
    # b reads the only snapshot, so c cannot write a snapshot in the same step.
    driver = check("a:5 | b:a5+1 c:5", "a0-4* | b4-5* c0-4*", **{**SLOTS, "snapshot_slot_count": 1})
    assert in_use(driver) == (0, 1)


def test_a_snapshot_is_dropped_with_its_block(check):
    driver = check("a:5 | b:15", "a0-4* | b0-14*", block_count=4, **SLOTS)
    assert in_use(driver) == (0, 1), "it is b's snapshot: a's was dropped with its blocks"
    assert driver.core.stats().blocks_cached == 3


@pytest.mark.parametrize("moment", ("before", "during", "between"))
def test_request_that_ends_releases_its_state_slots(drive, moment):
    driver = drive(**SLOTS)
    driver.add("a", tuple(range(40)), 4)
    if moment == "between":
        driver.step()
        assert in_use(driver) == (1, 0)
    plan = None if moment == "before" else driver.core.schedule(0.0)
    if plan is not None and moment == "during":
        assert in_use(driver) == (1, 0)
    driver.abort("a")
    if plan is not None:
        driver.take_result(plan, driver.executor.execute(plan, driver.core.flights.abandonment(plan)))
    assert in_use(driver) == (0, 0)
    driver.run()


@pytest.mark.parametrize("moment", ("it is written", "it is read"))
def test_unfinished_state_snapshot_is_released(drive, moment):
    driver = drive(**SLOTS)
    prompt = tuple(range(9))
    if moment == "it is read":
        driver.add("a", prompt, 1)
        driver.step()
    kept = in_use(driver)[1]
    driver.add("b", prompt, 4)
    plan = driver.core.schedule(0.0)
    assert len(plan.chunks[0].states) == (2 if moment == "it is written" else 1)
    driver.abort("b")
    driver.take_result(plan, driver.executor.execute(plan, driver.core.flights.abandonment(plan)))
    assert in_use(driver) == (0, kept)
    driver.run()


def test_a_failed_request_leaves_no_snapshot(check):
    driver = check("a:9 ?a | b:a9+3", "a0-8* | b0-11*", **SLOTS)
    assert in_use(driver) == (0, 1)


def test_a_preempted_request_restarts_from_its_snapshot(drive):
    driver = drive(block_count=6, block_size=4, **SLOTS)
    driver.add("a", tuple(range(9)), 12)
    driver.add("b", tuple(range(100, 109)), 12)
    preempted = []
    starts = []
    for _ in range(200):
        plan = driver.step()
        if plan is None:
            break
        preempted += plan.preempted
        starts += [chunk.start for chunk in plan.chunks if chunk.request.id in plan.admitted]
    assert preempted, "no request was preempted"
    assert starts[:2] == [0, 0]
    driver.run()


def test_a_step_planned_ahead_reads_the_state_of_the_step_in_flight(drive):
    driver = drive(overlap_steps=True, **{**SLOTS, "step_tokens_max": 4})
    driver.add("a", tuple(range(11)), 3)
    plans = [driver.core.schedule(0.0), driver.core.schedule_ahead(0.0)]
    first, second = (plan.chunks[0].states[0] for plan in plans)
    assert (first.reads, second.reads) == (None, first.writes)
    for plan in plans:
        driver.take_result(plan, driver.executor.execute(plan))
    driver.run()
    assert in_use(driver) == (0, 1)


def test_drafts_for_a_model_with_states_are_refused():
    with pytest.raises(StartupError, match="the change by a wrong draft token cannot be undone"):
        CoreSettings(block_count=4, context_tokens_max=64, state_slot_count=2, draft_tokens_max=3)


def test_connector_for_a_model_with_states_is_refused():
    executor = FakeExecutor(block_count=4)
    with pytest.raises(AssertionError, match="cannot carry states"):
        EngineCore(
            CoreSettings(block_count=4, context_tokens_max=64, state_slot_count=2), connector=FakeConnector(executor)
        )


def test_the_fake_executor_detects_a_wrong_state(drive):
    """The fake executor raises an error if a chunk reads a wrong state."""
    driver = drive(**SLOTS)
    driver.add("a", tuple(range(4)), 4)
    driver.step()
    slot = driver.core.scheduler.running[RequestId("a")].state.slot
    driver.executor._states[slot] = (1, None)
    with pytest.raises(AssertionError, match="before position 4 is"):
        driver.step()
