"""Functions that all measurements share: sending requests, generating load, stopping on SIGINT, and printing reports.

Metrics are read in Prometheus' text format 0.0.4. `ServerProcess` is a server of this project that a measurement starts
as a process, with its CPU time and memory.
"""

from __future__ import annotations

import math
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Generic, TypeVar

import msgspec
import trio

from trioserve.bench.client import Client, Failure, FailureKind, Http1Client, OpenStream, stream_opener
from trioserve.bench.load import PlannedRequest, ResponseReader, Tally, excerpt
from trioserve.bench.report import Measurement
from trioserve.bench.settings import Target, TargetSettings
from trioserve.contracts.endpoint import NOT_A_PAGE_HEADER

__all__ = [
    "EXIT_INTERRUPTED",
    "EXIT_REQUESTS_FAILED",
    "EXIT_UNREACHABLE",
    "CannotMeasure",
    "Ending",
    "HistogramDifference",
    "Measured",
    "PlainResponse",
    "Scrape",
    "ServerProcess",
    "ask",
    "cancel_on_signal",
    "common_headers",
    "conclude",
    "cpu_seconds",
    "find_model",
    "http1_client",
    "memory_bytes",
    "parts_so_far",
    "perform",
    "perform_all",
    "print_progress",
    "scrape",
    "start_all",
    "unreachable",
]


_SERIES = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class Scrape:
    """The metrics of one read. Lines that are not metrics are ignored.

    Args:
        text: the text of /metrics.
    """

    def __init__(self, text: str) -> None:
        self._series: dict[str, list[tuple[dict[str, str], float]]] = {}
        for line in text.splitlines():
            found = None if line.startswith("#") else _SERIES.match(line)
            if found is None:
                continue
            try:
                value = float(found[3])
            except ValueError:
                continue
            self._series.setdefault(found[1], []).append((dict(_LABEL.findall(found[2] or "")), value))

    def total(self, name: str, **labels: str) -> float | None:
        """Return the sum of the series with a name and with at least some labels. None: there is no such series.

        Args:
            name: name of the metric.
            **labels: labels that a series must have.
        """
        values = [value for _labels, value in self._matching(name, labels)]
        return sum(values) if values else None

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Return the sums of the series with a name, by the value of one label. Sums that are 0 are left out.

        Args:
            name: name of the metric.
            label: name of the label.
        """
        found: dict[str, float] = {}
        for labels, value in self._matching(name, {}):
            if value:
                key = labels.get(label, "")
                found[key] = found.get(key, 0.0) + value
        return found

    def buckets(self, name: str, **labels: str) -> dict[float, float]:
        """Return the cumulative counts of a histogram by upper bound, in ascending order. Counts of several series are
        added.

        Args:
            name: name of the histogram.
            **labels: labels that a series must have.
        """
        counts: dict[float, float] = {}
        for found, value in self._matching(f"{name}_bucket", labels):
            bound = float(found.get("le", "nan"))
            counts[bound] = counts.get(bound, 0.0) + value
        return dict(sorted(counts.items()))

    def _matching(self, name: str, labels: dict[str, str]) -> Iterator[tuple[dict[str, str], float]]:
        for found, value in self._series.get(name, ()):
            if labels.items() <= found.items():
                yield found, value


class HistogramDifference(msgspec.Struct, frozen=True):
    """The counts of a histogram between two reads.

    Attributes:
        bounds: upper bounds of the buckets in ascending order. The last one is infinite.
        counts: count of each bucket.
    """

    bounds: tuple[float, ...]
    counts: tuple[float, ...]

    @classmethod
    def between(cls, before: dict[float, float], after: dict[float, float]) -> HistogramDifference:
        """Return the difference of two results of Scrape.buckets.

        Args:
            before: the earlier result.
            after: the later result.
        """
        cumulated = [count - before.get(bound, 0.0) for bound, count in after.items()]
        counts = [now - below for now, below in zip(cumulated, [0.0, *cumulated], strict=False)]
        return cls(tuple(after), tuple(counts))

    @property
    def count(self) -> int:
        return round(sum(self.counts))

    def quantile(self, share: float) -> float | None:
        """Return a quantile, interpolated linearly within its bucket. The first bucket begins at 0.

        Args:
            share: 0 to 1.

        Returns:
            None if nothing was counted. The last finite bound if the quantile is above it.
        """
        found = self._bucket(share)
        if found is None:
            return None
        index, rest = found
        low = self.bounds[index - 1] if index else 0.0
        high = self.bounds[index]
        return low if math.isinf(high) else low + (high - low) * rest

    def bound(self, share: float) -> float | None:
        """Return the upper bound of a quantile's bucket. It is exact if each bucket has one whole number.

        Args:
            share: 0 to 1.
        """
        found = self._bucket(share)
        return None if found is None else self.bounds[found[0]]

    def _bucket(self, share: float) -> tuple[int, float] | None:
        """Return the index of the quantile's bucket, and the share of the bucket below the quantile."""
        wanted = share * sum(self.counts)
        below = 0.0
        for index, count in enumerate(self.counts):
            if count > 0 and below + count >= wanted:
                return index, (wanted - below) / count
            below += count
        return None


EXIT_REQUESTS_FAILED = 1
EXIT_UNREACHABLE = 2
EXIT_INTERRUPTED = 130  # exit code that shells use for a program that SIGINT ended

PLAIN_RESPONSE_BYTES_MAX = 1 << 24

Report = TypeVar("Report", bound=msgspec.Struct)
Item = TypeVar("Item")


# --- End of a measurement -----------------------------------------------------------------------------------------


class CannotMeasure(Exception):
    """There is no report. Code in a nursery returns this error, other code raises it.

    Args:
        message: one sentence for the user.
        exit_code: exit code of the program.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.message = message
        self.exit_code = exit_code


class Measured(msgspec.Struct, Generic[Report], frozen=True):
    report: Report
    exit_code: int


class Ending:
    """How a measurement of several parts ends.

    Attributes:
        exit_code: exit code of the program.
    """

    exit_code = 0


@contextmanager
def parts_so_far() -> Iterator[Ending]:
    """End early on SIGINT or CannotMeasure, so that the caller can report the parts that are already measured."""
    ending = Ending()
    try:
        yield ending
    except KeyboardInterrupt:
        ending.exit_code = EXIT_INTERRUPTED
    except CannotMeasure as error:
        ending.exit_code = _refuse(error)


def conclude(
    outcome: Measured[Report] | CannotMeasure,
    json_path: str | None,
    text: Callable[[Report], str],
    json: Callable[[Report], bytes],
) -> int:
    """Print the report, or the reason why there is none, and return the exit code.

    Args:
        outcome: the report and the exit code, or the reason.
        json_path: file for the JSON report. "-": standard output. None: no JSON.
        text: returns a report as text.
        json: returns a report as JSON.
    """
    if isinstance(outcome, CannotMeasure):
        return _refuse(outcome)
    # If the JSON report goes to standard output, the text report goes to standard error.
    print(text(outcome.report), end="", file=sys.stderr if json_path == "-" else sys.stdout)
    if json_path == "-":
        sys.stdout.write(json(outcome.report).decode())
    elif json_path is not None:
        pathlib.Path(json_path).write_bytes(json(outcome.report))
    return outcome.exit_code


def _refuse(error: CannotMeasure) -> int:
    print_progress(f"trioserve bench: {error.message}")
    return error.exit_code


def print_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


async def cancel_on_signal(scope: trio.CancelScope, task_status: trio.TaskStatus[None]) -> None:
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
        async for _ in signals:
            scope.cancel()
            return  # After this return, a second signal ends the program at once.


# --- Requests to a server --------------------------------------------------------------------------------------------


def common_headers(api_key: str | None) -> list[tuple[str, str]]:
    """Return the headers of every request, for both HTTP versions.

    Args:
        api_key: sent as a bearer token. None: no key.
    """
    headers = [("user-agent", "trioserve-bench"), ("content-type", "application/json"), (NOT_A_PAGE_HEADER, "bench")]
    if api_key is not None:
        headers.append(("authorization", f"Bearer {api_key}"))
    return headers


def http1_client(
    target: Target,
    *headers: tuple[str, str],
    api_key: str | None = None,
    open_stream: OpenStream | None = None,
) -> Http1Client:
    """Make a client for one server.

    Args:
        target: the server.
        *headers: headers of every request besides the common ones.
        api_key: sent as a bearer token. None: no key.
        open_stream: opens a connection. None: as the target says.
    """
    opener = open_stream or stream_opener(target, 1)
    return Http1Client(opener, [("host", target.authority), *common_headers(api_key), *headers])


async def ask(
    client: Client, target: Target, path: str, *, seconds_max: float, method: str = "GET", body: bytes = b""
) -> PlainResponse | Failure:
    """Send one request and read its whole response.

    Args:
        client: client of the server.
        target: the server.
        path: path below the target's.
        seconds_max: time in which the response must be complete.
        method: HTTP method.
        body: body of the request.
    """
    response = PlainResponse()
    with trio.move_on_after(seconds_max):
        return await client.request(method, target.path_prefix + path, body, response) or response
    return Failure(FailureKind.TIMEOUT, f"no response to {method} {path} within {seconds_max:g} s")


async def scrape(client: Client, target: Target, *, seconds_max: float) -> Scrape | None:
    """Read the metrics of a server. Return None if it has no metrics or does not respond.

    Args:
        client: client of the server.
        target: the server.
        seconds_max: time in which the response must be complete.
    """
    response = await ask(client, target, "/metrics", seconds_max=seconds_max)
    if isinstance(response, Failure) or response.status != 200:
        return None
    return Scrape(response.text())


async def find_model(client: Client, settings: TargetSettings, *, http: int | None = None) -> str | CannotMeasure:
    """Return the model of the settings, or the first model of the server. The server must respond in both cases.

    Args:
        client: client of the server.
        settings: settings of the measurement.
        http: HTTP version to name if the server cannot be reached. None: the user cannot choose it.
    """
    response = await ask(client, settings.target, "/v1/models", seconds_max=settings.timeout_seconds)
    if isinstance(response, Failure):
        return unreachable(settings, response, http=http)
    model = settings.model or response.first_model()
    return model or CannotMeasure(
        f"{settings.url} lists no model (GET /v1/models: status {response.status}, {response.excerpt()}): "
        "give --model, and --api-key if the server needs one",
        EXIT_REQUESTS_FAILED,
    )


def unreachable(settings: TargetSettings, failure: Failure, *, http: int | None = None) -> CannotMeasure:
    over, is_right = (
        ("", "") if http is None else (f" over HTTP/{'2' if http == 2 else '1.1'}", ", and is --http right")
    )
    return CannotMeasure(
        f"cannot reach {settings.url}{over}: {failure.message}; is the server up{is_right}?", EXIT_UNREACHABLE
    )


class PlainResponse:
    """Listener of a response that is not a stream. It keeps the status and the body."""

    def __init__(self) -> None:
        self.status = 0
        self._body = bytearray()

    def head(self, status: int) -> None:
        self.status = status

    def body(self, data: bytes, now_seconds: float) -> bool:
        self._body += data
        return len(self._body) <= PLAIN_RESPONSE_BYTES_MAX

    def first_model(self) -> str | None:
        """Return the id of the first model if the body is a list of models, otherwise None."""
        try:
            models = msgspec.json.decode(bytes(self._body), type=_ModelList).data if self.status == 200 else []
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return None
        return models[0].id if models else None

    def text(self) -> str:
        return self._body.decode("utf-8", "replace")

    def excerpt(self) -> str:
        return excerpt(bytes(self._body))


class _ModelCard(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: list[_ModelCard]


# --- Load of requests -----------------------------------------------------------------------------------------------


async def perform_all(items: Iterable[Item], perform_one: Callable[[Item], Awaitable[None]], *, in_flight: int) -> None:
    """Perform all items in a closed loop: the next one starts when another one ends.

    Args:
        items: items that are made when they are needed.
        perform_one: performs one item.
        in_flight: number of items at the same time.
    """
    shared = iter(items)

    async def worker() -> None:
        for item in shared:  # The iterator is shared, so each worker takes the next item.
            await perform_one(item)

    async with trio.open_nursery() as nursery:
        for _ in range(in_flight):
            nursery.start_soon(worker)


async def perform(
    client: Client,
    path: str,
    planned: PlannedRequest,
    *,
    started_at: float,
    seconds_max: float,
    tally: Tally,
    measurements: list[Measurement],
) -> Measurement:
    """Send a request, and measure its response.

    Args:
        client: client of the server.
        path: path of the request.
        planned: the request.
        started_at: time at which its measurement starts.
        seconds_max: seconds after `started_at` in which the response must be complete.
        tally: counts the received tokens.
        measurements: receives the result, also if this call is cancelled.
    """
    reader = ResponseReader(planned, started_at=started_at, tally=tally)
    failure: Failure | None = None
    is_over = False
    try:
        with trio.move_on_at(started_at + seconds_max) as scope:
            failure = await client.request("POST", path, planned.body, reader)
        if scope.cancelled_caught:
            failure = Failure(FailureKind.TIMEOUT, f"no whole response within {seconds_max:g} s")
        is_over = True
    finally:
        # An interrupted request is also measured, since the server has produced the tokens that have arrived.
        measurement = reader.measurement(failure, is_over=is_over)
        measurements.append(measurement)
    return measurement


POLL_SECONDS = 0.005  # seconds between two checks of readiness. The measured duration has an error of this size.
STOP_SECONDS_MAX = 15.0


class ServerProcess:
    """One server, which can be killed and started again on the same port. As a context, it starts and terminates.

    Args:
        name: name for messages and for the log file.
        words: words of the command line without the port.
        log_directory: directory for the output. None: a temporary file keeps it.
        folder: folder in which it runs. None: that of this process.
        environment: its environment. None: that of this process.
        program: words before the words of the command line.
        ready_path: path that answers 200 as soon as the server is ready.

    Attributes:
        port: its port at 127.0.0.1.
    """

    def __init__(
        self,
        name: str,
        words: Sequence[str],
        *,
        log_directory: pathlib.Path | None = None,
        folder: str | None = None,
        environment: Mapping[str, str] | None = None,
        program: Sequence[str] = (sys.executable, "-m", "trioserve"),
        ready_path: str = "/ready",
    ) -> None:
        self.name = name
        self.port = _free_port()
        self._words = [*program, *words]
        self._ready_path = ready_path
        self._folder, self._environment = folder, environment
        self._log: IO[bytes]
        if log_directory is None:
            self._log = tempfile.TemporaryFile()  # noqa: SIM115  # close() closes it
        else:
            self._log = (log_directory / f"{name}.log").open("w+b")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        self._process = subprocess.Popen(
            [*self._words, "--port", str(self.port)],
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )

    async def wait_until_ready(self, seconds_max: float) -> float:
        """Return the time of the first 200 of the ready path, by time.perf_counter.

        Args:
            seconds_max: maximum time to wait, in seconds.

        Raises:
            CannotMeasure: the server ended, or was not ready in time.
        """
        target = Target.from_url(self.url)
        client = http1_client(target)
        with trio.move_on_after(seconds_max):
            while self.is_alive:
                # A connection that is opened while the model loads waits in the backlog. It is the first one to be
                # served.
                response = await ask(client, target, self._ready_path, seconds_max=seconds_max)
                if not isinstance(response, Failure) and response.status == 200:
                    ready_at = time.perf_counter()
                    await client.aclose()
                    return ready_at
                await trio.sleep(POLL_SECONDS)
        raise self.not_ready()

    def not_ready(self) -> CannotMeasure:
        """Return the error with the last line of the server's log."""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines() or ["nothing"]
        return CannotMeasure(
            f"{self.name} did not become ready; the last line of its log: {lines[-1]}", EXIT_UNREACHABLE
        )

    def kill(self) -> None:
        """Kill the process with SIGKILL and wait for its end. Then its port is free."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)

    def proceed(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def close(self) -> None:
        self.kill()
        self._log.close()

    def __enter__(self) -> ServerProcess:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            pass  # close() kills the process.
        finally:
            self.close()


async def start_all(processes: Sequence[ServerProcess], *, seconds_max: float) -> None:
    """Start processes at the same time and wait until all are ready.

    Args:
        processes: processes that do not run.
        seconds_max: maximum time to wait, in seconds.

    Raises:
        CannotMeasure: one of them did not become ready.
    """
    for process in processes:
        process.start()
    async with trio.open_nursery() as nursery:
        for process in processes:
            nursery.start_soon(process.wait_until_ready, seconds_max)


def _free_port() -> int:
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


def memory_bytes(pid: int, root: pathlib.Path = pathlib.Path("/")) -> tuple[int | None, int | None, int | None]:
    """Return the resident, the proportional and the highest resident memory in bytes. None: the system does not report
    it.

    Args:
        pid: the process.
        root: root of the file system, for tests.
    """
    status = _kibibytes(root / f"proc/{pid}/status")
    return status.get("VmRSS"), _kibibytes(root / f"proc/{pid}/smaps_rollup").get("Pss"), status.get("VmHWM")


def _kibibytes(path: pathlib.Path) -> dict[str, int]:
    """Read lines such as "VmRSS:   1234 kB", and return bytes by name. Return {} if the file does not exist."""
    try:
        lines = path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return {}
    named = (line.partition(":") for line in lines if line.endswith(" kB"))
    return {name: int(value.split()[0]) * 1024 for name, _colon, value in named}
