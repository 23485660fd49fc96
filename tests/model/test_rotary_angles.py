"""Tests that rotary angles from the table equal computed angles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from trioserve.model.loading.checkpoint import open_checkpoint
from trioserve.model.torch_step import layers
from trioserve.model.torch_step.layers import RotaryAngles


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("kind", ("llama", "llama3-rope", "qwen3"))
def test_rotary_table_equals_computed_angles(
    kind: str, dtype: torch.dtype, tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The positions of a step are in any order, some are repeated, and the first and the last position are included."""
    config = msgspec.structs.replace(open_checkpoint(tiny_checkpoint(kind)).config, context_tokens_max=3_001)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    looked_up = RotaryAngles(config.heads.rotary, config.heads.head_dim, config, dtype=dtype, device=device)
    monkeypatch.setattr(layers, "ANGLE_TABLE_BYTES_MAX", 2 * 3_001 * config.heads.head_dim * dtype.itemsize - 1)
    computed = RotaryAngles(config.heads.rotary, config.heads.head_dim, config, dtype=dtype, device=device)
    # One object has a table that ends with the longest context. The other object has no table.
    if device.type == "cpu":
        with pytest.raises(IndexError):
            looked_up.cos_sin(torch.tensor([3_001]))
        computed.cos_sin(torch.tensor([3_001]))
    for positions in ([0], [3_000, 0, 17, 17, 5], torch.randperm(3_001).tolist()):
        there = torch.tensor(positions, device=device)
        for got, wanted in zip(looked_up.cos_sin(there), computed.cos_sin(there), strict=True):
            # The rounding of a cosine may depend on its place in a vector.
            torch.testing.assert_close(got, wanted, atol=torch.finfo(dtype).eps, rtol=0)
            assert got.shape == (len(positions), 1, config.heads.head_dim)
            assert got.is_contiguous()
