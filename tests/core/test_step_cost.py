"""Tests of the cost of a step and of an abort. The cost is counted in bytecodes and bytes, because clocks are
unreliable on a busy machine.

Counting bytecodes detects every loop in Python. The peak of newly allocated memory detects copies of the whole queue
that C code makes, such as a list, a dict or a sorted list.
"""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable

import pytest

from trioserve.contracts.ids import RequestId
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.step import StepResult
from trioserve.core.engine import EngineCore
from trioserve.core.settings import CoreSettings

FEW, MANY = 30, 3_000
SAMPLING = SamplingParams(temperature=0.0)


def bytecodes(action: Callable[[], object]) -> int:
    # Python 3.12 reports bytecodes only after a traced frame has requested them, so the first trace would see nothing.
    _traced_bytecodes(lambda: None)
    return _traced_bytecodes(action)


def _traced_bytecodes(action: Callable[[], object]) -> int:
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return count


def allocated_bytes(action: Callable[[], object]) -> int:
    gc.collect()
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


class Crowd:
    """A core with many requests: `running` requests decode, and `queued` requests wait, equally divided over three
    priorities.
    """

    def __init__(self, *, running: int = 4, queued: int, prompt_count: int = 20) -> None:
        self.core = EngineCore(
            CoreSettings(block_count=4096, context_tokens_max=4096, max_num_seqs=running, step_tokens_max=4096)
        )
        self.running = [self.add(prompt_count) for _ in range(running)]
        self.step()
        self.queued = [self.add(prompt_count, priority=index % 3) for index in range(queued)]
        self.step()
        stats = self.core.stats()
        assert (stats.running_count, stats.waiting_count) == (running, queued)

    @classmethod
    def around(cls, core: EngineCore) -> Crowd:
        crowd = cls.__new__(cls)
        crowd.core = core
        return crowd

    def add(self, prompt_count: int, priority: int = 0, number: int | None = None) -> RequestId:
        """Add a request. Requests with different numbers have no tokens in common."""
        if number is None:
            number = self.core.stats().running_count + self.core.stats().waiting_count
        request_id = RequestId(f"r{number}")
        self.core.add(
            EngineRequest(
                id=request_id,
                prompt_token_ids=tuple(range(number * 10_000, number * 10_000 + prompt_count)),
                sampling=SAMPLING,
                output_tokens_max=1000,
                stop_token_ids=frozenset(),
                seed=0,
                priority=priority,
            )
        )
        return request_id

    def step(self) -> None:
        plan = self.core.schedule(0.0)
        assert plan is not None
        result = StepResult(tuple(7 if chunk.samples else None for chunk in plan.chunks))
        self.core.update_from_output(plan, result, 0.0)


def check(action: Callable[[Crowd], object], **crowd: int) -> None:
    """Check that `action` costs the same with a short queue and with a long one."""
    counts = []
    for queued in (FEW, MANY):
        first, second = Crowd(queued=queued, **crowd), Crowd(queued=queued, **crowd)
        action(Crowd(queued=3, **crowd))  # Warm up, because some work is done only once per process.
        counts.append((bytecodes(lambda first=first: action(first)), allocated_bytes(lambda s=second: action(s))))
    (few_codes, few_bytes), (many_codes, many_bytes) = counts
    assert few_codes > 20, "the trace saw nothing"
    assert many_codes <= few_codes + 20, f"{few_codes} bytecodes with {FEW} queued, {many_codes} with {MANY}"
    assert many_bytes <= few_bytes + MANY, f"{few_bytes} bytes with {FEW} queued, {many_bytes} with {MANY}"


@pytest.mark.slow
def test_cost_of_a_step_does_not_depend_on_the_queue_length():
    check(Crowd.step)


@pytest.mark.slow
def test_cost_of_a_step_that_admits_does_not_depend_on_the_queue_length():
    def step_after_a_seat_became_free(crowd: Crowd) -> None:
        crowd.core.abort([crowd.running[0]], now=0.0)
        crowd.step()
        assert crowd.core.stats().running_count == len(crowd.running)

    check(step_after_a_seat_became_free)


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 1, 2, -3, -2, -1], ids=lambda place: f"at {place}")
def test_cost_of_an_abort_in_the_queue_does_not_depend_on_the_queue_length(place):
    check(lambda crowd: crowd.core.abort([crowd.queued[place]], now=0.0))


@pytest.mark.slow
def test_cost_of_an_abort_in_the_middle_of_the_queue_does_not_depend_on_its_length():
    check(lambda crowd: crowd.core.abort([crowd.queued[len(crowd.queued) // 2]], now=0.0))


@pytest.mark.slow
def test_cost_of_aborting_a_running_request_does_not_depend_on_the_queue_length():
    check(lambda crowd: crowd.core.abort([crowd.running[1]], now=0.0))


@pytest.mark.slow
def test_cost_of_an_arrival_does_not_depend_on_the_queue_length():
    check(lambda crowd: crowd.add(20))


@pytest.mark.slow
def test_cost_of_stats_does_not_depend_on_the_queue_length():
    check(lambda crowd: [crowd.core.stats() for _ in range(3)])


def test_cost_of_an_abort_grows_only_with_the_blocks_of_its_request():
    few = Crowd(running=2, queued=3, prompt_count=16)
    many = Crowd(running=2, queued=3, prompt_count=16 * 100)
    crowded = Crowd(running=64, queued=3, prompt_count=16)
    few_codes, many_codes, crowded_codes = (
        bytecodes(lambda crowd=crowd: crowd.core.abort([crowd.running[0]], now=0.0)) for crowd in (few, many, crowded)
    )
    assert crowded_codes <= few_codes + 5
    assert many_codes <= few_codes + 99 * 100, "more than a hundred bytecodes a block"
    assert many_codes >= few_codes + 99


def test_a_step_costs_in_proportion_to_what_it_computes():
    codes = [bytecodes(Crowd(running=running, queued=3).step) for running in (1, 10, 100)]
    a_request = (codes[1] - codes[0]) / 9
    assert codes[2] - codes[1] <= 90 * a_request * 1.1


def schedule_codes_beside_a_long_prompt(waiting: bool) -> int:
    """Count the bytecodes of a step in the middle of a long prompt that uses the whole token budget."""
    crowd = Crowd.around(EngineCore(CoreSettings(block_count=4096, context_tokens_max=60_000, step_tokens_max=64)))
    crowd.add(50_000)
    if waiting:
        crowd.add(1000)
    crowd.step()
    return bytecodes(crowd.step)


def test_waiting_requests_do_not_add_to_the_cost_of_a_long_prompt():
    alone, with_one_waiting = (schedule_codes_beside_a_long_prompt(waiting) for waiting in (False, True))
    assert with_one_waiting <= alone + 50


@pytest.mark.parametrize("cached_count", [160, 9_600])
def test_prefix_of_a_waiting_request_that_does_not_fit_is_not_looked_up_in_every_step(cached_count):
    settings = CoreSettings(block_count=1100, context_tokens_max=17_600, step_tokens_max=17_600, max_num_seqs=8)
    crowd = Crowd.around(EngineCore(settings))
    first = crowd.add(cached_count, number=1)
    crowd.step()
    crowd.core.abort([first], now=0.0)
    assert crowd.core.stats().blocks_cached == cached_count // settings.block_size
    crowd.add(16 * 400, number=2)
    crowd.step()
    crowd.add(12_000, number=1)  # The prompt has cache hits, but there are too few blocks for its other tokens.
    crowd.step()
    assert crowd.core.stats().waiting_count == 1
    assert bytecodes(crowd.step) < 2_000
