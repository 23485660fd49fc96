"""Seed-OSS: a Llama with biases on the projections of queries, keys and values."""

from __future__ import annotations

from trioserve.model.families.family import Family, GgufNaming
from trioserve.model.families.model_fields import ModelFields
from trioserve.model.model_config import LayerConfig, ModelConfig

__all__ = ["SEED_OSS"]


def _describe(fields: ModelFields) -> ModelConfig:
    attention = fields.attention(
        head_dim=128,
        has_bias=fields.flag_or("attention_bias", True),
        has_output_bias=fields.flag_or("attention_out_bias", False),
    )
    layer = LayerConfig(attention=attention, mlp=fields.mlp(has_bias=fields.flag_or("mlp_bias", False)))
    return fields.described("seed_oss", (layer,) * fields.layer_count)


SEED_OSS = Family(
    name="seed_oss",
    classes=("SeedOssForCausalLM",),
    model_type="seed_oss",
    defaults={"num_key_value_heads": 8},
    describe=_describe,
    gguf=GgufNaming(architecture="seed_oss", modules={"mlp_norm": "post_attention_norm"}),
)
