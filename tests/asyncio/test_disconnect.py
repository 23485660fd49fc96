"""Tests that a handler of FastAPI or Starlette ends and frees the blocks of its request when its client disconnects."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import hypercorn.trio
import pytest
import trio
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from hypercorn.config import Config as HypercornConfig
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.testclient import TestClient

import trioserve
from trioserve.asyncio import cancel_on_disconnect
from trioserve.contracts.sampling import SamplingParams
from trioserve.testing.fake_engine import FakeEngine, open_fake_engine

from .conftest import Fake, open_fake, until
from .hosts import HOSTS, ask, connect

PROMPT = "a prompt that takes three steps"
ENDLESS = SamplingParams(max_tokens=60, ignore_eos=True)


class Asked(BaseModel):
    prompt: str


def open_paused() -> AbstractAsyncContextManager[Fake]:
    return open_fake(paused=True, max_num_batched_tokens=12, next_token=lambda _ids: 97)


def app_of(fake: Fake, ends: list[object]) -> FastAPI:
    app = FastAPI()

    async def text_of(prompt: str) -> str:
        async with fake.engine.generate(prompt, ENDLESS) as stream:
            return "".join([delta.text async for delta in stream])

    @app.post("/text")
    async def text(asked: Asked, request: Request) -> dict[str, str]:
        try:
            async with cancel_on_disconnect(request):
                return {"text": await text_of(asked.prompt)}
        except BaseException as error:
            ends.append(error)
            raise

    @app.post("/careless")
    async def careless(asked: Asked) -> dict[str, str]:
        return {"text": await text_of(asked.prompt)}

    @app.post("/body-read-inside")
    async def body_read_inside(request: Request) -> dict[str, str]:
        async with cancel_on_disconnect(request):
            return {"text": await text_of((await request.json())["prompt"])}

    @app.post("/stream")
    async def stream(asked: Asked) -> StreamingResponse:
        async def texts():
            async with fake.engine.generate(asked.prompt, ENDLESS) as stream:
                async for delta in stream:
                    yield delta.text

        return StreamingResponse(texts())

    return app


@pytest.mark.parametrize("path", ["/text", "/body-read-inside", "/stream"])
@pytest.mark.parametrize(("steps", "blocks"), [(0, 0), (2, 6), (8, 9)], ids=["waiting", "in its prompt", "decoding"])
@pytest.mark.parametrize("host", HOSTS, ids=lambda host: host.__name__)
def test_handler_ends_when_its_client_disconnects(run, host, steps, blocks, path, caplog):
    async def program() -> None:
        ends: list[object] = []
        async with open_paused() as fake, host(app_of(fake, ends)) as port:
            async with connect(port) as client:
                await client.ask(path, {"prompt": PROMPT})
                await fake.until_queued(1)
                await fake.step(steps)
                assert fake.blocks_used == blocks
            await until(lambda: not fake.engine.live_requests())
            await fake.settle()
            assert fake.blocks_used == 0
            fake.assert_all_free()
        if path == "/text":
            assert [(type(end), end.status_code) for end in ends] == [(HTTPException, 499)]

    caplog.set_level(logging.ERROR)
    run(program)
    assert not caplog.records, "a client that left is not logged"


@pytest.mark.parametrize("host", HOSTS, ids=lambda host: host.__name__)
def test_handler_without_cancel_on_disconnect_keeps_running(run, host):
    async def program() -> None:
        async with open_paused() as fake, host(app_of(fake, [])) as port:
            async with connect(port) as client:
                await client.ask("/careless", {"prompt": PROMPT})
                await fake.until_queued(1)
                await fake.step(3)
            await fake.step(3)
            assert fake.blocks_used > 0
            fake.engine.abort_all("the test is over")
            await until(lambda: not fake.engine.live_requests())

    run(program)


@pytest.mark.parametrize("path", ["/text", "/body-read-inside"])
@pytest.mark.parametrize("host", HOSTS, ids=lambda host: host.__name__)
def test_client_that_stays_connected_gets_its_response(run, host, path):
    async def program() -> None:
        async with open_fake(next_token=lambda _ids: 97) as fake, host(app_of(fake, [])) as port:
            assert await ask(port, path, {"prompt": PROMPT}) == (200, '{"text":"' + 60 * "a" + '"}')

    run(program)


class Client:
    """A fake client of a handler. The client sends a request with a body, and disconnects at a given time."""

    def __init__(self) -> None:
        self.leaves = asyncio.Event()
        self.request = Request({"type": "http", "method": "POST", "headers": []}, self.receive)
        self._messages = [
            {"type": "http.request", "body": b"two", "more_body": True},
            {"type": "http.request", "body": b" pieces", "more_body": False},
        ]

    async def receive(self):
        if self._messages:
            return self._messages.pop(0)
        await self.leaves.wait()
        return {"type": "http.disconnect"}


def test_request_body_can_be_read_inside_of_cancel_on_disconnect(run):
    async def program() -> None:
        client = Client()
        async with cancel_on_disconnect(client.request):
            assert await client.request.body() == b"two pieces"

    run(program)


def test_cancel_on_disconnect_does_not_swallow_outer_cancellation(run):
    async def program() -> None:
        async def handle() -> None:
            async with cancel_on_disconnect(Client().request):
                await asyncio.get_running_loop().create_future()

        handling = asyncio.create_task(handle())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        handling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await handling

    run(program)


def test_cancel_on_disconnect_passes_errors_and_timeouts_of_its_body_on(run):
    async def program() -> None:
        for error in (ValueError("mine"), TimeoutError("mine, too")):
            with pytest.raises(type(error), match="mine"):
                async with cancel_on_disconnect(Client().request):
                    raise error

    run(program)


def test_client_disconnect_in_a_nested_scope_ends_the_outer_body(run):
    async def program() -> None:
        client = Client()
        client_of_another = Client()
        with pytest.raises(HTTPException):
            async with cancel_on_disconnect(client.request), cancel_on_disconnect(client_of_another.request):
                client.leaves.set()
                await asyncio.get_running_loop().create_future()
        assert asyncio.current_task().cancelling() == 0

    run(program)


def test_cancel_on_disconnect_works_in_starlettes_test_client(run):
    app = FastAPI()

    @app.post("/")
    async def handle(request: Request) -> str:
        async with cancel_on_disconnect(request):
            return (await request.body()).decode()

    with TestClient(app) as client:
        assert client.post("/", content="a body").json() == "a body"


# --- a host on Trio ---


def trio_app_of(engine: FakeEngine, ends: list[object]) -> FastAPI:
    app = FastAPI()

    async def text_of(prompt: str) -> str:
        async with engine.generate(prompt, ENDLESS) as stream:
            return "".join([delta.text async for delta in stream])

    @app.post("/text")
    async def text(asked: Asked, request: Request) -> dict[str, str]:
        try:
            async with trioserve.cancel_on_disconnect(request):
                return {"text": await text_of(asked.prompt)}
        except BaseException as error:
            ends.append(error)
            raise

    return app


@pytest.mark.parametrize(("steps", "blocks"), [(0, 0), (2, 6), (8, 9)], ids=["waiting", "in its prompt", "decoding"])
async def test_trio_handler_ends_when_its_client_disconnects(steps, blocks, caplog):
    ends: list[object] = []
    caplog.set_level(logging.ERROR)
    async with (
        open_fake_engine(paused=True, max_num_batched_tokens=12, next_token=lambda _ids: 97) as engine,
        under_hypercorn_on_trio(trio_app_of(engine, ends)) as port,
    ):
        async with await trio.open_tcp_stream("127.0.0.1", port) as client:
            await client.send_all(trio_request("/text"))
            while not engine.live_requests():
                await trio.lowlevel.checkpoint()
            await engine.step(steps)
            assert engine.stats().blocks_used == blocks
        while not ends:
            await trio.lowlevel.checkpoint()
        engine.assert_all_free()
    assert [(type(end), end.status_code) for end in ends] == [(HTTPException, 499)]
    assert not caplog.records, "no traceback for a client that left"


async def test_trio_client_that_stays_connected_gets_its_response():
    async with (
        open_fake_engine(next_token=lambda _ids: 97) as engine,
        under_hypercorn_on_trio(trio_app_of(engine, [])) as port,
        await trio.open_tcp_stream("127.0.0.1", port) as client,
    ):
        await client.send_all(trio_request("/text"))
        answer = b"".join([piece async for piece in client])
    assert answer.endswith(b'{"text":"' + 60 * b"a" + b'"}')


async def test_trio_cancel_on_disconnect_passes_errors_of_its_body_on():
    messages = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive():
        if not messages:
            await trio.sleep_forever()
        return messages.pop()

    request = Request({"type": "http", "method": "POST", "headers": []}, receive)
    with pytest.raises(ZeroDivisionError):
        async with trioserve.cancel_on_disconnect(request):
            raise ZeroDivisionError


def trio_request(path: str) -> bytes:
    body = json.dumps({"prompt": PROMPT}).encode()
    fields = f"host: localhost\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    return f"POST {path} HTTP/1.1\r\n{fields}\r\n\r\n".encode() + body


@asynccontextmanager
async def under_hypercorn_on_trio(app: FastAPI) -> AsyncIterator[int]:
    config = HypercornConfig()
    config.bind = ["127.0.0.1:0"]
    config.errorlog = config.accesslog = None
    end = trio.Event()
    async with trio.open_nursery() as nursery:
        [url] = await nursery.start(functools.partial(hypercorn.trio.serve, app, config, shutdown_trigger=end.wait))
        yield int(url.rpartition(":")[2])
        end.set()
