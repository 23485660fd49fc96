"""Gemma 1, 2, 3 and 3n (language models only): scaled embeddings, and norms that add 1 to their weights.

Gemma 2 and 3 also have norms after attention and MLP, and layers with sliding windows. Gemma 2 caps attention scores.
Gemma 3 normalizes heads, and its layers without a window use a larger theta.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import TypeVar

from trioserve.model.families.family import Family, GgufNaming, Naming
from trioserve.model.families.model_fields import ModelFields
from trioserve.model.layer_config import AttentionConfig, LayerConfig, MlpConfig, check_count
from trioserve.model.model_config import STREAMS_MAX, ModelConfig, StreamsConfig

__all__ = ["GEMMA", "GEMMA2", "GEMMA3", "GEMMA3N", "MODULES", "layers_of_shared_kv"]

# Models with 27 billion parameters divide scores by the square root of hidden_size / heads, not of head_dim. llama.cpp
# recognizes these models by their number of layers.
LAYERS_OF_27B = (46, 62)
# GGUF files need no norm_offset, because llama.cpp adds the 1 to the weights when it writes a file.
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
    fields.number_or("attn_logit_softcapping", None)  # The field is ignored, as in transformers.
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
    """Read hidden_act. Gemma 1 computes the tanh approximation of GELU, although its published configs say "gelu"."""
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
        context_tokens_max=fields.whole("max_position_embeddings"),  # This value already includes the rope scaling.
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


# If the config has no sparsity pattern, this fraction of gates is set to 0 in this number of first layers.
SPARSE_LAYERS, SPARSITY = 10, 0.95
Number = TypeVar("Number", int, float)


def _describe_gemma3n(fields: ModelFields) -> ModelConfig:
    """Describe the language model of Gemma 3n.

    The hidden state has several streams (AltUp). Each layer adds its own embedding of every token. The last layers read
    keys and values of an earlier layer. The first MLPs keep only the largest gates of a row. A low-rank product runs
    parallel to attention (LAuReL).
    """
    attentions = _attentions(fields)
    mlps = _mlps(fields)
    rank = fields.interval("laurel_rank", 64)
    return fields.described(
        "gemma3n",
        [
            LayerConfig(attention=attention, mlp=mlp, has_output_norms=True, laurel_rank=rank)
            for attention, mlp in zip(attentions, mlps, strict=True)
        ],
        context_tokens_max=fields.whole("max_position_embeddings"),
        embedding_scale=float(max(fields.whole("hidden_size"), 0)) ** 0.5,
        logit_cap=fields.number_unless_null("final_logit_softcapping", 30.0),
        tie_word_embeddings=fields.flag_or("tie_word_embeddings", True),
        streams=StreamsConfig(
            count=_stream_count(fields),
            active=fields.whole_or("altup_active_idx", 0),
            has_scale=fields.flag_or("altup_correct_scale", True),
            input_size=fields.whole_or("hidden_size_per_layer_input", 256),
            input_vocab_size=fields.whole_or("vocab_size_per_layer_input", 262_144),
        ),
    )


def _attentions(fields: ModelFields) -> list[AttentionConfig]:
    has_bias = fields.flag_or("attention_bias", False)
    windows = fields.windows(fields.whole_or("sliding_window", 512), lambda layer: (layer + 1) % 5 != 0)
    head_dim = fields.whole_or("head_dim", 256)
    whole = fields.rotary(head_dim, layer_type="full_attention", theta=1_000_000.0)
    sliding = fields.rotary(head_dim, layer_type="sliding_attention", theta=10_000.0)
    return [
        fields.attention(
            head_dim=256,
            rotary=whole if window is None else sliding,
            window=window,
            scale=1.0,
            has_bias=has_bias,
            has_output_bias=has_bias,
            qk_norm="head",
            has_value_norm=True,
            kv_from=kv_from,
        )
        for window, kv_from in zip(windows, layers_of_shared_kv(fields, windows, 15), strict=True)
    ]


def layers_of_shared_kv(fields: ModelFields, windows: Sequence[int | None], default: int) -> list[int | None]:
    """Return the layer whose KV each layer reads, None for layers with their own KV.

    The last layers have no KV. A layer with a sliding window reads the KV of the last such layer that has KV. The
    others, which have full attention, read the KV of the last full-attention layer that has KV.

    Args:
        windows: sliding window of each layer, None for full attention.
        default: number of layers without KV if the file does not contain it.
    """
    first_shared = fields.layer_count - fields.whole_or("num_kv_shared_layers", default)
    if not 1 <= first_shared <= fields.layer_count:
        raise fields.wrong("num_kv_shared_layers", f"0 to {fields.layer_count - 1}, less than there are layers")
    last = {window: index for index, window in enumerate(windows[:first_shared])}
    if unknown := set(windows) - set(last):
        kind = "full" if None in unknown else "sliding"
        raise fields.wrong("num_kv_shared_layers", f"so few that a layer with {kind} attention is left before them")
    return [None if index < first_shared else last[window] for index, window in enumerate(windows)]


def _stream_count(fields: ModelFields) -> int:
    count = fields.whole_or("altup_num_inputs", 4)
    check_count("altup_num_inputs", count, STREAMS_MAX, 2)
    return count


def _mlps(fields: ModelFields) -> list[MlpConfig]:
    sizes = _of_layers(fields, "intermediate_size", fields.wholes("intermediate_size"))
    fields.text_or("hidden_act", None)  # The field is ignored, as in Gemma 2.
    if fields.activation("hidden_activation", default="gelu_pytorch_tanh") != "gelu_tanh":
        raise fields.wrong("hidden_activation", "'gelu_pytorch_tanh'")
    return [
        MlpConfig(intermediate_size=size, activation="gelu_tanh", cutoff=cutoff)
        for size, cutoff in zip(sizes, _cutoffs(fields), strict=True)
    ]


def _cutoffs(fields: ModelFields) -> list[float | None]:
    """Return the cutoff of each layer's gates, None for layers that keep all gates.

    GGUF files contain the cutoffs. A config contains the fraction of gates that become 0. The function converts the
    fraction to a cutoff under the assumption that gates are normally distributed.
    """
    if "activation_sparsity_scale" in fields:
        scales = _of_layers(fields, "activation_sparsity_scale", fields.numbers("activation_sparsity_scale"))
        return [scale if scale > float("-inf") else None for scale in scales]
    shares: list[float] = [0.0] * fields.layer_count
    if "activation_sparsity_pattern" in fields:
        shares = _of_layers(fields, "activation_sparsity_pattern", fields.numbers("activation_sparsity_pattern"))
    elif fields.layer_count > SPARSE_LAYERS:
        shares[:SPARSE_LAYERS] = [SPARSITY] * SPARSE_LAYERS
    if not all(0 <= share < 1 for share in shares):
        raise fields.wrong("activation_sparsity_pattern", "a list of numbers from 0 to below 1")
    return [NormalDist().inv_cdf(share) if share else None for share in shares]


def _of_layers(fields: ModelFields, name: str, found: Sequence[Number]) -> list[Number]:
    """Return one value for each layer. A single value is repeated for all layers."""
    if len(found) not in (1, fields.layer_count):
        raise fields.wrong(name, f"one number, or one for each of {fields.layer_count} layers")
    return list(found) * (fields.layer_count // len(found))


GEMMA3N = Family(
    name="gemma3n",
    classes=("Gemma3nForCausalLM",),
    model_type="gemma3n_text",
    defaults={"num_key_value_heads": 2},
    notes=("altup_coef_clip",),
    describe=_describe_gemma3n,
    transformers=Naming(modules=GEMMA3.transformers.modules),
    gguf=GgufNaming(architecture="gemma3n"),
    with_images=("Gemma3nForConditionalGeneration",),
    text_defaults={
        "vocab_size": 262_400,
        "hidden_size": 2048,
        "intermediate_size": 16_384,
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32_768,
        "bos_token_id": 2,
    },
)
