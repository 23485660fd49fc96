"""Tests POST /v1/images/generations with the whole server in memory, whole and streamed."""

from __future__ import annotations

import base64
import io
import logging
from typing import Any

import msgspec
import pytest
import trio
from PIL import Image
from trio.testing import MockClock, wait_all_tasks_blocked

from trioserve.api.images import image_responses
from trioserve.contracts.image_generation import ImageRequestLimits
from trioserve.http.limits import KEEP_ALIVE_SECONDS
from trioserve.testing.fake_image_engine import FAKE_CLASSES, FAKE_IMAGE_MODEL
from trioserve.testing.memory_client import MemoryResponse
from trioserve.testing.memory_server import open_memory_image_server

PATH = "/v1/images/generations"
CAT = {"prompt": "a cat", "seed": 5}


def image_of(entry: dict[str, Any]) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(entry["b64_json"])))


def colour_of(entry: dict[str, Any]) -> tuple[int, ...]:
    colour = image_of(entry).convert("RGB").getpixel((0, 0))
    assert isinstance(colour, tuple)
    return colour


async def events_of(response: MemoryResponse) -> list[dict[str, Any]]:
    return [event async for event in response]


async def test_image_request_gets_the_requested_number_of_images() -> None:
    async with open_memory_image_server() as server:
        client = server.client()
        response = await client.post(PATH, {**CAT, "n": 2, "size": "32x16", "steps": 3})
        body = await response.json()
        assert response.status == 200
        assert response.headers["content-type"] == "application/json"
        msgspec.convert(body, image_responses.Images)
        assert [entry["seed"] for entry in body["data"]] == [5, 6]
        assert [image_of(entry).size for entry in body["data"]] == [(32, 16)] * 2
        assert {image_of(entry).format for entry in body["data"]} == {"PNG"}
        assert colour_of(body["data"][0]) != colour_of(body["data"][1])
        assert (body["model"], body["size"], body["output_format"]) == ("fake", "32x16", "png")
        work = FAKE_IMAGE_MODEL.image_work(32, 16)
        assert body["usage"] == {
            "input_tokens": 1,
            "output_tokens": 2 * work,
            "total_tokens": 2 * work + 1,
            "input_tokens_details": {"image_tokens": 0, "text_tokens": 1},
            "steps": 6,
        }
        await server.assert_all_free()


async def test_image_of_a_seed_does_not_depend_on_other_images() -> None:
    async with open_memory_image_server() as server:
        client = server.client()
        two = await (await client.post(PATH, {**CAT, "n": 2})).json()
        second = await (await client.post(PATH, {**CAT, "seed": 6})).json()
        assert second["data"][0]["b64_json"] == two["data"][1]["b64_json"]
        drawn = await (await client.post(PATH, {"prompt": "a cat"})).json()
        again = await (await client.post(PATH, {"prompt": "a cat", "seed": drawn["data"][0]["seed"]})).json()
        assert again["data"][0]["b64_json"] == drawn["data"][0]["b64_json"]


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp"])
async def test_images_have_the_requested_format(kind: str) -> None:
    async with open_memory_image_server() as server:
        body = await (await server.client().post(PATH, {**CAT, "output_format": kind})).json()
        assert body["output_format"] == kind
        assert image_of(body["data"][0]).format == kind.upper()


async def test_image_stream_sends_partial_images_of_each_image() -> None:
    async with open_memory_image_server(paused=True) as server:
        body = {**CAT, "n": 2, "steps": 4, "stream": True, "partial_images": 1}
        async with server.client().ask(PATH, body) as response:
            while await server.engine.step() is not None:
                """Each step is read before the next one: a reader that is slow finds the newest."""
            events = await events_of(response)
        assert response.headers["content-type"].startswith("text/event-stream")
        kinds = {
            "image_generation.partial_image": image_responses.GenerationPartial,
            "image_generation.completed": image_responses.GenerationCompleted,
        }
        for event in events:
            msgspec.convert(event, kinds[event["type"]])
        assert response.body.count(b"event: image_generation.partial_image\ndata: {") == 2
        for index in (0, 1):
            own = [event for event in events if event["index"] == index]
            assert [event["type"].rpartition(".")[2] for event in own] == ["partial_image", "completed"]
            assert [event["steps_done"] for event in own] == [2, 4]
            assert {(event["step_count"], event["seed"]) for event in own} == {(4, 5 + index)}
            assert own[0]["partial_image_index"] == 0
            assert colour_of(own[0]) != colour_of(own[1])
            assert own[1]["usage"]["output_tokens"] == 1
        server.engine.resume()
        whole = await (await server.client().post(PATH, {**CAT, "n": 2, "steps": 4})).json()
        finished = {event["index"]: event["b64_json"] for event in events if "usage" in event}
        assert [finished[index] for index in (0, 1)] == [entry["b64_json"] for entry in whole["data"]]
        await server.assert_all_free()


async def test_image_progress_events_are_sent_on_request() -> None:
    async with open_memory_image_server(paused=True) as server:
        body = {**CAT, "steps": 3, "stream": True, "stream_options": {"include_progress": True}}
        async with server.client().ask(PATH, body) as response:
            while await server.engine.step() is not None:
                """As above."""
            *progress, completed = await events_of(response)
        for event in progress:
            msgspec.convert(event, image_responses.GenerationProgress)
        assert [event["steps_done"] for event in progress] == [1, 2, 3]
        assert completed["type"] == "image_generation.completed"


async def test_silent_image_stream_sends_keep_alives(autojump_clock: MockClock) -> None:
    async with open_memory_image_server(step_seconds=KEEP_ALIVE_SECONDS + 1) as server:
        async with server.client().ask(PATH, {**CAT, "steps": 3, "stream": True}) as response:
            events = await events_of(response)
        assert response.body.count(b": keep-alive\n\n") >= 3
        assert len(events) == 1


async def test_image_class_is_chosen_by_name_or_index() -> None:
    model = msgspec.structs.replace(FAKE_IMAGE_MODEL, classes=FAKE_CLASSES)
    async with open_memory_image_server(model=model) as server:
        client = server.client()
        by_name = await (await client.post(PATH, {"prompt": "Three", "seed": 1})).json()
        by_index = await (await client.post(PATH, {"prompt": "3", "seed": 1})).json()
        assert by_name["data"] == by_index["data"]
        refused = await client.post(PATH, {"prompt": "a cat"})
        assert refused.status == 400
        assert (await refused.json())["error"]["param"] == "prompt"


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"size": "20x16"}, "size", "multiples of 8 from 8 to 64"),
        ({"width": 20, "height": 16}, "width", "multiples of 8 from 8 to 64"),
        ({"n": 5}, "n", "n is 5, at most 4"),
        ({"steps": 9}, "steps", "steps is 9, at most 8"),
        ({"num_inference_steps": 9}, "num_inference_steps", "steps is 9, at most 8"),
        ({"size": "64x64"}, "size", "at most 2048 pixels"),
        ({"sampler": "none"}, "sampler", "euler, ddim"),
        ({"prompt": "x" * 40_000}, "prompt", "40000 characters"),
        ({"prompt": 5}, "prompt", "Expected `str`"),
        ({"queue_timeout": -1}, "queue_timeout", "above 0"),
        ({"priority": 10**6}, "priority", "allowed is -100 to 100"),
        ({"priority": -500}, "priority", "priority is -500, allowed is -100 to 100"),
        ({"model": "other"}, "model", "served are: fake"),
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
async def test_invalid_image_request_is_refused_before_the_response_begins(
    fields: dict[str, Any], param: str, says: str, is_streamed: bool
) -> None:
    limits = ImageRequestLimits(pixels_max=2048, steps_max=8, n_max=4)
    async with open_memory_image_server(request_limits=limits) as server:
        response = await server.client().post(PATH, {**CAT, **fields, "stream": is_streamed})
        error = (await response.json())["error"]
        assert response.status == (404 if param == "model" else 400)
        assert error["param"] == param
        assert says in error["message"]
        await server.assert_all_free()


async def test_failed_image_request_gets_an_error_in_whole_and_streamed_responses() -> None:
    async with open_memory_image_server(paused=True) as server:
        for is_streamed in (False, True):
            async with server.client().ask(PATH, {**CAT, "stream": is_streamed}) as response:
                await wait_all_tasks_blocked()
                await server.engine.step(2)
                [view] = server.engine.live_requests()
                server.engine.fail_request(view.id, "out of paint")
                await server.engine.step()
                if is_streamed:
                    [event] = await events_of(response)
                    assert response.status == 200
                else:
                    event = await response.json()
                    assert response.status == 500
            assert event["error"]["code"] == "request_failed"
            assert "out of paint" in event["error"]["message"]
            await server.assert_all_free()


async def test_abort_by_id_ends_an_image_stream_with_an_error() -> None:
    async with open_memory_image_server(paused=True) as server:
        headers = {"X-Request-Id": "mine"}
        async with server.client().ask(PATH, {**CAT, "stream": True}, headers=headers) as response:
            await wait_all_tasks_blocked()
            await server.engine.step(2)
            other = server.client()
            listed = await (await other.get("/v1/requests")).json()
            msgspec.convert(listed, image_responses.LiveImageRequests)
            assert [(view["id"], view["state"], view["steps_done"]) for view in listed["data"]] == [
                ("mine", "running", 1)
            ]
            async with other.ask("/v1/requests/mine", method="DELETE") as aborted:
                assert (await aborted.json())["result"] == "aborted"
            [event] = await events_of(response)
            assert event["error"]["code"] == "request_aborted"
        await server.assert_all_free()


async def test_deadlines_end_image_requests(autojump_clock: MockClock) -> None:
    async with open_memory_image_server(step_seconds=1.0) as server:
        response = await server.client().post(PATH, {**CAT, "steps": 50, "timeout": 5})
        assert response.status == 504
        assert (await response.json())["error"]["code"] == "timeout"
        await trio.sleep(1)  # The running step ends in this time.
        await server.assert_all_free()


async def test_log_line_of_an_image_request_has_the_number_of_images_and_steps(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with open_memory_image_server(logs_requests=True) as server:
        await server.client().post(PATH, {**CAT, "n": 2, "steps": 3})
    [line] = [record.getMessage() for record in caplog.records if "request ended" in record.getMessage()]
    assert "pictures=2 steps=6" in line
    assert "cat" not in line


async def test_other_requests_run_while_an_image_is_encoded() -> None:
    async with open_memory_image_server() as server, trio.open_nursery() as nursery:
        with server.threads.held():
            nursery.start_soon(server.client().post, PATH, CAT)
            await wait_all_tasks_blocked()
            assert server.threads.held_count == 1
            assert (await server.client().get("/health")).status == 200
            assert server.engine.stats().slots_used == 0, "the slot is back before the file is written"
    await server.assert_all_free()
