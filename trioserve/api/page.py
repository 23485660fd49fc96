"""GET /ui/events: streams the state of a server to its live page: a snapshot, then changes at an interval.

Each change is computed after the previous change was sent, relative to the state that the reader has. So a slow reader
gets one change for everything that happened in between, and no changes are buffered for the reader. The CPU time of
events is bounded: the more an event costs, the longer the pause after it.

The files of the page are read when this module is imported, so that no request waits for a disk.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import msgspec
import trio

from trioserve.api.error_responses import refusal
from trioserve.api.form import Query
from trioserve.api.responder import Responder
from trioserve.api.route_table import Operation
from trioserve.api.sse import KEEP_ALIVE, one_line_json
from trioserve.contracts.errors import Draining, Overloaded
from trioserve.contracts.page import HISTORY_POINTS_MAX, HistoryShown, PageSnapshot, RequestShown

__all__ = [
    "ALIVE_SECONDS",
    "EVENTS_PATH",
    "OPERATIONS",
    "PAGE_PATH",
    "ROUTER_PATH",
    "UI_PATH",
    "Feed",
    "Page",
    "PageSettings",
    "change_between",
    "fold",
    "is_of_page",
    "show_file",
    "show_image_page",
    "show_page",
    "snapshot_fields",
]


class PageSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the live page.

    Attributes:
        is_shown: False: there is no page.
        history_seconds: time between two points of the history. 0: no history.
        readers_max: pages that may be open at a time, since each costs events.
        readers_of_one_max: pages of one API key that may be open at a time.
        pauses_per_cost: shortest pause after an event, as a multiple of the CPU time that the event cost. With 200, all
            readers together use at most half a percent of the event loop's time.
    """

    is_shown: bool = True
    history_seconds: float = 5.0
    readers_max: int = 16
    readers_of_one_max: int = 4
    pauses_per_cost: float = 200.0


SAME = re.compile(rb"(.)\1*", re.DOTALL)
DIFFERENT = re.compile(rb"[^\x00]+")
REQUEST_FIELDS = tuple(field.name for field in msgspec.structs.fields(RequestShown))
WHOLE_FIELDS = ("server", "request_count", "stats", "steps", "transfers", "queues", "models")
"""Fields that are sent completely if they change."""

Fields = dict[str, Any]


def snapshot_fields(snapshot: PageSnapshot) -> Fields:
    """Convert a snapshot to values that JSON can express.

    Args:
        snapshot: state of the server.
    """
    history = snapshot.history
    return {
        "now": snapshot.now,
        **{name: getattr(snapshot, name) for name in WHOLE_FIELDS},
        "blocks": None if snapshot.blocks is None else [[count, state] for _, count, state in _runs(snapshot.blocks)],
        "requests": snapshot.requests,
        "history": history
        and {"interval_seconds": history.interval_seconds, "at": history.at, "series": history.series},
        "endpoints": snapshot.endpoints,
    }


def change_between(before: PageSnapshot, after: PageSnapshot) -> Fields | None:
    """Compare two snapshots.

    Args:
        before: earlier state.
        after: later state.

    Returns:
        Changed fields for JSON, or None if only the time differs.
    """
    change: Fields = {
        name: getattr(after, name) for name in WHOLE_FIELDS if getattr(before, name) != getattr(after, name)
    }
    if before.blocks != after.blocks:
        change["blocks"] = _changed_blocks(before.blocks, after.blocks)
    requests = _changed_requests(before.requests, after.requests)
    if requests:
        change["requests"] = requests
    if after.history is not None and after.history is not before.history:
        new = _new_points(before.history, after.history)
        if new is not None:
            change["history"] = new
    if before.endpoints != after.endpoints:
        change["endpoints"] = _changed_endpoints(before.endpoints or {}, after.endpoints or {})
    return {"now": after.now, **change} if change else None


def fold(shown: Fields, change: Fields) -> None:
    """Apply a change to the state of a reader.

    Args:
        shown: state of the reader, decoded from JSON. It is modified.
        change: change, decoded from JSON.
    """
    # The field `server` precedes `blocks`, whose code needs the server's block count.
    for name, value in change.items():
        if name == "blocks":
            shown["blocks"] = value and _folded_blocks(shown["blocks"], value, shown["server"]["block_count"])
        elif name in ("requests", "endpoints"):
            shown[name] = shown[name] or {}
            for key, fields in value.items():
                if fields is None:
                    shown[name].pop(key, None)
                else:
                    shown[name].setdefault(key, {}).update(fields)
        elif name == "history":
            _fold_history(shown["history"], value)
        else:
            shown[name] = value


# --- blocks ---


def _runs(states: bytes, start: int = 0, end: int | None = None) -> list[tuple[int, int, int]]:
    """Return (first, count, state) of each run of equal block states. A regular expression is faster than a loop."""
    found = SAME.finditer(states, start, len(states) if end is None else end)
    return [(run.start(), run.end() - run.start(), states[run.start()]) for run in found]


def _changed_blocks(before: bytes | None, after: bytes | None) -> list[tuple[int, int, int]] | None:
    if after is None or before is None or len(before) != len(after):
        return None if after is None else _runs(after)
    difference = int.from_bytes(before, "big") ^ int.from_bytes(after, "big")
    runs = []
    for changed in DIFFERENT.finditer(difference.to_bytes(len(after), "big")):
        runs += _runs(after, changed.start(), changed.end())
    return runs


def _folded_blocks(shown: list[list[int]] | None, changed: list[list[int]], block_count: int) -> list[list[int]]:
    states = bytearray().join(bytes([state]) * count for count, state in shown or ())
    states = states[:block_count] + bytes(max(0, block_count - len(states)))
    for first, count, state in changed:
        states[first : first + count] = bytes([state]) * count
    return [[count, state] for _, count, state in _runs(bytes(states))]


# --- requests, endpoints and history ---


def _changed_requests(
    before: Mapping[str, RequestShown], after: Mapping[str, RequestShown]
) -> dict[str, Fields | RequestShown | None]:
    changed: dict[str, Fields | RequestShown | None] = dict.fromkeys(before.keys() - after.keys())
    for key, request in after.items():
        known = before.get(key)
        if known is None:
            changed[key] = request
        elif known is not request and known != request:
            changed[key] = {
                name: value for name in REQUEST_FIELDS if (value := getattr(request, name)) != getattr(known, name)
            }
    return changed


def _changed_endpoints(
    before: Mapping[str, Mapping[str, object]], after: Mapping[str, Mapping[str, object]]
) -> dict[str, Fields | None]:
    changed: dict[str, Fields | None] = dict.fromkeys(before.keys() - after.keys())
    for key, endpoint in after.items():
        known = before.get(key, {})
        fields = {name: value for name, value in endpoint.items() if name not in known or known[name] != value}
        if fields:
            changed[key] = fields
    return changed


def _new_points(before: HistoryShown | None, after: HistoryShown) -> Fields | None:
    """Return the points of the history after the reader's last point, or all points if that point is no longer kept."""
    count = after.number - (-1 if before is None else before.number)
    if count <= 0:
        return None
    return {"at": after.at, "points": {name: values[-count:] for name, values in after.series.items()}}


def _fold_history(shown: Fields, new: Fields) -> None:
    shown["at"] = new["at"]
    for name, values in new["points"].items():
        shown["series"][name] = (shown["series"].get(name, []) + values)[-HISTORY_POINTS_MAX:]


EVENTS_PATH = "/ui/events"
INTERVAL_SECONDS = 0.25
INTERVAL_SECONDS_MIN = 0.1
INTERVAL_SECONDS_MAX = 10.0
ALIVE_SECONDS = 15.0  # The stream sends a keep-alive after this silence.
SHARED_SECONDS = 0.02  # Readers that wake within this time get the same snapshot.
RETRY_SECONDS = 10.0


class Feed(Protocol):
    """Source of snapshots: an engine or a router. See trioserve/engine/live_feed.py."""

    @property
    def leaving(self) -> trio.Event: ...
    def watching(self) -> AbstractContextManager[None]: ...
    def snapshot(self, owner: str | None, *, sees_counts: bool = True) -> PageSnapshot: ...
    async def keep_history(self, interval_seconds: float) -> None: ...


class Page:
    """Streams of all readers of one server's live page.

    Args:
        feed: returns the source of snapshots.
        settings: bounds of the page.
        metrics_need_key: True: callers without the admin's key do not see the server's counts.
        cpu_clock: returns this thread's CPU time in seconds, which determines the length of the pauses.
    """

    def __init__(
        self,
        feed: Callable[[], Feed],
        settings: PageSettings | None = None,
        *,
        metrics_need_key: bool = False,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self.settings = settings or PageSettings()
        self._feed = feed
        self._metrics_need_key = metrics_need_key
        self._cpu_clock = cpu_clock
        self._readers: Counter[str | None] = Counter()
        self._snapshots: dict[tuple[str | None, bool], tuple[float, PageSnapshot]] = {}
        self._changes: dict[tuple[int, int], tuple[PageSnapshot, PageSnapshot, bytes | None]] = {}

    @property
    def reader_count(self) -> int:
        return self._readers.total()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Record the history while the context is open."""
        async with trio.open_nursery() as nursery:
            if self.settings.is_shown and self.settings.history_seconds:
                nursery.start_soon(self._feed().keep_history, self.settings.history_seconds)
            yield
            nursery.cancel_scope.cancel()

    async def stream(self, context: Responder) -> None:
        """Stream events until the reader leaves or the server shuts down.

        Args:
            context: the request.

        Raises:
            InvalidRequest: the query has a bad value.
            Draining: the server is shutting down.
            Overloaded: too many readers are open.
        """
        interval = Query(context.exchange.query).seconds(
            "interval", INTERVAL_SECONDS, low=INTERVAL_SECONDS_MIN, high=INTERVAL_SECONDS_MAX
        )
        feed = self._feed()
        if feed.leaving.is_set():
            raise Draining("the server is shutting down", reason="draining", retry_after_seconds=RETRY_SECONDS)
        owner = context.caller.lists
        with self._reading(owner), feed.watching():
            await context.start_events()
            if context.exchange.method != "HEAD":
                await self._send_all(context, feed, owner, interval)
        await context.finish()

    async def _send_all(self, context: Responder, feed: Feed, owner: str | None, interval: float) -> None:
        send = context.exchange.send
        sees_counts = owner is None or not self._metrics_need_key
        began = self._cpu_clock()
        shown = self._snapshot(feed, owner, sees_counts=sees_counts)
        event = _event(b"snapshot", snapshot_fields(shown))
        cost = self._cpu_clock() - began
        await send(event)
        alive_at = trio.current_time() + ALIVE_SECONDS
        is_last = False
        while not is_last:
            is_last = await self._pause(feed, interval, cost * self.settings.pauses_per_cost * self.reader_count)
            if is_last:
                self._snapshots.clear()  # The cached snapshots were made before the shutdown began.
            began = self._cpu_clock()
            before, shown = shown, self._snapshot(feed, owner, sees_counts=sees_counts)
            change = self._change(before, shown)
            cost = self._cpu_clock() - began
            if change is None:
                shown = before  # Only the time has changed.
                if trio.current_time() < alive_at:
                    continue
            await send(change or KEEP_ALIVE)
            alive_at = trio.current_time() + ALIVE_SECONDS

    async def _pause(self, feed: Feed, interval: float, seconds_min: float) -> bool:
        """Wait about one interval. Readers with the same interval wake at the same moments.

        Returns:
            True if the server shuts down.
        """
        earliest = trio.current_time() + max(interval, seconds_min) - interval / 2
        with trio.move_on_at(interval * math.ceil(earliest / interval)):
            await feed.leaving.wait()
            return True
        return False

    def _snapshot(self, feed: Feed, owner: str | None, *, sees_counts: bool) -> PageSnapshot:
        now = trio.current_time()
        kept = self._snapshots.get((owner, sees_counts))
        if kept is not None and now - kept[0] < SHARED_SECONDS:
            return kept[1]
        shown = feed.snapshot(owner, sees_counts=sees_counts)
        self._snapshots[owner, sees_counts] = now, shown
        return shown

    def _change(self, before: PageSnapshot, after: PageSnapshot) -> bytes | None:
        """Return the change between two snapshots as an event. The event is made once for all readers that have the
        same two snapshots.
        """
        key = id(before), id(after)
        kept = self._changes.get(key)
        if kept is not None:
            return kept[2]
        change = change_between(before, after)
        event = None if change is None else _event(b"change", change)
        if len(self._changes) >= self.settings.readers_max:
            self._changes.clear()
        # The entry keeps the snapshots alive, so that Python does not reuse their ids.
        self._changes[key] = before, after, event
        return event

    @contextmanager
    def _reading(self, owner: str | None) -> Iterator[None]:
        readers, settings = self._readers, self.settings
        if readers.total() >= settings.readers_max:
            raise _too_many(f"{settings.readers_max} pages of this server are open, which is the limit: close one")
        if owner is not None and readers[owner] >= settings.readers_of_one_max:
            raise _too_many(
                f"{settings.readers_of_one_max} pages are open with this API key, which is the limit: close one"
            )
        readers[owner] += 1
        try:
            yield
        finally:
            readers[owner] -= 1
            if not readers[owner]:
                del readers[owner]
            if not readers:
                self._snapshots.clear()
                self._changes.clear()


def _too_many(message: str) -> Overloaded:
    return Overloaded(message, reason="too_many_readers", retry_after_seconds=RETRY_SECONDS)


def _event(name: bytes, value: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name, one_line_json(value))


PAGE_PATH = "/"
ROUTER_PATH = "/router"
UI_PATH = "/ui/"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}
PAGE = "page.html"
IMAGE_PAGE = "images.html"
HEADERS = (
    (
        "content-security-policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cache-control", "no-cache"),
)


class _File(msgspec.Struct, frozen=True):
    body: bytes
    media_type: str
    etag: str


def _read_all() -> dict[str, _File]:
    files = {}
    for path in sorted(Path(__file__).with_suffix("").iterdir()):
        media_type = MEDIA_TYPES.get(path.suffix)
        if media_type is not None:
            body = path.read_bytes()
            files[path.name] = _File(body, media_type, f'"{blake2b(body, digest_size=12).hexdigest()}"')
    return files


FILES = _read_all()
"""Files by name."""


def is_of_page(path: str) -> bool:
    """Return True if only the live page uses this path.

    Args:
        path: path of a request.
    """
    return path in (PAGE_PATH, ROUTER_PATH) or path.startswith(UI_PATH)


async def show_page(context: Responder) -> None:
    await _show(context, FILES[PAGE])


async def show_image_page(context: Responder) -> None:
    """Send the page of a server that generates images.

    Args:
        context: the request.
    """
    await _show(context, FILES[IMAGE_PAGE])


async def show_file(context: Responder) -> None:
    """Send a file of the page.

    Args:
        context: the request.

    Raises:
        Refusal: there is no such file (404).
    """
    name = context.exchange.path.removeprefix(UI_PATH)
    file = FILES.get(name)
    if file is None or name in (PAGE, IMAGE_PAGE):
        raise refusal("not_found", f"the page has no file {name!r}")
    await _show(context, file)


async def _show(context: Responder, file: _File) -> None:
    headers = (*HEADERS, ("etag", file.etag))
    asked = context.exchange.headers.get("if-none-match") or ""
    if file.etag in (part.strip().removeprefix("W/") for part in asked.split(",")):
        await context.respond_bytes(b"", file.media_type, status=304, headers=headers)
    else:
        await context.respond_bytes(file.body, file.media_type, headers=headers)


OPERATIONS: tuple[Operation[Responder], ...] = (
    Operation(
        method="GET",
        path=PAGE_PATH,
        handler=show_page,
        summary="Show the live page, unless the server was started with --no-ui",
        needs_key=False,
        response="text/html",
    ),
    Operation(
        method="GET",
        path=UI_PATH + "{file}",
        handler=show_file,
        summary="Read a file of the live page",
        needs_key=False,
        response="*/*",
        errors=(400, 404),
        path_parameter="the file's name",
    ),
)
