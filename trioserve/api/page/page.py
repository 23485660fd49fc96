"""GET /ui/events: what a server does, for its live page: a snapshot, then what has changed, as often as is asked for.

A change is made when the one before has been written, against what that reader was sent last. So one that is slow gets
a single change for all that happened meanwhile, and nothing is kept for it. What making events costs has a bound: the
more it costs, the longer the pauses.
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
ALIVE_SECONDS = 15.0  # between two signs of life, if nothing else is to be said
SHARED_SECONDS = 0.02  # one look does for all who ask within so long; they ask at the same moments
RETRY_SECONDS = 10.0


class Feed(Protocol):
    """What there is to be shown: an engine's, or a router's. See engine/live_feed."""

    @property
    def leaving(self) -> trio.Event: ...
    def watching(self) -> AbstractContextManager[None]: ...
    def snapshot(self, owner: str | None, *, sees_counts: bool = True) -> PageSnapshot: ...
    async def keep_history(self, interval_seconds: float) -> None: ...


class Page:
    """The readers of one server. cpu_clock: in seconds, of this thread: by it the pauses grow."""

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
        self._looks: dict[tuple[str | None, bool], tuple[float, PageSnapshot]] = {}
        self._changes: dict[tuple[int, int], tuple[PageSnapshot, PageSnapshot, bytes | None]] = {}

    @property
    def reader_count(self) -> int:
        return self._readers.total()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The history is kept inside."""
        async with trio.open_nursery() as nursery:
            if self.settings.is_shown and self.settings.history_seconds:
                nursery.start_soon(self._feed().keep_history, self.settings.history_seconds)
            yield
            nursery.cancel_scope.cancel()

    async def stream(self, context: Responder) -> None:
        """Until the reader leaves, or the server does. Raises InvalidRequest, Draining, and Overloaded for one reader
        too many."""
        interval = Query(context.exchange.query).seconds(
            "interval", INTERVAL_SECONDS, low=INTERVAL_SECONDS_MIN, high=INTERVAL_SECONDS_MAX
        )
        feed = self._feed()
        if feed.leaving.is_set():
            raise Draining("the server is leaving", reason="draining", retry_after_seconds=RETRY_SECONDS)
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
        shown = self._look(feed, owner, sees_counts=sees_counts)
        event = _event(b"snapshot", snapshot_fields(shown))
        cost = self._cpu_clock() - began
        await send(event)
        alive_at = trio.current_time() + ALIVE_SECONDS
        is_last = False
        while not is_last:
            is_last = await self._pause(feed, interval, cost * self.settings.pauses_per_cost * self.reader_count)
            if is_last:
                self._looks.clear()  # none of them knows that it leaves
            began = self._cpu_clock()
            before, shown = shown, self._look(feed, owner, sees_counts=sees_counts)
            change = self._change(before, shown)
            cost = self._cpu_clock() - began
            if change is None:
                shown = before  # nothing but the time is other
                if trio.current_time() < alive_at:
                    continue
            await send(change or KEEP_ALIVE)
            alive_at = trio.current_time() + ALIVE_SECONDS

    async def _pause(self, feed: Feed, interval: float, seconds_min: float) -> bool:
        """For about an interval: all who have the same one wake at the same moments. Returns whether the server
        leaves."""
        earliest = trio.current_time() + max(interval, seconds_min) - interval / 2
        with trio.move_on_at(interval * math.ceil(earliest / interval)):
            await feed.leaving.wait()
            return True
        return False

    def _look(self, feed: Feed, owner: str | None, *, sees_counts: bool) -> PageSnapshot:
        now = trio.current_time()
        kept = self._looks.get((owner, sees_counts))
        if kept is not None and now - kept[0] < SHARED_SECONDS:
            return kept[1]
        shown = feed.snapshot(owner, sees_counts=sees_counts)
        self._looks[owner, sees_counts] = now, shown
        return shown

    def _change(self, before: PageSnapshot, after: PageSnapshot) -> bytes | None:
        """As an event; made once for all who have seen the same."""
        key = id(before), id(after)
        kept = self._changes.get(key)
        if kept is not None:
            return kept[2]
        change = change_between(before, after)
        event = None if change is None else _event(b"change", change)
        if len(self._changes) >= self.settings.readers_max:
            self._changes.clear()
        self._changes[key] = before, after, event  # as long as they are kept their ids are theirs
        return event

    @contextmanager
    def _reading(self, owner: str | None) -> Iterator[None]:
        readers, settings = self._readers, self.settings
        if readers.total() >= settings.readers_max:
            raise _too_many(f"{settings.readers_max} pages of this server are open already, and no more may be")
        if owner is not None and readers[owner] >= settings.readers_of_one_max:
            raise _too_many(f"{settings.readers_of_one_max} pages are open with this API key, and no more may be")
        readers[owner] += 1
        try:
            yield
        finally:
            readers[owner] -= 1
            if not readers[owner]:
                del readers[owner]
            if not readers:
                self._looks.clear()
                self._changes.clear()


def _too_many(message: str) -> Overloaded:
    return Overloaded(message, reason="too_many_readers", retry_after_seconds=RETRY_SECONDS)


def _event(name: bytes, value: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name, one_line_json(value))
