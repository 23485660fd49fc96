"""A numbered record of the changes in the prefix cache. Subscribers read it at their own pace, and the engine never
waits.

A ring buffer keeps the last changes. A new subscriber gets a snapshot of all resident blocks, and then the changes
after it. A subscriber that is too far behind also gets a snapshot.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import trio

from trioserve.contracts.endpoint import BlocksRemoved, BlocksStored, KvEvent, ResidencySnapshot
from trioserve.contracts.errors import Overloaded
from trioserve.contracts.ids import HASH_SCHEME, BlockHash
from trioserve.core.prefix_cache import PrefixCache

__all__ = ["EVENTS_MAX", "KvEvents", "KvReader"]

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
