"""Search for fields of a config.json that no code reads, which are then named in the log.

Without this, a misspelled field, or a field that is newer than this code, would be ignored silently.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable

from trioserve.model.loading.fields import Fields, one_line

__all__ = ["IMAGE_NOTES", "unread_names", "warn_of_unread"]

logger = logging.getLogger(__name__)

SHOWN_MAX = 10
NAME_CHARACTERS_MAX = 80

NOTES = frozenset(
    {
        # files and libraries
        *("architectures", "attn_implementation", "auto_map", "custom_pipelines", "dtype", "for_llm_compressor"),
        *("language", "license", "model_type", "name_or_path", "quantization_config", "sentence_transformers"),
        *("task_specific_params", "tokenizer_class", "torch_dtype", "torchscript", "transformers.js_config"),
        *("transformers_version", "unsloth_fixed", "unsloth_version"),
        # tokens
        *("bos_token_id", "cls_token_id", "decoder_start_token_id", "eos_token_id", "mask_token_id", "pad_token"),
        *("pad_token_id", "prefix", "sep_token_id", "unk_token_id"),
        # return values of a model in Python, and its savings of time and memory
        *("cache_implementation", "chunk_size", "chunk_size_feed_forward", "mamba_chunk_size", "num_logits_to_keep"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "pretraining_tp", "return_dict"),
        *("use_bfloat16", "use_cache", "use_flash_attn", "use_mamba_kernels", "use_return_dict"),
        # layers after the model's own, which predict further tokens; further fields begin with mtp_
        *("num_mtp_modules", "num_nextn_predict_layers", "use_mtp"),
        # training; NOTE_ENDINGS has the dropout rates
        *("aux_loss_alpha", "aux_loss_coef", "ep_size", "gradient_checkpointing", "init_method"),
        *(
            "initializer_cutoff_factor",
            "initializer_factor",
            "initializer_range",
            "neftune_noise_alpha",
            "rescale_prenorm_residual",
        ),
        *("router_aux_loss_coef", "router_jitter_noise", "router_z_loss_coef", "seq_aux", "z_loss_coefficient"),
        # heads that are not computed, and other kinds of models, as transformers writes them into every config
        *("add_cross_attention", "cross_attention_hidden_size", "finetuning_task", "id2label", "is_decoder"),
        *("is_encoder_decoder", "label2id", "num_labels", "problem_type", "pruned_heads", "tf_legacy_loss"),
        "tie_encoder_decoder",
        # sampling parameters, from before generation_config.json existed
        *("bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping"),
        *("encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_bos_token_id"),
        *("forced_eos_token_id", "length_penalty", "max_length", "min_length", "no_repeat_ngram_size"),
        *("num_beam_groups", "num_beams", "num_return_sequences", "output_scores", "remove_invalid_values"),
        *("repetition_penalty", "return_dict_in_generate", "suppress_tokens", "temperature", "top_k", "top_p"),
        "typical_p",
        # fields that only models with dense layers or scaled positions need
        *("intermediate_size", "original_max_position_embeddings"),
    }
)
"""Fields that change nothing in any family, whatever their value, or that are read elsewhere."""

NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "attention_bias": (False,),
    "attn_output_gate": (True,),
    "full_attn_mod": (1,),
    "interpolate_factor": (1,),
    "layernorm_full_attention_beta": (1, 1.0),
    "layernorm_linear_attention_beta": (1, 1.0),
    "layernorm_mlp_beta": (1, 1.0),
    "lm_head_bias": (False,),
    "mlp_bias": (False,),
    "normalization_function": ("rmsnorm",),
    "qk_layer_norms": (False,),
    "qk_norm_type": ("per_layer",),
    "rms_norm": (True,),
    "use_bias": (False,),
    "use_gated_activation": (True,),
    "use_mrope": (False,),
    "use_parallel_block": (True,),
    "use_resampler": (False,),
}
"""Fields that change nothing with these values."""

NOTE_ENDINGS = ("_dropout", "_dropout_prob", "_dropout_rate", "_pdrop")
ROPE_NAMES = ("rope_parameters", "rope_scaling")
# Some kinds of scaling ignore some of these. The last two fields place images.
ROPE_NOTES = frozenset(
    {
        *("attention_factor", "beta_fast", "beta_slow", "factor", "finetuned", "high_freq_factor", "long_factor"),
        *("low_freq_factor", "mscale", "mscale_all_dim", "original_max_position_embeddings"),
        *("short_factor", "truncate", "type"),
        *("mrope_interleaved", "mrope_section"),
    }
)
ROPE_LAYERS = ("full_attention", "sliding_attention")  # a model may have only one kind of layer

# fields outside of text_config in models that read images
IMAGE_NOTES = ("scale_factor", "text_config", "tie_word_embeddings", "use_reentrant_checkpointing", "vocab_size")
IMAGE_PREFIXES = (
    *("audio_", "boa_", "boi_", "eoa_", "eoi_", "image_", "mm_", "multimodal_", "projector_", "spatial_"),
    *("video_", "vision_"),
)


def unread_names(fields: Fields, notes: Collection[str] = (), *, with_images: bool = False) -> list[str]:
    """List fields that have a value, were not requested, and are not known to change nothing.

    Args:
        fields: fields of a config.
        notes: further fields that change nothing.
        with_images: the fields lie outside of text_config, and fields of other parts are ignored.

    Returns:
        Names, sorted. A name in a group follows the group's name and a dot.
    """
    unread = fields.unread().items()
    return sorted(name for name, value in unread if name not in notes and not _is_note(name, value, with_images))


def warn_of_unread(source: str, names: Iterable[str]) -> None:
    """Log one warning that names fields. Log nothing if there are none.

    Args:
        source: name of the config.
        names: fields that are not read.
    """
    names = list(names)
    if names:
        shown = ", ".join(one_line(name[:NAME_CHARACTERS_MAX]) for name in names[:SHOWN_MAX])
        logger.warning(
            "%s has %d fields that are not read here, and may change what the model computes: %s",
            source,
            len(names),
            shown,
        )


def _is_note(name: str, value: object, with_images: bool) -> bool:
    group, *inside = name.split(".")
    if group in ROPE_NAMES and inside:
        return inside[-1] in ROPE_NOTES or (len(inside) == 1 and inside[0] in ROPE_LAYERS)
    if with_images and group.startswith(IMAGE_PREFIXES):
        return True
    last = (group, *inside)[-1]
    if last in NEUTRAL_VALUES and value in NEUTRAL_VALUES[last]:
        return True
    return group in NOTES or last in NOTES or last.startswith(("_", "mtp_")) or last.endswith(NOTE_ENDINGS)
