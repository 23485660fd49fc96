"""An iterative model that is not one: what becomes of a latent, and whether the slots held what they should.

A latent is a number that depends on its request and on the steps that it has taken, and on nothing else, so every
schedule must give the same output. It is written to its slot and read back before each step, so a slot that has two
owners, was given away too early, or was moved somewhere else is noticed at the next look.
"""

from __future__ import annotations

import zlib

import msgspec

from trioserve.contracts.events import IterativePhase
from trioserve.contracts.ids import RequestId
from trioserve.contracts.iterative import IterativePlan, IterativeRequest, IterativeResult, LatentWork
from trioserve.contracts.step import IsAbandoned, never_abandoned

__all__ = ["FakeIterativeExecutor", "denoised", "latent_after"]


def latent_after(request: IterativeRequest, steps_done: int) -> int:
    """What a request has become when it is encoded and so many steps are done."""
    return denoised(request, _encoded(request), steps_done)


def denoised(request: IterativeRequest, latent: int, steps_done: int) -> int:
    """What a latent has become after so many steps."""
    for step in range(steps_done):
        latent = _denoised(request, latent, step)
    return latent


def _encoded(request: IterativeRequest) -> int:
    return zlib.crc32(f"{request.id} {request.seed} {request.is_guided}".encode())


def _denoised(request: IterativeRequest, latent: int, step: int) -> int:
    return zlib.crc32(f"{latent} {step} of {request.step_count}".encode())


class _Held(msgspec.Struct, frozen=True):
    request_id: RequestId
    steps_done: int
    latent: int


class FakeIterativeExecutor:
    """slot_count: of both kinds together. errors: who fails when it is computed next, and with which message."""

    def __init__(self, slot_count: int) -> None:
        self._slots: list[_Held | None] = [None] * slot_count
        self.errors: dict[RequestId, str] = {}

    @property
    def held_ids(self) -> set[RequestId]:
        """Of whom something lies in a slot."""
        return {held.request_id for held in self._slots if held is not None}

    def execute(self, plan: IterativePlan, is_abandoned: IsAbandoned = never_abandoned) -> IterativeResult | None:
        for slot in plan.freed:
            self._slots[slot] = None
        for move in plan.moves:
            assert self._slots[move.source] is not None, f"nothing lies in slot {move.source}, and it is moved"
            self._slots[move.target] = self._slots[move.source]
            self._slots[move.source] = None
        result = IterativeResult()
        for work in plan.works:
            message = self.errors.pop(work.request.id, None)
            if is_abandoned() or message is not None:
                self._slots[work.slot] = None  # whatever it was, it is not to be looked at
                if message is not None:
                    result.errors[work.request.id] = message
                continue
            self._compute(plan.phase, work, result)
        return None if is_abandoned() else result

    def _compute(self, phase: IterativePhase, work: LatentWork, result: IterativeResult) -> None:
        request = work.request
        if phase is IterativePhase.ENCODE:
            self._slots[work.slot] = _Held(request.id, 0, self.encoded(request))
            return
        held = self._slots[work.slot]
        assert held is not None, f"{request.id}: nothing lies in slot {work.slot}"
        assert held.request_id == request.id, f"{request.id}: what {held.request_id} has lies in slot {work.slot}"
        if phase is IterativePhase.DECODE:
            assert held.steps_done == request.step_count, f"{request.id} is decoded after {held.steps_done} steps"
            result.outputs[request.id] = self.shown(request, held.latent)
            return
        assert held.steps_done == work.step, f"{request.id}: step {work.step} comes after {held.steps_done}"
        latent = _denoised(request, held.latent, work.step)
        self._slots[work.slot] = _Held(request.id, work.step + 1, latent)
        if work.wants_partial:
            result.partials[request.id] = self.shown(request, latent)

    def encoded(self, request: IterativeRequest) -> int:
        """Its latent before the first step."""
        return _encoded(request)

    def shown(self, request: IterativeRequest, latent: int) -> object:
        """What a partial result or an output is."""
        return latent
