"""Hunyuan 1 and 3: Llamas with normalized heads, dense or with mixtures of experts.

Version 1 normalizes heads after they are rotated. Version 3 has mixtures as in DeepSeek-V3 without groups.
"""

from __future__ import annotations

import msgspec

from trioserve.model.families.family import Family, GgufNaming, Naming
from trioserve.model.families.model_fields import ModelFields
from trioserve.model.layer_config import AttentionConfig, ExpertsConfig, LayerConfig
from trioserve.model.model_config import ModelConfig

__all__ = ["HUNYUAN_DENSE", "HUNYUAN_MOE", "HY_V3"]


def _attention_v1(fields: ModelFields) -> AttentionConfig:
    for name, wanted in (("use_qk_norm", True), ("use_cla", False), ("mlp_bias", False)):
        if fields.flag_or(name, wanted) != wanted:
            raise fields.wrong(name, f"{str(wanted).lower()} for this family")
    has_bias, head_dim = fields.flag_or("attention_bias", False), fields.head_dim()
    rotary = fields.rotary(head_dim)
    rope = fields.group_or_none("rope_parameters") or fields.group_or_none("rope_scaling")
    alpha = None if rope is None else rope.number_or("alpha", None)
    kind = rope and (rope.text_or("rope_type", None) or rope.text_or("type", None))
    if alpha is not None and kind == "dynamic":  # A longer context than in training, by a larger base (NTK).
        rotary = msgspec.structs.replace(rotary, theta=rotary.theta * alpha ** (head_dim / (head_dim - 2)))
    return fields.attention(
        rotary=rotary, has_bias=has_bias, has_output_bias=has_bias, qk_norm="head", has_turned_norms=True
    )


def _describe_dense(fields: ModelFields) -> ModelConfig:
    layer = LayerConfig(attention=_attention_v1(fields), mlp=fields.mlp())
    return fields.described("hunyuan_v1_dense", [layer] * fields.layer_count)


def _describe_moe(fields: ModelFields) -> ModelConfig:
    size, attention = fields.whole("intermediate_size"), _attention_v1(fields)
    counts, chosen = _by_layer(fields, "num_experts", 1), _by_layer(fields, "moe_topk", 1)
    for name, wanted in (
        ("moe_intermediate_size", size),
        ("shared_expert_intermediate_size", size),
        ("num_shared_expert", 1),
    ):
        if set(_by_layer(fields, name, wanted)) != {wanted}:
            raise fields.wrong(name, f"{wanted} in each layer")
    layers = [
        LayerConfig(
            attention=attention,
            mlp=ExpertsConfig(
                expert_count=count,
                experts_per_token=per_token,
                intermediate_size=size,
                normalizes=True,
                shared_size=size,
            ),
        )
        for count, per_token in zip(counts, chosen, strict=True)
    ]
    if fields.text_or("hidden_act", "silu") != "silu":
        raise fields.wrong("hidden_act", "'silu'")
    return fields.described("hunyuan_v1_moe", layers)


def _by_layer(fields: ModelFields, name: str, default: int) -> tuple[int, ...]:
    """Return one number for each layer. A single number applies to all layers."""
    found = fields.wholes(name) or (default,)
    if len(found) not in (1, fields.layer_count):
        raise fields.wrong(name, f"one number, or one for each of {fields.layer_count} layers")
    return found * (fields.layer_count // len(found))


def _describe_v3(fields: ModelFields) -> ModelConfig:
    if fields.flag_or("mlp_bias", False):
        raise fields.wrong("mlp_bias", "false for this family")
    has_bias = fields.flag_or("attention_bias", False)
    attention = fields.attention(head_dim=128, has_bias=has_bias, has_output_bias=has_bias, qk_norm="head")
    layers = [LayerConfig(attention=attention, mlp=mlp) for mlp in fields.routed_by_sigmoid(dense_count=1)]
    return fields.described("hy_v3", layers)


_NORMS = {"q_norm": "self_attn.query_layernorm", "k_norm": "self_attn.key_layernorm"}
_SHARED = {f"shared.{part}_proj": f"mlp.shared_mlp.{part}_proj" for part in ("gate", "up", "down")}
HUNYUAN_DENSE = Family(
    name="hunyuan_v1_dense",
    classes=("HunYuanDenseV1ForCausalLM",),
    model_type="hunyuan_v1_dense",
    defaults={"rms_norm_eps": 1e-5},
    notes=("eod_token_id", "sep_token_id"),
    describe=_describe_dense,
    transformers=Naming(modules=_NORMS),
    gguf=GgufNaming(architecture="hunyuan-dense"),
)
HUNYUAN_MOE = Family(
    name="hunyuan_v1_moe",
    classes=("HunYuanMoEV1ForCausalLM",),
    model_type="hunyuan_v1_moe",
    defaults={"rms_norm_eps": 1e-5},
    notes=("eod_token_id", "sep_token_id", "norm_topk_prob", "use_mixed_mlp_moe"),
    describe=_describe_moe,
    transformers=Naming(modules={**_NORMS, **_SHARED, "router": "mlp.gate.wg"}),
    gguf=GgufNaming(architecture="hunyuan-moe"),
)
HY_V3 = Family(
    name="hy_v3",
    classes=("HYV3ForCausalLM",),
    model_type="hy_v3",
    spellings={
        "n_routed_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
        "routed_scaling_factor": "router_scaling_factor",
    },
    defaults={
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 11_158_840.0,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.826,
        "norm_topk_prob": True,
    },
    notes=("enable_moe_fp32_combine",),
    describe=_describe_v3,
    transformers=Naming(
        modules={
            "router": "mlp.router.gate",
            "router.score_bias": "mlp.expert_bias",
            **_SHARED,
        }
    ),
)
