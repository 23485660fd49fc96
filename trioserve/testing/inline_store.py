"""A store without a thread. Calls run in the event loop, so that a test's clock cannot advance during a call. A test
can make its disk full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import trio

from trioserve.store.database import FILE_NAME, StoreDatabase
from trioserve.store.settings import StoreSettings
from trioserve.store.store import Store

__all__ = ["InlineStore", "open_inline_store"]

T = TypeVar("T")


class _InlineRunner:
    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        # As with a thread: other tasks have a turn before and after the call, and cancellation does not interrupt the
        # call.
        await trio.lowlevel.cancel_shielded_checkpoint()
        result = function(*arguments)
        await trio.lowlevel.cancel_shielded_checkpoint()
        return result

    async def run_cancellable(self, function: Callable[..., T], *arguments: Any) -> T:
        await trio.lowlevel.checkpoint()
        return function(*arguments)


class InlineStore(Store):
    """A store in the event loop. `open_inline_store` makes it."""

    def set_disk_full(self, is_full: bool) -> None:
        """Make SQLite refuse new pages with SQLITE_FULL, or accept them again.

        Args:
            is_full: True: the disk is full from now on.
        """
        self._database.set_pages_max(1 if is_full else None)


@contextmanager
def open_inline_store(directory: Path | None = None, settings: StoreSettings | None = None) -> Iterator[InlineStore]:
    """Open a store whose time is the clock of the Trio program.

    Args:
        directory: existing folder for the database file. None: the database is in memory.
        settings: limits of the store.
    """
    path = None if directory is None else directory / FILE_NAME
    database = StoreDatabase(path, settings or StoreSettings(), now=trio.current_time())
    try:
        yield InlineStore(_InlineRunner(), database, trio.current_time)
    finally:
        database.close()
