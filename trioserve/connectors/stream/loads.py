"""Loads from other engines: their progress, their retries, and the messages that are due to the holders.

    start_load ──► alive ──► all chunks arrived, and the hold lasted to the end ──► Loaded
                         ──► refused, or failed too often or for too long ────────► LoadFailed
                         ──► abandoned ───────────────────────────────────────────► LoadFailed
                         ──► its deadline in the core passed ─────────────────────► (no event)

A load that has ended never becomes alive again. The call that ends a load also stops its transfer. A transfer checks
`is_alive` each time before it writes to the blocks. When the last load of a hold ends, the holder gets a release.
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

RETRIES_MAX = 8  # limit per load, also if chunks arrived between the failures
QUIET_SECONDS_MAX = 8.0  # a hold ends after ten seconds without a reader, so later retries would fail
RETRY_SECONDS = (0.0, 0.05, 0.2, 0.5, 1.0)  # by the number of failures since the last chunk arrived
DEAF_MAX = 3  # refused connections in a row; an engine that holds blocks also listens
NEWS_MAX = 1_000  # unsent releases per holder; further holds end by their deadline


class LoadEnd(enum.Enum):
    COMPLETED = "completed"
    FAILED = "failed"
    ABANDONED = "abandoned"


def _nobody() -> None:
    pass


class Load(msgspec.Struct, eq=False):
    """Load of KV from another engine into blocks of this engine.

    Attributes:
        request_id: Request that needs the KV.
        origin: Engine and request that hold the KV.
        block_table: Blocks of the request. Position p is in block_table[p // block_size].
        start: First position to read.
        token_count: Number of positions to read.
        proof: Hash of all tokens up to the last position (see proof.py).
        asked_count: Number of positions that the core asked for. It includes positions behind a sliding window, which
            have no block and are not read.
        is_alive: False once the load has ended.
        next_chunk: Index of the first chunk that has not arrived.
        retries: Number of failures since the start of the load.
        retries_in_a_row: Number of failures since the last chunk arrived.
        begun_at: Time in seconds when the transfer began. Loads above the limit `reads_max` wait before it.
        quiet_since: Time in seconds when the last chunk arrived, or when the transfer began. None before it began.
        stop: Stops the task that transfers the chunks.
    """

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
    """All loads of this engine.

    Cost: O(1) per call, unless a method says more.

    Args:
        reports: Receives the events for the core.
        on_work: Called when there is a new load, or a message for a holder.
    """

    def __init__(self, reports: Reports, on_work: Callable[[], None]) -> None:
        self._reports = reports
        self._on_work = on_work
        self._out: dict[RequestId, Load] = {}
        self._new: deque[Load] = deque()
        self._readers: dict[Source, Counter[str]] = {}  # number of loads per hold, by holder
        self._news: dict[Source, dict[str, None]] = {}  # releases that the holder has not received yet
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
        """Start a load, or report its failure if its origin is invalid.

        Args:
            request_id: Request that needs the KV.
            origin: Engine and request that hold the KV, or a sentence that says why there is none.
            block_table: Blocks of the request. Position p is in block_table[p // block_size].
            start: First position to read.
            token_count: Number of positions to read.
            proof: Hash of all tokens up to the last position (see proof.py).
            asked_count: Number of positions that the core asked for. None means `token_count`.
        """
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
            self._end(load, LoadEnd.ABANDONED, LoadFailed(request_id, "the request does not need it any more"))

    def expired(self, request_id: RequestId) -> None:
        load = self._out.get(request_id)
        if load is not None:
            self._end(load, LoadEnd.ABANDONED, None)
        self._reports.forget(HoldKind.LOAD, request_id)

    def not_needed(self, origin: Origin) -> None:
        """Release the hold of a request that ended without a load, unless another load reads it.

        Args:
            origin: Hold that was made for the request.
        """
        readers = self._readers.get(origin.source)
        if readers is None or origin.request_id not in readers:
            self._release(origin)

    # --- the transport's side ---

    def take_new(self) -> tuple[Load, ...]:
        """Return the loads whose transfer has not been started, and remove them from the list of new loads."""
        taken = tuple(load for load in self._new if load.is_alive)
        self._new.clear()
        return taken

    def came(self, load: Load, now: float) -> None:
        """Record that the next chunk is in the blocks and its checksum is right.

        Args:
            load: Load of the chunk.
            now: Current time in seconds.
        """
        load.next_chunk += 1
        load.retries_in_a_row = 0
        load.quiet_since = now

    def complete(self, load: Load) -> None:
        """End a load whose chunks all arrived, after the holder confirmed that the hold was alive to the end.

        Args:
            load: Load to end. Nothing happens if it has ended.
        """
        if load.is_alive:
            self._end(load, LoadEnd.COMPLETED, Loaded(load.request_id, load.asked_count))

    def failed(self, load: Load, message: str) -> None:
        """End a load that cannot be retried.

        Args:
            load: Load to end. Nothing happens if it has ended.
            message: Reason for the failure.
        """
        if load.is_alive:
            self._end(load, LoadEnd.FAILED, LoadFailed(load.request_id, f"{load.origin.source}: {message}"))

    def begun(self, load: Load, now: float) -> None:
        """Record that the transfer of a load begins. The limit QUIET_SECONDS_MAX counts from here.

        Args:
            load: Load that begins.
            now: Current time in seconds.
        """
        load.begun_at = now
        load.quiet_since = now

    def broken(self, load: Load, message: str, now: float, *, is_deaf: bool = False) -> float | None:
        """Record that the connection of a load failed, and decide when to retry.

        Args:
            load: Load whose connection failed.
            message: Reason, reported if the load fails.
            now: Current time in seconds.
            is_deaf: True if the holder refused the connection.

        Returns:
            Seconds to wait before the retry. None if the load has ended, now or before.
        """
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
        """Build the TELL messages that are due to a holder.

        Args:
            source: Holder that gets the messages.

        Returns:
            Messages with all holds that are still needed and all unsent releases. Empty if there are none.

        Cost: O(loads from the holder).
        """
        keep = list(self._readers.get(source, ()))
        release = list(self._news.get(source, ()))
        size = TELL_IDS_MAX // 2
        return [
            Tell(tuple(keep[at : at + size]), tuple(release[at : at + size]))
            for at in range(0, max(len(keep), len(release)), size)
        ]

    def take_urgent(self) -> tuple[Source, ...]:
        """Return the holders that need a message now, and clear the list."""
        taken = tuple(self._urgent)
        self._urgent.clear()
        return taken

    def told(self, source: Source, tell: Tell, gone: Iterable[str]) -> None:
        """Record that a holder answered a TELL, and fail the loads whose holds are gone.

        Args:
            source: Holder that answered.
            tell: Message that it answered.
            gone: Holds that are needed, but no longer exist.

        Cost: O(loads).
        """
        self._told(source, tell.release)
        lost = set(gone)
        if lost:
            for load in tuple(self._out.values()):
                if load.origin.source == source and load.origin.request_id in lost:
                    self.failed(load, "it does not hold the blocks any more")

    def cannot_tell(self, source: Source) -> None:
        """Drop the releases for a holder that cannot be reached. Its holds end by their deadlines.

        Args:
            source: Holder that cannot be reached.
        """
        self._news.pop(source, None)

    def stop(self) -> None:
        """Fail all loads, because the transport has ended."""
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
