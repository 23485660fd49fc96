"""Checkpoints with real shapes and random weights, as transformers saves them.

A step's reads and computations depend only on the shapes. So such a checkpoint measures the speed of a real model that
is unavailable.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from trioserve.model.families.registry import family_named
from trioserve.model.loading.names import TRANSFORMERS, Shape, outside_name, tensor_shapes
from trioserve.model.loading.safetensors import INDEX_NAME
from trioserve.model.model_config import AttentionConfig, ExpertsConfig, ModelConfig
from trioserve.model.number_formats import VALUE_BYTES, Dtype, Float32Array, convert, empty_values

__all__ = ["PIECE_VALUES", "checkpoint_bytes", "drawn_values", "transformers_config", "write_config", "write_weights"]

DTYPE: Dtype = "bfloat16"
DEVIATION = 0.02  # standard deviation with which these models are initialised for training, too
SHARD_BYTES_MAX = 5 * 10**9  # size limit of transformers' files
PIECE_VALUES = 2**22  # numbers that are drawn, rounded and written at a time


def transformers_config(config: ModelConfig) -> dict[str, Any]:
    """Return a model's fields of config.json, with the names of transformers.

    Args:
        config: model of SHAPES, or one that differs only in numbers.
    """
    layer = config.layers[0]
    attention, mlp = layer.attention, layer.mlp
    assert isinstance(attention, AttentionConfig), "only models with plain attention are written"
    assert config.layers == (layer,) * config.layer_count, "only models with equal layers are written"
    assert attention.window is None, "windows are not written"
    assert attention.rotary is not None, "only rotary attention is written"
    assert mlp is not None, "only layers with an MLP or experts are written"
    assert not mlp.has_bias, "biases of an MLP are not written"
    fields: dict[str, Any] = {
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": mlp.intermediate_size,
        "num_hidden_layers": config.layer_count,
        "num_attention_heads": attention.head_count,
        "num_key_value_heads": attention.kv_head_count,
        "head_dim": attention.head_dim,
        "max_position_embeddings": config.context_tokens_max,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": attention.has_bias,
        "rope_theta": attention.rotary.theta,
    }
    if isinstance(mlp, ExpertsConfig):
        assert config.family == "olmoe", "only the mixture of OLMoE is written"
        fields |= {
            "num_experts": mlp.expert_count,
            "num_experts_per_tok": mlp.experts_per_token,
            "norm_topk_prob": mlp.normalizes,
        }
    scaling = attention.rotary.scaling
    if scaling is not None:
        assert scaling.kind == "llama3", "only rope scaling of Llama 3 is written"
        fields["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_context_tokens,
        }
    return fields


def checkpoint_bytes(config: ModelConfig) -> int:
    """Return the size of the weights on disk in bytes.

    Args:
        config: model.
    """
    return sum(map(_byte_count, tensor_shapes(config).values()))


def write_config(config: ModelConfig, directory: Path, *, eos_token_id: int) -> None:
    fields = {
        "architectures": family_named(config.family).classes[:1],
        **transformers_config(config),
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
        "hidden_act": "silu",
        "torch_dtype": DTYPE,
    }
    (directory / "config.json").write_text(json.dumps(fields, indent=2) + "\n")


def write_weights(config: ModelConfig, directory: Path, *, seed: int, progress: Callable[[int, int], None]) -> None:
    """Write normally distributed matrices and biases, and norms of 1, in bfloat16.

    A tensor's values depend only on the seed and on its index among the tensors.

    Args:
        config: model.
        directory: destination.
        seed: seed of the random numbers.
        progress: called repeatedly with bytes_done and bytes_total. An exception from it ends the writing.
    """
    shards = list(_shards(tensor_shapes(config)))
    total, done = checkpoint_bytes(config), 0
    weight_map: dict[str, str] = {}
    place = 0
    for number, shapes in enumerate(shards, start=1):
        single = len(shards) == 1
        name = "model.safetensors" if single else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        with (directory / name).open("xb") as file:
            file.write(_header(config.family, shapes))
            for tensor_name, shape in shapes.items():
                generator = np.random.default_rng([seed, place])
                place += 1
                weight_map[outside_name(tensor_name, config.family, TRANSFORMERS)] = name
                for byte_count in _write_tensor(file, tensor_name, math.prod(shape), generator):
                    done += byte_count
                    progress(done, total)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")


def _byte_count(shape: Shape) -> int:
    return math.prod(shape) * VALUE_BYTES[DTYPE]


def _shards(shapes: dict[str, Shape]) -> Iterator[dict[str, Shape]]:
    shard: dict[str, Shape] = {}
    byte_count = 0
    for name, shape in shapes.items():
        if shard and byte_count + _byte_count(shape) > SHARD_BYTES_MAX:
            yield shard
            shard, byte_count = {}, 0
        shard[name] = shape
        byte_count += _byte_count(shape)
    yield shard


def _header(family: str, shapes: dict[str, Shape]) -> bytes:
    """Return the header of a safetensors file: its length in 8 bytes, then JSON, then spaces up to a multiple of 8.

    See https://huggingface.co/docs/safetensors.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + _byte_count(shape)
        entry = {"dtype": "BF16", "shape": shape, "data_offsets": (begin, end)}
        entries[outside_name(name, family, TRANSFORMERS)] = entry
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_tensor(file: BinaryIO, name: str, count: int, generator: np.random.Generator) -> Iterator[int]:
    """Write a tensor piece by piece, and yield the bytes of each piece."""
    for begin in range(0, count, PIECE_VALUES):
        piece_count = min(PIECE_VALUES, count - begin)
        piece = empty_values((piece_count,), DTYPE)
        convert(drawn_values(name, piece_count, generator), piece)
        file.write(piece.data)
        yield piece.nbytes


def drawn_values(name: str, count: int, generator: np.random.Generator) -> Float32Array:
    """Return the next values of a tensor.

    Args:
        name: name of the tensor, in this code or in the file.
        count: number of values.
        generator: source of random numbers.
    """
    if name.endswith("norm.weight"):
        return np.ones(count, dtype=np.float32)
    values = generator.standard_normal(count, dtype=np.float32)
    values *= np.float32(DEVIATION)
    return values
