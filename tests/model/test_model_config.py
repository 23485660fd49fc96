from __future__ import annotations

import math
from typing import Any

import pytest

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.model_config import ModelConfig, RopeScaling

GOOD: dict[str, Any] = {
    "architecture": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "layer_count": 2,
    "head_count": 4,
    "kv_head_count": 2,
    "head_dim": 16,
    "context_tokens_max": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_output_bias": False,
    "mlp_bias": False,
    "qk_norm": False,
    "sliding_windows": (None, 8),
    "bos_token_id": 1,
    "eos_token_ids": (2, 4),
    "dtype_name": "float32",
}


def test_dimensions_that_belong_together_are_accepted() -> None:
    assert ModelConfig(**GOOD).sliding_windows == (None, 8)


@pytest.mark.parametrize(
    "name, value, said",
    [
        ("architecture", "gemma", "supported are llama, mistral, qwen2, qwen3"),
        ("vocab_size", 0, "vocab_size is 0, allowed is 1 to"),
        ("hidden_size", -64, "hidden_size is -64"),
        ("intermediate_size", 2**60, "intermediate_size"),
        ("layer_count", 10**9, "layer_count is 1000000000, allowed is 1 to 1024"),
        ("head_count", 0, "head_count is 0"),
        ("kv_head_count", 3, "each key/value head must serve the same number of heads"),
        ("head_dim", 15, "head_dim is 15, but rotary positions need an even one"),
        ("context_tokens_max", 2**40, "context_tokens_max"),
        ("rms_norm_eps", 0.0, "rms_norm_eps is 0.0"),
        ("rms_norm_eps", math.nan, "rms_norm_eps is nan"),
        ("rope_theta", math.inf, "rope_theta is inf"),
        ("sliding_windows", (None,), "given for 1 layers, the model has 2"),
        ("sliding_windows", (None, 0), "sliding_window is 0"),
        ("bos_token_id", 320, "special token id is 320, but the vocabulary has 320 tokens"),
        ("eos_token_ids", (2, -1), "special token id is -1"),
        ("dtype_name", "int8", "stores int8"),
        (
            "rope_scaling",
            RopeScaling(kind="llama3", factor=8.0, frequency_factors=(1.0,) * 7),
            "7 rope frequency factors, but head_dim 16 needs 8",
        ),
    ],
)
def test_dimensions_that_cannot_be_are_refused_by_name(name: str, value: object, said: str) -> None:
    with pytest.raises(ModelLoadError, match=said):
        ModelConfig(**{**GOOD, name: value})


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"factor": 0.0}, "rope scaling factor is 0.0"),
        ({"factor": math.nan}, "rope scaling factor is nan"),
        ({"low_freq_factor": 4.0}, "must be below high_freq_factor"),
        ({"original_context_tokens": 0}, "original_max_position_embeddings is 0"),
        ({"attention_factor": -1.0}, "attention_factor is -1.0"),
        ({"frequency_factors": (1.0, 0.0)}, "frequency factor is 0.0"),
    ],
)
def test_rope_scaling_that_cannot_be_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelLoadError, match=said):
        RopeScaling(**{"kind": "llama3", "factor": 8.0, **changes})


@pytest.mark.parametrize(
    "scaling, named, reached",
    [
        (RopeScaling(kind="linear", factor=4.0), 4096, 16384),
        (RopeScaling(kind="yarn", factor=4.0, original_context_tokens=32768), 32768, 131072),
        (RopeScaling(kind="yarn", factor=4.0, original_context_tokens=32768), 131072, 131072),
        (RopeScaling(kind="llama3", factor=8.0), 131072, 131072),
    ],
)
def test_scaled_positions_reach_as_far_as_the_kind_of_scaling_says(
    scaling: RopeScaling, named: int, reached: int
) -> None:
    assert scaling.context_tokens(named) == reached
