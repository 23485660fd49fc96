"""Tests chats with images through a router. Bodies stay unchanged. Limits, affinity and cancels work as for text."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.contracts.media import ImageLimits
from trioserve.http.limits import FrontendLimits
from trioserve.testing.byte_tokenizer import IMAGE_CHAT_TEMPLATE, byte_tokenizer

pytest.importorskip("PIL")
PATH = "/v1/chat/completions"
SEES: dict[str, Any] = {
    "image_limits": ImageLimits(),
    "max_model_len": 800,
    "block_count": 400,
}


def png(grey: int, *, width: int = 16, height: int = 8) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    lines = zlib.compress((b"\0" + bytes((grey,)) * width) * height)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in ((b"IHDR", header), (b"IDAT", lines), (b"IEND", b""))
    )


def chat(file: bytes, **fields: Any) -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(file).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": 8, "temperature": 0, **fields}


async def ask(client, body: dict[str, Any]) -> tuple[int, str | None, Any]:
    response = await client.post(PATH, body)
    return response.status, response.headers.get("x-trioserve-endpoint"), await response.json()


def text_in(said: dict[str, Any]) -> str:
    return said["choices"][0]["message"]["content"]


@pytest.mark.parametrize("policy", ["least_loaded", "prefix_aware", "kv_aware"])
async def test_router_forwards_responses_about_images(open_setup, policy):
    tokenizer = byte_tokenizer(IMAGE_CHAT_TEMPLATE) if policy == "kv_aware" else None
    async with open_setup("ab", engine={**SEES, "kv_events_max": 100}, policy=policy, tokenizer=tokenizer) as setup:
        texts = set()
        for grey in (10, 200):
            direct = await ask(setup.servers["a"].client(), chat(png(grey)))
            routed = await ask(setup.client(), chat(png(grey)))
            assert (direct[0], routed[0]) == (200, 200)
            assert text_in(routed[2]) == text_in(direct[2])
            texts.add(text_in(routed[2]))
        assert len(texts) == 2, "the model does not distinguish the images"
        await setup.router.assert_all_free()
        for server in setup.servers.values():
            server.engine.assert_all_free()  # This check works although the router still reads the cache events.


async def test_same_image_goes_to_the_same_endpoint_and_is_not_encoded_again(open_setup):
    async with open_setup("ab", engine=SEES, policy="prefix_aware") as setup:
        # The image has the size of a photograph. Bytes after the end of the PNG are ignored.
        large = png(90) + bytes(64 * 1024)
        _status, first, said = await ask(setup.client(), chat(large))
        for _ in range(3):
            status, where, again = await ask(setup.client(), chat(large))
            assert (status, where, text_in(again)) == (200, first, text_in(said))
        counts = {id: server.engine.image_encoder.tile_count for id, server in setup.servers.items()}
        assert sorted(counts.values()) == [0, 3], "one endpoint encoded each image once"
        await setup.assert_all_free()


async def test_router_refuses_a_too_large_body_and_endpoint_refuses_a_too_large_image(open_setup):
    limits = FrontendLimits(body_bytes_max=20_000)
    engine = {**SEES, "image_limits": ImageLimits(image_bytes_max=6_000)}
    async with open_setup("ab", engine=engine, limits=limits) as setup:
        status, where, said = await ask(setup.client(), chat(png(1) + bytes(20_000)))
        assert (status, where, said["error"]["code"]) == (413, None, "body_too_large")
        status, where, said = await ask(setup.client(), chat(png(1) + bytes(9_000)))
        assert (status, said["error"]["param"]) == (400, "messages[0].content[0]")
        assert where in ("a", "b")
        assert (await ask(setup.client(), chat(png(1) + bytes(5_000))))[0] == 200
        await setup.assert_all_free()


async def test_endpoint_without_vision_refuses_images(open_setup):
    async with open_setup("ab") as setup:
        status, _where, said = await ask(setup.client(), chat(png(1)))
        assert (status, said["error"]["param"]) == (400, "messages[0].content[0]")
        assert "accepts only text" in said["error"]["message"]


async def test_client_that_leaves_during_image_encoding_frees_the_endpoint(open_setup):
    async with open_setup("a", engine=SEES) as setup, trio.open_nursery() as nursery:
        engine = setup.servers["a"].engine
        engine.image_encoder.hold()
        nursery.start_soon(ask, setup.client(), chat(png(1)))
        await wait_all_tasks_blocked()
        assert engine.image_encoder.waiting_count == 1
        assert engine.image_outputs.claimed_bytes > 0
        assert setup.leases() == {"a": 1}
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await wait_all_tasks_blocked()
            await setup.assert_all_free()
            assert engine.image_outputs.bytes_total == 0


async def test_stream_about_an_image_resumes_at_another_endpoint(open_setup, read_cut):
    texts = set()
    for step, is_cut in ((60, False), (14, True)):
        engine = {**SEES, "max_num_batched_tokens": 256, "paused": True}
        async with open_setup("ab", engine=engine) as setup:
            body = chat(png(7), stream=True, max_tokens=40)
            response, is_over = await read_cut(setup, PATH, body, step=step)
            assert is_over != is_cut
            events = [event async for event in response]
            parts = [choice["delta"].get("content") or "" for event in events for choice in event.get("choices", ())]
            texts.add("".join(parts))
    assert len(texts) == 1
