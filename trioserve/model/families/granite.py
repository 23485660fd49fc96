"""Granite 3: a Llama, or a mixture of experts, with factors for embeddings, scores, sums and logits."""

from __future__ import annotations

from trioserve.model.families.family import Family, GgufNaming, Naming
from trioserve.model.families.model_fields import ModelFields
from trioserve.model.model_config import ExpertsConfig, LayerConfig, MlpConfig, ModelConfig

__all__ = ["GRANITE", "GRANITE_MOE"]


def _describe_dense(fields: ModelFields) -> ModelConfig:
    return _described(fields, "granite", fields.mlp(has_bias=fields.flag_or("mlp_bias", False)))


def _describe_mixture(fields: ModelFields) -> ModelConfig:
    experts = fields.experts("num_local_experts", fields.whole("intermediate_size"), normalizes=True)
    return _described(fields, "granitemoe", experts)


def _described(fields: ModelFields, family: str, mlp: MlpConfig | ExpertsConfig) -> ModelConfig:
    has_bias = fields.flag_or("attention_bias", False)
    layer = LayerConfig(
        attention=fields.attention(
            has_bias=has_bias, has_output_bias=has_bias, scale=fields.number_or("attention_multiplier", 1.0)
        ),
        mlp=mlp,
        residual_scale=fields.number_or("residual_multiplier", 1.0),
    )
    divisor = fields.number_or("logits_scaling", 1.0)
    if not divisor > 0:
        raise fields.wrong("logits_scaling", "above 0")
    return fields.described(
        family,
        (layer,) * fields.layer_count,
        embedding_scale=fields.number_or("embedding_multiplier", 1.0),
        logit_scale=1.0 / divisor,
    )


GRANITE = Family(
    name="granite",
    classes=("GraniteForCausalLM",),
    model_type="granite",
    describe=_describe_dense,
    gguf=GgufNaming(architecture="granite", pairs_adjacent=True),
)
GRANITE_MOE = Family(
    name="granitemoe",
    classes=("GraniteMoeForCausalLM",),
    model_type="granitemoe",
    describe=_describe_mixture,
    transformers=Naming(
        modules={
            "router": "block_sparse_moe.router.layer",
            "experts.gate_proj": "block_sparse_moe.input_linear",
            "experts.up_proj": "block_sparse_moe.input_linear",
            "experts.down_proj": "block_sparse_moe.output_linear",
        }
    ),
    gguf=GgufNaming(architecture="granitemoe", pairs_adjacent=True),
)
