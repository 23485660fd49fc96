"""What is measured of a router, and with how much: values and the checks before anything is started."""

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
"""What is the same in every measurement from the command line, so that figures can be compared."""


class RouterBenchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Raises StartupError, one sentence, when a value is out of range.

    rows: which of ROUTER_ROWS; empty is all. requests: in each round, direct and through the router, both one at a time
    and `concurrency` at a time. output_tokens: events of a response that is streamed at a pace. server_flags: what
    `route` is given besides port and endpoints. Processes of a router are measured with eight times `concurrency`.
    watched: endpoints that are watched for watch_seconds, and get no requests.

    The bursts: `endpoints` servers with slots_max slots each, whose requests take service_seconds. One tenant sends
    steadily steady_share of what they can do together, another one bursts, so that together they ask for burst_load
    times of it for burst_seconds, followed by as long a rest.
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
                raise StartupError(f"--rows names {name!r}, there are: {', '.join(ROUTER_ROWS)}")
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
        several = sys.platform.startswith("linux")  # elsewhere a router is one process
        return self.rows or tuple(row for row in ROUTER_ROWS if several or row != "processes")

    @property
    def process_streams(self) -> int:
        """Streams at a time, to measure several processes with: more than one of them can serve in time."""
        return min(8 * self.concurrency, STREAMS_MAX)

    @property
    def capacity_per_second(self) -> float:
        """Requests that all endpoints together can answer in a second, at most."""
        return self.endpoints * self.slots_max / self.service_seconds

    def burst_flags(self, *, holds_back: bool) -> tuple[str, ...]:
        """Of the router that is measured under bursts: one that holds requests back, or one that passes all on."""
        waiting_max = str(self.endpoint_max_waiting) if holds_back else ENDLESS
        requests_max = () if holds_back else ("--endpoint-max-requests", ENDLESS)
        return (*self.server_flags, "--endpoint-max-waiting", waiting_max, *requests_max)
