"""Llama 2 to 3.3, models with the same config (SmolLM2, Falcon 3, Yi, TinyLlama and many more), and close variants."""

from __future__ import annotations

from dataclasses import replace

from trioserve.model.families.family import SHARED_EXPERTS, Family, GgufNaming, Naming
from trioserve.model.families.model_fields import ModelFields, windowed_layers, with_axes
from trioserve.model.layer_config import LayerConfig
from trioserve.model.model_config import ModelConfig

__all__ = ["LLAMA", "CWM", "ERNIE45", "ERNIE45_MOE", "HELIUM", "INTERNLM3", "PADDLEOCR_VL", "SEED_OSS", "SMOLLM3"]


def _describe_llama(fields: ModelFields) -> ModelConfig:
    # InternLM 1 and Pangu Embedded call this field `bias`.
    has_bias = fields.flag_or("attention_bias", fields.flag_or("bias", False))
    has_output_bias = fields.flag_or("attention_output_bias", has_bias)
    attention = fields.attention(has_bias=has_bias, has_output_bias=has_output_bias)
    mlp = fields.mlp(has_bias=fields.flag_or("mlp_bias", False))
    # In llama.cpp's files, a Mistral with a sliding window has the architecture "llama".
    windows = fields.windows(fields.whole_or("sliding_window", None) or None, lambda layer: True)
    return fields.described("llama", windowed_layers(attention, mlp, windows))


LLAMA = Family(
    name="llama",
    # transformers computes all these classes as Llamas, some with code of the checkpoint's authors.
    classes=(
        *("LlamaForCausalLM", "LLaMAForCausalLM", "AquilaForCausalLM", "AquilaModel", "InternLMForCausalLM"),
        *("IQuestCoderForCausalLM", "PanguEmbeddedForCausalLM", "XverseForCausalLM"),
    ),
    model_type="llama",
    notes=("is_llama_config", "perceiver_config", "pixel_shuffle_factor"),
    describe=_describe_llama,
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


def _describe_cwm(fields: ModelFields) -> ModelConfig:
    """Describe Code World Model: a Llama in which three of four layers have a sliding window."""
    attention = fields.attention(head_dim=128)
    mlp = fields.mlp(has_bias=fields.flag_or("mlp_bias", False))
    windows = fields.windows(fields.whole_or("sliding_window", 8192), lambda layer: layer % 4 != 0)
    return fields.described("cwm", windowed_layers(attention, mlp, windows))


CWM = Family(
    name="cwm",
    classes=("CwmForCausalLM",),
    model_type="cwm",
    defaults={
        "num_key_value_heads": 8,
        "rope_theta": 1_000_000.0,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1_000_000.0,
            "factor": 16.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
    },
    describe=_describe_cwm,
)


def _describe_ernie(fields: ModelFields, *, reads_images: bool = False) -> ModelConfig:
    """Describe the dense ERNIE 4.5, a Llama with other names and defaults, or the language model of PaddleOCR-VL."""
    # The GGUF reader sets attention_bias if the file has bias tensors.
    has_bias = fields.flag_or("use_bias", fields.flag_or("attention_bias", False))
    attention = fields.attention(head_dim=128, has_bias=has_bias, has_output_bias=has_bias)
    if reads_images:
        attention = with_axes(fields, attention, (16, 24, 24))
    layer = LayerConfig(attention=attention, mlp=fields.mlp(has_bias=has_bias))
    return fields.described(
        "paddleocr_vl" if reads_images else "ernie4_5",
        (layer,) * fields.layer_count,
        tie_word_embeddings=fields.flag_or("tie_word_embeddings", True),
    )


ERNIE45 = Family(
    name="ernie4_5",
    classes=("Ernie4_5ForCausalLM",),
    model_type="ernie4_5",
    defaults={"num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0},
    describe=_describe_ernie,
    transformers=Naming(pairs_adjacent=True),
    gguf=GgufNaming(architecture="ernie4_5", pairs_adjacent=True),
)
PADDLEOCR_VL = replace(
    ERNIE45,
    name="paddleocr_vl",
    classes=(),
    model_type="paddleocr_vl_text",
    describe=lambda fields: _describe_ernie(fields, reads_images=True),
    transformers=Naming(),
    gguf=None,
    with_images=("PaddleOCRVLForConditionalGeneration",),
)


def _describe_ernie_moe(fields: ModelFields) -> ModelConfig:
    """Describe ERNIE 4.5 with experts, which are chosen by softmax scores plus a bias."""
    if fields.flag_or("use_bias", False):
        raise fields.wrong("use_bias", "false for this family")
    if not 0 <= fields.number_or("moe_norm_min", 1e-12) <= 1e-9:
        raise fields.wrong("moe_norm_min", "0 to 1e-9")  # A larger number would change the sum of a token's weights.
    middle = fields.whole("moe_intermediate_size")
    experts = fields.experts(
        "num_experts",
        middle,
        normalizes=True,
        has_score_bias=True,
        shared_size=middle * fields.whole_or("n_shared_experts", 2),
    )
    first, last = fields.whole_or("first_k_dense_replace", 1), fields.whole_or("moe_layer_end_index", -1)
    last = fields.layer_count - 1 if last == -1 else last
    every = fields.interval("interleave_moe_layer_step", 1)
    attention, mlp = fields.attention(), fields.mlp()
    layers = [
        LayerConfig(attention=attention, mlp=experts if first <= index <= last and (index + 1) % every == 0 else mlp)
        for index in range(fields.layer_count)
    ]
    return fields.described("ernie4_5_moe", layers, tie_word_embeddings=fields.flag_or("tie_word_embeddings", True))


ERNIE45_MOE = Family(
    name="ernie4_5_moe",
    classes=("Ernie4_5_MoeForCausalLM",),
    model_type="ernie4_5_moe",
    spellings={
        "num_experts": "moe_num_experts",
        "num_experts_per_tok": "moe_k",
        "n_shared_experts": "moe_num_shared_experts",
        "first_k_dense_replace": "moe_layer_start_index",
        "interleave_moe_layer_step": "moe_layer_interval",
    },
    defaults={"num_key_value_heads": 4, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0},
    describe=_describe_ernie_moe,
    transformers=Naming(
        modules={**SHARED_EXPERTS, "router.score_bias": "mlp.moe_statics.e_score_correction_bias"}, pairs_adjacent=True
    ),
    gguf=GgufNaming(architecture="ernie4_5-moe", pairs_adjacent=True),
)


def _describe_helium(fields: ModelFields) -> ModelConfig:
    """Describe Helium: a Llama whose rotary embeddings rotate adjacent pairs."""
    attention = fields.attention(head_dim=128, has_bias=fields.flag_or("attention_bias", False))
    layer = LayerConfig(attention=attention, mlp=fields.mlp(has_bias=fields.flag_or("mlp_bias", False)))
    norm_eps = fields.number_or("rms_norm_eps", 1e-8)
    return fields.described("helium", (layer,) * fields.layer_count, norm_eps=norm_eps)


HELIUM = Family(
    name="helium",
    classes=("HeliumForCausalLM",),
    model_type="helium",
    defaults={"num_key_value_heads": 20, "rope_theta": 100_000.0},
    describe=_describe_helium,
    transformers=Naming(pairs_adjacent=True),
)


def _describe_internlm(fields: ModelFields) -> ModelConfig:
    """Describe InternLM 3: a Llama with different names for its bias fields. llama.cpp stores the model as a Llama."""
    # Published configs use `bias` and `qkv_bias`. transformers saves `mlp_bias` and `attention_bias`.
    has_bias = fields.flag_or("bias", fields.flag_or("mlp_bias", False))
    attention = fields.attention(
        has_bias=fields.flag_or("qkv_bias", fields.flag_or("attention_bias", False)), has_output_bias=has_bias
    )
    layer = LayerConfig(attention=attention, mlp=fields.mlp(has_bias=has_bias))
    return fields.described("internlm3", (layer,) * fields.layer_count)


INTERNLM3 = Family(
    name="internlm3",
    classes=("InternLM3ForCausalLM",),
    model_type="internlm3",
    describe=_describe_internlm,
)


def _describe_seed(fields: ModelFields) -> ModelConfig:
    """Describe Seed-OSS: a Llama with biases on the projections of queries, keys and values."""
    attention = fields.attention(
        head_dim=128,
        has_bias=fields.flag_or("attention_bias", True),
        has_output_bias=fields.flag_or("attention_out_bias", False),
    )
    layer = LayerConfig(attention=attention, mlp=fields.mlp(has_bias=fields.flag_or("mlp_bias", False)))
    return fields.described("seed_oss", (layer,) * fields.layer_count)


SEED_OSS = Family(
    name="seed_oss",
    classes=("SeedOssForCausalLM",),
    model_type="seed_oss",
    defaults={"num_key_value_heads": 8},
    describe=_describe_seed,
    gguf=GgufNaming(architecture="seed_oss", modules={"mlp_norm": "post_attention_norm"}),
)


def _describe_smollm3(fields: ModelFields) -> ModelConfig:
    """Describe SmolLM3: a Llama in which every fourth layer has no position embeddings."""
    has_positions = fields.layers_with_positions()
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
    describe=_describe_smollm3,
    gguf=GgufNaming(architecture="smollm3", pairs_adjacent=True),
)
