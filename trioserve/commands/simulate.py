"""`python -m trioserve simulate`: runs seeds until one fails, or replays one seed with a trace of all events.

The printed number of requests per second counts seconds of CPU time of the simulating processes. So the number is for
one core, and does not depend on other programs. All contracts are checked during the measurement.

`python -m trioserve simulate --routers N`: prints a table about several routers in front of the same endpoints.

For each row, one history per seed is simulated, with steady traffic and in virtual time. The figures of a row are
averages over the seeds. For exceeded limits, the figure is the maximum. All rules are checked, and the first broken
rule ends the program.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import NamedTuple

import msgspec

from trioserve.contracts.errors import StartupError
from trioserve.simulation.router.routers_books import (
    RoutersEvent,
    RoutersHistory,
    RoutersRow,
    RoutersWorld,
    rows_as_table,
)
from trioserve.simulation.router.routers_generator import Traffic, drawn_traffic
from trioserve.simulation.router.routers_simulator import RoutersSimulation
from trioserve.simulation.runs import Failure, Mode, Trace, Verdict, apply_events, runs_of, script_of
from trioserve.trio_tools.progress import ProgressBar

__all__ = [
    "EXIT_FAILED",
    "Row",
    "SimulateSettings",
    "run_replay",
    "run_routers",
    "run_simulate",
    "seeds_of",
    "show_failure",
    "show_verdict",
]


STEPS: dict[Mode, int] = {
    "core": 100,  # events, which contain about fifteen requests
    "stack": 12,  # clients
    "router": 150,  # events, which contain about fifty requests
    "routers": 100,  # events, which contain nearly as many requests
    "pair": 300,  # events, which contain about ten requests
    "lasting": 8,  # clients
    "ranks": 6,  # clients
    "iterative": 150,  # events, which contain about fifteen requests
    "images": 12,  # clients
    "models": 150,  # events, which contain nearly fifty requests
}
CHUNK_SEEDS = 50  # A chunk takes less than a second, so the progress line is updated often.
# Maximum number of replays that shorten a failing history. They take about ten seconds, and a few hundred are usual.
REPLAYS_MAX = 3_000
# Maximum number of script lines in all these replays, so that a history of thousands of requests takes only minutes.
REPLAYED_LINES_MAX = 2_000_000
EXIT_FAILED = 1


class SimulateSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a simulation run.

    Attributes:
        seeds: first seed, and the seed after the last seed.
        step_count: length of a history, in events or clients. STEPS shows the unit of each mode.
        job_count: number of processes.
        shrinks: True shortens a failing history before it is shown.
        mode: simulated part of the program.
    """

    seeds: tuple[int, int]
    step_count: int = STEPS["core"]
    job_count: int = 1
    shrinks: bool = True
    mode: Mode = "core"

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> SimulateSettings:
        """Create settings from command line arguments.

        Args:
            arguments: arguments of `trioserve simulate`.

        Raises:
            StartupError: a value is out of range, or two modes are chosen.
        """
        is_of_several = arguments.routers is not None
        named: dict[Mode, bool] = {
            "stack": arguments.stack,
            "router": arguments.router and not is_of_several,
            "routers": is_of_several,
            "pair": arguments.pair,
            "lasting": arguments.lasting,
            "ranks": arguments.ranks,
            "iterative": arguments.iterative,
            "images": arguments.images,
            "models": arguments.models,
        }
        modes = [mode for mode, is_named in named.items() if is_named]
        if len(modes) > 1:
            raise StartupError(
                "--stack, --router, --routers, --pair, --lasting, --ranks, --iterative, --images and --models are "
                "different simulations: give one of them"
            )
        mode = modes[0] if modes else "core"
        step_count = STEPS[mode] if arguments.steps is None else arguments.steps
        for flag, value in (("--steps", step_count), ("--jobs", arguments.jobs)):
            if value < 1:
                raise StartupError(f"{flag} is {value}, it must be at least 1")
        return cls(
            seeds=seeds_of(arguments.seeds or "0:1000"),
            step_count=step_count,
            job_count=arguments.jobs,
            shrinks=not arguments.no_shrink,
            mode=mode,
        )


class Chunk(msgspec.Struct, frozen=True):
    """Range of seeds that one process simulates without a report.

    Attributes:
        first: First seed.
        end: Seed after the last seed.
        step_count: Length of a history.
        mode: Simulated part of the program.
    """

    first: int
    end: int
    step_count: int
    mode: Mode


class ChunkReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a chunk of seeds, up to the first seed that failed.

    Attributes:
        history_count: Number of simulated histories.
        counts: Totals by name.
        digests: Digest of each history's trace. The texts are empty in modes without traces.
        cpu_seconds: CPU time of the simulation.
        failure: First failure. None if no seed failed.
        failed_seed: Seed of the failure, or the last seed.
    """

    history_count: int
    counts: dict[str, int]
    digests: list[str]
    cpu_seconds: float
    failure: Failure | None = None
    failed_seed: int = 0


def seeds_of(text: str) -> tuple[int, int]:
    """Parse a range of seeds.

    Args:
        text: `0:10000` means 0 to 9999, and `7` means only 7.

    Returns:
        First seed, and the seed after the last seed.

    Raises:
        StartupError: The text is not a range.
    """
    begin, colon, end = text.partition(":")
    try:
        seeds = (int(begin), int(end) if colon else int(begin) + 1)
    except ValueError:
        seeds = (0, 0)
    if not 0 <= seeds[0] < seeds[1]:
        raise StartupError(f"--seeds is {text!r}: give the first seed and the seed after the last, like 0:10000")
    return seeds


def run_simulate(settings: SimulateSettings) -> int:
    """Simulate one seed after another until one fails.

    Args:
        settings: Settings of the run.

    Returns:
        Exit code of the program.
    """
    first, end = settings.seeds
    totals: Counter[str] = Counter()
    digest = blake2b(digest_size=16)
    history_count, cpu_seconds, started_at = 0, 0.0, time.monotonic()
    with (
        ProgressBar("simulating", unit="histories") as bar,
        _reports(settings) as reports,
    ):
        for report in reports:
            history_count += report.history_count
            cpu_seconds += report.cpu_seconds
            totals.update(report.counts)
            for one in report.digests:
                digest.update(one.encode())
            rate = totals["requests"] / cpu_seconds
            bar.show_share(history_count, end - first, f"{rate:,.0f} requests/s of one core")
            if report.failure is not None:
                bar.close()
                _show_failure(report.failed_seed, report.failure, settings)
                return EXIT_FAILED
    for what in sorted(totals):
        print(f"  {what:<32}{totals[what]:>12,}")
    if settings.mode in ("stack", "lasting", "ranks", "images"):
        print(f"  digest of all traces            {digest.hexdigest()}")
    grants = f" with {totals['grants'] / cpu_seconds:,.0f} grants" if settings.mode in ("router", "routers") else ""
    print(
        f"{history_count:,} histories held, seeds {first} to {end - 1}: {totals['requests']:,} requests, "
        f"{totals['requests'] / cpu_seconds:,.0f} per second of one core{grants}, "
        f"{time.monotonic() - started_at:.1f} s with {settings.job_count} process(es)"
    )
    return 0


def run_replay(what: str, settings: SimulateSettings) -> int:
    """Replay a seed or a script, and print a trace.

    Args:
        what: A seed, or the path of a file with a script.
        settings: Settings of the run.

    Returns:
        Exit code of the program.

    Raises:
        StartupError: There is no such file.
    """
    if what.isdecimal():
        verdict = runs_of(settings.mode).run_seed(int(what), settings.step_count, trace=print)
    else:
        path = Path(what)
        if not path.is_file():
            raise StartupError(f"--replay is {what!r}: give a seed, or a file with a script")
        script = path.read_text(encoding="utf-8")
        verdict = runs_of(_mode_of(script)).run_script(script, trace=print)
    return show_verdict(verdict)


def show_verdict(verdict: Verdict) -> int:
    """Print the result of a replayed history.

    Args:
        verdict: Result of the replay.

    Returns:
        Exit code of the program.
    """
    if verdict.digest:
        print(f"digest of the trace: {verdict.digest}")
    print("every contract held" if verdict.failure is None else f"failed: {verdict.failure}")
    return 0 if verdict.failure is None else EXIT_FAILED


def _mode_of(script: str) -> Mode:
    """Find the mode of a script by its first word, which is "stage" for the stack, or the name of the mode.

    All other scripts are for the core.
    """
    lines = [line for line in script.splitlines() if line.strip() and not line.startswith("#")]
    modes: dict[str, Mode] = {"stage": "stack", **{mode: mode for mode in STEPS if mode not in ("core", "stack")}}
    return modes.get(lines[0].split()[0], "core") if lines else "core"


@contextmanager
def _reports(settings: SimulateSettings) -> Iterator[Iterator[ChunkReport]]:
    """Simulate all chunks, and yield their reports.

    The reports have the order of the seeds, so the first failure does not depend on the number of processes.
    """
    first, end = settings.seeds
    chunks = [
        Chunk(begin, min(begin + CHUNK_SEEDS, end), settings.step_count, settings.mode)
        for begin in range(first, end, CHUNK_SEEDS)
    ]
    if settings.job_count == 1:
        yield map(_simulate_chunk, chunks)
        return
    with multiprocessing.get_context("spawn").Pool(settings.job_count) as pool:
        yield pool.imap(_simulate_chunk, chunks)


def _simulate_chunk(chunk: Chunk) -> ChunkReport:
    totals: Counter[str] = Counter()
    digests = []
    failure, seed = None, chunk.first
    runs = runs_of(chunk.mode)
    started_at = time.process_time()
    for seed in range(chunk.first, chunk.end):
        verdict = runs.run_seed(seed, chunk.step_count)
        totals.update(verdict.counts)
        digests.append(verdict.digest)
        failure = verdict.failure
        if failure is not None:
            break
    return ChunkReport(
        history_count=seed - chunk.first + 1,
        counts=dict(totals),
        digests=digests,
        cpu_seconds=max(time.process_time() - started_at, 1e-6),  # The difference may be 0 with a coarse clock.
        failure=failure,
        failed_seed=seed,
    )


def _show_failure(seed: int, failure: Failure, settings: SimulateSettings) -> None:
    flag = "" if settings.mode == "core" else f" --{settings.mode}"
    replay = f"--replay {seed} --steps {settings.step_count}{flag}"
    show_failure(seed, failure, settings.mode, replay=replay, shrinks=settings.shrinks)


def show_failure(seed: int, failure: Failure, mode: Mode, *, replay: str, shrinks: bool) -> None:
    """Print a failure, the command that repeats it, and a shortened script.

    Args:
        seed: Seed that failed.
        failure: The failure, with its script.
        mode: Simulated part of the program.
        replay: Flags that repeat the whole history.
        shrinks: True if the script is shortened and printed.
    """
    print(f"seed {seed} failed: {failure}")
    print(f"repeat it with: python -m trioserve simulate {replay}")
    if shrinks:
        lines = failure.script.count("\n")
        replays_max = max(1, min(REPLAYS_MAX, REPLAYED_LINES_MAX // lines))
        plainest = runs_of(mode).shrunk(failure, replays_max=replays_max)
        lines_left = plainest.script.count("\n")
        print(f"shortened from {lines} lines to {lines_left}. Save them to a file for --replay:")
        print(f"# seed {seed}: {plainest}".replace("\n", " "))
        print(plainest.script, end="")


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
        return run_replay(what, SimulateSettings(seeds=(0, 1), mode="routers"))
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
