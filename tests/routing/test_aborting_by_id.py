"""Requests at the router that are seen and aborted by their ids, wherever they are."""

from __future__ import annotations

import pytest
from trio.testing import wait_all_tasks_blocked

from trioserve.frontend.openai_types import decode_body
from trioserve.frontend.routed_body import RoutedBody

PATH = "/v1/completions"


def body(**fields: object) -> dict[str, object]:
    return {"model": "fake", "prompt": "hello", "max_tokens": 50, **fields}


async def results(answer) -> dict[str, str]:
    assert answer.status == 200
    return {each["id"]: each["result"] for each in (await answer.json())["data"]}


async def test_those_that_run_and_those_in_line_are_listed_and_aborted(open_setup):
    async with open_setup("a", engine={"paused": True}, leases_max=1) as setup:
        engine = setup.servers["a"].engine
        async with (
            setup.client().ask(PATH, body(stream=True), headers={"x-request-id": "runs"}) as runs,
            setup.client().ask(PATH, body(), headers={"x-request-id": "waits"}) as waits,
        ):
            await engine.step(2)
            await wait_all_tasks_blocked()
            listed = (await (await setup.client().get("/v1/requests")).json())["data"]
            assert [(each["id"], each["state"], each["endpoint"]) for each in listed] == [
                ("runs", "running", "a"),
                ("waits", "waiting", None),
            ]
            answer = await setup.client().post("/v1/requests/abort", {"ids": ["waits", "runs", "nobody"]})
            assert await results(answer) == {"waits": "aborted", "runs": "aborted", "nobody": "unknown"}
            assert setup.router.dispatch.core.stats().waiting == 0
            await wait_all_tasks_blocked()
            assert engine.stats().blocks_used == 0
            assert [event["error"]["code"] async for event in runs if "error" in event] == ["request_aborted"]
            assert await waits.head() == 503
            assert (await waits.json())["error"]["code"] == "request_aborted"
        answer = await setup.client().post("/v1/requests/abort", {"ids": ["waits", "runs"]})
        assert await results(answer) == {"waits": "already_finished", "runs": "already_finished"}
        await setup.assert_all_free()


async def test_an_id_of_somebody_else_is_unknown(open_setup):
    async with open_setup("a", engine={"paused": True}, api_keys=("one", "two")) as setup:
        mine, other = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
        async with setup.client().ask(PATH, body(), headers={**mine, "x-request-id": "mine"}) as asked:
            await wait_all_tasks_blocked()
            assert (await (await setup.client().get("/v1/requests", headers=other)).json())["data"] == []
            client = setup.client()
            async with client.ask("/v1/requests/mine", None, method="DELETE", headers=other) as answer:
                assert await answer.head() == 404
            async with setup.client().ask("/v1/requests/mine", None, method="DELETE", headers=mine) as answer:
                assert await answer.head() == 200
            assert await asked.head() == 503
        await setup.assert_all_free()


@pytest.mark.parametrize(
    ("prompt", "count"),
    [
        ('"one"', 1),
        ('"[[one"', 1),
        ("[1, 2, 3]", 1),
        ('["a", "b"]', 2),
        (' [ "a" , "b,c", "]"]', 3),
        ("[[1, 2], [3]]", 2),
        ("[]", 1),
        ("null", 1),
    ],
)
def test_several_prompts_take_several_seats(prompt, count):
    assert decode_body(f'{{"prompt": {prompt}}}'.encode(), RoutedBody).prompt_count == count
