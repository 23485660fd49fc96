"""Command R, R+ and R7B: LayerNorm, attention and MLP computed in parallel, rotary embeddings of adjacent pairs.

R+ normalizes each head with its own weights. In R7B, three of four layers have a sliding window. The fourth layer has
no position embeddings.
"""

from __future__ import annotations

from trioserve.model.families.family import Family, GgufNaming, Naming
from trioserve.model.families.model_fields import ModelFields
from trioserve.model.layer_config import LayerConfig, QkNorm
from trioserve.model.model_config import ModelConfig

__all__ = ["COHERE", "COHERE2"]


def _describe_cohere(fields: ModelFields) -> ModelConfig:
    has_bias = fields.flag_or("attention_bias", False)
    qk_norm: QkNorm = "heads" if fields.flag_or("use_qk_norm", False) else "none"
    attention = fields.attention(has_bias=has_bias, has_output_bias=has_bias, qk_norm=qk_norm)
    layer = LayerConfig(attention=attention, mlp=fields.mlp(), is_parallel=True)
    return _described(fields, "cohere", [layer] * fields.layer_count)


def _describe_cohere2(fields: ModelFields) -> ModelConfig:
    has_bias = fields.flag_or("attention_bias", False)
    every = fields.interval("sliding_window_pattern", 4)
    windows = fields.windows(fields.whole_or("sliding_window", 4096), lambda layer: (layer + 1) % every != 0)
    rotary = fields.rotary(fields.head_dim())
    layers = [
        LayerConfig(
            attention=fields.attention(
                rotary=None if window is None else rotary,
                window=window,
                has_bias=has_bias,
                has_output_bias=has_bias,
            ),
            mlp=fields.mlp(),
            is_parallel=True,
        )
        for window in windows
    ]
    return _described(fields, "cohere2", layers)


def _described(fields: ModelFields, family: str, layers: list[LayerConfig]) -> ModelConfig:
    return fields.described(
        family,
        layers,
        norm="layer",
        norm_eps=fields.number_or("layer_norm_eps", 1e-5),
        logit_scale=fields.number_or("logit_scale", 0.0625),
        tie_word_embeddings=fields.flag_or("tie_word_embeddings", True),
    )


COHERE = Family(
    name="cohere",
    classes=("CohereForCausalLM",),
    model_type="cohere",
    defaults={"rope_theta": 500_000.0},
    describe=_describe_cohere,
    transformers=Naming(pairs_adjacent=True),
    gguf=GgufNaming(architecture="command-r", pairs_adjacent=True),
)
COHERE2 = Family(
    name="cohere2",
    classes=("Cohere2ForCausalLM",),
    model_type="cohere2",
    notes=(
        "layer_switch",
        "order_of_interleaved_layers",
        "position_embedding_type",
        "rotary_pct",
        "use_embedding_sharing",
        "use_parallel_embedding",
    ),
    describe=_describe_cohere2,
    transformers=Naming(pairs_adjacent=True),
    gguf=GgufNaming(architecture="cohere2", pairs_adjacent=True),
)
