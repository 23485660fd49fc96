"""The store as one SQLite file, or in memory. It has atomic writes, owners, lifetimes and eviction.

All methods are synchronous, and the time is an argument. One thread owns the database, and its calls may block that
thread (see Store). When `write` has returned, a change survives a crash of the process or machine.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from trioserve.contracts.errors import DiskFull, StartupError, StoreFault, StoreFull
from trioserve.store.full_disk import RESERVE_FILE_NAME, DiskReserve, UnwrittenChanges, UnwrittenGroup, bytes_of
from trioserve.store.settings import StoreSettings
from trioserve.store.stored_objects import (
    AppendBlob,
    Change,
    DeleteObject,
    Order,
    PutObject,
    Quota,
    QuotaExceeded,
    ReplaceObject,
    StoredObject,
)

__all__ = ["APPLICATION_ID", "MIGRATIONS", "SCHEMA_VERSION", "FILE_NAME", "StoreDatabase", "StoreUsage"]


# The text "trsv". It is in the header of each store file, so that files of other programs are recognized.
APPLICATION_ID = 0x74727376

# Each entry migrates a file from the previous version to the next. The first entry starts from an empty file.
# Never change a released entry: add another entry instead.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        # number: order of arrival, used for pages of lists.
        # byte_count: bytes that count toward the limit, including the blob and the row.
        """CREATE TABLE objects (
            number INTEGER PRIMARY KEY AUTOINCREMENT,
            kind TEXT NOT NULL,
            id TEXT NOT NULL,
            owner TEXT,
            created_at REAL NOT NULL,
            expires_at REAL NOT NULL,
            is_evictable INTEGER NOT NULL,
            byte_count INTEGER NOT NULL,
            blob_bytes INTEGER NOT NULL DEFAULT 0,
            body BLOB NOT NULL,
            UNIQUE (kind, id)
        ) STRICT""",
        "CREATE INDEX objects_by_owner ON objects (kind, owner, number)",
        "CREATE INDEX objects_by_end ON objects (expires_at)",
        "CREATE INDEX objects_to_evict ON objects (owner, number) WHERE is_evictable",
        """CREATE TABLE pieces (
            object INTEGER NOT NULL REFERENCES objects (number) ON DELETE CASCADE,
            offset INTEGER NOT NULL,
            data BLOB NOT NULL,
            PRIMARY KEY (object, offset)
        ) STRICT""",
    ),
)
SCHEMA_VERSION = len(MIGRATIONS)


FILE_NAME = "store.sqlite"
ROW_BYTES = 256  # Estimated size of a row and its entries in four indexes. SQLite needs less for short ids.
SWEPT_MAX = 1000  # Highest number of expired rows that one write removes, so that a write stays short.
# Fraction of a limit that is evicted at a time. Eviction is done in large portions, because it must scan an index.
EVICTED_SHARE = 0.05
PROBE_BYTES_MIN = 65_536  # Smallest size of a test write. It is larger than the size that a batch writes at a time.
PROBE_BYTES_MAX = 2**20
PAGES_MAX = 2**32 - 2  # This limit is set by SQLite.
_COLUMNS = "kind, id, owner, created_at, expires_at, body, blob_bytes"


DISK_ERRORS = (DiskFull, StoreFault)
"""Failures of the disk, which may be temporary. Limits of the settings raise StoreFull."""


class StoreUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of the store.

    Attributes:
        bytes, objects: number of bytes and number of objects that are stored now.
        evicted_count, expired_count, refused_count, failure_count: numbers since the start. A failure is a write that
            the disk refused.
        unwritten_bytes: bytes of changes that are kept in memory until the disk accepts them.
        trouble: reason why the disk refused the last write. None if the disk accepted it.
    """

    bytes: int
    objects: int
    evicted_count: int
    expired_count: int
    refused_count: int
    failure_count: int
    unwritten_bytes: int
    trouble: str | None


DISK_IS_FULL = "the store has no space: its disk is full, or its file has reached its maximum size"


class _Conflict(StoreFault):
    """A new object has the id of an existing object. This error is not caused by the disk."""


class _Gone(Exception):
    """An object that must be changed does not exist."""


class StoreDatabase:
    """The database of a store. If a method raises StoreFull or StoreFault, the method has changed nothing.

    Args:
        path: path of the file. None for a database in memory.
        settings: limits of the store.
        now: time in seconds since 1970.
        pages_max: largest size of the file in SQLite pages. None for no limit.

    Raises:
        StartupError: the file cannot be created or read, is damaged, belongs to another program or a later version, or
            is in use by another server.
    """

    def __init__(self, path: Path | None, settings: StoreSettings, *, now: float, pages_max: int | None = None) -> None:
        self._settings = settings
        self._path = path
        self._evicted_count = self._expired_count = self._refused_count = self._failure_count = 0
        self._unwritten = UnwrittenChanges()
        self._trouble: str | None = None
        self._probe_bytes = PROBE_BYTES_MIN
        try:
            if path is not None and not path.exists():
                path.touch(mode=0o600)  # The file must be private, because it contains prompts and responses.
            self._connection = sqlite3.connect(":memory:" if path is None else path, isolation_level=None)
        except (OSError, sqlite3.Error) as error:
            raise StartupError(f"the store {path} cannot be opened: {error}") from None
        try:
            self._prepare(pages_max)
            [(self._bytes, self._objects)] = self._connection.execute(
                "SELECT coalesce(sum(byte_count), 0), count(*) FROM objects"
            ).fetchall()
            self._reserve = DiskReserve(None if path is None else path.with_name(RESERVE_FILE_NAME))
            try:
                self._sweep(now)
            # The server starts despite this error, because reads work, and the disk may have space later.
            except DISK_ERRORS as error:
                self._note_failure(error)
        except (StoreFull, StoreFault) as error:
            self._connection.close()
            raise StartupError(f"the store {path} cannot be written: {error}") from None
        except sqlite3.Error as error:
            self._connection.close()
            raise StartupError(self._why_not_opened(error)) from None
        except BaseException:
            self._connection.close()
            raise

    def close(self) -> int:
        """Try once more to write the unwritten changes, and close the database. Return the number of lost writes."""
        if self._unwritten:
            self._reserve.release()
            try:
                self._write_unwritten()
            except DISK_ERRORS as error:
                self._note_failure(error)
        self._connection.close()
        return len(self._unwritten)

    def set_pages_max(self, pages_max: int | None) -> None:
        """Limit the size of the file. Tests use this to simulate a full disk.

        Args:
            pages_max: largest size in SQLite pages. If the value is below the current size of the file, the current
                size is used. So 1 simulates a full disk. None for no limit.
        """
        self._connection.execute(f"PRAGMA max_page_count = {PAGES_MAX if pages_max is None else pages_max:d}")

    @property
    def seconds_max(self) -> float:
        return self._settings.seconds_max

    @property
    def bytes_max(self) -> int:
        return self._settings.bytes_max

    @property
    def is_durable(self) -> bool:
        return self._path is not None

    # --- writing ---

    def write(self, changes: Sequence[Change], now: float, quotas: Sequence[Quota] = ()) -> bool:
        """Write all changes or none.

        Args:
            changes: the changes, in order.
            now: time in seconds since 1970.
            quotas: limits that the owners' objects must respect after the write.

        Returns:
            False if an object that should be replaced or extended does not exist any more. In that case nothing was
            changed.

        Raises:
            StoreFull: the limits leave no space. DiskFull: the disk has no space.
            StoreFault: the file fails, or a new object has the id of another object of its kind.
            QuotaExceeded: a quota would be exceeded.
        """
        try:
            if not self._reserve.is_whole and not self._reserve.fill():
                raise DiskFull(DISK_IS_FULL)  # Writes of terminal states may need the remaining space.
            self._write_unwritten()
            is_done = self._write(changes, now, quotas)
        except _Conflict:
            raise
        except DISK_ERRORS as error:
            self._note_failure(error, changes)
            raise
        if self._trouble is not None and bytes_of(changes) >= self._probe_bytes:
            # A smaller write that succeeds proves nothing, because it may fit into a partly used page.
            self._trouble = None
        return is_done

    def settle(self, changes: Sequence[Change], now: float) -> bool:
        """Write changes that must be accepted even if the disk is full: terminal states of jobs and responses, and
        deletions.

        If the disk refuses the write, the reserve is released. If the disk still refuses the write, the changes are
        kept in memory, where all readers see them. They are written when the disk has space: by the next write, by
        `retry`, or at the end.

        Args:
            changes: the changes, in order.
            now: time in seconds since 1970.

        Returns:
            As for `write`.

        StoreFull, StoreFault: as for `write`. Only raised if the changes exceed the memory limit.
        """
        try:
            return self.write(changes, now)
        except _Conflict:
            raise
        except DISK_ERRORS as error:
            self._reserve.release()
            try:
                self._write_unwritten()
                return self._write(changes, now, ())
            except _Conflict:
                raise
            except DISK_ERRORS:
                pass
            finally:
                self._reserve.fill()
            if not self._unwritten.has_room(changes):
                raise
            is_there = self._unwritten.add(UnwrittenGroup(tuple(changes), now), self._look, self._settings.seconds_max)
            if is_there:
                self._trouble = str(error)
            return is_there

    def retry(self) -> None:
        """Check whether the disk accepts writes again. If it does, write the changes that are kept in memory."""
        try:
            if not self._reserve.fill():
                raise DiskFull(DISK_IS_FULL)
            self._write_unwritten()
            self._probe()
        except DISK_ERRORS as error:
            self._note_failure(error)
        else:
            self._trouble = None
            self._probe_bytes = PROBE_BYTES_MIN

    def _probe(self) -> None:
        """Test the disk. Write as many bytes as the disk has refused, and remove them again.

        A smaller write would prove nothing, because it may fit into a page that has unused space.
        """
        with self._transaction():
            added = self._connection.execute(
                "INSERT OR IGNORE INTO objects (kind, id, created_at, expires_at, is_evictable, byte_count, body) "
                "VALUES ('probe', 'probe', 0, 0, 1, 0, zeroblob(?))",
                (self._probe_bytes,),
            ).rowcount
        self._objects += added
        objects = self._objects
        try:
            with self._transaction():
                self._delete("kind = 'probe'", ())
        except BaseException:
            self._objects = objects  # The lifetime of the probe is over, so a later write removes it.
            raise

    def _write_unwritten(self) -> None:
        """Write the unwritten changes to the database. The oldest changes are written first.

        Raises:
            DiskFull, StoreFault: the disk refuses the changes.
        """
        while (group := self._unwritten.first) is not None:
            try:
                self._write(group.changes, group.at, ())
            except _Conflict:
                pass
            except DISK_ERRORS:
                raise
            except StoreFull:
                pass  # The limits in the settings currently leave no space for this group.
            self._unwritten.drop_first(self._look, self._settings.seconds_max)

    def _look(self, kind: str, object_id: str) -> StoredObject | None:
        rows = self._query(f"SELECT {_COLUMNS} FROM objects WHERE kind = ? AND id = ?", (kind, object_id))
        return _object(rows[0]) if rows else None

    def _note_failure(self, error: Exception, changes: Sequence[Change] = ()) -> None:
        self._failure_count += 1
        self._trouble = str(error)
        self._probe_bytes = min(PROBE_BYTES_MAX, max(self._probe_bytes, bytes_of(changes)))

    def _write(self, changes: Sequence[Change], now: float, quotas: Sequence[Quota]) -> bool:
        self._sweep(now)
        bytes_before, objects_before, evicted_before = self._bytes, self._objects, self._evicted_count
        try:
            with self._transaction():
                self._make_room(changes)
                for change in changes:
                    self._apply(change, now)
                for quota in quotas:
                    self._check_quota(quota, now)
        except BaseException as error:
            self._bytes, self._objects, self._evicted_count = bytes_before, objects_before, evicted_before
            if isinstance(error, _Gone):
                return False
            if isinstance(error, StoreFull) and not isinstance(error, DiskFull):
                self._refused_count += 1
                for quota in quotas:  # Raise a quota error first, because the owner can solve it.
                    self._check_quota(quota, now, changes)
            raise
        return True

    # --- reading ---

    def get(self, kind: str, object_id: str, owner: str | None, now: float) -> StoredObject | None:
        """Return an object. None if the object is absent, expired, or belongs to another owner.

        Args:
            kind: kind of the object.
            owner: return only an object of this owner. None for an object of any owner.
            now: time in seconds since 1970.
        """
        is_unwritten, shown = self._unwritten.get(kind, object_id, owner, now)
        if is_unwritten:
            return shown
        rows = self._query(
            f"SELECT {_COLUMNS} FROM objects WHERE kind = ? AND id = ? AND expires_at > ? AND (? IS NULL OR owner = ?)",
            (kind, object_id, now, owner, owner),
        )
        return _object(rows[0]) if rows else None

    def page(
        self, kind: str, owner: str | None, now: float, *, after: str | None, limit: int, order: Order
    ) -> list[StoredObject] | None:
        """Return one page of a list, in order of arrival.

        Args:
            kind: kind of the objects.
            owner: return only objects of this owner. None for objects of all owners.
            now: time in seconds since 1970.
            after: id of the last object of the previous page. None for the first page.
            limit: highest number of objects to return.
            order: "asc" for oldest first, "desc" for newest first.

        Returns:
            The page. None if there is no object with the id `after`.
        """
        new = self._unwritten.new_objects(kind, owner, now)  # These objects are newer than all objects in the database.
        new_ids = [stored.id for stored in new]
        if after in new_ids:
            place = new_ids.index(after)
            if order == "asc":
                return new[place + 1 :][:limit]
            found = new[:place][::-1][:limit]
            return found + self._rows_of_page(kind, owner, now, 2**62, limit - len(found), order)
        number = 0 if order == "asc" else 2**62
        if after is not None:
            is_unwritten, shown = self._unwritten.get(kind, after, owner, now)
            written = self._query(
                "SELECT number FROM objects WHERE kind = ? AND id = ? AND expires_at > ? AND (? IS NULL OR owner = ?)",
                (kind, after, now, owner, owner),
            )
            if not written or (is_unwritten and shown is None):
                return None
            number = written[0][0]
        if order == "asc":
            rows = self._rows_of_page(kind, owner, now, number, limit, order)
            return rows + new[: limit - len(rows)]
        first = new[::-1][:limit] if after is None else []
        return first + self._rows_of_page(kind, owner, now, number, limit - len(first), order)

    def _rows_of_page(
        self, kind: str, owner: str | None, now: float, number: int, limit: int, order: Order
    ) -> list[StoredObject]:
        """Return up to `limit` objects of the database that come after `number` in `order`. Unwritten changes are
        applied to them.
        """
        sign = ">" if order == "asc" else "<"
        found: list[StoredObject] = []
        while len(found) < limit:
            rows = self._query(
                f"SELECT number, {_COLUMNS} FROM objects WHERE kind = ? AND expires_at > ? "
                f"AND (? IS NULL OR owner = ?) AND number {sign} ? ORDER BY number {order} LIMIT ?",
                (kind, now, owner, owner, number, limit - len(found)),
            )
            for row in rows:
                number, stored = row[0], _object(row[1:])
                is_unwritten, shown = self._unwritten.get(kind, stored.id, owner, now)
                if not is_unwritten:
                    found.append(stored)
                elif shown is not None:
                    found.append(shown)
            if not rows:
                break
        return found

    def read_blob(
        self, kind: str, object_id: str, owner: str | None, now: float, *, offset: int, size: int
    ) -> bytes | None:
        """Read a range of an object's blob.

        Args:
            kind: kind of the object.
            owner: read only an object of this owner. None for an object of any owner.
            now: time in seconds since 1970.
            offset: index of the first byte.
            size: highest number of bytes to return.

        Returns:
            The bytes. Near the end of the blob there are fewer bytes than requested, or b"". None if there is no such
            object.
        """
        is_unwritten, shown = self._unwritten.get(kind, object_id, owner, now)
        if not is_unwritten:
            return self._read_written_blob(kind, object_id, owner, now, offset, size)
        if shown is None:
            return None
        written_bytes, tail = self._unwritten.tail(kind, object_id)
        written = b""
        if offset < written_bytes:
            written = self._read_written_blob(kind, object_id, None, 0.0, offset, size) or b""
        return written + tail[max(0, offset - written_bytes) : max(0, offset + size - written_bytes)]

    def _read_written_blob(
        self, kind: str, object_id: str, owner: str | None, now: float, offset: int, size: int
    ) -> bytes | None:
        found = self._query(
            "SELECT number FROM objects WHERE kind = ? AND id = ? AND expires_at > ? AND (? IS NULL OR owner = ?)",
            (kind, object_id, now, owner, owner),
        )
        if not found:
            return None
        pieces = self._query(
            "SELECT offset, data FROM pieces WHERE object = ? AND offset < ? AND offset + length(data) > ? "
            "ORDER BY offset",
            (found[0][0], offset + size, offset),
        )
        return b"".join(data[max(0, offset - begin) : offset + size - begin] for begin, data in pieces)

    def usage(self) -> StoreUsage:
        return StoreUsage(
            bytes=self._bytes,
            objects=self._objects,
            evicted_count=self._evicted_count,
            expired_count=self._expired_count,
            refused_count=self._refused_count,
            failure_count=self._failure_count,
            unwritten_bytes=self._unwritten.byte_count,
            trouble=self._trouble,
        )

    # --- internals ---

    def _prepare(self, pages_max: int | None) -> None:
        execute = self._connection.execute
        # Only one server may use the file, because usage and unwritten changes are only in the server's memory.
        execute("PRAGMA locking_mode = EXCLUSIVE")
        [(found_id,)] = execute("PRAGMA application_id").fetchall()
        [(version,)] = execute("PRAGMA user_version").fetchall()
        [(table_count,)] = execute("SELECT count(*) FROM sqlite_schema").fetchall()
        if table_count and found_id != APPLICATION_ID:
            raise StartupError(f"{self._path} is another program's SQLite file: choose another --data-dir")
        if version > SCHEMA_VERSION:
            raise StartupError(
                f"the store {self._path} was written by a later version of trioserve (its tables have version "
                f"{version}, this one knows {SCHEMA_VERSION}): start the later version, or choose another --data-dir"
            )
        execute("PRAGMA foreign_keys = ON")
        execute("PRAGMA secure_delete = FAST")  # Overwrite deleted content if this needs no additional writes.
        execute("PRAGMA journal_mode = WAL")
        execute("PRAGMA synchronous = FULL")  # With WAL, this means that a commit is on the disk when it returns.
        if pages_max is not None:
            execute(f"PRAGMA max_page_count = {pages_max:d}")
        if table_count:
            [(result,), *_more] = execute("PRAGMA quick_check(1)").fetchall()
            if result != "ok":
                raise sqlite3.DatabaseError(result)
        if found_id == APPLICATION_ID and version == SCHEMA_VERSION:
            return  # Write nothing, so that the server can start on a full disk.
        with self._transaction():
            for migration in MIGRATIONS[version:]:
                for statement in migration:
                    execute(statement)
            execute(f"PRAGMA application_id = {APPLICATION_ID}")
            execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _why_not_opened(self, error: sqlite3.Error) -> str:
        """Return a message that says why a file cannot be opened."""
        if _code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return f"the store {self._path} is in use by another process: each server needs a --data-dir of its own"
        what = " ".join(str(error).replace("***", "").split())  # SQLite reports a damaged file in several lines.
        return f"the store {self._path} cannot be read ({what}): move it away, or put a copy in its place"

    def _apply(self, change: Change, now: float) -> None:
        execute = self._connection.execute
        if isinstance(change, PutObject):
            byte_count = _bytes_of_put(change)
            expires_at = now + (self._settings.seconds_max if change.seconds is None else change.seconds)
            # An expired object that is not removed yet must not block its id.
            self._delete("kind = ? AND id = ? AND expires_at <= ?", (change.kind, change.id, now))
            execute(
                "INSERT INTO objects (kind, id, owner, created_at, expires_at, is_evictable, byte_count, body) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (change.kind, change.id, change.owner, now, expires_at, change.is_evictable, byte_count, change.body),
            )
            self._bytes += byte_count
            self._objects += 1
            return
        if isinstance(change, DeleteObject):
            self._delete("kind = ? AND id = ?", (change.kind, change.id))
            return
        found = execute(
            "SELECT number, byte_count, blob_bytes, length(body) FROM objects "
            "WHERE kind = ? AND id = ? AND expires_at > ?",
            (change.kind, change.id, now),
        ).fetchone()
        if found is None:
            if isinstance(change, ReplaceObject) and not change.must_exist:
                return
            raise _Gone
        number, byte_count, blob_bytes, body_bytes = found
        if isinstance(change, ReplaceObject):
            added = 0 if change.body is None else len(change.body) - body_bytes
            execute(
                "UPDATE objects SET body = coalesce(?, body), byte_count = ?, expires_at = coalesce(?, expires_at), "
                "is_evictable = coalesce(?, is_evictable) WHERE number = ?",
                (
                    change.body,
                    byte_count + added,
                    None if change.seconds is None else now + change.seconds,
                    change.is_evictable,
                    number,
                ),
            )
        else:
            added = len(change.data)
            if added:
                execute("INSERT INTO pieces VALUES (?, ?, ?)", (number, blob_bytes, change.data))
            execute(
                "UPDATE objects SET byte_count = ?, blob_bytes = ? WHERE number = ?",
                (byte_count + added, blob_bytes + added, number),
            )
        self._bytes += added

    def _check_quota(self, quota: Quota, now: float, changes: Sequence[Change] = ()) -> None:
        """Check a quota. `changes` are changes that will be made afterwards.

        Raises:
            QuotaExceeded: the owner's objects exceed the quota, or would exceed it after the changes.
        """
        [(objects, blob_bytes)] = self._connection.execute(
            "SELECT count(*), coalesce(sum(blob_bytes), 0) FROM objects WHERE kind = ? AND owner IS ? "
            "AND expires_at > ?",
            (quota.kind, quota.owner, now),
        ).fetchall()
        for change in changes:
            objects += isinstance(change, PutObject) and (change.kind, change.owner) == (quota.kind, quota.owner)
            blob_bytes += len(change.data) if isinstance(change, AppendBlob) and change.kind == quota.kind else 0
        if objects > quota.objects_max or blob_bytes > quota.blob_bytes_max:
            raise QuotaExceeded(quota, objects, blob_bytes)

    def _make_room(self, changes: Sequence[Change]) -> None:
        """Evict objects until the changes fit.

        Raises:
            StoreFull: the changes cannot fit.
        """
        settings = self._settings
        bytes_new = sum(_bytes_of(change) for change in changes)
        objects_new = sum(isinstance(change, PutObject) for change in changes)
        bytes_wanted = self._bytes + bytes_new - settings.bytes_max
        objects_wanted = self._objects + objects_new - settings.objects_max
        if bytes_wanted <= 0 and objects_wanted <= 0:
            return
        if bytes_new <= settings.bytes_max and objects_new <= settings.objects_max:
            bytes_least = self._bytes - max(bytes_wanted, 0)
            objects_least = self._objects - max(objects_wanted, 0)
            self._evict(
                changes,
                bytes_goal=bytes_least - int(settings.bytes_max * EVICTED_SHARE) * (bytes_wanted > 0),
                objects_goal=objects_least - int(settings.objects_max * EVICTED_SHARE) * (objects_wanted > 0),
            )
            if self._bytes <= bytes_least and self._objects <= objects_least:
                return
        raise StoreFull(
            f"the store has no space: {bytes_new} bytes in {objects_new} new objects do not fit beside {self._bytes} "
            f"bytes in {self._objects} objects, with limits of {settings.bytes_max} and {settings.objects_max} "
            "(--store-max-bytes, --store-max-objects): delete objects, or send store=false"
        )

    def _evict(self, changes: Sequence[Change], *, bytes_goal: int, objects_goal: int) -> None:
        """Evict the oldest objects of the owner that has the most bytes. Repeat this until both goals are reached.

        So the objects of one owner do not displace the objects of other owners. Objects that the changes concern are
        not evicted.
        """
        kept = [
            row[0]
            for change in changes
            for row in self._connection.execute(
                "SELECT number FROM objects WHERE kind = ? AND id = ?", (change.kind, change.id)
            )
        ]
        keeps = f"is_evictable AND number NOT IN ({','.join(map(str, kept))})"
        while self._bytes > bytes_goal or self._objects > objects_goal:
            heaviest = self._connection.execute(
                f"SELECT owner FROM objects WHERE {keeps} GROUP BY owner ORDER BY sum(byte_count) DESC LIMIT 1"
            ).fetchone()
            if heaviest is None:
                return
            oldest = self._connection.execute(
                f"SELECT number, byte_count FROM objects WHERE {keeps} AND owner IS ? ORDER BY number LIMIT ?",
                (heaviest[0], SWEPT_MAX),
            ).fetchall()
            for number, _byte_count in oldest:
                self._evicted_count += self._delete("number = ?", (number,))
                if self._bytes <= bytes_goal and self._objects <= objects_goal:
                    return

    def _sweep(self, now: float) -> None:
        """Remove at most SWEPT_MAX expired objects."""
        if not self._query("SELECT 1 FROM objects WHERE expires_at <= ? LIMIT 1", (now,)):
            return
        bytes_before, objects_before = self._bytes, self._objects
        try:
            with self._transaction():
                count = self._delete(
                    "number IN (SELECT number FROM objects WHERE expires_at <= ? ORDER BY expires_at LIMIT ?)",
                    (now, SWEPT_MAX),
                )
        except BaseException:
            self._bytes, self._objects = bytes_before, objects_before
            raise
        self._expired_count += count

    def _delete(self, condition: str, values: tuple[object, ...]) -> int:
        rows = self._connection.execute(
            f"DELETE FROM objects WHERE {condition} RETURNING byte_count", values
        ).fetchall()
        self._bytes -= sum(row[0] for row in rows)
        self._objects -= len(rows)
        return len(rows)

    def _query(self, statement: str, values: tuple[object, ...]) -> list[tuple[Any, ...]]:
        try:
            return self._connection.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            raise StoreFault(f"the store could not be read: {error}") from error

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            yield
            self._connection.execute("COMMIT")
        except BaseException as error:
            if self._connection.in_transaction:  # Some errors have already ended the transaction.
                self._connection.execute("ROLLBACK")
            if not isinstance(error, sqlite3.Error):
                raise
            if _code(error) == sqlite3.SQLITE_FULL:
                raise DiskFull(DISK_IS_FULL) from error
            if isinstance(error, sqlite3.IntegrityError):
                raise _Conflict(f"the store could not be written: {error}") from error
            raise StoreFault(f"the store could not be written: {error}") from error


def _object(row: tuple[Any, ...]) -> StoredObject:
    return msgspec.convert(dict(zip(_COLUMNS.split(", "), row, strict=True)), StoredObject)


def _bytes_of_put(change: PutObject) -> int:
    return ROW_BYTES + len(change.id) + len(change.owner or "") + len(change.body)


def _bytes_of(change: Change) -> int:
    """Return the highest number of bytes that a change can add."""
    if isinstance(change, PutObject):
        return _bytes_of_put(change)
    if isinstance(change, AppendBlob):
        return len(change.data)
    return len(change.body or b"") if isinstance(change, ReplaceObject) else 0


def _code(error: sqlite3.Error) -> int:
    """Return the primary error code. The upper bits of an extended code contain more information."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF
