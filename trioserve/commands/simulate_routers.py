"""`python -m trioserve simulate --router --routers N`: several routers before the same endpoints, as a table.

Each row is a history for each seed, in virtual time: figures are the average over seeds, and the most of what is beyond
a limit. Every promise is checked while it is simulated, and the first that is broken ends it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

import msgspec

from trioserve.contracts.errors import StartupError
from trioserve.simulation.routers.figures import RoutersRow, rows_as_table
from trioserve.simulation.routers.simulator import RoutersSimulation
from trioserve.simulation.routers.world import RoutersWorld

__all__ = ["run_routers", "worlds_of"]

SEATS = 16
SECONDS_MAX = 30.0
SECONDS_MIN = 8.0  # four times a request's
REQUESTS_MAX = 20_000  # of a history, where that is long enough
EXIT_FAILED = 1


def run_routers(arguments: argparse.Namespace, seeds: tuple[int, int]) -> int:
    """Returns the exit code. Raises StartupError for what is out of range."""
    if not arguments.router:
        raise StartupError("--routers is for the simulation of routers: give --router, too")
    worlds = list(worlds_of(arguments.routers, arguments.endpoints))
    print("\n".join(rows_as_table(())))
    for world in worlds:
        rows = []
        for seed in range(*seeds):
            world = msgspec.structs.replace(world, seed=seed)
            simulation = RoutersSimulation(world)
            try:
                simulation.run()
            except AssertionError as failure:
                print(f"seed {seed} failed: {failure}\nof {world}", file=sys.stdout)
                return EXIT_FAILED
            rows.append(simulation.figures.row())
        print(rows_as_table([_together(rows)])[-1], flush=True)
    return 0


def worlds_of(router_counts: Sequence[int], endpoint_counts: Sequence[int]) -> Iterator[RoutersWorld]:
    """Without shares each router has the limit that a router has by default, and goes by what endpoints report."""
    for endpoints in endpoint_counts:
        for routers in router_counts:
            plain = RoutersWorld(routers=routers, endpoints=endpoints, seats=SEATS, leases_max=64)
            rate = plain.load * endpoints * SEATS / plain.service_seconds
            plain = msgspec.structs.replace(plain, seconds=min(SECONDS_MAX, max(SECONDS_MIN, REQUESTS_MAX / rate)))
            yield plain
            if routers > 1:
                limit = SEATS + plain.waiting_depth_max
                sharing = msgspec.structs.replace(plain, shares=True, leases_max=limit)
                yield sharing
                yield msgspec.structs.replace(sharing, dies=True)


def _together(rows: Sequence[RoutersRow]) -> RoutersRow:
    names = ("wait_p50", "wait_p99", "router_p99", "little_p99", "idle_share")
    averages = {name: sum(getattr(row, name) for row in rows) / len(rows) for name in names}
    return msgspec.structs.replace(rows[0], **averages, beyond=max(row.beyond for row in rows))
