"""Qwen2 and 2.5: a Llama with biases. Qwen3: norms on query and key heads. Both may have sliding windows or experts.

In a Qwen2 with experts, a shared expert also computes every token.
"""

from __future__ import annotations

import msgspec

from trioserve.model.families.family import Family, GgufNaming
from trioserve.model.families.model_fields import ModelFields, windowed_layers
from trioserve.model.layer_config import AttentionConfig, ExpertsConfig, LayerConfig
from trioserve.model.model_config import ModelConfig

__all__ = ["QWEN2", "QWEN3", "QWEN2_MOE", "QWEN3_MOE"]


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


def _describe_qwen2_moe(fields: ModelFields) -> ModelConfig:
    experts = _experts(fields, shared_size=fields.whole("shared_expert_intermediate_size"), has_shared_gate=True)
    return _described_moe(fields, "qwen2_moe", fields.attention(has_bias=fields.flag_or("qkv_bias", True)), experts)


def _describe_qwen3_moe(fields: ModelFields) -> ModelConfig:
    has_bias = fields.flag_or("attention_bias", False)
    attention = fields.attention(head_dim=128, qk_norm="head", has_bias=has_bias, has_output_bias=has_bias)
    return _described_moe(fields, "qwen3_moe", attention, _experts(fields))


def _experts(fields: ModelFields, shared_size: int = 0, has_shared_gate: bool = False) -> ExpertsConfig:
    return fields.experts(
        "num_experts" if "num_experts" in fields else "num_local_experts",
        fields.whole("moe_intermediate_size"),
        normalizes=fields.flag_or("norm_topk_prob", False),
        shared_size=shared_size,
        has_shared_gate=has_shared_gate,
    )


def _described_moe(fields: ModelFields, family: str, attention: AttentionConfig, experts: ExpertsConfig) -> ModelConfig:
    window = fields.whole_or("sliding_window", None) if fields.flag_or("use_sliding_window", False) else None
    first = fields.whole_or("max_window_layers", 28)
    windows = fields.windows(window, lambda layer: layer >= first)
    layers = [
        LayerConfig(attention=msgspec.structs.replace(attention, window=of_layer), mlp=mlp)
        for of_layer, mlp in zip(windows, fields.mlps_by_layer(experts), strict=True)
    ]
    return fields.described(family, layers)


QWEN2_MOE = Family(
    name="qwen2_moe",
    classes=("Qwen2MoeForCausalLM",),
    model_type="qwen2_moe",
    defaults={"num_key_value_heads": 16, "sliding_window": 4096},
    describe=_describe_qwen2_moe,
    gguf=GgufNaming(architecture="qwen2moe"),
)
QWEN3_MOE = Family(
    name="qwen3_moe",
    classes=("Qwen3MoeForCausalLM",),
    model_type="qwen3_moe",
    defaults={"num_key_value_heads": 4, "sliding_window": 4096},
    describe=_describe_qwen3_moe,
    gguf=GgufNaming(architecture="qwen3moe"),
)
