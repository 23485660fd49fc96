"""Granite 3: a Llama, dense or with experts, with factors on embeddings, scores, residual sums and logits.

In Granite 4.0-H most layers are Mamba-2 state spaces, and the attention layers have no position embeddings.

HyperCLOVA X SEED Think is a Granite with norms after attention and MLP.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from trioserve.model.families.family import Family, GgufNaming, Naming
from trioserve.model.families.model_fields import ModelFields
from trioserve.model.layer_config import ExpertsConfig, LayerConfig, MlpConfig
from trioserve.model.model_config import ModelConfig

__all__ = ["GRANITE", "GRANITE_HYBRID", "GRANITE_MOE", "HYPERCLOVAX"]


def _describe_dense(fields: ModelFields) -> ModelConfig:
    return _described(fields, "granite", fields.mlp(has_bias=fields.flag_or("mlp_bias", False)))


def _describe_mixture(fields: ModelFields) -> ModelConfig:
    return _described(fields, "granitemoe", _experts(fields, fields.whole_or("shared_intermediate_size", 0)))


def _experts(fields: ModelFields, shared_size: int) -> ExpertsConfig:
    middle = fields.whole("intermediate_size")
    return fields.experts("num_local_experts", middle, normalizes=True, shared_size=shared_size)


def _describe_hybrid(fields: ModelFields) -> ModelConfig:
    shared_size = fields.whole_or("shared_intermediate_size", 1024)
    mlp: MlpConfig | ExpertsConfig
    if fields.whole_or("num_local_experts", 8) == 0:
        mlp = replace(fields.mlp(), intermediate_size=shared_size)
    else:
        mlp = _experts(fields, shared_size)
    kind = fields.text_or("position_embedding_type", "nope")
    if kind not in ("nope", "rope"):
        raise fields.wrong("position_embedding_type", "nope or rope")
    rotary = fields.rotary(fields.head_dim()) if kind == "rope" else None
    attends = fields.attending_layers("linear_attention", ())
    return _described(fields, "granitemoehybrid", mlp, attends, rotary=rotary)


def _described(
    fields: ModelFields,
    family: str,
    mlp: MlpConfig | ExpertsConfig,
    attends: Sequence[bool] | None = None,
    **choices: Any,
) -> ModelConfig:
    """Describe a model of one of the families in this module.

    Args:
        fields: the fields of the checkpoint.
        family: name of the family.
        mlp: MLP of all layers.
        attends: for each layer, True if it has attention. None means all layers.
        choices: arguments of `ModelFields.attention`.
    """
    has_bias = fields.flag_or("attention_bias", False)
    attention = fields.attention(
        has_bias=has_bias, has_output_bias=has_bias, scale=fields.number_or("attention_multiplier", 1.0), **choices
    )
    state_space = None if attends is None or all(attends) else fields.state_space()
    layers = [
        LayerConfig(
            attention=attention if at or state_space is None else state_space,
            mlp=mlp,
            residual_scale=fields.number_or("residual_multiplier", 1.0),
        )
        for at in (attends or (True,) * fields.layer_count)
    ]
    divisor = fields.number_or("logits_scaling", 1.0)
    if not divisor > 0:
        raise fields.wrong("logits_scaling", "above 0")
    return fields.described(
        family,
        layers,
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
_SHARED = {f"shared.{part}_proj": "shared_mlp.input_linear" for part in ("gate", "up")} | {
    "shared.down_proj": "shared_mlp.output_linear"
}
GRANITE_MOE = Family(
    name="granitemoe",
    classes=("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"),
    model_type="granitemoe",
    describe=_describe_mixture,
    transformers=Naming(
        modules={
            "router": "block_sparse_moe.router.layer",
            "experts.gate_proj": "block_sparse_moe.input_linear",
            "experts.up_proj": "block_sparse_moe.input_linear",
            "experts.down_proj": "block_sparse_moe.output_linear",
            **_SHARED,
        }
    ),
    gguf=GgufNaming(architecture="granitemoe", pairs_adjacent=True),
)
GRANITE_HYBRID = Family(
    name="granitemoehybrid",
    classes=("GraniteMoeHybridForCausalLM",),
    model_type="granitemoehybrid",
    notes=("num_experts_per_tok", "rope_parameters", "rope_scaling", "rope_theta"),
    describe=_describe_hybrid,
    transformers=Naming(
        modules={
            **GRANITE_MOE.transformers.modules,
            "gate_proj": "shared_mlp.input_linear",
            "up_proj": "shared_mlp.input_linear",
            "down_proj": "shared_mlp.output_linear",
        }
    ),
    gguf=GgufNaming(architecture="granitehybrid", pairs_adjacent=True),
)


def _describe_hyperclovax(fields: ModelFields) -> ModelConfig:
    """HyperCLOVA X SEED Think: a Granite with norms after attention and MLP. logits_scaling multiplies, not divides."""
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
    describe=_describe_hyperclovax,
    transformers=Naming(modules={"attention_output_norm": "post_norm1", "mlp_output_norm": "post_norm2"}),
)
