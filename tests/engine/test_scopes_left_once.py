"""Tests that each public scope can be left only once, and that a forked child cannot use its parent's scopes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

import trioserve
from trioserve.asyncio.engine import in_a_thread
from trioserve.contracts.errors import AlreadyEnded, WrongLoop
from trioserve.contracts.sampling import SamplingParams
from trioserve.testing.accounting import assert_all_free
from trioserve.testing.fake_engine import open_fake_engine
from trioserve.testing.fake_image_engine import open_fake_image_engine
from trioserve.testing.memory_server import open_memory_image_server, open_memory_server
from trioserve.trio_tools.own_run import OpenedOnce

LONG = SamplingParams(max_tokens=50)

OPENINGS: dict[str, Callable[[], AbstractAsyncContextManager[Any]]] = {
    "fake engine": open_fake_engine,
    "fake image engine": open_fake_image_engine,
    "memory server": open_memory_server,
    "memory image server": open_memory_image_server,
}
REQUESTS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "generate": (open_fake_engine, lambda engine: engine.generate("a prompt", LONG)),
    "embed": (open_fake_engine, lambda engine: engine.embed(["a text"])),
    "generate_image": (open_fake_image_engine, lambda engine: engine.generate_image("a cat")),
}


async def check_left_once(scope: Any) -> None:
    """Leave an entered scope. Check that every further attempt to leave it is refused."""
    await scope.__aexit__(None, None, None)
    for error in (None, ValueError("of the body"), None):
        with pytest.raises(AlreadyEnded, match="was left before"):
            await scope.__aexit__(None if error is None else type(error), error, None)
    with pytest.raises(AlreadyEnded, match="was entered before"):
        await scope.__aenter__()


@pytest.mark.parametrize("name", OPENINGS)
async def test_scope_of_an_opened_engine_refuses_a_second_exit(autojump_clock, name):
    scope = OPENINGS[name]()
    with pytest.raises(AlreadyEnded, match="was not entered"):
        await scope.__aexit__(None, None, None)
    await scope.__aenter__()
    await check_left_once(scope)


def test_real_engines_use_the_same_scope_class():
    for opening in (
        trioserve.open_engine,
        trioserve.open_image_engine,
        trioserve.asyncio.open_engine,
        trioserve.asyncio.open_image_engine,
        trioserve.open_engines,
        trioserve.asyncio.open_engines,
    ):
        assert isinstance(opening("no-such-model"), OpenedOnce)


@pytest.mark.parametrize("name", REQUESTS)
async def test_second_exit_of_a_request_is_refused_and_others_with_its_id_continue(autojump_clock, name):
    open_engine, ask = REQUESTS[name]
    async with open_engine(paused=True) as engine:
        never_entered, scope, other = ask(engine), ask(engine), ask(engine)
        with pytest.raises(AlreadyEnded, match="was not entered"):
            await never_entered.__aexit__(None, None, None)
        await scope.__aenter__()
        await other.__aenter__()
        await check_left_once(scope)
        assert engine.dispatch.core.stats().leases == {"local": 1}
        assert len(engine.live_requests()) == 1
        await other.__aexit__(None, None, None)
        assert_all_free(engine)


def test_second_exit_of_an_asyncio_request_or_engine_is_refused():
    async def main() -> None:
        opening = in_a_thread(open_fake_engine)
        engine = await opening.__aenter__()
        for ask in (lambda: engine.generate("a prompt", LONG), lambda: engine.embed(["a text"])):
            with pytest.raises(AlreadyEnded, match="was not entered"):
                await ask().__aexit__(None, None, None)
            scope = ask()
            await scope.__aenter__()
            await check_left_once(scope)
        assert engine.live_requests() == []
        await check_left_once(opening)

    asyncio.run(main())


# --- in a forked child ---


def raised_in_child(act: Callable[[], object]) -> str:
    """Return the name and text of the error that `act` raises in a forked child. The child ends without any cleanup."""
    reader, writer = os.pipe()
    process_id = os.fork()
    if process_id == 0:
        try:
            act()
            told = "nothing"
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
        os.write(writer, told.encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        told = pipe.read().decode()
    os.waitpid(process_id, 0)
    return told


def step(awaitable: Awaitable[object]) -> None:
    """Run an awaitable until it waits for the first time."""
    awaitable.__await__().__next__()


def check_refused(told: str) -> None:
    assert told.startswith(WrongLoop.__name__), told
    assert f"opened in process {os.getpid()}" in told
    assert "open one here" in told


async def test_a_forked_child_cannot_use_its_parents_engine(autojump_clock):
    opening = open_fake_engine()
    engine = await opening.__aenter__()
    async with engine.generate("a prompt", LONG) as stream:
        await anext(stream)
        uses: list[Callable[[], object]] = [
            lambda: step(engine.generate("another").__aenter__()),
            lambda: step(engine.embed(["a text"]).__aenter__()),
            lambda: stream.__anext__(),
            lambda: step(stream.__aexit__(None, None, None)),
            lambda: step(opening.__aexit__(None, None, None)),
            lambda: step(engine.wait_until_idle()),
            lambda: engine.abort("an-id"),
            lambda: engine.drain(),
            lambda: engine.live_requests(),
            lambda: engine.stats(),
            lambda: engine.load(),
        ]
        for use in uses:
            check_refused(raised_in_child(use))
        assert sum([len(delta.token_ids) async for delta in stream]) > 40, "the parent goes on"
    await opening.__aexit__(None, None, None)


async def test_a_forked_child_cannot_use_its_parents_image_engine(autojump_clock):
    async with open_fake_image_engine() as engine:
        for use in (lambda: step(engine.generate_image("a cat").__aenter__()), lambda: engine.stats()):
            check_refused(raised_in_child(use))
        await engine.generate_image("a cat")


def test_a_forked_child_of_an_asyncio_program_cannot_use_its_parents_engine():
    async def main() -> None:
        opening = in_a_thread(open_fake_engine)
        engine = await opening.__aenter__()
        async with engine.generate("a prompt", LONG) as stream:
            first = await anext(stream)  # The response may already have every token.
            uses: list[Callable[[], object]] = [
                lambda: step(engine.generate("another").__aenter__()),
                lambda: step(engine.embed(["a text"]).__aenter__()),
                lambda: step(stream.__anext__()),
                lambda: step(stream.__aexit__(None, None, None)),
                lambda: step(opening.__aexit__(None, None, None)),
                lambda: step(engine.wait_until_idle()),
                lambda: engine.abort("an-id"),
                lambda: engine.stats(),
                lambda: engine.ready,
            ]
            for use in uses:
                check_refused(raised_in_child(use))
            assert len(first.token_ids) + sum([len(delta.token_ids) async for delta in stream]) > 40
        await opening.__aexit__(None, None, None)

    asyncio.run(main())


def test_forked_child_that_exits_normally_stops_nothing_of_its_parent():
    from trioserve.asyncio import trio_thread

    async def main() -> None:
        async with in_a_thread(open_fake_engine) as engine:
            assert raised_in_child(trio_thread._stop_all) == "nothing"
            async with engine.generate("a prompt", LONG) as stream:
                assert sum([len(delta.token_ids) async for delta in stream]) > 40

    asyncio.run(main())
