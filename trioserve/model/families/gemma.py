"""Gemma 1, 2 and 3 (language models only): scaled embeddings, and norms that add 1 to their weights.

Gemma 2 and 3 also have norms after attention and MLP, and layers with sliding windows. Gemma 2 caps attention scores.
Gemma 3 normalizes heads, and its layers without a window use a larger theta.
"""

from __future__ import annotations

import math

from trioserve.model.families.family import Family, GgufNaming, Naming
from trioserve.model.families.model_fields import ModelFields
from trioserve.model.model_config import LayerConfig, MlpConfig, ModelConfig

__all__ = ["GEMMA", "GEMMA2", "GEMMA3"]

# Models with 27 billion parameters divide by hidden_size / heads, not by head_dim. llama.cpp recognizes them by their
# number of layers.
LAYERS_OF_27B = (46, 62)
# No norm_offset for GGUF: llama.cpp adds the 1 to the weights when it writes a file.
MODULES = {"mlp_norm": "pre_feedforward_layernorm"}


def _describe_gemma(fields: ModelFields) -> ModelConfig:
    has_bias = fields.flag_or("attention_bias", False)
    attention = fields.attention(head_dim=256, has_bias=has_bias, has_output_bias=has_bias)
    layer = LayerConfig(attention=attention, mlp=_mlp_of_first(fields))
    return _described(fields, "gemma", [layer] * fields.layer_count)


def _describe_gemma2(fields: ModelFields) -> ModelConfig:
    has_bias = fields.flag_or("attention_bias", False)
    windows = fields.windows(fields.whole_or("sliding_window", 4096), lambda layer: layer % 2 == 0)
    cap = fields.number_unless_null("attn_logit_softcapping", 50.0)
    layers = [
        LayerConfig(
            attention=fields.attention(
                head_dim=256,
                window=window,
                scale=_scale(fields),
                score_cap=cap,
                has_bias=has_bias,
                has_output_bias=has_bias,
            ),
            mlp=_mlp(fields),
            has_output_norms=True,
        )
        for window in windows
    ]
    return _described(fields, "gemma2", layers, logit_cap=fields.number_unless_null("final_logit_softcapping", 30.0))


def _describe_gemma3(fields: ModelFields) -> ModelConfig:
    has_bias = fields.flag_or("attention_bias", False)
    fields.number_or("attn_logit_softcapping", None)  # ignored, as in transformers
    every = fields.interval("sliding_window_pattern", 6)
    windows = fields.windows(fields.whole_or("sliding_window", 4096), lambda layer: (layer + 1) % every != 0)
    head_dim = fields.whole_or("head_dim", 256)
    whole = fields.rotary(head_dim, layer_type="full_attention", theta=1_000_000.0)
    sliding = fields.rotary(head_dim, layer_type="sliding_attention", theta=10_000.0)
    layers = [
        LayerConfig(
            attention=fields.attention(
                head_dim=256,
                rotary=whole if window is None else sliding,
                window=window,
                scale=_scale(fields),
                has_bias=has_bias,
                has_output_bias=has_bias,
                qk_norm="head",
            ),
            mlp=_mlp(fields),
            has_output_norms=True,
        )
        for window in windows
    ]
    return _described(fields, "gemma3", layers, logit_cap=fields.number_or("final_logit_softcapping", None))


def _mlp_of_first(fields: ModelFields) -> MlpConfig:
    """Read hidden_act. Gemma 1 was published with "gelu" there, but computes the tanh approximation."""
    activation = fields.activation("hidden_act", default="gelu_pytorch_tanh")
    activation = "gelu_tanh" if activation == "gelu" else activation
    # transformers 5 ignores hidden_activation, but earlier versions and vLLM use it. So the two fields must agree.
    if "hidden_activation" in fields and fields.activation("hidden_activation", default="") != activation:
        raise fields.wrong(
            "hidden_activation", f"the same function as hidden_act, {fields.shown('hidden_act')}, or null"
        )
    return fields.mlp(activation=activation)


def _mlp(fields: ModelFields) -> MlpConfig:
    """Read hidden_activation. transformers ignores hidden_act in these models."""
    fields.text_or("hidden_act", None)
    return fields.mlp(activation=fields.activation("hidden_activation", default="gelu_pytorch_tanh"))


def _scale(fields: ModelFields) -> float:
    heads = fields.whole("num_attention_heads")
    of_27b = fields.whole("hidden_size") // max(heads, 1)
    default = of_27b if fields.layer_count in LAYERS_OF_27B else fields.whole_or("head_dim", 256)
    scalar = fields.number_or("query_pre_attn_scalar", float(default))
    if not scalar > 0:
        raise fields.wrong("query_pre_attn_scalar", "above 0")
    return 1.0 / math.sqrt(scalar)


def _described(
    fields: ModelFields, family: str, layers: list[LayerConfig], logit_cap: float | None = None
) -> ModelConfig:
    return fields.described(
        family,
        layers,
        context_tokens_max=fields.whole("max_position_embeddings"),  # already includes the rope scaling
        embedding_scale=math.sqrt(max(fields.whole("hidden_size"), 0)),
        logit_cap=logit_cap,
        tie_word_embeddings=fields.flag_or("tie_word_embeddings", True),
    )


GEMMA = Family(
    name="gemma",
    classes=("GemmaForCausalLM",),
    model_type="gemma",
    defaults={"num_key_value_heads": 16},
    describe=_describe_gemma,
    transformers=Naming(norm_offset=1.0),
    gguf=GgufNaming(architecture="gemma"),
)
GEMMA2 = Family(
    name="gemma2",
    classes=("Gemma2ForCausalLM",),
    model_type="gemma2",
    defaults={"query_pre_attn_scalar": 256},
    notes=("sliding_window_size",),
    describe=_describe_gemma2,
    transformers=Naming(norm_offset=1.0, modules=MODULES),
    gguf=GgufNaming(architecture="gemma2"),
)
GEMMA3 = Family(
    name="gemma3",
    classes=("Gemma3ForCausalLM",),
    model_type="gemma3_text",
    defaults={"query_pre_attn_scalar": 256},
    describe=_describe_gemma3,
    transformers=Naming(norm_offset=1.0, modules=MODULES),
    gguf=GgufNaming(architecture="gemma3"),
    with_images=("Gemma3ForConditionalGeneration",),
    text_defaults={
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131_072,
        "bos_token_id": 2,
    },
)
