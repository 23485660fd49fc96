"""Mistral and Ministral: a Llama that may have sliding windows. Older GGUF files call it a Llama.

Ministral 3 multiplies queries by a factor that grows with the position.
"""

from __future__ import annotations

from msgspec import structs

from trioserve.model.families.family import Family, GgufNaming
from trioserve.model.families.model_fields import ModelFields, windowed_layers
from trioserve.model.layer_config import Temperature
from trioserve.model.model_config import ModelConfig

__all__ = ["MINISTRAL3", "MISTRAL"]


def _describe(fields: ModelFields) -> ModelConfig:
    return _described(fields, "mistral", None)


def _describe_ministral3(fields: ModelFields) -> ModelConfig:
    rope = fields.group_or_none("rope_parameters") or fields.group_or_none("rope_scaling") or fields
    scale = rope.number_or("llama_4_scaling_beta", 0.0)
    if not scale:
        return _described(fields, "ministral3", None)
    interval = rope.whole("original_max_position_embeddings")
    return _described(fields, "ministral3", Temperature(scale=scale, interval=interval, first=0))


def _described(fields: ModelFields, family: str, temperature: Temperature | None) -> ModelConfig:
    attention = structs.replace(fields.attention(), temperature=temperature)
    windows = fields.windows(fields.whole_or("sliding_window", None) or None, lambda layer: True)
    return fields.described(family, windowed_layers(attention, fields.mlp(), windows))


MISTRAL = Family(
    name="mistral",
    classes=("MistralForCausalLM", "MinistralForCausalLM", "GritLM"),
    model_type="mistral",
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    describe=_describe,
    with_images=("Mistral3ForConditionalGeneration",),
    text_defaults={
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 131_072,
        "bos_token_id": 1,
    },
)
MINISTRAL3 = Family(
    name="ministral3",
    classes=("Ministral3ForCausalLM",),
    model_type="ministral3",
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1_000_000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16_384,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale_all_dim": 1.0,
            "mscale": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    describe=_describe_ministral3,
    gguf=GgufNaming(architecture="mistral3", pairs_adjacent=True),
    with_images=("Mistral3ForConditionalGeneration",),
)
