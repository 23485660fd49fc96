"""Qwen2 and 2.5: a Llama with biases. Qwen3: norms on query and key heads. Both may have sliding windows or experts.

In a Qwen2 with experts, a shared expert also computes every token. The language models of Qwen2-VL, Qwen2.5-VL
and Qwen3-VL are a Qwen2 or a Qwen3 in which tokens of images have three positions (M-RoPE).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from trioserve.model.families.family import Family, GgufNaming, Naming
from trioserve.model.families.model_fields import ModelFields, windowed_layers, with_axes
from trioserve.model.layer_config import AttentionConfig, ExpertsConfig, LayerConfig
from trioserve.model.model_config import ModelConfig

__all__ = [
    "MELLUM",
    "QWEN2",
    "QWEN25_OMNI",
    "QWEN25_VL",
    "QWEN2_MOE",
    "QWEN2_VL",
    "QWEN3",
    "QWEN3_MOE",
    "QWEN3_OMNI_MOE",
    "QWEN3_VL",
    "QWEN3_VL_MOE",
    "QWEN3_VL_MOE_SAVED",
]


def _describe_qwen2(fields: ModelFields) -> ModelConfig:
    return _described(fields, "qwen2", fields.attention(has_bias=True))


def _describe_qwen3(fields: ModelFields) -> ModelConfig:
    return _described(fields, "qwen3", _qwen3_attention(fields))


def _qwen3_attention(fields: ModelFields, head_dim: int | None = 128, **choices: Any) -> AttentionConfig:
    has_bias = fields.flag_or("attention_bias", False)
    return fields.attention(head_dim=head_dim, qk_norm="head", has_bias=has_bias, has_output_bias=has_bias, **choices)


def _described(fields: ModelFields, family: str, attention: AttentionConfig) -> ModelConfig:
    mlp = fields.mlp()
    window = fields.whole_or("sliding_window", None) if fields.flag_or("use_sliding_window", False) else None
    first = fields.whole_or("max_window_layers", 28)
    windows = fields.windows(window, lambda layer: layer >= first)
    return fields.described(family, windowed_layers(attention, mlp, windows))


QWEN2 = Family(
    name="qwen2",
    classes=("Qwen2ForCausalLM", "MiMoForCausalLM"),
    model_type="qwen2",
    defaults={"num_key_value_heads": 32, "sliding_window": 4096},
    describe=_describe_qwen2,
    gguf=GgufNaming(architecture="qwen2"),
    text_defaults={
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 22_016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 32_768,
    },
)
QWEN3 = Family(
    name="qwen3",
    classes=("Qwen3ForCausalLM",),
    model_type="qwen3",
    defaults={"num_key_value_heads": 32, "sliding_window": 4096},
    describe=_describe_qwen3,
    gguf=GgufNaming(architecture="qwen3"),
)


_VL_DEFAULTS = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 22_016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 128_000,
}


def _qwen2_vl(name: str, *with_images: str) -> Family:
    """Return the language model of Qwen2-VL or Qwen2.5-VL. The two models have the same architecture."""
    return Family(
        name=name,
        classes=(),
        model_type=f"{name}_text",
        defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0, "sliding_window": 4096},
        describe=lambda fields: _described(
            fields, name, with_axes(fields, fields.attention(has_bias=True), (16, 24, 24))
        ),
        with_images=with_images,
        text_defaults={
            "vocab_size": 152_064,
            "hidden_size": 8192,
            "intermediate_size": 29_568,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "max_position_embeddings": 32_768,
            "max_window_layers": 80,
            "bos_token_id": 151_643,
        },
    )


QWEN2_VL = _qwen2_vl("qwen2_vl", "Qwen2VLForConditionalGeneration", "Tarsier2ForConditionalGeneration")
QWEN25_VL = _qwen2_vl("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration")
QWEN25_OMNI = replace(
    QWEN2,
    name="qwen2_5_omni",
    classes=(),
    model_type="qwen2_5_omni_text",
    defaults={"num_key_value_heads": 4, "rope_theta": 1_000_000.0, "sliding_window": 32_768},
    gguf=None,
    with_images=("Qwen2_5OmniModel", "Qwen2_5OmniForConditionalGeneration"),
)
QWEN3_VL = Family(
    name="qwen3_vl",
    classes=(),
    model_type="qwen3_vl_text",
    defaults={"num_key_value_heads": 32, "rope_theta": 500_000.0},
    describe=lambda fields: _described(
        fields, "qwen3_vl", with_axes(fields, _qwen3_attention(fields), (24, 20, 20), alternates=True)
    ),
    with_images=("Qwen3VLForConditionalGeneration",),
    text_defaults=_VL_DEFAULTS,
)


def _describe_qwen2_moe(fields: ModelFields) -> ModelConfig:
    experts = _experts(fields, shared_size=fields.whole("shared_expert_intermediate_size"), has_shared_gate=True)
    return _described_moe(fields, "qwen2_moe", fields.attention(has_bias=fields.flag_or("qkv_bias", True)), experts)


def _describe_qwen3_moe(fields: ModelFields) -> ModelConfig:
    return _described_moe(fields, "qwen3_moe", _qwen3_attention(fields), _experts(fields))


def _describe_qwen3_vl_moe(fields: ModelFields) -> ModelConfig:
    experts = msgspec.structs.replace(_experts(fields), normalizes=True)
    attention = with_axes(fields, _qwen3_attention(fields, None), (24, 20, 20), alternates=True)
    return _described_moe(fields, "qwen3_vl_moe", attention, experts)


def _describe_mellum(fields: ModelFields) -> ModelConfig:
    """Describe Mellum 2: a Qwen3 with experts, in which layers with a sliding window may have other positions."""
    head_dim = fields.head_dim(128)
    whole = fields.rotary(head_dim, layer_type="full_attention", theta=500_000.0)
    sliding = fields.rotary(head_dim, layer_type="sliding_attention", theta=10_000.0)
    windows = fields.windows(fields.whole_or("sliding_window", 1024), lambda layer: False)
    is_sparse, experts = fields.sparse_layers(0), _experts(fields)
    dense = experts if all(is_sparse) else fields.mlp()
    layers = [
        LayerConfig(
            attention=_qwen3_attention(fields, rotary=whole if window is None else sliding, window=window),
            mlp=experts if sparse else dense,
        )
        for window, sparse in zip(windows, is_sparse, strict=True)
    ]
    return fields.described("mellum", layers)


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
QWEN3_OMNI_MOE = replace(
    QWEN3_MOE,
    name="qwen3_omni_moe",
    classes=(),
    model_type="qwen3_omni_moe_text",
    gguf=None,
    with_images=("Qwen3OmniMoeForConditionalGeneration",),
)
QWEN3_VL_MOE = Family(
    name="qwen3_vl_moe",
    classes=(),
    model_type="qwen3_vl_moe_text",
    saved_as="qwen3_vl_moe_saved",
    defaults={"num_key_value_heads": 16, "rope_theta": 500_000.0},
    describe=_describe_qwen3_vl_moe,
    transformers=Naming(
        modules={
            "experts.gate_proj.weight": "mlp.experts.gate_up_proj",
            "experts.up_proj.weight": "mlp.experts.gate_up_proj",
            "experts.down_proj.weight": "mlp.experts.down_proj",
        },
        turned=("experts.gate_proj", "experts.up_proj", "experts.down_proj"),
    ),
    with_images=("Qwen3VLMoeForConditionalGeneration",),
    text_defaults={
        **_VL_DEFAULTS,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 4,
        "tie_word_embeddings": True,
    },
)
# The matrices of experts are transposed in the authors' files only.
QWEN3_VL_MOE_SAVED = replace(
    QWEN3_VL_MOE,
    name="qwen3_vl_moe_saved",
    with_images=(),
    saved_as=None,
    transformers=replace(QWEN3_VL_MOE.transformers, turned=()),
)
MELLUM = Family(
    name="mellum",
    classes=("MellumForCausalLM",),
    model_type="mellum",
    defaults={"num_key_value_heads": 4, "norm_topk_prob": True},
    describe=_describe_mellum,
)
