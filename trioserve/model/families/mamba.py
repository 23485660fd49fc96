"""Mamba and Falcon-Mamba: every layer is a selective scan without an MLP. There is no KV cache.

In Jamba, most layers are selective scans, and some layers have attention. Some layers have an MLP, some have experts.
"""

from __future__ import annotations

from typing import Any

from trioserve.model.families.family import Family, GgufNaming, Naming
from trioserve.model.families.mamba2 import CONTEXT_TOKENS, MAMBA2
from trioserve.model.families.model_fields import ModelFields
from trioserve.model.layer_config import ExpertsConfig, LayerConfig, MlpConfig, SelectiveScanConfig
from trioserve.model.model_config import ModelConfig

__all__ = ["FALCON_MAMBA", "JAMBA", "MAMBA"]


def _selective_scan(fields: ModelFields, rank_field: str, inner_size: int, **choices: Any) -> SelectiveScanConfig:
    if (name := fields.text_or("hidden_act", "silu")) not in ("silu", "swish"):
        raise fields.wrong("hidden_act", f"'silu' for this family, and not {name!r}")
    rank = -(-fields.whole("hidden_size") // 16)
    if not fields.is_one_of(rank_field, ("auto",)):
        rank = fields.whole_or(rank_field, rank)
    return SelectiveScanConfig(channel_count=inner_size, rank=rank, **choices)


def _described(fields: ModelFields, family: str, **choices: Any) -> ModelConfig:
    inner_size = int(fields.number_or("expand", 2.0) * fields.whole("hidden_size"))
    layer = LayerConfig(
        attention=_selective_scan(
            fields,
            "time_step_rank",
            fields.whole_or("intermediate_size", inner_size),
            vector_size=fields.whole_or("state_size", 16),
            kernel_size=fields.whole_or("conv_kernel", 4),
            has_bias=fields.flag_or("use_bias", False),
            has_conv_bias=fields.flag_or("use_conv_bias", True),
            **choices,
        ),
        mlp=None,
    )
    return fields.described(
        family,
        [layer] * fields.layer_count,
        norm_eps=fields.number_or("layer_norm_epsilon", 1e-5),
        context_tokens_max=fields.whole_or("max_position_embeddings", CONTEXT_TOKENS),
        tie_word_embeddings=fields.flag_or("tie_word_embeddings", True),
    )


def _describe_mamba(fields: ModelFields) -> ModelConfig:
    # llama.cpp writes Falcon-Mamba as a Mamba with this flag.
    if fields.flag_or("has_unit_norms", False):
        return _described(fields, "mamba", norm="unit", norm_eps=fields.number_or("layer_norm_epsilon", 1e-5))
    return _described(fields, "mamba")


def _describe_falcon_mamba(fields: ModelFields) -> ModelConfig:
    return _described(fields, "falcon_mamba", norm="unit", norm_eps=fields.number_or("mixer_rms_eps", 1e-6))


_MIXER = {
    "selection_proj": "mixer.x_proj",
    "time_step_proj": "mixer.dt_proj",
    "state.time_step_bias": "mixer.dt_proj.bias",
}
_NAMES = Naming(layers="backbone.layers", modules={**MAMBA2.transformers.modules, **_MIXER})
_NOTES = (*MAMBA2.notes, "rescale_prenorm_residual", "use_mambapy", "use_falcon_mambapy")

MAMBA = Family(
    name="mamba",
    classes=("MambaForCausalLM",),
    model_type="mamba",
    notes=_NOTES,
    describe=_describe_mamba,
    transformers=_NAMES,
    gguf=GgufNaming(architecture="mamba"),
)
FALCON_MAMBA = Family(
    name="falcon_mamba",
    classes=("FalconMambaForCausalLM",),
    model_type="falcon_mamba",
    notes=_NOTES,
    describe=_describe_falcon_mamba,
    transformers=_NAMES,
)


def _describe_jamba(fields: ModelFields) -> ModelConfig:
    eps = fields.number_or("rms_norm_eps", 1e-6)
    scan = _selective_scan(
        fields,
        "mamba_dt_rank",
        fields.whole_or("mamba_expand", 2) * fields.whole("hidden_size"),
        vector_size=fields.whole_or("mamba_d_state", 16),
        kernel_size=fields.whole_or("mamba_d_conv", 4),
        has_bias=fields.flag_or("mamba_proj_bias", False),
        has_conv_bias=fields.flag_or("mamba_conv_bias", True),
        norm="weighted",
        norm_eps=eps,
    )
    attention, dense = fields.attention(rotary=None), fields.mlp()

    def chosen(kind: str, period: int, offset: int) -> range:
        first = fields.whole_or(f"{kind}_layer_offset", offset)
        return range(first, fields.layer_count, fields.interval(f"{kind}_layer_period", period))

    attends = fields.attending_layers("linear_attention", chosen("attn", 8, 4))
    mlps: list[MlpConfig | ExpertsConfig] = [dense] * fields.layer_count
    if fields.whole_or("num_experts", 16) > 1:
        experts = fields.experts("num_experts", fields.whole("intermediate_size"), normalizes=False)
        mlps = [experts if layer in chosen("expert", 2, 1) else dense for layer in range(fields.layer_count)]
    layers = [LayerConfig(attention=attention if at else scan, mlp=mlp) for at, mlp in zip(attends, mlps, strict=True)]
    return fields.described("jamba", layers, norm_eps=eps)


JAMBA = Family(
    name="jamba",
    classes=("JambaForCausalLM",),
    model_type="jamba",
    defaults={"num_key_value_heads": 8, "num_experts": 16, "num_experts_per_tok": 2},
    # Without experts, the fields of experts change nothing.
    notes=(
        *("use_mamba_kernels", "use_mambapy", "use_associative_scan"),
        *("num_experts_per_tok", "expert_layer_offset", "expert_layer_period"),
    ),
    describe=_describe_jamba,
    transformers=Naming(
        modules={
            "norm": "model.final_layernorm",
            "mlp_norm": "pre_ff_layernorm",
            "gate_proj": "feed_forward.gate_proj",
            "up_proj": "feed_forward.up_proj",
            "down_proj": "feed_forward.down_proj",
            "router": "feed_forward.router",
            "experts.gate_proj": "feed_forward.experts.{expert}.gate_proj",
            "experts.up_proj": "feed_forward.experts.{expert}.up_proj",
            "experts.down_proj": "feed_forward.experts.{expert}.down_proj",
            "state.time_step_bias": "mamba.dt_proj.bias",
        }
    ),
    gguf=GgufNaming(architecture="jamba"),
)
