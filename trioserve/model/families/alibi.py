"""Bloom and MPT: scores of attention that depend on distances (ALiBi), LayerNorm, and MLPs without a gate."""

from __future__ import annotations

from trioserve.model.families.family import Family, GgufNaming, Naming
from trioserve.model.families.model_fields import ModelFields
from trioserve.model.layer_config import LayerConfig, alibi_slopes
from trioserve.model.model_config import ModelConfig

__all__ = ["BLOOM", "MPT"]

_QKV = ("q_proj", "k_proj", "v_proj")


def _describe_bloom(fields: ModelFields) -> ModelConfig:
    if fields.flag_or("apply_residual_connection_post_layernorm", False):
        raise fields.wrong(
            "apply_residual_connection_post_layernorm", "false: sums with normed values are not supported"
        )
    head_count = fields.whole("num_attention_heads")
    attention = fields.attention(
        kv_head_count=head_count, rotary=None, slopes=alibi_slopes(head_count), has_bias=True, has_output_bias=True
    )
    size = fields.whole_or("n_inner", None) or 4 * fields.whole("hidden_size")
    layer = LayerConfig(attention=attention, mlp=fields.plain_mlp("gelu_new", has_bias=True, size=size))
    return fields.described(
        "bloom",
        (layer,) * fields.layer_count,
        norm="layer_biased",
        norm_eps=fields.number_or("layer_norm_eps", 1e-5),
        has_embedding_norm=True,
        tie_word_embeddings=fields.flag_or("tie_word_embeddings", True),
        context_tokens_max=fields.whole_or("seq_length", fields.whole_or("max_position_embeddings", 2048)),
    )


BLOOM = Family(
    name="bloom",
    classes=("BloomForCausalLM",),
    model_type="bloom",
    spellings={
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "layer_norm_eps": "layer_norm_epsilon",
    },
    notes=(
        *("attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion", "n_embed", "offset_alibi"),
        *("skip_bias_add", "skip_bias_add_qkv", "slow_but_exact"),
    ),
    describe=_describe_bloom,
    transformers=Naming(
        layers="transformer.h",
        modules={
            "embed": "transformer.word_embeddings",
            "embed_norm": "transformer.word_embeddings_layernorm",
            "norm": "transformer.ln_f",
            **dict.fromkeys(_QKV, "self_attention.query_key_value"),
            "o_proj": "self_attention.dense",
            "up_proj": "mlp.dense_h_to_4h",
            "down_proj": "mlp.dense_4h_to_h",
        },
        grouped=_QKV,
    ),
    gguf=GgufNaming(architecture="bloom", modules=dict.fromkeys(_QKV, "attn_qkv")),
)


def _describe_mpt(fields: ModelFields) -> ModelConfig:
    """Describe MPT: norms and projections have no biases."""
    head_count, hidden_size = fields.whole("num_attention_heads"), fields.whole("hidden_size")
    own = fields.group_or_none("attn_config")
    slopes, scale, clip = alibi_slopes(head_count), None, None
    if own is not None:
        if not own.flag_or("alibi", True):
            raise own.wrong("alibi", "true: learned positions of MPT are not supported")
        for name in ("prefix_lm", "qk_ln"):
            if not own.is_one_of(name, (None, False, 0, 0.0)):
                raise own.wrong(name, "off: this variant is not supported")
        if not own.is_one_of("attn_type", (None, "multihead_attention")):
            raise own.wrong("attn_type", "'multihead_attention'")
        slopes = alibi_slopes(head_count, own.number_or("alibi_bias_max", 8.0))
        scale, clip = own.number_or("softmax_scale", None), own.number_or("clip_qkv", None) or None
    if not fields.flag_or("no_bias", True):
        raise fields.wrong("no_bias", "true: biases of MPT are not supported")
    attention = fields.attention(kv_head_count=head_count, rotary=None, slopes=slopes, scale=scale, clip=clip)
    size = fields.whole_or("expansion_ratio", 4) * hidden_size
    layer = LayerConfig(attention=attention, mlp=fields.plain_mlp("gelu", has_bias=False, size=size))
    return fields.described(
        "mpt",
        (layer,) * fields.layer_count,
        norm="layer",
        norm_eps=fields.number_or("layer_norm_eps", 1e-5),
        tie_word_embeddings=fields.flag_or("tie_word_embeddings", True),
        context_tokens_max=fields.whole_or("max_seq_len", 2048),
    )


MPT = Family(
    name="mpt",
    classes=("MptForCausalLM", "MPTForCausalLM"),
    model_type="mpt",
    spellings={
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "layer_norm_eps": "layer_norm_epsilon",
    },
    notes=(
        *("attn_config.attn_impl", "attn_config.attn_uses_sequence_id", "embedding_fraction", "init_config"),
        *("init_device", "learned_pos_emb", "norm_type", "tokenizer_name", "verbose"),
    ),
    describe=_describe_mpt,
    transformers=Naming(
        layers="transformer.blocks",
        modules={
            "embed": "transformer.wte",
            "norm": "transformer.norm_f",
            "attention_norm": "norm_1",
            "mlp_norm": "norm_2",
            **dict.fromkeys(_QKV, "attn.Wqkv"),
            "o_proj": "attn.out_proj",
            "up_proj": "ffn.up_proj",
            "down_proj": "ffn.down_proj",
        },
    ),
    gguf=GgufNaming(architecture="mpt", modules=dict.fromkeys(_QKV, "attn_qkv")),
)
