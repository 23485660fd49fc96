"""Code World Model: a Llama in which three of four layers have a sliding window."""

from __future__ import annotations

from trioserve.model.families.family import Family
from trioserve.model.families.model_fields import ModelFields, windowed_layers
from trioserve.model.model_config import ModelConfig

__all__ = ["CWM"]


def _describe(fields: ModelFields) -> ModelConfig:
    attention = fields.attention(head_dim=128)
    mlp = fields.mlp(has_bias=fields.flag_or("mlp_bias", False))
    windows = fields.windows(fields.whole_or("sliding_window", 8192), lambda layer: layer % 4 != 0)
    return fields.described("cwm", windowed_layers(attention, mlp, windows))


CWM = Family(
    name="cwm",
    classes=("CwmForCausalLM",),
    model_type="cwm",
    defaults={
        "num_key_value_heads": 8,
        "rope_theta": 1_000_000.0,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1_000_000.0,
            "factor": 16.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
    },
    describe=_describe,
)
