"""gpt-oss: every other layer has a sliding window, heads have sinks, and every MLP is a mixture of clamped experts."""

from __future__ import annotations

from trioserve.model.families.family import Family, GgufNaming, Naming
from trioserve.model.families.model_fields import ModelFields, windowed_layers
from trioserve.model.model_config import ModelConfig

__all__ = ["GPT_OSS"]

GATE_UP = ("experts.gate_proj", "experts.up_proj")
# Constants of clamped_swiglu. GGUF files do not contain them.
CLAMPING = (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0))


def _describe(fields: ModelFields) -> ModelConfig:
    for name, value in CLAMPING:
        if fields.number_or(name, value) != value:
            raise fields.wrong(name, str(value))
    has_bias = fields.flag_or("attention_bias", True)
    attention = fields.attention(
        head_dim=64,
        rotary=fields.rotary(fields.head_dim(64), theta=150_000.0),
        has_bias=has_bias,
        has_output_bias=has_bias,
        has_sinks=True,
    )
    experts = fields.experts(
        "num_local_experts",
        fields.whole("intermediate_size"),
        normalizes=True,
        activation="clamped_swiglu",
        has_bias=True,
        has_router_bias=True,
    )
    windows = fields.windows(fields.whole_or("sliding_window", 128), lambda layer: layer % 2 == 0)
    return fields.described("gpt_oss", windowed_layers(attention, experts, windows))


GPT_OSS = Family(
    name="gpt_oss",
    classes=("GptOssForCausalLM",),
    model_type="gpt_oss",
    defaults={
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    notes=("experts_per_token", "initial_context_length"),
    describe=_describe,
    transformers=Naming(
        alternating=GATE_UP,
        turned=(*GATE_UP, "experts.down_proj"),
        modules={
            "router": "mlp.router",
            "sinks.weight": "self_attn.sinks",
            "experts.gate_proj.weight": "mlp.experts.gate_up_proj",
            "experts.up_proj.weight": "mlp.experts.gate_up_proj",
            "experts.down_proj.weight": "mlp.experts.down_proj",
            "experts.gate_proj.bias": "mlp.experts.gate_up_proj_bias",
            "experts.up_proj.bias": "mlp.experts.gate_up_proj_bias",
            "experts.down_proj.bias": "mlp.experts.down_proj_bias",
        },
    ),
    gguf=GgufNaming(architecture="gpt-oss", modules={"mlp_norm": "post_attention_norm"}),
)
