"""Tests of the measurement of the live page, over connections in memory."""

from __future__ import annotations

import msgspec
import trio

from trioserve.api.page import PageSettings
from trioserve.bench.page import measure_page, page_text
from trioserve.bench.runner import CannotMeasure
from trioserve.bench.settings import PageBenchSettings
from trioserve.testing.memory_server import MemoryServer, open_memory_server

SETTINGS = PageBenchSettings(rounds=2, concurrency=2, requests=4, prompt_tokens=4, output_tokens=8)


async def measured(server: MemoryServer, settings: PageBenchSettings = SETTINGS) -> object:
    async def connect() -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        return server.connect()

    return await measure_page(settings, open_stream=connect)


async def test_each_round_has_both_measurements_and_the_ratio_is_their_median(autojump_clock):
    async with open_memory_server(step_seconds=0.2) as server:
        report = (await measured(server)).report
        assert [one.without.completed_requests for one in report.rounds] == [4, 4]
        assert all(one.events > 1 and one.event_bytes > 500 for one in report.rounds)
        assert report.spread[0] <= report.ratio <= report.spread[1]
        assert f"ratio {report.ratio:.4f}" in page_text(report)
        await server.assert_all_free()
        assert server.app.page.reader_count == 0


async def test_both_measurements_of_a_round_have_different_prompts(autojump_clock):
    """With equal prompts, the second measurement would find its prompts in the prefix cache."""
    settings = msgspec.structs.replace(SETTINGS, prompt_tokens=48)
    async with open_memory_server(step_seconds=0.2, max_model_len=128, block_count=64) as server:
        await measured(server, settings)
        assert server.engine.stats().prefix_hit_tokens_total == 0


async def test_server_without_a_page_cannot_be_measured(autojump_clock):
    async with open_memory_server(step_seconds=0.2, page=PageSettings(is_shown=False)) as server:
        outcome = await measured(server)
        assert isinstance(outcome, CannotMeasure)
        assert "status 404" in outcome.message
