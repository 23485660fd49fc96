"""`trioserve top`: shows the state of a server in the terminal. It uses the same events as the live page."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

import msgspec

from trioserve.commands.remote import RemoteServer, ServerFailed
from trioserve.contracts.errors import StartupError
from trioserve.contracts.extras import install_command

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["BLOCK_STATES", "FeedState", "run_top", "states", "view"]

BLOCK_STATES = ("free", "cached", "used", "held")
POINTS_MAX = 180  # maximum number of points of a series, as in the server: 15 minutes
CELLS = 64  # number of cells in a line of the block map
LINES_MAX = 8
REQUESTS_MAX = 20
BARS = " ▁▂▃▄▅▆▇█"
COLOURS = ("bright_black", "blue", "green", "yellow")


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
        state = max(range(len(BLOCK_STATES)), key=lambda state: (part.count(state) if state else 0.5, state))
        text.append("■" if state else "·", style=COLOURS[state])
    return text


def _legend(blocks: bytearray) -> RenderableType:
    from rich.text import Text

    text = Text()
    for state, name in enumerate(BLOCK_STATES):
        text.append(f"{blocks.count(state)} {name}  ", style=COLOURS[state])
    return text
