"""GET /ui/events: streams the state of a server to its live page: a snapshot, then changes at an interval.

Each change is computed after the previous change was sent, relative to the state that the reader has. So a slow reader
gets one change for everything that happened in between, and no changes are buffered for the reader. The CPU time of
events is bounded: the more an event costs, the longer the pause after it.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from typing import Any, Protocol

import trio

from trioserve.api.page.changes import change_between, snapshot_fields
from trioserve.api.page.settings import PageSettings
from trioserve.api.query import Query
from trioserve.api.responder import Responder
from trioserve.api.sse import KEEP_ALIVE, one_line_json
from trioserve.contracts.errors import Draining, Overloaded
from trioserve.contracts.page import PageSnapshot

__all__ = ["ALIVE_SECONDS", "EVENTS_PATH", "Feed", "Page"]

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
