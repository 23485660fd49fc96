"""Cores whose steps a test permits one by one. Without a permit, the core schedules nothing.

The gate is in `schedule`, where a step begins. So no plan is in flight between two steps, and an abort frees blocks at
once, as between two steps of a running engine.
"""

from __future__ import annotations

import trio

from trioserve.contracts.guide import MaskMaker
from trioserve.contracts.iterative import IterativePlan
from trioserve.contracts.kv_transfer import KVConnector
from trioserve.contracts.step import StepPlan
from trioserve.core.engine import EngineCore
from trioserve.core.iterative.engine import IterativeCore
from trioserve.core.settings import CoreSettings, IterativeSettings

__all__ = ["GatedCore", "GatedImageCore", "GatedSteps"]


class GatedSteps:
    """Gate before each step of a core.

    Args:
        is_paused: if True, `schedule` returns no plan, except for one call after each `give_step`.
    """

    def __init__(self, *, is_paused: bool) -> None:
        self.is_paused = is_paused
        self._has_step = False
        self._asked = trio.Event()

    def may_schedule(self) -> bool:
        """Return True if the step loop may begin a step now."""
        self._asked.set()
        if self.is_paused and not self._has_step:
            return False
        self._has_step = False
        return True

    def give_step(self) -> None:
        self._has_step = True

    def take_back_step(self) -> None:
        self._has_step = False

    async def asked_again(self) -> None:
        """Wait until the step loop asks for a plan.

        By then the step in flight has ended and its results are delivered.
        """
        self._asked = trio.Event()
        await self._asked.wait()


class GatedCore(GatedSteps, EngineCore):
    """An EngineCore with a gate. While it is paused, it plans no step ahead."""

    def __init__(
        self,
        settings: CoreSettings,
        *,
        is_paused: bool,
        connector: KVConnector | None = None,
        mask_maker: MaskMaker | None = None,
    ) -> None:
        GatedSteps.__init__(self, is_paused=is_paused)
        EngineCore.__init__(self, settings, connector=connector, mask_maker=mask_maker)

    def schedule(self, now: float) -> StepPlan | None:
        return super().schedule(now) if self.may_schedule() else None

    def schedule_ahead(self, now: float) -> StepPlan | None:
        return None if self.is_paused else super().schedule_ahead(now)


class GatedImageCore(GatedSteps, IterativeCore):
    def __init__(self, settings: IterativeSettings, *, is_paused: bool) -> None:
        GatedSteps.__init__(self, is_paused=is_paused)
        IterativeCore.__init__(self, settings)

    def schedule(self, now: float) -> IterativePlan | None:
        return super().schedule(now) if self.may_schedule() else None
