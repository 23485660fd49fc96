"""All batches that have not ended: each is a scope in the server's nursery, and goes on after a restart.

What is asked in a batch has the lowest priority, and never more than half of the engine: whoever waits for a response
goes first.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING

import msgspec
import trio

from trioserve.api.batches.batch_book import BatchBook, BatchGone
from trioserve.api.batches.batch_record import LIVE_KIND, BatchError, BatchRecord, BatchStatus, batch_kind
from trioserve.api.batches.batch_run import BatchRun
from trioserve.api.batches.internal_exchange import InternalExchange
from trioserve.api.batches.settings import BatchSettings
from trioserve.api.caller import Caller
from trioserve.api.files.stored_files import FILE_KIND
from trioserve.contracts.errors import Draining, Overloaded
from trioserve.store.store import LIST_MAX, Store
from trioserve.store.stored_objects import Change, Quota, StoredObject
from trioserve.trio_tools.errors_unwrapped import errors_unwrapped
from trioserve.trio_tools.fair_places import FairPlaces
from trioserve.trio_tools.interrupts import uninterrupted

if TYPE_CHECKING:
    from trioserve.metrics.registry import Metrics

__all__ = ["Batches", "ServeAs"]

logger = logging.getLogger(__name__)

ServeAs = Callable[[InternalExchange, Caller], Awaitable[None]]
BATCHES_FULL = "batches_full"
RETRY_SECONDS = 60.0


@uninterrupted
class Batches:
    """To be used inside of `async with self.running()`; outside it takes none.

    serve_as: answers an exchange in a caller's name, at the lowest priority. caller_of: who has this owner's name;
    None: nobody any more. seats: how many sequences the engine runs at a time.
    """

    def __init__(
        self,
        store: Store | None,
        settings: BatchSettings,
        *,
        serve_as: ServeAs,
        caller_of: Callable[[str | None], Caller | None],
        tenant_header: str,
        seats: int | None,
        metrics: Metrics,
    ) -> None:
        self._store = store
        lines_at_once = settings.lines_at_once if seats is None else min(settings.lines_at_once, max(1, seats // 2))
        self._settings = msgspec.structs.replace(settings, lines_at_once=lines_at_once)
        self._serve_as = serve_as
        self._caller_of = caller_of
        self._tenant_header = tenant_header
        self._metrics = metrics
        self._live: dict[str, BatchRun] = {}
        self._deleting: set[str] = set()  # files that are being deleted
        self._left: dict[str, BatchRecord] = {}  # to the next start, which needs their files
        self._nursery: trio.Nursery | None = None
        self._is_draining = False
        self._idle = trio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Those of the store that have not ended go on. Leaving cancels them; in the store they stay as they are."""
        with errors_unwrapped():
            async with trio.open_nursery() as nursery:
                # Keys take turns for both: many batches of one key delay another key's batch by one turn. How many may
                # wait is bounded where batches are taken: check_room.
                self._running = FairPlaces(self._settings.running_max, what="batches", waiting_of_one_max=sys.maxsize)
                self._lines_under_way = FairPlaces(
                    self._settings.lines_at_once, what="lines of batches", waiting_of_one_max=sys.maxsize
                )
                self._nursery = nursery
                try:
                    if self._store is not None:
                        await self._resume(self._store)
                    yield
                finally:
                    self._nursery = None
                    nursery.cancel_scope.cancel()

    @property
    def live_count(self) -> int:
        return len(self._live)

    def drain(self) -> None:
        """Take no new ones, and ask no new line. What is not done is left in the store to the next start."""
        self._is_draining = True
        for run in self._live.values():
            run.drain()

    async def wait_until_idle(self) -> None:
        """Returns when no line is under way. For use after drain()."""
        while self._live:
            self._idle = trio.Event()
            await self._idle.wait()

    def check_room(self, owner: str | None) -> None:
        """Raises Draining, Overloaded."""
        if self._nursery is None or self._is_draining:
            raise Draining("the server is leaving", reason="draining", retry_after_seconds=RETRY_SECONDS)
        settings = self._settings
        own_count = sum(run.book.owner == owner for run in self._live.values())
        if len(self._live) >= settings.batches_max or own_count >= settings.batches_of_one_max:
            raise Overloaded(
                f"{len(self._live)} batches have not ended, {own_count} of them this caller's; at most "
                f"{settings.batches_max} may be, and {settings.batches_of_one_max} of one caller: wait for the end of "
                "one, or cancel it",
                reason=BATCHES_FULL,
                retry_after_seconds=RETRY_SECONDS,
            )

    async def create(
        self,
        store: Store,
        batch_id: str,
        owner: str | None,
        caller: Caller,
        record: BatchRecord,
        files: Sequence[Change] = (),
        *,
        quotas: Sequence[Quota] = (),
    ) -> None:
        """Returns when the batch is in the store, and has begun.

        Args:
            files: written together with it.
            quotas: what their owner may have afterwards.

        Raises:
            Draining, Overloaded: it takes no place.
            StoreFull, StoreFault, QuotaExceeded: nothing is written.
            BatchGone: a file that was to be replaced is gone.
        """
        self.check_room(owner)
        if record.input_file_id in self._deleting:
            raise BatchGone
        run = self._new_run(store, batch_id, owner, caller, record)
        self._keep(run)  # its place counts from now on, and its input file is in use
        try:
            await run.book.create(*files, quotas=quotas)
        except BaseException:
            self._forget(batch_id)
            raise
        if self._nursery is None:  # the server has left meanwhile; the next start goes on with it
            self._forget(batch_id)
        else:
            self._nursery.start_soon(self._work, run)

    @contextmanager
    def deleting(self, file_id: str) -> Iterator[str | None]:
        """While a file is deleted, no batch may begin to use it.

        Yields:
            The id of a batch that has not ended and needs the file, which must stay then; None: there is none.
        """
        for batch_id, record in self._unended():
            if file_id in (record.input_file_id, record.output_file_id, record.error_file_id):
                yield batch_id
                return
        self._deleting.add(file_id)
        try:
            yield None
        finally:
            self._deleting.discard(file_id)

    def _unended(self) -> Iterator[tuple[str, BatchRecord]]:
        """By their ids, those left to the next start included."""
        yield from ((batch_id, run.book.record) for batch_id, run in self._live.items())
        yield from self._left.items()

    def files_to_come(self, owner: str | None) -> int:
        """Files that batches of this owner may leave and have not made yet."""
        return sum(
            2
            for run in self._live.values()
            if run.book.owner == owner
            and run.book.file_kind == FILE_KIND
            and run.book.record.status is BatchStatus.VALIDATING
        )

    def input_expires_at(self, file_id: str) -> float | None:
        """When the time of a file is over that is kept longer for batches; None: it is kept for none."""
        times = (
            record.input_expires_at
            for _, record in self._unended()
            if record.input_file_id == file_id and record.input_expires_at is not None
        )
        return min(times, default=None)

    async def cancel(self, store: Store, stored: StoredObject) -> None:
        """End it, if it lives: what its lines hold is free at the latest one step later. Returns when that is in the
        store. One that this server has left to the next start will not go on there."""
        run = self._live.get(stored.id)
        if run is not None:
            run.cancel()
            await run.done.wait()
            return
        record = msgspec.json.decode(stored.body, type=BatchRecord)
        if record.status in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS):
            book = BatchBook(store, stored.id, stored.owner, record)
            with suppress(BatchGone):
                await book.move(BatchStatus.CANCELLING)
                await book.close(BatchStatus.CANCELLED)
            self._left.pop(stored.id, None)

    async def _work(self, run: BatchRun) -> None:
        try:
            await run.work()
        finally:
            if not run.book.record.is_final:
                self._left[run.book.batch_id] = run.book.record
            self._forget(run.book.batch_id)

    def _keep(self, run: BatchRun) -> None:
        self._live[run.book.batch_id] = run
        self._metrics.batches_live.set(len(self._live))

    def _forget(self, batch_id: str) -> None:
        self._live.pop(batch_id, None)
        self._metrics.batches_live.set(len(self._live))
        if not self._live:
            self._idle.set()

    def _new_run(self, store: Store, batch_id: str, owner: str | None, caller: Caller, record: BatchRecord) -> BatchRun:
        async def serve(exchange: InternalExchange) -> None:
            await self._serve_as(exchange, caller)

        def is_input_shared() -> bool:
            return any(
                name != batch_id and other.input_file_id == record.input_file_id for name, other in self._unended()
            )

        return BatchRun(
            store,
            BatchBook(store, batch_id, owner, record, is_input_shared=is_input_shared),
            self._settings,
            serve,
            headers=[] if record.tenant is None else [(self._tenant_header, record.tenant)],
            running=self._running,
            lines_under_way=self._lines_under_way,
            count_line=lambda file: self._metrics.batch_lines_total.labels(file).inc(),
        )

    async def _resume(self, store: Store) -> None:
        """All that have not ended, the oldest first."""
        assert self._nursery is not None
        marks: list[StoredObject] = []  # all of them first: what has ended loses its mark, by which pages go on
        while page := await store.page(
            LIVE_KIND, owner=None, after=marks[-1].id if marks else None, limit=LIST_MAX, order="asc"
        ):
            marks += page
        for mark in marks:
            stored = await store.get(batch_kind(mark.id), mark.id, owner=None)
            if stored is None:
                continue
            record = msgspec.json.decode(stored.body, type=BatchRecord)
            caller = self._caller_of(stored.owner)
            run = self._new_run(store, mark.id, stored.owner, caller or Caller(), record)
            if caller is None and record.status in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS):
                message = "the API key that made the batch is none any more"
                with suppress(BatchGone):
                    await run.book.fail(BatchError(code="invalid_api_key", message=message))
                continue
            self._keep(run)
            self._nursery.start_soon(self._work, run)
        if self._live:
            logger.info("batches go on count=%d", len(self._live))
