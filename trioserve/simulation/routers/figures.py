"""What came of a simulation of several routers: waits, how far limits were overshot, who was served worse."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from trioserve.simulation.routers.endpoint import SimulatedEndpoint
from trioserve.simulation.routers.world import RoutersWorld

__all__ = ["Figures", "RoutersRow", "rows_as_table"]


class RoutersRow(msgspec.Struct, frozen=True, kw_only=True):
    """One history. dies: one router does, and comes back. requests: those that got a seat. wait_p50, wait_p99: seconds
    from coming to a seat, at a router and inside an endpoint. router_p99: of the router with the worst p99;
    little_p99: of the tenant that asks for a fifth. beyond: sequences at one endpoint beyond its seats and those that
    may wait inside, at most. beyond_share: of the requests, those that came to an endpoint where as many were already.
    idle_share: of all seats, how many were empty while requests waited at a router. refused: requests;
    little_refused: of that tenant."""

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
        """As it is now, it was for so long."""
        if self._waiting:
            self._waiting_seconds += seconds
            self._idle_seat_seconds += seconds * (self._world.endpoints * self._world.seats - self._running)

    def note_waiting(self, by: int) -> None:
        self._waiting += by

    def note_came(self, count: int) -> None:
        """A request has come to an endpoint, where so many are now."""
        self._came += 1
        self._came_beyond += count > self._world.seats + self._world.waiting_depth_max

    def note_began(self, router: int, tenant: str, wait: float) -> None:
        """A request has a seat."""
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
    """0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] if ordered else 0.0


def rows_as_table(rows: Iterable[RoutersRow]) -> list[str]:
    """Markdown, a line each."""
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
