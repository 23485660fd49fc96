"""What of a batch is in the store: its record and its two files, changed together or not at all.

Several lines that end while one write is under way go into the next one together, so that a disk that takes
milliseconds for each write does not decide how fast a batch is.

While the disk is full, lines that are done wait in memory, within a bound, and no further line is asked. Final states
do not wait: the store shows them at once, and writes them when there is room (Store.settle).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

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
from trioserve.contracts.errors import DiskFull, StoreFault, StoreFull
from trioserve.store.store import Store
from trioserve.store.stored_objects import AppendBlob, Change, DeleteObject, PutObject, Quota, ReplaceObject

__all__ = ["BatchBook", "BatchGone", "DoneLine"]

RESERVE_BYTES = 16_384  # what a record may have more at its end than at its beginning; in a full store it has to fit
DONE_BEYOND_MAX = 1024  # lines that may be done while one before them is not: each is a number in the record
WAITING_BYTES_MAX = (
    16 * 2**20
)  # of the lines of one batch that wait for a full disk; at most four batches run at a time
RETRY_SECONDS_MIN = 0.5
RETRY_SECONDS_MAX = 5.0  # so soon after there is room the batch resumes
NOT_KEPT_CODE = "result_not_kept"


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
    """What the store has of one batch. Writes raise StoreFull, StoreFault and BatchGone, and then nothing has changed.

    Args:
        record: as it is in the store, always: it changes when a write has come back.
        is_input_shared: whether another batch that has not ended needs the same input.
    """

    def __init__(
        self,
        store: Store,
        batch_id: str,
        owner: str | None,
        record: BatchRecord,
        *,
        is_input_shared: Callable[[], bool] = lambda: False,
    ) -> None:
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
        self._is_input_shared = is_input_shared
        self._is_disk_full = False
        self._is_draining = False

    @property
    def is_whole(self) -> bool:
        """Every line is done."""
        return 0 < self.record.total <= self.record.completed + self.record.failed

    async def create(self, *files: Change, quotas: Sequence[Quota] = ()) -> None:
        """Write the batch and its mark, which holds room for its end.

        Args:
            files: written with it.
            quotas: what their owners may have afterwards.

        Raises:
            StoreFull, StoreFault, QuotaExceeded: nothing is written.
            BatchGone: a file that was to be replaced is gone.
        """
        body = msgspec.json.encode(self.record)
        if self.file_kind != FILE_KIND:
            files = (*files, *self.output_files())
        mark = self._put(LIVE_KIND, bytes(len(body) + RESERVE_BYTES))
        if not await self._store.write(*files, self._put(self._kind, body), mark, quotas=quotas):
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

    def drain(self) -> None:
        """The server leaves: lines that wait for a full disk are handed to the store, which writes them at its end."""
        self._is_draining = True

    async def move(self, status: BatchStatus, **fields: object) -> None:
        """Write another status, together with all lines that have ended before. No full disk prevents it."""
        async with self._writing:
            await self._settle(self.record.moved(status, self._store.now(), **fields), [])

    async def begin(self, total: int) -> None:
        """It is in progress: its files are there, and empty. Those of Anthropic's API were made with the batch, since
        each of its requests is told of whenever it ends. While the disk is full it waits, as `note` does."""
        async with self._writing:
            record = self.record
            record = record.moved(BatchStatus.IN_PROGRESS, self._store.now(), total=total)
            files = self.output_files() if self.file_kind == FILE_KIND else []
            await self._write_when_there_is_room(record, files)

    def output_files(self) -> list[Change]:
        """What makes them, empty."""
        record = self.record
        files: list[Change] = []
        for file_id, name in ((record.output_file_id, "output"), (record.error_file_id, "errors")):
            kept = FileRecord(filename=f"{self.batch_id}_{name}.jsonl", purpose="batch_output")
            seconds = max(record.output_seconds or 0.0, self._seconds)  # they must not go before the batch ends
            files += put_file(file_id, self.owner, kept, seconds=seconds, kind=self.file_kind)
        return files

    async def note(self, *lines: DoneLine) -> None:
        """Returns when the lines are in the store. While the disk is full it waits and tries again: the time of the
        batch bounds that, in the scope of the caller.

        Raises:
            StoreFull: a bound of the store's settings is reached.
            BatchGone: a file is gone.
        """
        for line in lines:
            waiting_bytes = sum(len(one.output) for one in self._pending)
            has_room = not self._is_disk_full or waiting_bytes + len(line.output) <= WAITING_BYTES_MAX
            self._pending.append(line if has_room else _without_result(line))
        async with self._writing:
            if self._pending:
                await self._write_when_there_is_room(self.record, [])

    async def settle_lines(self, *lines: DoneLine) -> None:
        """The same for lines of a batch that ends: a full disk does not hold them up. Raises StoreFull and StoreFault
        when even the store's memory has no room for them, and BatchGone."""
        self._pending += lines
        async with self._writing:
            if self._pending:
                await self._write(self.record, [], is_final=True)

    async def fail(self, error: BatchError) -> None:
        """The last status where no more can be done. Its message says how many lines have no result."""
        with suppress(StoreFull, StoreFault):
            # There is room now.
            await self._store.settle(ReplaceObject(kind=LIVE_KIND, id=self.batch_id, body=b"", must_exist=False))
        await self.close(BatchStatus.FAILED, errors=[error])

    async def close(self, status: BatchStatus, **fields: object) -> None:
        """Write its last status; files without a line are deleted. No full disk prevents it, and no file that is gone.

        Raises:
            BatchGone: the batch itself is gone.
            StoreFull, StoreFault: the store's memory has no room even for this.
        """
        async with self._writing:
            record = self.record.moved(status, self._store.now(), **fields)
            await self._settle(record, [DeleteObject(kind=LIVE_KIND, id=self.batch_id)])

    async def _write_when_there_is_room(self, record: BatchRecord, changes: list[Change]) -> None:
        seconds = RETRY_SECONDS_MIN
        try:
            while True:
                try:
                    await self._write(record, changes, is_final=self._is_draining)
                    return
                except (DiskFull, StoreFault):
                    if self._is_draining:
                        raise
                self._is_disk_full = True
                await trio.sleep(seconds)
                seconds = min(RETRY_SECONDS_MAX, 2 * seconds)
        finally:
            self._is_disk_full = False

    async def _settle(self, record: BatchRecord, changes: list[Change]) -> None:
        """Write the record with all that is pending; if there is no room, with errors in the place of results; if there
        is still none, or a file is gone, alone."""
        try:
            await self._write(record, changes, is_final=True)
            return
        except (StoreFull, StoreFault, BatchGone) as error:
            if not self._pending:
                raise
            if not isinstance(error, BatchGone):
                self._pending = [_without_result(line) for line in self._pending]
                with suppress(StoreFull, StoreFault):
                    await self._write(record, changes, is_final=True)
                    return
        self._pending = []
        await self._write(record, changes, is_final=True)

    def _ending(self, record: BatchRecord) -> tuple[BatchRecord, list[Change]]:
        """The final record and what happens to its files: those without a line go, the others live from now on."""
        counts = {record.output_file_id: record.completed, record.error_file_id: record.failed}
        changes: list[Change] = []
        for file_id, count in counts.items():
            if not count:
                changes.append(DeleteObject(kind=self.file_kind, id=file_id))
            elif record.output_seconds is not None:
                kept = ReplaceObject(
                    kind=self.file_kind, id=file_id, body=None, seconds=record.output_seconds, must_exist=False
                )
                changes.append(kept)
        if record.input_expires_at is not None and not self._is_input_shared():  # it was kept for the batch
            seconds = max(1.0, record.input_expires_at - self._store.now())
            changes.append(
                ReplaceObject(
                    kind=self.file_kind, id=record.input_file_id, body=None, seconds=seconds, must_exist=False
                )
            )
        missing = record.total - record.completed - record.failed
        if record.status is BatchStatus.FAILED and missing and record.errors:
            first, *others = record.errors
            message = f"{first.message}; {missing} of {record.total} lines have no result"
            record = msgspec.structs.replace(record, errors=[msgspec.structs.replace(first, message=message), *others])
        return record, changes

    async def _write(self, record: BatchRecord, changes: list[Change], *, is_final: bool = False) -> None:
        """Write the record, with all that is pending, and the changes. is_final: whatever the disk does."""
        lines, self._pending = self._pending, []
        ends = {**self._ends, **{line.number: line.end for line in lines}}
        record, ends = _counted(record, lines, ends)
        if record.is_final:
            record, ending = self._ending(record)
            changes = [*changes, *ending]
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
        write = self._store.settle if is_final else self._store.write
        try:
            is_there = await write(put, *appended, *changes)
        except BaseException:
            self._pending = lines + self._pending
            raise
        if not is_there:
            self._pending = lines + self._pending
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


class _Named(msgspec.Struct):
    id: str
    custom_id: str | None


def _without_result(line: DoneLine) -> DoneLine:
    """The same line, for which there is no room, with an error in the place of its response."""
    named = msgspec.json.decode(line.output, type=_Named)
    message = "the disk of the store was full when this line was done, and there was no room for its result: ask again"
    error = {"code": NOT_KEPT_CODE, "message": message, "line": line.number + 1}
    output = msgspec.json.encode({"id": named.id, "custom_id": named.custom_id, "response": None, "error": error})
    if len(output) >= len(line.output):
        return line
    return msgspec.structs.replace(line, output=output + b"\n", is_error=True, usage=BatchUsage())
