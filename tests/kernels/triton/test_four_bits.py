"""Tests of products with 4-bit weights against the float64 reference on the unpacked values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from trioserve_kernels import triton
from trioserve_kernels.four_bits import FourBitWeight
from trioserve_kernels.triton import four_bit_product, invariant
from trioserve_kernels.triton.four_bit_product import FEW_ROWS, TILE

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}  # as in conftest.py


def weight_of(outputs: int, inputs: int, group: int, kind: str, *, device: str) -> FourBitWeight:
    """Make a weight with values below 1 / sqrt(inputs). The memory after its codes and scales holds NaN or 255.

    Args:
        kind: "centered", "minimum" or "mxfp4".
    """
    draw = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 256, (outputs + 1, inputs // 2), dtype=torch.uint8, generator=draw).to(device)
    if kind == "mxfp4":
        exponents = torch.randint(117, 121, (outputs + 1, inputs // group), dtype=torch.uint8, generator=draw)
        exponents[-1] = 255
        return FourBitWeight(codes[:outputs], exponents.to(device)[:outputs], None)
    has_min = kind == "minimum"
    scales = torch.randn(outputs + 1, inputs // group, generator=draw) / (8 * inputs**0.5)
    scales[-1] = float("nan")
    scales = scales.to(torch.float32 if has_min else torch.float16).to(device)
    mins = scales * -6.5 if has_min else None
    return FourBitWeight(codes[:outputs], scales[:outputs], None if mins is None else mins[:outputs])


@pytest.mark.parametrize("rows", (1, FEW_ROWS, FEW_ROWS + 1, TILE[0] + 1))
@pytest.mark.parametrize("inputs, outputs", ((128, TILE[1]), (384, 40), (640, TILE[1] + 24)))
@pytest.mark.parametrize(
    "group, kind", ((32, "centered"), (64, "minimum"), (128, "minimum"), (128, "centered"), (32, "mxfp4"))
)
def test_product_with_four_bit_weights_equals_the_reference(
    rows: int,
    inputs: int,
    outputs: int,
    group: int,
    kind: str,
    product_dtype: torch.dtype,
    numbers: Callable[..., Tensor],
    device: str,
) -> None:
    weight = weight_of(outputs, inputs, group, kind, device=device)
    values, bias = numbers(rows, inputs, dtype=product_dtype), numbers(outputs, dtype=product_dtype, seed=2)
    product = values.double() @ weight.numbers(product_dtype).double().T
    tolerance = TOLERANCES[product_dtype]
    for given in (bias, None):
        wanted = product if given is None else product + given.double()
        for kernels in (triton, invariant):
            got = kernels.four_bit_linear(values, weight, given)
            torch.testing.assert_close(got.double(), wanted, atol=tolerance, rtol=tolerance)


def test_rows_of_a_four_bit_product_may_be_columns_of_a_wider_tensor(
    numbers: Callable[..., Tensor], device: str
) -> None:
    weight = weight_of(48, 128, 64, "minimum", device=device)
    wide = numbers(5, 300)
    got = triton.four_bit_linear(wide[:, 100:228], weight, None)
    wanted = wide[:, 100:228].double() @ weight.numbers(torch.float32).double().T
    torch.testing.assert_close(got.double(), wanted, atol=1e-5, rtol=1e-5)
    assert triton.four_bit_linear(wide[:0, :128], weight, None).shape == (0, 48)


@pytest.mark.parametrize("group, kind", ((64, "minimum"), (32, "mxfp4")))
def test_row_of_a_four_bit_product_has_the_same_bits_without_the_other_rows(
    group: int, kind: str, product_dtype: torch.dtype, numbers: Callable[..., Tensor], device: str
) -> None:
    """Check the batch-invariant mode at each index of a tile and with any number of rows."""
    weight = weight_of(150, 256, group, kind, device=device)
    values = numbers(2 * TILE[0] + 3, 256, dtype=product_dtype)
    together = invariant.four_bit_linear(values, weight, None)
    for row in range(values.shape[0]):
        assert torch.equal(invariant.four_bit_linear(values[row : row + 1], weight, None)[0], together[row])
    assert torch.equal(invariant.four_bit_linear(values[5:100], weight, None), together[5:100])


def test_kernel_unpacks_every_code_and_scale_of_mxfp4(device: str) -> None:
    """A row of the identity reads one value. Scale 255 gives the values of ldexp, which are infinite above float32."""
    codes = torch.arange(256, dtype=torch.uint8, device=device).repeat(256, 1)[:, :16]
    codes = torch.stack([codes * step for step in (1, 17)], 1).view(512, 16)
    scales = torch.arange(256, dtype=torch.uint8, device=device).repeat_interleave(2)[:, None]
    weight = FourBitWeight(codes, scales, None)
    wanted = weight.numbers(torch.float32)
    magnitudes = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    table = torch.tensor((*magnitudes, *(-each for each in magnitudes)), dtype=torch.float64, device=device)
    order = torch.cat((codes & 15, codes >> 4), 1).int()
    torch.testing.assert_close(wanted, (table[order] * 2.0 ** (scales.double() - 127)).float(), rtol=0, atol=0)
    is_finite = scales[:, 0] < 253  # Infinity times 0, in other rows of the product, is NaN.
    weight = FourBitWeight(codes[is_finite], scales[is_finite], None)
    got = triton.four_bit_linear(torch.eye(32, device=device), weight, None)
    torch.testing.assert_close(got, wanted[is_finite].T, rtol=0, atol=0)


@pytest.mark.parametrize("programs", (2, 4, 64))
@pytest.mark.parametrize("group, kind", ((128, "minimum"), (32, "mxfp4")))
def test_programs_divide_the_depth_of_a_product_with_few_rows(
    programs: int,
    group: int,
    kind: str,
    numbers: Callable[..., Tensor],
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every launch leaves the counters at 0. A repeated product has the same bits."""
    monkeypatch.setattr(four_bit_product, "program_count", lambda *_: programs)
    weight = weight_of(40, 1152, group, kind, device=device)
    values, bias = numbers(5, 1152), numbers(40, seed=2)
    assert four_bit_product._splits(values, 40) == {2: 1, 4: 2, 64: 4}[programs]
    wanted = values.double() @ weight.numbers(torch.float32).double().T + bias.double()
    got = [triton.four_bit_linear(values, weight, bias) for _ in range(2)]
    torch.testing.assert_close(got[0].double(), wanted, atol=1e-5, rtol=1e-5)
    assert torch.equal(*got)
    assert not four_bit_product._arrivals(values.device).any()
