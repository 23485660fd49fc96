"""Tests of calls of an engine from outside of its own Trio program. They are refused with advice."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest
import trio

import trioserve
from trioserve.contracts.errors import WrongLoop
from trioserve.testing.fake_engine import FakeEngine, open_fake_engine

CALLS: dict[str, Callable[[FakeEngine], Awaitable[object]]] = {}


def call(function: Callable[[FakeEngine], Awaitable[object]]) -> Callable[[FakeEngine], Awaitable[object]]:
    CALLS[function.__name__] = function
    return function


@call
async def entering_a_request(fake):
    async with fake.generate("a prompt"):
        pass


@call
async def entering_one_that_is_pooled(fake):
    await fake.embed("a text")


@call
async def abort(fake):
    fake.abort("an-id")


@call
async def hand_over(fake):
    fake.hand_over("an-id")


@call
async def live_requests(fake):
    fake.live_requests()


@call
async def drain(fake):
    fake.drain()


@call
async def encode(fake):
    await fake.encode("a text")


@call
async def decode(fake):
    await fake.decode([97])


def in_plain_code(function, fake):
    function(fake).send(None)


def in_asyncio(function, fake):
    asyncio.run(function(fake))


def in_another_run(function, fake):
    trio.run(function, fake)


PLACES = {
    in_plain_code: "where no Trio loop runs",
    in_asyncio: r"in an asyncio program.*trioserve\.asyncio\.open_",
    in_another_run: "in another Trio run than the one that opened the engine",
}


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
@pytest.mark.parametrize("name", CALLS)
async def test_call_from_another_loop_is_refused_with_advice(name, place):
    async with open_fake_engine() as fake:
        raised: list[BaseException] = []

        def work() -> None:
            try:
                place(CALLS[name], fake)
            except Exception as error:
                raised.append(error)

        await trio.to_thread.run_sync(work)
        with pytest.raises(WrongLoop, match=PLACES[place]):
            raise raised[0]
        assert fake.ready
        fake.assert_all_free()
    assert isinstance(raised[0], RuntimeError)


@pytest.mark.parametrize("name", ["open_engine", "open_engines", "open_image_engine"])
@pytest.mark.parametrize("place", [in_plain_code, in_asyncio], ids=lambda place: place.__name__)
def test_opening_an_engine_outside_of_trio_is_refused_with_advice(place, name):
    async def open_it(_fake: object) -> None:
        async with getattr(trioserve, name)({} if name == "open_engines" else "smollm2"):
            pass

    before = set(threading.enumerate())
    with pytest.raises(WrongLoop, match=rf"^trioserve\.{name} was called " + PLACES[place]) as raised:
        place(open_it, None)
    assert place is in_plain_code or f"trioserve.asyncio.{name}(...)" in str(raised.value)
    assert not set(threading.enumerate()) - before
