"""Tests an endpoint whose step hangs although it answers its health checks.

The endpoint gets no new requests. Other endpoints serve its waiting requests.
"""

from __future__ import annotations

import trio

from trioserve.contracts.endpoint import EndpointId
from trioserve.proxy.endpoint_watch import WatchSettings
from trioserve.router.endpoint_state import EndpointHealth

CHAT = "/v1/completions"
WATCH = WatchSettings(health_seconds=1, load_seconds=1, response_seconds_max=1, listens=False)
ENGINE = {"response": "abc", "step_seconds": 0.01, "step_timeout": 20}


def body(**fields):
    return {"model": "fake", "prompt": "hello", "max_tokens": 3, **fields}


def health(setup, id: str) -> EndpointHealth:
    return setup.router.dispatch.core.endpoints[EndpointId(id)].health


async def test_endpoint_with_a_hanging_step_is_ejected_until_the_step_ends(open_setup, autojump_clock):
    async with open_setup(watch=WATCH, failures_max=2, policy="round_robin", engine=ENGINE) as setup:
        engine = setup.servers["a"].engine
        engine.steps.hold()
        # The router does not see requests that are sent to the endpoint directly.
        async with setup.servers["a"].client().ask(CHAT, body()) as stuck, trio.open_nursery() as nursery:
            await engine.steps.entered()
            responses = []

            async def ask() -> None:
                responses.append(await setup.client().post(CHAT, body()))

            for _ in range(4):
                nursery.start_soon(ask)
            await trio.sleep(19)
            assert [response.headers["x-trioserve-endpoint"] for response in responses] == ["b", "b"]
            assert health(setup, "a") is EndpointHealth.HEALTHY
            await trio.sleep(5)
            assert health(setup, "a") is EndpointHealth.EJECTED
            # The requests moved to the other endpoint before any output.
            assert [response.status for response in responses] == [200] * 4
            assert {response.headers["x-trioserve-endpoint"] for response in responses} == {"b"}
            assert (await setup.client().post(CHAT, body())).headers["x-trioserve-endpoint"] == "b"
            engine.steps.release()
            assert await stuck.head() == 200
            await trio.sleep(2)
            assert health(setup, "a") is EndpointHealth.HEALTHY
            later = [await setup.client().post(CHAT, body()) for _ in range(2)]
            assert {response.headers["x-trioserve-endpoint"] for response in later} == {"a", "b"}
        await setup.assert_all_free()


async def test_request_refused_before_the_ejection_is_served_by_another_endpoint(open_setup, autojump_clock):
    """The step is overdue, but no check has detected it yet."""
    seldom = WatchSettings(health_seconds=3600, load_seconds=3600, listens=False)
    async with open_setup(watch=seldom, policy="round_robin", engine=ENGINE) as setup:
        engine = setup.servers["a"].engine
        engine.steps.hold()
        async with setup.servers["a"].client().ask(CHAT, body()):
            await engine.steps.entered()
            await trio.sleep(21)
            responses = [await setup.client().post(CHAT, body()) for _ in range(2)]
            assert [(response.status, response.headers["x-trioserve-endpoint"]) for response in responses] == [
                (200, "b")
            ] * 2
            engine.steps.release()
            await trio.sleep(1)
        await setup.assert_all_free()


async def test_stream_of_an_endpoint_with_a_hanging_step_resumes_at_another_endpoint(open_setup, autojump_clock):
    async with open_setup(watch=WATCH, failures_max=2, policy="round_robin", engine=ENGINE) as setup:
        async with setup.client().ask(CHAT, body(stream=True)) as response:
            id = response.headers["x-trioserve-endpoint"] if await response.head() == 200 else ""
            engine = setup.servers[id].engine
            events = aiter(response)
            text = (await anext(events))["choices"][0]["text"]
            engine.steps.hold()
            await engine.steps.entered()
            text += "".join([event["choices"][0]["text"] async for event in events])
            assert text == "abc"
            assert 20 < trio.current_time() < 30
            assert health(setup, id) is EndpointHealth.EJECTED
            assert response.body.endswith(b"[DONE]\n\n")
            engine.steps.release()
            await trio.sleep(1)
        await setup.assert_all_free()


async def test_stream_that_cannot_resume_stays_at_an_endpoint_with_a_hanging_step(open_setup, autojump_clock):
    async with open_setup("a", watch=WATCH, failures_max=2, engine=ENGINE) as setup:
        async with setup.client().ask(CHAT, body(stream=True)) as response:
            engine = setup.servers["a"].engine
            events = aiter(response)
            text = (await anext(events))["choices"][0]["text"]
            engine.steps.hold()
            await engine.steps.entered()
            await trio.sleep(30)
            assert health(setup, "a") is EndpointHealth.EJECTED
            engine.steps.release()
            assert text + "".join([event["choices"][0]["text"] async for event in events]) == "abc"
        await setup.assert_all_free()
