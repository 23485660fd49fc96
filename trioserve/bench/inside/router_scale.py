"""How far several routers before many endpoints go: waits, fairness, limits that are overshot, and what deciding costs.

Time is simulated, from a seed, and so is everything but the routers' cores and how each works out its share: see
simulation/routers. The processor time of their calls is real. Every promise of several routers is checked meanwhile.

Requests come first a little slower than all endpoints together can serve them, and then, in another history, faster.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
from collections.abc import Iterator
from random import Random
from statistics import fmean, median, quantiles

import msgspec

from trioserve.bench.inside.timed_core import CallTimes, TimedCore
from trioserve.bench.report import Machine
from trioserve.router.settings import RouterSettings
from trioserve.simulation.routers.figures import RoutersRow
from trioserve.simulation.routers.generator import SETTLED_SECONDS, Traffic, drawn_traffic
from trioserve.simulation.routers.simulator import RoutersSimulation
from trioserve.simulation.routers.world import RoutersWorld
from trioserve.testing.flag_types import at_least_one
from trioserve.trio_tools.interpreter import prepare_interpreter
from trioserve.trio_tools.progress import ProgressBar

__all__ = ["ScaleCase", "ScaleFigures", "add_arguments", "measured", "run", "scale_cases"]

ROUTERS = 8
ENDPOINTS = 100
SEATS = 16
SERVICE_SECONDS = 1.0
LOADS = (0.9, 1.3)
REQUESTS_MAX = 8_000  # of a history, where that is long enough
SECONDS_MIN = 2.5  # two and a half times a request's
SECONDS_MAX = 20.0
VARIED_ENDPOINTS_MAX = 100  # what is varied depends little on how many there are, and costs by it
BUSY_WEIGHT = 3.0
POLICIES = ("least_loaded", "power_of_two", "round_robin")  # those that look at nothing but load


class ScaleCase(msgspec.Struct, frozen=True, kw_only=True):
    """What a row of the table is about. what: as it is shown."""

    what: str
    world: RoutersWorld
    busy_weight: float = 1.0

    def traffic(self, load: float) -> Traffic:
        """What is asked for at this load, for as long as there are requests enough to judge by."""
        rate = Traffic(load=load, service_seconds=SERVICE_SECONDS).rate(self.world)
        return Traffic(
            load=load,
            service_seconds=SERVICE_SECONDS,
            seconds=min(SECONDS_MAX, max(SECONDS_MIN, REQUESTS_MAX / rate)),
            busy_weight=self.busy_weight,
        )


class ScaleFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One history. load: what is asked for, relative to what all seats can do. seconds: of traffic. The rest is
    processor time of the cores. choice_us, choice_p99_us: of a request that gets a lease at once, from entering to
    that; None where none did. report_us: of a load that an endpoint tells. reports_per_second: to each router.
    core_share: of one core, what deciding takes a router in all."""

    what: str
    load: float
    seconds: float
    row: RoutersRow
    choice_us: float | None
    choice_p99_us: float | None
    report_us: float
    reports_per_second: float
    core_share: float

    @property
    def refused_share(self) -> float:
        return self.row.refused / (self.row.requests + self.row.refused)


def scale_cases(routers: int, endpoints: int, *, policy: str, seed: int = 0) -> Iterator[ScaleCase]:
    """First more and more routers, then more and more endpoints, and then everything else varied by itself."""

    def world(router_count: int, endpoint_count: int) -> RoutersWorld:
        settings = RouterSettings()
        return RoutersWorld(
            policy=policy,
            routers=router_count,
            endpoints=endpoint_count,
            seats=SEATS,
            leases_max=settings.leases_max,
            waiting_depth_max=settings.waiting_depth_max,
            shares=router_count > 1,
            reports="pushed",
            queue_requests_max=settings.queue_requests_max,
            seed=seed,
        )

    for router_count in (*_below(routers, 1, factor=4), routers):
        yield ScaleCase(what=f"{router_count} x {endpoints:,}", world=world(router_count, endpoints))
    for endpoint_count in _below(endpoints, 10, factor=10):
        yield ScaleCase(what=f"{routers} x {endpoint_count:,}", world=world(routers, endpoint_count))
    few = min(endpoints, VARIED_ENDPOINTS_MAX)
    plain = world(routers, few)
    place = f"{routers} x {few:,}"
    yield ScaleCase(what=f"{place}, loads asked for", world=msgspec.structs.replace(plain, reports="asked"))
    if routers == 1:
        return
    alone = msgspec.structs.replace(plain, shares=False)
    yield ScaleCase(what=f"{place}, no peers", world=alone)
    yield ScaleCase(what=f"{place}, no peers, loads asked for", world=msgspec.structs.replace(alone, reports="asked"))
    tight = msgspec.structs.replace(plain, leases_max=SEATS + plain.waiting_depth_max)
    yield ScaleCase(what=f"{place}, a limit of {tight.leases_max}", world=tight)
    yield ScaleCase(
        what=f"{place}, one router has {BUSY_WEIGHT:g} times the clients", world=plain, busy_weight=BUSY_WEIGHT
    )


def _below(count: int, first: int, *, factor: int) -> Iterator[int]:
    while first < count:
        yield first
        first *= factor


def measured(case: ScaleCase, load: float, *, seed: int) -> ScaleFigures:
    """Raises AssertionError where a promise of several routers is broken."""
    traffic, times = case.traffic(load), CallTimes()
    simulation = RoutersSimulation(case.world, core_of=functools.partial(TimedCore, times=times))
    times.begins_at = simulation.now + SETTLED_SECONDS
    times.ends_at = times.begins_at + traffic.seconds
    gc.collect()
    gc.freeze()  # what is there already is not searched again while something is timed
    try:
        with ProgressBar(f"simulating {case.what}, load {load:g}", unit="s of traffic") as bar:
            for event in drawn_traffic(Random(seed), case.world, traffic):
                bar.show_share(int(event.at - SETTLED_SECONDS), int(traffic.seconds))
                simulation.apply(event)
            simulation.run_to_end()
    finally:
        gc.unfreeze()
    router_seconds = case.world.routers * traffic.seconds
    has_choices = len(times.choices) > 1
    return ScaleFigures(
        what=case.what,
        load=load,
        seconds=traffic.seconds,
        row=simulation.figures.row(),
        choice_us=median(times.choices) / 1e3 if has_choices else None,
        choice_p99_us=quantiles(times.choices, n=100)[-1] / 1e3 if has_choices else None,
        report_us=fmean(times.reports) / 1e3,
        reports_per_second=len(times.reports) / router_seconds,
        core_share=times.seconds / router_seconds,
    )


_HEADS = (
    f"{'load':>5}{'wait p50':>10}{'p99':>7}{'worst router':>14}{'small tenant':>14}{'beyond':>8}{'late':>7}"
    f"{'refused':>9}{'idle':>6}{'choice us':>11}{'p99':>7}{'report us':>11}{'reports/s':>11}{'of a core':>11}"
)


def _line(figures: ScaleFigures, what_width: int) -> str:
    row = figures.row
    choice = f"{'-':>11}{'-':>7}"
    if figures.choice_us is not None and figures.choice_p99_us is not None:
        choice = f"{figures.choice_us:>11.0f}{figures.choice_p99_us:>7.0f}"
    return (
        f"{figures.what:<{what_width}}{figures.load:>5g}{row.wait_p50:>10.2f}{row.wait_p99:>7.2f}{row.router_p99:>14.2f}"
        f"{row.little_p99:>14.2f}{row.beyond:>8}{row.beyond_share:>7.1%}{figures.refused_share:>9.1%}"
        f"{row.idle_share:>6.0%}{choice}{figures.report_us:>11.1f}{figures.reports_per_second:>11,.0f}"
        f"{figures.core_share:>11.1%}"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--routers", type=at_least_one, default=ROUTERS, metavar="N", help="the most routers that are simulated"
    )
    parser.add_argument(
        "--endpoints",
        type=at_least_one,
        default=ENDPOINTS,
        metavar="N",
        help="the most endpoints before which they stand",
    )
    parser.add_argument("--policy", choices=POLICIES, default=POLICIES[0], help="of every router")
    parser.add_argument(
        "--loads", type=_load, nargs="+", default=list(LOADS), metavar="X", help="1: as much as all can serve"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of who asks when, and for how much")


def _load(text: str) -> float:
    value = float(text)
    if not 0.01 <= value <= 10:
        raise argparse.ArgumentTypeError(f"{value}, it must be 0.01 to 10")
    return value


def run(arguments: argparse.Namespace) -> int:
    """Measure, print a table as it grows, and then everything as one line of JSON."""
    prepare_interpreter()
    cases = list(scale_cases(arguments.routers, arguments.endpoints, policy=arguments.policy, seed=arguments.seed))
    machine = Machine.here()
    width = max(len(case.what) for case in cases)
    print(f"{arguments.policy}; {machine.cpu}, {machine.cores} cores, Python {machine.python}")
    print(f"{'routers x endpoints':<{width}}{_HEADS}", flush=True)
    made: list[ScaleFigures] = []
    for case in cases:
        for load in arguments.loads:
            made.append(measured(case, load, seed=arguments.seed))
            print(_line(made[-1], width), flush=True)
    print(json.dumps({"machine": msgspec.to_builtins(machine), "cases": msgspec.to_builtins(made)}))
    return 0
