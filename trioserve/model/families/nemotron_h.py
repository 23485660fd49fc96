"""Nemotron-H and Nemotron 3 Nano: a layer is a Mamba-2 state space, attention, an MLP, or a mixture of experts.

Attention ignores positions. MLPs and experts have no gate.
"""

from __future__ import annotations

import math

from trioserve.model.families.family import SHARED_EXPERTS, Family, GgufNaming, Naming
from trioserve.model.families.model_fields import ModelFields
from trioserve.model.layer_config import ExpertsConfig, LayerConfig, MlpConfig, StateSpaceConfig
from trioserve.model.model_config import ModelConfig

__all__ = ["NEMOTRON_H"]

# Letters of hybrid_override_pattern, and old names of layers_block_type.
_KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_KINDS |= {"mamba": "linear_attention", "attention": "full_attention"}
_DEFAULT_KINDS = ("linear_attention", "moe", "full_attention", "mlp")


def _describe(fields: ModelFields) -> ModelConfig:
    for name in ("attention_bias", "tie_word_embeddings"):
        if fields.flag_or(name, False):
            raise fields.wrong(name, "false for this family")
    for name in ("moe_latent_size", "sliding_window"):
        if fields.whole_or(name, None) is not None:
            raise fields.wrong(name, "null for this family")
    kinds = _layer_kinds(fields)
    if "moe" in kinds and fields.flag_or("mlp_bias", False):
        raise fields.wrong("mlp_bias", "false for a model with experts")
    made = {
        "linear_attention": LayerConfig(attention=_state_space(fields), mlp=None),
        "full_attention": LayerConfig(attention=fields.attention(head_dim=128, rotary=None), mlp=None),
        "mlp": LayerConfig(attention=None, mlp=_mlp(fields)),
    }
    if "moe" in kinds or "n_routed_experts" in fields:
        made["moe"] = LayerConfig(attention=None, mlp=_experts(fields))
    eps = fields.number_or("layer_norm_epsilon", 1e-5)
    return fields.described("nemotron_h", [made[kind] for kind in kinds], norm_eps=eps)


def _layer_kinds(fields: ModelFields) -> list[str]:
    named = fields.strings_or("layers_block_type", None) or fields.strings_or("layer_types", None)
    if named is None:
        pattern = fields.text_or("hybrid_override_pattern", None)
        named = list(_DEFAULT_KINDS if pattern is None else pattern)
    kinds = [_KINDS.get(name, name) for name in named]
    if not kinds or not set(_DEFAULT_KINDS).issuperset(kinds):
        raise fields.wrong("layers_block_type", f"a list of {', '.join(_DEFAULT_KINDS)}")
    return kinds


def _state_space(fields: ModelFields) -> StateSpaceConfig:
    if (name := fields.text_or("mamba_hidden_act", "silu")) not in ("silu", "swish"):
        raise fields.wrong("mamba_hidden_act", f"'silu' for this family, and not {name!r}")
    return StateSpaceConfig(
        head_count=fields.whole_or("mamba_num_heads", 128),
        head_dim=fields.whole_or("mamba_head_dim", 64),
        group_count=fields.whole_or("n_groups", 8),
        vector_size=fields.whole_or("ssm_state_size", 128),
        kernel_size=fields.whole_or("conv_kernel", 4),
        has_bias=fields.flag_or("use_bias", False),
        has_conv_bias=fields.flag_or("use_conv_bias", True),
        # transformers ignores time_step_limit and time_step_max in this family.
        time_step_min=fields.number_or("time_step_min", 0.001),
        time_step_max=math.inf,
    )


def _mlp(fields: ModelFields) -> MlpConfig:
    return MlpConfig(
        intermediate_size=fields.whole("intermediate_size"),
        activation=fields.activation("mlp_hidden_act", default="relu2"),
        has_bias=fields.flag_or("mlp_bias", False),
        has_gate=False,
    )


def _experts(fields: ModelFields) -> ExpertsConfig:
    if fields.text_or("scoring_func", "sigmoid") != "sigmoid":
        raise fields.wrong("scoring_func", "'sigmoid' for this family")
    if fields.whole_or("n_shared_experts", 1) != 1:
        raise fields.wrong("n_shared_experts", "1")
    group_count = fields.whole_or("n_group", 1)
    return fields.experts(
        "n_routed_experts",
        fields.whole("moe_intermediate_size"),
        normalizes=fields.flag_or("norm_topk_prob", True),
        activation=fields.activation("mlp_hidden_act", default="relu2"),
        has_gate=False,
        scoring="sigmoid",
        has_score_bias=True,
        scale=fields.number_or("routed_scaling_factor", 1.0),
        group_count=group_count,
        groups_per_token=fields.whole_or("topk_group", 1),
        group_leaders=2 if group_count > 1 else 1,
        shared_size=fields.whole("moe_shared_expert_intermediate_size"),
    )


NEMOTRON_H = Family(
    name="nemotron_h",
    classes=("NemotronHForCausalLM",),
    model_type="nemotron_h",
    defaults={
        "num_key_value_heads": 8,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 21_504,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
    },
    notes=(
        *("expand", "num_hidden_layers", "mamba_proj_bias", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap"),
        *("mtp_layers_block_type", "mtp_hybrid_override_pattern", "num_logits_to_keep", "rescale_prenorm_residual"),
        *("residual_in_fp32", "rms_norm_eps", "time_step_floor", "time_step_limit", "time_step_max"),
        *("use_mamba_kernels", "hidden_dropout", "chunk_size"),
    ),
    describe=_describe,
    transformers=Naming(
        layers="backbone.layers",
        modules={
            "embed": "backbone.embeddings",
            "norm": "backbone.norm_f",
            "attention_norm": "norm",
            "mlp_norm": "norm",
            **{f"{part}_proj": f"mixer.{part}_proj" for part in ("q", "k", "v", "o", "in", "out", "up", "down")},
            "conv": "mixer.conv1d",
            "gate_norm": "mixer.norm",
            "state.rates": "mixer.A_log",
            "state.skips": "mixer.D",
            "state.time_step_bias": "mixer.dt_bias",
            "router": "mixer.gate",
            "router.score_bias": "mixer.gate.e_score_correction_bias",
            "experts.up_proj": "mixer.experts.{expert}.up_proj",
            "experts.down_proj": "mixer.experts.{expert}.down_proj",
            **{name: theirs.replace("mlp.", "mixer.") for name, theirs in SHARED_EXPERTS.items()},
        },
    ),
    gguf=GgufNaming(architecture="nemotron_h", mixture="nemotron_h_moe", modules={"mlp_norm": "attn_norm"}),
)
