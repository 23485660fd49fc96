"""Background responses. They continue without their client, each in its own cancel scope in the server's nursery.

    queued ──► in_progress ──► completed | incomplete | failed | cancelled

While a response runs, its state is in this module's table. When the response ends, it is first stored, and then removed
from the table. So a reader always finds the response in the table or in the store. If a server stops, its unfinished
responses stay in the store, and a later server reports them as failed.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec
import trio

from trioserve.api.error_responses import Refusal, refusal
from trioserve.api.limits import BackgroundSettings
from trioserve.api.responses.events import Ended, event_bytes
from trioserve.api.responses.response_run import PlannedResponse, ResponseRun
from trioserve.api.responses.response_types import ResponseErrorDetail, ResponseEvent, ResponseObject
from trioserve.api.responses.stored_responses import KIND, stored_bytes
from trioserve.api.streams.detached_stream import EventLog, EventLogFull
from trioserve.api.streams.resumption import Resumption
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

NOT_KEPT = "the response was complete, but the store was full: send the request again"
"""Message for a response that could not be stored."""
BACKGROUND_FULL = "background_full"
"""Reason of a refusal."""


class BackgroundResponse:
    """One running background response.

    Args:
        run: The response while it is made.
        owner: Caller that sent the request.
        log: Events of the response, kept for readers. None if the client did not ask for a stream.

    Attributes:
        scope: Cancel scope of the response. Cancelling it ends the response.
        done: Event that is set when the response has ended and is stored.
        response: The response object at the beginning, and after the end.
    """

    def __init__(self, run: ResponseRun, owner: str | None, log: EventLog | None) -> None:
        self.run = run
        self.owner = owner
        self.log = log
        self.scope = trio.CancelScope()
        self.done = trio.Event()
        self.response: ResponseObject = run.snapshot()
        self._ended: Ended | None = None

    @property
    def id(self) -> str:
        return self.run.planned.head.id

    def snapshot(self) -> ResponseObject:
        return self.response if self._ended is not None else self.run.snapshot()

    async def work(self) -> None:
        """Run the response to its end.

        All errors become a failed response. Only a cancellation of the server is raised.
        """
        with self.scope:
            try:
                with panics_become_failures():
                    async with self.run.turn as turn:
                        await turn.wait_until_begun()
                        self.publish(self.run.events.run())
                        await self.run.read(self._take)
                ended = self.run.complete()
            except EventLogFull:
                ended = self.run.fail(RequestFailed("the events of this response exceed their size limit"))
            except TrioserveError as error:
                ended = self.run.fail(error)
            except Exception as error:
                logger.exception("background response failed response=%s", self.id)
                ended = self.run.fail(error)
            self._ended = ended
        if self._ended is None:
            self._ended = self.run.cancel()
        self.response = self._ended[1]

    def publish(self, events: list[ResponseEvent]) -> None:
        """Append events to the log.

        Args:
            events: The new events.

        Raises:
            EventLogFull: The events exceed their size limit.
        """
        if self.log is not None:
            for event in events:
                self.log.append(event_bytes(event))

    def publish_end(self) -> bytes:
        """Append the last events. Return all events as bytes for the store, or b"" if there is no log."""
        assert self._ended is not None
        if self.log is None:
            return b""
        self.log.end(map(event_bytes, self._ended[0]))
        return self.log.everything()

    async def _take(self, events: list[ResponseEvent], _: Delta) -> None:
        self.publish(events)


@uninterrupted
class BackgroundResponses:
    """All running background responses, by id.

    A response can begin only inside of `async with self.running()`.

    Args:
        store: Store for the responses. None: background responses are refused.
        settings: Limits.
    """

    def __init__(self, store: Store | None, settings: BackgroundSettings) -> None:
        self._store = store
        self._settings = settings
        self._live: dict[str, BackgroundResponse] = {}
        self._nursery: trio.Nursery | None = None
        self._is_draining = False
        self._idle = trio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the tasks of the responses. Leaving the context cancels the tasks, and the store keeps their responses as
        unfinished.
        """
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
        """Accept no new responses. Running responses continue if the store is durable.

        If the store is in memory, running responses are cancelled, because no client could read them later.
        """
        self._is_draining = True
        if self._store is None or not self._store.is_durable:
            for live in list(self._live.values()):
                live.scope.cancel()

    async def wait_until_idle(self) -> None:
        """Return when no response runs. Call drain() before."""
        while self._live:
            self._idle = trio.Event()
            await self._idle.wait()

    async def begin(self, context: RequestContext, planned: PlannedResponse) -> None:
        """Begin a background response, and answer the request with it or with its events.

        Args:
            context: The request.
            planned: The response.

        Raises:
            Refusal: Background responses are not possible. Nothing has begun.
            Overloaded: Too many background responses run. Nothing has begun.
            InvalidRequest: The first events are too large. Nothing has begun.
        """
        store = self._checked_store(context.owner)
        body = planned.head.body
        limit = Deadlines(timeout=self._settings.seconds_max)
        deadlines = planned.turn.deadlines.within(NO_DEADLINES, limit)
        planned = msgspec.structs.replace(planned, turn=msgspec.structs.replace(planned.turn, deadlines=deadlines))
        log = None
        if body.stream:
            log = EventLog(first=0, bytes_max=self._settings.events_bytes_max, drops_taken=False)
        resumption = None
        if body.return_partial:
            resumption = Resumption(context, None, planned.turn.sampling, is_streamed=False, gives_partial=True)
        live = BackgroundResponse(ResponseRun(context, planned, resumption), context.owner, log)
        try:
            live.publish(live.run.events.queue())
        except EventLogFull:
            raise InvalidRequest(
                f"the events of this response would take more than {self._settings.events_bytes_max} bytes, because "
                "they repeat instructions and tools: shorten these, or send stream=false",
                param="stream",
            ) from None
        self._live[live.id] = live  # From this line on, the limits count the response.
        try:
            kept = stored_bytes(live.run.stored(live.snapshot()))
            await store.write(PutObject(kind=KIND, id=live.id, owner=live.owner, body=kept, is_evictable=False))
            if self._nursery is None:
                raise _refused("the server is shutting down")
        except BaseException:
            self._forget(live)
            raise
        self._nursery.start_soon(self._work, live, store)
        if live.log is None:
            await context.respond_json(live.snapshot())
            return
        await context.start_events()
        await live.log.follow(-1, context.exchange.send, silent_seconds_max=context.services.rules.keep_alive_seconds)
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
            # The exception is handled here, because it would otherwise cancel the other responses in the nursery.
            logger.exception("background response not kept response=%s", live.id)
        finally:
            live.done.set()
            if live.log is not None:
                live.log.end()
            self._forget(live)

    async def _settle_without_result(self, live: BackgroundResponse, store: Store) -> None:
        """Store the response as failed, without its output, because disk and memory are full."""
        error = ResponseErrorDetail(code="result_not_kept", message=NOT_KEPT)
        live.response = live.run.planned.head.object("failed", output=[], usage=live.response.usage, error=error)
        kept = stored_bytes(live.run.stored(live.response))
        try:
            await store.settle(ReplaceObject(kind=KIND, id=live.id, body=kept, is_evictable=True))
        except (StoreFull, StoreFault) as error:
            # Connected readers get the failed response. The store has the unfinished response, which counts as failed.
            logger.error("end of background response not stored response=%s error=%s", live.id, error)

    def _forget(self, live: BackgroundResponse) -> None:
        self._live.pop(live.id, None)
        if not self._live:
            self._idle.set()

    def _checked_store(self, owner: str | None) -> Store:
        if self._store is None or self._nursery is None or self._is_draining:
            raise _refused(
                "this server has no background responses" if self._store is None else "the server is shutting down"
            )
        settings = self._settings
        own_count = sum(live.owner == owner for live in self._live.values())
        if len(self._live) >= settings.responses_max or own_count >= settings.responses_of_one_max:
            raise Overloaded(
                f"{len(self._live)} background responses run (allowed: {settings.responses_max}), {own_count} of them "
                f"for this caller (allowed: {settings.responses_of_one_max}): cancel one, or wait until one ends",
                reason=BACKGROUND_FULL,
                retry_after_seconds=5,
            )
        return self._store


def _refused(why: str) -> Refusal:
    return refusal("no_background", f"{why}: send background=false", param="background")
