"""Metadata of a GGUF file about layers that keep a state, with the field names of config.json."""

from __future__ import annotations

from collections.abc import Container

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.loading.fields import Fields

__all__ = ["delta_values", "falcon_h1_values", "hybrid_values", "mamba2_values"]

_WITH_DELTA_RULES = ("qwen3next", "qwen35", "qwen35moe")
_OTHER_LAYERS = {"granitehybrid": "linear_attention", "lfm2": "conv", "lfm2moe": "conv"}


def hybrid_values(fields: Fields, architecture: str | None, hidden_size: int) -> dict[str, object]:
    """Return kinds of layers and sizes for architectures whose layers without attention have 0 key/value heads.

    Args:
        fields: metadata of the file.
        architecture: architecture of the file. Empty result for any other architecture.
        hidden_size: hidden size of the model.

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
        return {**values, "block_auto_adjust_ff_dim": False}  # the size in the file is already adjusted
    if architecture == "lfm2moe":
        return {**values, "norm_topk_prob": True}  # the metadata has no key for it
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
    """Return values of Falcon-H1 that have no key. Its multipliers are already applied to the file's tensors.

    Args:
        fields: metadata of the file.
        architecture: architecture of the file. Empty result for any other architecture.
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
    """Return values of Mamba-2 that have no key.

    Args:
        fields: metadata of the file.
        architecture: architecture of the file. Empty result for any other architecture.
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


def delta_values(fields: Fields, architecture: str | None) -> dict[str, object]:
    """Return values of models with a gated delta rule that have no key.

    Args:
        fields: metadata of the file.
        architecture: architecture of the file. Empty result for any other architecture.

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
        # llama.cpp reorders heads of the other architectures, so that it can repeat all keys as a whole
        "has_heads_in_turn": architecture != "qwen3next",
        "norm_topk_prob": True,  # the metadata has no key for it
    }
    is_recurrent = fields.flags_or(f"{architecture}.attention.recurrent_layers", None)
    if is_recurrent is not None:
        own = is_recurrent[: fields.whole(f"{architecture}.block_count")]
        values["layer_types"] = ["linear_attention" if each else "full_attention" for each in own]
    return values
