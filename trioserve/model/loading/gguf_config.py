"""Creates a model's description from the metadata and tensors of a GGUF file. See ggml's docs/gguf.md for the keys."""

from __future__ import annotations

import functools
import math
from collections.abc import Container, Mapping

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.families.model_fields import ModelFields, is_long
from trioserve.model.families.registry import family_named, family_of_gguf
from trioserve.model.layer_config import RopeScaling
from trioserve.model.loading.fields import Fields, warn_of_unread
from trioserve.model.loading.gguf import GgufFile, GgufTensor, read_float32s
from trioserve.model.model_config import Dtype, ModelConfig

__all__ = [
    "delta_values",
    "falcon_h1_values",
    "hybrid_values",
    "mamba2_values",
    "ROPE_FACTORS_NAMES",
    "further_layers",
    "model_config_from",
    "sampling_defaults_from",
]

_WITH_DELTA_RULES = ("qwen3next", "qwen35", "qwen35moe")
_OTHER_LAYERS = {
    "granitehybrid": "linear_attention",
    "jamba": "linear_attention",
    "lfm2": "conv",
    "lfm2moe": "conv",
}


def hybrid_values(
    fields: Fields, architecture: str | None, hidden_size: int, tensors: Container[str]
) -> dict[str, object]:
    """Return layer types and sizes for architectures in which 0 key/value heads mean that a layer has no attention.

    Args:
        fields: metadata of the file.
        architecture: architecture of the file. The result is empty for any other architecture.
        hidden_size: hidden size of the model.
        tensors: names of the file's tensors.

    Raises:
        ModelLoadError: the metadata is damaged or not supported.
    """
    if architecture not in _OTHER_LAYERS:
        return {}
    key = f"{architecture}.attention.head_count_kv"
    counts = fields.wholes(key)
    layer_count = fields.whole(f"{architecture}.block_count")
    if len(counts) != layer_count:
        raise ModelLoadError(f"{key} has {len(counts)} numbers, but it must have one for each of {layer_count} layers")
    attending = {count for count in counts if count}
    if len(attending) != 1:
        raise ModelLoadError(f"{key} holds {sorted(attending)}; supported is one number beside 0")
    values: dict[str, object] = {
        key: attending.pop(),
        "layer_types": ["full_attention" if count else _OTHER_LAYERS[architecture] for count in counts],
    }
    if architecture == "lfm2":
        return {**values, "block_auto_adjust_ff_dim": False}  # The size in the file is already adjusted.
    if architecture == "lfm2moe":
        return {**values, "norm_topk_prob": True}  # The metadata has no key for this field.
    if fields.flag_or(f"{architecture}.rope.scaling.finetuned", False):
        raise ModelLoadError(
            "the file has rotary attention, as Bamba has, which is supported from safetensors only: use these"
        )
    inner_size = fields.whole(f"{architecture}.ssm.inner_size")
    if hidden_size < 1 or inner_size % hidden_size:
        raise ModelLoadError(
            f"{architecture}.ssm.inner_size is {inner_size}, which is no multiple of the hidden size {hidden_size}: "
            "the file is damaged"
        )
    expert_count = fields.whole_or(f"{architecture}.expert_count", 0)
    if architecture == "jamba":
        routed = [layer for layer in range(layer_count) if f"blk.{layer}.ffn_gate_inp.weight" in tensors]
        first = routed[0] if routed else layer_count
        return {
            **values,
            "mamba_expand": inner_size // hidden_size,
            "mamba_proj_bias": any(f"blk.{layer}.ssm_in.bias" in tensors for layer in range(layer_count)),
            "mamba_conv_bias": any(f"blk.{layer}.ssm_conv1d.bias" in tensors for layer in range(layer_count)),
            f"{architecture}.expert_count": expert_count,
            "expert_layer_offset": first,
            "expert_layer_period": routed[1] - first if len(routed) > 1 else layer_count,
        }
    shared_size = fields.whole_or(f"{architecture}.expert_shared_feed_forward_length", None)
    if shared_size is None or not expert_count:
        shared_size = max(fields.wholes(f"{architecture}.feed_forward_length"), default=0)
    return {
        **values,
        "mamba_expand": inner_size // hidden_size,
        f"{architecture}.expert_count": expert_count,
        f"{architecture}.expert_shared_feed_forward_length": shared_size,
    }


def falcon_h1_values(fields: Fields, architecture: str | None, tensors: Container[str]) -> dict[str, object]:
    """Return fields of Falcon-H1 that have no metadata key. The file's tensors already include its multipliers.

    Args:
        fields: metadata of the file.
        architecture: architecture of the file. The result is empty for any other architecture.
        tensors: names of the file's tensors.

    Raises:
        ModelLoadError: a key is missing.
    """
    if architecture != "falcon-h1":
        return {}
    has_bias = "blk.0.ssm_in.bias" in tensors
    return {
        "mamba_d_ssm": fields.whole(f"{architecture}.ssm.inner_size"),
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in tensors,
        "mamba_norm_before_gate": False,
        "mamba_conv_bias": "blk.0.ssm_conv1d.bias" in tensors,
        "mamba_proj_bias": has_bias,
        "projectors_bias": has_bias,
    }


def mamba2_values(
    fields: Fields, architecture: str | None, hidden_size: int, tensors: Container[str]
) -> dict[str, object]:
    """Return fields of Mamba-2 that have no metadata key.

    Args:
        fields: metadata of the file.
        architecture: architecture of the file. The result is empty for any other architecture.
        hidden_size: hidden size of the model.
        tensors: names of the file's tensors.

    Raises:
        ModelLoadError: the metadata is damaged.
    """
    if architecture != "mamba2":
        return {}
    inner_size, head_count = (fields.whole(f"{architecture}.ssm.{key}") for key in ("inner_size", "time_step_rank"))
    if hidden_size < 1 or head_count < 1:
        raise ModelLoadError(
            f"the hidden size is {hidden_size} and {architecture}.ssm.time_step_rank {head_count}, but both must be at "
            "least 1: the file is damaged"
        )
    return {
        "num_heads": head_count,
        "head_dim": inner_size // head_count,
        "expand": inner_size / hidden_size,
        "use_bias": "blk.0.ssm_in.bias" in tensors,
        "use_conv_bias": "blk.0.ssm_conv1d.bias" in tensors,
    }


def mamba_values(fields: Fields, architecture: str | None, tensors: Container[str]) -> dict[str, object]:
    """Return fields of Mamba and Falcon-Mamba that have no metadata key.

    Args:
        fields: metadata of the file.
        architecture: architecture of the file. The result is empty for any other architecture.
        tensors: names of the file's tensors.

    Raises:
        ModelLoadError: a key is missing.
    """
    if architecture != "mamba":
        return {}
    return {
        f"{architecture}.feed_forward_length": fields.whole(f"{architecture}.ssm.inner_size"),
        "use_bias": "blk.0.ssm_in.bias" in tensors,
        "use_conv_bias": "blk.0.ssm_conv1d.bias" in tensors,
    }


def nemotron_h_values(fields: Fields, architecture: str | None, tensors: Container[str]) -> dict[str, object]:
    """Return fields of Nemotron-H that have no metadata key. A layer without key/value heads and without an MLP has a
    state space.

    Args:
        fields: metadata of the file.
        architecture: architecture of the file. The result is empty for any other architecture.
        tensors: names of the file's tensors.

    Raises:
        ModelLoadError: the metadata is damaged.
    """
    if architecture not in ("nemotron_h", "nemotron_h_moe"):
        return {}
    layers = range(fields.whole(f"{architecture}.block_count"))
    heads, sizes = (
        fields.wholes(f"{architecture}.{key}") for key in ("attention.head_count_kv", "feed_forward_length")
    )
    inner_size, head_count = (fields.whole(f"{architecture}.ssm.{key}") for key in ("inner_size", "time_step_rank"))
    if len(heads) != len(layers) or len(sizes) != len(layers) or head_count < 1:
        raise ModelLoadError(
            f"{architecture}.attention.head_count_kv and feed_forward_length must have one number for each of "
            f"{len(layers)} layers, and ssm.time_step_rank must be at least 1: the file is damaged"
        )
    mlp = "moe" if f"{architecture}.expert_count" in fields else "mlp"
    kinds = [
        "full_attention" if kv else mlp if size else "linear_attention" for kv, size in zip(heads, sizes, strict=True)
    ]

    def has_any(module: str) -> bool:
        return any(f"blk.{layer}.{module}.bias" in tensors for layer in layers)

    return {
        "layers_block_type": kinds,
        f"{architecture}.attention.head_count_kv": max(heads),
        f"{architecture}.feed_forward_length": max(sizes),
        "mamba_head_dim": inner_size // head_count,
        "use_bias": has_any("ssm_in"),
        "use_conv_bias": has_any("ssm_conv1d"),
        "mlp_bias": has_any("ffn_up"),
    }


def delta_values(fields: Fields, architecture: str | None) -> dict[str, object]:
    """Return fields that have no metadata key, for models with a gated delta rule.

    Args:
        fields: metadata of the file.
        architecture: architecture of the file. The result is empty for any other architecture.

    Raises:
        ModelLoadError: the metadata is damaged.
    """
    if architecture not in _WITH_DELTA_RULES:
        return {}
    inner_size, head_count = (fields.whole(f"{architecture}.ssm.{key}") for key in ("inner_size", "time_step_rank"))
    if head_count < 1 or inner_size % head_count:
        raise ModelLoadError(
            f"{architecture}.ssm.time_step_rank is {head_count} and ssm.inner_size {inner_size}, but each head must "
            "have the same part of it: the file is damaged"
        )
    values: dict[str, object] = {
        "linear_value_head_dim": inner_size // head_count,
        # Except for qwen3next, llama.cpp reorders heads, so that it can repeat the keys of all heads as one block.
        "has_heads_in_turn": architecture != "qwen3next",
        "norm_topk_prob": True,  # The metadata has no key for this field.
    }
    is_recurrent = fields.flags_or(f"{architecture}.attention.recurrent_layers", None)
    if is_recurrent is not None:
        own = is_recurrent[: fields.whole(f"{architecture}.block_count")]
        values["layer_types"] = ["linear_attention" if each else "full_attention" for each in own]
    return values


SOURCE = "the file's metadata"
ROPE_FACTORS_NAME = "rope_freqs.weight"
LONG_FACTORS_NAME, SHORT_FACTORS_NAME = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_FACTORS_NAMES = (ROPE_FACTORS_NAME, LONG_FACTORS_NAME, SHORT_FACTORS_NAME)
"""Tensors that are not weights: divisors of inverse frequencies."""
FREQUENCY_FACTORS_MAX = 2**16  # Limit of head_dim / 2, because these factors are read before head_dim is checked.

# Metadata keys, without the architecture's prefix, by the names of fields in config.json.
_KEYS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "intermediate_size": "feed_forward_length",
    "n_inner": "feed_forward_length",
    "ffn_hidden_size": "feed_forward_length",
    "num_kv_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "max_seq_len": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "sliding_window": "attention.sliding_window",
    "sliding_window_size": "attention.sliding_window",
    "attention_value_scale": "attention.value_scale",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "logit_scale": "logit_scale",
    "is_causal": "attention.causal",
    "clip_qkv": "attention.clamp_kqv",
    "use_parallel_residual": "use_parallel_residual",
    "routed_scaling_factor": "expert_weights_scale",
    "num_local_experts": "expert_count",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_topk": "expert_used_count",
    "interleave_moe_layer_step": "interleave_moe_layer_step",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "shared_intermediate_size": "expert_shared_feed_forward_length",
    "mamba_n_heads": "ssm.time_step_rank",
    "mamba_n_groups": "ssm.group_count",
    "mamba_d_state": "ssm.state_size",
    "mamba_d_conv": "ssm.conv_kernel",
    "mamba_dt_rank": "ssm.time_step_rank",
    "time_step_rank": "ssm.time_step_rank",
    "has_unit_norms": "ssm.dt_b_c_rms",
    "mamba_num_heads": "ssm.time_step_rank",
    "ssm_state_size": "ssm.state_size",
    "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "n_groups": "ssm.group_count",
    "state_size": "ssm.state_size",
    "conv_kernel": "ssm.conv_kernel",
    "layer_norm_epsilon": "attention.layer_norm_rms_epsilon",
    "conv_L_cache": "shortconv.l_cache",
    "norm_eps": "attention.layer_norm_rms_epsilon",
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
    "index_n_heads": "attention.indexer.head_count",
    "index_head_dim": "attention.indexer.key_length",
    "index_topk": "attention.indexer.top_k",
    "qk_rope_head_dim": "rope.dimension_count",
    "yarn_log_multiplier": "rope.scaling.yarn_log_multiplier",
    "yarn_factor": "rope.scaling.factor",
    "n_routed_experts": "expert_count",
    "n_shared_experts": "expert_shared_count",
    "num_shared_expert": "expert_shared_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "num_dense_layers": "leading_dense_block_count",
    "llama_4_scaling_beta": "attention.temperature_scale",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "linear_num_value_heads": "ssm.time_step_rank",
    "linear_num_key_heads": "ssm.group_count",
    "linear_key_head_dim": "ssm.state_size",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "full_attention_interval": "full_attention_interval",
    "altup_num_inputs": "altup.num_inputs",
    "altup_active_idx": "altup.active_idx",
    "hidden_size_per_layer_input": "embedding_length_per_layer_input",
    "num_kv_shared_layers": "attention.shared_kv_layers",
    "activation_sparsity_scale": "activation_sparsity_scale",
}
_NOTES = (
    *("vocab_size", "tensor_data_layout", "pooling_type", "rope.scaling.finetuned"),
    *("expert_group_scale", "expert_count", "expert_used_count", "expert_group_count", "expert_group_used_count"),
    *("rope.freq_base", "rope.freq_base_swa", "rope.dimension_count", "rope.dimension_count_swa"),
    *("rope.dimension_sections", "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor"),
    *("rope.scaling.original_context_length", "rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast"),
    *("rope.scaling.yarn_beta_slow", "rope.scaling.yarn_log_multiplier", "attention.key_length"),
    *("attention.value_length", "attention.key_length_mla", "attention.value_length_mla", "ssm.inner_size"),
    *("ssm.time_step_rank", "ssm.state_size", "ssm.group_count", "ssm.conv_kernel", "expert_feed_forward_length"),
    *("expert_shared_feed_forward_length", "expert_shared_count", "expert_gating_func", "expert_weights_norm"),
    *("expert_weights_scale", "leading_dense_block_count", "nextn_predict_layers", "attention.layer_norm_epsilon"),
    *("attention.layer_norm_rms_epsilon", "attention.sliding_window_pattern", "attention.recurrent_layers"),
    *("attention.head_count_kv", "feed_forward_length", "context_length", "altup.num_inputs", "altup.active_idx"),
)
_SCORINGS = {1: "softmax", 2: "sigmoid"}  # llama.cpp defines these numbers.
_END_TOKEN_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Additional tokens that end a response, by architecture. No metadata key contains the token that ends a tool call.
_END_TOKENS = {"gpt-oss": ("<|return|>", "<|call|>")}


def streams_values(fields: Fields, architecture: str | None, tensors: Mapping[str, GgufTensor]) -> dict[str, object]:
    """Return fields of models with several hidden streams (Gemma 3n) that have no metadata key, from tensor shapes.

    Args:
        fields: metadata of the file.
        architecture: architecture of the file. The result is empty if it is not gemma3n.
        tensors: tensors by name.

    Returns:
        Values by key. Sizes of MLPs are a list, because the layers' sizes may differ.

    Raises:
        ModelLoadError: a key has a wrong type.
    """
    if architecture != "gemma3n":
        return {}
    key = f"{architecture}.feed_forward_length"
    values: dict[str, object] = {key: list(fields.wholes(key))}
    shapes = {"laurel_rank": "blk.0.laurel_l.weight", "vocab_size_per_layer_input": "per_layer_token_embd.weight"}
    return values | {field: tensors[name].shape[0] for field, name in shapes.items() if name in tensors}


def mimo_values(fields: Fields, architecture: str | None, tensors: Mapping[str, GgufTensor]) -> dict[str, object]:
    """Return fields of MiMo-V2-Flash, whose layers with a sliding window have other KV heads.

    Args:
        fields: metadata of the file.
        architecture: architecture of the file. The result is empty if it is not mimo2.
        tensors: tensors by name.

    Raises:
        ModelLoadError: a key has a wrong type, or its list is too short.
    """
    if architecture != "mimo2":
        return {}
    count = fields.whole("mimo2.block_count") - fields.whole_or("mimo2.nextn_predict_layers", 0)
    key = "mimo2.attention.sliding_window_pattern"
    slides = [bool(each) for each in fields.flags_or(key, None) or fields.wholes(key)][:count]
    heads = fields.wholes("mimo2.attention.head_count_kv")[:count]
    if len(slides) != count or len(heads) != count:
        raise fields.wrong(key if len(slides) != count else "mimo2.attention.head_count_kv", f"{count} entries")
    heads_of, sinks_of = dict(zip(slides, heads, strict=True)), dict.fromkeys((False, True), False)
    for index, is_windowed in enumerate(slides):
        sinks_of[is_windowed] |= f"blk.{index}.attn_sinks.weight" in tensors
        if heads[index] != heads_of[is_windowed]:
            raise fields.wrong("mimo2.attention.head_count_kv", "one number for each kind of layer")
    values: dict[str, object] = {
        "mimo2.attention.head_count_kv": heads_of.get(False, heads[0]),
        "swa_num_key_value_heads": heads_of.get(True, heads[0]),
        "v_head_dim": fields.whole("mimo2.attention.value_length"),
        "layer_types": ["sliding_attention" if each else "full_attention" for each in slides],
        "add_full_attention_sink_bias": sinks_of[False],
        "add_swa_attention_sink_bias": sinks_of[True],
        "moe_layer_freq": [int(f"blk.{index}.ffn_gate_inp.weight" in tensors) for index in range(count)],
        "norm_topk_prob": fields.flag_or("mimo2.expert_weights_norm", True),
    }
    thetas = {"rope_theta": "rope.freq_base", "swa_rope_theta": "rope.freq_base_swa"}
    found = {name: fields.number_or(f"mimo2.{key}", None) for name, key in thetas.items()}
    return values | {name: theta for name, theta in found.items() if theta is not None}


def model_config_from(file: GgufFile, context_tokens: int | None = None) -> ModelConfig:
    """Create a model's description. Sizes come from metadata, biases and tied matrices from the list of tensors.

    Args:
        file: header of the file.
        context_tokens: see open_checkpoint.

    Raises:
        ModelLoadError: no supported family includes this model, or the file is damaged.
    """
    raw = Fields(file.metadata, SOURCE)
    name = raw.text_or("general.architecture", None)
    family = family_of_gguf(name)
    is_latent = f"{name}.attention.kv_lora_rank" in raw
    expert_count = raw.whole_or(f"{name}.expert_count", 0)
    if name == "llama" and expert_count > 0:
        family = family_named("mixtral")  # In llama.cpp's files, a Mixtral is a Llama with experts.
    gating = raw.whole_or(f"{name}.expert_gating_func", None)
    if name == "deepseek2" and gating is not None and _SCORINGS.get(gating) == "sigmoid":
        family = family_named("deepseek_v3")
    spellings = {ours: f"{name}.{key}" for ours, key in _KEYS.items()}
    values = dict(file.metadata)
    hybrid = hybrid_values(raw, name, raw.whole(f"{name}.embedding_length"), file.tensors)
    hybrid |= streams_values(raw, name, file.tensors)
    hybrid |= nemotron_h_values(raw, name, file.tensors)
    hybrid |= mimo_values(raw, name, file.tensors)
    for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        if f"{name}.{key}" not in hybrid:
            values[f"{name}.{key}"] = _same_for_all_layers(raw, f"{name}.{key}")
    if values[f"{name}.attention.head_count"] is None:
        raise raw.wrong(f"{name}.attention.head_count", "at least 1")
    if values[f"{name}.feed_forward_length"] is None:
        values[f"{name}.feed_forward_length"] = 0
    hidden_size, head_count = raw.whole(f"{name}.embedding_length"), raw.wholes(f"{name}.attention.head_count")[0]
    head_dim = rotated = 0
    if is_latent:
        values |= _latent_dims(raw, str(name))
    else:
        head_dim, rotated = _head_dim(raw, str(name), hidden_size // max(head_count, 1))
    values |= {
        "vocab_size": _vocab_size(file, raw),
        "head_dim": None if is_latent else head_dim,
        "partial_rotary_factor": rotated / head_dim if head_dim else 1.0,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors or "blk.0.attn_qkv.bias" in file.tensors,
        "attention_output_bias": "blk.0.attn_output.bias" in file.tensors,
        "use_qk_norm": _has_qk_norm(file, str(name), expert_count),
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "norm_topk_prob": raw.flag_or(f"{name}.expert_weights_norm", name == "qwen3moe"),
        "use_sliding_window": True,
        "max_window_layers": 0,
        "bos_token_id": raw.whole_or("tokenizer.ggml.bos_token_id", None),
    }
    if gating is not None:
        values["scoring_func"] = _SCORINGS.get(gating, f"llama.cpp's number {gating}")
    for key in ("expert_group_count", "expert_group_used_count"):
        if raw.whole_or(f"{name}.{key}", None) == 0:  # llama.cpp writes 0 for "none".
            values[f"{name}.{key}"] = None
    if family.name == "deepseek_v2" and raw.whole_or(f"{name}.expert_group_count", 1) > 1:
        values["topk_method"] = "group_limited_greedy"
    if further := further_layers(file):
        values[f"{name}.block_count"] = raw.whole(f"{name}.block_count") - further
    values |= hybrid | falcon_h1_values(raw, name, file.tensors) | delta_values(raw, name)
    values |= mamba2_values(raw, name, raw.whole(f"{name}.embedding_length"), file.tensors)
    values |= mamba_values(raw, name, file.tensors)
    if name == "glm-dsa":
        count = raw.whole(f"{name}.block_count") - further
        found = [f"blk.{index}.indexer.attn_k.weight" in file.tensors for index in range(count)]
        found = raw.flags_or(f"{name}.attention.indexer.types", found)
        values["indexer_types"] = ["full" if own else "shared" for own in found]
    if name == "falcon":  # In files of llama.cpp, attention and the MLP always run parallel, and heads have groups.
        norm_count = 1 + ("blk.0.attn_norm_2.weight" in file.tensors)
        values |= {"new_decoder_architecture": True, "num_ln_in_parallel_attn": norm_count}
        values["bias"] = values["attention_bias"]
    pattern_key = f"{name}.attention.sliding_window_pattern"
    if pattern_key in raw and "layer_types" not in values:
        if (pattern := raw.flags_or(pattern_key, None)) is None:
            values["sliding_window_pattern"] = file.metadata[pattern_key]
        else:
            values["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in pattern]
    fields = ModelFields(
        values,
        SOURCE,
        spellings=spellings,
        rope=functools.partial(_rope, file, str(name), context_tokens),
        eos_token_ids=_end_token_ids(raw),
        dtype_name=_dtype_name(file),
        served_tokens=context_tokens,
    )
    config = family.config_from(fields)
    read = raw.asked | {spellings.get(field, field) for field in fields.asked}
    unread = (key for key in file.metadata if key.startswith(f"{name}.") and key not in read | notes_of(str(name)))
    warn_of_unread(SOURCE, sorted(unread))
    return config


def notes_of(architecture: str) -> frozenset[str]:
    """Return keys that do not affect the computation, or that repeat other keys or the tensors.

    Args:
        architecture: architecture of the file.
    """
    return frozenset(f"{architecture}.{key}" for key in _NOTES)


def further_layers(file: GgufFile) -> int:
    """Return the number of prediction layers (MTP), which follow the model's layers.

    Args:
        file: header of the file.
    """
    fields = Fields(file.metadata, SOURCE)
    return fields.whole_or(f"{fields.text_or('general.architecture', None)}.nextn_predict_layers", 0)


def sampling_defaults_from(metadata: dict[str, object]) -> dict[str, float | int]:
    """Return recommended sampling parameters, with the names of SamplingParams.

    Args:
        metadata: metadata of the file.
    """
    fields = Fields(metadata, SOURCE)
    defaults: dict[str, float | int] = {}
    for name, key in (
        ("temperature", "temp"),
        ("top_p", "top_p"),
        ("min_p", "min_p"),
        ("repetition_penalty", "penalty_repeat"),
    ):
        if (number := fields.number_or(f"general.sampling.{key}", None)) is not None:
            defaults[name] = number
    if (top_k := fields.whole_or("general.sampling.top_k", None)) is not None:
        defaults["top_k"] = top_k
    return defaults


def _same_for_all_layers(fields: Fields, key: str) -> int | None:
    """Return the value of a key whose value is one number, or a list with the same number for each layer."""
    values = set(fields.wholes(key))
    if len(values) > 1:
        raise ModelLoadError(f"{key} differs from layer to layer, which is not supported")
    return values.pop() if values else None


def _has_qk_norm(file: GgufFile, architecture: str, expert_count: int) -> bool:
    """Return True if the model has a norm of queries and keys, for families in which some models have none."""
    # In Llama 4 the norm has no weights, so the number of experts identifies models with the norm, as in llama.cpp.
    if architecture == "llama4":
        return expert_count != 128
    if architecture == "minimax-m2":
        return True
    return (
        architecture in ("command-r", "glm4moe", "hunyuan-dense", "hunyuan-moe")
        and "blk.0.attn_q_norm.weight" in file.tensors
    )


def _head_dim(fields: Fields, architecture: str, default: int) -> tuple[int, int]:
    """Return the size of a head, and the number of its rotated dimensions.

    Args:
        default: size of a head if the file does not contain it.
    """
    head_dim = fields.whole_or(f"{architecture}.attention.key_length", default)
    rotated = fields.whole_or(f"{architecture}.rope.dimension_count", None)
    value_length = fields.whole_or(f"{architecture}.attention.value_length", head_dim)
    if value_length != head_dim and architecture != "mimo2":
        raise ModelLoadError(
            f"the model's keys have {head_dim} dimensions and its values {value_length}; supported are equal ones"
        )
    return head_dim, head_dim if rotated is None else rotated


def _latent_dims(fields: Fields, architecture: str) -> dict[str, object]:
    """Return the sizes of a head with latent attention.

    If a file has separate tensors for the projections of keys and of values, metadata keys ending with "_mla" contain
    these sizes. The usual metadata keys then describe the latents.
    """
    key = f"{architecture}.attention"
    turned = fields.whole(f"{architecture}.rope.dimension_count")
    whole = fields.whole_or(f"{key}.key_length_mla", None)
    value = fields.whole_or(f"{key}.value_length" if whole is None else f"{key}.value_length_mla", None)
    if whole is None:
        whole = fields.whole(f"{key}.key_length")
    return {"qk_nope_head_dim": whole - turned, "v_head_dim": value}


def _vocab_size(file: GgufFile, fields: Fields) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelLoadError("the file has no token_embd.weight: it is incomplete or holds no language model")
    token_count = len(fields.strings_or("tokenizer.ggml.tokens", []))
    if token_count > embedding.shape[0]:
        raise ModelLoadError(
            f"the file's tokenizer has {token_count} tokens, but the embedding only {embedding.shape[0]} rows: "
            "the file is damaged"
        )
    return embedding.shape[0]


def _end_token_ids(fields: Fields) -> tuple[int, ...]:
    ids = [fields.whole_or(f"tokenizer.ggml.{key}", None) for key in _END_TOKEN_KEYS]
    if further := _END_TOKENS.get(fields.text_or("general.architecture", "")):
        tokens = fields.strings_or("tokenizer.ggml.tokens", [])
        ids.extend(tokens.index(token) for token in further if token in tokens)
    return tuple(dict.fromkeys(token_id for token_id in ids if token_id is not None))


def _dtype_name(file: GgufFile) -> Dtype:
    storages = {tensor.storage.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    dtypes: dict[frozenset[str], Dtype] = {frozenset({"F32"}): "float32", frozenset({"F16"}): "float16"}
    return dtypes.get(frozenset(storages), "bfloat16")


def _rope(
    file: GgufFile,
    architecture: str,
    served_tokens: int | None,
    fields: ModelFields,
    layer_type: str | None,
    theta: float,
) -> tuple[float, RopeScaling | None]:
    if layer_type == "sliding_attention":
        # Only in Gemma 3 and 3n does theta differ between layer types. Their values are constants in llama.cpp.
        if architecture not in ("gemma3", "gemma3n"):
            theta = fields.number_or(f"{architecture}.rope.freq_base", theta)
        return fields.number_or(f"{architecture}.rope.freq_base_swa", theta), None
    theta = fields.number_or(f"{architecture}.rope.freq_base", theta)
    context_tokens = fields.whole("max_position_embeddings")
    if LONG_FACTORS_NAME in file.tensors:
        return theta, _longrope(file, fields, f"{architecture}.rope.scaling", context_tokens, served_tokens)
    return theta, _rope_scaling(file, fields, architecture, context_tokens)


def _longrope(file: GgufFile, fields: Fields, key: str, context_tokens: int, served_tokens: int | None) -> RopeScaling:
    original = fields.whole_or(f"{key}.original_context_length", context_tokens)
    name = LONG_FACTORS_NAME if is_long(served_tokens, context_tokens, original) else SHORT_FACTORS_NAME
    factors = _frequency_factors(file, name)
    if factors is None:
        raise ModelLoadError(f"the file has {LONG_FACTORS_NAME}, but no {name}: it is incomplete, fetch it again")
    return RopeScaling(
        kind="longrope",
        factor=context_tokens / max(original, 1),
        original_context_tokens=original,
        attention_factor=fields.number_or(f"{key}.attn_factor", 1.0),
        frequency_factors=factors,
    )


def _rope_scaling(file: GgufFile, fields: Fields, architecture: str, context_tokens: int) -> RopeScaling | None:
    key = f"{architecture}.rope.scaling"
    kind = fields.text_or(f"{key}.type", "none")
    own_factor = fields.number_or(f"{key}.yarn_attn_factor", 1.0)
    if own_factor != 1.0 and kind != "yarn":
        raise fields.wrong(f"{key}.yarn_attn_factor", f"1 where {key}.type is {kind!r}")
    if (share := fields.number_or(f"{key}.yarn_ext_factor", 1.0)) != 1.0 and (kind == "yarn" or share > 0):
        raise fields.wrong(f"{key}.yarn_ext_factor", "1: no other blend of scaled and unscaled positions is supported")
    factors = _frequency_factors(file, ROPE_FACTORS_NAME)
    if factors is not None:
        return RopeScaling(kind="llama3", factor=max(factors), frequency_factors=factors)
    factor = fields.number_or(f"{key}.factor", None)
    if kind == "none":
        # Old files have only the key scale_linear, because the key `type` did not exist.
        linear_factor = fields.number_or(f"{architecture}.rope.scale_linear", 1.0)
        if linear_factor == 1.0:
            return None
        return RopeScaling(kind="linear", factor=linear_factor, original_context_tokens=context_tokens)
    if factor is None:
        raise ModelLoadError(f"the file's metadata lacks {key}.factor, which {key}.type {kind!r} needs")
    if kind == "linear":
        return RopeScaling(kind="linear", factor=factor, original_context_tokens=context_tokens)
    if kind != "yarn":
        raise ModelLoadError(f"the model's rope scaling is {kind!r}; supported are none, linear and yarn")
    attention_factor = fields.number_or(f"{key}.attn_factor", None)
    if attention_factor is None and f"{key}.yarn_log_multiplier" in fields:
        # In these files, the factor of scores already includes the attention factor, so it is divided out.
        attention_factor = 1.0 / (0.1 * math.log(factor) + 1.0) if factor > 1.0 else 1.0
    if own_factor != 1.0:
        attention_factor = own_factor * (1.0 if attention_factor is None else attention_factor)
    if attention_factor is not None and factor > 1.0:
        # ggml multiplies this factor by YaRN's factor. ModelConfig contains the product.
        attention_factor *= 0.1 * math.log(factor) + 1.0
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_context_tokens=fields.whole_or(f"{key}.original_context_length", context_tokens),
        attention_factor=attention_factor,
        beta_fast=fields.number_or(f"{key}.yarn_beta_fast", 32.0),
        beta_slow=fields.number_or(f"{key}.yarn_beta_slow", 1.0),
        rounds_ends=architecture != "gpt-oss",  # gpt-oss does not round the limits of the blended range.
    )


def _frequency_factors(file: GgufFile, name: str) -> tuple[float, ...] | None:
    """Return the divisors of inverse frequencies (llama3 or longrope scaling). The file stores them as a tensor."""
    tensor = file.tensors.get(name)
    if tensor is None:
        return None
    if tensor.storage.name != "F32" or tensor.value_count > FREQUENCY_FACTORS_MAX:
        raise ModelLoadError(
            f"{name} has {tensor.value_count} values of type {tensor.storage.name}, but it must have one "
            "F32 value for each pair of a head's dimensions: the file is damaged"
        )
    return read_float32s(tensor, file.path)
