from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from trioserve.model.loading.checkpoint import open_checkpoint

# Half a step of the coarsest block: the tiny weights are normal with a standard deviation of 0.1, so a block spans at
# most 0.9, and its absolute maximum is below 0.5. Rounding of scales to float16 (Q8_0 to Q4_1) or to 6 or 8 bits (K
# quants) adds an error to the largest values.
LARGEST_ERROR = {"F32": 0.0, "F16": 2.0**-12, "BF16": 2.0**-9, "Q8_0": 0.5 / 127, "Q4_0": 0.5 / 8, "Q4_1": 0.9 / 15}
LARGEST_ERROR |= {"Q5_0": 0.5 / 16, "Q5_1": 0.9 / 31, "Q4_K": 0.9 / 15, "Q5_K": 0.9 / 31, "Q6_K": 0.5 / 31}
LARGEST_ERROR |= {"Q2_K": 0.9 / 3, "Q3_K": 0.5 / 3, "IQ4_NL": 0.5 / 6, "IQ4_XS": 0.5 / 6}


@pytest.mark.slow
def test_quantized_checkpoints_are_close_to_the_original(
    tiny_checkpoints: Any, tiny_checkpoint: Callable[..., Path], tiny_gguf: Callable[..., Path], tensors_of: Any
) -> None:
    original = tensors_of(open_checkpoint(tiny_checkpoint("llama-wide")))
    assert set(tiny_checkpoints.GGUF_QUANT_TYPES) == set(LARGEST_ERROR)
    for quant_type, largest_error in LARGEST_ERROR.items():
        checkpoint = open_checkpoint(tiny_gguf("llama-wide", quant_type))
        for name, tensor in tensors_of(checkpoint).items():
            error = np.abs(tensor.float().numpy() - original[name].numpy())
            if tensor.ndim == 1:
                assert error.max() == 0.0
            else:
                assert error.max() <= largest_error, (quant_type, name)
                if quant_type not in ("F32", "F16", "BF16"):
                    assert error.max() > largest_error / 20, "an error this small means that nothing was quantized"


@pytest.mark.parametrize(
    "quant_type",
    ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"],
)
def test_every_tensor_equals_the_gguf_packages_result(
    tiny_gguf: Callable[..., Path], quant_type: str, tensors_of: Any
) -> None:
    path = tiny_gguf("llama-wide", quant_type)
    given = tensors_of(open_checkpoint(path))
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for name, outside in (
        ("embed.weight", "token_embd.weight"),
        ("layers.0.down_proj.weight", "blk.0.ffn_down.weight"),
    ):
        expected = gguf.quants.dequantize(stored[outside].data, stored[outside].tensor_type)
        assert np.array_equal(given[name].numpy(), expected), name


@pytest.mark.parametrize("quant_type", ["Q8_0", "F16"])
def test_dequantized_values_do_not_depend_on_the_slice_size(
    tiny_gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, quant_type: str
) -> None:
    checkpoint = open_checkpoint(tiny_gguf("llama", quant_type))
    at_once = {tensor.name: tensor.read("bfloat16") for tensor in checkpoint.tensors()}
    # No tensor's size is a multiple of this slice size.
    monkeypatch.setattr("trioserve.model.loading.stored_tensor.SLICE_VALUES", 39 * 32)
    for tensor in checkpoint.tensors():
        assert np.array_equal(tensor.read("bfloat16"), at_once[tensor.name]), tensor.name
