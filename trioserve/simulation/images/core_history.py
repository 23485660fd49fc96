"""A history of a core of iterative requests, as data: its limits, then its events.

    iterative slots=2 kept=1 work=4
    arrive id="a" steps=3 guided=true
    begin
    abort ids=["a"]
    forward
    update

A history stays valid when events are removed from it. For example, an update without a step does nothing.
"""

from __future__ import annotations

import msgspec

from trioserve.contracts.events import FinishReason
from trioserve.contracts.request import PRIORITY_MAX, PRIORITY_MIN

__all__ = [
    "Abort",
    "Arrive",
    "Begin",
    "Fail",
    "Forward",
    "IterativeHistory",
    "IterativeSimulationEvent",
    "IterativeWorld",
    "Update",
]


class IterativeWorld(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="iterative"):
    """Limits of the core.

    Attributes:
        slots: number of slots for running requests.
        kept: number of slots for latents that are kept for preempted requests.
        work: maximum work of one step.
    """

    slots: int = 1
    kept: int = 0
    work: int = 2


class Arrive(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="arrive"):
    """A request arrives. A second request with the same id is ignored.

    Attributes:
        encode: work of encoding.
        denoise: work of one denoising step.
        decode: work of decoding.
    """

    id: str
    steps: int = 1
    seed: int = 0
    priority: int = 0
    guided: bool = False
    encode: int = 1
    denoise: int = 1
    decode: int = 1
    partial_every: int | None = None

    def can_run(self, world: IterativeWorld) -> bool:
        rows = 2 if self.guided else 1
        return (
            self.steps >= 1
            and PRIORITY_MIN <= self.priority <= PRIORITY_MAX
            and max(self.encode, rows * self.denoise, self.decode) <= world.work
            and (self.partial_every is None or self.partial_every >= 1)
        )


class Abort(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="abort"):
    ids: tuple[str, ...]
    reason: FinishReason = FinishReason.ABORT


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """Plan a step, unless a step is in flight."""


class Fail(msgspec.Struct, frozen=True, kw_only=True, tag="fail"):
    """Requests fail in the step in flight. Nothing happens if the step does not contain them or is already computed.

    Attributes:
        ids: the requests.
    """

    ids: tuple[str, ...]


class Forward(msgspec.Struct, frozen=True, tag="forward"):
    """Compute the forward pass of the step in flight."""


class Update(msgspec.Struct, frozen=True, tag="update"):
    """Let the core process the result of the step in flight."""


IterativeSimulationEvent = Arrive | Abort | Begin | Fail | Forward | Update


class IterativeHistory(msgspec.Struct, frozen=True):
    world: IterativeWorld
    events: tuple[IterativeSimulationEvent, ...]
