"""AFMoE, the family of Arcee's Trinity: norms before and after attention and MLP, and mixtures as in DeepSeek-V3.

The sigmoid of a projection multiplies the output of attention. Layers without a sliding window have no position
embeddings.
"""

from __future__ import annotations

import math

from trioserve.model.families.family import SHARED_EXPERTS, Family, Naming
from trioserve.model.families.model_fields import ModelFields
from trioserve.model.layer_config import LayerConfig
from trioserve.model.model_config import ModelConfig

__all__ = ["AFMOE"]


def _describe(fields: ModelFields) -> ModelConfig:
    for name, computed in (("attention_bias", False), ("route_norm", True)):
        if fields.flag_or(name, computed) is not computed:
            raise fields.wrong(name, f"{str(computed).lower()} for this family")
    if fields.is_null("sliding_window"):
        raise fields.wrong("sliding_window", "a whole number for this family")
    every = fields.interval("global_attn_every_n_layers", 4)
    windows = fields.windows(fields.whole_or("sliding_window", 1024), lambda layer: (layer + 1) % every != 0)
    rotary = fields.rotary(fields.head_dim(128))
    layers = [
        LayerConfig(
            attention=fields.attention(
                head_dim=128,
                rotary=None if window is None else rotary,
                window=window,
                qk_norm="head",
                has_gate=True,
            ),
            mlp=mlp,
            has_output_norms=True,
        )
        for window, mlp in zip(windows, fields.routed_by_sigmoid(dense_count=1), strict=True)
    ]
    has_scale = fields.flag_or("mup_enabled", False)
    return fields.described(
        "afmoe", layers, embedding_scale=math.sqrt(max(fields.whole("hidden_size"), 0)) if has_scale else 1.0
    )


AFMOE = Family(
    name="afmoe",
    classes=("AfmoeForCausalLM",),
    model_type="afmoe",
    spellings={
        "n_routed_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
        "first_k_dense_replace": "num_dense_layers",
        "routed_scaling_factor": "route_scale",
        "scoring_func": "score_func",
    },
    defaults={"rms_norm_eps": 1e-5, "n_shared_experts": 2, "norm_topk_prob": True},
    notes=("load_balance_coeff", "num_expert_groups", "num_limited_groups", "use_grouped_mm"),
    describe=_describe,
    transformers=Naming(
        modules={
            **SHARED_EXPERTS,
            "attention_output_norm": "post_attention_layernorm",
            "mlp_norm": "pre_mlp_layernorm",
            "mlp_output_norm": "post_mlp_layernorm",
            "q_gate_proj": "self_attn.gate_proj",
            "router": "mlp.router.gate",
            "router.score_bias": "mlp.expert_bias",
        }
    ),
)
