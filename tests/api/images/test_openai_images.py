"""Tests that the unmodified openai-python generates and edits images with the whole server in memory."""

from __future__ import annotations

import base64
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import openai
import pytest
import trio
from PIL import Image

from trioserve.testing.httpx_transport import MemoryTransport
from trioserve.testing.memory_server import open_memory_image_server

# The client library stops reading its async generators at the last event, without closing them.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning"),
]


@asynccontextmanager
async def opened() -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        open_memory_image_server(step_work_max=64) as server,
        httpx.AsyncClient(transport=MemoryTransport(server.client)) as web,
        openai.AsyncOpenAI(base_url="http://memory/v1", api_key="none", http_client=web, max_retries=0) as client,
    ):
        yield client
        await trio.testing.wait_all_tasks_blocked()
        await server.assert_all_free()


def size_of(file: str | None) -> tuple[int, int]:
    return Image.open(io.BytesIO(base64.b64decode(file or ""))).size


def red_square() -> tuple[str, bytes, str]:
    file = io.BytesIO()
    Image.new("RGB", (16, 16), "red").save(file, "PNG")
    return "red.png", file.getvalue(), "image/png"


async def test_openai_client_generates_images() -> None:
    async with opened() as client:
        response = await client.images.generate(
            model="fake", prompt="a cat", n=2, size="32x16", output_format="webp", extra_body={"seed": 7, "steps": 3}
        )
        assert [size_of(image.b64_json) for image in response.data or []] == [(32, 16)] * 2
        assert (response.size, response.output_format) == ("32x16", "webp")
        assert response.usage is not None
        assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens


async def test_openai_client_streams_image_events() -> None:
    async with opened() as client:
        stream = await client.images.generate(
            model="fake", prompt="a cat", stream=True, partial_images=1, extra_body={"steps": 50}
        )
        events = [event async for event in stream]
        assert events[-1].type == "image_generation.completed"
        assert {event.type for event in events[:-1]} <= {"image_generation.partial_image"}
        assert size_of(events[-1].b64_json) == (16, 16)


async def test_openai_client_edits_an_image_whole_and_streamed() -> None:
    async with opened() as client:
        whole = await client.images.edit(model="fake", prompt="a dog", image=red_square(), extra_body={"strength": 0.5})
        assert [size_of(image.b64_json) for image in whole.data or []] == [(16, 16)]
        several = await client.images.edit(model="fake", prompt="a dog", image=[red_square()], mask=red_square(), n=2)
        assert len(several.data or []) == 2
        stream = await client.images.edit(model="fake", prompt="a dog", image=red_square(), stream=True)
        assert [event.type async for event in stream][-1] == "image_edit.completed"


async def test_refused_image_request_raises_an_exception_of_the_openai_client() -> None:
    async with opened() as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.images.generate(model="fake", prompt="a cat", size="512x512")
        assert refused.value.param == "size"
        with pytest.raises(openai.BadRequestError):
            await client.images.generate(model="fake", prompt="a cat", response_format="url")
