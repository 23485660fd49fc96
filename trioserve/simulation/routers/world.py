"""Several routers before the same endpoints, as settings of a simulation."""

from __future__ import annotations

import msgspec

from trioserve.contracts.errors import StartupError

__all__ = ["RoutersWorld"]


class RoutersWorld(msgspec.Struct, frozen=True, kw_only=True):
    """routers, endpoints: how many. seats: sequences that run at an endpoint; the others wait inside it. leases_max: of
    an endpoint, of all routers together where they share it, else of each. shares: the routers know of each other.
    load: what is asked for, relative to what all seats can do. service_seconds: of a request, on the average; the
    lengths are exponential. seconds: in which requests come. report_seconds: between two loads that an endpoint sends
    to each router. wire_seconds: one way. dies: in the middle one router is gone, its clients ask another one, and a
    while later it is back. notice_seconds: until the others know.
    """

    policy: str = "least_loaded"
    routers: int = 4
    endpoints: int = 32
    seats: int = 8
    leases_max: int = 8
    waiting_depth_max: int = 4
    shares: bool = False
    dies: bool = False
    load: float = 0.9
    service_seconds: float = 2.0
    seconds: float = 30.0
    report_seconds: float = 0.25
    wire_seconds: float = 0.001
    notice_seconds: float = 2.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low, high in (("routers", 1, 64), ("endpoints", 1, 10_000), ("seats", 1, 1024)):
            value = getattr(self, name)
            if not low <= value <= high:
                raise StartupError(f"--{name} is {value}, it must be {low} to {high}")
        if self.dies and self.routers < 2:
            raise StartupError("a router that is alone is missed by nobody: simulate 2 or more, or none that dies")
