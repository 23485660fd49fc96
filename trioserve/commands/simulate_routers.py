"""`python -m trioserve simulate --routers N`: prints a table about several routers in front of the same endpoints.

For each row, one history per seed is simulated, with steady traffic and in virtual time. The figures of a row are
averages over the seeds. For exceeded limits, the figure is the maximum. All rules are checked, and the first broken
rule ends the program.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from random import Random
from typing import NamedTuple

import msgspec

from trioserve.commands.simulate import EXIT_FAILED, run_replay, show_failure, show_verdict
from trioserve.commands.simulate import SimulateSettings as OfHistories
from trioserve.contracts.errors import StartupError
from trioserve.simulation.router.routers_books import RoutersRow, rows_as_table
from trioserve.simulation.router.routers_generator import Traffic, drawn_traffic
from trioserve.simulation.router.routers_history import RoutersEvent, RoutersHistory, RoutersWorld
from trioserve.simulation.router.routers_simulator import RoutersSimulation
from trioserve.simulation.script import Trace, Verdict, apply_events, script_of
from trioserve.trio_tools.progress import ProgressBar

__all__ = ["Row", "rows_of", "run_routers"]

SEATS = 16
WAITING_DEPTH_MAX = 4
SECONDS_MAX = 30.0
SECONDS_MIN = 8.0  # minimum length of a history: four times the duration of a request
REQUESTS_MAX = 20_000  # maximum number of requests in a history that is longer than SECONDS_MIN
FLAGS_OF_OTHERS = ("stack", "pair", "lasting", "ranks", "iterative", "images", "models")


class Row(NamedTuple):
    """The simulation for one row of the table.

    Attributes:
        world: Simulated routers and endpoints.
        traffic: Simulated clients.
    """

    world: RoutersWorld
    traffic: Traffic

    def run(
        self,
        seed: int,
        *,
        trace: Trace | None = None,
        watch: Callable[[int, int], None] = lambda done, total: None,
    ) -> tuple[Verdict, RoutersSimulation]:
        """Simulate one history.

        Args:
            seed: Seed of the history.
            trace: Receives a line for each event. None for no trace.
            watch: Called with the passed seconds and the total seconds of traffic.
        """
        world = msgspec.structs.replace(self.world, seed=seed)
        simulation = RoutersSimulation(world, trace=trace)

        def script(happened: tuple[RoutersEvent, ...]) -> str:
            return script_of(RoutersHistory(world, happened))

        events = _watched(drawn_traffic(Random(seed), world, self.traffic), self.traffic.seconds, watch)
        return apply_events(simulation, events, script, trace), simulation


def _watched(
    events: Iterable[RoutersEvent], seconds: float, watch: Callable[[int, int], None]
) -> Iterator[RoutersEvent]:
    for event in events:
        watch(int(event.at), int(seconds))
        yield event


def run_routers(arguments: argparse.Namespace, seeds: tuple[int, int]) -> int:
    """Simulate all rows and print the table.

    Args:
        arguments: Arguments of `trioserve simulate`.
        seeds: First seed, and the seed after the last seed.

    Returns:
        Exit code of the program.

    Raises:
        StartupError: A value is out of range, or a flag belongs to another simulation.
    """
    if any(getattr(arguments, flag) for flag in FLAGS_OF_OTHERS):
        others = ", ".join(f"--{flag}" for flag in FLAGS_OF_OTHERS)
        raise StartupError(f"--routers is a simulation of its own: leave out {others}")
    rows = list(rows_of(arguments.routers, arguments.endpoints))
    if arguments.replay is not None:
        return _replay(arguments.replay, rows)
    print("\n".join(rows_as_table(())))
    for row in rows:
        figures = []
        for seed in range(*seeds):
            with ProgressBar(f"simulating {row.world.routers} routers, seed {seed}", unit="s of traffic") as bar:
                verdict, simulation = row.run(seed, watch=bar.show_share)
            if verdict.failure is not None:
                counts = f"--routers {row.world.routers} --endpoints {row.world.endpoints}"
                replay = f"--replay {seed} {counts}"
                show_failure(seed, verdict.failure, "routers", replay=replay, shrinks=not arguments.no_shrink)
                return EXIT_FAILED
            figures.append(simulation.figures.row(dies=row.traffic.dies))
        print(rows_as_table([_together(figures)])[-1], flush=True)
    return 0


def _replay(what: str, rows: Sequence[Row]) -> int:
    """Replay a seed in each row, up to the first row that fails."""
    if not what.isdecimal():
        return run_replay(what, OfHistories(seeds=(0, 1), mode="routers"))
    for row in rows:
        verdict, _ = row.run(int(what), trace=print)
        if show_verdict(verdict):
            return EXIT_FAILED
    return 0


def rows_of(router_counts: Sequence[int], endpoint_counts: Sequence[int]) -> Iterator[Row]:
    """Return the rows: without shares of endpoints, with shares, and with shares while a router crashes.

    Without shares, each router uses its default limit and relies on the load reports of endpoints.

    Args:
        router_counts: Numbers of routers.
        endpoint_counts: Numbers of endpoints.
    """
    for endpoints in endpoint_counts:
        for routers in router_counts:
            plain = RoutersWorld(
                routers=routers, endpoints=endpoints, seats=SEATS, leases_max=64, waiting_depth_max=WAITING_DEPTH_MAX
            )
            rate = Traffic().rate(plain)
            traffic = Traffic(seconds=min(SECONDS_MAX, max(SECONDS_MIN, REQUESTS_MAX / rate)))
            yield Row(plain, traffic)
            if routers > 1:
                sharing = msgspec.structs.replace(plain, shares=True, leases_max=SEATS + WAITING_DEPTH_MAX)
                yield Row(sharing, traffic)
                yield Row(sharing, msgspec.structs.replace(traffic, dies=True))


def _together(rows: Sequence[RoutersRow]) -> RoutersRow:
    names = ("wait_p50", "wait_p99", "router_p99", "little_p99", "idle_share")
    averages = {name: sum(getattr(row, name) for row in rows) / len(rows) for name in names}
    return msgspec.structs.replace(rows[0], **averages, beyond=max(row.beyond for row in rows))
