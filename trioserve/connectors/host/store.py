"""Records of the host store: which blocks are in memory or in files, and which blocks to evict. No function waits."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

import msgspec

from trioserve.connectors.host.block_files import FILES_MAX, Differences, FoundFile
from trioserve.connectors.host.copying import BlockMemory, Content
from trioserve.contracts.ids import BlockHash

__all__ = ["Shelf", "BlockStore", "Counts", "KeptBlock"]

Key = TypeVar("Key", bound=Hashable)


class Shelf(Generic[Key]):
    """Set of keys with sizes that evicts the least recently used keys. Pinned keys are never evicted.

    Args:
        bytes_max: Limit for kept and reserved bytes.

    Attributes:
        bytes_used: Kept and reserved bytes. Never more than `bytes_max`.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes_used = 0
        self._sizes: OrderedDict[Key, int] = OrderedDict()  # keys in the order in which they are evicted
        self._pins: Counter[Key] = Counter()

    def __contains__(self, key: object) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def touch(self, keys: Sequence[Key]) -> None:
        """Mark keys as used now.

        Args:
            keys: Keys of a prefix's blocks, in order. The first block is evicted last, because the other blocks are
                useless without it.
        """
        for key in reversed(keys):
            if key in self._sizes:
                self._sizes.move_to_end(key)

    def reserve(self, byte_count: int, keep: Container[Key] = ()) -> list[Key] | None:
        """Reserve bytes, and evict keys if necessary. The caller must pass the bytes to `put` or `release`.

        Args:
            byte_count: Bytes to reserve.
            keep: Keys that must not be evicted.

        Returns:
            Evicted keys. None if too few bytes can be freed, and then no key is evicted.
        """
        missing = self.bytes_used + byte_count - self.bytes_max
        leaving = []
        if missing > 0:
            for key, size in self._sizes.items():
                if key not in self._pins and key not in keep:
                    leaving.append(key)
                    missing -= size
                    if missing <= 0:
                        break
            else:
                return None
        for key in leaving:
            self.drop(key)
        self.bytes_used += byte_count
        return leaving

    def release(self, byte_count: int) -> None:
        """Release reserved bytes that are not needed.

        Args:
            byte_count: Bytes that were reserved.
        """
        self.bytes_used -= byte_count

    def put(self, key: Key, byte_count: int) -> None:
        """Add a key that uses reserved bytes, as the most recently used key.

        Args:
            key: Key to add.
            byte_count: Bytes that were reserved for it.
        """
        assert key not in self._sizes, f"{key!r} is kept already"
        self._sizes[key] = byte_count

    def drop(self, key: Key) -> None:
        self.bytes_used -= self._sizes.pop(key)

    def pin(self, keys: Iterable[Key]) -> None:
        """Protect keys from eviction until `unpin` is called as often as `pin`. `drop` still removes them.

        Args:
            keys: Keys to protect.
        """
        self._pins.update(keys)

    def unpin(self, key: Key) -> None:
        self._pins[key] -= 1
        if self._pins[key] == 0:
            del self._pins[key]

    def sizes(self) -> dict[Key, int]:
        """Return a copy of the sizes of all keys, in bytes."""
        return dict(self._sizes)

    @property
    def pinned(self) -> set[Key]:
        return set(self._pins)

    def check(self, reserved_bytes: int) -> None:
        """Assert that the byte counts are consistent. For tests.

        Args:
            reserved_bytes: Bytes that are reserved now.

        Cost: O(keys).
        """
        assert self.bytes_used == sum(self._sizes.values()) + reserved_bytes <= self.bytes_max
        assert all(count > 0 for count in self._pins.values())


# A surprise is a difference between the directory and the records. A count allows one surprise per 64 files until the
# files are counted again.
SURPRISES_SHARE = 64


class KeptBlock(msgspec.Struct, frozen=True):
    """Block in memory.

    Attributes:
        content: KV of the block.
        proof: Proof of the tokens that the block belongs to (see Proofs).
    """

    content: Content
    proof: bytes


class Counts(msgspec.Struct):
    """Totals since the start, in blocks unless a field says otherwise.

    Attributes:
        saved: Blocks copied into memory.
        unsaved: Blocks not copied into memory, because the memory was full or too many copies were waiting.
        loaded: Blocks copied to the engine.
        loaded_from_files: Blocks of `loaded` that were read from files.
        written: Blocks written to files.
        unwritten: Blocks that were evicted from memory before they were written, or whose write failed.
        evicted: Blocks evicted from memory.
        files_evicted: Files evicted from the directory.
        dropped: Blocks that were damaged, missing, or stored under a wrong name.
        write_failures: Failed operations on the disk, not blocks.
        read_failures: Files that could not be read or had a wrong content.
    """

    saved: int = 0
    unsaved: int = 0
    loaded: int = 0
    loaded_from_files: int = 0
    written: int = 0
    unwritten: int = 0
    evicted: int = 0
    files_evicted: int = 0
    dropped: int = 0
    write_failures: int = 0
    read_failures: int = 0


class BlockStore:
    """Records of all blocks in memory and in files.

    A block may be in memory, in a file, or in both. `reserve` reserves bytes for a block that is being copied into
    memory. Exactly one call of `put` or `abandon` must follow.

    Args:
        block_bytes: Size of a block in memory.
        memory_bytes: Limit for blocks in memory.
        file_of: Returns the key of a block's file (see block_files.py). None if there are no files.
        file_bytes: Size of a file.
        directory_bytes: Limit for all files.
    """

    def __init__(
        self,
        block_bytes: int,
        memory_bytes: int,
        *,
        file_of: Callable[[BlockHash], str] | None = None,
        file_bytes: int = 0,
        directory_bytes: int = 0,
    ) -> None:
        self.counts = Counts()
        self.places = BlockMemory(block_bytes, memory_bytes)
        self.block_bytes = block_bytes
        self.file_bytes = file_bytes
        self.memory: Shelf[BlockHash] = Shelf(memory_bytes)
        self.files: Shelf[str] = Shelf(min(directory_bytes, FILES_MAX * file_bytes))
        self._file_of = file_of
        self._kept: dict[BlockHash, KeptBlock] = {}
        self._arriving: set[BlockHash] = set()
        self._unwritten: dict[BlockHash, None] = {}  # blocks in memory that wait to be written to files, in order
        self._surplus: list[str] = []  # files to remove from the directory
        self._surprises = 0  # number of surprises since the files were last counted
        self._surprises_allowed = 0

    def found(self, files: Iterable[FoundFile]) -> None:
        """Add the files that exist at the start.

        Args:
            files: Files, least recently used first. Their total size is within the limit.
        """
        for file in files:
            if self.files.reserve(file.byte_count) is not None:
                self.files.put(file.key, file.byte_count)

    # --- lookups ---

    def in_memory(self, name: BlockHash) -> KeptBlock | None:
        return self._kept.get(name)

    def file(self, name: BlockHash) -> str | None:
        """Return the key of a block's file.

        Args:
            name: Name of the block.

        Returns:
            The key, or None if the block has no file.
        """
        if self._file_of is None:
            return None
        key = self._file_of(name)
        return key if key in self.files else None

    def is_known(self, name: BlockHash) -> bool:
        """Return True if a block is in memory, in a file, or being copied into memory.

        Args:
            name: Name of the block.
        """
        return name in self._kept or name in self._arriving or self.file(name) is not None

    def touch(self, names: Sequence[BlockHash]) -> None:
        """Mark blocks as used now.

        Args:
            names: First blocks of a request, in order.
        """
        self.memory.touch(names)
        if self._file_of is not None:
            self.files.touch([self._file_of(name) for name in names])

    # --- blocks in memory ---

    def reserve(self, name: BlockHash, keep: Container[BlockHash]) -> bool:
        """Reserve memory for a block, and evict other blocks if necessary.

        Args:
            name: Name of the block.
            keep: Blocks that must not be evicted.

        Returns:
            False if there is not enough memory, or the block is already in memory or being copied.
        """
        if name in self._kept or name in self._arriving:
            return False
        evicted = self.memory.reserve(self.block_bytes, keep)
        if evicted is None:
            return False
        for other in evicted:
            self._left_memory(other)
        self._arriving.add(name)
        return True

    def put(self, name: BlockHash, kept: KeptBlock) -> None:
        self._arriving.remove(name)
        self.memory.put(name, self.block_bytes)
        self._kept[name] = kept
        if self._file_of is not None and self.file(name) is None:
            self._unwritten[name] = None

    def abandon(self, name: BlockHash) -> None:
        self._arriving.remove(name)
        self.memory.release(self.block_bytes)

    def drop(self, name: BlockHash) -> None:
        """Remove a block that is damaged or missing.

        Args:
            name: Name of the block.
        """
        self.counts.dropped += 1
        if self._kept.pop(name, None) is not None:
            self.memory.drop(name)
            self._unwritten.pop(name, None)
        key = self.file(name)
        if key is not None:
            self.files.drop(key)
            self._surplus.append(key)
            self.note_surprise()

    def _left_memory(self, name: BlockHash) -> None:
        del self._kept[name]
        if name in self._unwritten:
            del self._unwritten[name]
            self.counts.unwritten += 1
        self.counts.evicted += 1

    # --- blocks in files ---

    @property
    def has_file_work(self) -> bool:
        return bool(self._unwritten or self._surplus or self.wants_count)

    def note_surprise(self) -> None:
        """Record that the directory may differ from these records: a file is missing or damaged, or a write failed."""
        if self._file_of is not None:
            self._surprises += 1

    @property
    def wants_count(self) -> bool:
        """True if the files should be counted again.

        The first surprise triggers a count. Later counts need more surprises, because a count reads every entry.
        """
        return self._surprises > self._surprises_allowed

    def counted_not(self) -> None:
        """Record that a count of the files failed. Further surprises trigger another count."""
        self.counts.write_failures += 1
        self._surprises = 0
        self._surprises_allowed = max(1, len(self.files) // SURPRISES_SHARE)

    def counted(self, differences: Differences) -> None:
        """Correct the records after a count. No file may have been written since the count began.

        Missing files and files with another size are dropped. Unknown files, for example after a failed removal, are
        added.

        Args:
            differences: Result of the count.
        """
        self._surprises = 0
        self._surprises_allowed = differences.file_count // SURPRISES_SHARE
        for keys, is_there in ((differences.gone, False), (differences.changed, True)):
            for key in keys:
                if key not in self.files:  # This store dropped the file during the count.
                    continue
                self.files.drop(key)
                self.counts.dropped += 1
                if is_there:
                    self._surplus.append(key)
        for file in differences.unknown:
            if file.key in self.files or file.key in self._surplus:
                continue
            evicted = self.files.reserve(file.byte_count)
            if evicted is None:
                self._surplus.append(file.key)
                continue
            self._surplus += evicted
            self.counts.files_evicted += len(evicted)
            self.files.put(file.key, file.byte_count)

    def pop_surplus(self) -> list[str]:
        """Return the keys of the files to remove, and clear the list."""
        surplus, self._surplus = self._surplus, []
        return surplus

    def next_to_write(self) -> BlockHash | None:
        """Select the next block to write.

        The block is pinned and bytes for its file are reserved, until `wrote` or `not_written` is called. Files that
        are evicted for it must be removed (see `pop_surplus`).

        Returns:
            Name of the block, or None if no block waits.
        """
        while self._unwritten:
            name = next(iter(self._unwritten))
            del self._unwritten[name]
            if self.file(name) is not None:
                continue  # The block already has a file. It was dropped and saved again while the file was written.
            evicted = self.files.reserve(self.file_bytes)
            if evicted is None:
                self.counts.unwritten += 1
                continue
            self._surplus += evicted
            self.counts.files_evicted += len(evicted)
            self.memory.pin([name])
            return name
        return None

    def wrote(self, name: BlockHash) -> None:
        assert self._file_of is not None
        self.memory.unpin(name)
        self.files.put(self._file_of(name), self.file_bytes)
        self.counts.written += 1

    def not_written(self, name: BlockHash) -> None:
        """Record a failed write. All other waiting blocks are skipped, because the disk probably refuses them, too.

        Args:
            name: Name of the block.
        """
        self.memory.unpin(name)
        self.note_surprise()
        self.files.release(self.file_bytes)
        self.counts.write_failures += 1
        self.counts.unwritten += 1 + len(self._unwritten)
        self._unwritten.clear()
