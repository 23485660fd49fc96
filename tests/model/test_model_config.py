from __future__ import annotations

import math
from typing import Any

import pytest

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.layer_config import AttentionConfig, LayerConfig, MlpConfig, RopeScaling, RotaryConfig
from trioserve.model.model_config import ModelConfig

ATTENTION: dict[str, Any] = {
    "head_count": 4,
    "kv_head_count": 2,
    "head_dim": 16,
    "rotary": RotaryConfig(theta=10_000.0, rotated_dims=16),
}
LAYER: dict[str, Any] = {"attention": AttentionConfig(**ATTENTION), "mlp": MlpConfig(intermediate_size=96)}
WINDOWED = LayerConfig(**{**LAYER, "attention": AttentionConfig(**ATTENTION, window=8)})
GOOD: dict[str, Any] = {
    "family": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "layers": (LayerConfig(**LAYER), WINDOWED, WINDOWED),
    "context_tokens_max": 512,
    "norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_ids": (2, 4),
    "dtype_name": "float32",
}


def test_consistent_model_dimensions_are_accepted() -> None:
    config = ModelConfig(**GOOD)
    assert (config.layer_count, config.windows) == (3, (None, 8))
    assert config.rotaries == ((ATTENTION["rotary"], ATTENTION["head_dim"]),)


@pytest.mark.parametrize(
    "name, value, said",
    [
        ("vocab_size", 0, "vocab_size is 0, allowed is 1 to"),
        ("hidden_size", -64, "hidden_size is -64"),
        ("layers", (WINDOWED,) * 1025, "layer_count is 1025, allowed is 1 to 1024"),
        ("layers", (), "layer_count is 0"),
        ("context_tokens_max", 2**40, "context_tokens_max"),
        ("norm_eps", 0.0, "epsilon is 0.0"),
        ("norm_eps", math.nan, "epsilon is nan"),
        ("embedding_scale", 0.0, "embeddings' scale is 0.0"),
        ("logit_scale", math.inf, "logits' scale is inf"),
        ("logit_cap", -30.0, "final_logit_softcapping is -30.0"),
        ("bos_token_id", 320, "special token id is 320, but the vocabulary has 320 tokens"),
        ("eos_token_ids", (2, -1), "special token id is -1"),
        ("dtype_name", "int8", "stores int8"),
    ],
)
def test_impossible_model_is_refused_by_field(name: str, value: object, said: str) -> None:
    with pytest.raises(ModelLoadError, match=said):
        ModelConfig(**{**GOOD, name: value})


@pytest.mark.parametrize(
    "name, value, said",
    [
        ("head_count", 0, "head_count is 0"),
        ("kv_head_count", 3, "each key/value head must serve the same number of heads"),
        ("head_dim", 15, "head_dim is 15, but rotary positions need an even one"),
        ("head_dim", 8, "16 dimensions of each head are rotated, but a head has 8"),
        ("window", 0, "sliding_window is 0"),
        ("scale", 0.0, "scale is 0.0"),
        ("score_cap", -1.0, "attn_logit_softcapping is -1.0"),
    ],
)
def test_impossible_heads_are_refused_by_field(name: str, value: object, said: str) -> None:
    with pytest.raises(ModelLoadError, match=said):
        AttentionConfig(**{**ATTENTION, name: value})


def test_layers_may_differ_in_their_heads_but_not_if_they_share_keys() -> None:
    wide = LayerConfig(**{**LAYER, "attention": AttentionConfig(**{**ATTENTION, "kv_head_count": 4})})
    config = ModelConfig(**{**GOOD, "layers": (WINDOWED, wide)})
    assert ([entry and entry.size for entry in config.kv_entries], config.common_kv_entry) == ([64, 128], None)
    shared = LayerConfig(**{**LAYER, "attention": AttentionConfig(**{**ATTENTION, "kv_from": 0})})
    with pytest.raises(ModelLoadError, match="shares the keys and values of layer 0, which has none of its kind"):
        ModelConfig(**{**GOOD, "layers": (wide, shared)})


def test_an_mlp_without_numbers_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="intermediate_size is 0"):
        MlpConfig(intermediate_size=0)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"theta": math.inf}, "rope_theta is inf"),
        ({"rotated_dims": 7}, "7 dimensions of each head are rotated, but pairs"),
        (
            {"scaling": RopeScaling(kind="llama3", factor=8.0, frequency_factors=(1.0,) * 7)},
            "7 rope frequency factors, but 16 rotated dimensions need 8",
        ),
    ],
)
def test_impossible_positions_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelLoadError, match=said):
        RotaryConfig(**{"theta": 10_000.0, "rotated_dims": 16, **changes})


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
def test_impossible_rope_scaling_is_refused(changes: dict[str, Any], said: str) -> None:
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
def test_context_length_depends_on_the_kind_of_rope_scaling(scaling: RopeScaling, named: int, reached: int) -> None:
    assert scaling.context_tokens(named) == reached
