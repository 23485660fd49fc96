"""InternLM 3: a Llama with other names for its bias fields. llama.cpp writes it as a Llama."""

from __future__ import annotations

from trioserve.model.families.family import Family
from trioserve.model.families.model_fields import ModelFields
from trioserve.model.model_config import LayerConfig, ModelConfig

__all__ = ["INTERNLM3"]


def _describe(fields: ModelFields) -> ModelConfig:
    # Published configs use `bias` and `qkv_bias`. transformers saves `mlp_bias` and `attention_bias`.
    has_bias = fields.flag_or("bias", fields.flag_or("mlp_bias", False))
    attention = fields.attention(
        has_bias=fields.flag_or("qkv_bias", fields.flag_or("attention_bias", False)), has_output_bias=has_bias
    )
    layer = LayerConfig(attention=attention, mlp=fields.mlp(has_bias=has_bias))
    return fields.described("internlm3", (layer,) * fields.layer_count)


INTERNLM3 = Family(
    name="internlm3",
    classes=("InternLM3ForCausalLM",),
    model_type="internlm3",
    describe=_describe,
)
