"""Tests of keys and values in 8 bits in torch: rounding errors, and attention over the decoded numbers.

The same tests of the native kernels are in test_native.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trioserve_kernels import reference, reference_invariant
from trioserve_kernels.kv_format import CODED_DTYPES, decode, encode, head_dim_of, is_coded

FORMATS = pytest.mark.parametrize("kv_format", ("int8", "fp8"))
DTYPES = pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("float32", "bfloat16"))


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def coded(heads: Tensor, kv_format: str) -> Tensor:
    dtype = CODED_DTYPES[kv_format]
    return encode(heads, dtype).view(dtype)


@FORMATS
def test_rounding_error_of_8_bit_kv_is_at_most_half_a_step(kv_format: str) -> None:
    heads = random(50, 3, 64) * torch.logspace(-6, 4, 50)[:, None, None]
    heads[7] = 0
    kept = decode(coded(heads, kv_format), torch.float32)
    largest = heads.abs().amax(-1, keepdim=True)
    # The scale is a bfloat16, rounded up by at most 2 ** -7.
    step = largest / 127 if kv_format == "int8" else torch.maximum(heads.abs() / 8, largest / 448 * 2.0**-9)
    assert ((kept - heads).abs() <= 0.5 * step * (1 + 2.0**-7) + 1e-30).all()
    assert (kept[7] == 0).all()
    assert ((kept - heads).abs().amax(-1) > 0.1 * step.amax(-1))[:7].any(), "so exact is nothing of 8 bits"


@FORMATS
def test_nan_or_infinity_in_one_kv_head_changes_no_other_head(kv_format: str) -> None:
    heads = random(4, 3, 32)
    heads[1, 2, 5], heads[3, 0, 31] = float("nan"), float("-inf")
    is_finite = decode(coded(heads, kv_format), torch.bfloat16).isfinite().all(-1)
    expected = torch.ones(4, 3, dtype=torch.bool)
    expected[1, 2] = expected[3, 0] = False
    assert torch.equal(is_finite, expected)


def test_numbers_that_fp8_can_represent_stay_exact() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 127) != 127]  # NaN
    numbers = codes.view(torch.float8_e4m3fn).float()[None]
    assert torch.equal(decode(coded(numbers, "fp8"), torch.float32), numbers)


@FORMATS
def test_8_bit_slots_are_written_and_cleared(kv_format: str) -> None:
    pages = torch.zeros(3, 4, 2, 2, 16 + 2, dtype=torch.uint8).view(CODED_DTYPES[kv_format])
    rows = pages.view(12, -1)
    assert is_coded(pages)
    assert head_dim_of(pages) == 16
    keys_values = random(3, 2 * 2 * 16)
    reference.store_kv_(rows, keys_values, torch.tensor([5, 9, 2]))
    found = reference.gather_context(pages, torch.tensor([1, 2, 0]), torch.float32)
    expected = decode(coded(keys_values.view(3, 2, 2, 16), kv_format), torch.float32)
    assert torch.equal(found[[1, 5, 10]], expected)
    assert (found[[0, 2, 3]] == 0).all()
    reference.clear_slots_(rows, torch.tensor([9]))
    assert (reference.gather_context(pages, torch.tensor([2]), torch.float32) == 0).all()


@FORMATS
@DTYPES
@pytest.mark.parametrize("batch_invariant", (False, True))
def test_torch_attends_over_decoded_8_bit_kv(kv_format: str, dtype: torch.dtype, batch_invariant: bool) -> None:
    kernels = reference_invariant if batch_invariant else reference
    pages = coded(random(9, 8, 2, 2, 32), kv_format)
    queries = random(6, 4 * 32, dtype=dtype, seed=2)
    table = torch.tensor([[4, 1, 7, 0, 3, 5]], dtype=torch.int32)
    found, expected = torch.empty_like(queries), torch.empty_like(queries)
    rows, tiles = torch.tensor([0, 6], dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32)
    for result, of in ((found, pages), (expected, decode(pages, dtype))):
        kernels.paged_chunks_(result, queries, of, table, torch.tensor([45], dtype=torch.int32), rows, tiles, None)
    assert torch.equal(found, expected)
