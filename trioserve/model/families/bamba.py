"""Bamba: most layers are Mamba-2 state spaces. The others have attention that rotates half of each head."""

from __future__ import annotations

from trioserve.model.families.family import Family, Naming
from trioserve.model.families.model_fields import ModelFields
from trioserve.model.model_config import LayerConfig, ModelConfig

__all__ = ["BAMBA"]


def _describe(fields: ModelFields) -> ModelConfig:
    head_dim = fields.head_dim()
    has_bias = fields.flag_or("attention_bias", False)
    attention = fields.attention(
        has_bias=has_bias,
        has_output_bias=has_bias,
        rotary=fields.rotary(head_dim, rotated_dims=fields.part_of_head(head_dim, 0.5)),
    )
    state_space, mlp = fields.state_space(), fields.mlp(has_bias=fields.flag_or("mlp_bias", False))
    attends = fields.attending_layers("linear_attention", fields.wholes("attn_layer_indices"))
    layers = [LayerConfig(attention=attention if at else state_space, mlp=mlp) for at in attends]
    return fields.described("bamba", layers, norm_eps=fields.number_or("rms_norm_eps", 1e-5))


BAMBA = Family(
    name="bamba",
    classes=("BambaForCausalLM",),
    model_type="bamba",
    defaults={"num_key_value_heads": 8},
    describe=_describe,
    transformers=Naming(
        modules={
            "norm": "model.final_layernorm",
            "mlp_norm": "pre_ff_layernorm",
            "gate_proj": "feed_forward.gate_proj",
            "up_proj": "feed_forward.up_proj",
            "down_proj": "feed_forward.down_proj",
        }
    ),
)
