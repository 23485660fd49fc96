"""Tests that all slots are free after a client has disconnected, in each phase of an image request."""

from __future__ import annotations

import io
from collections.abc import Callable
from random import Random

import msgspec
import pytest
from PIL import Image
from trio.testing import wait_all_tasks_blocked

from trioserve.api.images.image_context import EditSlots, UnsentImages
from trioserve.contracts.image_generation import ImageRequestLimits, IterativeRequest, RGBImage
from trioserve.testing.fake_image_engine import FAKE_IMAGE_MODEL, FakeImageExecutor
from trioserve.testing.memory_client import MemoryClient
from trioserve.testing.memory_server import MemoryImageServer, open_memory_image_server

from .forms import multipart

GENERATIONS = "/v1/images/generations"
EDITS = "/v1/images/edits"
STEPS = 3
BODY = {"prompt": "a cat", "n": 2, "steps": STEPS}
PHASES = {"encode": 0, "first denoising step": 1, "later denoising step": 2, "decode": STEPS + 1}
"""After how many steps of the engine the next one is of this phase."""

Leave = Callable[[MemoryClient], None]
WAYS: dict[str, Leave] = {
    "closes": lambda client: client.close(),
    "resets": lambda client: client.abort(),
}


def slots_used(server: MemoryImageServer) -> int:
    return server.engine.stats().slots_used


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("http", [1, 2])
@pytest.mark.parametrize("phase", PHASES)
async def test_client_that_leaves_during_an_image_step_frees_its_slots_after_the_step(
    phase: str, http: int, is_streamed: bool
) -> None:
    async with open_memory_image_server(paused=True) as server:
        body = {**BODY, "stream": is_streamed, "partial_images": 2 if is_streamed else 0}
        async with server.client(http=http).ask(GENERATIONS, body):
            await server.engine.step(PHASES[phase])
            async with server.engine.held_step() as plan:
                assert plan.phase.value == phase.rpartition(" ")[2].replace("step", "denoise")
                assert slots_used(server) == 2
        await server.engine.step()
        await server.assert_all_free()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("phase", PHASES)
async def test_client_that_leaves_between_image_steps_frees_its_slots_at_once(phase: str, way: str) -> None:
    async with open_memory_image_server(paused=True) as server:
        client = server.client()
        async with client.ask(GENERATIONS, {**BODY, "stream": True}):
            await server.engine.step(PHASES[phase])
            assert slots_used(server) == (2 if PHASES[phase] else 0)
            WAYS[way](client)
            await wait_all_tasks_blocked()
            assert slots_used(server) == 0
        await server.assert_all_free()


async def test_image_request_that_leaves_the_queue_admits_the_next_request() -> None:
    async with open_memory_image_server(paused=True, max_num_seqs=1) as server:
        first, second, third = (server.client() for _ in range(3))
        async with first.ask(GENERATIONS, {"prompt": "a"}), third.ask(GENERATIONS, {"prompt": "c"}) as response:
            async with second.ask(GENERATIONS, {"prompt": "b"}):
                await wait_all_tasks_blocked()
                assert server.engine.load().waiting + server.engine.dispatch.core.stats().waiting >= 1
            server.engine.resume()
            assert await response.head() == 200
        await server.assert_all_free()


@pytest.mark.parametrize("is_whole", [False, True], ids=["partial", "whole"])
async def test_client_that_leaves_while_an_image_is_encoded_frees_all_slots(is_whole: bool) -> None:
    """The other images of the request use their slots until the client leaves."""
    async with open_memory_image_server(paused=True) as server:
        body = {**BODY, "stream": True, "partial_images": 2}
        async with server.client().ask(GENERATIONS, body):
            with server.threads.held():
                await server.engine.step(2 if not is_whole else STEPS + 1)
                assert server.threads.held_count == 1
                assert slots_used(server) == 2
                await server.hang_up()
                await wait_all_tasks_blocked()
                assert server.threads.held_count == 0
                assert slots_used(server) == 0
        await server.assert_all_free()


class Noise(FakeImageExecutor):
    """A fake executor that generates noise images, whose files are large."""

    def shown(self, request: IterativeRequest, latent: int) -> RGBImage:
        image = super().shown(request, latent)
        return RGBImage(image.width, image.height, Random(latent).randbytes(len(image.rgb)))


@pytest.mark.parametrize("http", [1, 2])
async def test_client_that_leaves_while_an_image_is_sent_frees_all_slots(http: int) -> None:
    """The client reads nothing: its window is full, and the handler waits inside of an event."""
    model = msgspec.structs.replace(FAKE_IMAGE_MODEL, side_max=1024, pixels_per_work=512 * 512)
    async with open_memory_image_server(paused=True, model=model, new_executor=Noise) as server:
        client = server.client(http=http)
        async with client.ask(GENERATIONS, {**BODY, "size": "512x512", "stream": True, "partial_images": 2}):
            await server.engine.step(3)
            assert server.threads.run_count == 1, "the second one waits for the first to be taken"
            assert slots_used(server) == 2
            client.close()
            await wait_all_tasks_blocked()
            assert slots_used(server) == 0
        await server.assert_all_free()


@pytest.mark.parametrize("is_large", [False, True], ids=["small", "large"])
async def test_client_that_leaves_while_an_upload_is_parsed_frees_all_resources(is_large: bool) -> None:
    file = io.BytesIO()
    side = 256 if is_large else 16
    Image.effect_noise((side, side), 80).save(file, "PNG")
    content, content_type = multipart(("prompt", "p"), ("image", file.getvalue(), "a.png"))
    assert (len(content) > 65_536) == is_large
    limits = ImageRequestLimits(pixels_max=256 * 256)
    async with open_memory_image_server(request_limits=limits) as server:
        with server.threads.held(), server.decoder.held():
            async with server.client().ask(EDITS, content, headers={"content-type": content_type}):
                await wait_all_tasks_blocked()
                # A large form is parsed in a thread.
                assert (server.threads.held_count, server.decoder.held_count) == (is_large, not is_large)
            await wait_all_tasks_blocked()
            assert server.threads.held_count == server.decoder.held_count == 0
        await server.assert_all_free()


async def test_unread_image_response_uses_no_slot() -> None:
    model = msgspec.structs.replace(FAKE_IMAGE_MODEL, side_max=1024, pixels_per_work=512 * 512)
    async with open_memory_image_server(model=model, new_executor=Noise) as server:
        async with server.client().ask(GENERATIONS, {**BODY, "size": "512x512"}):
            await wait_all_tasks_blocked()
            assert server.server.counters().exchanges_open == 1
            assert slots_used(server) == 0
            assert not server.engine.live_requests()
        await server.assert_all_free()


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
async def test_memory_of_unread_images_is_limited(is_streamed: bool) -> None:
    model = msgspec.structs.replace(FAKE_IMAGE_MODEL, side_max=1024, pixels_per_work=512 * 512)
    unsent = UnsentImages(1_000_000)
    async with open_memory_image_server(model=model, new_executor=Noise, unsent=unsent) as server:
        body = {**BODY, "size": "512x512", "stream": is_streamed}
        async with server.client().ask(GENERATIONS, body):
            await wait_all_tasks_blocked()
            assert unsent.byte_count > 2 * 512 * 512 * 3
            refused = await server.client().post(GENERATIONS, {"prompt": "a cat"})
            assert refused.status == 429
            assert refused.headers["x-trioserve-reason"] == "unsent_pictures"
        await server.assert_all_free()
        assert unsent.byte_count == 0
        assert (await server.client().post(GENERATIONS, {"prompt": "a cat"})).status == 200
        assert unsent.byte_count == 0


async def test_unread_edit_result_frees_the_decoded_input_image() -> None:
    model = msgspec.structs.replace(FAKE_IMAGE_MODEL, side_max=1024, pixels_per_work=512 * 512)
    edits = EditSlots(1)
    file = io.BytesIO()
    Image.effect_noise((16, 16), 80).save(file, "PNG")
    content, content_type = multipart(("prompt", "p"), ("size", "512x512"), ("image", file.getvalue(), "a.png"))
    async with open_memory_image_server(model=model, new_executor=Noise, edits=edits) as server:
        async with server.client().ask(EDITS, content, headers={"content-type": content_type}):
            await wait_all_tasks_blocked()
            assert server.server.counters().exchanges_open == 1
            assert edits.taken_count == 0
        await server.assert_all_free()
