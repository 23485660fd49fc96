"""Tests of layers with the gated delta rule, and of attention with gates (Qwen3-Next, Qwen3.5)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from trioserve.contracts.errors import ModelLoadError
from trioserve.contracts.sampling import SamplingParams
from trioserve.model.layer_config import AttentionConfig, DeltaNetConfig
from trioserve.model.loading.checkpoint import open_checkpoint
from trioserve.model.loading.hf_config import model_config_from
from trioserve.model.loading.names import TRANSFORMERS, FurtherLayers, match_tensors, tensor_places
from trioserve.model.model_config import ModelConfig
from trioserve.model.native.model import why_not_native
from trioserve.model.torch_step.recurrent_layers import _scanned_deltas

BASE: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "linear_num_value_heads": 16,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}


def read(**fields: Any) -> ModelConfig:
    return model_config_from({**BASE, **fields}, {}, dtype_name="float32")


def attends(config: ModelConfig) -> list[int]:
    return [index for index, layer in enumerate(config.layers) if isinstance(layer.attention, AttentionConfig)]


def test_every_fourth_layer_of_qwen3_next_is_attention() -> None:
    assert attends(read()) == [3, 7]
    assert attends(read(full_attention_interval=2)) == [1, 3, 5, 7]
    assert attends(read(layer_types=["full_attention"] + ["linear_attention"] * 7)) == [0]
    rotary = read().heads.rotary
    assert rotary is not None
    assert (rotary.rotated_dims, read().heads.head_dim, read().heads.has_gate) == (64, 256, True)


def test_state_size_does_not_depend_on_the_text_length() -> None:
    convolved = 2 * 4 * 8 + 16 * 16
    assert read().state_bytes == 6 * 4 * (3 * convolved + 16 * 8 * 16)


@pytest.mark.parametrize(
    ("fields", "message"),
    (
        ({"linear_num_value_heads": 0}, "linear_num_value_heads is 0"),
        ({"linear_num_key_heads": 3}, "linear_num_value_heads is 16 and linear_num_key_heads 3"),
        ({"linear_num_key_heads": 32}, "linear_num_key_heads is 32, allowed is 1 to 16"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim is 0"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1, allowed is 2 to 64"),
        ({"linear_key_head_dim": 1}, "linear_key_head_dim is 1, allowed is 2"),
        ({"linear_conv_kernel_dim": 65}, "linear_conv_kernel_dim is 65"),
        ({"full_attention_interval": 0}, "full_attention_interval in config.json is 0, but it must be at least 1"),
        ({"layer_types": ["sliding_attention"] * 8}, "'sliding_attention'; supported are full_attention and linear"),
        ({"hidden_act": "gelu"}, "hidden_act in config.json is 'gelu'"),
    ),
)
def test_damaged_or_unsupported_delta_rule_config_is_refused_by_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        read(**fields)


def test_native_kernels_name_unsupported_sizes_of_delta_rules() -> None:
    assert why_not_native(read(), "float32") is None
    few = read(linear_num_value_heads=8)
    assert "linear_num_value_heads is 8, which is no multiple of 16" in str(why_not_native(few, "float32"))


@pytest.mark.parametrize("decay_count", (1, 8), ids=("one decay", "a decay for each row"))
def test_delta_rule_over_a_chunk_equals_the_rule_token_by_token(decay_count: int) -> None:
    """The reference applies the rule in float64. For each token, the state decays, its value for the key moves towards
    the token's value, and the query reads the state.
    """
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    queries, keys, values = drawn(50, 3, 8), torch.nn.functional.normalize(drawn(50, 3, 8), dim=-1), drawn(50, 3, 6)
    exponents, shares, begun = -drawn(50, 3, decay_count).abs(), drawn(50, 3).sigmoid(), drawn(3, 8, 6)
    state, expected = begun.clone(), []
    for query, key, value, exponent, share in zip(queries, keys, values, exponents, shares, strict=True):
        state = state * exponent.exp()[:, :, None]
        said = torch.einsum("hkv,hk->hv", state, key)
        state = state + key[:, :, None] * ((value - said) * share[:, None])[:, None]
        expected.append(torch.einsum("hkv,hk->hv", state, query))
    found = _scanned_deltas(queries, keys, values, exponents, shares, begun)
    torch.testing.assert_close(found, torch.stack(expected))
    torch.testing.assert_close(begun, state)


def logprobs_of(step_driver: ModuleType, path: Path, cpu_kernels: str) -> torch.Tensor:
    driver = step_driver.StepDriver(step_driver.load_runner(path, cpu_kernels=cpu_kernels))
    prompt = [(7 * position) % 320 for position in range(90)]
    driver.add("p", prompt, SamplingParams(temperature=0.0, prompt_logprobs=0))
    entries = [entry for count in (70, 1, 19) for entry in driver.step({"p": count}).prompt_logprobs["p"]]
    return torch.tensor([entry.logprob for entry in entries])


@pytest.mark.parametrize("kind", ("qwen3.5", "qwen3.5-moe"))
def test_gguf_file_with_reordered_heads_gives_equal_tensors(
    kind: str,
    cpu_kernels: str,
    tiny_checkpoints: ModuleType,
    tiny_checkpoint: Callable[..., Path],
    step_driver: ModuleType,
    tmp_path: Path,
) -> None:
    path = tmp_path / "model.gguf"
    tiny_checkpoints.write_family_gguf(tiny_checkpoint(kind), path)
    layers = open_checkpoint(path).config.layers
    assert all(layer.attention.has_heads_in_turn for layer in layers if isinstance(layer.attention, DeltaNetConfig))
    expected = logprobs_of(step_driver, tiny_checkpoint(kind), cpu_kernels)
    torch.testing.assert_close(logprobs_of(step_driver, path, cpu_kernels), expected, atol=1e-4, rtol=0)


def test_layers_that_predict_further_tokens_are_ignored() -> None:
    config = read()
    _, shapes = tensor_places(config, TRANSFORMERS)
    further = FurtherLayers(config, TRANSFORMERS, 0)
    match_tensors(config, {**shapes, "mtp.fc.weight": (64, 128)}, TRANSFORMERS, ignored=further.has)


def test_adapter_for_gated_queries_is_refused(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from trioserve.model.loading.adapter_directory import read_adapter

    path = tiny_checkpoint("qwen3.5")
    name = "base_model.model.model.layers.1.self_attn.q_proj"
    factors = {f"{name}.lora_A.weight": torch.zeros(4, 64), f"{name}.lora_B.weight": torch.zeros(256, 4)}
    save_file(factors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"]}')
    with pytest.raises(ModelLoadError, match=r"self_attn\.q_proj, which cannot have an adapter here"):
        read_adapter(tmp_path, open_checkpoint(path).config, dtype="float32", rank_max=16)
