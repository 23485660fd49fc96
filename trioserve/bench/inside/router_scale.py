"""Measures several routers with many endpoints: waits, fairness, exceeded limits, and the cost of decisions.

Time and clients are simulated from a seed. Only the routers' cores and their division of capacity are real (see
simulation/router), and the CPU time of their calls. All rules of several routers are checked meanwhile.

One history has a little fewer requests than all endpoints together can serve, another has more.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import math
from array import array
from collections.abc import Callable, Iterator
from random import Random
from statistics import fmean, median, quantiles
from time import perf_counter_ns
from typing import Any

import msgspec

from trioserve.bench.report import Machine
from trioserve.bench.settings import at_least_one
from trioserve.contracts.endpoint import EndpointId, EndpointLoad, RoutedRequest
from trioserve.router.core import RouterCore
from trioserve.router.settings import RouterSettings
from trioserve.router.ticket import Ticket, TicketState
from trioserve.simulation.router.routers_books import RoutersRow, RoutersWorld
from trioserve.simulation.router.routers_generator import SETTLED_SECONDS, Traffic, drawn_traffic
from trioserve.simulation.router.routers_simulator import RoutersSimulation
from trioserve.trio_tools.interpreter import prepare_interpreter
from trioserve.trio_tools.progress import ProgressBar

__all__ = ["CallTimes", "ScaleCase", "ScaleFigures", "TimedCore", "add_arguments", "measured", "run", "scale_cases"]

INTERRUPTED_NS = 1_000_000  # A call normally takes about ten microseconds. A slower call than this does not count.


class CallTimes:
    """Nanoseconds of the calls of all cores that share this object.

    Only calls from begins_at on and before ends_at count. A call that takes INTERRUPTED_NS is left out, since the
    processor did something else meanwhile. The thread's CPU clock would not have that problem, but reading it takes a
    third of the measured time.

    Attributes:
        begins_at: first time that counts.
        ends_at: time from which calls no longer count.
        choices: calls of enter with a request that got a lease at once.
        reports: calls of note_load, which may grant leases to waiting requests.
        others: all other calls.
    """

    def __init__(self) -> None:
        self.begins_at = -math.inf
        self.ends_at = math.inf
        self.choices = array("q")
        self.reports = array("q")
        self.others = array("q")

    @property
    def seconds(self) -> float:
        """Sum of all calls in seconds."""
        return (sum(self.choices) + sum(self.reports) + sum(self.others)) / 1e9


class TimedCore(RouterCore):
    """A RouterCore that measures its calls. The time of callbacks inside of a call is not counted.

    Args:
        *settings: positional arguments of RouterCore.
        times: receives the measurements.
        on_change: callback of RouterCore.
        **more: other arguments of RouterCore.
    """

    def __init__(self, *settings: Any, times: CallTimes, on_change: Callable[[Ticket], None], **more: Any) -> None:
        self._times = times
        self._outside_ns = 0

        def timed_on_change(ticket: Ticket) -> None:
            began = perf_counter_ns()
            on_change(ticket)
            self._outside_ns += perf_counter_ns() - began

        super().__init__(*settings, on_change=timed_on_change, **more)

    def enter(self, request: RoutedRequest, now: float) -> Ticket:
        began = perf_counter_ns() - self._outside_ns
        ticket = super().enter(request, now)
        is_choice = ticket.state is TicketState.LEASED
        self._note(self._times.choices if is_choice else self._times.others, began, now)
        return ticket

    def first_token(self, ticket: Ticket, now: float, *, can_resume: bool = False) -> None:
        began = perf_counter_ns() - self._outside_ns
        super().first_token(ticket, now, can_resume=can_resume)
        self._note(self._times.others, began, now)

    def leave(self, ticket: Ticket, now: float) -> None:
        began = perf_counter_ns() - self._outside_ns
        super().leave(ticket, now)
        self._note(self._times.others, began, now)

    def note_load(self, id: EndpointId, load: EndpointLoad, now: float, *, sent_when_asked: int) -> None:
        began = perf_counter_ns() - self._outside_ns
        super().note_load(id, load, now, sent_when_asked=sent_when_asked)
        self._note(self._times.reports, began, now)

    def set_lease_share(self, id: EndpointId, share: int, now: float) -> None:
        began = perf_counter_ns() - self._outside_ns
        super().set_lease_share(id, share, now)
        self._note(self._times.others, began, now)

    def next_tick(self, now: float) -> float:
        began = perf_counter_ns() - self._outside_ns
        moment = super().next_tick(now)
        self._note(self._times.others, began, now)
        return moment

    def tick(self, now: float) -> None:
        began = perf_counter_ns() - self._outside_ns
        super().tick(now)
        self._note(self._times.others, began, now)

    def _note(self, samples: array[int], began: int, now: float) -> None:
        took = perf_counter_ns() - self._outside_ns - began
        if took < INTERRUPTED_NS and self._times.begins_at <= now < self._times.ends_at:
            samples.append(took)


ROUTERS = 8
ENDPOINTS = 100
SEATS = 16
SERVICE_SECONDS = 1.0
LOADS = (0.9, 1.3)
REQUESTS_MAX = 8_000  # number of requests of a history, unless its duration would be below SECONDS_MIN
SECONDS_MIN = 2.5  # minimum duration of a history: two and a half times the duration of a request
SECONDS_MAX = 20.0
# The results of variations depend little on the number of endpoints, but the run time depends on it.
VARIED_ENDPOINTS_MAX = 100
BUSY_WEIGHT = 3.0
POLICIES = ("least_loaded", "power_of_two", "round_robin")  # policies that choose only by load


class ScaleCase(msgspec.Struct, frozen=True, kw_only=True):
    """One case of the table.

    Attributes:
        what: its name in the table.
        world: routers and endpoints.
        busy_weight: clients of the first router, relative to those of another router.
    """

    what: str
    world: RoutersWorld
    busy_weight: float = 1.0

    def traffic(self, load: float) -> Traffic:
        """Return requests at a load, for a duration that has enough of them to judge.

        Args:
            load: load relative to the capacity of all endpoints.
        """
        rate = Traffic(load=load, service_seconds=SERVICE_SECONDS).rate(self.world)
        return Traffic(
            load=load,
            service_seconds=SERVICE_SECONDS,
            seconds=min(SECONDS_MAX, max(SECONDS_MIN, REQUESTS_MAX / rate)),
            busy_weight=self.busy_weight,
        )


class ScaleFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one history. Times are CPU times of the cores.

    Attributes:
        what: name of the case.
        load: load relative to the capacity of all endpoints.
        seconds: duration of the traffic.
        row: waits, fairness and limits.
        choice_us: median time to choose an endpoint for a request that gets its lease at once. None: there was no such
            request.
        choice_p99_us: 99th percentile of that time.
        report_us: mean time to process a load report of an endpoint.
        reports_per_second: load reports per router.
        core_share: share of one core that a router uses for all decisions.
    """

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
    """Yield the cases: a growing number of routers, a growing number of endpoints, and then variations of everything
    else.

    Args:
        routers: largest number of routers.
        endpoints: largest number of endpoints.
        policy: policy of every router.
        seed: seed of all random choices.
    """

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
    """Simulate one case at one load.

    Args:
        load: load relative to the capacity of all endpoints.
        seed: seed of the traffic.

    Raises:
        AssertionError: a rule of several routers is broken.
    """
    traffic, times = case.traffic(load), CallTimes()
    simulation = RoutersSimulation(case.world, core_of=functools.partial(TimedCore, times=times))
    times.begins_at = simulation.now + SETTLED_SECONDS
    times.ends_at = times.begins_at + traffic.seconds
    gc.collect()
    gc.freeze()  # During the measurement, the garbage collector does not search existing objects again.
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
    parser.add_argument("--routers", type=at_least_one, default=ROUTERS, metavar="N", help="largest number of routers")
    parser.add_argument(
        "--endpoints",
        type=at_least_one,
        default=ENDPOINTS,
        metavar="N",
        help="largest number of endpoints",
    )
    parser.add_argument("--policy", choices=POLICIES, default=POLICIES[0], help="policy of every router")
    parser.add_argument(
        "--loads",
        type=_load,
        nargs="+",
        default=list(LOADS),
        metavar="X",
        help="loads; 1 is the capacity of all endpoints",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of all requests")


def _load(text: str) -> float:
    value = float(text)
    if not 0.01 <= value <= 10:
        raise argparse.ArgumentTypeError(f"{value}, allowed is 0.01 to 10")
    return value


def run(arguments: argparse.Namespace) -> int:
    """Measure, print a table row by row, and then all figures as one line of JSON. Return the exit code.

    Args:
        arguments: the parsed command line.
    """
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
