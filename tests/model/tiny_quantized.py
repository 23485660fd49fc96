"""Tiny checkpoints in quantized safetensors formats: AutoAWQ, GPTQModel, compressed-tensors and FP8.

Each writer draws codes, scales and zero points, stores them in its format, and returns the numbers that they encode.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

__all__ = ["VARIANTS", "change_files", "write_dense", "write_quantized"]

Floats = np.ndarray
Parts = dict[str, torch.Tensor]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def packed_words(codes: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Pack numbers [n, m] into words, int32 [n, words]. `order` lists the numbers of a word, from the lowest bits on.
    The default is their own order.
    """
    count = 32 // bits
    codes = np.pad(codes, ((0, 0), (0, -codes.shape[1] % count))).astype(np.uint64)
    words = np.zeros((codes.shape[0], codes.shape[1] // count), dtype=np.uint64)
    for place, index in enumerate(order or range(count)):
        words |= codes[:, index::count] << np.uint64(bits * place)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32).copy())


def draw(
    random: np.random.Generator, shape: tuple[int, int], bits: int, group: int, dtype: torch.dtype
) -> tuple[np.ndarray, torch.Tensor, np.ndarray]:
    """Draw codes [outputs, inputs], and scales and zero points [outputs, groups]."""
    groups = -(-shape[1] // group)
    codes = random.integers(0, 2**bits, shape)
    scales = torch.from_numpy(random.uniform(0.2, 0.6, (shape[0], groups)) / 2**bits).to(dtype)
    return codes, scales, random.integers(0, 2**bits, (shape[0], groups))


def numbers(codes: np.ndarray, scales: torch.Tensor, zeros: np.ndarray, group_of: np.ndarray) -> Floats:
    differences = (codes - zeros[:, group_of]).astype(np.float32)
    return differences * scales.to(torch.float32).numpy()[:, group_of]


def awq(random: np.random.Generator, shape: tuple[int, int], *, group: int) -> tuple[Parts, Floats]:
    codes, scales, zeros = draw(random, shape, 4, group, torch.float16)
    parts = {
        "qweight": packed_words(codes.T, 4, AWQ_ORDER),
        "qzeros": packed_words(zeros.T, 4, AWQ_ORDER),
        "scales": scales.T.contiguous(),
    }
    return parts, numbers(codes, scales, zeros, np.arange(shape[1]) // group)


def gptq(
    random: np.random.Generator,
    shape: tuple[int, int],
    *,
    bits: int,
    group: int,
    sym: bool,
    desc_act: bool = False,
    version: int = 1,
    dtype: torch.dtype = torch.float16,
) -> tuple[Parts, Floats]:
    group = shape[1] if group == -1 else group
    codes, scales, zeros = draw(random, shape, bits, group, dtype)
    if sym:
        zeros = np.full_like(zeros, 2 ** (bits - 1))
    group_of = np.arange(shape[1]) // group
    if desc_act:
        group_of = random.permutation(group_of)
    words = packed_words(zeros.T, bits).numpy().view(np.uint32)
    if version == 1:
        words = words - np.uint32(sum(1 << place for place in range(0, 32, bits)))
    parts = {
        "qweight": packed_words(codes, bits).T.contiguous(),
        "qzeros": torch.from_numpy(words.view(np.int32).copy()),
        "scales": scales.T.contiguous(),
        "g_idx": torch.from_numpy(group_of.astype(np.int32)),
    }
    return parts, numbers(codes, scales, zeros, group_of)


def packed(
    random: np.random.Generator,
    shape: tuple[int, int],
    *,
    bits: int,
    group: int | None,
    symmetric: bool,
    ordered: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Parts, Floats]:
    group = group or shape[1]
    codes, scales, zeros = draw(random, shape, bits, group, dtype)
    if symmetric:
        zeros = np.full_like(zeros, 2 ** (bits - 1))
    group_of = np.arange(shape[1]) // group
    if ordered:
        group_of = random.permutation(group_of)
    parts = {
        "weight_packed": packed_words(codes, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(shape),
    }
    if not symmetric:
        parts["weight_zero_point"] = packed_words(zeros.T, bits).T.contiguous()
    if ordered:
        parts["weight_g_idx"] = torch.from_numpy(group_of.astype(np.int32))
    return parts, numbers(codes, scales, zeros, group_of)


def whole(random: np.random.Generator, shape: tuple[int, int]) -> tuple[Parts, Floats]:
    codes, scales, zeros = draw(random, shape, 8, shape[1], torch.bfloat16)
    zeros = np.full_like(zeros, 128)
    weight = torch.from_numpy((codes - 128).astype(np.int8))
    return {"weight": weight, "weight_scale": scales}, numbers(codes, scales, zeros, np.zeros(shape[1], dtype=int))


def fp8(
    random: np.random.Generator,
    shape: tuple[int, int],
    *,
    scale_name: str = "weight_scale",
    blocks: tuple[int, int] | None = None,
    scales: str = "block",
    scale_shape: tuple[int, ...] | None = None,
) -> tuple[Parts, Floats]:
    weight = torch.from_numpy(random.normal(0, 60, shape)).to(torch.float8_e4m3fn)
    sizes = {"tensor": shape, "channel": (1, shape[1]), "block": blocks or shape}[scales]
    grid = (-(-shape[0] // sizes[0]), -(-shape[1] // sizes[1]))
    scale = torch.from_numpy(random.uniform(0.001, 0.003, grid)).to(torch.float32)
    rows, columns = (torch.arange(size) // block for size, block in zip(shape, sizes, strict=True))
    values = weight.to(torch.float32) * scale[rows][:, columns]
    return {"weight": weight, scale_name: scale.reshape(grid if scale_shape is None else scale_shape)}, values.numpy()


def _compressed(format: str, weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        **more,
    }


def _packed(bits: int, group: int | None, symmetric: bool, **more: Any) -> dict[str, Any]:
    strategy = "channel" if group is None else "group"
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy, "group_size": group}
    return _compressed("pack-quantized", {**weights, "dynamic": False, **more})


def _fp8(strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False, **more}
    return _compressed("float-quantized", weights)


def _awq(group: int) -> dict[str, Any]:
    fixed = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm", "modules_to_not_convert": None}
    return {**fixed, "group_size": group}


def _gptq(bits: int, group: int, sym: bool, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": sym, "desc_act": False, **more}


Writer = Callable[..., tuple[Parts, Floats]]
VARIANTS: dict[str, tuple[dict[str, Any], Writer, dict[str, Any]]] = {
    **{f"awq-{group}": (_awq(group), awq, {"group": group}) for group in (32, 64, 128)},
    "gptq-4": (_gptq(4, 64, True), gptq, {"bits": 4, "group": 64, "sym": True}),
    "gptq-4-row": (_gptq(4, -1, True), gptq, {"bits": 4, "group": -1, "sym": True}),
    "gptq-4-asym": (_gptq(4, 32, False), gptq, {"bits": 4, "group": 32, "sym": False}),
    "gptq-4-v2": (
        _gptq(4, 128, False, checkpoint_format="gptq_v2"),
        gptq,
        {"bits": 4, "group": 128, "sym": False, "version": 2},
    ),
    "gptq-4-order": (
        _gptq(4, 64, False, desc_act=True, checkpoint_format="gptq"),
        gptq,
        {"bits": 4, "group": 64, "sym": False, "desc_act": True},
    ),
    "gptq-8": (_gptq(8, 32, True), gptq, {"bits": 8, "group": 32, "sym": True}),
    "gptq-8-asym": (_gptq(8, 128, False), gptq, {"bits": 8, "group": 128, "sym": False}),
    "packed-4": (_packed(4, 128, True), packed, {"bits": 4, "group": 128, "symmetric": True}),
    "packed-4-half": (
        _packed(4, 32, True),
        packed,
        {"bits": 4, "group": 32, "symmetric": True, "dtype": torch.float16},
    ),
    "packed-4-asym": (_packed(4, 32, False), packed, {"bits": 4, "group": 32, "symmetric": False}),
    "packed-4-channel": (_packed(4, None, False), packed, {"bits": 4, "group": None, "symmetric": False}),
    "packed-4-order": (
        _packed(4, 64, True, actorder="group"),
        packed,
        {"bits": 4, "group": 64, "symmetric": True, "ordered": True},
    ),
    "packed-8": (_packed(8, None, True), packed, {"bits": 8, "group": None, "symmetric": True}),
    "packed-8-asym": (_packed(8, 64, False), packed, {"bits": 8, "group": 64, "symmetric": False}),
    "int8": (
        _compressed("int-quantized", {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}),
        whole,
        {},
    ),
    "float8-tensor": (_fp8("tensor"), fp8, {"scales": "tensor", "scale_shape": (1,)}),
    "float8-channel": (_fp8("channel"), fp8, {"scales": "channel"}),
    "float8-block": (_fp8("block", block_structure=[128, 128]), fp8, {"blocks": (128, 128)}),
    "fp8-scalar": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        fp8,
        {"scales": "tensor", "scale_shape": ()},
    ),
    "fp8-block": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]},
        fp8,
        {"blocks": (128, 128), "scale_name": "weight_scale_inv"},
    ),
    "fbgemm": ({"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]}, fp8, {"scales": "channel"}),
}
"""Content of quantization_config, and the function that writes a matrix with its options, by variant."""


def write_quantized(checkpoint: Path, directory: Path, variant: str) -> dict[str, torch.Tensor]:
    """Write a checkpoint with quantized projections in each layer. Return all tensors dequantized, projections in
    float32.
    """
    config, write, options = VARIANTS[variant]
    tensors, meant = {}, {}
    random = np.random.default_rng(20_260_101)
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        module, _, kind = name.rpartition(".")
        if not (module.endswith("proj") and kind == "weight"):
            tensors[name] = meant[name] = tensor
            continue
        parts, values = write(random, tuple(tensor.shape), **options)
        meant[name] = torch.from_numpy(values)
        tensors.update({f"{module}.{part}": value for part, value in parts.items()})
    shutil.copytree(checkpoint, directory, dirs_exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    _change_config(directory, lambda found: found.update(quantization_config=config))
    return meant


def write_dense(checkpoint: Path, directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write a checkpoint with given tensors."""
    shutil.copytree(checkpoint, directory, dirs_exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def change_files(
    directory: Path,
    *,
    tensors: Callable[[dict[str, torch.Tensor]], object] | None = None,
    config: Callable[[dict[str, Any]], object] | None = None,
) -> None:
    """Replace tensors and config of a checkpoint. The config gets quantization_config."""
    if tensors is not None:
        found = {name: tensor.clone() for name, tensor in load_file(directory / "model.safetensors").items()}
        tensors(found)
        save_file(found, directory / "model.safetensors", metadata={"format": "pt"})
    if config is not None:
        _change_config(directory, lambda found: config(found["quantization_config"]))


def _change_config(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    change(config)
    path.write_text(json.dumps(config), encoding="utf-8")
