"""Phi-3 and Phi-4: a Llama with one tensor for q, k, v and one for gate, up. Phi-4-mini rotates not all of a head.

Phi-3.5-MoE has LayerNorm, and mixtures of experts whose router chooses two experts one after the other.
"""

from __future__ import annotations

from msgspec.structs import replace

from trioserve.model.families.family import Family, GgufNaming, Naming
from trioserve.model.families.mixtral import MIXTRAL
from trioserve.model.families.model_fields import ModelFields, windowed_layers
from trioserve.model.layer_config import RotaryConfig
from trioserve.model.model_config import ModelConfig

__all__ = ["PHI3", "PHIMOE"]


def _describe(fields: ModelFields) -> ModelConfig:
    head_dim = fields.head_dim()
    rotary = fields.rotary(head_dim, rotated_dims=fields.part_of_head(head_dim, 1.0))
    attention, mlp = fields.attention(rotary=rotary), fields.mlp()
    windows = fields.windows(fields.whole_or("sliding_window", None) or None, lambda layer: True)
    return fields.described("phi3", windowed_layers(attention, mlp, windows))


PHI3 = Family(
    name="phi3",
    classes=("Phi3ForCausalLM",),
    model_type="phi3",
    defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    describe=_describe,
    transformers=Naming(
        modules={
            "q_proj": "self_attn.qkv_proj",
            "k_proj": "self_attn.qkv_proj",
            "v_proj": "self_attn.qkv_proj",
            "gate_proj": "mlp.gate_up_proj",
            "up_proj": "mlp.gate_up_proj",
        }
    ),
    gguf=GgufNaming(
        architecture="phi3",
        modules={
            "q_proj": "attn_qkv",
            "k_proj": "attn_qkv",
            "v_proj": "attn_qkv",
            "gate_proj": "ffn_up",
            "up_proj": "ffn_up",
        },
    ),
)


def _describe_mixture(fields: ModelFields) -> ModelConfig:
    has_bias = fields.flag_or("attention_bias", False)
    attention = fields.attention(rotary=_rotary_of_mixture(fields), has_bias=has_bias, has_output_bias=has_bias)
    if fields.whole_or("num_experts_per_tok", 2) != 2:
        raise fields.wrong("num_experts_per_tok", "2, which transformers chooses for every value")
    mlp = fields.experts(
        "num_local_experts",
        fields.whole("intermediate_size"),
        normalizes=False,
        scoring="sparsemixer",
        nearness=2 * fields.number_or("router_jitter_noise", 0.01),
    )
    windows = fields.windows(fields.whole_or("sliding_window", None) or None, lambda layer: True)
    return fields.described(
        "phimoe",
        windowed_layers(attention, mlp, windows),
        norm="layer_biased",
        has_head_bias=fields.flag_or("lm_head_bias", False),
    )


def _rotary_of_mixture(fields: ModelFields) -> RotaryConfig:
    """Read the rotary parameters. Cosine and sine have one factor for short contexts and another one for long ones."""
    rotary = fields.rotary(fields.head_dim())
    rope = fields.group_or_none("rope_parameters") or fields.group_or_none("rope_scaling")
    if rope is None or rotary.scaling is None:
        return rotary
    if rotary.scaling.kind != "longrope":
        raise rope.wrong("rope_type", "'default' or 'longrope' for this family")
    is_short = rotary.scaling.frequency_factors == rope.numbers("short_factor")
    factor = rope.number("short_mscale" if is_short else "long_mscale")
    return replace(rotary, scaling=replace(rotary.scaling, attention_factor=factor))


PHIMOE = Family(
    name="phimoe",
    classes=("PhimoeForCausalLM", "PhiMoEForCausalLM"),
    model_type="phimoe",
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0, "num_key_value_heads": 8},
    notes=(
        *("input_jitter_noise", "rope_parameters.long_mscale", "rope_parameters.short_mscale"),
        *("rope_scaling.long_mscale", "rope_scaling.short_mscale"),
    ),
    describe=_describe_mixture,
    transformers=Naming(modules=MIXTRAL.transformers.modules),
)
