"""Measures the time from the command to a ready server, the first requests, and the memory of the idle server.

The server is a separate process. The report shows its CPU time beside the elapsed seconds, which other processes of the
machine affect.
"""

from __future__ import annotations

import contextlib
import datetime
import mmap
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median

import msgspec
import trio

from trioserve.bench.client import stream_opener
from trioserve.bench.http1 import Http1Client
from trioserve.bench.report import Machine
from trioserve.bench.run import EXIT_INTERRUPTED, EXIT_UNREACHABLE, PlainResponse, common_headers
from trioserve.bench.settings import Target
from trioserve.bench.startup_settings import StartupSettings

__all__ = [
    "STOP_SECONDS_MAX",
    "Start",
    "StartupReport",
    "cpu_seconds",
    "free_port",
    "main",
    "memory_bytes",
    "startup_json",
    "startup_text",
    "wait_until_ready",
]

POLL_SECONDS = 0.005  # between two checks of readiness, and so the error of a figure
STOP_SECONDS_MAX = 10.0
READY_PATH = "/ready"
READ_BYTES = 8 * 2**20
PROMPT_CHARACTERS = 64
MADV_POPULATE_WRITE = 23  # Linux has it, but Python does not name it.


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one start.

    Attributes:
        checkout: folder of the version, or "" for this version.
        ready_seconds: from the command to the first 200 of /ready.
        cpu_seconds: CPU time of all threads until then. None: the system does not report it.
        resident_bytes: resident memory of the idle server right afterwards, or None.
        proportional_bytes: the same, with shared pages divided among the processes that share them, or None.
        resident_bytes_max: the highest resident memory until then, or None.
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
    date: str
    machine: Machine
    starts: list[Start]


class _NotReady(Exception):
    """The server did not become ready. The message says why."""


def main(settings: StartupSettings) -> int:
    """Measure, print the report, and return the exit code of bench.

    After an interruption, the report of the starts so far is printed.

    Args:
        settings: settings of the measurement.
    """
    starts: list[Start] = []
    exit_code = 0
    try:
        for turn in range(1 + settings.rounds):
            for checkout in ("", *settings.checkouts):
                start = _start(checkout, settings)
                note = ""
                if turn == 0:
                    note = " (not counted: it fills caches of files, bytecode and kernels)"
                else:
                    starts.append(start)
                print(f"{_name(checkout)}: ready after {start.ready_seconds:.2f} s{note}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        exit_code = EXIT_INTERRUPTED
    except _NotReady as error:
        print(f"trioserve bench: {error}", file=sys.stderr)
        exit_code = EXIT_UNREACHABLE
    if not starts:
        return exit_code
    report = StartupReport(
        settings=settings,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        machine=Machine.here(),
        starts=starts,
    )
    print(startup_text(report), end="", file=sys.stderr if settings.json_path == "-" else sys.stdout)
    if settings.json_path == "-":
        sys.stdout.write(startup_json(report).decode())
    elif settings.json_path is not None:
        pathlib.Path(settings.json_path).write_bytes(startup_json(report))
    return exit_code


def startup_text(report: StartupReport) -> str:
    """Return a table with one line per version: medians, and the fastest start.

    Args:
        report: the report.
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
    machine = report.machine
    lines += [
        "",
        f"{machine.cpu}, {machine.cores} cores, Python {machine.python}, {report.date}; serve with {flags}, "
        f"{report.settings.rounds} rounds in turn.",
    ]
    return "\n".join(lines) + "\n"


def startup_json(report: StartupReport) -> bytes:
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"


def memory_bytes(pid: int, root: pathlib.Path = pathlib.Path("/")) -> tuple[int | None, int | None, int | None]:
    """Return the resident, the proportional and the highest resident memory in bytes. None: the system does not report
    it.

    Args:
        pid: the process.
        root: root of the file system, for tests.
    """
    status = _kibibytes(root / f"proc/{pid}/status")
    return status.get("VmRSS"), _kibibytes(root / f"proc/{pid}/smaps_rollup").get("Pss"), status.get("VmHWM")


def _start(checkout: str, settings: StartupSettings) -> Start:
    """Start a server, measure it, and stop it. Raises _NotReady."""
    read_seconds = None
    if settings.cold_path is not None:
        _touch_memory(settings.memory_at_hand_gib)
        read_seconds = _read_cold(pathlib.Path(settings.cold_path))
    _touch_memory(settings.memory_at_hand_gib)
    port = free_port()
    command = [sys.executable, "-m", "trioserve", "serve", "--port", str(port), *settings.server_flags]
    with _environment(checkout) as (folder, environment), tempfile.TemporaryFile() as log:
        started_at = time.perf_counter()
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        try:
            ready_at = trio.run(wait_until_ready, port, lambda: process.poll() is None, settings.timeout_seconds)
            if ready_at is None:
                log.seek(0)
                log_lines = log.read().decode(errors="replace").strip().splitlines() or ["nothing"]
                raise _NotReady(f"{_name(checkout)} did not become ready; the last line of its log: {log_lines[-1]}")
            resident, proportional, most = memory_bytes(process.pid)
            cpu = cpu_seconds(process.pid)
            return Start(
                checkout=checkout,
                ready_seconds=ready_at - started_at,
                cpu_seconds=cpu,
                resident_bytes=resident,
                proportional_bytes=proportional,
                resident_bytes_max=most,
                read_seconds=read_seconds,
                request_seconds=trio.run(_time_requests, port, settings.timeout_seconds),
            )
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


async def _time_requests(port: int, seconds_max: float) -> tuple[float, float] | None:
    target = Target.from_url(f"http://127.0.0.1:{port}")
    headers = [("host", target.authority), ("content-type", "application/json"), *common_headers(None)]
    client = Http1Client(stream_opener(target, 1), headers)
    seconds: list[float] = []
    with trio.move_on_after(seconds_max):
        listed = PlainResponse()
        await client.request("GET", "/v1/models", b"", listed)
        # The second prompt has another letter, so that it finds nothing of the first one in a cache.
        for letter in "ab" if listed.first_model() else "":
            asked = {"model": listed.first_model(), "prompt": letter * PROMPT_CHARACTERS, "max_tokens": 1}
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
        os.fsync(opened.fileno())  # Pages that are not written to the disk would stay in memory.
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


async def wait_until_ready(port: int, is_alive: Callable[[], bool], seconds_max: float) -> float | None:
    """Return the time of the first 200 of /ready, or None if the server ended or the time ran out.

    Args:
        port: port of the server.
        is_alive: returns False if the server has ended.
        seconds_max: maximum time to wait, in seconds.
    """
    target = Target.from_url(f"http://127.0.0.1:{port}")
    client = Http1Client(stream_opener(target, 1), [("host", target.authority), *common_headers(None)])
    with trio.move_on_after(seconds_max):
        while is_alive():
            response = PlainResponse()
            # A connection that is opened while the model loads waits in the backlog, and gets the first response.
            failure = await client.request("GET", READY_PATH, b"", response)
            if failure is None and response.status == 200:
                ready_at = time.perf_counter()
                await client.aclose()
                return ready_at
            await trio.sleep(POLL_SECONDS)
    return None


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
        # The folder has the name kernels, and its package the name trioserve_kernels.
        pathlib.Path(folder, "trioserve_kernels").symlink_to(root / "kernels")
        yield str(root), {**environment, "PYTHONPATH": os.pathsep.join((str(root), folder))}


def free_port() -> int:
    """Return a TCP port on which no process listens at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def cpu_seconds(pid: int) -> float | None:
    """Return the CPU time of all threads of a process, to some hundredths of a second. None: the system does not report
    it.

    Args:
        pid: the process.
    """
    try:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
    except OSError:
        return None
    user, system = fields.split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _kibibytes(path: pathlib.Path) -> dict[str, int]:
    """Read lines such as "VmRSS:   1234 kB", and return bytes by name. Return {} if the file does not exist."""
    try:
        lines = path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return {}
    named = (line.partition(":") for line in lines if line.endswith(" kB"))
    return {name: int(value.split()[0]) * 1024 for name, _colon, value in named}


def _middle(values: Sequence[float | None], form: str, unit: int) -> str:
    known = [value for value in values if value is not None]
    return form.format(median(known) / unit) if known else "-"


def _name(checkout: str) -> str:
    return checkout or "this version"
