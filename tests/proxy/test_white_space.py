"""Tests whole JSON responses of a router: the router sends the head and white space while the request waits or runs."""

from __future__ import annotations

import json

import pytest
import trio

from trioserve.api.caller import AccessRules
from trioserve.router.settings import SilenceSettings

PATH = "/v1/completions"
ACCESS = AccessRules(keep_alive_seconds=5, keep_alive_json=True)
ENGINE = {"response": "abcdefghij" * 8, "step_seconds": 1.0, "access": ACCESS}
OPTIONS = {"engine": ENGINE, "access": ACCESS, "silence": SilenceSettings()}


def body(**fields: object) -> dict[str, object]:
    return {"model": "fake", "prompt": "hello", "max_tokens": 12, **fields}


@pytest.mark.parametrize("http", [1, 2])
async def test_client_gets_white_space_while_its_request_waits_or_runs(open_setup, autojump_clock, http):
    async with open_setup("a", leases_max=1, **OPTIONS) as setup, trio.open_nursery() as nursery:

        async def first() -> None:
            await (await setup.client().post(PATH, body(max_tokens=30))).read()

        nursery.start_soon(first)
        await trio.sleep(0.5)
        began_at = trio.current_time()
        async with setup.client(http=http).ask(PATH, body()) as response:
            assert await response.head() == 200
            assert trio.current_time() - began_at == pytest.approx(5)
            await response.read()
        assert response.body.startswith(b" " * 8 + b"{")
        assert json.loads(response.body)["choices"][0]["text"] == "abcdefghijab"
    await setup.assert_all_free()


async def test_timeout_after_white_space_becomes_an_error_in_the_body(open_setup, autojump_clock):
    async with open_setup("a", leases_max=1, **OPTIONS) as setup, trio.open_nursery() as nursery:

        async def first() -> None:
            await (await setup.client().post(PATH, body(max_tokens=30))).read()

        nursery.start_soon(first)
        await trio.sleep(0.5)
        response = await setup.client().post(PATH, body(queue_timeout=12))
        await response.read()
        assert response.status == 200
        assert response.body.startswith(b"  {")
        assert json.loads(response.body)["error"]["code"] == "queue_timeout"


async def test_request_whose_endpoint_dies_after_the_head_is_served_by_another_endpoint(open_setup, autojump_clock):
    async with open_setup("ab", **OPTIONS) as setup:
        async with setup.client().ask(PATH, body()) as response:
            assert await response.head() == 200
            [first] = [id for id, count in setup.leases().items() if count]
            await setup.servers[first].hang_up()
            await response.read()
        assert json.loads(response.body)["choices"][0]["text"] == "abcdefghijab"
    await setup.assert_all_free()


async def test_error_of_the_endpoint_after_the_head_becomes_the_response_body(open_pair, autojump_clock):
    async with open_pair("b", access=ACCESS) as pair, pair.client().ask(PATH, body()) as response:
        ask = await pair.ask_of("b")
        assert await response.head() == 200
        ask.refuse(400, "nothing_like_it")
        await response.read()
    assert json.loads(response.body)["error"]["code"] == "nothing_like_it"


@pytest.mark.parametrize("seconds", [3, 7])
async def test_a_client_that_leaves_frees_lease_and_blocks(open_setup, autojump_clock, seconds):
    async with open_setup("a", **OPTIONS) as setup:
        assert setup.servers["a"].engine.stats().blocks_used == 0
        client = setup.client()
        with trio.move_on_after(seconds):
            async with client.ask(PATH, body(max_tokens=60)) as response:
                await response.read()
        assert (response.body == b" ") == (seconds == 7)
        client.close()
        await trio.sleep(2)
        assert setup.servers["a"].engine.stats().blocks_used == 0
        assert not any(setup.leases().values())
        await setup.assert_all_free()
