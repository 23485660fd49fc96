"""The stored part of a batch: its state and its two output files, which always change in one transaction.

Lines that finish while a write runs are written together by the next write. So the latency of the disk does not limit
the speed of a batch.

While the disk is full, finished lines wait in memory up to a limit, and no further line is sent to the engine. Terminal
statuses do not wait: readers of the store see them at once, and the store writes them when the disk has space
(Store.settle).
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
from trioserve.api.batches.stored_files import FILE_KIND, FileRecord, put_file
from trioserve.contracts.errors import DiskFull, StoreFault, StoreFull
from trioserve.store.store import Store
from trioserve.store.stored_objects import AppendBlob, Change, DeleteObject, PutObject, Quota, ReplaceObject

__all__ = ["BatchBook", "BatchDeleted", "DoneLine"]

# The state may grow by this number of bytes until the batch ends, and must then fit even into a full store.
RESERVE_BYTES = 16_384
# At most this number of lines may be done after the first unfinished line. The state lists all their numbers.
DONE_BEYOND_MAX = 1024
# The finished lines of one batch may take this memory while the disk is full. At most four batches run at a time.
WAITING_BYTES_MAX = 16 * 2**20
RETRY_SECONDS_MIN = 0.5
RETRY_SECONDS_MAX = 5.0  # The longest time until a batch resumes after the disk has space again.
NOT_KEPT_CODE = "result_not_kept"


class BatchDeleted(Exception):
    """One of the batch's files was deleted, or the batch itself has expired."""


class DoneLine(msgspec.Struct, frozen=True, kw_only=True):
    """A finished line.

    Attributes:
        number: Number of the line, from 0.
        end: Offset in the input of the byte after the line.
        output: Line of JSON for one of the two output files.
        is_error: True if the output belongs to the error file.
        is_dropped: True if the line was never sent to the engine.
        usage: Token counts of the response.
    """

    number: int
    end: int
    output: bytes
    is_error: bool
    is_dropped: bool = False
    usage: BatchUsage = BatchUsage()


class BatchBook:
    """The stored part of one batch. If a write raises StoreFull, StoreFault or BatchDeleted, nothing has changed.

    Args:
        store: Holds the batch, its files and its results.
        owner: Owner of the batch.
        record: State of the batch in the store. The attribute changes when a write has succeeded.
        is_input_shared: Returns True if another unfinished batch needs the same input file.
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
        self._ends: dict[int, int] = {}  # The end offsets in the input of the lines in done_beyond, by line number.
        self._writing = trio.Lock()
        self._progress = trio.Event()
        self._is_input_shared = is_input_shared
        self._is_disk_full = False
        self._is_draining = False

    @property
    def is_whole(self) -> bool:
        """True if all lines are done."""
        return 0 < self.record.total <= self.record.completed + self.record.failed

    async def create(self, *files: Change, quotas: Sequence[Quota] = ()) -> None:
        """Write the batch and its marker. The marker reserves space for the end of the batch.

        Args:
            files: Changes to files that are written in the same transaction.
            quotas: Limits for the owner's objects after the write.

        Raises:
            StoreFull: The store is full. Nothing is written.
            StoreFault: The disk refused the write. Nothing is written.
            QuotaExceeded: The owner has too many objects. Nothing is written.
            BatchDeleted: The input file was deleted. Nothing is written.
        """
        body = msgspec.json.encode(self.record)
        if self.file_kind != FILE_KIND:
            files = (*files, *self.output_files())
        mark = self._put(LIVE_KIND, bytes(len(body) + RESERVE_BYTES))
        if not await self._store.write(*files, self._put(self._kind, body), mark, quotas=quotas):
            raise BatchDeleted

    def is_done(self, number: int) -> bool:
        return number < self.record.line_next or number in self._ends or number in self.record.done_beyond

    def pass_over(self, number: int, end: int) -> None:
        """Note the end offset of a line that an earlier process finished.

        Args:
            number: Number of the line.
            end: Offset in the input of the byte after the line.
        """
        self._ends[number] = end

    async def wait_for_room(self, number: int) -> None:
        """Wait until the line is close enough to the first unfinished line.

        Args:
            number: Number of the line.
        """
        while number >= self.record.line_next + DONE_BEYOND_MAX:
            self._progress = trio.Event()
            await self._progress.wait()

    def drain(self) -> None:
        """Record that the server shuts down. Lines that wait for a full disk are passed to the store, which writes them
        when it closes.
        """
        self._is_draining = True

    async def move(self, status: BatchStatus, **fields: object) -> None:
        """Write another status, and all lines that have finished. Succeeds even if the disk is full.

        Args:
            status: New status.
            fields: Further fields of the state to change.
        """
        async with self._writing:
            await self._settle(self.record.moved(status, self._store.now(), **fields), [])

    async def begin(self, total: int) -> None:
        """Write the status in_progress, and create the output files.

        A batch of Anthropic's API already has its output files, because its results must exist however the batch ends.
        If the disk is full, this method waits as `note` does.

        Args:
            total: Number of lines.
        """
        async with self._writing:
            record = self.record
            record = record.moved(BatchStatus.IN_PROGRESS, self._store.now(), total=total)
            files = self.output_files() if self.file_kind == FILE_KIND else []
            await self._write_when_there_is_room(record, files)

    def output_files(self) -> list[Change]:
        """Return the changes that create the empty output files."""
        record = self.record
        files: list[Change] = []
        for file_id, name in ((record.output_file_id, "output"), (record.error_file_id, "errors")):
            kept = FileRecord(filename=f"{self.batch_id}_{name}.jsonl", purpose="batch_output")
            # The output files must not expire before the batch ends.
            seconds = max(record.output_seconds or 0.0, self._seconds)
            files += put_file(file_id, self.owner, kept, seconds=seconds, kind=self.file_kind)
        return files

    async def note(self, *lines: DoneLine) -> None:
        """Write finished lines to the store, and return when the store has them.

        While the disk is full, this method waits and retries. The caller's cancel scope has the time limit of the
        batch.

        Args:
            lines: Finished lines.

        Raises:
            StoreFull: A limit of the store's settings is reached.
            BatchDeleted: A file of the batch was deleted.
        """
        for line in lines:
            waiting_bytes = sum(len(pending.output) for pending in self._pending)
            has_room = not self._is_disk_full or waiting_bytes + len(line.output) <= WAITING_BYTES_MAX
            self._pending.append(line if has_room else _without_result(line))
        async with self._writing:
            if self._pending:
                await self._write_when_there_is_room(self.record, [])

    async def settle_lines(self, *lines: DoneLine) -> None:
        """Write lines of a batch that is ending. Succeeds even if the disk is full.

        Args:
            lines: Finished lines.

        Raises:
            StoreFull: Even the store's memory is full.
            StoreFault: Even the store's memory is full.
            BatchDeleted: A file of the batch was deleted.
        """
        self._pending += lines
        async with self._writing:
            if self._pending:
                await self._write(self.record, [], is_final=True)

    async def fail(self, error: BatchError) -> None:
        """Write the status failed. The message says how many lines have no result.

        Args:
            error: Reason of the failure.
        """
        with suppress(StoreFull, StoreFault):
            # Shrinking the marker frees the space that it reserved for the write below.
            await self._store.settle(ReplaceObject(kind=LIVE_KIND, id=self.batch_id, body=b"", must_exist=False))
        await self.close(BatchStatus.FAILED, errors=[error])

    async def close(self, status: BatchStatus, **fields: object) -> None:
        """Write the terminal status, and delete output files without lines.

        Succeeds even if the disk is full or a file of the batch was deleted.

        Args:
            status: Terminal status.
            fields: Further fields of the state to change.

        Raises:
            BatchDeleted: The batch itself was deleted.
            StoreFull: Even the store's memory is full.
            StoreFault: Even the store's memory is full.
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
        """Write the state and all pending lines, even if the disk is full or a file was deleted.

        If there is no space, replace results by errors. If there is still no space, or a file was deleted, write only
        the state.
        """
        try:
            await self._write(record, changes, is_final=True)
            return
        except (StoreFull, StoreFault, BatchDeleted) as error:
            if not self._pending:
                raise
            if not isinstance(error, BatchDeleted):
                self._pending = [_without_result(line) for line in self._pending]
                with suppress(StoreFull, StoreFault):
                    await self._write(record, changes, is_final=True)
                    return
        self._pending = []
        await self._write(record, changes, is_final=True)

    def _ending(self, record: BatchRecord) -> tuple[BatchRecord, list[Change]]:
        """Return the final state, and the changes to the output files. The changes delete empty files, and start the
        lifetime of all other files.
        """
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
        # The batch has extended the lifetime of its input file.
        if record.input_expires_at is not None and not self._is_input_shared():
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
        """Write the state, all pending lines, and the changes, in one transaction.

        Args:
            record: New state, without the pending lines.
            changes: Further changes.
            is_final: True for a final state. The store keeps it in memory if the disk refuses it, and writes it later.
        """
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
            seconds=self._store.seconds_max if record.is_final else None,  # The lifetime begins when the batch ends.
            # If ended batches could not be evicted, a caller could fill the store with batches that fail at once.
            is_evictable=record.is_final,
        )
        write = self._store.settle if is_final else self._store.write
        try:
            is_there = await write(put, *appended, *changes)
        except BaseException:
            self._pending = lines + self._pending
            raise
        if not is_there:
            self._pending = lines + self._pending
            raise BatchDeleted
        self.record, self._ends = record, ends
        self._progress.set()

    def _put(self, kind: str, body: bytes) -> PutObject:
        return PutObject(
            kind=kind, id=self.batch_id, owner=self.owner, body=body, seconds=self._seconds, is_evictable=False
        )

    @property
    def _seconds(self) -> float:
        """Lifetime of the objects that the batch needs: the time until the batch's time limit, plus the store's
        default.
        """
        return max(0.0, self.record.expires_at - self._store.now()) + self._store.seconds_max


def _counted(record: BatchRecord, lines: list[DoneLine], ends: dict[int, int]) -> tuple[BatchRecord, dict[int, int]]:
    """Return the state after these lines are done, and the end offsets of the lines in done_beyond."""
    usage = record.usage
    for line in lines:
        usage = usage.plus(line.usage)
    line_next, offset_next = record.line_next, record.offset_next
    while line_next in ends:
        offset_next = ends.pop(line_next)
        line_next += 1
    failed = sum(line.is_error for line in lines)
    # Keep line numbers that an earlier process recorded, because this process has not read those lines yet.
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
    """Return the line with an error instead of its response, because there is no space for the response."""
    named = msgspec.json.decode(line.output, type=_Named)
    message = "the disk of the store was full when this line was done, so its result is lost: send the request again"
    error = {"code": NOT_KEPT_CODE, "message": message, "line": line.number + 1}
    output = msgspec.json.encode({"id": named.id, "custom_id": named.custom_id, "response": None, "error": error})
    if len(output) >= len(line.output):
        return line
    return msgspec.structs.replace(line, output=output + b"\n", is_error=True, usage=BatchUsage())
