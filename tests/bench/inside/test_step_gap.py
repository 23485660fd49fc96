"""Tests that both engines of the gap measurement get the same requests. They do not check the length of gaps."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager

from trioserve.bench.inside.step_gap import Passes, run_step_gap
from trioserve.testing.fake_engine import open_fake_engine
from trioserve.testing.fake_executor import FakeExecutor


def test_every_step_gap_figure_is_in_the_table_and_in_the_json(capsys):
    opened = []

    @asynccontextmanager
    async def open_engine(model, *, max_num_seqs, overlap_steps, kv_cache_memory):
        assert (model, max_num_seqs, kv_cache_memory) == ("some", 3, 0.25)
        async with open_fake_engine(max_num_seqs=3, overlap_steps=overlap_steps, max_num_batched_tokens=200) as engine:
            opened.append(engine)
            yield engine

    passes = Passes(FakeExecutor, "execute", lambda plan, _is_abandoned: plan.token_count)
    assert run_step_gap(open_engine, "some", passes=passes, stream_counts=(1, 3), rounds=2, tokens=9) == 0
    *table, line = capsys.readouterr().out.splitlines()
    figures = json.loads(line)["figures"]
    assert len(table) == 2 + len(figures)
    shapes = [(figure["stream_count"], figure["overlap_steps"]) for figure in figures]
    assert shapes == [(1, False), (1, True), (3, False), (3, True)]
    # The prompt's step brings one of 9 tokens, or two if a request waits for the prefix blocks of another request. So
    # 7 or 8 decodes remain, and one gap less.
    for figure in figures:
        assert figure["sample_count"] >= 2 * 6
        assert 0 < figure["gap_us"] <= figure["gap_us_p90"]
        assert min(figure["forward_ms"], figure["speed"]) > 0


def test_gaps_are_counted_only_between_successive_passes_of_the_given_size():
    class Computing:
        def compute(self, rows):
            return rows

    passes = Passes(Computing, "compute", lambda rows: rows)
    with passes.watched():
        for rows in (5, 2, 2, 2, 1, 2):
            assert Computing().compute(rows) == rows
    Computing().compute(2)
    assert len(passes.take(2)) == 2
    assert passes.take(2) == []
