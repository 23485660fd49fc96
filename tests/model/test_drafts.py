"""Tests that draft tokens, right or wrong, do not change the output of the target model.

In float32, a step with draft tokens differs from decoding only in the order of sums. That is too little to change a
token here.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from trioserve.contracts.sampling import SamplingParams
from trioserve.model.step_model import Samples, sampled_rows
from trioserve.model.torch_step import step_model as torch_step_model
from trioserve.model.torch_step.sampler import sample

TOKENS = 24
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "sampled": SamplingParams(temperature=0.9),
    "filtered": SamplingParams(temperature=1.2, top_k=20, top_p=0.8, min_p=0.01),
    "penalties": SamplingParams(temperature=0.7, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4),
    "bias": SamplingParams(temperature=0.0, logit_bias={7: 3.0, 9: -4.0}, logprobs=3),
    "min_tokens": SamplingParams(temperature=0.8, min_tokens=12),
    "logprobs": SamplingParams(temperature=0.8, logprobs=2),
}
STOPS = tuple(range(0, 320, 3))  # Every third token. min_tokens forbids these tokens at first.


def prompt_of(length: int, seed: int) -> list[int]:
    return torch.randint(5, 320, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def add_all(driver: Any) -> None:
    for number, (name, sampling) in enumerate(SAMPLINGS.items()):
        driver.add(name, prompt_of(5 + 7 * number, number), sampling, seed=number, stop_token_ids=STOPS)


def one_at_a_time(step_driver: ModuleType, runner: Any) -> tuple[dict[str, list[int]], dict[str, list[Any]]]:
    """Return tokens and log-probabilities of all requests, decoded together without draft tokens."""
    driver = step_driver.StepDriver(runner)
    add_all(driver)
    logprobs: dict[str, list[Any]] = {name: [] for name in SAMPLINGS}
    for _ in range(TOKENS + 8):
        result = driver.step({name: driver.left(name) for name in SAMPLINGS})
        assert not result.errors
        for name, entry in result.logprobs.items():
            logprobs[name].append(entry)
    return driver.tokens, logprobs


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3"])
def test_output_does_not_depend_on_draft_tokens(
    kind: str, cpu_kernels: str, tiny_checkpoint: Callable[..., Path], step_driver: ModuleType
) -> None:
    """Mix right, wrong and partly right drafts of all lengths with decodes and a prompt in the same step."""
    runner = step_driver.load_runner(tiny_checkpoint(kind), cpu_kernels=cpu_kernels)
    expected, expected_logprobs = one_at_a_time(step_driver, runner)
    rng = random.Random(kind)
    driver = step_driver.StepDriver(runner, seed=1)
    add_all(driver)
    logprobs: dict[str, list[Any]] = {name: [] for name in SAMPLINGS}
    driver.step({name: driver.left(name) for name in SAMPLINGS})
    for name, sampling in SAMPLINGS.items():
        if sampling.logprobs is not None:
            logprobs[name] = expected_logprobs[name][:1]
    accepted_count = 0
    for round_number in range(TOKENS):
        drafts = {}
        for name in SAMPLINGS:
            truth = expected[name][len(driver.tokens[name]) :][: rng.choice((0, 1, 2, 5))]
            right = rng.choice((len(truth), rng.randint(0, len(truth))))
            drafts[name] = [token if place < right else rng.randrange(320) for place, token in enumerate(truth)]
        counts = dict.fromkeys(SAMPLINGS, 1)
        before = {name: len(driver.tokens[name]) for name in SAMPLINGS}
        name = f"other{round_number}"
        driver.add(name, prompt_of(9, round_number))
        result = driver.step({**counts, name: 9}, drafts)
        assert not result.errors
        for name, count in before.items():
            new_count = len(driver.tokens[name]) - count
            accepted_count += new_count - 1
            if name in result.logprobs:
                new = [result.logprobs[name], *result.draft_logprobs.get(name, ())]
                logprobs[name] += new[:new_count]
    assert accepted_count > TOKENS
    for name in SAMPLINGS:
        count = min(len(expected[name]), len(driver.tokens[name]))
        assert driver.tokens[name][:count] == expected[name][:count], name
        for mine, other in zip(logprobs[name], expected_logprobs[name], strict=False):
            assert mine.token_id == other.token_id
            assert mine.logprob == pytest.approx(other.logprob, abs=1e-3)
            assert [token for token, _ in mine.top] == [token for token, _ in other.top]


def test_sampling_error_after_a_draft_token_ends_the_run_of_accepted_tokens(
    tiny_checkpoint: Callable[..., Path], step_driver: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request fails only if the error recurs for its next token. The draft token before it may have been wrong."""

    def sample_all_but_two(*arguments: Any) -> Samples:
        samples = sample(*arguments)
        for row in bad_rows:
            samples.token_ids[row] = None
            samples.errors[row] = "nothing"
            samples.logprobs.pop(row, None)
        return samples

    bad_rows: tuple[int, ...] = ()
    monkeypatch.setattr(torch_step_model, "sample", sample_all_but_two)
    runner = step_driver.load_runner(tiny_checkpoint("llama"), cpu_kernels="torch")
    driver = step_driver.StepDriver(runner)
    for name, sampling in (("a", SAMPLINGS["greedy"]), ("b", SAMPLINGS["logprobs"])):
        driver.add(name, prompt_of(6, 1), sampling)
    driver.step({"a": 6, "b": 6})
    # Sampling fails for request a after its second draft token, and for request b after its first draft token.
    bad_rows = (2, 5)
    result = driver.step({"a": 1, "b": 1}, {"a": (5, 6, 7), "b": (5, 6, 7)})
    assert not result.errors
    assert None not in result.token_ids
    assert [len(result.draft_token_ids[name]) for name in "ab"] == [1, 0]
    assert result.draft_logprobs == {"b": ()}
    bad_rows = (0,)
    assert set(driver.step({"a": 1, "b": 1}, {"a": (5,)}).errors) == {"a"}


def test_each_draft_token_is_sampled_with_its_own_position_and_history(
    tiny_checkpoint: Callable[..., Path], step_driver: ModuleType
) -> None:
    driver = step_driver.StepDriver(step_driver.load_runner(tiny_checkpoint("llama")))
    driver.add("a", prompt_of(6, 1))
    driver.add("b", prompt_of(4, 2))
    driver.step({"a": 6, "b": 2})
    plain, prompt, drafted = driver.chunk("b", 1), driver.chunk("b", 2), driver.chunk("a", 1, (5, 6))
    rows = sampled_rows([plain, drafted, prompt])
    assert rows[0] is drafted
    assert rows[-1] is prompt
    assert [row.start + row.count for row in rows] == [7, 8, 9, 4]
    assert [list(row.tokens[: row.start + row.count])[6:] for row in rows[:3]] == [
        driver.tokens["a"][6:],
        [*driver.tokens["a"][6:], 5],
        [*driver.tokens["a"][6:], 5, 6],
    ]
