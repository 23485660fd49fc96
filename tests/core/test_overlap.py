"""Tests of steps that are planned while another step is in flight: their content, and the effect of requests that
end.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from trioserve.contracts.errors import StartupError
from trioserve.contracts.events import AbortOutcome, EngineEvent, FinishReason, RequestFinished, TokensReady
from trioserve.contracts.ids import RequestId
from trioserve.contracts.step import StepPlan, StepResult
from trioserve.core.engine import EngineCore
from trioserve.core.settings import CoreSettings
from trioserve.testing.fake_executor import FakeModel
from trioserve.testing.invariants import check_core, check_idle


class Steps:
    """A driver's core whose steps a test plans, computes and finishes one by one."""

    def __init__(self, driver) -> None:
        self.driver = driver
        self.core: EngineCore = driver.core

    def begin(self) -> StepPlan:
        plan = self.core.schedule(self.driver.now)
        check_core(self.core)
        assert plan is not None
        return plan

    def ahead(self) -> StepPlan | None:
        plan = self.core.schedule_ahead(self.driver.now)
        check_core(self.core)
        return plan

    def compute(self, plan: StepPlan, *, fail: Iterable[str] = ()) -> StepResult | None:
        self.driver.executor.errors.update({RequestId(name): f"{name} is broken" for name in fail})
        return self.driver.executor.execute(plan, self.core.flights.abandonment(plan))

    def take(self, plan: StepPlan, result: StepResult | None) -> list[EngineEvent]:
        return self.driver.take_result(plan, result)

    def end(self, plan: StepPlan, *, fail: Iterable[str] = ()) -> list[EngineEvent]:
        return self.take(plan, self.compute(plan, fail=fail))

    def run(self) -> None:
        """Run all requests to their end. Plan each step ahead if possible."""
        while list(self.core.live_requests()):
            plan: StepPlan | None = self.begin()
            while plan is not None:
                behind = self.ahead()
                self.end(plan)
                plan = behind
        check_idle(self.core)
        self.driver.compare()


@pytest.fixture
def steps(drive):
    """Return a `Steps` object with these settings."""
    return lambda **settings: Steps(drive(overlap_steps=True, **{"step_tokens_max": 64, **settings}))


def used_count(steps: Steps) -> int:
    return steps.core.stats().blocks_used


STOPS_AT_ONCE = FakeModel(vocab_size=8, stop_token_id=0, stop_period=1)


# --- planning ahead ----------------------------------------------------------------------------------------------


def test_decode_after_the_token_in_flight_is_planned_ahead(steps):
    steps = steps()
    steps.driver.add("a", range(5), 4)
    first = steps.begin()
    (chunk,) = steps.ahead().chunks
    assert (chunk.start, chunk.count, chunk.samples, chunk.awaits_token) == (5, 1, True, True)
    assert len(chunk.tokens) == 5
    steps.end(first)
    assert len(chunk.tokens) == 6


def test_the_next_chunk_of_a_prompt_is_planned_ahead(steps):
    steps = steps(step_tokens_max=4)
    steps.driver.add("a", range(10), 2)
    steps.begin()
    (chunk,) = steps.ahead().chunks
    assert (chunk.start, chunk.count, chunk.samples, chunk.awaits_token) == (4, 4, False, False)


def test_a_request_that_ends_with_the_step_in_flight_is_not_planned_again(steps):
    steps = steps()
    steps.driver.add("a", range(3), 1)
    steps.driver.add("b", range(10, 13), 2)
    steps.begin()
    assert [chunk.request.id for chunk in steps.ahead().chunks] == ["b"]


def test_an_aborted_request_is_not_planned_again(steps):
    steps = steps()
    steps.driver.add("a", range(3), 5)
    steps.driver.add("b", range(10, 13), 5)
    steps.begin()
    steps.driver.abort("a")
    assert [chunk.request.id for chunk in steps.ahead().chunks] == ["b"]


def test_no_step_is_planned_ahead_if_no_request_continues(steps):
    steps = steps()
    steps.driver.add("a", range(3), 1)
    steps.begin()
    assert steps.ahead() is None


def test_a_waiting_request_starts_in_a_step_that_is_planned_ahead(steps):
    steps = steps()
    steps.driver.add("a", range(3), 5)
    steps.begin()
    steps.driver.add("b", range(10, 13), 5)
    plan = steps.ahead()
    assert ([chunk.request.id for chunk in plan.chunks], plan.admitted) == (["a", "b"], ("b",))


def test_a_request_waits_for_a_prefix_that_the_step_in_flight_computes(steps):
    steps = steps(block_size=4)
    steps.driver.add("a", range(12), 5)
    first = steps.begin()
    steps.driver.add("b", (*range(12), 99), 5)
    second = steps.ahead()
    assert [chunk.request.id for chunk in second.chunks] == ["a"]
    steps.end(first)
    steps.end(second)
    third = steps.begin()
    assert [(chunk.request.id, chunk.start) for chunk in third.chunks] == [("a", 13), ("b", 12)]


def test_planning_ahead_preempts_no_request(steps):
    steps = steps(block_count=4, block_size=4)
    steps.driver.add("a", range(8), 8)
    steps.driver.add("b", range(20, 28), 8)
    first = steps.begin()
    assert steps.ahead() is None  # Both requests need a block, and no block is free.
    steps.end(first)
    assert steps.begin().preempted == ("b",)


def test_block_table_of_the_step_in_flight_does_not_change(steps):
    steps = steps(block_size=4)
    steps.driver.add("a", range(8), 5)
    (first,) = steps.begin().chunks
    table = list(first.block_table)
    (second,) = steps.ahead().chunks
    assert len(second.block_table) == len(table) + 1
    assert first.block_table == table


# --- ends and aborts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_computed_first", [False, True])
def test_token_after_a_stop_token_is_discarded_and_then_blocks_are_freed(steps, is_computed_first):
    steps = steps(model=STOPS_AT_ONCE)
    steps.driver.add("a", range(1, 4), 9, stop_token_ids=frozenset({0}))
    first, second = steps.begin(), steps.ahead()
    result = steps.compute(first)
    surplus = steps.compute(second) if is_computed_first else None
    ready, finished = steps.take(first, result)
    assert isinstance(ready, TokensReady)
    assert (finished.reason, finished.stop_token_id) == (FinishReason.STOP, 0)
    assert not list(steps.core.live_requests())
    assert used_count(steps) == 1
    assert steps.driver.abort("a")["a"].outcome is AbortOutcome.ALREADY_FINISHED
    assert (surplus is None) is not is_computed_first
    assert steps.take(second, surplus if is_computed_first else steps.compute(second)) == []
    check_idle(steps.core)


def test_a_step_with_only_ended_requests_is_abandoned(steps):
    steps = steps(model=STOPS_AT_ONCE)
    steps.driver.add("a", range(1, 4), 9, stop_token_ids=frozenset({0}))
    first, second = steps.begin(), steps.ahead()
    assert not steps.core.flights.is_abandoned(second)
    steps.end(first)
    assert steps.core.flights.is_abandoned(second)
    assert steps.compute(second) is None


def test_batch_slot_is_free_as_soon_as_its_request_has_ended(steps):
    steps = steps(model=STOPS_AT_ONCE, max_num_seqs=1)
    steps.driver.add("a", range(1, 4), 9, stop_token_ids=frozenset({0}))
    steps.driver.add("b", range(4, 8), 1)
    first, second = steps.begin(), steps.ahead()
    steps.end(first)
    third = steps.ahead()
    assert third.admitted == ("b",)
    steps.end(second)
    steps.end(third)
    check_idle(steps.core)


def test_an_abort_with_two_steps_in_flight_frees_blocks_with_the_second(steps):
    steps = steps()
    steps.driver.add("a", range(5), 9)
    steps.driver.add("b", range(20, 25), 9)
    first, second = steps.begin(), steps.ahead()
    used = used_count(steps)
    assert steps.driver.abort("a")["a"].finished is None
    assert [event.request_id for event in steps.end(first)] == ["b"]
    assert used_count(steps) == used
    third = steps.ahead()
    assert [chunk.request.id for chunk in third.chunks] == ["b"]
    finished, _ready = steps.end(second)
    assert finished == RequestFinished(
        request_id=RequestId("a"), reason=FinishReason.ABORT, phase=finished.phase, cached_token_count=0
    )
    assert used_count(steps) == 2
    steps.end(third)


def test_abort_of_a_request_that_is_only_in_the_first_step_waits_for_that_step(steps):
    steps = steps()
    steps.driver.add("a", range(5), 1)
    steps.driver.add("b", range(20, 25), 9)
    first, second = steps.begin(), steps.ahead()
    steps.driver.abort("a")
    finished, ready = steps.end(first)
    assert (finished.request_id, finished.reason, ready.request_id) == ("a", FinishReason.ABORT, "b")
    steps.end(second)


def test_abort_of_a_request_that_is_only_in_the_second_step_waits_for_that_step(steps):
    steps = steps()
    steps.driver.add("b", range(20, 25), 9)
    first = steps.begin()
    steps.driver.add("a", range(5), 9)
    second = steps.ahead()
    assert steps.driver.abort("a")["a"].finished is None
    assert not steps.core.flights.is_abandoned(second)
    assert [event.request_id for event in steps.end(first)] == ["b"]
    assert {event.request_id for event in steps.end(second)} == {"a", "b"}


def test_a_second_step_continues_for_a_new_request_if_the_first_is_abandoned(steps):
    steps = steps()
    steps.driver.add("a", range(5), 9)
    first = steps.begin()
    steps.driver.add("b", range(20, 25), 2)
    second = steps.ahead()
    steps.driver.abort("a")
    assert steps.core.flights.is_abandoned(first)
    assert not steps.core.flights.is_abandoned(second)
    assert steps.end(first) == []
    assert [event.request_id for event in steps.end(second)] == ["a", "b"]
    steps.run()


# The request fails at its first token, or in the middle of its prompt.
@pytest.mark.parametrize("prompt_count", [5, 20])
def test_failed_request_does_not_end_others_and_its_chunk_in_the_second_step_is_dropped(steps, prompt_count):
    """Scenario S20 of tests/README.md."""
    steps = steps(step_tokens_max=12)
    steps.driver.add("b", range(40, 44), 9)
    steps.driver.add("a", range(prompt_count), 9)
    first, second = steps.begin(), steps.ahead()
    assert [chunk.request.id for chunk in second.chunks] == ["b", "a"]
    events = steps.end(first, fail=["a"])
    assert [event.reason for event in events if isinstance(event, RequestFinished)] == [FinishReason.ERROR]
    assert [event.request_id for event in steps.end(second)] == ["b"]
    assert steps.core.stats().blocks_cached == 0  # None of the request's blocks can be found.
    steps.run()


def test_a_request_that_fails_in_the_second_step_keeps_the_first_token(steps):
    steps = steps()
    steps.driver.add("a", range(5), 9)
    first, second = steps.begin(), steps.ahead()
    steps.end(first)
    (finished,) = steps.end(second, fail=["a"])
    assert finished.reason is FinishReason.ERROR
    assert len(steps.driver.tokens["a"]) == 1
    check_idle(steps.core)


def test_a_block_with_a_discarded_token_is_not_found(steps):
    steps = steps(block_size=4)
    steps.driver.add("a", range(3), 9)
    first, second = steps.begin(), steps.ahead()
    assert second.chunks[0].start == 3
    steps.driver.abort("a")
    steps.take(first, StepResult((7,)))
    steps.take(second, StepResult((7,)))
    assert steps.core.stats().blocks_cached == 0
    check_idle(steps.core)


def test_connector_is_notified_of_end_and_abort_only_after_the_second_step(steps):
    steps = steps(model=STOPS_AT_ONCE, connected=True)
    driver = steps.driver
    driver.holds = {"a"}
    driver.add("a", range(1, 4), 9, stop_token_ids=frozenset({0}))
    first, second = steps.begin(), steps.ahead()
    result = driver.executor.execute(first)
    events = steps.core.update_from_output(first, result, driver.now)
    assert isinstance(events[-1], RequestFinished)
    assert not driver.connector.finished
    assert steps.core.abort(["a"], now=0.0)["a"].outcome is AbortOutcome.ALREADY_FINISHED
    assert steps.core.drop_plan(second, driver.now) == []
    assert driver.connector.finished == {"a": FinishReason.STOP}
    assert driver.connector.sends["a"].is_aborted
    assert steps.core.stats().blocks_held == 1
    steps.core.on_transfer(driver.connector.released(RequestId("a")), driver.now)
    driver.connector.check()
    check_idle(steps.core)


def test_responses_are_the_same_with_and_without_overlap(steps):
    steps = steps(block_count=12, block_size=2, max_num_seqs=3, step_tokens_max=6)
    for index in range(9):
        prompt = (*range(index % 3 + 1), index, *range(index % 4))
        steps.driver.add(f"{index}", prompt, index % 5 + 1, stop_token_ids=frozenset(range(0, 256, 5)))
    steps.run()


# --- wrong calls ----------------------------------------------------------------------------------------------


def test_result_of_a_later_step_is_refused_before_the_earlier_step_returns(steps):
    steps = steps()
    steps.driver.add("a", range(5), 9)
    first, second = steps.begin(), steps.ahead()
    with pytest.raises(AssertionError, match="not the oldest"):
        steps.core.update_from_output(second, StepResult((1,)), 0.0)
    with pytest.raises(AssertionError, match="a step is in flight"):
        steps.core.schedule(0.0)
    with pytest.raises(AssertionError, match="2 steps are in flight"):
        steps.core.schedule_ahead(0.0)
    steps.end(first)
    with pytest.raises(AssertionError, match="not the one in flight"):
        steps.core.update_from_output(first, StepResult((1,)), 0.0)
    steps.end(second)
    with pytest.raises(AssertionError, match="0 steps are in flight"):
        steps.core.schedule_ahead(0.0)


def test_schedule_ahead_is_refused_without_overlap_steps(drive):
    driver = drive()
    driver.add("a", range(5), 9)
    driver.core.schedule(0.0)
    with pytest.raises(AssertionError, match="do not overlap"):
        driver.core.schedule_ahead(0.0)


def test_overlap_steps_with_drafts_is_refused():
    with pytest.raises(StartupError, match=r"--overlap-steps .* --speculative-ngram 3 .*: use only one"):
        CoreSettings(block_count=4, context_tokens_max=64, overlap_steps=True, draft_tokens_max=3)
