"""Hunyuan 3: a Llama with normalized heads, and mixtures of experts as in DeepSeek-V3 without groups."""

from __future__ import annotations

from trioserve.model.families.family import Family, Naming
from trioserve.model.families.model_fields import ModelFields
from trioserve.model.layer_config import LayerConfig
from trioserve.model.model_config import ModelConfig

__all__ = ["HY_V3"]


def _describe_v3(fields: ModelFields) -> ModelConfig:
    if fields.flag_or("mlp_bias", False):
        raise fields.wrong("mlp_bias", "false for this family")
    has_bias = fields.flag_or("attention_bias", False)
    attention = fields.attention(head_dim=128, has_bias=has_bias, has_output_bias=has_bias, qk_norm="head")
    layers = [LayerConfig(attention=attention, mlp=mlp) for mlp in fields.routed_by_sigmoid(dense_count=1)]
    return fields.described("hy_v3", layers)


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
            **{f"shared.{part}_proj": f"mlp.shared_mlp.{part}_proj" for part in ("gate", "up", "down")},
        }
    ),
)
