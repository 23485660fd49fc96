"""Tests that every engine of the prompt measurement gets the same requests, and of the simulated figures. They check no
latencies of this machine.
"""

from __future__ import annotations

import json
from contextlib import asynccontextmanager

import pytest

from trioserve.bench.inside.wide_prompt import ALONE_STEPS, MACHINES, Load, run_wide_prompt, simulated
from trioserve.testing.fake_engine import open_fake_engine


def test_every_long_prompt_figure_is_in_the_table_and_in_the_json(capsys):
    stretches, engines = [], []

    @asynccontextmanager
    async def open_engine(model, *, max_num_seqs, kv_cache_memory, wide_prompt_stretch):
        assert (model, max_num_seqs, kv_cache_memory) == ("some", 5, 0.5)
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
            assert engine.stats().steps_total > ALONE_STEPS

    load = Load(streams=3, prompts=2, prompt_tokens=900)
    assert run_wide_prompt(open_engine, "some", load=load, stretches=(2, 50), rounds=2, kv_cache_gib=0.5) == 0
    *table, line = capsys.readouterr().out.splitlines()
    figures = json.loads(line)["figures"]
    assert len(table) == 2 + len(figures)
    assert stretches == [2, 50] * 2
    assert [figure["stretch"] for figure in figures] == stretches
    for figure in figures:
        assert 0 < figure["alone_ms_p50"] <= figure["alone_ms_p99"]
        assert 0 < figure["beside_ms_p50"] <= figure["beside_ms_p99"]
        # Each step that computes a part of a prompt also gives each stream a token.
        assert figure["step_count"] >= 2 * 900 // 64
        assert figure["sample_count"] >= 3 * (900 // 64 - 1)


def test_simulated_figures_need_no_engine(capsys):
    load = Load(streams=16, prompts=1, prompt_tokens=2_000)
    assert run_wide_prompt(None, load=load, stretches=(2, 1_000), machine="gpu") == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
    short, long = figures
    assert short["beside_ms_p99"] < long["beside_ms_p99"]
    assert short["prompt_seconds"] > long["prompt_seconds"]
    assert long["step_count"] == 5  # 496 prompt tokens fit beside 16 decodes.


@pytest.mark.parametrize("machine", MACHINES)
def test_several_short_prompts_keep_gaps_below_four_decode_steps(machine):
    figure = simulated(MACHINES[machine], Load(streams=12, prompts=4, prompt_tokens=128), stretch=3.0)
    assert figure.beside_ms_p99 < 4 * figure.alone_ms_p50
