"""EXAONE 3: a Llama with other field and tensor names. EXAONE 4: norms after attention and MLP, and normalized heads.

In the large EXAONE 4 models, layers without a sliding window have no position embeddings. K-EXAONE is built like these
models, but has norms before attention and MLP, and mixtures of experts as in DeepSeek-V3.
"""

from __future__ import annotations

from trioserve.model.families.family import SHARED_EXPERTS, Family, GgufNaming, Naming
from trioserve.model.families.model_fields import ModelFields
from trioserve.model.layer_config import AttentionConfig, LayerConfig
from trioserve.model.model_config import ModelConfig

__all__ = ["EXAONE", "EXAONE4", "EXAONE_MOE"]


def _describe_exaone(fields: ModelFields) -> ModelConfig:
    rotary = fields.rotary(fields.head_dim(), theta=500_000.0)
    layer = LayerConfig(attention=fields.attention(rotary=rotary), mlp=fields.mlp())
    norm_eps = fields.number_or("rms_norm_eps", 1e-5)
    return fields.described("exaone", (layer,) * fields.layer_count, norm_eps=norm_eps)


def _attentions(fields: ModelFields) -> list[AttentionConfig]:
    window = fields.whole_or("sliding_window", None) or None
    # If layer_types is present, sliding_window_pattern may be a string that repeats it, so it is not read.
    every = 0 if "layer_types" in fields else fields.whole_or("sliding_window_pattern", 4)
    rotary = fields.rotary(fields.head_dim())
    return [
        fields.attention(
            rotary=rotary if window is None or of_layer is not None else None, window=of_layer, qk_norm="head"
        )
        for of_layer in fields.windows(window, lambda layer: every > 0 and (layer + 1) % every != 0)
    ]


def _describe_exaone4(fields: ModelFields) -> ModelConfig:
    mlp = fields.mlp()
    layers = [
        LayerConfig(attention=attention, mlp=mlp, has_input_norms=False, has_output_norms=True)
        for attention in _attentions(fields)
    ]
    return fields.described("exaone4", layers)


def _describe_exaone_moe(fields: ModelFields) -> ModelConfig:
    pairs = zip(_attentions(fields), fields.routed_by_sigmoid(dense_count=1), strict=True)
    return fields.described("exaone_moe", [LayerConfig(attention=attention, mlp=mlp) for attention, mlp in pairs])


EXAONE = Family(
    name="exaone",
    classes=("ExaoneForCausalLM",),
    model_type="exaone",
    describe=_describe_exaone,
    spellings={
        "num_hidden_layers": "num_layers",
        "rms_norm_eps": "layer_norm_epsilon",
        "hidden_act": "activation_function",
    },
    transformers=Naming(
        layers="transformer.h",
        modules={
            "embed": "transformer.wte",
            "norm": "transformer.ln_f",
            "attention_norm": "ln_1",
            "q_proj": "attn.attention.q_proj",
            "k_proj": "attn.attention.k_proj",
            "v_proj": "attn.attention.v_proj",
            "o_proj": "attn.attention.out_proj",
            "mlp_norm": "ln_2",
            "gate_proj": "mlp.c_fc_0",
            "up_proj": "mlp.c_fc_1",
            "down_proj": "mlp.c_proj",
        },
    ),
    gguf=GgufNaming(architecture="exaone"),
)
EXAONE4 = Family(
    name="exaone4",
    classes=("Exaone4ForCausalLM",),
    model_type="exaone4",
    defaults={"num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window": 4096},
    notes=("sliding_window_pattern",),
    describe=_describe_exaone4,
    gguf=GgufNaming(architecture="exaone4"),
)
EXAONE_MOE = Family(
    name="exaone_moe",
    classes=("ExaoneMoeForCausalLM", "ExaoneMoEForCausalLM"),
    model_type="exaone_moe",
    spellings={"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"},
    defaults={
        **EXAONE4.defaults,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_group": 1,
        "topk_group": 1,
    },
    notes=("sliding_window_pattern",),
    describe=_describe_exaone_moe,
    transformers=Naming(modules={**SHARED_EXPERTS, "router.score_bias": "mlp.e_score_correction_bias"}),
    gguf=GgufNaming(architecture="exaone-moe"),
)
