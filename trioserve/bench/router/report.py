"""The figures of a router with their units, the bursts of its tenants, and their output as text and as JSON."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from statistics import median

import msgspec

from trioserve.bench.report import Machine, Spread, measured_at, report_json
from trioserve.bench.router.fake_endpoint import MODEL, DepthFigures
from trioserve.bench.router.socket_load import Asked, Planned, WireRequest
from trioserve.bench.server_settings import RouterBenchSettings

__all__ = [
    "TENANTS",
    "BurstFigures",
    "EventFigures",
    "LatencyFigures",
    "ProcessFigures",
    "RouterReport",
    "TenantFigures",
    "ThroughputFigures",
    "WatchFigures",
    "burst_figures",
    "burst_plan",
    "fair_shares",
    "router_json",
    "router_text",
]

TENANTS = ("steady", "bursting")
"""The key of a request is the index of its tenant."""


class TenantFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of one tenant.

    Attributes:
        name: the tenant.
        asked: number of requests.
        served: number of requests with status 200.
        refused: number of other responses by status and reason.
        wait_ms: waiting time of served requests, without the service itself.
        of_fair_share: served requests, relative to the tenant's max-min fair share of all served requests. Below 1:
            other tenants got more than their share.
    """

    name: str
    asked: int
    served: int
    refused: dict[str, int]
    wait_ms: Spread | None
    of_fair_share: float


class BurstFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One run of bursts.

    Attributes:
        holds_back: True if the router holds requests back.
        flags: flags of the router.
        capacity_per_second: requests per second that all endpoints together can serve.
        endpoints: length of the queue inside of each endpoint.
        tenants: figures of each tenant.
    """

    holds_back: bool
    flags: list[str]
    capacity_per_second: float
    endpoints: list[DepthFigures]
    tenants: list[TenantFigures]

    @property
    def depth_max(self) -> int:
        return max(each.depth_max for each in self.endpoints)

    @property
    def depth_mean(self) -> float:
        return sum(each.depth_mean for each in self.endpoints) / len(self.endpoints)


def burst_plan(settings: RouterBenchSettings) -> list[Planned]:
    """Return random arrivals (Poisson). Equal seeds give equal arrivals.

    Args:
        settings: settings of the measurement.
    """
    chance = random.Random(settings.seed)
    requests = [
        WireRequest(
            "/v1/completions",
            {"model": MODEL, "prompt": "three or four words", "max_tokens": 4},
            headers=[("x-tenant-id", name)],
        )
        for name in TENANTS
    ]
    period = 2 * settings.burst_seconds
    steady_rate = settings.steady_share * settings.capacity_per_second
    burst_rate = (settings.burst_load - settings.steady_share) * settings.capacity_per_second
    windows = [(0, steady_rate, 0.0, settings.bursts * period)]
    for index in range(settings.bursts):
        windows.append((1, burst_rate, index * period, index * period + settings.burst_seconds))
    plan = []
    for key, rate, begin, end in windows:
        moment = begin
        while rate > 0 and (moment := moment + chance.expovariate(rate)) < end:
            plan.append(Planned(moment, key, requests[key]))
    return plan


def burst_figures(
    settings: RouterBenchSettings, asked: Sequence[Asked], endpoints: list[DepthFigures], *, holds_back: bool
) -> BurstFigures:
    by_tenant = [[each for each in asked if each.key == key] for key in range(len(TENANTS))]
    served = [sum(not each.outcome for each in mine) for mine in by_tenant]
    shares = fair_shares([len(mine) for mine in by_tenant], sum(served))
    tenants = [
        TenantFigures(
            name=name,
            asked=len(mine),
            served=count,
            refused=dict(Counter(each.outcome for each in mine if each.outcome)),
            wait_ms=Spread.from_seconds(
                [max(0.0, each.seconds - settings.service_seconds) for each in mine if not each.outcome]
            ),
            of_fair_share=count / share if share else 1.0,
        )
        for name, mine, count, share in zip(TENANTS, by_tenant, served, shares, strict=True)
    ]
    return BurstFigures(
        holds_back=holds_back,
        flags=list(settings.burst_flags(holds_back=holds_back)),
        capacity_per_second=settings.capacity_per_second,
        endpoints=endpoints,
        tenants=tenants,
    )


def fair_shares(demands: Sequence[float], capacity: float) -> list[float]:
    """Return max-min fair shares: no share exceeds its demand, and the rest is divided equally among the others.

    Args:
        demands: demand of each tenant.
        capacity: sum to divide.
    """
    shares = [0.0] * len(demands)
    left = capacity
    ordered = sorted(range(len(demands)), key=lambda index: demands[index])
    for taken, index in enumerate(ordered):
        shares[index] = min(demands[index], left / (len(demands) - taken))
        left -= shares[index]
    return shares


class LatencyFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Latency of small requests, which are sent one at a time, in turn directly and through the router.

    Attributes:
        what: name of the requests.
        direct_ms: latency without the router.
        through_ms: latency through the router.
        turns_added_ms: for each turn, the difference of its two medians. On a busy machine, the lowest one is closest
            to the router's own latency.
    """

    what: str
    direct_ms: Spread
    through_ms: Spread
    turns_added_ms: list[float]

    @property
    def added_p50_ms(self) -> float:
        return self.through_ms.p50 - self.direct_ms.p50

    @property
    def added_p99_ms(self) -> float:
        """Difference of the 99th percentiles. It need not be the difference of any single request."""
        return self.through_ms.p99 - self.direct_ms.p99


class ThroughputFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Throughput with several connections. Lists have one entry per round.

    Attributes:
        connections: number of connections.
        requests: requests of each round.
        direct_seconds: duration without the router.
        through_seconds: duration through the router.
        cpu_seconds: CPU time of the router's process. None: the system does not report it.
    """

    connections: int
    requests: int
    direct_seconds: list[float]
    through_seconds: list[float]
    cpu_seconds: list[float | None]


class EventFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Concurrent streams through the router. Each stream has an event every event_seconds. Lists have one entry per
    round.

    Attributes:
        streams: number of streams.
        events: events of each round.
        event_seconds: interval of the events.
        through_seconds: duration.
        cpu_seconds: CPU time of the router's process for the events and their requests. None: the system does not
            report it.
        pinned_cpu_seconds: CPU time of the router's process for streams that cannot be resumed at another endpoint. The
            router stores no tokens of such streams.
    """

    streams: int
    events: int
    event_seconds: float
    through_seconds: list[float]
    cpu_seconds: list[float | None]
    pinned_cpu_seconds: list[float | None] = []


class ProcessFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Streams through a router with several processes. A single process could not serve this number of streams in time.

    Lists have one entry per round.

    Attributes:
        processes: number of processes.
        streams: number of streams.
        events: events of each round.
        through_seconds: duration.
        cpu_seconds: CPU time of all processes together. None: the system does not report it.
        busiest_cpu_seconds: CPU time of the busiest process. None: the system does not report it.
    """

    processes: int
    streams: int
    events: int
    through_seconds: list[float]
    cpu_seconds: list[float | None]
    busiest_cpu_seconds: list[float | None]


class WatchFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of watching endpoints that get no requests.

    Attributes:
        how: how the router learns the load of endpoints: it asks at the interval of `route`, or the endpoints send it.
        endpoints: number of endpoints.
        seconds: duration.
        cpu_seconds: CPU time of the router's process. None: the system does not report it.
    """

    how: str
    endpoints: int
    seconds: float
    cpu_seconds: float | None

    @property
    def endpoints_max(self) -> float | None:
        """Number of endpoints for which watching would use one whole core."""
        return self.endpoints * self.seconds / self.cpu_seconds if self.cpu_seconds else None


class RouterReport(msgspec.Struct, frozen=True, kw_only=True):
    settings: RouterBenchSettings
    date: str = msgspec.field(default_factory=measured_at)
    machine: Machine = msgspec.field(default_factory=Machine.here)
    latency: list[LatencyFigures]
    throughput: ThroughputFigures | None
    events: EventFigures | None
    processes: list[ProcessFigures]
    watch: list[WatchFigures]
    bursts: list[BurstFigures]


def router_json(report: RouterReport) -> bytes:
    """Return the report as JSON. Its key `figures` has the figures of the text report."""
    return report_json(report, after={"figures": _figures(report)})


def router_text(report: RouterReport) -> str:
    """Return the report as tables."""
    title = f"{report.settings.label}: " if report.settings.label else ""
    flags = " ".join(report.settings.server_flags) or "no flags"
    lines = [f"{title}route with {flags}; {report.machine}, {report.date}"]
    if report.latency:
        names = ("direct p50", "p99", "through p50", "p99", "added p50", "p99", "p50, least")
        lines += ["", f"{'one at a time, ms':<26}" + "".join(f"{name:>13}" for name in names)]
        for each in report.latency:
            direct, through = each.direct_ms, each.through_ms
            cells = (
                direct.p50,
                direct.p99,
                through.p50,
                through.p99,
                each.added_p50_ms,
                each.added_p99_ms,
                min(each.turns_added_ms),
            )
            lines.append(f"{each.what:<26}" + "".join(f"{cell:>13.3f}" for cell in cells))
    figures = _figures(report)
    if report.throughput is not None or report.events is not None or report.processes:
        lines += ["", f"{'of the rounds':<44}{'median':>10}{'best':>10}"]
        lines += [f"{name:<44}{_shown(middle):>10}{_shown(best):>10}" for name, (middle, best) in figures.items()]
    if report.watch:
        lines += ["", f"{'endpoints that are watched, their loads':<44}{'of a core':>10}{'a full core':>13}"]
    for watched in report.watch:
        share = None if watched.cpu_seconds is None else 100 * watched.cpu_seconds / watched.seconds
        lines.append(
            f"{f'{watched.endpoints}, {watched.how}':<44}{_shown(share):>8} %{_shown(watched.endpoints_max):>13}"
        )
    for burst in report.bursts:
        lines += ["", *_burst_lines(burst, report.settings)]
    return "\n".join(lines) + "\n"


def _figures(report: RouterReport) -> dict[str, tuple[float | None, float | None]]:
    """Return median and best of the rounds, by name."""
    figures: dict[str, tuple[float | None, float | None]] = {}
    load, events = report.throughput, report.events
    if load is not None:
        at = f", {load.connections} at a time"
        figures[f"requests/s direct{at}"] = _rates(load.direct_seconds, load.requests)
        figures[f"requests/s through{at}"] = _rates(load.through_seconds, load.requests)
        figures["router CPU us per request"] = _each_us(load.cpu_seconds, load.requests)
        figures["requests per second of router CPU"] = _rates(load.cpu_seconds, load.requests)
    if events is not None:
        figures[f"events/s through, {events.streams} streams"] = _rates(events.through_seconds, events.events)
        figures["router CPU us per event"] = _each_us(events.cpu_seconds, events.events)
        figures["the same, if streams cannot resume"] = _each_us(events.pinned_cpu_seconds, events.events)
    for each in report.processes:
        of = "1 process" if each.processes == 1 else f"{each.processes} processes"
        figures[f"events/s by the clock, {of}"] = _rates(each.through_seconds, each.events)
        figures[f"events/s if each has a core, {of}"] = _rates(each.busiest_cpu_seconds, each.events)
        figures[f"router CPU us per event, {of}"] = _each_us(each.cpu_seconds, each.events)
    return figures


def _burst_lines(burst: BurstFigures, settings: RouterBenchSettings) -> list[str]:
    depths = " ".join(str(each.depth_max) for each in burst.endpoints)
    means = " ".join(f"{each.depth_mean:.1f}" for each in burst.endpoints)
    lines = [
        f"{settings.bursts} bursts of {settings.burst_seconds:g} s at {settings.burst_load:g} times the "
        f"{burst.capacity_per_second:g} requests/s of {settings.endpoints} endpoints with {settings.slots_max} slots; "
        f"route with {' '.join(burst.flags)}",
        f"waiting inside an endpoint: at most {burst.depth_max} ({depths}), mean {burst.depth_mean:.2f} ({means})",
        f"{'tenant':<12}{'asked':>8}{'served':>8}{'refused':>9}{'wait ms: p50':>14}{'p99':>9}{'of its fair share':>19}",
    ]
    for tenant in burst.tenants:
        wait = tenant.wait_ms
        waited = f"{'-':>14}{'-':>9}" if wait is None else f"{wait.p50:>14.0f}{wait.p99:>9.0f}"
        refused = sum(tenant.refused.values())
        reasons = ", ".join(f"{count} x {reason}" for reason, count in tenant.refused.items())
        lines.append(
            f"{tenant.name:<12}{tenant.asked:>8}{tenant.served:>8}{refused / max(1, tenant.asked):>9.1%}{waited}"
            f"{tenant.of_fair_share:>19.2f}{'  ' + reasons if reasons else ''}"
        )
    return lines


def _rates(seconds: Sequence[float | None], count: int) -> tuple[float | None, float | None]:
    known = [each for each in seconds if each]
    return (count / median(known), count / min(known)) if known else (None, None)


def _each_us(seconds: Sequence[float | None], count: int) -> tuple[float | None, float | None]:
    known = [each for each in seconds if each is not None]
    return (1e6 * median(known) / count, 1e6 * min(known) / count) if known else (None, None)


def _shown(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"
