"""A core whose steps a test gives out one by one: until it gives one, there is nothing to compute.

It is gated where a step begins, at `schedule`, so that between two steps no plan is in flight and an abort gives its
blocks back at once, as between two steps of a running engine.
"""

from __future__ import annotations

import trio

from trioserve.contracts.guide import MaskMaker
from trioserve.contracts.kv_transfer import KVConnector
from trioserve.contracts.step import StepPlan
from trioserve.core.engine import EngineCore
from trioserve.core.settings import CoreSettings

__all__ = ["GatedCore"]


class GatedCore(EngineCore):
    """is_paused: schedule answers None; `give_step` makes one exception. Nothing is planned ahead then."""

    def __init__(
        self,
        settings: CoreSettings,
        *,
        is_paused: bool,
        connector: KVConnector | None = None,
        mask_maker: MaskMaker | None = None,
    ) -> None:
        super().__init__(settings, connector=connector, mask_maker=mask_maker)
        self.is_paused = is_paused
        self._has_step = False
        self._asked = trio.Event()

    def schedule(self, now: float) -> StepPlan | None:
        self._asked.set()
        if self.is_paused and not self._has_step:
            return None
        self._has_step = False
        return super().schedule(now)

    def schedule_ahead(self, now: float) -> StepPlan | None:
        return None if self.is_paused else super().schedule_ahead(now)

    def give_step(self) -> None:
        self._has_step = True

    def take_back_step(self) -> None:
        self._has_step = False

    async def asked_again(self) -> None:
        """Wait until the step loop asks for a plan: the step in flight is over by then, and delivered."""
        self._asked = trio.Event()
        await self._asked.wait()
