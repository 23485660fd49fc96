"""Time limits of stopping a service."""

from __future__ import annotations

import msgspec

from trioserve.contracts.errors import StartupError

__all__ = ["StoppingSettings"]

STOPPING_SECONDS_MAX = 86_400  # one day; a larger value probably has the wrong unit


class StoppingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Time limits for the phases in which a service stops.

    Attributes:
        drain_seconds_max: Longest time for running requests to finish after the command to stop.
        drain_delay_seconds: Minimum time for which the server still answers after SIGTERM, so that load balancers and
            people can see that it drains. At most drain_seconds_max. Not applied after SIGINT, which a waiting person
            sends.
        grace_seconds_max: Longest time for clients to read the end of their responses, after the drain or a fault.
            After this time, every task is cancelled.

    Raises:
        StartupError: a value is out of range.
    """

    drain_seconds_max: float = 30.0
    drain_delay_seconds: float = 2.0
    grace_seconds_max: float = 2.0

    def __post_init__(self) -> None:
        for name in ("drain_seconds_max", "drain_delay_seconds", "grace_seconds_max"):
            value = getattr(self, name)
            if not 0 <= value <= STOPPING_SECONDS_MAX:
                raise StartupError(f"{name} is {value}, it must be 0 to {STOPPING_SECONDS_MAX} seconds")
