"""Tests connections that become silent without a close, because a NAT has forgotten them or another machine uses the
address.
"""

from __future__ import annotations

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.proxy.endpoint_watch import WatchSettings
from trioserve.router.settings import SilenceSettings
from trioserve.testing.memory_client import MemoryEnd
from trioserve.testing.memory_server import MemoryServer, open_memory_server

CHAT = "/v1/completions"
TEXT = "abcdefghijklmnopqrstuvwxyz" * 4
WATCH = WatchSettings(health_seconds=1, load_seconds=1, response_seconds_max=1, listens=False)
ENGINE = {"response": TEXT, "step_seconds": 1.0, "max_num_seqs": 32, "block_count": 800}
OPTIONS = {
    "watch": WATCH,
    "silence": SilenceSettings(),
    "engine": ENGINE,
    "policy": "round_robin",
    "lease_until": "end",
}


def body(**fields):
    return {"model": "fake", "prompt": "hello", "max_tokens": 60, **fields}


@pytest.fixture
def go_silent(monkeypatch):
    """Make all current connections to a server silent."""
    ends: dict[object, list[MemoryEnd]] = {}
    connect = MemoryServer.connect

    def recorded(server: MemoryServer) -> MemoryEnd:
        ends.setdefault(server, []).append(connect(server))
        return ends[server][-1]

    monkeypatch.setattr(MemoryServer, "connect", recorded)

    def silence(server: MemoryServer) -> None:
        for end in ends[server]:
            end.go_silent()

    return silence


def blocks(setup, id: str) -> int:
    return setup.servers[id].engine.stats().blocks_used


def silent_total(setup) -> dict[str, float]:
    counter = setup.router.metrics.silent_responses_total
    samples = [sample for metric in counter.collect() for sample in metric.samples]
    return {
        sample.labels["reason"]: sample.value for sample in samples if sample.name.endswith("_total") and sample.value
    }


@pytest.mark.parametrize("ids", ["ab", "a"])
async def test_stream_resumes_over_another_connection(open_setup, go_silent, autojump_clock, ids):
    """The stream resumes at another endpoint or, if there is none, at the same endpoint. The stream's old blocks are
    freed although no close arrives.
    """
    async with open_setup(ids, **OPTIONS) as setup:
        async with setup.client().ask(CHAT, body(stream=True)) as response:
            assert await response.head() == 200
            first = response.headers["x-trioserve-endpoint"]
            events = aiter(response)
            text = "".join([(await anext(events))["choices"][0]["text"] for _ in range(3)])
            go_silent(setup.servers[first])
            began_at = trio.current_time()
            text += (await anext(events))["choices"][0]["text"]
            assert trio.current_time() - began_at < 30
            if ids == "ab":
                await trio.sleep(3)
                assert blocks(setup, first) == 0
            text += "".join([event["choices"][0]["text"] async for event in events])
        assert text == TEXT[:60]
        assert response.body.endswith(b"[DONE]\n\n")
        assert silent_total(setup)["silent"] >= 1
        await trio.sleep(5)
        await setup.router.assert_all_free()
        assert [blocks(setup, id) for id in ids] == [0] * len(ids)


async def test_whole_response_is_requested_elsewhere_after_its_connection_is_silent(
    open_setup, go_silent, autojump_clock
):
    async with open_setup(**OPTIONS) as setup:
        responses = []

        async def ask() -> None:
            responses.append(await setup.client().post(CHAT, body()))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.sleep(3)
            [first] = [id for id, count in setup.leases().items() if count]
            go_silent(setup.servers[first])
        [response] = responses
        assert (response.status, response.headers["x-trioserve-endpoint"] != first) == (200, True)
        assert (await response.json())["choices"][0]["text"] == TEXT[:60]
        await trio.sleep(5)
        assert [blocks(setup, id) for id in "ab"] == [0, 0]


@pytest.mark.parametrize("stream", [False, True])
async def test_router_waits_for_a_long_prompt(open_setup, autojump_clock, stream):
    """Steps take far longer than the time limit. Meanwhile, the engine only sends heartbeats."""
    engine = {**ENGINE, "step_seconds": 90.0, "step_timeout": 3600.0}
    async with open_setup(**{**OPTIONS, "engine": engine}) as setup:
        response = await setup.client().post(CHAT, body(max_tokens=2, stream=stream))
        assert response.status == 200
        assert trio.current_time() >= 180
        assert silent_total(setup) == {}
        await setup.assert_all_free()


async def test_router_waits_for_a_request_in_a_paused_engine(open_setup, autojump_clock):
    async with open_setup("a", **OPTIONS) as setup:
        async with setup.client().ask(CHAT, body(stream=True, max_tokens=2)) as response:
            assert await response.head() == 200
            setup.servers["a"].engine.pause()
            await trio.sleep(90)
            setup.servers["a"].engine.resume()
            await response.read()
        assert response.body.endswith(b"[DONE]\n\n")
        assert silent_total(setup) == {}


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_leaves_a_silent_connection_frees_its_blocks(open_setup, go_silent, autojump_clock, stream):
    async with open_setup("a", **OPTIONS) as setup:
        with trio.move_on_after(14):
            async with setup.client().ask(CHAT, body(stream=stream)) as response:
                await trio.sleep(3)
                assert blocks(setup, "a") > 0
                go_silent(setup.servers["a"])
                await response.read()
        assert blocks(setup, "a") > 0
        await trio.sleep(3)
        assert blocks(setup, "a") == 0
        await setup.router.assert_all_free()


async def test_all_streams_resume_when_another_process_uses_the_address(open_setup, go_silent, autojump_clock):
    async with open_memory_server(**ENGINE) as taken, open_setup(**{**OPTIONS, "leases_max": 64}) as setup:
        texts: list[str] = []

        async def ask() -> None:
            async with setup.client().ask(CHAT, body(stream=True)) as response:
                text = "".join([event["choices"][0]["text"] async for event in response])
                texts.append(text or f"{response.status} {response.body!r}")

        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(ask)
            await trio.sleep(4)
            assert setup.leases()["a"] > 0
            count, former = setup.leases()["a"], setup.servers["a"]
            go_silent(setup.servers["a"])
            setup.servers["a"] = taken
            await trio.sleep(8)
            assert sum(silent_total(setup).values()) >= count
            assert silent_total(setup)["replaced"] == count
        assert texts == [TEXT[:60]] * 20
        former.engine.abort([view.id for view in former.engine.live_requests()])
        await wait_all_tasks_blocked()
        await setup.router.assert_all_free()


async def test_request_missing_from_load_reports_counts_as_lost(open_pair, autojump_clock):
    async with open_pair(
        "v w", watch=WATCH, silence=SilenceSettings(), policy="round_robin", queue_seconds_max=600
    ) as pair:
        responses = []

        async def ask() -> None:
            responses.append(await pair.client().post(CHAT, body()))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            nursery.start_soon(ask)
            await trio.sleep(70)
            for id in "vw":
                for asked in pair[id].open:
                    asked.respond({"id": "cmpl-0", "choices": []})
            await trio.sleep(1)
            for id in "vw":
                for asked in pair[id].open:
                    asked.respond({"id": "cmpl-0", "choices": []})
        assert [response.status for response in responses] == [200, 200]
        counter = pair.router.metrics.silent_responses_total
        assert counter.labels("not_running")._value.get() == 2
