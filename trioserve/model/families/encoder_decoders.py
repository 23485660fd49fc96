"""Decoders that attend to the rows of an encoder (loading/encoder_part.py): Whisper (arXiv 2212.04356), BART (arXiv
1910.13461) and T5 (arXiv 1910.10683).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from trioserve.model.families.family import Family, Naming
from trioserve.model.families.model_fields import ModelFields
from trioserve.model.layer_config import LayerConfig, MlpConfig
from trioserve.model.model_config import CrossAttention, ModelConfig, RelativePositions

__all__ = ["BART", "MBART", "MT5", "T5", "T5_GATED", "WHISPER"]

T5_TOKENS_MAX = 512  # Positions of T5 have no limit. It was trained with texts of this length.

_SPELLINGS = {
    "hidden_size": "d_model",
    "num_hidden_layers": "decoder_layers",
    "num_attention_heads": "decoder_attention_heads",
    "hidden_act": "activation_function",
}
_MODULES = {
    "positions": "model.decoder.embed_positions",
    "attention_norm": "self_attn_layer_norm",
    "mlp_norm": "final_layer_norm",
    "o_proj": "self_attn.out_proj",
    "up_proj": "fc1",
    "down_proj": "fc2",
}
_NOTES = (
    *("activation_dropout", "attention_dropout", "decoder_layerdrop", "decoder_start_token_id", "dropout"),
    *("encoder_attention_heads", "encoder_ffn_dim", "encoder_layerdrop", "encoder_layers", "init_std", "max_length"),
    "num_hidden_layers",
)


def _layer(fields: ModelFields, *, has_key_bias: bool = True, normalizes_sums: bool = False) -> LayerConfig:
    """Build a layer whose names are those of BART. Whisper has them, too."""
    if not fields.flag_or("is_encoder_decoder", True):
        raise fields.wrong("is_encoder_decoder", "true: a decoder without its encoder is not supported")
    attention = fields.attention(
        kv_head_count=fields.whole("num_attention_heads"),
        rotary=None,
        has_bias=True,
        has_key_bias=has_key_bias,
        has_output_bias=True,
    )
    mlp = fields.plain_mlp("gelu", has_bias=True, size=fields.whole("decoder_ffn_dim"))
    return LayerConfig(attention=attention, mlp=mlp, normalizes_sums=normalizes_sums)


def _described(
    fields: ModelFields, family: str, layer: LayerConfig, *, rows_max: int, tokens_max: int, **choices: Any
) -> ModelConfig:
    cross = CrossAttention(rows_max=rows_max, tokens_max=tokens_max)
    return fields.described(
        family,
        (layer,) * fields.layer_count,
        **{
            "norm": "layer_biased",
            "norm_eps": 1e-5,
            "cross": cross,
            "context_tokens_max": cross.context_tokens_max,
            "tie_word_embeddings": fields.flag_or("tie_word_embeddings", True),
            **choices,
        },
    )


def _describe_whisper(fields: ModelFields) -> ModelConfig:
    layer = _layer(fields, has_key_bias=False)
    rows_max, tokens_max = fields.whole("max_source_positions"), fields.whole("max_position_embeddings")
    return _described(fields, "whisper", layer, rows_max=rows_max, tokens_max=tokens_max, position_first=0)


WHISPER = Family(
    name="whisper",
    classes=("WhisperForConditionalGeneration",),
    model_type="whisper",
    spellings={**_SPELLINGS, "max_position_embeddings": "max_target_positions"},
    notes=(
        *_NOTES,
        *("apply_spec_augment", "begin_suppress_tokens", "classifier_proj_size", "forced_decoder_ids"),
        *("mask_feature_length", "mask_feature_min_masks", "mask_feature_prob", "mask_time_length"),
        *("mask_time_min_masks", "mask_time_prob", "median_filter_width"),
        *("num_mel_bins", "suppress_tokens", "use_weighted_layer_sum"),
        "scale_embedding",  # No class of transformers multiplies Whisper's embeddings by this scale.
    ),
    describe=_describe_whisper,
    transformers=Naming(
        layers="model.decoder.layers",
        modules={
            **_MODULES,
            "embed": "model.decoder.embed_tokens",
            "norm": "model.decoder.layer_norm",
            "lm_head": "proj_out",
        },
    ),
)


def _describe_bart(fields: ModelFields) -> ModelConfig:
    return _described_bart(fields, "bart", is_post=True)


def _describe_mbart(fields: ModelFields) -> ModelConfig:
    return _described_bart(fields, "mbart", is_post=False)


def _described_bart(fields: ModelFields, family: str, *, is_post: bool) -> ModelConfig:
    """Describe BART, whose norms follow the sums, or mBART, which has a last norm."""
    tokens_max = fields.whole("max_position_embeddings")
    is_scaled = fields.flag_or("scale_embedding", False)
    return _described(
        fields,
        family,
        _layer(fields, normalizes_sums=is_post),
        rows_max=tokens_max,
        tokens_max=tokens_max,
        position_first=2,  # Rows of the table begin with position -2.
        embedding_scale=math.sqrt(fields.whole("hidden_size")) if is_scaled else 1.0,
        has_embedding_norm=True,
        has_last_norm=not is_post,
        has_head_bias=True,
    )


BART = Family(
    name="bart",
    classes=("BartForConditionalGeneration",),
    model_type="bart",
    spellings=_SPELLINGS,
    notes=(
        *(*_NOTES, "add_bias_logits", "add_final_layer_norm", "classif_dropout", "classifier_dropout", "gradient_ckpt"),
        *("force_bos_token_to_be_generated", "normalize_before", "normalize_embedding", "prefix", "save_step"),
        *("static_position_embeddings", "task_specific_params"),
    ),
    describe=_describe_bart,
    transformers=Naming(
        layers="model.decoder.layers",
        modules={
            **_MODULES,
            "embed": "model.shared",
            "embed_norm": "model.decoder.layernorm_embedding",
            "norm": "model.decoder.layer_norm",
            "lm_head.bias": "final_logits_bias",
        },
    ),
)
MBART = dataclasses.replace(
    BART, name="mbart", classes=("MBartForConditionalGeneration",), model_type="mbart", describe=_describe_mbart
)


def _describe_t5(fields: ModelFields) -> ModelConfig:
    # transformers 4 scaled the outputs of models with tied embeddings.
    is_tied = fields.flag_or("tie_word_embeddings", True)
    return _described_t5(fields, "t5", is_scaled=fields.flag_or("scale_decoder_outputs", is_tied))


def _describe_mt5(fields: ModelFields) -> ModelConfig:
    return _described_t5(fields, "t5", is_scaled=False)


def _described_t5(fields: ModelFields, family: str, *, is_scaled: bool) -> ModelConfig:
    """Describe T5, whose scores are not scaled, and have biases by distance."""
    kind = fields.text_or("feed_forward_proj", "relu")
    gate, _, activation = kind.rpartition("-")
    activations = {"relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh", "silu": "silu"}
    if gate not in ("", "gated") or activation not in activations:
        raise fields.wrong("feed_forward_proj", f"{', '.join(activations)}, or one of them after gated-")
    if kind == "gated-gelu":  # T5 1.1, which means the approximation.
        activation = "gelu_new"
    size = fields.whole("hidden_size")
    attention = fields.attention(
        kv_head_count=fields.whole("num_attention_heads"), head_dim=fields.whole("d_kv"), rotary=None, scale=1.0
    )
    mlp = MlpConfig(
        intermediate_size=fields.whole("d_ff"),
        activation=activations[activation],  # type: ignore[arg-type]  # its values are activations
        has_gate=bool(gate),
    )
    tokens_max = fields.whole_or("n_positions", T5_TOKENS_MAX)
    return _described(
        fields,
        f"{family}_gated" if gate else family,
        LayerConfig(attention=attention, mlp=mlp),
        rows_max=tokens_max,
        tokens_max=tokens_max,
        norm="rms",
        norm_eps=fields.number_or("layer_norm_epsilon", 1e-6),
        relative=RelativePositions(
            bucket_count=fields.whole_or("relative_attention_num_buckets", 32),
            distance_max=fields.whole_or("relative_attention_max_distance", 128),
        ),
        logit_scale=size**-0.5 if is_scaled else 1.0,
    )


T5 = Family(
    name="t5",
    classes=("T5ForConditionalGeneration",),
    model_type="t5",
    spellings={
        "hidden_size": "d_model",
        "num_hidden_layers": "num_decoder_layers",
        "num_attention_heads": "num_heads",
    },
    notes=(
        *("classifier_dropout", "decoder_start_token_id", "dense_act_fn", "dropout_rate", "initializer_factor"),
        *("is_gated_act", "num_layers", "task_specific_params"),
    ),
    describe=_describe_t5,
    transformers=Naming(
        layers="decoder.block",
        modules={
            "embed": "shared",
            "norm": "decoder.final_layer_norm",
            "relative": "decoder.block.0.layer.0.SelfAttention.relative_attention_bias",
            "attention_norm": "layer.0.layer_norm",
            **{f"{part}_proj": f"layer.0.SelfAttention.{part}" for part in "qkvo"},
            "cross_norm": "layer.1.layer_norm",
            **{f"cross_{part}_proj": f"layer.1.EncDecAttention.{part}" for part in "qkvo"},
            "mlp_norm": "layer.2.layer_norm",
            "up_proj": "layer.2.DenseReluDense.wi",
            "down_proj": "layer.2.DenseReluDense.wo",
        },
        unread=("layer.1.EncDecAttention.relative_attention_bias.weight",),
    ),
)
T5_GATED = dataclasses.replace(
    T5,
    name="t5_gated",
    classes=(),
    transformers=dataclasses.replace(
        T5.transformers,
        modules={
            **T5.transformers.modules,
            "gate_proj": "layer.2.DenseReluDense.wi_0",
            "up_proj": "layer.2.DenseReluDense.wi_1",
        },
    ),
)
MT5 = dataclasses.replace(
    T5,
    name="mt5",
    classes=("MT5ForConditionalGeneration",),
    model_type="mt5",
    defaults={"feed_forward_proj": "gated-gelu"},
    describe=_describe_mt5,
)
