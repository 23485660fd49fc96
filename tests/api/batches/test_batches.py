"""Tests batches with the whole server in memory: results of lines, statuses, owners and limits."""

from __future__ import annotations

import msgspec
import pytest
import trio
from openai.types import Batch, FileObject

from trioserve.api.batches import batch_run
from trioserve.api.batches.handlers import Batch as DescribedBatch
from trioserve.api.limits import BatchSettings
from trioserve.store.settings import StoreSettings
from trioserve.testing.fake_engine import InjectedFault
from trioserve.testing.memory_server import open_memory_server

KEYS = ("alice-key", "bob-key")


async def test_every_line_of_a_batch_gets_its_response(owner_of, batch_line, autojump_clock):
    async with open_memory_server(step_seconds=0.01) as server:
        owner = owner_of(server)
        made = await owner.batch(
            *(batch_line(f"r{index}", f"prompt {index}") for index in range(20)), metadata={"a": "b"}
        )
        Batch.model_validate(made, strict=True)
        msgspec.convert(made, DescribedBatch)
        assert (made["status"], made["metadata"]) == ("validating", {"a": "b"})
        assert made["expires_at"] == made["created_at"] + 86_400
        batch = await owner.ended(made["id"])
        Batch.model_validate(batch, strict=True)
        msgspec.convert(batch, DescribedBatch)
        assert batch["status"] == "completed"
        assert batch["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
        assert batch["error_file_id"] is None
        assert batch["usage"]["output_tokens"] == 80
        lines = await owner.lines_of(batch["output_file_id"])
        assert sorted(line["custom_id"] for line in lines) == sorted(f"r{index}" for index in range(20))
        alone = await owner.ok("/v1/completions", batch_line("x", "prompt 7")["body"])
        [seventh] = [line for line in lines if line["custom_id"] == "r7"]
        assert seventh["response"]["status_code"] == 200
        assert seventh["response"]["body"]["choices"] == alone["choices"]
        assert seventh["error"] is None
        shown = await owner.ok(f"/v1/files/{batch['output_file_id']}")
        FileObject.model_validate(shown, strict=True)
        assert shown["purpose"] == "batch_output"
        await server.assert_all_free()


async def test_batch_lines_are_not_counted_as_http_requests(owner_of, batch_line, autojump_clock):
    async with open_memory_server() as server:
        owner = owner_of(server)
        await owner.ended((await owner.batch(batch_line("a"), batch_line("b")))["id"])
        page = server.engine.metrics.expose().decode()
        assert '\nhttp_requests_total{handler="/v1/batches",method="POST",status="2xx"} 1.0\n' in page
        assert 'trioserve:http_requests_total{model_name="fake",path="/v1/completions",status="200"} 2.0' in page
        assert 'handler="/v1/completions"' not in page


@pytest.mark.parametrize("function", ["usage_of", "line_request", "custom_id_of"])
async def test_bug_in_one_batch_does_not_affect_the_next_batch(
    owner_of, batch_line, autojump_clock, monkeypatch, function
):
    def broken(*_arguments, **_options):
        raise InjectedFault

    async with open_memory_server() as server:
        owner = owner_of(server)
        with monkeypatch.context() as patched:
            patched.setattr(batch_run, function, broken)
            batch = await owner.ended((await owner.batch(batch_line("a"), batch_line("b")))["id"])
        assert batch["status"] == "failed"
        assert batch["errors"]["data"][0]["code"] == "internal_error"
        assert (await owner.ended((await owner.batch(batch_line("a")))["id"]))["status"] == "completed"
        await server.assert_all_free()


BAD_LINES = [
    (b"no json", "invalid_json_line", None),
    ({"custom_id": "x"}, "invalid_json_line", "x"),
    ({"custom_id": "x", "method": "GET", "url": "/v1/completions", "body": {}}, "invalid_method", "x"),
    ({"custom_id": "x", "method": "POST", "url": "/v1/embeddings", "body": {}}, "mismatched_url", "x"),
    ({"custom_id": "", "method": "POST", "url": "/v1/completions", "body": {}}, "invalid_custom_id", ""),
    (
        {"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": {"stream": True}},
        "stream_not_supported",
        "x",
    ),
    ({"custom_id": "good", "method": "POST", "url": "/v1/completions", "body": {}}, "duplicate_custom_id", "good"),
    (b"\xff\xfe", "invalid_json_line", None),
    (b"[" * 5000, "invalid_json_line", None),
]


async def test_invalid_batch_lines_become_error_lines_and_other_lines_run(owner_of, batch_line, autojump_clock):
    async with open_memory_server() as server:
        owner = owner_of(server)
        bad = [content for content, _, _ in BAD_LINES]
        batch = await owner.ended(
            (await owner.batch(batch_line("good"), b"", *bad, batch_line("cold", temperature=-1), b"  "))["id"]
        )
        assert batch["status"] == "completed"
        assert batch["request_counts"] == {"total": 11, "completed": 1, "failed": 10}
        assert [line["custom_id"] for line in await owner.lines_of(batch["output_file_id"])] == ["good"]
        errors = await owner.lines_of(batch["error_file_id"])
        [refused] = [line for line in errors if line["response"] is not None]
        assert refused["response"]["status_code"] == 400
        assert refused["response"]["body"]["error"]["param"] == "temperature"
        others = sorted(
            (line["error"]["line"], line["error"]["code"], line["custom_id"]) for line in errors if line["error"]
        )
        assert others == [(index + 2, code, id) for index, (_, code, id) in enumerate(BAD_LINES)]


@pytest.mark.parametrize("lines, code", [([], "empty_file"), ([b"", b" "], "empty_file")])
async def test_batch_of_a_file_without_lines_fails(owner_of, lines, code, autojump_clock):
    async with open_memory_server() as server:
        owner = owner_of(server)
        batch = await owner.ended((await owner.batch(*lines))["id"])
        assert batch["status"] == "failed"
        assert [error["code"] for error in batch["errors"]["data"]] == [code]
        assert batch["output_file_id"] is None


async def test_batch_with_too_many_lines_fails(owner_of, batch_line, autojump_clock):
    async with open_memory_server(batches=BatchSettings(lines_max=3)) as server:
        owner = owner_of(server)
        batch = await owner.ended((await owner.batch(*(batch_line(f"r{index}") for index in range(4))))["id"])
        assert batch["errors"]["data"][0]["code"] == "too_many_lines"


async def test_batch_line_that_is_too_long_becomes_an_error_line(owner_of, batch_line, autojump_clock):
    async with open_memory_server(batches=BatchSettings(line_bytes_max=1000)) as server:
        owner = owner_of(server)
        made = await owner.batch(
            batch_line("long", "x" * 3_000_000), batch_line("short"), batch_line("longer", "x" * 1000)
        )
        batch = await owner.ended(made["id"])
        assert batch["request_counts"] == {"total": 3, "completed": 1, "failed": 2}
        errors = await owner.lines_of(batch["error_file_id"])
        assert sorted((line["error"]["line"], line["error"]["code"]) for line in errors) == [
            (1, "line_too_long"),
            (3, "line_too_long"),
        ]


async def test_batch_can_use_every_endpoint(owner_of, batch_line, autojump_clock):
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    bodies = {
        "/v1/chat/completions": chat,
        "/v1/responses": {"model": "fake", "input": "Hi", "max_output_tokens": 16},
        "/v1/embeddings": {"input": ["one", "two"]},
    }
    async with open_memory_server() as server:
        owner = owner_of(server)
        for url, body in bodies.items():
            asked = [
                {"custom_id": "good", "method": "POST", "url": url, "body": body},
                {"custom_id": "later", "method": "POST", "url": url, "body": {**body, "background": True}},
            ]
            batch = await owner.ended((await owner.batch(*asked, endpoint=url))["id"])
            counts = {"total": 2, "completed": 1, "failed": 1}
            assert batch["request_counts"] == counts, await owner.lines_of(batch["error_file_id"])
            assert batch["usage"]["input_tokens"] > 0
            [good] = await owner.lines_of(batch["output_file_id"])
            assert good["response"]["body"]["object"] in ("chat.completion", "response", "list")
            [later] = await owner.lines_of(batch["error_file_id"])
            assert later["error"]["code"] == "background_not_supported"
        await server.assert_all_free()


# --- priority and limits ---


async def test_batch_lines_run_after_other_requests_and_use_half_of_the_engine(owner_of, batch_line, autojump_clock):
    async with open_memory_server(step_seconds=0.01, max_num_seqs=4) as server:
        owner = owner_of(server)
        await owner.batch(*(batch_line(f"r{index}", priority=-100, max_tokens=50) for index in range(30)))
        await trio.sleep(0.1)
        live = (await owner.ok("/v1/requests"))["data"]
        assert len(live) == 2  # A batch may use half of the sequences that the engine runs.
        assert {request["priority"] for request in live} == {100}
        began_at = trio.current_time()
        await owner.ok("/v1/completions", batch_line("x")["body"])
        assert trio.current_time() - began_at < 0.1


async def test_batch_lines_wait_while_the_queue_is_full(owner_of, batch_line, autojump_clock):
    async with open_memory_server(step_seconds=0.1, max_num_seqs=2, max_queued_requests=1) as server:
        owner = owner_of(server)
        made = await owner.batch(*(batch_line(f"r{index}") for index in range(3)))
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(owner.ask, "/v1/completions", batch_line("x", max_tokens=50)["body"])
        batch = await owner.ended(made["id"])
        assert batch["request_counts"] == {"total": 3, "completed": 3, "failed": 0}


async def test_number_of_batches_of_one_key_is_limited(owner_of, batch_line, autojump_clock):
    settings = BatchSettings(batches_max=3, batches_of_one_max=2, running_max=1)
    async with open_memory_server(batches=settings, api_keys=KEYS, step_seconds=1) as server:
        alice, bob = (owner_of(server, key) for key in KEYS)
        file_id = await alice.upload(batch_line("a", max_tokens=100))
        first, second = [await alice.batch(input_file_id=file_id) for _ in range(2)]
        body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
        status, said = await alice.ask("/v1/batches", body)
        assert (status, said["error"]["code"]) == (429, "overloaded")
        bobs = await bob.batch(batch_line("b"))
        assert (await alice.state(second["id"]))["status"] == "validating"  # Only one batch runs at a time.
        await alice.ok(f"/v1/batches/{first['id']}/cancel", b"", method="POST")
        await bob.ended(bobs["id"])  # Keys take turns, so bob's batch runs before alice's second batch.
        await trio.sleep(0.1)
        assert (await alice.state(second["id"]))["status"] == "in_progress"
        await alice.batch(input_file_id=file_id)


# --- owners ---


async def test_another_key_cannot_find_files_and_batches(owner_of, batch_line, autojump_clock):
    async with open_memory_server(api_keys=KEYS, admin_api_key="admin-key") as server:
        alice, bob, admin = (owner_of(server, key) for key in (*KEYS, "admin-key"))
        made = await alice.batch(batch_line("a"))
        batch = await alice.ended(made["id"])
        for path in (
            f"/v1/files/{batch['input_file_id']}",
            f"/v1/files/{batch['output_file_id']}",
            f"/v1/files/{batch['output_file_id']}/content",
            f"/v1/batches/{batch['id']}",
        ):
            assert (await bob.ask(path))[0] == 404
            assert (await admin.ask(path))[0] == 200
        assert (await bob.ask(f"/v1/batches/{batch['id']}/cancel", b"", method="POST"))[0] == 404
        assert (await bob.ask(f"/v1/files/{batch['input_file_id']}", method="DELETE"))[0] == 404
        body = {"input_file_id": batch["input_file_id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        status, said = await bob.ask("/v1/batches", body)
        assert (status, said["error"]["param"]) == (404, "input_file_id")
        for path in ("/v1/files", "/v1/batches"):
            assert (await bob.ok(path))["data"] == []
            assert (await alice.ok(path))["data"]
            assert (await admin.ok(path))["data"]


async def test_requests_of_batch_lines_count_for_the_owner_of_the_batch(owner_of, batch_line, autojump_clock):
    async with open_memory_server(api_keys=KEYS, step_seconds=1) as server:
        alice, bob = (owner_of(server, key) for key in KEYS)
        made = await alice.batch(batch_line("a", max_tokens=20), batch_line("cheeky", priority=-1))
        await trio.sleep(0.5)
        assert [one["id"] for one in (await alice.ok("/v1/requests"))["data"]] == [f"{made['id']}-0"]
        assert (await bob.ok("/v1/requests"))["data"] == []
        batch = await alice.ended(made["id"])
        [refused] = await alice.lines_of(batch["error_file_id"])
        assert refused["response"]["body"]["error"]["param"] == "priority"


HOSTILE = ["..", "%2e%2e", "x" * 200, "a%00b", "%27%20OR%201=1--", "file-" + "0" * 32, "é", "*", "a%2Fb"]


@pytest.mark.parametrize("id", HOSTILE)
async def test_malformed_ids_are_not_found(owner_of, id, autojump_clock):
    async with open_memory_server() as server:
        owner = owner_of(server)
        for path in (f"/v1/files/{id}", f"/v1/files/{id}/content", f"/v1/batches/{id}"):
            assert (await owner.ask(path.encode("ascii", "replace").decode()))[0] == 404
        body = {"input_file_id": id, "endpoint": "/v1/completions", "completion_window": "24h"}
        assert (await owner.ask("/v1/batches", body))[0] == 404


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"endpoint": "/v1/models"}, "endpoint"),
        ({"endpoint": "/v1/batches"}, "endpoint"),
        ({"completion_window": "24"}, "completion_window"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"completion_window": "15d"}, "completion_window"),
        ({"metadata": {f"k{index}": "v" for index in range(17)}}, "metadata"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"metadata": {"k": 1}}, "metadata[...]"),
        ({"output_expires_after": {"anchor": "x", "seconds": 3600}}, "output_expires_after"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3599}}, "output_expires_after"),
    ],
)
async def test_invalid_batch_is_refused_by_field_name(owner_of, batch_line, fields, param, autojump_clock):
    async with open_memory_server() as server:
        owner = owner_of(server)
        file_id = await owner.upload(batch_line("a"))
        body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h", **fields}
        status, said = await owner.ask("/v1/batches", body)
        assert (status, said["error"]["param"]) == (400, param)
        assert (await owner.ok("/v1/batches"))["data"] == []


async def test_input_file_must_have_the_purpose_batch(owner_of, batch_line, autojump_clock):
    async with open_memory_server() as server:
        owner = owner_of(server)
        file_id = await owner.upload(batch_line("a"), purpose="user_data")
        body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
        status, said = await owner.ask("/v1/batches", body)
        assert (status, said["error"]["param"]) == (400, "input_file_id")


async def test_batches_are_listed_page_by_page(owner_of, batch_line, autojump_clock):
    async with open_memory_server() as server:
        owner = owner_of(server)
        file_id = await owner.upload(batch_line("a"))
        ids = [(await owner.batch(input_file_id=file_id))["id"] for _ in range(5)][::-1]
        page = await owner.ok("/v1/batches?limit=2")
        assert [batch["id"] for batch in page["data"]] == ids[:2]
        assert page["has_more"]
        page = await owner.ok(f"/v1/batches?limit=3&after={page['last_id']}")
        assert [batch["id"] for batch in page["data"]] == ids[2:]
        assert not page["has_more"]
        for query, param in (("limit=0", "limit"), ("limit=101", "limit"), ("after=nobody", "after")):
            status, said = await owner.ask(f"/v1/batches?{query}")
            assert (status, said["error"]["param"]) == (400, param)


# --- a full store ---


async def test_upload_beyond_the_share_of_a_key_is_refused(owner_of, batch_line, autojump_clock):
    async with open_memory_server(store_settings=StoreSettings(bytes_max=20_000)) as server:
        owner = owner_of(server)
        kept = await owner.upload(b"x" * 9000)
        form = (await owner.ask("/v1/files"))[1]
        assert [file["id"] for file in form["data"]] == [kept]
        status, said = await owner.ask(
            "/v1/files",
            b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\ncontent-disposition: '
            b'form-data; name="file"; filename="f"\r\n\r\n' + b"x" * 5000 + b"\r\n--b--\r\n",
            content_type="multipart/form-data; boundary=b",
        )
        assert status == 400
        assert "half of" in said["error"]["message"]
        assert len((await owner.ok("/v1/files"))["data"]) == 1


async def test_batch_fails_when_the_store_is_full_and_keeps_finished_lines(owner_of, batch_line, autojump_clock):
    async with open_memory_server(store_settings=StoreSettings(bytes_max=70_000), step_seconds=0.01) as server:
        owner = owner_of(server)
        batch = await owner.ended((await owner.batch(*(batch_line(f"r{index}") for index in range(200))))["id"])
        assert batch["status"] == "failed"
        assert [error["code"] for error in batch["errors"]["data"]] == ["store_full"]
        done = await owner.lines_of(batch["output_file_id"])
        assert 0 < len(done) == batch["request_counts"]["completed"] < 200
        await server.assert_all_free()


# --- files of a batch ---


async def test_files_of_an_unfinished_batch_cannot_be_deleted(owner_of, batch_line, autojump_clock):
    async with open_memory_server(step_seconds=0.1) as server:
        owner = owner_of(server)
        made = await owner.batch(*(batch_line(f"r{index}") for index in range(60)))
        await trio.sleep(0.3)
        assert (await owner.state(made["id"]))["status"] == "in_progress"
        files = [file["id"] for file in (await owner.ok("/v1/files"))["data"]]
        assert len(files) == 3  # The files are the input file and two output files.
        for file_id in files:
            status, said = await owner.ask(f"/v1/files/{file_id}", method="DELETE")
            assert (status, said["error"]["code"]) == (409, "file_in_use")
            assert made["id"] in said["error"]["message"]
        batch = await owner.ended(made["id"])
        assert len(await owner.lines_of(batch["output_file_id"])) == 60
        for file_id in (made["input_file_id"], batch["output_file_id"]):
            await owner.ok(f"/v1/files/{file_id}", method="DELETE")


async def test_concurrent_batch_and_deletion_of_its_input_do_not_both_succeed(owner_of, batch_line, autojump_clock):
    outcomes = set()
    for order in range(9):
        async with open_memory_server() as server:
            owner = owner_of(server)
            file_id = await owner.upload(batch_line("a"))
            statuses = {}

            async def create(owner, file_id, statuses, turns):
                for _ in range(turns):
                    await trio.lowlevel.checkpoint()
                body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
                statuses["create"], said = await owner.ask("/v1/batches", body)
                if statuses["create"] == 200:
                    statuses["end"] = (await owner.ended(said["id"]))["status"]

            async def delete(owner, file_id, statuses, turns):
                for _ in range(turns):
                    await trio.lowlevel.checkpoint()
                statuses["delete"], _ = await owner.ask(f"/v1/files/{file_id}", method="DELETE")

            async with trio.open_nursery() as nursery:
                nursery.start_soon(create, owner, file_id, statuses, max(0, 12 - 3 * order))
                nursery.start_soon(delete, owner, file_id, statuses, max(0, 3 * order - 12))
            assert (statuses["create"], statuses["delete"], statuses.get("end")) in (
                (200, 409, "completed"),
                (404, 200, None),
                (200, 200, "completed"),  # The file was deleted after the end of the batch.
            )
            outcomes.add((statuses["create"], statuses["delete"]))
    assert len(outcomes) > 1, f"one order was tried only: {outcomes}"


async def test_expired_input_file_is_kept_until_its_batches_end(owner_of, batch_line, autojump_clock):
    """The file expires after an hour, and the first of its two batches ends long before the second."""
    async with open_memory_server(
        step_seconds=300.0, batches=BatchSettings(running_max=1), store_settings=StoreSettings(seconds_max=86_400)
    ) as server:
        owner = owner_of(server)
        more = "".join(
            f'--b\r\ncontent-disposition: form-data; name="expires_after[{name}]"\r\n\r\n{value}\r\n'
            for name, value in (("anchor", "created_at"), ("seconds", "3600"))
        )
        file_id = await owner.upload(*(batch_line(f"r{index}") for index in range(6)), more=more)
        expires_at = (await owner.ok(f"/v1/files/{file_id}"))["expires_at"]
        first, second = [await owner.batch(input_file_id=file_id) for _ in range(2)]
        assert (await owner.ok(f"/v1/files/{file_id}"))["expires_at"] > 86_400
        for made in (first, second):
            await trio.sleep(4000)
            batch = await owner.state(made["id"])
            assert batch["status"] == "completed"
            assert len(await owner.lines_of(batch["output_file_id"])) == 6
        assert trio.current_time() > expires_at
        await trio.sleep(2)
        assert (await owner.ask(f"/v1/files/{file_id}"))[0] == 404


async def test_lifetime_of_result_files_begins_at_the_end_of_the_batch(owner_of, batch_line, autojump_clock):
    async with open_memory_server(step_seconds=1000.0) as server:
        owner = owner_of(server)
        made = await owner.batch(
            *(batch_line(f"r{index}") for index in range(4)),
            output_expires_after={"anchor": "created_at", "seconds": 3600},
        )
        await trio.sleep(7_000)
        batch = await owner.state(made["id"])
        assert batch["completed_at"] - batch["in_progress_at"] > 3600
        assert len(await owner.lines_of(batch["output_file_id"])) == 4
        await trio.sleep(3601)
        assert trio.current_time() > batch["completed_at"] + 3600
        assert (await owner.ask(f"/v1/files/{batch['output_file_id']}"))[0] == 404


async def test_many_batches_of_one_key_delay_another_keys_batch_by_one_turn(owner_of, batch_line, autojump_clock):
    settings = BatchSettings(running_max=1)
    async with open_memory_server(api_keys=("a", "b"), step_seconds=0.05, batches=settings) as server:
        many, one = owner_of(server, "a"), owner_of(server, "b")
        made = [await many.batch(batch_line("r")) for _ in range(6)]
        await one.ended((await one.batch(batch_line("r")))["id"])
        states = [(await many.state(batch["id"]))["status"] for batch in made]
        assert states.count("validating") >= 3
        for batch in made:
            await many.ended(batch["id"])
