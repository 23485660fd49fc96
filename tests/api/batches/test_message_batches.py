"""Tests batches of messages in Anthropic's format."""

from __future__ import annotations

import json

import msgspec
import pytest
import trio
from anthropic.types.messages import DeletedMessageBatch, MessageBatch, MessageBatchIndividualResponse

from trioserve.api.batches import handlers
from trioserve.api.batches.batch_book import BatchBook
from trioserve.api.limits import BatchSettings
from trioserve.testing.fake_engine import InjectedFault
from trioserve.testing.memory_server import open_memory_server

PATH = "/v1/messages/batches"
KEYS = ("alice-key", "bob-key")


def request(custom_id: str, **fields):
    params = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0, **fields}
    return {"custom_id": custom_id, "params": params}


def checked(batch):
    msgspec.convert(batch, handlers.MessageBatch)
    MessageBatch.model_validate(batch)
    return batch


async def create(owner, *requests):
    return checked(await owner.ok(PATH, {"requests": requests}))


async def ended(owner, batch):
    while True:
        batch = checked(await owner.ok(f"{PATH}/{batch['id']}"))
        if batch["processing_status"] == "ended":
            return batch
        await trio.sleep(0.5)


async def results(owner, batch):
    lines = [json.loads(line) for line in (await owner.ok(batch["results_url"])).decode().splitlines()]
    for line in lines:
        MessageBatchIndividualResponse.model_validate(line)
    return {line["custom_id"]: line["result"] for line in lines}


async def test_every_request_of_a_message_batch_has_a_result(owner_of, autojump_clock):
    async with open_memory_server(step_seconds=0.01) as server:
        owner = owner_of(server)
        pretty = json.dumps({"requests": [request("pretty")]}, indent=4).encode()
        batch = await create(owner, *(request(f"r{index}") for index in range(10)), request("bad", temperature=-1))
        assert (batch["processing_status"], batch["request_counts"]["processing"]) == ("in_progress", 11)
        assert batch["results_url"] is None
        batch = await ended(owner, batch)
        assert batch["request_counts"] == {
            "processing": 0,
            "succeeded": 10,
            "errored": 1,
            "canceled": 0,
            "expired": 0,
        }
        found = await results(owner, batch)
        assert {kind for id, kind in ((id, one["type"]) for id, one in found.items()) if id != "bad"} == {"succeeded"}
        assert found["r3"]["message"]["type"] == "message"
        assert found["bad"]["error"]["error"]["type"] == "invalid_request_error"
        other = await ended(owner, await owner.ok(PATH, pretty))
        assert list(await results(owner, other)) == ["pretty"]
        for path in ("/v1/files", "/v1/batches"):  # OpenAI's API does not list message batches and their files.
            assert (await owner.ok(path))["data"] == []
        await server.assert_all_free()


@pytest.mark.parametrize("running_max", [1, 4])
async def test_cancelled_message_batch_reports_every_request(owner_of, running_max, autojump_clock):
    """The batch either runs or still waits when the client cancels it."""
    settings = BatchSettings(running_max=running_max)
    async with open_memory_server(step_seconds=0.1, max_num_seqs=2, batches=settings) as server:
        owner = owner_of(server)
        first = await create(owner, *(request(f"r{index}") for index in range(10)))
        second = await create(owner, request("x", max_tokens=50))
        await trio.sleep(1.25)
        for batch, count in ((second, 1), (first, 10)):
            with trio.fail_after(5):
                cancelled = checked(await owner.ok(f"{PATH}/{batch['id']}/cancel", b"", method="POST"))
            assert cancelled["processing_status"] == "ended"
            assert cancelled["cancel_initiated_at"] is not None
            found = await results(owner, cancelled)
            assert len(found) == count
            kinds = [one["type"] for one in found.values()]
            assert kinds.count("canceled") == cancelled["request_counts"]["canceled"] > 0
        assert kinds.count("succeeded") > 0
        await trio.sleep(0.1)
        await server.assert_all_free()


async def test_message_batch_that_fails_during_cancelling_is_cancelled(owner_of, autojump_clock, monkeypatch):
    def broken(*_arguments):
        raise InjectedFault

    async with open_memory_server(step_seconds=0.1, max_num_seqs=2) as server:
        owner = owner_of(server)
        batch = await create(owner, *(request(f"r{index}") for index in range(10)))
        await trio.sleep(1.25)
        monkeypatch.setattr(BatchBook, "is_done", broken)
        cancelled = checked(await owner.ok(f"{PATH}/{batch['id']}/cancel", b"", method="POST"))
        assert cancelled["processing_status"] == "ended"
        await trio.sleep(0.1)
        await server.assert_all_free()


async def test_expired_message_batch_reports_every_request(owner_of, autojump_clock):
    async with open_memory_server(step_seconds=300, step_timeout=1000, max_num_seqs=2) as server:
        owner = owner_of(server)
        batch = await create(owner, *(request(f"r{index}", max_tokens=30) for index in range(20)))
        await trio.sleep(86_399)
        batch = await ended(owner, batch)
        kinds = [one["type"] for one in (await results(owner, batch)).values()]
        assert len(kinds) == 20
        assert kinds.count("expired") == batch["request_counts"]["expired"] > 0


async def test_message_batch_resumes_after_a_restart(owner_of, tmp_path, autojump_clock):
    options = {"store_directory": tmp_path, "step_seconds": 0.1, "max_num_seqs": 4}
    async with open_memory_server(**options) as server:
        batch = await create(owner_of(server), *(request(f"r{index}") for index in range(12)))
        await trio.sleep(1.25)
    async with open_memory_server(**options) as server:
        owner = owner_of(server)
        batch = await ended(owner, batch)
        assert batch["request_counts"]["succeeded"] == len(await results(owner, batch)) == 12


async def test_message_batches_can_be_listed_and_deleted(owner_of, autojump_clock):
    async with open_memory_server() as server:
        owner = owner_of(server)
        ids = [(await create(owner, request("a")))["id"] for _ in range(5)][::-1]
        page = await owner.ok(f"{PATH}?limit=2")
        msgspec.convert(page, handlers.MessageBatches)
        assert ([one["id"] for one in page["data"]], page["has_more"]) == (ids[:2], True)
        page = await owner.ok(f"{PATH}?limit=10&after_id={page['last_id']}")
        assert ([one["id"] for one in page["data"]], page["has_more"]) == (ids[2:], False)
        page = await owner.ok(f"{PATH}?limit=2&before_id={ids[4]}")
        assert ([one["id"] for one in page["data"]], page["has_more"]) == (ids[2:4], True)
        for query in ("limit=0", "limit=1001", "after_id=x", "before_id=x", "after_id=x&before_id=x"):
            assert (await owner.ask(f"{PATH}?{query}"))[0] == 400
        batch = await ended(owner, {"id": ids[0]})
        deleted = await owner.ok(f"{PATH}/{batch['id']}", method="DELETE")
        DeletedMessageBatch.model_validate(deleted)
        for path in (f"{PATH}/{batch['id']}", f"{PATH}/{batch['id']}/results"):
            assert (await owner.ask(path))[0] == 404


async def test_unfinished_message_batch_has_no_results_and_cannot_be_deleted(owner_of, autojump_clock):
    async with open_memory_server(step_seconds=1, api_keys=KEYS) as server:
        alice, bob = (owner_of(server, key) for key in KEYS)
        batch = await create(alice, request("a", max_tokens=20))
        for method, path in (("GET", f"{PATH}/{batch['id']}/results"), ("DELETE", f"{PATH}/{batch['id']}")):
            status, said = await alice.ask(path, method=method)
            assert (status, said["error"]["type"]) == (400, "invalid_request_error")
            assert (await bob.ask(path, method=method))[0] == 404
        assert (await bob.ask(f"{PATH}/{batch['id']}/cancel", b"", method="POST"))[0] == 404
        assert (await alice.ask(f"/v1/batches/{batch['id']}"))[0] == 404
        assert [one["id"] for one in (await alice.ok("/v1/requests"))["data"]] == [f"{batch['id']}-0"]


@pytest.mark.parametrize(
    "requests, words",
    [
        ([], "requests"),
        ([request("a"), request("a")], "used twice"),
        ([request("")], "custom_id"),
        ([request("a b")], "custom_id"),
        ([request("a" * 65)], "custom_id"),
        ([{"custom_id": "a"}], "params"),
        ("x", "requests"),
    ],
)
async def test_invalid_message_batch_is_refused(owner_of, requests, words, autojump_clock):
    async with open_memory_server() as server:
        owner = owner_of(server)
        status, said = await owner.ask(PATH, {"requests": requests})
        assert (status, said["error"]["type"]) == (400, "invalid_request_error")
        assert words in said["error"]["message"]
        assert (await owner.ok(PATH))["data"] == []
