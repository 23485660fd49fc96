"""Command R, R+ and R7B: LayerNorm, attention and MLP computed in parallel, rotary embeddings of adjacent pairs.

R+ normalizes each head with its own weights. In R7B, three of four layers have a sliding window. The fourth layer has
no position embeddings. Command A+ is built like R7B, but has mixtures of experts and, in some models, RMS norms.
"""

from __future__ import annotations

from typing import Any

from trioserve.model.families.family import SHARED_EXPERTS, Family, GgufNaming, Naming
from trioserve.model.families.model_fields import ModelFields
from trioserve.model.layer_config import ExpertsConfig, LayerConfig, MlpConfig, QkNorm
from trioserve.model.model_config import ModelConfig, RowFactors

__all__ = ["COHERE", "COHERE2", "COHERE2_MOE"]


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


def _describe_cohere2_moe(fields: ModelFields) -> ModelConfig:
    has_bias = fields.flag_or("attention_bias", False)
    is_sparse = fields.sparse_layers(0)
    dense_count = fields.whole_or("first_k_dense_replace", 0)
    before = fields.interval("prefix_dense_sliding_window_pattern", 1)
    after = fields.interval("sliding_window_pattern", 4)

    def slides(layer: int) -> bool:
        return (layer + 1) % before != 0 if layer < dense_count else (layer - dense_count + 1) % after != 0

    experts = _mixture(fields)
    dense = MlpConfig(intermediate_size=fields.whole_or("prefix_dense_intermediate_size", experts.intermediate_size))
    rotary = fields.rotary(fields.head_dim(128))
    windows = fields.windows(fields.whole_or("sliding_window", 4096), slides)
    layers = [
        LayerConfig(
            attention=fields.attention(
                head_dim=128,
                rotary=rotary if window is not None or (before == 1 and not sparse) else None,
                window=window,
                has_bias=has_bias,
                has_output_bias=has_bias,
            ),
            mlp=experts if sparse else dense,
            is_parallel=True,
        )
        for window, sparse in zip(windows, is_sparse, strict=True)
    ]
    # The average of routed and shared experts is a sum whose terms are halved.
    halves = RowFactors(name="shared.down_proj.weight", parts=((fields.whole("hidden_size"), 0.5),))
    choices: dict[str, Any] = {"row_factors": () if experts.scale == 1.0 else (halves,)}
    if (eps := fields.number_or("rms_norm_eps", None)) is not None:
        choices |= {"norm": "rms", "norm_eps": eps}
    return _described(fields, "cohere2_moe", layers, **choices)


def _mixture(fields: ModelFields) -> ExpertsConfig:
    if (scoring := fields.text_or("expert_selection_fn", "softmax")) not in ("softmax", "sigmoid"):
        raise fields.wrong("expert_selection_fn", "'softmax' or 'sigmoid'")
    if (combined := fields.text_or("shared_expert_combination_strategy", "average")) not in ("average", "sum"):
        raise fields.wrong("shared_expert_combination_strategy", "'average' or 'sum'")
    middle, shared_count = fields.whole("intermediate_size"), fields.whole_or("num_shared_experts", 0)
    return fields.experts(
        "num_experts",
        middle,
        normalizes=fields.flag_or("norm_topk_prob", True) or scoring == "softmax",
        scoring=scoring,
        scale=0.5 if shared_count and combined == "average" else 1.0,
        shared_size=middle * shared_count,
    )


def _described(fields: ModelFields, family: str, layers: list[LayerConfig], **choices: Any) -> ModelConfig:
    if "norm" not in choices:
        choices |= {"norm": "layer", "norm_eps": fields.number_or("layer_norm_eps", 1e-5)}
    return fields.described(
        family,
        layers,
        **choices,
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
COHERE2_MOE = Family(
    name="cohere2_moe",
    classes=("Cohere2MoeForCausalLM",),
    model_type="cohere2_moe",
    describe=_describe_cohere2_moe,
    notes=(*COHERE2.notes, "layer_norm_eps"),
    transformers=Naming(modules=SHARED_EXPERTS, pairs_adjacent=True),
)
