"""Tests of the kernels that compute row by row: norm, rotary embedding with the KV write, and activation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from trioserve_kernels import reference, triton
from trioserve_kernels.kv_format import CODED_DTYPES, encode


@pytest.mark.parametrize("rows, columns", ((1, 64), (5, 576), (3, 1500)))
def test_triton_rms_norm_equals_the_reference(
    rows: int, columns: int, dtype: torch.dtype, numbers: Callable[..., Tensor], check_close: Callable[..., None]
) -> None:
    values, weight = numbers(rows, columns, dtype=dtype), numbers(columns, dtype=dtype, seed=1)
    wanted = reference.rms_norm(values.double(), weight.double(), 1e-3)
    check_close(triton.rms_norm(values, weight, 1e-3), wanted)


def test_rms_norm_of_heads_inside_wider_rows_equals_the_reference(
    dtype: torch.dtype, numbers: Callable[..., Tensor], check_close: Callable[..., None]
) -> None:
    heads = numbers(7, 12, 80, dtype=dtype)[:, 2:9]
    check_close(triton.rms_norm(heads, None, 1e-5), reference.rms_norm(heads.double(), None, 1e-5))


def test_residual_sum_is_computed_before_the_norm(
    dtype: torch.dtype, numbers: Callable[..., Tensor], check_close: Callable[..., None], device: str
) -> None:
    hidden, product, weight = (
        numbers(3, 576, dtype=dtype),
        numbers(3, 576, dtype=dtype, seed=1),
        numbers(576, dtype=dtype, seed=2),
    )
    added = hidden + product
    normed = triton.add_rms_norm_(hidden, product, weight, 1e-5)
    check_close(hidden, added.double())
    if device == "cuda" or dtype != torch.bfloat16:
        assert torch.equal(hidden, added)  # The kernel must round like torch. The interpreter truncates bfloat16.
    before = hidden.clone()
    # The norm is that of the rounded sum.
    check_close(normed, reference.rms_norm(hidden.double(), weight.double(), 1e-5))
    assert torch.equal(triton.add_rms_norm_(hidden, None, weight, 1e-5), normed)
    assert torch.equal(hidden, before)


@pytest.mark.parametrize("has_norm", (False, True))
@pytest.mark.parametrize("head_dim, heads, kv_heads", ((64, 9, 3), (80, 2, 2), (96, 8, 1), (128, 4, 2)))
def test_rotary_rotates_heads_and_writes_keys_and_values(
    has_norm: bool,
    head_dim: int,
    heads: int,
    kv_heads: int,
    dtype: torch.dtype,
    numbers: Callable[..., Tensor],
    check_close: Callable[..., None],
    device: str,
) -> None:
    qkv = numbers(3, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    cos, sin = numbers(3, 1, head_dim, dtype=dtype, seed=1), numbers(3, 1, head_dim, dtype=dtype, seed=2)
    slots = torch.tensor([9, 0, 6], device=device)
    cache = numbers(12, 2 * kv_heads * head_dim, dtype=dtype, seed=3)
    wanted, wanted_cache = qkv.double(), cache.double()
    weight = numbers((heads + kv_heads) * head_dim, dtype=dtype, seed=4) * 0.1  # Norms round twice more.
    norm = (weight, 1e-2) if has_norm else None
    exact_norm = (weight.double(), 1e-2) if has_norm else None
    reference.rotary_and_store_kv_(wanted, cos.double(), sin.double(), wanted_cache, slots, kv_heads, exact_norm)
    before = cache.clone()
    triton.rotary_and_store_kv_(qkv, cos, sin, cache, slots, kv_heads, norm)
    check_close(qkv, wanted)
    check_close(cache, wanted_cache)
    assert torch.equal(cache[slots], qkv[:, heads * head_dim :])
    others = [slot for slot in range(12) if slot not in (9, 0, 6)]
    assert torch.equal(cache[others], before[others])


@pytest.mark.parametrize("kv_format", CODED_DTYPES)
def test_writes_of_8_bits_equal_the_format(kv_format: str, numbers: Callable[..., Tensor], device: str) -> None:
    """Use numbers of all sizes: large, small, zero, and heads with NaN or infinity. The bytes must be equal."""
    head_dim, heads, kv_heads, rows = 80, 2, 3, 9
    qkv = numbers(rows, (heads + 2 * kv_heads) * head_dim) * torch.logspace(-6, 4, rows, device=device)[:, None]
    qkv *= torch.logspace(-4, 0, 8 * head_dim, device=device)[torch.randperm(8 * head_dim, device=device)]
    values = qkv.view(rows, -1, head_dim)[:, heads + kv_heads :]
    values[0, 0] = 0.0
    values[1, 1, 3] = float("nan")
    values[2, 2, 79] = -float("inf")
    values[3, 0] *= 1e-35
    cos, sin = numbers(rows, 1, head_dim, seed=1), numbers(rows, 1, head_dim, seed=2)
    dtype = CODED_DTYPES[kv_format]
    slots = torch.arange(rows, device=device) + 1
    cache = torch.zeros(12, 2 * kv_heads * (head_dim + 2), dtype=torch.uint8, device=device)
    triton.rotary_and_store_kv_(qkv, cos, sin, cache.view(dtype), slots, kv_heads)
    wanted = encode(qkv.view(rows, -1, head_dim)[:, heads:], dtype)
    got = cache[slots].view(wanted.shape)
    for head in ((1, kv_heads + 1), (2, kv_heads + 2)):  # NaN has more than one representation
        for bytes_of_head in (wanted, got):
            assert bytes_of_head[head][-2:].view(torch.bfloat16).isnan().all()
            bytes_of_head[head][-2:] = 0
    assert torch.equal(got, wanted)
    assert cache[[0, 10, 11]].count_nonzero() == 0


@pytest.mark.parametrize("columns", (16, 96, 9000))
def test_rows_in_fp8_have_the_codes_of_the_reference(
    columns: int, dtype: torch.dtype, numbers: Callable[..., Tensor], device: str
) -> None:
    """Use rows of different sizes, with zeros, infinity and NaN."""
    values = numbers(7, 2 * columns, dtype=torch.float32)[:, :columns]
    values *= torch.logspace(-4, 4, 7, device=device)[:, None]
    values[1] = 0.0
    values[2, 3] = float("nan")
    values[4, columns - 1] = -float("inf")
    values = values.to(dtype)
    codes, scales = triton.fp8_rows(values)
    wanted, wanted_scales = reference.fp8_rows(values)
    finite = [0, 1, 3, 5, 6]
    assert torch.equal(codes[finite].view(torch.uint8), wanted[finite].view(torch.uint8))
    assert torch.equal(scales[finite], wanted_scales[finite])
    for row in (2, 4):
        assert (codes[row].float() * scales[row]).isnan().all()


@pytest.mark.parametrize("columns", (10, 1025))
def test_activation_times_up_equals_the_reference(
    columns: int, dtype: torch.dtype, numbers: Callable[..., Tensor], check_close: Callable[..., None]
) -> None:
    gate_up = numbers(3, 2 * columns, dtype=dtype)
    check_close(triton.activate_and_mul(gate_up), reference.activate_and_mul(gate_up.double()))
    for activation in ("relu2", "silu"):
        wanted = reference.activate(gate_up.double(), activation)
        check_close(triton.activate(gate_up, activation), wanted)
    for activation in ("gelu", "gelu_tanh", "relu", "relu2", "clamped_swiglu"):
        if activation == "clamped_swiglu":
            gate_up = gate_up * 4  # The numbers are so large that some values are clamped.
        wanted = reference.activate_and_mul(gate_up.double(), activation)
        check_close(triton.activate_and_mul(gate_up, activation), wanted)
