"""A history of several routers as data: its settings, then the events from outside.

    routers endpoints=2 leases_max=4 shares=true
    come number=1 at=3.0 router=0 seconds=1.5
    die at=3.5 router=0

Times are seconds since the routers began. A history stays valid when events are removed or moved: an event with an
earlier time than the one before happens at once, and an event that does not apply does nothing.
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
        seats: sequences that run at an endpoint. Others wait inside it.
        leases_max: lease limit of an endpoint, for all routers together if they share it, else for each.
        shares: whether the routers know each other and share limits.
        reports: "asked" if each router gets a load every `report_seconds`; "pushed" if the endpoint sends its load when
            it has changed, as often as a real endpoint does.
        wire_seconds: duration of one way.
        queue_requests_max: most requests that wait at each router.
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
    """A request arrives at a router, or at another one if that is gone.

    Attributes:
        number: the request's number. A second request with the same number is ignored.
        seconds: how long it has a seat at its endpoint.
        patience: seconds until its client leaves, or None if it stays to the end.
    """

    number: int
    at: float = 0.0
    router: int = 0
    seconds: float = 1.0
    tenant: str = "much"
    patience: float | None = None


class Die(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="die"):
    """A router dies: its requests at endpoints end, and its clients ask another router."""

    at: float = 0.0
    router: int = 0


class Back(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="back"):
    """A dead router begins again."""

    at: float = 0.0
    router: int = 0


class Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="part"):
    """Two routers cannot see each other any more."""

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
