"""Pauses of an engine whose weights are replaced.

While weights are written, the engine pauses. Running requests then continue with the new weights, are computed again,
or end. Operators that replace weights or put the engine to sleep take turns.
"""

from __future__ import annotations

import math
from typing import Any

import trio
from trio.lowlevel import Task

from trioserve.contracts.errors import InvalidRequest, WeightsLost
from trioserve.engine.lifecycle.request_scope import AnyScope
from trioserve.simulation.stack.pause_plan import Halt, Pause, Sleep, Swap
from trioserve.simulation.stack.pauses import HaltedEngine, Pauses
from trioserve.simulation.stack.swaps import Swaps, source_of, version_of
from trioserve.testing.fake_engine import FakeEngine

__all__ = ["SwapPauses"]


class SwapPauses(Pauses):
    """Records of pauses and of new weights.

    Args:
        swaps: records of the weights and their tokens.
        **options: options of Pauses.

    Attributes:
        is_replacing: True while weights are written, or if only a part of them was written.
    """

    def __init__(self, *, swaps: Swaps, **options: Any) -> None:
        super().__init__(**options)
        self.is_replacing = False
        self._swaps = swaps
        self._updaters: dict[Task, Swap] = {}  # tasks inside of `update_weights`
        self._updater: Task | None = None  # the one of them whose weights are being written
        self._begun_before: list[AnyScope] = []  # requests that ran before the current turn of its task

    @property
    def holds_up(self) -> bool:
        return super().holds_up or self.is_replacing

    @property
    def is_closed(self) -> bool:
        return super().is_closed or self.is_replacing

    @property
    def _fake(self) -> FakeEngine:
        assert isinstance(self.engine, FakeEngine)
        return self.engine

    async def _finish(self) -> None:
        if self.is_replacing and self._fake.fault is None and not self._fake.draining:
            await self._swap(Swap(at=0.0, number=1))

    async def _act(self, fake: HaltedEngine, halt: Halt) -> str:
        return await (self._swap(halt) if isinstance(halt, Swap) else super()._act(fake, halt))

    async def _sleep(self, fake: HaltedEngine, order: Sleep) -> str:
        try:
            return await super()._sleep(fake, order)
        except InvalidRequest:
            assert order.mode == "wait", "a sleep is refused that ends running requests, or keeps them"
            assert self._fake.has_half_weights, "a sleep is refused, although running requests can end"
            return "refused"

    async def _pause_engine(self, fake: HaltedEngine, order: Pause) -> None:
        await self._fake.pause_generation(order.mode, clear_cache=order.clears)

    def _check_given_back(self, order: Pause) -> None:
        stats = self._fake.current_core.stats()
        if order.mode == "retract" or (order.mode == "keep" and order.clears):
            assert stats.blocks_used == 0, f"all blocks must be freed, but {stats.blocks_used} are in use"
        if order.clears:
            assert stats.blocks_cached == 0, "the prefix cache must be empty"
            self._count("pauses that empty the cache")

    async def _swap(self, order: Swap) -> str:
        fake, task = self._fake, trio.lowlevel.current_task()
        if not self._updaters:  # The place has these settings for all replacements.
            fake.weights.seconds, fake.weights.breaks = order.seconds, order.breaks
        self._updaters[task] = order
        outcome = "left"
        try:
            with trio.move_on_after(math.inf if order.patience is None else order.patience):
                source, version = source_of(order.number), version_of(order.number)
                await fake.update_weights(source, version=version, in_flight=order.in_flight)
                outcome = order.in_flight
        except WeightsLost:
            assert fake.has_half_weights, "weights were lost, but the engine does not report it"
            outcome = "lost"
        finally:
            self._note_update_over(task, outcome)
        return outcome

    # --- records ---

    def _waits_for_its_turn(self, halt: Halt) -> bool:
        return isinstance(halt, Swap | Sleep)

    def _is_turn_of(self, task: Task) -> bool:
        return self._fake.turn_owner is task

    def note_drained(self, fake: HaltedEngine) -> None:
        if self._updater is None:  # Otherwise this happens after the weights are written.
            super().note_drained(fake)

    def _note_update_over(self, task: Task, outcome: str) -> None:
        fake, order = self._fake, self._updaters.pop(task)
        is_whole = outcome == order.in_flight
        has_version = fake.weight_version == version_of(order.number)
        if self._updater is task:
            self._updater = None
            self.is_replacing = fake.has_half_weights and not is_whole
            # Leaving waits until the weights are written.
            if is_whole or (outcome == "left" and has_version):
                self._swaps.replace(order.number, recomputes=is_whole and order.in_flight == "recompute")
            if fake.draining and self.is_closed:
                self._end_for_drain(self._begun_before)
        assert not is_whole or has_version, "the weights are new, but the version is old"

    # --- as an instrument ---

    def before_task_step(self, task: Task) -> None:
        if task in self._updaters and self.engine is not None:
            self._begun_before = self._begun(self.engine)
        super().before_task_step(task)

    def _follow(self, fake: HaltedEngine, task: Task) -> str | None:
        return super()._follow(fake, task) or self._follow_swap(self._fake, task)

    def _follow_swap(self, fake: FakeEngine, task: Task) -> str | None:
        if self._begins_to_replace(fake, task):
            self._hold_up(self._begun_before)
            if not self.is_closed:
                self._closed_at = fake.current_core, fake.current_core.stats().steps_total
            self.is_replacing, self._updater = True, task
            if self._updaters[task].in_flight == "abort":
                for request in self._begun_before:
                    self._must_be_over.append(request)
                    self._note_ended(request, "weights_replaced")
        if fake.is_replacing_weights != self.is_replacing:
            return f"weights are {'' if fake.is_replacing_weights else 'not '}being replaced, expected is the opposite"
        if not self.level and fake.weight_version != self._swaps.version:
            return f"the engine has weights {fake.weight_version}, expected are {self._swaps.version}"
        return None

    def _begins_to_replace(self, fake: FakeEngine, task: Task) -> bool:
        if not fake.is_replacing_weights or self._updater is not None or task not in self._updaters:
            return False
        # If half of the weights were written before, the new replacement is visible only by the requests that it ends.
        ends = self.is_replacing and self._updaters[task].in_flight == "abort" and self._begun_before
        return not ends or any(request.is_finished for request in self._begun_before)
