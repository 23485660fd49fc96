"""Gemma 4 (language models only): layers with full attention have other heads than layers with a sliding window.

In some models, each layer adds its own embedding of every token, or has a mixture of experts beside its MLP. The last
layers may read the keys and values of an earlier layer.
"""

from __future__ import annotations

import math

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.families.family import Family, Naming
from trioserve.model.families.gemma import MODULES, layers_of_shared_kv
from trioserve.model.families.model_fields import ModelFields
from trioserve.model.layer_config import (
    AttentionConfig,
    ExpertsConfig,
    LayerConfig,
    MlpConfig,
    RopeScaling,
    RotaryConfig,
)
from trioserve.model.loading.fields import Fields
from trioserve.model.model_config import ModelConfig, RowFactors, StreamsConfig

__all__ = ["GEMMA4", "GEMMA4_UNIFIED"]

GLOBAL_HEAD_DIM = 512
# Parameters of the rotary embeddings if the config has none.
ROPE_OF_LAYERS: dict[str, dict[str, object]] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25},
}
# Divisor of the frequencies of pairs that are not rotated, as llama.cpp writes it.
NO_ROTATION = 1e30


def _describe(fields: ModelFields) -> ModelConfig:
    attentions = _attentions(fields)
    activation = fields.activation("hidden_activation", default="gelu_pytorch_tanh")
    size, is_wide = fields.whole("intermediate_size"), fields.flag_or("use_double_wide_mlp", False)
    mlps: list[MlpConfig | ExpertsConfig] = [
        MlpConfig(
            intermediate_size=2 * size if is_wide and attention.kv_from is not None else size, activation=activation
        )
        for attention in attentions
    ]
    factors: tuple[RowFactors, ...] = ()
    if fields.flag_or("enable_moe_block", False):
        mlps = [
            ExpertsConfig(
                expert_count=fields.whole("num_experts"),
                experts_per_token=fields.whole("top_k_experts"),
                intermediate_size=fields.whole("moe_intermediate_size"),
                normalizes=True,
                activation=activation,
                shared_size=mlp.intermediate_size,
                has_own_norms=True,
            )
            for mlp in mlps
        ]
        hidden_size = fields.whole("hidden_size")
        factors = (RowFactors(name="router_norm.weight", parts=((hidden_size, hidden_size**-0.5),)),)
    input_size = fields.whole_or("hidden_size_per_layer_input", 256)
    input_vocab_size = fields.whole_or("vocab_size_per_layer_input", 262_144)
    return fields.described(
        "gemma4",
        [
            LayerConfig(
                attention=attention,
                mlp=mlp,
                has_output_norms=True,
                has_scale=True,
            )
            for attention, mlp in zip(attentions, mlps, strict=True)
        ],
        row_factors=factors,
        context_tokens_max=fields.whole("max_position_embeddings"),
        embedding_scale=float(max(fields.whole("hidden_size"), 0)) ** 0.5,
        logit_cap=fields.number_or("final_logit_softcapping", None),
        tie_word_embeddings=fields.flag_or("tie_word_embeddings", True),
        streams=StreamsConfig(count=1, input_size=input_size, input_vocab_size=input_vocab_size)
        if input_size
        else None,
    )


def _attentions(fields: ModelFields) -> list[AttentionConfig]:
    if fields.text_or("use_bidirectional_attention", None) not in (None, "vision"):
        raise fields.wrong("use_bidirectional_attention", "null or 'vision'")
    has_bias, has_joint = fields.flag_or("attention_bias", False), fields.flag_or("attention_k_eq_v", False)
    windows = list(fields.windows(fields.whole_or("sliding_window", 512), lambda layer: (layer + 1) % 6 != 0))
    windows[-1] = None  # as in transformers
    # transformers 5.24 writes per_layer_config instead of the two global fields.
    head_dim = fields.whole_or("global_head_dim", GLOBAL_HEAD_DIM)
    kv_heads = fields.whole_or("num_global_key_value_heads", None) if has_joint else None
    by_layer = fields.group_or_none("per_layer_config")
    attentions = []
    for index, (window, kv_from) in enumerate(zip(windows, layers_of_shared_kv(fields, windows, 0), strict=True)):
        own = {"head_dim": fields.whole_or("head_dim", 256), "num_key_value_heads": fields.whole("num_key_value_heads")}
        if window is None and by_layer is None:
            own |= {"head_dim": head_dim} | ({} if kv_heads is None else {"num_key_value_heads": kv_heads})
        if (overrides := by_layer and by_layer.group_or_none(str(index))) is not None:
            own = {name: overrides.whole_or(name, number) for name, number in own.items()}
            if unread := overrides.unread():
                raise ModelLoadError(
                    f"per_layer_config in {fields.source} has {', '.join(unread)} for layer {index}; supported are "
                    "head_dim and num_key_value_heads"
                )
        attentions.append(
            AttentionConfig(
                head_count=fields.whole("num_attention_heads"),
                kv_head_count=own["num_key_value_heads"],
                head_dim=own["head_dim"],
                rotary=_rotary(fields, own["head_dim"], "full_attention" if window is None else "sliding_attention"),
                window=window,
                scale=1.0,
                has_bias=has_bias,
                has_output_bias=has_bias,
                qk_norm="head",
                has_value_norm=True,
                has_values_of_keys=has_joint and window is None and kv_from is None,
                kv_from=kv_from,
            )
        )
    return attentions


def _rotary(fields: ModelFields, head_dim: int, layer_type: str) -> RotaryConfig:
    """Read the rotary parameters of one type of layers.

    With "proportional", only the first pairs of a head are rotated, with the frequencies that they have if all pairs
    are rotated.
    """
    by_type = fields.group_or_none("rope_parameters")
    rope = None if by_type is None else by_type.group_or_none(layer_type)
    if rope is None:
        rope = Fields(ROPE_OF_LAYERS[layer_type], fields.source)
    theta = rope.number("rope_theta")
    if rope.text_or("rope_type", "default") != "proportional":
        return fields.rotary(head_dim, layer_type=layer_type, rotated_dims=head_dim, theta=theta)
    share = rope.number_or("partial_rotary_factor", 1.0)
    if not (math.isfinite(share) and 0 <= share <= 1):
        raise rope.wrong("partial_rotary_factor", "0 to 1")
    pairs, rotated = head_dim // 2, int(share * head_dim // 2)
    factors = (rope.number_or("factor", 1.0),) * rotated + (NO_ROTATION,) * (pairs - rotated)
    scaling = RopeScaling(kind="llama3", factor=1.0, frequency_factors=factors)
    return RotaryConfig(theta=theta, rotated_dims=head_dim, scaling=scaling)


MODULES_OF_EXPERTS = {
    "router": "router.proj",
    "router_norm.weight": "router.scale",
    "router.expert_scale": "router.per_expert_scale",
    "experts_norm": "pre_feedforward_layernorm_2",
    "experts_output_norm": "post_feedforward_layernorm_2",
    "shared_output_norm": "post_feedforward_layernorm_1",
    "experts.gate_proj.weight": "experts.gate_up_proj",
    "experts.up_proj.weight": "experts.gate_up_proj",
    "experts.down_proj.weight": "experts.down_proj",
    **{f"shared.{part}_proj": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}
GEMMA4 = Family(
    name="gemma4",
    classes=("Gemma4ForCausalLM",),
    model_type="gemma4_text",
    describe=_describe,
    transformers=Naming(modules={**MODULES, **MODULES_OF_EXPERTS}),
    with_images=("Gemma4ForConditionalGeneration",),
)
GEMMA4_UNIFIED = Family(
    name="gemma4_unified",
    classes=("Gemma4UnifiedForCausalLM",),
    model_type="gemma4_unified_text",
    defaults={"hidden_size_per_layer_input": 0, "sliding_window": 1024},
    describe=_describe,
    transformers=Naming(modules=MODULES),
    with_images=("Gemma4UnifiedForConditionalGeneration",),
)
