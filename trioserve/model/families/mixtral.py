"""Mixtral: a Mistral whose MLPs are mixtures of experts. GGUF files call it a Llama with experts."""

from __future__ import annotations

from trioserve.model.families.family import Family, GgufNaming, Naming
from trioserve.model.families.model_fields import ModelFields, windowed_layers
from trioserve.model.model_config import ModelConfig

__all__ = ["MIXTRAL"]


def _describe(fields: ModelFields) -> ModelConfig:
    attention = fields.attention()
    mlp = fields.experts("num_local_experts", fields.whole("intermediate_size"), normalizes=True)
    windows = fields.windows(fields.whole_or("sliding_window", None) or None, lambda layer: True)
    return fields.described("mixtral", windowed_layers(attention, mlp, windows))


MIXTRAL = Family(
    name="mixtral",
    classes=("MixtralForCausalLM",),
    model_type="mixtral",
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0},
    describe=_describe,
    transformers=Naming(
        modules={
            "router": "block_sparse_moe.gate",
            "experts.gate_proj": "block_sparse_moe.experts.{expert}.w1",
            "experts.up_proj": "block_sparse_moe.experts.{expert}.w3",
            "experts.down_proj": "block_sparse_moe.experts.{expert}.w2",
        }
    ),
    gguf=GgufNaming(architecture="llama", pairs_adjacent=True),
)
