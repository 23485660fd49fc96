from __future__ import annotations

import gguf
import pytest
import torch

from trioserve_kernels.four_bits import join, weight_of_blocks
from trioserve_kernels.reference import four_bit_linear


def blocks_of(block_type: str, numbers: torch.Tensor) -> torch.Tensor:
    kind = gguf.GGMLQuantizationType[block_type]
    return torch.from_numpy(gguf.quants.quantize(numbers.numpy(), kind))


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("block_type", ("Q4_0", "Q4_1", "MXFP4"))
def test_unpacked_values_equal_those_of_the_gguf_package(block_type: str) -> None:
    parts = [blocks_of(block_type, random(rows, 256, seed=rows)) for rows in (24, 8)]
    weight = join([weight_of_blocks(block_type, part) for part in parts])
    kind = gguf.GGMLQuantizationType[block_type]
    wanted = torch.cat([torch.from_numpy(gguf.quants.dequantize(part.numpy(), kind)) for part in parts])
    assert (weight.outputs, weight.inputs, weight.group) == (32, 256, 32)
    torch.testing.assert_close(weight.numbers(torch.float32), wanted, rtol=0, atol=2.0**-22)
    values = random(5, 256, seed=1)
    torch.testing.assert_close(four_bit_linear(values, weight, None), values @ wanted.T)


@pytest.mark.parametrize("group", (32, 64, 128))
def test_join_of_four_bit_matrices_merges_blocks_with_equal_scales(group: int) -> None:
    """Merge only if the blocks of all parts have equal scales."""
    blocks = torch.randint(0, 256, (40, 8, 24), dtype=torch.uint8, generator=torch.Generator().manual_seed(4))
    for start in range(0, 8, group // 32):
        blocks[:, start : start + group // 32, :8] = random(40, 1, 2, seed=start).view(torch.uint8).view(40, 1, 8)
    plain = weight_of_blocks("Q4_F32", blocks.view(40, -1))
    joined = join([plain])
    assert joined.group == group
    assert torch.equal(joined.numbers(torch.float32), plain.numbers(torch.float32))
    other = blocks.clone()
    other[3, 0, 0] ^= 1
    mixed = join([plain, weight_of_blocks("Q4_F32", other.view(40, -1))])
    assert mixed.group == 32
    assert mixed.byte_count > 2 * joined.byte_count or group == 32
