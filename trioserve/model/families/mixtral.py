"""Mixtral: a Mistral whose MLPs are mixtures of experts. GGUF files call it a Llama with experts.

MiniMax-M2 stores its experts under the same names.
"""

from __future__ import annotations

from trioserve.model.families.family import Family, GgufNaming, Naming
from trioserve.model.families.model_fields import ModelFields, windowed_layers
from trioserve.model.layer_config import LayerConfig
from trioserve.model.model_config import ModelConfig

__all__ = ["MIXTRAL", "MINIMAX_M2"]


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
