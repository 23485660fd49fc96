"""Code World Model: a Llama in which three of four layers see a window."""

from __future__ import annotations

import msgspec

from trioserve.model.families.family import Family
from trioserve.model.families.model_fields import ModelFields
from trioserve.model.model_config import LayerConfig, ModelConfig

__all__ = ["CWM"]


def _describe(fields: ModelFields) -> ModelConfig:
    attention = fields.attention(head_dim=128)
    mlp = fields.mlp(has_bias=fields.flag_or("mlp_bias", False))
    windows = fields.windows(fields.whole_or("sliding_window", 8192), lambda layer: layer % 4 != 0)
    layers = [LayerConfig(attention=msgspec.structs.replace(attention, window=window), mlp=mlp) for window in windows]
    return fields.described("cwm", layers)


CWM = Family(
    name="cwm",
    classes=("CwmForCausalLM",),
    model_type="cwm",
    describe=_describe,
)
