"""Measures a router between clients and fake endpoints. Each is a separate process, connected by sockets of this
machine.

The cost of a router is the difference to requests that are sent directly. Both are sent in turn in the same run, so
that other work on the machine affects both. The router's CPU time is also measured, since other processes change it
little.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from statistics import median

import msgspec

from trioserve.bench.report import Spread
from trioserve.bench.router.fake_endpoint import MODEL, DepthFigures, FakeEndpointSettings
from trioserve.bench.router.report import (
    BurstFigures,
    EventFigures,
    LatencyFigures,
    ProcessFigures,
    RouterReport,
    ThroughputFigures,
    WatchFigures,
    burst_figures,
    burst_plan,
    router_json,
    router_text,
)
from trioserve.bench.router.socket_load import (
    Address,
    LoadFailed,
    Response,
    WireRequest,
    ask,
    at_a_time,
    at_moments,
    opened,
)
from trioserve.bench.runner import (
    EXIT_REQUESTS_FAILED,
    EXIT_UNREACHABLE,
    CannotMeasure,
    Measured,
    ServerProcess,
    conclude,
    cpu_seconds,
    parts_so_far,
    print_progress,
)
from trioserve.bench.server_settings import PROCESS_COUNTS, RouterBenchSettings

__all__ = ["main"]

READY_SECONDS_MAX = 60.0
POLL_SECONDS = 0.02
STOP_SECONDS_MAX = 15.0
CHILDREN_POLLS_MAX = 100
TURN_REQUESTS = 100  # In each turn, this many requests are sent directly, and then as many through the router.
FEW_TOKENS = 4
WATCHED = (("requested four times a second", None), ("sent once a second", 1.0), ("sent ten times a second", 0.1))
COMPLETIONS = "/v1/completions"


class Router(msgspec.Struct, frozen=True):
    """A router that is ready.

    Attributes:
        address: its address.
        endpoints: addresses of its endpoints.
        pid: its process.
    """

    address: Address
    endpoints: list[Address]
    pid: int


def main(settings: RouterBenchSettings) -> int:
    """Measure, print the report, and return the exit code of bench.

    After an interruption, the report of the rows so far is printed.

    Args:
        settings: settings of the measurement.
    """
    latency: list[LatencyFigures] = []
    throughput: ThroughputFigures | None = None
    events: EventFigures | None = None
    processes: list[ProcessFigures] = []
    watch: list[WatchFigures] = []
    bursts: list[BurstFigures] = []
    rows = settings.chosen_rows
    with parts_so_far() as ending, _load_failure():
        if {"latency", "throughput", "events"} & set(rows):
            fast = FakeEndpointSettings(event_seconds=settings.event_seconds)
            with _endpoints(fast) as ports, _router(ports, settings.server_flags) as router:
                _warm_up(router, settings)
                if "latency" in rows:
                    latency = [_latency(router, settings, stream=stream) for stream in (False, True)]
                    print_progress("latency is measured")
                if "throughput" in rows:
                    throughput = _throughput(router, settings)
                    print_progress("throughput is measured")
                if "events" in rows:
                    events = _events(router, settings)
                    print_progress("events are measured")
        if "processes" in rows:
            processes = _processes(settings)
            print_progress("routers of several processes are measured")
        if "watch" in rows:
            for how, load_seconds in WATCHED:
                watch.append(_watched(settings, how, load_seconds))
            print_progress("watching is measured")
        if "bursts" in rows:
            for holds_back in (True, False):
                bursts.append(_bursts(settings, holds_back=holds_back))
                print_progress(f"bursts are measured, {'requests held back' if holds_back else 'all forwarded'}")
    if not (latency or throughput or events or processes or watch or bursts):
        return ending.exit_code
    report = RouterReport(
        settings=settings,
        latency=latency,
        throughput=throughput,
        events=events,
        processes=processes,
        watch=watch,
        bursts=bursts,
    )
    return conclude(Measured(report, ending.exit_code), settings.json_path, router_text, router_json)


@contextlib.contextmanager
def _load_failure() -> Iterator[None]:
    try:
        yield
    except LoadFailed as error:
        raise CannotMeasure(str(error), EXIT_REQUESTS_FAILED) from error


# --- Measurements ---


def _small(*, stream: bool = False) -> WireRequest:
    body = {"model": MODEL, "prompt": "three or four words", "max_tokens": FEW_TOKENS}
    if not stream:
        return WireRequest(COMPLETIONS, body)
    return WireRequest(COMPLETIONS, {**body, "stream": True, "at_once": True}, events=FEW_TOKENS)


def _warm_up(router: Router, settings: RouterBenchSettings) -> None:
    """Make the router open its connections, and run the measured code once, so that Python specializes it before."""
    count = min(settings.requests, 300)
    with opened(router.address, settings.concurrency) as connections:
        for stream in (False, True):
            at_a_time(connections, _small(stream=stream), requests=count)


def _latency(router: Router, settings: RouterBenchSettings, *, stream: bool) -> LatencyFigures:
    request = _small(stream=stream)
    direct_seconds: list[float] = []
    through_seconds: list[float] = []
    turns_added_ms = []
    with opened(router.endpoints[0], 1) as direct, opened(router.address, 1) as through:
        for left in range(settings.requests * settings.rounds, 0, -TURN_REQUESTS):
            count = min(left, TURN_REQUESTS)
            direct_turn = at_a_time(direct, request, requests=count)
            through_turn = at_a_time(through, request, requests=count)
            turns_added_ms.append(1e3 * (median(through_turn) - median(direct_turn)))
            direct_seconds += direct_turn
            through_seconds += through_turn
    direct_ms, through_ms = Spread.from_seconds(direct_seconds), Spread.from_seconds(through_seconds)
    assert direct_ms is not None
    assert through_ms is not None
    what = f"{FEW_TOKENS} tokens, streamed" if stream else f"{FEW_TOKENS} tokens"
    return LatencyFigures(what=what, direct_ms=direct_ms, through_ms=through_ms, turns_added_ms=turns_added_ms)


def _throughput(router: Router, settings: RouterBenchSettings) -> ThroughputFigures:
    request = _small()
    direct, through, cpu = [], [], []
    for _ in range(settings.rounds):
        direct.append(_timed(router.endpoints[0], request, settings.concurrency, settings.requests))
        before = cpu_seconds(router.pid)
        through.append(_timed(router.address, request, settings.concurrency, settings.requests))
        cpu.append(_difference(before, cpu_seconds(router.pid)))
    return ThroughputFigures(
        connections=settings.concurrency,
        requests=settings.requests,
        direct_seconds=direct,
        through_seconds=through,
        cpu_seconds=cpu,
    )


def _events(router: Router, settings: RouterBenchSettings) -> EventFigures:
    tokens, streams = settings.output_tokens, settings.concurrency
    body = {"model": MODEL, "prompt": "three or four words", "max_tokens": tokens, "stream": True}
    # The router stores no tokens of a stream that is pinned to one endpoint, since no other endpoint can resume it.
    [host, port] = router.endpoints[0]
    pinned = WireRequest(f"{COMPLETIONS}?id=http://{host}:{port}", body, events=tokens)
    request = WireRequest(COMPLETIONS, body, events=tokens)
    through, cpu, pinned_cpu = [], [], []
    for _ in range(settings.rounds):
        before = cpu_seconds(router.pid)
        through.append(_timed(router.address, request, streams, streams))
        cpu.append(_difference(before, between := cpu_seconds(router.pid)))
        _timed(router.address, pinned, streams, streams)
        pinned_cpu.append(_difference(between, cpu_seconds(router.pid)))
    return EventFigures(
        streams=streams,
        events=streams * tokens,
        event_seconds=settings.event_seconds,
        through_seconds=through,
        cpu_seconds=cpu,
        pinned_cpu_seconds=pinned_cpu,
    )


def _processes(settings: RouterBenchSettings) -> list[ProcessFigures]:
    """Measure routers with one process and with several processes, in turn, so that other work affects all of them."""
    streams, tokens = settings.process_streams, settings.output_tokens
    body = {"model": MODEL, "prompt": "three or four words", "max_tokens": tokens, "stream": True}
    request = WireRequest(COMPLETIONS, body, events=tokens)
    made = [
        ProcessFigures(
            processes=count,
            streams=streams,
            events=streams * tokens,
            through_seconds=[],
            cpu_seconds=[],
            busiest_cpu_seconds=[],
        )
        for count in PROCESS_COUNTS
    ]
    with contextlib.ExitStack() as stack:
        ports = stack.enter_context(_endpoints(FakeEndpointSettings(event_seconds=settings.event_seconds)))
        routers = [
            stack.enter_context(_router(ports, (*settings.server_flags, *_process_flags(count))))
            for count in PROCESS_COUNTS
        ]
        for router in routers:
            _timed(router.address, _small(stream=True), streams, 4 * streams)
        pids = [_serving_processes(router, count) for router, count in zip(routers, PROCESS_COUNTS, strict=True)]
        for _ in range(settings.rounds):
            for router, figures, serving in zip(routers, made, pids, strict=True):
                before = [cpu_seconds(pid) for pid in serving]
                figures.through_seconds.append(_timed(router.address, request, streams, streams))
                spent = [_difference(*each) for each in zip(before, map(cpu_seconds, serving), strict=True)]
                known = [each for each in spent if each is not None]
                figures.cpu_seconds.append(sum(known) if known else None)
                figures.busiest_cpu_seconds.append(max(known, default=None))
    return made


def _process_flags(count: int) -> tuple[str, ...]:
    """Return flags with which no request waits in the router."""
    several = () if count == 1 else ("--router-processes", str(count))
    return ("--endpoint-max-requests", "100000", "--max-queued-requests", "100000", *several)


def _serving_processes(router: Router, count: int) -> list[int]:
    """Return the processes that serve: the router itself, or its children if there are several."""
    if count == 1:
        return [router.pid]
    for _ in range(CHILDREN_POLLS_MAX):  # A single read of the list may miss a child while processes start and end.
        by_thread = pathlib.Path(f"/proc/{router.pid}/task").glob("*/children")
        children = [pid for path in by_thread for pid in path.read_text(encoding="ascii").split()]
        if len(children) == count:
            return [int(pid) for pid in children]
        time.sleep(POLL_SECONDS)
    raise CannotMeasure(f"the router did not start {count} processes", EXIT_UNREACHABLE)


def _watched(settings: RouterBenchSettings, how: str, load_seconds: float | None) -> WatchFigures:
    """Measure a router that gets no requests."""
    fleet = FakeEndpointSettings(endpoints=settings.watched, load_seconds=load_seconds)
    with _endpoints(fleet) as ports, _router(ports, settings.server_flags) as router:
        # The first request to each endpoint costs more, so the measurement begins later.
        time.sleep(settings.watch_seconds / 5)
        before, began = cpu_seconds(router.pid), time.monotonic()
        time.sleep(settings.watch_seconds)
        spent, seconds = _difference(before, cpu_seconds(router.pid)), time.monotonic() - began
    return WatchFigures(how=how, endpoints=settings.watched, seconds=seconds, cpu_seconds=spent)


def _bursts(settings: RouterBenchSettings, *, holds_back: bool) -> BurstFigures:
    endpoints = FakeEndpointSettings(
        endpoints=settings.endpoints, slots_max=settings.slots_max, service_seconds=settings.service_seconds
    )
    plan = burst_plan(settings)
    flags = settings.burst_flags(holds_back=holds_back)
    with _endpoints(endpoints) as ports, _router(ports, flags) as router:
        for address in router.endpoints:
            _ask_once(address, WireRequest("/measure-anew", {}))
        asked = at_moments(router.address, plan)
        depths = [
            msgspec.json.decode(_ask_once(address, WireRequest("/measured")).body, type=DepthFigures)
            for address in router.endpoints
        ]
    return burst_figures(settings, asked, depths, holds_back=holds_back)


def _timed(address: Address, request: WireRequest, connections: int, requests: int) -> float:
    with opened(address, connections) as sockets:
        began = time.perf_counter()
        at_a_time(sockets, request, requests=requests)
        return time.perf_counter() - began


def _difference(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before


# --- Processes ---


@contextlib.contextmanager
def _endpoints(settings: FakeEndpointSettings) -> Iterator[list[int]]:
    """Start fake endpoints and yield their ports.

    The process of the endpoints ends at the end of its input. So it also ends if this process is killed.
    """
    command = [sys.executable, "-m", "trioserve.bench.router.fake_endpoint", msgspec.json.encode(settings).decode()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line:
                raise CannotMeasure("the fake endpoints did not start", EXIT_UNREACHABLE)
            yield json.loads(line)
        finally:
            process.stdin.close()


@contextlib.contextmanager
def _router(ports: list[int], flags: tuple[str, ...]) -> Iterator[Router]:
    """Start a router, and yield it after it has reported every endpoint as healthy with a load.

    Raises CannotMeasure.
    """
    endpoints = [("127.0.0.1", port) for port in ports]
    named = [word for port in ports for word in ("--endpoint", f"http://127.0.0.1:{port}")]
    with ServerProcess("the router", ["route", *named, *flags]) as server:
        address = ("127.0.0.1", server.port)
        ready_by = time.monotonic() + READY_SECONDS_MAX
        while not _all_well(address):
            if not server.is_alive or time.monotonic() > ready_by:
                raise server.not_ready()
            time.sleep(POLL_SECONDS)
        yield Router(address, endpoints, server.pid)


class _Endpoint(msgspec.Struct):
    health: str
    waiting_depth: int | None


class _Endpoints(msgspec.Struct):
    data: list[_Endpoint]


def _all_well(router: Address) -> bool:
    try:
        response = _ask_once(router, WireRequest("/endpoints"))
    except (OSError, LoadFailed):
        return False
    if response.status != 200:
        return False
    endpoints = msgspec.json.decode(response.body, type=_Endpoints).data
    return all(each.health == "healthy" and each.waiting_depth is not None for each in endpoints)


def _ask_once(address: Address, request: WireRequest) -> Response:
    with socket.create_connection(address, timeout=READY_SECONDS_MAX) as connection:
        return ask(connection, request)
