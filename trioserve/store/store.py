"""The store for Trio programs. All calls run in the store's own thread, so that no call blocks the event loop."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import trio

from trioserve.contracts.errors import StartupError
from trioserve.store.database import FILE_NAME, StoreDatabase, StoreUsage
from trioserve.store.settings import StoreSettings
from trioserve.store.stored_objects import Change, Order, Quota, StoredObject, is_id
from trioserve.trio_tools.interrupts import uninterrupted, uninterrupted_context
from trioserve.trio_tools.worker_thread import WorkerThread

__all__ = ["LIST_MAX", "BLOB_PIECE_BYTES_MAX", "JobRunner", "Store", "open_store"]

LIST_MAX = 100  # Highest number of objects per page. It is small, because the body of an object may have megabytes.
BLOB_PIECE_BYTES_MAX = 2**20  # Highest number of bytes per read, so that other calls do not wait long.

RETRY_SECONDS_MIN = 0.5
# Longest time between two retries. A retry costs one or two system calls, so short intervals are affordable.
RETRY_SECONDS_MAX = 5.0

logger = logging.getLogger(__name__)

T = TypeVar("T")


class JobRunner(Protocol):
    """Calls functions in order, in the one thread that owns the database."""

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function, and wait for its end even if the caller is cancelled.

        Args:
            arguments: its arguments.
        """

    async def run_cancellable(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function. If the caller is cancelled, it returns at once.

        Args:
            arguments: its arguments.
        """


@uninterrupted
class Store:
    """A store that runs in its own thread. open_store creates it.

    In all methods, `owner` limits the call to objects of this owner. None means objects of any owner. An id that no
    object can have is treated as absent. Methods raise StoreFull if there is no space, and StoreFault if the file
    fails. In both cases nothing was changed.

    While the store is open, a task must run `keep_trying`, which writes the changes that the disk has refused.

    Args:
        runner: calls the database in its thread.
        database: open database. Only the store's thread uses it.
        wall_clock: returns seconds since 1970.
    """

    def __init__(self, runner: JobRunner, database: StoreDatabase, wall_clock: Callable[[], float]) -> None:
        self._runner = runner
        self._database = database
        self._wall_clock = wall_clock
        self._was_in_trouble = False
        self._has_trouble = trio.Event()
        self._note_trouble()

    def now(self) -> float:
        """Return the time of the store's clock in seconds since 1970."""
        return self._wall_clock()

    @property
    def seconds_max(self) -> float:
        """Return the lifetime in seconds of an object that is written without a lifetime."""
        return self._database.seconds_max

    @property
    def bytes_max(self) -> int:
        """Return the limit on the bytes of all objects together."""
        return self._database.bytes_max

    async def write(self, *changes: Change, quotas: Sequence[Quota] = ()) -> bool:
        """Write all changes or none. They are permanent when this method returns, even if the caller was cancelled
        meanwhile.

        Args:
            changes: the changes, in order.
            quotas: limits of the owners, checked in the same transaction.

        Returns:
            False if an object that should be replaced or extended does not exist any more. In that case nothing was
            changed.

        Raises:
            StoreFull, StoreFault, QuotaExceeded: nothing was changed.
        """
        return await self._change(self._database.write, changes, self._wall_clock(), quotas)

    async def settle(self, *changes: Change) -> bool:
        """Write a terminal state or delete objects, even if the disk refuses writes. See StoreDatabase.settle.

        Args:
            changes: the changes, in order.

        Returns:
            As for `write`.

        Raises:
            StoreFull, StoreFault: as for `write`. Only raised if there is no space in memory either.
        """
        return await self._change(self._database.settle, changes, self._wall_clock())

    async def keep_trying(self) -> None:
        """Retry the unwritten changes as long as the disk refuses writes. Runs until it is cancelled."""
        while True:
            await self._has_trouble.wait()
            seconds = RETRY_SECONDS_MIN
            while self.trouble is not None:
                await trio.sleep(seconds)
                seconds = min(RETRY_SECONDS_MAX, 2 * seconds)
                try:
                    await self._runner.run(self._database.retry)
                finally:
                    self._note_trouble()

    @property
    def trouble(self) -> str | None:
        """Return the reason why the disk refused the last write. None if the disk accepted it. Never waits."""
        return self._database.usage().trouble

    async def _change(self, function: Callable[..., bool], changes: tuple[Change, ...], *arguments: Any) -> bool:
        for change in changes:
            assert is_id(change.id), f"{change.id!r} is not a valid id"
        try:
            return await self._runner.run(function, changes, *arguments)
        finally:
            self._note_trouble()

    def _note_trouble(self) -> None:
        """Log one line when the disk starts to refuse writes, and one line when it accepts writes again."""
        usage = self._database.usage()
        if (usage.trouble is not None) is self._was_in_trouble:
            return
        self._was_in_trouble = usage.trouble is not None
        if self._was_in_trouble:
            logger.error("store cannot be written, reads and requests continue error=%s", usage.trouble)
            self._has_trouble.set()
        else:
            logger.warning("store can be written again failures=%d", usage.failure_count)
            self._has_trouble = trio.Event()

    async def get(self, kind: str, object_id: str, *, owner: str | None) -> StoredObject | None:
        if not is_id(object_id):
            return None
        return await self._runner.run_cancellable(self._database.get, kind, object_id, owner, self._wall_clock())

    async def page(
        self, kind: str, *, owner: str | None, after: str | None = None, limit: int = 20, order: Order = "desc"
    ) -> list[StoredObject] | None:
        """Return one page of a list, in order of arrival.

        Args:
            kind: kind of the objects.
            owner: return only objects of this owner. None for objects of all owners.
            after: id of the last object of the previous page. None for the first page.
            limit: highest number of objects to return, 1 to LIST_MAX.
            order: "asc" for oldest first, "desc" for newest first.

        Returns:
            The page. None if there is no object with the id `after`.
        """
        assert 1 <= limit <= LIST_MAX, f"limit is {limit}"
        if after is not None and not is_id(after):
            return None

        def read(now: float) -> list[StoredObject] | None:
            return self._database.page(kind, owner, now, after=after, limit=limit, order=order)

        return await self._runner.run_cancellable(read, self._wall_clock())

    async def read_blob(
        self, kind: str, object_id: str, *, owner: str | None, offset: int = 0, size: int = BLOB_PIECE_BYTES_MAX
    ) -> bytes | None:
        """Read a range of an object's blob.

        Args:
            kind: kind of the object.
            owner: read only an object of this owner. None for an object of any owner.
            offset: index of the first byte.
            size: highest number of bytes to return, 1 to BLOB_PIECE_BYTES_MAX.

        Returns:
            The bytes, or b"" at the end of the blob. None if there is no such object.
        """
        assert 1 <= size <= BLOB_PIECE_BYTES_MAX, f"size is {size}"
        if not is_id(object_id):
            return None

        def read(now: float) -> bytes | None:
            return self._database.read_blob(kind, object_id, owner, now, offset=offset, size=size)

        return await self._runner.run_cancellable(read, self._wall_clock())

    @property
    def is_durable(self) -> bool:
        """Return True if objects survive a restart."""
        return self._database.is_durable

    def usage(self) -> StoreUsage:
        """Return counts of the store. Never waits, even if a write is running in the thread."""
        return self._database.usage()


@uninterrupted_context
async def open_store(
    directory: Path | None = None,
    settings: StoreSettings | None = None,
    *,
    wall_clock: Callable[[], float] = time.time,
) -> AsyncIterator[Store]:
    """Open the store for the duration of the scope.

    Leaving the scope waits until the running call has ended.

    Args:
        directory: directory of the file. It is created if it is absent. None for a store in memory.
        settings: limits of the store. None for the defaults.
        wall_clock: returns seconds since 1970.

    Raises:
        StartupError: the directory cannot be created, or the file cannot be used, see StoreDatabase.
    """

    def open_database() -> StoreDatabase:
        if directory is not None:
            try:
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise StartupError(f"--data-dir {directory} cannot be created: {error}") from None
        path = None if directory is None else directory / FILE_NAME
        return StoreDatabase(path, settings or StoreSettings(), now=wall_clock())

    async with WorkerThread("store") as thread:
        database = await thread.run(open_database)
        try:
            yield Store(thread, database, wall_clock)
        finally:
            lost = await thread.run(database.close)  # This call finishes even if the task is cancelled.
            if lost:
                logger.error("final states lost because the store's disk refused writes until the end count=%d", lost)
