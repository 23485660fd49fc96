"""The store as a Trio program sees it: every call runs in one thread of its own, and none blocks the event loop."""

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

LIST_MAX = 100  # objects of one page: each may have a body of megabytes
BLOB_PIECE_BYTES_MAX = 2**20  # of one read, so that other calls have their turn

RETRY_SECONDS_MIN = 0.5
RETRY_SECONDS_MAX = 5.0  # a try costs a system call or two, and an owner who made room wants to see it used

logger = logging.getLogger(__name__)

T = TypeVar("T")


class JobRunner(Protocol):
    """Calls functions in the one thread that the database belongs to, in order."""

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Waits for the end of it also when cancelled."""

    async def run_cancellable(self, function: Callable[..., T], *arguments: Any) -> T:
        """A cancelled caller leaves at once."""


@uninterrupted
class Store:
    """Made by open_store. owner, everywhere: only theirs; None: anybody's. An id that none can be is simply not there.

    Raises StoreFull when there is no room (and nothing of the write has happened), StoreFault when the file fails.

    To be used beside a task that runs `keep_trying`: that writes final states for which the disk had no room.
    """

    def __init__(self, runner: JobRunner, database: StoreDatabase, wall_clock: Callable[[], float]) -> None:
        self._runner = runner
        self._database = database
        self._wall_clock = wall_clock
        self._was_in_trouble = False
        self._has_trouble = trio.Event()
        self._note_trouble()

    def now(self) -> float:
        """By the clock that its times go by: seconds since 1970."""
        return self._wall_clock()

    @property
    def seconds_max(self) -> float:
        """The life of what is given no other."""
        return self._database.seconds_max

    @property
    def bytes_max(self) -> int:
        """Of all that it keeps."""
        return self._database.bytes_max

    async def write(self, *changes: Change, quotas: Sequence[Quota] = ()) -> bool:
        """Write all of the changes or none, for good when this returns, also when the caller is cancelled meanwhile.

        Args:
            quotas: what their owners may have afterwards: checked together with the write.

        Returns:
            False if an object to be replaced or appended to is gone. Then nothing has changed.

        Raises:
            StoreFull, StoreFault, QuotaExceeded: nothing has changed.
        """
        return await self._change(self._database.write, changes, self._wall_clock(), quotas)

    async def settle(self, *changes: Change) -> bool:
        """Write a final state, or delete, whatever the disk does. See StoreDatabase.settle.

        Returns:
            As for `write`.

        Raises:
            StoreFull, StoreFault: as for `write`, if there is no room for the changes even in memory.
        """
        return await self._change(self._database.settle, changes, self._wall_clock())

    async def keep_trying(self) -> None:
        """While the disk takes nothing, try again and again. Runs until it is cancelled."""
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
        """Why the disk took nothing at the last write; None: it took all. Never waits."""
        return self._database.usage().trouble

    async def _change(self, function: Callable[..., bool], changes: tuple[Change, ...], *arguments: Any) -> bool:
        for change in changes:
            assert is_id(change.id), f"{change.id!r} is no id"
        try:
            return await self._runner.run(function, changes, *arguments)
        finally:
            self._note_trouble()

    def _note_trouble(self) -> None:
        """One line in the log when the disk stops taking writes, and one when it takes them again."""
        usage = self._database.usage()
        if (usage.trouble is not None) is self._was_in_trouble:
            return
        self._was_in_trouble = usage.trouble is not None
        if self._was_in_trouble:
            logger.error("store cannot be written, reads and requests go on error=%s", usage.trouble)
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
        """At most `limit` (up to LIST_MAX) in the order of their coming, behind the object with the id `after`;
        None if that is not there."""
        assert 1 <= limit <= LIST_MAX, f"limit is {limit}"
        if after is not None and not is_id(after):
            return None

        def read(now: float) -> list[StoredObject] | None:
            return self._database.page(kind, owner, now, after=after, limit=limit, order=order)

        return await self._runner.run_cancellable(read, self._wall_clock())

    async def read_blob(
        self, kind: str, object_id: str, *, owner: str | None, offset: int = 0, size: int = BLOB_PIECE_BYTES_MAX
    ) -> bytes | None:
        """At most `size` bytes of its blob from `offset` on, none at the end; None if there is no such object."""
        assert 1 <= size <= BLOB_PIECE_BYTES_MAX, f"size is {size}"
        if not is_id(object_id):
            return None

        def read(now: float) -> bytes | None:
            return self._database.read_blob(kind, object_id, owner, now, offset=offset, size=size)

        return await self._runner.run_cancellable(read, self._wall_clock())

    @property
    def is_durable(self) -> bool:
        """Whether what it keeps is there after a restart."""
        return self._database.is_durable

    def usage(self) -> StoreUsage:
        """Never waits: a few numbers, as they are while the thread may be writing."""
        return self._database.usage()


@uninterrupted_context
async def open_store(
    directory: Path | None = None,
    settings: StoreSettings | None = None,
    *,
    wall_clock: Callable[[], float] = time.time,
) -> AsyncIterator[Store]:
    """The store in this directory, which is made if it is not there; None: in memory, for as long as this scope.

    Leaving waits for the call at hand. Raises StartupError: see StoreDatabase.
    """

    def open_database() -> StoreDatabase:
        if directory is not None:
            try:
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise StartupError(f"--data-dir {directory} cannot be made: {error}") from None
        path = None if directory is None else directory / FILE_NAME
        return StoreDatabase(path, settings or StoreSettings(), now=wall_clock())

    async with WorkerThread("store") as thread:
        database = await thread.run(open_database)
        try:
            yield Store(thread, database, wall_clock)
        finally:
            lost = await thread.run(database.close)  # ends also when cancelled
            if lost:
                logger.error("final states lost, since the store's disk took nothing to the end count=%d", lost)
