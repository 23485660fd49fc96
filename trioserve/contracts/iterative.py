"""Requests that take a known number of steps: what is asked, what one forward pass computes, and what comes of it.

A request is encoded once, denoised step_count times, and decoded once, in this order. What it has between two of these
lies in its latent slot: the encoded prompt, the latent, and whatever the model caches for it.
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
    """One thing to be made, such as an image.

    step_count: denoising steps, at least 1. seed: 0 <= seed < 2**64: with the step it fixes all randomness, whatever
    else runs. priority: PRIORITY_MIN to PRIORITY_MAX, a lower number runs sooner. is_guided: a denoising step computes
    two rows of it, with the prompt and without, in the same forward pass. encode_work, denoise_work, decode_work: what
    each phase costs, of a denoising step each row, at least 1; in units of the caller's, which only have to be those of
    IterativeSettings.step_work_max. partial_every: after so many denoising steps, each time, what has become of it so
    far is wanted; None: never. task: what the executor has to know besides; the core does not look at it.
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
        """What it adds to a forward pass of this phase."""
        if phase is IterativePhase.ENCODE:
            return self.encode_work
        if phase is IterativePhase.DECODE:
            return self.decode_work
        assert phase is IterativePhase.DENOISE, phase
        return self.denoise_work * (2 if self.is_guided else 1)


class LatentWork(msgspec.Struct, frozen=True):
    """What one request computes in one forward pass. slot: its latent slot. step: of a denoising step which one it is,
    0 to step_count - 1; 0 in the other phases. wants_partial: what has become of it behind this step is wanted."""

    request: IterativeRequest
    slot: int
    step: int
    wants_partial: bool = False


class LatentMove(msgspec.Struct, frozen=True):
    """All that slot `source` holds is to be in slot `target`."""

    source: int
    target: int


class IterativePlan(msgspec.Struct, frozen=True):
    """One forward pass of one phase. step_index counts from 0. moves: done before anything is computed, in this order,
    also where nobody waits for the rest. freed: slots that nobody has any more since the plan before; what lies there
    is let go first. work_count: of all works together. admitted and preempted name requests that got a slot, or had to
    leave theirs, when this plan was made. Slots are those of running requests first, and behind them those of kept
    latents."""

    step_index: int
    phase: IterativePhase
    works: tuple[LatentWork, ...]
    work_count: int
    moves: tuple[LatentMove, ...] = ()
    admitted: tuple[RequestId, ...] = ()
    preempted: tuple[RequestId, ...] = ()
    freed: tuple[int, ...] = ()


class IterativeResult(msgspec.Struct, frozen=True):
    """The response to a plan. outputs: of each request that was decoded. partials: of each that wanted one. errors:
    requests that cannot go on, with a sentence for the client; the others are not touched."""

    outputs: dict[RequestId, object] = {}
    partials: dict[RequestId, object] = {}
    errors: dict[RequestId, str] = {}


class IterativeExecutor(Protocol):
    """Computes plans, one at a time, in whichever thread calls it. What it knows of a request lies in that one's slot:
    a request that is not in the next plan may be gone."""

    def execute(self, plan: IterativePlan, is_abandoned: IsAbandoned = never_abandoned) -> IterativeResult | None:
        """Let go what is freed, do the moves, and compute the works. A result does not depend on what else is in the
        plan: in float32 it has the same bytes. Raises only for a fault of the engine itself. Once is_abandoned says so,
        nobody waits for the result, and None may be returned when the moves are done. What the works have written is
        not looked at again.
        """
        ...


class StepDone(msgspec.Struct, frozen=True):
    """A denoising step of a request is done. steps_done: so many are by now. partial: what has become of it, where that
    was wanted."""

    request_id: RequestId
    steps_done: int
    partial: object | None = None


class OutputReady(msgspec.Struct, frozen=True):
    """What a request gives, once. Its end comes next."""

    request_id: RequestId
    output: object


IterativeEvent = StepDone | OutputReady | RequestFinished


class IterativeStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot. slots_used of slots_total belong to requests that run, and of kept_total slots for the latents of
    preempted requests kept_used are taken. The *_total figures of what came to pass only grow: steps, denoising steps
    of all requests, and preemptions."""

    running_count: int
    waiting_count: int
    slots_total: int
    slots_used: int
    kept_total: int
    kept_used: int
    steps_total: int
    denoised_total: int
    preemptions_total: int
