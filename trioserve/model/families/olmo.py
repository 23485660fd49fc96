"""OLMo 2 and 3 have norms after attention and MLP instead of before. Queries and keys are normalized over all heads.

In OLMo 3, three of four layers have a sliding window, and only the fourth layer has scaled positions. OLMoE is a Llama
with mixtures of experts. It normalizes queries and keys like OLMo 2. OLMo 1 is a Llama whose norms have no weights.
FlexOlmo has the experts of OLMoE and the norms of OLMo 2.

In OLMo Hybrid, three of four layers have the gated delta rule, with norms before it and before its MLP.
"""

from __future__ import annotations

import dataclasses

from msgspec.structs import replace

from trioserve.model.families.family import Family, GgufNaming, Naming
from trioserve.model.families.model_fields import ModelFields
from trioserve.model.layer_config import DeltaNetConfig, LayerConfig
from trioserve.model.model_config import ModelConfig

__all__ = ["FLEX_OLMO", "OLMO", "OLMO2", "OLMO3", "OLMOE", "OLMO_HYBRID", "OLMO_HYBRID_SAVED"]


def _describe_olmo(fields: ModelFields) -> ModelConfig:
    has_bias = fields.flag_or("attention_bias", False)
    clip = fields.number_or("clip_qkv", None)
    attention = fields.attention(has_bias=has_bias, has_output_bias=has_bias, clip=clip)
    layer = LayerConfig(attention=attention, mlp=fields.mlp())
    return fields.described("olmo", (layer,) * fields.layer_count, norm="layer_bare", norm_eps=1e-5)


OLMO = Family(
    name="olmo",
    classes=("OlmoForCausalLM",),
    model_type="olmo",
    describe=_describe_olmo,
    gguf=GgufNaming(architecture="olmo", pairs_adjacent=True),
)


def _describe_olmo2(fields: ModelFields) -> ModelConfig:
    # In llama.cpp's files, an OLMo 3 has the architecture "olmo2" and a sliding window.
    return _described(fields, "olmo2", fields.whole_or("sliding_window", None))


def _describe_olmo3(fields: ModelFields) -> ModelConfig:
    return _described(fields, "olmo3", fields.whole_or("sliding_window", 4096))


def _described(fields: ModelFields, family: str, window: int | None) -> ModelConfig:
    has_bias = fields.flag_or("attention_bias", False)
    head_dim = fields.head_dim()
    whole = fields.rotary(head_dim, layer_type="full_attention")
    sliding = fields.rotary(head_dim, layer_type="sliding_attention")
    layers = [
        LayerConfig(
            attention=fields.attention(
                rotary=whole if window is None else sliding,
                window=window,
                has_bias=has_bias,
                has_output_bias=has_bias,
                qk_norm="row",
            ),
            mlp=fields.mlp(),
            has_input_norms=False,
            has_output_norms=True,
        )
        for window in fields.windows(window, lambda layer: (layer + 1) % 4 != 0)
    ]
    return fields.described(family, layers)


def _describe_olmoe(fields: ModelFields) -> ModelConfig:
    return fields.described("olmoe", (_mixture(fields),) * fields.layer_count)


def _describe_flex(fields: ModelFields) -> ModelConfig:
    layer = replace(_mixture(fields), has_input_norms=False, has_output_norms=True)
    return fields.described("flex_olmo", (layer,) * fields.layer_count)


def _mixture(fields: ModelFields) -> LayerConfig:
    has_bias = fields.flag_or("attention_bias", False)
    attention = fields.attention(has_bias=has_bias, has_output_bias=has_bias, qk_norm="row")
    normalizes = fields.flag_or("norm_topk_prob", False)
    experts = fields.experts("num_experts", fields.whole("intermediate_size"), normalizes=normalizes)
    return LayerConfig(attention=attention, mlp=experts)


def _describe_hybrid(fields: ModelFields) -> ModelConfig:
    has_bias, mlp = fields.flag_or("attention_bias", False), fields.mlp()
    head_count = fields.whole("num_attention_heads")
    key_heads = fields.whole_or("linear_num_key_heads", head_count)
    if key_heads < 1:
        raise fields.wrong("linear_num_key_heads", "at least 1")
    default_dim = int(0.75 * fields.whole("hidden_size") / key_heads)
    key_dim = fields.whole_or("linear_key_head_dim", default_dim)
    delta = DeltaNetConfig(
        head_count=fields.whole_or("linear_num_value_heads", head_count),
        group_count=key_heads,
        head_dim=fields.whole_or("linear_value_head_dim", 2 * key_dim),
        vector_size=key_dim,
        kernel_size=fields.whole_or("linear_conv_kernel_dim", 4),
        has_joint_qkv=False,
        share_scale=2.0 if fields.flag_or("linear_allow_neg_eigval", True) else 1.0,
        norm_eps=1e-5,  # fixed in transformers
    )
    # A null theta, as in the published configs, means that attention ignores positions.
    rope = fields.group_or_none("rope_parameters")
    has_positions = not (fields if rope is None else rope).is_null("rope_theta")
    rotary = fields.rotary(fields.head_dim())
    attention = fields.attention(
        rotary=rotary if has_positions else None,
        has_bias=has_bias,
        has_output_bias=has_bias,
        qk_norm="row",
    )
    count = fields.layer_count
    attends = fields.attending_layers("linear_attention", range(3, count, 4) or (count - 1,))
    makers = {
        False: LayerConfig(attention=delta, mlp=mlp),
        True: LayerConfig(attention=attention, mlp=mlp, has_input_norms=False, has_output_norms=True),
    }
    return fields.described("olmo_hybrid", [makers[at] for at in attends])


OLMO2 = Family(
    name="olmo2",
    classes=("Olmo2ForCausalLM",),
    model_type="olmo2",
    defaults={"rms_norm_eps": 1e-5},
    describe=_describe_olmo2,
    gguf=GgufNaming(architecture="olmo2"),
)
OLMO3 = Family(
    name="olmo3",
    classes=("Olmo3ForCausalLM",),
    model_type="olmo3",
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 500_000.0},
    describe=_describe_olmo3,
)
OLMOE = Family(
    name="olmoe",
    classes=("OlmoeForCausalLM",),
    model_type="olmoe",
    defaults={"rms_norm_eps": 1e-5},
    describe=_describe_olmoe,
    gguf=GgufNaming(architecture="olmoe"),
)
OLMO_HYBRID = Family(
    name="olmo_hybrid",
    classes=("OlmoHybridForCausalLM",),
    model_type="olmo_hybrid",
    saved_as="olmo_hybrid_saved",
    notes=("linear_a_log_max", "linear_a_log_min", "linear_dt_init_floor", "linear_dt_max", "linear_dt_min"),
    describe=_describe_hybrid,
    transformers=Naming(
        modules={
            "attention_norm": "attention_layer_norm",
            "mlp_norm": "feedforward_layer_norm",
            **{f"delta_{part}": f"linear_attn.{part}_proj" for part in "qkv"},
            **{f"conv_{part}": f"linear_attn.{part}_conv1d" for part in "qkv"},
            "delta_gate": "linear_attn.g_proj",
            "delta_decay": "linear_attn.a_proj",
            "delta_share": "linear_attn.b_proj",
            "out_proj": "linear_attn.o_proj",
            "gate_norm": "linear_attn.o_norm",
            "state.rates": "linear_attn.A_log",
            "state.time_step_bias": "linear_attn.dt_bias",
        }
    ),
)
# transformers gives a norm of attention layers the name that only other layers have in the authors' files.
OLMO_HYBRID_SAVED = dataclasses.replace(
    OLMO_HYBRID,
    name="olmo_hybrid_saved",
    classes=(),
    saved_as=None,
    transformers=dataclasses.replace(
        OLMO_HYBRID.transformers,
        modules={**OLMO_HYBRID.transformers.modules, "attention_output_norm": "feedforward_layer_norm"},
    ),
)
FLEX_OLMO = Family(
    name="flex_olmo",
    classes=("FlexOlmoForCausalLM",),
    model_type="flex_olmo",
    defaults={"rope_theta": 500_000.0},
    describe=_describe_flex,
)
