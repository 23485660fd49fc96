"""Tests of a disk that refuses writes: final states are readable at once, and written as soon as there is space."""

from __future__ import annotations

import logging
import os
import sqlite3

import pytest
import trio

from trioserve.contracts.errors import DiskFull, StoreFault, StoreFull
from trioserve.store.database import FILE_NAME, StoreDatabase
from trioserve.store.full_disk import RESERVE_BYTES, RESERVE_FILE_NAME, UNWRITTEN_BYTES_MAX, DiskReserve
from trioserve.store.settings import StoreSettings
from trioserve.store.store import open_store
from trioserve.store.stored_objects import (
    AppendBlob,
    DeleteObject,
    PutObject,
    Quota,
    QuotaExceeded,
    ReplaceObject,
)
from trioserve.testing.inline_work import open_inline_store

NOW = 1000.0
FILL = b"x" * 4000


def put(name, body=b"{}", **options):
    return PutObject(kind="response", id=name, owner="alice", body=body, **options)


def replace(name, body, **options):
    return ReplaceObject(kind="response", id=name, body=body, **options)


def append(name, data):
    return AppendBlob(kind="response", id=name, data=data)


def delete(name):
    return DeleteObject(kind="response", id=name)


def ids(kept, **options):
    options = {"after": None, "limit": 100, "order": "asc", **options}
    page = kept.page("response", "alice", NOW, **options)
    return None if page is None else [entry.id for entry in page]


def fill(kept):
    """Fill the file, so that SQLite has no free page and cannot allocate a page."""
    kept.set_pages_max(1)
    number = 0
    while True:
        try:
            kept.write([put(f"fill{number}", FILL)], NOW)
        except DiskFull:
            return
        number += 1


@pytest.fixture
def full(tmp_path):
    """Return a database on a full disk, with the objects `a` and `b`."""
    kept = StoreDatabase(tmp_path / FILE_NAME, StoreSettings(), now=NOW)
    kept.write([put("a", b"1"), append("a", b"one "), put("b", b"2")], NOW)
    fill(kept)
    yield kept
    kept.close()


def test_final_state_on_a_full_disk_is_readable_at_once_and_written_later(full, tmp_path):
    assert full.settle([replace("a", FILL * 3), append("a", b"two")], NOW)
    assert full.get("response", "a", "alice", NOW).body == FILL * 3
    assert full.get("response", "a", "bob", NOW) is None
    assert full.get("response", "a", "alice", NOW).blob_bytes == 7
    assert full.read_blob("response", "a", "alice", NOW, offset=2, size=4) == b"e tw"
    assert full.usage().unwritten_bytes > 12_000
    assert "disk is full" in full.usage().trouble
    full.retry()
    assert full.usage().trouble is not None
    full.set_pages_max(None)
    full.retry()
    assert (full.usage().trouble, full.usage().unwritten_bytes) == (None, 0)
    assert full.get("response", "a", "alice", NOW).body == FILL * 3
    assert full.read_blob("response", "a", "alice", NOW, offset=0, size=100) == b"one two"


def test_list_of_stored_objects_contains_unwritten_objects(full):
    before = ids(full)
    assert full.settle([put("new1", FILL * 3)], NOW)
    assert full.settle([put("new2", FILL * 3), append("new2", b"blob")], NOW)
    assert full.settle([delete("b"), replace("a", FILL * 3)], NOW)
    expected = [name for name in before if name != "b"] + ["new1", "new2"]
    for order, wanted in (("asc", expected), ("desc", expected[::-1])):
        paged, after = [], None
        while page := ids(full, after=after, limit=2, order=order):
            paged += page
            after = page[-1]
        assert paged == wanted
    assert ids(full, after="b") is None
    assert full.read_blob("response", "new2", "alice", NOW, offset=0, size=10) == b"blob"
    full.set_pages_max(None)
    full.retry()
    assert ids(full) == expected


def test_deleted_objects_stay_deleted_while_the_disk_is_full(full):
    assert full.settle([delete("a"), replace("b", FILL * 3)], NOW)
    assert full.get("response", "a", None, NOW) is None
    assert not full.settle([replace("a", FILL)], NOW)
    assert full.settle([replace("a", FILL, must_exist=False), append("b", FILL)], NOW)
    full.set_pages_max(None)
    full.retry()
    assert full.get("response", "a", None, NOW) is None
    assert full.get("response", "b", None, NOW).blob_bytes == len(FILL)


def test_ordinary_write_does_not_overtake_an_unwritten_final_state(full):
    assert full.settle([replace("a", FILL * 3)], NOW)
    with pytest.raises(DiskFull):
        full.write([replace("a", b"later")], NOW)
    full.set_pages_max(None)
    full.write([replace("a", b"later")], NOW)
    assert full.get("response", "a", None, NOW).body == b"later"
    assert full.usage().unwritten_bytes == 0


def test_unwritten_bytes_are_bounded_with_space_for_small_final_states(full):
    large = b"x" * 1_000_000
    kept = 0
    with pytest.raises(StoreFull):
        while True:
            full.settle([append("a", large)], NOW)
            kept += 1
    assert 10 < kept <= UNWRITTEN_BYTES_MAX // 2 // len(large)
    assert full.settle([replace("b", FILL)], NOW)
    assert full.usage().unwritten_bytes <= UNWRITTEN_BYTES_MAX


def test_a_conflicting_id_does_not_block_later_writes(full):
    with pytest.raises(StoreFault):
        full.settle([put("a", b"again")], NOW)
    assert full.settle([replace("b", FILL * 3)], NOW)
    full.set_pages_max(None)
    full.retry()
    assert full.usage().trouble is None


def test_close_of_the_database_retries_unwritten_changes(full, tmp_path):
    assert full.settle([replace("a", FILL * 3)], NOW)
    full.set_pages_max(None)
    assert full.close() == 0
    kept = StoreDatabase(tmp_path / FILE_NAME, StoreSettings(), now=NOW)
    assert kept.get("response", "a", None, NOW).body == FILL * 3
    kept.set_pages_max(1)
    assert kept.settle([replace("b", FILL * 300)], NOW)
    assert kept.close() == 1


def test_a_read_only_database_keeps_final_states_in_memory(tmp_path):
    kept = StoreDatabase(tmp_path / FILE_NAME, StoreSettings(), now=NOW)
    kept.write([put("a", b"1")], NOW)
    # SQLite reports SQLITE_READONLY, as for a disk that was remounted read-only.
    kept._connection.execute("PRAGMA query_only = ON")
    with pytest.raises(StoreFault):
        kept.write([put("b")], NOW)
    assert kept.settle([replace("a", b"2")], NOW)
    assert kept.get("response", "a", None, NOW).body == b"2"
    kept._connection.execute("PRAGMA query_only = OFF")
    kept.retry()
    assert kept.usage().trouble is None
    kept.close()
    with sqlite3.connect(tmp_path / FILE_NAME) as connection:
        assert connection.execute("SELECT body FROM objects").fetchall() == [(b"2",)]


def test_the_database_opens_on_a_full_disk(tmp_path):
    kept = StoreDatabase(tmp_path / FILE_NAME, StoreSettings(), now=NOW)
    kept.write([put("a", FILL, seconds=5), put("b", FILL)], NOW)
    kept.close()
    (tmp_path / RESERVE_FILE_NAME).unlink()
    os.chmod(tmp_path / FILE_NAME, 0o400)
    kept = StoreDatabase(tmp_path / FILE_NAME, StoreSettings(), now=NOW + 1, pages_max=1)
    assert ids(kept) == ["a", "b"]
    kept.close()


# --- the disk reserve ---


def test_disk_reserve_allocates_disk_space(tmp_path):
    path = tmp_path / RESERVE_FILE_NAME
    reserve = DiskReserve(path)
    assert path.stat().st_blocks * 512 >= RESERVE_BYTES
    reserve.release()
    assert (path.stat().st_blocks, reserve.is_whole) == (0, False)
    assert reserve.fill()
    assert path.stat().st_blocks * 512 >= RESERVE_BYTES
    again = DiskReserve(path)
    assert again.is_whole


def test_disk_reserve_is_released_only_for_final_states(tmp_path, monkeypatch):
    kept = StoreDatabase(tmp_path / FILE_NAME, StoreSettings(), now=NOW)
    kept.write([put("a", b"1"), put("b", b"2")], NOW)
    is_full = True
    events = []
    apply = kept._apply

    def refuse(change, now):
        size = (tmp_path / RESERVE_FILE_NAME).stat().st_size
        events.append(size > 0)
        if is_full and size:
            raise DiskFull("the disk is full, but for the reserve")
        apply(change, now)

    monkeypatch.setattr(kept, "_apply", refuse)
    monkeypatch.setattr(kept._reserve, "_free_bytes", lambda: 0 if is_full else 2**30)
    assert kept.settle([replace("a", b"end")], NOW)
    assert events == [True, False]
    assert kept.usage().unwritten_bytes == 0
    with pytest.raises(DiskFull):
        kept.write([put("c")], NOW)
    assert kept.settle([delete("b")], NOW)  # The owner of an object makes space.
    assert ids(kept) == ["a"]
    is_full = False
    kept.write([put("c")], NOW)
    assert ids(kept) == ["a", "c"]
    assert kept._reserve.is_whole
    kept.close()


# --- the store, together with the task that retries writes ---


async def test_disk_trouble_logs_one_line_at_its_start_and_one_at_its_end(autojump_clock, caplog):
    caplog.set_level(logging.INFO, "trioserve.store")
    with open_inline_store() as store:
        await store.write(put("a"))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.keep_trying)
            for size in (3, 100):
                store.set_disk_full(True)
                for number in range(30):
                    assert await store.settle(replace("a", FILL * (number + size)))
                assert store.trouble is not None
                await trio.sleep(60)
                assert store.trouble is not None
                store.set_disk_full(False)
                await trio.sleep(5)
                assert store.trouble is None
                assert store.usage().unwritten_bytes == 0
            nursery.cancel_scope.cancel()
    assert [record.getMessage().split(",")[0].split(" failures")[0] for record in caplog.records] == [
        "store cannot be written",
        "store can be written again",
    ] * 2


async def test_final_states_that_are_lost_when_the_store_closes_are_logged(tmp_path, caplog):
    async with open_store(tmp_path) as store:
        await store.write(put("a"))
        await store._runner.run(store._database.set_pages_max, 1)
        await store.settle(replace("a", FILL * 300))
    assert "final states lost" in caplog.text


# --- quotas ---


def test_quota_is_checked_in_the_transaction_of_the_write():
    kept = StoreDatabase(None, StoreSettings(), now=NOW)
    quota = Quota(kind="response", owner="alice", objects_max=2, blob_bytes_max=10)
    assert kept.write([put("a"), append("a", b"x" * 6)], NOW, [quota])
    with pytest.raises(QuotaExceeded) as raised:
        kept.write([put("b"), append("b", b"x" * 5)], NOW, [quota])
    assert (raised.value.objects, raised.value.blob_bytes) == (2, 11)
    assert ids(kept) == ["a"]
    assert kept.write([put("b"), append("b", b"x" * 4)], NOW, [quota])
    with pytest.raises(QuotaExceeded):
        kept.write([put("c")], NOW, [quota])
    assert kept.write([put("c")], NOW, [Quota(kind="response", owner="bob", objects_max=0, blob_bytes_max=0)])
    assert kept.write([delete("a"), delete("c"), put("d")], NOW, [quota])
