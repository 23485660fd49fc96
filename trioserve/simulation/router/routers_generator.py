"""Generates histories of several routers.

Wild histories have a few routers, which die, come back and lose sight of each other. Histories with steady traffic have
many routers, and serve for measurements.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import msgspec

from trioserve.router.policies import POLICIES
from trioserve.simulation.router.routers_books import Back, Come, Die, Meet, Part, RoutersEvent, RoutersWorld
from trioserve.simulation.router.routers_simulator import RoutersSimulation

__all__ = ["SETTLED_SECONDS", "RoutersGenerator", "Traffic", "drawn_traffic"]

# After this time, all routers that began together know each other, and each router has its share.
SETTLED_SECONDS = 3.0
# fraction of the requests from the smaller tenant, which fair queueing should keep from waiting for the larger tenant
LITTLE_SHARE = 0.2
BACK_AFTER = 0.3  # fraction of the whole time until a dead router comes back


class RoutersGenerator:
    """Generates one history.

    Args:
        rng: source of all random choices, used in the order of the calls.
    """

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self.world = world = _drawn_world(rng)
        self._service_seconds = rng.choice((0.2, 1.0, 3.0))
        rate = rng.choice((0.3, 0.8, 1.5)) * world.endpoints * world.seats / self._service_seconds
        self._gap_seconds = 1 / rate
        self._wildness = rng.choice((0.0, 0.02, 0.1)) if world.routers > 1 else 0.0
        self._patience_share = rng.choice((0.0, 0.1, 0.4))
        self._number = 0
        self._at = rng.choice((0.0, 0.5, SETTLED_SECONDS))
        # number of requests that arrive at the same time at the start
        self._at_once = world.routers if rng.random() < 0.5 else 0

    def next_event(self, simulation: RoutersSimulation) -> RoutersEvent:
        rng = self._rng
        if self._number < self._at_once:
            return self._come(self._number)
        if rng.random() < self._wildness:
            return self._incident()
        # Sometimes there is no event for so long that all routers must know the current state.
        self._at = round(self._at + (8.0 if rng.random() < 0.02 else rng.expovariate(1 / self._gap_seconds)), 3)
        return self._come(rng.randrange(self.world.routers))

    def _come(self, router: int) -> Come:
        rng = self._rng
        self._number += 1
        is_hasty = rng.random() < self._patience_share
        return Come(
            number=self._number,
            at=self._at,
            router=router,
            seconds=round(rng.expovariate(1 / self._service_seconds), 3),
            tenant="little" if rng.random() < LITTLE_SHARE else "much",
            patience=round(rng.expovariate(1 / self._service_seconds), 3) if is_hasty else None,
        )

    def _incident(self) -> RoutersEvent:
        rng = self._rng
        router, peer = rng.sample(range(self.world.routers), 2)
        match rng.choice(("die", "back", "back", "part", "meet")):
            case "die":
                return Die(at=self._at, router=router)
            case "back":
                return Back(at=self._at, router=router)
            case "part":
                return Part(at=self._at, router=router, peer=peer)
            case _:
                return Meet(at=self._at, router=router, peer=peer)


def _drawn_world(rng: Random) -> RoutersWorld:
    is_large = rng.random() < 0.1
    routers = rng.randint(8, 12) if is_large else rng.randint(1, 5)
    seats = rng.randint(1, 6)
    return RoutersWorld(
        policy=rng.choice(sorted(POLICIES)),
        routers=routers,
        endpoints=routers + rng.randint(0, 4) if is_large else rng.randint(1, 4),
        seats=seats,
        leases_max=rng.randint(1, seats + 8),
        waiting_depth_max=rng.randint(0, 4),
        shares=routers > 1 and rng.random() < 0.8,
        report_seconds=rng.choice((0.1, 0.25, 0.25, 1.0)),
        wire_seconds=rng.choice((0.001, 0.02)),
        seed=rng.getrandbits(32),
    )


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of steady traffic.

    Attributes:
        load: request rate as a fraction of the capacity of all seats.
        service_seconds: mean duration of a request. Durations have an exponential distribution.
        seconds: duration of the traffic.
        busy_weight: request rate of the first router, as a multiple of the rate of each other router.
        dies: True if one router dies in the middle, and comes back later.
    """

    load: float = 0.9
    service_seconds: float = 2.0
    seconds: float = 30.0
    busy_weight: float = 1.0
    dies: bool = False

    def rate(self, world: RoutersWorld) -> float:
        """Return the request rate in requests per second.

        Args:
            world: the settings.
        """
        return self.load * world.endpoints * world.seats / self.service_seconds


def drawn_traffic(rng: Random, world: RoutersWorld, traffic: Traffic) -> Iterator[RoutersEvent]:
    """Draw a history with steady traffic.

    It begins with one request for every router at the same time, after the routers have settled.

    Args:
        rng: source of random choices.
        world: the settings.
    """
    begins_at, rate = SETTLED_SECONDS, traffic.rate(world)
    incidents: list[RoutersEvent] = []
    if traffic.dies:
        dies_at = begins_at + traffic.seconds / 2
        incidents = [
            Die(at=dies_at, router=world.routers - 1),
            Back(at=dies_at + BACK_AFTER * traffic.seconds, router=world.routers - 1),
        ]
    at, number = begins_at, 0
    while at < begins_at + traffic.seconds:
        while incidents and incidents[0].at <= at:
            yield incidents.pop(0)
        number += 1
        yield Come(
            number=number,
            at=at,
            router=number - 1 if number <= world.routers else _drawn_router(rng, world.routers, traffic.busy_weight),
            seconds=rng.expovariate(1 / traffic.service_seconds),
            tenant="little" if rng.random() < LITTLE_SHARE else "much",
        )
        at = begins_at if number < world.routers else at + rng.expovariate(rate)
    yield from incidents


def _drawn_router(rng: Random, count: int, busy_weight: float) -> int:
    if busy_weight == 1.0:
        return rng.randrange(count)
    place = rng.random() * (count - 1 + busy_weight)
    return 0 if place < busy_weight else min(count - 1, 1 + int(place - busy_weight))
