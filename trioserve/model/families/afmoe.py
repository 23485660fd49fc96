"""AFMoE, the family of Arcee's Trinity: norms before and after attention and MLP, and mixtures as in DeepSeek-V3.

The sigmoid of a projection multiplies the output of attention. Layers without a sliding window have no position
embeddings.

Laguna has no norms after attention and MLP. Softplus replaces the sigmoid, and layers differ in their number of heads.
"""

from __future__ import annotations

import math

from trioserve.model.families.family import SHARED_EXPERTS, Family, Naming
from trioserve.model.families.model_fields import ModelFields
from trioserve.model.layer_config import LayerConfig, RotaryConfig
from trioserve.model.model_config import ModelConfig

__all__ = ["AFMOE", "LAGUNA"]


def _describe(fields: ModelFields) -> ModelConfig:
    for name, computed in (("attention_bias", False), ("route_norm", True)):
        if fields.flag_or(name, computed) is not computed:
            raise fields.wrong(name, f"{str(computed).lower()} for this family")
    if fields.is_null("sliding_window"):
        raise fields.wrong("sliding_window", "a whole number for this family")
    every = fields.interval("global_attn_every_n_layers", 4)
    windows = fields.windows(fields.whole_or("sliding_window", 1024), lambda layer: (layer + 1) % every != 0)
    rotary = fields.rotary(fields.head_dim(128))
    layers = [
        LayerConfig(
            attention=fields.attention(
                head_dim=128,
                rotary=None if window is None else rotary,
                window=window,
                qk_norm="head",
                has_gate=True,
            ),
            mlp=mlp,
            has_output_norms=True,
        )
        for window, mlp in zip(windows, fields.routed_by_sigmoid(dense_count=1), strict=True)
    ]
    has_scale = fields.flag_or("mup_enabled", False)
    return fields.described(
        "afmoe", layers, embedding_scale=math.sqrt(max(fields.whole("hidden_size"), 0)) if has_scale else 1.0
    )


AFMOE = Family(
    name="afmoe",
    classes=("AfmoeForCausalLM",),
    model_type="afmoe",
    spellings={
        "n_routed_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
        "first_k_dense_replace": "num_dense_layers",
        "routed_scaling_factor": "route_scale",
        "scoring_func": "score_func",
    },
    defaults={"rms_norm_eps": 1e-5, "n_shared_experts": 2, "norm_topk_prob": True},
    notes=("load_balance_coeff", "num_expert_groups", "num_limited_groups", "use_grouped_mm"),
    describe=_describe,
    transformers=Naming(
        modules={
            **SHARED_EXPERTS,
            "attention_output_norm": "post_attention_layernorm",
            "mlp_norm": "pre_mlp_layernorm",
            "mlp_output_norm": "post_mlp_layernorm",
            "q_gate_proj": "self_attn.gate_proj",
            "router": "mlp.router.gate",
            "router.score_bias": "mlp.expert_bias",
        }
    ),
)


def _describe_laguna(fields: ModelFields) -> ModelConfig:
    for name in ("attention_bias", "moe_apply_router_weight_on_input"):
        if fields.flag_or(name, False):
            raise fields.wrong(name, "false for this family")
    has_gate_of_heads = "gating" not in fields or fields.is_one_of("gating", (True, "per-head"))
    if not (has_gate_of_heads or fields.is_one_of("gating", ("per-element",))):
        raise fields.wrong("gating", "true, 'per-head' or 'per-element'")
    count = fields.layer_count
    heads = fields.wholes("num_attention_heads_per_layer") or (fields.whole("num_attention_heads"),) * count
    if len(heads) != count:
        raise fields.wrong("num_attention_heads_per_layer", f"a number for each of {count} layers")
    windows = fields.windows(fields.whole_or("sliding_window", 512), lambda layer: False)
    sparse = fields.experts(
        "num_experts",
        fields.whole_or("moe_intermediate_size", 512),
        normalizes=True,
        scoring="sigmoid",
        has_score_bias=True,
        scale=fields.number_or("moe_routed_scaling_factor", 1.0),
        shared_size=fields.whole_or("shared_expert_intermediate_size", 512),
        logit_cap=fields.number_or("moe_router_logit_softcapping", 0.0) or None,
    )
    rotaries = {is_full: _rotary_of_laguna(fields, is_full) for is_full in (True, False)}
    layers = [
        LayerConfig(
            attention=fields.attention(
                head_dim=128,
                head_count=head_count,
                kv_head_count=fields.whole_or("num_key_value_heads", 8),
                rotary=rotaries[window is None],
                window=window,
                qk_norm="head",
                has_gate=True,
                has_softplus_gate=True,
                has_gate_of_heads=has_gate_of_heads,
            ),
            mlp=sparse if is_sparse else fields.mlp(),
        )
        for head_count, window, is_sparse in zip(heads, windows, fields.sparse_layers(1), strict=True)
    ]
    return fields.described("laguna", layers)


def _rotary_of_laguna(fields: ModelFields, is_full: bool) -> RotaryConfig:
    layer_type, theta, part = ("full_attention", 500_000.0, 0.5) if is_full else ("sliding_attention", 10_000.0, 1.0)
    head_dim, by_type = fields.head_dim(128), fields.group_or_none("rope_parameters")
    if by_type is None:
        return RotaryConfig(theta=theta, rotated_dims=int(head_dim * part))
    part = 1.0
    if (rope := by_type.group_or_none(layer_type)) is not None:
        part = rope.number_or("partial_rotary_factor", 1.0)
        if not 0 < part <= 1:
            raise rope.wrong("partial_rotary_factor", "above 0 and at most 1")
    return fields.rotary(head_dim, layer_type=layer_type, rotated_dims=int(head_dim * part), theta=theta)


LAGUNA = Family(
    name="laguna",
    classes=("LagunaForCausalLM",),
    model_type="laguna",
    describe=_describe_laguna,
    transformers=Naming(
        modules={
            "q_gate_proj": "self_attn.g_proj",
            "router.score_bias": "mlp.experts.e_score_correction_bias",
        }
    ),
)
