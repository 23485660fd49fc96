"""Tests that a router lists requests and aborts them by id, in its queue, at an endpoint, or in another process."""

from __future__ import annotations

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.admission.dispatch import Dispatch
from trioserve.api.openai.request_types import decode_body
from trioserve.contracts.endpoint import EndpointId, RoutedRequest
from trioserve.contracts.errors import EndpointLost, RequestAborted
from trioserve.contracts.events import AbortOutcome
from trioserve.proxy.routed_body import RoutedBody
from trioserve.router.endpoint_state import Fault
from trioserve.router.policies import RoundRobin
from trioserve.router.settings import RouterSettings

PATH = "/v1/completions"


def body(**fields: object) -> dict[str, object]:
    return {"model": "fake", "prompt": "hello", "max_tokens": 50, **fields}


async def results(response) -> dict[str, str]:
    assert response.status == 200
    return {each["id"]: each["result"] for each in (await response.json())["data"]}


async def test_running_and_queued_requests_are_listed_and_aborted(open_setup):
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
            response = await setup.client().post("/v1/requests/abort", {"ids": ["waits", "runs", "nobody"]})
            assert await results(response) == {"waits": "aborted", "runs": "aborted", "nobody": "unknown"}
            assert setup.router.dispatch.core.stats().waiting == 0
            await wait_all_tasks_blocked()
            assert engine.stats().blocks_used == 0
            assert [event["error"]["code"] async for event in runs if "error" in event] == ["request_aborted"]
            assert await waits.head() == 503
            assert (await waits.json())["error"]["code"] == "request_aborted"
        response = await setup.client().post("/v1/requests/abort", {"ids": ["waits", "runs"]})
        assert await results(response) == {"waits": "already_finished", "runs": "already_finished"}
        await setup.assert_all_free()


async def test_request_of_another_caller_is_unknown(open_setup):
    async with open_setup("a", engine={"paused": True}, api_keys=("one", "two")) as setup:
        mine, other = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
        async with setup.client().ask(PATH, body(), headers={**mine, "x-request-id": "mine"}) as asked:
            await wait_all_tasks_blocked()
            assert (await (await setup.client().get("/v1/requests", headers=other)).json())["data"] == []
            client = setup.client()
            async with client.ask("/v1/requests/mine", None, method="DELETE", headers=other) as response:
                assert await response.head() == 404
            async with setup.client().ask("/v1/requests/mine", None, method="DELETE", headers=mine) as response:
                assert await response.head() == 200
            assert await asked.head() == 503
        await setup.assert_all_free()


@pytest.mark.parametrize(
    ("resume", "count"), [("null", 0), ('{"token_ids": [[1, 2, 3], [4]], "finished": [false, true]}', 5)]
)
def test_known_tokens_of_a_resumed_response_count_like_prompt_tokens(resume: str, count: int) -> None:
    raw = f'{{"prompt": "x", "resume": {resume}}}'.encode()
    assert decode_body(raw, RoutedBody).known_token_count == count


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
def test_each_prompt_of_a_request_needs_its_own_lease(prompt, count):
    assert decode_body(f'{{"prompt": {prompt}}}'.encode(), RoutedBody).prompt_count == count


async def test_request_aborted_while_its_endpoint_fails_is_not_retried(autojump_clock):
    dispatch = Dispatch(RouterSettings(leases_max=1), RoundRobin)
    for id in ("a", "b"):
        dispatch.core.add_endpoint(EndpointId(id), ("m",), trio.current_time())
        dispatch.core.note_health(EndpointId(id), True, trio.current_time())
    request = RoutedRequest(model="m")
    with dispatch.enter(request, id="mine") as admission, dispatch.enter(request) as in_the_way:
        await in_the_way.lease()
        await admission.lease()
        with pytest.raises(EndpointLost), admission.attempt():
            assert dispatch.abort(["mine"]) == {"mine": AbortOutcome.ABORTED}
            raise EndpointLost("just then")
        assert admission.failed(Fault.BROKE)
        with trio.fail_after(1), pytest.raises(RequestAborted):
            await admission.lease()
    assert dispatch.core.stats().waiting == 0
    assert not any(dispatch.core.stats().leases.values())


async def test_abort_releases_the_queue_position_at_once():
    dispatch = Dispatch(RouterSettings(), RoundRobin)
    # No health check has passed yet, so this endpoint gets no requests.
    dispatch.core.add_endpoint(EndpointId("a"), ("m",), trio.current_time())
    with dispatch.enter(RoutedRequest(model="m"), id="mine") as admission:
        assert dispatch.core.stats().waiting == 1
        assert dispatch.abort(["mine"]) == {"mine": AbortOutcome.ABORTED}
        assert dispatch.core.stats().waiting == 0
        assert dispatch.abort(["mine"]) == {"mine": AbortOutcome.ALREADY_FINISHED}
        with pytest.raises(RequestAborted):
            await admission.lease()
