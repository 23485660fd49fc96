"""Writes checkpoints with real shapes and random weights, as transformers saves them, or as one GGUF file for a
comparison with llama.cpp.

The time of a step depends only on the shapes. Therefore, such a checkpoint can measure the speed of a real model whose
weights are not available.
"""

from __future__ import annotations

import errno
import functools
import json
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal

import gguf
import numpy as np

from trioserve.model.families.registry import family_named
from trioserve.model.layer_config import AttentionConfig, ExpertsConfig, MlpConfig
from trioserve.model.loading.names import GGUF, TRANSFORMERS, Shape, outside_name, tensor_shapes
from trioserve.model.loading.safetensors import INDEX_NAME
from trioserve.model.model_config import ModelConfig
from trioserve.model.number_formats import VALUE_BYTES, Dtype, Values, convert, empty_values
from trioserve.model.torch_step.rotary import rotary_frequencies

__all__ = [
    "PIECE_VALUES",
    "checkpoint_bytes",
    "drawn_values",
    "transformers_config",
    "write_config",
    "write_weights",
    "GGUF_TYPES",
    "SPACE",
    "GgufType",
    "write_gguf",
]

DTYPE: Dtype = "bfloat16"
DEVIATION = 0.02  # Training of the real models also starts with this standard deviation.
SHARD_BYTES_MAX = 5 * 10**9  # transformers has the same size limit for a file.
PIECE_VALUES = 2**22  # number of values that one thread draws, rounds and writes at a time


def transformers_config(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of config.json for a model, with the names of transformers.

    Args:
        config: model of SHAPES, or a model that differs only in numbers.
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
        assert config.family in ("olmoe", "qwen3_moe"), "only mixtures of OLMoE and Qwen3 are written"
        if config.family == "qwen3_moe":
            fields["moe_intermediate_size"] = mlp.intermediate_size
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

    A tensor's values depend only on the seed and on its index among the tensors. All processors draw and write.

    Args:
        config: model.
        directory: destination.
        seed: seed of the random numbers.
        progress: called repeatedly with bytes_done and bytes_total. An exception ends the writing.
    """
    shards = list(_shards(tensor_shapes(config)))
    total, done = checkpoint_bytes(config), 0
    weight_map: dict[str, str] = {}
    tensor_index = 0
    for number, shapes in enumerate(shards, start=1):
        single = len(shards) == 1
        name = "model.safetensors" if single else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        with (directory / name).open("xb") as file, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
            offset = file.write(_header(config.family, shapes))
            file.flush()
            pieces: list[Future[int]] = []
            for tensor_name, shape in shapes.items():
                weight_map[outside_name(tensor_name, config.family, TRANSFORMERS)] = name
                for piece_index, begin in enumerate(range(0, math.prod(shape), PIECE_VALUES)):
                    count = min(PIECE_VALUES, math.prod(shape) - begin)
                    generator = np.random.default_rng([seed, tensor_index, piece_index])
                    pieces.append(threads.submit(_write_piece, file.fileno(), offset, tensor_name, count, generator))
                    offset += count * VALUE_BYTES[DTYPE]
                tensor_index += 1
            try:
                for piece in pieces:
                    done += piece.result()
                    progress(done, total)
            except BaseException:
                threads.shutdown(cancel_futures=True)  # The other pieces are not written.
                raise
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


def _write_piece(file: int, offset: int, name: str, count: int, generator: np.random.Generator) -> int:
    """Write some values of a tensor at an offset of a file, and return their bytes. Runs in any thread."""
    piece = drawn_values(name, count, generator, DTYPE)
    if os.pwrite(file, piece.data, offset) != piece.nbytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return piece.nbytes


def drawn_values(name: str, count: int, generator: np.random.Generator, dtype: Dtype) -> Values:
    """Return random values of a tensor: ones for a norm, else quantiles of the normal distribution.

    Drawing 16 random bits and looking up their quantile takes a third of the time of drawing normal numbers.

    Args:
        name: name of the tensor, in this project or in the file.
        count: number of values.
        generator: source of random numbers.
        dtype: number format of the result.
    """
    if name.endswith("norm.weight"):
        return _in_format([1.0], dtype).repeat(count)
    return _quantiles(dtype).take(generator.integers(0, 2**16, count, dtype=np.uint16), mode="clip")


@functools.cache
def _quantiles(dtype: Dtype) -> Values:
    """Return the 2**16 quantiles of the normal distribution of the weights, in ascending order."""
    normal = NormalDist(sigma=DEVIATION)
    return _in_format([normal.inv_cdf((index + 0.5) / 2**16) for index in range(2**16)], dtype)


def _in_format(numbers: list[float], dtype: Dtype) -> Values:
    result = empty_values((len(numbers),), dtype)
    convert(np.array(numbers, dtype=np.float32), result)
    return result


GgufType = Literal["bf16", "q8_0", "q4_0"]
GGUF_TYPES: dict[GgufType, gguf.GGMLQuantizationType] = {
    "bf16": gguf.GGMLQuantizationType.BF16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
}
SPACE = "\u0120"  # Byte-level BPE represents a space by this character.
PLAIN = gguf.GGMLQuantizationType.F32


def write_gguf(
    config: ModelConfig,
    path: Path,
    matrix_type: GgufType,
    tokens: list[str],
    *,
    seed: int,
    progress: Callable[[int, int], None],
) -> None:
    """Write a model of SHAPES as a GGUF file.

    Matrices have matrix_type. The output layer and a tied embedding have at least 8 bits. Norms and routers are
    float32.

    Args:
        config: model.
        path: destination.
        matrix_type: type of matrices.
        tokens: vocabulary of byte-level BPE, whose last token ends a text. It must contain the token of two spaces,
            which is the only merged token. A file must have a merged token.
        seed: seed of the random numbers.
        progress: see random_checkpoint.write_weights.
    """
    family = family_named(config.family)
    assert family.gguf is not None, "GGUF does not support this family"
    shapes = _stored_shapes(config)
    types = {name: _type_of(name, shape, matrix_type, config) for name, shape in shapes.items()}
    writer = gguf.GGUFWriter(path, family.gguf.architecture)
    _add_metadata(writer, config)
    _add_tokenizer(writer, tokens)
    factors = _frequency_factors(config)
    if factors is not None:
        writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
    byte_counts: dict[str, int] = {}
    for name, shape in shapes.items():
        row_shape = gguf.quant_shape_to_byte_shape(shape, types[name])
        is_plain = types[name] is PLAIN
        byte_counts[name] = math.prod(shape) * 4 if is_plain else math.prod(row_shape)
        writer.add_tensor_info(
            name,
            shape if is_plain else row_shape,
            np.dtype(np.float32 if is_plain else np.uint8),
            byte_counts[name],
            None if is_plain else types[name],
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    assert writer.fout is not None, "writing the header opens the file"
    (file,) = writer.fout
    writer.write_padding(file, file.tell())
    if factors is not None:
        factors.tofile(file)
        writer.write_padding(file, factors.nbytes)
    total, done = sum(byte_counts.values()), 0
    for place, (name, shape) in enumerate(shapes.items()):
        generator = np.random.default_rng([seed, place])
        columns = shape[-1]
        rows_left = math.prod(shape) // columns
        while rows_left:
            rows = min(rows_left, max(1, PIECE_VALUES // columns))
            rows_left -= rows
            values = drawn_values(name, rows * columns, generator, "float32").reshape(rows, columns)
            piece = values if types[name] is PLAIN else gguf.quants.quantize(values, types[name])
            piece.tofile(file)
            done += piece.nbytes
            progress(done, total)
        writer.write_padding(file, byte_counts[name])
    writer.close()


def _stored_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return the shapes of tensors by their names in the file. In the file, all experts of a layer are one tensor."""
    shapes_by_name: dict[str, list[Shape]] = {}
    for name, shape in tensor_shapes(config).items():
        shapes_by_name.setdefault(outside_name(name, config.family, GGUF), []).append(shape)
    return {
        name: shapes[0] if len(shapes) == 1 else (len(shapes), *shapes[0]) for name, shapes in shapes_by_name.items()
    }


def _type_of(name: str, shape: Shape, matrix_type: GgufType, config: ModelConfig) -> gguf.GGMLQuantizationType:
    if len(shape) == 1 or ".ffn_gate_inp." in name:
        return PLAIN
    is_head = name.startswith("output.") or (config.tie_word_embeddings and name.startswith("token_embd."))
    return GGUF_TYPES["q8_0" if is_head and matrix_type == "q4_0" else matrix_type]


def _add_metadata(writer: Any, config: ModelConfig) -> None:
    heads, mlp = config.heads, config.layers[0].mlp
    assert mlp is not None, "only layers with an MLP or experts are written"
    assert heads.rotary is not None, "only rotary attention is written"
    writer.add_block_count(config.layer_count)
    writer.add_context_length(config.context_tokens_max)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(mlp.intermediate_size)
    writer.add_head_count(heads.head_count)
    writer.add_head_count_kv(heads.kv_head_count)
    writer.add_key_length(heads.head_dim)
    writer.add_value_length(heads.head_dim)
    writer.add_rope_dimension_count(heads.rotary.rotated_dims)
    writer.add_rope_freq_base(heads.rotary.theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if isinstance(mlp, ExpertsConfig):
        writer.add_expert_count(mlp.expert_count)
        writer.add_expert_used_count(mlp.experts_per_token)
    else:
        assert isinstance(mlp, MlpConfig)


def _add_tokenizer(writer: Any, tokens: list[str]) -> None:
    assert 2 * SPACE in tokens
    kinds = [gguf.TokenType.NORMAL] * (len(tokens) - 1) + [gguf.TokenType.CONTROL]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([int(kind) for kind in kinds])
    writer.add_token_merges([f"{SPACE} {SPACE}"])
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_add_bos_token(False)


def _frequency_factors(config: ModelConfig) -> np.ndarray[Any, Any] | None:
    """Return the divisors of inverse frequencies for llama.cpp, which does not compute Llama 3 scaling itself."""
    rotary = config.heads.rotary
    if rotary is None or rotary.scaling is None:
        return None
    assert rotary.scaling.kind == "llama3", "only rope scaling of Llama 3 is written"
    scaled, _ = rotary_frequencies(rotary, config.heads.head_dim)
    plain = rotary.theta ** -(np.arange(0, rotary.rotated_dims, 2) / rotary.rotated_dims)
    return (plain / scaled).astype(np.float32)
