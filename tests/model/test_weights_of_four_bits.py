"""Tests of 4-bit weights that torch keeps if its kernels can multiply with them, as Triton's kernels on a GPU can.

In these tests, plain kernels replace Triton's kernels. Results equal those of the dequantized weights in every bit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from trioserve.contracts.errors import StartupError
from trioserve.model import torch_step_model
from trioserve.model.runner import ModelRunner
from trioserve.model.settings import ModelSettings
from trioserve_kernels import reference_fused

KEPT = ("awq-128", "gptq-4", "gptq-4-asym", "gptq-4-v2", "packed-4", "packed-4-half", "packed-4-asym")
NOT_KEPT = ("gptq-4-order", "gptq-8", "packed-8", "float8-tensor")


@pytest.fixture
def load(
    tiny_quantized: ModuleType,
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    step_driver: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> Any:
    """Function load(kind, variant, quantization, dtype="bfloat16") that returns a runner with the kernels that act as
    Triton's.
    """
    monkeypatch.setattr(torch_step_model, "pick_kernels", lambda *_, **__: reference_fused)
    made: list[ModelRunner] = []

    def runner(kind: str, variant: str, quantization: str, dtype: str = "bfloat16") -> ModelRunner:
        directory = tmp_path / f"{kind}-{variant}"
        if not directory.exists():
            tiny_quantized.write_quantized(tiny_checkpoint(kind), directory, variant)
        made.append(step_driver.load_runner(directory, dtype=dtype, cpu_kernels="torch", quantization=quantization))
        return made[-1]

    yield runner
    for one in made:
        one.close()


def tokens_of(step_driver: ModuleType, runner: ModelRunner) -> list[list[int]]:
    driver = step_driver.StepDriver(runner)
    for name, length in (("a", 20), ("b", 3)):
        driver.add(name, [(7 * index + length) % 300 + 5 for index in range(length)])
    driver.generate(["a", "b"], 12)
    return [driver.tokens[name] for name in "ab"]


@pytest.mark.parametrize("variant", (*KEPT, *NOT_KEPT))
def test_four_bit_weights_give_the_tokens_of_dequantized_weights(
    variant: str, load: Callable[..., ModelRunner], step_driver: Any
) -> None:
    kept, dense = (load("llama-wide", variant, quantization) for quantization in ("auto", "none"))
    assert tokens_of(step_driver, kept) == tokens_of(step_driver, dense)
    assert ("weights kept as file" in kept.computed_by) == (variant in KEPT)
    assert "weights kept" not in dense.computed_by
    if variant in KEPT:
        assert kept.arithmetic != dense.arithmetic
        assert kept.step_weight_bytes < 0.6 * dense.step_weight_bytes
    else:
        assert kept.step_weight_bytes == dense.step_weight_bytes


def test_experts_stay_in_four_bits(load: Callable[..., ModelRunner], step_driver: Any) -> None:
    kept, dense = (load("qwen3-moe", "packed-4-asym", quantization) for quantization in ("auto", "none"))
    assert tokens_of(step_driver, kept) == tokens_of(step_driver, dense)
    assert kept.step_weight_bytes < 0.75 * dense.step_weight_bytes


def test_four_bit_weights_are_dequantized_for_float32(load: Callable[..., ModelRunner]) -> None:
    assert "weights kept" not in load("llama-wide", "gptq-4", "auto", dtype="float32").computed_by


def test_unsupported_quantization_on_a_gpu_is_refused(load: Callable[..., ModelRunner]) -> None:
    runner = load("llama-wide", "gptq-8", "none")
    settings = ModelSettings(device="cuda", gpu_kernels="triton", quantization="file")
    with pytest.raises(StartupError, match="no weights of 4 bits that can be kept on a GPU"):
        torch_step_model.TorchStepModel(
            runner.config, settings, dtype="bfloat16", device="cpu", kernels=reference_fused, block_types={"a": "Q8_0"}
        )
    with pytest.raises(StartupError, match="use gpu_kernels triton, or quantization none"):
        ModelSettings(device="cuda", gpu_kernels="torch", quantization="file")
    with pytest.raises(StartupError, match="only the native kernels compute"):
        ModelSettings(device="cuda", gpu_kernels="triton", quantization="int4")
