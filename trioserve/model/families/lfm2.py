"""LFM2: most layers are short convolutions. All other layers have attention with normalized heads.

Mixtures of experts in LFM2-MoE use DeepSeek-V3's router.
"""

from __future__ import annotations

from collections.abc import Sequence

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.families.family import Family, GgufNaming, Naming
from trioserve.model.families.model_fields import ModelFields
from trioserve.model.layer_config import ExpertsConfig, LayerConfig, MlpConfig, ShortConvConfig
from trioserve.model.model_config import ModelConfig

__all__ = ["LFM2", "LFM2_MOE"]


def _describe(fields: ModelFields) -> ModelConfig:
    mlp = MlpConfig(intermediate_size=_intermediate_size(fields))
    return _described(fields, "lfm2", [mlp] * fields.layer_count)


def _describe_mixture(fields: ModelFields) -> ModelConfig:
    if fields.text_or("scoring_func", "sigmoid") != "sigmoid":
        raise fields.wrong("scoring_func", "'sigmoid' for this family")
    experts = fields.experts(
        "num_experts",
        fields.whole("moe_intermediate_size"),
        normalizes=fields.flag_or("norm_topk_prob", True),
        scoring="sigmoid",
        scale=fields.number_or("routed_scaling_factor", 1.0),
        has_score_bias=fields.flag_or("use_expert_bias", True),
    )
    dense_count = fields.whole_or("num_dense_layers", 2)
    mlps = [fields.mlp() if layer < dense_count else experts for layer in range(fields.layer_count)]
    return _described(fields, "lfm2_moe", mlps)


def _described(fields: ModelFields, family: str, mlps: Sequence[MlpConfig | ExpertsConfig]) -> ModelConfig:
    attention = fields.attention(
        qk_norm="head", rotary=fields.rotary(fields.head_dim(), theta=fields.number_or("theta", 1_000_000.0))
    )
    conv = ShortConvConfig(
        channel_count=fields.whole("hidden_size"),
        kernel_size=fields.whole_or("conv_L_cache", 3),
        has_bias=fields.flag_or("conv_bias", False),
    )
    if not any(name in fields for name in ("layer_types", "layers_block_type", "full_attn_idxs")):
        if family == "lfm2_moe":
            raise ModelLoadError(f"{fields.source} lacks layer_types, which must name the kind of each layer")
        # Without a list, all layers have attention, as in transformers.
        indexes: Sequence[int] = range(fields.layer_count)
    else:
        indexes = fields.wholes("full_attn_idxs")
    attends = fields.attending_layers("conv", indexes)
    return fields.described(
        family,
        [LayerConfig(attention=attention if at else conv, mlp=mlp) for at, mlp in zip(attends, mlps, strict=True)],
        norm_eps=fields.number_or("norm_eps", 1e-5),
        tie_word_embeddings=fields.flag_or("tie_word_embeddings", fields.flag_or("tie_embedding", True)),
    )


def _intermediate_size(fields: ModelFields) -> int:
    """Return the channels of the MLP: two thirds of the configured size, rounded up to a multiple of a given number."""
    size = fields.whole_or("block_ff_dim", None)
    if size is None:
        size = fields.whole("intermediate_size")
    if not fields.flag_or("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    multiplier = fields.number_or("block_ffn_dim_multiplier", 1.0)
    if fields.is_null("block_ffn_dim_multiplier"):
        return size
    return -(-int(multiplier * size) // (piece := fields.interval("block_multiple_of", 256))) * piece


_MODULES = {
    "attention_norm": "operator_norm",
    "mlp_norm": "ffn_norm",
    "norm": "model.embedding_norm",
    "o_proj": "self_attn.out_proj",
    "q_norm": "self_attn.q_layernorm",
    "k_norm": "self_attn.k_layernorm",
    "gate_proj": "feed_forward.w1",
    "up_proj": "feed_forward.w3",
    "down_proj": "feed_forward.w2",
    "router": "feed_forward.gate",
    "router.score_bias": "feed_forward.expert_bias",
    "experts.gate_proj": "feed_forward.experts.{expert}.w1",
    "experts.up_proj": "feed_forward.experts.{expert}.w3",
    "experts.down_proj": "feed_forward.experts.{expert}.w2",
    "in_proj": "conv.in_proj",
    "conv": "conv.conv",
    "out_proj": "conv.out_proj",
}
_GGUF_MODULES = {
    "norm": "token_embd_norm",
    "in_proj": "shortconv.in_proj",
    "conv": "shortconv.conv",
    "out_proj": "shortconv.out_proj",
}
LFM2 = Family(
    name="lfm2",
    classes=("Lfm2ForCausalLM",),
    model_type="lfm2",
    defaults={"num_key_value_heads": 8},
    notes=(
        "block_dim",
        "block_ffn_dim_multiplier",
        "block_mlp_init_scale",
        "block_multiple_of",
        "block_norm_eps",
        "block_out_init_scale",
        "block_use_swiglu",
        "block_use_xavier_init",
        "conv_dim",
        "conv_dim_out",
        "conv_use_xavier_init",
        "num_heads",
        "use_pos_enc",
    ),
    describe=_describe,
    transformers=Naming(modules=_MODULES),
    gguf=GgufNaming(architecture="lfm2", modules=_GGUF_MODULES),
)
LFM2_MOE = Family(
    name="lfm2_moe",
    classes=("Lfm2MoeForCausalLM",),
    model_type="lfm2_moe",
    defaults={"num_key_value_heads": 8},
    describe=_describe_mixture,
    transformers=Naming(modules=_MODULES),
    gguf=GgufNaming(architecture="lfm2moe", modules=_GGUF_MODULES),
)
