"""EXAONE 4: norms behind attention and MLP, normed heads; in the large ones the layers without a window know no
positions."""

from __future__ import annotations

from trioserve.model.families.family import Family, GgufNaming
from trioserve.model.families.model_fields import ModelFields
from trioserve.model.model_config import LayerConfig, ModelConfig

__all__ = ["EXAONE4"]


def _describe(fields: ModelFields) -> ModelConfig:
    window = fields.whole_or("sliding_window", None) or None
    every = fields.whole_or("sliding_window_pattern", 4)
    rotary = fields.rotary(fields.head_dim())
    layers = [
        LayerConfig(
            attention=fields.attention(
                rotary=rotary if window is None or of_layer is not None else None, window=of_layer, qk_norm="head"
            ),
            mlp=fields.mlp(),
            has_input_norms=False,
            has_output_norms=True,
        )
        for of_layer in fields.windows(window, lambda layer: every > 0 and (layer + 1) % every != 0)
    ]
    return fields.described("exaone4", layers)


EXAONE4 = Family(
    name="exaone4",
    classes=("Exaone4ForCausalLM",),
    model_type="exaone4",
    describe=_describe,
    gguf=GgufNaming(architecture="exaone4"),
)
