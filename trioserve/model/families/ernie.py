"""ERNIE 4.5, dense: a Llama whose rotary embeddings rotate adjacent pairs."""

from __future__ import annotations

from trioserve.model.families.family import Family, GgufNaming, Naming
from trioserve.model.families.model_fields import ModelFields
from trioserve.model.model_config import LayerConfig, ModelConfig

__all__ = ["ERNIE45"]


def _describe(fields: ModelFields) -> ModelConfig:
    # The GGUF reader sets attention_bias if the file has bias tensors.
    has_bias = fields.flag_or("use_bias", fields.flag_or("attention_bias", False))
    attention = fields.attention(head_dim=128, has_bias=has_bias, has_output_bias=has_bias)
    layer = LayerConfig(attention=attention, mlp=fields.mlp(has_bias=has_bias))
    return fields.described(
        "ernie4_5", (layer,) * fields.layer_count, tie_word_embeddings=fields.flag_or("tie_word_embeddings", True)
    )


ERNIE45 = Family(
    name="ernie4_5",
    classes=("Ernie4_5ForCausalLM",),
    model_type="ernie4_5",
    defaults={"num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0},
    describe=_describe,
    transformers=Naming(pairs_adjacent=True),
    gguf=GgufNaming(architecture="ernie4_5", pairs_adjacent=True),
)
