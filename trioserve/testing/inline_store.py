"""A store without a thread: its calls are made where they are asked for, so that a test's clock does not run on while
one is under way. Its disk can be made full."""

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
        # As with a thread, others have their turn before and after it; and it is waited for also when cancelled.
        await trio.lowlevel.cancel_shielded_checkpoint()
        result = function(*arguments)
        await trio.lowlevel.cancel_shielded_checkpoint()
        return result

    async def run_cancellable(self, function: Callable[..., T], *arguments: Any) -> T:
        await trio.lowlevel.checkpoint()
        return function(*arguments)


class InlineStore(Store):
    """Made by open_inline_store."""

    def set_disk_full(self, is_full: bool) -> None:
        """SQLite itself refuses further pages from now on, with SQLITE_FULL, or takes them again."""
        self._database.set_pages_max(1 if is_full else None)


@contextmanager
def open_inline_store(directory: Path | None = None, settings: StoreSettings | None = None) -> Iterator[InlineStore]:
    """In memory, or in a directory that is there. Its time is that of Trio's clock."""
    path = None if directory is None else directory / FILE_NAME
    database = StoreDatabase(path, settings or StoreSettings(), now=trio.current_time())
    try:
        yield InlineStore(_InlineRunner(), database, trio.current_time)
    finally:
        database.close()
