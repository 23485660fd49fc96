"""Tests of the grouped products and of the weighted sum of experts, against products of single groups in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from trioserve_kernels import reference, triton
from trioserve_kernels.four_bits import weight_of_blocks
from trioserve_kernels.triton import invariant
from trioserve_kernels.triton.product import FEW_ROWS_TILE, OUTPUT_BLOCK, ROW_BLOCK

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
DEPTH, OUTPUTS = 96, OUTPUT_BLOCK + 24
# Rows of each group: groups without rows at each place, all rows in one group, more rows than a tile, and one row each.
COUNTS = (
    (0, 3, 0, FEW_ROWS_TILE[0] + 1, 0),
    (0, 0, 40, 0, 0),
    (ROW_BLOCK + 1, 2, 5 * ROW_BLOCK, 0, 1),
    (1, 1, 1, 1, 1),
    (0, 0, 0, 0, 0),
)


def ends_of(counts: tuple[int, ...], device: str) -> Tensor:
    return torch.tensor(counts, device=device).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("has_bias", (False, True), ids=("plain", "biased"))
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_grouped_product_equals_products_of_the_groups(
    counts: tuple[int, ...],
    has_bias: bool,
    product_dtype: torch.dtype,
    numbers: Callable[..., Tensor],
    device: str,
) -> None:
    """Rows after the last group belong to no group, as rows of other ranks' experts."""
    groups, rows = len(counts), sum(counts)
    values = numbers(rows + 3, DEPTH, dtype=product_dtype)
    weight = numbers(groups, OUTPUTS, DEPTH, dtype=product_dtype, seed=1) / DEPTH**0.5
    bias = numbers(groups, OUTPUTS, dtype=product_dtype, seed=2) if has_bias else None
    ends = ends_of(counts, device)
    wanted = reference.linear_by_group(
        values.double(), weight.double(), ends, None if bias is None else bias.double(), torch.nn.functional.linear
    )
    tolerance = TOLERANCES[product_dtype]
    for kernels in (triton, invariant):
        got = kernels.grouped_linear(values, weight, ends, bias)
        torch.testing.assert_close(got[:rows].double(), wanted[:rows], atol=tolerance, rtol=tolerance)


def test_row_of_a_grouped_product_has_the_same_bits_without_the_other_rows(
    product_dtype: torch.dtype, numbers: Callable[..., Tensor], device: str
) -> None:
    counts = (2, ROW_BLOCK + 3, 0, 1)
    values = numbers(sum(counts), DEPTH, dtype=product_dtype)
    weight = numbers(len(counts), OUTPUTS, DEPTH, dtype=product_dtype, seed=1)
    together = invariant.grouped_linear(values, weight, ends_of(counts, device), None)
    for row in (0, 1, 2, 5, ROW_BLOCK + 1, ROW_BLOCK + 4, sum(counts) - 1):
        group = next(index for index in range(4) if row < sum(counts[: index + 1]))
        alone = ends_of(tuple(int(index == group) for index in range(4)), device)
        assert torch.equal(invariant.grouped_linear(values[row : row + 1], weight, alone, None)[0], together[row])


@pytest.mark.parametrize("block_type", ("Q4_0", "Q4_1", "MXFP4"))
@pytest.mark.parametrize("counts", COUNTS[:3], ids=str)
def test_grouped_product_in_four_bits_equals_the_unpacked_product(
    counts: tuple[int, ...], block_type: str, numbers: Callable[..., Tensor], device: str
) -> None:
    size, groups, rows = {"Q4_0": 2, "Q4_1": 4, "MXFP4": 1}[block_type], len(counts), sum(counts)
    blocks = torch.zeros(groups * OUTPUTS, DEPTH // 32, size + 16, dtype=torch.uint8)
    if block_type == "MXFP4":
        blocks[..., 0] = 122 + torch.arange(groups * OUTPUTS)[:, None] % 4
    else:
        blocks[..., :size] = (numbers(groups * OUTPUTS, DEPTH // 32, size // 2) / 8).half().cpu().view(torch.uint8)
    blocks[..., size:] = torch.randint(0, 256, (16,), generator=torch.Generator().manual_seed(3), dtype=torch.uint8)
    weight = weight_of_blocks(block_type, blocks.flatten(1).to(device))
    values, bias = numbers(rows, DEPTH), numbers(groups, OUTPUTS, seed=2)
    ends = ends_of(counts, device)
    wanted = reference.linear_by_group(values, weight, ends, bias, torch.nn.functional.linear)
    for kernels in (triton, invariant):
        torch.testing.assert_close(kernels.grouped_linear(values, weight, ends, bias), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rows", (1, 5))
def test_weighted_sum_leaves_out_products_without_weight(
    rows: int, dtype: torch.dtype, numbers: Callable[..., Tensor], check_close: Callable[..., None]
) -> None:
    """A product that is left out is NaN. Columns end within a block."""
    products, weights = numbers(rows, 3, 1030, dtype=dtype), numbers(rows, 3, seed=1)
    weights[-1, 1] = 0.0
    wanted = (products.double() * weights.double()[..., None]).sum(1)
    products[-1, 1] = float("nan")
    check_close(triton.weighted_sum(products, weights), wanted)
    check_close(reference.weighted_sum(products, weights), wanted)
