"""What of a batch is in the store: its record and its two files, changed together or not at all.

Several lines that end while one write is under way go into the next one together, so that a disk that takes
milliseconds for each write does not decide how fast a batch is.
"""

from __future__ import annotations

import msgspec
import trio

from trioserve.api.batches.batch_record import (
    LIVE_KIND,
    BatchError,
    BatchRecord,
    BatchStatus,
    BatchUsage,
    batch_kind,
    file_kind,
)
from trioserve.api.files.stored_files import FILE_KIND, FileRecord, put_file
from trioserve.store.store import Store
from trioserve.store.stored_objects import AppendBlob, Change, DeleteObject, PutObject, ReplaceObject

__all__ = ["BatchBook", "BatchGone", "DoneLine"]

RESERVE_BYTES = 16_384  # what a record may have more at its end than at its beginning; in a full store it has to fit
DONE_BEYOND_MAX = 1024  # lines that may be done while one before them is not: each is a number in the record


class BatchGone(Exception):
    """Somebody has deleted one of its files, or the time of the batch itself is over."""


class DoneLine(msgspec.Struct, frozen=True, kw_only=True):
    """output: a line of JSON for one of the two files, as is_error says. is_dropped: it was not asked. end: offset of
    what follows the line in the input."""

    number: int
    end: int
    output: bytes
    is_error: bool
    is_dropped: bool = False
    usage: BatchUsage = BatchUsage()


class BatchBook:
    """record: as it is in the store, always: it changes when a write has come back. Writes raise StoreFull, StoreFault
    and BatchGone, and then nothing has changed."""

    def __init__(self, store: Store, batch_id: str, owner: str | None, record: BatchRecord) -> None:
        self.batch_id = batch_id
        self.owner = owner
        self.record = record
        self.file_kind = file_kind(batch_id)
        self._kind = batch_kind(batch_id)
        self._store = store
        self._pending: list[DoneLine] = []
        self._ends: dict[int, int] = {}  # of the lines in done_beyond
        self._writing = trio.Lock()
        self._progress = trio.Event()

    @property
    def is_whole(self) -> bool:
        """Every line is done."""
        return 0 < self.record.total <= self.record.completed + self.record.failed

    async def create(self, *files: Change) -> None:
        """The batch and its mark, which holds room for its end. files: written with it. Raises StoreFull,
        StoreFault, and BatchGone if one that was to be replaced is gone."""
        body = msgspec.json.encode(self.record)
        if self.file_kind != FILE_KIND:
            files = (*files, *self.output_files())
        mark = self._put(LIVE_KIND, bytes(len(body) + RESERVE_BYTES))
        if not await self._store.write(*files, self._put(self._kind, body), mark):
            raise BatchGone

    def is_done(self, number: int) -> bool:
        return number < self.record.line_next or number in self._ends or number in self.record.done_beyond

    def pass_over(self, number: int, end: int) -> None:
        """A line that was done before this process began: where it ends is known now."""
        self._ends[number] = end

    async def wait_for_room(self, number: int) -> None:
        """Returns when this line is not too far beyond the first one that is not done."""
        while number >= self.record.line_next + DONE_BEYOND_MAX:
            self._progress = trio.Event()
            await self._progress.wait()

    async def move(self, status: BatchStatus, **fields: object) -> None:
        """What has ended before is written with it."""
        async with self._writing:
            await self._write(self.record.moved(status, self._store.now(), **fields), [])

    async def begin(self, total: int) -> None:
        """It is in progress: its files are there, and empty. Those of Anthropic's API were made with the batch, since
        each of its requests is told of whenever it ends."""
        async with self._writing:
            record = self.record
            record = record.moved(BatchStatus.IN_PROGRESS, self._store.now(), total=total)
            await self._write(record, self.output_files() if self.file_kind == FILE_KIND else [])

    def output_files(self) -> list[Change]:
        """What makes them, empty."""
        record = self.record
        files: list[Change] = []
        for file_id, name in ((record.output_file_id, "output"), (record.error_file_id, "errors")):
            kept = FileRecord(filename=f"{self.batch_id}_{name}.jsonl", purpose="batch_output")
            seconds = record.output_seconds or self._seconds
            files += put_file(file_id, self.owner, kept, seconds=seconds, kind=self.file_kind)
        return files

    async def note(self, *lines: DoneLine) -> None:
        """Returns when they are in the store."""
        self._pending += lines
        async with self._writing:
            if self._pending:
                await self._write(self.record, [])

    async def fail(self, error: BatchError) -> None:
        """The last status where no more can be written: lines that are not in the store are lost."""
        self._pending = []
        await self._store.write(ReplaceObject(kind=LIVE_KIND, id=self.batch_id, body=b""))  # there is room now
        await self.close(BatchStatus.FAILED, errors=[error])

    async def close(self, status: BatchStatus, **fields: object) -> None:
        """Its last status; files without a line are taken away."""
        async with self._writing:
            record = self.record
            failed = record.failed + sum(line.is_error for line in self._pending)
            done = record.completed + record.failed + len(self._pending)
            counts = {record.output_file_id: done - failed, record.error_file_id: failed}
            changes: list[Change] = [
                DeleteObject(kind=self.file_kind, id=file_id) for file_id, count in counts.items() if not count
            ]
            changes.append(DeleteObject(kind=LIVE_KIND, id=self.batch_id))
            await self._write(record.moved(status, self._store.now(), **fields), changes)

    async def _write(self, record: BatchRecord, changes: list[Change]) -> None:
        """The record, with all that is pending, and the changes."""
        lines, self._pending = self._pending, []
        ends = {**self._ends, **{line.number: line.end for line in lines}}
        record, ends = _counted(record, lines, ends)
        appended = [
            AppendBlob(kind=self.file_kind, id=file_id, data=data)
            for file_id, is_error in ((record.output_file_id, False), (record.error_file_id, True))
            if (data := b"".join(line.output for line in lines if line.is_error is is_error))
        ]
        put = ReplaceObject(
            kind=self._kind,
            id=self.batch_id,
            body=msgspec.json.encode(record),
            seconds=self._store.seconds_max if record.is_final else None,  # from its end on
            is_evictable=record.is_final,  # otherwise a caller could fill the store with batches that fail at once
        )
        try:
            is_there = await self._store.write(put, *changes, *appended)
        except BaseException:
            self._pending = lines + self._pending
            raise
        if not is_there:
            raise BatchGone
        self.record, self._ends = record, ends
        self._progress.set()

    def _put(self, kind: str, body: bytes) -> PutObject:
        return PutObject(
            kind=kind, id=self.batch_id, owner=self.owner, body=body, seconds=self._seconds, is_evictable=False
        )

    @property
    def _seconds(self) -> float:
        """The life of what it needs: until it ends at the latest, and then as long as anything."""
        return max(0.0, self.record.expires_at - self._store.now()) + self._store.seconds_max


def _counted(record: BatchRecord, lines: list[DoneLine], ends: dict[int, int]) -> tuple[BatchRecord, dict[int, int]]:
    """The record with these lines done; and the ends of those that are done beyond the first one that is not."""
    usage = record.usage
    for line in lines:
        usage = usage.plus(line.usage)
    line_next, offset_next = record.line_next, record.offset_next
    while line_next in ends:
        offset_next = ends.pop(line_next)
        line_next += 1
    failed = sum(line.is_error for line in lines)
    # Those of an earlier process that were not met again yet are kept as they are.
    beyond = {number for number in record.done_beyond if number >= line_next} | ends.keys()
    record = msgspec.structs.replace(
        record,
        completed=record.completed + len(lines) - failed,
        failed=record.failed + failed,
        dropped=record.dropped + sum(line.is_dropped for line in lines),
        usage=usage,
        line_next=line_next,
        offset_next=offset_next,
        done_beyond=sorted(beyond),
    )
    return record, ends
