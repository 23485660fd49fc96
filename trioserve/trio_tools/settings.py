"""How long leaving may take: the bounds of a service's last minutes, with their units and reasons."""

from __future__ import annotations

import msgspec

from trioserve.contracts.errors import StartupError

__all__ = ["StoppingSettings"]

STOPPING_SECONDS_MAX = 86_400  # a day: whoever asks for more has meant something else


class StoppingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How long each phase of stopping may take.

    Args:
        drain_seconds_max: for running requests to finish after the order to stop.
        drain_delay_seconds: for how long the server at least still answers after SIGTERM, so that load balancers and
            people see that it drains. At most drain_seconds_max. SIGINT comes from a person who waits: it has no delay.
        grace_seconds_max: for clients to read the end, after the drain or a fault. Then everything is cancelled.
    """

    drain_seconds_max: float = 30.0
    drain_delay_seconds: float = 2.0
    grace_seconds_max: float = 2.0

    def __post_init__(self) -> None:
        for name in ("drain_seconds_max", "drain_delay_seconds", "grace_seconds_max"):
            value = getattr(self, name)
            if not 0 <= value <= STOPPING_SECONDS_MAX:
                raise StartupError(f"{name} is {value}, it must be 0 to {STOPPING_SECONDS_MAX} seconds")
