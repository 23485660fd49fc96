"""Tests of the replay of sessions in virtual time."""

from __future__ import annotations

import json

import msgspec
import pytest

from trioserve.bench.agents.traces import draw_traffic
from trioserve.bench.inside.agent_replay import WARM_SHARE, Comparison, Scale, replay
from trioserve.cli import main

SCALE = Scale(0.01)


def drawn(name, *, clients=3):
    return draw_traffic(name, SCALE.shape, clients=clients, rounds=1, seed=1)


def replayed(traffic, share, *, has_retention=False):
    return replay(traffic, share, "gpu", SCALE, has_retention=has_retention)


def test_large_pool_computes_each_token_once():
    traffic = drawn("agents")
    figures = replayed(traffic, WARM_SHARE)
    # The KV of a response is computed with the response, and is no prompt of the next turn.
    own = sum(turn.input_tokens for session in traffic.sessions for turn in session.turns)
    turns = sum(len(session.turns) for session in traffic.sessions)
    assert figures.turns == turns
    # A turn computes again what its session had in a block that was not full, and several sessions may compute the
    # prefix at the same time.
    repeated_max = turns * (SCALE.block_size + 1) + len(traffic.clients) * SCALE.shape.prefix_tokens
    assert 0 <= figures.computed_tokens - own <= repeated_max
    assert figures.prompt_tokens == traffic.prompt_tokens
    assert figures.hit_rate == pytest.approx(1 - figures.computed_tokens / figures.prompt_tokens)


def test_small_pool_computes_more_and_answers_later():
    traffic = drawn("agents")
    warm, few = (replayed(traffic, share) for share in (WARM_SHARE, 0.5))
    assert few.blocks < warm.blocks
    assert few.computed_tokens > 1.5 * warm.computed_tokens
    assert few.ttft_ms_p50 > warm.ttft_ms_p50
    assert few.turns_per_minute < warm.turns_per_minute


def test_token_of_a_scaled_down_trace_takes_the_time_of_all_tokens_that_it_represents():
    whole, small = Scale(1.0), Scale(0.1)
    assert small.machine("gpu").token == pytest.approx(10 * whole.machine("gpu").token)
    assert small.machine("cpu").attended == pytest.approx(100 * whole.machine("cpu").attended)
    assert (small.block_size, small.step_tokens_max) == (whole.block_size // 10, round(whole.step_tokens_max / 10))


def test_session_retention_does_not_affect_traffic_without_sessions():
    traffic = drawn("anonymous")
    recency, retention = (replayed(traffic, 0.5, has_retention=has) for has in (False, True))
    assert recency.computed_tokens == retention.computed_tokens
    assert recency.seconds == retention.seconds


def test_replays_of_one_traffic_are_equal():
    traffic = drawn("hoarder")
    first, again = (replayed(traffic, 0.5, has_retention=True) for _ in range(2))
    assert first == again
    assert sum(first.computed_by_tenant.values()) == first.computed_tokens
    assert set(first.computed_by_tenant) == {"agents", "templates", "hoarder"}


def test_least_gain_is_that_of_the_tenant_with_the_smallest_ratio():
    figures = replayed(drawn("single-turn", clients=1), 1.0)

    def computing(**tokens):
        return msgspec.structs.replace(figures, computed_by_tenant=tokens, computed_tokens=sum(tokens.values()))

    comparison = Comparison(recency=computing(a=100, b=50), retention=computing(a=50, b=60), warm=figures)
    assert comparison.gain == pytest.approx(150 / 110)
    assert comparison.least_gain == pytest.approx(50 / 60)


def test_every_replay_is_in_the_table_and_in_the_json(capsys):
    command = "bench inside agents --scale 0.01 --clients 1 --sessions 1 --share 0.5 1 --traffic people single-turn"
    assert main(command.split()) == 0
    *table, line = capsys.readouterr().out.splitlines()
    comparisons = json.loads(line)["comparisons"]
    assert len(table) == 2 + 2 * len(comparisons)
    assert [(one["recency"]["traffic"], one["retention"]["share"]) for one in comparisons] == [
        ("people", 0.5),
        ("people", 1.0),
        ("single-turn", 0.5),
        ("single-turn", 1.0),
    ]
    assert all(one["retention"]["has_retention"] and not one["recency"]["has_retention"] for one in comparisons)


def test_prefetches_reduce_the_tokens_that_turns_load_from_the_host_store():
    traffic = drawn("agents", clients=6)
    host, prefetch = (
        replay(traffic, 0.5, "gpu", SCALE, has_retention=True, load_us=5.0, prefetches=prefetches)
        for prefetches in (False, True)
    )
    assert host.prefetched_tokens == 0 < host.loaded_tokens
    assert prefetch.prefetched_tokens > 0
    assert prefetch.loaded_tokens < host.loaded_tokens
    assert prefetch.turns == host.turns == sum(len(session.turns) for session in traffic.sessions)
