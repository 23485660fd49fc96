"""Which blocks are kept, where, and which go to make room. Knows names and bytes; waits for nothing."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence

import msgspec

from trioserve.connectors.host.block_files import FILES_MAX, Differences, FoundFile
from trioserve.connectors.host.block_memory import BlockMemory, Content
from trioserve.connectors.host.shelf import Shelf
from trioserve.contracts.block_hash import BlockHash

__all__ = ["BlockStore", "Counts", "KeptBlock"]

SURPRISES_SHARE = 64  # one in so many files has to be a surprise before all of them are counted again


class KeptBlock(msgspec.Struct, frozen=True):
    """In memory. proof: what shows whose it is (chain.py)."""

    content: Content
    proof: bytes


class Counts(msgspec.Struct):
    """Totals since the start, in blocks unless they say otherwise.

    saved: copied into memory. unsaved: that were not, since there was no room for them, or too much was being copied.
    loaded, loaded_from_files: copied to the engine, and how many of them had to be read. written: into files.
    unwritten: that left memory, or could not be written, before they were in a file. evicted, files_evicted: that went
    to make room in memory, or in the directory. dropped: that were damaged, gone, or not what their name said.
    write_failures: what the disk refused; failures, not blocks. read_failures: files that could not be read or trusted.
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
    """Each block is in memory, in a file, or in both. Bytes for a block that is on its way into memory are reserved
    under its name: exactly one of put and give_up follows.

    file_of: the key of a block's file (block_files.py); None: there are no files. file_bytes: of one.
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
        self._unwritten: dict[BlockHash, None] = {}  # in memory, and their turn to be written comes in this order
        self._surplus: list[str] = []  # files that are not kept, and are still there
        self._surprises = 0  # since the files were counted
        self._surprises_allowed = 0

    def found(self, files: Iterable[FoundFile]) -> None:
        """They were there at the start, the least recently used one first; together they are within the limit."""
        for file in files:
            if self.files.reserve(file.byte_count) is not None:
                self.files.put(file.key, file.byte_count)

    # --- looking ---

    def in_memory(self, name: BlockHash) -> KeptBlock | None:
        return self._kept.get(name)

    def file(self, name: BlockHash) -> str | None:
        """The key of its file, if there is one."""
        if self._file_of is None:
            return None
        key = self._file_of(name)
        return key if key in self.files else None

    def is_known(self, name: BlockHash) -> bool:
        """Whether it is kept, or on its way."""
        return name in self._kept or name in self._arriving or self.file(name) is not None

    def touch(self, names: Sequence[BlockHash]) -> None:
        """A request used these, which are its first ones, in order."""
        self.memory.touch(names)
        if self._file_of is not None:
            self.files.touch([self._file_of(name) for name in names])

    # --- memory ---

    def reserve(self, name: BlockHash, keep: Container[BlockHash]) -> bool:
        """Bytes for one block on its way, if need be those of others, but not of `keep`. False: there is no room, or it
        is kept or on its way already."""
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

    def give_up(self, name: BlockHash) -> None:
        self._arriving.remove(name)
        self.memory.release(self.block_bytes)

    def drop(self, name: BlockHash) -> None:
        """What was kept under this name is not to be believed, or is gone."""
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

    # --- files ---

    @property
    def has_file_work(self) -> bool:
        return bool(self._unwritten or self._surplus or self.wants_count)

    def note_surprise(self) -> None:
        """The directory is not as it is known: a file is gone or damaged, a write has failed."""
        if self._file_of is not None:
            self._surprises += 1

    @property
    def wants_count(self) -> bool:
        """Whether the files should be counted: at the first surprise, and then after some more, since it takes a look
        at every file."""
        return self._surprises > self._surprises_allowed

    def counted_not(self) -> None:
        """The directory cannot be read: it is counted at a later surprise."""
        self.counts.write_failures += 1
        self._surprises = 0
        self._surprises_allowed = max(1, len(self.files) // SURPRISES_SHARE)

    def counted(self, differences: Differences) -> None:
        """What the directory really holds. Nobody has written since the count began.

        What is gone or has another size is dropped. Files that are not known, as after a removal that failed, count
        from now on.
        """
        self._surprises = 0
        self._surprises_allowed = differences.file_count // SURPRISES_SHARE
        for keys, is_there in ((differences.gone, False), (differences.changed, True)):
            for key in keys:
                if key not in self.files:  # dropped meanwhile
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

    def take_surplus(self) -> list[str]:
        """Files to be removed."""
        surplus, self._surplus = self._surplus, []
        return surplus

    def next_to_write(self) -> BlockHash | None:
        """A block that is in memory and should be in a file; bytes are reserved for it and it is pinned, until wrote or
        not_written. Files that have to go for it are surplus."""
        while self._unwritten:
            name = next(iter(self._unwritten))
            del self._unwritten[name]
            if self.file(name) is not None:
                continue  # of what was dropped and came back while it was written
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
        """The disk refuses; nothing else that waits to be written is tried, either."""
        self.memory.unpin(name)
        self.note_surprise()
        self.files.release(self.file_bytes)
        self.counts.write_failures += 1
        self.counts.unwritten += 1 + len(self._unwritten)
        self._unwritten.clear()
