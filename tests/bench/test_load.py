"""Tests that equal seeds give equal requests, with the requested lengths, arrivals and leaving clients."""

from __future__ import annotations

import itertools
import json
import statistics

import pytest

from trioserve.bench.load import WORDS, Load


def planned(settings, prompt_mode="ids"):
    return list(Load(settings, model="m", prompt_mode=prompt_mode).requests())


def prompts(settings, prompt_mode="ids"):
    return [json.loads(one.body)["prompt"] for one in planned(settings, prompt_mode)]


def test_seed_decides_the_requests_of_a_load(bench_settings):
    settings = bench_settings(rate_per_second=2.0, abort_fraction=0.5)
    assert planned(settings) == planned(settings)
    other = bench_settings(rate_per_second=2.0, abort_fraction=0.5, seed=1)
    assert [one.body for one in planned(settings)] != [one.body for one in planned(other)]
    assert [one.arrival_seconds for one in planned(settings)] != [one.arrival_seconds for one in planned(other)]


def test_longer_load_begins_with_the_requests_of_a_shorter_load(bench_settings):
    short, long = planned(bench_settings(requests=3)), planned(bench_settings(requests=9))
    assert [one.body for one in long[:3]] == [one.body for one in short]


def test_prompts_share_only_the_prefix(bench_settings):
    made = prompts(bench_settings(prompt_tokens=40, prefix_tokens=16, requests=5))
    assert {len(prompt) for prompt in made} == {40}
    assert len({tuple(prompt[:16]) for prompt in made}) == 1
    assert len({prompt[16] for prompt in made}) == 5


def test_warm_up_prompts_share_only_the_prefix_with_measured_prompts(bench_settings):
    settings = bench_settings(prompt_tokens=20, prefix_tokens=8, warmup_requests=3)
    load = Load(settings, model="m", prompt_mode="ids")
    warm = [json.loads(one.body)["prompt"] for one in load.warmups()]
    assert len(warm) == 3
    measured = prompts(settings)
    assert {tuple(prompt[:8]) for prompt in warm} == {tuple(prompt[:8]) for prompt in measured}
    assert not {tuple(prompt[8:]) for prompt in warm} & {tuple(prompt[8:]) for prompt in measured}


@pytest.mark.parametrize("vocab_size, low", [(32_000, 512), (600, 300), (2, 1)])
def test_token_ids_are_in_the_vocabulary_but_not_among_its_special_tokens(bench_settings, vocab_size, low):
    for prompt in prompts(bench_settings(vocab_size=vocab_size, prompt_tokens=400)):
        assert all(low <= token < vocab_size for token in prompt)


def test_text_prompts_have_one_word_per_token(bench_settings):
    made = prompts(bench_settings(prompt_tokens=30, prefix_tokens=10), "text")
    assert {len(prompt.split(" ")) for prompt in made} == {30}
    assert {word for prompt in made for word in prompt.split(" ")} <= set(WORDS)
    assert len({tuple(prompt.split(" ")[:10]) for prompt in made}) == 1


def test_chat_request_has_one_user_message(bench_settings):
    body = json.loads(planned(bench_settings(endpoint="chat"), "text")[0].body)
    assert [message["role"] for message in body["messages"]] == ["user"]
    assert "prompt" not in body


def test_body_requests_a_stream_with_usage_and_has_the_settings(bench_settings):
    body = json.loads(planned(bench_settings(output_tokens=7, temperature=0.5))[0].body)
    del body["prompt"]
    assert body == {
        "model": "m",
        "max_tokens": 7,
        "temperature": 0.5,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert "ignore_eos" not in json.loads(planned(bench_settings(ignore_eos=False))[0].body)


def test_closed_loop_has_no_arrivals(bench_settings):
    assert {one.arrival_seconds for one in planned(bench_settings())} == {None}


def test_open_loop_arrivals_are_poisson_with_the_rate(bench_settings):
    arrivals = [one.arrival_seconds for one in planned(bench_settings(requests=4000, rate_per_second=50.0))]
    assert arrivals[0] == 0.0
    gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals)]
    # For exponential gaps, mean and standard deviation are both 1 / rate. 4000 samples are within 5 % of each.
    assert statistics.mean(gaps) == pytest.approx(0.02, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.02, rel=0.05)


def test_exact_share_of_clients_leaves(bench_settings):
    made = planned(bench_settings(requests=40, abort_fraction=0.25, abort_after_tokens=2))
    assert [one.abort_after_tokens for one in made].count(2) == 10
    assert [one.abort_after_tokens for one in made].count(None) == 30
