"""Tests of 4-bit and FP8 weights that torch keeps. 4-bit weights are kept if the kernels can multiply with them, as
Triton's kernels on a GPU can.

In these tests, plain kernels replace Triton's kernels. With 4 bits, results equal those of the dequantized weights in
every bit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import torch

from trioserve.contracts.errors import StartupError
from trioserve.contracts.sampling import SamplingParams
from trioserve.model.runner import ModelRunner
from trioserve.model.settings import ModelSettings
from trioserve.model.torch_step import step_model as torch_step_model
from trioserve_kernels import reference_fused
from trioserve_kernels.fp8 import FP8_LARGEST, fp8_linear, fp8_weight_of_blocks, join_fp8, why_not_fp8

PROMPT = [(7 * index) % 300 + 5 for index in range(24)]
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
    """Function load(kind, variant, quantization, dtype="bfloat16") that returns a runner with reference
    kernels in place of Triton's kernels.
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


@pytest.fixture
def load_fp8(load: Callable[..., ModelRunner], monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModelRunner]:
    """Function load_fp8(kind, variant) that returns a runner with quantization "file", as on a GPU."""
    settle = torch_step_model._kept_types

    def as_on_gpu(settings: ModelSettings, *arguments: Any) -> dict[str, str]:
        return settle(msgspec.structs.replace(settings, device="cuda", quantization="file"), *arguments)

    def loaded(kind: str, variant: str) -> ModelRunner:
        with monkeypatch.context() as changed:
            changed.setattr(torch_step_model, "_kept_types", as_on_gpu)
            return load(kind, variant, "auto")

    return loaded


@pytest.mark.parametrize("variant", ("float8-tensor", "float8-channel", "fbgemm"))
def test_fp8_weights_give_logprobs_near_those_of_dequantized_weights(
    variant: str, load: Callable[..., ModelRunner], load_fp8: Callable[..., ModelRunner], step_driver: Any
) -> None:
    def logprobs(runner: ModelRunner) -> torch.Tensor:
        driver = step_driver.StepDriver(runner)
        driver.add("a", PROMPT, SamplingParams(temperature=0.0, prompt_logprobs=0))
        entries = driver.step({"a": len(PROMPT)}).prompt_logprobs["a"]
        return torch.tensor([entry.logprob for entry in entries])

    kept, dense = load_fp8("llama-wide", variant), load("llama-wide", variant, "none")
    assert "weights kept as file" in kept.computed_by
    assert kept.step_weight_bytes < 0.7 * dense.step_weight_bytes
    got, wanted = logprobs(kept), logprobs(dense)
    # Inputs are rounded to 3 bits of mantissa, in a model of random weights whose logits have a deviation of 2.
    assert 0 < (got - wanted).abs().mean() < 0.3


def test_fp8_weights_with_a_scale_for_each_block_are_dequantized(load_fp8: Callable[..., ModelRunner]) -> None:
    with pytest.raises(StartupError, match="none in FP8 with a scale for each matrix or row"):
        load_fp8("llama-wide", "fp8-block")


@pytest.mark.parametrize(
    "dtype, options, why",
    (
        ("float16", {}, "dtype is float16"),
        ("bfloat16", {"batch_invariant": True}, "batch_invariant is set"),
        ("bfloat16", {}, "compute capability 8.6"),
    ),
)
def test_fp8_weights_that_cannot_be_multiplied_are_refused(
    dtype: Any, options: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    settings = ModelSettings(device="cuda", gpu_kernels="triton", quantization="file", **options)
    types = {"layers.0.q_proj.weight": "F8_E4M3"}
    with pytest.raises(StartupError, match=f"{why}.*use quantization none"):
        torch_step_model._kept_types(settings, dtype, reference_fused, types, torch.device("cuda"))
    experts = {"layers.0.experts.1.up_proj.weight": "F8_E4M3"}
    with pytest.raises(StartupError, match="no weights"):
        torch_step_model._kept_types(settings, dtype, reference_fused, experts, torch.device("cuda"))


def test_fp8_product_equals_that_of_the_rounded_numbers() -> None:
    """Use rows of very different sizes and a row of zeros. Rows with infinity or NaN must not change other rows."""
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(6, 64, generator=generator) * torch.tensor([1e-6, 1.0, 1e4, 0.0, 1.0, 1.0])[:, None]
    values = values.to(torch.bfloat16)
    values[4, 3], values[5, 7] = float("inf"), float("nan")
    rows = torch.randn(48, 64, generator=generator)
    scales = rows.abs().amax(-1) / FP8_LARGEST
    codes = (rows / scales[:, None]).to(torch.float8_e4m3fn)
    blocks = torch.cat((scales[:, None].view(torch.uint8), codes.view(torch.uint8)), -1)
    weight = join_fp8([fp8_weight_of_blocks(blocks[:16]), fp8_weight_of_blocks(blocks[16:])])
    torch.testing.assert_close(weight.numbers(torch.float32), rows, rtol=0.07, atol=0.02)
    bias = torch.randn(48, generator=generator).to(torch.bfloat16)
    got = fp8_linear(values, weight, bias)
    factors = values[:4].float().abs().amax(-1, keepdim=True).clamp(min=1e-30) * (1 / FP8_LARGEST)
    rounded = (values[:4].float() / factors).to(torch.float8_e4m3fn).float() * factors
    wanted = (rounded @ weight.numbers(torch.float32).t()).to(torch.bfloat16) + bias
    torch.testing.assert_close(got[:4], wanted, rtol=0.02, atol=0.02)
    torch.testing.assert_close(got[3], bias)
    assert not got[4:].isfinite().any()


def test_fp8_is_refused_if_torch_multiplies_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not_fp8(torch.device("cpu")) is None
    monkeypatch.setattr(torch, "_scaled_mm", lambda codes, weight, **_: torch.ones(len(codes), weight.shape[1]))
    assert why_not_fp8(torch.device("cpu")) == "torch's FP8 product gives a wrong result"

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no kernel\nmore lines")

    monkeypatch.setattr(torch, "_scaled_mm", fails)
    assert why_not_fp8(torch.device("cpu")) == "torch's FP8 product fails: no kernel"
