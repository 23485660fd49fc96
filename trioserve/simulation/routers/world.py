"""Settings of several routers of the same endpoints."""

from __future__ import annotations

from typing import Literal

import msgspec

from trioserve.contracts.errors import StartupError

__all__ = ["RoutersWorld"]


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
