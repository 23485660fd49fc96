"""Tests images in prompts of each API: equal prompts give equal responses, and a text model refuses images."""

from __future__ import annotations

import base64
import io
from typing import Any

import pytest
from PIL import Image

from trioserve.contracts.media import ImageLimits
from trioserve.testing.memory_server import MemoryServer, open_memory_server

OPTIONS: dict[str, Any] = {"block_count": 512, "max_model_len": 1024}


def image() -> str:
    file = io.BytesIO()
    Image.new("RGB", (16, 16), (200, 40, 0)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


URL = f"data:image/png;base64,{image()}"
TEXT = {"type": "text", "text": "What?"}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "openai": (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": URL}}, TEXT]}],
            "max_tokens": 5,
        },
    ),
    "responses": (
        "/v1/responses",
        {
            "input": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_image", "image_url": URL},
                        {"type": "input_text", "text": "What?"},
                    ],
                }
            ],
            "max_output_tokens": 5,
            "model": "fake",
        },
    ),
    "anthropic": (
        "/v1/messages",
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": image()}},
                        TEXT,
                    ],
                }
            ],
            "max_tokens": 5,
        },
    ),
    "ollama": (
        "/api/chat",
        {
            "model": "fake",
            "messages": [{"role": "user", "content": "What?", "images": [image()]}],
            "options": {"num_predict": 5},
            "stream": False,
        },
    ),
    "ollama generate": (
        "/api/generate",
        {
            "model": "fake",
            "prompt": "What?",
            "images": [image()],
            "options": {"num_predict": 5},
            "stream": False,
        },
    ),
}


async def ask(server: MemoryServer, path: str, asked: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    async with server.client().ask(path, asked) as response:
        return await response.head(), await response.json()


def prompt_tokens(answer: dict[str, Any]) -> int:
    usage = answer.get("usage", answer)
    found = next(usage[name] for name in ("prompt_tokens", "input_tokens", "prompt_eval_count") if name in usage)
    # Anthropic's API counts cached tokens separately.
    return int(found) + int(usage.get("cache_read_input_tokens") or 0)


async def test_equal_prompts_get_equal_responses_in_each_api() -> None:
    async with open_memory_server(image_limits=ImageLimits(), **OPTIONS) as server:
        counts = {}
        for name, (path, asked) in ASKED.items():
            status, answer = await ask(server, path, asked)
            assert status == 200, (name, answer)
            counts[name] = prompt_tokens(answer)
        assert len(set(counts.values())) == 1, counts
        assert server.engine.image_encoder.tile_count == 5
        server.engine.assert_all_free()


@pytest.mark.parametrize("name", ASKED)
async def test_a_text_model_refuses_images(name: str) -> None:
    async with open_memory_server(**OPTIONS) as server:
        path, asked = ASKED[name]
        status, answer = await ask(server, path, asked)
        assert status == 400
        assert "is an image, and this model accepts only text: send text" in str(answer["error"])


async def test_tokens_of_a_chat_with_an_image_are_counted() -> None:
    async with open_memory_server(image_limits=ImageLimits(), **OPTIONS) as server:
        path, asked = ASKED["openai"]
        _, counted = await ask(server, "/tokenize", {"messages": asked["messages"]})
        _, answer = await ask(server, path, asked)
        assert counted["count"] == prompt_tokens(answer)


@pytest.mark.parametrize(
    "url, sentence",
    [
        ("https://a.example/b.png", "this server fetches no URLs"),
        ("data:text/html;base64,aGk=", "send an image as"),
        ("data:image/png,hi", "send an image as"),
        ("data:image/png;base64,!!!", "is not valid base64"),
        ("data:image/png;base64,aGVsbG8=", "is not an image of a supported format"),
    ],
)
async def test_an_invalid_image_is_refused(url: str, sentence: str) -> None:
    async with open_memory_server(image_limits=ImageLimits(), **OPTIONS) as server:
        content = [{"type": "text", "text": "Look:"}, {"type": "image_url", "image_url": {"url": url}}]
        asked = {"messages": [{"role": "user", "content": content}], "max_tokens": 5}
        status, answer = await ask(server, "/v1/chat/completions", asked)
        assert status == 400
        assert sentence in answer["error"]["message"]
        assert answer["error"]["param"] == "messages[0].content[1]"
        server.engine.assert_all_free()
