"""Falcon-H1: in each layer, attention and a Mamba-2 state space read the same input, and their outputs are added.

The multipliers of the projections are folded into the weights at loading. The multipliers of embeddings and logits
are applied in the forward pass.
"""

from __future__ import annotations

from trioserve.model.families.family import Family, GgufNaming, Naming
from trioserve.model.families.model_fields import ModelFields
from trioserve.model.layer_config import AttentionConfig, LayerConfig, StateNorm, StateSpaceConfig
from trioserve.model.model_config import ModelConfig, RowFactors

__all__ = ["FALCON_H1"]


def _describe(fields: ModelFields) -> ModelConfig:
    has_bias = fields.flag_or("attention_bias", False)
    # If mamba_d_ssm is null, mamba_expand sets the inner size.
    inner_size = None if fields.is_null("mamba_d_ssm") else fields.whole_or("mamba_d_ssm", 1024)
    state_space = fields.state_space(inner_size, _norm(fields))
    if fields.flag_or("projectors_bias", False) != state_space.has_bias:
        raise fields.wrong("projectors_bias", "the same as mamba_proj_bias")
    attention = fields.attention(has_bias=has_bias, has_output_bias=has_bias)
    mlp = fields.mlp(has_bias=fields.flag_or("mlp_bias", False))
    return fields.described(
        "falcon_h1",
        [LayerConfig(attention=attention, beside=state_space, mlp=mlp)] * fields.layer_count,
        norm_eps=fields.number_or("rms_norm_eps", 1e-5),
        embedding_scale=fields.number_or("embedding_multiplier", 1.0),
        logit_scale=fields.number_or("lm_head_multiplier", 1.0),
        row_factors=_row_factors(fields, attention, state_space),
    )


def _norm(fields: ModelFields) -> StateNorm:
    if not fields.flag_or("mamba_rms_norm", False):
        return "none"
    return "ungated" if fields.flag_or("mamba_norm_before_gate", True) else "gated"


def _row_factors(
    fields: ModelFields, attention: AttentionConfig, state_space: StateSpaceConfig
) -> tuple[RowFactors, ...]:
    """Return the factors for the rows of weights and biases.

    A multiplier of a projection's input or output scales the weight. Only an output multiplier scales the bias.
    """
    vectors = state_space.group_count * state_space.vector_size
    sizes = (state_space.inner_size, state_space.inner_size, vectors, vectors, state_space.head_count)
    hidden, middle = fields.whole("hidden_size"), fields.whole("intermediate_size")
    gate, down = _multipliers(fields, "mlp_multipliers", 2)
    behind = {
        "q_proj": ((attention.query_size, 1.0),),
        "k_proj": ((attention.key_size, fields.number_or("key_multiplier", 1.0)),),
        "v_proj": ((attention.key_size, 1.0),),
        "o_proj": ((hidden, fields.number_or("attention_out_multiplier", 1.0)),),
        "in_proj": tuple(zip(sizes, _multipliers(fields, "ssm_multipliers", 5), strict=True)),
        "out_proj": ((hidden, fields.number_or("ssm_out_multiplier", 1.0)),),
        "gate_proj": ((middle, gate),),
        "down_proj": ((hidden, down),),
    }
    read_by_attention = fields.number_or("attention_in_multiplier", 1.0)
    before = dict.fromkeys(("q_proj", "k_proj", "v_proj"), read_by_attention)
    before["in_proj"] = fields.number_or("ssm_in_multiplier", 1.0)
    found = []
    for module, parts in behind.items():
        scaled = tuple((rows, factor * before.get(module, 1.0)) for rows, factor in parts)
        found += [RowFactors(name=f"{module}.weight", parts=scaled), RowFactors(name=f"{module}.bias", parts=parts)]
    return tuple(factors for factors in found if any(factor != 1.0 for _rows, factor in factors.parts))


def _multipliers(fields: ModelFields, name: str, count: int) -> tuple[float, ...]:
    found = fields.numbers(name) if name in fields else (1.0,) * count
    if len(found) != count:
        raise fields.wrong(name, f"a list of {count} numbers")
    return found


FALCON_H1 = Family(
    name="falcon_h1",
    classes=("FalconH1ForCausalLM",),
    model_type="falcon_h1",
    defaults={"num_key_value_heads": 8},
    notes=("mamba_expand", "mamba_norm_before_gate"),
    describe=_describe,
    transformers=Naming(
        modules={
            "norm": "model.final_layernorm",
            "mlp_norm": "pre_ff_layernorm",
            "gate_proj": "feed_forward.gate_proj",
            "up_proj": "feed_forward.up_proj",
            "down_proj": "feed_forward.down_proj",
        }
    ),
    # llama.cpp writes the MLP's norm as "ffn_norm", without the suffix ".weight".
    gguf=GgufNaming(architecture="falcon-h1", modules={"mlp_norm.weight": "ffn_norm"}),
)
