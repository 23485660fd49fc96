"""Tests that times of day and random ids come from one source, so that a fixed source makes responses reproducible."""

from __future__ import annotations

import itertools

import pytest
import trio

from trioserve.api.routes import App
from trioserve.http.exchange import ClockAndIds
from trioserve.http.server import FrontendServer
from trioserve.testing.fake_engine import open_fake_engine
from trioserve.testing.memory_client import MemoryClient, memory_connection


@pytest.mark.parametrize("http", [1, 2])
@pytest.mark.parametrize(
    ("path", "prefix", "body"),
    [
        ("/v1/completions", "cmpl-", {"prompt": [1, 2]}),
        ("/v1/chat/completions", "chatcmpl-", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
async def test_date_creation_time_and_ids_come_from_the_given_source(path, prefix, body, http, autojump_clock):
    ids = map("id-{}".format, itertools.count())
    clock_and_ids = ClockAndIds(wall_clock=lambda: 1_700_000_000.9, new_request_id=lambda: next(ids))
    async with open_fake_engine() as fake, trio.open_nursery() as nursery:
        server = FrontendServer(App(fake, clock_and_ids=clock_and_ids), clock_and_ids=clock_and_ids)
        ours, theirs = memory_connection()
        nursery.start_soon(server.serve_connection, theirs)
        client = MemoryClient(ours, http=http)
        response = await client.post(path, {**body, "max_tokens": 1})
        value = await response.json()
        nursery.cancel_scope.cancel()
    assert (value["created"], value["id"]) == (1_700_000_000, f"{prefix}id-0")
    assert response.headers["x-request-id"] == "id-0"
    assert response.headers["date"] == "Tue, 14 Nov 2023 22:13:20 GMT"


async def test_refused_connection_gets_the_time_of_the_given_clock(autojump_clock):
    async def handler(exchange):
        raise AssertionError("nothing was asked")

    server = FrontendServer(handler, clock_and_ids=ClockAndIds(wall_clock=lambda: 0.0))
    ours, theirs = memory_connection()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.serve_connection, theirs)
        await ours.send_all(b"no such thing\r\n\r\n")
        received = await ours.receive_some()
        await ours.aclose()
    assert b"date: Thu, 01 Jan 1970 00:00:00 GMT\r\n" in received


def test_default_request_ids_are_long_and_differ():
    clock_and_ids = ClockAndIds()
    made = {clock_and_ids.new_request_id() for _ in range(100)}
    assert len(made) == 100
    assert all(len(one) == 32 for one in made)


async def test_fake_engine_numbers_its_request_ids(autojump_clock):
    async with open_fake_engine() as fake:
        assert [fake.generate([1]).id for _ in range(2)] == ["req-1", "req-2"]
