"""DeepSeek-V2 and V3 and their relatives: latent attention, and experts that are chosen from groups.

MiniCPM3 has latent attention without experts. GLM-4.7-Flash is built like V3.

dots.llm1 has the experts of V3 and ordinary attention.

Most layers of Kimi Linear have a gated delta rule. Its latent attention ignores positions.

A layer of LongCat-Flash has two attentions and two MLPs, and experts whose result is added at its end. It is described
as two layers.

DeepSeek-V3.2 and GLM-5 have an indexer, which selects the tokens of a context that attention reads. It selects all
tokens of a context of up to `index_topk` tokens. If no longer context is served, the indexer is not read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from trioserve.model.families.family import SHARED_EXPERTS, Family, GgufNaming, Naming
from trioserve.model.families.model_fields import ModelFields
from trioserve.model.layer_config import (
    DeltaNetConfig,
    ExpertsConfig,
    IndexerConfig,
    LatentAttentionConfig,
    LayerConfig,
    MlpConfig,
)
from trioserve.model.model_config import ModelConfig, RowFactors

__all__ = [
    "AXK1",
    "DEEPSEEK",
    "DEEPSEEK_V2",
    "DEEPSEEK_V3",
    "DEEPSEEK_V32",
    "DOTS1",
    "GLM4_MOE_LITE",
    "GLM_MOE_DSA",
    "KIMI_LINEAR",
    "KIMI_LINEAR_SAVED",
    "LONGCAT_FLASH",
    "MINICPM",
    "MINICPM3",
    "SARVAM_MLA",
]


def _attention(fields: ModelFields, *, has_positions: bool = True) -> LatentAttentionConfig:
    for name in ("attention_bias", "mlp_bias"):
        if fields.flag_or(name, False):
            raise fields.wrong(name, "false for this family")
    plain, rotated = fields.whole("qk_nope_head_dim"), fields.whole("qk_rope_head_dim")
    if rotated < 1 or plain < 1:
        raise fields.wrong("qk_rope_head_dim" if rotated < 1 else "qk_nope_head_dim", "at least 1")
    head_count = fields.whole("num_attention_heads")
    if fields.whole_or("num_key_value_heads", head_count) not in (1, head_count):
        raise fields.wrong("num_key_value_heads", f"{head_count} with latent attention")
    value = fields.whole_or("v_head_dim", fields.whole("hidden_size") // max(head_count, 1))
    # transformers computes the rotation angles from head_dim. Other programs write a different size into this field.
    found, latent = fields.whole_or("head_dim", rotated), fields.whole("kv_lora_rank")
    usual = (
        rotated,
        latent + rotated,
        plain + rotated,
        plain,
        value,
        fields.whole("hidden_size") // max(head_count, 1),
    )
    if found not in usual:
        raise fields.wrong("head_dim", f"{rotated} as qk_rope_head_dim, or left out")
    factor = fields.latent_score_factor() if has_positions else 1.0
    return LatentAttentionConfig(
        head_count=head_count,
        query_rank=fields.whole_or("q_lora_rank", None) or None,
        latent_dim=latent,
        plain_dim=plain,
        turned_dim=rotated,
        value_dim=value,
        rotary=fields.rotary(rotated) if has_positions else None,
        scale=factor / math.sqrt(plain + rotated),
    )


def _describe_v2(fields: ModelFields) -> ModelConfig:
    method = fields.text_or("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise fields.wrong("topk_method", "'greedy' or 'group_limited_greedy' for this family")
    if fields.flag_or("norm_topk_prob", False):
        raise fields.wrong("norm_topk_prob", "false for this family")
    groups = {"group_count": 1, "groups_per_token": 1} if method == "greedy" else {}
    return _described(fields, "deepseek_v2", fields.routed_mlps("softmax", **groups))


def _describe_v3(fields: ModelFields) -> ModelConfig:
    return _described(fields, "deepseek_v3", fields.routed_by_sigmoid())


def _describe_glm(fields: ModelFields) -> ModelConfig:
    mlps = fields.routed_by_sigmoid(dense_count=1)
    return _described(fields, "glm4_moe_lite", mlps, norm_eps=fields.number_or("rms_norm_eps", 1e-5))


def _described(fields: ModelFields, family: str, mlps: list[MlpConfig | ExpertsConfig], **choices: Any) -> ModelConfig:
    if not fields.flag_or("rope_interleave", True):
        raise fields.wrong("rope_interleave", "true for this family")
    attention = _attention(fields)
    return fields.described(family, [LayerConfig(attention=attention, mlp=mlp) for mlp in mlps], **choices)


def _describe_v32(fields: ModelFields) -> ModelConfig:
    return _described_indexed(fields, "deepseek_v32", norm_eps=1e-6, has_adjacent_pairs=False)


def _describe_glm_dsa(fields: ModelFields) -> ModelConfig:
    return _described_indexed(fields, "glm_moe_dsa", norm_eps=1e-5, has_adjacent_pairs=True)


def _described_indexed(fields: ModelFields, family: str, norm_eps: float, has_adjacent_pairs: bool) -> ModelConfig:
    """Describe a model whose attention reads the tokens that an indexer selects.

    Args:
        norm_eps: epsilon of the norms if the file does not contain it.
        has_adjacent_pairs: see IndexerConfig, if the file does not contain it.
    """
    if not {"indexed_attention"}.issuperset(fields.strings_or("layer_types", [])):
        raise fields.wrong("layer_types", "a list of 'indexed_attention'")
    eps = fields.number_or("rms_norm_eps", norm_eps)
    config = _described(fields, family, fields.routed_by_sigmoid(dense_count=3), norm_eps=eps)
    indexer = IndexerConfig(
        head_count=fields.whole("index_n_heads"),
        head_dim=fields.whole_or("index_head_dim", 128),
        token_count=fields.whole_or("index_topk", 2048),
        has_adjacent_pairs=fields.flag_or("indexer_rope_interleave", has_adjacent_pairs),
    )
    selects = _selecting_layers(fields)
    served = config.context_tokens_max if fields.served_tokens is None else fields.served_tokens
    if served <= indexer.token_count:
        return config
    if fields.is_null("q_lora_rank"):
        raise fields.wrong("q_lora_rank", "a whole number for this family")
    layers = []
    for layer, own in zip(config.layers, selects, strict=True):
        assert isinstance(layer.attention, LatentAttentionConfig), "all layers of this family have latents"
        attention = msgspec.structs.replace(
            layer.attention, indexer=indexer if own else None, has_selected_tokens=not own
        )
        layers.append(msgspec.structs.replace(layer, attention=attention))
    return msgspec.structs.replace(config, layers=tuple(layers))


def _selecting_layers(fields: ModelFields) -> list[bool]:
    """Return True for each layer with an indexer. Another layer uses the tokens that an earlier layer selects."""
    count, pattern = fields.layer_count, fields.strings_or_text("index_topk_pattern")
    kinds = fields.strings_or("indexer_types", None) or [
        {"F": "full", "S": "shared"}.get(kind, kind) for kind in pattern
    ]
    if not kinds:
        interval, offset = max(fields.whole_or("index_topk_freq", 1), 1), fields.whole_or("index_skip_topk_offset", 2)
        kinds = ["shared" if max(index - offset + 1, 0) % interval else "full" for index in range(count)]
    if len(kinds) < count or kinds[0] != "full" or not {"full", "shared"}.issuperset(kinds):
        raise fields.wrong("indexer_types", "one of 'full' and 'shared' for each layer, 'full' for the first layer")
    return [kind == "full" for kind in kinds[:count]]


def _describe_v1(fields: ModelFields) -> ModelConfig:
    """Describe DeepSeek-MoE of 2024: attention of a Llama, and experts that are not in groups."""
    has_bias = fields.flag_or("attention_bias", False)
    attention = fields.attention(has_bias=has_bias, has_output_bias=has_bias)
    mlps = fields.routed_mlps("softmax")
    return fields.described("deepseek", [LayerConfig(attention=attention, mlp=mlp) for mlp in mlps])


def _describe_sarvam(fields: ModelFields) -> ModelConfig:
    return _described(fields, "sarvam_mla", fields.routed_by_sigmoid())


def _describe_axk1(fields: ModelFields) -> ModelConfig:
    """Describe A.X-K1: DeepSeek-V3 with a norm of the result of each mixture of experts."""
    if fields.is_null("q_lora_rank"):
        raise fields.wrong("q_lora_rank", "a whole number for this family")
    config = _described(fields, "axk1", fields.routed_by_sigmoid(dense_count=1))
    layers = (
        msgspec.structs.replace(layer, has_only_mlp_output_norm=layer.experts is not None) for layer in config.layers
    )
    return msgspec.structs.replace(config, layers=tuple(layers))


def _describe_minicpm(fields: ModelFields) -> ModelConfig:
    """Describe MiniCPM 1 and 2: a Llama with factors on embeddings, residual sums and logits."""
    layer = LayerConfig(
        attention=fields.attention(),
        mlp=fields.mlp(),
        residual_scale=fields.number("scale_depth") / math.sqrt(fields.layer_count),
    )
    return fields.described(
        "minicpm",
        (layer,) * fields.layer_count,
        embedding_scale=fields.number("scale_emb"),
        logit_scale=fields.number("dim_model_base") / max(fields.whole("hidden_size"), 1),
        tie_word_embeddings=fields.flag_or("tie_word_embeddings", True),
    )


def _describe_minicpm3(fields: ModelFields) -> ModelConfig:
    """Describe MiniCPM3, which scales residual sums by its number of layers and logits by its hidden size."""
    count, hidden = fields.layer_count, fields.whole("hidden_size")
    depth, base = fields.number_unless_null("scale_depth", 1.4), fields.number_unless_null("dim_model_base", 256.0)
    depth = math.sqrt(count) if depth is None else depth  # With null, residual_scale is 1.
    base = float(hidden) if base is None else base
    if not (base > 0 and depth > 0):
        raise fields.wrong("scale_depth" if base > 0 else "dim_model_base", "above 0")
    layer = LayerConfig(
        attention=_attention(fields),
        mlp=fields.mlp(),
        residual_scale=depth / math.sqrt(count),
    )
    return fields.described(
        "minicpm3",
        (layer,) * count,
        embedding_scale=fields.number_or("scale_emb", 12.0),
        logit_scale=base / max(hidden, 1),
        norm_eps=fields.number_or("rms_norm_eps", 1e-5),
        tie_word_embeddings=fields.flag_or("tie_word_embeddings", True),
    )


DEEPSEEK_V2 = Family(
    name="deepseek_v2",
    classes=("DeepseekV2ForCausalLM",),
    model_type="deepseek_v2",
    defaults={"q_lora_rank": 1536, "n_shared_experts": 2, "v_head_dim": 128},
    notes=("qk_head_dim",),
    describe=_describe_v2,
    transformers=Naming(modules=SHARED_EXPERTS, pairs_adjacent=True),
    gguf=GgufNaming(architecture="deepseek2", pairs_adjacent=True),
)
DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    classes=("DeepseekV3ForCausalLM",),
    model_type="deepseek_v3",
    defaults={
        "num_key_value_heads": 128,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "q_lora_rank": 1536,
        "v_head_dim": 128,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
    },
    notes=("qk_head_dim",),
    describe=_describe_v3,
    transformers=Naming(modules=SHARED_EXPERTS, pairs_adjacent=True),
    gguf=GgufNaming(architecture="deepseek2", pairs_adjacent=True),
)
GLM4_MOE_LITE = Family(
    name="glm4_moe_lite",
    classes=("Glm4MoeLiteForCausalLM",),
    model_type="glm4_moe_lite",
    defaults={
        "num_key_value_heads": 20,
        "n_shared_experts": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.8,
        "q_lora_rank": 768,
        "v_head_dim": 256,
        "norm_topk_prob": True,
    },
    notes=("qk_head_dim",),
    describe=_describe_glm,
    transformers=Naming(modules=SHARED_EXPERTS, pairs_adjacent=True),
)
AXK1 = replace(
    DEEPSEEK_V3,
    name="axk1",
    classes=("AXK1ForCausalLM",),
    model_type="axk1",
    defaults={
        **{name: value for name, value in DEEPSEEK_V3.defaults.items() if name != "first_k_dense_replace"},
        "num_key_value_heads": 64,
    },
    describe=_describe_axk1,
    transformers=Naming(modules={**SHARED_EXPERTS, "mlp_output_norm": "post_mlp_layernorm"}, pairs_adjacent=True),
    gguf=None,
)
# Some files have an indexer in every layer, also in layers that use the tokens of an earlier one.
_INDEXED = replace(
    DEEPSEEK_V3.transformers,
    unread=tuple(
        f"self_attn.indexer.{name}"
        for name in ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight")
    ),
)
_INDEXED_NOTES = ("qk_head_dim", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset")
DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    name="deepseek_v32",
    classes=("DeepseekV32ForCausalLM",),
    model_type="deepseek_v32",
    defaults={**DEEPSEEK_V3.defaults, "index_n_heads": 64},
    notes=_INDEXED_NOTES,
    describe=_describe_v32,
    transformers=_INDEXED,
    gguf=None,
)
GLM_MOE_DSA = replace(
    DEEPSEEK_V32,
    name="glm_moe_dsa",
    classes=("GlmMoeDsaForCausalLM",),
    model_type="glm_moe_dsa",
    defaults={
        **DEEPSEEK_V3.defaults,
        "num_key_value_heads": 64,
        "q_lora_rank": 2048,
        "v_head_dim": 256,
        "n_group": 1,
        "topk_group": 1,
        "index_n_heads": 32,
    },
    describe=_describe_glm_dsa,
    gguf=GgufNaming(
        architecture="glm-dsa",
        pairs_adjacent=True,
        unread=tuple(
            f"indexer.{name}"
            for name in ("attn_q_b.weight", "attn_k.weight", "k_norm.weight", "k_norm.bias", "proj.weight")
        ),
    ),
)
SARVAM_MLA = Family(
    name="sarvam_mla",
    classes=("SarvamMLAForCausalLM",),
    model_type="sarvam_mla",
    spellings={"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"},
    defaults={
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "v_head_dim": 128,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
    },
    notes=("q_head_dim", "qk_head_dim"),
    describe=_describe_sarvam,
    transformers=DEEPSEEK_V3.transformers,
)
DEEPSEEK = Family(
    name="deepseek",
    classes=("DeepseekForCausalLM",),
    model_type="deepseek",
    describe=_describe_v1,
    transformers=Naming(modules=SHARED_EXPERTS),
)
MINICPM = Family(
    name="minicpm",
    classes=("MiniCPMForCausalLM",),
    model_type="minicpm",
    describe=_describe_minicpm,
)
MINICPM3 = Family(
    name="minicpm3",
    classes=("MiniCPM3ForCausalLM",),
    model_type="minicpm3",
    defaults={"num_key_value_heads": 40, "q_lora_rank": 768},
    notes=("qk_head_dim",),
    describe=_describe_minicpm3,
    gguf=GgufNaming(architecture="minicpm3"),
)


def _describe_dots(fields: ModelFields) -> ModelConfig:
    """dots.llm1: a Qwen3 with mixtures of experts as in DeepSeek-V3 in all layers but the first."""
    has_bias = fields.flag_or("attention_bias", False)
    attention = fields.attention(has_bias=has_bias, has_output_bias=has_bias, qk_norm="head")
    first = fields.whole_or("max_window_layers", 62)
    windows = fields.windows(fields.whole_or("sliding_window", None) or None, lambda layer: layer >= first)
    layers = [
        LayerConfig(attention=msgspec.structs.replace(attention, window=window), mlp=mlp)
        for window, mlp in zip(windows, fields.routed_by_sigmoid(), strict=True)
    ]
    return fields.described("dots1", layers)


DOTS1 = Family(
    name="dots1",
    classes=("Dots1ForCausalLM",),
    model_type="dots1",
    defaults={"num_key_value_heads": 32, "topk_group": 1},
    describe=_describe_dots,
    transformers=Naming(modules=SHARED_EXPERTS),
    gguf=GgufNaming(architecture="dots1"),
)


def _describe_longcat(fields: ModelFields) -> ModelConfig:
    """Describe LongCat-Flash. The factors of its latents are part of the weights of their norms."""
    for name in ("router_bias", "norm_topk_prob"):
        if fields.flag_or(name, False):
            raise fields.wrong(name, "false for this family")
    identity_count = fields.whole_or("zero_expert_num", 256)
    if identity_count and (kind := fields.text_or("zero_expert_type", "identity")) != "identity":
        raise fields.wrong("zero_expert_type", f"'identity' for this family, and not {kind!r}")
    hidden, attention, mlp = fields.whole("hidden_size"), _attention(fields), fields.mlp()
    if attention.query_rank is None:
        raise fields.wrong("q_lora_rank", "at least 1 for this family")
    experts = fields.experts(
        "n_routed_experts",
        fields.whole_or("moe_intermediate_size", 2048),
        normalizes=False,
        scale=fields.number_or("routed_scaling_factor", 6.0),
        has_score_bias=True,
        identity_count=identity_count,
    )
    ranks = {"q": attention.query_rank, "kv": attention.latent_dim}
    factors = (
        RowFactors(name=f"{latent}_a_norm.weight", parts=((rank, math.sqrt(hidden / rank)),))
        for latent, rank in ranks.items()
        if fields.flag_or(f"mla_scale_{latent}_lora", True)
    )
    halves = (LayerConfig(attention=attention, mlp=mlp, shortcut=experts), LayerConfig(attention=attention, mlp=mlp))
    return fields.described(
        "longcat_flash",
        halves * fields.layer_count,
        norm_eps=fields.number_or("rms_norm_eps", 1e-5),
        row_factors=tuple(factors),
    )


LONGCAT_FLASH = Family(
    name="longcat_flash",
    classes=("LongcatFlashForCausalLM",),
    model_type="longcat_flash",
    spellings={
        "num_hidden_layers": "num_layers",
        "intermediate_size": "ffn_hidden_size",
        "moe_intermediate_size": "expert_ffn_hidden_size",
        "num_experts_per_tok": "moe_topk",
    },
    defaults={"q_lora_rank": 1536, "v_head_dim": 128, "head_dim": 64, "rope_theta": 10_000_000.0},
    notes=("attention_method", "mla_scale_kv_lora", "mla_scale_q_lora", "qk_head_dim"),
    describe=_describe_longcat,
    transformers=Naming(
        sublayers=2,
        modules={
            "attention_norm": "input_layernorm.{sublayer}",
            "mlp_norm": "post_attention_layernorm.{sublayer}",
            "q_a_proj": "self_attn.{sublayer}.q_a_proj",
            "q_a_norm": "self_attn.{sublayer}.q_a_layernorm",
            "q_b_proj": "self_attn.{sublayer}.q_b_proj",
            "kv_a_proj": "self_attn.{sublayer}.kv_a_proj_with_mqa",
            "kv_a_norm": "self_attn.{sublayer}.kv_a_layernorm",
            "kv_b_proj": "self_attn.{sublayer}.kv_b_proj",
            "k_b_proj": "self_attn.{sublayer}.k_b_proj",
            "v_b_proj": "self_attn.{sublayer}.v_b_proj",
            "o_proj": "self_attn.{sublayer}.o_proj",
            **{f"{part}_proj": f"mlps.{{sublayer}}.{part}_proj" for part in ("gate", "up", "down")},
            "router": "mlp.router.classifier",
            "router.score_bias": "mlp.router.e_score_correction_bias",
        },
        pairs_adjacent=True,
    ),
)


def _describe_kimi_linear(fields: ModelFields) -> ModelConfig:
    """Describe Kimi Linear. An inner object of the authors' configs describes the delta rule, and numbers layers from
    1.
    """
    if not fields.flag_or("mla_use_nope", True):
        raise fields.wrong("mla_use_nope", "true for this family")
    own = fields.group_or_none("linear_attn_config")
    sizes = {"head_dim": 128, "num_heads": 32, "conv_kernel_dim": 4}
    sizes = {name: fields.whole_or(f"linear_{name}", size) for name, size in sizes.items()}
    indexes: Sequence[int] = range(4, fields.layer_count, 4)
    if own is not None:
        names = {"head_dim": "head_dim", "num_heads": "num_heads", "conv_kernel_dim": "short_conv_kernel_size"}
        sizes = {name: own.whole_or(theirs, sizes[name]) for name, theirs in names.items()}
        if "full_attn_layers" in own and "kda_layers" in own:
            numbers = own.wholes("full_attn_layers")
            if sorted((*numbers, *own.wholes("kda_layers"))) != list(range(1, fields.layer_count + 1)):
                raise own.wrong("kda_layers", "all numbers of layers, from 1, that full_attn_layers does not have")
            indexes = [number - 1 for number in numbers]
    delta = DeltaNetConfig(
        head_count=sizes["num_heads"],
        group_count=sizes["num_heads"],
        head_dim=sizes["head_dim"],
        vector_size=sizes["head_dim"],
        kernel_size=sizes["conv_kernel_dim"],
        has_joint_qkv=False,
        rank=sizes["head_dim"],
    )
    attention = _attention(fields, has_positions=False)
    attends, mlps = fields.attending_layers("linear_attention", indexes), fields.routed_by_sigmoid(dense_count=1)
    return fields.described(
        "kimi_linear",
        [LayerConfig(attention=attention if at else delta, mlp=mlp) for at, mlp in zip(attends, mlps, strict=True)],
        norm_eps=fields.number_or("rms_norm_eps", 1e-5),
    )


_MOE = "block_sparse_moe"
_EXPERT_NAMES = {"gate": "w1", "up": "w3", "down": "w2"}
KIMI_LINEAR = Family(
    name="kimi_linear",
    classes=("KimiLinearForCausalLM",),
    model_type="kimi_linear",
    saved_as="kimi_linear_saved",
    spellings={
        "max_position_embeddings": "model_max_length",
        "n_group": "num_expert_group",
        "n_routed_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
        "norm_topk_prob": "moe_renormalize",
        "num_experts_per_tok": "num_experts_per_token",
        "scoring_func": "moe_router_activation_func",
    },
    defaults={
        "num_key_value_heads": 32,
        "n_shared_experts": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.446,
        "v_head_dim": 128,
        "norm_topk_prob": True,
    },
    notes=("qk_head_dim", "rope_parameters", "rope_scaling", "rope_theta", "use_grouped_topk"),
    describe=_describe_kimi_linear,
    transformers=Naming(
        modules={
            **{f"delta_{part}": f"self_attn.{part}_proj" for part in "qkv"},
            **{f"conv_{part}": f"self_attn.{part}_conv1d" for part in "qkv"},
            **{f"delta_gate_{half}": f"self_attn.g_{half}_proj" for half in "ab"},
            **{f"delta_decay_{half}": f"self_attn.f_{half}_proj" for half in "ab"},
            "delta_share": "self_attn.b_proj",
            "out_proj": "self_attn.o_proj",
            "gate_norm": "self_attn.o_norm",
            "state.rates": "self_attn.A_log",
            "state.time_step_bias": "self_attn.dt_bias",
            "router": f"{_MOE}.gate",
            "router.score_bias": f"{_MOE}.gate.e_score_correction_bias",
            **{f"experts.{part}_proj": f"{_MOE}.experts.{{expert}}.{name}" for part, name in _EXPERT_NAMES.items()},
            **{f"shared.{part}_proj": f"{_MOE}.shared_experts.{part}_proj" for part in _EXPERT_NAMES},
        },
    ),
)
# transformers gives dense MLPs the prefix that only mixtures have in the authors' files.
KIMI_LINEAR_SAVED = replace(
    KIMI_LINEAR,
    name="kimi_linear_saved",
    classes=(),
    saved_as=None,
    transformers=Naming(
        modules={
            **KIMI_LINEAR.transformers.modules,
            **{f"{part}_proj": f"{_MOE}.{part}_proj" for part in _EXPERT_NAMES},
        }
    ),
)
