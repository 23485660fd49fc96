"""Tests that both engines of the long prompt measurement get the same requests. They do not check latencies."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager

from trioserve.bench.inside.wide_prompt import ALONE_STEPS, BY_TIME, BY_TOKENS, run_wide_prompt
from trioserve.testing.fake_engine import open_fake_engine


def test_every_long_prompt_figure_is_in_the_table_and_in_the_json(capsys):
    stretches, engines = [], []

    @asynccontextmanager
    async def open_engine(model, *, max_num_seqs, kv_cache_memory, wide_prompt_stretch):
        assert (model, max_num_seqs, kv_cache_memory) == ("some", 4, 0.5)
        stretches.append(wide_prompt_stretch)
        async with open_fake_engine(
            max_num_seqs=max_num_seqs,
            block_count=2_000,
            max_model_len=4_000,
            max_num_batched_tokens=64,
            wide_prompt_stretch=wide_prompt_stretch,
        ) as engine:
            engines.append(engine)
            yield engine

    assert run_wide_prompt(open_engine, "some", stream_count=3, prompt_tokens=900, rounds=2, kv_cache_gib=0.5) == 0
    *table, line = capsys.readouterr().out.splitlines()
    figures = json.loads(line)["figures"]
    assert len(table) == 2 + len(figures)
    assert stretches == [BY_TIME, BY_TOKENS]
    assert [figure["stretch"] for figure in figures] == [BY_TIME, BY_TOKENS] * 2
    for figure in figures:
        assert 0 < figure["alone_ms_p50"] <= figure["alone_ms_p99"]
        assert 0 < figure["beside_ms_p50"] <= figure["beside_ms_p99"]
        # Each step that computes a part of the prompt also gives each stream a token.
        assert figure["sample_count"] >= 3 * (900 // 64 - 1)
    assert all(engine.stats().steps_total > 2 * ALONE_STEPS for engine in engines)
