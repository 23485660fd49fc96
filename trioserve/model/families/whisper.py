"""Whisper (arXiv 2212.04356): a decoder that attends to the rows of an audio encoder (loading/audio_part.py)."""

from __future__ import annotations

from trioserve.model.families.family import Family, Naming
from trioserve.model.families.model_fields import ModelFields
from trioserve.model.layer_config import LayerConfig
from trioserve.model.model_config import CrossAttention, ModelConfig

__all__ = ["WHISPER"]

# The decoder's first position is a multiple of this number, and so of every usual block size.
FIRST_POSITION_STEP = 64


def _describe_whisper(fields: ModelFields) -> ModelConfig:
    if not fields.flag_or("is_encoder_decoder", True):
        raise fields.wrong("is_encoder_decoder", "true: a decoder without its encoder is not supported")
    attention = fields.attention(
        kv_head_count=fields.whole("num_attention_heads"),
        rotary=None,
        has_bias=True,
        has_key_bias=False,
        has_output_bias=True,
    )
    layer = LayerConfig(
        attention=attention, mlp=fields.plain_mlp("gelu", has_bias=True, size=fields.whole("decoder_ffn_dim"))
    )
    row_count = fields.whole("max_source_positions")
    first = -(-row_count // FIRST_POSITION_STEP) * FIRST_POSITION_STEP
    return fields.described(
        "whisper",
        (layer,) * fields.layer_count,
        norm="layer_biased",
        norm_eps=1e-5,
        position_first=0,
        cross=CrossAttention(row_count=row_count, first_position=first),
        context_tokens_max=first + fields.whole("max_position_embeddings"),
        tie_word_embeddings=fields.flag_or("tie_word_embeddings", True),
    )


WHISPER = Family(
    name="whisper",
    classes=("WhisperForConditionalGeneration",),
    model_type="whisper",
    spellings={
        "hidden_size": "d_model",
        "num_hidden_layers": "decoder_layers",
        "num_attention_heads": "decoder_attention_heads",
        "hidden_act": "activation_function",
        "max_position_embeddings": "max_target_positions",
    },
    notes=(
        *("activation_dropout", "apply_spec_augment", "attention_dropout", "begin_suppress_tokens"),
        *("classifier_proj_size", "decoder_layerdrop", "decoder_start_token_id", "dropout", "encoder_attention_heads"),
        *("encoder_ffn_dim", "encoder_layerdrop", "encoder_layers", "forced_decoder_ids", "init_std"),
        *("mask_feature_length", "mask_feature_min_masks", "mask_feature_prob", "mask_time_length"),
        *("mask_time_min_masks", "mask_time_prob", "max_length", "median_filter_width", "num_hidden_layers"),
        *("num_mel_bins", "suppress_tokens", "use_weighted_layer_sum"),
        "scale_embedding",  # No class of transformers multiplies Whisper's embeddings by this scale.
    ),
    describe=_describe_whisper,
    transformers=Naming(
        layers="model.decoder.layers",
        modules={
            "embed": "model.decoder.embed_tokens",
            "positions": "model.decoder.embed_positions",
            "norm": "model.decoder.layer_norm",
            "lm_head": "proj_out",
            "attention_norm": "self_attn_layer_norm",
            "mlp_norm": "final_layer_norm",
            "o_proj": "self_attn.out_proj",
            "up_proj": "fc1",
            "down_proj": "fc2",
        },
    ),
)
