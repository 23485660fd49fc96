"""Tests /v1/files with the whole server in memory."""

from __future__ import annotations

import msgspec
import pytest
import trio
from openai.types import FileObject
from trio.testing import wait_all_tasks_blocked

from trioserve.api.batches import files
from trioserve.api.batches.stored_files import FILES_OF_ONE_MAX
from trioserve.http.limits import FrontendLimits
from trioserve.store.settings import StoreSettings
from trioserve.testing.memory_client import ConnectionLost
from trioserve.testing.memory_server import open_memory_server

FORM = "multipart/form-data; boundary=b"
KEYS = ("alice-key", "bob-key")


async def test_file_can_be_uploaded_read_and_deleted(owner_of, autojump_clock):
    async with open_memory_server() as server:
        owner = owner_of(server)
        file_id = await owner.upload(b"one", b"two", filename="Übung 1.jsonl")
        shown = await owner.ok(f"/v1/files/{file_id}")
        FileObject.model_validate(shown, strict=True)
        msgspec.convert(shown, files.File)
        assert (shown["bytes"], shown["filename"], shown["purpose"]) == (8, "Übung 1.jsonl", "batch")
        assert await owner.ok(f"/v1/files/{file_id}/content") == b"one\ntwo\n"
        deleted = await owner.ok(f"/v1/files/{file_id}", method="DELETE")
        msgspec.convert(deleted, files.FileDeletion)
        for path in (f"/v1/files/{file_id}", f"/v1/files/{file_id}/content"):
            assert (await owner.ask(path))[0] == 404
        assert (await owner.ask(f"/v1/files/{file_id}", method="DELETE"))[0] == 404


async def test_large_file_is_returned_unchanged(owner_of):
    """A large form is parsed in a thread, and a large file is sent in several pieces."""
    content = bytes(range(256)) * 10_000
    async with open_memory_server() as server:
        owner = owner_of(server)
        file_id = await owner.upload(content)
        assert await owner.ok(f"/v1/files/{file_id}/content") == content + b"\n"


async def test_empty_file_can_be_stored(owner_of, autojump_clock):
    async with open_memory_server() as server:
        owner = owner_of(server)
        file_id = await owner.upload()
        assert await owner.ok(f"/v1/files/{file_id}/content") == b""


async def test_files_are_listed_page_by_page_and_by_purpose(owner_of, autojump_clock):
    async with open_memory_server() as server:
        owner = owner_of(server)
        ids = [await owner.upload(b"x", purpose="batch" if index % 2 else "user_data") for index in range(6)]
        everything = await owner.ok("/v1/files")
        msgspec.convert(everything, files.Files)
        assert [file["id"] for file in everything["data"]] == ids[::-1]
        assert [file["id"] for file in (await owner.ok("/v1/files?order=asc"))["data"]] == ids
        page = await owner.ok("/v1/files?order=asc&limit=4")
        assert ([file["id"] for file in page["data"]], page["has_more"]) == (ids[:4], True)
        page = await owner.ok(f"/v1/files?order=asc&limit=4&after={page['last_id']}")
        assert ([file["id"] for file in page["data"]], page["has_more"]) == (ids[4:], False)
        own = await owner.ok("/v1/files?purpose=user_data&limit=10000")
        assert [file["id"] for file in own["data"]] == ids[4::-2]
        for query, param in (
            ("limit=0", "limit"),
            ("limit=10001", "limit"),
            ("limit=x", "limit"),
            ("order=up", "order"),
            ("purpose=x", "purpose"),
            ("after=nobody", "after"),
            ("&".join("a=1" for _ in range(65)), None),
        ):
            status, said = await owner.ask(f"/v1/files?{query}")
            assert (status, said["error"]["param"]) == (400, param)


async def test_uploaded_file_is_removed_when_it_expires(owner_of, autojump_clock):
    more = '--b\r\ncontent-disposition: form-data; name="expires_after[anchor]"\r\n\r\ncreated_at\r\n'
    more += '--b\r\ncontent-disposition: form-data; name="expires_after[seconds]"\r\n\r\n3600\r\n'
    async with open_memory_server() as server:
        owner = owner_of(server)
        file_id = await owner.upload(b"x", more=more)
        await trio.sleep(3599)
        assert (await owner.ask(f"/v1/files/{file_id}"))[0] == 200
        await trio.sleep(2)
        assert (await owner.ask(f"/v1/files/{file_id}"))[0] == 404


async def test_one_key_can_fill_half_of_the_store(owner_of, autojump_clock):
    async with open_memory_server(api_keys=KEYS, store_settings=StoreSettings(bytes_max=100_000)) as server:
        alice, bob = (owner_of(server, key) for key in KEYS)
        await alice.upload(b"x" * 40_000)
        assert (await alice.ask("/v1/files", b"", content_type=FORM, method="POST"))[0] == 400
        with pytest.raises(AssertionError, match="half of"):
            await alice.upload(b"x" * 20_000)
        await bob.upload(b"x" * 40_000)
        with pytest.raises(AssertionError, match="half of"):
            await bob.upload(b"x" * 20_000)
        assert len((await alice.ok("/v1/files"))["data"]) == 1


async def test_upload_to_a_full_store_is_507_and_stores_nothing(owner_of, autojump_clock):
    async with open_memory_server(store_settings=StoreSettings(objects_max=1)) as server:
        owner = owner_of(server)
        await owner.upload(b"x")
        with pytest.raises(AssertionError, match="507"):
            await owner.upload(b"x")
        assert len((await owner.ok("/v1/files"))["data"]) == 1


async def test_number_of_files_of_one_key_is_limited(owner_of, autojump_clock, monkeypatch):
    monkeypatch.setattr("trioserve.api.batches.stored_files.FILES_OF_ONE_MAX", 3)
    assert FILES_OF_ONE_MAX == 1000
    async with open_memory_server() as server:
        owner = owner_of(server)
        for _ in range(3):
            await owner.upload(b"x")
        with pytest.raises(AssertionError, match="allowed are 3"):
            await owner.upload(b"x")


async def test_form_larger_than_the_body_limit_is_413(owner_of, autojump_clock):
    async with open_memory_server(limits=FrontendLimits(body_bytes_max=10_000)) as server:
        owner = owner_of(server)
        with pytest.raises(AssertionError, match="body_too_large"):
            await owner.upload(b"x" * 20_000)


async def test_interrupted_upload_stores_no_file(owner_of, autojump_clock):
    async with open_memory_server() as server:
        client = server.client()
        body = b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\n' + b"x" * 1000
        async with client.ask("/v1/files", body, headers={"content-type": FORM}, withheld_bytes=10):
            await wait_all_tasks_blocked()
        await server.assert_all_free()
        assert (await owner_of(server).ok("/v1/files"))["data"] == []


async def test_file_download_ends_early_if_the_file_is_deleted(owner_of, autojump_clock):
    async with open_memory_server() as server:
        owner = owner_of(server)
        file_id = await owner.upload(b"x" * 60_000, b"y" * 4_000_000)
        reader = server.client()
        async with reader.ask(f"/v1/files/{file_id}/content") as response:
            await response.head()
            await owner.ok(f"/v1/files/{file_id}", method="DELETE")
            with pytest.raises(ConnectionLost):
                await response.read()
        await server.hang_up()
        await server.assert_all_free()
