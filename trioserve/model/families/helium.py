"""Helium: a Llama whose rotary embeddings rotate adjacent pairs."""

from __future__ import annotations

from trioserve.model.families.family import Family, Naming
from trioserve.model.families.model_fields import ModelFields
from trioserve.model.model_config import LayerConfig, ModelConfig

__all__ = ["HELIUM"]


def _describe(fields: ModelFields) -> ModelConfig:
    attention = fields.attention(head_dim=128, has_bias=fields.flag_or("attention_bias", False))
    layer = LayerConfig(attention=attention, mlp=fields.mlp(has_bias=fields.flag_or("mlp_bias", False)))
    norm_eps = fields.number_or("rms_norm_eps", 1e-8)
    return fields.described("helium", (layer,) * fields.layer_count, norm_eps=norm_eps)


HELIUM = Family(
    name="helium",
    classes=("HeliumForCausalLM",),
    model_type="helium",
    defaults={"num_key_value_heads": 20, "rope_theta": 100_000.0},
    describe=_describe,
    transformers=Naming(pairs_adjacent=True),
)
