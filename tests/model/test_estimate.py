"""The memory of a model is computed before its weights are read, and equals that of the loaded model."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from trioserve.contracts.errors import StartupError
from trioserve.model.drafts.checkpoints import DraftSource, draft_source
from trioserve.model.estimate import PROGRAM_BYTES, estimate_checkpoint, estimate_model
from trioserve.model.loading.checkpoint import Checkpoint, open_checkpoint
from trioserve.model.loading.default_model import find_default_model
from trioserve.model.loading.safetensors import UnfetchedCheckpoint
from trioserve.model.runner import ModelRunner
from trioserve.model.settings import ModelSettings
from trioserve_kernels.native import NoNativeKernels, load_library
from trioserve_kernels.structs import WeightFormat


@pytest.mark.parametrize("format", [format for format in WeightFormat if format != WeightFormat.DENSE])
def test_bytes_of_each_weight_format_equal_those_of_the_kernels(format: WeightFormat) -> None:
    try:
        library = load_library()
    except NoNativeKernels as error:
        pytest.skip(str(error))
    assert format.value_bytes * 1024 * 512 == library.quantized_bytes(1024, 512, format)


@pytest.mark.parametrize("family", ["llama", "mixtral", "moonlight", "bamba"])
def test_estimated_kv_cache_equals_that_of_the_loaded_model(
    family: str, tiny_checkpoint: Callable[..., Path], cpu_kernels: str
) -> None:
    path = tiny_checkpoint(family)
    settings = ModelSettings(device="cpu", cpu_kernels=cpu_kernels, kv_cache_bytes=2**22)  # type: ignore[arg-type]
    estimate = estimate_model(path, settings)
    runner = ModelRunner.load(open_checkpoint(path), settings)
    try:
        assert estimate.kv_tokens == runner.block_count * runner.block_size
        states = (runner.state_slot_count + runner.snapshot_slot_count) * runner.config.state_bytes
        assert estimate.kv_bytes == runner.kv_cache_bytes + states
        assert estimate.dtype == runner.dtype
        if cpu_kernels == "torch":
            assert (estimate.path, estimate.why_slower) == ("torch", "cpu_kernels is torch")
    finally:
        runner.close()


@pytest.mark.parametrize(("kind", "family"), [("model", "llama"), ("eagle", "smollm3"), ("mtp", "deepseek-v3")])
def test_estimate_includes_the_draft_model(
    kind: str,
    family: str,
    tiny_checkpoint: Callable[..., Path],
    tiny_eagle: ModuleType,
    tiny_mtp: ModuleType,
    tmp_path: Path,
) -> None:
    path, draft_path = tiny_checkpoint(family), None
    if kind == "mtp":
        path = tiny_mtp.write_mtp(path, tmp_path)
    else:
        draft_path = tiny_checkpoint("llama") if kind == "model" else tiny_eagle.write_eagle(tmp_path / "head")
    settings = ModelSettings(device="cpu", cpu_kernels="torch", kv_cache_bytes=2**22)

    def open_draft(target: Checkpoint) -> DraftSource:
        return draft_source("small", draft_path, target, settings, 4)

    plain, estimate = estimate_model(path, settings), estimate_model(path, settings, open_draft)
    checkpoint = open_checkpoint(path, uses_further_layers=True)
    runner = ModelRunner.load(checkpoint, settings, draft=open_draft(checkpoint))
    try:
        assert estimate.kv_tokens == runner.block_count * runner.block_size < plain.kv_tokens
        assert estimate.kv_bytes == runner.kv_cache_bytes <= 2**22
        assert estimate.fixed_bytes - plain.fixed_bytes == estimate.draft_bytes > 0
    finally:
        runner.close()
    if kind == "model":
        draft = estimate_model(tiny_checkpoint("llama"), settings)
        assert estimate.draft_bytes == draft.fixed_bytes - PROGRAM_BYTES
        assert estimate.kv_token_bytes == plain.kv_token_bytes + draft.kv_token_bytes


@pytest.mark.parametrize("quantization", ["none", "file", "int8", "int4"])
def test_estimated_weights_equal_those_of_the_kernels(quantization: str) -> None:
    """The kernels pad matrices, so they take at most 1 % more."""
    from trioserve.model.native.packed_weights import PackedWeights, packed_bytes

    try:
        library = load_library()
    except NoNativeKernels as error:
        pytest.skip(str(error))
    path = find_default_model("smollm2")
    if path is None:
        pytest.skip("the bundled model is not on this machine")
    checkpoint = open_checkpoint(path)
    types = {tensor.name: tensor.block_type for tensor in checkpoint.tensors() if tensor.block_type is not None}
    packed = PackedWeights(checkpoint.config, library, "bfloat16", quantization, types)  # type: ignore[arg-type]
    byte_count = packed.byte_count
    packed.close()
    expected = packed_bytes(checkpoint.config, "bfloat16", quantization, types)  # type: ignore[arg-type]
    assert expected <= byte_count < 1.01 * expected
    settings = ModelSettings(device="cpu", quantization=quantization)  # type: ignore[arg-type]
    vectors = sum(4 * math.prod(tensor.shape) for tensor in checkpoint.tensors() if len(tensor.shape) == 1)
    assert estimate_model(path, settings).weight_bytes == expected + vectors


def test_estimate_counts_an_encoder_in_float32(tiny_encoders: ModuleType, tmp_path: Path) -> None:
    tiny_encoders.write_encoder(tmp_path, "BertModel")
    [file] = tmp_path.glob("*.safetensors")
    estimate = estimate_model(tmp_path, ModelSettings(device="cpu"))
    assert (estimate.family, estimate.dtype, estimate.kv_bytes) == ("bert", "float32", 0)
    assert 0.5 * file.stat().st_size < estimate.weight_bytes <= file.stat().st_size


def test_estimate_refuses_settings_that_the_model_cannot_run_with(tiny_checkpoint: Callable[..., Path]) -> None:
    path = tiny_checkpoint("moonlight")
    with pytest.raises(StartupError, match="keeps latents"):
        estimate_model(path, ModelSettings(device="cpu", kv_cache_dtype="int8"))
    with pytest.raises(StartupError, match="no weights that can be kept quantized"):
        estimate_model(path, ModelSettings(device="cpu", quantization="file"))


@pytest.mark.parametrize(
    "variant", ["awq-64", "gptq-4", "gptq-4-order", "gptq-8", "packed-4", "int8", "float8-channel", "fp8-block"]
)
def test_estimate_from_the_config_alone_equals_that_of_the_whole_checkpoint(
    variant: str, tiny_checkpoint: Callable[..., Path], tiny_quantized: ModuleType, tmp_path: Path
) -> None:
    tiny_quantized.write_quantized(tiny_checkpoint("llama", dtype="bfloat16"), tmp_path, variant)
    settings = ModelSettings(device="cpu", kv_cache_bytes=2**22)
    whole, unfetched = open_checkpoint(tmp_path), UnfetchedCheckpoint(tmp_path)
    assert estimate_checkpoint(unfetched, settings) == estimate_checkpoint(whole, settings)


@pytest.mark.parametrize("kind", ["gemma3n", "moonlight", "bamba", "lfm2", "mixtral", "llama4"])
def test_config_alone_names_the_tensors_of_a_family(kind: str, tiny_checkpoint: Callable[..., Path]) -> None:
    path = tiny_checkpoint(kind)
    whole, unfetched = open_checkpoint(path), UnfetchedCheckpoint(path)
    assert {tensor.name: tensor.shape for tensor in unfetched.tensors()} == {
        tensor.name: tensor.shape for tensor in whole.tensors()
    }
