"""Responses that go on without their client: each is a scope of its own, a child of the server's nursery.

    queued ──► in_progress ──► completed | incomplete | failed | cancelled

What a response is at this moment stands here as long as it lives, and in the store when it is over: it is written there
first, and taken off here then, so nobody finds it neither here nor there. What the store has of one that was never
finished, when the server is another one, is told as failed.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from trioserve.api.error_responses import Refusal, refusal
from trioserve.api.responses.events import Event, event_bytes
from trioserve.api.responses.plan import PlannedResponse
from trioserve.api.responses.response_object import response_error
from trioserve.api.responses.response_run import Ended, ResponseRun
from trioserve.api.responses.settings import BackgroundSettings
from trioserve.api.responses.stored_responses import KIND, stored_bytes
from trioserve.api.resumption import Resumption
from trioserve.api.streams.event_log import EventLogFull
from trioserve.api.streams.followed_log import FollowedLog
from trioserve.contracts.deadlines import NO_DEADLINES, Deadlines
from trioserve.contracts.errors import (
    InvalidRequest,
    Overloaded,
    RequestFailed,
    StoreFault,
    StoreFull,
    TrioserveError,
    panics_become_failures,
)
from trioserve.contracts.output import Delta
from trioserve.store.store import Store
from trioserve.store.stored_objects import AppendBlob, PutObject, ReplaceObject
from trioserve.trio_tools.errors_unwrapped import errors_unwrapped
from trioserve.trio_tools.interrupts import uninterrupted

if TYPE_CHECKING:
    from trioserve.api.request_context import RequestContext

__all__ = ["BackgroundResponse", "BackgroundResponses"]

logger = logging.getLogger(__name__)

NOT_KEPT = "the response was complete, and the store had no room for it: ask again"
BACKGROUND_FULL = "background_full"
"""The reason of a refusal."""


class BackgroundResponse:
    """One that lives. log: its events, where it was asked for as a stream. done: it is over, and stored."""

    def __init__(self, run: ResponseRun, owner: str | None, log: FollowedLog | None) -> None:
        self.run = run
        self.owner = owner
        self.log = log
        self.scope = trio.CancelScope()
        self.done = trio.Event()
        self.response: dict[str, Any] = run.snapshot()
        self._ended: Ended | None = None

    @property
    def id(self) -> str:
        return self.run.planned.head.id

    def snapshot(self) -> dict[str, Any]:
        return self.response if self._ended is not None else self.run.snapshot()

    async def work(self) -> None:
        """To its end, whichever it is. Raises nothing but Cancelled: of the server's, not its own."""
        with self.scope:
            try:
                with panics_become_failures():
                    async with self.run.turn as turn:
                        await turn.wait_until_begun()
                        self.publish(self.run.events.run())
                        await self.run.read(self._take)
                ended = self.run.complete()
            except EventLogFull:
                ended = self.run.fail(RequestFailed("the events of this response take more room than one may have"))
            except TrioserveError as error:
                ended = self.run.fail(error)
            except Exception as error:
                logger.exception("background response failed response=%s", self.id)
                ended = self.run.fail(error)
            self._ended = ended
        if self._ended is None:
            self._ended = self.run.cancel()
        self.response = self._ended[1]

    def publish(self, events: list[Event]) -> None:
        """Raises EventLogFull."""
        if self.log is not None:
            for event in events:
                self.log.append(event_bytes(event))
            self.log.wake()

    def publish_end(self) -> bytes:
        """The last events; and all of them, as they are kept."""
        assert self._ended is not None
        if self.log is None:
            return b""
        self.log.append_last(map(event_bytes, self._ended[0]))
        return self.log.everything()

    async def _take(self, events: list[Event], _: Delta) -> None:
        self.publish(events)


@uninterrupted
class BackgroundResponses:
    """The ones that live, by id. To be used inside of `async with self.running()`; outside it takes none."""

    def __init__(self, store: Store | None, settings: BackgroundSettings) -> None:
        self._store = store
        self._settings = settings
        self._live: dict[str, BackgroundResponse] = {}
        self._nursery: trio.Nursery | None = None
        self._is_draining = False
        self._idle = trio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Leaving cancels those that still live; in the store they stay as they were."""
        with errors_unwrapped():
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                try:
                    yield
                finally:
                    self._nursery = None
                    nursery.cancel_scope.cancel()

    @property
    def live_count(self) -> int:
        return len(self._live)

    def find(self, response_id: str, owner: str | None) -> BackgroundResponse | None:
        found = self._live.get(response_id)
        return found if found is not None and owner in (None, found.owner) else None

    def drain(self) -> None:
        """Take no new ones. Those that live go on like other requests; but where nobody could read them later, since
        the store is in memory, they are ended."""
        self._is_draining = True
        if self._store is None or not self._store.is_durable:
            for live in list(self._live.values()):
                live.scope.cancel()

    async def wait_until_idle(self) -> None:
        """Returns when none lives. For use after drain()."""
        while self._live:
            self._idle = trio.Event()
            await self._idle.wait()

    async def begin(self, context: RequestContext, planned: PlannedResponse) -> None:
        """Answer the request with a response that has begun in the background. Raises Refusal and Overloaded, and then
        there is none."""
        store = self._checked_store(context.owner)
        body = planned.head.body
        limit = Deadlines(timeout=self._settings.seconds_max)
        deadlines = planned.turn.deadlines.within(NO_DEADLINES, limit)
        planned = msgspec.structs.replace(planned, turn=msgspec.structs.replace(planned.turn, deadlines=deadlines))
        log = None
        if body.stream:
            log = FollowedLog(first=0, bytes_max=self._settings.events_bytes_max, drops_taken=False)
        resumption = None
        if body.return_partial:
            resumption = Resumption(context, None, planned.turn.sampling, is_streamed=False, gives_partial=True)
        live = BackgroundResponse(ResponseRun(context, planned, resumption), context.owner, log)
        try:
            live.publish(live.run.events.queue())
        except EventLogFull:
            raise InvalidRequest(
                f"the events of this response would take more than {self._settings.events_bytes_max} bytes, since each "
                "tells instructions and tools back: shorten them, or send stream=false",
                param="stream",
            ) from None
        self._live[live.id] = live  # its place counts from now on
        try:
            kept = stored_bytes(live.run.stored(live.snapshot()))
            await store.write(PutObject(kind=KIND, id=live.id, owner=live.owner, body=kept, is_evictable=False))
            if self._nursery is None:
                raise _refused("the server is leaving")
        except BaseException:
            self._forget(live)
            raise
        self._nursery.start_soon(self._work, live, store)
        if live.log is None:
            await context.respond_json(live.snapshot())
            return
        await context.start_events()
        await live.log.follow(-1, context.exchange.send, silent_seconds_max=context.rules.keep_alive_seconds)
        await context.finish()

    async def _work(self, live: BackgroundResponse, store: Store) -> None:
        try:
            await live.work()
            events = live.publish_end()
            kept = stored_bytes(live.run.stored(live.response))
            change = ReplaceObject(kind=KIND, id=live.id, body=kept, is_evictable=True)
            more = [AppendBlob(kind=KIND, id=live.id, data=events)] if events else []
            try:
                await store.settle(change, *more)
            except (StoreFull, StoreFault) as error:
                logger.error("background response not kept response=%s error=%s", live.id, error)
                await self._settle_without_result(live, store)
        except Exception:
            # Its own fault, and nobody else's: those beside it go on.
            logger.exception("background response not kept response=%s", live.id)
        finally:
            live.done.set()
            if live.log is not None:
                live.log.is_ended = True
                live.log.wake()
            self._forget(live)

    async def _settle_without_result(self, live: BackgroundResponse, store: Store) -> None:
        """There is no room for the result, on the disk or in memory: the response has failed, and says why."""
        live.response = {
            **live.run.planned.head.object("failed", output=[], error=response_error(NOT_KEPT, "result_not_kept")),
            "usage": live.response["usage"],
        }
        kept = stored_bytes(live.run.stored(live.response))
        try:
            await store.settle(ReplaceObject(kind=KIND, id=live.id, body=kept, is_evictable=True))
        except (StoreFull, StoreFault) as error:
            # A reader that is there gets it. Later the response is shown as one that was never finished, so as failed.
            logger.error("background response has no final state response=%s error=%s", live.id, error)

    def _forget(self, live: BackgroundResponse) -> None:
        self._live.pop(live.id, None)
        if not self._live:
            self._idle.set()

    def _checked_store(self, owner: str | None) -> Store:
        if self._store is None or self._nursery is None or self._is_draining:
            raise _refused(
                "this server takes no background responses" if self._store is None else "the server is leaving"
            )
        settings = self._settings
        own_count = sum(live.owner == owner for live in self._live.values())
        if len(self._live) >= settings.responses_max or own_count >= settings.responses_of_one_max:
            raise Overloaded(
                f"{len(self._live)} responses live in the background, {own_count} of them this caller's; at most "
                f"{settings.responses_max} may, and {settings.responses_of_one_max} of one caller: cancel one, or wait "
                "for its end",
                reason=BACKGROUND_FULL,
                retry_after_seconds=5,
            )
        return self._store


def _refused(why: str) -> Refusal:
    return refusal("no_background", f"{why}: send background=false", param="background")
