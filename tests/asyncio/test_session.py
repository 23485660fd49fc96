"""Tests sessions in an asyncio program: turns, cancelled tasks, and what a session that was left holds."""

from __future__ import annotations

import asyncio
import inspect

import pytest

import trioserve
import trioserve.asyncio
from trioserve.contracts.errors import AlreadyEnded, InvalidRequest, RequestAborted
from trioserve.contracts.sampling import SamplingParams
from trioserve.testing.byte_tokenizer import END_TOKEN_ID

from .conftest import open_fake

ENDLESS = SamplingParams(ignore_eos=True)


def test_asyncio_session_has_every_method_of_the_trio_session_with_equal_parameters():
    for name, method in inspect.getmembers(trioserve.Session):
        if name.startswith("_") or name in ("enter", "leave"):
            continue
        ours = getattr(trioserve.asyncio.Session, name)
        assert ours.__doc__, name
        if inspect.isfunction(method):
            assert list(inspect.signature(ours).parameters) == list(inspect.signature(method).parameters), name


def test_turns_continue_one_conversation(run):
    async def program():
        async with open_fake(response="!") as fake:
            async with fake.engine.session(tenant="t") as session:
                reply = await session.respond("one")
                assert (reply.content, reply.finish_reason) == ("!", trioserve.FinishReason.STOP)
                prompt = trioserve.ChatPrompt(messages=[{"role": "user", "content": "two"}])
                async with session.generate(prompt) as stream:
                    assert "".join([delta.text async for delta in stream]) == "!"
                session.expect_turn(3)
                assert [message["content"] for message in session.messages] == ["one", "!", "two", "!"]
                assert session.token_ids[-1] == END_TOKEN_ID
                assert session.id
            with pytest.raises(AlreadyEnded):
                await session.respond("three")
            assert fake.engine.thread.call(lambda: len(fake.fake.sessions)) == 0
            fake.assert_all_free()

    run(program)


def test_cancelled_turn_changes_nothing_and_the_next_one_runs(run):
    async def program():
        async with open_fake(response="!", paused=True) as fake, fake.engine.session() as session:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await session.respond("lost", ENDLESS)
            fake.engine.thread.call(fake.fake.resume)
            await session.respond("one")
            assert [message["content"] for message in session.messages] == ["one", "!"]

    run(program)


def test_leaving_the_scope_ends_a_turn_of_another_task(run):
    async def program():
        async with open_fake(paused=True) as fake:
            async with asyncio.TaskGroup() as tasks, fake.engine.session() as session:

                async def turn() -> None:
                    with pytest.raises(RequestAborted):
                        await session.respond("one", ENDLESS)

                tasks.create_task(turn())
                await fake.until_queued(1)
                await fake.step(3)
                with pytest.raises(InvalidRequest, match="is a turn of this session"):
                    await session.respond("two")
                assert fake.blocks_used > 0
            await fake.settle()
            assert fake.blocks_used == 0
            fake.assert_all_free()

    run(program)
