"""Settings of the measurements that start their own servers, with checks that run before anything is started."""

from __future__ import annotations

import pathlib
import sys
from typing import Literal

import msgspec

from trioserve.bench.settings import Target, check_integer, check_number, check_permitted, check_writable
from trioserve.contracts.errors import StartupError

__all__ = [
    "AGENT_ROWS",
    "CONNECTORS",
    "PROCESS_COUNTS",
    "ROUTER_ROWS",
    "WITHOUT_FLAGS",
    "AgentBenchSettings",
    "DisaggregatedSettings",
    "RouterBenchSettings",
    "StartupSettings",
    "SurviveSettings",
    "SwitchSettings",
]


class StartupSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the startup measurement. Raises StartupError if a value is out of range.

    Attributes:
        checkouts: folders with other versions of this project. All versions are started in turn, so that a noisy
            machine affects all of them.
        server_flags: flags of `serve` besides its port.
        cold_path: folder or file of a model. Before each start, it is dropped from memory, read alone, and dropped
            again, so that the start reads it from the disk. None: the start reads it from where the system keeps it.
        memory_at_hand_gib: GiB of memory that are allocated and freed right before each read and each start. So a
            virtual machine need not request memory from its host during the measurement.
        rounds: number of starts of each version.
        timeout_seconds: seconds after which a start has failed.
        json_path: file for the JSON report. "-": standard output.
        label: name of this version in the report.
    """

    checkouts: tuple[str, ...] = ()
    server_flags: tuple[str, ...] = ()
    cold_path: str | None = None
    memory_at_hand_gib: float = 0.0
    rounds: int = 5
    timeout_seconds: float = 120.0
    json_path: str | None = None
    label: str = ""

    def __post_init__(self) -> None:
        check_integer("--rounds", self.rounds, 1, 100)
        check_number("--memory-at-hand", self.memory_at_hand_gib, 0.0, 4096.0)
        check_number("--timeout", self.timeout_seconds, 0.001, 86_400.0)
        for folder in self.checkouts:
            if not pathlib.Path(folder, "trioserve", "__main__.py").is_file():
                raise StartupError(f"--checkout {folder} has no trioserve in it: name a checkout of the project")
        if self.cold_path is not None and not pathlib.Path(self.cold_path).exists():
            raise StartupError(f"--cold {self.cold_path} does not exist: name the folder or file of a model")
        check_writable(self.json_path)


class SwitchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the measurement of models on demand. Raises StartupError if a value is out of range.

    Attributes:
        model: model that both names have.
        rounds: number of rounds. Each loads both models once.
        clients: clients of the storm. Half of them leave at a random time.
        rate_per_second: clients of the storm that start per second.
        output_tokens: tokens of a response of the storm.
        turn_seconds: the server's --model-turn.
        pause_seconds: time between two switches in which no request runs.
        server_flags: further flags of `serve`.
        peer: address of another server with two models `a` and `b`, which loads one of them on demand. It is measured
            in turn with this server. None: no peer.
        seed: seed of the storm.
        timeout_seconds: seconds after which the start of the server has failed.
        json_path: file for the JSON report. "-": standard output.
    """

    model: str = "smollm2"
    rounds: int = 5
    clients: int = 100
    rate_per_second: float = 2.0
    output_tokens: int = 16
    turn_seconds: float = 1.0
    pause_seconds: float = 2.0
    server_flags: tuple[str, ...] = ()
    peer: str | None = None
    seed: int = 0
    timeout_seconds: float = 120.0
    json_path: str | None = None

    def __post_init__(self) -> None:
        if self.peer is not None:
            check_permitted(Target.from_url(self.peer), self.peer, allow_remote=False)
        check_integer("--rounds", self.rounds, 1, 1000)
        check_integer("--clients", self.clients, 0, 100_000)
        check_number("--rate", self.rate_per_second, 0.01, 10_000.0)
        check_integer("--output-tokens", self.output_tokens, 1, 4096)
        check_number("--turn", self.turn_seconds, 0.0, 3600.0)
        check_number("--pause", self.pause_seconds, 0.0, 3600.0)
        check_number("--timeout", self.timeout_seconds, 0.001, 86_400.0)
        check_writable(self.json_path)


CONNECTORS = ("tcp", "nixl")


class DisaggregatedSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the comparison. Raises StartupError if a value is out of range.

    Attributes:
        connector: KV connector of the pair.
        concurrency: streams that decode all the time.
        output_tokens: tokens of each response of a stream.
        prompt_tokens: tokens of each prompt of a stream.
        requests: long prompts that arrive meanwhile, with few tokens of output.
        rate_per_second: long prompts per second, at random times.
        long_prompt_tokens: tokens of each long prompt.
        threads: threads of the one server. Each server of the pair gets half of them, so that both have the same cores.
        rounds: number of rounds of each, in turn.
        seed: seed of prompts and arrivals.
        timeout_seconds: seconds after which a request has failed.
        server_flags: other flags of every `serve`.
        json_path: file for the JSON report. "-": standard output.
        label: name of the measurement.
    """

    connector: str = "tcp"
    concurrency: int = 4
    output_tokens: int = 128
    prompt_tokens: int = 32
    requests: int = 16
    rate_per_second: float = 1.0
    long_prompt_tokens: int = 1500
    threads: int = 2
    rounds: int = 2
    seed: int = 0
    timeout_seconds: float = 300.0
    server_flags: tuple[str, ...] = ()
    json_path: str | None = None
    label: str = ""

    def __post_init__(self) -> None:
        if self.connector not in CONNECTORS:
            raise StartupError(f'--connector is "{self.connector}", allowed are {", ".join(CONNECTORS)}')
        check_integer("--concurrency", self.concurrency, 1, 1000)
        check_integer("--output-tokens", self.output_tokens, 2, 100_000)
        check_integer("--prompt-tokens", self.prompt_tokens, 1, 100_000)
        check_integer("--requests", self.requests, 1, 10_000)
        check_number("--rate", self.rate_per_second, 0.001, 1000.0)
        check_integer("--long-prompt-tokens", self.long_prompt_tokens, 32, 1_000_000)
        check_integer("--threads", self.threads, 2, 1024)
        check_integer("--rounds", self.rounds, 1, 100)
        check_integer("--seed", self.seed, 0, 2**31 - 1)
        check_number("--timeout", self.timeout_seconds, 0.001, 86_400.0)
        check_writable(self.json_path)


class SurviveSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one run.

    Attributes:
        model: model that each endpoint serves.
        endpoints: number of endpoints.
        concurrency: concurrent requests. The default exceeds the leases of one endpoint (64) and is several times its
            batch, so that many requests have no token yet when an endpoint dies.
        requests: number of requests in each of the two runs.
        output_tokens: maximum tokens of a response.
        period_seconds: mean time between two interruptions.
        seed: seed of requests and interruptions.
        logprob_tolerance: allowed difference of a log probability. In float32 without --batch-invariant 1e-3 is enough.
        timeout_seconds: time in which a response must be complete.
        server_flags: flags of every endpoint. They must make tokens independent of the other requests in the batch.
            Otherwise streams differ for that reason alone.
        router_flags: flags of the router.
        log_directory: directory for the output of all processes. None: the output is dropped.
        json_path: file for the report as JSON, "-" for standard output. None: no file.
        label: text before the title of the report.

    Raises:
        StartupError: a value is out of range.
    """

    model: str = "smollm2"
    endpoints: int = 3
    concurrency: int = 96
    requests: int = 1000
    output_tokens: int = 64
    period_seconds: float = 6.0
    seed: int = 0
    logprob_tolerance: float = 0.0
    timeout_seconds: float = 300.0
    server_flags: tuple[str, ...] = ("--batch-invariant",)
    router_flags: tuple[str, ...] = ("--health-interval", "0.5")
    log_directory: str | None = None
    json_path: str | None = None
    label: str = ""

    def __post_init__(self) -> None:
        # At least one endpoint must remain while another endpoint is down.
        check_integer("--endpoints", self.endpoints, 2, 16)
        check_integer("--concurrency", self.concurrency, 1, 4096)
        check_integer("--requests", self.requests, 1, 1_000_000)
        check_integer("--output-tokens", self.output_tokens, 8, 100_000)
        check_number("--period", self.period_seconds, 0.05, 86_400.0)
        check_number("--logprob-tolerance", self.logprob_tolerance, 0.0, 100.0)
        check_number("--timeout", self.timeout_seconds, 1.0, 86_400.0)
        check_writable(self.json_path)


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


AGENT_ROWS = ("recency", "sessions", "responses", "peer")


class AgentBenchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the replay of agents' sessions. Raises StartupError if a value is out of range.

    Attributes:
        mode: "replay" replays sessions. "turns" compares a turn over HTTP and over a websocket, "idle" keeps
            `connections` websockets open. Both use a server with a fake model.
        connections: idle websockets.
        model: model of every server.
        shape: "small" for a small model on a CPU, "full" for the shape of public traces.
        scale: factor of all token counts of the shape.
        pause_scale: factor of the pauses in which a tool runs.
        concurrency: agents at the same time.
        rounds: sessions of each agent, one after another.
        shares: sizes of the KV pool, relative to the working set.
        rows: names of AGENT_ROWS. Empty: all rows, without the peer if there is no command for it.
        peer_command: command that starts another server. {blocks} and {tokens} stand for the blocks and tokens of its
            pool. None: no peer.
        server_flags: other flags of every `serve`.
        seed: seed of sessions and texts.
        timeout_seconds: seconds after which a request has failed.
        log_directory: directory for the output of the servers. None: the output is dropped.
        json_path: file for the JSON report. "-": standard output.
        label: name of the measurement.
    """

    mode: Literal["replay", "turns", "idle"] = "replay"
    connections: int = 5_000
    model: str = "smollm2"
    shape: Literal["small", "full"] = "small"
    scale: float = 1.0
    pause_scale: float = 0.1
    concurrency: int = 6
    rounds: int = 1
    shares: tuple[float, ...] = (0.25, 0.5, 1.0)
    rows: tuple[str, ...] = ()
    peer_command: str | None = None
    server_flags: tuple[str, ...] = ()
    seed: int = 0
    timeout_seconds: float = 300.0
    log_directory: str | None = None
    json_path: str | None = None
    label: str = ""

    def __post_init__(self) -> None:
        for name in self.rows:
            if name not in AGENT_ROWS:
                raise StartupError(f"--rows has {name!r}, allowed are: {', '.join(AGENT_ROWS)}")
        if "peer" in self.rows and self.peer_command is None:
            raise StartupError(
                "--rows has 'peer', but there is no --peer-command: add the command that starts the peer"
            )
        check_integer("--connections", self.connections, 1, 100_000)
        check_number("--scale", self.scale, 0.001, 1.0)
        check_number("--pause-scale", self.pause_scale, 0.0, 10.0)
        check_integer("--concurrency", self.concurrency, 1, 4096)
        check_integer("--rounds", self.rounds, 1, 1000)
        for share in self.shares:
            check_number("--shares", share, 0.01, 100.0)
        check_integer("--seed", self.seed, 0, 2**31 - 1)
        check_number("--timeout", self.timeout_seconds, 0.001, 86_400.0)
        check_writable(self.json_path)

    @property
    def chosen_rows(self) -> tuple[str, ...]:
        return self.rows or tuple(row for row in AGENT_ROWS if row != "peer" or self.peer_command is not None)
