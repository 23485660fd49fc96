"""Requests with a known number of steps, such as images: requests, plans, results and events.

A request is encoded once, denoised step_count times, and decoded once, in this order. Its latent slot keeps its state
between the phases: the encoded prompt, the latent, and the model's caches.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from trioserve.contracts.events import IterativePhase, RequestFinished
from trioserve.contracts.ids import RequestId
from trioserve.contracts.step import IsAbandoned, never_abandoned

__all__ = [
    "IterativeEvent",
    "IterativeExecutor",
    "IterativePlan",
    "IterativeRequest",
    "IterativeResult",
    "IterativeStats",
    "LatentMove",
    "LatentWork",
    "OutputReady",
    "StepDone",
]


class IterativeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One object to generate, such as an image.

    Attributes:
        id: Id that the engine gave to the request.
        step_count: Denoising steps, at least 1.
        seed: 0 <= seed < 2**64. Seed and step determine all randomness, regardless of other requests.
        priority: PRIORITY_MIN to PRIORITY_MAX. A lower number runs sooner.
        is_guided: True if a denoising step computes two rows in one forward pass: with the prompt and without.
        encode_work: Work of encoding, at least 1, in the unit of IterativeSettings.step_work_max.
        denoise_work: Work of each row in a denoising step, at least 1.
        decode_work: Work of decoding, at least 1.
        partial_every: Denoising steps between two partial results. None for no partial results.
        task: Parameters for the executor. The core does not read them.
    """

    id: RequestId
    step_count: int
    seed: int
    priority: int = 0
    is_guided: bool = False
    encode_work: int = 1
    denoise_work: int = 1
    decode_work: int = 1
    partial_every: int | None = None
    task: object = None

    def work(self, phase: IterativePhase) -> int:
        """Return the work that the request adds to a forward pass.

        Args:
            phase: Phase of the forward pass. Not QUEUED.
        """
        if phase is IterativePhase.ENCODE:
            return self.encode_work
        if phase is IterativePhase.DECODE:
            return self.decode_work
        assert phase is IterativePhase.DENOISE, phase
        return self.denoise_work * (2 if self.is_guided else 1)


class LatentWork(msgspec.Struct, frozen=True):
    """The computation of one request in one forward pass.

    Attributes:
        request: The request.
        slot: Latent slot of the request.
        step: Denoising step, 0 to step_count - 1. 0 in the other phases.
        wants_partial: True if a partial result is needed after this step.
    """

    request: IterativeRequest
    slot: int
    step: int
    wants_partial: bool = False


class LatentMove(msgspec.Struct, frozen=True):
    """Move the whole content of one latent slot to another.

    Attributes:
        source: Slot to read.
        target: Slot to overwrite.
    """

    source: int
    target: int


class IterativePlan(msgspec.Struct, frozen=True):
    """One forward pass of one phase.

    Slots of running requests have the lowest numbers. Slots for the latents of preempted requests have higher numbers.

    Attributes:
        step_index: Number of the step, counted from 0.
        phase: Phase of all works.
        works: Requests to compute.
        work_count: Sum of their work.
        moves: Moves to do in this order before the computation, even if the step is abandoned.
        admitted: Requests that got a slot when this plan was made.
        preempted: Requests that lost their slot when this plan was made.
        freed: Slots that were freed since the previous plan. The executor drops their content before the moves.
    """

    step_index: int
    phase: IterativePhase
    works: tuple[LatentWork, ...]
    work_count: int
    moves: tuple[LatentMove, ...] = ()
    admitted: tuple[RequestId, ...] = ()
    preempted: tuple[RequestId, ...] = ()
    freed: tuple[int, ...] = ()


class IterativeResult(msgspec.Struct, frozen=True):
    """The results of a plan.

    Attributes:
        outputs: Output of each request that was decoded.
        partials: Partial result of each work with wants_partial.
        errors: Requests that cannot continue, each with a sentence for the client. Other requests are not affected.
    """

    outputs: dict[RequestId, object] = {}
    partials: dict[RequestId, object] = {}
    errors: dict[RequestId, str] = {}


class IterativeExecutor(Protocol):
    """Computes plans, one at a time, in the thread that calls it.

    All state of a request is in its latent slot. A request that is missing in the next plan may have ended.
    """

    def execute(self, plan: IterativePlan, is_abandoned: IsAbandoned = never_abandoned) -> IterativeResult | None:
        """Drop the freed slots, do the moves, and compute the works.

        The result of one work does not depend on the other works of the plan. In float32, the bytes are equal.

        Args:
            plan: The forward pass.
            is_abandoned: True once no request waits for the result. The writes of an abandoned plan are never read.

        Returns:
            The results. For an abandoned plan, the executor may return None after it did the moves.

        Raises:
            Exception: a fault of the engine itself. A fault of one request goes into `errors`.
        """
        ...


class StepDone(msgspec.Struct, frozen=True):
    """Event: a denoising step of a request is complete.

    Attributes:
        request_id: The request.
        steps_done: Denoising steps done so far.
        partial: Partial result. None if not requested.
    """

    request_id: RequestId
    steps_done: int
    partial: object | None = None


class OutputReady(msgspec.Struct, frozen=True):
    """The output of a request. The core sends it once, before RequestFinished."""

    request_id: RequestId
    output: object


IterativeEvent = StepDone | OutputReady | RequestFinished


class IterativeStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of an iterative engine. Values ending in _total, except the two slot totals, only grow.

    Attributes:
        running_count: Requests with a slot.
        waiting_count: Requests that wait for a slot.
        slots_total: Slots for running requests.
        slots_used: Slots of running requests in use.
        kept_total: Slots for the latents of preempted requests.
        kept_used: Used slots among kept_total.
        steps_total: Number of steps.
        denoised_total: Denoising steps, summed over requests.
        preemptions_total: Number of preemptions.
    """

    running_count: int
    waiting_count: int
    slots_total: int
    slots_used: int
    kept_total: int
    kept_used: int
    steps_total: int
    denoised_total: int
    preemptions_total: int
