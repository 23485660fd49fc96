"""The runner with these kernels answers as it does with the plain ones: chunks and decodes in one step, windows,
heads that are normed, prompts in pieces and longer than a tile, guesses behind decodes, a cache full of NaN."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from trioserve.contracts.sampling import SamplingParams
from trioserve.model import torch_step_model
from trioserve_kernels import reference, triton

PROMPTS = {"a": 36, "b": 2, "c": 9, "d": 8}


def answers(kernels: Any, path: Path, device: str, step_driver: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Tokens, and the logprobs of prompts and answers."""
    monkeypatch.setattr(torch_step_model, "pick_kernels", lambda device_type: kernels)
    driver = step_driver.StepDriver(step_driver.load_runner(path, device=device, cpu_kernels="torch"))
    for index, (name, length) in enumerate(PROMPTS.items()):
        sampling = SamplingParams(temperature=index % 2, top_p=0.9, logprobs=0, prompt_logprobs=0)
        driver.add(name, [(7 * length + 3 * position) % 320 for position in range(length)], sampling, seed=index)
    entries = []
    for counts in ({"a": 34, "b": 2}, {"a": 2, "b": 1, "c": 5, "d": 8}, {"a": 1, "b": 1, "c": 4, "d": 1}):
        result = driver.step(counts)
        assert not result.errors
        for found in (result.logprobs, *result.prompt_logprobs.values()):
            entries.extend(found.values() if isinstance(found, dict) else found)
    result = driver.step(dict.fromkeys(PROMPTS, 1), {"a": (5, 6, 7), "c": (9,), "d": tuple(range(40, 60))})
    assert not result.errors
    for found in result.draft_logprobs.values():
        entries.extend(found)
    return {**driver.tokens, **result.draft_token_ids}, [entry.logprob for entry in entries]


@pytest.mark.parametrize("kind", ("llama", "qwen2-sliding", "qwen3"))
def test_a_model_answers_as_with_the_plain_kernels(
    kind: str,
    tiny_checkpoints: ModuleType,
    step_driver: ModuleType,
    device: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In float32, up to the order of sums."""
    tiny_checkpoints.write_checkpoint(tmp_path, kind, dtype="float32", sharded=False)
    tokens, logprobs = answers(triton, tmp_path, device, step_driver, monkeypatch)
    plain_tokens, plain_logprobs = answers(reference, tmp_path, "cpu", step_driver, monkeypatch)
    assert tokens == plain_tokens
    assert logprobs == pytest.approx(plain_logprobs, abs=2e-4)
