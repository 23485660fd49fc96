"""Tests of gpt-oss with experts in MXFP4, in the formats of its authors and of llama.cpp.

The tests compare numbers and blocks of the native kernels, and cover refusals.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from trioserve.contracts.errors import ModelLoadError
from trioserve.contracts.sampling import SamplingParams
from trioserve.model.loading.checkpoint import Checkpoint, open_checkpoint
from trioserve.model.torch_step import step_model as torch_step_model
from trioserve_kernels import reference_fused
from trioserve_kernels.native import NoNativeKernels, load_library

LOGPROB_TOLERANCE = 2e-4  # see test_parity.py
PROMPT = torch.randint(5, 320, (60,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module")
def written(tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint with quantized experts, and the same checkpoint dequantized by transformers."""
    from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

    plain = tiny_checkpoint("gpt-oss")
    quantized, dense = tmp_path_factory.mktemp("mxfp4"), tmp_path_factory.mktemp("dense")
    random = np.random.default_rng(5)
    stored: dict[str, torch.Tensor] = {}
    meant: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = meant[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        blocks = torch.from_numpy(random.integers(0, 256, (experts, outputs, inputs // 32, 16), dtype=np.uint8))
        scales = torch.from_numpy(random.integers(122, 126, (experts, outputs, inputs // 32), dtype=np.uint8))
        stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks, scales
        meant[name] = _convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
        assert meant[name].shape == tensor.shape
    for directory, tensors in ((quantized, stored), (dense, meant)):
        shutil.copytree(plain, directory, dirs_exist_ok=True)
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    left_out = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": left_out}
    (quantized / "config.json").write_text(json.dumps(config))
    return quantized, dense


def test_mxfp4_numbers_equal_those_of_the_format(
    written: tuple[Path, Path], tensors_of: Callable[[Checkpoint], dict[str, torch.Tensor]]
) -> None:
    found, expected = (tensors_of(open_checkpoint(path)) for path in written)
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_mxfp4_blocks_encode_equal_numbers_in_both_file_formats(
    written: tuple[Path, Path], tiny_checkpoints: ModuleType, tmp_path: Path
) -> None:
    quantized, dense = written
    tiny_checkpoints.write_family_gguf(dense, tmp_path / "model.gguf", expert_type="MXFP4")
    expected = {tensor.name: tensor.read("float32") for tensor in open_checkpoint(dense).tensors()}
    for path in (quantized, tmp_path / "model.gguf"):
        kept = 0
        for tensor in open_checkpoint(path).tensors():
            np.testing.assert_array_equal(tensor.read("float32"), expected[tensor.name])
            if tensor.read_blocks is None:
                continue
            assert tensor.block_type == "MXFP4"
            kept += 1
            numbers = gguf.quants.dequantize(tensor.read_blocks(), gguf.GGMLQuantizationType.MXFP4)
            np.testing.assert_array_equal(numbers, expected[tensor.name])
        assert kept == 4 * 6 * 3


def test_end_of_a_tool_call_ends_a_response_of_a_gguf_model(
    tiny_checkpoints: ModuleType, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    tiny_checkpoints.write_family_gguf(tiny_checkpoint("gpt-oss"), path, special_tokens=("<|return|>", "<|call|>"))
    assert open_checkpoint(path).config.eos_token_ids[-2:] == (318, 319)


def logprobs_of(step_driver: ModuleType, path: Path, **options: Any) -> torch.Tensor:
    runner = step_driver.load_runner(path, **options)
    driver = step_driver.StepDriver(runner)
    driver.add("p", PROMPT, SamplingParams(temperature=0.0, prompt_logprobs=0))
    entries = [*driver.step({"p": 40}).prompt_logprobs["p"], *driver.step({"p": 20}).prompt_logprobs["p"]]
    runner.close()
    return torch.tensor([entry.logprob for entry in entries])


def test_mxfp4_logprobs_equal_those_of_transformers(
    written: tuple[Path, Path], cpu_kernels: str, step_driver: ModuleType
) -> None:
    import transformers

    quantized, dense = written
    model = transformers.AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        wanted = model(torch.tensor([PROMPT]), use_cache=False).logits[0].log_softmax(-1)
    expected = wanted[torch.arange(59), PROMPT[1:]]
    found = logprobs_of(step_driver, quantized, cpu_kernels=cpu_kernels)
    torch.testing.assert_close(found, expected, atol=LOGPROB_TOLERANCE, rtol=0)


def test_native_kernels_keep_mxfp4_weights_in_4_bits(written: tuple[Path, Path], step_driver: ModuleType) -> None:
    """The weights are exact. Inputs of products are rounded to 8 bits."""
    try:
        load_library()
    except NoNativeKernels as error:
        pytest.skip(f"no native kernels: {error}")
    quantized, dense = written
    exact = logprobs_of(step_driver, quantized, cpu_kernels="torch")
    errors, read_bytes = {}, {}
    for path, quantization in ((quantized, "none"), (quantized, "auto"), (dense, "int8")):
        options = {"dtype": "bfloat16", "cpu_kernels": "native", "quantization": quantization}
        runner = step_driver.load_runner(path, **options)
        read_bytes[quantization] = runner.step_weight_bytes
        assert ("weights kept as file" in runner.computed_by) == (quantization == "auto")
        runner.close()
        errors[quantization] = float((logprobs_of(step_driver, path, **options) - exact).square().mean().sqrt())
    # The router's choice between nearly equal experts causes the largest errors, and most of them.
    assert errors["auto"] < 1.5 * errors["int8"] < 8 * errors["none"]
    experts = 4 * 3 * 3 * 64 * 96  # counts of experts that a token chooses
    assert read_bytes["none"] - read_bytes["auto"] == experts * 2 - experts * 4.5 / 8


def test_triton_path_keeps_mxfp4_weights_in_4_bits(
    written: tuple[Path, Path], step_driver: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain kernels replace Triton's kernels. Both compute with the exact values of the weights."""
    monkeypatch.setattr(torch_step_model, "pick_kernels", lambda *_, **__: reference_fused)
    found, read_bytes = {}, {}
    for quantization in ("none", "auto"):
        options = {"dtype": "bfloat16", "cpu_kernels": "torch", "quantization": quantization}
        runner = step_driver.load_runner(written[0], **options)
        read_bytes[quantization] = runner.step_weight_bytes
        assert ("weights kept as file" in runner.computed_by) == (quantization == "auto")
        runner.close()
        found[quantization] = logprobs_of(step_driver, written[0], **options)
    assert torch.equal(found["auto"], found["none"])
    experts = 4 * 3 * 3 * 64 * 96  # weights of the experts that a token chooses
    assert read_bytes["none"] - read_bytes["auto"] == experts * 2 - experts * 4.25 / 8


def test_row_with_mxfp4_experts_has_equal_bits_in_a_batch_and_alone(
    written: tuple[Path, Path], step_driver: ModuleType
) -> None:
    try:
        load_library()
    except NoNativeKernels as error:
        pytest.skip(f"no native kernels: {error}")
    options = {"dtype": "bfloat16", "cpu_kernels": "native", "quantization": "file", "batch_invariant": True}
    whole = logprobs_of(step_driver, written[0], **options)
    runner = step_driver.load_runner(written[0], **options)
    driver = step_driver.StepDriver(runner)
    driver.add("p", PROMPT, SamplingParams(temperature=0.0, prompt_logprobs=0))
    entries = [entry for _ in PROMPT for entry in driver.step({"p": 1}).prompt_logprobs.get("p", ())]
    runner.close()
    assert torch.equal(torch.tensor([entry.logprob for entry in entries]), whole)


FIRST = "model.layers.0.mlp.experts.down_proj"


@pytest.mark.parametrize(
    "change, said",
    (
        (lambda tensors: tensors.pop(f"{FIRST}_scales"), f"hold {FIRST}_blocks, but no {FIRST}_scales"),
        (lambda tensors: tensors.pop(f"{FIRST}_blocks"), f"{FIRST}_scales is stored as U8, and belongs to no matrix"),
        (
            lambda tensors: tensors.update({FIRST: torch.zeros(6, 96, 64)}),
            f"hold {FIRST} both plain and quantized",
        ),
        (
            lambda tensors: tensors.update({f"{FIRST}_scales": torch.zeros(6, 64, 2, dtype=torch.uint8)}),
            f"{FIRST}_scales has shape [6, 64, 2], but {FIRST}_blocks has [6, 64, 3, 16]",
        ),
        (
            lambda tensors: tensors.update({f"{FIRST}_scales": torch.zeros(6, 64, 3, dtype=torch.int8)}),
            f"{FIRST}_scales is stored as I8, but it must be U8",
        ),
        (
            lambda tensors: tensors.update({f"{FIRST}_blocks": torch.zeros(6, 64, 48, dtype=torch.uint8)}),
            f"{FIRST}_blocks has shape [6, 64, 48], but it must be experts, outputs, blocks of 32 inputs, and 16",
        ),
        (
            lambda tensors: tensors.update(
                {
                    f"{FIRST}_blocks": torch.zeros(6, 96, 2, 16, dtype=torch.uint8),
                    f"{FIRST}_scales": torch.zeros(6, 96, 2, dtype=torch.uint8),
                }
            ),
            f"{FIRST} has shape [6, 64, 96], but the config asks for",
        ),
    ),
)
def test_mxfp4_tensors_that_do_not_match_each_other_are_refused(
    change: Callable[[dict[str, torch.Tensor]], object], said: str, written: tuple[Path, Path], tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(written[0], tmp_path / "model"))
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ModelLoadError) as caught:
        open_checkpoint(directory)
    assert said in str(caught.value)
