"""MiMo-V2-Flash: layers with a sliding window have twice as many KV heads, sinks, and another theta.

Values are smaller than keys. All layers but the first have mixtures of experts as in DeepSeek-V3.
"""

from __future__ import annotations

from trioserve.model.families.family import Family, GgufNaming, Naming
from trioserve.model.families.model_fields import ModelFields
from trioserve.model.layer_config import AttentionConfig, ExpertsConfig, LayerConfig, MlpConfig, RotaryConfig
from trioserve.model.model_config import ModelConfig, RowFactors

__all__ = ["MIMO_V2_FLASH"]

THETA, LOCAL_THETA, ROTATED_PART = 5_000_000.0, 10_000.0, 0.334


def _describe(fields: ModelFields) -> ModelConfig:
    full, sliding = _attention(fields, None), _attention(fields, _window(fields))
    pattern = fields.wholes("hybrid_layer_pattern")  # Published configs have this field instead of layer_types.
    if pattern and len(pattern) != fields.layer_count:
        raise fields.wrong("hybrid_layer_pattern", f"0 or 1 for each of {fields.layer_count} layers")
    windows = fields.windows(
        sliding.window, lambda layer: bool(pattern[layer]) if pattern else layer != 0 and (layer + 1) % 6 != 0
    )
    attentions = [full if window is None else sliding for window in windows]
    # The factor of values is a factor of the output projection, which has no bias.
    factor = fields.number_or("attention_value_scale", None if fields.is_null("attention_value_scale") else 0.707)
    rows = ((fields.whole("hidden_size"), 1.0 if factor is None else factor),)
    return fields.described(
        "mimo_v2_flash",
        [LayerConfig(attention=attention, mlp=mlp) for attention, mlp in zip(attentions, _mlps(fields), strict=True)],
        row_factors=(RowFactors(name="o_proj.weight", parts=rows),),
    )


def _window(fields: ModelFields) -> int:
    fields.whole_or("attention_chunk_size", None)  # The field is ignored, as in transformers.
    if (seen := fields.whole_or("sliding_window_size", None)) is not None:
        return seen + 1  # Published configs count the tokens before a token, as transformers reads this field.
    return fields.whole_or("sliding_window", 129)


def _attention(fields: ModelFields, window: int | None) -> AttentionConfig:
    """Describe layers with full attention (window is None) or with a sliding window.

    Published configs have fields of their own for layers with a window, and no rope_parameters.
    """
    is_full = window is None
    layer_type, own = ("full_attention", "") if is_full else ("sliding_attention", "swa_")
    head_dim, value_dim = fields.whole_or("head_dim", 192), fields.whole_or("v_head_dim", 128)
    kv_heads = fields.whole_or("num_key_value_heads", 4)
    if not is_full:
        head_dim, value_dim = fields.whole_or("swa_head_dim", head_dim), fields.whole_or("swa_v_head_dim", value_dim)
        kv_heads = fields.whole_or("swa_num_key_value_heads", 2 * kv_heads)
    by_type, theta = fields.group_or_none("rope_parameters"), THETA if is_full else LOCAL_THETA
    rope = None if by_type is None else by_type.group_or_none(layer_type)
    part = (fields if rope is None else rope).number_or("partial_rotary_factor", ROTATED_PART)
    if not 0 < part <= 1:
        raise (rope or fields).wrong("partial_rotary_factor", "above 0 and at most 1")
    rotated = int(head_dim * part)
    if rope is None:
        rotary = RotaryConfig(theta=fields.number_or(f"{own}rope_theta", theta), rotated_dims=rotated)
    else:
        rotary = fields.rotary(head_dim, layer_type=layer_type, rotated_dims=rotated, theta=theta)
    return AttentionConfig(
        head_count=fields.whole_or(f"{own}num_attention_heads", fields.whole("num_attention_heads")),
        kv_head_count=kv_heads,
        head_dim=head_dim,
        rotary=rotary,
        window=window,
        has_sinks=fields.flag_or(f"add_{own or 'full_'}attention_sink_bias", not is_full),
        has_bias=fields.flag_or("attention_bias", False),
        value_head_dim=value_dim,
    )


def _mlps(fields: ModelFields) -> list[MlpConfig | ExpertsConfig]:
    types = fields.strings_or("mlp_layer_types", None) or ["dense"] + ["sparse"] * (fields.layer_count - 1)
    if frequencies := fields.wholes("moe_layer_freq"):  # Published configs have this field instead of mlp_layer_types.
        types = ["sparse" if frequency else "dense" for frequency in frequencies]
    if len(types) != fields.layer_count or not {"dense", "sparse"}.issuperset(types):
        raise fields.wrong("mlp_layer_types", f"'dense' or 'sparse' for each of {fields.layer_count} layers")
    if fields.whole_or("n_shared_experts", 0):
        raise fields.wrong("n_shared_experts", "0 or null")
    sparse = fields.experts(
        "n_routed_experts",
        fields.whole("moe_intermediate_size"),
        normalizes=fields.flag_or("norm_topk_prob", True),
        scoring="sigmoid",
        has_score_bias=True,
        scale=fields.number_or("routed_scaling_factor", 1.0),
        group_count=fields.whole_or("n_group", 1),
        groups_per_token=fields.whole_or("topk_group", 1),
        group_leaders=2 if fields.whole_or("n_group", 1) > 1 else 1,
    )
    if not fields.is_one_of("scoring_func", (None, "sigmoid")):
        raise fields.wrong("scoring_func", "'sigmoid'")
    if not fields.is_one_of("topk_method", (None, "noaux_tc")):
        raise fields.wrong("topk_method", "'noaux_tc'")
    return [fields.mlp() if kind == "dense" else sparse for kind in types]


MIMO_V2_FLASH = Family(
    name="mimo_v2_flash",
    classes=("MiMoV2FlashForCausalLM",),
    model_type="mimo_v2_flash",
    defaults={"rms_norm_eps": 1e-5},
    describe=_describe,
    transformers=Naming(modules={"sinks.weight": "self_attn.attention_sink_bias"}),
    gguf=GgufNaming(architecture="mimo2"),
)
