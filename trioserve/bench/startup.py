"""Measures the time from the command to a ready server, the first requests, and the memory of the idle server.

The server is a separate process. The report shows its CPU time beside the elapsed seconds, which other processes of the
machine affect.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pathlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from statistics import median

import msgspec
import trio

from trioserve.bench.client import Failure
from trioserve.bench.report import Machine, measured_at, report_json
from trioserve.bench.runner import (
    Measured,
    PlainResponse,
    ServerProcess,
    ask,
    conclude,
    cpu_seconds,
    http1_client,
    memory_bytes,
    parts_so_far,
    print_progress,
)
from trioserve.bench.server_settings import StartupSettings
from trioserve.bench.settings import Target

__all__ = [
    "STOP_SECONDS_MAX",
    "Start",
    "StartupReport",
    "main",
    "startup_text",
]

POLL_SECONDS = 0.005  # seconds between two checks of readiness. A measured start has an error of this size.
STOP_SECONDS_MAX = 10.0
READ_BYTES = 8 * 2**20
PROMPT_CHARACTERS = 64
MADV_POPULATE_WRITE = 23  # Python has no name for this constant of Linux.


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one start.

    Attributes:
        checkout: folder of the version, or "" for this version.
        ready_seconds: from the command to the first 200 of /ready.
        cpu_seconds: CPU time of all threads until the server is ready. None: the system does not report it.
        resident_bytes: resident memory of the idle server right after it is ready. None: the system does not report it.
        proportional_bytes: resident memory, in which shared pages are divided among the processes that share them, or
            None.
        resident_bytes_max: the highest resident memory until the server is ready, or None.
        read_seconds: time to read the model's files from the disk, measured alone before the start. None: not measured.
        request_seconds: times of the first request and of a second similar one. Each has PROMPT_CHARACTERS characters
            and returns one token. None: a request failed.
    """

    checkout: str
    ready_seconds: float
    cpu_seconds: float | None
    resident_bytes: int | None
    proportional_bytes: int | None
    resident_bytes_max: int | None
    read_seconds: float | None = None
    request_seconds: tuple[float, float] | None = None


class StartupReport(msgspec.Struct, frozen=True, kw_only=True):
    settings: StartupSettings
    date: str = msgspec.field(default_factory=measured_at)
    machine: Machine = msgspec.field(default_factory=Machine.here)
    starts: list[Start]


def main(settings: StartupSettings) -> int:
    """Measure, print the report, and return the exit code of bench.

    After an interruption, the report of the starts so far is printed.

    Args:
        settings: settings of the measurement.
    """
    starts: list[Start] = []
    with parts_so_far() as ending:
        for turn in range(1 + settings.rounds):
            for checkout in ("", *settings.checkouts):
                start = _start(checkout, settings)
                note = ""
                if turn == 0:
                    note = " (not counted: it fills caches of files, bytecode and kernels)"
                else:
                    starts.append(start)
                print_progress(f"{_name(checkout)}: ready after {start.ready_seconds:.2f} s{note}")
    if not starts:
        return ending.exit_code
    report = StartupReport(settings=settings, starts=starts)
    return conclude(Measured(report, ending.exit_code), settings.json_path, startup_text, report_json)


def startup_text(report: StartupReport) -> str:
    """Return a table with one line per version: medians, and the fastest start.

    Args:
        report: start times of all versions.
    """
    is_cold = report.settings.cold_path is not None
    lines = [
        "| version | ready, s: median | least | CPU s | resident, MiB | proportional | most "
        "| first request, s | second one |" + (" reading, s | ready to reading |" if is_cold else ""),
        "|---|---|---|---|---|---|---|---|---|" + ("---|---|" if is_cold else ""),
    ]
    for checkout in ("", *report.settings.checkouts):
        starts = [start for start in report.starts if start.checkout == checkout]
        if not starts:
            continue
        seconds = [start.ready_seconds for start in starts]
        cells = [
            report.settings.label or _name(checkout) if not checkout else _name(checkout),
            f"{median(seconds):.2f}",
            f"{min(seconds):.2f}",
            _middle([start.cpu_seconds for start in starts], "{:.2f}", 1),
            _middle([start.resident_bytes for start in starts], "{:.0f}", 2**20),
            _middle([start.proportional_bytes for start in starts], "{:.0f}", 2**20),
            _middle([start.resident_bytes_max for start in starts], "{:.0f}", 2**20),
        ]
        requests = [start.request_seconds or (None, None) for start in starts]
        cells += [_middle(place, "{:.2f}", 1) for place in zip(*requests, strict=True)]
        if is_cold:
            reads = [(start.ready_seconds, start.read_seconds) for start in starts if start.read_seconds is not None]
            cells += [
                _middle([read for _ready, read in reads], "{:.2f}", 1),
                _middle([ready / read for ready, read in reads], "{:.2f}", 1),
            ]
        lines.append("| " + " | ".join(cells) + " |")
    flags = " ".join(report.settings.server_flags) or "no flags"
    lines += [
        "",
        f"{report.machine}, {report.date}; serve with {flags}, {report.settings.rounds} rounds in turn.",
    ]
    return "\n".join(lines) + "\n"


def _start(checkout: str, settings: StartupSettings) -> Start:
    """Start a server, measure it, and stop it. Raise CannotMeasure if it does not start."""
    read_seconds = None
    if settings.cold_path is not None:
        _touch_memory(settings.memory_at_hand_gib)
        read_seconds = _read_cold(pathlib.Path(settings.cold_path))
    _touch_memory(settings.memory_at_hand_gib)
    with _environment(checkout) as (folder, environment):
        words = ["serve", *settings.server_flags]
        server = ServerProcess(_name(checkout), words, folder=folder, environment=environment)
        started_at = time.perf_counter()
        with server:
            ready_at = trio.run(server.wait_until_ready, settings.timeout_seconds)
            resident, proportional, most = memory_bytes(server.pid)
            cpu = cpu_seconds(server.pid)
            return Start(
                checkout=checkout,
                ready_seconds=ready_at - started_at,
                cpu_seconds=cpu,
                resident_bytes=resident,
                proportional_bytes=proportional,
                resident_bytes_max=most,
                read_seconds=read_seconds,
                request_seconds=trio.run(_time_requests, server.url, settings.timeout_seconds),
            )


async def _time_requests(url: str, seconds_max: float) -> tuple[float, float] | None:
    target = Target.from_url(url)
    client = http1_client(target)
    seconds: list[float] = []
    with trio.move_on_after(seconds_max):
        listed = await ask(client, target, "/v1/models", seconds_max=seconds_max)
        model = None if isinstance(listed, Failure) else listed.first_model()
        # The second prompt has another letter, so that the prefix cache has no block for it.
        for letter in "ab" if model else "":
            asked = {"model": model, "prompt": letter * PROMPT_CHARACTERS, "max_tokens": 1}
            response, began_at = PlainResponse(), time.perf_counter()
            failure = await client.request("POST", "/v1/completions", msgspec.json.encode(asked), response)
            if failure is None and response.status == 200:
                seconds.append(time.perf_counter() - began_at)
        await client.aclose()
    return (seconds[0], seconds[1]) if len(seconds) == 2 else None


def _touch_memory(gib: float) -> None:
    byte_count = int(gib * 2**30)
    if byte_count:
        # Only private mappings get large pages, which take a tenth of the time.
        with (
            mmap.mmap(-1, byte_count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory,
            contextlib.suppress(OSError),
        ):
            memory.madvise(mmap.MADV_HUGEPAGE)
            memory.madvise(MADV_POPULATE_WRITE)


def _read_cold(path: pathlib.Path) -> float:
    """Return the seconds to read files from the disk with one thread. The files are not in memory before or after."""
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.is_file())
    buffer = bytearray(READ_BYTES)
    for file in files:
        _drop_from_memory(file)
    began_at = time.perf_counter()
    for file in files:
        with file.open("rb", buffering=0) as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while opened.readinto(buffer):
                pass
    seconds = time.perf_counter() - began_at
    for file in files:
        _drop_from_memory(file)
    return seconds


def _drop_from_memory(file: pathlib.Path) -> None:
    with file.open("rb", buffering=0) as opened:
        os.fsync(opened.fileno())  # Pages that are not written to the disk yet would stay in memory.
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def _environment(checkout: str) -> Iterator[tuple[str | None, dict[str, str]]]:
    """Return the folder and the environment in which `python -m trioserve` is a checkout. "" is this version."""
    # The server may write bytecode, even if this process may not. So a second start finds its bytecode.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    if not checkout:
        yield None, environment
        return
    root = pathlib.Path(checkout).resolve()
    with tempfile.TemporaryDirectory() as folder:
        # The folder is named kernels, but its package is imported as trioserve_kernels.
        pathlib.Path(folder, "trioserve_kernels").symlink_to(root / "kernels")
        yield str(root), {**environment, "PYTHONPATH": os.pathsep.join((str(root), folder))}


def _middle(values: Sequence[float | None], form: str, unit: int) -> str:
    known = [value for value in values if value is not None]
    return form.format(median(known) / unit) if known else "-"


def _name(checkout: str) -> str:
    return checkout or "this version"
