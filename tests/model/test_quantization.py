"""Tests that models with quantized weights are close to torch in float32 from the same file, and that refusals come
before any weight is read.

The blocks of a file are kept exactly. Differences come from activations and KV in bfloat16, and from rounding of inputs
to 8 bits: at most 0.4 % of the largest of 32 numbers. For tiny random models, whose logprobs spread over several units,
this is about twice the error of bfloat16 alone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from trioserve.config import make_config
from trioserve.contracts.errors import StartupError
from trioserve.contracts.sampling import SamplingParams
from trioserve.model.device import step_weight_bytes
from trioserve.model.loading.checkpoint import open_checkpoint
from trioserve.model.native.packed_weights import settle_quantization, weight_format
from trioserve.model.runner import ModelRunner
from trioserve.model.settings import ModelSettings
from trioserve_kernels.native import NoNativeKernels, load_library
from trioserve_kernels.structs import BLOCK_FORMATS, GGML_FORMATS, WeightFormat

BLOCK_TYPES = tuple(GGML_FORMATS)


@pytest.fixture(scope="module")
def library() -> None:
    try:
        load_library()
    except NoNativeKernels as error:
        pytest.skip(f"no native kernels: {error}")


def prompt_of(length: int, seed: int) -> list[int]:
    return torch.randint(5, 320, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def logprobs_of(step_driver: ModuleType, runner: ModelRunner, counts: list[int]) -> torch.Tensor:
    """Return logprobs of each prompt token after the first, in chunks of given lengths."""
    driver = step_driver.StepDriver(runner)
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=0)
    driver.add("p", prompt_of(sum(counts), 3), sampling)
    entries = [entry for count in counts for entry in driver.step({"p": count}).prompt_logprobs["p"]]
    runner.close()
    return torch.tensor([entry.logprob for entry in entries])


def error_against(exact: torch.Tensor, given: torch.Tensor) -> float:
    return float((given - exact).square().mean().sqrt())


# --- whole models -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("block_type", BLOCK_TYPES)
def test_kept_quantized_blocks_give_logprobs_close_to_float32(
    block_type: str, tiny_gguf: Callable[..., Path], step_driver: ModuleType
) -> None:
    path = tiny_gguf("llama-wide", block_type)
    counts = [70, 1, 1, 18]
    exact = logprobs_of(step_driver, step_driver.load_runner(path, cpu_kernels="torch"), counts)
    errors = {}
    for quantization in ("none", "file"):
        runner = step_driver.load_runner(path, dtype="bfloat16", cpu_kernels="native", quantization=quantization)
        errors[quantization] = error_against(exact, logprobs_of(step_driver, runner, counts))
    assert errors["file"] < 3 * errors["none"]
    assert errors["file"] < 0.1


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("kind", ("llama", "llama-tied", "llama-biased", "mistral", "qwen2", "qwen3", "gemma3n"))
@pytest.mark.parametrize("quantization, most", (("int8", 0.1), ("int4", 1.0)))
def test_plain_checkpoint_is_quantized_when_read(
    kind: str, quantization: str, most: float, tiny_checkpoint: Callable[..., Path], step_driver: ModuleType
) -> None:
    path = tiny_checkpoint(kind)
    counts = [40, 1, 9]
    exact = logprobs_of(step_driver, step_driver.load_runner(path, cpu_kernels="torch"), counts)
    runner = step_driver.load_runner(path, dtype="auto", quantization=quantization)
    assert runner.dtype == "bfloat16"
    error = error_against(exact, logprobs_of(step_driver, runner, counts))
    assert error < most
    assert error > 1e-4, "an error this small means that nothing was quantized"


@pytest.mark.usefixtures("library")
def test_tokens_do_not_depend_on_the_batch(tiny_gguf: Callable[..., Path], step_driver: ModuleType) -> None:
    """The bits of a product do not depend on the batch (with AMX, among batches of 5 rows and more), and contexts this
    short are not divided.
    """
    tokens = []
    for batch in (12, 6):
        runner = step_driver.load_runner(tiny_gguf("llama-wide", "Q4_K"), dtype="bfloat16", quantization="file")
        driver = step_driver.StepDriver(runner)
        names = [f"r{index}" for index in range(12)]
        for index, name in enumerate(names):
            driver.add(name, prompt_of(3 + index, index))
        for first in range(0, len(names), batch):
            driver.generate(names[first : first + batch], 12)
        tokens.append(driver.tokens)
        runner.close()
    assert tokens[0] == tokens[1]


@pytest.mark.usefixtures("library")
def test_file_with_mixed_quantization_types_is_close_to_float32(
    tmp_path: Path,
    tiny_checkpoints: ModuleType,
    tiny_checkpoint: Callable[..., Path],
    step_driver: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Store values and down projections in Q6_K, as llama.cpp's Q4_K_M does. Here gate and up differ, too."""
    add_tensor = tiny_checkpoints._add_tensor

    def mixing(writer: Any, name: str, values: np.ndarray, quant_type: str) -> None:
        other = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "ffn_up": "Q8_0", "attn_k": "F16"}
        add_tensor(writer, name, values, next((new for part, new in other.items() if part in name), quant_type))

    monkeypatch.setattr(tiny_checkpoints, "_add_tensor", mixing)
    path = tmp_path / "mixed.gguf"
    tiny_checkpoints.write_gguf(tiny_checkpoint("llama-wide"), path, quant_type="Q4_K")
    exact = logprobs_of(step_driver, step_driver.load_runner(path, cpu_kernels="torch"), [50])
    for quantization, most in (("file", 0.1), ("int8", 0.1), ("int4", 1.0)):
        runner = step_driver.load_runner(path, dtype="bfloat16", quantization=quantization)
        assert error_against(exact, logprobs_of(step_driver, runner, [50])) < most


@pytest.mark.usefixtures("library")
def test_step_weight_bytes_count_quantized_weights(tiny_gguf: Callable[..., Path], step_driver: ModuleType) -> None:
    path = tiny_gguf("llama-wide", "Q4_1")
    config = open_checkpoint(path).config
    in_bfloat16 = step_weight_bytes(config, "bfloat16")
    head = 2 * config.vocab_size * config.hidden_size / in_bfloat16
    in_four_bits = (1 - head) * 20 / 64 + head * 34 / 64
    for quantization, share in (("none", 1.0), ("int8", 34 / 64), ("file", 20 / 64), ("int4", in_four_bits)):
        runner = step_driver.load_runner(path, dtype="bfloat16", cpu_kernels="native", quantization=quantization)
        assert runner.step_weight_bytes == pytest.approx(share * in_bfloat16, rel=1e-9)
        runner.close()


# --- accepted and refused settings ------------------------------------------------------------------------------------


def test_quantized_blocks_with_few_enough_bits_are_kept() -> None:
    assert {name: weight_format("int4", "layers.0.q_proj.weight", name) for name in BLOCK_FORMATS} == {
        name: format if format.bits <= 4 else WeightFormat.Q4_MIN for name, (_, format) in BLOCK_FORMATS.items()
    }
    for quantization, tensor in (
        ("int8", "layers.0.q_proj.weight"),
        ("int4", "lm_head.weight"),
        ("int4", "embed.weight"),
    ):
        assert {name: weight_format(quantization, tensor, name) for name in BLOCK_FORMATS} == {
            name: WeightFormat.Q8 if format.bits <= 4 else format for name, (_, format) in BLOCK_FORMATS.items()
        }
    for name, (_, format) in BLOCK_FORMATS.items():
        assert weight_format("file", "embed.weight", name) == format
        assert weight_format("none", "embed.weight", name) == WeightFormat.DENSE
    assert weight_format("file", "embed.weight", None) == WeightFormat.DENSE


def test_auto_keeps_blocks_of_a_quantized_file_unless_dtype_is_float32() -> None:
    assert settle_quantization("auto", {"a": "Q4_K"}, dtype="bfloat16") == "file"
    assert settle_quantization("auto", {"a": "Q4_K"}, dtype="float32") == "none"
    assert settle_quantization("auto", {}, dtype="bfloat16") == "none"
    assert settle_quantization("none", {"a": "Q4_K"}, dtype="bfloat16") == "none"


def load(path: Path, **options: Any) -> ModelRunner:
    return ModelRunner.load(open_checkpoint(path), ModelSettings(**{"kv_cache_bytes": 2**20, **options}))


@pytest.mark.usefixtures("library")
def test_log_of_the_start_says_how_weights_are_kept(tiny_gguf: Callable[..., Path]) -> None:
    path = tiny_gguf("llama", "Q4_0")
    for options, said in (
        ({}, "weights kept as file"),
        ({"quantization": "int8"}, "weights kept as int8"),
        ({"quantization": "none"}, ""),
        ({"dtype": "float32"}, ""),
        ({"cpu_kernels": "torch"}, "plain torch"),
    ):
        runner = load(path, device="cpu", **options)
        assert said in runner.computed_by
        assert bool(said) or "weights kept" not in runner.computed_by
        runner.close()


@pytest.mark.parametrize(
    "options, words",
    (
        ({"dtype": "float32"}, "dtype is float32"),
        ({"dtype": "float16"}, "dtype is float16"),
        ({"device": "cuda", "gpu_kernels": "torch"}, "(device is cuda|gpu_kernels is torch)"),
        ({"cpu_kernels": "torch"}, "cpu_kernels is torch"),
    ),
)
@pytest.mark.parametrize("quantization", ("file", "int8", "int4"))
def test_contradicting_quantization_settings_are_refused(
    options: dict[str, Any], words: str, quantization: str
) -> None:
    with pytest.raises(StartupError, match=f"quantization is {quantization} and {words}.*or quantization none"):
        ModelSettings(quantization=quantization, **options)
    ModelSettings(quantization="none", **options)
    ModelSettings(quantization="auto", **options)


def test_unknown_quantization_is_refused() -> None:
    with pytest.raises(StartupError, match="quantization is 'fp8', allowed is one of auto, none, file, int8, int4"):
        ModelSettings(quantization="fp8")
    with pytest.raises(StartupError, match="quantization is 'fp8', allowed is one of auto, none, file, int8, int4"):
        make_config(quantization="fp8")


@pytest.mark.usefixtures("library")
def test_file_quantization_of_a_plain_checkpoint_is_refused(tiny_checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(
        StartupError,
        match=r"quantization is file, but .* can be kept quantized: use int8, int4 or none",
    ):
        load(tiny_checkpoint("llama"), device="cpu", quantization="file")


def test_quantized_weights_without_native_kernels_are_refused(
    tiny_gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIOSERVE_NATIVE", "0")
    path = tiny_gguf("llama", "Q4_0")
    with pytest.raises(StartupError, match=r"quantization is int8, but only the native kernels.*use quantization none"):
        load(path, device="cpu", quantization="int8")
    runner = load(path, device="cpu")
    assert runner.computed_by == "plain torch"
    runner.close()
