"""Jobs of the host store that run in threads: saving a finished request's blocks, loading blocks, and writing files.

The engine's thread creates a job, gets each piece of work from the job, passes the result back to the job, and ends the
job. Only the pieces of work, which are functions without arguments, run in another thread. Each piece of work handles
at most BATCH_BYTES, so that the job notices changes soon. A piece of work may change only the memory of the job, files,
and (inside the gate) the blocks of the engine that the job may write.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec

from trioserve.connectors.host.block_files import BlockFiles, FileUnusable, Proofs
from trioserve.connectors.host.copying import Content, DeviceBlocks, Gate, copy_in, copy_out
from trioserve.connectors.host.store import BlockStore, KeptBlock
from trioserve.contracts.ids import BlockHash, BlockIndex, RequestId
from trioserve.contracts.kv_transfer import KVPages

__all__ = ["BATCH_BYTES", "Job", "LoadPart", "Loading", "SavePart", "Saving", "Writing"]

BATCH_BYTES = 32 * 2**20
"""Limit of one piece of work: a few ms at memory speed, and about 50 ms at disk speed.

A job that is no longer wanted runs at most this long. Each piece costs about 100 us for the switch to a thread.
"""

NOT_NEEDED = "the request does not need it any more"

logger = logging.getLogger(__name__)


class Job(Protocol):
    """Job that runs in pieces.

    Attributes:
        gate: Gate to the engine's blocks. Closing it stops the job.
    """

    gate: Gate

    def next_work(self) -> Callable[[], Any] | None:
        """Return the next piece of work, or None if no work is left or the job was stopped.

        After None, the caller calls `end` once.
        """
        ...

    def take(self, result: Any) -> None:
        """Accept the result of a piece of work.

        Args:
            result: Value that the work returned.
        """
        ...

    def fail(self, error: Exception) -> None:
        """Handle an error of a piece of work.

        Args:
            error: Error that the work raised.
        """
        ...

    def end(self) -> None: ...


class SavePart(msgspec.Struct, frozen=True):
    """Block to save. Memory for it is reserved in the store.

    Attributes:
        index: Index of the block in the request.
        block: Block of the engine.
        name: Name of the block.
    """

    index: int
    block: BlockIndex
    name: BlockHash


class Saving:
    """Job that copies blocks of a finished request into the store.

    Args:
        request_id: Finished request.
        names: Names of all its full blocks.
        parts: Blocks to save.
        proofs: Proofs of the request's blocks.
        pages: KV cache of the engine.
        store: Store that receives the blocks.
        on_end: Called when the job has ended.
        device: Copies blocks of a device. None if the host can address the blocks.
    """

    def __init__(
        self,
        request_id: RequestId,
        names: Sequence[BlockHash],
        parts: Sequence[SavePart],
        proofs: Proofs,
        pages: KVPages,
        store: BlockStore,
        on_end: Callable[[Saving], None],
        device: DeviceBlocks | None = None,
    ) -> None:
        self.request_id = request_id
        self.gate = Gate()
        self.block_count = len(parts)
        self._names = names
        self._parts = parts
        self._proofs = proofs
        self._pages = pages
        self._store = store
        self._on_end = on_end
        self._device = device
        self._batch_count = _blocks_of_batch(store)
        self._done_count = 0

    def next_work(self) -> Callable[[], Any] | None:
        parts = self._parts[self._done_count : self._done_count + self._batch_count]
        return partial(self._copy, parts) if parts and self.gate.is_wanted else None

    def take(self, result: list[KeptBlock]) -> None:
        if not self.gate.is_open:
            return  # The gate is closed, so the copies may contain another request's KV.
        for kept in result:
            self._store.put(self._parts[self._done_count].name, kept)
            self._done_count += 1
        self._store.counts.saved += len(result)

    def fail(self, error: Exception) -> None:
        logger.warning("blocks not saved request=%s error=%r", self.request_id, error)
        self.gate.is_wanted = False

    def end(self) -> None:
        for part in self._parts[self._done_count :]:
            self._store.abandon(part.name)
            self._store.counts.unsaved += 1
        self._store.touch(self._names)
        self._on_end(self)

    def _copy(self, parts: Sequence[SavePart]) -> list[KeptBlock]:
        """Copy blocks while they are held. Returns the copies in order."""
        if self._device is not None:
            contents = [self._store.places.take() for _ in parts]
            self._device.copy_out([part.block for part in parts], contents)
            return [
                KeptBlock(content, self._proofs.of(part.index)) for content, part in zip(contents, parts, strict=True)
            ]
        copied: list[KeptBlock] = []
        for part in parts:
            content = self._store.places.take()
            if not copy_out(self._pages, part.block, content, self.gate):
                break
            copied.append(KeptBlock(content, self._proofs.of(part.index)))
        return copied


class LoadPart(msgspec.Struct, frozen=True):
    """Block to load.

    Attributes:
        index: Index of the block in the request.
        block: Block of the engine.
        name: Name of the block.
        token_count: Number of tokens to load.
        kept: Pinned block in memory. None if the block is read from a file.
        key: Pinned key of the block's file. None if the block is in memory.
        is_reserved: True if memory is reserved to keep the block that is read from a file.
    """

    index: int
    block: BlockIndex
    name: BlockHash
    token_count: int
    kept: KeptBlock | None = None
    key: str | None = None
    is_reserved: bool = False


class LoadOutcome(msgspec.Struct, frozen=True):
    """Result of a piece of a load.

    Attributes:
        read: For each loaded part, in order: the block that was read from a file, or None if the block was in memory.
        problem: Reason why the next part was not loaded. None if all parts were loaded.
        is_bad: True if the stored block of the next part is unusable.
    """

    read: list[KeptBlock | None]
    problem: str | None = None
    is_bad: bool = False


class Loading:
    """Job that copies stored blocks into the blocks of a request.

    Args:
        request_id: Request that loads.
        names: Names of its full blocks, up to the last block to load.
        parts: Blocks to load.
        proofs: Proofs of the request's blocks.
        pages: KV cache of the engine.
        store: Store of the blocks.
        files: Files of the store. None if the store has no files.
        on_end: Called when the job has ended.
        before_count: Number of tokens before the first part. They are not loaded, because no sliding window reaches
            them.
        device: Copies blocks of a device. None if the host can address the blocks.

    Attributes:
        is_abandoned: True if the request no longer needs the blocks.
        problem: Reason why not all blocks were loaded.
        token_count: Number of loaded tokens.
        reads_files: True if a part is read from a file.
    """

    def __init__(
        self,
        request_id: RequestId,
        names: Sequence[BlockHash],
        parts: Sequence[LoadPart],
        proofs: Proofs,
        pages: KVPages,
        store: BlockStore,
        files: BlockFiles | None,
        on_end: Callable[[Loading], None],
        *,
        before_count: int = 0,
        device: DeviceBlocks | None = None,
    ) -> None:
        self.request_id = request_id
        self.before_count = before_count
        self.gate = Gate()
        self.is_abandoned = False
        self.problem = "no block of it is stored any more"
        self.token_count = 0
        self.reads_files = any(part.kept is None for part in parts)
        self._names = names
        self._parts = parts
        self._proofs = proofs
        self._pages = pages
        self._store = store
        self._files = files
        self._on_end = on_end
        self._device = device
        self._batch_count = _blocks_of_batch(store)
        self._done_count = 0

    def next_work(self) -> Callable[[], Any] | None:
        parts = self._parts[self._done_count : self._done_count + self._batch_count]
        return partial(self._copy, parts) if parts and self.gate.is_wanted else None

    def take(self, result: LoadOutcome) -> None:
        for read in result.read:
            part = self._parts[self._done_count]
            self._done_count += 1
            self._release(part, read)
            self.token_count += part.token_count
            self._store.counts.loaded += 1
            self._store.counts.loaded_from_files += part.kept is None
        if result.problem is None:
            return
        self.problem = result.problem
        self.gate.is_wanted = False
        if result.is_bad:
            bad = self._parts[self._done_count]
            self._store.counts.read_failures += bad.kept is None
            # Two loads may find the same damaged block. Drop the block only if no other load has replaced it meanwhile.
            if self._store.in_memory(bad.name) is bad.kept and bad.key in (None, self._store.file(bad.name)):
                self._store.drop(bad.name)

    def fail(self, error: Exception) -> None:
        logger.warning("blocks not loaded request=%s error=%r", self.request_id, error)
        self.problem = f"{type(error).__name__}: {error}"
        self.gate.is_wanted = False

    def end(self) -> None:
        for part in self._parts[self._done_count :]:
            self._release(part, None)
        self._store.touch(self._names)
        self._on_end(self)

    def _release(self, part: LoadPart, read: KeptBlock | None) -> None:
        if part.kept is not None:
            self._store.memory.unpin(part.name)
            return
        assert part.key is not None
        self._store.files.unpin(part.key)
        if part.is_reserved:
            if read is None:
                self._store.abandon(part.name)
            else:
                self._store.put(part.name, read)

    def _copy(self, parts: Sequence[LoadPart]) -> LoadOutcome:
        arrived: list[KeptBlock | None] = []
        contents: list[Content] = []
        problem = None
        for part in parts:
            proof = self._proofs.of(part.index)
            read = None
            if part.kept is None:
                content, problem = self._read(part, proof)
                read = KeptBlock(content, proof)
            else:
                content = part.kept.content
                problem = None if part.kept.proof == proof else "the stored block has other tokens"
            if problem is not None:
                problem = f"block {part.index}: {problem}"
                break
            if self._device is None and not copy_in(self._pages, part.block, content, part.token_count, self.gate):
                return LoadOutcome(arrived, NOT_NEEDED)
            arrived.append(read)
            contents.append(content)
        if self._device is not None and contents:
            blocks = [part.block for part in parts[: len(contents)]]
            last_token_count = parts[len(contents) - 1].token_count
            if not self._device.copy_in(blocks, contents, last_token_count, self.gate):
                return LoadOutcome([], NOT_NEEDED)
        return LoadOutcome(arrived, problem, is_bad=problem is not None)

    def _read(self, part: LoadPart, proof: bytes) -> tuple[Content, str | None]:
        assert self._files is not None
        content = self._store.places.take()
        try:
            self._files.read(part.name, proof, content)
        except FileUnusable as error:
            return content, str(error)
        except OSError as error:
            return content, f"the file cannot be read: {error.strerror}"
        return content, None


class Writing:
    """Job that writes blocks from memory to files, and removes surplus files.

    The job also counts the files if the directory differs from the records. The job starts again when new blocks wait
    or files must be removed.

    Args:
        store: Store of the blocks.
        files: Files of the store.
        on_end: Called when the job has ended.
    """

    def __init__(self, store: BlockStore, files: BlockFiles, on_end: Callable[[], None]) -> None:
        self.gate = Gate()
        self._store = store
        self._files = files
        self._on_end = on_end
        self._name: BlockHash | None = None  # name of the block that is being written
        self._has_warned = False
        self._is_counting = False

    def next_work(self) -> Callable[[], Any] | None:
        if not self._store.has_file_work or not self.gate.is_wanted:
            return None
        self._name = self._store.next_to_write()
        surplus = self._store.pop_surplus()
        self._is_counting = self._name is None and not surplus
        if self._is_counting:
            return partial(self._files.compare, self._store.files.sizes()) if self._store.wants_count else None
        kept = None if self._name is None else self._store.in_memory(self._name)
        return partial(self._write, surplus, self._name, kept)

    def take(self, result: Any) -> None:
        """Accept the result of a piece of work.

        Args:
            result: Result of a count, or False if the folder of the files was missing.
        """
        if self._is_counting:
            self._store.counted(result)
            return
        if result is False:
            self._store.note_surprise()
        if self._name is not None:
            self._store.wrote(self._name)
            self._name = None
            if self._has_warned:
                self._has_warned = False
                logger.info("blocks are written to the directory again")

    def fail(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("blocks not written to the directory, but still kept in memory error=%r", error)
        if self._is_counting:
            self._store.counted_not()
        elif self._name is None:
            self._store.note_surprise()
            self._store.counts.write_failures += 1
        else:
            self._store.not_written(self._name)
            self._name = None

    def end(self) -> None:
        self._on_end()

    def _write(self, surplus: Sequence[str], name: BlockHash | None, kept: KeptBlock | None) -> bool:
        """Remove files and write a block. Returns False if the folder was missing."""
        self._files.remove(surplus)
        if name is None:
            return True
        assert kept is not None
        return self._files.write(name, kept.proof, kept.content)


def _blocks_of_batch(store: BlockStore) -> int:
    return max(1, BATCH_BYTES // store.block_bytes)
