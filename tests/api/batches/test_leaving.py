"""Tests batches that end before their last line: cancelled in each phase, expired, or resumed by the next server."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.api.limits import BatchSettings
from trioserve.store.settings import StoreSettings
from trioserve.testing.memory_server import open_memory_server

KEYS = ("alice-key", "bob-key")


async def step(server) -> None:
    server.engine.steps.release()
    server.engine.steps.hold()
    await wait_all_tasks_blocked()


@pytest.mark.parametrize("step_count", [0, 1, 2, 4])
async def test_cancelling_a_batch_frees_all_blocks_one_step_later(owner_of, batch_line, step_count, autojump_clock):
    """Lines are in the prefill or between two output tokens. Other lines wait in the queue."""
    async with open_memory_server(max_num_batched_tokens=16, block_count=128, max_num_seqs=4) as server:
        owner = owner_of(server)
        server.engine.steps.hold()
        lines = [batch_line(f"r{index}", f"{index} is more than one chunk", max_tokens=30) for index in range(6)]
        made = await owner.batch(*lines)
        await server.engine.steps.entered()
        for _ in range(step_count):
            await step(server)
        used = server.engine.core.stats().blocks_used
        assert used > 0
        cancelled = await owner.ok(f"/v1/batches/{made['id']}/cancel", b"", method="POST")
        assert cancelled["status"] == "cancelled"
        assert server.engine.core.stats().blocks_used == used  # The running forward pass still reads the blocks.
        await step(server)
        assert server.engine.core.stats().blocks_used == 0
        server.engine.steps.release()
        await server.assert_all_free()
        assert server.app.batches.live_count == 0
        assert cancelled["request_counts"]["total"] == 6
        assert cancelled["cancelling_at"] <= cancelled["cancelled_at"]


async def test_cancelled_batch_keeps_the_results_of_finished_lines(owner_of, batch_line, autojump_clock):
    async with open_memory_server(step_seconds=0.1, max_num_seqs=2) as server:
        owner = owner_of(server)
        made = await owner.batch(*(batch_line(f"r{index}") for index in range(10)))
        await trio.sleep(1.25)  # In this time, two or three lines finish.
        batch = await owner.ok(f"/v1/batches/{made['id']}/cancel", b"", method="POST")
        done = await owner.lines_of(batch["output_file_id"])
        assert 0 < len(done) == batch["request_counts"]["completed"] < 10
        assert batch["error_file_id"] is None
        again = await owner.ok(f"/v1/batches/{made['id']}/cancel", b"", method="POST")
        assert again == batch


async def test_waiting_batch_can_be_cancelled(owner_of, batch_line, autojump_clock):
    async with open_memory_server(step_seconds=1, batches=BatchSettings(running_max=1)) as server:
        owner = owner_of(server)
        await owner.batch(batch_line("a", max_tokens=50))
        waiting = await owner.batch(batch_line("b"))
        batch = await owner.ok(f"/v1/batches/{waiting['id']}/cancel", b"", method="POST")
        assert batch["status"] == "cancelled"
        assert batch["in_progress_at"] is None
        assert server.engine.core.stats().running_count == 1


async def test_cancelling_an_ended_batch_changes_nothing(owner_of, batch_line, autojump_clock):
    async with open_memory_server() as server:
        owner = owner_of(server)
        batch = await owner.ended((await owner.batch(batch_line("a")))["id"])
        assert await owner.ok(f"/v1/batches/{batch['id']}/cancel", b"", method="POST") == batch


async def test_aborting_the_request_of_a_batch_line_makes_it_an_error_line(owner_of, batch_line, autojump_clock):
    async with open_memory_server(step_seconds=0.1) as server:
        owner = owner_of(server)
        made = await owner.batch(batch_line("a", max_tokens=50), batch_line("b"))
        await trio.sleep(0.35)
        assert (await owner.ok(f"/v1/requests/{made['id']}-0", method="DELETE"))["result"] == "aborted"
        batch = await owner.ended(made["id"])
        assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
        [aborted] = await owner.lines_of(batch["error_file_id"])
        assert aborted["response"]["body"]["error"]["code"] == "request_aborted"


async def test_batch_lines_not_done_in_time_are_reported_as_expired(owner_of, batch_line, autojump_clock):
    async with open_memory_server(step_seconds=0.1, max_num_seqs=2) as server:
        owner = owner_of(server)
        made = await owner.batch(*(batch_line(f"r{index}") for index in range(600)), completion_window="2s")
        batch = await owner.ended(made["id"])
        assert batch["status"] == "expired"
        counts = batch["request_counts"]
        assert counts["total"] == counts["completed"] + counts["failed"] == 600
        done = await owner.lines_of(batch["output_file_id"])
        errors = await owner.lines_of(batch["error_file_id"])
        assert {line["error"]["code"] for line in errors} == {"batch_expired"}
        assert sorted(line["custom_id"] for line in [*done, *errors]) == sorted(f"r{index}" for index in range(600))
        assert 0 < len(done) < 20
        await trio.sleep(0.1)
        await server.assert_all_free()


async def test_batch_that_never_ran_expires(owner_of, batch_line, autojump_clock):
    async with open_memory_server(step_seconds=1, batches=BatchSettings(running_max=1)) as server:
        owner = owner_of(server)
        await owner.batch(batch_line("a", max_tokens=50))
        batch = await owner.ended((await owner.batch(batch_line("b"), completion_window="5s"))["id"])
        assert (batch["status"], batch["request_counts"]["total"]) == ("expired", 0)


async def test_long_batch_outlives_the_time_to_live_of_the_store(owner_of, batch_line, autojump_clock):
    """The time to live begins when the batch ends."""
    async with open_memory_server(
        step_seconds=1, max_num_seqs=2, store_settings=StoreSettings(seconds_max=20)
    ) as server:
        owner = owner_of(server)
        lines = [batch_line(f"r{index}", max_tokens=9, user="x" * 400_000) for index in range(8)]  # four reads
        made = await owner.batch(*lines, completion_window="200s")
        await trio.sleep(60)
        assert (await owner.state(made["id"]))["status"] == "in_progress"
        batch = await owner.ended(made["id"])
        assert batch["request_counts"] == {"total": 8, "completed": 8, "failed": 0}
        await trio.sleep(15)
        assert len(await owner.lines_of(batch["output_file_id"])) == 8
        await trio.sleep(10)
        assert (await owner.ask(f"/v1/batches/{made['id']}"))[0] == 404


# --- a restart ---


@asynccontextmanager
async def served(directory, **options):
    async with open_memory_server(
        store_directory=directory, step_seconds=0.1, max_num_seqs=6, api_keys=KEYS, **options
    ) as server:
        yield server


@pytest.mark.parametrize("seconds", [0, 0.05, 0.45, 1.3, 2.1, 30])
@pytest.mark.parametrize("way", ["cancelled", "drained"])
async def test_batch_resumes_at_the_next_server(owner_of, batch_line, seconds, way, tmp_path, autojump_clock):
    """Each line has exactly one output, no matter when the first server ends."""
    lines = [batch_line(f"r{index}", f"prompt {index}", max_tokens=1 + index % 7) for index in range(25)]
    async with served(tmp_path) as server:
        owner = owner_of(server, KEYS[0])
        made = await owner.batch(*lines, b"no json")
        await trio.sleep(seconds)
        if way == "drained":
            server.drain()
            await server.app.wait_until_idle()
    async with served(tmp_path) as server:
        owner = owner_of(server, KEYS[0])
        batch = await owner.ended(made["id"])
        assert batch["status"] == "completed"
        assert batch["request_counts"] == {"total": 26, "completed": 25, "failed": 1}
        done = await owner.lines_of(batch["output_file_id"])
        assert sorted(line["custom_id"] for line in done) == sorted(f"r{index}" for index in range(25))
        assert len(await owner.lines_of(batch["error_file_id"])) == 1
        assert batch["usage"]["output_tokens"] == sum(1 + index % 7 for index in range(25))
        assert (await owner_of(server, KEYS[1]).ask(f"/v1/batches/{made['id']}"))[0] == 404
        await trio.sleep(0.1)
        await server.assert_all_free()


async def test_draining_server_refuses_batches_and_finishes_running_lines(
    owner_of, batch_line, tmp_path, autojump_clock
):
    async with served(tmp_path) as server:
        owner = owner_of(server, KEYS[0])
        made = await owner.batch(*(batch_line(f"r{index}", max_tokens=10) for index in range(25)))
        await trio.sleep(0.35)
        server.app.drain()
        body = {"input_file_id": made["input_file_id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        assert (await owner.ask("/v1/batches", body))[0] == 503
        await server.app.wait_until_idle()
        batch = await owner.state(made["id"])
        assert (batch["status"], batch["request_counts"]["completed"]) == ("in_progress", 3)
        await server.assert_all_free()


async def test_batch_that_waits_for_the_next_start_can_be_cancelled(owner_of, batch_line, tmp_path, autojump_clock):
    async with served(tmp_path) as server:
        owner = owner_of(server, KEYS[0])
        made = await owner.batch(*(batch_line(f"r{index}") for index in range(25)))
        await trio.sleep(0.35)
        server.app.drain()
        await server.app.wait_until_idle()
        cancelled = await owner.ok(f"/v1/batches/{made['id']}/cancel", b"", method="POST")
        assert (cancelled["status"], cancelled["request_counts"]["completed"]) == ("cancelled", 3)
    async with served(tmp_path) as server:
        assert server.app.batches.live_count == 0
        assert await owner_of(server, KEYS[0]).state(made["id"]) == cancelled


async def test_batches_of_a_removed_key_fail_at_the_next_start(owner_of, batch_line, tmp_path, autojump_clock):
    async with served(tmp_path) as server:
        made = await owner_of(server, KEYS[0]).batch(batch_line("a", max_tokens=50))
    async with open_memory_server(store_directory=tmp_path, api_keys=(KEYS[1],), admin_api_key="admin") as server:
        batch = await owner_of(server, "admin").ended(made["id"])
        assert batch["status"] == "failed"
        assert batch["errors"]["data"][0]["code"] == "invalid_api_key"
    async with served(tmp_path) as server:
        assert server.app.batches.live_count == 0


async def test_batch_that_was_being_cancelled_is_not_restarted(owner_of, batch_line, tmp_path, autojump_clock):
    async with served(tmp_path) as server:
        owner = owner_of(server, KEYS[0])
        made = await owner.batch(batch_line("a", max_tokens=50))
        await trio.sleep(0.25)
        await owner.ok(f"/v1/batches/{made['id']}/cancel", b"", method="POST")
    async with served(tmp_path) as server:
        await trio.sleep(1)
        assert (await owner_of(server, KEYS[0]).state(made["id"]))["status"] == "cancelled"
        assert server.engine.live_requests() == []


async def test_slow_batch_line_does_not_delay_later_lines(owner_of, batch_line, tmp_path, autojump_clock):
    """Later lines are recorded as done, and the next server does not send these lines again."""
    async with served(tmp_path) as server:
        owner = owner_of(server, KEYS[0])
        made = await owner.batch(batch_line("slow", max_tokens=100), *(batch_line(f"r{index}") for index in range(20)))
        await trio.sleep(5)
        assert (await owner.state(made["id"]))["request_counts"]["completed"] == 20
    async with served(tmp_path) as server:
        owner = owner_of(server, KEYS[0])
        await trio.sleep(0.25)
        assert [one["id"] for one in (await owner.ok("/v1/requests"))["data"]] == [f"{made['id']}-0"]
        batch = await owner.ended(made["id"])
        ids = [line["custom_id"] for line in await owner.lines_of(batch["output_file_id"])]
        assert sorted(ids) == sorted(["slow", *(f"r{index}" for index in range(20))])


async def test_batch_of_a_broken_engine_waits_for_the_next_start(owner_of, batch_line, tmp_path, autojump_clock):
    with pytest.raises(Exception, match="a step of the engine failed"):
        async with served(tmp_path) as server:
            owner = owner_of(server, KEYS[0])
            made = await owner.batch(*(batch_line(f"r{index}") for index in range(10)))
            await trio.sleep(0.7)
            server.engine.break_next_step()
            await trio.sleep(1)
    async with served(tmp_path) as server:
        owner = owner_of(server, KEYS[0])
        batch = await owner.ended(made["id"])
        assert batch["request_counts"] == {"total": 10, "completed": 10, "failed": 0}
        assert json.dumps(await owner.lines_of(batch["output_file_id"])).count('"custom_id"') == 10
