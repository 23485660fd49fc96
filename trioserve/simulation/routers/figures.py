"""Results of a simulation of several routers: waits, how far limits were exceeded, and which router or tenant was
served worst.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from trioserve.simulation.routers.endpoint import SimulatedEndpoint
from trioserve.simulation.routers.world import RoutersWorld

__all__ = ["Figures", "RoutersRow", "rows_as_table"]


class RoutersRow(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one history.

    Attributes:
        dies: whether one router dies, and comes back.
        requests: requests that got a seat.
        wait_p50: median seconds from arrival to a seat, at a router and inside an endpoint.
        wait_p99: 99th percentile of the same.
        router_p99: `wait_p99` of the router with the worst one.
        little_p99: `wait_p99` of the tenant that sends a fifth of the requests.
        beyond: most sequences at one endpoint beyond its seats and its allowed queue.
        beyond_share: share of the requests that arrived at an endpoint with that many already there.
        idle_share: share of all seats that were empty while requests waited at a router.
        refused: refused requests.
        little_refused: refused requests of the small tenant.
    """

    world: RoutersWorld
    dies: bool
    requests: int
    wait_p50: float
    wait_p99: float
    router_p99: float
    little_p99: float
    beyond: int
    beyond_share: float
    idle_share: float
    refused: int
    little_refused: int


class Figures:
    def __init__(self, world: RoutersWorld) -> None:
        self._world = world
        self._waits: list[float] = []
        self._by_router: dict[int, list[float]] = {}
        self._by_tenant: dict[str, list[float]] = {}
        self._refused: Counter[str] = Counter()
        self._came = 0
        self._came_beyond = 0
        self._running = 0
        self._waiting = 0
        self._waiting_seconds = 0.0
        self._idle_seat_seconds = 0.0
        self._most = 0

    def pass_time(self, seconds: float) -> None:
        """Add a period without changes.

        Args:
            seconds: its length.
        """
        if self._waiting:
            self._waiting_seconds += seconds
            self._idle_seat_seconds += seconds * (self._world.endpoints * self._world.seats - self._running)

    def note_waiting(self, by: int) -> None:
        self._waiting += by

    def note_came(self, count: int) -> None:
        """Note a request that has arrived at an endpoint.

        Args:
            count: requests at the endpoint now.
        """
        self._came += 1
        self._came_beyond += count > self._world.seats + self._world.waiting_depth_max

    def note_began(self, router: int, tenant: str, wait: float) -> None:
        """Note a request that got a seat.

        Args:
            router: its router.
            tenant: its tenant.
            wait: seconds that it waited.
        """
        self._running += 1
        self._waits.append(wait)
        self._by_router.setdefault(router, []).append(wait)
        self._by_tenant.setdefault(tenant, []).append(wait)

    def note_left_seat(self) -> None:
        self._running -= 1

    def note_refused(self, tenant: str) -> None:
        self._refused[tenant] += 1

    def end(self, endpoints: Iterable[SimulatedEndpoint]) -> None:
        self._most = max(endpoint.most for endpoint in endpoints)

    def row(self, *, dies: bool = False) -> RoutersRow:
        world = self._world
        seat_seconds = self._waiting_seconds * world.endpoints * world.seats
        return RoutersRow(
            world=world,
            dies=dies,
            requests=len(self._waits),
            wait_p50=_percentile(self._waits, 50),
            wait_p99=_percentile(self._waits, 99),
            router_p99=max((_percentile(waits, 99) for waits in self._by_router.values()), default=0.0),
            little_p99=_percentile(self._by_tenant.get("little", []), 99),
            beyond=max(0, self._most - world.seats - world.waiting_depth_max),
            beyond_share=self._came_beyond / self._came if self._came else 0.0,
            idle_share=self._idle_seat_seconds / seat_seconds if seat_seconds else 0.0,
            refused=self._refused.total(),
            little_refused=self._refused["little"],
        )


def _percentile(values: list[float], percent: int) -> float:
    """Percentile of values, or 0 if there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] if ordered else 0.0


def rows_as_table(rows: Iterable[RoutersRow]) -> list[str]:
    """Format results as a Markdown table.

    Args:
        rows: the results.

    Returns:
        The lines of the table.
    """
    heads = (
        "routers, endpoints",
        "shares",
        "wait p50, p99",
        "worst router, small tenant p99",
        "beyond the limit",
        "seats idle while some wait",
    )
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        world = row.world
        shares = ("yes, one dies" if row.dies else "yes") if world.shares else "no"
        cells = (
            f"{world.routers}, {world.endpoints:,}",
            shares,
            f"{row.wait_p50:.2f}, {row.wait_p99:.2f} s",
            f"{row.router_p99:.2f}, {row.little_p99:.2f} s",
            f"{row.beyond}",
            f"{row.idle_share:.0%}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines
