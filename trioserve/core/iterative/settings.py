"""Limits of a core of iterative requests."""

from __future__ import annotations

import msgspec

from trioserve.contracts.errors import StartupError

__all__ = ["IterativeSettings"]


class IterativeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a core of iterative requests.

    Attributes:
        slot_count: number of latent slots, which is also the most requests that run at a time.
        kept_slot_count: further slots for the latents of preempted requests. While all are taken, no request is
            preempted.
        step_work_max: work of one forward pass at most, in the units of IterativeRequest. This limits how long an abort
            waits for the step in flight.

    Raises:
        StartupError: a value is out of range.
    """

    slot_count: int
    kept_slot_count: int = 0
    step_work_max: int

    def __post_init__(self) -> None:
        for name, low in (("slot_count", 1), ("kept_slot_count", 0), ("step_work_max", 1)):
            if getattr(self, name) < low:
                raise StartupError(f"{name} is {getattr(self, name)}, it must be at least {low}")
