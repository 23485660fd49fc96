"""GPT-2 and its kin: GPT-BigCode and OPT with learned positions, GPT-J, CodeGen and Falcon with rotary positions.

All have LayerNorm and MLPs without a gate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from trioserve.model.families.family import Family, GgufNaming, Naming
from trioserve.model.families.model_fields import ModelFields
from trioserve.model.layer_config import AttentionConfig, LayerConfig, alibi_slopes
from trioserve.model.model_config import ModelConfig

__all__ = ["CODEGEN", "FALCON", "FALCON_GROUPED", "GPT2", "GPTJ", "GPT_BIGCODE", "OPT"]

_SPELLINGS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "hidden_act": "activation_function",
    "layer_norm_eps": "layer_norm_epsilon",
}
_QKV = ("q_proj", "k_proj", "v_proj")
_MODULES = {
    "embed": "transformer.wte",
    "positions": "transformer.wpe",
    "norm": "transformer.ln_f",
    "attention_norm": "ln_1",
    "mlp_norm": "ln_2",
}
_GPT2_MODULES = {
    **_MODULES,
    **dict.fromkeys(_QKV, "attn.c_attn"),
    "o_proj": "attn.c_proj",
    "up_proj": "mlp.c_fc",
    "down_proj": "mlp.c_proj",
}
_UNREAD = ("attn.bias", "attn.masked_bias")


def _described(fields: ModelFields, family: str, layers: Sequence[LayerConfig], **choices: Any) -> ModelConfig:
    return fields.described(
        family,
        layers,
        **{
            "norm": "layer_biased",
            "norm_eps": fields.number_or("layer_norm_eps", 1e-5),
            "tie_word_embeddings": fields.flag_or("tie_word_embeddings", True),
            **choices,
        },
    )


def _layer(fields: ModelFields, attention: AttentionConfig, activation: str, **choices: Any) -> LayerConfig:
    """Build a layer with the names that GPT-2's config has for an MLP."""
    size = fields.whole_or("n_inner", None) or 4 * fields.whole("hidden_size")
    return LayerConfig(attention=attention, mlp=fields.plain_mlp(activation, has_bias=True, size=size), **choices)


def _describe_gpt2(fields: ModelFields) -> ModelConfig:
    scale = None if fields.flag_or("scale_attn_weights", True) else 1.0
    divides = fields.flag_or("scale_attn_by_inverse_layer_idx", False)
    layers = []
    for index in range(fields.layer_count):
        if divides:
            scale = (fields.head_dim() ** -0.5 if fields.flag_or("scale_attn_weights", True) else 1.0) / (index + 1)
        attention = fields.attention(
            kv_head_count=fields.whole("num_attention_heads"),
            rotary=None,
            scale=scale,
            has_bias=True,
            has_output_bias=True,
        )
        layers.append(_layer(fields, attention, "gelu_new"))
    return _described(fields, "gpt2", layers, position_first=0)


GPT2 = Family(
    name="gpt2",
    classes=("GPT2LMHeadModel",),
    model_type="gpt2",
    spellings=_SPELLINGS,
    notes=(
        *("n_ctx", "reorder_and_upcast_attn", "summary_activation", "summary_first_dropout"),
        *("summary_proj_to_labels", "summary_type", "summary_use_proj"),
    ),
    describe=_describe_gpt2,
    transformers=Naming(
        layers="transformer.h",
        modules=_GPT2_MODULES,
        turned=(*_QKV, "o_proj", "up_proj", "down_proj"),
        unread=_UNREAD,
    ),
    gguf=GgufNaming(architecture="gpt2", modules=dict.fromkeys(_QKV, "attn_qkv")),
)


def _describe_bigcode(fields: ModelFields) -> ModelConfig:
    """Describe StarCoder 1 and SantaCoder: a GPT-2 whose query heads share one key and one value."""
    attention = fields.attention(
        kv_head_count=1 if fields.flag_or("multi_query", True) else fields.whole("num_attention_heads"),
        rotary=None,
        scale=None if fields.flag_or("scale_attn_weights", True) else 1.0,
        has_bias=True,
        has_output_bias=True,
    )
    layer = _layer(fields, attention, "gelu_pytorch_tanh")
    return _described(fields, "gpt_bigcode", (layer,) * fields.layer_count, position_first=0)


GPT_BIGCODE = Family(
    name="gpt_bigcode",
    classes=("GPTBigCodeForCausalLM",),
    model_type="gpt_bigcode",
    spellings=_SPELLINGS,
    notes=(
        *("attention_softmax_in_fp32", "inference_runner", "max_batch_size", "max_sequence_length", "pad_key_length"),
        *("pre_allocate_kv_cache", "scale_attention_softmax_in_fp32", "summary_activation", "summary_first_dropout"),
        *("summary_proj_to_labels", "summary_type", "summary_use_proj", "validate_runner_input"),
    ),
    describe=_describe_bigcode,
    transformers=Naming(layers="transformer.h", modules=_GPT2_MODULES, grouped=_QKV, unread=_UNREAD),
    gguf=GgufNaming(architecture="starcoder", modules=dict.fromkeys(_QKV, "attn_qkv")),
)


def _describe_opt(fields: ModelFields) -> ModelConfig:
    if not fields.flag_or("do_layer_norm_before", True):
        raise fields.wrong("do_layer_norm_before", "true: norms after a sum are not supported")
    if fields.flag_or("_remove_final_layer_norm", False):
        raise fields.wrong("_remove_final_layer_norm", "false: a model without a last norm is not supported")
    hidden_size, has_bias = fields.whole("hidden_size"), fields.flag_or("enable_bias", True)
    if fields.whole_or("word_embed_proj_dim", hidden_size) != hidden_size:
        raise fields.wrong("word_embed_proj_dim", f"hidden_size ({hidden_size})")
    attention = fields.attention(
        kv_head_count=fields.whole("num_attention_heads"), rotary=None, has_bias=has_bias, has_output_bias=has_bias
    )
    layer = LayerConfig(
        attention=attention, mlp=fields.plain_mlp("relu", has_bias=has_bias, size=fields.whole("ffn_dim"))
    )
    norm = "layer_biased" if fields.flag_or("layer_norm_elementwise_affine", True) else "layer_bare"
    # Rows of the table begin with position -2.
    return _described(fields, "opt", (layer,) * fields.layer_count, norm=norm, norm_eps=1e-5, position_first=2)


OPT = Family(
    name="opt",
    classes=("OPTForCausalLM",),
    model_type="opt",
    spellings={"hidden_act": "activation_function"},
    notes=("dropout", "init_std", "layerdrop"),
    describe=_describe_opt,
    transformers=Naming(
        layers="model.decoder.layers",
        modules={
            "embed": "model.decoder.embed_tokens",
            "positions": "model.decoder.embed_positions",
            "norm": "model.decoder.final_layer_norm",
            "attention_norm": "self_attn_layer_norm",
            "mlp_norm": "final_layer_norm",
            "o_proj": "self_attn.out_proj",
            "up_proj": "fc1",
            "down_proj": "fc2",
        },
    ),
)


def _describe_gptj(fields: ModelFields) -> ModelConfig:
    return _described_gptj(fields, "gptj")


def _described_gptj(fields: ModelFields, family: str) -> ModelConfig:
    """Describe a model whose MLP reads the input of attention, and whose head has a bias."""
    if fields.is_null("rotary_dim"):
        raise fields.wrong("rotary_dim", "a whole number")
    attention = fields.attention(
        kv_head_count=fields.whole("num_attention_heads"),
        rotary=fields.rotary(fields.head_dim(), rotated_dims=fields.whole_or("rotary_dim", 64)),
    )
    layer = _layer(fields, attention, "gelu_new", is_parallel=True)
    tied = fields.flag_or("tie_word_embeddings", False)
    return _described(fields, family, (layer,) * fields.layer_count, tie_word_embeddings=tied, has_head_bias=True)


_GPTJ_MODULES = {**_MODULES, "o_proj": "attn.out_proj", "up_proj": "mlp.fc_in", "down_proj": "mlp.fc_out"}
_GPTJ_NOTES = (
    *("n_ctx", "rotary", "scale_attn_weights", "summary_activation", "summary_first_dropout"),
    *("summary_proj_to_labels", "summary_type", "summary_use_proj"),
)
GPTJ = Family(
    name="gptj",
    classes=("GPTJForCausalLM",),
    model_type="gptj",
    spellings=_SPELLINGS,
    notes=_GPTJ_NOTES,
    describe=_describe_gptj,
    transformers=Naming(
        layers="transformer.h",
        modules={**_GPTJ_MODULES, **{module: f"attn.{module}" for module in _QKV}},
        pairs_adjacent=True,
        unread=_UNREAD,
    ),
)


def _describe_codegen(fields: ModelFields) -> ModelConfig:
    return _described_gptj(fields, "codegen")


CODEGEN = Family(
    name="codegen",
    classes=("CodeGenForCausalLM",),
    model_type="codegen",
    spellings=_SPELLINGS,
    notes=_GPTJ_NOTES,
    describe=_describe_codegen,
    transformers=Naming(
        layers="transformer.h",
        modules={**_GPTJ_MODULES, **dict.fromkeys(_QKV, "attn.qkv_proj")},
        pairs_adjacent=True,
        grouped=_QKV,
        shards=4,
        unread=(*_UNREAD, "attn.causal_mask"),
    ),
)


def _describe_falcon(fields: ModelFields) -> ModelConfig:
    """Describe Falcon. Falcon 40B and 180B have groups of query heads, and by default a norm of the MLP's own."""
    is_grouped = fields.flag_or("new_decoder_architecture", False)
    head_count, has_bias = fields.whole("num_attention_heads"), fields.flag_or("bias", False)
    kv_head_count = 1 if fields.flag_or("multi_query", True) else head_count
    is_parallel = fields.flag_or("parallel_attn", True)
    has_own_norm = False
    if is_grouped:
        if not is_parallel:
            raise fields.wrong("parallel_attn", "true with new_decoder_architecture")
        kv_head_count = fields.whole_or("num_kv_heads", head_count)
        has_own_norm = fields.whole_or("num_ln_in_parallel_attn", 2) == 2
    positions: dict[str, Any] = {}
    if fields.flag_or("alibi", False):  # Slopes are divided like the products of queries and keys.
        positions = {"rotary": None, "slopes": alibi_slopes(head_count, scale=fields.head_dim() ** -0.5)}
    attention = fields.attention(kv_head_count=kv_head_count, has_bias=has_bias, has_output_bias=has_bias, **positions)
    size = fields.whole_or("ffn_hidden_size", 4 * fields.whole("hidden_size"))
    layer = LayerConfig(
        attention=attention,
        mlp=fields.plain_mlp("gelu", has_bias=has_bias, size=size),
        is_parallel=is_parallel,
        has_own_mlp_norm=has_own_norm,
    )
    family = "falcon_grouped" if has_own_norm else "falcon"
    return _described(fields, family, (layer,) * fields.layer_count)


_FALCON_MODULES = {
    "embed": "transformer.word_embeddings",
    "norm": "transformer.ln_f",
    **dict.fromkeys(_QKV, "self_attention.query_key_value"),
    "o_proj": "self_attention.dense",
    "up_proj": "mlp.dense_h_to_4h",
    "down_proj": "mlp.dense_4h_to_h",
}
FALCON = Family(
    name="falcon",
    classes=("FalconForCausalLM", "RWForCausalLM"),
    model_type="falcon",
    spellings={
        "hidden_act": "activation",
        "layer_norm_eps": "layer_norm_epsilon",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
        "num_kv_heads": "n_head_kv",
    },
    notes=("multi_query", "num_kv_heads", "parallel_attn", "rope_parameters"),
    describe=_describe_falcon,
    transformers=Naming(layers="transformer.h", modules=_FALCON_MODULES, grouped=_QKV),
    gguf=GgufNaming(architecture="falcon", modules=dict.fromkeys(_QKV, "attn_qkv")),
)
FALCON_GROUPED = replace(
    FALCON,
    name="falcon_grouped",
    classes=(),
    transformers=replace(
        FALCON.transformers, modules={**_FALCON_MODULES, "attention_norm": "ln_attn", "mlp_norm": "ln_mlp"}
    ),
    gguf=GgufNaming(
        architecture="falcon",
        modules={**dict.fromkeys(_QKV, "attn_qkv"), "attention_norm": "attn_norm_2", "mlp_norm": "attn_norm"},
    ),
)
