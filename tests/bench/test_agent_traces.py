"""Tests of the drawn sessions of agents: their medians, their seed, and the arithmetic of the working set."""

from __future__ import annotations

import statistics

import pytest

from trioserve.bench.agents.traces import SMALL_SHAPE, TRAFFICS, LogNormal, Session, Shape, Traffic, Turn, draw_traffic


def session(number=1, *turns, prefix=0, prefix_tokens=100, wait=0.0):
    return Session(
        number=number,
        tenant="t",
        prefix=prefix,
        prefix_tokens=prefix_tokens,
        turns=tuple(Turn(*turn) for turn in turns),
        wait_seconds=wait,
    )


def test_full_shape_has_the_medians_of_public_traces():
    traffic = draw_traffic("agents", Shape(), clients=40, rounds=10, seed=1)
    prompts = [tokens for one in traffic.sessions for tokens in one.prompt_tokens()]
    turns = [turn for one in traffic.sessions for turn in one.turns]
    pauses = [turn.pause_seconds for turn in turns]
    assert statistics.median(len(one.turns) for one in traffic.sessions) == pytest.approx(43, rel=0.1)
    assert statistics.median(prompts) == pytest.approx(142_000, rel=0.1)
    assert statistics.median(turn.output_tokens for turn in turns) == pytest.approx(444, rel=0.05)
    assert statistics.median(pauses) == pytest.approx(3.46, rel=0.05)
    assert min(pauses) == 0.2
    assert max(pauses) == 60.0
    least = sum(one.own_tokens for one in traffic.sessions) + 2 * 16_000
    assert 0.96 < 1 - least / sum(prompts) < 0.99


@pytest.mark.parametrize("name", TRAFFICS)
def test_equal_seeds_draw_equal_traffic_within_the_context(name):
    first, again, other = (draw_traffic(name, SMALL_SHAPE, clients=4, rounds=2, seed=seed) for seed in (3, 3, 4))
    assert first == again
    assert first != other
    assert len({one.number for one in first.sessions}) == len(first.sessions)
    assert first.context_tokens_max <= SMALL_SHAPE.context_tokens_max


def test_each_prompt_repeats_the_context_before_it():
    one = session(1, (10, 5, 1.0), (20, 7, 0.0))
    assert list(one.prompt_tokens()) == [110, 135]
    assert one.own_tokens == 42
    assert Traffic("", ((one,),)).prompt_tokens == 245


def test_working_set_is_the_most_tokens_that_wait_at_one_time():
    # The first two sessions share a prefix. Both wait from second 2 to 4, the first one with 10 + 5 + 20 + 7 tokens.
    first = session(1, (10, 5, 2.0), (20, 7, 3.0), (1, 1, 0.0))
    second = session(2, (30, 3, 4.0), (9, 9, 0.0))
    # This session waits from second 5 to 9, and no other session has its prefix.
    third = session(3, (1, 1, 4.0), (1, 1, 0.0), prefix=1, prefix_tokens=20, wait=5.0)
    assert Traffic("", ((first,), (second,))).working_set_tokens() == 100 + 42 + 33
    assert Traffic("", ((first,), (second,), (third,))).working_set_tokens() == 100 + 42 + 33
    beside = session(3, (1, 1, 4.0), (1, 1, 0.0), prefix=1)
    assert Traffic("", ((first,), (second,), (beside,))).working_set_tokens() == 100 + 42 + 33 + 102
    assert Traffic("", ((first,),)).working_set_tokens() == 142


def test_single_turns_need_only_their_shared_prefixes_again():
    single = [session(number, (50, 5, 0.0), prefix=number % 2, prefix_tokens=8) for number in range(4)]
    alone = session(9, (500, 5, 0.0), prefix=9, prefix_tokens=0)
    assert Traffic("", ((*single, alone),)).working_set_tokens() == 16


def test_scaled_shape_has_fewer_tokens_and_the_same_turns():
    whole = draw_traffic("agents", Shape(), clients=8, rounds=2, seed=0)
    small = draw_traffic("agents", Shape().scaled(0.1), clients=8, rounds=2, seed=0)
    assert [len(one.turns) for one in whole.sessions] == [len(one.turns) for one in small.sessions]
    assert small.prompt_tokens / whole.prompt_tokens == pytest.approx(0.1, rel=0.02)


def test_percentiles_of_a_range_limit_its_samples():
    pauses = LogNormal.between(0.2, 60.0)
    assert pauses.median == pytest.approx(3.464, rel=1e-3)
    assert (pauses.low, pauses.high) == (0.2, 60.0)
