"""A group of ranks in one process, with one thread per rank.

Each rank has a real model. Collectives exchange Python objects between the threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from trioserve.contracts.step import IsAbandoned, StepPlan, StepResult, never_abandoned
from trioserve.model.loading.checkpoint import open_checkpoint
from trioserve.model.parallel.collectives import Collectives
from trioserve.model.parallel.rank_checkpoint import RankCheckpoint
from trioserve.model.runner import ModelRunner
from trioserve.model.settings import ModelSettings

__all__ = ["RankGroup", "ThreadCollectives", "thread_group"]

Result = TypeVar("Result")
WAIT_SECONDS_MAX = 60.0  # After this time, a rank has failed, or made another call than the other ranks.


class _Meeting:
    """Exchanges values between the threads of all ranks."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=WAIT_SECONDS_MAX)
        self._given: list[Any] = [None] * size

    def exchange(self, rank: int, own: Any, take: Callable[[list[Any]], Result]) -> Result:
        """Wait for the values of all ranks and return a result of them.

        Args:
            rank: the calling rank.
            own: its value.
            take: computes the result from all values, before any rank can change its value.
        """
        self._given[rank] = own
        self.barrier.wait()
        result = take(self._given)
        self.barrier.wait()
        return result


class ThreadCollectives:
    """Collectives of one rank. They check that all ranks make the same calls.

    Attributes:
        calls: number of sums and gathers.
    """

    native: int | None = None

    def __init__(self, rank: int, size: int, meeting: _Meeting) -> None:
        self.rank, self.size = rank, size
        self._meeting = meeting
        self.calls = {"sum": 0, "gather": 0}

    def sum_(self, values: Any, is_abandoned: bool = False) -> bool:
        self.calls["sum"] += 1

        def total(given: list[Any]) -> tuple[Any, bool]:
            arrays = self._checked("sum", given)
            result = _copy(arrays[0])
            for array in arrays[1:]:
                result += array
            return result, any(vote for _, _, vote in given)

        result, is_over = self._meeting.exchange(self.rank, ("sum", values, is_abandoned), total)
        values[...] = result
        return is_over

    def gather(self, own: Any) -> Any:
        self.calls["gather"] += 1
        stack = torch.stack if isinstance(own, torch.Tensor) else np.stack
        return self._meeting.exchange(
            self.rank, ("gather", own, False), lambda given: stack(self._checked("gather", given))
        )

    def close(self) -> None:
        pass

    def abort(self) -> None:
        """Let the other ranks fail instead of waiting."""
        self._meeting.barrier.abort()

    def _checked(self, call: str, given: list[Any]) -> list[Any]:
        assert {name for name, _, _ in given} == {call}, "ranks made different calls"
        arrays = [array for _, array, _ in given]
        assert len({(tuple(array.shape), str(array.dtype)) for array in arrays}) == 1, "ranks passed different shapes"
        for array in arrays:
            assert array.is_contiguous() if isinstance(array, torch.Tensor) else array.flags.c_contiguous
        return arrays


def _copy(array: Any) -> Any:
    return array.clone() if isinstance(array, torch.Tensor) else array.copy()


def thread_group(size: int) -> list[ThreadCollectives]:
    meeting = _Meeting(size)
    return [ThreadCollectives(rank, size, meeting) for rank in range(size)]


class RankGroup:
    """The runners of all ranks, with the interface of one runner. It checks that all ranks return the same result.

    Args:
        path: directory of the checkpoint.
        size: number of ranks.
        settings: settings of each runner.
        expert_parallel: see share_of.
        collectives: one for each rank. None: ThreadCollectives.
        block_count: most blocks of the KV cache.
    """

    def __init__(
        self,
        path: Path,
        size: int,
        settings: ModelSettings,
        *,
        expert_parallel: bool = False,
        collectives: Sequence[Collectives] | None = None,
        block_count: int = 200,
    ) -> None:
        self.collectives: Sequence[Any] = thread_group(size) if collectives is None else collectives
        self._pools = [ThreadPoolExecutor(1, f"rank-{rank}") for rank in range(size)]

        def load(rank: int) -> ModelRunner:
            checkpoint = RankCheckpoint(open_checkpoint(path), rank, size, expert_parallel=expert_parallel)
            return ModelRunner.load(checkpoint, settings, collectives=self.collectives[rank])

        self.runners: list[ModelRunner] = self._each(load)
        self.config = self.runners[0].config
        self.block_size = settings.block_size
        self.block_count = min(block_count, *(runner.block_count for runner in self.runners), 10**9)
        self.state_slot_count = min(runner.state_slot_count for runner in self.runners)
        self.snapshot_slot_count = min(runner.snapshot_slot_count for runner in self.runners)
        self._each(lambda rank: self.runners[rank].allocate_kv(self.block_count))

    def execute(self, plan: StepPlan, is_abandoned: IsAbandoned = never_abandoned) -> StepResult | None:
        return self.execute_with_votes(plan, [is_abandoned] * len(self.runners))

    def execute_with_votes(self, plan: StepPlan, votes: Sequence[IsAbandoned]) -> StepResult | None:
        """Execute a step. Each rank gets its own flag that abandons the step."""
        results = self._each(lambda rank: self.runners[rank].execute(plan, votes[rank]))
        for result in results[1:]:
            assert result == results[0], "ranks disagree"
        return results[0]

    def warm_up(self) -> None:
        self._each(lambda rank: self.runners[rank].warm_up())

    def close(self) -> None:
        self._each(lambda rank: self.runners[rank].close())
        for pool in self._pools:
            pool.shutdown()

    def _each(self, call: Callable[[int], Result]) -> list[Result]:
        def guarded(rank: int) -> Result:
            try:
                return call(rank)
            except BaseException:
                if isinstance(self.collectives[rank], ThreadCollectives):
                    self.collectives[rank].abort()
                raise

        futures = [pool.submit(guarded, rank) for rank, pool in enumerate(self._pools)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [future.result() for future in futures]
