"""New weights, looked at in a thread of their own and written in the compute thread, behind the step in flight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from trioserve.contracts.weights import ReplacementState, WeightSource
from trioserve.engine.weight_updates import Replacement
from trioserve.trio_tools.daemon_thread import call_abandonable
from trioserve.trio_tools.worker_thread import WorkerThread

__all__ = ["ThreadedWeights", "WrittenWeights"]

LOOK_THREAD = "trioserve-weights"


class WrittenWeights(Protocol):
    """A Replacement of what blocks. state: may be read in any thread."""

    @property
    def state(self) -> ReplacementState: ...

    def replace(self) -> None:
        """To be called in the compute thread."""
        ...


class ThreadedWeights:
    """A WeightPlace. look: reads of a source what there is, and raises InvalidRequest."""

    def __init__(self, look: Callable[[WeightSource], WrittenWeights], compute: WorkerThread) -> None:
        self._look = look
        self._compute = compute

    async def check(self, source: WeightSource) -> Replacement:
        # Files that hang cannot be ended from outside: not in a thread that steps need.
        found = await call_abandonable(self._look, source, thread_name=LOOK_THREAD)
        return _ThreadedReplacement(found, self._compute)


class _ThreadedReplacement:
    def __init__(self, weights: WrittenWeights, compute: WorkerThread) -> None:
        self._weights = weights
        self._compute = compute

    @property
    def state(self) -> ReplacementState:
        return self._weights.state

    async def replace(self) -> None:
        await self._compute.run(self._weights.replace)  # ends also when cancelled
