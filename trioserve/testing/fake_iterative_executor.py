"""Fake iterative models and their executors, which check the content of the latent slots.

A latent is a number that depends only on its request and on the number of completed denoising steps. So every schedule
must give the same output. The executor writes the latent to its slot after each step, and reads it back before the next
step. So the next read detects a slot that has two owners, was freed too early, or was moved to a wrong index. The fake
image model turns a latent into an image of one colour.
"""

from __future__ import annotations

import zlib

import msgspec

from trioserve.contracts.events import IterativePhase
from trioserve.contracts.ids import RequestId
from trioserve.contracts.image_generation import ImageTask, RGBImage
from trioserve.contracts.iterative import IterativePlan, IterativeRequest, IterativeResult, LatentWork
from trioserve.contracts.step import IsAbandoned, never_abandoned

__all__ = ["FakeImageExecutor", "FakeIterativeExecutor", "denoised", "image_after", "latent_after"]


def latent_after(request: IterativeRequest, steps_done: int) -> int:
    """Return the latent of a request after a number of denoising steps.

    Args:
        request: the request.
        steps_done: number of steps.
    """
    return denoised(request, _encoded(request), steps_done)


def denoised(request: IterativeRequest, latent: int, steps_done: int) -> int:
    """Return a latent after a number of denoising steps, beginning with step 0.

    Args:
        request: the request.
        latent: latent before step 0.
        steps_done: number of steps.
    """
    for step in range(steps_done):
        latent = _denoised(request, latent, step)
    return latent


def _encoded(request: IterativeRequest) -> int:
    return zlib.crc32(f"{request.id} {request.seed} {request.is_guided}".encode())


def _denoised(request: IterativeRequest, latent: int, step: int) -> int:
    return zlib.crc32(f"{latent} {step} of {request.step_count}".encode())


class _SlotContent(msgspec.Struct, frozen=True):
    request_id: RequestId
    steps_done: int
    latent: int


class FakeIterativeExecutor:
    """Executor of a fake iterative model.

    Args:
        slot_count: number of latent slots, including the slots for latents of preempted requests.

    Attributes:
        errors: requests that fail in their next step, each with the error text.
    """

    def __init__(self, slot_count: int) -> None:
        self._slots: list[_SlotContent | None] = [None] * slot_count
        self.errors: dict[RequestId, str] = {}

    @property
    def held_ids(self) -> set[RequestId]:
        """Ids of the requests that have a latent in a slot."""
        return {held.request_id for held in self._slots if held is not None}

    def execute(self, plan: IterativePlan, is_abandoned: IsAbandoned = never_abandoned) -> IterativeResult | None:
        for slot in plan.freed:
            self._slots[slot] = None
        for move in plan.moves:
            assert self._slots[move.source] is not None, f"slot {move.source} is empty, but the plan moves it"
            self._slots[move.target] = self._slots[move.source]
            self._slots[move.source] = None
        result = IterativeResult()
        for work in plan.works:
            message = self.errors.pop(work.request.id, None)
            if is_abandoned() or message is not None:
                self._slots[work.slot] = None  # The slot has garbage now, which no step may read.
                if message is not None:
                    result.errors[work.request.id] = message
                continue
            self._compute(plan.phase, work, result)
        return None if is_abandoned() else result

    def _compute(self, phase: IterativePhase, work: LatentWork, result: IterativeResult) -> None:
        request = work.request
        if phase is IterativePhase.ENCODE:
            self._slots[work.slot] = _SlotContent(request.id, 0, self.encoded(request))
            return
        held = self._slots[work.slot]
        assert held is not None, f"{request.id}: slot {work.slot} is empty"
        assert held.request_id == request.id, f"{request.id}: slot {work.slot} has the latent of {held.request_id}"
        if phase is IterativePhase.DECODE:
            assert held.steps_done == request.step_count, f"{request.id} is decoded after {held.steps_done} steps"
            result.outputs[request.id] = self.shown(request, held.latent)
            return
        assert held.steps_done == work.step, f"{request.id}: step {work.step} follows {held.steps_done} steps"
        latent = _denoised(request, held.latent, work.step)
        self._slots[work.slot] = _SlotContent(request.id, work.step + 1, latent)
        if work.wants_partial:
            result.partials[request.id] = self.shown(request, latent)

    def encoded(self, request: IterativeRequest) -> int:
        """Return the latent of a request before step 0.

        Args:
            request: the request.
        """
        return _encoded(request)

    def shown(self, request: IterativeRequest, latent: int) -> object:
        """Return the partial result or the output that corresponds to a latent.

        Args:
            request: the request.
            latent: its latent.
        """
        return latent


def image_after(request: IterativeRequest, steps_done: int) -> RGBImage:
    """Return the image of a request after a number of steps. It does not depend on other requests.

    Args:
        request: a request whose task is an ImageTask.
        steps_done: number of denoising steps.
    """
    return _image(request, denoised(request, _encoded_task(request), steps_done))


class FakeImageExecutor(FakeIterativeExecutor):
    """Executor of a fake image model.

    Like FakeIterativeExecutor, it raises AssertionError if a slot has wrong content.
    """

    def encoded(self, request: IterativeRequest) -> int:
        return _encoded_task(request)

    def shown(self, request: IterativeRequest, latent: int) -> RGBImage:
        return _image(request, latent)


def _encoded_task(request: IterativeRequest) -> int:
    task = request.task
    assert isinstance(task, ImageTask), f"{request.id} does not request an image"
    asked = msgspec.msgpack.encode((request.seed, request.step_count, request.is_guided, task))
    return zlib.crc32(asked)


def _image(request: IterativeRequest, latent: int) -> RGBImage:
    task = request.task
    assert isinstance(task, ImageTask)
    return RGBImage(task.width, task.height, latent.to_bytes(4, "big")[1:] * (task.width * task.height))
