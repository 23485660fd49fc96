"""The reader's side: which loads are out, how far each has come, and what their holders have to be told.

    start_load ──► alive ──► all of it came, and the hold lived to the end ──► Loaded
                         ──► refused, or broken too often or for too long ───► LoadFailed
                         ──► abandoned ──────────────────────────────────────► LoadFailed
                         ──► its deadline in the core ───────────────────────► (nothing)

A load that has ended never lives again. Whoever brings its bytes asks `is_alive` before each of them is written, and is
stopped in the call that ends it. From the end of the last load of a hold on, its holder is to be told that nothing more
will be read of it.
"""

from __future__ import annotations

import enum
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

import msgspec

from trioserve.connectors.stream.frames import TELL_IDS_MAX, Tell
from trioserve.connectors.stream.reports import Reports
from trioserve.connectors.stream.sources import Origin, Source
from trioserve.contracts.ids import BlockIndex, RequestId
from trioserve.contracts.kv_transfer import HoldKind, Loaded, LoadFailed

__all__ = ["Load", "LoadEnd", "Loads"]

RETRIES_MAX = 8  # of one load, however far it came in between
QUIET_SECONDS_MAX = 8.0  # a hold lasts ten without a sign of life: soon after this there is nothing to come back to
RETRY_SECONDS = (0.0, 0.05, 0.2, 0.5, 1.0)  # by how often it broke since the last chunk that came
DEAF_MAX = 3  # refused connections in a row: an engine listens as long as it holds anything
NEWS_MAX = 1_000  # releases that wait to be told to one holder; of those beyond, it learns by the deadline


class LoadEnd(enum.Enum):
    COMPLETED = "completed"
    FAILED = "failed"
    ABANDONED = "abandoned"


def _nobody() -> None:
    pass


class Load(msgspec.Struct, eq=False):
    """KV that is to be read into blocks: token_count positions from `start` on, position p in block_table[p //
    block_size]. proof: of all tokens up to their end. asked_count: of the positions and those before them that lie in
    no block, behind a sliding window. next_chunk: the first one that has not come. begun_at: when its turn came. stop:
    of the task that brings it."""

    request_id: RequestId
    origin: Origin
    block_table: Sequence[BlockIndex]
    start: int
    token_count: int
    proof: bytes
    asked_count: int
    is_alive: bool = True
    next_chunk: int = 0
    retries: int = 0
    retries_in_a_row: int = 0
    begun_at: float = 0.0
    quiet_since: float | None = None
    stop: Callable[[], None] = _nobody


class Loads:
    """All calls are O(1) unless they say otherwise. on_work: called when there is a new load, or something to tell a
    holder."""

    def __init__(self, reports: Reports, on_work: Callable[[], None]) -> None:
        self._reports = reports
        self._on_work = on_work
        self._out: dict[RequestId, Load] = {}
        self._new: deque[Load] = deque()
        self._readers: dict[Source, Counter[str]] = {}  # of each hold, how many of our loads read it
        self._news: dict[Source, dict[str, None]] = {}  # releases that the holder does not know of yet
        self._urgent: set[Source] = set()
        self.ends: Counter[LoadEnd] = Counter()
        self.resumed_total = 0

    def __len__(self) -> int:
        return len(self._out)

    # --- the core's side ---

    def start(
        self,
        request_id: RequestId,
        origin: Origin | str,
        block_table: Sequence[BlockIndex],
        start: int,
        token_count: int,
        proof: bytes,
        *,
        asked_count: int | None = None,
    ) -> None:
        """asked_count: token_count if it is None. origin: where it is, or why it cannot be had."""
        if isinstance(origin, str):
            self.ends[LoadEnd.FAILED] += 1
            self._reports.add(LoadFailed(request_id, origin))
            return
        asked_count = token_count if asked_count is None else asked_count
        load = Load(request_id, origin, block_table, start, token_count, proof, asked_count)
        self._out[request_id] = load
        self._readers.setdefault(origin.source, Counter())[origin.request_id] += 1
        self._new.append(load)
        self._urgent.add(origin.source)
        self._on_work()

    def abandoned(self, request_id: RequestId) -> None:
        load = self._out.get(request_id)
        if load is not None:
            self._end(load, LoadEnd.ABANDONED, LoadFailed(request_id, "nobody waits for it any more"))

    def expired(self, request_id: RequestId) -> None:
        load = self._out.get(request_id)
        if load is not None:
            self._end(load, LoadEnd.ABANDONED, None)
        self._reports.forget(HoldKind.LOAD, request_id)

    def not_needed(self, origin: Origin) -> None:
        """A request has ended that never loaded what is held for it."""
        readers = self._readers.get(origin.source)
        if readers is None or origin.request_id not in readers:
            self._release(origin)

    # --- the transport's side ---

    def take_new(self) -> tuple[Load, ...]:
        """Those that nobody brings yet."""
        taken = tuple(load for load in self._new if load.is_alive)
        self._new.clear()
        return taken

    def came(self, load: Load, now: float) -> None:
        """One chunk more is in its place, and right."""
        load.next_chunk += 1
        load.retries_in_a_row = 0
        load.quiet_since = now

    def complete(self, load: Load) -> None:
        """Everything came, and the holder has said that it was right to the end."""
        if load.is_alive:
            self._end(load, LoadEnd.COMPLETED, Loaded(load.request_id, load.asked_count))

    def failed(self, load: Load, message: str) -> None:
        """For good."""
        if load.is_alive:
            self._end(load, LoadEnd.FAILED, LoadFailed(load.request_id, f"{load.origin.source}: {message}"))

    def begun(self, load: Load, now: float) -> None:
        """Its turn has come: patience with its holder counts from here."""
        load.begun_at = now
        load.quiet_since = now

    def broken(self, load: Load, message: str, now: float, *, is_deaf: bool = False) -> float | None:
        """Its connection failed; is_deaf: there is nobody to connect to. Returns in how many seconds to go on with
        another one; None: never, it has failed."""
        if not load.is_alive:
            return None
        load.retries += 1
        quiet_seconds = 0.0 if load.quiet_since is None else now - load.quiet_since
        seconds = RETRY_SECONDS[min(load.retries_in_a_row, len(RETRY_SECONDS) - 1)]
        load.retries_in_a_row += 1
        if (
            load.retries > RETRIES_MAX
            or load.retries_in_a_row > (DEAF_MAX if is_deaf else len(RETRY_SECONDS))
            or quiet_seconds + seconds >= QUIET_SECONDS_MAX
        ):
            self.failed(load, message)
            return None
        self.resumed_total += 1
        return seconds

    def tells(self, source: Source) -> list[Tell]:
        """What a holder has to be told now: what is still wanted of it, and what no more. O(loads from there)."""
        keep = list(self._readers.get(source, ()))
        release = list(self._news.get(source, ()))
        size = TELL_IDS_MAX // 2
        return [
            Tell(tuple(keep[at : at + size]), tuple(release[at : at + size]))
            for at in range(0, max(len(keep), len(release)), size)
        ]

    def take_urgent(self) -> tuple[Source, ...]:
        """Those that have to be told something at once."""
        taken = tuple(self._urgent)
        self._urgent.clear()
        return taken

    def told(self, source: Source, tell: Tell, gone: Iterable[str]) -> None:
        """It knows, and these of the wanted ones it does not have. O(loads)."""
        self._told(source, tell.release)
        lost = set(gone)
        if lost:
            for load in tuple(self._out.values()):
                if load.origin.source == source and load.origin.request_id in lost:
                    self.failed(load, "it does not hold the blocks any more")

    def cannot_tell(self, source: Source) -> None:
        """It cannot be reached. What it has not heard it will learn from its deadlines."""
        self._news.pop(source, None)

    def stop(self) -> None:
        """Nobody will be there to bring anything."""
        for load in tuple(self._out.values()):
            self.failed(load, "this engine's connector has ended")
        self._new.clear()

    # --- inside ---

    def _end(self, load: Load, end: LoadEnd, report: Loaded | LoadFailed | None) -> None:
        del self._out[load.request_id]
        load.is_alive = False
        self.ends[end] += 1
        source, held = load.origin.source, load.origin.request_id
        readers = self._readers[source]
        readers[held] -= 1
        if not readers[held]:
            del readers[held]
            if not readers:
                del self._readers[source]
            self._release(load.origin)
        if report is not None:
            self._reports.add(report)
        load.stop()

    def _release(self, origin: Origin) -> None:
        news = self._news.setdefault(origin.source, {})
        if len(news) < NEWS_MAX:
            news[origin.request_id] = None
        self._urgent.add(origin.source)
        self._on_work()

    def _told(self, source: Source, released: Iterable[str]) -> None:
        news = self._news.get(source)
        if news is None:
            return
        for request_id in released:
            news.pop(request_id, None)
        if not news:
            del self._news[source]
