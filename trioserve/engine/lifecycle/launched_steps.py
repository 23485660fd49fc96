"""Overlapping steps on a device with its own queue, such as a GPU.

A step is launched as soon as the event loop hands it over. Its result is awaited later. While the compute thread waits
for step N, step N+1 is already in the device's queue. So the device does not wait between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from trioserve.contracts.step import IsAbandoned, LaunchingExecutor, StepPlan, StepResult
from trioserve.trio_tools.worker_thread import WorkerThread

__all__ = ["LaunchedSteps"]

Finish = Callable[[], StepResult | None]


class LaunchedSteps:
    """A `StepRunner` that launches and finishes each step in the compute thread, as two separate jobs.

    The launch of a later step runs before an earlier step is finished.

    Args:
        executor: launches steps on the device.
        thread: the compute thread.
    """

    def __init__(self, executor: LaunchingExecutor, thread: WorkerThread) -> None:
        self._executor = executor
        self._thread = thread
        # A failed launch does not affect the earlier steps. After a failed finish, no later step can be finished.
        self._is_broken = False
        self._is_over = False

    def run_step(self, plan: StepPlan, is_abandoned: IsAbandoned) -> Coroutine[Any, Any, StepResult | None]:
        return self._result(self._thread.begin(self._launch, plan, is_abandoned))

    async def _result(self, launched: Coroutine[Any, Any, Finish]) -> StepResult | None:
        finish = await launched
        return await self._thread.run(self._finish, finish)

    def _launch(self, plan: StepPlan, is_abandoned: IsAbandoned) -> Finish:
        if self._is_broken:
            return _nothing
        try:
            return self._executor.launch(plan, is_abandoned)
        except BaseException:
            self._is_broken = True
            raise

    def _finish(self, finish: Finish) -> StepResult | None:
        if self._is_over:
            return None
        try:
            return finish()
        except BaseException:
            self._is_broken = self._is_over = True
            raise


def _nothing() -> None:
    return None
