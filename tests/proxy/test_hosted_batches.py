"""Tests of files and batches of a server whose models are loaded on demand."""

from __future__ import annotations

import json
from typing import Any

import trio

from tests.api.batches.conftest import Owner, line
from tests.proxy.test_model_host import open_models, spec
from trioserve.contracts.request import PRIORITY_MAX


def of_models(*names: str) -> list[dict[str, Any]]:
    return [line(f"r{number}", f"prompt {number}", model=name) for number, name in enumerate(names)]


async def test_batch_loads_the_models_that_its_lines_name(autojump_clock):
    async with open_models(spec("a"), spec("b", adapters=("fr",)), memory=50, turn_seconds=1) as models:
        owner = Owner(models.router)
        batch = await owner.ended((await owner.batch(*of_models(*"abab", "fr", "c")))["id"])
        assert batch["request_counts"] == {"total": 6, "completed": 5, "failed": 1}
        results = {
            each["custom_id"]: each["response"]["body"] for each in await owner.lines_of(batch["output_file_id"])
        }
        assert results["r1"]["model"] == results["r3"]["model"] != results["r4"]["model"]
        alone = await owner.ok("/v1/completions", line("x", "prompt 0", model="a")["body"])
        assert results["r0"]["choices"] == alone["choices"]
        [unknown] = await owner.lines_of(batch["error_file_id"])
        assert (unknown["response"]["status_code"], unknown["response"]["body"]["error"]["code"]) == (
            404,
            "model_not_found",
        )
        assert set(models.loads) == {"a", "b"}
        await models.router.assert_all_free()


async def test_lines_of_a_batch_run_after_the_requests_of_clients(autojump_clock):
    async with open_models(spec("a")) as models:
        models.loading["a"] = trio.Event()
        owner = Owner(models.router)
        made = await owner.batch(*of_models("a"))
        await trio.sleep(1)
        [waiting] = models.router.dispatch.live_admissions()
        assert (waiting.priority, models.state("a")) == (PRIORITY_MAX, "loading")
        models.loading["a"].set()
        assert (await owner.ended(made["id"]))["request_counts"]["completed"] == 1


async def test_batch_of_messages_runs_and_its_results_are_read(autojump_clock):
    async with open_models(spec("a")) as models:
        owner = Owner(models.router)
        params = {"model": "a", "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]}
        made = await owner.ok("/v1/messages/batches", {"requests": [{"custom_id": "x", "params": params}]})
        await trio.sleep(60)
        state = await owner.ok(f"/v1/messages/batches/{made['id']}")
        assert (state["processing_status"], state["request_counts"]["succeeded"]) == ("ended", 1)
        results = await owner.ok(f"/v1/messages/batches/{made['id']}/results")
        assert json.loads(results)["result"]["message"]["usage"]["output_tokens"] == 4


async def test_cancelled_batch_cancels_the_load_that_only_its_lines_wait_for(autojump_clock):
    async with open_models(spec("a")) as models:
        models.loading["a"] = trio.Event()
        owner = Owner(models.router)
        made = await owner.batch(*of_models("a", "a"))
        await trio.sleep(1)
        await owner.ok(f"/v1/batches/{made['id']}/cancel", {})
        assert (await owner.ended(made["id"]))["status"] == "cancelled"
        assert (await models.host.wait_until_settled("a")).state == "unloaded"
        await models.router.assert_all_free()
