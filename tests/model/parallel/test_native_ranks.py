"""Tests of ranks with native kernels and shared memory.

The ranks compute the same tokens as one process. Logprobs differ only by the order of float32 sums. test_ranks.py tests
every model family, with collectives in Python.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest

from trioserve.contracts.step import IsAbandoned, StepPlan
from trioserve.model.parallel.collectives import Arrivals, Collectives, SharedMemoryCollectives, make_shared_memory
from trioserve.model.runner import ModelRunner
from trioserve.model.step_rows import FilledMasks
from trioserve_kernels.native import NoNativeKernels, load_library

SECONDS_MAX = 120.0
# Tolerance for sums of some hundred products of about 1 in another order, and for logprobs between 1 and 10.
TOLERANCE = 2e-4

KINDS: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("llama", 2, {}),
    ("llama-tied", 3, {}),
    ("llama-biased", 2, {}),
    ("llama-biased", 2, {"threads": 2}),
    ("qwen2-moe", 3, {"expert_parallel": True}),
)
FURTHER_KINDS: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("qwen3", 2, {}),
    ("gemma2", 2, {}),
    ("gemma3n", 2, {}),
    ("gemma4", 2, {}),
    ("gemma4-moe", 2, {}),
    ("hunyuan-moe", 2, {}),
    ("mimo-v2-flash", 2, {}),
    ("cohere2", 2, {}),
    ("gpt-neox", 2, {}),
    ("phi", 2, {}),
    ("gpt2", 2, {}),
    ("apertus", 2, {}),
    ("olmo2", 2, {}),
    ("qwen2-moe", 2, {}),
    ("granite-moe", 2, {"expert_parallel": True}),
    ("afmoe", 2, {}),
    ("afmoe", 2, {"expert_parallel": True}),
    ("flex-olmo", 2, {}),
    ("gpt-oss", 2, {}),
    ("gpt-oss", 2, {"expert_parallel": True}),
    ("deepseek-v2-lite", 2, {}),
    ("deepseek-v3", 3, {"expert_parallel": True}),
    ("lfm2", 2, {}),
    ("falcon-h1", 2, {}),
    ("granite-hybrid", 2, {}),
    ("qwen3-next", 2, {}),
    ("llama4", 2, {"expert_parallel": True}),
)


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    try:
        load_library()
    except NoNativeKernels as error:
        pytest.skip(f"no native kernels: {error}")


class Group:
    """Ranks in threads of this process, with native kernels and shared memory."""

    def __init__(
        self,
        program: ModuleType,
        path: Path,
        size: int,
        *,
        wrapped_by: Callable[[SharedMemoryCollectives], Collectives] = lambda near: near,
        **options: Any,
    ) -> None:
        descriptor = make_shared_memory(size)
        self.arrivals = Arrivals(descriptor, size)
        self._collectives = [SharedMemoryCollectives(load_library(), descriptor, rank, size) for rank in range(size)]
        os.close(descriptor)
        self._pool = ThreadPoolExecutor(size)
        self.runners: list[ModelRunner] = [
            program.rank_runner(path, wrapped_by(rank), cpu_kernels="native", **options) for rank in self._collectives
        ]

    def begin(self, work: Callable[[ModelRunner, int], Any]) -> list[Future[Any]]:
        return [self._pool.submit(work, runner, rank) for rank, runner in enumerate(self.runners)]

    def each(self, work: Callable[[ModelRunner, int], Any]) -> list[Any]:
        return [run.result(SECONDS_MAX) for run in self.begin(work)]

    def close(self) -> None:
        self._pool.shutdown()
        for runner in self.runners:
            runner.close()
        for rank in self._collectives:
            rank.close()
        self.arrivals.close()


@pytest.fixture
def grouped(rank_program: ModuleType) -> Iterator[Callable[..., Group]]:
    made: list[Group] = []

    def make(path: Path, size: int, **options: Any) -> Group:
        made.append(Group(rank_program, path, size, **options))
        return made[-1]

    yield make
    for group in made:
        group.close()


def numbers_of(found: Any) -> list[float]:
    if isinstance(found, dict):
        found = list(found.values())
    if isinstance(found, list | tuple):
        return [number for part in found for number in numbers_of(part)]
    return [] if found is None else [float(found)]


def check_equal(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found["tokens"] == wanted["tokens"]
    for name in ("logprobs", "prompt_logprobs", "labels"):
        assert numbers_of(found[name]) == pytest.approx(numbers_of(wanted[name]), abs=TOLERANCE)


@pytest.mark.parametrize(
    ("kind", "size", "options"),
    (*KINDS, *(pytest.param(*further, marks=pytest.mark.slow) for further in FURTHER_KINDS)),
)
def test_ranks_compute_the_same_tokens_as_one_process(
    kind: str,
    size: int,
    options: dict[str, Any],
    tiny_checkpoint: Callable[..., Path],
    rank_program: ModuleType,
    grouped: Callable[..., Group],
) -> None:
    path = tiny_checkpoint(kind)
    whole = rank_program.rank_runner(path, None, cpu_kernels="native")
    wanted = rank_program.history(whole)
    whole.close()
    first, *others = grouped(path, size, **options).each(lambda runner, rank: rank_program.history(runner))
    check_equal(first, wanted)
    assert all(other == first for other in others), "all ranks must have the same bits"


@pytest.mark.slow
def test_ranks_in_processes_compute_the_same_tokens_as_one_process(
    tiny_checkpoint: Callable[..., Path], rank_program: ModuleType, group: Callable[..., list[Any]]
) -> None:
    path = tiny_checkpoint("llama")
    whole = rank_program.rank_runner(path, None, cpu_kernels="native")
    wanted = rank_program.history(whole)
    whole.close()
    first, second, third = group("steps", 3, path)
    assert first == second == third
    check_equal(first, wanted)


def test_step_abandoned_by_one_rank_ends_in_all_ranks(
    tiny_checkpoint: Callable[..., Path], step_driver: ModuleType, grouped: Callable[..., Group]
) -> None:
    """Execute one step five times. Both ranks abandon the step if at least one of them asks for it."""
    runners = grouped(tiny_checkpoint("llama"), 2)

    def work(runner: ModelRunner, rank: int) -> list[bool]:
        driver = step_driver.StepDriver(runner)
        driver.add("a", range(5, 25))
        plan = StepPlan(0, (driver.chunk("a", 20),), 20)
        leaving = [(1, 1), (0, 1), (1, 0), (0, 0), (1, 1)]
        return [runner.execute(plan, IsAbandoned(by_rank[rank])) is None for by_rank in leaving]

    assert runners.each(work) == [[False, True, True, True, False]] * 2


def test_step_abandoned_during_the_wait_for_masks_ends_in_all_ranks(
    tiny_checkpoint: Callable[..., Path], step_driver: ModuleType, grouped: Callable[..., Group]
) -> None:
    """The masks of rank 1 are never filled. It abandons the step while rank 0 waits only for it."""
    group = grouped(tiny_checkpoint("llama"), 2)
    never = np.zeros(1, dtype=np.int32)
    leaves = IsAbandoned(1)

    def work(runner: ModelRunner, rank: int, is_stuck: bool) -> Any:
        driver = step_driver.StepDriver(runner)
        driver.add("a", range(5, 25))
        masks = FilledMasks(([4],), runner.config.vocab_size)
        if is_stuck and rank == 1:
            masks.filled_address = never.ctypes.data
        chunk = msgspec.structs.replace(driver.chunk("a", 20), mask_row=0)
        result = runner.execute(StepPlan(0, (chunk,), 20, masks=masks), leaves if rank == 1 else IsAbandoned(1))
        return None if result is None else result.token_ids

    meetings = []
    for _ in range(2):
        assert group.each(lambda runner, rank: work(runner, rank, False)) == [(4,)] * 2
        meetings.append(group.arrivals.counts()[0])
    # This is the vote after the masks. Only the exchange of sampled tokens follows.
    vote = 2 * meetings[1] - meetings[0] - 1
    runs = group.begin(lambda runner, rank: work(runner, rank, True))
    give_up_at = time.monotonic() + SECONDS_MAX
    while group.arrivals.counts() != (vote, vote - 1) and time.monotonic() < give_up_at:
        os.sched_yield()
    assert group.arrivals.counts() == (vote, vote - 1)
    assert group.arrivals.missing() == (1,)
    leaves.waited_for[0] = 0
    assert [run.result(SECONDS_MAX) for run in runs] == [None, None]


class Distant:
    """Collectives that kernels can only call through Python.

    Args:
        near: the collectives that do the work.
        fails_at: number of sums before the first failure. None: no failure.
    """

    native = None

    def __init__(self, near: SharedMemoryCollectives, fails_at: int | None = None) -> None:
        self._near, self._sums_left = near, fails_at
        self.rank, self.size = near.rank, near.size

    def sum_(self, values: Any, is_abandoned: bool = False) -> bool:
        if self._sums_left is not None:
            if not self._sums_left:
                raise ConnectionError("gone")
            self._sums_left -= 1
        return self._near.sum_(values, is_abandoned)

    def gather(self, own: Any) -> Any:
        return self._near.gather(own)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("kind", ["llama", "gemma2", "cohere2", "qwen2-moe", "falcon-h1"])
def test_collectives_in_python_give_the_same_results_as_shared_memory(
    kind: str, tiny_checkpoint: Callable[..., Path], rank_program: ModuleType, grouped: Callable[..., Group]
) -> None:
    """NativeCallbacks provide no separate buffer for a rank's own part."""
    near, distant = (grouped(tiny_checkpoint(kind), 2, wrapped_by=wrap) for wrap in (lambda near: near, Distant))
    wanted, found = (group.each(lambda runner, rank: rank_program.history(runner)) for group in (near, distant))
    assert found == wanted


def test_error_in_a_collective_is_raised_by_the_step(
    tiny_checkpoint: Callable[..., Path], rank_program: ModuleType, grouped: Callable[..., Group]
) -> None:
    group = grouped(tiny_checkpoint("llama"), 2, wrapped_by=lambda near: Distant(near, fails_at=7))

    def work(runner: ModelRunner, rank: int) -> None:
        with pytest.raises(ConnectionError):
            rank_program.history(runner)

    group.each(work)
