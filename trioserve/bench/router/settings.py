"""Settings of the measurements of a router."""

from __future__ import annotations

import sys

import msgspec

from trioserve.bench.settings import check_integer, check_number, check_writable
from trioserve.contracts.errors import StartupError

__all__ = ["PROCESS_COUNTS", "ROUTER_ROWS", "WITHOUT_FLAGS", "RouterBenchSettings"]

ROUTER_ROWS = ("latency", "throughput", "events", "processes", "watch", "bursts")
PROCESS_COUNTS = (1, 2)
STREAMS_MAX = 512
ENDLESS = "1000000"
WITHOUT_FLAGS = frozenset(
    {
        "event_seconds",
        "watched",
        "watch_seconds",
        "slots_max",
        "service_seconds",
        "endpoint_max_waiting",
        "burst_load",
        "burst_seconds",
        "bursts",
        "steady_share",
    }
)
"""Settings that every measurement from the command line shares, so that figures can be compared."""


class RouterBenchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the measurements of a router. Raises StartupError if a value is out of range.

    In the bursts, one tenant sends steadily `steady_share` of the capacity of all endpoints. Another tenant sends in
    bursts: for burst_seconds, both together request `burst_load` times the capacity, then the second tenant rests for
    as long.

    Attributes:
        rows: names of ROUTER_ROWS. Empty: all rows.
        requests: requests of each round, direct and through the router, both one at a time and `concurrency` at a time.
        concurrency: requests in flight. Several router processes are measured with eight times as many.
        rounds: number of measurements.
        output_tokens: events of a response that is streamed at intervals.
        event_seconds: interval of these events.
        watched: endpoints that the router watches but that get no requests.
        watch_seconds: duration of that measurement.
        server_flags: flags of `route` besides port and endpoints.
        endpoints: servers of the bursts.
        slots_max: slots of each of these servers.
        service_seconds: service time of each of their requests.
        endpoint_max_waiting: requests that may wait inside an endpoint if the router holds requests back.
        burst_load: load during a burst, relative to the capacity.
        burst_seconds: duration of a burst.
        bursts: number of bursts.
        steady_share: load of the steady tenant, relative to the capacity.
        seed: seed of the arrivals.
        json_path: file for the JSON report. "-": standard output.
        label: name of the measurement.
    """

    rows: tuple[str, ...] = ()
    requests: int = 2_000
    concurrency: int = 32
    rounds: int = 3
    output_tokens: int = 200
    event_seconds: float = 0.01
    watched: int = 100
    watch_seconds: float = 5.0
    server_flags: tuple[str, ...] = ()
    endpoints: int = 8
    slots_max: int = 4
    service_seconds: float = 0.2
    endpoint_max_waiting: int = 4
    burst_load: float = 2.0
    burst_seconds: float = 4.0
    bursts: int = 2
    steady_share: float = 0.25
    seed: int = 0
    json_path: str | None = None
    label: str = ""

    def __post_init__(self) -> None:
        for name in self.rows:
            if name not in ROUTER_ROWS:
                raise StartupError(f"--rows has {name!r}, allowed are: {', '.join(ROUTER_ROWS)}")
        check_integer("--requests", self.requests, 1, 1_000_000)
        check_integer("--concurrency", self.concurrency, 1, 512)
        check_integer("--rounds", self.rounds, 1, 100)
        check_integer("--output-tokens", self.output_tokens, 1, 100_000)
        for name in ("endpoints", "slots_max", "bursts", "watched"):
            check_integer(name, getattr(self, name), 1, 1000)
        for name in ("service_seconds", "event_seconds", "watch_seconds", "burst_load", "burst_seconds"):
            check_number(name, getattr(self, name), 0.001, 60.0)
        check_number("steady_share", self.steady_share, 0.0, self.burst_load)
        check_writable(self.json_path)

    @property
    def chosen_rows(self) -> tuple[str, ...]:
        several = sys.platform.startswith("linux")  # On other systems, a router is one process.
        return self.rows or tuple(row for row in ROUTER_ROWS if several or row != "processes")

    @property
    def process_streams(self) -> int:
        """Concurrent streams for the measurement of several processes.

        One process alone cannot serve all of them in time.
        """
        return min(8 * self.concurrency, STREAMS_MAX)

    @property
    def capacity_per_second(self) -> float:
        """Maximum number of requests that all endpoints together can serve in a second."""
        return self.endpoints * self.slots_max / self.service_seconds

    def burst_flags(self, *, holds_back: bool) -> tuple[str, ...]:
        """Return the flags of the router that is measured under bursts.

        Args:
            holds_back: True: the router holds requests back. False: it forwards all requests at once.
        """
        waiting_max = str(self.endpoint_max_waiting) if holds_back else ENDLESS
        requests_max = () if holds_back else ("--endpoint-max-requests", ENDLESS)
        return (*self.server_flags, "--endpoint-max-waiting", waiting_max, *requests_max)
