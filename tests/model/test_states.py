"""Tests of layers that keep a state: their configs, their memory, and options that such models refuse."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from trioserve.assemble import open_engine
from trioserve.contracts.errors import ModelLoadError, StartupError
from trioserve.contracts.sampling import SamplingParams
from trioserve.model.device import cache_size, kv_block_bytes
from trioserve.model.drafts.checkpoints import check_draft
from trioserve.model.layer_config import AttentionConfig, SelectiveScanConfig, ShortConvConfig, StateSpaceConfig
from trioserve.model.loading.checkpoint import open_checkpoint
from trioserve.model.loading.hf_config import model_config_from
from trioserve.model.model_config import ModelConfig
from trioserve.model.native.model import why_not_native
from trioserve.model.native.recurrent import why_not_recurrent
from trioserve.model.settings import ModelSettings
from trioserve.model.torch_step import recurrent_layers
from trioserve.model.torch_step.step_model import TorchStepModel

GRANITE: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_local_experts": 0,
    "shared_intermediate_size": 96,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "layer_types": ["mamba", "attention"],
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
}


FALCON: dict[str, Any] = {
    "architectures": ["FalconH1ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "mamba_d_ssm": 96,
    "mamba_n_heads": 3,
    "mamba_d_state": 16,
}


def read(**fields: Any) -> ModelConfig:
    return model_config_from({**GRANITE, **fields}, {}, dtype_name="float32")


def test_old_and_new_names_of_layer_kinds_are_equivalent() -> None:
    config = read()
    assert [type(layer.attention) for layer in config.layers] == [StateSpaceConfig, AttentionConfig]
    assert read(layer_types=["linear_attention", "full_attention"]) == config
    assert read(layer_types=None, layers_block_type=["mamba", "attention"]) == config
    assert read(mamba_d_head="auto") == config == read(mamba_d_head=16)


def test_granite_with_only_attention_keeps_no_state() -> None:
    config = read(layer_types=["attention"] * 2, position_embedding_type="rope", mamba_d_head=7)
    assert config.state_bytes == 0
    assert config.heads.rotary is not None


@pytest.mark.parametrize(
    ("fields", "message"),
    (
        ({"layer_types": ["mamba", "rwkv"]}, "layer_types in config.json holds 'rwkv'"),
        ({"layer_types": ["mamba"]}, "layer_types in config.json has 1 entries"),
        ({"mamba_d_head": 24}, "8 heads of 24 in its state spaces"),
        ({"mamba_n_groups": 3}, "8 heads in 3 groups"),
        ({"mamba_d_conv": 1}, "kernel size is 1, allowed is 2 to 64"),
        ({"mamba_d_conv": 100}, "kernel size is 100"),
        ({"mamba_d_state": 2**40}, "state size is"),
        ({"time_step_limit": [0.5]}, "time_step_limit"),
        ({"time_step_limit": [2.0, 1.0]}, "time_step_limit is 2.0 to 1.0"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type"),
        ({"hidden_act": "relu"}, "hidden_act in config.json is 'relu'"),
    ),
)
def test_refusal_of_a_damaged_or_unsupported_config_names_the_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        read(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    (
        ({"mamba_d_ssm": 100}, "3 heads of 33 in its state spaces"),
        (
            {"projectors_bias": True},
            "projectors_bias in config.json is True, but it must be the same as mamba_proj_bias",
        ),
        ({"mlp_multipliers": [1.0]}, "mlp_multipliers in config.json is .*, but it must be a list of 2 numbers"),
        ({"ssm_multipliers": [1.0] * 4}, "ssm_multipliers in config.json is .*, but it must be a list of 5 numbers"),
        ({"key_multiplier": 0.0}, "a multiplier of k_proj.weight is 0.0"),
        ({"ssm_out_multiplier": float("nan")}, "a multiplier of out_proj.weight is nan"),
        ({"embedding_multiplier": -1.0}, "the embeddings' scale is -1.0"),
        ({"hidden_act": "gelu"}, "hidden_act in config.json is 'gelu'"),
    ),
)
def test_damaged_or_unsupported_falcon_h1_is_refused_by_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        model_config_from({**FALCON, **fields}, {}, dtype_name="float32")


def test_falcon_h1_multipliers_are_applied_to_its_weights(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    """A row gets the factor of its part. A bias only gets factors that apply after the product."""
    from safetensors.torch import load_file

    path = tiny_checkpoint("falcon-h1-biased")
    stored = load_file(path / "model.safetensors")
    found = {tensor.name: torch.from_numpy(tensor.read("float32")) for tensor in open_checkpoint(path).tensors()}
    for kind, before in (("weight", 1.25), ("bias", 1.0)):
        theirs, ours = stored[f"model.layers.1.mamba.in_proj.{kind}"], found[f"layers.1.in_proj.{kind}"]
        for row, factor in ((0, 0.9), (192, 0.7), (384, 0.5), (384 + 32, 1.5), (-1, 0.6)):
            torch.testing.assert_close(ours[row], theirs[row] * factor * before)
    for kind, factor in (("weight", 0.9 * 0.4), ("bias", 0.4)):
        torch.testing.assert_close(
            found[f"layers.0.k_proj.{kind}"], stored[f"model.layers.0.self_attn.k_proj.{kind}"] * factor
        )
    assert torch.equal(found["layers.0.up_proj.weight"], stored["model.layers.0.feed_forward.up_proj.weight"])


def test_infinity_in_a_config_of_transformers_is_read() -> None:
    limited = read(time_step_limit=[0.0, {"__float__": "Infinity"}])
    assert limited == read()
    assert read(time_step_limit=[0.1, 0.5]) != limited


def test_states_get_at_most_half_of_the_memory_and_copies_a_quarter() -> None:
    config = read()
    state, block = config.state_bytes, kv_block_bytes(config, 16, "float32")
    budget = 100 * state
    size = cache_size(config, ModelSettings(kv_cache_bytes=budget, max_num_seqs=64), "cpu", "float32")
    assert (size.state_slot_count, size.snapshot_slot_count) == (50, 25)
    assert size.block_count == (budget - 75 * state) // block
    few = cache_size(config, ModelSettings(kv_cache_bytes=budget, max_num_seqs=4), "cpu", "float32")
    assert (few.state_slot_count, few.snapshot_slot_count) == (4, 25)
    with pytest.raises(StartupError, match=f"the states of one sequence need {state}"):
        cache_size(config, ModelSettings(kv_cache_bytes=2 * state - 1), "cpu", "float32")


def test_layer_without_attention_has_no_kv(tiny_checkpoint: Callable[..., Path], step_driver: ModuleType) -> None:
    runner = step_driver.load_runner(tiny_checkpoint("lfm2"), cpu_kernels="torch")
    kinds = [type(layer.attention) for layer in runner.config.layers]
    assert kinds == [ShortConvConfig, AttentionConfig, ShortConvConfig]
    assert [pages.numel() > 0 for pages in runner.storage.pages] == [False, True, False]
    assert [memory is not None for memory in runner.states.buffers] == [True, False, True]


def test_layer_with_attention_and_state_space_has_kv_and_state(
    tiny_checkpoint: Callable[..., Path], step_driver: ModuleType
) -> None:
    runner = step_driver.load_runner(tiny_checkpoint("falcon-h1"), cpu_kernels="torch")
    assert all(pages.numel() > 0 for pages in runner.storage.pages)
    assert all(memory is not None for memory in runner.states.buffers)
    assert runner.config.state_bytes == 2 * 4 * (3 * (192 + 2 * 2 * 16) + 192 * 16)


MAMBA: dict[str, Any] = {
    "architectures": ["Mamba2ForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_heads": 8,
    "head_dim": 16,
    "n_groups": 2,
    "state_size": 16,
    "vocab_size": 320,
}


@pytest.mark.parametrize(
    ("fields", "message"),
    (
        ({"head_dim": 24}, "num_heads in config.json is 8, but it must be 128"),
        ({"n_groups": 3}, "8 heads in 3 groups"),
        ({"hidden_act": "gelu"}, "hidden_act in config.json is 'gelu'"),
        ({"time_step_limit": [1.0]}, "time_step_limit in config.json is"),
    ),
)
def test_damaged_or_unsupported_mamba2_is_refused_by_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        model_config_from({**MAMBA, **fields}, {}, dtype_name="float32")


def test_blocks_need_no_memory_without_attention(tiny_checkpoint: Callable[..., Path], step_driver: ModuleType) -> None:
    config = model_config_from(MAMBA, {}, dtype_name="float32")
    assert config.context_tokens_max == 2**20  # Mamba-2's config names no context length
    assert (config.has_attention, config.window_max, config.has_latents) == (False, None, False)
    assert kv_block_bytes(config, 16, "float32") == 0
    size = cache_size(config, ModelSettings(kv_cache_bytes=config.state_bytes * 8), "cpu", "float32")
    assert size == (2**20 // 16, 4, 2)
    with pytest.raises(StartupError, match="the states of one sequence need"):
        cache_size(config, ModelSettings(kv_cache_bytes=config.state_bytes), "cpu", "float32")
    for kernels in ("torch", "native"):
        runner = step_driver.load_runner(tiny_checkpoint("mamba2"), cpu_kernels=kernels)
        assert sum(pages.nbytes for pages in runner.storage.pages) == runner.kv_cache_bytes == 0
        assert not runner.claim_memory()


def test_native_kernels_name_unsupported_sizes_of_state_spaces() -> None:
    assert why_not_native(read(), "float32") is None
    assert "state space's head_dim is 8" in str(why_not_native(read(mamba_n_heads=16), "float32"))
    # 128 channels of x, and 2 * 2 * 17 of b and c
    assert "number of channels is 196" in str(why_not_native(read(mamba_d_state=17), "float32"))


def test_torch_refuses_batch_invariance_for_layers_with_states(tiny_checkpoint: Callable[..., Path]) -> None:
    config = open_checkpoint(tiny_checkpoint("lfm2")).config
    with pytest.raises(StartupError, match="depend on how a prompt is divided into chunks"):
        TorchStepModel(config, ModelSettings(batch_invariant=True), dtype="float32", device="cpu")


def test_draft_tokens_are_refused_for_models_with_states() -> None:
    config = read()
    with pytest.raises(StartupError, match="name another draft model"):
        check_draft(config, config, "small")


@pytest.mark.parametrize(
    "kind", ("granite-hybrid", "falcon-h1", "mamba2", "jamba", "nemotron-h-moe", "olmo-hybrid", "qwen3-next")
)
def test_state_layers_give_equal_results_for_mixed_chunks_and_single_chunks(
    kind: str, cpu_kernels: str, tiny_checkpoint: Callable[..., Path], step_driver: ModuleType
) -> None:
    """One chunk is longer than a piece of the scan, others are decodes, and one request gets a used state slot."""
    runner = step_driver.load_runner(tiny_checkpoint(kind), cpu_kernels=cpu_kernels)
    prompts = {"a": list(range(5, 150)), "b": list(range(40, 49)), "c": list(range(100, 300))}
    alone = {}
    for name, prompt in prompts.items():
        driver = step_driver.StepDriver(runner)
        driver.add(name, prompt)
        driver.generate([name], 6)
        alone[name] = driver.tokens[name]
    together = step_driver.StepDriver(runner, seed=1)
    for name, prompt in prompts.items():
        together.add(name, prompt)
    together.step({"a": 145, "b": 4})
    together.step({"c": 97, "a": 1, "b": 5})
    together.step({"a": 1, "b": 1, "c": 103})
    together.forget("b", tokens=prompts["b"])
    together.generate(["b", "a", "c"], 6)
    for name, tokens in alone.items():
        assert together.tokens[name][: len(tokens)] == tokens[: len(together.tokens[name])], name


def test_decay_rates_are_read_from_their_logarithms(
    tiny_checkpoint: Callable[..., Path], step_driver: ModuleType, tmp_path: Path
) -> None:
    """Change the logarithms in a checkpoint's file, and read the rates."""
    from safetensors.torch import load_file, save_file

    path = shutil.copytree(tiny_checkpoint("granite-hybrid"), tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.0.mamba.A_log"] = torch.full((6,), 3.0)
    save_file(tensors, path / "model.safetensors")
    assert json.loads((path / "config.json").read_text())["model_type"] == "granitemoehybrid"
    found = {tensor.name: tensor for tensor in open_checkpoint(path).tensors()}
    rates = found["layers.0.state.rates"].read("float32")
    assert rates.tolist() == pytest.approx([-20.0855] * 6, abs=1e-3)


async def test_engine_refuses_options_that_states_do_not_support(tiny_checkpoint: Callable[..., Path]) -> None:
    transfer = {"kv_connector": "tcp", "kv_role": "kv_both"}
    options: dict[str, Any]
    for options, message in (
        ({"kv_transfer_config": json.dumps(transfer)}, "which connectors do not transfer"),
        ({"speculative_ngram": 3}, "the change by a wrong draft token cannot be undone"),
    ):
        with pytest.raises(StartupError, match=message):
            async with open_engine(str(tiny_checkpoint("lfm2")), cpu_kernels="torch", **options):
                raise AssertionError("opened")


@pytest.mark.parametrize(
    "kind",
    (
        "granite-hybrid",
        "falcon-h1",
        "mamba2",
        "zamba2",
        "minimax",
        "jamba",
        "nemotron-h-moe",
        "olmo-hybrid",
        "qwen3-next",
    ),
)
async def test_engine_continues_from_a_copied_state_and_frees_all_slots(
    kind: str, tiny_checkpoint: Callable[..., Path]
) -> None:
    path = str(tiny_checkpoint(kind))
    async with open_engine(path, dtype="float32", max_num_seqs=4, kv_cache_memory=0.01) as engine:
        said = []
        for _ in range(2):
            async with engine.generate(list(range(5, 60)), SamplingParams(temperature=0.0, max_tokens=8)) as stream:
                said.append([token_id async for delta in stream for token_id in delta.token_ids])
        stats = engine.stats()
    assert said[0] == said[1]
    assert stats.prefix_hit_tokens_total == 48
    assert (stats.states_used, stats.states_total) == (0, 4)
    assert stats.snapshots_kept > 0


@pytest.mark.parametrize("count", (1, 2, 63, 64))
def test_pieces_of_a_selective_scan_give_the_states_of_single_tokens(count: int) -> None:
    draw = torch.Generator().manual_seed(count)
    decays, added = (torch.rand(count, 5, 3, generator=draw, dtype=torch.float64) for _ in range(2))
    state, wanted = torch.rand(5, 3, generator=draw, dtype=torch.float64), []
    for token in range(count):
        wanted.append(decays[token] * (wanted[-1] if wanted else state) + added[token])
    torch.testing.assert_close(recurrent_layers._accumulated(decays, added, state), torch.stack(wanted))


def test_native_kernels_name_unsupported_sizes_of_selective_scans() -> None:
    scan = SelectiveScanConfig(channel_count=128, vector_size=16, rank=16, kernel_size=4)
    assert why_not_recurrent(scan) is None
    replace = msgspec.structs.replace
    assert why_not_recurrent(replace(scan, rank=8)) == "the rank of the time steps is 8, which is no multiple of 16"
    reason = why_not_recurrent(replace(scan, vector_size=24))
    assert reason == "a state space's state size is 24, which is no multiple of 16"


@pytest.mark.parametrize("count", (1, 63, 64, 65, 200))
def test_pieces_of_a_span_give_the_outputs_and_the_state_of_single_tokens(count: int) -> None:
    """Compare in float64, for a state space and for the delta rule with one decay, or with a decay for each row of the
    state. The last piece may be shorter than the others.
    """
    draw = torch.Generator().manual_seed(count)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    heads, vector, width = 2, 5, 3
    keys, queries = (torch.nn.functional.normalize(numbers(count, heads, vector), dim=-1) for _ in range(2))
    values, shares = numbers(count, heads, width), numbers(count, heads).sigmoid()
    for rule, decay_count in (("state space", 1), ("delta", 1), ("delta", vector)):
        exponents = -numbers(count, heads, decay_count).abs()
        state = numbers(heads, vector, width)
        expected, wanted = state.clone(), []
        for token in range(count):
            expected = expected * exponents[token].exp()[:, :, None]
            added = values[token]
            if rule == "delta":
                added = (added - (expected * keys[token][..., None]).sum(-2)) * shares[token][:, None]
            expected = expected + keys[token][..., None] * added[:, None]
            wanted.append((expected * queries[token][..., None]).sum(-2))
        if rule == "delta":
            found = recurrent_layers._scanned_deltas(queries, keys, values, exponents, shares, state)
        else:
            found = recurrent_layers._scanned_states(values, keys, queries, exponents[..., 0], state)
        torch.testing.assert_close(found, torch.stack(wanted))
        torch.testing.assert_close(state, expected)
