"""Llama 4 (language model only).

In three of four layers, a token attends only to the section of the context that contains the token. In the fourth
layer, it attends to the whole context, without position embeddings. The router's weight scales an expert's input. A
shared expert also computes every token.
"""

from __future__ import annotations

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.families.family import Family, GgufNaming, Naming
from trioserve.model.families.model_fields import ModelFields
from trioserve.model.layer_config import ExpertsConfig, LayerConfig, MlpConfig, Temperature
from trioserve.model.model_config import ModelConfig

__all__ = ["LLAMA4"]

EXPERT_MATRICES = ("experts.gate_proj", "experts.up_proj", "experts.down_proj")


def _describe(fields: ModelFields) -> ModelConfig:
    count = fields.layer_count
    has_positions = fields.layers_with_positions()
    section = fields.whole_or("attention_chunk_size", 8192) if not fields.is_null("attention_chunk_size") else None
    # llama.cpp writes a window of 0 for models without sections, whose layers all have position embeddings.
    if fields.whole_or("sliding_window", None) == 0:
        has_positions, section = [True] * count, None
    has_sections = _layers_with_sections(fields, has_positions)
    temperature = None
    if not fields.is_one_of("attn_temperature_tuning", (False, 0)):
        scale, interval = fields.number_or("attn_scale", 0.1), fields.whole_or("floor_scale", 8192)
        temperature = Temperature(scale=scale, interval=interval)
    has_norm = fields.flag_or("use_qk_norm", True)
    has_bias = fields.flag_or("attention_bias", False)
    rotary = fields.rotary(fields.head_dim(128), theta=500_000.0)
    mixed = fields.wholes("moe_layers") if "moe_layers" in fields else None
    every = fields.interval("interleave_moe_layer_step", 1)
    dense, experts = _mlps(fields)
    layers = [
        LayerConfig(
            attention=fields.attention(
                head_dim=128,
                rotary=rotary if has_positions[layer] else None,
                section=section if has_sections[layer] else None,
                temperature=None if has_positions[layer] else temperature,
                has_bias=has_bias,
                has_output_bias=has_bias,
                qk_norm="unit" if has_norm and has_positions[layer] else "none",
            ),
            mlp=experts if ((layer + 1) % every == 0 if mixed is None else layer in mixed) else dense,
        )
        for layer in range(count)
    ]
    return fields.described("llama4", layers, norm_eps=fields.number_or("rms_norm_eps", 1e-5))


def _layers_with_sections(fields: ModelFields, has_positions: list[bool]) -> list[bool]:
    kinds = fields.strings_or("layer_types", None)
    if kinds is None:
        return has_positions
    if len(kinds) != fields.layer_count or not set(kinds) <= {"chunked_attention", "full_attention"}:
        raise fields.wrong("layer_types", "chunked_attention or full_attention for each layer")
    return [kind == "chunked_attention" for kind in kinds]


def _mlps(fields: ModelFields) -> tuple[MlpConfig, ExpertsConfig]:
    """Return the MLP of dense layers and the mixture of the other layers."""
    of_mlp = fields.mlp()
    # In llama.cpp's files, intermediate_size is the size of dense layers, not of experts.
    of_file = fields.whole_or("moe_intermediate_size", None)
    middle = of_mlp.intermediate_size if of_file is None else of_file
    dense = (
        of_mlp if of_file is not None else MlpConfig(intermediate_size=fields.whole_or("intermediate_size_mlp", 16384))
    )
    if (scoring := fields.text_or("scoring_func", "sigmoid")) != "sigmoid":
        raise ModelLoadError(f"scoring_func in {fields.source} is {scoring!r}; supported for this family is sigmoid")
    experts = fields.experts(
        "num_local_experts", middle, normalizes=False, scoring="sigmoid", weighs_inputs=True, shared_size=middle
    )
    return dense, experts


LLAMA4 = Family(
    name="llama4",
    classes=("Llama4ForCausalLM",),
    model_type="llama4_text",
    defaults={"num_key_value_heads": 8},
    describe=_describe,
    transformers=Naming(
        turned=EXPERT_MATRICES,
        pairs_adjacent=True,
        modules={
            "gate_proj": "feed_forward.gate_proj",
            "up_proj": "feed_forward.up_proj",
            "down_proj": "feed_forward.down_proj",
            "router": "feed_forward.router",
            "experts.gate_proj.weight": "feed_forward.experts.gate_up_proj",
            "experts.up_proj.weight": "feed_forward.experts.gate_up_proj",
            "experts.down_proj.weight": "feed_forward.experts.down_proj",
            "shared.gate_proj": "feed_forward.shared_expert.gate_proj",
            "shared.up_proj": "feed_forward.shared_expert.up_proj",
            "shared.down_proj": "feed_forward.shared_expert.down_proj",
        },
    ),
    gguf=GgufNaming(architecture="llama4", pairs_adjacent=True),
    with_images=("Llama4ForConditionalGeneration",),
    text_defaults={
        "vocab_size": 202_048,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
    },
)
