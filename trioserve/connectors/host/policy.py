"""Policy of the host store: decides which blocks to save, load and write, and creates jobs for worker threads.

No function of this module waits. When a request ends, its full blocks are copied, unless they are already stored. When
the prefix cache evicts a block, it is too late for a copy: the core does not call the connector, and needs the block at
once. So the core holds the blocks of an ended request while they are copied, which takes a few ms. At most half of the
pool is held for copies at a time. If all layers of a model have a sliding window, only the blocks that the window still
reaches can be copied, and a later prompt is matched by these blocks. Loads read from memory or from files. Blocks that
are read from files are also stored in memory if enough memory is free.

A load that is no longer needed stops before its next piece, and the policy reports it to the core when it has stopped.
Until then, the policy offers no further loads from files, because the disk may be broken. Loads from memory continue.
"""

from __future__ import annotations

import enum
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from trioserve.connectors.host.block_files import BlockChain, BlockFiles, HashBlock, Proofs
from trioserve.connectors.host.copying import DeviceBlocks, block_bytes
from trioserve.connectors.host.jobs import Job, Loading, LoadPart, SavePart, Saving, Writing
from trioserve.connectors.host.store import BlockStore
from trioserve.connectors.windowed_tables import first_place, first_position
from trioserve.contracts.errors import StartupError
from trioserve.contracts.events import FinishReason
from trioserve.contracts.ids import BlockHash, BlockIndex, RequestId, hash_block
from trioserve.contracts.kv_transfer import (
    BlockCopies,
    HoldKind,
    KVLayout,
    KVPages,
    Loaded,
    LoadFailed,
    Released,
    TransferEvent,
)
from trioserve.contracts.request import EngineRequest, KVTransferParams

__all__ = ["HostSettings", "host_settings_from", "HostPolicy", "Lane"]

GIB = 2**30
FILE_OVERHEAD_BYTES_MAX = 4096  # upper limit for the head and the checksum of a file, without the tokens in the head
OPTIONS = ("memory_gib", "memory_bytes", "directory", "directory_gib", "directory_bytes")


class HostSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the host store.

    Attributes:
        memory_bytes: Limit for blocks in memory, including blocks that are being copied.
        directory: Directory for files. None stores no files.
        directory_bytes: Limit for all files in the directory, including files of other models and earlier starts.
    """

    memory_bytes: int
    directory: Path | None = None
    directory_bytes: int = 0


def host_settings_from(options: Mapping[str, Any], layout: KVLayout) -> HostSettings:
    """Check the options of the connector `host`.

    Args:
        options: Content of kv_connector_extra_config.
        layout: KV layout of the engine.

    Raises:
        StartupError: an option is unknown or not allowed, or a limit is smaller than one block.
    """
    unknown = sorted(str(name) for name in options if name not in OPTIONS)
    if unknown:
        raise StartupError(f"the host connector has no option {unknown[0]!r}: it has {', '.join(OPTIONS)}")
    memory_bytes = _size(options, "memory")
    if memory_bytes is None:
        raise StartupError("the host connector needs a limit for its memory: give memory_gib or memory_bytes")
    _check_holds_a_block("memory", memory_bytes, layout)
    directory, directory_bytes = options.get("directory"), _size(options, "directory")
    if directory is None:
        if directory_bytes is not None:
            raise StartupError("the host connector got a limit for a directory, but no directory: give both or none")
        return HostSettings(memory_bytes=memory_bytes)
    if not isinstance(directory, str) or not directory or "\0" in directory:
        raise StartupError(f"directory of the host connector is {directory!r}: give the path of a directory")
    if directory_bytes is None:
        raise StartupError("the host connector needs a limit for its directory: give directory_gib or directory_bytes")
    _check_holds_a_block("directory", directory_bytes, layout)
    return HostSettings(memory_bytes=memory_bytes, directory=Path(directory), directory_bytes=directory_bytes)


def _size(options: Mapping[str, Any], what: str) -> int | None:
    in_gib, in_bytes = options.get(f"{what}_gib"), options.get(f"{what}_bytes")
    if in_gib is not None and in_bytes is not None:
        raise StartupError(f"the host connector got {what}_gib and {what}_bytes: give one of them")
    name, value = (f"{what}_gib", in_gib) if in_gib is not None else (f"{what}_bytes", in_bytes)
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value <= 0:
        raise StartupError(f"{name} of the host connector is {value!r}: it must be a number above 0")
    return int(value * GIB) if in_gib is not None else int(value)


def _check_holds_a_block(what: str, byte_count: int, layout: KVLayout) -> None:
    needed = layout.layer_count * layout.block_size * layout.token_bytes
    if what == "directory":
        needed += FILE_OVERHEAD_BYTES_MAX + 4 * layout.block_size
    if byte_count < needed:
        raise StartupError(
            f"the host connector may use {byte_count} bytes of {what}, and one block of {layout.model} needs {needed}"
        )


CHAINS_MAX = 128
"""Limit of requests whose block names are remembered: requests at the head of the queue, and requests that load."""

SAVING_BYTES_MAX = 2 * 2**30
"""Limit of blocks that are held for copying: about a second of work, a tenth of the maximum duration of a hold."""


class Lane(enum.Enum):
    """A queue of jobs. Jobs of one lane run one after another. Jobs of different lanes never wait for each other."""

    SAVE = "save"
    LOAD = "load"
    LOAD_FILES = "load files"
    WRITE = "write"


class HostPolicy:
    """KVConnector (see contracts.kv_transfer) that keeps blocks in host memory and files.

    The owner of the policy runs the jobs of the lanes.

    Args:
        settings: Limits of the host store.
        pages: KV cache of the engine.
        wake: Called when the core should call `progress`.
        files: Files of the store. None if the store has no files.
        hash_block: Function that hashes a block. Tests may pass another function.
        window_tokens: Sliding window of the model, see ConnectorSetup.
        copies: Copies blocks of a device, see ConnectorSetup.

    Attributes:
        on_work: Called when a lane has got a job.
        lanes: Waiting jobs by lane, in order.
        store: Records of all stored blocks.
    """

    def __init__(
        self,
        settings: HostSettings,
        pages: KVPages,
        wake: Callable[[], None],
        *,
        files: BlockFiles | None = None,
        hash_block: HashBlock = hash_block,
        window_tokens: int | None = None,
        copies: BlockCopies | None = None,
    ) -> None:
        self.on_work: Callable[[Lane], None] = lambda lane: None
        self.lanes: dict[Lane, deque[Job]] = {lane: deque() for lane in Lane}
        self._pages = pages
        self._device = None if copies is None else DeviceBlocks(pages.layout, copies)
        self._block_size = pages.layout.block_size
        self._window_tokens = window_tokens
        self._wake = wake
        self._files = files
        self._hash_block = hash_block
        self.store = BlockStore(
            block_bytes(pages.layout),
            settings.memory_bytes,
            file_of=None if files is None else files.key,
            file_bytes=0 if files is None else files.file_bytes,
            directory_bytes=settings.directory_bytes,
        )
        self._chains: OrderedDict[RequestId, BlockChain] = OrderedDict()
        self._saves: dict[RequestId, Saving] = {}
        self._loads: dict[RequestId, Loading] = {}
        self._running: set[Job] = set()  # jobs that a thread runs, or that wait for their next piece
        self._writing = None if files is None else Writing(self.store, files, self._writing_ended)
        self._is_writing = False
        self._saving_block_count = 0
        self._saving_blocks_max = min(pages.block_count // 2, max(1, SAVING_BYTES_MAX // self.store.block_bytes))
        self._events: dict[tuple[RequestId, HoldKind], TransferEvent] = {}
        self._is_closed = False

    # --- methods for the core ---

    def num_matched_tokens(self, request: EngineRequest, computed_count: int) -> int:
        if self._is_closed or computed_count % self._block_size != 0:
            return 0
        first = computed_count // self._block_size
        chain, tokens = self._chain(request), request.known_token_ids
        files_answer = not any(load.is_abandoned and load.reads_files for load in self._running_loads())
        end, stored_from = first, first
        # The engine must always compute the last token, so the last token is never matched.
        for index in range(first, (len(tokens) - 1) // self._block_size):
            name = chain.name(index, tokens)
            if self.store.in_memory(name) is None and not (files_answer and self.store.file(name) is not None):
                if self._window_tokens is None:
                    break
                # A later block can still match if no sliding window reaches from that block to this missing block.
                stored_from = index + 1
            if stored_from <= max(first, self._first_place_seen((index + 1) * self._block_size)):
                end = index + 1
        return (end - first) * self._block_size

    def start_load(
        self, request: EngineRequest, block_table: Sequence[BlockIndex], computed_count: int, token_count: int
    ) -> None:
        assert request.id not in self._loads, f"{request.id} is loaded twice at a time"
        if self._is_closed:
            self._report(LoadFailed(request.id, "the host store has ended"), HoldKind.LOAD)
            return
        tokens, size = request.known_token_ids, self._block_size
        end = computed_count + token_count
        start = first_position(block_table, size, computed_count)
        indices = range(start // size, -(-end // size))
        chain = self._chain(request)
        # If the prompt ends inside the last block, that block is not full and has no name.
        used = [chain.name(index, tokens) for index in range(indices.stop) if (index + 1) * size <= len(tokens)]
        names = used[indices.start :]
        parts: list[LoadPart] = []
        needed = self._only_in_memory(names)
        for index, name in zip(indices, names, strict=False):
            part = self._load_part(index, block_table[index], name, min(size, end - index * size))
            if part is None:
                break
            # If no memory was free for one block, no memory is free for later blocks. Do not search again.
            had_room = not parts or parts[-1].kept is not None or parts[-1].is_reserved
            if part.kept is None and had_room and self.store.reserve(name, needed):
                part = msgspec.structs.replace(part, is_reserved=True)
            parts.append(part)
        load = Loading(
            request.id,
            used,
            parts,
            Proofs(request.cache_salt, tokens, size),
            self._pages,
            self.store,
            self._files,
            self._load_ended,
            before_count=start - computed_count,
            device=self._device,
        )
        self._loads[request.id] = load
        self._enqueue(Lane.LOAD_FILES if load.reads_files else Lane.LOAD, load)

    def load_abandoned(self, request_id: RequestId) -> None:
        load = self._loads.get(request_id)
        if load is None:
            return  # The load has already ended, and `progress` will return its event.
        load.is_abandoned = True
        load.problem = "the request does not need it any more"
        load.gate.is_wanted = False
        self._end_unless_begun(load)

    def request_finished(
        self,
        request: EngineRequest,
        block_table: Sequence[BlockIndex],
        tokens: Sequence[int],
        reason: FinishReason,
    ) -> bool:
        chain = self._chain(request)
        del self._chains[request.id]
        # The KV of a failed request may be the cause of the failure, so it is not stored.
        if self._is_closed or reason is FinishReason.ERROR:
            return False
        names = [chain.name(index, tokens) for index in range(len(tokens) // self._block_size)]
        self.store.touch(names)
        there_from = first_place(block_table)  # Blocks behind the sliding window no longer exist.
        new = [index for index, name in enumerate(names) if index >= there_from and not self.store.is_known(name)]
        room = self._saving_blocks_max - self._saving_block_count
        parts = []
        needed = self._only_in_memory(names)
        for index in new[: max(0, room)]:
            if not self.store.reserve(names[index], needed):
                break
            parts.append(SavePart(index, block_table[index], names[index]))
        self.store.counts.unsaved += len(new) - len(parts)
        if not parts:
            return False
        proofs = Proofs(request.cache_salt, tuple(tokens), self._block_size)
        save = Saving(request.id, names, parts, proofs, self._pages, self.store, self._save_ended, self._device)
        self._saves[request.id] = save
        self._saving_block_count += save.block_count
        self._enqueue(Lane.SAVE, save)
        return True

    def transfer_params(self, request_id: RequestId) -> KVTransferParams | None:
        return None

    def request_aborted_after_finish(self, request_id: RequestId) -> None:
        save = self._saves.get(request_id)
        if save is not None:
            save.gate.is_wanted = False
            self._end_unless_begun(save)

    def hold_expired(self, request_id: RequestId, kind: HoldKind) -> None:
        self._events.pop((request_id, kind), None)
        jobs: Mapping[RequestId, Saving | Loading] = self._saves if kind is HoldKind.SEND else self._loads
        job = jobs.get(request_id)
        if job is not None:
            job.gate.close()
            self._forget(job)
            self._end_unless_begun(job)

    def progress(self) -> Iterable[TransferEvent]:
        events, self._events = self._events, {}
        return tuple(events.values())

    def counts(self) -> dict[str, float]:
        """Return totals, and the number of bytes that are in use now."""
        counts, size = self.store.counts, self.store.block_bytes
        return {
            **{f"host_{name}": getattr(counts, name) for name in counts.__struct_fields__},
            "host_saved_bytes": counts.saved * size,
            "host_loaded_bytes": counts.loaded * size,
            "host_memory_bytes_used": self.store.memory.bytes_used,
            "host_directory_bytes_used": self.store.files.bytes_used,
        }

    # --- methods for the owner of the policy ---

    def begin_job(self, lane: Lane) -> Job | None:
        """Return the next job of a lane, or None.

        The owner calls the job's `next_work` until it returns None, `take` or `fail` after each piece, and finally
        `job_ended`.

        Args:
            lane: Lane to take the job from.
        """
        if not self.lanes[lane]:
            return None
        job = self.lanes[lane].popleft()
        self._running.add(job)
        return job

    def take(self, job: Job, result: Any) -> None:
        """Accept the result of a piece of work.

        Args:
            job: Running job.
            result: Value that the work returned.
        """
        job.take(result)
        self._write_if_need_be()

    def fail(self, job: Job, error: Exception) -> None:
        """Handle an error of a piece of work.

        Args:
            job: Running job.
            error: Error that the work raised.
        """
        job.fail(error)

    def job_ended(self, job: Job) -> None:
        self._running.remove(job)
        job.end()
        self._write_if_need_be()

    def close(self) -> None:
        """End the policy.

        Afterwards, no job accesses the engine's blocks, no tokens match, and the policy reports no events.
        """
        self._is_closed = True
        self._events.clear()
        for job in (*self._running, *self._saves.values(), *self._loads.values()):
            job.gate.close()
        for jobs in self.lanes.values():
            jobs.clear()

    # --- private methods ---

    def _first_place_seen(self, position: int) -> int:
        """Return the index of the first block that the token at this position attends to."""
        return 0 if self._window_tokens is None else max(0, position - self._window_tokens + 1) // self._block_size

    def _chain(self, request: EngineRequest) -> BlockChain:
        chain = self._chains.get(request.id)
        # The cache salt contains the weight version, so it changes when the weights are replaced.
        if chain is None or chain.salt != request.cache_salt:
            chain = BlockChain(request.cache_salt, self._block_size, hash_block=self._hash_block)
            self._chains[request.id] = chain
            if len(self._chains) > CHAINS_MAX:
                self._chains.popitem(last=False)
        return chain

    def _load_part(self, index: int, block: BlockIndex, name: BlockHash, token_count: int) -> LoadPart | None:
        """Pin a stored block, and describe its part of a load. Return None if the block is not stored."""
        kept = self.store.in_memory(name)
        if kept is not None:
            self.store.memory.pin([name])
            return LoadPart(index, block, name, token_count, kept)
        key = self.store.file(name)
        if key is None:
            return None
        self.store.files.pin([key])
        return LoadPart(index, block, name, token_count, key=key)

    def _only_in_memory(self, names: Sequence[BlockHash]) -> set[BlockHash]:
        """Return the blocks of a prefix that exist only in memory.

        The memory for further blocks of the same prefix must not be taken from these blocks.
        """
        return {name for name in names if self.store.file(name) is None}

    def _enqueue(self, lane: Lane, job: Job) -> None:
        self.lanes[lane].append(job)
        self.on_work(lane)

    def _end_unless_begun(self, job: Saving | Loading) -> None:
        for jobs in self.lanes.values():
            if job in jobs:
                jobs.remove(job)
                job.end()
                return

    def _running_loads(self) -> Iterator[Loading]:
        return (job for job in self._running if isinstance(job, Loading))

    def _forget(self, job: Saving | Loading) -> None:
        jobs: dict[RequestId, Any] = self._saves if isinstance(job, Saving) else self._loads
        if jobs.get(job.request_id) is job:
            del jobs[job.request_id]

    def _save_ended(self, save: Saving) -> None:
        self._saving_block_count -= save.block_count
        self._forget(save)
        if save.gate.is_open:
            self._report(Released(save.request_id), HoldKind.SEND)

    def _load_ended(self, load: Loading) -> None:
        self._forget(load)
        if not load.gate.is_open:
            return
        if load.token_count > 0 and not load.is_abandoned:
            self._report(Loaded(load.request_id, load.before_count + load.token_count), HoldKind.LOAD)
        else:
            self._report(LoadFailed(load.request_id, load.problem), HoldKind.LOAD)

    def _write_if_need_be(self) -> None:
        if self._writing is not None and self.store.has_file_work and not self._is_writing and not self._is_closed:
            self._is_writing = True
            self._enqueue(Lane.WRITE, self._writing)

    def _writing_ended(self) -> None:
        self._is_writing = False

    def _report(self, event: TransferEvent, kind: HoldKind) -> None:
        self._events[event.request_id, kind] = event
        self._wake()
