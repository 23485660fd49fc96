"""Models with random weights as one GGUF file, in bfloat16 or quantized, for a comparison with llama.cpp."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np

from trioserve.model.families.registry import family_named
from trioserve.model.loading.names import GGUF, Shape, outside_name, tensor_shapes
from trioserve.model.model_config import ExpertsConfig, MlpConfig, ModelConfig
from trioserve.model.random_checkpoint import PIECE_VALUES, drawn_values
from trioserve.model.rotary import rotary_frequencies

__all__ = ["GGUF_TYPES", "SPACE", "GgufType", "write_gguf"]

GgufType = Literal["bf16", "q8_0", "q4_0"]
GGUF_TYPES: dict[GgufType, gguf.GGMLQuantizationType] = {
    "bf16": gguf.GGMLQuantizationType.BF16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
}
SPACE = "\u0120"  # byte-level BPE writes a space as this character
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
        tokens: vocabulary of byte-level BPE, whose last token ends a text. It must contain two spaces: they are the
            only merged token, because a file must have one.
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
            values = drawn_values(name, rows * columns, generator).reshape(rows, columns)
            piece = values if types[name] is PLAIN else gguf.quants.quantize(values, types[name])
            piece.tofile(file)
            done += piece.nbytes
            progress(done, total)
        writer.write_padding(file, byte_counts[name])
    writer.close()


def _stored_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return the shapes of tensors by their names in the file, in which all experts of a layer are one tensor."""
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
    """Return the numbers by which llama.cpp divides inverse frequencies. It has no Llama 3 scaling of its own."""
    rotary = config.heads.rotary
    if rotary is None or rotary.scaling is None:
        return None
    assert rotary.scaling.kind == "llama3", "only rope scaling of Llama 3 is written"
    scaled, _ = rotary_frequencies(rotary, config.heads.head_dim)
    plain = rotary.theta ** -(np.arange(0, rotary.rotated_dims, 2) / rotary.rotated_dims)
    return (plain / scaled).astype(np.float32)
