"""Qwen3-Next and Qwen3.5, dense or with experts and one shared expert.

Most layers have the gated delta rule instead of attention. The attention layers multiply their output by a gate.
"""

from __future__ import annotations

from trioserve.model.families.family import Family, GgufNaming, Naming
from trioserve.model.families.model_fields import ModelFields, with_axes
from trioserve.model.layer_config import DeltaNetConfig, ExpertsConfig, LayerConfig, MlpConfig
from trioserve.model.model_config import ModelConfig

__all__ = ["QWEN35", "QWEN35_MOE", "QWEN3_NEXT"]

MODULES = {
    "conv": "linear_attn.conv1d",
    "out_proj": "linear_attn.out_proj",
    "gate_norm": "linear_attn.norm",
    "state.rates": "linear_attn.A_log",
    "state.time_step_bias": "linear_attn.dt_bias",
}
GGUF_MODULES = {"mlp_norm": "post_attention_norm"}
# Defaults of the `text_config` of vision models.
TEXT_DEFAULTS = {"num_attention_heads": 16, "max_position_embeddings": 32_768}


def _describe_next(fields: ModelFields) -> ModelConfig:
    mlps = fields.mlps_by_layer(_experts(fields, fields.flag_or("norm_topk_prob", True)))
    return _described(fields, "qwen3_next", mlps)


def _describe_mixture(fields: ModelFields) -> ModelConfig:
    return _described(fields, "qwen3_5_moe", [_experts(fields, True)] * fields.layer_count)


def _describe_dense(fields: ModelFields) -> ModelConfig:
    return _described(fields, "qwen3_5", [fields.mlp()] * fields.layer_count)


def _experts(fields: ModelFields, normalizes: bool) -> ExpertsConfig:
    return fields.experts(
        "num_experts",
        fields.whole_or("moe_intermediate_size", 512),
        normalizes=normalizes,
        shared_size=fields.whole_or("shared_expert_intermediate_size", 512),
        has_shared_gate=True,
    )


def _described(fields: ModelFields, family: str, mlps: list[MlpConfig | ExpertsConfig]) -> ModelConfig:
    if (name := fields.text_or("hidden_act", "silu")) != "silu":
        raise fields.wrong("hidden_act", f"'silu' for this family, and not {name!r}")
    head_dim = fields.whole_or("head_dim", 256)
    has_bias = fields.flag_or("attention_bias", False)
    attention = fields.attention(
        head_dim=256,
        rotary=fields.rotary(head_dim, rotated_dims=fields.part_of_head(head_dim, 0.25)),
        qk_norm="head",
        has_gate=True,
        has_bias=has_bias,
        has_output_bias=has_bias,
    )
    if family != "qwen3_next":
        attention = with_axes(fields, attention, (11, 11, 10), alternates=True)
    delta = DeltaNetConfig(
        head_count=fields.whole_or("linear_num_value_heads", 32),
        group_count=fields.whole_or("linear_num_key_heads", 16),
        head_dim=fields.whole_or("linear_value_head_dim", 128),
        vector_size=fields.whole_or("linear_key_head_dim", 128),
        kernel_size=fields.whole_or("linear_conv_kernel_dim", 4),
        has_heads_in_turn=fields.flag_or("has_heads_in_turn", False),
    )
    every = fields.interval("full_attention_interval", 4)
    indexes = range(every - 1, fields.layer_count, every)
    attends = fields.attending_layers("linear_attention", indexes)
    layers = [LayerConfig(attention=attention if at else delta, mlp=mlp) for at, mlp in zip(attends, mlps, strict=True)]
    return fields.described(family, layers)


QWEN3_NEXT = Family(
    name="qwen3_next",
    classes=("Qwen3NextForCausalLM",),
    model_type="qwen3_next",
    defaults={"num_key_value_heads": 2},
    describe=_describe_next,
    transformers=Naming(
        norm_offset=1.0,
        modules={
            **MODULES,
            "delta_qkv": "linear_attn.in_proj_qkvz",
            "delta_gate": "linear_attn.in_proj_qkvz",
            "delta_decay": "linear_attn.in_proj_ba",
            "delta_share": "linear_attn.in_proj_ba",
        },
        grouped=("delta_qkv", "delta_gate", "delta_decay", "delta_share"),
    ),
    gguf=GgufNaming(
        architecture="qwen3next",
        modules={**GGUF_MODULES, "delta_decay": "ssm_ba", "delta_share": "ssm_ba"},
        grouped=("delta_decay", "delta_share"),
    ),
)
QWEN35 = Family(
    name="qwen3_5",
    classes=("Qwen3_5ForCausalLM",),
    model_type="qwen3_5_text",
    notes=("mamba_ssm_dtype",),
    describe=_describe_dense,
    transformers=Naming(norm_offset=1.0, modules=MODULES),
    gguf=GgufNaming(architecture="qwen35", modules=GGUF_MODULES),
    with_images=("Qwen3_5ForConditionalGeneration",),
    text_defaults=TEXT_DEFAULTS,
)
QWEN35_MOE = Family(
    name="qwen3_5_moe",
    classes=("Qwen3_5MoeForCausalLM",),
    model_type="qwen3_5_moe_text",
    defaults={"num_key_value_heads": 2},
    notes=("mamba_ssm_dtype",),
    describe=_describe_mixture,
    transformers=Naming(norm_offset=1.0, modules=MODULES),
    gguf=GgufNaming(architecture="qwen35moe", modules=GGUF_MODULES),
    with_images=("Qwen3_5MoeForConditionalGeneration",),
    text_defaults=TEXT_DEFAULTS,
)
