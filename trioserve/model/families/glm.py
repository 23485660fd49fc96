"""GLM-4 of 0414: half of each head is turned, neighbours together; norms before and behind attention and MLP."""

from __future__ import annotations

from trioserve.model.families.family import Family, GgufNaming, Naming
from trioserve.model.families.model_fields import ModelFields
from trioserve.model.model_config import LayerConfig, ModelConfig

__all__ = ["GLM4"]


def _describe(fields: ModelFields) -> ModelConfig:
    head_dim = fields.head_dim(128)
    attention = fields.attention(
        head_dim=128,
        has_bias=fields.flag_or("attention_bias", True),
        rotary=fields.rotary(head_dim, rotated_dims=fields.part_of_head(head_dim, 0.5)),
    )
    layer = LayerConfig(attention=attention, mlp=fields.mlp(), has_output_norms=True)
    return fields.described("glm4", (layer,) * fields.layer_count)


GLM4 = Family(
    name="glm4",
    classes=("Glm4ForCausalLM",),
    model_type="glm4",
    describe=_describe,
    transformers=Naming(
        modules={
            "attention_output_norm": "post_self_attn_layernorm",
            "mlp_output_norm": "post_mlp_layernorm",
            "gate_proj": "mlp.gate_up_proj",
            "up_proj": "mlp.gate_up_proj",
        },
        pairs_adjacent=True,
    ),
    gguf=GgufNaming(architecture="glm4", modules={"gate_proj": "ffn_up", "up_proj": "ffn_up"}, pairs_adjacent=True),
)
