"""Several routers before the same endpoints: what is given from the beginning of a history."""

from __future__ import annotations

import msgspec

from trioserve.contracts.errors import StartupError

__all__ = ["RoutersWorld"]


class RoutersWorld(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="routers"):
    """routers, endpoints: how many. seats: sequences that run at an endpoint; the others wait inside it. leases_max: of
    an endpoint, of all routers together where they share it, else of each. shares: the routers know of each other.
    report_seconds: between two loads that an endpoint sends to each router. wire_seconds: one way.
    """

    policy: str = "least_loaded"
    routers: int = 2
    endpoints: int = 1
    seats: int = 1
    leases_max: int = 1
    waiting_depth_max: int = 0
    shares: bool = False
    report_seconds: float = 0.25
    wire_seconds: float = 0.001
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low, high in (("routers", 1, 64), ("endpoints", 1, 10_000), ("seats", 1, 1024)):
            value = getattr(self, name)
            if not low <= value <= high:
                raise StartupError(f"--{name} is {value}, it must be {low} to {high}")
