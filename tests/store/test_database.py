"""Tests of the database: atomic writes, owners, lifetimes and eviction, with the time as an argument."""

from __future__ import annotations

import os
import signal
import sqlite3
import stat
import subprocess
import sys

import pytest

from trioserve.contracts.errors import StartupError, StoreFault, StoreFull
from trioserve.store.database import APPLICATION_ID, FILE_NAME, ROW_BYTES, SCHEMA_VERSION, StoreDatabase
from trioserve.store.settings import StoreSettings
from trioserve.store.stored_objects import AppendBlob, DeleteObject, PutObject, ReplaceObject, is_id

NOW = 1000.0


def database(path=None, *, pages_max=None, now=NOW, **settings):
    return StoreDatabase(path, StoreSettings(**settings), now=now, pages_max=pages_max)


def put(object_id, body=b"{}", *, owner="alice", **more):
    return PutObject(kind="response", id=object_id, owner=owner, body=body, **more)


def ids(kept, owner=None, now=NOW, *, after=None, limit=100, order="asc"):
    page = kept.page("response", owner, now, after=after, limit=limit, order=order)
    return None if page is None else [entry.id for entry in page]


def test_an_object_is_visible_to_its_owner_and_to_readers_of_all_owners():
    kept = database()
    kept.write([put("a", b"1"), put("b", b"2", owner="bob"), put("c", b"3", owner=None)], NOW)
    assert kept.get("response", "a", "alice", NOW).body == b"1"
    assert kept.get("response", "b", "alice", NOW) is None
    assert kept.get("response", "c", "alice", NOW) is None
    assert kept.get("file", "a", "alice", NOW) is None
    assert [kept.get("response", entry, None, NOW).body for entry in "abc"] == [b"1", b"2", b"3"]
    assert ids(kept, "alice") == ["a"]
    assert ids(kept) == ["a", "b", "c"]


def test_pages_of_stored_objects_follow_the_order_of_arrival():
    kept = database()
    kept.write([put(entry) for entry in "dbace"], NOW)
    assert ids(kept, limit=2) == ["d", "b"]
    assert ids(kept, limit=2, after="b") == ["a", "c"]
    assert ids(kept, order="desc", limit=2) == ["e", "c"]
    assert ids(kept, order="desc", after="c") == ["a", "b", "d"]
    assert ids(kept, after="e") == []
    assert ids(kept, after="unknown") is None
    assert ids(kept, "bob", after="a") is None


def test_database_write_is_atomic():
    kept = database()
    kept.write([put("a", b"1")], NOW)
    usage = kept.usage()
    assert not kept.write([put("b"), ReplaceObject(kind="response", id="gone", body=b"2")], NOW)
    assert not kept.write([DeleteObject(kind="response", id="a"), AppendBlob(kind="response", id="x", data=b"2")], NOW)
    with pytest.raises(StoreFault):
        kept.write([put("b"), put("a")], NOW)
    assert kept.usage() == usage
    assert ids(kept) == ["a"]


def test_replaced_object_keeps_its_owner_time_and_blob():
    kept = database()
    kept.write([put("a", b"1", seconds=10), AppendBlob(kind="response", id="a", data=b"blob")], NOW)
    kept.write([ReplaceObject(kind="response", id="a", body=b"22")], NOW + 1)
    entry = kept.get("response", "a", "alice", NOW + 1)
    assert (entry.body, entry.created_at, entry.expires_at, entry.blob_bytes) == (b"22", NOW, NOW + 10, 4)
    assert kept.usage().bytes == ROW_BYTES + len("a") + len("alice") + 2 + 4
    kept.write([ReplaceObject(kind="response", id="a", body=b"", seconds=100)], NOW + 2)
    assert kept.get("response", "a", "alice", NOW + 2).expires_at == NOW + 102


def test_a_blob_is_read_in_pieces_of_any_size():
    kept = database()
    kept.write([put("a"), *(AppendBlob(kind="response", id="a", data=data) for data in (b"abc", b"", b"defg"))], NOW)
    kept.write([AppendBlob(kind="response", id="a", data=b"h")], NOW)

    def read(offset, size):
        return kept.read_blob("response", "a", "alice", NOW, offset=offset, size=size)

    assert [read(0, 100), read(0, 3), read(2, 3), read(7, 9), read(8, 9)] == [b"abcdefgh", b"abc", b"cde", b"h", b""]
    assert kept.read_blob("response", "a", "bob", NOW, offset=0, size=1) is None
    kept.write([DeleteObject(kind="response", id="a")], NOW)
    assert read(0, 1) is None
    assert kept.usage().bytes == 0
    assert kept._connection.execute("SELECT count(*) FROM pieces").fetchone() == (0,)


def test_an_expired_object_is_absent_and_removed_by_the_next_write():
    kept = database(seconds_max=100)
    kept.write([put("short", seconds=10), put("long")], NOW)
    assert ids(kept, now=NOW + 9.9) == ["short", "long"]
    assert kept.get("response", "short", None, NOW + 10) is None
    assert ids(kept, now=NOW + 10) == ["long"]
    assert ids(kept, now=NOW + 10, after="short") is None
    assert not kept.write([ReplaceObject(kind="response", id="short", body=b"")], NOW + 10)
    kept.write([put("short", b"new")], NOW + 10)
    assert (kept.usage().objects, kept.usage().expired_count) == (2, 1)
    assert ids(kept, now=NOW + 100) == ["short"]


def test_the_oldest_objects_are_evicted_at_a_limit():
    kept = database(objects_max=4)
    for entry in "abcdef":
        kept.write([put(entry)], NOW)
    assert ids(kept) == ["c", "d", "e", "f"]
    kept = database(bytes_max=4000)
    for entry in "abcdef":
        kept.write([put(entry, b"x" * 700)], NOW)
    assert ids(kept) == ["c", "d", "e", "f"]
    assert kept.usage().evicted_count == 2
    assert kept.usage().bytes <= 4000


def test_the_owner_with_most_bytes_is_evicted_first():
    kept = database(objects_max=6)
    kept.write([put("bobs", owner="bob")], NOW)
    for entry in "abcdefgh":
        kept.write([put(entry)], NOW)
    assert ids(kept) == ["bobs", "d", "e", "f", "g", "h"]


def test_objects_that_are_not_evictable_stay_and_the_write_is_refused():
    kept = database(objects_max=2)
    kept.write([put("a", is_evictable=False), put("b")], NOW)
    kept.write([put("c", is_evictable=False)], NOW)
    assert ids(kept) == ["a", "c"]
    with pytest.raises(StoreFull, match=r"--store-max-objects"):
        kept.write([put("d")], NOW)
    assert ids(kept) == ["a", "c"]
    kept.write([ReplaceObject(kind="response", id="a", body=b"", is_evictable=True)], NOW)
    kept.write([put("d")], NOW)
    assert ids(kept) == ["c", "d"]
    assert kept.usage().refused_count == 1


def test_database_write_does_not_evict_the_objects_that_it_writes():
    kept = database(bytes_max=4000)
    kept.write([put("a", b"x" * 1500), put("b", b"x" * 1500)], NOW)
    kept.write([AppendBlob(kind="response", id="a", data=b"x" * 1000)], NOW)
    assert ids(kept) == ["a"]
    with pytest.raises(StoreFull):
        kept.write([AppendBlob(kind="response", id="a", data=b"x" * 5000)], NOW)
    assert kept.get("response", "a", None, NOW).blob_bytes == 1000


def test_database_write_on_a_full_disk_changes_nothing(tmp_path):
    kept = database(tmp_path / FILE_NAME, pages_max=40)
    kept.write([put("a", b"1")], NOW)
    usage = kept.usage()
    with pytest.raises(StoreFull, match="disk is full"):
        kept.write([put("b"), AppendBlob(kind="response", id="b", data=b"x" * 400_000)], NOW)
    assert (kept.usage().bytes, kept.usage().objects) == (usage.bytes, usage.objects)
    assert ids(kept) == ["a"]
    kept.write([put("c")], NOW)
    kept.close()
    assert ids(database(tmp_path / FILE_NAME)) == ["a", "c"]


def test_objects_and_counts_survive_a_restart(tmp_path):
    kept = database(tmp_path / FILE_NAME)
    kept.write([put("a", b"x" * 100), put("b", seconds=5)], NOW)
    usage = kept.usage()
    kept.close()
    assert stat.S_IMODE((tmp_path / FILE_NAME).stat().st_mode) == 0o600
    kept = database(tmp_path / FILE_NAME)
    assert (kept.usage().bytes, kept.usage().objects) == (usage.bytes, usage.objects)
    kept.close()
    kept = database(tmp_path / FILE_NAME, now=NOW + 6)
    assert kept.usage().objects == 1
    kept.close()


WRITER = """
import sys
from pathlib import Path
from trioserve.store.database import StoreDatabase
from trioserve.store.settings import StoreSettings
from trioserve.store.stored_objects import AppendBlob, PutObject
kept = StoreDatabase(Path(sys.argv[1]), StoreSettings(), now=0.0)
for number in range(100_000):
    name = f"n{number}"
    kept.write([PutObject(kind="k", id=name, owner=None, body=name.encode()),
                AppendBlob(kind="k", id=name, data=b"x" * 20_000)], 0.0)
    print(number, flush=True)
"""


@pytest.mark.slow
def test_a_killed_process_loses_no_acknowledged_write(tmp_path):
    path = tmp_path / FILE_NAME
    with subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE, text=True) as writer:
        for line in writer.stdout:
            if int(line) >= 25:
                os.kill(writer.pid, signal.SIGKILL)  # The kill most likely happens during the next write.
                break
        acknowledged = [int(line), *(int(more) for more in writer.stdout if more.endswith("\n"))][-1]
    assert writer.returncode == -signal.SIGKILL
    kept = database(path, now=0.0)
    numbers = [int(entry.id[1:]) for entry in kept.page("k", None, 0.0, after=None, limit=10**6, order="asc")]
    assert numbers == list(range(len(numbers)))
    assert len(numbers) - 1 in (acknowledged, acknowledged + 1)
    for number in numbers:
        entry = kept.get("k", f"n{number}", None, 0.0)
        assert (entry.body, entry.blob_bytes) == (f"n{number}".encode(), 20_000)
        assert kept.read_blob("k", entry.id, None, 0.0, offset=0, size=10**6) == b"x" * 20_000
    kept.close()


def check_not_opened(path, sentence):
    with pytest.raises(StartupError, match=sentence) as raised:
        database(path)
    assert "\n" not in str(raised.value)


def test_damaged_database_file_is_reported(tmp_path):
    path = tmp_path / FILE_NAME
    path.write_bytes(b"this is no database, but it is long enough to be looked at" * 40)
    check_not_opened(path, "cannot be read .*move it away")
    path.unlink()
    kept = database(path)
    kept.write([put(f"n{number}", b"x" * 2000) for number in range(100)], NOW)
    kept.close()
    raw = bytearray(path.read_bytes())
    raw[8192:40960] = os.urandom(32768)
    path.write_bytes(raw)
    check_not_opened(path, "cannot be read .*move it away")


def test_database_files_of_other_programs_and_later_versions_are_not_changed(tmp_path):
    path = tmp_path / FILE_NAME
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE notes (text)")
    connection.close()
    check_not_opened(path, "another program's")
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    connection.close()
    check_not_opened(path, "later version")


def test_two_servers_cannot_open_one_database_file(tmp_path):
    kept = database(tmp_path / FILE_NAME)
    kept.write([put("a")], NOW)
    check_not_opened(tmp_path / FILE_NAME, "in use by another process")
    kept.close()
    database(tmp_path / FILE_NAME).close()


def test_unwritable_database_path_is_reported(tmp_path):
    check_not_opened(tmp_path / "missing" / FILE_NAME, "cannot be opened")


@pytest.mark.parametrize(
    ("text", "expect"),
    [
        ("resp_0a-1.b:c", True),
        ("a" * 128, True),
        ("a" * 129, False),
        ("", False),
        ("../../etc/passwd", False),
        ("a b", False),
        ("a\n", False),
        ("a\x00", False),
        ("ä", False),
        ("-a", False),
        ("a'; DROP TABLE objects", False),
    ],
)
def test_ids_of_stored_objects_contain_only_plain_characters(text, expect):
    assert is_id(text) is expect
