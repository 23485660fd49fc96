"""GLM-4: rotary embeddings rotate half of each head in adjacent pairs. GLM-4-0414 adds norms after attention and MLP.

GLM-4.5 also rotates half of each head, but in pairs j and j + half. Most of its layers are mixtures as in DeepSeek-V3.
Solar Open has these mixtures in all layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trioserve.model.families.family import SHARED_EXPERTS, Family, GgufNaming, Naming
from trioserve.model.families.model_fields import ModelFields, with_axes
from trioserve.model.layer_config import LayerConfig, QkNorm
from trioserve.model.model_config import ModelConfig

__all__ = ["GLM", "GLM4", "GLM4V", "GLM4V_MOE", "GLM4_MOE", "GLM_OCR", "SOLAR_OPEN"]


_SECTIONS = (8, 12, 12)  # The default of mrope_section in transformers.


def _describe_glm(fields: ModelFields) -> ModelConfig:
    return _described(fields, "glm", has_output_norms=False)


def _describe_glm4(fields: ModelFields) -> ModelConfig:
    return _described(fields, "glm4", has_output_norms=True)


def _described(
    fields: ModelFields,
    family: str,
    *,
    has_output_norms: bool,
    head_dim: int | None = 128,
    has_bias: bool = True,
    rotated_part: float = 0.5,
    norm_eps: float = 1.5625e-7,
    reads_images: bool = False,
) -> ModelConfig:
    size = fields.head_dim(head_dim)
    attention = fields.attention(
        head_dim=head_dim,
        has_bias=fields.flag_or("attention_bias", has_bias),
        rotary=fields.rotary(size, rotated_dims=fields.part_of_head(size, rotated_part)),
    )
    if reads_images:
        attention = with_axes(fields, attention, _SECTIONS)
    layer = LayerConfig(attention=attention, mlp=fields.mlp(), has_output_norms=has_output_norms)
    norm_eps = fields.number_or("rms_norm_eps", norm_eps)
    return fields.described(family, (layer,) * fields.layer_count, norm_eps=norm_eps)


def _describe_reader(fields: ModelFields, family: str, *, has_bias: bool = True) -> ModelConfig:
    """Describe the dense language model of a GLM that reads images."""
    return _described(
        fields,
        family,
        has_output_norms=True,
        head_dim=None,
        has_bias=has_bias,
        rotated_part=1.0,
        norm_eps=1e-5,
        reads_images=True,
    )


def _describe_glm4_moe(fields: ModelFields) -> ModelConfig:
    qk_norm: QkNorm = "head" if fields.flag_or("use_qk_norm", False) else "none"
    return _described_mixture(
        fields, "glm4_moe", 128, qk_norm=qk_norm, has_bias=fields.flag_or("attention_bias", False)
    )


def _described_mixture(
    fields: ModelFields, family: str, head_dim: int | None, *, reads_images: bool = False, **choices: Any
) -> ModelConfig:
    size = fields.head_dim(head_dim)
    rotary = fields.rotary(size, rotated_dims=fields.part_of_head(size, 0.5))
    attention = fields.attention(head_dim=head_dim, rotary=rotary, **choices)
    if reads_images:
        attention = with_axes(fields, attention, _SECTIONS)
    layers = [LayerConfig(attention=attention, mlp=mlp) for mlp in fields.routed_by_sigmoid()]
    return fields.described(family, layers, norm_eps=fields.number_or("rms_norm_eps", 1e-5))


def _describe_solar(fields: ModelFields) -> ModelConfig:
    has_bias = fields.flag_or("attention_bias", False)
    rotary = fields.rotary(fields.head_dim(128), theta=1_000_000.0)
    attention = fields.attention(head_dim=128, has_bias=has_bias, rotary=rotary)
    layers = [LayerConfig(attention=attention, mlp=mlp) for mlp in fields.routed_by_sigmoid()]
    return fields.described("solar_open", layers, norm_eps=fields.number_or("rms_norm_eps", 1e-5))


GLM = Family(
    name="glm",
    classes=("GlmForCausalLM",),
    model_type="glm",
    defaults={"num_key_value_heads": 2},
    describe=_describe_glm,
    transformers=Naming(
        modules={"gate_proj": "mlp.gate_up_proj", "up_proj": "mlp.gate_up_proj"},
        pairs_adjacent=True,
    ),
)
GLM4 = Family(
    name="glm4",
    classes=("Glm4ForCausalLM",),
    model_type="glm4",
    defaults={"num_key_value_heads": 2},
    describe=_describe_glm4,
    transformers=Naming(
        modules={
            "attention_output_norm": "post_self_attn_layernorm",
            "mlp_output_norm": "post_mlp_layernorm",
            "gate_proj": "mlp.gate_up_proj",
            "up_proj": "mlp.gate_up_proj",
        },
        pairs_adjacent=True,
    ),
    gguf=GgufNaming(architecture="glm4", modules={"gate_proj": "ffn_up", "up_proj": "ffn_up"}, pairs_adjacent=True),
)
GLM4V = replace(
    GLM4,
    name="glm4v",
    classes=(),
    model_type="glm4v_text",
    describe=lambda fields: _describe_reader(fields, "glm4v"),
    gguf=None,
    with_images=("Glm4vForConditionalGeneration", "Glm46VForConditionalGeneration"),
)
GLM_OCR = replace(
    GLM4V,
    name="glm_ocr",
    model_type="glm_ocr_text",
    describe=lambda fields: _described(
        fields,
        "glm_ocr",
        has_output_norms=True,
        head_dim=None,
        has_bias=False,
        rotated_part=1.0,
        norm_eps=1e-5,
        reads_images=True,
    ),
    defaults={"num_key_value_heads": 8},
    with_images=("GlmOcrForConditionalGeneration",),
)
GLM4_MOE = Family(
    name="glm4_moe",
    classes=("Glm4MoeForCausalLM",),
    model_type="glm4_moe",
    defaults={
        "num_key_value_heads": 8,
        "n_shared_experts": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
    },
    describe=_describe_glm4_moe,
    transformers=Naming(modules=SHARED_EXPERTS),
    gguf=GgufNaming(architecture="glm4moe", modules={"mlp_norm": "post_attention_norm"}),
)
GLM4V_MOE = replace(
    GLM4_MOE,
    name="glm4v_moe",
    classes=(),
    model_type="glm4v_moe_text",
    describe=lambda fields: _described_mixture(
        fields, "glm4v_moe", None, reads_images=True, has_bias=fields.flag_or("attention_bias", True)
    ),
    gguf=None,
    with_images=("Glm4vMoeForConditionalGeneration", "Glm46VForConditionalGeneration"),
)
SOLAR_OPEN = Family(
    name="solar_open",
    classes=("SolarOpenForCausalLM",),
    model_type="solar_open",
    defaults={"num_key_value_heads": 8, "n_shared_experts": 1, "topk_group": 1, "norm_topk_prob": True},
    describe=_describe_solar,
    transformers=Naming(modules=SHARED_EXPERTS),
)
