"""Mamba-2: every layer is a state space without an MLP. No values are stored per token, so there is no KV cache.

In Bamba, most layers are Mamba-2 layers, and some layers have attention.
"""

from __future__ import annotations

from trioserve.model.families.family import Family, GgufNaming, Naming
from trioserve.model.families.model_fields import ModelFields
from trioserve.model.layer_config import LayerConfig, StateSpaceConfig
from trioserve.model.model_config import ModelConfig

__all__ = ["MAMBA2", "BAMBA"]

# Context length for a config without one, because a state space has no limit. llama.cpp writes the same value.
CONTEXT_TOKENS = 2**20


def _describe_mamba2(fields: ModelFields) -> ModelConfig:
    if (name := fields.text_or("hidden_act", "silu")) not in ("silu", "swish"):
        raise fields.wrong("hidden_act", f"'silu' for this family, and not {name!r}")
    head_count, head_dim = fields.whole_or("num_heads", 128), fields.whole_or("head_dim", 64)
    inner_size = int(fields.number_or("expand", 2.0) * fields.whole("hidden_size"))
    if head_count * head_dim != inner_size:
        raise fields.wrong("num_heads", f"{inner_size} (expand * hidden_size) by head_dim, which is {head_dim}")
    limits = fields.time_step_limits()
    layer = LayerConfig(
        attention=StateSpaceConfig(
            head_count=head_count,
            head_dim=head_dim,
            group_count=fields.whole_or("n_groups", 8),
            vector_size=fields.whole_or("state_size", 128),
            kernel_size=fields.whole_or("conv_kernel", 4),
            has_bias=fields.flag_or("use_bias", False),
            has_conv_bias=fields.flag_or("use_conv_bias", True),
            time_step_min=limits[0],
            time_step_max=limits[1],
        ),
        mlp=None,
    )
    return fields.described(
        "mamba2",
        [layer] * fields.layer_count,
        norm_eps=fields.number_or("layer_norm_epsilon", 1e-5),
        context_tokens_max=fields.whole_or("max_position_embeddings", CONTEXT_TOKENS),
    )


MAMBA2 = Family(
    name="mamba2",
    classes=("Mamba2ForCausalLM",),
    model_type="mamba2",
    notes=(
        "norm_before_gate",
        "residual_in_fp32",
        "time_step_floor",
        "time_step_init_scheme",
        "time_step_max",
        "time_step_min",
        "time_step_rank",
        "time_step_scale",
        "use_associative_scan",
    ),
    describe=_describe_mamba2,
    transformers=Naming(
        layers="backbone.layers",
        modules={
            "embed": "backbone.embeddings",
            "norm": "backbone.norm_f",
            "attention_norm": "norm",
            "in_proj": "mixer.in_proj",
            "conv": "mixer.conv1d",
            "out_proj": "mixer.out_proj",
            "gate_norm": "mixer.norm",
            "state.rates": "mixer.A_log",
            "state.skips": "mixer.D",
            "state.time_step_bias": "mixer.dt_bias",
        },
    ),
    gguf=GgufNaming(architecture="mamba2"),
)


def _describe_bamba(fields: ModelFields) -> ModelConfig:
    """Describe Bamba: most layers are Mamba-2 state spaces, and some have attention that rotates half of each head."""
    head_dim = fields.head_dim()
    has_bias = fields.flag_or("attention_bias", False)
    attention = fields.attention(
        has_bias=has_bias,
        has_output_bias=has_bias,
        rotary=fields.rotary(head_dim, rotated_dims=fields.part_of_head(head_dim, 0.5)),
    )
    state_space, mlp = fields.state_space(), fields.mlp(has_bias=fields.flag_or("mlp_bias", False))
    attends = fields.attending_layers("linear_attention", fields.wholes("attn_layer_indices"))
    layers = [LayerConfig(attention=attention if at else state_space, mlp=mlp) for at in attends]
    return fields.described("bamba", layers, norm_eps=fields.number_or("rms_norm_eps", 1e-5))


BAMBA = Family(
    name="bamba",
    classes=("BambaForCausalLM",),
    model_type="bamba",
    defaults={"num_key_value_heads": 8},
    describe=_describe_bamba,
    transformers=Naming(
        modules={
            "norm": "model.final_layernorm",
            "mlp_norm": "pre_ff_layernorm",
            "gate_proj": "feed_forward.gate_proj",
            "up_proj": "feed_forward.up_proj",
            "down_proj": "feed_forward.down_proj",
        }
    ),
)
