"""Tests of latent attention (MLA): its KV cache, known results, and its formats in files."""

from __future__ import annotations

import functools
import importlib
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

from trioserve.contracts.errors import ModelLoadError, StartupError
from trioserve.contracts.sampling import SamplingParams
from trioserve.model.device import attended_token_flops, kv_block_bytes, step_weight_bytes, token_flops
from trioserve.model.families import deepseek
from trioserve.model.layer_config import KVEntry, LatentAttentionConfig
from trioserve.model.loading.checkpoint import Checkpoint, open_checkpoint
from trioserve.model.loading.hf_config import model_config_from
from trioserve.model.model_config import ModelConfig
from trioserve.model.native.model import why_not_native
from trioserve.model.settings import ModelSettings
from trioserve.model.torch_step import attention as sparse
from trioserve.model.torch_step import step_model
from trioserve.model.torch_step.step_model import TorchStepModel

ALL_LOGPROBS = SamplingParams(temperature=0.0, prompt_logprobs=0)
# source: config.json of each model
V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_hidden_layers": 27,
    "vocab_size": 102400,
    "max_position_embeddings": 163840,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 4096,
    },
}


def read(**fields: Any) -> ModelConfig:
    return model_config_from({**V2_LITE, **fields}, {}, dtype_name="bfloat16")


def answer(step_driver: ModuleType, path: Path, **options: Any) -> tuple[list[float], list[int]]:
    """Return the logprobs of a prompt in uneven chunks, and the generated tokens."""
    runner = step_driver.load_runner(path, **options)
    driver = step_driver.StepDriver(runner)
    driver.add("a", list(range(10, 60)), ALL_LOGPROBS)
    found = [entry for count in (20, 1, 5, 24) for entry in driver.step({"a": count}).prompt_logprobs["a"]]
    driver.generate(["a"], 6)
    runner.close()
    return [entry.logprob for entry in found], driver.tokens["a"][50:]


# --- KV cache ---------------------------------------------------------------------------------------------------------


def test_kv_cache_of_latent_attention_keeps_a_latent_and_one_rotated_key() -> None:
    """DeepSeek-V2-Lite keeps 576 numbers per token and layer. Keys and values of its 16 heads would be 5,120."""
    config = read()
    assert config.kv_attention.kv_entry == KVEntry(part_count=1, head_count=1, head_dim=512 + 64)
    assert kv_block_bytes(config, 16, "bfloat16") == 27 * 16 * 576 * 2
    assert attended_token_flops(config) == 27 * 2 * 16 * (576 + 512)
    attention = 2048 * (16 * 192 + 576 + 16 * 128) + 16 * 512 * (128 + 128)
    experts = 2048 * (64 + 3 * (6 * 1408 + 2816))
    assert token_flops(config) == 2 * (27 * attention + 26 * experts + 2048 * 3 * 10944)
    assert step_weight_bytes(config, "bfloat16") == token_flops(config) + 2 * 102400 * 2048


def test_scale_of_scores_includes_yarns_temperature() -> None:
    attention = read().layers[0].attention
    assert isinstance(attention, LatentAttentionConfig)
    assert attention.scale == pytest.approx(192**-0.5 * (0.0707 * np.log(40) + 1) ** 2)
    assert attention.rotary.scaling is not None
    assert attention.rotary.scaling.attention_factor == 1.0


@pytest.mark.parametrize("computed_by", ("torch", "native"))
def test_kv_pages_of_latent_attention_contain_only_latents(
    computed_by: str, tiny_checkpoint: Callable[..., Path], step_driver: ModuleType
) -> None:
    if computed_by == "native":
        importlib.import_module("trioserve_kernels.native").load_library()
    runner = step_driver.load_runner(tiny_checkpoint("deepseek-v3"), cpu_kernels=computed_by, block_count=7)
    assert {tuple(pages.shape) for pages in runner.storage.pages} == {(7, 4, 1, 1, 48)}
    assert runner.kv_cache_bytes == sum(pages.nbytes for pages in runner.storage.pages)
    layout = runner.kv_pages("m").layout
    assert (layout.part_count, layout.kv_head_count, layout.head_dim, layout.token_bytes) == (1, 1, 48, 192)
    runner.close()


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"topk_method": "noaux_tc"}, "topk_method in config.json is 'noaux_tc'"),
        ({"scoring_func": "sigmoid"}, "scoring_func in config.json is 'sigmoid'"),
        ({"norm_topk_prob": True}, "norm_topk_prob in config.json is True"),
        ({"attention_bias": True}, "attention_bias in config.json is True"),
        ({"num_key_value_heads": 4}, "num_key_value_heads in config.json is 4"),
        ({"rope_interleave": False}, "rope_interleave in config.json is False"),
        ({"kv_lora_rank": 0}, "kv_lora_rank is 0"),
        ({"qk_rope_head_dim": 0}, "qk_rope_head_dim in config.json is 0"),
        ({"architectures": ["DeepseekV3ForCausalLM"]}, "topk_method in config.json is 'greedy'"),
    ],
)
def test_error_of_an_unsupported_latent_attention_variant_says_what_is_wrong(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        read(**fields)
    assert said in str(caught.value)


def test_layers_with_different_kv_entries_are_refused(tiny_checkpoint: Callable[..., Path]) -> None:
    latent, other = (open_checkpoint(tiny_checkpoint(kind)).config for kind in ("deepseek-v3", "llama"))
    with pytest.raises(ModelLoadError, match="latent attention differs from layer to layer"):
        msgspec.structs.replace(latent, layers=(latent.layers[0], other.layers[0]))


def test_fused_kernels_refuse_latents_if_results_must_not_depend_on_the_batch(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    config = open_checkpoint(tiny_checkpoint("minicpm3")).config
    kernels = importlib.import_module("trioserve_kernels.reference_fused")
    with pytest.raises(StartupError, match="leave batch_invariant out"):
        TorchStepModel(config, ModelSettings(batch_invariant=True), dtype="float32", device="cpu", kernels=kernels)


# --- known answers ----------------------------------------------------------------------------------------------------


def write_as_latents(directory: Path, target: Path, *, has_positions: bool) -> None:
    """Write a model with grouped queries as a model with latents.

    The latents are the keys (without rotation) and values of all heads, and each head's projections select its own. The
    norm of latents changes nothing with an epsilon of 1e8.
    """
    config = json.loads((directory / "config.json").read_text())
    tensors = load_file(directory / "model.safetensors")
    heads, groups, hidden = config["num_attention_heads"], config["num_key_value_heads"], config["hidden_size"]
    dim, unused = hidden // heads, 16
    plain, turned = (unused, dim) if has_positions else (dim, unused)
    rank = (1 if has_positions else 2) * groups * dim
    identity = torch.eye(rank).view(-1, groups, dim, rank)
    up = torch.zeros(heads, plain + dim, rank)
    for head in range(heads):
        own = identity[:, head * groups // heads]
        up[head, plain:] = own[-1]
        if not has_positions:
            up[head, :plain] = own[0]
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        layer, _, module = name.partition(".self_attn.")
        if module == "q_proj.weight":
            # The model with latents divides scores by the root of a larger number.
            queries = tensor.view(heads, dim, hidden) * ((dim + unused) / dim) ** 0.5
            nothing = torch.zeros(heads, unused, hidden)
            found[name] = torch.cat((nothing, queries) if has_positions else (queries, nothing), 1).flatten(0, 1)
        elif module == "k_proj.weight":
            values = tensors[f"{layer}.self_attn.v_proj.weight"]
            down = (values, tensor) if has_positions else (tensor, values, torch.zeros(unused, hidden))
            found[f"{layer}.self_attn.kv_a_proj_with_mqa.weight"] = torch.cat(down)
            found[f"{layer}.self_attn.kv_a_layernorm.weight"] = torch.full((rank,), 1e4)
            found[f"{layer}.self_attn.kv_b_proj.weight"] = up.flatten(0, 1).clone()
        elif module != "v_proj.weight":
            found[name] = tensor
    described = {
        "architectures": ["MiniCPM3ForCausalLM"],
        "num_key_value_heads": heads,
        "q_lora_rank": None,
        "kv_lora_rank": rank,
        "qk_nope_head_dim": plain,
        "qk_rope_head_dim": turned,
        "v_head_dim": dim,
        "scale_emb": 1,
        "scale_depth": config["num_hidden_layers"] ** 0.5,
        "dim_model_base": hidden,
    }
    left_out = ("no_rope_layers", "head_dim")
    target.mkdir()
    (target / "config.json").write_text(
        json.dumps({**{name: value for name, value in config.items() if name not in left_out}, **described})
    )
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, target / "model.safetensors")


@pytest.mark.parametrize("has_positions", (False, True), ids=("two groups, no positions", "one group, positions"))
def test_grouped_queries_written_as_latents_give_equal_logprobs(
    has_positions: bool,
    cpu_kernels: str,
    tiny_checkpoint: Callable[..., Path],
    step_driver: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = shutil.copytree(tiny_checkpoint("llama"), tmp_path / "original")
    config = json.loads((original / "config.json").read_text())
    changes: dict[str, Any] = {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [0, 0]}
    if has_positions:
        changes = {"num_key_value_heads": 1}
        tensors = load_file(original / "model.safetensors")
        for name, tensor in tensors.items():
            if name.endswith(("k_proj.weight", "v_proj.weight")):
                tensors[name] = tensor[: len(tensor) // 2].clone()
        save_file(tensors, original / "model.safetensors")
    (original / "config.json").write_text(json.dumps({**config, **changes}))
    write_as_latents(original, tmp_path / "latents", has_positions=has_positions)
    monkeypatch.setattr(deepseek, "LatentAttentionConfig", functools.partial(LatentAttentionConfig, norm_eps=1e8))
    expected, found = (answer(step_driver, path, cpu_kernels=cpu_kernels) for path in (original, tmp_path / "latents"))
    assert found[0] == pytest.approx(expected[0], abs=1e-4)
    assert found[1] == expected[1]


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quant_type", ("Q8_0", "Q4_0"))
@pytest.mark.parametrize("has_halves", (False, True), ids=("kv_b", "k_b and v_b"))
def test_quantized_gguf_files_with_joint_or_split_latents_are_computed_as_in_torch(
    has_halves: bool,
    quant_type: str,
    tiny_checkpoints: ModuleType,
    tiny_checkpoint: Callable[..., Path],
    step_driver: ModuleType,
    tmp_path: Path,
) -> None:
    """The native kernels keep all blocks except those of the latents' projections."""
    path = tmp_path / "model.gguf"
    source = tiny_checkpoint("deepseek-v2-lite")
    types = {"quant_type": quant_type, "expert_type": quant_type}
    tiny_checkpoints.write_family_gguf(source, path, has_latent_halves=has_halves, **types)
    exact, _ = answer(step_driver, path, cpu_kernels="torch")
    native, _ = answer(step_driver, path, dtype="bfloat16", cpu_kernels="native", quantization="file")
    assert np.abs(np.array(native) - np.array(exact)).mean() < 0.1


def test_joint_projection_is_ignored_if_both_halves_exist(
    tiny_checkpoints: ModuleType,
    tiny_checkpoint: Callable[..., Path],
    tensors_of: Callable[[Checkpoint], dict[str, torch.Tensor]],
    tmp_path: Path,
) -> None:
    """llama.cpp wrote such files while it changed from one tensor to two."""
    found = []
    for name, has_halves, has_both in (("one", False, False), ("two", True, False), ("both", True, True)):
        path = tmp_path / f"{name}.gguf"
        tiny_checkpoints.write_family_gguf(
            tiny_checkpoint("deepseek-v3"), path, has_latent_halves=has_halves, has_both_forms=has_both
        )
        found.append(tensors_of(open_checkpoint(path)))
    for tensors in found[1:]:
        assert tensors.keys() == found[0].keys()
        assert all(torch.equal(tensors[name], found[0][name]) for name in tensors)


def test_published_format_of_deepseek_v3_is_read(
    tiny_checkpoint: Callable[..., Path],
    tensors_of: Callable[[Checkpoint], dict[str, torch.Tensor]],
    tmp_path: Path,
) -> None:
    """Layers' matrices are FP8 with a scale for each block of 128 by 128. Routers, norms and embeddings are plain."""
    source = tiny_checkpoint("deepseek-v3")
    config = json.loads((source / "config.json").read_text())
    quantized: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if tensor.ndim != 2 or not name.startswith("model.layers.") or name.endswith("mlp.gate.weight"):
            quantized[name] = plain[name] = tensor.to(torch.bfloat16) if tensor.ndim == 2 else tensor
            continue
        rows, columns = (-(-size // 128) for size in tensor.shape)
        scales = torch.arange(1, rows * columns + 1, dtype=torch.float32).view(rows, columns) / 1024
        repeated = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: tensor.shape[0], : tensor.shape[1]]
        numbers = (tensor / repeated).to(torch.float8_e4m3fn)
        quantized[name], quantized[f"{name}_scale_inv"] = numbers, scales
        plain[name] = numbers.float() * repeated
    scheme = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
    for directory, tensors, more in (("fp8", quantized, {"quantization_config": scheme}), ("plain", plain, {})):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "config.json").write_text(json.dumps({**config, **more}))
        save_file(tensors, tmp_path / directory / "model.safetensors")
    found, expected = (tensors_of(open_checkpoint(tmp_path / directory)) for directory in ("fp8", "plain"))
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor.float(), expected[name].float()), name


# --- sparse attention -------------------------------------------------------------------------------------------------

SPARSE = ("deepseek-v3.2", "glm-moe-dsa")


@pytest.mark.parametrize("kind", SPARSE)
def test_tokens_of_an_indexer_equal_transformers_in_small_groups_of_rows(
    kind: str, tiny_checkpoint: Callable[..., Path], step_driver: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The indexer selects 10 tokens. Rows are selected in groups of at most four, and a request is preempted."""
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(sparse, "GATHERED_BYTES_MAX", {"cpu": 30_000})
    path, prompt = tiny_checkpoint(kind), list(range(10, 70))
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    found, tokens = answer(step_driver, path)
    with torch.no_grad():
        wanted = model(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0].log_softmax(-1)
    assert found == pytest.approx([float(wanted[at, token]) for at, token in enumerate(prompt[1:50])], abs=1e-3)
    driver = step_driver.StepDriver(step_driver.load_runner(path))
    driver.add("short", prompt[:3])
    driver.add("long", prompt)
    driver.step({"short": 3, "long": 25})
    driver.step({"short": 1, "long": 35})
    driver.generate(["short", "long"], 3)
    driver.forget("long")
    driver.generate(["short", "long"], 4)
    with torch.no_grad():
        for name, length in (("short", 3), ("long", 60)):
            scores = model(torch.tensor([driver.tokens[name][:-1]]), use_cache=False).logits[0]
            assert driver.tokens[name][length:] == scores[length - 1 :].argmax(-1).tolist()


@pytest.mark.parametrize("kind", SPARSE)
def test_context_within_the_selected_tokens_needs_no_indexer(
    kind: str, tiny_checkpoint: Callable[..., Path], step_driver: ModuleType
) -> None:
    """The native kernels compute this context, and the KV cache has no keys of an indexer."""
    path = tiny_checkpoint(kind)
    whole, short = open_checkpoint(path).config, open_checkpoint(path, context_tokens=10).config
    assert whole.is_sparse
    assert not short.is_sparse
    assert why_not_native(short, "float32") is None
    assert why_not_native(whole, "float32") == (
        "an indexer selects tokens in contexts of more than 10 tokens (--max-model-len)"
    )
    drivers = [
        step_driver.StepDriver(step_driver.load_runner(path, cpu_kernels="torch", context_tokens_max=context))
        for context in (None, 10)
    ]
    for driver in drivers:
        driver.add("a", [5, 6, 7, 8])
        driver.generate(["a"], 6)
    assert drivers[0].tokens == drivers[1].tokens


def test_kv_cache_has_the_keys_of_each_indexer(tiny_checkpoint: Callable[..., Path]) -> None:
    """GLM's second layer attends to the tokens that the first one selects."""
    sizes = {
        kind: [entry.head_dim for entry in open_checkpoint(tiny_checkpoint(kind)).config.kv_entries] for kind in SPARSE
    }
    assert sizes == {"deepseek-v3.2": [48 + 32, 48 + 32], "glm-moe-dsa": [48 + 32, 48]}


@pytest.mark.parametrize(
    "fields, expected",
    [
        ({}, [True] * 5),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 2}, [True, True, False, True, False]),
        ({"index_topk_pattern": "FSSFS"}, [True, False, False, True, False]),
        ({"index_topk_pattern": "FSSFS", "indexer_types": ["full"] * 5}, [True] * 5),
    ],
)
def test_layers_with_an_indexer_are_those_of_the_config(fields: dict[str, Any], expected: list[bool]) -> None:
    config = read_sparse(**fields)
    assert [layer.attention.indexer is not None for layer in config.layers] == expected
    assert [layer.attention.has_selected_tokens for layer in config.layers] == [not own for own in expected]


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"indexer_types": ["shared"] * 5}, "indexer_types in config.json is"),
        ({"index_topk_pattern": "FSS"}, "one of 'full' and 'shared' for each layer"),
        ({"index_head_dim": 32}, "index_head_dim is 32, but qk_rope_head_dim \\(64\\)"),
        ({"index_topk": 0}, "index_topk is 0"),
        ({"q_lora_rank": None}, "q_lora_rank in config.json is None"),
    ],
)
def test_error_of_a_damaged_indexer_names_the_field(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelLoadError, match=said):
        read_sparse(**fields)


def read_sparse(**fields: Any) -> ModelConfig:
    return model_config_from(
        {
            **V2_LITE,
            "architectures": ["GlmMoeDsaForCausalLM"],
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "norm_topk_prob": True,
            "q_lora_rank": 64,
            "num_hidden_layers": 5,
            **fields,
        },
        {},
        dtype_name="bfloat16",
    )


def test_of_equal_scores_the_earlier_ones_are_selected() -> None:
    scores = torch.tensor([[0.0, 2.0, -0.0, -3.0, 0.0, float("-inf")], [-2.0, -1.0, -1.0, -0.5, float("-inf"), -4.0]])
    assert [sorted(row) for row in sparse._largest(scores, 3).tolist()] == [[0, 1, 2], [1, 2, 3]]
    assert [sorted(row) for row in sparse._largest(scores, 5).tolist()] == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 5]]


def test_sparse_attention_refuses_batch_invariance(
    tiny_checkpoint: Callable[..., Path], step_driver: ModuleType
) -> None:
    with pytest.raises(StartupError, match="the tokens that the model's indexer selects depend on the batch"):
        step_driver.load_runner(tiny_checkpoint("deepseek-v3.2"), batch_invariant=True)


def test_fused_kernels_compute_sparse_attention_outside_of_graphs(
    tiny_checkpoint: Callable[..., Path], step_driver: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, found = tiny_checkpoint("glm-moe-dsa"), []
    for kernels in (None, importlib.import_module("trioserve_kernels.reference_fused")):
        if kernels is not None:
            monkeypatch.setattr(step_model, "pick_kernels", lambda *_, chosen=kernels, **__: chosen)
        found.append(answer(step_driver, path, cpu_kernels="torch"))
    assert found[1][0] == pytest.approx(found[0][0], abs=1e-4)
    assert found[1][1] == found[0][1]
