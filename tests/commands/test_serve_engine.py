"""Tests of a server inside of a Trio program, with an engine that the program has opened."""

from __future__ import annotations

import functools
import json

import pytest
import trio

import trioserve
from trioserve.testing import open_fake_engine


async def get(url: str, path: str) -> bytes:
    host, port = url.removeprefix("http://").split(":")
    async with await trio.open_tcp_stream(host, int(port)) as stream:
        await stream.send_all(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
        return b"".join([piece async for piece in stream])


async def test_program_can_serve_an_engine_and_call_the_engine_directly():
    async with open_fake_engine(response="hello") as engine, trio.open_nursery() as nursery:
        [url] = await nursery.start(functools.partial(trioserve.serve, engine, port=0))
        head, _, body = (await get(url, "/v1/models")).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert json.loads(body)["data"][0]["id"] == "fake"
        async with engine.generate("hi") as response:
            assert "".join([delta.text async for delta in response]) == "hello"
        nursery.cancel_scope.cancel()


async def test_engine_stays_open_when_serving_is_cancelled():
    async with open_fake_engine(response="hello") as engine:
        for _ in range(2):
            async with trio.open_nursery() as nursery:
                [url] = await nursery.start(functools.partial(trioserve.serve, engine, port=0))
                assert (await get(url, "/ready")).startswith(b"HTTP/1.1 200")
                nursery.cancel_scope.cancel()
        engine.assert_all_free()


async def test_error_of_a_program_server_names_the_wrong_option():
    async with open_fake_engine() as engine:
        with pytest.raises(trioserve.StartupError, match="prot is not an option: did you mean port"):
            await trioserve.serve(engine, prot=1)
