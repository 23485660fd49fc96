"""Mixtral: a Mistral whose MLPs are mixtures of experts. GGUF files call it a Llama with experts.

MiniMax-01 and MiniMax-M2 store their experts under the same names. DBRX has LayerNorm, and limits
queries, keys and values.
"""

from __future__ import annotations

from dataclasses import replace

from trioserve.model.families.family import Family, GgufNaming, Naming
from trioserve.model.families.model_fields import ModelFields, windowed_layers
from trioserve.model.layer_config import ExpertsConfig, LayerConfig, LightningConfig, NormedSums, RotaryConfig
from trioserve.model.loading.fields import Fields
from trioserve.model.model_config import ModelConfig

__all__ = ["DBRX", "MIXTRAL", "MINIMAX", "MINIMAX_01", "MINIMAX_M2"]


def _describe_mixtral(fields: ModelFields) -> ModelConfig:
    attention = fields.attention()
    mlp = fields.experts("num_local_experts", fields.whole("intermediate_size"), normalizes=True)
    windows = fields.windows(fields.whole_or("sliding_window", None) or None, lambda layer: True)
    return fields.described("mixtral", windowed_layers(attention, mlp, windows))


MIXTRAL = Family(
    name="mixtral",
    classes=("MixtralForCausalLM",),
    model_type="mixtral",
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0},
    describe=_describe_mixtral,
    transformers=Naming(
        modules={
            "router": "block_sparse_moe.gate",
            "experts.gate_proj": "block_sparse_moe.experts.{expert}.w1",
            "experts.up_proj": "block_sparse_moe.experts.{expert}.w3",
            "experts.down_proj": "block_sparse_moe.experts.{expert}.w2",
        }
    ),
    gguf=GgufNaming(architecture="llama", pairs_adjacent=True),
)


def _describe_minimax(fields: ModelFields) -> ModelConfig:
    """Describe MiniMax-M2: every MLP is a mixture whose router uses sigmoid scores with a bias.

    Queries and keys are normalized over all heads together, and only some dimensions of each head are rotated.
    """
    if not fields.flag_or("use_qk_norm", True):
        raise fields.wrong("use_qk_norm", "true for this family")
    if (scoring := fields.text_or("scoring_func", "sigmoid")) != "sigmoid":
        raise fields.wrong("scoring_func", f"'sigmoid' for this family, and not {scoring!r}")
    head_dim = fields.whole_or("head_dim", 128)
    rotated_default = fields.whole_or("rotary_dim", head_dim)  # Configs without partial_rotary_factor use this field.
    rotated = fields.part_of_head(head_dim, rotated_default / max(head_dim, 1))
    rotary = fields.rotary(head_dim, rotated_dims=rotated, theta=5_000_000.0)
    attention = fields.attention(head_dim=128, rotary=rotary, qk_norm="row")
    middle = fields.whole_or("moe_intermediate_size", None) or fields.whole("intermediate_size")
    experts = fields.experts("num_local_experts", middle, normalizes=True, scoring="sigmoid", has_score_bias=True)
    return fields.described("minimax_m2", [LayerConfig(attention=attention, mlp=experts)] * fields.layer_count)


MINIMAX_M2 = Family(
    name="minimax_m2",
    classes=("MiniMaxM2ForCausalLM",),
    model_type="minimax_m2",
    defaults={"num_key_value_heads": 8},
    notes=("attn_type_list", "mlp_intermediate_size", "shared_moe_mode"),
    describe=_describe_minimax,
    transformers=Naming(
        modules={
            **MIXTRAL.transformers.modules,
            "router.score_bias": "block_sparse_moe.e_score_correction_bias",
        }
    ),
    gguf=GgufNaming(architecture="minimax-m2"),
)


# Factors of the sums with the results of attention, lightning attention and MLPs, as transformers names them.
_FACTORS = {
    f"{ours}_{name}_factor": f"layernorm_{theirs}_{name}"
    for ours, theirs in (("full_attn", "full_attention"), ("linear_attn", "linear_attention"), ("mlp", "mlp"))
    for name in ("alpha", "beta")
}


def _describe_minimax_01(fields: ModelFields) -> ModelConfig:
    """Describe MiniMax-01: most layers have lightning attention, and all have experts. Sums are weighted.

    The norm of the hidden state may replace it in sums. The decays of a layer's heads depend on its index.
    """
    count, head_count = fields.layer_count, fields.interval("num_attention_heads", 32)
    kinds = fields.wholes("attn_type_list")  # The authors' configs name layers with full attention 1.
    if kinds and (len(kinds) != count or not {0, 1}.issuperset(kinds)):
        raise fields.wrong("attn_type_list", f"a list of {count} times 0 or 1")
    default = [index for index in range(count) if (kinds[index] if kinds else index % 2 == 0)]
    head_dim = fields.head_dim()
    rotary = fields.rotary(head_dim, rotated_dims=fields.whole_or("rotary_dim", head_dim), theta=1_000_000.0)
    window = fields.whole_or("sliding_window", None)
    attention = fields.attention(rotary=rotary, window=window)
    middle = fields.whole("intermediate_size")
    experts = fields.experts("num_local_experts", middle, normalizes=True)

    def factors(part: str) -> tuple[float, float]:
        alpha, beta = (fields.number_or(f"{part}_{name}_factor", 1.0) for name in ("alpha", "beta"))
        return alpha, beta

    keeps_norms = fields.flag_or("postnorm", True)
    layers = []
    for index, attends in enumerate(fields.attending_layers("linear_attention", default)):
        scale = 1.0 - index / (count - 1 + 1e-5) + 1e-5
        slopes = tuple(scale * 2.0 ** (-8.0 * (head + 1) / head_count) for head in range(head_count))
        lightning = LightningConfig(head_count=head_count, head_dim=head_dim, slopes=slopes)
        of_attention = factors("full_attn" if attends else "linear_attn")
        sums = NormedSums(attention=of_attention, mlp=factors("mlp"), keeps_norms=keeps_norms)
        layers.append(LayerConfig(attention=attention if attends else lightning, mlp=experts, sums=sums))
    return fields.described("minimax", layers, norm_eps=fields.number_or("rms_norm_eps", 1e-5))


MINIMAX = Family(
    name="minimax",
    classes=("MiniMaxForCausalLM",),
    model_type="minimax",
    spellings=_FACTORS,
    defaults={"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
    notes=("block_size", "router_jitter_noise", "shared_moe_mode"),
    describe=_describe_minimax_01,
    transformers=Naming(
        modules={
            **MIXTRAL.transformers.modules,
            "lightning_qkv": "self_attn.qkv_proj",
            "lightning_gate": "self_attn.output_gate",
            "out_proj": "self_attn.out_proj",
            "gate_norm": "self_attn.norm",
        },
        unread=tuple(f"self_attn.{name}" for name in ("slope_rate", "query_decay", "key_decay", "diagonal_decay")),
    ),
)
# The authors' classes. Their code does not keep norms if the field is missing.
MINIMAX_01 = replace(
    MINIMAX,
    name="minimax_text_01",
    classes=("MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM"),
    model_type="minimax_text_01",
    defaults={**MINIMAX.defaults, "postnorm": False},
)


def _describe_dbrx(fields: ModelFields) -> ModelConfig:
    own = fields.group_or_none("attn_config") or Fields({}, fields.source)
    mixture = fields.group_or_none("ffn_config") or Fields({}, fields.source)
    activation = mixture.group_or_none("ffn_act_fn")
    if activation is not None and not activation.is_one_of("name", (None, "silu")):
        raise activation.wrong("name", "'silu'")
    if not mixture.is_one_of("moe_normalize_expert_weights", (None, 1, 1.0)):
        raise mixture.wrong("moe_normalize_expert_weights", "1 or null")
    head_dim = fields.head_dim()
    rotary = fields.rotary(head_dim)
    if (theta := own.number_or("rope_theta", None)) is not None:  # Published configs have theta here.
        rotary = RotaryConfig(theta=theta, rotated_dims=head_dim, scaling=rotary.scaling)
    layer = LayerConfig(
        attention=fields.attention(
            kv_head_count=own.whole_or("kv_n_heads", 1), rotary=rotary, clip=own.number_or("clip_qkv", None)
        ),
        mlp=ExpertsConfig(
            expert_count=mixture.whole_or("moe_num_experts", 4),
            experts_per_token=mixture.whole_or("moe_top_k", 1),
            intermediate_size=mixture.whole_or("ffn_hidden_size", 3584),
            normalizes=not mixture.is_null("moe_normalize_expert_weights"),
        ),
    )
    return fields.described("dbrx", [layer] * fields.layer_count, norm="layer", norm_eps=1e-5)


DBRX = Family(
    name="dbrx",
    classes=("DbrxForCausalLM", "DBRXForCausalLM"),
    model_type="dbrx",
    spellings={
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "max_position_embeddings": "max_seq_len",
    },
    notes=(
        *("attn_config.attn_pdrop", "emb_pdrop", "ffn_config.hidden_size", "ffn_config.moe_jitter_eps"),
        *("ffn_config.moe_loss_weight", "num_key_value_heads"),
    ),
    describe=_describe_dbrx,
    transformers=Naming(
        layers="transformer.blocks",
        modules={
            "embed": "transformer.wte",
            "norm": "transformer.norm_f",
            "attention_norm": "norm_attn_norm.norm_1",
            "mlp_norm": "norm_attn_norm.norm_2",
            **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "norm_attn_norm.attn.Wqkv"),
            "o_proj": "norm_attn_norm.attn.out_proj",
            "router": "ffn.router.layer",
            "experts.gate_proj.weight": "ffn.experts.mlp.w1",
            "experts.up_proj.weight": "ffn.experts.mlp.v1",
            "experts.down_proj.weight": "ffn.experts.mlp.w2",
        },
        turned=("experts.down_proj",),
    ),
)
