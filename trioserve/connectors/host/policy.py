"""What the host store answers to the core, and what it has done in threads meanwhile. Waits for nothing.

A request's full blocks are copied when it ends, if they are not stored: not when the prefix cache evicts them, since
nobody is asked then, and the room is needed at once. So the core holds them for as long as the copying takes, a few ms;
and no more than half of the pool at a time. Of a model whose layers all have a sliding window only the blocks are there
to be copied that the window still reaches; a prompt is found by these. What is loaded comes from memory or from files,
and what comes from files is kept in memory again if there is room.

A load that nobody waits for any more stops at its next piece, and is reported when it has stopped. While one does not,
as on a disk that is dead, no further load is promised that would have to read files; those from memory go on.
"""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from trioserve.connectors.host.block_files import BlockFiles
from trioserve.connectors.host.chain import BlockChain, HashBlock, Proofs
from trioserve.connectors.host.copying import block_bytes
from trioserve.connectors.host.jobs import Job, Loading, LoadPart, SavePart, Saving, Writing
from trioserve.connectors.host.settings import HostSettings
from trioserve.connectors.host.store import BlockStore
from trioserve.connectors.windowed_tables import first_place, first_position
from trioserve.contracts.block_hash import BlockHash, hash_block
from trioserve.contracts.events import FinishReason
from trioserve.contracts.ids import BlockIndex, RequestId
from trioserve.contracts.kv_transfer import HoldKind, KVPages, Loaded, LoadFailed, Released, TransferEvent
from trioserve.contracts.kv_transfer_params import KVTransferParams
from trioserve.contracts.request import EngineRequest

__all__ = ["HostPolicy", "Lane"]

CHAINS_MAX = 128
"""Requests whose names are remembered between two questions: those at the head of the queue, and those that load."""

SAVING_BYTES_MAX = 2 * 2**30
"""That are held to be copied at a time: about a second's work, and a tenth of the time for which blocks may be held."""


class Lane(enum.Enum):
    """Jobs of one lane come one after the other, and those of two lanes wait for each other never."""

    SAVE = "save"
    LOAD = "load"
    LOAD_FILES = "load files"
    WRITE = "write"


class HostPolicy:
    """A KVConnector (contracts.kv_transfer). Whoever drives it takes jobs off the lanes, in order.

    window_tokens: as in ConnectorSetup.
    on_work: told whenever a lane has got a job. wake: told when `progress` has something to tell.
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
    ) -> None:
        self.on_work: Callable[[Lane], None] = lambda lane: None
        self.lanes: dict[Lane, deque[Job]] = {lane: deque() for lane in Lane}
        self._pages = pages
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
        self._running: set[Job] = set()  # in a thread, or between two
        self._writing = None if files is None else Writing(self.store, files, self._writing_ended)
        self._is_writing = False
        self._saving_block_count = 0
        self._saving_blocks_max = min(pages.block_count // 2, max(1, SAVING_BYTES_MAX // self.store.block_bytes))
        self._events: dict[tuple[RequestId, HoldKind], TransferEvent] = {}
        self._is_closed = False

    # --- the core's side ---

    def num_matched_tokens(self, request: EngineRequest, computed_count: int) -> int:
        if self._is_closed or computed_count % self._block_size != 0:
            return 0
        first = computed_count // self._block_size
        chain, tokens = self._chain(request), request.known_token_ids
        files_answer = not any(load.is_abandoned and load.reads_files for load in self._running_loads())
        end, stored_from = first, first
        for index in range(first, (len(tokens) - 1) // self._block_size):  # the last token is computed in any case
            name = chain.name(index, tokens)
            if self.store.in_memory(name) is None and not (files_answer and self.store.file(name) is not None):
                if self._window_tokens is None:
                    break
                stored_from = index + 1  # what comes behind it may do without it
            if stored_from <= max(first, self._first_place_seen((index + 1) * self._block_size)):
                end = index + 1
        return (end - first) * self._block_size

    def start_load(
        self, request: EngineRequest, block_table: Sequence[BlockIndex], computed_count: int, token_count: int
    ) -> None:
        assert request.id not in self._loads, f"{request.id} is loaded twice at a time"
        if self._is_closed:
            self._report(LoadFailed(request.id, "the store has been left"), HoldKind.LOAD)
            return
        tokens, size = request.known_token_ids, self._block_size
        end = computed_count + token_count
        start = first_position(block_table, size, computed_count)
        indices = range(start // size, -(-end // size))
        chain = self._chain(request)
        # A last block that is not full is not one of the prompt's either, if the prompt ends in it.
        used = [chain.name(index, tokens) for index in range(indices.stop) if (index + 1) * size <= len(tokens)]
        names = used[indices.start :]
        parts: list[LoadPart] = []
        needed = self._only_in_memory(names)
        for index, name in zip(indices, names, strict=False):
            part = self._load_part(index, block_table[index], name, min(size, end - index * size))
            if part is None:
                break
            # Where there is no room for one there is none for those behind it: looking for it takes time.
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
        )
        self._loads[request.id] = load
        self._enqueue(Lane.LOAD_FILES if load.reads_files else Lane.LOAD, load)

    def load_abandoned(self, request_id: RequestId) -> None:
        load = self._loads.get(request_id)
        if load is None:
            return  # its end waits to be told
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
        # What made a request fail may be in its KV, and must not outlive it.
        if self._is_closed or reason is FinishReason.ERROR:
            return False
        names = [chain.name(index, tokens) for index in range(len(tokens) // self._block_size)]
        self.store.touch(names)
        there_from = first_place(block_table)  # behind a sliding window nothing is left to be saved
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
        save = Saving(request.id, names, parts, proofs, self._pages, self.store, self._save_ended)
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
        """Totals, and how many bytes are in use now."""
        counts, size = self.store.counts, self.store.block_bytes
        return {
            **{f"host_{name}": getattr(counts, name) for name in counts.__struct_fields__},
            "host_saved_bytes": counts.saved * size,
            "host_loaded_bytes": counts.loaded * size,
            "host_memory_bytes_used": self.store.memory.bytes_used,
            "host_directory_bytes_used": self.store.files.bytes_used,
        }

    # --- the side of whoever drives it ---

    def begin_job(self, lane: Lane) -> Job | None:
        """The next one, or None. It is asked for its next_work until there is none, take or fail follows each, and
        job_ended is the end of it."""
        if not self.lanes[lane]:
            return None
        job = self.lanes[lane].popleft()
        self._running.add(job)
        return job

    def take(self, job: Job, result: Any) -> None:
        """What its work returned."""
        job.take(result)
        self._write_if_need_be()

    def fail(self, job: Job, error: Exception) -> None:
        """Its work raised."""
        job.fail(error)

    def job_ended(self, job: Job) -> None:
        self._running.remove(job)
        job.end()
        self._write_if_need_be()

    def close(self) -> None:
        """Nothing touches the engine's blocks from now on, and nothing is answered or reported."""
        self._is_closed = True
        self._events.clear()
        for job in (*self._running, *self._saves.values(), *self._loads.values()):
            job.gate.close()
        for jobs in self.lanes.values():
            jobs.clear()

    # --- inside ---

    def _first_place_seen(self, position: int) -> int:
        """Of a block table, by the token at this position."""
        return 0 if self._window_tokens is None else max(0, position - self._window_tokens + 1) // self._block_size

    def _chain(self, request: EngineRequest) -> BlockChain:
        chain = self._chains.get(request.id)
        if chain is None or chain.salt != request.cache_salt:  # which a change of weights changes
            chain = BlockChain(request.cache_salt, self._block_size, hash_block=self._hash_block)
            self._chains[request.id] = chain
            if len(self._chains) > CHAINS_MAX:
                self._chains.popitem(last=False)
        return chain

    def _load_part(self, index: int, block: BlockIndex, name: BlockHash, token_count: int) -> LoadPart | None:
        """With what it pins; None: the block is not stored."""
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
        """Those of a prefix that must not go to make room for more of it."""
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
