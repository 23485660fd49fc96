"""Gemma 1, 2 and 3, texts only: scaled embeddings, and norms that add 1 to their weights. In 2 and 3 there are norms
behind attention and MLP, too, and layers with windows; 2 caps scores, 3 norms heads and turns slower without a window.
"""

from __future__ import annotations

import math

from trioserve.model.families.family import Family, GgufNaming, Naming
from trioserve.model.families.model_fields import ModelFields
from trioserve.model.model_config import LayerConfig, MlpConfig, ModelConfig

__all__ = ["GEMMA", "GEMMA2", "GEMMA3"]

# Models of 27 billion parameters scale by the hidden size's share of a head. llama.cpp tells them by their layers.
LAYERS_OF_27B = (46, 62)
# GGUF files have the 1 in the weights already.
MODULES = {"mlp_norm": "pre_feedforward_layernorm"}


def _describe_gemma(fields: ModelFields) -> ModelConfig:
    has_bias = fields.flag_or("attention_bias", False)
    attention = fields.attention(head_dim=256, has_bias=has_bias, has_output_bias=has_bias)
    layer = LayerConfig(attention=attention, mlp=_mlp_of_first(fields))
    return _described(fields, "gemma", [layer] * fields.layer_count)


def _describe_gemma2(fields: ModelFields) -> ModelConfig:
    has_bias = fields.flag_or("attention_bias", False)
    windows = fields.windows(fields.whole_or("sliding_window", 4096), lambda layer: layer % 2 == 0)
    cap = fields.number_if_said("attn_logit_softcapping", 50.0)
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
    return _described(fields, "gemma2", layers, logit_cap=fields.number_if_said("final_logit_softcapping", 30.0))


def _describe_gemma3(fields: ModelFields) -> ModelConfig:
    has_bias = fields.flag_or("attention_bias", False)
    fields.number_or("attn_logit_softcapping", None)  # read and not used, as in transformers
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
    """By hidden_act. Gemma 1 was published with gelu there, and computes the approximation nevertheless."""
    activation = fields.activation("hidden_act", default="gelu_pytorch_tanh")
    activation = "gelu_tanh" if activation == "gelu" else activation
    # transformers 5 does not read it, and earlier versions and vLLM compute by it.
    if "hidden_activation" in fields and fields.activation("hidden_activation", default="") != activation:
        raise fields.wrong("hidden_activation", f"what hidden_act, {fields.shown('hidden_act')}, means, or null")
    return fields.mlp(activation=activation)


def _mlp(fields: ModelFields) -> MlpConfig:
    """By hidden_activation. hidden_act is a note beside it, which transformers does not read."""
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
        context_tokens_max=fields.whole("max_position_embeddings"),  # with the scaling already
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
