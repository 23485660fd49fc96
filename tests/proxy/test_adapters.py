"""Tests a router in front of engines with different LoRA adapters. A request goes to an endpoint that has the request's
adapter.
"""

from __future__ import annotations

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.proxy.endpoint_watch import WatchSettings
from trioserve.testing.byte_tokenizer import byte_tokenizer

PATH = "/v1/completions"
LONG = "a prompt of several blocks, the same for all"
ASKED = WatchSettings(health_seconds=2.0)
HEALTH_SECONDS = 2.5  # The router asks an endpoint for its models again within this time.


async def ask(setup, model: str | None, **body: object) -> tuple[int, str | None, str]:
    named = {} if model is None else {"model": model}
    response = await setup.client().post(PATH, {"prompt": LONG, "max_tokens": 4, "temperature": 0, **named, **body})
    await wait_all_tasks_blocked()
    text = (await response.json())["choices"][0]["text"] if response.status == 200 else ""
    return response.status, response.headers.get("x-trioserve-endpoint"), text


async def test_request_goes_to_an_endpoint_that_has_its_adapter(open_setup, autojump_clock):
    async with open_setup("ab", watch=ASKED) as setup:
        await setup.servers["a"].engine.load_adapter("only-a", "/one")
        await setup.servers["b"].engine.load_adapter("only-b", "/two")
        for server in setup.servers.values():
            await server.engine.load_adapter("both", "/three")
        await trio.sleep(HEALTH_SECONDS)
        for _ in range(4):
            assert (await ask(setup, "only-a"))[:2] == (200, "a")
            assert (await ask(setup, "only-b"))[:2] == (200, "b")
        texts = {model: (await ask(setup, model))[2] for model in ("only-a", "only-b", "both", "fake", None)}
        assert texts[None] == texts["fake"], "a request without a model name uses the base model"
        assert len({*texts.values()}) == 4
        async with setup.client().ask("/v1/models", method="GET") as response:
            listed = (await response.json())["data"]
        assert {card["id"] for card in listed} == {"fake", "both", "only-a", "only-b"}
        assert (await ask(setup, "neither"))[0] == 404
        await setup.servers["a"].engine.unload_adapter("only-a")
        await trio.sleep(HEALTH_SECONDS)
        assert (await ask(setup, "only-a"))[0] == 404
        await setup.router.assert_all_free()
        for server in setup.servers.values():
            server.engine.assert_all_free()  # This check works although the router still reads the load stream.


@pytest.mark.parametrize("home", ["a", "b"])
async def test_prompt_goes_to_the_endpoint_that_cached_it_with_the_same_adapter(open_setup, home, autojump_clock):
    engine = {"kv_events_max": 1000, "lora_modules": ("x=/one", "y=/two")}
    async with open_setup("ab", engine=engine, policy="kv_aware", tokenizer=byte_tokenizer()) as setup:
        await trio.sleep(HEALTH_SECONDS)
        other = "b" if home == "a" else "a"
        for model, at in (("x", home), ("y", other)):
            response = await setup.client().post(f"{PATH}?id={at}", {"prompt": LONG, "max_tokens": 1, "model": model})
            assert response.status == 200
            await wait_all_tasks_blocked()
        hits = {id: server.engine.stats().prefix_hit_tokens_total for id, server in setup.servers.items()}
        assert hits == {"a": 0, "b": 0}
        assert (await ask(setup, "x"))[:2] == (200, home)
        assert (await ask(setup, "y"))[:2] == (200, other)
        assert all(server.engine.stats().prefix_hit_tokens_total > 0 for server in setup.servers.values())


STREAMED = {"prompt": "x", "max_tokens": 20, "temperature": 0, "stream": True, "model": "x"}
PAUSED = {"paused": True, "max_model_len": 256, "block_count": 128, "lora_modules": ("x=/one",)}


async def text_of(response) -> str:
    return "".join([choice["text"] async for event in response for choice in event.get("choices", ())])


async def test_stream_resumes_at_another_endpoint_that_has_its_adapter(open_setup, read_cut):
    texts = set()
    for step, is_cut in ((40, False), (8, True)):
        async with open_setup("ab", engine=PAUSED) as setup:
            response, is_over = await read_cut(setup, PATH, STREAMED, step=step)
            assert is_over != is_cut
            texts.add(await text_of(response))
    assert len(texts) == 1


async def test_stream_does_not_resume_with_another_adapter_of_the_same_name(open_setup, read_cut):
    async with open_setup("ab", engine=PAUSED) as setup:
        for id, server in setup.servers.items():
            await server.engine.load_adapter("x", f"/{id}", replaces=True)
        response, is_over = await read_cut(setup, PATH, STREAMED, step=8)
        assert not is_over
        errors = [event["error"] async for event in response if "error" in event]
        assert len(errors) == 1, "the stream resumed with another adapter"
