"""Tests batches on a full disk: SQLite refuses further pages until the test allows them."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager

import pytest
import trio

from trioserve.api.batches import batch_book
from trioserve.api.limits import BatchSettings
from trioserve.contracts.errors import DiskFull
from trioserve.store.settings import StoreSettings
from trioserve.store.stored_objects import DeleteObject
from trioserve.testing.memory_server import open_memory_server

from .conftest import form

LINES = 60
MESSAGES = "/v1/messages/batches"


async def accounted(owner, batch):
    """Return the number of lines in each output file. Check that each custom_id appears at most once."""
    output, errors = [await owner.lines_of(batch[f"{name}_file_id"]) for name in ("output", "error")]
    ids = [line["custom_id"] for line in (*output, *errors)]
    assert len(ids) == len(set(ids))
    assert (len(output), len(errors)) == (batch["request_counts"]["completed"], batch["request_counts"]["failed"])
    return len(output), len(errors)


@asynccontextmanager
async def in_progress(owner_of, batch_line, count=LINES, fields=None, **options):
    """Yield a server, an owner, and a batch with some finished lines at the moment when the disk becomes full."""
    async with open_memory_server(step_seconds=0.05, max_num_seqs=8, **options) as server:
        owner = owner_of(server)
        made = await owner.batch(*(batch_line(f"r{index}") for index in range(count)), **(fields or {}))
        await trio.sleep(0.6)
        batch = await owner.state(made["id"])
        assert 0 < batch["request_counts"]["completed"] < count
        server.store.set_disk_full(True)
        await trio.sleep(2)
        yield server, owner, made["id"]
        await server.assert_all_free()


@pytest.mark.parametrize("seconds", [1, 30, 3600])
async def test_batch_resumes_when_the_disk_has_space_again(owner_of, batch_line, seconds, caplog, autojump_clock):
    async with in_progress(owner_of, batch_line) as (server, owner, batch_id):
        await trio.sleep(seconds)
        assert (await owner.state(batch_id))["status"] == "in_progress"
        assert server.store.trouble is not None
        assert caplog.text.count("store cannot be written") == 1
        server.store.set_disk_full(False)
        await trio.sleep(15)
        batch = await owner.state(batch_id)
        assert batch["status"] == "completed"
        assert await accounted(owner, batch) == (LINES, 0)


async def test_batch_waits_if_the_disk_is_full_before_its_first_line(owner_of, batch_line, monkeypatch, autojump_clock):
    async with open_memory_server(batches=BatchSettings(running_max=1)) as server:
        owner = owner_of(server)
        first = await owner.batch(*(batch_line(f"r{index}", max_tokens=50) for index in range(20)))
        second = await owner.batch(*(batch_line(f"r{index}") for index in range(20)))

        async def refuse(*changes, **options):
            raise DiskFull("the disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(server.store, "write", refuse)
            # After the cancellation, the second batch begins.
            await owner.ok(f"/v1/batches/{first['id']}/cancel", b"", method="POST")
            await trio.sleep(60)
            assert (await owner.state(second["id"]))["status"] == "validating"
        batch = await owner.ended(second["id"])
        assert batch["status"] == "completed"
        assert await accounted(owner, batch) == (20, 0)


async def test_batch_on_a_full_disk_is_cancelled_at_once_and_keeps_finished_lines(owner_of, batch_line, autojump_clock):
    async with in_progress(owner_of, batch_line) as (server, owner, batch_id):
        cancelled = await owner.ok(f"/v1/batches/{batch_id}/cancel", b"", method="POST")
        assert cancelled["status"] == "cancelled"
        done, _ = await accounted(owner, cancelled)
        assert done > 0
        assert server.app.batches.live_count == 0
        server.store.set_disk_full(False)
        await trio.sleep(10)
        assert await owner.state(batch_id) == cancelled
        assert await accounted(owner, cancelled) == (done, 0)
        assert server.store.usage().unwritten_bytes == 0


async def test_completion_window_ends_a_batch_on_a_full_disk_at_once(owner_of, batch_line, autojump_clock):
    async with in_progress(owner_of, batch_line, fields={"completion_window": "60s"}) as (server, owner, batch_id):
        await trio.sleep(70)
        batch = await owner.state(batch_id)
        assert batch["status"] == "expired"
        done, dropped = await accounted(owner, batch)
        assert (done > 0, done + dropped) == (True, LINES)
        server.store.set_disk_full(False)
        await trio.sleep(10)
        assert await owner.state(batch_id) == batch
        assert await accounted(owner, batch) == (done, dropped)


async def test_batch_results_beyond_the_memory_limit_are_reported_as_not_kept(
    owner_of, batch_line, monkeypatch, autojump_clock
):
    monkeypatch.setattr(batch_book, "WAITING_BYTES_MAX", 1000)
    async with open_memory_server(step_seconds=0.05, max_num_seqs=16) as server:
        owner = owner_of(server)
        # The lines end one after another, and the later lines end while the disk is full.
        made = await owner.batch(*(batch_line(f"r{index}", max_tokens=index + 4) for index in range(30)))
        await trio.sleep(0.3)
        server.store.set_disk_full(True)
        await trio.sleep(30)
        server.store.set_disk_full(False)
        batch = await owner.ended(made["id"])
        done, failed = await accounted(owner, batch)
        assert (done + failed, failed > 0) == (30, True)
        errors = await owner.lines_of(batch["error_file_id"])
        assert {line["error"]["code"] for line in errors} == {"result_not_kept"}
        assert server.store.trouble is None


async def test_no_new_line_is_sent_while_the_batch_waits_for_the_disk(owner_of, batch_line, autojump_clock):
    async with in_progress(owner_of, batch_line, count=200) as (server, _, _batch_id):
        tokens = server.engine.core.stats()
        await trio.sleep(600)
        assert server.engine.core.stats() == tokens


@pytest.mark.parametrize("is_full_to_the_end", [True, False])
async def test_shutdown_on_a_full_disk_loses_no_batch_line(
    owner_of, batch_line, tmp_path, is_full_to_the_end, autojump_clock
):
    async with in_progress(owner_of, batch_line, store_directory=tmp_path) as (server, owner, batch_id):
        server.drain()
        with trio.move_on_after(30) as scope:
            await server.app.wait_until_idle()
        assert not scope.cancelled_caught
        server.store.set_disk_full(is_full_to_the_end)
    async with open_memory_server(store_directory=tmp_path) as server:
        owner = owner_of(server)
        batch = await owner.ended(batch_id)
        assert batch["status"] == "completed"
        assert await accounted(owner, batch) == (LINES, 0)


async def test_deleting_a_file_frees_space_on_a_full_disk(owner_of, batch_line, autojump_clock):
    async with open_memory_server() as server:
        owner = owner_of(server)
        file_id = await owner.upload(batch_line("a", user="x" * 50_000))
        server.store.set_disk_full(True)
        status, _ = await owner.ask(
            "/v1/batches", {"input_file_id": "none", "endpoint": "/v1/completions", "completion_window": "24h"}
        )
        assert status == 404
        with pytest.raises(AssertionError, match="store_full"):
            await owner.upload(batch_line("b", user="x" * 50_000))
        await owner.ok(f"/v1/files/{file_id}", method="DELETE")
        assert (await owner.ask(f"/v1/files/{file_id}"))[0] == 404
        await owner.upload(batch_line("b", user="x" * 30_000))  # The batch fits into the freed space.


async def test_health_and_metrics_report_a_full_disk_and_requests_are_served(owner_of, batch_line, autojump_clock):
    async with in_progress(owner_of, batch_line) as (server, owner, batch_id):
        for path in ("/health", "/ready"):
            assert "disk is full" in (await owner.ok(path))["store"]
        assert (await owner.ask("/v1/completions", {"prompt": "Hi", "max_tokens": 2}))[0] == 200
        text = (await owner.ok("/metrics")).decode()
        failures = [line for line in text.splitlines() if line.startswith("trioserve:store_write_failures_total")]
        assert float(failures[0].split()[-1]) > 0
        server.store.set_disk_full(False)
        await trio.sleep(10)
        assert "store" not in await owner.ok("/health")
        await owner.ok(f"/v1/batches/{batch_id}/cancel", b"", method="POST")


async def test_batch_ends_if_its_file_was_deleted(owner_of, batch_line, autojump_clock):
    async with open_memory_server(step_seconds=0.1) as server:
        owner = owner_of(server)
        made = await owner.batch(*(batch_line(f"r{index}") for index in range(60)))
        await trio.sleep(0.3)
        stored = await server.store.get("batch", made["id"], owner=None)
        record = json.loads(stored.body)
        await server.store.write(DeleteObject(kind="file", id=record["output_file_id"]))
        batch = await owner.ended(made["id"])
        assert (batch["status"], batch["errors"]["data"][0]["code"]) == ("failed", "file_gone")
        assert "lines have no result" in batch["errors"]["data"][0]["message"]


async def test_cancelled_message_batch_has_a_result_for_each_request(owner_of, autojump_clock):
    async with open_memory_server(step_seconds=0.05, max_num_seqs=4, batches=BatchSettings(lines_at_once=2)) as server:
        owner = owner_of(server)
        params = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0}
        requests = [{"custom_id": f"r{index}", "params": params} for index in range(40)]
        made = await owner.ok(MESSAGES, {"requests": requests})
        await trio.sleep(0.6)
        server.store.set_disk_full(True)
        await trio.sleep(2)
        batch = await owner.ok(f"{MESSAGES}/{made['id']}/cancel", b"", method="POST")
        assert batch["processing_status"] == "ended"
        for is_full in (True, False):
            server.store.set_disk_full(is_full)
            await trio.sleep(10)
            lines = [json.loads(line) for line in (await owner.ok(batch["results_url"])).decode().splitlines()]
            assert sorted(line["custom_id"] for line in lines) == sorted(one["custom_id"] for one in requests)
            assert {line["result"]["type"] for line in lines} == {"succeeded", "canceled"}


# --- concurrent writes ---


async def test_concurrent_uploads_do_not_exceed_the_quota(owner_of, batch_line, autojump_clock):
    async with open_memory_server(store_settings=StoreSettings(bytes_max=400_000)) as server:
        owner = owner_of(server)
        statuses = []

        async def upload():
            status, said = await owner.ask(
                "/v1/files", form(b"x" * 90_000), content_type="multipart/form-data; boundary=b"
            )
            assert status == 200 or "half of" in said["error"]["message"]
            statuses.append(status)

        async with trio.open_nursery() as nursery:
            for _ in range(6):
                nursery.start_soon(upload)
        assert sorted(statuses) == [200] * 2 + [400] * 4
        assert sum(file["bytes"] for file in (await owner.ok("/v1/files"))["data"]) <= 200_000
