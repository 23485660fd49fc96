"""GPT-NeoX and its kin with MLPs without a gate: Persimmon, Phi 1 and 2, StarCoder 2, Nemotron, Arcee, Apertus.

The rows of GPT-NeoX's queries, keys and values are adjacent for each head.
"""

from __future__ import annotations

from typing import Any

from trioserve.model.families.family import Family, GgufNaming, Naming
from trioserve.model.families.model_fields import ModelFields, windowed_layers
from trioserve.model.layer_config import AttentionConfig, LayerConfig, MlpConfig, QkNorm
from trioserve.model.model_config import ModelConfig

__all__ = ["APERTUS", "ARCEE", "GPT_NEOX", "JAIS2", "NEMOTRON", "PERSIMMON", "PHI", "STABLELM", "STARCODER2"]


def _attention(fields: ModelFields, rotated_part: float = 1.0, **choices: Any) -> AttentionConfig:
    """Build the description of attention that rotates a part of each head.

    Args:
        fields: the fields of the checkpoint.
        rotated_part: rotated fraction of a head if the file does not contain it.
        choices: fields of AttentionConfig that are not read in the usual way.
    """
    head_dim = fields.head_dim()
    rotary = fields.rotary(head_dim, rotated_dims=fields.part_of_head(head_dim, rotated_part))
    return fields.attention(rotary=rotary, **choices)


def _described(fields: ModelFields, family: str, layer: LayerConfig, **choices: Any) -> ModelConfig:
    """Describe a model with equal layers, and norms that are LayerNorm with biases."""
    norm_eps = fields.number_or("layer_norm_eps", 1e-5)
    return fields.described(family, (layer,) * fields.layer_count, norm="layer_biased", norm_eps=norm_eps, **choices)


def _normed_heads(fields: ModelFields, default: bool) -> QkNorm:
    return "head" if fields.flag_or("qk_layernorm", default) else "none"


def _describe_neox(fields: ModelFields) -> ModelConfig:
    has_bias, is_parallel = fields.flag_or("attention_bias", True), fields.flag_or("use_parallel_residual", True)
    layer = LayerConfig(
        attention=_attention(
            fields, 0.25, kv_head_count=fields.whole("num_attention_heads"), has_bias=has_bias, has_output_bias=has_bias
        ),
        mlp=fields.plain_mlp("gelu", has_bias=True),
        is_parallel=is_parallel,
        has_own_mlp_norm=is_parallel,
    )
    return _described(fields, "gpt_neox", layer)


GPT_NEOX = Family(
    name="gpt_neox",
    classes=("GPTNeoXForCausalLM",),
    model_type="gpt_neox",
    spellings={"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"},
    describe=_describe_neox,
    transformers=Naming(
        layers="gpt_neox.layers",
        modules={
            "embed": "gpt_neox.embed_in",
            "norm": "gpt_neox.final_layer_norm",
            "lm_head": "embed_out",
            **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "attention.query_key_value"),
            "o_proj": "attention.dense",
            "up_proj": "mlp.dense_h_to_4h",
            "down_proj": "mlp.dense_4h_to_h",
        },
        grouped=("q_proj", "k_proj", "v_proj"),
        unread=("attention.bias", "attention.masked_bias"),
    ),
    gguf=GgufNaming(architecture="gptneox", modules=dict.fromkeys(("q_proj", "k_proj", "v_proj"), "attn_qkv")),
)


def _describe_persimmon(fields: ModelFields) -> ModelConfig:
    attention = _attention(
        fields,
        0.5,
        kv_head_count=fields.whole("num_attention_heads"),
        has_bias=True,
        has_output_bias=True,
        qk_norm=_normed_heads(fields, True),
    )
    return _described(
        fields, "persimmon", LayerConfig(attention=attention, mlp=fields.plain_mlp("relu2", has_bias=True))
    )


PERSIMMON = Family(
    name="persimmon",
    classes=("PersimmonForCausalLM",),
    model_type="persimmon",
    describe=_describe_persimmon,
    transformers=Naming(
        modules={
            "norm": "model.final_layernorm",
            **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "self_attn.query_key_value"),
            "q_norm": "self_attn.q_layernorm",
            "k_norm": "self_attn.k_layernorm",
            "o_proj": "self_attn.dense",
            "up_proj": "mlp.dense_h_to_4h",
            "down_proj": "mlp.dense_4h_to_h",
        },
        grouped=("q_proj", "k_proj", "v_proj"),
    ),
)


def _describe_phi(fields: ModelFields) -> ModelConfig:
    """Describe Phi 1, 1.5 and 2: the MLP reads the input of attention, and the head has a bias."""
    layer = LayerConfig(
        attention=_attention(fields, 0.5, has_bias=True, has_output_bias=True, qk_norm=_normed_heads(fields, False)),
        mlp=fields.plain_mlp("gelu_new", has_bias=True),
        is_parallel=True,
    )
    return _described(fields, "phi", layer, has_head_bias=True)


PHI = Family(
    name="phi",
    classes=("PhiForCausalLM",),
    model_type="phi",
    describe=_describe_phi,
    transformers=Naming(
        modules={
            "norm": "model.final_layernorm",
            "q_norm": "self_attn.q_layernorm",
            "k_norm": "self_attn.k_layernorm",
            "o_proj": "self_attn.dense",
            "up_proj": "mlp.fc1",
            "down_proj": "mlp.fc2",
        }
    ),
    gguf=GgufNaming(architecture="phi2"),
)


def _describe_starcoder(fields: ModelFields) -> ModelConfig:
    has_bias = fields.flag_or("use_bias", fields.flag_or("attention_bias", True))
    attention = fields.attention(has_bias=has_bias, has_output_bias=has_bias)
    windows = fields.windows(fields.whole_or("sliding_window", None) or None, lambda layer: True)
    return fields.described(
        "starcoder2",
        windowed_layers(attention, fields.plain_mlp("gelu_pytorch_tanh", has_bias=has_bias), windows),
        norm="layer_biased",
        norm_eps=fields.number_or("layer_norm_eps", 1e-5),
        tie_word_embeddings=fields.flag_or("tie_word_embeddings", True),
    )


STARCODER2 = Family(
    name="starcoder2",
    classes=("Starcoder2ForCausalLM",),
    model_type="starcoder2",
    spellings={"layer_norm_eps": "norm_epsilon"},
    defaults={"num_key_value_heads": 2},
    describe=_describe_starcoder,
    transformers=Naming(modules={"up_proj": "mlp.c_fc", "down_proj": "mlp.c_proj"}),
    gguf=GgufNaming(architecture="starcoder2"),
)


def _describe_nemotron(fields: ModelFields) -> ModelConfig:
    has_bias = fields.flag_or("attention_bias", False)
    layer = LayerConfig(
        attention=_attention(fields, 0.5, has_bias=has_bias, has_output_bias=has_bias),
        mlp=fields.plain_mlp("relu2", has_bias=fields.flag_or("mlp_bias", False)),
    )
    return _described(fields, "nemotron", layer)


NEMOTRON = Family(
    name="nemotron",
    classes=("NemotronForCausalLM",),
    model_type="nemotron",
    spellings={"layer_norm_eps": "norm_eps"},
    describe=_describe_nemotron,
    transformers=Naming(norm_offset=1.0),  # transformers adds 1 to the weights of all norms.
    gguf=GgufNaming(architecture="nemotron"),
)


def _describe_jais2(fields: ModelFields) -> ModelConfig:
    """Describe Jais 2: a Llama with LayerNorm and biases, whose MLP has no gate and squares relu."""
    has_bias = fields.flag_or("attention_bias", True)
    layer = LayerConfig(
        attention=fields.attention(has_bias=has_bias, has_output_bias=has_bias),
        mlp=fields.plain_mlp("relu2", has_bias=fields.flag_or("mlp_bias", True)),
    )
    return _described(fields, "jais2", layer)


JAIS2 = Family(
    name="jais2",
    classes=("Jais2ForCausalLM",),
    model_type="jais2",
    describe=_describe_jais2,
)


def _describe_arcee(fields: ModelFields) -> ModelConfig:
    """Describe Arcee (AFM): a Llama whose MLP has no gate and squares relu."""
    has_bias = fields.flag_or("attention_bias", False)
    layer = LayerConfig(
        attention=fields.attention(has_bias=has_bias, has_output_bias=has_bias),
        mlp=fields.plain_mlp("relu2", has_bias=fields.flag_or("mlp_bias", False)),
    )
    return fields.described("arcee", (layer,) * fields.layer_count)


ARCEE = Family(
    name="arcee",
    classes=("ArceeForCausalLM",),
    model_type="arcee",
    defaults={"rms_norm_eps": 1e-5},
    describe=_describe_arcee,
    gguf=GgufNaming(architecture="arcee"),
)


def _describe_apertus(fields: ModelFields) -> ModelConfig:
    """Describe Apertus: normed heads, and an MLP whose activation has numbers of its own."""
    if (name := fields.text_or("hidden_act", "xielu")) != "xielu":
        raise fields.wrong("hidden_act", f"'xielu' for this family, and not {name!r}")
    has_bias = fields.flag_or("attention_bias", False)
    attention = fields.attention(has_bias=has_bias, has_output_bias=has_bias, qk_norm="head")
    mlp = MlpConfig(intermediate_size=fields.whole("intermediate_size"), activation="xielu", has_gate=False)
    return fields.described("apertus", (LayerConfig(attention=attention, mlp=mlp),) * fields.layer_count)


APERTUS = Family(
    name="apertus",
    classes=("ApertusForCausalLM",),
    model_type="apertus",
    notes=("post_norm", "qk_norm"),
    defaults={
        "rms_norm_eps": 1e-5,
        "rope_theta": 12_000_000.0,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 12_000_000.0,
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
    },
    describe=_describe_apertus,
    transformers=Naming(modules={"attention_norm": "attention_layernorm", "mlp_norm": "feedforward_layernorm"}),
)


def _describe_stablelm(fields: ModelFields) -> ModelConfig:
    """Describe StableLM: a Llama with LayerNorm that rotates a quarter of each head."""
    layer = LayerConfig(
        attention=_attention(
            fields,
            0.25,
            has_bias=fields.flag_or("use_qkv_bias", fields.flag_or("attention_bias", False)),
            qk_norm="each" if fields.flag_or("qk_layernorm", False) else "none",
        ),
        mlp=fields.mlp(activation=fields.activation("hidden_act", default="silu")),
        is_parallel=fields.flag_or("use_parallel_residual", False),
    )
    return _described(fields, "stablelm", layer)


STABLELM = Family(
    name="stablelm",
    classes=("StableLmForCausalLM", "StableLMEpochForCausalLM"),
    model_type="stablelm",
    spellings={"layer_norm_eps": "norm_eps", "partial_rotary_factor": "rope_pct"},
    defaults={"num_key_value_heads": 32},
    describe=_describe_stablelm,
    transformers=Naming(
        modules={f"heads.{part}_norm": f"self_attn.{part}_layernorm.norms.{{head}}" for part in "qk"},
    ),
    gguf=GgufNaming(architecture="stablelm"),
)
