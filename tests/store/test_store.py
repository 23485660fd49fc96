"""Tests of the store and its thread: waiting, cancelling and closing."""

from __future__ import annotations

import threading

import pytest
import trio

from trioserve.contracts.errors import StartupError
from trioserve.store.settings import StoreSettings
from trioserve.store.store import open_store
from trioserve.store.stored_objects import AppendBlob, PutObject


def put(object_id, body=b"{}"):
    return PutObject(kind="response", id=object_id, owner="alice", body=body)


async def test_the_store_works_in_a_thread_of_its_own(tmp_path):
    before = set(threading.enumerate())
    async with open_store(tmp_path / "new" / "data") as store:
        assert await store.write(put("a", b"1"), put("b"), AppendBlob(kind="response", id="b", data=b"blob"))
        assert (await store.get("response", "a", owner="alice")).body == b"1"
        assert await store.get("response", "a", owner="bob") is None
        assert [entry.id for entry in await store.page("response", owner=None)] == ["b", "a"]
        assert await store.read_blob("response", "b", owner="alice", offset=1, size=2) == b"lo"
        assert store.usage().objects == 2
    assert not set(threading.enumerate()) - before
    async with open_store(tmp_path / "new" / "data") as store:
        assert (await store.get("response", "a", owner="alice")).body == b"1"


async def test_an_id_that_the_store_never_assigns_is_absent():
    async with open_store() as store:
        for hostile in ("", "../a", "a" * 1000, "\x00", "ä"):
            assert await store.get("response", hostile, owner=None) is None
            assert await store.page("response", owner=None, after=hostile) is None
            assert await store.read_blob("response", hostile, owner=None) is None


async def test_cancelled_store_write_is_finished_when_the_call_returns():
    async with open_store() as store:
        with trio.CancelScope() as scope:
            scope.cancel()
            await store.write(put("a"))
        assert await store.get("response", "a", owner="alice") is not None


async def test_lifetimes_of_stored_objects_follow_the_given_clock(autojump_clock):
    now = 0.0
    async with open_store(None, StoreSettings(seconds_max=60), wall_clock=lambda: now) as store:
        await store.write(put("a"))
        now = 59.9
        assert await store.get("response", "a", owner="alice") is not None
        now = 60.0
        assert await store.get("response", "a", owner="alice") is None


async def test_store_directory_that_cannot_be_created_is_reported(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StartupError, match="--data-dir"):
        async with open_store(tmp_path / "file" / "data"):
            pass
