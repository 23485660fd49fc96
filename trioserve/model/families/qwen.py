"""Qwen2 and 2.5: a Llama with biases. Qwen3: norms on query and key heads. Both may have sliding windows."""

from __future__ import annotations

from trioserve.model.families.family import Family, GgufNaming
from trioserve.model.families.model_fields import ModelFields, windowed_layers
from trioserve.model.model_config import AttentionConfig, ModelConfig

__all__ = ["QWEN2", "QWEN3"]


def _describe_qwen2(fields: ModelFields) -> ModelConfig:
    return _described(fields, "qwen2", fields.attention(has_bias=True))


def _describe_qwen3(fields: ModelFields) -> ModelConfig:
    has_bias = fields.flag_or("attention_bias", False)
    attention = fields.attention(head_dim=128, qk_norm="head", has_bias=has_bias, has_output_bias=has_bias)
    return _described(fields, "qwen3", attention)


def _described(fields: ModelFields, family: str, attention: AttentionConfig) -> ModelConfig:
    mlp = fields.mlp()
    window = fields.whole_or("sliding_window", None) if fields.flag_or("use_sliding_window", False) else None
    first = fields.whole_or("max_window_layers", 28)
    windows = fields.windows(window, lambda layer: layer >= first)
    return fields.described(family, windowed_layers(attention, mlp, windows))


QWEN2 = Family(
    name="qwen2",
    classes=("Qwen2ForCausalLM",),
    model_type="qwen2",
    defaults={"num_key_value_heads": 32, "sliding_window": 4096},
    describe=_describe_qwen2,
    gguf=GgufNaming(architecture="qwen2"),
)
QWEN3 = Family(
    name="qwen3",
    classes=("Qwen3ForCausalLM",),
    model_type="qwen3",
    defaults={"num_key_value_heads": 32, "sliding_window": 4096},
    describe=_describe_qwen3,
    gguf=GgufNaming(architecture="qwen3"),
)
