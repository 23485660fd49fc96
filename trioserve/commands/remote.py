"""A blocking HTTP client for commands that call a running server: JSON calls and event streams.

The commands `requests`, `abort`, `endpoints` and `drain` are here too. Each sends one call. Ctrl-C ends a call and
closes its connection. The command `top` shows the state of a server, from the same events as the live page.
"""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from http.client import HTTPException, HTTPResponse
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, urlsplit

import msgspec

from trioserve.commands.program_end import EXIT_FAILED
from trioserve.contracts.endpoint import NOT_A_PAGE_HEADER
from trioserve.contracts.errors import StartupError, TrioserveError
from trioserve.contracts.extras import install_command

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = [
    "BLOCK_STATES",
    "DEFAULT_URL",
    "Event",
    "FeedState",
    "RemoteServer",
    "ServerFailed",
    "run_abort",
    "run_drain",
    "run_endpoints",
    "run_requests",
    "run_top",
    "states",
    "view",
]


DEFAULT_URL = "http://127.0.0.1:8000"
CALL_SECONDS_MAX = 30.0
SILENCE_SECONDS_MAX = 120.0  # longest time without bytes on a stream; by default, servers send a comment every 15 s
MESSAGE_CHARACTERS_MAX = 600
LOOPBACK = ("127.", "localhost", "::1")


class ServerFailed(TrioserveError):
    """Error: the server cannot be reached, or refused the call. The message is one sentence that says what to do."""


class Event(NamedTuple):
    name: str
    data: str


class RemoteServer:
    """Client of one running server.

    Args:
        url: address of the server, with or without `http://` and a final `/v1`.
        api_key: API key, which is sent as bearer token. None sends no key.

    Raises:
        ServerFailed: `url` is not a valid http or https URL.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        url = url if "://" in url else f"http://{url}"
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ServerFailed(f"{url!r} is not the URL of a server: use a URL such as {DEFAULT_URL}")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"content-type": "application/json", NOT_A_PAGE_HEADER: "trioserve"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        # Proxies in environment variables are for other machines. A proxy cannot reach a loopback address of this
        # machine.
        proxies = [urllib.request.ProxyHandler({})] if parts.hostname.startswith(LOOPBACK) else []
        self._opener = urllib.request.build_opener(*proxies)

    @classmethod
    def from_arguments(cls, url: str | None, api_key: str | None) -> RemoteServer:
        """Create a client from command line arguments, with environment variables as defaults.

        Args:
            url: URL of the server. None uses TRIOSERVE_URL, or DEFAULT_URL if that variable is not set.
            api_key: one or more keys, separated by commas or spaces. The first key is used. None uses
                TRIOSERVE_API_KEY.

        Raises:
            ServerFailed: the URL is not valid.
        """
        keys = (api_key or os.environ.get("TRIOSERVE_API_KEY", "")).replace(",", " ").split()
        return cls(url or os.environ.get("TRIOSERVE_URL") or DEFAULT_URL, keys[0] if keys else None)

    def call(self, method: str, path: str, body: object = None) -> Any:
        """Send one request and return the decoded JSON of the response.

        Args:
            method: HTTP method.
            path: path and query, from the root of the server.
            body: encoded as JSON. None sends no body.

        Raises:
            ServerFailed: the server cannot be reached, refuses the request, or does not answer with JSON.
        """
        with closing(self._open(method, path, body, CALL_SECONDS_MAX)) as response:
            try:
                return msgspec.json.decode(response.read())
            except (msgspec.DecodeError, OSError, HTTPException) as error:
                raise ServerFailed(
                    f"{self.url}{path} did not answer with JSON ({error}): check that the URL is right"
                ) from None

    def events(self, method: str, path: str, body: object = None) -> Generator[Event, None, None]:
        """Send one request and yield server-sent events until the server ends the response.

        To close the connection earlier, close the iterator.

        Args:
            method: HTTP method.
            path: path and query, from the root of the server.
            body: encoded as JSON. None sends no body.

        Raises:
            ServerFailed: the server cannot be reached, refuses the request, or the connection is lost.
        """
        with closing(self._open(method, path, body, SILENCE_SECONDS_MAX)) as response:
            name, lines = "message", []
            try:
                for raw in response:
                    line = raw.decode(errors="replace").rstrip("\r\n")
                    field, _colon, value = line.partition(":")
                    if field == "event":
                        name = value.strip()
                    elif field == "data":
                        lines.append(value.removeprefix(" "))
                    elif not line and lines:
                        yield Event(name, "\n".join(lines))
                        name, lines = "message", []
            except (OSError, HTTPException) as error:
                raise ServerFailed(f"the connection to {self.url} is lost ({error}): try again") from None

    def _open(self, method: str, path: str, body: object, seconds_max: float) -> HTTPResponse:
        data = None if body is None else msgspec.json.encode(body)
        request = urllib.request.Request(self.url + path, data, self._headers, method=method)
        try:
            response: HTTPResponse = self._opener.open(request, timeout=seconds_max)
        except urllib.error.HTTPError as error:
            with error:
                raise ServerFailed(self._refusal(path, error)) from None
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise ServerFailed(
                f"no server answers at {self.url} ({reason}): start one with `trioserve serve`, or give another URL"
            ) from None
        return response

    def _refusal(self, path: str, error: urllib.error.HTTPError) -> str:
        try:
            refusal = msgspec.json.decode(error.read())["error"]
            message = str(refusal["message"] if isinstance(refusal, dict) else refusal)
        except (msgspec.DecodeError, OSError, HTTPException, KeyError, TypeError):
            message = f"there is no {path}" if error.code == 404 else str(error.reason)
        hint = ": set a key with --api-key or TRIOSERVE_API_KEY" if error.code in (401, 403) else ""
        return f"{self.url} answered {error.code}, {message[:MESSAGE_CHARACTERS_MAX]}{hint}"


REQUEST_COLUMNS = (
    *("id", "state", "age_seconds", "prompt_tokens", "completion_tokens", "tenant"),
    *("pictures", "steps_done", "step_count"),
)
"""Columns of the table. A column without any value is left out."""
ENDPOINT_COLUMNS = ("id", "url", "health", "role", "leases", "leases_max", "in_flight", "moved_from", "moved_to")


def run_requests(server: RemoteServer, *, as_json: bool) -> int:
    """Print the unfinished requests that the caller's API key may see.

    Args:
        server: running server.
        as_json: True prints the JSON of the response instead of a table.
    """
    return _show(server.call("GET", "/v1/requests"), REQUEST_COLUMNS, as_json=as_json, nothing="no unfinished requests")


def run_endpoints(server: RemoteServer, *, as_json: bool) -> int:
    return _show(server.call("GET", "/endpoints"), ENDPOINT_COLUMNS, as_json=as_json, nothing="no endpoints")


def run_abort(server: RemoteServer, ids: Sequence[str], *, as_json: bool) -> int:
    """Abort requests, and print the result for each request.

    Args:
        server: running server.
        ids: ids of the requests.
        as_json: True prints the JSON of the response.

    Returns:
        1 if the server does not know one of the requests, otherwise 0.
    """
    answer = server.call("POST", "/v1/requests/abort", {"ids": list(ids)})
    if as_json:
        print(msgspec.json.encode(answer).decode())
    else:
        for result in answer["data"]:
            print(f"{result['id']}: {result['result']}")
    return EXIT_FAILED if any(result["result"] == "unknown" for result in answer["data"]) else 0


def run_drain(server: RemoteServer, name: str, *, move: bool, as_json: bool) -> int:
    """Drain an endpoint of a router: the router sends it no new requests, and removes it once it is idle.

    Args:
        server: running router.
        name: id of the endpoint.
        move: True moves running requests to other endpoints instead of waiting for their end.
        as_json: True prints the JSON of the response.
    """
    query = "?move=true" if move else ""
    answer = server.call("POST", f"/endpoints/{quote(name, safe='')}/drain{query}", {})
    if as_json:
        print(msgspec.json.encode(answer).decode())
    else:
        print(f"{name} gets no new requests, and is removed once its last request has ended or moved")
    return 0


def _show(answer: Mapping[str, Any], columns: Sequence[str], *, as_json: bool, nothing: str) -> int:
    rows: list[Mapping[str, Any]] = answer["data"]
    if as_json:
        print(msgspec.json.encode(answer).decode())
        return 0
    if not rows:
        print(nothing)
        return 0
    shown = [column for column in columns if any(row.get(column) is not None for row in rows)]
    cells = [shown, *([_cell(row.get(column)) for column in shown] for row in rows)]
    widths = [max(len(line[place]) for line in cells) for place in range(len(shown))]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    return 0


def _cell(value: object) -> str:
    if value is None:
        return "-"
    text = f"{value:.1f}" if isinstance(value, float) else str(value)
    return "".join(character if character.isprintable() else "?" for character in text)


BLOCK_STATES = ("free", "cached", "used", "held", "retired")
RETIRED = 4
POINTS_MAX = 180  # maximum number of points of a series, as in the server: 15 minutes
CELLS = 64  # number of cells in a line of the block map
LINES_MAX = 8
REQUESTS_MAX = 20
BARS = " ▁▂▃▄▅▆▇█"
COLOURS = ("bright_black", "blue", "green", "yellow", "black")


class FeedState:
    """State of a server after the events so far.

    Attributes:
        fields: fields of the snapshot, without blocks, requests, endpoints and history.
        blocks: state of each block, as an index into BLOCK_STATES.
        requests: running requests by id.
        endpoints: endpoints of a router by id.
        series: latest points of each series by name, oldest first.
    """

    def __init__(self) -> None:
        self.fields: dict[str, Any] = {}
        self.blocks: bytearray = bytearray()
        self.requests: dict[str, dict[str, Any]] = {}
        self.endpoints: dict[str, dict[str, Any]] = {}
        self.series: dict[str, list[float | None]] = {}

    def take_snapshot(self, snapshot: Mapping[str, Any]) -> None:
        fields = dict(snapshot)
        self.blocks = bytearray()
        for count, state in fields.pop("blocks", None) or ():
            self.blocks += bytes([state]) * count
        self.requests = {id: dict(request) for id, request in (fields.pop("requests", None) or {}).items()}
        self.endpoints = {id: dict(endpoint) for id, endpoint in (fields.pop("endpoints", None) or {}).items()}
        history = fields.pop("history", None) or {}
        self.series = {name: list(points) for name, points in history.get("series", {}).items()}
        self.fields = fields

    def take_change(self, change: Mapping[str, Any]) -> None:
        for name, value in change.items():
            if name == "blocks":
                for first, count, state in value or ():
                    self.blocks[first : first + count] = bytes([state]) * count
                block_count = (change.get("server") or self.fields.get("server") or {}).get("block_count")
                if block_count is not None:
                    del self.blocks[block_count:]
            elif name == "requests":
                _merge(self.requests, value or {})
            elif name == "endpoints":
                _merge(self.endpoints, value or {})
            elif name == "history":
                for series, new_points in value["points"].items():
                    points = self.series.setdefault(series, [])
                    points.extend(new_points)
                    del points[:-POINTS_MAX]
            else:
                self.fields[name] = value


def _merge(known: dict[str, dict[str, Any]], changes: Mapping[str, Mapping[str, Any] | None]) -> None:
    for id, fields in changes.items():
        if fields is None:
            known.pop(id, None)
        else:
            known.setdefault(id, {}).update(fields)


def run_top(server: RemoteServer, *, interval: float, as_json: bool) -> int:
    """Show the state of a server until Ctrl-C, or until the server ends the event stream.

    Args:
        server: running server or router.
        interval: seconds between two updates.
        as_json: True prints the first snapshot as JSON and returns.

    Returns:
        0.

    Raises:
        StartupError: rich is not installed.
        ServerFailed: the server cannot be reached, or has ended the event stream.
    """
    if as_json:
        with closing(server.events("GET", _path(interval))) as events:
            print(next(events).data)
        return 0
    try:
        from rich.live import Live
    except ImportError:
        raise StartupError(f"`top` draws with rich: {install_command('top')}, or use `top --json`") from None
    with Live(screen=True, auto_refresh=False) as live, closing(states(server, interval)) as seen:
        for state in seen:
            live.update(view(state, server.url), refresh=True)
    raise ServerFailed(f"{server.url} has ended the event stream: the server is stopping")


def states(server: RemoteServer, interval: float) -> Generator[FeedState, None, None]:
    """Yield the state of the server after each event. All items are the same object, which is updated in place.

    Args:
        server: running server or router.
        interval: seconds between two events.
    """
    state = FeedState()
    with closing(server.events("GET", _path(interval))) as events:
        for event in events:
            if event.name == "snapshot":
                state.take_snapshot(msgspec.json.decode(event.data))
            elif event.name == "change":
                state.take_change(msgspec.json.decode(event.data))
            yield state


def view(state: FeedState, url: str) -> RenderableType:
    """Draw the state of a server as one screen.

    Args:
        state: state of the server.
        url: URL of the server, shown in the first line.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    server, stats = state.fields.get("server") or {}, state.fields.get("stats") or {}
    head = Text.assemble(
        (f"{server.get('model') or 'router'} ", "bold"),
        f"{server.get('executor') or ''}  {url}  ",
        f"process {server['process']} (each has its own view)  " if server.get("process") else "",
        ("draining" if server.get("is_draining") else "", "yellow"),
    )
    counts = Text(
        "  ".join(f"{name} {stats[name]}" for name in ("running", "waiting", "preemptions_total") if name in stats)
    )
    parts: list[RenderableType] = [head, counts, _plots(state)]
    if state.blocks:
        parts += [_blocks(state.blocks), _legend(state.blocks)]
    if state.endpoints:
        names = ("endpoint", "health", "leases", "in flight", "moved from", "moved to")
        endpoints = Table(*names, box=None, header_style="bold")
        for id, endpoint in state.endpoints.items():
            leases = f"{endpoint.get('leases', '-')}/{endpoint.get('leases_max', '-')}"
            counts_there = (str(endpoint.get(name, "-")) for name in ("in_flight", "moved_from", "moved_to"))
            endpoints.add_row(Text(id), str(endpoint.get("health", "-")), leases, *counts_there)
        parts.append(endpoints)
    models = state.fields.get("models")
    if models:
        table = Table("model", "state", "waiting", "in use", "memory", "why", box=None, header_style="bold")
        for name, model in models.items():
            memory = f"{model.get('bytes', 0) / 2**30:.1f} GiB"
            counts_of_model = (str(model.get(key, "-")) for key in ("waiting", "leases"))
            progress = model.get("progress")
            state_there = str(model.get("state", "-")) + ("" if progress is None else f" {progress:.0%}")
            reason = Text(str(model.get("failure") or model.get("reason") or "-"))
            table.add_row(Text(name), state_there, *counts_of_model, memory, reason)
        parts.append(table)
    requests = Table("request", "phase", "age", "prompt", "tokens", "tenant", box=None, header_style="bold")
    now = float(state.fields.get("now") or 0.0)
    for id, request in sorted(state.requests.items(), key=lambda entry: -entry[1].get("entered_at", 0.0))[
        :REQUESTS_MAX
    ]:
        requests.add_row(Text(id), _phase(request), *_numbers(request, now), Text(request.get("tenant") or "-"))
    parts.append(requests)
    more = int(state.fields.get("request_count") or 0) - len(state.requests)
    if more > 0:
        parts.append(Text(f"and {more} more", style="bright_black"))
    return Group(*parts)


def _path(interval: float) -> str:
    return f"/ui/events?interval={interval:g}"


def _phase(request: dict[str, Any]) -> str:
    freed = request.get("freed")
    if freed:
        return f"{request.get('outcome')}: {freed['blocks']} blocks free in {1000 * freed['seconds']:.0f} ms"
    return str(
        request.get("outcome") or (request.get("phase") if request.get("state") == "running" else request.get("state"))
    )


def _numbers(request: dict[str, Any], now: float) -> tuple[str, str, str]:
    end = request.get("ended_at") or now
    age = max(0.0, end - request.get("entered_at", end))
    return f"{age:.1f} s", str(request.get("prompt_tokens", "-")), str(request.get("completion_tokens", "-"))


def _plots(state: FeedState) -> RenderableType:
    from rich.text import Text

    lines = []
    for name, title in (("tokens_per_second", "tokens/s"), ("kv_usage", "KV usage"), ("ttft_p95", "TTFT p95 s")):
        points = state.series.get(name, [])[-40:]
        known = [point for point in points if point is not None]
        if known:
            lines.append(f"{title:<11}{_spark(points):<40} {known[-1]:.3g}")
    return Text("\n".join(lines), style="cyan")


def _spark(points: Sequence[float | None]) -> str:
    top = max((point for point in points if point is not None), default=0.0) or 1.0
    return "".join(" " if point is None else BARS[round(8 * max(0.0, point) / top)] for point in points)


def _blocks(blocks: bytearray) -> RenderableType:
    """Draw the block map. Each cell shows a group of blocks in the colour of their most common state except "free"."""
    from rich.text import Text

    share = max(1, -(-len(blocks) // (CELLS * LINES_MAX)))
    text = Text()
    for place, start in enumerate(range(0, len(blocks), share)):
        if place and place % CELLS == 0:
            text.append("\n")
        part = blocks[start : start + share]
        counts = [(part.count(state) if state else 0.5, state) for state in range(RETIRED)]
        state = RETIRED if part.count(RETIRED) == len(part) else max(counts)[1]
        text.append("■" if state else "·", style=COLOURS[state])
    return text


def _legend(blocks: bytearray) -> RenderableType:
    from rich.text import Text

    text = Text()
    for state, name in enumerate(BLOCK_STATES):
        if state == RETIRED and RETIRED not in blocks:
            continue
        text.append(f"{blocks.count(state)} {name}  ", style=COLOURS[state])
    return text
