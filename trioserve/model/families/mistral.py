"""Mistral and Ministral: a Llama whose layers may see a window. In GGUF files they are Llamas."""

from __future__ import annotations

from trioserve.model.families.family import Family
from trioserve.model.families.model_fields import ModelFields, windowed_layers
from trioserve.model.model_config import ModelConfig

__all__ = ["MISTRAL"]


def _describe(fields: ModelFields) -> ModelConfig:
    attention, mlp = fields.attention(), fields.mlp()
    windows = fields.windows(fields.whole_or("sliding_window", None) or None, lambda layer: True)
    return fields.described("mistral", windowed_layers(attention, mlp, windows))


MISTRAL = Family(
    name="mistral",
    classes=("MistralForCausalLM", "MinistralForCausalLM"),
    model_type="mistral",
    describe=_describe,
    with_images=("Mistral3ForConditionalGeneration",),
)
