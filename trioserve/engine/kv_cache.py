"""The KV cache of an engine as routers and operators see it: its changes, and the limit of its size.

`KvEvents` is a numbered record of the changes in the prefix cache. Subscribers read it at their own pace, and the
engine never waits. A ring buffer keeps the last changes. A new subscriber gets a snapshot of all resident blocks, and
then the changes after it. A subscriber that is too far behind also gets a snapshot.

`KvLimit` limits the number of KV blocks that an engine uses while it serves, and returns the memory of the others.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import trio

from trioserve.contracts.endpoint import BlocksRemoved, BlocksStored, KvEvent, ResidencySnapshot
from trioserve.contracts.errors import InvalidRequest, Overloaded
from trioserve.contracts.ids import HASH_SCHEME, BlockHash
from trioserve.core.prefix_cache import PrefixCache
from trioserve.engine.lifecycle.work import CacheRelease

__all__ = ["EVENTS_MAX", "KvEvents", "KvLimit", "KvReader", "KvRelease"]

# The buffer needs at most about 10 MB. A subscriber may miss this many changes before it needs a snapshot.
EVENTS_MAX = 65_536
EVENT_HASHES_MAX = 512  # One event has at most 14 KB of JSON, far less than the buffer of a slow client.
# Each router has one subscriber. Each subscriber may need memory for a list of all blocks during its snapshot.
READERS_MAX = 16
RETRY_SECONDS = 30.0


class KvEvents:
    """Records the changes of a prefix cache. Call every method in the thread of the engine's Trio program.

    Args:
        cache: the prefix cache.
        model: name of the model.
        block_size: tokens per block.
        window_tokens: attention window of the model, in tokens. None: no window.
        events_max: number of latest changes that are kept.

    Attributes:
        epoch: random name of this record. Sequence numbers are only valid together with this name.
        next_sequence: number of the next change.
        is_over: True if the engine ended, so no more changes will come.
    """

    def __init__(
        self,
        cache: PrefixCache,
        *,
        model: str,
        block_size: int,
        window_tokens: int | None = None,
        events_max: int = EVENTS_MAX,
    ) -> None:
        self.epoch = secrets.token_hex(8)
        self.model = model
        self.block_size = block_size
        self.window_tokens = window_tokens
        self.next_sequence = 0
        self.is_over = False
        self._cache = cache
        self._events_max = events_max
        # A full buffer has change n at index n modulo its length.
        self._ring: list[tuple[BlockHash, bool]] = []
        self._reader_count = 0
        self._waiting = trio.lowlevel.ParkingLot()
        cache.on_residency = self._note

    @contextmanager
    def reading(self) -> Iterator[KvReader]:
        """Count a subscriber while the context is entered. Raises Overloaded if there are too many subscribers."""
        if self._reader_count >= READERS_MAX:
            raise Overloaded(
                f"{READERS_MAX} clients read the cache events of this engine already, and no more are allowed",
                reason="too_many_readers",
                retry_after_seconds=RETRY_SECONDS,
            )
        self._reader_count += 1
        try:
            yield KvReader(self)
        finally:
            self._reader_count -= 1

    def end(self) -> None:
        """Wake the subscribers for the last time, because the engine has ended."""
        self.is_over = True
        self._waiting.unpark_all()

    @property
    def first_sequence(self) -> int:
        """Number of the oldest change that the record still has."""
        return self.next_sequence - len(self._ring)

    def run_from(self, sequence: int) -> tuple[bool, list[BlockHash]]:
        """Return consecutive changes that all store blocks, or all remove blocks.

        Args:
            sequence: number of the first change. The buffer must still have this change.

        Returns:
            True if blocks were stored, False if blocks were removed. The second value has the names of at most
            EVENT_HASHES_MAX blocks.
        """
        assert self.first_sequence <= sequence < self.next_sequence
        is_stored = self._change(sequence)[1]
        hashes = []
        for number in range(sequence, min(sequence + EVENT_HASHES_MAX, self.next_sequence)):
            block_hash, is_same = self._change(number)
            if is_same is not is_stored:
                break
            hashes.append(block_hash)
        return is_stored, hashes

    def resident_hashes(self) -> list[BlockHash]:
        return self._cache.resident_hashes()

    async def wait_beyond(self, sequence: int) -> None:
        """Wait until the change with this number exists, or until no more changes will come.

        Args:
            sequence: number of the change.
        """
        while self.next_sequence <= sequence and not self.is_over:
            await self._waiting.park()

    def _change(self, sequence: int) -> tuple[BlockHash, bool]:
        return self._ring[sequence % self._events_max]

    def _note(self, block_hash: BlockHash, is_resident: bool) -> None:
        if len(self._ring) < self._events_max:
            self._ring.append((block_hash, is_resident))
        else:
            self._ring[self.next_sequence % self._events_max] = (block_hash, is_resident)
        self.next_sequence += 1
        if self._waiting:
            self._waiting.unpark_all()


class KvReader:
    """The position of one subscriber in the record of changes.

    Args:
        events: the record of changes.
    """

    def __init__(self, events: KvEvents) -> None:
        self._events = events
        self._sequence: int | None = None  # Number of the next change. None: the subscriber gets a snapshot first.
        self._unsent: list[BlockHash] = []  # The rest of the snapshot, in reverse order.
        self._snapshot_is_open = False

    def next_nowait(self) -> KvEvent | None:
        """Return the next event, or None if no event has happened yet."""
        events = self._events
        if self._snapshot_is_open:
            return self._snapshot_part()
        if self._sequence is None or self._sequence < events.first_sequence:
            self._sequence = events.next_sequence
            self._unsent = events.resident_hashes()
            self._snapshot_is_open = True
            return self._snapshot_part()
        if self._sequence == events.next_sequence:
            return None
        is_stored, hashes = events.run_from(self._sequence)
        kind = BlocksStored if is_stored else BlocksRemoved
        event = kind(sequence=self._sequence, hashes=hashes)
        self._sequence += len(hashes)
        return event

    async def next(self) -> KvEvent | None:
        """Wait for the next event and return it. Return None when the engine ends."""
        while not self._events.is_over:
            event = self.next_nowait()
            if event is not None:
                return event
            assert self._sequence is not None
            await self._events.wait_beyond(self._sequence)
        return None

    def _snapshot_part(self) -> ResidencySnapshot:
        events = self._events
        assert self._sequence is not None
        part = self._unsent[-EVENT_HASHES_MAX:]
        del self._unsent[-EVENT_HASHES_MAX:]
        self._snapshot_is_open = bool(self._unsent)
        return ResidencySnapshot(
            epoch=events.epoch,
            sequence=self._sequence,
            model=events.model,
            block_size=events.block_size,
            hash_scheme=HASH_SCHEME,
            hashes=part,
            left=len(self._unsent),
            window_tokens=events.window_tokens,
        )


if TYPE_CHECKING:
    from trioserve.core.engine import EngineCore


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
