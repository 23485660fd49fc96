"""Tests checkpoints of model families that transformers does not know.

Each family computes the same as a family of transformers, but its authors chose other names of config fields and
tensors. The tests compare the model description and the tensors with those of the family in transformers. Its results
are compared in test_parity.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file, save_file

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.layer_config import AttentionConfig, ExpertsConfig, alibi_slopes
from trioserve.model.loading.checkpoint import Checkpoint, open_checkpoint
from trioserve.model.loading.hf_config import model_config_from
from trioserve.model.loading.names import TRANSFORMERS, tensor_places
from trioserve.model.model_config import ModelConfig

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATED = ("mlp.gate_proj", "mlp.up_proj")


@dataclass(frozen=True, kw_only=True)
class Published:
    """A checkpoint with the authors' names, made from a tiny checkpoint of transformers that computes the same.

    Attributes:
        kind: kind of the tiny checkpoint.
        changes: changed fields of the tiny checkpoint's config.
        renamed: the authors' names of fields, by transformers' names.
        fields: further fields of the authors' config.
        removed: fields that the authors' config does not have.
        tensors: regular expressions for names of tensors, and their replacements, in order.
        joined: the authors' name of a tensor that has the rows of several modules, by these modules.
        grouped: the rows of a joint tensor are ordered by key/value heads.
    """

    kind: str = "llama"
    changes: Mapping[str, Any] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    removed: tuple[str, ...] = ()
    tensors: tuple[tuple[str, str], ...] = ()
    joined: Mapping[tuple[str, ...], str] = field(default_factory=dict)
    grouped: bool = False


BAILING_TENSORS = (
    (r"^model\.embed_tokens", "model.word_embeddings"),
    (r"self_attn\.o_proj", "attention.dense"),
    (r"self_attn\.q_norm", "attention.query_layernorm"),
    (r"self_attn\.k_norm", "attention.key_layernorm"),
    (r"e_score_correction_bias", "expert_bias"),
)
BAILING_FIELDS = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
ROUTED = {"head_dim": 32, "use_qk_norm": True, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
PUBLISHED: dict[str, Published] = {
    **{
        name: Published()
        for name in (
            "LLaMAForCausalLM",
            "AquilaForCausalLM",
            "AquilaModel",
            "IQuestCoderForCausalLM",
            "XverseForCausalLM",
        )
    },
    **{
        name: Published(changes={"attention_bias": True}, renamed={"attention_bias": "bias"})
        for name in ("InternLMForCausalLM", "PanguEmbeddedForCausalLM")
    },
    "GritLM": Published(kind="mistral"),
    "MiMoForCausalLM": Published(kind="qwen2", changes={"tie_word_embeddings": False}),
    "ExaoneMoEForCausalLM": Published(kind="exaone-moe"),
    "InternLM2ForCausalLM": Published(
        changes={"attention_bias": True},
        renamed={"attention_bias": "bias"},
        fields={"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_theta": 10_000},
        removed=("rope_parameters",),
        tensors=(
            (r"embed_tokens", "tok_embeddings"),
            (r"^lm_head", "output"),
            (r"input_layernorm", "attention_norm"),
            (r"post_attention_layernorm", "ffn_norm"),
            (r"self_attn\.o_proj", "attention.wo"),
            (r"mlp\.gate_proj", "feed_forward.w1"),
            (r"mlp\.up_proj", "feed_forward.w3"),
            (r"mlp\.down_proj", "feed_forward.w2"),
        ),
        joined={QKV: "attention.wqkv"},
        grouped=True,
    ),
    "BaiChuanForCausalLM": Published(
        changes={"num_key_value_heads": 4},
        removed=("num_key_value_heads",),
        fields={"model_max_length": 512, "z_loss_weight": 0},
        joined={QKV: "self_attn.W_pack"},
    ),
    "QWenLMHeadModel": Published(
        kind="qwen2",
        changes={"num_key_value_heads": 4, "tie_word_embeddings": False},
        renamed={
            "rms_norm_eps": "layer_norm_epsilon",
            "max_position_embeddings": "seq_length",
        },
        fields={
            "intermediate_size": 192,
            "kv_channels": 16,
            "rotary_emb_base": 10_000,
            "rotary_pct": 1.0,
            "no_bias": True,
            "use_logn_attn": True,
            "use_dynamic_ntk": True,
            "max_position_embeddings": 2048,
        },
        removed=(
            *("rope_parameters", "num_key_value_heads", "use_sliding_window", "sliding_window", "max_window_layers"),
            "layer_types",
        ),
        tensors=(
            (r"^model\.layers", "transformer.h"),
            (r"^model\.embed_tokens", "transformer.wte"),
            (r"^model\.norm", "transformer.ln_f"),
            (r"input_layernorm", "ln_1"),
            (r"post_attention_layernorm", "ln_2"),
            (r"self_attn\.o_proj", "attn.c_proj"),
            (r"mlp\.gate_proj", "mlp.w2"),
            (r"mlp\.up_proj", "mlp.w1"),
            (r"mlp\.down_proj", "mlp.c_proj"),
        ),
        joined={QKV: "attn.c_attn"},
    ),
    **{
        name: Published(
            kind="glm",
            changes={
                "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0, "partial_rotary_factor": 0.5}
            },
            renamed={
                "head_dim": "kv_channels",
                "intermediate_size": "ffn_hidden_size",
                "max_position_embeddings": "seq_length",
                "num_hidden_layers": "num_layers",
                "num_key_value_heads": "multi_query_group_num",
                "rms_norm_eps": "layernorm_epsilon",
                "attention_bias": "add_qkv_bias",
                "vocab_size": "padded_vocab_size",
            },
            fields={"rope_ratio": 50, "multi_query_attention": True, "original_rope": True, "rmsnorm": True},
            removed=("rope_parameters", "hidden_act"),
            tensors=(
                (r"^model\.layers", "transformer.encoder.layers"),
                (r"^model\.embed_tokens", "transformer.embedding.word_embeddings"),
                (r"^model\.norm", "transformer.encoder.final_layernorm"),
                (r"^lm_head", "transformer.output_layer"),
                (r"self_attn\.o_proj", "self_attention.dense"),
                (r"mlp\.gate_up_proj", "mlp.dense_h_to_4h"),
                (r"mlp\.down_proj", "mlp.dense_4h_to_h"),
            ),
            joined={QKV: "self_attention.query_key_value"},
        )
        for name in ("ChatGLMModel", "ChatGLMForConditionalGeneration")
    },
    "StableLMEpochForCausalLM": Published(
        kind="stablelm",
        renamed={"layer_norm_eps": "norm_eps"},
        fields={"rope_pct": 0.5, "rope_theta": 20_000},
        removed=("rope_parameters", "rms_norm_eps"),
    ),
    "OrionForCausalLM": Published(
        kind="stablelm",
        changes={
            "use_qkv_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
        },
        renamed={"layer_norm_eps": "rms_norm_eps"},
        removed=("rope_parameters", "use_qkv_bias", "rms_norm_eps"),
    ),
    "MiniCPMForCausalLM": Published(
        kind="granite",
        changes={"attention_multiplier": 0.25, "residual_multiplier": 1.0 / 2**0.5, "logits_scaling": 4.0},
        removed=("attention_multiplier", "residual_multiplier", "logits_scaling", "embedding_multiplier"),
        fields={"scale_emb": 12, "scale_depth": 1.0, "dim_model_base": 16},
    ),
    "TeleFLMForCausalLM": Published(
        kind="granite",
        changes={"attention_multiplier": 0.25, "residual_multiplier": 1.0, "logits_scaling": 2.0},
        removed=("attention_multiplier", "residual_multiplier", "logits_scaling", "embedding_multiplier"),
        fields={"use_mup": True, "input_mult": 12.0, "output_mult": 2.0, "mup_scale_factor": 4.0},
    ),
    "RWForCausalLM": Published(
        kind="falcon",
        renamed={
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
        },
        removed=("rms_norm_eps",),
    ),
    "BailingMoeV2ForCausalLM": Published(
        kind="glm4-moe",
        changes={**ROUTED, "attention_bias": True},
        renamed={**BAILING_FIELDS, "attention_bias": "use_qkv_bias"},
        fields={
            "score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "use_bias": False,
            "partial_rotary_factor": 0.5,
            "moe_shared_expert_intermediate_size": 48,
        },
        removed=("rope_parameters",),
        tensors=BAILING_TENSORS,
        joined={QKV: "attention.query_key_value"},
    ),
    "SarvamMoEForCausalLM": Published(
        kind="glm4-moe",
        changes={
            **ROUTED,
            "attention_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 8_000_000.0, "partial_rotary_factor": 1.0},
        },
        renamed=BAILING_FIELDS,
        removed=("rope_parameters", "use_qk_norm", "attention_bias"),
        tensors=BAILING_TENSORS,
        joined={QKV: "attention.query_key_value"},
    ),
    "SarvamMLAForCausalLM": Published(
        kind="moonlight",
        renamed=BAILING_FIELDS,
        fields={"head_dim": 48},
        removed=("num_key_value_heads",),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_checkpoint_with_the_authors_names_equals_that_of_transformers(
    name: str,
    tiny_checkpoints: ModuleType,
    tensors_of: Callable[[Checkpoint], dict[str, torch.Tensor]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    published = PUBLISHED[name]
    plain, theirs = tmp_path / "plain", tmp_path / "theirs"
    tiny_checkpoints.write_checkpoint(plain, published.kind, fields=dict(published.changes))
    expected = open_checkpoint(plain)
    theirs.mkdir()
    config = json.loads((plain / "config.json").read_text())
    written = {
        published.renamed.get(field, field): value for field, value in config.items() if field not in published.removed
    }
    (theirs / "config.json").write_text(json.dumps({**written, **published.fields, "architectures": [name]}))
    (theirs / "generation_config.json").write_text((plain / "generation_config.json").read_text())
    kv_heads = config.get("num_key_value_heads", 1)
    save_file(_renamed(published, load_file(plain / "model.safetensors"), kv_heads), theirs / "model.safetensors")
    caplog.clear()
    found = open_checkpoint(theirs)
    assert not caplog.messages
    assert structs.replace(found.config, family=expected.config.family) == _without_usual_scales(expected.config)
    assert found.continues_texts
    ours, wanted = tensors_of(found), tensors_of(expected)
    assert set(ours) == set(wanted)
    assert all(torch.equal(ours[tensor], wanted[tensor]) for tensor in wanted)


def _without_usual_scales(config: ModelConfig) -> ModelConfig:
    """Leave out scales of attention that equal 1 / sqrt(head_dim). Granite's config always has one."""
    heads = config.kv_attention
    if heads.query_factor != 1.0 or not isinstance(heads, AttentionConfig):
        return config
    layers = [structs.replace(layer, attention=structs.replace(heads, scale=None)) for layer in config.layers]
    return structs.replace(config, layers=tuple(layers)) if heads.scale else config


def _renamed(published: Published, tensors: dict[str, torch.Tensor], kv_heads: int) -> dict[str, torch.Tensor]:
    """Return tensors under the authors' names, with joint tensors."""
    for parts, whole in published.joined.items():
        for first in [name for name in tensors if parts[0] in name]:
            rows = [tensors.pop(first.replace(parts[0], part)) for part in parts]
            if published.grouped:
                rows = [torch.cat([part.unflatten(0, (kv_heads, -1)) for part in rows], 1).flatten(0, 1)]
            tensors[first.replace(parts[0], whole)] = torch.cat(rows)
    renamed = {}
    for name, tensor in tensors.items():
        for pattern, replacement in published.tensors:
            name = re.sub(pattern, replacement, name)
        renamed[name] = tensor.contiguous()
    return renamed


def test_models_of_baichuan_with_13b_have_alibi() -> None:
    base = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {**base, "architectures": ["BaichuanForCausalLM"], "vocab_size": 125_696, "model_max_length": 256}
    large = model_config_from(config, {}, dtype_name="float32")
    small = model_config_from({**config, "max_position_embeddings": 512}, {}, dtype_name="float32")
    assert (large.heads.slopes, large.heads.rotary, large.context_tokens_max) == (alibi_slopes(4), None, 256)
    assert (small.heads.slopes, small.context_tokens_max) == (None, 512)
    assert small.heads.rotary is not None
    assert small.has_unit_head
    assert not model_config_from({**config, "vocab_size": 64_000}, {}, dtype_name="float32").has_unit_head


def test_rows_of_a_unit_head_are_scaled_to_length_1(
    tiny_checkpoint: Callable[..., Path], tensors_of: Callable[[Checkpoint], dict[str, torch.Tensor]]
) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint("llama"))
    config = structs.replace(checkpoint.config, has_unit_head=True)
    places, _ = tensor_places(config, TRANSFORMERS)
    rows = tensors_of(checkpoint)["lm_head.weight"].numpy()
    found = places["lm_head.weight"].read(lambda wanted: rows, "float32")
    wanted = torch.nn.functional.normalize(torch.from_numpy(rows))
    torch.testing.assert_close(torch.from_numpy(np.asarray(found)), wanted)


def test_deepseek_of_2024_joins_attention_of_llama_with_experts_of_v2(tiny_checkpoint: Callable[..., Path]) -> None:
    llama, routed = (open_checkpoint(tiny_checkpoint(kind)).config for kind in ("llama", "deepseek-v2-lite"))
    fields = json.loads((tiny_checkpoint("deepseek-v2-lite") / "config.json").read_text())
    shared = {name: fields[name] for name in fields if name not in ("kv_lora_rank", "q_lora_rank", "head_dim")}
    shared |= {"architectures": ["DeepseekForCausalLM"], "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
    found = model_config_from({**shared, "rope_parameters": None}, {}, dtype_name="float32")
    assert [layer.attention for layer in found.layers] == [llama.layers[0].attention] * len(found.layers)
    assert [layer.mlp for layer in found.layers] == [layer.mlp for layer in routed.layers]


def test_softmax_experts_of_ling_1_may_be_normalized() -> None:
    config = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 320,
        "max_position_embeddings": 512,
        "norm_topk_prob": True,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "num_shared_experts": 2,
        "architectures": ["BailingMoeForCausalLM"],
    }
    found = model_config_from(config, {}, dtype_name="float32")
    wanted = ExpertsConfig(expert_count=8, experts_per_token=3, intermediate_size=32, normalizes=True, shared_size=64)
    assert [layer.mlp for layer in found.layers] == [wanted, wanted]
    with pytest.raises(ModelLoadError, match=r"norm_head in .* must be false"):
        model_config_from({**config, "norm_head": True}, {}, dtype_name="float32")
