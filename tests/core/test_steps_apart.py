"""Tests of two steps in flight that have no common requests: their content, and aborts."""

from __future__ import annotations

import pytest

from trioserve.contracts.events import AbortOutcome, FinishReason
from trioserve.contracts.ids import RequestId
from trioserve.contracts.step import StepPlan
from trioserve.core.engine import EngineCore
from trioserve.testing.invariants import check_core, check_idle


@pytest.fixture
def driver(drive):
    """Return a driver whose core plans steps apart: driver(**settings)."""
    return lambda **settings: drive(
        overlap_steps=True, steps_apart=True, **{"step_tokens_max": 64, "max_num_seqs": 8, **settings}
    )


def names(plan: StepPlan | None) -> str:
    return "" if plan is None else " ".join(chunk.request.id for chunk in plan.chunks)


def begun(driver, *requests: str, output: int = 9) -> EngineCore:
    """Start requests with computed prompts, so that they run and no step is in flight."""
    for name in requests:
        driver.add(name, tuple(range(3)), output)
    driver.step()
    return driver.core


def end(driver, plan: StepPlan) -> None:
    driver.take_result(plan, driver.executor.execute(plan, driver.core.flights.abandonment(plan)))
    check_core(driver.core)


def test_each_of_two_steps_in_flight_has_half_of_the_running_requests(driver):
    made = driver()
    core = begun(made, "a", "b", "c", "d", "e")
    first = core.schedule(0.0)
    second = core.schedule_ahead(0.0)
    assert (names(first), names(second)) == ("a b c", "d e")
    assert not any(chunk.awaits_token for chunk in second.chunks)
    assert not second.is_ahead
    end(made, first)
    third = core.schedule_ahead(0.0)
    assert names(third) == "a b c"
    end(made, second)
    end(made, third)
    made.run()
    check_idle(core)


def test_a_single_request_is_in_one_step_at_a_time(driver):
    made = driver()
    core = begun(made, "a")
    first = core.schedule(0.0)
    assert core.schedule_ahead(0.0) is None
    end(made, first)
    made.run()


def test_requests_left_out_of_a_step_are_in_the_next_step(driver):
    made = driver()
    core = begun(made, "a", "b", "c", "d")
    first = core.schedule(0.0)
    end(made, first)
    second = core.schedule(0.0)
    end(made, second)
    assert (names(first), names(second)) == ("a b", "c d")
    third = core.schedule(0.0)
    assert names(third) == "a b"
    end(made, third)
    made.run()


def test_a_new_request_starts_in_the_second_step(driver):
    made = driver()
    core = begun(made, "a", "b")
    first = core.schedule(0.0)
    made.add("c", (7, 8, 9, 1, 2), 3)
    second = core.schedule_ahead(0.0)
    assert names(second) == "b c"
    end(made, first)
    end(made, second)
    made.run()


def test_an_abort_ends_requests_outside_of_steps_at_once(driver):
    made = driver(enable_prefix_caching=False)
    core = begun(made, "a", "b", "c", "d", "e")
    first, second = core.schedule(0.0), core.schedule_ahead(0.0)
    end(made, first)
    used = core.stats().blocks_used
    results = made.abort("a", "d")
    assert results[RequestId("a")].outcome is AbortOutcome.ABORTED
    assert results[RequestId("a")].finished is not None, "no step in flight reads its blocks"
    assert results[RequestId("d")].finished is None
    assert core.stats().blocks_used < used
    used = core.stats().blocks_used
    assert not core.flights.is_abandoned(second)
    made.abort("e")
    assert core.flights.is_abandoned(second)
    assert core.stats().blocks_used == used, "the abandoned step may still read the blocks"
    third = core.schedule_ahead(0.0)
    assert names(third) == "b c"
    used = core.stats().blocks_used
    end(made, second)
    assert made.finished["d"].reason is FinishReason.ABORT
    assert core.stats().blocks_used < used
    end(made, third)
    made.run()
    check_idle(core)


def test_no_request_is_preempted_until_both_steps_have_returned(driver):
    made = driver(block_count=5, block_size=4, enable_prefix_caching=False, context_tokens_max=16)
    core = begun(made, "a", "b", output=9)
    preempted = []
    for _ in range(40):
        if not list(core.live_requests()):
            break
        first = core.schedule(0.0)
        preempted += first.preempted
        second = core.schedule_ahead(0.0)
        assert second is None or not second.preempted
        for plan in (first, second):
            if plan is not None:
                end(made, plan)
    assert preempted == ["b"]
    check_idle(core)
    made.compare()
