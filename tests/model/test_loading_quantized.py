"""Tests of quantized safetensors files: numbers of each format, blocks of the native kernels, and refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from trioserve.contracts.errors import ModelLoadError
from trioserve.contracts.sampling import SamplingParams
from trioserve.model.fingerprint import weights_name
from trioserve.model.loading.checkpoint import open_checkpoint
from trioserve.model.loading.names import TRANSFORMERS, outside_name
from trioserve.model.loading.stored_tensor import FP8_ROWS, StoredTensor
from trioserve.model.native.packed_weights import weight_format
from trioserve.model.torch_step.formats import as_tensor
from trioserve_kernels.fp8 import fp8_weight_of_blocks
from trioserve_kernels.native import NoNativeKernels, WeightMemory, load_library
from trioserve_kernels.structs import BLOCK_FORMATS, WeightFormat

Written = tuple[Path, dict[str, torch.Tensor]]
ALL = (
    *("awq-32", "awq-64", "awq-128"),
    *("gptq-4", "gptq-4-row", "gptq-4-asym", "gptq-4-v2", "gptq-4-order", "gptq-8", "gptq-8-asym"),
    *("packed-4", "packed-4-half", "packed-4-asym", "packed-4-channel", "packed-4-order", "packed-8", "packed-8-asym"),
    *("int8", "float8-tensor", "float8-channel", "float8-block", "fp8-scalar", "fp8-block", "fbgemm"),
)


@pytest.fixture(scope="module")
def written(
    tiny_quantized: ModuleType, tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Written]:
    """Function written(variant, kind) that returns a directory, and the numbers that it encodes by name. Tests share
    it.
    """
    made: dict[tuple[str, str], Written] = {}

    def write(variant: str, kind: str = "llama-wide") -> Written:
        if (variant, kind) not in made:
            directory = tmp_path_factory.mktemp(variant)
            meant = tiny_quantized.write_quantized(tiny_checkpoint(kind), directory, variant)
            made[variant, kind] = directory, meant
        return made[variant, kind]

    return write


def meant_by_name(directory: Path, meant: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the encoded numbers by our tensor names. Several of our tensors may be rows of one tensor in the file."""
    checkpoint, found, taken = open_checkpoint(directory), {}, dict.fromkeys(meant, 0)
    for tensor in checkpoint.tensors():
        outside = outside_name(tensor.name, checkpoint.config.family, TRANSFORMERS)
        first = taken[outside]
        taken[outside] += tensor.shape[0]
        found[tensor.name] = meant[outside][first : taken[outside]]
    return found


def numbers_of_blocks(tensor: StoredTensor) -> np.ndarray:
    """Decode blocks to float32, as kernels/cpu/quantized.h describes them, or rows of FP8."""
    assert tensor.read_blocks is not None
    assert tensor.block_type is not None
    if tensor.block_type == FP8_ROWS:
        return fp8_weight_of_blocks(torch.from_numpy(tensor.read_blocks())).numbers(torch.float32).numpy()
    blocks = tensor.read_blocks().reshape(tensor.shape[0], tensor.shape[1] // 32, -1)
    is_half, bits = tensor.block_type.endswith("_0"), int(tensor.block_type[1])
    head = 2 if is_half else 8
    if is_half:
        scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float32)
        mins = scales * (-8 if bits == 4 else 0)
    else:
        scales, mins = (np.ascontiguousarray(blocks[..., at : at + 4]).view(np.float32) for at in (0, 4))
    values = blocks[..., head:]
    codes = np.concatenate((values & 15, values >> 4), axis=-1) if bits == 4 else values.view(np.int8)
    return (scales * codes.astype(np.float32) + mins).reshape(tensor.shape)


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ALL)
def test_quantized_numbers_equal_those_of_the_format(variant: str, written: Callable[..., Written]) -> None:
    directory, meant = written(variant)
    expected = meant_by_name(directory, meant)
    for tensor in open_checkpoint(directory).tensors():
        exact = expected[tensor.name]
        assert torch.equal(as_tensor(tensor.read("float32")), exact), tensor.name
        assert torch.equal(as_tensor(tensor.read("bfloat16")), exact.to(torch.bfloat16)), tensor.name


def test_all_variants_of_quantized_checkpoints_are_tested(tiny_quantized: ModuleType) -> None:
    assert set(ALL) == set(tiny_quantized.VARIANTS)


@pytest.mark.parametrize("variant", ALL)
def test_blocks_encode_the_numbers_of_the_file(variant: str, written: Callable[..., Written]) -> None:
    directory, meant = written(variant)
    expected = meant_by_name(directory, meant)
    kept = {}
    for tensor in open_checkpoint(directory).tensors():
        if tensor.read_blocks is not None:
            kept[tensor.name] = tensor.block_type
            np.testing.assert_array_equal(numbers_of_blocks(tensor), expected[tensor.name].numpy())
    half = {"gptq-4": "Q4_0", "gptq-4-row": "Q4_0", "packed-4-half": "Q4_0", "gptq-8": "Q8_0"}
    wide = "Q8_F32" if "8" in variant and variant != "awq-128" else "Q4_F32"
    if "order" in variant or "8-block" in variant:
        assert not kept
    else:
        is_fp8 = "fp8" in variant or "float8" in variant or variant == "fbgemm"
        assert len(kept) == 7
        assert set(kept.values()) == {FP8_ROWS if is_fp8 else half.get(variant, wide)}


@pytest.mark.parametrize("variant", ("awq-32", "gptq-4", "packed-4-asym", "fp8-block", "float8-channel"))
@pytest.mark.parametrize("kind", ("phi3", "cohere", "qwen2"))
def test_quantized_joint_matrices_reordered_rows_and_biases_are_read(
    kind: str, variant: str, tiny_quantized: ModuleType, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    if kind != "phi3" and variant == "gptq-4":
        variant = "gptq-4-row"
    quantized, dense = tmp_path / "quantized", tmp_path / "dense"
    meant = tiny_quantized.write_quantized(tiny_checkpoint(kind), quantized, variant)
    tiny_quantized.write_dense(tiny_checkpoint(kind), dense, meant)
    expected = {tensor.name: tensor.read("float32") for tensor in open_checkpoint(dense).tensors()}
    for tensor in open_checkpoint(quantized).tensors():
        np.testing.assert_array_equal(tensor.read("float32"), expected[tensor.name])
        if tensor.read_blocks is not None:
            np.testing.assert_array_equal(numbers_of_blocks(tensor), expected[tensor.name])


@pytest.mark.parametrize("variant", ("awq-32", "fp8-block"))
def test_quantized_experts_are_read(
    variant: str, tiny_quantized: ModuleType, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    meant = tiny_quantized.write_quantized(tiny_checkpoint("qwen3-moe"), tmp_path, variant)
    for name, exact in meant_by_name(tmp_path, meant).items():
        tensor = next(tensor for tensor in open_checkpoint(tmp_path).tensors() if tensor.name == name)
        assert torch.equal(as_tensor(tensor.read("float32")).reshape(exact.shape), exact), name
        if "experts.3." in name:
            break
    else:
        pytest.fail("no experts")


@pytest.mark.parametrize("is_inner", (False, True))
def test_quantized_text_model_of_a_vision_model_is_dequantized(
    is_inner: bool, tiny_quantized: ModuleType, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    quantized, dense = tmp_path / "quantized", tmp_path / "dense"
    meant = tiny_quantized.write_quantized(tiny_checkpoint("mistral3-images"), quantized, "float8-channel")
    tiny_quantized.write_dense(tiny_checkpoint("mistral3-images"), dense, meant)
    if is_inner:
        config = json.loads((quantized / "config.json").read_text(encoding="utf-8"))
        config["text_config"]["quantization_config"] = config.pop("quantization_config")
        (quantized / "config.json").write_text(json.dumps(config), encoding="utf-8")
    expected = {tensor.name: tensor.read("float32") for tensor in open_checkpoint(dense).tensors()}
    for tensor in open_checkpoint(quantized).tensors():
        np.testing.assert_array_equal(tensor.read("float32"), expected[tensor.name])


@pytest.mark.parametrize("variant", ("awq-64", "gptq-8-asym", "packed-4", "int8"))
def test_native_kernels_keep_quantized_blocks_without_loss(variant: str, written: Callable[..., Written]) -> None:
    try:
        library = load_library()
    except NoNativeKernels as error:
        pytest.skip(f"no native kernels: {error}")
    for tensor in open_checkpoint(written(variant)[0]).tensors():
        if tensor.read_blocks is None or tensor.block_type is None:
            continue
        _, format = BLOCK_FORMATS[tensor.block_type]
        memory = WeightMemory(library, library.quantized_bytes(*tensor.shape, format))
        place = memory.take(library.quantized_bytes(*tensor.shape, format))
        library.pack_blocks(tensor.block_type, tensor.read_blocks(), tensor.shape[1], place)
        kept = library.dequantized(format, place, *tensor.shape)
        np.testing.assert_array_equal(kept, numbers_of_blocks(tensor))
        memory.close()


def test_each_matrix_is_kept_with_the_expected_bits() -> None:
    for quantization in ("file", "int4"):
        assert weight_format(quantization, "layers.0.q_proj.weight", "Q4_F32") == WeightFormat.Q4_WIDE
    for quantization in ("file", "int8"):
        assert weight_format(quantization, "layers.0.q_proj.weight", "Q8_F32") == WeightFormat.Q8_WIDE


def test_only_equal_quantized_weights_have_equal_names(
    written: Callable[..., Written], tiny_checkpoint: Callable[..., Path]
) -> None:
    checkpoints = [open_checkpoint(written(variant)[0]) for variant in ("awq-32", "awq-32", "awq-64", "fp8-block")]
    names = [weights_name(checkpoint) for checkpoint in (*checkpoints, open_checkpoint(tiny_checkpoint("llama-wide")))]
    assert names[0] == names[1]
    assert len(set(names)) == 4


# --- models -----------------------------------------------------------------------------------------------------------


def logprobs_of(step_driver: ModuleType, path: Path, **options: Any) -> torch.Tensor:
    runner = step_driver.load_runner(path, **options)
    driver = step_driver.StepDriver(runner)
    prompt = torch.randint(5, 320, (40,), generator=torch.Generator().manual_seed(3)).tolist()
    driver.add("p", prompt, SamplingParams(temperature=0.0, prompt_logprobs=0))
    entries = driver.step({"p": 40}).prompt_logprobs["p"]
    runner.close()
    return torch.tensor([entry.logprob for entry in entries])


@pytest.mark.parametrize("variant", ("awq-128", "gptq-4-order", "packed-8-asym", "fp8-block", "float8-channel"))
def test_quantized_model_equals_the_plain_model_with_the_encoded_numbers(
    variant: str,
    cpu_kernels: str,
    written: Callable[..., Written],
    tiny_quantized: ModuleType,
    tiny_checkpoint: Callable[..., Path],
    step_driver: ModuleType,
    tmp_path: Path,
) -> None:
    directory, meant = written(variant)
    tiny_quantized.write_dense(tiny_checkpoint("llama-wide"), tmp_path, meant)
    exact = logprobs_of(step_driver, tmp_path, cpu_kernels=cpu_kernels)
    assert torch.equal(logprobs_of(step_driver, directory, cpu_kernels=cpu_kernels), exact)


@pytest.mark.parametrize("variant", ("awq-128", "gptq-4", "gptq-8-asym", "packed-4-asym", "int8"))
def test_model_with_the_files_own_bits_is_close_to_float32(
    variant: str, written: Callable[..., Written], step_driver: ModuleType
) -> None:
    try:
        load_library()
    except NoNativeKernels as error:
        pytest.skip(f"no native kernels: {error}")
    directory, _ = written(variant)
    exact = logprobs_of(step_driver, directory, cpu_kernels="torch")
    errors, read_bytes = {}, {}
    for quantization in ("none", "auto"):
        options = {"dtype": "bfloat16", "cpu_kernels": "native", "quantization": quantization}
        runner = step_driver.load_runner(directory, **options)
        read_bytes[quantization] = runner.step_weight_bytes
        runner.close()
        given = logprobs_of(step_driver, directory, **options)
        errors[quantization] = float((given - exact).square().mean().sqrt())
    assert errors["auto"] < 3 * errors["none"]
    assert errors["auto"] < 0.1
    assert read_bytes["auto"] < (0.5 if "4" in variant or "awq" in variant else 0.72) * read_bytes["none"]


@pytest.mark.parametrize("variant", ("packed-4", "packed-4-asym", "packed-4-channel", "packed-8", "float8-channel"))
def test_compressed_tensors_library_reads_equal_numbers(variant: str, written: Callable[..., Written]) -> None:
    pytest.importorskip("compressed_tensors")

    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from safetensors.torch import load_file

    directory, meant = written(variant)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    scheme = QuantizationScheme.model_validate(config["config_groups"]["group_0"])
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    stored = load_file(directory / "model.safetensors")
    for module in ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"):
        parts = {name[len(module) + 1 :]: value for name, value in stored.items() if name.startswith(module + ".")}
        parts["weight_scale"] = parts["weight_scale"].to(torch.float32)
        theirs = compressor.decompress(parts, scheme)["weight"]
        assert torch.equal(theirs.to(torch.float32), meant[f"{module}.weight"])


@pytest.mark.parametrize("variant", ("packed-4", "packed-8", "float8-tensor", "float8-channel", "float8-block"))
def test_transformers_reads_equal_numbers_from_quantized_files(
    variant: str,
    written: Callable[..., Written],
    tiny_quantized: ModuleType,
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
) -> None:
    import transformers

    directory, meant = written(variant)
    tiny_quantized.write_dense(tiny_checkpoint("llama-wide"), tmp_path, meant)
    ids = torch.arange(5, 45)[None]
    theirs, dense = (
        transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(ids).logits
        for path in (directory, tmp_path)
    )
    torch.testing.assert_close(theirs, dense, rtol=0, atol=1e-5)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def copied(written: Callable[..., Written], tmp_path: Path) -> Callable[[str], Path]:
    return lambda variant: Path(shutil.copytree(written(variant)[0], tmp_path / variant))


GROUP = "config_groups.group_0"


@pytest.mark.parametrize(
    "variant, changes, said",
    (
        ("awq-32", {"quant_method": "bitsandbytes"}, "quant_method in quantization_config of config.json is 'bitsand"),
        ("awq-32", {"quant_method": None}, "quant_method in quantization_config of config.json is missing; supported"),
        ("awq-32", {"bits": 8}, "bits in quantization_config of config.json is 8; supported is 4"),
        ("awq-32", {"version": "gemv"}, "version in quantization_config of config.json is 'gemv'; supported is gemm"),
        ("awq-32", {"zero_point": False}, "zero_point in quantization_config of config.json is False"),
        ("awq-32", {"group_size": 0}, "group_size in quantization_config of config.json is 0"),
        ("awq-32", {"modules_to_not_convert": 3}, "modules_to_not_convert in quantization_config of config.json is 3"),
        ("gptq-4", {"bits": 3}, "bits in quantization_config of config.json is 3; supported is 4, 8"),
        ("gptq-4", {"checkpoint_format": "marlin"}, "checkpoint_format in quantization_config of config.json is 'marl"),
        ("gptq-4", {"is_marlin_format": True}, "is_marlin_format in quantization_config of config.json is True"),
        ("gptq-4", {"dynamic": {"-:lm_head": {}}}, "dynamic in quantization_config of config.json is {'-:lm_head'"),
        ("gptq-4", {"desc_act": "yes"}, "desc_act in quantization_config of config.json is 'yes', but it must be true"),
        ("packed-4", {"format": "nvfp4-pack-quantized"}, "format in quantization_config of config.json is 'nvfp4"),
        ("packed-4", {"quantization_status": "frozen"}, "quantization_status in quantization_config of config.json is"),
        ("packed-4", {"transform_config": {"R1": {}}}, "transform_config in quantization_config of config.json is"),
        ("packed-4", {"sparsity_config": {"format": "sparse-24"}}, "format in sparsity_config in quantization_config"),
        ("packed-4", {"config_groups": {}}, "config_groups in quantization_config of config.json is {}"),
        ("packed-4", {"weights": {"num_bits": 3}}, "num_bits in weights in config_groups.group_0 of quantization_conf"),
        ("int8", {"weights": {"strategy": "tensor", "symmetric": False}}, "symmetric in weights in config_groups"),
        ("packed-4", {"weights": {"strategy": "tensor"}}, "strategy in weights in config_groups.group_0 of quantizati"),
        ("packed-4", {"weights": {"type": "float"}}, "type in weights in config_groups.group_0 of quantization_config"),
        ("float8-block", {"weights": {"num_bits": 4}}, "num_bits in weights in config_groups.group_0 of quantization"),
        ("float8-block", {"weights": {"strategy": "group"}}, "strategy in weights in config_groups.group_0 of quantiz"),
        ("fp8-block", {"fmt": "e5m2"}, "fmt in quantization_config of config.json is 'e5m2'; supported is e4m3"),
        (
            "fp8-block",
            {"expert_dtype": "fp4"},
            "expert_dtype in quantization_config of config.json is 'fp4'; supported",
        ),
        ("fp8-block", {"weight_block_size": [128]}, "weight_block_size in quantization_config of config.json is [128]"),
    ),
)
def test_error_of_an_unsupported_quantized_checkpoint_names_the_field(
    variant: str, changes: dict[str, Any], said: str, copied: Callable[[str], Path], tiny_quantized: ModuleType
) -> None:
    def change(config: dict[str, Any]) -> None:
        for name, value in changes.items():
            if name == "weights":
                config["config_groups"]["group_0"]["weights"].update(value)
            elif value is None:
                del config[name]
            else:
                config[name] = value

    directory = copied(variant)
    tiny_quantized.change_files(directory, config=change)
    with pytest.raises(ModelLoadError) as caught:
        open_checkpoint(directory)
    assert said in str(caught.value)


def test_different_quantization_schemes_in_one_checkpoint_are_refused(
    copied: Callable[[str], Path], tiny_quantized: ModuleType
) -> None:
    directory = copied("packed-4")
    other = {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}
    tiny_quantized.change_files(directory, config=lambda config: config["config_groups"].update(group_1=other))
    with pytest.raises(ModelLoadError, match=r"config_groups in .* quantizes weights in 2 ways; supported is one"):
        open_checkpoint(directory)


QUERIES = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    "variant, part, shown",
    (
        ("awq-32", "qzeros", "lack"),
        ("awq-32", "scales", "lack"),
        ("gptq-4-order", "g_idx", "lack"),
        ("packed-4-asym", "weight_zero_point", "lack"),
        ("packed-4", "weight_scale", "lack"),
        ("packed-4", "weight_shape", "lack"),
        ("packed-4-order", "weight_g_idx", "lack"),
        ("fp8-block", "weight_scale_inv", "lack"),
        ("fbgemm", "weight_scale", "lack"),
        ("awq-32", "scales", "shape"),
        ("awq-32", "qzeros", "shape"),
        ("gptq-4", "g_idx", "shape"),
        ("packed-4-asym", "weight_zero_point", "shape"),
        ("fp8-block", "weight_scale_inv", "shape"),
        ("int8", "weight_scale", "shape"),
        ("awq-32", "scales", "storage"),
        ("gptq-4", "qweight", "storage"),
        ("packed-4", "weight_packed", "storage"),
        ("fp8-block", "weight", "storage"),
    ),
)
def test_error_names_the_damaged_tensor_of_a_quantized_matrix(
    variant: str, part: str, shown: str, copied: Callable[[str], Path], tiny_quantized: ModuleType
) -> None:
    name = f"{QUERIES}.{part}"

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        found = tensors.pop(name)
        if shown == "shape":
            tensors[name] = found[:-1].contiguous() if len(found) > 1 else torch.cat((found, found))
        elif shown == "storage":
            tensors[name] = found.to(torch.int8)

    directory = copied(variant)
    tiny_quantized.change_files(directory, tensors=damage)
    with pytest.raises(
        ModelLoadError, match=rf"weights lack {name}(_inv)?, " if shown == "lack" else rf"{name} is stored as"
    ):
        open_checkpoint(directory)


def test_group_size_that_differs_from_the_config_is_refused(
    copied: Callable[[str], Path], tiny_quantized: ModuleType
) -> None:
    directory = copied("awq-32")
    tiny_quantized.change_files(directory, config=lambda config: config.update(group_size=64))
    with pytest.raises(ModelLoadError, match=r"down_proj.scales .* has shape \[16, 256\], .* of shape \[8, 256\]"):
        open_checkpoint(directory)


def test_matrix_both_plain_and_quantized_is_refused(copied: Callable[[str], Path], tiny_quantized: ModuleType) -> None:
    directory = copied("gptq-4")
    weight = torch.zeros(256, 256)
    tiny_quantized.change_files(directory, tensors=lambda tensors: tensors.update({f"{QUERIES}.weight": weight}))
    with pytest.raises(ModelLoadError, match=rf"hold {QUERIES}.weight both plain and quantized"):
        open_checkpoint(directory)


def test_quantized_codes_without_a_matrix_are_refused(
    copied: Callable[[str], Path], tiny_quantized: ModuleType
) -> None:
    directory = copied("gptq-4")
    name = "model.norm.weight"
    tiny_quantized.change_files(directory, tensors=lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))
    with pytest.raises(ModelLoadError, match=f"{name} is stored as I8, and belongs to no matrix"):
        open_checkpoint(directory)


def test_single_matrices_of_a_quantized_checkpoint_may_be_plain(
    written: Callable[..., Written], copied: Callable[[str], Path], tiny_quantized: ModuleType
) -> None:
    """The field modules_to_not_convert names the plain matrices."""
    directory, meant = copied("awq-32"), written("awq-32")[1]

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for part in ("qweight", "qzeros", "scales"):
            del tensors[f"{QUERIES}.{part}"]
        tensors[f"{QUERIES}.weight"] = meant[f"{QUERIES}.weight"].to(torch.bfloat16)

    tiny_quantized.change_files(directory, tensors=change)
    tensor = next(tensor for tensor in open_checkpoint(directory).tensors() if tensor.name.endswith("q_proj.weight"))
    assert (tensor.dtype, tensor.block_type) == ("bfloat16", None)


@pytest.mark.parametrize("value", (0.0, 1.0))
def test_superfluous_bias_must_be_zero(value: float, copied: Callable[[str], Path], tiny_quantized: ModuleType) -> None:
    directory = copied("gptq-4")
    bias = torch.full((256,), value, dtype=torch.float16)
    tiny_quantized.change_files(directory, tensors=lambda tensors: tensors.update({f"{QUERIES}.bias": bias}))
    if value == 0.0:
        open_checkpoint(directory)
        return
    with pytest.raises(ModelLoadError, match=f"hold {QUERIES}.bias, which llama with this config does not use"):
        open_checkpoint(directory)


def queries(directory: Path) -> StoredTensor:
    return next(tensor for tensor in open_checkpoint(directory).tensors() if tensor.name == "layers.0.q_proj.weight")


def test_damage_outside_of_headers_is_refused_when_read(
    copied: Callable[[str], Path], tiny_quantized: ModuleType
) -> None:
    directory = copied("gptq-4-order")
    tiny_quantized.change_files(directory, tensors=lambda tensors: tensors[f"{QUERIES}.g_idx"].add_(1))
    with pytest.raises(ModelLoadError, match=f"of {QUERIES}, g_idx names other groups than 0 to 3"):
        queries(directory).read("float32")
    directory = copied("packed-4")
    tiny_quantized.change_files(directory, tensors=lambda tensors: tensors[f"{QUERIES}.weight_shape"].add_(1))
    with pytest.raises(ModelLoadError, match=f"of {QUERIES}, weight_shape is not"):
        queries(directory).read("float32")


@pytest.mark.parametrize(
    "variant, change, said",
    (
        ("gptq-4-order", {"desc_act": False}, "g_idx is out of order, but desc_act is false"),
        ("gptq-4-asym", {"sym": True}, "qzeros are not symmetric, but sym is true"),
    ),
)
def test_config_that_contradicts_the_quantized_numbers_is_reported(
    variant: str,
    change: dict[str, Any],
    said: str,
    written: Callable[..., Written],
    copied: Callable[[str], Path],
    tiny_quantized: ModuleType,
) -> None:
    """The numbers can be read, but their blocks cannot be kept."""
    directory = copied(variant)
    tiny_quantized.change_files(directory, config=lambda config: config.update(change))
    tensor = queries(directory)
    assert torch.equal(as_tensor(tensor.read("float32")), written(variant)[1][f"{QUERIES}.weight"])
    assert tensor.read_blocks is not None
    with pytest.raises(ModelLoadError, match=f"{said}: use quantization none"):
        tensor.read_blocks()
