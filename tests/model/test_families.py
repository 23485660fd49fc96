"""Tests of all model families in both file formats: reading descriptions and refusing unknown variants."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from trioserve.contracts.errors import ModelLoadError
from trioserve.contracts.sampling import SamplingParams
from trioserve.model.families.registry import FAMILIES
from trioserve.model.layer_config import (
    AttentionConfig,
    DeltaNetConfig,
    ExpertsConfig,
    KVAttention,
    LayerConfig,
    MlpConfig,
    SelectiveScanConfig,
    alibi_slopes,
)
from trioserve.model.loading.checkpoint import Checkpoint, open_checkpoint
from trioserve.model.loading.hf_config import model_config_from
from trioserve.model.model_config import ModelConfig
from trioserve.model.native.model import why_not_native
from trioserve.model.torch_step.rotary import rotary_frequencies

GGUF_KINDS = (
    "olmo",
    "bloom",
    "falcon",
    "falcon-grouped",
    "falcon-grouped-one-norm",
    "gpt2",
    "gpt-bigcode",
    "gpt-neox",
    "phi",
    "starcoder2",
    "stablelm",
    "stablelm-parallel",
    "nemotron",
    "arcee",
    "gemma3n",
    "qwen3-next",
    "ministral3",
    "minimax-m2",
    "granite-moe-shared",
    "hunyuan-dense",
    "ernie4_5-moe",
    "exaone-moe",
    "gemma",
    "gemma2",
    "gemma3",
    "phi3",
    "phi3-part",
    "phi3-longrope",
    "olmo2",
    "smollm3",
    "granite",
    "glm4",
    "cohere",
    "cohere-normed",
    "cohere2",
    "exaone",
    "ernie4_5",
    "seed_oss",
    "mixtral",
    "qwen3-moe",
    "olmoe",
    "granite-moe",
    "glm4-moe",
    "dots1",
    "gpt-oss",
    "lfm2",
    "lfm2-moe",
    "granite-hybrid",
    "granite-hybrid-unturned-moe",
    "falcon-h1",
    "falcon-h1-unnormed",
    "mamba2",
    "mamba",
    "mamba-biased",
    "jamba",
    "jamba-dense",
    "nemotron-h",
    "nemotron-h-moe",
    "deepseek-v2",
    "deepseek-v2-lite",
    "deepseek-v3",
    "moonlight",
    "glm-moe-dsa",
    "minicpm3",
    "llama4-long",
)
HALVES_KINDS = ("deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "moonlight", "glm-moe-dsa")
BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 320,
    "max_position_embeddings": 512,
}
MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 1}


def read(class_name: str, **fields: Any) -> ModelConfig:
    return model_config_from({**BASE, "architectures": [class_name], **fields}, {}, dtype_name="float32")


def windows(config: ModelConfig) -> list[int | None]:
    return [layer.attention.window for layer in config.layers]


@pytest.mark.parametrize(
    "kind, has_latent_halves", [*((kind, False) for kind in GGUF_KINDS), *((kind, True) for kind in HALVES_KINDS)]
)
def test_gguf_file_and_directory_give_the_same_model(
    kind: str,
    has_latent_halves: bool,
    tiny_checkpoints: ModuleType,
    tiny_checkpoint: Callable[..., Path],
    tensors_of: Callable[[Checkpoint], dict[str, torch.Tensor]],
    tmp_path: Path,
) -> None:
    path = tmp_path / "model.gguf"
    tiny_checkpoints.write_family_gguf(tiny_checkpoint(kind), path, has_latent_halves=has_latent_halves)
    check_same_model(path, tiny_checkpoint(kind), tensors_of, has_scale=not kind.startswith("gemma"))


def test_gguf_file_and_directory_of_mimo_give_the_same_model(
    tiny_checkpoints: ModuleType,
    tiny_checkpoint: Callable[..., Path],
    tensors_of: Callable[[Checkpoint], dict[str, torch.Tensor]],
    tmp_path: Path,
) -> None:
    """llama.cpp rotates an equal part of all heads."""
    directory, path = shutil.copytree(tiny_checkpoint("mimo-v2-flash"), tmp_path / "model"), tmp_path / "model.gguf"
    config = json.loads((directory / "config.json").read_text())
    config["rope_parameters"]["sliding_attention"]["partial_rotary_factor"] = 0.5
    (directory / "config.json").write_text(json.dumps(config))
    tiny_checkpoints.write_family_gguf(directory, path)
    check_same_model(path, directory, tensors_of)


def test_layers_with_an_indexer_are_found_by_their_tensors_in_an_older_gguf_file(
    tiny_checkpoints: ModuleType,
    tiny_checkpoint: Callable[..., Path],
    tensors_of: Callable[[Checkpoint], dict[str, torch.Tensor]],
    tmp_path: Path,
) -> None:
    path = tmp_path / "model.gguf"
    tiny_checkpoints.write_family_gguf(tiny_checkpoint("glm-moe-dsa"), path, has_indexer_types=False)
    check_same_model(path, tiny_checkpoint("glm-moe-dsa"), tensors_of)
    assert not open_checkpoint(path, context_tokens=10).config.is_sparse


def test_gguf_file_and_directory_of_hunyuan_moe_give_the_same_model(
    tiny_checkpoints: ModuleType,
    tiny_checkpoint: Callable[..., Path],
    tensors_of: Callable[[Checkpoint], dict[str, torch.Tensor]],
    tmp_path: Path,
) -> None:
    """llama.cpp needs an equal number of experts in all layers."""
    directory, path = shutil.copytree(tiny_checkpoint("hunyuan-moe"), tmp_path / "model"), tmp_path / "model.gguf"
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "moe_topk": [2, 2]}))
    tiny_checkpoints.write_family_gguf(directory, path)
    check_same_model(path, directory, tensors_of)


def check_same_model(
    path: Path,
    directory: Path,
    tensors_of: Callable[[Checkpoint], dict[str, torch.Tensor]],
    *,
    has_scale: bool = True,
) -> None:
    """Check that a GGUF file and a directory of transformers give equal descriptions and tensors.

    Args:
        has_scale: see check_close.
    """
    ours, theirs = open_checkpoint(path), open_checkpoint(directory)
    # GGUF files store these as float32, and take the end tokens from the tokenizer.
    numbers = {"norm_eps", "embedding_scale", "logit_scale", "logit_cap", "eos_token_ids", "layers"}
    numbers |= {"row_factors"}  # The weights in GGUF files are already multiplied.
    for field in set(ModelConfig.__struct_fields__) - numbers:
        assert getattr(ours.config, field) == getattr(theirs.config, field), field
    for field in ("norm_eps", "embedding_scale", "logit_scale", "logit_cap"):
        assert getattr(ours.config, field) == pytest.approx(getattr(theirs.config, field)), field
    for own, other in zip(ours.config.layers, theirs.config.layers, strict=True):
        check_close(own, other, has_scale=has_scale)
    expected, found = tensors_of(theirs), tensors_of(ours)
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def check_close(own: LayerConfig, other: LayerConfig, *, has_scale: bool) -> None:
    """Compare two layers, with a tolerance for numbers that GGUF files store as float32.

    Args:
        own: layer read from a GGUF file.
        other: layer read from a directory of transformers.
        has_scale: True to compare the scale of attention scores. llama.cpp derives Gemma's scale from the model size.
    """
    replace = msgspec.structs.replace
    assert own.residual_scale == pytest.approx(other.residual_scale)
    if isinstance(own.attention, SelectiveScanConfig) and isinstance(other.attention, SelectiveScanConfig):
        assert own.attention.norm_eps == pytest.approx(other.attention.norm_eps)
        own = replace(own, attention=replace(own.attention, norm_eps=other.attention.norm_eps))
    if not isinstance(own.attention, KVAttention):
        assert replace(own, residual_scale=other.residual_scale) == other
        return
    scale = other.attention.scale
    if has_scale and scale is not None:
        assert own.attention.scale == pytest.approx(scale)
    if own.attention.rotary is not None and other.attention.rotary is not None:
        turned_dim = own.attention.turned_dim
        found, wanted = (rotary_frequencies(layer.attention.rotary, turned_dim) for layer in (own, other))
        np.testing.assert_allclose(found, wanted, rtol=1e-6)
        wanted_rotary = other.attention.rotary
        own_rotary = replace(own.attention.rotary, theta=wanted_rotary.theta, scaling=wanted_rotary.scaling)
        own = replace(own, attention=replace(own.attention, rotary=own_rotary))
    attention = replace(own.attention, scale=scale)
    if isinstance(attention, AttentionConfig) and attention.temperature is not None:
        assert attention.temperature.scale == pytest.approx(other.attention.temperature.scale)
        attention = replace(attention, temperature=other.attention.temperature)
    if isinstance(own.mlp, MlpConfig) and isinstance(other.mlp, MlpConfig):
        assert own.mlp.cutoff == pytest.approx(other.mlp.cutoff)
        own = replace(own, mlp=replace(own.mlp, cutoff=other.mlp.cutoff))
    assert replace(own, attention=attention, residual_scale=other.residual_scale) == other


def test_gguf_file_of_falcon_mamba_is_read_as_a_mamba_with_norms(
    tiny_checkpoints: ModuleType,
    tiny_checkpoint: Callable[..., Path],
    tensors_of: Callable[[Checkpoint], dict[str, torch.Tensor]],
    tmp_path: Path,
) -> None:
    """llama.cpp has one epsilon for all norms: that of the layers' input norms."""
    path = tmp_path / "model.gguf"
    tiny_checkpoints.write_family_gguf(tiny_checkpoint("falcon-mamba"), path)
    ours, theirs = open_checkpoint(path), open_checkpoint(tiny_checkpoint("falcon-mamba"))
    assert (ours.config.family, theirs.config.family) == ("mamba", "falcon_mamba")
    for own, other in zip(ours.config.layers, theirs.config.layers, strict=True):
        assert isinstance(own.attention, SelectiveScanConfig)
        assert isinstance(other.attention, SelectiveScanConfig)
        assert (own.attention.norm_eps, other.attention.norm_eps) == (pytest.approx(1e-4), 1e-5)
        assert msgspec.structs.replace(own.attention, norm_eps=1e-5) == other.attention
    expected, found = tensors_of(theirs), tensors_of(ours)
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_slopes_of_heads_follow_a_geometric_sequence() -> None:
    assert alibi_slopes(4, bias_max=4.0) == (0.5, 0.25, 0.125, 0.0625)
    assert alibi_slopes(8) == tuple(2.0**-power for power in range(1, 9))
    assert alibi_slopes(6, scale=2.0) == tuple(2 * 2.0**-power for power in (2, 4, 6, 8, 1, 3))


def test_every_model_family_has_one_name() -> None:
    names = [family.name for family in FAMILIES]
    classes = [name for family in FAMILIES for name in family.classes]
    for listed in (names, classes):
        assert len(set(listed)) == len(listed)


def test_sliding_windows_follow_the_pattern_of_each_family() -> None:
    assert windows(read("Gemma2ForCausalLM", head_dim=16)) == [4096, None] * 3
    assert windows(read("Gemma3ForCausalLM", head_dim=16, sliding_window=8)) == [8] * 5 + [None]
    assert windows(read("Gemma3ForCausalLM", head_dim=16, sliding_window=8, sliding_window_pattern=2)) == [8, None] * 3
    assert windows(read("Olmo3ForCausalLM", sliding_window=8)) == [8, 8, 8, None, 8, 8]
    assert windows(read("Cohere2ForCausalLM", sliding_window=8)) == [8, 8, 8, None, 8, 8]
    assert windows(read("Olmo2ForCausalLM")) == [None] * 6


def test_gemma_3_uses_a_larger_theta_in_layers_without_window() -> None:
    old = read("Gemma3ForCausalLM", head_dim=16, rope_theta=1e6, rope_local_base_freq=1e4)
    new = read(
        "Gemma3ForCausalLM",
        head_dim=16,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )
    assert old == new == read("Gemma3ForCausalLM", head_dim=16)
    thetas = [layer.attention.rotary.theta for layer in new.layers if layer.attention.rotary is not None]
    assert thetas == [1e4] * 5 + [1e6]


def test_gemma_3_scales_positions_only_in_layers_without_window() -> None:
    scaling = {"rope_type": "linear", "factor": 8.0}
    config = read("Gemma3ForCausalLM", head_dim=16, rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling=scaling)
    scalings = [layer.attention.rotary.scaling for layer in config.layers if layer.attention.rotary is not None]
    assert scalings[:5] == [None] * 5
    assert scalings[5] is not None
    assert config.context_tokens_max == 512


def test_layers_without_position_embeddings_are_read() -> None:
    def has_positions(config: ModelConfig) -> list[bool]:
        return [layer.attention.rotary is not None for layer in config.layers]

    assert has_positions(read("SmolLM3ForCausalLM")) == [True, True, True, False, True, True]
    assert has_positions(read("SmolLM3ForCausalLM", no_rope_layers=[1, 0, 1, 0, 1, 0])) == [True, False] * 3
    assert has_positions(read("Cohere2ForCausalLM", sliding_window=8)) == [True, True, True, False, True, True]


def test_published_config_of_gpt_oss_is_read() -> None:
    """Read the fields of the smaller model's published config, without fields that do not matter here."""
    yarn = {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096}
    config = read(
        "GptOssForCausalLM",
        attention_bias=True,
        experts_per_token=4,
        head_dim=64,
        hidden_act="silu",
        hidden_size=2880,
        initial_context_length=4096,
        intermediate_size=2880,
        layer_types=["sliding_attention", "full_attention"] * 12,
        max_position_embeddings=131_072,
        num_attention_heads=64,
        num_experts_per_tok=4,
        num_hidden_layers=24,
        num_key_value_heads=8,
        num_local_experts=32,
        rms_norm_eps=1e-5,
        rope_scaling={**yarn, "rope_type": "yarn", "truncate": False},
        rope_theta=150_000,
        sliding_window=128,
        swiglu_limit=7.0,
        vocab_size=201_088,
    )
    assert windows(config) == [128, None] * 12
    assert config.context_tokens_max == 131_072
    rotary = config.heads.rotary
    assert rotary is not None
    assert rotary.scaling is not None
    assert (rotary.theta, rotary.scaling.factor, rotary.scaling.rounds_ends) == (150_000.0, 32.0, False)
    mlp = config.layers[0].mlp
    assert isinstance(mlp, ExpertsConfig)
    assert (mlp.expert_count, mlp.experts_per_token, mlp.intermediate_size) == (32, 4, 2880)
    assert config.heads.has_sinks
    assert why_not_native(config, "bfloat16") is None


def test_llama_4_layer_kinds_are_read_from_its_config() -> None:
    """Read configs with the fields of Scout and Maverick."""

    def kinds(config: ModelConfig) -> list[tuple[bool, int | None, bool, str, str]]:
        return [
            (
                layer.attention.rotary is not None,
                layer.attention.section,
                layer.attention.temperature is not None,
                layer.attention.qk_norm,
                type(layer.mlp).__name__,
            )
            for layer in config.layers
        ]

    scout = read(
        "Llama4ForCausalLM", **MIXTURE, no_rope_layers=[], attn_temperature_tuning=4, intermediate_size_mlp=128
    )
    local, whole = (True, 8192, False, "unit", "ExpertsConfig"), (False, None, True, "none", "ExpertsConfig")
    assert kinds(scout) == [local, local, local, whole, local, local]
    maverick = read(
        "Llama4ForCausalLM",
        **MIXTURE,
        use_qk_norm=False,
        interleave_moe_layer_step=2,
        attn_temperature_tuning=False,
        layer_types=["chunked_attention"] * 6,
        intermediate_size_mlp=128,
    )
    mlps = [layer.mlp for layer in maverick.layers]
    assert [mlp.intermediate_size for mlp in mlps] == [128, 96] * 3
    assert [isinstance(mlp, ExpertsConfig) and mlp.shared_size == 96 for mlp in mlps] == [False, True] * 3
    assert {(kind[1], kind[2], kind[3]) for kind in kinds(maverick)} == {(8192, False, "none")}
    by_name = read("Llama4ForCausalLM", **MIXTURE, moe_layers=[0, 5])
    assert [isinstance(layer.mlp, ExpertsConfig) for layer in by_name.layers] == [True] + [False] * 4 + [True]


def test_both_spellings_of_the_layers_of_nemotron_h_are_equivalent() -> None:
    names = ["mamba", "mlp", "attention", "linear_attention", "moe", "full_attention"]
    by_letters = read("NemotronHForCausalLM", hybrid_override_pattern="M-*ME*")
    assert by_letters == read("NemotronHForCausalLM", layers_block_type=names)
    assert by_letters == read("NemotronHForCausalLM", layers_block_type=names, hybrid_override_pattern="-")
    assert [layer.attention is None for layer in by_letters.layers] == [False, True, False, False, True, False]


def test_null_switches_off_a_cap_of_gemma_2() -> None:
    config = read("Gemma2ForCausalLM", head_dim=16, attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (config.heads.score_cap, config.logit_cap) == (None, None)
    usual = read("Gemma2ForCausalLM", head_dim=16)
    assert (usual.heads.score_cap, usual.logit_cap) == (50.0, 30.0)


def test_idefics_text_config_defaults_to_llama() -> None:
    class_name = "Idefics3ForConditionalGeneration"
    described = {"architectures": [class_name], "text_config": {"num_hidden_layers": 2, "rope_theta": 500_000.0}}
    config = model_config_from(described, {}, dtype_name="bfloat16")
    assert (config.vocab_size, config.hidden_size, config.layer_count) == (32_000, 4096, 2)
    assert (config.heads.head_count, config.context_tokens_max, config.norm_eps) == (32, 2048, 1e-6)
    without = model_config_from({"architectures": [class_name]}, {}, dtype_name="bfloat16")
    assert (without.layer_count, without.norm_eps) == (32, 1e-5)


@pytest.mark.parametrize(
    "class_name, fields, said",
    [
        ("LlamaForCausalLM", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping in config.json is 30.0"),
        ("LlamaForCausalLM", {"residual_multiplier": 0.22}, "residual_multiplier in config.json is 0.22"),
        ("LlamaForCausalLM", {"num_local_experts": 8}, "num_local_experts in config.json is 8"),
        ("Qwen2ForCausalLM", {"no_rope_layers": [1] * 6}, "no_rope_layers in config.json is [1, 1"),
        ("Cohere2ForCausalLM", {"use_qk_norm": True}, "use_qk_norm in config.json is True"),
        ("Qwen2ForCausalLM", {"is_causal": False}, "is_causal in config.json is False"),
        ("Gemma2ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention in config.json is"),
        ("GraniteForCausalLM", {"use_post_norm": True}, "use_post_norm in config.json is True"),
        ("LlamaForCausalLM", {"no_rope_layer_interval": 4}, "no_rope_layer_interval in config.json is 4"),
        ("LlamaForCausalLM", {"scale_emb": 12}, "scale_emb in config.json is 12"),
        ("LlamaForCausalLM", {"qk_layernorm": True}, "qk_layernorm in config.json is True"),
        ("LlamaForCausalLM", {"kv_lora_rank": 512}, "kv_lora_rank in config.json is 512"),
        ("MixtralForCausalLM", {**MIXTURE, "mlp_only_layers": [1]}, "mlp_only_layers in config.json is [1]"),
        ("MixtralForCausalLM", {**MIXTURE, "decoder_sparse_step": 2}, "decoder_sparse_step in config.json is 2"),
        ("MixtralForCausalLM", {**MIXTURE, "scoring_func": "sigmoid"}, "scoring_func in config.json is 'sigmoid'"),
        (
            "MixtralForCausalLM",
            {**MIXTURE, "routed_scaling_factor": 2.5},
            "routed_scaling_factor in config.json is 2.5",
        ),
        ("Glm4MoeForCausalLM", {**ROUTED, "scoring_func": "softmax"}, "scoring_func in config.json is 'softmax'"),
        ("Glm4MoeForCausalLM", {**ROUTED, "topk_method": "greedy"}, "topk_method in config.json is 'greedy'"),
        ("Glm4MoeForCausalLM", {**ROUTED, "moe_layer_freq": 2}, "moe_layer_freq in config.json is 2"),
        ("Glm4MoeForCausalLM", {**ROUTED, "n_group": 3}, "8 experts are in 3 groups"),
        ("Glm4MoeForCausalLM", {**ROUTED, "n_group": 8}, "that a group counts by is 2, allowed is 1 to 1"),
        ("Glm4MoeForCausalLM", {**ROUTED, "n_group": 4, "topk_group": 1}, "for each token is 3, allowed is 1 to 2"),
        ("Qwen3MoeForCausalLM", {**MIXTURE, "moe_intermediate_size": 32, "n_group": 2}, "n_group in config.json is 2"),
        ("Llama4ForCausalLM", {**MIXTURE, "no_rope_layers": [1]}, "no_rope_layers in config.json has 1 entries"),
        (
            "Llama4ForCausalLM",
            {**MIXTURE, "layer_types": ["sliding_attention"] * 6},
            "must be chunked_attention or full",
        ),
        ("Llama4ForCausalLM", {**MIXTURE, "attention_chunk_size": 0}, "attention_chunk_size is 0, allowed is 1"),
        ("Llama4ForCausalLM", {**MIXTURE, "floor_scale": 0}, "floor_scale is 0, allowed is 1"),
        ("Llama4ForCausalLM", {**MIXTURE, "scoring_func": "softmax"}, "scoring_func in config.json is 'softmax'"),
        (
            "GptOssForCausalLM",
            {**MIXTURE, "swiglu_limit": 5.0},
            "swiglu_limit in config.json is 5.0, but it must be 7.0",
        ),
        (
            "GptOssForCausalLM",
            {**MIXTURE, "swiglu_alpha": 1.0},
            "swiglu_alpha in config.json is 1.0, but it must be 1.7",
        ),
        ("MixtralForCausalLM", {**MIXTURE, "swiglu_limit": 7.0}, "swiglu_limit in config.json is 7.0"),
        ("GraniteForCausalLM", {"layer_types": ["mamba"] * 6}, "layer_types in config.json is ['mamba'"),
        ("GraniteForCausalLM", {"logits_scaling": 0}, "logits_scaling in config.json is 0, but it must be above 0"),
        ("Gemma2ForCausalLM", {"hidden_activation": "tanh"}, "hidden_activation in config.json is 'tanh'; supported"),
        ("Gemma2ForCausalLM", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar in config.json is 0"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1]}, "no_rope_layers in config.json has 1 entries"),
        ("Gemma3ForCausalLM", {"sliding_window_pattern": 0}, "sliding_window_pattern in config.json is 0, but it must"),
        (
            "Cohere2ForCausalLM",
            {"sliding_window_pattern": 0},
            "sliding_window_pattern in config.json is 0, but it must",
        ),
        ("LlamaForCausalLM", {"rope_scaling": {"type": "linear", "factor": 1e308}}, "context_tokens_max is 2147483648"),
        ("LlamaForCausalLM", {"rope_theta": 1.0, "rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_theta is 1.0"),
        (
            "LlamaForCausalLM",
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": 1.0, "mscale_all_dim": -14.4}},
            "mscale_all_dim",
        ),
        ("SmolLM3ForCausalLM", {"no_rope_layer_interval": 0}, "no_rope_layer_interval in config.json is 0"),
        ("Glm4ForCausalLM", {"partial_rotary_factor": 1.5}, "partial_rotary_factor in config.json is 1.5"),
        ("Olmo3ForCausalLM", {"layer_types": ["full_attention"]}, "layer_types in config.json has 1 entries"),
        (
            "Phi3ForCausalLM",
            {"rope_scaling": {"type": "longrope"}},
            "short_factor in rope_scaling in config.json is None",
        ),
        (
            "Phi3ForCausalLM",
            {"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [2.0]}},
            "has 1 rope frequency factors, but 16 rotated dimensions need 8",
        ),
        (
            "Phi3ForCausalLM",
            {"rope_scaling": {"type": "longrope", "short_factor": [True]}},
            "must be a list of 1 to 65536 numbers",
        ),
        (
            "Phi3ForCausalLM",
            {"original_max_position_embeddings": 1, "rope_scaling": {"type": "longrope", "long_factor": [1.0] * 8}},
            "original_max_position_embeddings is 1, which must be 2 or more",
        ),
        (
            "Mistral3ForConditionalGeneration",
            {"text_config": {**BASE, "model_type": "mistral4"}},
            "the text_config in config.json is of a mistral4; supported in such a model is mistral",
        ),
        (
            "Gemma3ForConditionalGeneration",
            {"text_config": {**BASE, "use_bidirectional_attention": True}},
            "use_bidirectional_attention in text_config in config.json is True",
        ),
        ("Gemma3ForConditionalGeneration", {}, "text_config in config.json lacks num_hidden_layers"),
        ("MistralForCausalLM", {"sliding_window": 0}, "sliding_window in config.json is 0, but it must be at least 1"),
        ("Lfm2ForCausalLM", {"conv_L_cache": 1, "full_attn_idxs": [0]}, "kernel size is 1, allowed is 2 to 64"),
        ("Lfm2MoeForCausalLM", {**MIXTURE, "num_experts": 4, "moe_intermediate_size": 32}, "lacks layer_types"),
        ("MambaForCausalLM", {"hidden_act": "gelu"}, "hidden_act in config.json is 'gelu'"),
        ("MambaForCausalLM", {"time_step_rank": 0}, "rank of the time steps is 0, allowed is 1 to"),
        ("FalconMambaForCausalLM", {"mixer_rms_eps": 0.0}, "epsilon of the state space's norms is 0.0"),
        ("JambaForCausalLM", {"attn_layer_period": 0}, "attn_layer_period in config.json is 0, but it must"),
        ("NemotronHForCausalLM", {"moe_latent_size": 64}, "moe_latent_size in config.json is 64, but it must be null"),
        ("OlmoHybridForCausalLM", {"linear_num_key_heads": 0}, "linear_num_key_heads in config.json is 0"),
        ("NemotronHForCausalLM", {"attention_bias": True}, "attention_bias in config.json is True"),
        ("NemotronHForCausalLM", {"hybrid_override_pattern": "M-X"}, "must be a list of linear_attention, moe"),
        ("NemotronHForCausalLM", {"mlp_bias": True}, "mlp_bias in config.json is True, but it must be false"),
        ("JambaForCausalLM", {"mamba_d_conv": 1}, "kernel size is 1, allowed is 2 to 64"),
        ("Glm4MoeForCausalLM", {**ROUTED, "topk_group": 0}, "groups for each token is 0, allowed is 1 to 1"),
        (
            "ExaoneMoeForCausalLM",
            {**EXPERTS, "mlp_layer_types": ["dense"] * 5},
            "'dense', 'dense'], but it must be a list of 6 times 'dense' or 'sparse'",
        ),
        ("AfmoeForCausalLM", {**EXPERTS, "attention_bias": True}, "attention_bias in config.json is True"),
        ("AfmoeForCausalLM", {**EXPERTS, "route_norm": False}, "route_norm in config.json is False"),
        ("AfmoeForCausalLM", {**EXPERTS, "sliding_window": None}, "sliding_window in config.json is None"),
        ("AfmoeForCausalLM", {**EXPERTS, "score_func": "softmax"}, "score_func in config.json is 'softmax'"),
        ("Ernie4_5_MoeForCausalLM", {"use_bias": True}, "use_bias in config.json is True"),
        ("Ernie4_5_MoeForCausalLM", {"moe_norm_min": 0.1}, "moe_norm_min in config.json is 0.1"),
        ("Cohere2MoeForCausalLM", {**EXPERTS, "expert_selection_fn": "tanh"}, "expert_selection_fn in config.json is"),
        (
            "Cohere2MoeForCausalLM",
            {**EXPERTS, "shared_expert_combination_strategy": "max"},
            "shared_expert_combination_strategy in config.json is 'max', but it must be 'average' or 'sum'",
        ),
    ],
)
def test_unsupported_variant_is_refused_by_field_name(class_name: str, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        read(class_name, **fields)
    assert said in str(caught.value)


def test_longrope_factors_depend_on_served_context() -> None:
    short, long = [1.0] * 8, [3.0] * 8
    scaling = {"type": "su", "short_factor": short, "long_factor": long}
    fields = {**BASE, "architectures": ["Phi3ForCausalLM"], "original_max_position_embeddings": 64}
    for served, wanted in ((64, short), (65, long), (None, long)):
        config = model_config_from({**fields, "rope_scaling": scaling}, {}, dtype_name="float32", context_tokens=served)
        assert config.context_tokens_max == 512
        assert config.heads.rotary is not None
        found = config.heads.rotary.scaling
        assert found is not None
        assert (found.kind, found.factor, found.attention_factor) == ("longrope", 8.0, None)
        assert found.frequency_factors == tuple(wanted)


def test_longrope_factors_of_gguf_depend_on_served_context(
    tiny_checkpoints: ModuleType, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    directory = shutil.copytree(tiny_checkpoint("phi3-longrope"), tmp_path / "model")
    fields = json.loads((directory / "config.json").read_text())
    fields["original_max_position_embeddings"] = 64
    (directory / "config.json").write_text(json.dumps(fields))
    path = tmp_path / "model.gguf"
    tiny_checkpoints.write_family_gguf(directory, path)
    for served, wanted in ((64, "short_factor"), (None, "long_factor")):
        rotary = open_checkpoint(path, context_tokens=served).config.heads.rotary
        assert rotary is not None
        assert rotary.scaling is not None
        assert rotary.scaling.frequency_factors == pytest.approx(fields["rope_parameters"][wanted])


def test_dynamic_scaling_changes_nothing_within_the_context() -> None:
    scaling = {"rope_type": "dynamic", "factor": 6.0}
    assert read("InternLM3ForCausalLM", rope_scaling=scaling) == read("InternLM3ForCausalLM")


def test_text_config_of_gemma_3_with_vision_is_read() -> None:
    """Read the fields of the published config. For missing fields, transformers' defaults apply."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106], "vision_config": {}}
    config = model_config_from({**outer, "text_config": text}, {}, dtype_name="bfloat16")
    heads = config.heads
    assert (config.family, config.vocab_size, config.context_tokens_max) == ("gemma3", 262_208, 131_072)
    assert (heads.head_count, heads.kv_head_count, heads.head_dim, heads.scale) == (8, 4, 256, 1 / 16)
    assert (config.tie_word_embeddings, config.eos_token_ids, config.layer_count) == (True, (1, 106), 34)


@pytest.mark.parametrize("before", ("language_model.model.", "model.language_model."))
def test_image_tensors_are_skipped_under_old_and_new_names(
    before: str,
    tiny_checkpoint: Callable[..., Path],
    tensors_of: Callable[[Checkpoint], dict[str, torch.Tensor]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain = tiny_checkpoint("mistral")
    head = "language_model.lm_head." if before.startswith("language_model") else "lm_head."
    tensors = {"vision_tower.patch_conv.weight": torch.zeros(2, 2), "model.vision_tower.norm.weight": torch.zeros(2)}
    for name, tensor in load_file(plain / "model.safetensors").items():
        tensors[name.replace("model.", before, 1).replace("lm_head.", head, 1)] = tensor
    config = json.loads((plain / "config.json").read_text())
    outer = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "text_config": config,
        "vision_config": {"model_type": "unknown"},
    }
    (tmp_path / "config.json").write_text(json.dumps(outer))
    save_file(tensors, tmp_path / "model.safetensors")
    found, expected = open_checkpoint(tmp_path), open_checkpoint(plain)
    assert msgspec.structs.replace(found.config, eos_token_ids=expected.config.eos_token_ids) == expected.config
    ours, theirs = tensors_of(found), tensors_of(expected)
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert "images are not served" in caplog.text


@pytest.mark.parametrize(
    "name, part, before, kind",
    (
        ("MantisForConditionalGeneration", "text_config", "language_model.", "mistral"),
        ("TarsierForConditionalGeneration", "text_config", "model.language_model.", "llama"),
        ("BeeForConditionalGeneration", "text_config", "model.language_model.", "cohere2"),
        ("Blip2ForConditionalGeneration", "text_config", "language_model.", "opt"),
        ("KimiK25ForConditionalGeneration", "text_config", "language_model.", "moonlight"),
        ("InternVLChatModel", "llm_config", "language_model.", "qwen2"),
        ("NemotronH_Nano_VL_V2", "llm_config", "language_model.", "nemotron-h"),
        ("Ovis", "llm_config", "llm.", "gemma2"),
        ("DeepseekVLV2ForCausalLM", "language_config", "language.", "deepseek-v2-lite"),
        ("DotsOCRForCausalLM", None, "", "qwen2"),
        ("KeyeForConditionalGeneration", None, "", "qwen3"),
        ("Phi3VForCausalLM", None, "", "phi3"),
    ),
)
def test_language_model_of_any_family_is_read_from_a_model_with_images(
    name: str,
    part: str | None,
    before: str,
    kind: str,
    tiny_checkpoint: Callable[..., Path],
    tensors_of: Callable[[Checkpoint], dict[str, torch.Tensor]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain = tiny_checkpoint(kind)
    config = json.loads((plain / "config.json").read_text())
    if kind in ("cohere2", "opt"):
        del config["rms_norm_eps"]  # a field of other families
    if kind == "moonlight":
        config["model_type"] = "kimi_k2"  # Kimi K2's own type, which transformers does not know.
    outer = {"architectures": [name], "model_type": "other", "vision_config": {"hidden_size": 8}}
    written = {**config, **outer} if part is None else {**outer, part: config}
    (tmp_path / "config.json").write_text(json.dumps(written))
    places = ("vision_tower", "visual", "model.vision_embed_tokens")
    tensors = {f"{place}.patch.weight": torch.zeros(2, 2) for place in places}
    for tensor_name, tensor in load_file(plain / "model.safetensors").items():
        is_inner = before.startswith("model.") and tensor_name.startswith("model.")
        outside = tensor_name.replace("model.", before, 1) if is_inner else before + tensor_name
        tensors[tensor_name if before.startswith("model.") and not is_inner else outside] = tensor
    save_file(tensors, tmp_path / "model.safetensors")
    expected = open_checkpoint(plain)
    caplog.clear()
    found = open_checkpoint(tmp_path)
    assert caplog.messages == ["images are not served: only the text part of this model is supported"]
    assert msgspec.structs.replace(found.config, eos_token_ids=expected.config.eos_token_ids) == expected.config
    ours, theirs = tensors_of(found), tensors_of(expected)
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[tensor_name], theirs[tensor_name]) for tensor_name in theirs)


@pytest.mark.parametrize(
    "name, kind", (("Qwen2_5OmniModel", "qwen2"), ("Qwen3OmniMoeForConditionalGeneration", "qwen3-moe"))
)
def test_thinker_of_a_model_that_speaks_is_read(
    name: str,
    kind: str,
    tiny_checkpoint: Callable[..., Path],
    tensors_of: Callable[[Checkpoint], dict[str, torch.Tensor]],
    tmp_path: Path,
) -> None:
    plain = tiny_checkpoint(kind)
    config = json.loads((plain / "config.json").read_text())
    text = {**config, "model_type": {"qwen2": "qwen2_5_omni_text", "qwen3-moe": "qwen3_omni_moe_text"}[kind]}
    thinker = {"text_config": text, "vision_config": {"hidden_size": 8}, "audio_config": {"d_model": 8}}
    outer = {"architectures": [name], "thinker_config": thinker, "talker_config": {"hidden_size": 8}}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    tensors = {f"thinker.{key}": tensor for key, tensor in load_file(plain / "model.safetensors").items()}
    further = ("thinker.visual.norm.weight", "talker.model.norm.weight", "token2wav.weight")
    save_file({**tensors, **{key: torch.zeros(2) for key in further}}, tmp_path / "model.safetensors")
    found, expected = open_checkpoint(tmp_path), open_checkpoint(plain)
    assert found.config.layers == expected.config.layers
    ours, theirs = tensors_of(found), tensors_of(expected)
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_language_model_that_no_family_serves_is_refused_by_its_type() -> None:
    config = {"architectures": ["LlavaForConditionalGeneration"], "text_config": {"model_type": "unheard_of"}}
    with pytest.raises(ModelLoadError, match="the model's architecture is unheard_of"):
        model_config_from(config, {}, dtype_name="float32")


@pytest.mark.parametrize("kind", ("olmo-hybrid", "qwen3-vl-moe", "kimi-linear"))
def test_checkpoint_that_transformers_saved_again_is_read(
    kind: str,
    tiny_checkpoint: Callable[..., Path],
    tensors_of: Callable[[Checkpoint], dict[str, torch.Tensor]],
    tmp_path: Path,
) -> None:
    """Tiny checkpoints of these kinds have the authors' names and shapes. transformers writes others."""
    authors = shutil.copytree(tiny_checkpoint(kind), tmp_path / "model")
    expected = tensors_of(open_checkpoint(authors))
    tensors, saved = load_file(authors / "model.safetensors"), {}
    for name, tensor in tensors.items():
        layer, _, module = name.partition("post_attention_layernorm")
        if ".mlp.experts." in name:
            tensor = tensor.transpose(1, 2).contiguous()
        if kind == "olmo-hybrid" and module and f"{layer}post_feedforward_layernorm.weight" in tensors:
            name = f"{layer}feedforward_layer_norm.weight"
        if kind == "kimi-linear":
            name = name.replace(".mlp.", ".block_sparse_moe.")
        saved[name] = tensor
    assert any(name not in tensors or saved[name].shape != tensors[name].shape for name in saved)
    save_file(saved, authors / "model.safetensors")
    found = tensors_of(open_checkpoint(authors))
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_older_qwen_2_5_vl_checkpoint_is_read(
    tiny_checkpoint: Callable[..., Path],
    tensors_of: Callable[[Checkpoint], dict[str, torch.Tensor]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Read the published names: no text_config, no prefix of the language model, and the type "mrope"."""
    nested = tiny_checkpoint("qwen2.5-vl")
    config = json.loads((nested / "config.json").read_text())
    text = config.pop("text_config")
    rope = {"type": "mrope", "mrope_section": [2, 3, 3]}
    text |= {"rope_parameters": None, "rope_scaling": rope, "rope_theta": text["rope_parameters"]["rope_theta"]}
    (tmp_path / "config.json").write_text(json.dumps({**text, **config}))
    for name in ("generation_config.json", "preprocessor_config.json"):
        shutil.copy(nested / name, tmp_path)
    tensors = load_file(nested / "model.safetensors")
    older = (("model.language_model.", "model."), ("model.visual.", "visual."))
    for new, old in older:
        tensors = {name.replace(new, old): tensor for name, tensor in tensors.items()}
    assert any(name.startswith("visual.") for name in tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    expected = open_checkpoint(nested)
    caplog.clear()
    found = open_checkpoint(tmp_path)
    assert not caplog.messages
    assert found.config == expected.config
    assert found.vision is not None
    assert expected.vision is not None
    assert (found.vision.config, found.vision.processing) == (expected.vision.config, expected.vision.processing)
    assert found.vision.weight_bytes == expected.vision.weight_bytes > 0
    ours, theirs = tensors_of(found), tensors_of(expected)
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_multi_token_prediction_layers_are_skipped(
    tiny_checkpoints: ModuleType,
    tiny_checkpoint: Callable[..., Path],
    tensors_of: Callable[[Checkpoint], dict[str, torch.Tensor]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Skip the prediction layer, which checkpoints of DeepSeek and GLM number as one more layer."""
    caplog.set_level("INFO")
    plain = tiny_checkpoint("glm4-moe")
    config = json.loads((plain / "config.json").read_text())
    tensors = load_file(plain / "model.safetensors")
    last = f"model.layers.{config['num_hidden_layers'] - 1}."
    further = f"model.layers.{config['num_hidden_layers']}."
    more = {name.replace(last, further): tensor.clone() for name, tensor in tensors.items() if name.startswith(last)}
    more |= {f"{further}{name}.weight": torch.zeros(64) for name in ("enorm", "hnorm", "shared_head.norm")}
    save_file({**tensors, **more, f"{further}eh_proj.weight": torch.zeros(64, 128)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    tiny_checkpoints.write_family_gguf(tmp_path, tmp_path / "model.gguf")
    expected = tensors_of(open_checkpoint(plain))
    for path in (tmp_path, tmp_path / "model.gguf"):
        caplog.clear()
        found = tensors_of(open_checkpoint(path))
        assert set(found) == set(expected)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert "layers that predict further tokens are not used" in caplog.text
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 0}))
    with pytest.raises(ModelLoadError, match="does not use"):
        open_checkpoint(tmp_path)


def test_exaone_3_reads_both_spellings_of_fields() -> None:
    """Read the published config, and the config that transformers saves."""
    theirs = {name: value for name, value in BASE.items() if name != "num_hidden_layers"}
    config = {**theirs, "architectures": ["ExaoneForCausalLM"], "num_layers": 6, "layer_norm_epsilon": 1e-3}
    published = model_config_from({**config, "activation_function": "silu"}, {}, dtype_name="float32")
    assert published == read("ExaoneForCausalLM", rms_norm_eps=1e-3)
    assert (published.layer_count, published.norm_eps) == (6, 1e-3)
    with pytest.raises(ModelLoadError, match="activation_function in "):
        model_config_from({**config, "activation_function": "gelu"}, {}, dtype_name="float32")


def test_falcon_3_and_internlm_3_are_described_as_llamas() -> None:
    """Read the fields of the published configs."""
    falcon = {
        "head_dim": 256,
        "num_key_value_heads": 4,
        "attention_bias": False,
        "mlp_bias": False,
        "rope_scaling": None,
    }
    config = read("LlamaForCausalLM", activation="swiglu", rope_theta=1000042, **falcon)
    assert (config.heads.head_dim, config.heads.query_size) == (256, 1024)
    intern = read("InternLM3ForCausalLM", head_dim=16, qkv_bias=False, bias=False)
    assert intern.layers == read("LlamaForCausalLM").layers
    biased = read("InternLM3ForCausalLM", qkv_bias=True, bias=False)
    assert (biased.heads.has_bias, biased.heads.has_output_bias) == (True, False)


@pytest.mark.parametrize("name", ("MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM"))
def test_config_of_the_authors_of_minimax_01_describes_the_same_model(
    name: str, tiny_checkpoint: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    replace = msgspec.structs.replace
    saved = json.loads((tiny_checkpoint("minimax") / "config.json").read_text())
    config = {
        **saved,
        "architectures": [name],
        "attn_type_list": [int(kind == "full_attention") for kind in saved.pop("layer_types")],
        "postnorm": True,
        "rotary_dim": 16,
    }
    del config["layer_types"]
    for part, full in (("full_attn", "full_attention"), ("linear_attn", "linear_attention"), ("mlp", "mlp")):
        for factor in ("alpha", "beta"):
            config[f"layernorm_{full}_{factor}"] = config.pop(f"{part}_{factor}_factor")
    found = model_config_from(config, {}, dtype_name="float32")
    assert not caplog.messages
    expected = open_checkpoint(tiny_checkpoint("minimax")).config
    heads = replace(expected.heads, rotary=replace(expected.heads.rotary, rotated_dims=16))
    layers = [
        replace(layer, attention=heads) if layer.attention == expected.heads else layer for layer in expected.layers
    ]
    assert list(found.layers) == layers
    del config["postnorm"]
    sums = [layer.sums for layer in model_config_from(config, {}, dtype_name="float32").layers]
    assert not any(each.keeps_norms for each in sums if each is not None)


def test_config_of_the_authors_of_step_3_5_describes_the_same_model(
    tiny_checkpoint: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Lists have a further entry for a prediction layer, and some fields have other names."""
    expected = open_checkpoint(tiny_checkpoint("step3p5")).config
    config = json.loads((tiny_checkpoint("step3p5") / "config.json").read_text())["text_config"]
    rope = config.pop("rope_parameters")
    thetas = {kind: parameters.pop("rope_theta") for kind, parameters in rope.items()}
    parts = {kind: parameters.pop("partial_rotary_factor", 1.0) for kind, parameters in rope.items()}
    types = [*config["layer_types"], "full_attention"]
    renamed = {
        "num_attention_groups": "num_key_value_heads",
        "moe_num_experts": "n_routed_experts",
        "moe_top_k": "num_experts_per_tok",
    }
    config |= {theirs: config.pop(ours) for theirs, ours in renamed.items()}
    sliding_heads = config.pop("num_sliding_attention_heads")
    for name in ("mlp_layer_types", "per_layer_config"):
        del config[name]
    config |= {
        "architectures": ["Step3p5ForCausalLM"],
        "layer_types": types,
        "rope_theta": [thetas[kind] for kind in types],
        "partial_rotary_factors": [parts[kind] for kind in types],
        "rope_scaling": rope["full_attention"],
        "moe_layers_enum": "1,2,3,4",
        "attention_other_setting": {
            "attention_type": "sliding_attention",
            "num_attention_heads": sliding_heads,
            "num_attention_groups": 2,
            "head_dim": 32,
            "true_head_dim": 32,
        },
        "swiglu_limits": [*config["swiglu_limits"], 7.0],
        "swiglu_limits_shared": [*config["swiglu_limits_shared"], 7.0],
        "num_nextn_predict_layers": 1,
    }
    caplog.clear()
    found = model_config_from(config, {}, dtype_name="float32")
    assert not caplog.messages
    assert found.layers == expected.layers
    assert [getattr(layer.mlp, "limit", None) for layer in found.layers] == [0.1, None, 0.05, None]


def test_copies_of_a_shared_block_are_not_read(
    tiny_checkpoint: Callable[..., Path],
    tensors_of: Callable[[Checkpoint], dict[str, torch.Tensor]],
    tmp_path: Path,
) -> None:
    """Some files of Zamba2 have the block's weights in each layer with the block."""
    path = shutil.copytree(tiny_checkpoint("zamba2"), tmp_path / "model")
    expected = tensors_of(open_checkpoint(path))
    tensors = load_file(path / "model.safetensors")
    first, second = "model.layers.1.shared_transformer.", "model.layers.3.shared_transformer."
    copies = {name.replace(first, second): tensor.clone() for name, tensor in tensors.items() if first in name}
    assert copies
    assert not copies.keys() & tensors.keys()
    save_file({**tensors, **copies}, path / "model.safetensors")
    found = tensors_of(open_checkpoint(path))
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_inner_object_describes_the_layers_of_kimi_linear() -> None:
    fields = {**EXPERTS, "num_experts_per_token": 2, "model_max_length": 512, "kv_lora_rank": 32}
    fields |= {"qk_nope_head_dim": 16, "qk_rope_head_dim": 16}
    inner = {"head_dim": 32, "num_heads": 3, "short_conv_kernel_size": 5}
    layers = {"full_attn_layers": [2, 6], "kda_layers": [1, 3, 4, 5]}
    config = read("KimiLinearForCausalLM", **fields, linear_attn_config={**inner, **layers})
    mixers = [layer.attention for layer in config.layers]
    assert [index for index, mixer in enumerate(mixers) if isinstance(mixer, KVAttention)] == [1, 5]
    assert isinstance(mixers[0], DeltaNetConfig)
    assert (mixers[0].head_count, mixers[0].vector_size, mixers[0].kernel_size) == (3, 32, 5)
    with pytest.raises(ModelLoadError, match=r"kda_layers in linear_attn_config in config.json is \[1, 3\]"):
        read("KimiLinearForCausalLM", **fields, linear_attn_config={**layers, "kda_layers": [1, 3]})


def test_layer_types_win_over_a_pattern_of_letters() -> None:
    layer_types = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    config = read("Exaone4ForCausalLM", sliding_window=8, sliding_window_pattern="LLG", layer_types=layer_types)
    assert windows(config) == [8, 8, None] * 2


def test_unknown_fields_and_neutral_values_are_accepted() -> None:
    plain = read("LlamaForCausalLM")
    assert plain == read(
        "LlamaForCausalLM",
        transformers_version="5.0",
        made_with="care",
        residual_multiplier=1.0,
        num_local_experts=None,
        layer_types=["full_attention"] * 6,
    )


def test_mixture_of_identical_experts_equals_dense_model(
    tiny_checkpoint: Callable[..., Path], step_driver: ModuleType, cpu_kernels: str, tmp_path: Path
) -> None:
    """Compare log-probabilities. The weights of a token's experts add up to 1, so the sum is the dense MLP's output."""
    dense = tiny_checkpoint("llama")
    config = json.loads((dense / "config.json").read_text())
    tensors = {}
    for name, tensor in load_file(dense / "model.safetensors").items():
        projection = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}.get(name.split(".")[-2])
        if projection is None:
            tensors[name] = tensor
            continue
        layer = ".".join(name.split(".")[:3])
        for expert in range(5):
            tensors[f"{layer}.block_sparse_moe.experts.{expert}.{projection}.weight"] = tensor.clone()
        tensors[f"{layer}.block_sparse_moe.gate.weight"] = torch.randn(5, config["hidden_size"])
    mixture = {**config, "architectures": ["MixtralForCausalLM"], "num_local_experts": 5, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps(mixture))
    save_file(tensors, tmp_path / "model.safetensors")
    entries = []
    for path in (dense, tmp_path):
        driver = step_driver.StepDriver(step_driver.load_runner(path, cpu_kernels=cpu_kernels))
        driver.add("a", list(range(10, 40)), SamplingParams(temperature=0.0, prompt_logprobs=0))
        found = [entry for count in (20, 1, 9) for entry in driver.step({"a": count}).prompt_logprobs["a"]]
        entries.append([entry.logprob for entry in found])
    assert entries[1] == pytest.approx(entries[0], abs=1e-4)


def test_published_fields_of_mimo_v2_describe_the_model_of_transformers_fields() -> None:
    sizes = {
        "architectures": ["MiMoV2FlashForCausalLM"],
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 7,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 512,
    }
    published = {
        "head_dim": 192,
        "v_head_dim": 128,
        "swa_head_dim": 192,
        "swa_v_head_dim": 128,
        "swa_num_attention_heads": 64,
        "swa_num_key_value_heads": 8,
        "rope_theta": 5_000_000,
        "swa_rope_theta": 10_000,
        "partial_rotary_factor": 0.334,
        "attention_value_scale": 0.707,
        "attention_chunk_size": 128,
        "sliding_window_size": 128,
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0, 1],
        "moe_layer_freq": [0, 1, 1, 1, 1, 1, 1],
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "routed_scaling_factor": None,
        "n_shared_experts": None,
    }
    config = model_config_from({**sizes, **published}, {}, dtype_name="float32")
    assert config == model_config_from(sizes, {}, dtype_name="float32")
    assert config.windows == (None, 129)
    assert [entry and entry.head_count for entry in config.kv_entries] == [4, 8, 8, 8, 8, 4, 8]
