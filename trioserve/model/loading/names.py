"""Tensor names out there to names in here, and which tensors of which shape a model must have.

In here: "embed.weight", "layers.{i}.{module}.weight" or ".bias", "norm.weight", "lm_head.weight" (absent when tied).
Matrices are [out, in]; rotary positions pair index j with j + head_dim / 2, as in transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.model_config import ModelConfig

__all__ = ["Shape", "gguf_name", "match_tensors", "tensor_shapes", "transformers_name"]

Shape = tuple[int, ...]

_TRANSFORMERS_MODULES = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "lm_head": "lm_head",
    "input_norm": "input_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "o_proj": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "post_norm": "post_attention_layernorm",
    "gate_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "down_proj": "mlp.down_proj",
}
_GGUF_MODULES = {
    "embed": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "input_norm": "attn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "post_norm": "ffn_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}


def tensor_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor that a model with this config has, by its name in here, in the order of computing."""
    hidden, middle = config.hidden_size, config.intermediate_size
    queries, keys = config.head_count * config.head_dim, config.kv_head_count * config.head_dim
    matrices = {
        "q_proj": (queries, hidden, config.attention_bias),
        "k_proj": (keys, hidden, config.attention_bias),
        "v_proj": (keys, hidden, config.attention_bias),
        "o_proj": (hidden, queries, config.attention_output_bias),
        "gate_proj": (middle, hidden, config.mlp_bias),
        "up_proj": (middle, hidden, config.mlp_bias),
        "down_proj": (hidden, middle, config.mlp_bias),
    }
    norms = {"input_norm": hidden, "post_norm": hidden}
    if config.qk_norm:
        norms |= {"q_norm": config.head_dim, "k_norm": config.head_dim}
    shapes: dict[str, Shape] = {"embed.weight": (config.vocab_size, hidden)}
    for layer in range(config.layer_count):
        for module, size in norms.items():
            shapes[f"layers.{layer}.{module}.weight"] = (size,)
        for module, (rows, columns, biased) in matrices.items():
            shapes[f"layers.{layer}.{module}.weight"] = (rows, columns)
            if biased:
                shapes[f"layers.{layer}.{module}.bias"] = (rows,)
    shapes["norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def transformers_name(name: str) -> str:
    """The name in transformers' checkpoints of the tensor that is called `name` in here."""
    return _outside_name(name, _TRANSFORMERS_MODULES, "model.layers")


def gguf_name(name: str) -> str:
    """The name in GGUF files of the tensor that is called `name` in here."""
    return _outside_name(name, _GGUF_MODULES, "blk")


def match_tensors(
    config: ModelConfig,
    found: Mapping[str, Shape],
    outside_name: Callable[[str], str],
    *,
    ignored: Callable[[str], bool],
) -> dict[str, str]:
    """Name in here to name out there for every tensor of the model.

    found: what the files hold, by their own names. ignored: says which superfluous ones do no harm.
    Raises ModelLoadError when one is missing, has another shape than the config says, or is unknown: a model computed
    without it would answer nonsense.
    """
    wanted = tensor_shapes(config)
    outside = {name: outside_name(name) for name in wanted}
    missing = [name for name in outside.values() if name not in found]
    if missing:
        raise ModelLoadError(
            f"the weights lack {_listed(missing)}, which {config.architecture} with this config needs: "
            "the checkpoint is incomplete, fetch it again"
        )
    for name, shape in wanted.items():
        if found[outside[name]] != shape:
            raise ModelLoadError(
                f"{outside[name]} has shape {list(found[outside[name]])}, but the config asks for {list(shape)}: "
                "weights and config are not of the same model"
            )
    known = set(outside.values())
    unknown = [name for name in found if name not in known and not ignored(name)]
    if unknown:
        raise ModelLoadError(
            f"the weights hold {_listed(unknown)}, which {config.architecture} with this config has no place for: "
            "weights and config are not of the same model, or it is a variant that is not supported"
        )
    return outside


def _outside_name(name: str, modules: Mapping[str, str], layers: str) -> str:
    *layer, module, kind = name.split(".")
    if not layer:
        return f"{modules[module]}.{kind}"
    return f"{layers}.{layer[1]}.{modules[module]}.{kind}"


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more tensors"
