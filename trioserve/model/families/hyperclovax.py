"""HyperCLOVA X SEED Think: a Granite with norms after attention and MLP. logits_scaling multiplies, not divides."""

from __future__ import annotations

from trioserve.model.families.family import Family, Naming
from trioserve.model.families.model_fields import ModelFields
from trioserve.model.model_config import LayerConfig, ModelConfig

__all__ = ["HYPERCLOVAX"]


def _describe(fields: ModelFields) -> ModelConfig:
    has_bias = fields.flag_or("attention_bias", False)
    layer = LayerConfig(
        attention=fields.attention(
            has_bias=has_bias, has_output_bias=has_bias, scale=fields.number_or("attention_multiplier", None)
        ),
        mlp=fields.mlp(has_bias=fields.flag_or("mlp_bias", False)),
        has_output_norms=fields.flag_or("use_post_norm", True),
        residual_scale=fields.number_or("residual_multiplier", 1.0),
    )
    return fields.described(
        "hyperclovax",
        (layer,) * fields.layer_count,
        embedding_scale=fields.number_or("embedding_multiplier", 1.0),
        logit_scale=fields.number_or("logits_scaling", 1.0),
    )


HYPERCLOVAX = Family(
    name="hyperclovax",
    classes=("HyperCLOVAXForCausalLM",),
    model_type="hyperclovax",
    describe=_describe,
    transformers=Naming(modules={"attention_output_norm": "post_norm1", "mlp_output_norm": "post_norm2"}),
)
