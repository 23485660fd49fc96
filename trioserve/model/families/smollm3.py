"""SmolLM3: a Llama in which every fourth layer has no position embeddings."""

from __future__ import annotations

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.families.family import Family, GgufNaming
from trioserve.model.families.model_fields import ModelFields
from trioserve.model.model_config import LayerConfig, ModelConfig

__all__ = ["SMOLLM3"]


def _describe(fields: ModelFields) -> ModelConfig:
    interval = fields.interval("no_rope_layer_interval", 4)
    # Despite its name, no_rope_layers has 1 for layers with position embeddings.
    has_positions = fields.wholes("no_rope_layers") or tuple(
        int((layer + 1) % interval != 0) for layer in range(fields.layer_count)
    )
    if len(has_positions) != fields.layer_count:
        raise ModelLoadError(
            f"no_rope_layers in {fields.source} has {len(has_positions)} entries, the model has {fields.layer_count} "
            "layers: the checkpoint's config is damaged"
        )
    has_bias = fields.flag_or("attention_bias", False)
    slides = fields.flag_or("use_sliding_window", False)
    windows = fields.windows(
        fields.whole_or("sliding_window", None) if slides else None, lambda layer: not has_positions[layer]
    )
    rotary = fields.rotary(fields.head_dim())
    layers = [
        LayerConfig(
            attention=fields.attention(
                rotary=rotary if has_positions[layer] else None,
                window=window,
                has_bias=has_bias,
                has_output_bias=has_bias,
            ),
            mlp=fields.mlp(has_bias=fields.flag_or("mlp_bias", False)),
        )
        for layer, window in enumerate(windows)
    ]
    return fields.described("smollm3", layers, tie_word_embeddings=fields.flag_or("tie_word_embeddings", True))


SMOLLM3 = Family(
    name="smollm3",
    classes=("SmolLM3ForCausalLM",),
    model_type="smollm3",
    defaults={"rope_theta": 2_000_000.0},
    describe=_describe,
    gguf=GgufNaming(architecture="smollm3", pairs_adjacent=True),
)
