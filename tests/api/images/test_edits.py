"""Tests POST /v1/images/edits with the whole server in memory: valid and refused forms."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import pytest
from PIL import Image
from trio.testing import wait_all_tasks_blocked

from trioserve.api.images import image_responses
from trioserve.api.images.image_context import EditSlots
from trioserve.contracts.image_generation import ImageRequestLimits, ImageTask, IterativeRequest, RGBImage
from trioserve.contracts.media import ImageLimits
from trioserve.testing.fake_image_engine import FAKE_IMAGE_MODEL, FakeImageExecutor
from trioserve.testing.memory_client import MemoryResponse
from trioserve.testing.memory_server import MemoryImageServer, open_memory_image_server

from .forms import multipart

PATH = "/v1/images/edits"
PROMPT = ("prompt", "a dog")


def png(width: int = 16, height: int = 16, *, mode: str = "RGB", colour: Any = "red") -> bytes:
    file = io.BytesIO()
    Image.new(mode, (width, height), colour).save(file, "PNG")
    return file.getvalue()


async def post(server: MemoryImageServer, *parts: Any) -> MemoryResponse:
    content, content_type = multipart(*parts)
    async with server.client().ask(PATH, content, headers={"content-type": content_type}) as response:
        await response.read()
    return response


class Seen(FakeImageExecutor):
    """Image model that records its tasks."""

    tasks: list[tuple[IterativeRequest, ImageTask]]

    def __init__(self, slot_count: int) -> None:
        super().__init__(slot_count)
        self.tasks = []

    def encoded(self, request: IterativeRequest) -> int:
        assert isinstance(request.task, ImageTask)
        self.tasks.append((request, request.task))
        return super().encoded(request)


async def test_edit_form_is_passed_to_the_model_as_a_task() -> None:
    mask = Image.new("RGBA", (16, 8), (0, 0, 0, 255))
    mask.paste((0, 0, 0, 0), (0, 0, 4, 8))
    file = io.BytesIO()
    mask.save(file, "PNG")
    async with open_memory_image_server(new_executor=Seen) as server:
        parts = [("image", png(16, 8), "a.png"), ("mask", file.getvalue(), "m.png"), ("strength", "0.5")]
        response = await post(server, PROMPT, *parts, ("seed", "5"), ("steps", "4"), ("output_format", "webp"))
        assert response.status == 200, response.body
        body = await response.json()
        msgspec.convert(body, image_responses.Images)
        assert (body["size"], body["output_format"], body["usage"]["steps"]) == ("16x8", "webp", 2)
        assert body["usage"]["input_tokens_details"]["image_tokens"] == 1
        [(request, task)] = server.engine.executor.tasks  # type: ignore[attr-defined]  # the executor given above
        assert (request.seed, task.prompt, task.width, task.height) == (5, "a dog", 16, 8)
        assert task.image == RGBImage(16, 8, b"\xff\x00\x00" * 128)
        assert task.mask is not None
        assert [task.mask.rgb[3 * x] for x in range(16)] == [255] * 4 + [0] * 12
        await server.assert_all_free()


async def test_streamed_edit_has_image_edit_events() -> None:
    async with open_memory_image_server(paused=True) as server:
        content, content_type = multipart(
            PROMPT, ("image", png(), "a.png"), ("stream", "true"), ("partial_images", "1"), ("strength", "1")
        )
        async with server.client().ask(PATH, content, headers={"content-type": content_type}) as response:
            while await server.engine.step() is not None:
                """Each step is read before the next one."""
            first, last = [event async for event in response]
        msgspec.convert(first, image_responses.EditPartial)
        msgspec.convert(last, image_responses.EditCompleted)
        await server.assert_all_free()


@pytest.mark.parametrize(
    ("parts", "param", "says"),
    [
        pytest.param([PROMPT], "image", "has no image", id="no image"),
        pytest.param(
            [PROMPT, ("image", b"nonsense", "a.png")], "image", "not an image of a supported format", id="nonsense"
        ),
        pytest.param(
            [PROMPT, ("image", png(80, 80), "a.png")], "image", "80 x 80 pixels; allowed are 4096", id="large"
        ),
        pytest.param(
            [PROMPT, ("image", png(), "a.png"), ("mask", png(8, 8), "m.png")],
            "mask",
            "the size of the image",
            id="mask",
        ),
        pytest.param([PROMPT, ("image", png(), "a.png"), ("size", "9x9")], "size", "multiples of 8", id="size"),
        pytest.param([PROMPT, ("image", png(), "a.png"), ("model", "x")], "model", "served are: fake", id="model"),
    ],
)
async def test_invalid_image_edit_is_refused(parts: Any, param: str, says: str) -> None:
    async with open_memory_image_server(request_limits=ImageRequestLimits(pixels_max=4096)) as server:
        response = await post(server, *parts)
        error = (await response.json())["error"]
        assert response.status == (404 if param == "model" else 400)
        assert error["param"] == param
        assert says in error["message"]
        await server.assert_all_free()


async def test_image_file_above_the_size_limit_is_not_decoded() -> None:
    async with open_memory_image_server(uploads=ImageLimits(image_bytes_max=50)) as server:
        response = await post(server, PROMPT, ("image", png(), "a.png"))
        assert "an image may have 50" in (await response.json())["error"]["message"]


async def test_edit_body_that_is_not_a_form_is_refused() -> None:
    async with open_memory_image_server() as server:
        response = await server.client().post(PATH, {"prompt": "a dog"})
        assert response.status == 400
        assert (await response.json())["error"]["param"] == "content-type"


async def test_edit_is_refused_by_a_model_without_edits() -> None:
    model = msgspec.structs.replace(FAKE_IMAGE_MODEL, takes_images=False)
    async with open_memory_image_server(model=model) as server:
        response = await post(server, PROMPT, ("image", png(), "a.png"))
        error = (await response.json())["error"]
        assert (response.status, error["param"]) == (400, "image")
        assert "/v1/images/generations" in error["message"]
        assert server.decoder.run_count == 0


async def test_number_of_concurrent_edits_is_limited() -> None:
    places = EditSlots(1)
    async with open_memory_image_server(paused=True, edits=places) as server:
        content, content_type = multipart(PROMPT, ("image", png(), "a.png"))
        async with server.client().ask(PATH, content, headers={"content-type": content_type}):
            await wait_all_tasks_blocked()
            refused = await post(server, PROMPT, ("image", png(), "a.png"))
            assert refused.status == 429
            assert refused.headers["x-trioserve-reason"] == "too_many_edits"
        await server.assert_all_free()
        assert places.taken_count == 0
        server.engine.resume()
        assert (await post(server, PROMPT, ("image", png(), "a.png"))).status == 200
