"""dots.llm1: a Qwen3 with mixtures of experts as in DeepSeek-V3 in all layers but the first."""

from __future__ import annotations

import msgspec

from trioserve.model.families.family import SHARED_EXPERTS, Family, GgufNaming, Naming
from trioserve.model.families.model_fields import ModelFields
from trioserve.model.model_config import LayerConfig, ModelConfig

__all__ = ["DOTS1"]


def _describe(fields: ModelFields) -> ModelConfig:
    has_bias = fields.flag_or("attention_bias", False)
    attention = fields.attention(has_bias=has_bias, has_output_bias=has_bias, qk_norm="head")
    first = fields.whole_or("max_window_layers", 62)
    windows = fields.windows(fields.whole_or("sliding_window", None) or None, lambda layer: layer >= first)
    layers = [
        LayerConfig(attention=msgspec.structs.replace(attention, window=window), mlp=mlp)
        for window, mlp in zip(windows, fields.routed_by_sigmoid(), strict=True)
    ]
    return fields.described("dots1", layers)


DOTS1 = Family(
    name="dots1",
    classes=("Dots1ForCausalLM",),
    model_type="dots1",
    defaults={"num_key_value_heads": 32, "topk_group": 1},
    describe=_describe,
    transformers=Naming(modules=SHARED_EXPERTS),
    gguf=GgufNaming(architecture="dots1"),
)
