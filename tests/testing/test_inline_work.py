"""Tests that jobs in the event loop take no time of an autojump clock."""

from __future__ import annotations

import pytest
import trio

from trioserve import SamplingParams, StructuredOutput
from trioserve.contracts.errors import AlreadyEnded, InvalidRequest
from trioserve.testing import open_fake_engine
from trioserve.testing.inline_work import InlineTexts

TEXT = "long " * 5_000
DEEP = '{"type": "array", "items": ' * 40 + "{}" + "}" * 40


async def test_autojump_clock_does_not_advance_during_text_and_grammar_jobs(autojump_clock):
    async with open_fake_engine(max_model_len=30_000, block_count=8_000) as engine, trio.open_nursery() as nursery:
        nursery.start_soon(trio.sleep, 1)  # The clock would jump to the end of this sleep.
        token_ids = await engine.encode(TEXT)
        with engine.tokenizing() as texts:
            assert await texts.decode(token_ids) == TEXT
        sampling = SamplingParams(structured=StructuredOutput.json(DEEP), max_tokens=3)
        async with engine.generate("say", sampling) as stream:
            assert [delta async for delta in stream]
        assert trio.current_time() == 0
        nursery.cancel_scope.cancel()


async def test_error_of_a_job_reaches_its_caller_and_a_cancelled_caller_leaves():
    ran: list[int] = []

    def refuse(*_: object) -> None:
        raise InvalidRequest("no")

    async with InlineTexts() as texts:
        for run in (lambda: texts.run(refuse, size=1), lambda: texts.run_compile(refuse, tenant=None)):
            with pytest.raises(InvalidRequest, match="no"):
                await run()
        with trio.CancelScope() as scope:
            scope.cancel()
            await texts.run(lambda: ran.append(1), size=1)
        assert scope.cancelled_caught
    assert ran == []


async def test_jobs_are_refused_after_inline_texts_are_closed():
    async with InlineTexts() as texts:
        pass
    with pytest.raises(AlreadyEnded):
        await texts.run(lambda: None, size=1)
    with pytest.raises(AlreadyEnded), texts.aside(None) as runner:
        await runner.run(lambda: None, size=1)
