"""Tests of RankCheckpoint: it reads the rows and columns of a rank's share, and no others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from trioserve.model.loading.checkpoint import Checkpoint, dequantize, open_checkpoint
from trioserve.model.loading.names import tensor_shapes
from trioserve.model.loading.stored_tensor import FP8_ROWS, StoredTensor
from trioserve.model.number_formats import Float32Array
from trioserve.model.parallel.rank_checkpoint import RankCheckpoint

Checkpoints = Callable[..., Path]


def ranks_of(checkpoint: Checkpoint, size: int, *, expert_parallel: bool = False) -> list[RankCheckpoint]:
    return [RankCheckpoint(checkpoint, rank, size, expert_parallel=expert_parallel) for rank in range(size)]


def named(checkpoint: Checkpoint) -> dict[str, StoredTensor]:
    return {tensor.name: tensor for tensor in checkpoint.tensors()}


def values_of(tensor: StoredTensor) -> Float32Array:
    return np.asarray(tensor.read("float32"), dtype=np.float32)


def numbers(tensor: StoredTensor) -> Float32Array:
    """Return the dequantized values of a tensor's blocks."""
    assert tensor.block_type is not None
    assert tensor.read_blocks is not None
    return dequantize(tensor.block_type, tensor.read_blocks()).reshape(tensor.shape)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("expert_parallel", [False, True])
def test_tensors_of_every_family_have_the_shapes_of_the_ranks_part(
    tiny_checkpoint: Checkpoints, tiny_checkpoints: ModuleType, size: int, expert_parallel: bool
) -> None:
    for kind in {**tiny_checkpoints.KINDS, **tiny_checkpoints.FAMILY_KINDS}:
        checkpoint = open_checkpoint(tiny_checkpoint(kind))
        if checkpoint.config.has_attention and checkpoint.config.kv_attention.head_count < size:
            continue
        if expert_parallel and not checkpoint.config.has_experts:
            continue
        for rank in ranks_of(checkpoint, size, expert_parallel=expert_parallel):
            found = {tensor.name: tensor.shape for tensor in rank.tensors()}
            assert found == tensor_shapes(rank.config), kind
            assert rank.weight_bytes == sum(tensor.byte_count for tensor in rank.tensors())
            for tensor in rank.tensors():
                assert values_of(tensor).shape == tensor.shape, (kind, tensor.name)


@pytest.mark.parametrize("size", [2, 3])
def test_shards_of_all_ranks_together_are_the_whole_tensor(tiny_checkpoint: Checkpoints, size: int) -> None:
    whole = open_checkpoint(tiny_checkpoint("llama-wide"))
    parts = [named(rank) for rank in ranks_of(whole, size)]
    for name, tensor in named(whole).items():
        module = name.split(".")[-2]
        own = [values_of(part[name]) for part in parts]
        if module in ("o_proj", "down_proj"):
            assert (np.concatenate(own, 1) == values_of(tensor)).all(), name
        elif module.endswith("norm"):
            assert all((each == values_of(tensor)).all() for each in own), name
        elif module not in ("k_proj", "v_proj") or size == 2:  # three ranks share two KV heads
            assert (np.concatenate(own) == values_of(tensor)).all(), name


def test_bias_of_a_summed_product_is_only_in_rank_0(tiny_checkpoint: Checkpoints) -> None:
    whole = open_checkpoint(tiny_checkpoint("llama-biased"))
    first, second = (named(rank) for rank in ranks_of(whole, 2))
    for name in ("layers.0.o_proj.bias", "layers.1.down_proj.bias"):
        assert (values_of(first[name]) == values_of(named(whole)[name])).all()
        assert values_of(first[name]).any()
        assert not values_of(second[name]).any()
        assert second[name].shape == first[name].shape
    bias = values_of(named(whole)["layers.0.q_proj.bias"])
    assert (np.concatenate([values_of(part["layers.0.q_proj.bias"]) for part in (first, second)]) == bias).all()


def test_bias_of_whole_experts_is_in_their_rank(tiny_checkpoint: Checkpoints) -> None:
    whole = open_checkpoint(tiny_checkpoint("gpt-oss"))
    for rank in ranks_of(whole, 3, expert_parallel=True):
        own = named(rank)
        for expert in rank.config.experts_of(0):
            name = f"layers.0.experts.{expert}.down_proj.bias"
            assert (values_of(own[name]) == values_of(named(whole)[name])).all()
            assert values_of(own[name]).any()


def test_consecutive_rows_of_a_shard_are_read_without_a_copy(tiny_checkpoint: Checkpoints) -> None:
    whole = open_checkpoint(tiny_checkpoint("llama"))
    second = named(RankCheckpoint(whole, 1, 2))
    for name, first_row in (("layers.0.gate_proj.weight", 48), ("embed.weight", 160), ("layers.1.v_proj.weight", 16)):
        rows, of_whole = second[name].rows, named(whole)[name].rows
        assert rows is not None
        assert of_whole is not None
        assert rows.row_bytes == of_whole.row_bytes
        assert rows.offset == of_whole.offset + first_row * rows.row_bytes
        assert (values_of(rows.part(3, 4)) == values_of(named(whole)[name])[first_row + 3 : first_row + 7]).all()
    assert second["layers.0.down_proj.weight"].rows is None  # columns are not contiguous in the file


@pytest.mark.parametrize("quant_type", ["Q8_0", "Q4_0", "Q4_K", "Q6_K", "IQ4_XS"])
def test_quantized_blocks_are_kept_unless_a_shard_border_divides_a_block(
    tiny_gguf: Checkpoints, quant_type: str
) -> None:
    whole = open_checkpoint(tiny_gguf("llama-wide", quant_type))
    has_large_blocks = quant_type not in ("Q8_0", "Q4_0")
    for rank in ranks_of(whole, 2):
        for name, tensor in named(rank).items():
            if tensor.block_type is not None:
                assert (numbers(tensor) == values_of(tensor)).all(), name
        kept = {name for name, tensor in named(rank).items() if tensor.block_type == quant_type}
        assert {"embed.weight", "layers.0.q_proj.weight", "layers.0.gate_proj.weight"} <= kept
        assert "layers.0.down_proj.weight" in kept  # each rank has 256 of 512 inputs
        # 4 heads of 64: each rank has 128 inputs, so a cut goes through blocks of 256.
        assert ("layers.0.o_proj.weight" in kept) != has_large_blocks
        o_proj = named(rank)["layers.0.o_proj.weight"]
        assert rank.config.part is not None
        first = 128 * rank.config.part.rank
        expect = values_of(named(whole)["layers.0.o_proj.weight"])[:, first : first + 128]
        assert (values_of(o_proj) == expect).all()


@pytest.mark.parametrize("variant", ["awq-32", "gptq-4", "fp8-block", "float8-channel"])
def test_quantized_matrices_of_safetensors_are_divided_among_ranks(
    tiny_checkpoint: Checkpoints, tiny_quantized: ModuleType, tmp_path: Path, variant: str
) -> None:
    tiny_quantized.write_quantized(tiny_checkpoint("llama-wide"), tmp_path, variant)
    whole = open_checkpoint(tmp_path)
    parts = [named(rank) for rank in ranks_of(whole, 2)]
    for name, tensor in named(whole).items():
        module = name.split(".")[-2]
        if not module.endswith("proj"):
            continue
        axis = 1 if module in ("o_proj", "down_proj") else 0
        assert (np.concatenate([values_of(part[name]) for part in parts], axis) == values_of(tensor)).all(), name
        assert {part[name].block_type for part in parts} == {tensor.block_type}
        if tensor.read_blocks is not None:
            reads = [part[name].read_blocks for part in parts]
            blocks = [read() for read in reads if read is not None]
            if axis == 1 and tensor.block_type == FP8_ROWS:  # Each rank has the scale of the row.
                assert all((block[:, :4] == tensor.read_blocks()[:, :4]).all() for block in blocks)
                blocks[1:] = [block[:, 4:] for block in blocks[1:]]
            assert (np.concatenate(blocks, axis) == tensor.read_blocks()).all(), name
