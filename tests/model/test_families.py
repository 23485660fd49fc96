"""Every family in the two formats: what a file says becomes the description, and unknown variants are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from trioserve.contracts.errors import ModelLoadError
from trioserve.contracts.sampling import SamplingParams
from trioserve.model.families.registry import FAMILIES
from trioserve.model.loading.checkpoint import Checkpoint, open_checkpoint
from trioserve.model.loading.hf_config import model_config_from
from trioserve.model.model_config import LayerConfig, ModelConfig

GGUF_KINDS = (
    "gemma",
    "gemma2",
    "gemma3",
    "phi3",
    "phi3-part",
    "olmo2",
    "smollm3",
    "granite",
    "glm4",
    "cohere",
    "cohere2",
    "ernie4_5",
    "seed_oss",
    "mixtral",
    "qwen3-moe",
    "olmoe",
    "granite-moe",
)
BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "vocab_size": 320,
    "max_position_embeddings": 512,
}


def read(class_name: str, **fields: Any) -> ModelConfig:
    return model_config_from({**BASE, "architectures": [class_name], **fields}, {}, dtype_name="float32")


def windows(config: ModelConfig) -> list[int | None]:
    return [layer.attention.window for layer in config.layers]


@pytest.mark.parametrize("kind", GGUF_KINDS)
def test_a_gguf_file_holds_the_model_that_its_directory_holds(
    kind: str,
    tiny_checkpoints: ModuleType,
    tiny_checkpoint: Callable[..., Path],
    tensors_of: Callable[[Checkpoint], dict[str, torch.Tensor]],
    tmp_path: Path,
) -> None:
    path = tmp_path / "model.gguf"
    tiny_checkpoints.write_family_gguf(tiny_checkpoint(kind), path)
    ours, theirs = open_checkpoint(path), open_checkpoint(tiny_checkpoint(kind))
    # In a file these are float32, and the tokenizer's end tokens are the model's.
    numbers = {"norm_eps", "embedding_scale", "logit_scale", "logit_cap", "eos_token_ids", "layers"}
    for field in set(ModelConfig.__struct_fields__) - numbers:
        assert getattr(ours.config, field) == getattr(theirs.config, field), field
    for field in ("norm_eps", "embedding_scale", "logit_scale", "logit_cap"):
        assert getattr(ours.config, field) == pytest.approx(getattr(theirs.config, field)), field
    for own, other in zip(ours.config.layers, theirs.config.layers, strict=True):
        check_close(own, other, has_scale=not kind.startswith("gemma"))
    expected, found = tensors_of(theirs), tensors_of(ours)
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def check_close(own: LayerConfig, other: LayerConfig, *, has_scale: bool) -> None:
    """has_scale: of scores; llama.cpp knows that of a Gemma by its size."""
    replace = msgspec.structs.replace
    assert own.residual_scale == pytest.approx(other.residual_scale)
    scale = other.attention.scale
    if has_scale and scale is not None:
        assert own.attention.scale == pytest.approx(scale)
    attention = replace(own.attention, scale=scale)
    assert replace(own, attention=attention, residual_scale=other.residual_scale) == other


def test_every_family_is_named_once() -> None:
    names = [family.name for family in FAMILIES]
    classes = [name for family in FAMILIES for name in family.classes]
    for listed in (names, classes):
        assert len(set(listed)) == len(listed)


def test_windows_alternate_as_each_family_does() -> None:
    assert windows(read("Gemma2ForCausalLM", head_dim=16)) == [4096, None] * 3
    assert windows(read("Gemma3ForCausalLM", head_dim=16, sliding_window=8)) == [8] * 5 + [None]
    assert windows(read("Gemma3ForCausalLM", head_dim=16, sliding_window=8, sliding_window_pattern=2)) == [8, None] * 3
    assert windows(read("Olmo3ForCausalLM", sliding_window=8)) == [8, 8, 8, None, 8, 8]
    assert windows(read("Cohere2ForCausalLM", sliding_window=8)) == [8, 8, 8, None, 8, 8]
    assert windows(read("Olmo2ForCausalLM")) == [None] * 6


def test_gemma_3_turns_slower_where_it_sees_everything() -> None:
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


def test_scaling_is_left_out_where_there_is_a_window() -> None:
    scaling = {"rope_type": "linear", "factor": 8.0}
    config = read("Gemma3ForCausalLM", head_dim=16, rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling=scaling)
    scalings = [layer.attention.rotary.scaling for layer in config.layers if layer.attention.rotary is not None]
    assert scalings[:5] == [None] * 5
    assert scalings[5] is not None
    assert config.context_tokens_max == 512


def test_layers_that_know_no_positions() -> None:
    def know(config: ModelConfig) -> list[bool]:
        return [layer.attention.rotary is not None for layer in config.layers]

    assert know(read("SmolLM3ForCausalLM")) == [True, True, True, False, True, True]
    assert know(read("SmolLM3ForCausalLM", no_rope_layers=[1, 0, 1, 0, 1, 0])) == [True, False] * 3
    assert know(read("Cohere2ForCausalLM", sliding_window=8)) == [True, True, True, False, True, True]


def test_a_cap_may_be_switched_off() -> None:
    config = read("Gemma2ForCausalLM", head_dim=16, attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (config.heads.score_cap, config.logit_cap) == (None, None)
    usual = read("Gemma2ForCausalLM", head_dim=16)
    assert (usual.heads.score_cap, usual.logit_cap) == (50.0, 30.0)


@pytest.mark.parametrize(
    "class_name, fields, said",
    [
        ("LlamaForCausalLM", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping in config.json is 30.0"),
        ("LlamaForCausalLM", {"residual_multiplier": 0.22}, "residual_multiplier in config.json is 0.22"),
        ("LlamaForCausalLM", {"num_local_experts": 8}, "num_local_experts in config.json is 8"),
        ("Qwen2ForCausalLM", {"no_rope_layers": [1] * 6}, "no_rope_layers in config.json is [1, 1"),
        ("CohereForCausalLM", {"use_qk_norm": True}, "use_qk_norm in config.json is True"),
        ("GraniteForCausalLM", {"layer_types": ["mamba"] * 6}, "layer_types in config.json is ['mamba'"),
        ("GraniteForCausalLM", {"logits_scaling": 0}, "logits_scaling in config.json is 0, but it must be above 0"),
        ("Gemma2ForCausalLM", {"hidden_activation": "relu"}, "hidden_activation in config.json is 'relu'; supported"),
        ("Gemma2ForCausalLM", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar in config.json is 0"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1]}, "no_rope_layers in config.json has 1 entries"),
        ("SmolLM3ForCausalLM", {"no_rope_layer_interval": 0}, "no_rope_layer_interval in config.json is 0"),
        ("Glm4ForCausalLM", {"partial_rotary_factor": 1.5}, "partial_rotary_factor in config.json is 1.5"),
        ("Olmo3ForCausalLM", {"layer_types": ["full_attention"]}, "layer_types in config.json has 1 entries"),
        ("Phi3ForCausalLM", {"rope_scaling": {"type": "longrope"}}, "'longrope'; supported are default, linear"),
    ],
)
def test_a_variant_that_is_not_computed_is_refused_by_name(class_name: str, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        read(class_name, **fields)
    assert said in str(caught.value)


def test_notes_and_neutral_values_are_no_variants() -> None:
    plain = read("LlamaForCausalLM")
    assert plain == read(
        "LlamaForCausalLM",
        transformers_version="5.0",
        made_with="care",
        residual_multiplier=1.0,
        num_local_experts=None,
        layer_types=["full_attention"] * 6,
    )


def test_identical_experts_are_the_dense_model(
    tiny_checkpoint: Callable[..., Path], step_driver: ModuleType, cpu_kernels: str, tmp_path: Path
) -> None:
    """The weights of those that are chosen add up to 1, so whichever they are, the sum is the dense MLP's."""
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
