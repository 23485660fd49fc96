"""From the command to a ready server, and what the idle server's memory is: a process of its own, seen from outside.

The processor time is shown beside the seconds, since others on the machine take part in these.
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

LOOKS_SECONDS = 0.005  # between two questions whether it is ready; as much may be missing in a figure
STOP_SECONDS_MAX = 10.0
READY_PATH = "/ready"
READ_BYTES = 8 * 2**20
PROMPT_CHARACTERS = 64
MADV_POPULATE_WRITE = 23  # of Linux; Python does not name it


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """One start. checkout: which version, "" for this one. ready_seconds: from the command to the first 200 of
    /ready. cpu_seconds: of all of its threads until then. Bytes are of the idle server right afterwards: what is
    resident, the same with shared pages divided among those who share them, and the most it ever was; None where the
    system does not tell. read_seconds: to read the model's files from the disk, alone and just before; None where they
    are not read cold. request_seconds: of the first request and of a second one like it, one token each behind
    PROMPT_CHARACTERS; None if that is not answered.
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
    """Why a server is not there, in a sentence."""


def main(settings: StartupSettings) -> int:
    """Measure, print, and return the exit code as bench does. What was measured before an interruption is printed."""
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
    """One line a version: medians, and the quickest start."""
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
    """Resident, proportional, and the most that was resident; None for what the system does not tell."""
    status = _kibibytes(root / f"proc/{pid}/status")
    return status.get("VmRSS"), _kibibytes(root / f"proc/{pid}/smaps_rollup").get("Pss"), status.get("VmHWM")


def _start(checkout: str, settings: StartupSettings) -> Start:
    """Raises _NotReady."""
    read_seconds = None
    if settings.cold_path is not None:
        _have_memory_at_hand(settings.memory_at_hand_gib)
        read_seconds = _read_cold(pathlib.Path(settings.cold_path))
    _have_memory_at_hand(settings.memory_at_hand_gib)
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
                said = log.read().decode(errors="replace").strip().splitlines() or ["nothing"]
                raise _NotReady(f"{_name(checkout)} did not become ready; its last words: {said[-1]}")
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
        # Other letters: the second one finds nothing that the first one left.
        for letter in "ab" if listed.first_model() else "":
            asked = {"model": listed.first_model(), "prompt": letter * PROMPT_CHARACTERS, "max_tokens": 1}
            response, began_at = PlainResponse(), time.perf_counter()
            failure = await client.request("POST", "/v1/completions", msgspec.json.encode(asked), response)
            if failure is None and response.status == 200:
                seconds.append(time.perf_counter() - began_at)
        await client.aclose()
    return (seconds[0], seconds[1]) if len(seconds) == 2 else None


def _have_memory_at_hand(gib: float) -> None:
    byte_count = int(gib * 2**30)
    if byte_count:
        # Private: only that comes in large pages, with which it takes a tenth of the time.
        with (
            mmap.mmap(-1, byte_count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory,
            contextlib.suppress(OSError),
        ):
            memory.madvise(mmap.MADV_HUGEPAGE)
            memory.madvise(MADV_POPULATE_WRITE)


def _read_cold(path: pathlib.Path) -> float:
    """Seconds to read the files from the disk, one behind the other, as fast as one thread does. Afterwards they are
    not in memory any more."""
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
        os.fsync(opened.fileno())  # what is not written yet stays
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


async def wait_until_ready(port: int, is_alive: Callable[[], bool], seconds_max: float) -> float | None:
    """The moment of the first 200 of /ready; None if the server has ended, or the time has."""
    target = Target.from_url(f"http://127.0.0.1:{port}")
    client = Http1Client(stream_opener(target, 1), [("host", target.authority), *common_headers(None)])
    with trio.move_on_after(seconds_max):
        while is_alive():
            response = PlainResponse()
            # Who connects while the model is loaded waits in the backlog: the response is then the first one given.
            failure = await client.request("GET", READY_PATH, b"", response)
            if failure is None and response.status == 200:
                ready_at = time.perf_counter()
                await client.aclose()
                return ready_at
            await trio.sleep(LOOKS_SECONDS)
    return None


@contextlib.contextmanager
def _environment(checkout: str) -> Iterator[tuple[str | None, dict[str, str]]]:
    """The folder and the environment in which `python -m trioserve` is that checkout; "" is this very one."""
    # A server that is started twice has its bytecode, wherever this process may write none.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    if not checkout:
        yield None, environment
        return
    root = pathlib.Path(checkout).resolve()
    with tempfile.TemporaryDirectory() as folder:
        # The folder is called kernels, and the package trioserve_kernels.
        pathlib.Path(folder, "trioserve_kernels").symlink_to(root / "kernels")
        yield str(root), {**environment, "PYTHONPATH": os.pathsep.join((str(root), folder))}


def free_port() -> int:
    """One that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def cpu_seconds(pid: int) -> float | None:
    """What all threads of a process have computed, to some hundredths of a second; None if the system does not tell."""
    try:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
    except OSError:
        return None
    user, system = fields.split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _kibibytes(path: pathlib.Path) -> dict[str, int]:
    """Lines like "VmRSS:   1234 kB", in bytes; nothing where there is no such file."""
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
