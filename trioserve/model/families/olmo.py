"""OLMo 2 and 3 have norms after attention and MLP instead of before. Queries and keys are normalized over all heads.

In OLMo 3, three of four layers have a sliding window, and only the fourth layer has scaled positions. OLMoE is a Llama
with mixtures of experts. It normalizes queries and keys like OLMo 2.
"""

from __future__ import annotations

from trioserve.model.families.family import Family, GgufNaming
from trioserve.model.families.model_fields import ModelFields
from trioserve.model.layer_config import LayerConfig
from trioserve.model.model_config import ModelConfig

__all__ = ["OLMO2", "OLMO3", "OLMOE"]


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
    has_bias = fields.flag_or("attention_bias", False)
    attention = fields.attention(has_bias=has_bias, has_output_bias=has_bias, qk_norm="row")
    normalizes = fields.flag_or("norm_topk_prob", False)
    experts = fields.experts("num_experts", fields.whole("intermediate_size"), normalizes=normalizes)
    return fields.described("olmoe", (LayerConfig(attention=attention, mlp=experts),) * fields.layer_count)


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
