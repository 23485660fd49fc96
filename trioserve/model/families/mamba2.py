"""Mamba-2: every layer is a state space without an MLP. No values are stored per token, so there is no KV cache.

In Bamba, most layers are Mamba-2 layers, and some layers have attention. In Zamba2, some layers also have a
transformer block, which they share.
"""

from __future__ import annotations

from trioserve.model.families.family import Family, GgufNaming, Naming
from trioserve.model.families.model_fields import ModelFields
from trioserve.model.layer_config import LayerConfig, MlpConfig, SharedBlock, StateSpaceConfig
from trioserve.model.model_config import ModelConfig

__all__ = ["MAMBA2", "BAMBA", "ZAMBA2"]

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


# transformers has this list for a model without one.
_ZAMBA2_KINDS = ["mamba"] + (["mamba"] * 5 + ["hybrid"]) * 7 + ["mamba"] * 4 + ["hybrid"] + ["mamba"] * 3 + ["hybrid"]
_ZAMBA2_KINDS += ["mamba"] * 2


def _describe_zamba2(fields: ModelFields) -> ModelConfig:
    """Describe Zamba2: hybrid layers share num_mem_blocks transformer blocks in turn, each with its own adapters."""
    if fields.flag_or("use_long_context", False):
        raise fields.wrong("use_long_context", "false, because versions of transformers differ in its rotary base")
    # Without tied embeddings, transformers does not tie the blocks either.
    for name in ("use_conv_bias", "tie_word_embeddings"):
        if not fields.flag_or(name, True):
            raise fields.wrong(name, "true for this family")
    kinds = fields.strings_or("layers_block_type", None) or fields.strings_or("layer_types", None)
    kinds = kinds or _ZAMBA2_KINDS
    if len(kinds) != fields.layer_count or not {"mamba", "linear_attention", "hybrid"}.issuperset(kinds):
        raise fields.wrong("layers_block_type", f"a list of {fields.layer_count} times 'mamba' or 'hybrid'")
    hidden, has_bias = fields.whole("hidden_size"), fields.flag_or("add_bias_linear", False)
    head_count, inner_size = fields.interval("n_mamba_heads", 8), fields.whole_or("mamba_expand", 2) * hidden
    state_space = StateSpaceConfig(
        head_count=head_count,
        head_dim=inner_size // head_count,
        group_count=fields.whole_or("mamba_ngroups", 1),
        vector_size=fields.whole_or("mamba_d_state", 64),
        kernel_size=fields.whole_or("mamba_d_conv", 4),
        has_bias=has_bias,
        time_step_min=fields.number_or("time_step_min", 0.001),
        norm_eps=1e-5,
    )
    head_dim = 2 * hidden // fields.interval("num_attention_heads", 32)
    adapts_attention = fields.flag_or("use_shared_attention_adapter", False)
    attention = fields.attention(
        head_dim=head_dim,
        rotary=fields.rotary(head_dim) if fields.flag_or("use_mem_rope", False) else None,
        scale=(head_dim / 2) ** -0.5,
    )
    if adapts_attention and attention.kv_head_count != attention.head_count:
        raise fields.wrong("num_key_value_heads", "num_attention_heads for a model with adapters of attention")
    mlp = MlpConfig(
        intermediate_size=fields.whole_or("intermediate_size", 4 * hidden),
        activation=fields.activation("hidden_act", default="gelu"),
        has_bias=has_bias,
    )
    block_count, rank = fields.interval("num_mem_blocks", 1), fields.whole_or("adapter_rank", 128)
    places = [index for index, kind in enumerate(kinds) if kind == "hybrid"]
    layers = [LayerConfig(attention=state_space, mlp=None)] * len(kinds)
    for use, index in enumerate(places):
        block = SharedBlock(first=places[use % block_count], use=use, rank=rank, adapts_attention=adapts_attention)
        layers[index] = LayerConfig(attention=attention, beside=state_space, mlp=mlp, block=block)
    eps = fields.number_or("rms_norm_eps", 1e-5)
    return fields.described("zamba2", layers, norm_eps=eps, tie_word_embeddings=True)


_MIXER = {
    "in_proj": "mamba.in_proj",
    "conv": "mamba.conv1d",
    "out_proj": "mamba.out_proj",
    "gate_norm": "mamba.norm",
    "attention_norm": "input_layernorm",
    "state.rates": "mamba.A_log",
    "state.skips": "mamba.D",
    "state.time_step_bias": "mamba.dt_bias",
}
_ATTENTION, _MLP = "shared_transformer.self_attn", "shared_transformer.feed_forward"
_MATRICES = (("a", 0), ("b", 1))

ZAMBA2 = Family(
    name="zamba2",
    classes=("Zamba2ForCausalLM",),
    model_type="zamba2",
    notes=(
        *("attention_hidden_size", "attention_head_dim", "chunk_size", "hybrid_layer_ids", "kv_channels"),
        *("mamba_headdim", "num_logits_to_keep", "num_query_groups", "time_step_floor", "time_step_max"),
        *("use_mamba_kernels", "use_mem_eff_path", "rope_parameters", "rope_scaling", "rope_theta"),
    ),
    describe=_describe_zamba2,
    transformers=Naming(
        modules={
            "norm": "model.final_layernorm",
            **{f"hybrid.{module}": f"mamba_decoder.{theirs}" for module, theirs in _MIXER.items()},
            "block.attention_norm": "shared_transformer.input_layernorm",
            "block.mlp_norm": "shared_transformer.pre_ff_layernorm",
            **{f"block.{part}_proj": f"{_ATTENTION}.{part}_proj" for part in "qkvo"},
            **{f"block.{part}_proj": f"{_MLP}.gate_up_proj" for part in ("gate", "up")},
            "block.down_proj": f"{_MLP}.down_proj",
            "block_proj": "linear",
            **{
                f"adapters.{part}_{matrix}": f"{_ATTENTION}.linear_{part}_adapter_list.{{use}}.{index}"
                for part in "qkv"
                for matrix, index in _MATRICES
            },
            **{
                f"adapters.gate_up_{matrix}": f"{_MLP}.gate_up_proj_adapter_list.{{use}}.{index}"
                for matrix, index in _MATRICES
            },
        }
    ),
)
