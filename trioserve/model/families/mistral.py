"""Mistral and Ministral: a Llama whose layers may see a window. In GGUF files they are Llamas."""

from __future__ import annotations

import msgspec

from trioserve.model.families.family import Family
from trioserve.model.families.model_fields import ModelFields
from trioserve.model.model_config import LayerConfig, ModelConfig

__all__ = ["MISTRAL"]


def _describe(fields: ModelFields) -> ModelConfig:
    attention, mlp = fields.attention(), fields.mlp()
    windows = fields.windows(fields.whole_or("sliding_window", None), lambda layer: True)
    layers = [LayerConfig(attention=msgspec.structs.replace(attention, window=window), mlp=mlp) for window in windows]
    return fields.described("mistral", layers)


MISTRAL = Family(
    name="mistral",
    classes=("MistralForCausalLM", "MinistralForCausalLM"),
    model_type="mistral",
    describe=_describe,
    with_images=("Mistral3ForConditionalGeneration",),
)
