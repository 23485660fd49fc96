"""Tests that both engines of the draft measurement get the same prompts. They do not check speeds."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager

import pytest

from trioserve.bench.inside import draft_bench
from trioserve.testing.fake_engine import open_fake_engine


@pytest.fixture
def open_engine():
    """Open fake engines whose output repeats itself."""

    @asynccontextmanager
    async def opened(model, *, kv_cache_memory, quantization, **options):
        assert (model, kv_cache_memory, quantization) == ("some", 0.25, "auto")
        async with open_fake_engine(
            response="round and round it goes, " * 20,
            block_count=2_000,
            max_model_len=4_000,
            max_num_batched_tokens=8_000,
            **options,
        ) as engine:
            yield engine

    return opened


def test_every_draft_figure_is_in_the_table_and_in_the_json(open_engine, capsys, monkeypatch):
    one, several = draft_bench.WORKLOADS[0], draft_bench.WORKLOADS[-1]
    monkeypatch.setattr(draft_bench, "WORKLOADS", (one, several))
    assert draft_bench.run_draft_bench(open_engine, "some", draft_tokens=5, rounds=1, tokens=60) == 0
    *table, line = capsys.readouterr().out.splitlines()
    figures = json.loads(line)["figures"]
    assert len(table) == 2 + len(figures)
    assert [figure["streams"] for figure in figures] == [1, len(several.prompts)]
    assert [figure["tokens"] for figure in figures] == [60, 60 * len(several.prompts)]
    for figure in figures:
        assert figure["drafted"] >= figure["accepted"] > 10  # The figures are from the round with drafts.
        assert figure["steps"] < 60
