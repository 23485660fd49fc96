"""Steps of a device that computes by itself, for steps that overlap: each is begun as soon as it is handed over, and
waited for when the event loop comes to ask for its result.

So while the compute thread waits for step N, N+1 stands in the device's own queue, and between the two the device waits
for nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from trioserve.contracts.step import IsAbandoned, LaunchingExecutor, StepPlan, StepResult
from trioserve.trio_tools.worker_thread import WorkerThread

__all__ = ["LaunchedSteps"]

Finish = Callable[[], StepResult | None]


class LaunchedSteps:
    """A StepRunner. Both halves of a step run in the compute thread; a later step's first half comes before an earlier
    one's second."""

    def __init__(self, executor: LaunchingExecutor, thread: WorkerThread) -> None:
        self._executor = executor
        self._thread = thread
        # A step that cannot be launched says nothing against those before it; one that cannot be finished is the last.
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
