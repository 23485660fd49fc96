"""Phi-3 and Phi-4: a Llama with one tensor for q, k, v and one for gate, up. Phi-4-mini rotates not all of a head."""

from __future__ import annotations

from trioserve.model.families.family import Family, GgufNaming, Naming
from trioserve.model.families.model_fields import ModelFields, windowed_layers
from trioserve.model.model_config import ModelConfig

__all__ = ["PHI3"]


def _describe(fields: ModelFields) -> ModelConfig:
    head_dim = fields.head_dim()
    rotary = fields.rotary(head_dim, rotated_dims=fields.part_of_head(head_dim, 1.0))
    attention, mlp = fields.attention(rotary=rotary), fields.mlp()
    windows = fields.windows(fields.whole_or("sliding_window", None) or None, lambda layer: True)
    return fields.described("phi3", windowed_layers(attention, mlp, windows))


PHI3 = Family(
    name="phi3",
    classes=("Phi3ForCausalLM",),
    model_type="phi3",
    defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    describe=_describe,
    transformers=Naming(
        modules={
            "q_proj": "self_attn.qkv_proj",
            "k_proj": "self_attn.qkv_proj",
            "v_proj": "self_attn.qkv_proj",
            "gate_proj": "mlp.gate_up_proj",
            "up_proj": "mlp.gate_up_proj",
        }
    ),
    gguf=GgufNaming(
        architecture="phi3",
        modules={
            "q_proj": "attn_qkv",
            "k_proj": "attn_qkv",
            "v_proj": "attn_qkv",
            "gate_proj": "ffn_up",
            "up_proj": "ffn_up",
        },
    ),
)
