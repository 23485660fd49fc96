"""Llama 2 to 3.3, and models with the same config: SmolLM2, Falcon 3, Yi, TinyLlama and many more."""

from __future__ import annotations

from trioserve.model.families.family import Family, GgufNaming
from trioserve.model.families.model_fields import ModelFields, windowed_layers
from trioserve.model.model_config import ModelConfig

__all__ = ["LLAMA"]


def _describe(fields: ModelFields) -> ModelConfig:
    has_bias = fields.flag_or("attention_bias", False)
    has_output_bias = fields.flag_or("attention_output_bias", has_bias)
    attention = fields.attention(has_bias=has_bias, has_output_bias=has_output_bias)
    mlp = fields.mlp(has_bias=fields.flag_or("mlp_bias", False))
    # llama.cpp writes a Mistral, which has a sliding window, as a Llama.
    windows = fields.windows(fields.whole_or("sliding_window", None) or None, lambda layer: True)
    return fields.described("llama", windowed_layers(attention, mlp, windows))


LLAMA = Family(
    name="llama",
    classes=("LlamaForCausalLM",),
    model_type="llama",
    notes=("is_llama_config", "perceiver_config", "pixel_shuffle_factor"),
    describe=_describe,
    with_images=("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"),
    gguf=GgufNaming(architecture="llama", pairs_adjacent=True),
    text_defaults={
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "bos_token_id": 1,
    },
)
