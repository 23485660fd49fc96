"""Families that transformers computes with code of the checkpoint's authors: InternLM 2, Baichuan, Qwen 1 and others.

Except for Orion's LayerNorm and the factors of Tele-FLM, the dense ones are Llamas with other names. Ling (Bailing) and
Sarvam have mixtures of experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from trioserve.model.families.family import SHARED_EXPERTS, Family, Naming
from trioserve.model.families.model_fields import ModelFields
from trioserve.model.layer_config import AttentionConfig, ExpertsConfig, LayerConfig, MlpConfig, alibi_slopes
from trioserve.model.model_config import ModelConfig

__all__ = [
    "BAICHUAN",
    "BAILING_MOE",
    "BAILING_MOE_V2",
    "CHATGLM",
    "INTERNLM2",
    "ORION",
    "QWEN",
    "SARVAM_MOE",
    "TELEFLM",
]

_QKV = ("q_proj", "k_proj", "v_proj")


def _described(fields: ModelFields, family: str, *, has_bias: bool = False, **choices: Any) -> ModelConfig:
    """Describe a model with equal layers, each with attention of a Llama and an MLP without biases."""
    layer = LayerConfig(attention=fields.attention(has_bias=has_bias, has_output_bias=has_bias), mlp=fields.mlp())
    return fields.described(family, (layer,) * fields.layer_count, **choices)


def _describe_internlm2(fields: ModelFields) -> ModelConfig:
    return _described(fields, "internlm2", has_bias=fields.flag_or("bias", False))


INTERNLM2 = Family(
    name="internlm2",
    classes=("InternLM2ForCausalLM",),
    model_type="internlm2",
    describe=_describe_internlm2,
    transformers=Naming(
        modules={
            "embed": "model.tok_embeddings",
            "lm_head": "output",
            "attention_norm": "attention_norm",
            "mlp_norm": "ffn_norm",
            **dict.fromkeys(_QKV, "attention.wqkv"),
            "o_proj": "attention.wo",
            "gate_proj": "feed_forward.w1",
            "up_proj": "feed_forward.w3",
            "down_proj": "feed_forward.w2",
        },
        grouped=_QKV,
    ),
)


def _describe_baichuan(fields: ModelFields) -> ModelConfig:
    """Describe Baichuan 1 and 2. Models with 13B have ALiBi, and call their context length model_max_length."""
    positions: dict[str, Any] = {}
    if "max_position_embeddings" not in fields:
        positions = {"rotary": None, "slopes": alibi_slopes(fields.whole("num_attention_heads"))}
    layer = LayerConfig(attention=fields.attention(**positions), mlp=fields.mlp())
    return fields.described(
        "baichuan",
        (layer,) * fields.layer_count,
        context_tokens_max=fields.whole("model_max_length" if positions else "max_position_embeddings"),
        has_unit_head=fields.whole("vocab_size") == _BAICHUAN2_TOKENS,
    )


# In Baichuan 2, the rows of the head are scaled to length 1. The configs of both versions have the same fields.
_BAICHUAN2_TOKENS = 125_696
BAICHUAN = Family(
    name="baichuan",
    classes=("BaiChuanForCausalLM", "BaichuanForCausalLM"),
    model_type="baichuan",
    notes=("model_max_length", "z_loss_weight"),
    describe=_describe_baichuan,
    transformers=Naming(modules=dict.fromkeys(_QKV, "self_attn.W_pack")),
)


def _describe_qwen(fields: ModelFields) -> ModelConfig:
    """Describe Qwen 1. Its context ends where logn attention and dynamic scaling of positions would begin."""
    if not fields.flag_or("no_bias", True):
        raise fields.wrong("no_bias", "true")
    size = fields.whole("intermediate_size")
    layer = LayerConfig(
        attention=fields.attention(kv_head_count=fields.whole("num_attention_heads"), has_bias=True),
        mlp=MlpConfig(intermediate_size=size // 2),
    )
    return fields.described("qwen", (layer,) * fields.layer_count)


QWEN = Family(
    name="qwen",
    classes=("QWenLMHeadModel",),
    model_type="qwen",
    spellings={
        "head_dim": "kv_channels",
        "max_position_embeddings": "seq_length",
        "rms_norm_eps": "layer_norm_epsilon",
        "rope_theta": "rotary_emb_base",
        "partial_rotary_factor": "rotary_pct",
    },
    notes=(
        *("bf16", "fp16", "fp32", "max_position_embeddings", "onnx_safe", "scale_attn_weights", "softmax_in_fp32"),
        *("use_cache_kernel", "use_cache_quantization", "use_dynamic_ntk", "use_logn_attn"),
    ),
    describe=_describe_qwen,
    transformers=Naming(
        layers="transformer.h",
        modules={
            "embed": "transformer.wte",
            "norm": "transformer.ln_f",
            "attention_norm": "ln_1",
            "mlp_norm": "ln_2",
            **dict.fromkeys(_QKV, "attn.c_attn"),
            "o_proj": "attn.c_proj",
            "gate_proj": "mlp.w2",
            "up_proj": "mlp.w1",
            "down_proj": "mlp.c_proj",
        },
    ),
)


def _describe_chatglm(fields: ModelFields) -> ModelConfig:
    """Describe ChatGLM 2 and 3 and GLM-4 of 2024: as transformers' Glm, with theta 10,000 * rope_ratio."""
    for name, needed in _CHATGLM_FLAGS.items():
        if fields.flag_or(name, needed) is not needed:
            raise fields.wrong(name, str(needed).lower())
    head_count, head_dim = fields.whole("num_attention_heads"), fields.head_dim()
    theta = 10_000.0 * fields.number_or("rope_ratio", 1.0)
    attention = fields.attention(
        kv_head_count=fields.whole("multi_query_group_num")
        if fields.flag_or("multi_query_attention", False)
        else head_count,
        has_bias=fields.flag_or("add_qkv_bias", False),
        rotary=fields.rotary(head_dim, rotated_dims=head_dim // 2, theta=theta),
    )
    layer = LayerConfig(attention=attention, mlp=fields.mlp())
    return fields.described("chatglm", (layer,) * fields.layer_count)


_CHATGLM_FLAGS = {
    "add_bias_linear": False,
    "apply_residual_connection_post_layernorm": False,
    "original_rope": True,
    "post_layer_norm": True,
    "rmsnorm": True,
}
CHATGLM = Family(
    name="chatglm",
    classes=("ChatGLMForConditionalGeneration", "ChatGLMModel"),
    model_type="chatglm",
    spellings={
        "head_dim": "kv_channels",
        "intermediate_size": "ffn_hidden_size",
        "max_position_embeddings": "seq_length",
        "num_hidden_layers": "num_layers",
        "rms_norm_eps": "layernorm_epsilon",
        "vocab_size": "padded_vocab_size",
    },
    notes=(
        "apply_query_key_layer_scaling",
        "attention_softmax_in_fp32",
        "bias_dropout_fusion",
        "fp32_residual_connection",
    ),
    describe=_describe_chatglm,
    transformers=Naming(
        layers="transformer.encoder.layers",
        modules={
            "embed": "transformer.embedding.word_embeddings",
            "norm": "transformer.encoder.final_layernorm",
            "lm_head": "transformer.output_layer",
            **dict.fromkeys(_QKV, "self_attention.query_key_value"),
            "o_proj": "self_attention.dense",
            **dict.fromkeys(("gate_proj", "up_proj"), "mlp.dense_h_to_4h"),
            "down_proj": "mlp.dense_4h_to_h",
        },
        pairs_adjacent=True,
    ),
)
ORION = Family(
    name="orion",
    classes=("OrionForCausalLM",),
    model_type="orion",
    describe=lambda fields: _described(
        fields, "orion", norm="layer_biased", norm_eps=fields.number_or("rms_norm_eps", 1e-5)
    ),
)


def _describe_teleflm(fields: ModelFields) -> ModelConfig:
    factors: dict[str, Any] = {}
    if fields.flag_or("use_mup", False):
        factors["embedding_scale"] = fields.number("input_mult")
        factors["logit_scale"] = fields.number("output_mult") / fields.number("mup_scale_factor")
    return _described(fields, "teleflm", **factors)


TELEFLM = Family(
    name="teleflm",
    classes=("TeleFLMForCausalLM",),
    model_type="TeleFLM",
    notes=("input_mult", "mup_scale_factor", "output_mult"),
    describe=_describe_teleflm,
)


def _bailing_layers(
    fields: ModelFields, attention: AttentionConfig, mlps: Sequence[MlpConfig | ExpertsConfig]
) -> list[LayerConfig]:
    for name in ("norm_head", "use_bias"):
        if fields.flag_or(name, False):
            raise fields.wrong(name, "false for this family")
    return [LayerConfig(attention=attention, mlp=mlp) for mlp in mlps]


def _describe_bailing(fields: ModelFields) -> ModelConfig:
    """Describe Ling 1: experts with the highest softmax scores, in all layers or all but the first ones."""
    attention = fields.attention(has_bias=fields.flag_or("use_qkv_bias", False))
    return fields.described("bailing_moe", _bailing_layers(fields, attention, fields.routed_mlps("softmax")))


def _describe_bailing_v2(fields: ModelFields) -> ModelConfig:
    """Describe Ling 2 and Ring 2: normed heads, rotated in part, and the router of DeepSeek-V3."""
    return _described_sigmoid(fields, "bailing_moe_v2", has_normed_heads=False, has_score_bias=False)


def _describe_sarvam(fields: ModelFields) -> ModelConfig:
    return _described_sigmoid(fields, "sarvam_moe", has_normed_heads=True, has_score_bias=True)


def _described_sigmoid(
    fields: ModelFields, family: str, *, has_normed_heads: bool, has_score_bias: bool
) -> ModelConfig:
    head_dim = fields.head_dim()
    attention = fields.attention(
        has_bias=fields.flag_or("use_qkv_bias", fields.flag_or("attention_bias", False)),
        rotary=fields.rotary(head_dim, rotated_dims=fields.part_of_head(head_dim, 1.0)),
        qk_norm="head" if fields.flag_or("use_qk_norm", has_normed_heads) else "none",
    )
    size = fields.whole_or("moe_shared_expert_intermediate_size", fields.whole("moe_intermediate_size"))
    mlps = fields.routed_by_sigmoid(
        has_score_bias=fields.flag_or("moe_router_enable_expert_bias", has_score_bias),
        shared_size=size * fields.whole_or("n_shared_experts", 0),
    )
    return fields.described(family, _bailing_layers(fields, attention, mlps))


BAILING_MOE = Family(
    name="bailing_moe",
    classes=("BailingMoeForCausalLM",),
    model_type="bailing_moe",
    spellings={"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"},
    notes=("multi_gate", "norm_softmax", "use_rmsnorm"),
    describe=_describe_bailing,
    transformers=Naming(
        modules={
            **SHARED_EXPERTS,
            "embed": "model.word_embeddings",
            **dict.fromkeys(_QKV, "attention.query_key_value"),
            "o_proj": "attention.dense",
        }
    ),
)
BAILING_MOE_V2 = replace(
    BAILING_MOE,
    name="bailing_moe_v2",
    classes=("BailingMoeV2ForCausalLM",),
    model_type="bailing_moe_v2",
    spellings={**BAILING_MOE.spellings, "scoring_func": "score_function"},
    notes=(*BAILING_MOE.notes, "router_dtype"),
    describe=_describe_bailing_v2,
    transformers=Naming(
        modules={
            **BAILING_MOE.transformers.modules,
            "q_norm": "attention.query_layernorm",
            "k_norm": "attention.key_layernorm",
            "router.score_bias": "mlp.gate.expert_bias",
        }
    ),
)
SARVAM_MOE = replace(
    BAILING_MOE_V2,
    name="sarvam_moe",
    classes=("SarvamMoEForCausalLM",),
    model_type="sarvam_moe",
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 64,
        "rope_theta": 8_000_000.0,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
    },
    describe=_describe_sarvam,
)
