"""Limits the number of KV blocks that an engine uses while it serves, and returns the memory of the others."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import trio

from trioserve.contracts.errors import InvalidRequest
from trioserve.engine.lifecycle.work import CacheRelease

if TYPE_CHECKING:
    from trioserve.core.engine import EngineCore

__all__ = ["KvLimit", "KvRelease"]

PartsOut = TypeVar("PartsOut", covariant=True)


class KvRelease(CacheRelease[PartsOut], Protocol[PartsOut]):
    """Releases the memory of a whole KV cache or of its last blocks."""

    async def limit_blocks(self, count: int) -> None:
        """Return the memory of the KV blocks from `count` on to the operating system, between two steps.

        The system provides it again when such a block is written.

        Args:
            count: number of blocks that keep their memory. The content of the others is lost.
        """
        ...


class KvLimit:
    """The limit of one engine. It stays in force when the engine is reopened or wakes up.

    Args:
        wait_until_open: waits until the engine admits requests. Raises an error if it is closed.
    """

    def __init__(self, wait_until_open: Callable[[], Awaitable[None]]) -> None:
        self._wait_until_open = wait_until_open
        self._limit: int | None = None
        self._turn = trio.Lock()
        self._changed = trio.Event()

    def install(self, core: EngineCore, cache_release: KvRelease[Any] | str) -> None:
        """Use new parts of the engine.

        Args:
            core: the new core.
            cache_release: see `EngineParts`.
        """
        self._core = core
        self._cache_release = cache_release
        core.pool.on_retired = self.note_change
        if self._limit is not None:
            core.limit_blocks(self._limit)
        self.note_change()

    async def set(self, block_count: int) -> None:
        """Use only some of the KV blocks from now on. Return when the memory of the others was released.

        A smaller limit waits for the requests that use other blocks. If the caller is cancelled meanwhile, the former
        limit is restored.

        Args:
            block_count: number of blocks, see `EngineCore.limit_blocks`.

        Raises:
            InvalidRequest: block_count is out of range, or this engine cannot release a part of its KV cache.
            Draining: the engine is closed.
        """
        async with self._turn:
            await self._wait_until_open()
            if isinstance(self._cache_release, str):
                raise InvalidRequest(f"the KV cache keeps its size: {self._cache_release}")
            former, is_free = self._core.pool.limit, False
            self._core.limit_blocks(block_count)
            self._limit = block_count
            try:
                while self._core.pool.retiring_count:
                    self._changed = trio.Event()
                    await self._changed.wait()
                    await self._wait_until_open()
                is_free = True
            finally:
                if not is_free:
                    self._core.limit_blocks(former)
                    self._limit = former
            await self._cache_release.limit_blocks(block_count)

    def note_change(self) -> None:
        """Note that the last block retired, or that the engine is closed."""
        self._changed.set()
