"""All unfinished batches. Each has a cancel scope in the server's nursery, and resumes after a restart.

Requests of a batch have the lowest priority, and use at most half of the engine. Requests of waiting clients run first.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING

import msgspec
import trio

from trioserve.api.batches.batch_book import BatchBook, BatchDeleted
from trioserve.api.batches.batch_record import LIVE_KIND, BatchError, BatchRecord, BatchStatus, batch_kind
from trioserve.api.batches.batch_run import BatchRun
from trioserve.api.batches.input_lines import InternalExchange
from trioserve.api.batches.stored_files import FILE_KIND
from trioserve.api.caller import Caller
from trioserve.api.limits import BatchSettings
from trioserve.contracts.errors import Draining, Overloaded
from trioserve.store.store import LIST_MAX, Store
from trioserve.store.stored_objects import Change, Quota, StoredObject
from trioserve.trio_tools.errors_unwrapped import errors_unwrapped
from trioserve.trio_tools.fair_slots import FairSlots
from trioserve.trio_tools.interrupts import uninterrupted

if TYPE_CHECKING:
    from trioserve.metrics.registry import Metrics

__all__ = ["Batches", "ServeAs"]

logger = logging.getLogger(__name__)

ServeAs = Callable[[InternalExchange, Caller], Awaitable[None]]
"""Function that answers an exchange in a caller's name at the lowest priority."""
BATCHES_FULL = "batches_full"
RETRY_SECONDS = 60.0


@uninterrupted
class Batches:
    """All unfinished batches. A batch can begin only inside of `async with self.running()`.

    Args:
        store: The store. None if the server has none.
        settings: Limits.
        serve_as: Answers an exchange in a caller's name at the lowest priority.
        caller_of: Returns the caller with this owner name, or None if its key no longer exists.
        tenant_header: Name of the header for the tenant.
        seats: Number of sequences that the engine runs at a time. None if it is not known.
        metrics: Metrics of the server.
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
        self._deleting: set[str] = set()  # The ids of the files whose deletion has begun.
        # Batches that the next start of the server resumes. Their input files must be kept.
        self._postponed: dict[str, BatchRecord] = {}
        self._nursery: trio.Nursery | None = None
        self._is_draining = False
        self._idle = trio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Resume the unfinished batches of the store, and run the tasks of batches.

        Leaving the context cancels the tasks. The store keeps unfinished batches for the next start.
        """
        with errors_unwrapped():
            async with trio.open_nursery() as nursery:
                # Keys take turns for both limits. So many batches of one key delay a batch of another key by only one
                # turn. check_room bounds the number of waiting batches.
                self._running = FairSlots(self._settings.running_max, what="batches", waiting_of_one_max=sys.maxsize)
                self._lines_under_way = FairSlots(
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
        """Accept no new batches, and send no further lines to the engine.

        The store keeps the rest for the next start.
        """
        self._is_draining = True
        for run in self._live.values():
            run.drain()

    async def wait_until_idle(self) -> None:
        """Return when no line runs. Call drain() before."""
        while self._live:
            self._idle = trio.Event()
            await self._idle.wait()

    def check_room(self, owner: str | None) -> None:
        """Check that another batch may begin.

        Args:
            owner: Owner of the new batch.

        Raises:
            Draining: The server is shutting down.
            Overloaded: There are too many unfinished batches.
        """
        if self._nursery is None or self._is_draining:
            raise Draining("the server is shutting down", reason="draining", retry_after_seconds=RETRY_SECONDS)
        settings = self._settings
        own_count = sum(run.book.owner == owner for run in self._live.values())
        if len(self._live) >= settings.batches_max or own_count >= settings.batches_of_one_max:
            raise Overloaded(
                f"{len(self._live)} batches are unfinished (allowed: {settings.batches_max}), {own_count} of them of "
                f"this caller (allowed: {settings.batches_of_one_max}): wait until one ends, or cancel one",
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
        """Store a batch and begin it.

        Args:
            owner: Owner of the batch.
            caller: Caller in whose name the lines run.
            record: State of the batch.
            files: Changes to files that are written in the same transaction.
            quotas: Limits for the owner's objects after the write.

        Raises:
            Draining: The server is shutting down. Nothing is written.
            Overloaded: There are too many unfinished batches. Nothing is written.
            StoreFull: The store is full. Nothing is written.
            StoreFault: The disk refused the write. Nothing is written.
            QuotaExceeded: The owner has too many objects. Nothing is written.
            BatchDeleted: The input file was deleted. Nothing is written.
        """
        self.check_room(owner)
        if record.input_file_id in self._deleting:
            raise BatchDeleted
        run = self._new_run(store, batch_id, owner, caller, record)
        self._keep(run)  # From this line on, the limits count the batch, and its input file cannot be deleted.
        try:
            await run.book.create(*files, quotas=quotas)
        except BaseException:
            self._forget(batch_id)
            raise
        if self._nursery is None:  # The server stopped during the write. The next start resumes the batch.
            self._forget(batch_id)
        else:
            self._nursery.start_soon(self._work, run)

    @contextmanager
    def deleting(self, file_id: str) -> Iterator[str | None]:
        """Refuse new batches that use a file while the file is being deleted.

        Yields:
            The id of an unfinished batch that needs the file. Then the file must not be deleted. None if no unfinished
            batch needs the file.
        """
        for batch_id, record in self._unfinished():
            if file_id in (record.input_file_id, record.output_file_id, record.error_file_id):
                yield batch_id
                return
        self._deleting.add(file_id)
        try:
            yield None
        finally:
            self._deleting.discard(file_id)

    def _unfinished(self) -> Iterator[tuple[str, BatchRecord]]:
        """Yield id and state of all unfinished batches, including those that wait for the next start."""
        yield from ((batch_id, run.book.record) for batch_id, run in self._live.items())
        yield from self._postponed.items()

    def files_to_come(self, owner: str | None) -> int:
        """Return the number of output files that this owner's batches will create and have not created yet.

        Args:
            owner: Owner of the batches.
        """
        return sum(
            2
            for run in self._live.values()
            if run.book.owner == owner
            and run.book.file_kind == FILE_KIND
            and run.book.record.status is BatchStatus.VALIDATING
        )

    def input_expires_at(self, file_id: str) -> float | None:
        """Return the original expiry time of a file that batches keep longer, or None if no batch does."""
        times = (
            record.input_expires_at
            for _, record in self._unfinished()
            if record.input_file_id == file_id and record.input_expires_at is not None
        )
        return min(times, default=None)

    async def cancel(self, store: Store, stored: StoredObject) -> None:
        """Cancel a batch. Return when the store has the terminal status.

        The engine frees the blocks of its lines at the latest one step later. A batch that waits for the next start is
        cancelled in the store.

        Args:
            stored: The batch.
        """
        run = self._live.get(stored.id)
        if run is not None:
            run.cancel()
            await run.done.wait()
            return
        record = msgspec.json.decode(stored.body, type=BatchRecord)
        if record.status in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS):
            book = BatchBook(store, stored.id, stored.owner, record)
            with suppress(BatchDeleted):
                await book.move(BatchStatus.CANCELLING)
                await book.close(BatchStatus.CANCELLED)
            self._postponed.pop(stored.id, None)

    async def _work(self, run: BatchRun) -> None:
        try:
            await run.work()
        finally:
            if not run.book.record.is_final:
                self._postponed[run.book.batch_id] = run.book.record
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
                name != batch_id and other.input_file_id == record.input_file_id for name, other in self._unfinished()
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
        """Resume all unfinished batches, oldest first."""
        assert self._nursery is not None
        # All markers are read first, because a batch that ends deletes its marker, and each page begins after the last
        # marker of the previous page.
        marks: list[StoredObject] = []
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
                message = "the API key that created the batch no longer exists"
                with suppress(BatchDeleted):
                    await run.book.fail(BatchError(code="invalid_api_key", message=message))
                continue
            self._keep(run)
            self._nursery.start_soon(self._work, run)
        if self._live:
            logger.info("batches resumed count=%d", len(self._live))
