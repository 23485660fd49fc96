"""How long leaving may take: the bounds of a service's last minutes, with their units and reasons."""

from __future__ import annotations

import msgspec

from trioserve.contracts.errors import StartupError

__all__ = ["StoppingSettings"]

STOPPING_SECONDS_MAX = 86_400  # a day: whoever asks for more has meant something else


class StoppingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """drain_seconds_max: how long running requests may go on after the order to stop.
    grace_seconds_max: after that, or after a fault, how long clients have until everything is cancelled.
    """

    drain_seconds_max: float = 30.0
    grace_seconds_max: float = 2.0

    def __post_init__(self) -> None:
        for name in ("drain_seconds_max", "grace_seconds_max"):
            value = getattr(self, name)
            if not 0 <= value <= STOPPING_SECONDS_MAX:
                raise StartupError(f"{name} is {value}, it must be 0 to {STOPPING_SECONDS_MAX} seconds")
