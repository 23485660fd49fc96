"""A history of several routers as data: its settings, then what clients do, and the faults of routers.

    routers endpoints=2 leases_max=4 shares=true
    come number=1 at=3.0 router=0 seconds=1.5
    die at=3.5 router=0

Times are seconds since the routers began. A history stays valid when events are removed or moved. If an event has an
earlier time than the event before it, it happens at once. An event that does not apply does nothing.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from trioserve.contracts.errors import StartupError

__all__ = [
    "Back",
    "Come",
    "Die",
    "Meet",
    "Part",
    "RoutersEvent",
    "RoutersHistory",
    "RoutersWorld",
]


class RoutersWorld(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="routers"):
    """Settings of a history.

    Attributes:
        routers: number of routers.
        endpoints: number of endpoints.
        seats: number of sequences that can run at an endpoint. Further sequences wait inside the endpoint.
        leases_max: maximum number of leases at an endpoint. The limit holds for all routers together if `shares` is
            True, and otherwise for each router.
        shares: True if the routers know each other and share the limits.
        reports: "asked": each router asks for the load every `report_seconds`. "pushed": an endpoint sends its load
            when the load has changed, as often as a real endpoint does.
        wire_seconds: network latency in one direction.
        queue_requests_max: maximum number of requests that wait at one router.
    """

    policy: str = "least_loaded"
    routers: int = 2
    endpoints: int = 1
    seats: int = 1
    leases_max: int = 1
    waiting_depth_max: int = 0
    shares: bool = False
    reports: Literal["asked", "pushed"] = "asked"
    report_seconds: float = 0.25
    wire_seconds: float = 0.001
    queue_requests_max: int = 100_000
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low, high in (("routers", 1, 64), ("endpoints", 1, 10_000), ("seats", 1, 1024)):
            value = getattr(self, name)
            if not low <= value <= high:
                raise StartupError(f"--{name} is {value}, it must be {low} to {high}")


class Come(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="come"):
    """A request arrives at a router, or at another router if the first one is gone.

    Attributes:
        number: the request's number. A second request with the same number is ignored.
        seconds: how long the request runs at its endpoint.
        patience: seconds until the client disconnects. None: it stays until the end.
    """

    number: int
    at: float = 0.0
    router: int = 0
    seconds: float = 1.0
    tenant: str = "much"
    patience: float | None = None


class Die(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="die"):
    """A router dies. Its requests at endpoints end, and its clients send their requests to another router."""

    at: float = 0.0
    router: int = 0


class Back(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="back"):
    """A dead router starts again."""

    at: float = 0.0
    router: int = 0


class Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="part"):
    """Two routers can no longer see each other."""

    at: float = 0.0
    router: int = 0
    peer: int = 0


class Meet(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="meet"):
    """Two routers can see each other again."""

    at: float = 0.0
    router: int = 0
    peer: int = 0


RoutersEvent = Come | Die | Back | Part | Meet


class RoutersHistory(msgspec.Struct, frozen=True):
    world: RoutersWorld
    events: tuple[RoutersEvent, ...]
