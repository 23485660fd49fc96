"""EXAONE 3: a Llama with other field and tensor names. EXAONE 4: norms after attention and MLP, and normalized heads.

In the large EXAONE 4 models, layers without a sliding window have no position embeddings.
"""

from __future__ import annotations

from trioserve.model.families.family import Family, GgufNaming, Naming
from trioserve.model.families.model_fields import ModelFields
from trioserve.model.layer_config import LayerConfig
from trioserve.model.model_config import ModelConfig

__all__ = ["EXAONE", "EXAONE4"]


def _describe_exaone(fields: ModelFields) -> ModelConfig:
    rotary = fields.rotary(fields.head_dim(), theta=500_000.0)
    layer = LayerConfig(attention=fields.attention(rotary=rotary), mlp=fields.mlp())
    norm_eps = fields.number_or("rms_norm_eps", 1e-5)
    return fields.described("exaone", (layer,) * fields.layer_count, norm_eps=norm_eps)


def _describe_exaone4(fields: ModelFields) -> ModelConfig:
    window = fields.whole_or("sliding_window", None) or None
    # If layer_types is present, sliding_window_pattern may be a string that repeats it, so it is not read.
    every = 0 if "layer_types" in fields else fields.whole_or("sliding_window_pattern", 4)
    rotary = fields.rotary(fields.head_dim())
    layers = [
        LayerConfig(
            attention=fields.attention(
                rotary=rotary if window is None or of_layer is not None else None, window=of_layer, qk_norm="head"
            ),
            mlp=fields.mlp(),
            has_input_norms=False,
            has_output_norms=True,
        )
        for of_layer in fields.windows(window, lambda layer: every > 0 and (layer + 1) % every != 0)
    ]
    return fields.described("exaone4", layers)


EXAONE = Family(
    name="exaone",
    classes=("ExaoneForCausalLM",),
    model_type="exaone",
    describe=_describe_exaone,
    spellings={
        "num_hidden_layers": "num_layers",
        "rms_norm_eps": "layer_norm_epsilon",
        "hidden_act": "activation_function",
    },
    transformers=Naming(
        layers="transformer.h",
        modules={
            "embed": "transformer.wte",
            "norm": "transformer.ln_f",
            "attention_norm": "ln_1",
            "q_proj": "attn.attention.q_proj",
            "k_proj": "attn.attention.k_proj",
            "v_proj": "attn.attention.v_proj",
            "o_proj": "attn.attention.out_proj",
            "mlp_norm": "ln_2",
            "gate_proj": "mlp.c_fc_0",
            "up_proj": "mlp.c_fc_1",
            "down_proj": "mlp.c_proj",
        },
    ),
    gguf=GgufNaming(architecture="exaone"),
)
EXAONE4 = Family(
    name="exaone4",
    classes=("Exaone4ForCausalLM",),
    model_type="exaone4",
    defaults={"num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window": 4096},
    notes=("sliding_window_pattern",),
    describe=_describe_exaone4,
    gguf=GgufNaming(architecture="exaone4"),
)
