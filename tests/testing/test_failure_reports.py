"""Tests of the report that pytest writes for a failed test that uses the kit."""

from __future__ import annotations

import pytest

from .test_kit_readme import run_pytest

HANGS = """
import pytest
import trio
import trioserve.testing.fake_engine  # not within the timeout
from trioserve import SamplingParams


async def hang(engine):
    async def ask(name):
        async with engine.generate("hello", SamplingParams(max_tokens=10), request_id=name) as stream:
            async for _ in stream:
                pass

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, "r1")
        await engine.step(3)
        nursery.start_soon(ask, "r2")


@pytest.mark.fake_engine(paused=True, max_num_seqs=1)
async def test_hang(fake_engine, autojump_clock):
    with trio.fail_after(2):
        await hang(fake_engine)
"""

TIMEOUT = HANGS.replace("    with trio.fail_after(2):\n        await", "    await").replace(
    "(fake_engine, autojump_clock)", "(fake_engine)"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "arguments", "sentence"),
    [
        (HANGS, (), "TooSlowError"),
        (
            TIMEOUT,
            (
                "--timeout=2",
                "-p",
                "no:unraisableexception",
            ),
            "Failed: Timeout",
        ),
    ],
    ids=["trio deadline", "pytest-timeout"],
)
def test_report_of_hung_test_names_what_requests_wait_for(tmp_path, source, arguments, sentence):
    report = run_pytest(tmp_path, source, *arguments).stdout
    for line in (
        "r1 waits for token 4 of 10: running",
        "r2 waits in the queue at place 1",
        "2 of 1024 blocks used",
        "the engine is paused: no step begins until engine.step() or engine.resume()",
    ):
        assert line in report.splitlines()
    assert f"test_hang - {sentence}" in report or f"test_hang - trio.{sentence}" in report


@pytest.mark.slow
def test_report_shows_sentences_and_no_groups_first(tmp_path):
    source = """
import pytest
import trio
from trioserve.testing import open_fake_engine


async def test_nested():
    async with open_fake_engine(), trio.open_nursery():
        async with trio.open_nursery():
            raise ValueError("the sentence")


@pytest.mark.fake_engine(max_model_len=0)
async def test_option(fake_engine):
    pass


@pytest.mark.fake_engine(paused=True)
async def test_two(fake_engine):
    await fake_engine.generate("hello").__aenter__()
    raise ValueError("the first")
"""
    report = run_pytest(tmp_path, source, "--tb=short").stdout
    assert "test_nested - ValueError: the sentence" in report
    assert "StartupError: max_model_len is 0, it must be at least 1" in report
    assert "ValueError: the first\nAssertionError: not all is free" in report
