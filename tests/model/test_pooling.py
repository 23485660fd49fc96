"""Tests that vectors of decoder models equal vectors computed from transformers' hidden states, in any batch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from trioserve.contracts.pooling import Pooling, PoolingResult
from trioserve.model.loading.checkpoint import open_checkpoint
from trioserve.model.step_model import NOT_FINITE
from trioserve.model.step_rows import pooled_vector

TOLERANCE = 1e-4
LAST = Pooling(task="embed", method="last", normalize=True)
MEAN = Pooling(task="embed", method="mean", normalize=False, is_whole=True)
PROMPT = [(7 * place) % 300 + 5 for place in range(37)]


def hidden_states(path: Path, tokens: list[int]) -> np.ndarray:
    """Return hidden states after the last norm, [tokens, size]."""
    from transformers import AutoModel

    model: Any = AutoModel.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0].numpy()


def check_vector(found: PoolingResult, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found.values(), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_pooled_vectors_equal_hidden_states_of_transformers(
    kind: str, cpu_kernels: str, tiny_checkpoint: Callable[..., Path], step_driver: ModuleType
) -> None:
    path = tiny_checkpoint(kind)
    driver = step_driver.StepDriver(step_driver.load_runner(path, cpu_kernels=cpu_kernels))
    driver.add("last", PROMPT, pooling=LAST)
    driver.add("mean", PROMPT[:20], pooling=MEAN)
    driver.add("text", PROMPT[:9])
    first = driver.step({"text": 9, "last": 30})
    assert first.pooled == {}
    result = driver.step({"text": 1, "mean": 20, "last": 7})
    assert result.token_ids[1:] == (None, None)
    assert isinstance(result.token_ids[0], int), "a generating request must continue next to them"
    states = hidden_states(path, PROMPT)
    check_vector(result.pooled["last"], states[-1] / np.linalg.norm(states[-1]))
    check_vector(result.pooled["mean"], hidden_states(path, PROMPT[:20]).mean(axis=0))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "smollm3", "qwen3-moe"])
def test_model_saved_without_a_head_computes_vectors(
    kind: str, cpu_kernels: str, tiny_checkpoint: Callable[..., Path], step_driver: ModuleType, tmp_path: Path
) -> None:
    from transformers import AutoModel

    AutoModel.from_pretrained(tiny_checkpoint(kind), dtype=torch.float32).save_pretrained(tmp_path)
    named = json.loads((tmp_path / "config.json").read_text())["architectures"]
    assert named[0].endswith("Model")
    assert not open_checkpoint(tmp_path).continues_texts
    driver = step_driver.StepDriver(step_driver.load_runner(tmp_path, cpu_kernels=cpu_kernels))
    driver.add("last", PROMPT, pooling=LAST)
    driver.add("mean", PROMPT[:20], pooling=MEAN)
    driver.step({"last": 30})
    result = driver.step({"last": 7, "mean": 20})
    states = hidden_states(tmp_path, PROMPT)
    check_vector(result.pooled["last"], states[-1] / np.linalg.norm(states[-1]))
    check_vector(result.pooled["mean"], hidden_states(tmp_path, PROMPT[:20]).mean(axis=0))


def test_step_with_only_pooling_chunks_returns_vectors(
    cpu_kernels: str, tiny_checkpoint: Callable[..., Path], step_driver: ModuleType
) -> None:
    path = tiny_checkpoint("llama")
    driver = step_driver.StepDriver(step_driver.load_runner(path, cpu_kernels=cpu_kernels))
    driver.add("one", PROMPT[:1], pooling=LAST)
    driver.add("half", PROMPT, pooling=msgspec.structs.replace(LAST, dimensions=16))
    result = driver.step({"one": 1, "half": 37})
    state = hidden_states(path, PROMPT[:1])[0]
    check_vector(result.pooled["one"], state / np.linalg.norm(state))
    state = hidden_states(path, PROMPT)[-1, :16]  # The vector is truncated first, and then normalized.
    check_vector(result.pooled["half"], state / np.linalg.norm(state))


def test_vector_that_is_not_finite_fails_only_its_own_request(
    cpu_kernels: str, tiny_checkpoint: Callable[..., Path], step_driver: ModuleType
) -> None:
    runner = step_driver.load_runner(tiny_checkpoint("llama"), cpu_kernels=cpu_kernels)
    driver = step_driver.StepDriver(runner)
    driver.add("broken", PROMPT, pooling=LAST)
    driver.add("whole", PROMPT, pooling=LAST)
    driver.skip("broken", 10)  # The KV cache of a new pool contains NaN.
    result = driver.step({"broken": 27, "whole": 37})
    assert result.errors == {"broken": NOT_FINITE}
    assert list(result.pooled) == ["whole"]


def test_each_pooling_method_gives_its_defined_vector() -> None:
    rows = np.array([[3.0, 4.0, 0.0], [1.0, 0.0, 2.0]], dtype=np.float32)
    cls = Pooling(task="embed", method="cls", normalize=False)
    assert pooled_vector(rows, cls).values() == [3, 4, 0]
    assert pooled_vector(rows, msgspec.structs.replace(cls, method="mean")).values() == [2, 2, 1]
    assert pooled_vector(rows, msgspec.structs.replace(cls, normalize=True)).values() == pytest.approx([0.6, 0.8, 0])
    assert pooled_vector(rows * 0, msgspec.structs.replace(cls, normalize=True)).values() == [0, 0, 0]
    assert pooled_vector(rows * np.nan, cls) is None


def test_label_probabilities_equal_those_of_transformers(
    cpu_kernels: str, tiny_checkpoint: Callable[..., Path], step_driver: ModuleType
) -> None:
    from transformers import AutoModelForCausalLM

    path = tiny_checkpoint("llama")
    driver = step_driver.StepDriver(step_driver.load_runner(path, cpu_kernels=cpu_kernels))
    labels = Pooling(task="labels", method="last", normalize=False, label_token_ids=(7, 300, 8))
    driver.add("a", PROMPT, pooling=labels)
    driver.add("b", PROMPT[:9], pooling=msgspec.structs.replace(labels, label_token_ids=(5,)))
    driver.step({"a": 30})
    result = driver.step({"b": 9, "a": 7})
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    for name, prompt, ids in (("a", PROMPT, [7, 300, 8]), ("b", PROMPT[:9], [5])):
        with torch.no_grad():
            logprobs = model(torch.tensor([prompt]), use_cache=False).logits[0, -1].log_softmax(-1)
        check_vector(result.pooled[name], logprobs[ids].numpy())
