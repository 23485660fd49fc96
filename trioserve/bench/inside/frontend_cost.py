"""Measures the CPU time of the front end for a streamed event and for a small request, over real sockets, without a
model.

The server runs in this process, and the clients run in another process. Only the CPU time of this process counts, so
neither the clients nor other programs affect the figures. The engine is the real one with a model that computes
nothing. A second run has readers in this process that read the same streams without HTTP. It measures the engine's
part, which is subtracted. So the cost of an event is all of handler, JSON, SSE, HTTP and socket.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from statistics import median

import msgspec
import trio

from trioserve.api.routes import App
from trioserve.bench.inside.command import print_figures
from trioserve.bench.settings import at_least_one
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.step import IsAbandoned, StepPlan, StepResult, never_abandoned
from trioserve.http.limits import FrontendLimits
from trioserve.http.server import FrontendServer
from trioserve.testing.fake_engine import FakeEngine, open_fake_engine
from trioserve.trio_tools.interpreter import prepare_interpreter
from trioserve.trio_tools.progress import with_progress

__all__ = ["FrontendCost", "add_arguments", "event_cost", "request_cost", "run"]

SHAPES = ((1, 64, 2), (64, 1, 2), (64, 1, 1))  # number of connections, streams of each connection, HTTP version
TOKENS = (100, 1_100)  # numbers of tokens of a short and of a long response. Each token is one event.
# seconds between two tokens of a stream, which are enough to send the tokens of all streams
STEP_SECONDS = 0.002
SMALL_REQUESTS = 4_000
ROUNDS = 5
CLIENT_SECONDS_MAX = 120


class FrontendCost(msgspec.Struct, frozen=True, kw_only=True):
    """One figure: microseconds of the server's CPU time per event or request. It is the median of several rounds.

    Attributes:
        what: "event" or "small request".
        connection_count: number of connections.
        stream_count: streams of each connection.
        http: HTTP version.
        median_us: median, without the engine's part.
        low_us: minimum.
        high_us: maximum.
        engine_us: the engine's part.
        response_us: cost of a response without its events. It includes a part of the cost to open the connection.
    """

    what: str
    connection_count: int
    stream_count: int
    http: int
    median_us: float
    low_us: float
    high_us: float
    engine_us: float = 0.0
    response_us: float = 0.0


class _NothingComputed:
    """An executor that computes nothing. Every token is the letter a."""

    def execute(self, plan: StepPlan, is_abandoned: IsAbandoned = never_abandoned) -> StepResult | None:
        return StepResult(tuple(97 if chunk.samples else None for chunk in plan.chunks), {}, {}, {})


def event_cost(
    connection_count: int,
    stream_count: int,
    http: int,
    *,
    tokens: tuple[int, int] = TOKENS,
    rounds: int = ROUNDS,
) -> FrontendCost:
    """Measure one event, while connection_count * stream_count responses are streamed.

    Args:
        connection_count: number of connections.
        stream_count: streams of each connection.
        http: HTTP version.
        tokens: tokens of a short and of a long response. The cost of an event is from their difference.
        rounds: number of rounds.
    """
    response_count = connection_count * stream_count
    short, long = tokens
    event_us: list[float] = []
    engine_us: list[float] = []
    response_us: list[float] = []

    def served(token_count: int) -> tuple[float, float]:
        """Return microseconds and events of one response."""
        body = {"prompt": "hello", "max_tokens": token_count, "ignore_eos": True, "stream": True, "temperature": 0}
        seconds, events = trio.run(
            _serve, connection_count, stream_count, http, json.dumps(body), 1, response_count, token_count
        )
        # A delta may have several tokens, so there may be fewer events than tokens.
        return seconds / response_count * 1e6, events / response_count

    def read_alone(token_count: int) -> float:
        return trio.run(_read_without_http, response_count, token_count) / response_count * 1e6

    for _ in with_progress(range(rounds), "measuring", unit="rounds"):
        alone_short, alone_long = read_alone(short), read_alone(long)
        (short_us, short_events), (long_us, long_events) = served(short), served(long)
        engine_us.append((alone_long - alone_short) / (long - short))
        event_us.append((long_us - short_us) / (long_events - short_events) - engine_us[-1])
        response_us.append(short_us - alone_short - short_events * event_us[-1])
    return _cost(
        "event",
        connection_count,
        stream_count,
        http,
        event_us,
        engine_us=median(engine_us),
        response_us=median(response_us),
    )


def request_cost(http: int, *, requests: int = SMALL_REQUESTS, rounds: int = ROUNDS) -> FrontendCost:
    """Measure one small JSON request, of those that 32 connections send one after another.

    Args:
        http: HTTP version.
        requests: number of requests of a round.
        rounds: number of rounds.
    """
    samples = []
    for _ in with_progress(range(rounds), "measuring", unit="rounds"):
        seconds, _events = trio.run(_serve, 32, 1, http, "", requests // 32, 1, 1)
        samples.append(seconds / (requests // 32 * 32) * 1e6)
    return _cost("small request", 32, 1, http, samples)


def _cost(
    what: str,
    connections: int,
    streams: int,
    http: int,
    samples: list[float],
    *,
    engine_us: float = 0.0,
    response_us: float = 0.0,
) -> FrontendCost:
    return FrontendCost(
        what=what,
        connection_count=connections,
        stream_count=streams,
        http=http,
        median_us=median(samples),
        low_us=min(samples),
        high_us=max(samples),
        engine_us=engine_us,
        response_us=response_us,
    )


def _engine_options(request_count: int, tokens: int) -> dict[str, int | float]:
    return {
        "block_count": request_count * (tokens // 16 + 3),
        "block_size": 16,
        "max_model_len": tokens + 16,
        "max_num_seqs": request_count,
        "max_queued_requests": request_count,
        "max_num_batched_tokens": 8 * request_count,
        "step_seconds": STEP_SECONDS,
    }


async def _read_without_http(request_count: int, tokens: int) -> float:
    """Return the CPU seconds of the same number of streams, read in this process without HTTP."""
    async with open_fake_engine(enable_prefix_caching=False, **_engine_options(request_count, tokens)) as engine:  # type: ignore[arg-type]
        engine.steps.executor = _NothingComputed()
        began = time.process_time()
        async with trio.open_nursery() as nursery:
            for _ in range(request_count):
                nursery.start_soon(_read, engine, tokens)
        return time.process_time() - began


async def _read(engine: FakeEngine, tokens: int) -> None:
    async with engine.generate("hello", SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0)) as stream:
        async for _delta in stream:
            pass


async def _serve(
    connections: int, streams: int, http: int, body: str, repeats: int, request_count: int, tokens: int
) -> tuple[float, int]:
    """Return this process's CPU seconds while it serves the clients, and the number of events that they received."""
    async with open_fake_engine(enable_prefix_caching=False, **_engine_options(request_count, tokens)) as engine:  # type: ignore[arg-type]
        engine.steps.executor = _NothingComputed()
        server = FrontendServer(App(engine), limits=FrontendLimits(streams_max=max(100, streams)))
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        port = listeners[0].socket.getsockname()[1]
        load = {
            "port": port,
            "connections": connections,
            "streams": streams,
            "http": http,
            "body": body,
            "repeats": repeats,
        }
        async with trio.open_nursery() as nursery:
            await nursery.start(server.serve, listeners)
            began = time.process_time()
            with trio.fail_after(CLIENT_SECONDS_MAX):
                ran = await trio.run_process(
                    [sys.executable, "-m", "trioserve.bench.inside.frontend_load"],
                    stdin=json.dumps(load).encode(),
                    capture_stdout=True,
                )
            seconds = time.process_time() - began
            nursery.cancel_scope.cancel()
    return seconds, int(ran.stdout)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=at_least_one, default=ROUNDS, metavar="N", help="rounds of each figure")


def run(arguments: argparse.Namespace) -> int:
    """Measure, print a table row by row, and then all figures as one line of JSON. The defaults take about two minutes.

    Args:
        arguments: the parsed command line.

    Returns:
        Exit code.
    """
    prepare_interpreter()
    rounds: int = arguments.rounds
    print(
        f"{'':<16}{'connections':>12}{'streams':>9}{'HTTP':>6}{'median us':>11}{'low':>9}{'high':>9}{'engine us':>11}"
        f"{'response us':>11}"
    )
    costs = []
    for shape in SHAPES:
        costs.append(event_cost(*shape, rounds=rounds))
        _print_row(costs[-1])
    for http in (1, 2):
        costs.append(request_cost(http, rounds=rounds))
        _print_row(costs[-1])
    print_figures(costs=costs)
    return 0


def _print_row(cost: FrontendCost) -> None:
    print(
        f"{cost.what:<16}{cost.connection_count:>12}{cost.stream_count:>9}{cost.http:>6}{cost.median_us:>11.1f}"
        f"{cost.low_us:>9.1f}{cost.high_us:>9.1f}{cost.engine_us:>11.1f}"
        f"{cost.response_us:>11.1f}",
        flush=True,
    )
