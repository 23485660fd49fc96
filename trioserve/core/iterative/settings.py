"""How much a core of iterative requests may have at a time."""

from __future__ import annotations

import msgspec

from trioserve.contracts.errors import StartupError

__all__ = ["IterativeSettings"]


class IterativeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """slot_count: latent slots, so no more requests run. kept_slot_count: further slots, for the latents of requests
    that were preempted; while all are taken nobody is preempted. step_work_max: what one forward pass may cost, in the
    units of IterativeRequest: it bounds how long an abort waits. Raises StartupError."""

    slot_count: int
    kept_slot_count: int = 0
    step_work_max: int

    def __post_init__(self) -> None:
        for name, low in (("slot_count", 1), ("kept_slot_count", 0), ("step_work_max", 1)):
            if getattr(self, name) < low:
                raise StartupError(f"{name} is {getattr(self, name)}, it must be at least {low}")
