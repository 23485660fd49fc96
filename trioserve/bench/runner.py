"""Tools of all measurements: questions to a server, a load of requests, early ends, and the output of the report."""

from __future__ import annotations

import pathlib
import signal
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import msgspec
import trio

from trioserve.bench.client import Client, Failure, FailureKind, Http1Client, OpenStream, stream_opener
from trioserve.bench.load import PlannedRequest, ResponseReader, Tally, excerpt
from trioserve.bench.report import Measurement
from trioserve.bench.scrape import Scrape
from trioserve.bench.settings import Target, TargetSettings
from trioserve.contracts.endpoint import NOT_A_PAGE_HEADER

__all__ = [
    "EXIT_INTERRUPTED",
    "EXIT_REQUESTS_FAILED",
    "EXIT_UNREACHABLE",
    "CannotMeasure",
    "Ending",
    "Measured",
    "PlainResponse",
    "ask",
    "cancel_on_signal",
    "common_headers",
    "conclude",
    "find_model",
    "http1_client",
    "parts_so_far",
    "perform",
    "perform_all",
    "print_progress",
    "scrape",
    "unreachable",
]

EXIT_REQUESTS_FAILED = 1
EXIT_UNREACHABLE = 2
EXIT_INTERRUPTED = 130  # exit code that shells show for SIGINT

PLAIN_RESPONSE_BYTES_MAX = 1 << 24

Report = TypeVar("Report", bound=msgspec.Struct)
Item = TypeVar("Item")


# --- the end of a measurement -----------------------------------------------------------------------------------------


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
    """End early on SIGINT or CannotMeasure, so that the caller reports the parts that were measured until then."""
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
    # The JSON report has standard output for itself if it was requested there.
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
            return  # A second signal ends the program in the usual way.


# --- questions to a server --------------------------------------------------------------------------------------------


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
        f"{settings.url} names no model (GET /v1/models: status {response.status}, {response.excerpt()}): "
        "give --model, and --api-key if the server wants one",
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


# --- a load of requests -----------------------------------------------------------------------------------------------


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
        # Also after an interruption, since the server has produced the tokens that came until then.
        measurement = reader.measurement(failure, is_over=is_over)
        measurements.append(measurement)
    return measurement
