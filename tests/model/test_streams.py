"""Tests of hidden states of several streams, layers that share keys and values, and gates with a cutoff (Gemma 3n)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist
from types import ModuleType
from typing import Any

import pytest
import torch
import trio
import trio.testing

from trioserve import open_engine
from trioserve.contracts.errors import ModelLoadError
from trioserve.contracts.sampling import SamplingParams
from trioserve.model.device import kv_block_bytes
from trioserve.model.loading.checkpoint import open_checkpoint
from trioserve.model.loading.hf_config import model_config_from
from trioserve.model.loading.names import TRANSFORMERS, match_tensors, tensor_places
from trioserve.model.model_config import ModelConfig
from trioserve.model.native.model import why_not_native

BASE: dict[str, Any] = {
    "architectures": ["Gemma3nForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 10,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "num_kv_shared_layers": 4,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 300,
}


def read(**fields: Any) -> ModelConfig:
    return model_config_from({**BASE, **fields}, {}, dtype_name="float32")


def test_layer_without_own_keys_uses_the_last_layer_of_the_same_kind_that_has_keys() -> None:
    config = read()
    assert config.windows == (512, None)
    assert config.kv_layers == (0, 1, 2, 3, 4, 5, 5, 5, 5, 4)
    assert [entry is None for entry in config.kv_entries] == [False] * 6 + [True] * 4
    assert read(num_kv_shared_layers=0).kv_layers == tuple(range(10))


def test_cache_has_no_blocks_for_sharing_layers() -> None:
    whole, shared = (kv_block_bytes(read(num_kv_shared_layers=count), 16, "float32") for count in (0, 4))
    assert shared * 10 == whole * 6


def test_activation_cutoff_is_the_quantile_of_the_layers_sparsity() -> None:
    cutoffs = [layer.mlp.cutoff for layer in read(activation_sparsity_pattern=[0.95] * 3 + [0.5] + [0.0] * 6).layers]
    assert cutoffs == [pytest.approx(1.6448536)] * 3 + [pytest.approx(0.0)] + [None] * 6
    deep = read(num_hidden_layers=15)
    assert [layer.mlp.cutoff for layer in deep.layers] == [NormalDist().inv_cdf(0.95)] * 10 + [None] * 5
    assert all(layer.mlp.cutoff is None for layer in read().layers)


@pytest.mark.parametrize(
    ("fields", "message"),
    (
        ({"num_kv_shared_layers": 10}, "num_kv_shared_layers in config.json is 10, but it must be 0 to 9"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers in config.json is -1"),
        ({"num_kv_shared_layers": 7}, "so few that a layer with full attention is left before them"),
        ({"laurel_rank": 0}, "laurel_rank in config.json is 0, but it must be at least 1"),
        ({"altup_num_inputs": 0}, "altup_num_inputs is 0, allowed is 2 to 8"),
        ({"altup_num_inputs": 1}, "altup_num_inputs is 1, allowed is 2 to 8"),
        ({"altup_num_inputs": 9}, "altup_num_inputs is 9, allowed is 2 to 8"),
        ({"altup_active_idx": 4}, "altup_active_idx is 4, but there are 4 streams"),
        ({"altup_active_idx": -1}, "altup_active_idx is -1"),
        ({"hidden_size_per_layer_input": 0}, "hidden_size_per_layer_input is 0"),
        ({"vocab_size_per_layer_input": 0}, "vocab_size_per_layer_input is 0"),
        ({"activation_sparsity_pattern": [0.5] * 4}, "must be one number, or one for each of 10 layers"),
        ({"activation_sparsity_pattern": [1.0] * 10}, "of numbers from 0 to below 1"),
        ({"intermediate_size": [96, 64]}, "intermediate_size in config.json is .*one for each of 10 layers"),
        ({"intermediate_size": None}, "intermediate_size in config.json is None"),
        ({"hidden_activation": "silu"}, "hidden_activation in config.json is 'silu'"),
    ),
)
def test_damaged_or_unsupported_gemma_3n_config_is_refused_by_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        read(**fields)


@pytest.mark.parametrize("field", ("altup_num_inputs", "hidden_size_per_layer_input", "laurel_rank"))
def test_families_other_than_gemma_3n_have_no_streams(field: str) -> None:
    with pytest.raises(ModelLoadError, match=f"{field} in config.json is 4, which gemma3 with this config"):
        neutral = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}
        read(architectures=["Gemma3ForCausalLM"], **{**neutral, field: 4})


def test_native_kernels_name_unsupported_sizes_of_gemma_3n() -> None:
    assert why_not_native(read(), "float32") is None
    assert "laurel_rank is 8, which is no multiple of 16" in str(why_not_native(read(laurel_rank=8), "float32"))
    odd = read(hidden_size_per_layer_input=8)
    assert "hidden_size_per_layer_input is 8, which is no multiple of 16" in str(why_not_native(odd, "float32"))


def test_unused_keys_and_values_of_a_checkpoint_are_ignored() -> None:
    """Published checkpoints contain keys and values for layers that share those of an earlier layer."""
    config = read()
    _, shapes = tensor_places(config, TRANSFORMERS)
    names = [f"model.layers.{index}.self_attn.{name}.weight" for index in (6, 9) for name in ("k_proj", "v_proj")]
    extra = dict.fromkeys(names, (32, 64))
    match_tensors(config, {**shapes, **extra}, TRANSFORMERS, ignored=lambda _name: False)
    with pytest.raises(ModelLoadError, match=r"model.layers.5.self_attn.k_proj.bias"):
        odd = {"model.layers.5.self_attn.k_proj.bias": (32,)}
        match_tensors(config, {**shapes, **odd}, TRANSFORMERS, ignored=lambda _name: False)


def logprobs_of(step_driver: ModuleType, path: Path, prompt: list[int], **options: Any) -> torch.Tensor:
    driver = step_driver.StepDriver(step_driver.load_runner(path, **options))
    driver.add("p", prompt, SamplingParams(temperature=0.0, prompt_logprobs=0))
    return torch.tensor([entry.logprob for entry in driver.step({"p": len(prompt)}).prompt_logprobs["p"]])


def test_token_outside_of_the_input_table_uses_token_0s_row(
    cpu_kernels: str, tiny_checkpoint: Callable[..., Path], step_driver: ModuleType, tmp_path: Path
) -> None:
    """The table has 300 rows for 320 tokens. Changing a row only changes logprobs after its token. Changing row 0 also
    changes them after tokens outside of the table.
    """
    from safetensors.torch import load_file, save_file

    path = tiny_checkpoint("gemma3n")
    tensors = load_file(path / "model.safetensors")
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((path / name).read_bytes())
    prompt = [7, 310, 11]
    before = logprobs_of(step_driver, path, prompt, cpu_kernels=cpu_kernels)
    for row, differs in ((0, True), (299, False)):
        changed = dict(tensors)
        table = changed["model.embed_tokens_per_layer.weight"].clone()
        table[row] += 1.0
        changed["model.embed_tokens_per_layer.weight"] = table
        save_file(changed, tmp_path / "model.safetensors", metadata={"format": "pt"})
        found = logprobs_of(step_driver, tmp_path, prompt, cpu_kernels=cpu_kernels)
        assert found[0] == before[0]
        assert bool(found[1] != before[1]) == differs


@pytest.mark.parametrize("quantization", ("int8", "int4"))
def test_input_table_of_a_quantized_model_is_quantized(
    quantization: str, tiny_checkpoint: Callable[..., Path], step_driver: ModuleType
) -> None:
    prompt = list(range(5, 45))
    path = tiny_checkpoint("gemma3n")
    exact = logprobs_of(step_driver, path, prompt)
    found = logprobs_of(step_driver, path, prompt, quantization=quantization, dtype="bfloat16", cpu_kernels="native")
    error = (found - exact).square().mean().sqrt()
    assert 0 < error < {"int8": 0.3, "int4": 1.5}[quantization]


def test_step_weight_bytes_exclude_the_input_table(
    tiny_checkpoint: Callable[..., Path], step_driver: ModuleType
) -> None:
    runner = step_driver.load_runner(tiny_checkpoint("gemma3n"), cpu_kernels="native")
    config = runner.config
    table = 300 * config.layer_count * 16 * 4
    assert runner.step_weight_bytes < open_checkpoint(tiny_checkpoint("gemma3n")).weight_bytes - table // 2


async def test_engine_answers_and_frees_every_block(tiny_checkpoint: Callable[..., Path]) -> None:
    path = str(tiny_checkpoint("gemma3n"))
    async with open_engine(path, dtype="float32", max_num_seqs=4, kv_cache_memory=0.01) as engine:
        said = []
        for _ in range(2):
            async with engine.generate(list(range(5, 60)), SamplingParams(temperature=0.0, max_tokens=24)) as stream:
                said.append([token_id async for delta in stream for token_id in delta.token_ids])
        async with engine.generate(list(range(5, 60)), SamplingParams(temperature=0.0, max_tokens=200)) as stream:
            async for _delta in stream:
                break  # The test needs no more output.
        await trio.testing.wait_all_tasks_blocked()
        stats = engine.stats()
    assert said[0] == said[1]
    assert stats.prefix_hit_tokens_total > 0
    assert (stats.running_count, stats.blocks_used) == (0, 0)


async def test_blocks_of_a_sharing_model_are_offloaded_and_loaded(tiny_checkpoint: Callable[..., Path]) -> None:
    """The last two layers keep nothing of their own, so the blocks of the other layers are sufficient."""
    prompt, other = list(range(5, 69)), list(range(70, 170))
    limits = {"memory_gib": 0.05}
    transfer = {"kv_connector": "host", "kv_role": "kv_both", "kv_connector_extra_config": limits}
    answers = []
    async with open_engine(
        str(tiny_checkpoint("gemma3n")),
        dtype="float32",
        max_num_seqs=1,
        max_model_len=128,
        kv_cache_memory=0.0003,
        kv_transfer_config=transfer,
    ) as engine:
        assert engine.stats().blocks_total * 16 < len(prompt) + len(other)  # The other prompt evicts the first prompt.
        for tokens in (prompt, other, prompt):
            async with engine.generate(tokens, SamplingParams(temperature=0.0, max_tokens=16)) as stream:
                answers.append([token_id async for delta in stream for token_id in delta.token_ids])
        stats = engine.stats()
    assert answers[0] == answers[2]
    assert stats.loaded_tokens_total >= 32


def test_published_fields_of_gemma_4_give_the_heads_of_layers_with_full_attention(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    """transformers 5.24 writes per_layer_config. Published configs have global_head_dim."""
    written = json.loads((tiny_checkpoint("gemma4") / "config.json").read_text())
    published = {name: value for name, value in written.items() if name != "per_layer_config"}
    published |= {"global_head_dim": 64, "num_global_key_value_heads": 1}
    config = model_config_from(published, {}, dtype_name="float32")
    assert config == model_config_from(written, {}, dtype_name="float32")
    assert [entry and (entry.head_count, entry.head_dim) for entry in config.kv_entries] == [(2, 32), (1, 64)] * 3
    separate = model_config_from({**published, "attention_k_eq_v": False}, {}, dtype_name="float32")
    assert [entry and (entry.head_count, entry.head_dim) for entry in separate.kv_entries] == [(2, 32), (2, 64)] * 3
