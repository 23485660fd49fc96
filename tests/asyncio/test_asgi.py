"""Tests the server's routes under other hosts: Uvicorn, Hypercorn on asyncio and Trio, and Starlette's test client."""

from __future__ import annotations

import asyncio
import functools
import json
import socket
from collections.abc import Callable
from typing import Any

import hypercorn.asyncio
import hypercorn.trio
import pytest
import trio
from fastapi import FastAPI
from hypercorn.config import Config as HypercornConfig
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

import trioserve
from trioserve.asgi import AsgiApplication, asgi_app
from trioserve.asyncio.engine import Engine
from trioserve.contracts.errors import StartupError, WrongLoop
from trioserve.testing.fake_engine import FakeEngine, open_fake_engine

from .conftest import Fake, open_fake, until
from .hosts import HOSTS, ask, connect, under_uvicorn

PROMPT = "a prompt that takes three steps"
ENDLESS = {"prompt": PROMPT, "max_tokens": 60, "ignore_eos": True}


def opens(**options: Any) -> Callable[[], Any]:
    return functools.partial(open_fake_engine, next_token=lambda _ids: 97, max_num_batched_tokens=12, **options)


def fake_of(app: AsgiApplication) -> Fake:
    assert isinstance(app.engine, Engine)
    return Fake(app.engine)


@pytest.mark.parametrize("host", HOSTS, ids=lambda host: host.__name__)
def test_asyncio_host_serves_all_routes_and_opens_and_closes_the_engine(run, host):
    async def program() -> None:
        app = asgi_app(opens())
        async with host(app) as port:
            await until(lambda: app._app is not None)
            status, text = await ask(port, "/v1/completions", {"prompt": "x", "max_tokens": 3, "ignore_eos": True})
            assert (status, json.loads(text)["choices"][0]["text"]) == (200, "aaa")
            status, text = await ask(port, "/v1/completions", {**ENDLESS, "stream": True})
            assert status == 200
            assert "data: [DONE]" in text
            status, text = await ask(port, "/v1/responses", {"model": "fake", "input": "x", "background": True})
            assert status == 200, text
            assert (await ask(port, "/health"))[0] == 200
            assert (await ask(port, "/nothing"))[0] == 404
            engine = app.engine
        assert isinstance(engine, Engine)
        assert not engine.ready
        with pytest.raises(RuntimeError, match="the lifespan of this application opens its engine"):
            _ = app.engine

    run(program)


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize(("steps", "blocks"), [(0, 0), (2, 6), (8, 9)], ids=["waiting", "in its prompt", "decoding"])
@pytest.mark.parametrize("host", HOSTS, ids=lambda host: host.__name__)
def test_closed_client_connection_frees_its_blocks(run, host, steps, blocks, stream):
    async def program() -> None:
        app = asgi_app(opens(paused=True))
        async with host(app) as port:
            await until(lambda: app._app is not None)
            fake = fake_of(app)
            async with connect(port) as client:
                await client.ask("/v1/completions", {**ENDLESS, "stream": stream})
                await fake.until_queued(1)
                await fake.step(steps)
                if stream and steps == 8:
                    await client.read_until(b"data: ")
                assert fake.blocks_used == blocks
            await until(lambda: not fake.engine.live_requests())
            await fake.settle()
            assert fake.blocks_used == 0
            fake.assert_all_free()

    run(program)


def test_mounted_app_sends_the_head_of_an_unstreamed_response_early(run):
    async def program() -> None:
        llm = asgi_app(opens(paused=True), keep_alive_comments=1.0, keep_alive_json=True)
        app = FastAPI(lifespan=llm.lifespan)
        app.mount("/llm", llm)
        async with under_uvicorn(app) as port:
            await until(lambda: llm._app is not None)
            async with connect(port) as client:
                await client.ask("/llm/v1/completions", {"prompt": "x", "max_tokens": 3, "ignore_eos": True})
                await client.read_until(b"1\r\n \r\n")
                await fake_of(llm).step(8)
                await client.read_until(b'"text":"aaa"')
                await client.read_until(b"0\r\n\r\n")
            fake_of(llm).assert_all_free()

    run(program)


@pytest.mark.parametrize("host", HOSTS, ids=lambda host: host.__name__)
def test_slow_client_blocks_no_other_client_and_gets_its_whole_response(run, host):
    async def program() -> None:
        app = asgi_app(opens())
        async with host(app) as port, connect(port) as slow:
            await until(lambda: app._app is not None)
            await slow.ask("/v1/completions", {**ENDLESS, "stream": True})
            assert (await ask(port, "/v1/completions", {"prompt": "x", "max_tokens": 3}))[0] == 200
            assert (await slow.response())[1].endswith("data: [DONE]\n\n\r\n0\r\n\r\n")

    run(program)


def test_request_ends_if_the_host_cancels_its_call(run):
    async def program() -> None:
        async with open_fake(paused=True) as fake:
            app = asgi_app(fake.engine)
            body = json.dumps(ENDLESS).encode()
            scope = {"type": "http", "method": "POST", "path": "/v1/completions", "http_version": "1.1", "headers": []}
            messages = [{"type": "http.request", "body": body, "more_body": False}]

            async def receive():
                return messages.pop() if messages else await asyncio.get_running_loop().create_future()

            async def send(message):
                raise AssertionError("nothing is ready to be sent")

            call = asyncio.create_task(app(scope, receive, send))
            await fake.until_queued(1)
            await fake.step()
            assert fake.blocks_used > 0
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await fake.settle()
            fake.assert_all_free()

    run(program)


def test_request_ends_if_the_hosts_send_fails(run):
    async def program() -> None:
        async with open_fake(paused=True, next_token=lambda _ids: 97) as fake:
            app = asgi_app(fake.engine)
            body = json.dumps({**ENDLESS, "stream": True}).encode()
            scope = {"type": "http", "method": "POST", "path": "/v1/completions", "http_version": "1.1", "headers": []}
            messages = [{"type": "http.request", "body": body, "more_body": False}]

            async def receive():
                return messages.pop() if messages else await asyncio.get_running_loop().create_future()

            async def send(message):
                raise OSError("gone")

            call = asyncio.create_task(app(scope, receive, send))
            await fake.until_queued(1)
            await fake.step(4)
            with pytest.raises(OSError, match="gone"):
                await call
            await fake.settle()
            fake.assert_all_free()

    run(program)


# --- mounted ---


def test_app_works_in_fastapi_behind_a_proxy_that_strips_a_path(run):
    async def program() -> None:
        llm = asgi_app(opens())
        app = FastAPI(lifespan=llm.lifespan)
        app.mount("/llm", llm)

        @app.get("/blocks")
        async def blocks() -> dict[str, int]:
            return {"used": llm.engine.stats().blocks_used}

        async with under_uvicorn(app, root_path="/proxied") as port:
            assert await ask(port, "/blocks") == (200, '{"used":0}')
            assert (await ask(port, "/llm/health"))[0] == 200
            status, text = await ask(port, "/llm/v1/completions", {"prompt": "x", "max_tokens": 3, "ignore_eos": True})
            assert (status, json.loads(text)["choices"][0]["text"]) == (200, "aaa")
            status, text = await ask(port, "/llm/v1/completions", {**ENDLESS, "stream": True})
            assert "data: [DONE]" in text
            assert await ask(port, "/blocks") == (200, '{"used":0}')

    run(program)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_app_works_alone_and_mounted_in_starlettes_test_client(run, backend):
    for is_mounted in (False, True):
        llm = asgi_app(opens(), api_key=("a-key",))
        app = Starlette(routes=[Mount("/llm", llm)], lifespan=llm.lifespan) if is_mounted else llm
        prefix = "/llm" if is_mounted else ""
        with TestClient(app, backend=backend) as client:
            assert client.get(prefix + "/v1/models").status_code == 401
            models = client.get(prefix + "/v1/models", headers={"x-api-key": "a-key"})
            assert models.json()["data"][0]["id"] == "fake"
            is_trio = isinstance(llm.engine, FakeEngine)
            assert is_trio == (backend == "trio")


def test_app_with_an_open_engine_needs_no_lifespan_and_keeps_no_state(run):
    async def program() -> None:
        async with open_fake(response="abc") as fake:
            app = asgi_app(fake.engine)
            outer = Starlette(routes=[Mount("/llm", app)])
            async with under_uvicorn(outer) as port:
                asked = {"model": "fake", "input": "x"}
                status, _ = await ask(port, "/llm/v1/responses", asked)
                assert status == 200
                status, text = await ask(port, "/llm/v1/responses", {**asked, "background": True})
                assert status >= 400, text
                async with app.lifespan():
                    status, text = await ask(port, "/llm/v1/responses", {**asked, "background": True})
                    assert status == 200, text
            fake.assert_all_free()

    run(program)


# --- on Trio ---


async def test_app_works_under_hypercorn_on_trio():
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    config = HypercornConfig()
    config.bind = [f"fd://{listener.detach()}"]
    config.errorlog = config.accesslog = None
    app = asgi_app(opens(paused=True))
    ended = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(functools.partial(hypercorn.trio.serve, app, config, shutdown_trigger=ended.wait))
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        body = json.dumps({**ENDLESS, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
        await stream.send_all(head.encode() + body)
        while app._app is None or not app.engine.live_requests():
            await trio.lowlevel.checkpoint()
        fake = app.engine
        assert isinstance(fake, FakeEngine)
        await fake.step(2)
        assert fake.stats().blocks_used == 6
        await stream.aclose()
        while fake.live_requests():
            await trio.lowlevel.checkpoint()
        fake.assert_all_free()
        ended.set()


# --- unsupported combinations ---


async def test_asyncio_engine_refuses_a_trio_host():
    def serve_elsewhere() -> AsgiApplication:
        async def main() -> AsgiApplication:
            async with open_fake() as fake:
                return asgi_app(fake.engine)

        return asyncio.run(main())

    app = await trio.to_thread.run_sync(serve_elsewhere)
    with pytest.raises(WrongLoop, match=r"open it with trioserve\.open_engine"):
        await app({"type": "http"}, None, None)


async def test_trio_engine_refuses_an_asyncio_host():
    async with open_fake_engine() as fake:
        app = asgi_app(fake)
        with pytest.raises(WrongLoop, match=r"open it with trioserve\.asyncio\.open_engine"):
            await trio.to_thread.run_sync(asyncio.run, app({"type": "http"}, None, None))


def test_engine_options_of_another_engine_type_are_refused(run):
    with pytest.raises(TypeError, match="does not take host, port"):
        trioserve.asgi_app("smollm2", port=80, host="::")
    with pytest.raises(TypeError, match="does not take max_num_seqs"):
        trioserve.asgi_app(opens(), max_num_seqs=3)
    with pytest.raises(StartupError, match="store_ttl is 0"):
        trioserve.asgi_app("smollm2", max_num_seqs=3, store_ttl=0)
    with pytest.raises(TypeError, match="engine is 5"):
        trioserve.asgi_app(5)


def test_failed_engine_start_is_reported_to_the_asgi_host_in_one_sentence(run, tmp_path):
    async def program() -> None:
        app = asgi_app(str(tmp_path / "none.gguf"))
        said = []

        async def receive():
            return {"type": "lifespan.startup"}

        async def send(message):
            said.append(message)

        await app({"type": "lifespan"}, receive, send)
        assert [message["type"] for message in said] == ["lifespan.startup.failed"]
        assert "none.gguf" in said[0]["message"]
        with pytest.raises(RuntimeError, match="the lifespan of this application opens its engine"):
            await app({"type": "http"}, receive, send)

    run(program)


# --- access without keys ---


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_remote_clients_cannot_operate_a_server_without_keys(backend):
    for options, statuses in (
        ({}, (403, 403, 403)),
        ({"allowed_host": ("testserver",)}, (200, 403, 403)),
        ({"allowed_host": ("testserver",), "allow_operator_without_key": True}, (200, 200, 403)),
    ):
        with TestClient(asgi_app(opens(), **options), backend=backend) as client:
            page = {"origin": "https://evil.example", "sec-fetch-site": "cross-site"}
            asked = (client.get("/v1/models"), client.post("/pause"), client.post("/resume", headers=page))
            assert tuple(response.status_code for response in asked) == statuses
