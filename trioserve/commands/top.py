"""`trioserve top`: shows the events of the live page in the terminal."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

import msgspec

from trioserve.commands.feed_state import BLOCK_STATES, FeedState
from trioserve.commands.remote import RemoteServer, ServerFailed
from trioserve.contracts.errors import StartupError
from trioserve.contracts.extras import install_command

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["run_top", "states", "view"]

CELLS = 64  # per line of the block map
LINES_MAX = 8
REQUESTS_MAX = 20
BARS = " ▁▂▃▄▅▆▇█"
COLOURS = ("bright_black", "blue", "green", "yellow")


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
    """Yield the state after each event. All items are the same object, which changes.

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
    """Draw one screen.

    Args:
        state: of the server.
        url: of the server, for the first line.
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
    """Draw the block map. A cell shows a group of blocks in the colour of its most common state other than free."""
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
