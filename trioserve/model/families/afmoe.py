"""AFMoE, the family of Arcee's Trinity: norms before and after attention and MLP, and mixtures as in DeepSeek-V3.

The sigmoid of a projection multiplies the output of attention. Layers without a sliding window have no position
embeddings.

Laguna has no norms after attention and MLP. Softplus replaces the sigmoid, and layers differ in their number of heads.
Step-3.5-Flash is similar, with a sigmoid for each head.
"""

from __future__ import annotations

import math

from msgspec.structs import replace

from trioserve.model.families.family import SHARED_EXPERTS, Family, Naming
from trioserve.model.families.model_fields import ModelFields
from trioserve.model.layer_config import ExpertsConfig, LayerConfig, MlpConfig, RotaryConfig
from trioserve.model.model_config import ModelConfig

__all__ = ["AFMOE", "LAGUNA", "STEP35"]


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


def _describe_step35(fields: ModelFields) -> ModelConfig:
    """Describe Step-3.5-Flash: layers with a window have more heads. Few layers limit the activations of experts.

    The authors' lists have further entries for prediction layers.
    """
    for name, wanted in _STEP35_FLAGS.items():
        if fields.flag_or(name, wanted) != wanted:
            raise fields.wrong(name, f"{str(wanted).lower()} for this family")
    if not fields.is_one_of("moe_router_activation", (None, "sigmoid")):
        raise fields.wrong("moe_router_activation", "'sigmoid'")
    if fields.wholes("use_rope_layers"):
        raise fields.wrong("use_rope_layers", "an empty list")
    count = fields.layer_count
    types = (fields.strings_or("layer_types", None) or ["full_attention"] * count)[:count]
    if len(types) != count or not {"full_attention", "sliding_attention"}.issuperset(types):
        raise fields.wrong("layer_types", f"full_attention or sliding_attention for each of {count} layers")
    head_count, other = fields.whole_or("num_attention_heads", 64), fields.group_or_none("attention_other_setting")
    sliding_count = head_count if other is None else other.whole_or("num_attention_heads", head_count)
    heads = {"full_attention": head_count}
    heads["sliding_attention"] = fields.whole_or("num_sliding_attention_heads", sliding_count)
    if other is not None:
        if not other.is_one_of("attention_type", (None, "sliding_attention")):
            raise other.wrong("attention_type", "'sliding_attention'")
        kept = {"num_attention_groups": fields.whole("num_key_value_heads")}
        kept |= dict.fromkeys(("head_dim", "true_head_dim"), fields.head_dim())
        for name, size in kept.items():
            if other.whole_or(name, size) != size:
                raise other.wrong(name, f"{size}, as in layers with full attention")
    attentions = {
        each: fields.attention(
            head_count=heads[each],
            rotary=_rotary_of_step35(fields, each, types.index(each)),
            window=fields.whole("sliding_window") if each == "sliding_attention" else None,
            scale=fields.number_or("query_pre_attn_scalar", float(fields.head_dim())) ** -0.5,
            qk_norm="head",
            has_gate=True,
            has_gate_of_heads=True,
        )
        for each in dict.fromkeys(types)
    }
    limits, shared_limits = (
        [limit or None for limit in fields.numbers(name)[:count]] if name in fields else [None] * count
        for name in ("swiglu_limits", "swiglu_limits_shared")
    )
    if len(limits) != count or len(shared_limits) != count:
        raise fields.wrong("swiglu_limits", f"a number for each of {count} layers")
    layers = []
    parts = zip(types, _sparse_layers_of_step35(fields), limits, shared_limits, strict=True)
    for each, is_sparse, limit, shared_limit in parts:
        mlp: MlpConfig | ExpertsConfig = replace(fields.mlp(), limit=shared_limit)
        if is_sparse:
            mlp = fields.experts(
                "n_routed_experts",
                fields.whole("moe_intermediate_size"),
                normalizes=True,
                scoring="sigmoid",
                has_score_bias=True,
                scale=fields.number_or("moe_router_scaling_factor", 1.0),
                shared_size=fields.whole("share_expert_dim"),
                limit=limit,
                shared_limit=shared_limit,
            )
        layers.append(LayerConfig(attention=attentions[each], mlp=mlp))
    return fields.described("step3p5", layers)


def _rotary_of_step35(fields: ModelFields, layer_type: str, index: int) -> RotaryConfig:
    """Read the rotary embedding of a layer type, whose first layer has this index in the authors' lists."""
    head_dim, by_type = fields.head_dim(), fields.group_or_none("rope_parameters")
    rope = None if by_type is None else by_type.group_or_none(layer_type)
    if by_type is not None and rope is None:
        raise by_type.wrong(layer_type, "an object with the rope_theta of these layers")
    thetas = fields.numbers("rope_theta") if fields.is_list("rope_theta") else (10_000.0,) * (index + 1)
    parts = fields.numbers("partial_rotary_factors") if "partial_rotary_factors" in fields else (1.0,) * (index + 1)
    if len(thetas) <= index or len(parts) <= index:
        raise fields.wrong("rope_theta", "a number for each layer, like partial_rotary_factors")
    part = parts[index] if rope is None else rope.number_or("partial_rotary_factor", 1.0)
    if not 0 < part <= 1:
        raise (rope or fields).wrong("partial_rotary_factor", "above 0 and at most 1")
    rotated = int(head_dim * part)
    return fields.rotary(head_dim, layer_type=layer_type, rotated_dims=rotated, theta=thetas[index])


def _sparse_layers_of_step35(fields: ModelFields) -> list[bool]:
    count = fields.layer_count
    if "mlp_layer_types" in fields:
        return fields.sparse_layers(0)
    named = fields.wholes("moe_layers_enum") if fields.is_list("moe_layers_enum") else None
    if named is None and (text := fields.text_or("moe_layers_enum", None)) is not None:
        items = [item.strip() for item in text.split(",")]
        if not all(item.isdecimal() and len(item) < 6 for item in items):
            raise fields.wrong("moe_layers_enum", "indexes of layers with commas between them")
        named = tuple(map(int, items))
    chosen = set(range(3, count) if named is None else named)
    return [index in chosen for index in range(count)]


# Flags of the authors' configs. Other values would be another model.
_STEP35_FLAGS = {
    **dict.fromkeys(("attention_bias", "mlp_bias"), False),
    **dict.fromkeys(("norm_expert_weight", "use_head_wise_attn_gate", "use_moe_router_bias", "zero_centered"), True),
}

STEP35 = Family(
    name="step3p5",
    classes=("Step3p5ForCausalLM",),
    model_type="step3p5",
    with_images=("Step3p7ForConditionalGeneration",),
    spellings={
        "num_key_value_heads": "num_attention_groups",
        "n_routed_experts": "moe_num_experts",
        "num_experts_per_tok": "moe_top_k",
        "share_expert_dim": "share_expert_dims",
    },
    defaults={
        "head_dim": 128,
        "num_key_value_heads": 8,
        "n_routed_experts": 288,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1280,
        "share_expert_dim": 1280,
        "rms_norm_eps": 1e-5,
    },
    notes=(
        *("per_layer_config", "need_fp32_gate", "moe_layer_offset", "moe_every_n_layer", "yarn_only_types"),
        *("max_seq_len", "num_nextn_predict_layers", "use_qk_norm", "sink"),
    ),
    describe=_describe_step35,
    transformers=Naming(
        norm_offset=1.0,
        modules={
            "q_gate_proj": "self_attn.g_proj",
            "router": "moe.gate",
            "router.score_bias": "moe.router_bias",
            **{f"experts.{part}_proj": f"moe.{part}_proj" for part in ("gate", "up", "down")},
            **{f"shared.{part}_proj": f"share_expert.{part}_proj" for part in ("gate", "up", "down")},
        },
    ),
)
