"""The store as one SQLite file, or in memory: what is written whole or not at all, who may see it, what has to go.

Synchronous, and the time is an argument. It belongs to one thread, which may block: see Store. What `write` has
returned from survives the end of the process at any moment, and that of the machine.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from trioserve.contracts.errors import StartupError, StoreFault, StoreFull
from trioserve.store.schema import APPLICATION_ID, MIGRATIONS, SCHEMA_VERSION
from trioserve.store.settings import StoreSettings
from trioserve.store.stored_objects import (
    AppendBlob,
    Change,
    DeleteObject,
    Order,
    PutObject,
    ReplaceObject,
    StoredObject,
)

__all__ = ["FILE_NAME", "StoreDatabase", "StoreUsage"]

FILE_NAME = "store.sqlite"
ROW_BYTES = 256  # of a row and its entries in four indexes, roughly; more than SQLite takes for short ids
SWEPT_MAX = 1000  # rows that one write removes for others at most, so that it stays short
EVICTED_SHARE = 0.05  # what is freed at a time when a bound is reached: looking for victims costs a pass over an index
_COLUMNS = "kind, id, owner, created_at, expires_at, body, blob_bytes"


class StoreUsage(msgspec.Struct, frozen=True, kw_only=True):
    """bytes, objects: at this moment. The others: since the start."""

    bytes: int
    objects: int
    evicted_count: int
    expired_count: int
    refused_count: int


class _Gone(Exception):
    """What was to be changed is not there."""


class StoreDatabase:
    """path: of the file; None: in memory. pages_max: of SQLite's, the file's own bound.

    Opening raises StartupError: the file cannot be made or read, is damaged, is not ours, is another server's at this
    moment, or comes from a later version. Methods raise StoreFull or StoreFault, and then nothing has changed.
    """

    def __init__(self, path: Path | None, settings: StoreSettings, *, now: float, pages_max: int | None = None) -> None:
        self._settings = settings
        self._path = path
        self._evicted_count = self._expired_count = self._refused_count = 0
        try:
            if path is not None and not path.exists():
                path.touch(mode=0o600)  # it holds what people write to a model
            self._connection = sqlite3.connect(":memory:" if path is None else path, isolation_level=None)
        except (OSError, sqlite3.Error) as error:
            raise StartupError(f"the store {path} cannot be opened: {error}") from None
        try:
            self._prepare(pages_max)
            [(self._bytes, self._objects)] = self._connection.execute(
                "SELECT coalesce(sum(byte_count), 0), count(*) FROM objects"
            ).fetchall()
            self._sweep(now)
        except (StoreFull, StoreFault) as error:
            self._connection.close()
            raise StartupError(f"the store {path} cannot be written: {error}") from None
        except sqlite3.Error as error:
            self._connection.close()
            raise StartupError(self._why_not_opened(error)) from None
        except BaseException:
            self._connection.close()
            raise

    def close(self) -> None:
        self._connection.close()

    @property
    def seconds_max(self) -> float:
        return self._settings.seconds_max

    @property
    def bytes_max(self) -> int:
        return self._settings.bytes_max

    @property
    def is_durable(self) -> bool:
        return self._path is not None

    # --- what is written ---

    def write(self, changes: Sequence[Change], now: float) -> bool:
        """All of the changes, or none. False, and nothing has changed, if an object to be replaced or appended to is
        gone. Raises StoreFull, StoreFault; a new object with the id of another one of its kind is a StoreFault."""
        self._sweep(now)
        bytes_before, objects_before, evicted_before = self._bytes, self._objects, self._evicted_count
        try:
            with self._transaction():
                self._make_room(changes)
                for change in changes:
                    self._apply(change, now)
        except BaseException as error:
            self._bytes, self._objects, self._evicted_count = bytes_before, objects_before, evicted_before
            if isinstance(error, _Gone):
                return False
            self._refused_count += isinstance(error, StoreFull)
            raise
        return True

    # --- what is read ---

    def get(self, kind: str, object_id: str, owner: str | None, now: float) -> StoredObject | None:
        """owner: only theirs; None: anybody's. None if there is no such object, or it is another's, or its time is
        over."""
        rows = self._query(
            f"SELECT {_COLUMNS} FROM objects WHERE kind = ? AND id = ? AND expires_at > ? AND (? IS NULL OR owner = ?)",
            (kind, object_id, now, owner, owner),
        )
        return _object(rows[0]) if rows else None

    def page(
        self, kind: str, owner: str | None, now: float, *, after: str | None, limit: int, order: Order
    ) -> list[StoredObject] | None:
        """At most `limit` objects in the order of their coming, behind the one with the id `after`; None if that is not
        there."""
        number = 0 if order == "asc" else 2**62
        if after is not None:
            found = self._query(
                "SELECT number FROM objects WHERE kind = ? AND id = ? AND expires_at > ? AND (? IS NULL OR owner = ?)",
                (kind, after, now, owner, owner),
            )
            if not found:
                return None
            number = found[0][0]
        sign = ">" if order == "asc" else "<"
        rows = self._query(
            f"SELECT {_COLUMNS} FROM objects WHERE kind = ? AND expires_at > ? AND (? IS NULL OR owner = ?) "
            f"AND number {sign} ? ORDER BY number {order} LIMIT ?",
            (kind, now, owner, owner, number, limit),
        )
        return [_object(row) for row in rows]

    def read_blob(
        self, kind: str, object_id: str, owner: str | None, now: float, *, offset: int, size: int
    ) -> bytes | None:
        """At most `size` bytes of an object's blob; fewer, or none, at its end. None as in `get`."""
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
        )

    # --- inside ---

    def _prepare(self, pages_max: int | None) -> None:
        execute = self._connection.execute
        # One server a file: its bounds are counted here, and another one would not see what this one keeps.
        execute("PRAGMA locking_mode = EXCLUSIVE")
        [(found_id,)] = execute("PRAGMA application_id").fetchall()
        [(version,)] = execute("PRAGMA user_version").fetchall()
        [(table_count,)] = execute("SELECT count(*) FROM sqlite_schema").fetchall()
        if table_count and found_id != APPLICATION_ID:
            raise StartupError(f"{self._path} is another program's SQLite file: take another --data-dir")
        if version > SCHEMA_VERSION:
            raise StartupError(
                f"the store {self._path} was written by a later version of trioserve (its tables have version "
                f"{version}, this one knows {SCHEMA_VERSION}): start that, or take another --data-dir"
            )
        execute("PRAGMA foreign_keys = ON")
        execute("PRAGMA secure_delete = FAST")  # what was deleted should not lie about in the file
        execute("PRAGMA journal_mode = WAL")
        execute("PRAGMA synchronous = FULL")  # with WAL: each commit is on the disk when it returns
        if pages_max is not None:
            execute(f"PRAGMA max_page_count = {pages_max:d}")
        if table_count:
            [(result,), *_more] = execute("PRAGMA quick_check(1)").fetchall()
            if result != "ok":
                raise sqlite3.DatabaseError(result)
        with self._transaction():
            for migration in MIGRATIONS[version:]:
                for statement in migration:
                    execute(statement)
            execute(f"PRAGMA application_id = {APPLICATION_ID}")
            execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _why_not_opened(self, error: sqlite3.Error) -> str:
        if _code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return f"the store {self._path} is in use by another process: each server needs a --data-dir of its own"
        what = " ".join(str(error).replace("***", "").split())  # SQLite tells of damage in several lines
        return f"the store {self._path} cannot be read ({what}): move it away, or put a copy in its place"

    def _apply(self, change: Change, now: float) -> None:
        execute = self._connection.execute
        if isinstance(change, PutObject):
            byte_count = _bytes_of_put(change)
            expires_at = now + (self._settings.seconds_max if change.seconds is None else change.seconds)
            # What is past its time and not swept yet does not stand in the way.
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
            raise _Gone
        number, byte_count, blob_bytes, body_bytes = found
        if isinstance(change, ReplaceObject):
            added = len(change.body) - body_bytes
            execute(
                "UPDATE objects SET body = ?, byte_count = ?, expires_at = coalesce(?, expires_at), "
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

    def _make_room(self, changes: Sequence[Change]) -> None:
        """Evict what may go until the changes fit. Raises StoreFull if they cannot."""
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
            f"the store has no room: {bytes_new} bytes in {objects_new} new objects were to be added to {self._bytes} "
            f"in {self._objects}, and it takes {settings.bytes_max} in {settings.objects_max} (--store-max-bytes, "
            "--store-max-objects): delete some, or send store=false"
        )

    def _evict(self, changes: Sequence[Change], *, bytes_goal: int, objects_goal: int) -> None:
        """The oldest of whoever has most, so that one key's objects do not push out those of all others; but none that
        the changes are for."""
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
        """Remove what is past its time."""
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
            if self._connection.in_transaction:  # some errors have ended it already
                self._connection.execute("ROLLBACK")
            if not isinstance(error, sqlite3.Error):
                raise
            if _code(error) == sqlite3.SQLITE_FULL:
                raise StoreFull(
                    "the store has no room: its disk is full, or its file as large as it may get"
                ) from error
            raise StoreFault(f"the store could not be written: {error}") from error


def _object(row: tuple[Any, ...]) -> StoredObject:
    return msgspec.convert(dict(zip(_COLUMNS.split(", "), row, strict=True)), StoredObject)


def _bytes_of_put(change: PutObject) -> int:
    return ROW_BYTES + len(change.id) + len(change.owner or "") + len(change.body)


def _bytes_of(change: Change) -> int:
    """What it adds at most."""
    if isinstance(change, PutObject):
        return _bytes_of_put(change)
    if isinstance(change, AppendBlob):
        return len(change.data)
    return len(change.body) if isinstance(change, ReplaceObject) else 0


def _code(error: sqlite3.Error) -> int:
    """The primary code; extended ones have more in the upper bits."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF
