"""Tests of EngineCore: the requests that it accepts, aborts at every moment, and its events."""

from __future__ import annotations

import msgspec
import pytest

from trioserve.contracts.errors import ContextTooLong, InvalidRequest
from trioserve.contracts.events import AbortOutcome, AbortResult, FinishReason, Phase, RequestFinished
from trioserve.contracts.ids import RequestId
from trioserve.contracts.request import PRIORITY_MAX, PRIORITY_MIN
from trioserve.contracts.step import StepResult
from trioserve.testing.fake_executor import FakeModel
from trioserve.testing.invariants import check_core, check_idle

ABORTED_LATER = AbortResult(AbortOutcome.ABORTED)
ALREADY_FINISHED = AbortResult(AbortOutcome.ALREADY_FINISHED)
UNKNOWN = AbortResult(AbortOutcome.UNKNOWN)


def finished(name: str, phase: Phase, reason: FinishReason = FinishReason.ABORT, **more: object) -> RequestFinished:
    return RequestFinished(request_id=name, reason=reason, phase=phase, **more)


# --- add ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt_count", "output_tokens_max", "priority"),
    [(1, 15, 0), (15, 1, 0), (1, 1, PRIORITY_MIN), (1, 1, PRIORITY_MAX)],
)
def test_request_at_the_limits_of_the_core_is_served(drive, prompt_count, output_tokens_max, priority):
    driver = drive(block_count=4)
    driver.add("a", range(prompt_count), output_tokens_max, priority=priority)
    driver.run()
    assert driver.finished["a"].reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("prompt_count", "output_tokens_max", "priority", "error", "param"),
    [
        (0, 1, 0, InvalidRequest, "prompt"),
        (1, 0, 0, InvalidRequest, "max_tokens"),
        (1, -1, 0, InvalidRequest, "max_tokens"),
        (16, 1, 0, ContextTooLong, "max_tokens"),
        (1, 16, 0, ContextTooLong, "max_tokens"),
        (1, 1, PRIORITY_MIN - 1, InvalidRequest, "priority"),
        (1, 1, PRIORITY_MAX + 1, InvalidRequest, "priority"),
    ],
)
def test_request_beyond_the_limits_of_the_core_is_refused(
    drive, prompt_count, output_tokens_max, priority, error, param
):
    driver = drive(block_count=4)
    with pytest.raises(error) as raised:
        driver.add("a", range(prompt_count), output_tokens_max, priority=priority)
    assert raised.value.param == param
    assert driver.abort("a") == {"a": UNKNOWN}
    check_idle(driver.core)


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_a_token_id_that_no_vocabulary_has_is_refused(drive, token_id):
    driver = drive()
    with pytest.raises(InvalidRequest, match="token ids outside 0 to 4294967295"):
        driver.add("a", [1, token_id, 3])
    check_idle(driver.core)


def test_request_id_in_use_is_refused_and_finished_id_is_accepted(drive):
    driver = drive()
    driver.add("a", [1, 2])
    with pytest.raises(AssertionError, match="in use"):
        driver.add("a", [3])
    driver.run()
    del driver.finished["a"]
    driver.add("a", [4, 5], 2)
    assert driver.abort("a")["a"].outcome is AbortOutcome.ABORTED


def test_a_request_may_arrive_while_a_step_runs(drive):
    driver = drive()
    driver.add("a", [1, 2], 3)
    plan = driver.core.schedule(driver.now)
    driver.add("b", [3], 2)
    for event in driver.core.update_from_output(plan, driver.executor.execute(plan), driver.now):
        driver._take(event)
    driver.run()


# --- the order of a step --------------------------------------------------------------------------------------------


def test_schedule_is_refused_while_a_step_is_in_flight(drive):
    """Scenario S20 of tests/README.md."""
    driver = drive()
    driver.add("a", [1])
    driver.core.schedule(driver.now)
    with pytest.raises(AssertionError, match="in flight"):
        driver.core.schedule(driver.now)


def test_only_the_plan_in_flight_is_accepted_and_only_once(drive):
    driver = drive()
    driver.add("a", [1], 3)
    first = driver.core.schedule(driver.now)
    result = driver.executor.execute(first)
    driver.core.update_from_output(first, result, driver.now)
    with pytest.raises(AssertionError, match="not the one in flight"):
        driver.core.update_from_output(first, result, driver.now)
    driver.core.schedule(driver.now)
    with pytest.raises(AssertionError, match="not the one in flight"):
        driver.core.update_from_output(first, result, driver.now)


def test_a_result_of_wrong_size_is_refused_before_any_change(drive):
    driver = drive()
    driver.add("a", [1], 3)
    plan = driver.core.schedule(driver.now)
    with pytest.raises(AssertionError):
        driver.core.update_from_output(plan, StepResult(()), driver.now)
    check_core(driver.core)
    driver.core.update_from_output(plan, driver.executor.execute(plan), driver.now)


# --- abort ----------------------------------------------------------------------------------------------------------


def test_abort_of_an_unknown_id_returns_unknown(drive):
    driver = drive()
    driver.add("a", [1])
    assert driver.abort("A", "a ", "") == {"A": UNKNOWN, "a ": UNKNOWN, "": UNKNOWN}
    assert driver.abort() == {}
    driver.run()


def test_abort_of_a_waiting_request_ends_it_at_once(drive):
    driver = drive()
    driver.add("a", [1])
    assert driver.abort("a") == {"a": AbortResult(AbortOutcome.ABORTED, finished("a", Phase.QUEUED))}
    assert driver.abort("a") == {"a": ALREADY_FINISHED}
    check_idle(driver.core)


def test_request_listed_twice_in_one_abort_is_aborted_once(drive):
    driver = drive()
    driver.add("a", [1])
    assert driver.abort("a", "a") == {"a": AbortResult(AbortOutcome.ABORTED, finished("a", Phase.QUEUED))}
    check_idle(driver.core)


def test_abort_between_steps_frees_every_block_at_once(drive):
    """Scenario S33 of tests/README.md."""
    driver = drive()
    driver.add("a", range(12), 3)
    driver.step()
    assert driver.core.stats().blocks_used == 2
    assert driver.abort("a") == {"a": AbortResult(AbortOutcome.ABORTED, finished("a", Phase.PREFILL))}
    assert driver.core.stats().blocks_used == 0
    assert driver.core.stats().blocks_cached == 2, "computed blocks stay cached"
    check_idle(driver.core)


def test_abort_during_decode_names_the_phase(drive):
    driver = drive()
    driver.add("a", [1, 2], 3)
    driver.step()
    assert driver.abort("a")["a"].finished == finished("a", Phase.DECODE)


@pytest.mark.parametrize("prompt_count", [1, 4, 5, 8, 12])
def test_abort_while_the_step_runs_holds_the_blocks_until_the_update(drive, prompt_count):
    driver = drive()
    driver.add("a", range(prompt_count), 3)
    plan = driver.core.schedule(driver.now)
    used = driver.core.stats().blocks_used
    assert driver.abort("a") == {"a": ABORTED_LATER}
    assert driver.core.stats().blocks_used == used, "the running step still reads the blocks"
    result = driver.executor.execute(plan)
    assert driver.core.update_from_output(plan, result, driver.now) == [finished("a", Phase.PREFILL)]
    assert driver.core.stats().blocks_used == 0
    check_idle(driver.core)


def test_abort_ends_a_request_at_once_if_the_running_step_does_not_compute_it(drive):
    driver = drive(step_tokens_max=4, max_num_seqs=2)
    driver.add("a", range(4), 5)
    driver.step()
    driver.add("b", range(90, 99), 5)
    driver.step()
    driver.add("c", range(50, 60), 5)
    plan = driver.core.schedule(driver.now)
    assert {chunk.request.id for chunk in plan.chunks} == {"a", "b"}
    assert driver.abort("c")["c"].finished == finished("c", Phase.QUEUED)
    driver.core.update_from_output(plan, driver.executor.execute(plan), driver.now)


def test_first_abort_reason_is_reported_and_the_token_of_the_running_step_is_dropped(drive):
    driver = drive()
    driver.add("a", [1, 2], 1)
    plan = driver.core.schedule(driver.now)
    assert driver.abort("a", reason=FinishReason.DEADLINE) == {"a": ABORTED_LATER}
    assert driver.abort("a") == {"a": ABORTED_LATER}
    events = driver.core.update_from_output(plan, driver.executor.execute(plan), driver.now)
    assert events == [finished("a", Phase.PREFILL, FinishReason.DEADLINE)]
    assert driver.abort("a") == {"a": ALREADY_FINISHED}


def test_an_abort_wins_over_an_error_of_the_same_step(drive):
    driver = drive()
    driver.add("a", [1, 2], 1)
    driver.step(abort="a", fail="a")
    assert driver.finished["a"] == finished("a", Phase.PREFILL)
    check_idle(driver.core)


def test_abort_of_a_preempted_request_ends_it_at_once(drive):
    driver = drive(block_count=3)
    driver.add("a", range(4), 6)
    driver.add("b", range(10, 14), 6)
    driver.step()
    plan = driver.step()
    assert plan.preempted == ("b",)
    assert driver.abort("b")["b"].finished == finished("b", Phase.DECODE)
    driver.run()


def test_requests_of_one_step_can_be_aborted_in_any_number(drive):
    driver = drive()
    for name in "abcd":
        driver.add(name, [ord(name), 1, 2], 4)
    driver.step(abort="acd")
    assert set(driver.finished) == set("acd")
    driver.run()
    assert driver.finished["b"].reason is FinishReason.LENGTH


@pytest.mark.parametrize("moment", ["between steps", "during a step", "one by one over several steps"])
def test_any_set_of_requests_can_be_aborted_at_any_time(drive, moment):
    """Scenario S19 of tests/README.md: abort every subset of five requests.

    Two of the requests decode, one computes its prompt, one was preempted, and one waits. One call aborts the subset.
    It causes one event per aborted request, and the other requests get their complete responses.
    """
    names = "abcde"
    for subset in range(2 ** len(names)):
        chosen = [name for index, name in enumerate(names) if subset >> index & 1]
        driver = drive(block_count=10, step_tokens_max=6)
        for index, name in enumerate("abd"):
            driver.add(name, [index, 7], 9, priority=0 if name == "d" else -1)
        driver.step()
        driver.add("c", range(60, 81), 9, priority=-1)
        while not driver.core.stats().preemptions_total:
            driver.step()
        driver.add("e", range(80, 86), 9)
        statuses = [live.status.value for live in driver.core.live_requests()]
        assert sorted(statuses) == ["preempted", "running", "running", "running", "waiting"]
        assert [live.output_count > 0 for live in driver.core.live_requests() if live.request.id == "c"] == [False]
        if moment == "between steps":
            driver.abort(*chosen, "nobody", *chosen)
            assert set(driver.finished) == set(chosen)
        elif moment == "during a step":
            plan = driver.core.schedule(driver.now)
            driver.abort(*chosen, "nobody", *chosen)
            used = driver.core.stats().blocks_used
            for event in driver.core.update_from_output(plan, driver.executor.execute(plan), driver.now):
                driver._take(event)
            driver.check()
            assert set(driver.finished) == set(chosen)
            assert driver.core.stats().blocks_used <= used
        else:
            for name in chosen:
                driver.step(abort=[name])
        assert {name for name, event in driver.finished.items() if event.reason is FinishReason.ABORT} == set(chosen)
        driver.run()
        assert {name for name, event in driver.finished.items() if event.reason is FinishReason.ABORT} == set(chosen)


def test_request_continues_when_another_request_with_its_prefix_ends(drive):
    driver = drive()
    driver.add("a", range(9), 6)
    driver.step()
    driver.step()
    driver.add("b", range(9), 6)
    driver.step()
    assert driver.core.stats().blocks_used == 4
    driver.abort("a")
    assert driver.core.stats().blocks_used == 3, "b still uses the two shared blocks"
    driver.run()


def test_a_request_that_finished_long_ago_is_unknown(drive):
    driver = drive()
    driver.add("a", [1])
    driver.run()
    assert driver.abort("a") == {"a": ALREADY_FINISHED}
    for index in range(10_000):
        request_id = RequestId(f"r{index}")
        driver.core.add(msgspec.structs.replace(driver.requests["a"], id=request_id))
        driver.core.abort([request_id], now=driver.now)
    assert driver.abort("a", "r0") == {"a": UNKNOWN, "r0": ALREADY_FINISHED}


# --- events -------------------------------------------------------------------------------------------------


def test_error_of_a_request_ends_only_that_request(drive):
    driver = drive()
    for name in "abc":
        driver.add(name, [ord(name), 1, 2], 4)
    driver.step()
    driver.step(fail="b")
    assert driver.finished == {"b": finished("b", Phase.DECODE, FinishReason.ERROR, message="b is broken")}
    driver.run()


def test_blocks_of_a_failed_chunk_cannot_be_found(drive):
    driver = drive()
    driver.add("a", range(8), 1)
    driver.step(fail="a")
    assert driver.core.stats().blocks_cached == 0
    driver.add("b", range(8), 1)
    driver.run()


def test_stop_token_is_the_last_token_and_is_reported(drive):
    driver = drive(model=FakeModel(vocab_size=16, stop_token_id=3, stop_period=4))
    for index in range(8):
        driver.add(f"r{index}", [index, index + 1], 32, stop_token_ids=frozenset({3}))
    driver.run()
    reasons = {event.reason for event in driver.finished.values()}
    assert FinishReason.STOP in reasons
    for name, event in driver.finished.items():
        if event.reason is FinishReason.STOP:
            assert event.stop_token_id == driver.tokens[name][-1] == 3


@pytest.mark.parametrize("min_tokens", [0, 1, 5, 32])
def test_no_stop_token_ends_a_request_before_min_tokens(drive, min_tokens):
    driver = drive(model=FakeModel(vocab_size=8, stop_token_id=3, stop_period=2))
    driver.add("a", [1, 2], 32, stop_token_ids=frozenset({3}), min_tokens=min_tokens)
    driver.run()
    assert len(driver.tokens["a"]) >= min(32, min_tokens + 1)


def test_cached_tokens_are_counted_when_a_request_first_runs(drive):
    driver = drive()
    driver.add("a", range(9), 1)
    driver.run()
    driver.add("b", range(9), 1)
    driver.run()
    assert (driver.finished["a"].cached_token_count, driver.finished["b"].cached_token_count) == (0, 8)
    stats = driver.core.stats()
    assert (stats.prefix_query_tokens_total, stats.prefix_hit_tokens_total) == (18, 8)


def test_a_preempted_request_does_not_count_its_own_blocks_as_cached_tokens(check):
    driver = check(
        "a:4>6@-1 b:8>4",
        "a0-3* b0-3 | a4* b4-7* | -b a5* | a6* | a7* | a8* | b4-8* | b9* | b10*",
        block_count=4,
    )
    assert driver.finished["b"].cached_token_count == 0
    stats = driver.core.stats()
    assert (stats.prefix_query_tokens_total, stats.prefix_hit_tokens_total) == (12, 0)


def test_output_tokens_are_found_as_a_prefix_too(drive):
    driver = drive()
    driver.add("a", range(6), 6)
    driver.run()
    driver.add("b", [*range(6), *driver.tokens["a"][:5], 7], 1)
    driver.run()
    assert driver.finished["b"].cached_token_count == 8


def test_logprobs_are_delivered_with_their_tokens(drive):
    driver = drive()
    driver.add("a", range(6), 6, logprobs=3)
    driver.add("b", range(9), 6)
    driver.run()
    assert [entry.token_id for entry in driver.logprobs["a"]] == driver.tokens["a"]
    assert {len(entry.top) for entry in driver.logprobs["a"]} == {3}
    assert driver.logprobs["b"] == []


@pytest.mark.parametrize("prompt_count", [1, 2, 8, 9, 20])
def test_prompt_logprobs_are_complete_before_the_first_token(drive, prompt_count):
    driver = drive()
    driver.add("warm", range(prompt_count), 2)
    driver.run()
    driver.add("a", range(prompt_count), 3, prompt_logprobs=2)
    driver.run()
    assert driver.finished["a"].cached_token_count == 0, "the prompt is computed, and not found in the cache"
    assert len(driver.prompt_logprobs["a"]) == prompt_count


@pytest.mark.parametrize(
    ("script", "expect", "block_count"),
    [
        # b is preempted before its prompt logprobs are complete, and then finds its own blocks in the prefix cache.
        ("a:4>6@-1 b:12>2=p", "a0-3* b0-3 | -b a4* | a5* | a6* | a7* | a8* | b0-7 | b8-11* | b12*", 4),
        # b is preempted after its prompt logprobs are complete.
        ("a:4>6 b:8>3=p", "a0-3* b0-3 | a4* b4-7* | -b a5* | a6* | a7* | a8* | b0-7 | b8* | b9*", 4),
    ],
)
def test_prompt_logprobs_are_reported_once_if_the_prompt_is_computed_twice(check, script, expect, block_count):
    driver = check(script, expect, block_count=block_count)
    assert len(driver.prompt_logprobs["b"]) == len(driver.requests["b"].prompt_token_ids)


def test_stats_count_requests_and_blocks(drive):
    driver = drive(max_num_seqs=2)
    for name in "abc":
        driver.add(name, [ord(name)] * 5, 4)
    driver.step()
    stats = driver.core.stats()
    assert (stats.running_count, stats.waiting_count, stats.steps_total) == (2, 1, 1)
    assert (stats.blocks_total, stats.blocks_used) == (64, 3)
    assert stats.kv_usage == 3 / 64
