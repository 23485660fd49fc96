"""Granite 3, dense: a Llama with factors for embeddings, scores, sums and logits."""

from __future__ import annotations

from trioserve.model.families.family import Family, GgufNaming
from trioserve.model.families.model_fields import ModelFields
from trioserve.model.model_config import LayerConfig, ModelConfig

__all__ = ["GRANITE"]


def _describe(fields: ModelFields) -> ModelConfig:
    has_bias = fields.flag_or("attention_bias", False)
    layer = LayerConfig(
        attention=fields.attention(
            has_bias=has_bias, has_output_bias=has_bias, scale=fields.number_or("attention_multiplier", 1.0)
        ),
        mlp=fields.mlp(has_bias=fields.flag_or("mlp_bias", False)),
        residual_scale=fields.number_or("residual_multiplier", 1.0),
    )
    divisor = fields.number_or("logits_scaling", 1.0)
    if not divisor > 0:
        raise fields.wrong("logits_scaling", "above 0")
    return fields.described(
        "granite",
        (layer,) * fields.layer_count,
        embedding_scale=fields.number_or("embedding_multiplier", 1.0),
        logit_scale=1.0 / divisor,
    )


GRANITE = Family(
    name="granite",
    classes=("GraniteForCausalLM",),
    model_type="granite",
    describe=_describe,
    gguf=GgufNaming(architecture="granite", pairs_adjacent=True),
)
